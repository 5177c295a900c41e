"""The names of fmoe_ext.integrations.megatron.core, where they were before."""

from fmoe_ext.integrations.megatron.core import (
    MegatronCoreMLP,
    MegatronCoreMoE,
    layer_arguments,
    moe_layer_spec,
    process_groups,
)

__all__ = ["MegatronCoreMLP", "MegatronCoreMoE", "layer_arguments", "moe_layer_spec", "process_groups"]
