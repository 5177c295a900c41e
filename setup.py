"""Builds the native modules of fmoe_ext; the variables it reads are listed in docs/install.md."""

from __future__ import annotations  # so that a Python that is too old gets as far as its message

import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NoReturn

from setuptools import Extension, setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent.resolve()
PYTHON_FLOOR = (3, 10)  # requires-python in pyproject.toml
TORCH_FLOOR = (2, 11)
# Highest libtorch stable-ABI version that the sources may use: the floor, so that one binary serves every later torch.
TORCH_TARGET = "0x020b000000000000"
DEFAULT_CUDA_ARCHS = "8.0+PTX;9.0a"  # newer devices than these compile the PTX when it is loaded


def stop(sentence: str) -> NoReturn:
    sys.exit(f"fmoe_ext: {sentence}")


if sys.version_info < PYTHON_FLOOR:
    floor = ".".join(map(str, PYTHON_FLOOR))
    stop(f"Python {platform.python_version()} is too old: version {floor} or newer is needed.")

if sys.platform == "win32":
    stop("Windows itself is not supported: install and build in WSL 2, which is Linux.")
if sys.platform == "darwin":
    print("fmoe_ext: macOS was not tried; Linux is what is tested.", file=sys.stderr)

try:
    import torch
    from torch.utils import cpp_extension
except ImportError:
    stop(
        "PyTorch is needed to build: run `pip install torch` first, then `pip install -e . --no-build-isolation` "
        "(an isolated build does not see the torch that is installed)."
    )

if tuple(int(part) for part in torch.__version__.split(".")[:2]) < TORCH_FLOOR:
    stop(
        f"torch {torch.__version__} is too old: version {TORCH_FLOOR[0]}.{TORCH_FLOOR[1]} or newer is needed, "
        "run `pip install -U torch`."
    )


def env_flag(name: str) -> bool | None:
    """True, False or None (unset) for an environment variable that switches a part of the build."""
    value = os.environ.get(name, "").strip().lower()
    if value == "":
        return None
    if value in ("1", "on", "true", "yes"):
        return True
    if value in ("0", "off", "false", "no"):
        return False
    stop(f"{name}={value!r} is not understood: set it to 1 or 0, or leave it unset.")


def cxx() -> str:
    """CXX, of which empty means unset."""
    return os.environ.get("CXX", "").strip() or "c++"


def check_cxx20() -> None:
    compiler = cxx()
    if shutil.which(compiler.split()[0]) is None:
        stop(f"no C++ compiler: {compiler!r} was not found, install gcc >= 11 or point CXX to one.")
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "probe.cpp")
        source.write_text(
            "#include <concepts>\ntemplate <std::integral T> T f(T x) { return x; }\nint a = f(1);\n"
        )
        command = [*compiler.split(), "-std=c++20", "-fsyntax-only", str(source)]
        result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode != 0:
        stop(
            f"the C++ compiler {compiler!r} does not know C++20: install gcc >= 11 or clang >= 14 and set CXX."
        )


def find_cuda() -> tuple[str | None, str]:
    """(folder of the CUDA toolkit, or None when the CUDA module is not to be built; the reason, for people).

    Unless FMOE_CUDA decides, the CUDA module is built for a torch that has CUDA: another torch cannot load it.
    """
    wanted = env_flag("FMOE_CUDA")
    if wanted is False:
        return None, "FMOE_CUDA=0"
    if wanted is None and torch.version.cuda is None:
        return None, f"torch {torch.__version__} has no CUDA; FMOE_CUDA=1 builds them anyway"
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda"
    nvcc = shutil.which("nvcc", path=str(Path(home, "bin"))) or shutil.which("nvcc")
    if nvcc is None:
        if wanted:
            stop(
                "FMOE_CUDA=1 but nvcc was not found: install the CUDA toolkit, or set CUDA_HOME, or unset FMOE_CUDA."
            )
        return None, "nvcc was not found: install the CUDA toolkit, or set CUDA_HOME"
    # nvcc on the PATH may be a link or a script elsewhere: only nvcc itself knows its toolkit.
    plan = subprocess.run(
        [nvcc, "-dryrun", "-E", "-x", "cu", os.devnull], capture_output=True, text=True
    ).stderr
    tops = [line.split("TOP=", 1)[1].strip() for line in plan.splitlines() if "TOP=" in line]
    return os.path.realpath(tops[0]) if tops else str(Path(nvcc).resolve().parent.parent), nvcc


def find_nccl() -> tuple[Path, Path]:
    """(include folder, library folder or None) of NCCL: NCCL_HOME, pip's nvidia-nccl-cu*, or the system's."""
    candidates = []
    if os.environ.get("NCCL_HOME"):
        candidates.append(Path(os.environ["NCCL_HOME"]))
    candidates += [Path(entry, "nvidia", "nccl") for entry in sys.path if entry]
    candidates += [Path("/usr"), Path("/usr/local")]
    for home in candidates:
        if Path(home, "include", "nccl.h").exists():
            return home / "include", home / "lib"
    stop(
        "USE_NCCL=1 but nccl.h was not found: run `pip install nvidia-nccl-cu13` (or -cu12), or set NCCL_HOME."
    )


def sources(*patterns: str) -> list[str]:
    return sorted(str(path.relative_to(ROOT)) for pattern in patterns for path in ROOT.glob(pattern))


def headers(folder: str) -> list[str]:
    return [str(path) for path in ROOT.glob(f"{folder}/**/*.*") if path.suffix in (".h", ".cuh")]


SOURCE_NAMES = f"-ffile-prefix-map={ROOT}/="  # errors name csrc/x.h, not a folder of whoever built the wheel
COMMON = ["-std=c++20", f"-DTORCH_TARGET_VERSION={TORCH_TARGET}", "-fvisibility=hidden", SOURCE_NAMES]
WARNINGS = ["-Wall", "-Wextra", "-Wno-unused-parameter", "-Wno-unknown-pragmas"]
SANITIZE = [
    "-fsanitize=address,undefined",
    "-fno-omit-frame-pointer",
    "-fno-sanitize-recover=undefined",
    "-fno-wrapv",  # Python's own flags allow signed overflow, which would hide it from UBSan
    "-D_GLIBCXX_ASSERTIONS",
    "-g1",  # lines of a report; names of variables would take a third of the time
    "-O1",
]


def build_info(cuda_home: str | None) -> str:
    """What `python -m fmoe_ext.info` says of the build; a comma-separated list of words without spaces or quotes."""
    compiler = cxx().split()[0]
    version = subprocess.run(
        [compiler, "-dumpfullversion", "-dumpversion"], capture_output=True, text=True
    ).stdout
    facts = {
        "torch": torch.__version__,
        "abi": "stable-2.11",
        "cxx": f"{Path(compiler).name}-{version.split()[0] if version else 'unknown'}",
        "cuda_archs": cuda_archs().replace(";", "/") if cuda_home else "none",
        "nccl": "yes" if env_flag("USE_NCCL") else "no",
    }
    return ",".join(f"{key}={value}" for key, value in facts.items())


def cpu_extension(cuda_home: str | None) -> Extension:
    flags = [*COMMON, *WARNINGS, "-O3", "-g0", "-fno-math-errno", "-fno-trapping-math"]
    link = []
    if env_flag("FMOE_SANITIZE"):
        flags, link = [*COMMON, *WARNINGS, *SANITIZE], ["-fsanitize=address,undefined"]
    if env_flag("FMOE_EMULATE_AMX"):
        flags.append("-DFMOE_EMULATE_AMX")
    flags.append(f"-DFMOE_BUILD_INFO={build_info(cuda_home)}")
    return cpp_extension.CppExtension(
        "fmoe_ext._C",
        sources("csrc/*.cpp", "csrc/gemm/*.cpp"),
        include_dirs=[str(ROOT / "csrc")],
        depends=headers("csrc"),
        extra_compile_args={"cxx": flags},
        extra_link_args=link,
        py_limited_api=True,
    )


def cuda_extension(home: str) -> Extension:
    cpp_extension.CUDA_HOME = home
    os.environ["TORCH_CUDA_ARCH_LIST"] = cuda_archs()
    lib = "lib64" if Path(home, "lib64").exists() else "lib"
    hopper = (
        ["-DFMOE_HAS_SM90A"] if "9.0a" in os.environ["TORCH_CUDA_ARCH_LIST"] else []
    )  # read by cuda/select.h
    return cpp_extension.CppExtension(
        "fmoe_ext._C_cuda",
        sources("cuda/*.cu", "cuda/*.cpp"),
        include_dirs=[str(ROOT / "cuda"), str(ROOT / "csrc"), str(Path(home, "include"))],
        depends=[*headers("cuda"), *headers("csrc")],
        library_dirs=[str(Path(home, lib))],
        libraries=["cudart_static", "dl", "rt"],
        # Under a CPU torch no symbol is found in libtorch.so, so the linker would leave it out; but it is through
        # libtorch.so that a CUDA torch provides its CUDA symbols.
        extra_link_args=["-Wl,--no-as-needed,-ltorch"],
        extra_compile_args={
            "cxx": [*COMMON, *WARNINGS, "-O2", "-DUSE_CUDA", *hopper, kernel_sources()],
            "nvcc": [*NVCC, "-lineinfo", "-Xcompiler", f"-fvisibility=hidden,{SOURCE_NAMES}"],
        },
        py_limited_api=True,
    )


def cuda_archs() -> str:
    """TORCH_CUDA_ARCH_LIST, with 9.0a beside 9.0: the Hopper kernels need instructions that 9.0 alone lacks."""
    chosen = re.split(r"[;\s]+", os.environ.get("TORCH_CUDA_ARCH_LIST", "").strip() or DEFAULT_CUDA_ARCHS)
    names = {arch.removesuffix("+PTX") for arch in chosen}
    if names & {"9.0", "Hopper"} and "9.0a" not in names:
        chosen.append("9.0a")
    return ";".join(chosen)


NVCC = ["-std=c++20", "-O3"]  # what decides the kernels' code, of nvcc's options


def kernel_sources() -> str:
    """The flag by which the CUDA module knows what its kernels were built from; proofs are kept by it."""
    command = [sys.executable, ROOT / "cuda" / "sources_digest.py", *NVCC]
    found = subprocess.run(command, capture_output=True, text=True, check=True)
    return f"-DFMOE_KERNEL_SOURCES={found.stdout.strip()}"


def nccl_extension(cuda_home: str | None) -> Extension:
    include, lib = find_nccl()
    homes = [cuda_home, os.environ.get("CUDA_HOME"), "/usr/local/cuda"]
    cuda_home = next(
        (home for home in homes if home and Path(home, "include", "cuda_runtime.h").exists()), None
    )
    if cuda_home is None:
        stop(
            "USE_NCCL=1 needs cuda_runtime.h, which nccl.h includes: install the CUDA toolkit or set CUDA_HOME."
        )
    return Extension(
        "fmoe_ext._C_nccl",
        sources("csrc/nccl/*.cpp"),
        # torch's headers only for the pybind11 among them
        include_dirs=[str(include), str(Path(cuda_home, "include")), *cpp_extension.include_paths()],
        depends=headers("csrc/nccl"),
        extra_compile_args={"cxx": ["-std=c++20", "-fvisibility=hidden", *WARNINGS, "-O2"]},
        extra_link_args=[f"-L{lib}", "-l:libnccl.so.2", f"-Wl,-rpath,{lib}"],
        language="c++",
    )


def long_description() -> str:
    """README.md for a package index, where its relative pictures and links lead nowhere: without them."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    text = re.sub(r"^!\[[^]]*\]\((?!https?:)[^)]*\)\n\n?", "", text, flags=re.MULTILINE)
    return re.sub(r"(?<!!)\[([^]]*)\]\((?!https?:)[^)]*\)", r"\1", text)


class BuildExtension(cpp_extension.BuildExtension):
    """Leaves no native module of an earlier build, which would be installed, or loaded, beside those of this one."""

    def run(self) -> None:
        built = {ext.name.rpartition(".")[2] for ext in self.extensions}
        folder = ROOT if self.inplace else Path(self.build_lib)
        for path in Path(folder, "fmoe_ext").glob("_C*.so"):
            if path.name.partition(".")[0] not in built:
                path.unlink()
        super().run()


class BuildPython(build_py):
    """Starts from an empty folder, or modules that were deleted since the last build would be installed again."""

    def run(self) -> None:
        package = Path(self.build_lib, "fmoe_ext")
        if not self.editable_mode and package.exists():
            for path in package.rglob("*.py"):
                path.unlink()
        super().run()


if not os.environ.get("CXX", "unset").strip():
    del os.environ["CXX"]  # distutils would call a compiler of that name
check_cxx20()
cuda_home, why = find_cuda()
extensions = [cpu_extension(cuda_home)]
if cuda_home is not None and sources("cuda/*.cu"):
    extensions.append(cuda_extension(cuda_home))
if env_flag("USE_NCCL"):
    extensions.append(nccl_extension(cuda_home))

if cuda_home:
    note = f"with CUDA kernels ({why}); about 3 minutes of processor time, longer on busy processors"
else:
    note = f"without CUDA kernels ({why}); about 1 minute of processor time"
names = ", ".join(extension.name for extension in extensions)
print(f"fmoe_ext: building {names} for torch {torch.__version__}, {platform.machine()}, {note}", flush=True)
setup(
    long_description=long_description(),
    long_description_content_type="text/markdown",
    ext_modules=extensions,
    cmdclass={"build_ext": BuildExtension, "build_py": BuildPython},
    options={"bdist_wheel": {"py_limited_api": "cp310"}} if not env_flag("USE_NCCL") else {},
)
