"""Find process groups by name, and check what their ranks must agree on.

An operator names its group by a string, so that it can stand in a compiled graph; register_group() says which it is.
Ranks whose layers differ would wait for each other, or read each other's rows as their own: check_agreement() compares
the layouts once, and explained() says which exchange failed where a rank is missing. new_group_of() makes groups of
some ranks, around a fault of torch.
"""

import hashlib
import itertools
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeAlias

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

# Groups by name; an entry lives as long as the group does.
_groups: weakref.WeakValueDictionary[str, dist.ProcessGroup] = weakref.WeakValueDictionary()
# Timeouts that register_group() was given.
_timeouts: weakref.WeakKeyDictionary[dist.ProcessGroup, timedelta] = weakref.WeakKeyDictionary()
# Groups whose timeout a communicator has taken over.
_timeouts_in_use: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()
# The numbers of the layers of each group.
_layers: weakref.WeakKeyDictionary[dist.ProcessGroup, Iterator[int]] = weakref.WeakKeyDictionary()
# The layouts of layers that the ranks of each group have found to be the same.
_agreed: weakref.WeakKeyDictionary[dist.ProcessGroup, set[str]] = weakref.WeakKeyDictionary()


# How callers name a group; None is the default group.
Group: TypeAlias = dist.ProcessGroup | DeviceMesh | None


def register_group(group: Group = None, timeout: timedelta | None = None) -> str:
    """Return the name by which operators find a group: a ProcessGroup, a one-dimensional DeviceMesh or None.

    None is the default group. Any number of groups may be registered, each any number of times.
    timeout: after which an exchange over a communicator of our own (builds with USE_NCCL=1) is aborted and raises on
    every rank; by default the timeout of init_process_group(), or of the store that it was given. torch does not tell
    the timeout of new_group(): give it here, on all ranks and before the group's first exchange.
    """
    # 1. The process group, which must be this rank's.
    if isinstance(group, DeviceMesh):
        group = group.get_group()
    if not dist.is_initialized():
        raise RuntimeError(
            "expert parallelism needs torch.distributed.init_process_group() to be called first"
        )
    group = group or dist.group.WORLD
    assert group is not None  # there is a default group
    if dist.get_rank(group) < 0:
        raise ValueError(f"rank {dist.get_rank()} is not a member of the group that it was given")
    # 2. Its timeout, which the first communicator takes over.
    if timeout is not None:
        if timeout <= timedelta(0):
            raise ValueError(f"timeout must be more than 0 s, but got {timeout.total_seconds():g} s")
        if group in _timeouts_in_use and timeout != timeout_of(group):
            raise RuntimeError(
                f"the timeout of the group of ranks {dist.get_process_group_ranks(group)} is {timeout_of(group)} since "
                f"its first exchange, and cannot become {timeout}: register the group with it earlier"
            )
        _timeouts[group] = timeout
    _groups[group.group_name] = group
    return group.group_name


def use_timeout(group: dist.ProcessGroup) -> timedelta:
    """Return timeout_of() for a communicator that keeps it: from now on it cannot change."""
    _timeouts_in_use.add(group)
    return timeout_of(group)


def timeout_of(group: dist.ProcessGroup) -> timedelta:
    """Find the timeout of an exchange in a group: from register_group(), or else from init_process_group()."""
    return _timeouts.get(group) or group.get_group_store().timeout  # type: ignore[attr-defined]  # not in its stubs


def find_group(name: str) -> dist.ProcessGroup:
    """Find the group that register_group() returned this name for."""
    try:
        return _groups[name]
    except KeyError:
        raise RuntimeError(
            f"no process group {name!r}: call fmoe_ext.ep.exchange.register_group(group) in this process, "
            "and do not destroy the group while layers use it"
        ) from None


def size_of(group: Group = None) -> int:
    """Register a group -> the number of its ranks."""
    return dist.get_world_size(find_group(register_group(group)))


def backend_of(group: dist.ProcessGroup, device: str) -> str | None:
    """Return the backend of a group for a type of device, as "nccl" for "cuda"; None if it has none.

    dist.get_backend() says what the group was made with: "undefined" without a name, or all of "cpu:gloo,cuda:nccl".
    """
    backends = dict(pair.split(":") for pair in dist.get_backend_config(group).split(","))
    return backends.get(device)


def host_device(group: dist.ProcessGroup) -> str:
    """Return the device of tensors that the host reads after a collective call: "cuda" if the group has no other."""
    return "cpu" if backend_of(group, "cpu") else "cuda"


def next_layer_index(name: str) -> int:
    """Number a new layer on the group of this name: alike on all ranks that make their layers in one order."""
    return next(_layers.setdefault(find_group(name), itertools.count()))


def check_same(what: str, value: Any, group: dist.ProcessGroup | None) -> None:
    """Raise ValueError on every rank of the group if value is not the same on all; says which ranks differ.

    value is a tuple, list or string of plain values; this is a collective call.
    """
    texts = [str(v) for v in gather_values(value, group)]
    # the majority is taken to be right; of equally frequent values that of the first rank
    expected = max(dict.fromkeys(texts), key=texts.count)
    ranks = dist.get_process_group_ranks(group)
    odd = {rank: text for rank, text in zip(ranks, texts, strict=True) if text != expected}
    if odd:
        differences = "; ".join(f"rank {rank} has {text}" for rank, text in odd.items())
        raise ValueError(
            f"{what} must be the same on ranks {ranks}: {differences}, the others have {expected}"
        )


def check_agreement(layout: str, name: str) -> None:
    """Raise ValueError on every rank if a layer's layout is not the same on all; collective at its first call."""
    group = find_group(name)
    agreed = _agreed.setdefault(group, set())
    if layout and layout not in agreed:
        check_same(
            "(layer, num_experts, experts of a rank, overlap_degree, max_rows_per_rank, exchange, wire)",
            layout,
            group,
        )
        agreed.add(layout)


def new_group_of(ranks: Sequence[int], parent: dist.ProcessGroup, **options: Any) -> dist.ProcessGroup | None:
    """Call dist.new_group() for ranks of a parent -> the group; None if this rank is not in it.

    All ranks of the parent call it, each with the ranks of its own group.
    torch names a group of use_local_synchronization by its ranks and by how many groups this process has. After a group
    of some ranks only, the ranks would wait for each other under two names (pytorch/pytorch#189073). Where the numbers
    differ, all ranks of the job make every group, or those that have fewer fill up with groups of themselves.
    """
    me = dist.get_rank()
    # 1. Do all have as many groups? None: torch names groups otherwise
    counts = gather_values(_num_groups(me), parent)
    agree = None in counts or min(counts) == max(counts)
    # 2. If not, and all ranks of the job are here: new_group() without local synchronization names alike everywhere
    if not agree and dist.get_world_size(parent) == dist.get_world_size():
        wanted = sorted(set(gather_values(tuple(ranks), parent)))
        made = {members: dist.new_group(list(members), **options) for members in wanted}
        return made[tuple(ranks)] if me in ranks else None
    # 3. Else fill up to the same number
    missing = 0 if agree else max(counts) - counts[dist.get_rank(parent)]
    fillers = [_group_of(me) for _ in range(missing)]
    group = dist.new_group(list(ranks), use_local_synchronization=True, **options) if me in ranks else None
    for filler in fillers:
        dist.destroy_process_group(filler)
    return group


def _group_of(rank: int) -> dist.ProcessGroup:
    group: dist.ProcessGroup = dist.new_group([rank], use_local_synchronization=True)
    return group


def _num_groups(rank: int) -> int | None:
    """Count this process's groups, by torch's name of a new one; None where torch names groups otherwise.

    The name is the SHA-1 of the ranks and the number, so the number is found by trying.
    """
    try:
        group = _group_of(rank)
    except ValueError:  # there is a group of that name
        return None
    names = (hashlib.sha1(f"{rank}_{n}".encode(), usedforsecurity=False).hexdigest() for n in range(10_000))
    found = next((n for n, name in enumerate(names) if name == group.group_name), None)
    dist.destroy_process_group(group)
    return found


def gather_values(value: Any, group: dist.ProcessGroup | None) -> list[Any]:
    """Gather a picklable value of every rank of the group, in the order of ranks; a collective call."""
    values = [None] * dist.get_world_size(group)
    with explained(group):
        dist.all_gather_object(values, value, group=group)
    return values


@contextmanager
def explained(group: dist.ProcessGroup | None) -> Iterator[None]:
    """Raise a RuntimeError of the block again with the ranks of the group, and with the usual causes."""
    try:
        yield
    except RuntimeError as error:
        raise RuntimeError(
            f"rank {dist.get_rank()}: the exchange in the group of ranks {dist.get_process_group_ranks(group)} failed: "
            "a rank of it has ended, is late by more than the group's timeout, or did not reach this layer. (Over gloo "
            "a rank that is a step behind may end another by SIGABRT, without a traceback: look for the rank that "
            "failed first.) "
            f"{error}"
        ) from error
