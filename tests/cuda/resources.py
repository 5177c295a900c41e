"""What nvcc says of every kernel: registers, shared memory, stack, spills; for docs/kernel_resources.md.

python tests/cuda/resources.py          compiles cuda/*.cu (no GPU needed) and writes the table
"""

import hashlib
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TABLE = ROOT / "docs" / "kernel_resources.md"
ARCHITECTURES = ("80", "90a")
COLUMNS = ("file", "kernel", "sm", "registers", "static shared bytes", "stack bytes", "spill bytes")


@dataclass(frozen=True, order=True)
class Kernel:
    file: str
    name: str
    architecture: str
    registers: int
    shared: int
    stack: int
    spills: int


def sources():
    return sorted((ROOT / "cuda").glob("*.cu"))


def digest():
    """Changes with any byte that the compiler sees."""
    sha = hashlib.sha256()
    for path in sorted(
        path for path in (ROOT / "cuda").iterdir() if path.suffix in (".cu", ".cuh", ".inc", ".h")
    ):
        sha.update(path.name.encode() + b"\0" + path.read_bytes())
    return sha.hexdigest()[:16]


def compile_report(source, architectures=ARCHITECTURES):
    """ptxas -v for one file; raises with the compiler's words when it fails."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            "nvcc",
            "-std=c++20",
            "-O3",
            "-Xptxas",
            "-v",
            "-c",
            str(source),
            "-o",
            str(Path(folder, "out.o")),
        ]
        command += [f"-gencode=arch=compute_{a},code=sm_{a}" for a in architectures]
        result = subprocess.run(command, capture_output=True, text=True, timeout=600)
    if result.returncode:
        raise RuntimeError(f"nvcc failed on {source.name}:\n{result.stderr}")
    return result.stderr


def short_name(mangled):
    name = subprocess.run(["c++filt", mangled], capture_output=True, text=True, check=True).stdout.strip()
    name = re.sub(r"\(anonymous namespace\)::|_GLOBAL__N__\w+::|fmoe_ext::", "", name).removeprefix("void ")
    name = re.sub(r"\((CurveKind)\)(\d)", r"curve \2", name)
    return name[: name.index("(")] if "(" in name else name


def kernels_of(source, report):
    """Kernels in a ptxas report."""
    found = []
    blocks = re.split(r"Compiling entry function ", report)[1:]
    for block in blocks:
        name, architecture = re.match(r"'(\S+)' for 'sm_(\w+)'", block).groups()
        stack, stores, _ = map(
            int,
            re.search(
                r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", block
            ).groups(),
        )
        registers = int(re.search(r"Used (\d+) registers", block).group(1))
        shared = re.search(r"(\d+) bytes smem", block)
        found.append(
            Kernel(
                source.name,
                short_name(name),
                architecture,
                registers,
                int(shared.group(1)) if shared else 0,
                stack,
                stores,
            )
        )
    return sorted(found)


def all_kernels():
    with ThreadPoolExecutor(2) as pool:
        reports = list(pool.map(compile_report, sources()))
    return [
        kernel
        for source, report in zip(sources(), reports, strict=True)
        for kernel in kernels_of(source, report)
    ]


def table_text(kernels):
    version = re.search(
        r"release ([\d.]+)", subprocess.run(["nvcc", "--version"], capture_output=True, text=True).stdout
    )
    lines = [
        "# Kernel resources",
        "",
        f"nvcc {version.group(1)}, written by `python tests/cuda/resources.py`; sources {digest()}.",
        "The Hopper kernels use dynamic shared memory, and registers as setmaxnreg divides them (docs/kernels.md).",
        "On sm_80 their bodies are empty.",
        "",
        "| " + " | ".join(COLUMNS) + " |",
        "|" + "---|" * len(COLUMNS),
    ]
    lines += ["| " + " | ".join(map(str, astuple(kernel))) + " |" for kernel in kernels]
    return "\n".join(lines) + "\n"


def read_table():
    """(digest of the sources, kernels) as committed."""
    text = TABLE.read_text()
    rows = [line.strip("|\n ").split(" | ") for line in text.splitlines() if ".cu |" in line]
    kernels = [Kernel(file, name, sm, *map(int, numbers)) for file, name, sm, *numbers in rows]
    return re.search(r"sources (\w+)\.", text).group(1), kernels


if __name__ == "__main__":
    if shutil.which("nvcc") is None:
        sys.exit("nvcc was not found")
    TABLE.write_text(table_text(all_kernels()))
    print(TABLE.relative_to(ROOT))
