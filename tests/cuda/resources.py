"""List registers, shared memory, stack, spills and instructions of every kernel; for tests/cuda/kernel_resources.md.

    python tests/cuda/resources.py          compiles cuda/*.cu (no GPU needed) and writes the table

Instructions are counted where cuobjdump and nvdisasm are found: on the PATH, in the toolkit, or in a Triton wheel.
"""

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple, dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TABLE = ROOT / "tests" / "cuda" / "kernel_resources.md"
ARCHITECTURES = ("80", "90a")
COLUMNS = ("file", "kernel", "sm", "registers", "static shared bytes", "stack bytes", "spill bytes")
COLUMNS += ("instructions", "HGMMA", "UTMALDG")


@dataclass(frozen=True, order=True)
class Kernel:
    file: str
    name: str
    architecture: str
    registers: int
    shared: int
    stack: int
    spills: int
    instructions: int = 0
    hgmma: int = 0  # warpgroup products
    utmaldg: int = 0  # TMA loads

    def as_ptxas_says(self):
        return replace(self, instructions=0, hgmma=0, utmaldg=0)


@dataclass(frozen=True)
class Report:
    ptxas: str  # what ptxas -v says
    code: str | None  # machine code as text, where cuobjdump was found


def sources():
    """The files with kernels."""
    return sorted(path for path in (ROOT / "cuda").glob("*.cu") if path.name != "device_info.cu")


def digest():
    """Changes with what the kernels are built from; comments do not count."""
    command = [sys.executable, ROOT / "cuda" / "sources_digest.py"]
    found = subprocess.run(command, capture_output=True, check=True).stdout
    return hashlib.sha256(found).hexdigest()[:16]


def find_cuobjdump():
    """Path of a cuobjdump that has its nvdisasm beside it, or None."""
    nvcc = shutil.which("nvcc")
    folders = [*os.environ.get("PATH", "").split(os.pathsep), "/usr/local/cuda/bin"]
    folders += [Path(nvcc).resolve().parent] if nvcc else []
    folders += [Path(entry, "triton", "backends", "nvidia", "bin") for entry in sys.path]
    return next(
        (
            str(Path(folder, "cuobjdump"))
            for folder in folders
            if all(Path(folder, tool).exists() for tool in ("cuobjdump", "nvdisasm"))
        ),
        None,
    )


def compile_report(source, architectures=ARCHITECTURES):
    """The Report of one file; raises with the compiler's words when it fails."""
    with tempfile.TemporaryDirectory() as folder:
        cuobjdump, out = find_cuobjdump(), Path(folder, "out.fatbin")
        command = [
            "nvcc",
            "-std=c++20",
            "-O3",
            "-Xptxas",
            "-v",
            f"-I{ROOT / 'csrc'}",
            "-fatbin",  # no code of the host
            str(source),
            "-o",
            str(out),
        ]
        command += [f"-gencode=arch=compute_{a},code=sm_{a}" for a in architectures]
        result = subprocess.run(command, capture_output=True, text=True, timeout=1200)
        if result.returncode:
            raise RuntimeError(f"nvcc failed on {source.name}:\n{result.stderr}")
        if cuobjdump is None:
            return Report(result.stderr, None)
        code = subprocess.run([cuobjdump, "-sass", str(out)], capture_output=True, text=True, timeout=600)
    if code.returncode:
        raise RuntimeError(f"cuobjdump failed on {source.name}:\n{code.stderr}")
    return Report(result.stderr, code.stdout)


def short_name(mangled):
    name = subprocess.run(["c++filt", mangled], capture_output=True, text=True, check=True).stdout.strip()
    name = re.sub(r"\(anonymous namespace\)::|_GLOBAL__N__\w+::|fmoe_ext::", "", name).removeprefix("void ")
    name = re.sub(r"\(CurveKind\)(\d)", r"curve \1", name)
    name = re.sub(r"\(gemm::PackedFormat\)(\d+)", r"format \1", name)
    return name[: name.index("(")] if "(" in name else name


def count_instructions(code):
    """{(kernel, architecture): (instructions, HGMMA, UTMALDG)} of cuobjdump's text."""
    counts = {}
    for part in re.split(r"^arch = sm_", code, flags=re.MULTILINE)[1:]:
        for function in re.split(r"^\s*Function : ", part, flags=re.MULTILINE)[1:]:
            name, body = function.split("\n", 1)
            lines = re.findall(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?!NOP)(.*);", body, flags=re.MULTILINE)
            counts[short_name(name.strip()), part.split()[0]] = (
                len(lines),
                sum("HGMMA" in line for line in lines),
                sum("UTMALDG" in line for line in lines),
            )
    return counts


def kernels_of(source, report):
    """Kernels of a source in its Report."""
    counts = count_instructions(report.code) if report.code else {}
    found = []
    blocks = re.split(r"Compiling entry function ", report.ptxas)[1:]
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
                *counts.get((short_name(name), architecture), ()),
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
    if find_cuobjdump() is None:
        sys.exit(
            "cuobjdump and nvdisasm were not found: put those of a CUDA toolkit or of a Triton wheel on the PATH"
        )
    TABLE.write_text(table_text(all_kernels()))
    print(TABLE.relative_to(ROOT))
