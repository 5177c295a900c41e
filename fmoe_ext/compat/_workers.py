"""What fmoe.functions asks of other workers. Everything that needs a process group goes through here."""

import torch
import torch.distributed as dist

from fmoe_ext.ep import exchange


class _State:
    group = None


def set_group(group):
    _State.group = group


def get_group():
    return _State.group


def exchange_counts(local_expert_count, world_size):
    """local_expert_count [world_size * num_expert] -> what each worker sends to the experts here, same layout."""
    if world_size == 1:
        return local_expert_count.clone()
    counts = local_expert_count.view(world_size, -1)
    return exchange.exchange_counts(counts, exchange.register_group(_State.group)).flatten()


def to_experts(rows, local_expert_count, global_expert_count, world_size):
    """Rows in the local order (worker, expert) -> the rows for the experts here, in the order (expert, worker)."""
    if world_size == 1:
        return rows
    received = _exchange(rows, local_expert_count, global_expert_count, world_size)
    return received[_expert_major(global_expert_count, world_size, rows.device)]


def from_experts(rows, local_expert_count, global_expert_count, world_size):
    """The way back of to_experts."""
    if world_size == 1:
        return rows
    order = _expert_major(global_expert_count, world_size, rows.device)
    by_worker = torch.empty_like(rows)
    by_worker[order] = rows
    return _exchange(by_worker, global_expert_count, local_expert_count, world_size)


def sum_over_workers(x, world_size):
    """The sum of x over the workers."""
    return torch.stack(all_gather(x[None], world_size, _State.group)).sum(0).squeeze(0)


def all_gather(x, world_size, group):
    """x of every worker of the group; the numbers of rows may differ."""
    if world_size == 1:
        return [x]
    rows = torch.tensor([x.shape[0]], device=x.device)
    sizes = [torch.empty_like(rows) for _ in range(world_size)]
    dist.all_gather(sizes, rows, group=group)
    sizes = [int(size) for size in sizes]
    padded = x.new_zeros((max(sizes), *x.shape[1:]))
    padded[: x.shape[0]] = x
    parts = [torch.empty_like(padded) for _ in range(world_size)]
    dist.all_gather(parts, padded, group=group)
    return [part[:size] for part, size in zip(parts, sizes, strict=True)]


def _exchange(rows, send_count, recv_count, world_size):
    send, recv = (count.view(world_size, -1).sum(1).tolist() for count in (send_count, recv_count))
    return exchange.global_exchange(rows, send, recv, exchange.register_group(_State.group))


def _expert_major(global_expert_count, world_size, device):
    """Position in (worker, expert) order of each row in (expert, worker) order."""
    count = global_expert_count.view(world_size, -1).cpu()
    begin = (count.flatten().cumsum(0) - count.flatten()).view_as(count)
    parts = [
        torch.arange(int(begin[worker, expert]), int(begin[worker, expert] + count[worker, expert]))
        for expert in range(count.shape[1])
        for worker in range(world_size)
    ]
    return torch.cat(parts).to(device)
