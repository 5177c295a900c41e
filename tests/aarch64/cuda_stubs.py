"""Makes a CUDA build of torch importable where there is no CUDA: libraries of its names whose functions do nothing.

    python tests/aarch64/cuda_stubs.py TORCH_LIB OUT

TORCH_LIB is torch's folder lib. OUT goes into LD_LIBRARY_PATH; torch then finds no device and computes on the CPU.
Wheels of torch for Linux on Arm are CUDA builds, and CUDA itself is another two gigabytes, of which a test on the CPU
calls nothing.
"""

import re
import subprocess
import sys
from pathlib import Path

PREFIX, SUFFIX = "aarch64-linux-gnu-", "-12"  # Debian's cross compiler
CUDA_LIBRARY = re.compile(r"lib(cu|nvrtc|nccl|nvshmem)")
CUDA_SYMBOL = re.compile(r"_*(cu|nv|nccl)")
SOURCE = "int cudaGetDeviceCount(int *count) { *count = 0; return 100; }  // cudaErrorNoDevice\n"


def output_of(*command: str) -> list[str]:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()


def symbols(library: Path, kind: str) -> dict[str, str]:
    """Dynamic symbols and their versions, "" for none; kind is defined or undefined."""
    lines = output_of(f"{PREFIX}nm", "-D", f"--{kind}-only", str(library))
    parts = [line.split()[-1].partition("@") for line in lines]
    return {name: version.lstrip("@") for name, _, version in parts}


def needed(library: Path) -> set[str]:
    found = (
        re.search(r"\(NEEDED\).*\[(.*)\]", line) for line in output_of(f"{PREFIX}readelf", "-d", str(library))
    )
    return {match[1] for match in found if match}


def main(torch_lib: Path, out: Path) -> None:
    libraries = [path for path in torch_lib.glob("lib*.so*") if not path.is_symlink()]
    defined = set().union(*(symbols(library, "defined") for library in libraries))
    wanted = {}
    for library in libraries:
        wanted |= {
            name: version
            for name, version in symbols(library, "undefined").items()
            if CUDA_SYMBOL.match(name) and name not in defined
        }
    out.mkdir(parents=True, exist_ok=True)
    labels = "".join(f"\t.globl {name}\n{name}:\n" for name in wanted if name != "cudaGetDeviceCount")
    (out / "stubs.s").write_text(f"\t.text\n{labels}\tmov x0, #0\n\tret\n")
    (out / "count.c").write_text(SOURCE)
    versions = {version: [n for n in wanted if wanted[n] == version] for version in {*wanted.values()} - {""}}
    (out / "versions").write_text(
        "".join(f"{v} {{ {'; '.join(names)}; }};\n" for v, names in versions.items())
    )
    command = [f"{PREFIX}gcc{SUFFIX}", "-shared", "-fPIC", f"-Wl,--version-script={out / 'versions'}"]
    command += ["-o", str(out / "libstubs.so"), str(out / "stubs.s"), str(out / "count.c")]
    subprocess.run(command, check=True)
    for name in set().union(*map(needed, libraries)):
        if CUDA_LIBRARY.match(name) and not (torch_lib / name).exists():
            (out / name).unlink(missing_ok=True)
            (out / name).symlink_to("libstubs.so")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
