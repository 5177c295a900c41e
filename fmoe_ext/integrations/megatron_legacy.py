"""Megatron-LM of FastMoE's time (v2.2 to v3.0): layers in model.language_model, options in get_args(), groups in mpu.

Experts are spread over Megatron's data-parallel group. Tensor-parallel ranks have the same tokens: each computes a
slice of them with whole experts.
"""

import sys
from functools import partial

import torch.distributed as dist
from torch import nn

from fmoe_ext.gates import find_gate
from fmoe_ext.integrations.recognize import GATED, simplify
from fmoe_ext.integrations.target import DenseMLP, Target
from fmoe_ext.integrations.tensor_parallel import whole

KIND = "Megatron-LM before Megatron-core"
LOOKED_FOR = (
    "language_model.transformer.layers[i].mlp, language_model.encoder... or language_model.decoder..."
)
STACKS_OF_VERSION = (
    ("v2.2", ("transformer",)),
    ("v2.5", ("encoder", "decoder")),
    ("v3.0.2", ("encoder", "decoder")),
    (None, ("transformer", "encoder", "decoder")),
)
EXPERTS_TAG = "experts"  # param.dp_comm of experts that tensor-parallel ranks have copies of


def get_args():
    """Megatron's parsed options; RuntimeError where no Megatron-LM has been imported."""
    for name in ("megatron", "megatron.training"):
        module = sys.modules.get(name)
        if hasattr(module, "get_args"):
            return module.get_args()
    raise RuntimeError("Megatron-LM is not imported: `from megatron import get_args` has to work before")


def get_mpu():
    """Megatron's module of process groups; RuntimeError where no Megatron-LM has been imported."""
    megatron = sys.modules.get("megatron")
    mpu = sys.modules.get("megatron.mpu", getattr(megatron, "mpu", None))
    mpu = sys.modules.get("megatron.core.parallel_state") if mpu is None else mpu
    if mpu is None:
        raise RuntimeError("Megatron-LM is not imported: `from megatron import mpu` has to work before")
    return mpu


def stacks(model, version=None):
    """(name, layers) of the stacks of transformer layers of a model of this version; of any version for None."""
    names = dict(STACKS_OF_VERSION)
    if version not in names:
        known = ", ".join(map(repr, names))
        raise ValueError(f"megatron_version must be one of {known}, but got {version!r}")
    while isinstance(getattr(model, "module", None), nn.Module):
        model = model.module
    language_model = getattr(model, "language_model", None)
    found = ((name, getattr(getattr(language_model, name, None), "layers", None)) for name in names[version])
    return [(name, layers) for name, layers in found if layers is not None]


def find(model, options):
    """The MLPs of a legacy Megatron model; all ranks call it together if it is tensor parallel."""
    if type(model).__module__.split(".")[0] == "transformers":
        return []  # some have a language_model too
    found = [
        (f"language_model.{name}.layers.{i}.mlp", layer)
        for name, layers in stacks(model, options.megatron_version)
        for i, layer in enumerate(layers)
        if hasattr(layer, "mlp")
    ]
    if not found:
        return []
    from fmoe_ext.megatron.balance import generate_megatron_gate_hook, reset_gate_hook

    args = get_args()
    arguments = layer_arguments(args, options.distributed_experts)
    given = (getattr(args, name, None) for name in ("fmoe_num_experts", "num_experts"))
    num_expert = options.num_experts or next((n for n in given if n), None)
    for name, value in (("top_k", getattr(args, "top_k", None)), ("num_expert", num_expert)):
        if value is not None:
            arguments[name] = value
    if options.gate is None and getattr(args, "balance_strategy", None):
        arguments["gate"] = find_gate(args.balance_strategy)
    num_experts = (num_expert or 0) * arguments["world_size"]
    return [
        Target(
            path=path,
            parent=layer,
            attribute="mlp",
            dense=_read(layer.mlp, args),
            wrap=as_megatron_mlp,
            finish=partial(reset_gate_hook, len(found)),
            moe_kwargs=arguments | {"gate_hook": generate_megatron_gate_hook(i, num_experts)},
        )
        for i, (path, layer) in enumerate(found)
    ]


def layer_arguments(args, distributed_experts=True):
    """Arguments of FMoE for this layout of processes; all ranks call it together if it is tensor parallel."""
    if not dist.is_initialized():
        return {"world_size": 1, "expert_dp_comm": "dp"}
    mpu = get_mpu()
    data_group = mpu.get_data_parallel_group()
    arguments = {"world_size": 1, "expert_dp_comm": "dp", "gate_group": data_group}
    if distributed_experts and dist.get_world_size(data_group) > 1:
        arguments |= {
            "world_size": dist.get_world_size(data_group),
            "moe_group": data_group,
            "expert_dp_comm": "none",
        }
    if getattr(args, "tensor_model_parallel_size", 1) > 1:
        arguments |= {
            "slice_group": mpu.get_tensor_model_parallel_group(),
            "gate_group": stage_group(args),
            "expert_dp_comm": EXPERTS_TAG if arguments["world_size"] > 1 else "gate",
        }
    return arguments


def stage_group(args):
    """A new group of all ranks of this rank's pipeline stage; all ranks of the job call it."""
    world_size = dist.get_world_size()
    stage_size = world_size // getattr(args, "pipeline_model_parallel_size", 1)
    for first in range(0, world_size, stage_size):
        group = dist.new_group(range(first, first + stage_size))
        if first <= dist.get_rank() < first + stage_size:
            mine = group
    return mine


def data_parallel_groups():
    """Groups of a DistributedGroupedDataParallel for fmoefied Megatron models; all ranks of the job call it."""
    args, mpu = get_args(), get_mpu()
    data_group = mpu.get_data_parallel_group()
    groups = {"dp_group": data_group, "moe_group": data_group, "gate_group": stage_group(args)}
    if getattr(args, "tensor_model_parallel_size", 1) > 1:
        groups[f"{EXPERTS_TAG}_group"] = mpu.get_tensor_model_parallel_group()
    return groups


def as_megatron_mlp(moe):
    """The layer, called as Megatron calls an MLP: its parameters keep the names that they have in FastMoE."""
    moe.register_forward_hook(_add_zero_bias)
    return moe


def _add_zero_bias(moe, args, output):
    return output, output.new_zeros(moe.d_model)


def _read(mlp, args):
    first, second = getattr(mlp, "dense_h_to_4h", None), getattr(mlp, "dense_4h_to_h", None)
    d_hidden = getattr(args, "ffn_hidden_size", None) or 4 * args.hidden_size
    activation = simplify(getattr(mlp, "activation_func", "gelu"))
    if activation == "gelu" and getattr(mlp, "bias_gelu_fusion", False):
        activation = "gelu_tanh"  # Megatron's fused kernel computes this one
    gated = bool(getattr(args, "swiglu", False))
    if first is None or second is None:
        reason = f"{type(mlp).__name__} has no dense_h_to_4h and dense_4h_to_h"
        return DenseMLP(args.hidden_size, d_hidden, activation, why_unreadable=reason)
    if gated:
        activation = GATED["silu"]
    parameters = (first.weight, first.bias, second.weight, second.bias)
    given = (None if p is None else p.detach() for p in parameters)
    dense = DenseMLP(args.hidden_size, d_hidden, activation, *given)
    if not dist.is_initialized():
        return dense
    return whole(dense, gated, get_mpu().get_tensor_model_parallel_group())
