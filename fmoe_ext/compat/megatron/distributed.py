"""fmoe.megatron.distributed: the data parallelism of fmoefied models of Megatron-LM v2.2 to v3.0.2."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import nn

from fmoe_ext.compat.megatron.runtime import data_parallel_groups
from fmoe_ext.distributed import DistributedGroupedDataParallel

_groups: dict[str, Any] | None = None  # set by hand or by _init(); None: Megatron's are used


def _set_groups(**kwargs: dist.ProcessGroup | None) -> None:
    """Set the groups of DistributedDataParallel by hand: dp_group, moe_group, gate_group."""
    global _groups
    _groups = kwargs


def _init() -> None:
    _set_groups(**data_parallel_groups())


def get_moe_group() -> dist.ProcessGroup | None:
    """Return the group over which experts are spread, Megatron's data-parallel group."""
    if _groups is None:
        _init()
    assert _groups is not None
    return _groups["moe_group"]


class DistributedDataParallel(DistributedGroupedDataParallel):
    """DistributedGroupedDataParallel over the groups of _set_groups() or Megatron's, for Megatron's schedules.

    State dicts are the module's, without a prefix. Raises ValueError for Megatron's contiguous gradient buffers,
    which this does not use.
    """

    module: Any

    def __init__(
        self,
        module: nn.Module,
        accumulate_allreduce_grads_in_fp32: bool = False,
        use_contiguous_buffers_in_ddp: bool = False,
    ) -> None:
        if accumulate_allreduce_grads_in_fp32 or use_contiguous_buffers_in_ddp:
            raise ValueError(
                "accumulate_allreduce_grads_in_fp32 and use_contiguous_buffers_in_ddp must be False, but got "
                f"{accumulate_allreduce_grads_in_fp32} and {use_contiguous_buffers_in_ddp}: run Megatron with "
                "--DDP-impl torch, or without --accumulate-allreduce-grads-in-fp32"
            )
        # of _set_groups() or _init(), if one was called before
        super().__init__(module, **(data_parallel_groups() if _groups is None else _groups))

    def set_input_tensor(self, *args: Any, **kwargs: Any) -> Any:
        """Call the wrapped module's, as Megatron's schedules do."""
        return self.module.set_input_tensor(*args, **kwargs)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Call the wrapped module's, without a prefix."""
        return self.module.state_dict(*args, **kwargs)

    def state_dict_for_save_checkpoint(self, *args: Any, **kwargs: Any) -> Any:
        """Call the wrapped module's, as Megatron's checkpoints do."""
        return self.module.state_dict_for_save_checkpoint(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Call the wrapped module's, without a prefix."""
        return self.module.load_state_dict(*args, **kwargs)
