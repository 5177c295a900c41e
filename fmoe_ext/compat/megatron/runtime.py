"""Read Megatron-LM's options, process groups and stacks of layers, for v2.2 to v3.0.2; add FastMoE's options to it.

Megatron itself is not imported: whatever version a program has imported is found in sys.modules. The layout:

* Experts are spread over Megatron's data-parallel group, or copied on it (distributed_experts=False).
* Tensor-parallel ranks have the same tokens. Each computes a slice of them with whole experts (slice_group), so that
  they have copies of the experts, and different gradients.
* The gate's gradient is reduced over both groups, which together are the pipeline stage.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import torch.distributed as dist
from torch import nn

# (version, attributes of language_model that have layers)
_STACKS_OF_VERSION = (
    ("v2.2", ("transformer",)),
    ("v2.5", ("encoder", "decoder")),
    ("v3.0.2", ("encoder", "decoder")),
    (None, ("transformer", "encoder", "decoder")),
)
EXPERTS_TAG = "experts"  # param.dp_comm of experts that tensor-parallel ranks have copies of


def add_fmoe_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add FastMoE's options to Megatron's parser; --num-experts becomes --fmoe-num-experts where it is taken."""
    group = parser.add_argument_group(title="fastmoe")
    group.add_argument("--fmoefy", action="store_true", help="replace the MLPs by MoE layers")
    try:
        group.add_argument("--num-experts", type=int, default=None, help="experts of each rank")
    except argparse.ArgumentError:
        group.add_argument("--fmoe-num-experts", type=int, default=None, help="experts of each rank")
    group.add_argument("--top-k", type=int, default=2, help="experts of each token")
    group.add_argument("--balance-loss-weight", type=float, default=1, help="factor of the balance loss")
    group.add_argument("--balance-strategy", type=str, default=None, help="gate: naive, noisy, gshard, ...")
    group.add_argument("--hidden-hidden-size", type=int, default=None, help="hidden width of an expert")
    return parser


def get_args() -> Any:
    """Return Megatron's parsed options; RuntimeError where no Megatron-LM has been imported."""
    for name in ("megatron", "megatron.training"):
        module: Any = sys.modules.get(name)
        if hasattr(module, "get_args"):
            return module.get_args()
    raise RuntimeError("Megatron-LM is not imported: `from megatron import get_args` has to work before")


def get_mpu() -> Any:
    """Return Megatron's module of process groups; RuntimeError where no Megatron-LM has been imported."""
    megatron = sys.modules.get("megatron")
    mpu = sys.modules.get("megatron.mpu", getattr(megatron, "mpu", None))
    # v3.0.2 has it in megatron.core
    mpu = sys.modules.get("megatron.core.parallel_state") if mpu is None else mpu
    if mpu is None:
        raise RuntimeError("Megatron-LM is not imported: `from megatron import mpu` has to work before")
    return mpu


def stacks(model: Any, version: str | None = None) -> list[tuple[str, Any]]:
    """Find (name, layers) of the stacks of transformer layers of a model of this version; of any version for None."""
    names = dict(_STACKS_OF_VERSION)
    if version not in names:
        known = ", ".join(map(repr, names))
        raise ValueError(f"megatron_version must be one of {known}, but got {version!r}")
    while isinstance(getattr(model, "module", None), nn.Module):  # DistributedDataParallel, Float16Module
        model = model.module
    language_model = getattr(model, "language_model", None)
    found = ((name, getattr(getattr(language_model, name, None), "layers", None)) for name in names[version])
    return [(name, layers) for name, layers in found if layers is not None]


def layer_arguments(args: Any, distributed_experts: bool = True) -> dict[str, Any]:
    """Make the arguments of FMoE for this layout of processes; all ranks call it together if it is tensor parallel."""
    if not dist.is_initialized():
        return {"world_size": 1, "expert_dp_comm": "dp"}
    # data parallel alone, then expert parallel over the same ranks, then tensor parallel
    mpu = get_mpu()
    data_group = mpu.get_data_parallel_group()
    arguments: dict[str, Any] = {"world_size": 1, "expert_dp_comm": "dp", "gate_group": data_group}
    if distributed_experts and dist.get_world_size(data_group) > 1:
        arguments |= {
            "world_size": dist.get_world_size(data_group),
            "moe_group": data_group,
            "expert_dp_comm": "none",
        }
    if getattr(args, "tensor_model_parallel_size", 1) > 1:
        arguments |= {
            "slice_group": mpu.get_tensor_model_parallel_group(),
            "gate_group": _stage_group(args),
            # without expert parallelism all ranks of the stage have copies of the experts, as of the gate
            "expert_dp_comm": EXPERTS_TAG if arguments["world_size"] > 1 else "gate",
        }
    return arguments


def _stage_group(args: Any) -> dist.ProcessGroup:
    """Make a group of all ranks of this rank's pipeline stage; all ranks of the job call it."""
    world_size = dist.get_world_size()
    # Megatron numbers ranks stage by stage
    stage_size = world_size // getattr(args, "pipeline_model_parallel_size", 1)
    # new_group() is collective: every rank makes the groups of all stages, and keeps its own
    for first in range(0, world_size, stage_size):
        group = dist.new_group(range(first, first + stage_size))
        if first <= dist.get_rank() < first + stage_size:
            mine = group
    return mine


def data_parallel_groups() -> dict[str, dist.ProcessGroup]:
    """Make the groups for DistributedGroupedDataParallel of fmoefied Megatron models; all ranks call it."""
    args, mpu = get_args(), get_mpu()
    data_group = mpu.get_data_parallel_group()
    groups = {"dp_group": data_group, "moe_group": data_group, "gate_group": _stage_group(args)}
    if getattr(args, "tensor_model_parallel_size", 1) > 1:
        # copies of an expert, whose gradients are of different slices of the tokens
        groups[f"{EXPERTS_TAG}_group"] = mpu.get_tensor_model_parallel_group()
    return groups
