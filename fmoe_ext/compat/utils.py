"""fmoe.utils."""

import torch.distributed as dist


def get_torch_default_comm() -> dist.ProcessGroup:
    """The default process group; RuntimeError if there is none."""
    if not dist.is_initialized() or dist.group.WORLD is None:
        raise RuntimeError("there is no default process group: call torch.distributed.init_process_group()")
    return dist.group.WORLD


def get_rank_0_in_comm(comm: dist.ProcessGroup) -> int:
    """The number in the whole job of the first rank of a group."""
    return dist.get_process_group_ranks(comm)[0]


__all__ = ["get_rank_0_in_comm", "get_torch_default_comm"]
