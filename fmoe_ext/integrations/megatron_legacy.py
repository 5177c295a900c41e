"""The names of fmoe_ext.integrations.megatron.runtime, where they were before."""

from fmoe_ext.integrations.megatron.runtime import (
    EXPERTS_TAG,
    data_parallel_groups,
    get_args,
    get_mpu,
    layer_arguments,
    stacks,
    stage_group,
)

__all__ = [
    "EXPERTS_TAG",
    "data_parallel_groups",
    "get_args",
    "get_mpu",
    "layer_arguments",
    "stacks",
    "stage_group",
]
