"""Megatron-core, 0.15 and newer: MoE layers in the place of a model's MLPs, or in its layer specification.

Experts are spread over Megatron's expert-parallel group; Megatron's DistributedDataParallel, optimizers and
dist_checkpointing treat them as they treat Megatron's own. options.py says what becomes of each MoE option of
TransformerConfig, gate.py builds the gate that the config describes, layer.py is the layer itself, dense.py reads the
MLPs that fmoefy replaces, arguments.py has what both need.
"""

from fmoe_ext.integrations.megatron.core.arguments import layer_arguments, process_groups
from fmoe_ext.integrations.megatron.core.dense import KIND, LOOKED_FOR, find
from fmoe_ext.integrations.megatron.core.layer import MegatronCoreMLP, MegatronCoreMoE, moe_layer_spec
from fmoe_ext.integrations.megatron.core.options import OPTIONS, check_options

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
]
