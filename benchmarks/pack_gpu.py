"""Make the bundles that a machine with a GPU and no network needs, each of at most 60 MiB with the tree.

    python -m benchmarks.pack_gpu                builds what is missing; build/gpu/modules and build/gpu/peers
    python -m benchmarks.pack_gpu --no-peers     our modules alone

The first has our modules, the second SonicMoE's wheels; `benchmarks/run_gpu.sh` takes what is there. CUTLASS's DSL,
which SonicMoE needs, is stripped of debug symbols and packed by xz. The communicator of NCCL is built for the Python of
that machine.
"""

import argparse
import lzma
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
LIMIT = 60 * 2**20
PYTHON = "3.12"  # of the machine with the GPU
PLATFORMS = [f"manylinux_2_{n}_x86_64" for n in (39, 35, 34, 31, 28, 27, 24, 17)] + ["manylinux2014_x86_64"]
WHEELS = ("sonic-moe==0.1.2.post1", "quack-kernels==0.3.11", "apache-tvm-ffi", "torch-c-dlpack-ext")
DSL = ("nvidia-cutlass-dsl==4.4.2", "nvidia-cutlass-dsl-libs-base==4.4.2")
MODULES = ("_C.abi3.so", "_C_cuda.abi3.so")


def download(names, folder):
    """Wheels of exactly these packages; those that cannot be had are named, the others stay."""
    missing = []
    for name in names:
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:"]
        command += ["--python-version", PYTHON, "--implementation", "cp", "-d", str(folder), name]
        command += [part for platform in PLATFORMS for part in ("--platform", platform)]
        result = subprocess.run(command, capture_output=True, text=True)
        if result.returncode:
            missing.append(f"{name}: {result.stderr.strip().splitlines()[-1]}")
    return missing


def copy_modules(folder):
    """The native modules, built for sm_80 and sm_90a if they are missing."""
    missing = [name for name in MODULES if not (ROOT / "fmoe_ext" / name).exists()]
    if missing:
        environment = {**os.environ, "FMOE_CUDA": "1"}
        subprocess.run(
            [sys.executable, "setup.py", "build_ext", "--inplace"], cwd=ROOT, env=environment, check=True
        )
    for name in MODULES:
        shutil.copy2(ROOT / "fmoe_ext" / name, folder / name)


def build_communicator(folder, python):
    """_C_nccl for another Python, compiled by hand: its torch need not be here. -> why it is missing, or nothing"""
    from torch.utils import cpp_extension

    with tempfile.TemporaryDirectory() as wheel:
        if missing := download(["nvidia-nccl-cu13"], wheel):
            return missing
        with zipfile.ZipFile(next(Path(wheel).glob("*.whl"))) as content:
            content.extractall(wheel)
        asked = "import sysconfig as s; print(s.get_paths()['include'], s.get_config_var('EXT_SUFFIX'))"
        found = subprocess.run([python, "-c", asked], capture_output=True, text=True)
        if found.returncode:
            return [f"_C_nccl: {python} was not found: --python names a Python {PYTHON} with its headers"]
        include, suffix = found.stdout.split()
        nccl, cuda = Path(wheel, "nvidia", "nccl"), os.environ.get("CUDA_HOME", "/usr/local/cuda")
        includes = [nccl / "include", Path(cuda, "include"), include, *cpp_extension.include_paths()]
        command = ["c++", "-std=c++20", "-O2", "-fPIC", "-shared", "-fvisibility=hidden"]
        command += [*(f"-isystem{path}" for path in includes), str(ROOT / "csrc/nccl/communicator.cpp")]
        # torch has loaded NCCL by this name when the module is imported
        command += [f"-L{nccl / 'lib'}", "-l:libnccl.so.2", "-ldl", "-o", str(folder / f"_C_nccl{suffix}")]
        subprocess.run(command, check=True)
    return []


def pack_dsl(wheels, archive):
    """The installed form of wheels as one .tar.xz, their libraries without debug symbols."""
    with tempfile.TemporaryDirectory() as unpacked:
        for wheel in wheels:
            with zipfile.ZipFile(wheel) as content:
                content.extractall(unpacked)
        strip = shutil.which("strip")
        for library in Path(unpacked).rglob("*.so*"):
            if strip and library.is_file():
                subprocess.run([strip, "--strip-debug", str(library)], check=False, capture_output=True)
        filters = [
            {"id": lzma.FILTER_X86},
            {"id": lzma.FILTER_LZMA2, "preset": 6, "dict_size": 64 * 2**20},
        ]
        with (
            lzma.open(archive, "wb", filters=filters) as stream,
            tarfile.open(fileobj=stream, mode="w") as tar,
        ):
            tar.add(unpacked, arcname=".")


def size_of_tree():
    """Bytes of the tracked files, which travel with the bundle."""
    command = ["git", "ls-files", "-z"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout.split("\0")
    return sum((ROOT / name).stat().st_size for name in listed if name and (ROOT / name).is_file())


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "gpu")
    parser.add_argument("--no-peers", action="store_true", help="leave SonicMoE out")
    parser.add_argument("--python", default=f"python{PYTHON}", help=f"a Python {PYTHON}, for _C_nccl")
    args = parser.parse_args(argv)
    modules, peers = args.out / "modules", args.out / "peers"
    shutil.rmtree(args.out, ignore_errors=True)
    modules.mkdir(parents=True)
    peers.mkdir()
    copy_modules(modules)
    missing = build_communicator(modules, args.python)
    if not args.no_peers:
        missing += download(WHEELS, peers)
        with tempfile.TemporaryDirectory() as wheels:
            missing += download(DSL, wheels)
            if found := sorted(Path(wheels).glob("*.whl")):
                pack_dsl(found, peers / "dsl.tar.xz")
    for line in missing:
        print(f"not carried: {line}")
    tree = size_of_tree()
    print(f"tracked files, which travel with each bundle: {tree / 2**20:.1f} MiB")
    too_large = False
    for folder in (modules, peers):
        sizes = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
        too_large |= sum(sizes.values()) + tree > LIMIT
        print(f"{folder.name}: {sum(sizes.values()) / 2**20:.1f} MiB of {LIMIT / 2**20:.0f} with the tree")
        for name, size in sizes.items():
            print(f"  {size / 2**20:6.1f} {name}")
    if too_large:
        sys.exit("a bundle is too large: leave packages out of WHEELS")


if __name__ == "__main__":
    main()
