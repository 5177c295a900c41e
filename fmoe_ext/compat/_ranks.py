"""Exchange rows and counts with other ranks, for functions.py, and for the gates and policies that count over ranks.

FastMoE's functions take counts and no group: the group is the one of the last ensure_comm(), kept in _State. A backward
exchanges in the group of its forward, which its node keeps, whatever ensure_comm() came since. Counts are as in
functions.py: local_expert_count is what this rank sends to each expert, global_expert_count what each rank sends to the
experts here.

A rank sends rows in the order (rank, expert). What it receives is in the order (rank, expert), too, now by sending
rank, but an expert's rows must be together: to_experts() sorts to (expert, rank) after the exchange, from_experts()
undoes that before the exchange back. With 2 ranks, 2 experts here, a..d from rank 0 and e..g from rank 1:

    received   a b | c d || e | f g        rank 0: expert 0, expert 1; rank 1: expert 0, expert 1
    sorted     a b e | c d f g             expert 0, expert 1
"""

from typing import Any

import torch

from fmoe_ext.ep import exchange
from fmoe_ext.ep.process_groups import Group
from fmoe_ext.ep.ranks import gather_rows


class _State:
    group: Group = None  # None: the default group


def set_group(group: Group) -> None:
    _State.group = group


def get_group() -> Group:
    return _State.group


def exchange_counts(local_expert_count: torch.Tensor, world_size: int) -> torch.Tensor:
    """Exchange local_expert_count [world_size * num_expert] -> what each rank sends to the experts here."""
    if world_size == 1:
        return local_expert_count.clone()
    counts = local_expert_count.view(world_size, -1)
    return exchange.exchange_counts(counts, exchange.register_group(_State.group)).flatten()


def to_host(count: torch.Tensor, world_size: int, group: Group) -> torch.Tensor:
    """Copy a count that may have come from other ranks; RuntimeError if its exchange failed meanwhile."""
    count = count.cpu()  # waits for the exchange, so that check() sees its end
    if world_size > 1:
        exchange.check(exchange.register_group(group))
    return count


def to_experts(
    rows: torch.Tensor,
    local_expert_count: torch.Tensor,
    global_expert_count: torch.Tensor,
    world_size: int,
    group: Group,
) -> torch.Tensor:
    """Send rows in the order (rank, expert) -> the rows for the experts here, in the order (expert, rank)."""
    if world_size == 1:
        return rows
    received = _exchange(rows, local_expert_count, global_expert_count, world_size, group)
    return received[_expert_major(global_expert_count, world_size, group, rows.device)]


def from_experts(
    rows: torch.Tensor,
    local_expert_count: torch.Tensor,
    global_expert_count: torch.Tensor,
    world_size: int,
    group: Group,
) -> torch.Tensor:
    """Reverse to_experts()."""
    if world_size == 1:
        return rows
    order = _expert_major(global_expert_count, world_size, group, rows.device)
    # the inverse permutation, as an assignment
    by_rank = torch.empty_like(rows)
    by_rank[order] = rows
    return _exchange(by_rank, global_expert_count, local_expert_count, world_size, group)


def sum_over_ranks(x: torch.Tensor, world_size: int) -> torch.Tensor:
    """Return the sum of x over the ranks."""
    return torch.stack(all_gather(x[None], world_size, _State.group)).sum(0).squeeze(0)


def all_gather(x: torch.Tensor, world_size: int, group: Any) -> list[torch.Tensor]:
    """Gather x of every rank of the group; the numbers of rows may differ."""
    return [x] if world_size == 1 else gather_rows(x, group)


def _exchange(
    rows: torch.Tensor, send_count: torch.Tensor, recv_count: torch.Tensor, world_size: int, group: Group
) -> torch.Tensor:
    # rows for each rank, and from each rank
    counts = (to_host(count, world_size, group) for count in (send_count, recv_count))
    send, recv = (count.view(world_size, -1).sum(1).tolist() for count in counts)
    return exchange.global_exchange(rows, send, recv, exchange.register_group(group))


def _expert_major(
    global_expert_count: torch.Tensor, world_size: int, group: Group, device: torch.device
) -> torch.Tensor:
    """Return, for each row in the order (expert, rank), its position in the order (rank, expert)."""
    count = to_host(global_expert_count, world_size, group).view(world_size, -1)
    # [rank, expert]: the first row of each part
    begin = (count.flatten().cumsum(0) - count.flatten()).view_as(count)
    parts = [
        torch.arange(int(begin[rank, expert]), int(begin[rank, expert] + count[rank, expert]), device="cpu")
        for expert in range(count.shape[1])
        for rank in range(world_size)
    ]
    return torch.cat(parts).to(device)
