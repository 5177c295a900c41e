"""Give Megatron-core, 0.15 and newer, our MoE layers: in its layer specification, or in place of a model's MLPs.

Megatron builds a model from a specification, a tree that names a module for each part of a layer. with_experts()
copies the tree with our layer where MoELayer stood, and Megatron builds ours with its config and process groups
(specs.py). A model that is built already has dense MLPs, which fmoefy reads and replaces (dense.py). Either way the
layer is called as an MLP is, [s, b, h] -> ([s, b, h], None), and its parameters carry the attributes by which
Megatron's DistributedDataParallel, optimizers and dist_checkpointing tell experts from the rest (layer.py). The gate
is built from the options of TransformerConfig (gate.py), every one of which is honoured, without effect or refused
(table.py). Experts are spread over Megatron's expert-parallel group (arguments.py); with expert tensor parallelism
each rank has a part of every expert's width (expert_tensor.py).
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
