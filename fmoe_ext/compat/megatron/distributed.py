"""fmoe.megatron.distributed."""

from fmoe_ext.compat._core import core

_groups = None


def _set_groups(**kwargs):
    """Sets the groups of DistributedDataParallel by hand: dp_group, moe_group, gate_group."""
    global _groups
    _groups = kwargs


def get_moe_group():
    """The group over which experts are spread: Megatron's data-parallel group."""
    if _groups is None:
        _init()
    return _groups["moe_group"]


def _init():
    _set_groups(**core("integrations.megatron", "data_parallel_groups", "fmoe.megatron.distributed")())


class DistributedDataParallel:
    """DistributedGroupedDataParallel over Megatron's groups; calling this class builds one."""

    def __new__(cls, module, accumulate_allreduce_grads_in_fp32=False, use_contiguous_buffers_in_ddp=False):
        if accumulate_allreduce_grads_in_fp32 or use_contiguous_buffers_in_ddp:
            raise ValueError(
                "fmoe.megatron.DistributedDataParallel supports neither accumulate_allreduce_grads_in_fp32 nor "
                "use_contiguous_buffers_in_ddp"
            )
        if _groups is None:
            _init()
        build = core(
            "integrations.megatron", "DistributedDataParallel", "fmoe.megatron.DistributedDataParallel"
        )
        return build(module, **_groups)
