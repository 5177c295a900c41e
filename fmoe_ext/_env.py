"""List every environment variable that fmoe_ext reads, with its type, default and meaning; no other module reads any.

Those whose meaning begins with "build" are read by setup.py and, MAX_JOBS, by torch's builder; setup.py reads CXX,
CUDA_HOME and CUDA_PATH too. `fmoe info` prints the list.
"""

import os
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any


@dataclass(frozen=True)
class _Variable:
    """An environment variable."""

    name: str
    type: type
    default: object
    meaning: str  # "build: ..." or "run: ..."
    choices: tuple[str, ...] = ()  # the only values; empty for any


VARIABLES = (
    _Variable(
        "FMOE_CUDA",
        bool,
        None,
        "build: 1 demands the CUDA kernels, 0 leaves them out; unset: built if torch has CUDA and nvcc is found",
    ),
    _Variable("USE_NCCL", bool, False, "build: 1 builds the NCCL exchange"),
    _Variable("NCCL_HOME", str, None, "build: folder with include/nccl.h and lib/libnccl.so.2"),
    _Variable("TORCH_CUDA_ARCH_LIST", str, "8.0+PTX;9.0a", "build: CUDA architectures"),
    _Variable("MAX_JOBS", int, None, "build: parallel compiler processes"),
    _Variable(
        "FMOE_SANITIZE", bool, False, "build: 1 compiles the CPU kernels with AddressSanitizer and UBSan"
    ),
    _Variable(
        "FMOE_EMULATE_AMX",
        bool,
        False,
        "build: 1 emulates the tile registers of AMX, for tests on a processor that has only AVX512_BF16",
    ),
    _Variable(
        "FMOE_DEBUG",
        bool,
        False,
        "run: 1 makes CUDA ops raise for expert indices out of range (synchronises)",
    ),
    _Variable(
        "FMOE_CPU_ISA",
        str,
        None,
        "run: most capable instruction set that the CPU kernels may use; the processor's fastest when unset",
        ("portable", "avx2", "avx512", "avx512_vnni", "avx512_bf16", "amx_bf16", "neon", "neon_bf16"),
    ),
    _Variable(
        "FMOE_GPU_KERNELS",
        str,
        "auto",
        "run: kernels of CUDA tensors; auto: those proved by python -m fmoe_ext.gpu prove, else the portable ones",
        ("auto", "proved", "all", "portable", "torch"),
    ),
    _Variable(
        "XDG_CACHE_HOME", str, None, "run: where fmoe_ext/gpu/ has what was proved; ~/.cache when unset"
    ),
    _Variable(
        "FMOE_RANKS_PER_NODE",
        int,
        None,
        'run: neighbouring ranks of a group that exchange="node" takes for one node; those of one host name when unset',
    ),
    _Variable("FMOE_TOPO_GPUS_PER_NODE", int, 8, "run: FasterGate's default gpus_per_node"),
    _Variable("FMOE_TOPO_OUTGOING_FRACTION", float, 0.14, "run: FasterGate's default outgoing_fraction"),
    _Variable(
        "FMOE_FASTER_GLBPLC_NETBW",
        float,
        None,
        "run: bytes a second of one rank, for shadowing; measured when unset",
    ),
    _Variable(
        "FMOE_FASTER_GLBPLC_GPUTP",
        float,
        None,
        "run: FLOP a second of one rank's experts, for shadowing; measured when unset",
    ),
)
_BY_NAME = MappingProxyType({variable.name: variable for variable in VARIABLES})


def text(name: str) -> str:
    """Return the text of a listed variable, unconverted but without spaces around it; "" when unset."""
    return os.environ.get(_BY_NAME[name].name, "").strip()


def get(name: str) -> Any:
    """Return the value of a listed variable, converted to its type; its default when unset or empty.

    Raises ValueError for a text that is not of its type, or none of its choices.
    """
    variable, value = _BY_NAME[name], text(name)
    if value == "":
        return variable.default
    if variable.type is bool:
        if value.lower() in ("1", "on", "true", "yes"):
            return True
        if value.lower() in ("0", "off", "false", "no"):
            return False
        raise ValueError(f"environment variable {name} must be 1 or 0, but is {value!r}")
    if variable.choices and value not in variable.choices:
        raise ValueError(
            f"environment variable {name} must be one of {', '.join(variable.choices)}, but is {value!r}"
        )
    try:
        return variable.type(value)
    except ValueError:
        raise ValueError(
            f"environment variable {name} must be of type {variable.type.__name__}, but is {value!r}"
        ) from None


def unlisted(name: str) -> str | None:
    """Return the text of any variable, None when unset; for FastMoE's functions that take a name only."""
    return os.environ.get(name)


def everything() -> dict[str, str]:
    """Return the whole environment, for replace() in a process that this one starts."""
    return dict(os.environ)


def replace(environment: dict[str, str]) -> None:
    """Give this process, and those that it starts, another environment."""
    os.environ.clear()
    os.environ.update(environment)
