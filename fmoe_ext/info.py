"""The command `fmoe info`: facts for a bug report; or what is in a model's files, and whether memory holds it."""

import argparse
import importlib.util
import math
import platform
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

import fmoe_ext
from fmoe_ext import _env, ops
from fmoe_ext._cli import add_json, as_json, positive_float, positive_int, reason, run
from fmoe_ext.ep.cost import Hardware
from fmoe_ext.gpu import kernels as gpu_kernels
from fmoe_ext.gpu import proof as gpu_proof
from fmoe_ext.gpu.proof import Key, summary
from fmoe_ext.memory import memory_of
from fmoe_ext.ops.processor import refused_cpu_isa


def gpu_kernels_in_use(keys: Iterable[Key]) -> list[tuple[str, str]]:
    """List (what, value): FMOE_GPU_KERNELS and, for each CUDA device, what has been proved on it."""
    lines = [("GPU kernels", f"FMOE_GPU_KERNELS={_env.get('FMOE_GPU_KERNELS')}")]
    for device, key in enumerate(keys):
        proof = gpu_proof.load(key, gpu_kernels.sources())
        text = summary(proof) if proof else [f"nothing proved: run `{gpu_kernels.command(device)}`"]
        lines += [(f"  device {device}", line) for line in text]
    return lines


def _facts() -> list[tuple[str, str]]:
    """List (what, value) of this installation and machine."""
    # without the CUDA module no kernels were chosen for devices
    num_devices = torch.cuda.device_count() if ops.cuda_module_missing is None else 0
    refused = refused_cpu_isa()  # an instruction set that the system keeps from this process
    devices = [("CUDA devices", "none")]
    if torch.cuda.is_available():
        names = (torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
        devices = [("CUDA devices", ", ".join(names)), ("torch's NCCL", nccl)]
    cuda, has_nccl = "loaded", importlib.util.find_spec("fmoe_ext._C_nccl") is not None
    if ops.cuda_module_missing is not None:
        built = importlib.util.find_spec("fmoe_ext._C_cuda") is not None
        cuda = f"{'built, ' if built else ''}not loaded: {ops.cuda_module_missing}"
    return [
        ("fmoe_ext", f"{fmoe_ext.__version__} ({Path(fmoe_ext.__file__).parent})"),
        ("torch", f"{torch.__version__}, CUDA {torch.version.cuda or 'none'}"),
        ("Python", f"{platform.python_version()}, {platform.platform()}"),
        (
            "CPU",
            f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads",
        ),
        ("CPU kernels", ops.cpu_isa() + (f" ({refused} is refused by the system)" if refused else "")),
        *devices,
        *((f"built with {key}", value) for key, value in ops.build_info().items()),
        ("fmoe_ext._C", "loaded"),
        ("fmoe_ext._C_cuda", cuda),
        ("fmoe_ext._C_nccl", "built" if has_nccl else "not built (USE_NCCL=1 builds it)"),
        *gpu_kernels_in_use(gpu_kernels.key_of(device) for device in range(num_devices)),
    ]


def report() -> str:
    """Write the facts of this installation, and the environment variables, as lines."""
    lines = _facts()
    width = max(len(name) for name, _ in lines)
    text = [f"{name:<{width}}  {value}" for name, value in lines]
    text.append("environment variables (value; default):")
    for variable in _env.VARIABLES:
        text.append(f"  {variable.name}={_env.text(variable.name)} ({variable.default}) {variable.meaning}")
    return "\n".join(text)


def of_model(
    model: str | Path,
    memory: int | str = "auto",
    length: int = 2048,
    batch: int = 1,
    tflops: float | None = None,
) -> dict[str, Any]:
    """Return facts about a model's files, and what stream() and a training step on one rank need.

    memory: bytes for the model, or a text as "8GiB" (memory_of). length, batch: tokens of a sequence and sequences of
    the step. tflops: what the machine reaches, in 10^12 operations a second; by default it is measured with a product
    of matrices. Raises CheckpointError for files that open_model() refuses, ValueError for another memory, and
    for a configuration that planning.sizes cannot count.
    """
    # not at the top: a bug report needs none of them
    from fmoe_ext.finetune.streaming.budget import least_memory
    from fmoe_ext.model_files import open_model
    from fmoe_ext.planning.layouts import Layout, estimate
    from fmoe_ext.planning.sizes import sizes_of

    # 1. The files: bytes of experts, which can be streamed, and of the rest, which stays in memory.
    files = open_model(model)
    skeleton = files.skeleton()
    sizes, _ = sizes_of(str(files.path))
    layers = [*files.of(skeleton).layers.values()]
    of_experts = sum(span.num_bytes for layer in layers for span in layer.every_span())
    resident = sum(files.formats.values()) - of_experts
    # 2. The memory: all experts in it, or streamed.
    free = memory_of(memory).num_bytes
    whole, streamed = least_memory(layers, resident, is_whole=True), least_memory(layers, resident)
    # 3. The time of a training step on one rank, without exchange (infinite bandwidth) and without reads.
    reached = tflops
    if not reached:  # a product of float32 matrices on this machine's CPU, the best of three
        size, seconds = 1024, []
        x = torch.ones(size, size, device="cpu")
        for _ in range(4):  # the first one starts threads, and does not count
            begin = time.perf_counter()
            x @ x
            seconds.append(time.perf_counter() - begin)
        reached = 2 * size**3 / min(seconds[1:]) / 1e12
    step = estimate(
        sizes.layers(length, files.dtype.itemsize),
        Layout(1, 1, 1, "none", batch),
        batch,
        Hardware(math.inf, reached * 1e12),
    )
    experts = sum(block.experts for block in sizes.blocks)
    active = sum(block.active for block in sizes.blocks)
    parameters = sizes.rest + sizes.head + sum(block.dense for block in sizes.blocks) + experts
    return {
        "model": str(files.path),
        "architecture": type(skeleton).__name__,
        "model_type": files.config.model_type,
        "layers": len(sizes.blocks),
        "layers_with_experts": sum(block.is_routed for block in sizes.blocks),
        "experts": sizes.num_experts,
        "experts_per_token": sizes.top_k,
        "parameters": parameters,
        "active_parameters": round(parameters - experts + active),
        "files": len(files.weights),
        "bytes": sum(file.stat().st_size for file in files.weights),
        "bytes_of_experts": of_experts,
        "formats": dict(files.formats),
        "packed_by": files.packed_by,
        "free_memory": free,
        "memory_whole": whole,
        "memory_streamed": streamed,
        "fits": "whole" if whole <= free else "streamed" if layers and streamed <= free else "not",
        "tokens_of_a_step": batch * length,
        "tflops": reached,
        "minutes_of_a_step": step.seconds / 60,
    }


def _as_text(found: dict[str, Any]) -> str:
    """Write the facts of of_model() as lines."""
    by_size = sorted(found["formats"].items(), key=lambda item: -item[1])
    formats = ", ".join(f"{name} {num_bytes:,} bytes" for name, num_bytes in by_size)
    fits = {
        "whole": "all experts fit in it",
        "streamed": "experts are read from the files as they are needed: fmoe_ext.stream()",
        "not": "too little, even for stream()",
    }
    rows = {
        "model": found["model"],
        "architecture": f"{found['architecture']} ({found['model_type']})",
        "layers": f"{found['layers']}, {found['layers_with_experts']} of them with experts",
        "experts": f"{found['experts']} a layer, {found['experts_per_token']} for each token",
        "parameters": f"{found['parameters']:,}, {found['active_parameters']:,} active for a token",
        "files": f"{found['files']}, {found['bytes']:,} bytes, {found['bytes_of_experts']:,} of experts",
        "weights": formats + (f"; packed by {found['packed_by']}" if found["packed_by"] else ""),
        "memory": f"{found['free_memory']:,} bytes: {fits[found['fits']]}",
        "stream needs": f"{found['memory_streamed']:,} bytes, {found['memory_whole']:,} to keep all experts",
        "training step": f"{found['minutes_of_a_step']:.3g} minutes for {found['tokens_of_a_step']:,} tokens at "
        f"{found['tflops']:.3g} TFLOP/s, without reads",
    }
    width = max(map(len, rows))
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows.items())


def cmake_prefix_path() -> str:
    """Return the folders of fmoe-config.cmake and of torch's, for `cmake -DCMAKE_PREFIX_PATH=`."""
    folder = Path(fmoe_ext.__file__).resolve().parent / "share" / "cmake" / "fmoe"
    return f"{folder};{torch.utils.cmake_prefix_path}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(
        prog="fmoe info",
        description="Prints versions, native modules, devices and environment variables: quote it in a bug report. "
        "Given a model, prints what is in its files and whether they fit in this machine's memory.",
    )
    parser.add_argument("model", nargs="?", help="folder or name of a model, or a GGUF file")
    parser.add_argument("--memory", default="auto", help='for the model, as "8GiB"; by default what is free')
    parser.add_argument(
        "--length", type=positive_int, default=2048, help="tokens of a sequence, 2048 by default"
    )
    parser.add_argument("--batch", type=positive_int, default=1, help="sequences of a step, 1 by default")
    parser.add_argument(
        "--tflops", type=positive_float, help="10^12 operations a second, measured by default"
    )
    parser.add_argument(
        "--cmake", action="store_true", help="print the folders for CMAKE_PREFIX_PATH instead"
    )
    add_json(parser)
    options = parser.parse_args(arguments)
    if options.cmake and options.json:
        parser.error("--cmake and --json exclude each other")
    if options.model is not None:
        if options.cmake:
            parser.error("--cmake is of this installation: leave the model out")
        try:
            found = of_model(options.model, options.memory, options.length, options.batch, options.tflops)
        except (RuntimeError, ValueError, OSError, ImportError) as error:  # CheckpointError is a RuntimeError
            sys.exit(f"error: {reason(error)}")
        print(as_json(found) if options.json else _as_text(found))
        return
    for name in ("memory", "length", "batch", "tflops"):
        if getattr(options, name) != parser.get_default(name):
            parser.error(f"--{name} is of a model: name one")
    if options.json:
        facts: dict[str, Any] = {}
        for name, value in _facts():
            key = name.strip()
            # a device has several lines of one name
            facts[key] = f"{facts[key]}; {value}" if key in facts else value
        facts["environment"] = {
            v.name: {"value": _env.text(v.name), "default": v.default, "meaning": v.meaning}
            for v in _env.VARIABLES
        }
        print(as_json(facts))
        return
    print(cmake_prefix_path() if options.cmake else report())


if __name__ == "__main__":
    run(main)
