"""Builds the emulator, its test programs and the emulated ops with g++ and ninja; nothing of CUDA but its headers.

    python tests/emulator/emu_build.py [plain|asan|tsan] [target ...]

Objects and programs go to build/emulator/<mode>/. The emulator itself is never compiled with -fsanitize=thread:
it tells ThreadSanitizer about threads and asynchronous work itself (sanitize.h).
"""

import fcntl
import functools
import os
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent.resolve()
ROOT = HERE.parent.parent
OUT = ROOT / "build" / "emulator"

MODES = {  # mode: (flags of everything, flags of the emulator only, flags of the kernels and tests only)
    "plain": ("-O2", "", ""),
    "asan": (
        "-O1 -g1 -fno-omit-frame-pointer",
        "-fsanitize=address",
        "-fsanitize=address,undefined -fno-sanitize=null,object-size -fno-sanitize-recover",  # ASan sees those
    ),
    "tsan": ("-O1 -g1", "-O2 -DEMU_TSAN", "-fsanitize=thread"),
}
EMULATOR = ["scheduler", "sanitize", "shared", "sync", "warp", "async", "tma", "wgmma", "diagnostics"]
PROGRAMS = sorted(path.stem for path in HERE.glob("test_*.cpp"))
OPERATORS = (
    "count_tokens",
    "sort_tokens",
    "apply_capacity",
    "permute",
    "unpermute",
    "unpermute_backward",
    "topk_gate",
    "topk_gate_backward",
    "grouped_gemm",
    "grouped_gemm_backward",
    "_decode_packed",
    "expert_mlp",
    "expert_mlp_backward",
    "expert_mlp_backward_inputs",
    "expert_mlp_backward_weights",
)
OPS = "fmoe_emu.so"  # the registered ops, for Python; plain mode only


def cuda_include():
    """Folder with cuda.h, or None; only headers are needed."""
    candidates = []
    nvcc = shutil.which("nvcc")
    for home in (
        os.environ.get("CUDA_HOME"),
        "/usr/local/cuda",
        nvcc and str(Path(nvcc).resolve().parent.parent),
    ):
        if home:
            candidates.append(Path(home, "include"))
    candidates += [
        Path(entry, "nvidia", name, "include") for entry in sys.path for name in ("cu13", "cuda_runtime")
    ]
    return next((folder for folder in candidates if (folder / "cuda.h").exists()), None)


def missing():
    """Why nothing can be built here, as a sentence, or None."""
    if shutil.which("g++") is None:
        return "g++ was not found"
    if shutil.which("ninja") is None:
        return "ninja was not found (pip install ninja)"
    if cuda_include() is None:
        return "the CUDA headers were not found (cuda.h; set CUDA_HOME)"
    return None


def torch_flags():
    import sysconfig

    import torch
    from torch.utils import cpp_extension

    includes = [*cpp_extension.include_paths(), sysconfig.get_paths()["include"], str(ROOT / "csrc")]
    lib = Path(torch.__file__).parent / "lib"
    compile_flags = (
        " ".join(f"-isystem {path}" for path in includes)
        + " -fvisibility=hidden -DTORCH_TARGET_VERSION=0x020b000000000000"
    )
    return compile_flags, f"-L{lib} -Wl,-rpath,{lib} -ltorch -ltorch_cpu -lc10"


def ninja_file():
    common = (
        "-std=c++20 -fPIC -fno-strict-aliasing "
        "-Wall -Wno-unknown-pragmas -Wno-unused-variable -Wno-sign-compare -Wno-psabi "
        f"-DFMOE_EMULATOR -isystem {cuda_include()} -I{HERE} -I{ROOT}/cuda -I{ROOT}/csrc"
    )
    torch_compile, torch_link = torch_flags()
    lines = ["ninja_required_version = 1.5"]
    lines += ["rule cxx", f"  command = g++ {common} $flags -MMD -MF $out.d -x c++ -c $in -o $out"]
    lines += ["  description = compile $out"]
    lines += ["  deps = gcc", "  depfile = $out.d"]
    lines += ["rule link", "  command = g++ $flags $in -o $out $libs", "  description = link $out"]

    def compile_to(folder, source, flags):
        target = f"{folder}/{source.name}.o"
        lines.extend([f"build {target}: cxx {source}", f"  flags = {flags}"])
        return target

    for mode, (everything, emulator, rest) in MODES.items():
        folder = OUT / mode
        machine = [compile_to(folder, HERE / f"{name}.cpp", f"{everything} {emulator}") for name in EMULATOR]
        kernels = [
            compile_to(folder, path, f"{everything} {rest}") for path in sorted(ROOT.glob("cuda/*.cu"))
        ]
        for program in PROGRAMS:
            test = compile_to(folder, HERE / f"{program}.cpp", f"{everything} {rest}")
            lines += [
                f"build {folder}/{program}: link {test} {' '.join(kernels + machine)}",
                f"  flags = {rest}",
            ]
        if mode == "plain":
            ops = [
                compile_to(folder, path, f"{everything} {torch_compile}")
                for path in [*sorted(ROOT.glob("cuda/*.cpp")), HERE / "schedule_op.cpp"]
            ]
            lines += [f"build {folder}/{OPS}: link {' '.join(ops + kernels + machine)}"]
            lines += ["  flags = -shared", f"  libs = {torch_link}"]
    return "\n".join(lines) + "\n"


def build(mode, *targets):
    """Brings targets of one mode up to date and returns their paths; raises with the compiler's words if it fails."""
    OUT.mkdir(parents=True, exist_ok=True)
    text = ninja_file()
    file = OUT / "build.ninja"
    paths = [OUT / mode / target for target in targets]
    jobs = os.environ.get("MAX_JOBS") or str(os.cpu_count())
    with (OUT / "lock").open("w") as lock:  # tests of another process build the same
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not file.exists() or file.read_text() != text:
            file.write_text(text)
        result = subprocess.run(
            ["ninja", "-f", str(file), "-j", jobs, *map(str, paths)], capture_output=True, text=True, cwd=OUT
        )
    if result.returncode:
        raise RuntimeError(f"building {targets} ({mode}) failed:\n{result.stdout[-8000:]}{result.stderr}")
    return paths


@functools.cache
def load_ops():
    """torch.ops.fmoe_ext_emu: the ops of _C_cuda, same host code and kernels, run by the emulator on CPU tensors."""
    import torch

    import fmoe_ext.ops  # noqa: F401  (the schemas)

    library = torch.library.Library("fmoe_ext_emu", "DEF")
    for name in OPERATORS:
        schema = str(getattr(torch.ops.fmoe_ext, name).default._schema)
        library.define(schema.removeprefix("fmoe_ext::"))
    torch.ops.load_library(str(build("plain", OPS)[0]))
    torch.ops.fmoe_ext_emu.definitions = library  # they live as long as this object
    return torch.ops.fmoe_ext_emu


if __name__ == "__main__":
    mode = sys.argv[1] if len(sys.argv) > 1 else "plain"
    names = sys.argv[2:] or [*PROGRAMS, *([OPS] if mode == "plain" else [])]
    print("\n".join(map(str, build(mode, *names))))
