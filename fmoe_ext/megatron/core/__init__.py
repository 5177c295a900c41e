"""Megatron-core, 0.15 and newer: MoE layers that replace a model's MLPs, or stand in its layer specification.

Experts are spread over Megatron's expert-parallel group; its DistributedDataParallel, optimizers and dist_checkpointing
treat them as its own. table.py: each MoE option of TransformerConfig; gate.py: the gate that a config describes;
layer.py: the layer; specs.py: the layer in Megatron's specifications; dense.py: the MLPs that fmoefy replaces;
arguments.py: what both need.
"""

from fmoe_ext.megatron.core.arguments import layer_arguments, process_groups
from fmoe_ext.megatron.core.dense import KIND, LOOKED_FOR, find
from fmoe_ext.megatron.core.layer import MegatronCoreMLP
from fmoe_ext.megatron.core.specs import MegatronCoreMoE, moe_layer_spec, with_experts
from fmoe_ext.megatron.core.table import OPTIONS, check_options

__all__ = [
    "KIND",
    "LOOKED_FOR",
    "OPTIONS",
    "MegatronCoreMLP",
    "MegatronCoreMoE",
    "check_options",
    "find",
    "layer_arguments",
    "moe_layer_spec",
    "process_groups",
    "with_experts",
]
