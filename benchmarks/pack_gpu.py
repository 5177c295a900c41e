"""Make the bundles that a machine with a GPU and no network needs: our modules, peers' wheels, caches; 64 MiB each.

    python -m benchmarks.pack_gpu                builds what is missing; build/gpu/base and build/gpu/dsl
    python -m benchmarks.pack_gpu --no-modules   wheels alone

`benchmarks/run_gpu.sh --part N` installs from these folders. CUTLASS's DSL, which SonicMoE needs, makes a bundle of its
own: its library is stripped of debug symbols and packed by xz.
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
LIMIT = 64 * 2**20
PYTHON = "3.12"  # of the machine with the GPU
PLATFORMS = [f"manylinux_2_{n}_x86_64" for n in (39, 35, 34, 31, 28, 27, 24, 17)] + ["manylinux2014_x86_64"]
WHEELS = (
    "liger-kernel",
    "sonic-moe==0.1.2.post1",
    "quack-kernels==0.3.11",
    "apache-tvm-ffi",
    "torch-c-dlpack-ext",
)
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
        with lzma.open(archive, "wb", preset=2) as stream, tarfile.open(fileobj=stream, mode="w") as tar:
            tar.add(unpacked, arcname=".")


def size_of(folder):
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def size_of_tree():
    """Bytes of the tracked files, which travel with a bundle."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True).stdout.split(
        "\0"
    )
    return sum((ROOT / name).stat().st_size for name in listed if name and (ROOT / name).is_file())


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "gpu")
    parser.add_argument("--no-modules", action="store_true", help="do not build or copy our modules")
    parser.add_argument("--no-dsl", action="store_true", help="leave CUTLASS's DSL out")
    args = parser.parse_args(argv)
    base, dsl = args.out / "base", args.out / "dsl"
    for folder in (base, dsl):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
    missing = download(WHEELS, base)
    if not args.no_modules:
        copy_modules(base)
    if not args.no_dsl:
        with tempfile.TemporaryDirectory() as wheels:
            missing += download(DSL, wheels)
            found = sorted(Path(wheels).glob("*.whl"))
            if found:
                pack_dsl(found, dsl / "dsl.tar.xz")
    for line in missing:
        print(f"not carried: {line}")
    too_large, tree = False, size_of_tree()
    print(f"tracked files, which travel with each bundle: {tree / 2**20:.1f} MiB")
    for folder in (base, dsl):
        size = size_of(folder)
        too_large |= size + tree > LIMIT
        print(f"{folder}: {size / 2**20:.1f} MiB of {LIMIT / 2**20:.0f}")
        for path in sorted(folder.iterdir()):
            print(f"  {path.stat().st_size / 2**20:6.1f} {path.name}")
    if too_large:
        sys.exit("a bundle is larger than one call carries: leave packages out of WHEELS")


if __name__ == "__main__":
    main()
