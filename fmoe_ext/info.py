"""`fmoe info`: the facts that a bug report quotes."""

import argparse
import importlib.util
import platform
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

import fmoe_ext
from fmoe_ext import _env, ops
from fmoe_ext._cli import add_json, as_json, run
from fmoe_ext.gpu import kernels as gpu_kernels
from fmoe_ext.gpu import proof as gpu_proof
from fmoe_ext.gpu.proof import Key
from fmoe_ext.gpu.report import summary
from fmoe_ext.ops.processor import refused_cpu_isa


def _native_modules() -> list[tuple[str, str]]:
    """(module, state) pairs; the state of a missing one says why."""
    modules = [("fmoe_ext._C", "loaded")]
    built = importlib.util.find_spec("fmoe_ext._C_cuda") is not None
    missing = ops.cuda_module_missing
    modules.append(
        (
            "fmoe_ext._C_cuda",
            "loaded" if missing is None else f"{'built, ' if built else ''}not loaded: {missing}",
        )
    )
    if importlib.util.find_spec("fmoe_ext._C_nccl") is not None:
        modules.append(("fmoe_ext._C_nccl", "built"))
    else:
        modules.append(("fmoe_ext._C_nccl", "not built (USE_NCCL=1 builds it)"))
    return modules


def _devices() -> list[tuple[str, str]]:
    if not torch.cuda.is_available():
        return [("CUDA devices", "none")]
    names = (torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    return [("CUDA devices", ", ".join(names)), ("torch's NCCL", nccl)]


def gpu_kernels_in_use(keys: Iterable[Key]) -> list[tuple[str, str]]:
    """(what, value) pairs: FMOE_GPU_KERNELS and, for each CUDA device, what has been proved on it."""
    lines = [("GPU kernels", f"FMOE_GPU_KERNELS={_env.get('FMOE_GPU_KERNELS')}")]
    for device, key in enumerate(keys):
        proof = gpu_proof.load(key, gpu_kernels.sources())
        text = summary(proof) if proof else [f"nothing proved: run `{gpu_kernels.command(device)}`"]
        lines += [(f"  device {device}", line) for line in text]
    return lines


def _cpu_kernels() -> str:
    """The instruction set in use, and the one that the system refuses this process, if there is one."""
    refused = refused_cpu_isa()
    return f"{ops.cpu_isa()} ({refused} is refused by the system)" if refused else ops.cpu_isa()


def _facts() -> list[tuple[str, str]]:
    """(what, value) pairs of this installation and machine."""
    num_devices = torch.cuda.device_count() if ops.cuda_module_missing is None else 0
    return [
        ("fmoe_ext", f"{fmoe_ext.__version__} ({Path(fmoe_ext.__file__).parent})"),
        ("torch", f"{torch.__version__}, CUDA {torch.version.cuda or 'none'}"),
        ("Python", f"{platform.python_version()}, {platform.platform()}"),
        (
            "CPU",
            f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads",
        ),
        ("CPU kernels", _cpu_kernels()),
        *_devices(),
        *((f"built with {key}", value) for key, value in ops.build_info().items()),
        *_native_modules(),
        *gpu_kernels_in_use(gpu_kernels.key_of(device) for device in range(num_devices)),
    ]


def _as_dict() -> dict[str, Any]:
    """_facts() by name, and the environment variables."""
    found: dict[str, Any] = {}
    for name, value in _facts():
        key = name.strip()
        found[key] = f"{found[key]}; {value}" if key in found else value
    found["environment"] = {
        v.name: {"value": _env.text(v.name), "default": v.default, "meaning": v.meaning}
        for v in _env.VARIABLES
    }
    return found


def report() -> str:
    lines = _facts()
    width = max(len(name) for name, _ in lines)
    text = [f"{name:<{width}}  {value}" for name, value in lines]
    text.append("environment variables (value; default):")
    for variable in _env.VARIABLES:
        text.append(f"  {variable.name}={_env.text(variable.name)} ({variable.default}) {variable.meaning}")
    return "\n".join(text)


def cmake_prefix_path() -> str:
    """Return the folders of fmoe-config.cmake and of torch's, for `cmake -DCMAKE_PREFIX_PATH=`."""
    folder = Path(fmoe_ext.__file__).resolve().parent / "share" / "cmake" / "fmoe"
    return f"{folder};{torch.utils.cmake_prefix_path}"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="fmoe info",
        description="Prints versions, native modules, devices and environment variables: quote it in a bug report.",
    )
    parser.add_argument(
        "--cmake", action="store_true", help="print the folders for CMAKE_PREFIX_PATH instead"
    )
    add_json(parser)
    options = parser.parse_args(arguments)
    if options.cmake and options.json:
        parser.error("--cmake and --json exclude each other")
    print(cmake_prefix_path() if options.cmake else as_json(_as_dict()) if options.json else report())


if __name__ == "__main__":
    run(main)
