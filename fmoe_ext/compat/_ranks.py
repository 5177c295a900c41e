"""Exchanges of fmoe.functions with other ranks; everything that needs a process group goes through here.

FastMoE's functions take counts and no group: the group is the one of the last ensure_comm(), kept in _State. A rank
sends rows in the order (rank, expert) and wants those that it receives in the order (expert, rank), so that each
expert's are together: to_experts() sorts after the exchange, from_experts() undoes it before.
"""

from typing import Any

import torch

from fmoe_ext.ep import exchange
from fmoe_ext.ep.process_groups import Group
from fmoe_ext.ep.ranks import gather_rows


class _State:
    group: Group = None


def set_group(group: Group) -> None:
    _State.group = group


def get_group() -> Group:
    return _State.group


def exchange_counts(local_expert_count: torch.Tensor, world_size: int) -> torch.Tensor:
    """local_expert_count [world_size * num_expert] -> what each rank sends to the experts here, same layout."""
    if world_size == 1:
        return local_expert_count.clone()
    counts = local_expert_count.view(world_size, -1)
    return exchange.exchange_counts(counts, exchange.register_group(_State.group)).flatten()


def to_host(count: torch.Tensor, world_size: int) -> torch.Tensor:
    """Copy a count that may have come from other ranks; RuntimeError if its exchange failed meanwhile."""
    count = count.cpu()  # waits for the exchange, so that check() sees its end
    if world_size > 1:
        exchange.check(exchange.register_group(_State.group))
    return count


def to_experts(
    rows: torch.Tensor, local_expert_count: torch.Tensor, global_expert_count: torch.Tensor, world_size: int
) -> torch.Tensor:
    """Rows in the local order (rank, expert) -> the rows for the experts here, in the order (expert, rank)."""
    if world_size == 1:
        return rows
    received = _exchange(rows, local_expert_count, global_expert_count, world_size)
    return received[_expert_major(global_expert_count, world_size, rows.device)]


def from_experts(
    rows: torch.Tensor, local_expert_count: torch.Tensor, global_expert_count: torch.Tensor, world_size: int
) -> torch.Tensor:
    """Reverse to_experts()."""
    if world_size == 1:
        return rows
    order = _expert_major(global_expert_count, world_size, rows.device)
    by_rank = torch.empty_like(rows)
    by_rank[order] = rows
    return _exchange(by_rank, global_expert_count, local_expert_count, world_size)


def sum_over_ranks(x: torch.Tensor, world_size: int) -> torch.Tensor:
    """Return the sum of x over the ranks."""
    return torch.stack(all_gather(x[None], world_size, _State.group)).sum(0).squeeze(0)


def all_gather(x: torch.Tensor, world_size: int, group: Any) -> list[torch.Tensor]:
    """Gather x of every rank of the group; the numbers of rows may differ."""
    return [x] if world_size == 1 else gather_rows(x, group)


def _exchange(
    rows: torch.Tensor, send_count: torch.Tensor, recv_count: torch.Tensor, world_size: int
) -> torch.Tensor:
    counts = (to_host(count, world_size) for count in (send_count, recv_count))
    send, recv = (count.view(world_size, -1).sum(1).tolist() for count in counts)
    return exchange.global_exchange(rows, send, recv, exchange.register_group(_State.group))


def _expert_major(global_expert_count: torch.Tensor, world_size: int, device: torch.device) -> torch.Tensor:
    """Position in (rank, expert) order of each row in (expert, rank) order."""
    count = to_host(global_expert_count, world_size).view(world_size, -1)
    begin = (count.flatten().cumsum(0) - count.flatten()).view_as(count)
    parts = [
        torch.arange(int(begin[rank, expert]), int(begin[rank, expert] + count[rank, expert]), device="cpu")
        for expert in range(count.shape[1])
        for rank in range(world_size)
    ]
    return torch.cat(parts).to(device)
