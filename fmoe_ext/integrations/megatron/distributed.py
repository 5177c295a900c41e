"""The data parallelism of fmoefied legacy Megatron models."""

from __future__ import annotations

from typing import Any

from torch import nn

from fmoe_ext.distributed import DistributedGroupedDataParallel
from fmoe_ext.integrations.megatron.runtime import data_parallel_groups


class DistributedDataParallel(DistributedGroupedDataParallel):
    """DistributedGroupedDataParallel over Megatron's groups, with the methods that Megatron calls on its own.

    State dicts are those of the module, without a prefix. groups: <tag>_group arguments in the place of Megatron's.
    Raises ValueError for Megatron's contiguous gradient buffers, which this does not use.
    """

    module: Any

    def __init__(
        self,
        module: nn.Module,
        accumulate_allreduce_grads_in_fp32: bool = False,
        use_contiguous_buffers_in_ddp: bool = False,
        *,
        groups: dict[str, Any] | None = None,
    ):
        if accumulate_allreduce_grads_in_fp32 or use_contiguous_buffers_in_ddp:
            raise ValueError(
                "accumulate_allreduce_grads_in_fp32 and use_contiguous_buffers_in_ddp must be False, but got "
                f"{accumulate_allreduce_grads_in_fp32} and {use_contiguous_buffers_in_ddp}: run Megatron with "
                "--DDP-impl torch, or without --accumulate-allreduce-grads-in-fp32"
            )
        super().__init__(module, **(data_parallel_groups() if groups is None else groups))

    def set_input_tensor(self, *args: Any, **kwargs: Any) -> Any:
        """The wrapped module's, which Megatron's schedules call."""
        return self.module.set_input_tensor(*args, **kwargs)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The wrapped module's, without a prefix."""
        return self.module.state_dict(*args, **kwargs)

    def state_dict_for_save_checkpoint(self, *args: Any, **kwargs: Any) -> Any:
        """The wrapped module's, which Megatron's checkpoints call."""
        return self.module.state_dict_for_save_checkpoint(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The wrapped module's, without a prefix."""
        return self.module.load_state_dict(*args, **kwargs)
