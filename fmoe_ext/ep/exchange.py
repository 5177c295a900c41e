"""Exchange counts and rows between the ranks of a process group: the collectives under expert parallelism.

First the ranks tell each other how many rows come (exchange_counts), then the rows travel. The layers call
start_exchange() and wait(), and have a backward of their own (schedule.py, traced.py). global_exchange() does both at
once and is differentiable, for FastMoE's interface and for moving experts. All go through _start(), in one of two ways:

* over the process group, a collective for each tensor;
* over NCCL by a communicator and a stream of our own, in builds with USE_NCCL=1, all tensors in one group of calls.
  torch queues every collective of a group on one stream, so that rows would wait behind other collectives.

What start_exchange() sends over NCCL, in either way, takes thread blocks of SMs; our products leave _NCCL_SMS of them
free meanwhile (ops/chooser.py).

An exchange that has started is a Transfer. Before a thread waits for one, it may let another microbatch compute
(while_waiting, which pipeline/overlap.py uses).
"""

import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from fmoe_ext.ep.process_groups import backend_of, explained, find_group, use_timeout
from fmoe_ext.ep.process_groups import register_group as register_group  # its name for users
from fmoe_ext.ops import chooser
from fmoe_ext.ops._autograd import custom_op, register_autograd

try:
    import fmoe_ext._C_nccl as _C_nccl  # only in builds with USE_NCCL=1
except ImportError:
    _C_nccl = None

# Dtypes that every backend can send; rows of others are viewed as bytes.
_DTYPES_OF_BACKENDS = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32)

# Our communicators, made at a group's first exchange on a device, which is collective.
_nccl: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[torch.device, "_NcclExchange"]] = (
    weakref.WeakKeyDictionary()
)

# Thread blocks, one an SM, that our communicator takes; products leave as many SMs free for torch's NCCL, which may
# take more.
_NCCL_SMS = 16


def start_exchange(
    outs: Sequence[torch.Tensor],
    xs: Sequence[torch.Tensor],
    send_splits: Sequence[int],
    recv_splits: Sequence[int],
    group_name: str,
) -> "Transfer":
    """Start the exchange of rows of each x [sum(send_splits), *] into its out [sum(recv_splits), *] -> for wait().

    Rows for rank p follow those for rank p - 1. Over a communicator of our own all tensors travel in one group of
    calls. All are contiguous and on one device; nothing here is differentiable.
    """
    group = find_group(group_name)
    work = _start(outs, xs, send_splits, recv_splits, group)
    return Transfer(work, backend_of(group, xs[0].device.type) == "nccl")


def _start(
    outs: Sequence[torch.Tensor],
    xs: Sequence[torch.Tensor],
    send_splits: Sequence[int],
    recv_splits: Sequence[int],
    group: dist.ProcessGroup,
) -> Any:
    """Start over a communicator of our own if the build has NCCL and the group sends by it; else over the group.

    -> an object with wait() and is_completed().
    """
    if _C_nccl is not None and backend_of(group, xs[0].device.type) == "nccl":
        by_device, device = _nccl.setdefault(group, {}), xs[0].device
        if device not in by_device:
            by_device[device] = _NcclExchange(group, device)
        return by_device[device].start(outs, xs, send_splits, recv_splits)
    works = []
    for out, x in zip(outs, xs, strict=True):
        if x.dtype not in _DTYPES_OF_BACKENDS:  # only bytes move, whatever their numbers mean
            out, x = _as_bytes(out), _as_bytes(x)
        splits = list(recv_splits), list(send_splits)
        works.append(dist.all_to_all_single(out, x, *splits, group=group, async_op=True))
    return _Works(works)


class _Works:
    """Works of one process group, a tensor each."""

    def __init__(self, works: list[Any]):
        self._works = works

    def wait(self) -> None:
        for work in self._works:
            work.wait()

    def is_completed(self) -> bool:
        # to query an event breaks a CUDA graph's capture
        if torch.cuda.is_current_stream_capturing():
            return False
        return all(work.is_completed() for work in self._works)


def _as_bytes(x: torch.Tensor) -> torch.Tensor:
    """View contiguous x [N, *] as uint8 [N, ...], without a copy."""
    if x.dim() > 1 and x.stride(-1) == 1:  # a contiguous tensor of one column may have another stride
        return x.view(torch.uint8)
    return x.view(-1).view(torch.uint8).view(x.shape[0], x.element_size() * math.prod(x.shape[1:]))


@dataclass
class _Turns:
    """Turns that this thread gives to others while its rows are under way; each turn is a call of go_on()."""

    go_on: Callable[[], None]
    taken: int = 0  # calls so far


_turns: ContextVar[_Turns | None] = ContextVar("turns of this thread", default=None)


@contextmanager
def while_waiting(go_on: Callable[[], None]) -> Iterator[None]:
    """In the block, call go_on(), which lets other threads compute, before each wait for rows.

    go_on() is not called for rows that were already under way at its last call: they have had time to come.
    """
    token = _turns.set(_Turns(go_on))
    try:
        yield
    finally:
        _turns.reset(token)


class Transfer:
    """An exchange that has started, and how many turns its thread had given away by then.

    over_nccl: products that start before it has ended and before it is waited for leave it some SMs.
    """

    def __init__(self, work: Any, over_nccl: bool = False):
        self.work = work
        self._ended = chooser.reserve(self, _NCCL_SMS, work.is_completed) if over_nccl else None
        self._turns = _turns.get()
        self._turn = 0 if self._turns is None else self._turns.taken

    def wait(self) -> None:
        if self._ended is not None:
            self._ended()
        self.work.wait()

    def is_new(self, turns: _Turns) -> bool:
        """Return whether no other thread has had a turn since it started."""
        return self._turns is turns and self._turn == turns.taken


def wait(transfers: Sequence[Transfer], group_name: str) -> None:
    """Wait for what start_exchange() started; the error of a dead or absent rank says which group it was in.

    Before it waits, it may give a turn to another thread (while_waiting).
    """
    turns = _turns.get()
    if turns is not None and any(transfer.is_new(turns) for transfer in transfers):
        turns.taken += 1
        turns.go_on()
    with explained(find_group(group_name)):
        for transfer in transfers:
            transfer.wait()


def check(group_name: str) -> None:
    """Raise RuntimeError if an exchange over our own communicator of the group was aborted; else do nothing.

    Call it before the host uses what came: after an abort a copy to the host returns as after a success, with whatever
    was in the buffer. Without a communicator of our own, torch reports what its own collectives find.
    """
    group = find_group(group_name)
    for exchange in _nccl.get(group, {}).values():
        with explained(group):
            exchange.communicator.check()


class _NcclExchange:
    """A communicator and a stream of our own for one group and device.

    The ranks make it together: the constructor is a collective call.
    """

    def __init__(self, group, device):
        ids = [_C_nccl.make_unique_id() if dist.get_rank(group) == 0 else None]
        dist.broadcast_object_list(ids, group=group, group_src=0)
        with torch.cuda.device(device):
            self.communicator = _C_nccl.Communicator(
                ids[0],
                dist.get_world_size(group),
                dist.get_rank(group),
                use_timeout(group).total_seconds(),
                _NCCL_SMS,
            )
        self.stream = torch.cuda.Stream(device)

    def start(self, outs, xs, send_splits, recv_splits):
        with torch.cuda.device(xs[0].device):
            stream = torch.cuda.current_stream()
            self.stream.wait_stream(stream)  # the rows may still be computed there
            self.communicator.all_to_all(
                [x.data_ptr() for x in xs],
                list(send_splits),
                [out.data_ptr() for out in outs],
                list(recv_splits),
                [x.element_size() * math.prod(x.shape[1:]) for x in xs],
                self.stream.cuda_stream,
            )
            return _NcclWork(self.stream.record_event(), self.communicator, stream, (*outs, *xs))


class _NcclWork:
    """An exchange that has started. It keeps its tensors until their own stream has waited for its end.

    So the allocator gives their memory to nobody earlier. record_stream() would do so too, but the allocator would
    then query an event before it uses each block again.
    """

    def __init__(self, event, communicator, stream, tensors):
        self.event, self.communicator = event, communicator
        self._release = weakref.finalize(self, _release, stream, event, [*tensors])
        self._release.atexit = False  # CUDA may be gone by then

    def wait(self):
        torch.cuda.current_stream().wait_event(self.event)
        self._release()
        self.communicator.check()  # the host does not wait here: what fails later is said by the next call

    def is_completed(self):
        """Return whether it has ended; False while a graph is captured, where nobody can ask."""
        return not torch.cuda.is_current_stream_capturing() and self.event.query()


def _release(stream, event, tensors):
    """Drop the tensors of an exchange; the stream uses their memory again only after the event."""
    stream.wait_event(event)
    tensors.clear()


@torch.library.custom_op("fmoe_ext::exchange_counts", mutates_args=())
def exchange_counts(counts: torch.Tensor, group: str) -> torch.Tensor:
    """Send row p of counts to rank p and return the rows that were sent to this rank, in the order of ranks.

    counts [W, n] int64, W ranks in the group -> [W, n] int64.
    Equivalent to: torch.distributed.all_to_all_single. FastMoE: expert_exchange.
    """
    of_group = find_group(group)
    world_size = dist.get_world_size(of_group)
    _check(counts.dtype == torch.int64, f"counts must be int64, but got {counts.dtype}")
    _check(
        counts.dim() == 2 and counts.shape[0] == world_size,
        f"counts must have shape [{world_size}, n] in a group of {world_size} ranks, but got {list(counts.shape)}",
    )
    out = torch.empty_like(counts, memory_format=torch.contiguous_format)
    each = [1] * world_size
    work = _start([out], [counts.contiguous()], each, each, of_group)
    # Nobody else gets the turn meanwhile: the rows come next, with nothing to compute before them.
    with explained(of_group):
        work.wait()
    return out


@exchange_counts.register_fake
def _(counts, group):
    return torch.empty_like(counts, memory_format=torch.contiguous_format)


def global_exchange(
    x: torch.Tensor, send_splits: Sequence[int], recv_splits: Sequence[int], group: str
) -> torch.Tensor:
    """Send the first send_splits[0] rows of x to rank 0 of the group, the next to rank 1, ...; return what came.

    x [sum(send_splits), *] of any dtype -> [sum(recv_splits), *], rows by source rank. Zero rows are fine.
    Raises RuntimeError if splits and shapes do not fit. Differentiable: the gradient goes the way back.
    Equivalent to: torch.distributed.all_to_all_single. FastMoE: global_scatter, global_gather.
    """
    return _exchange(x, send_splits, recv_splits, group)


@custom_op("fmoe_ext::global_exchange")
def _exchange(
    x: torch.Tensor, send_splits: Sequence[int], recv_splits: Sequence[int], group: str
) -> torch.Tensor:
    of_group = find_group(group)
    world_size = dist.get_world_size(of_group)
    for name, splits in (("send_splits", send_splits), ("recv_splits", recv_splits)):
        _check(
            len(splits) == world_size and min(splits) >= 0,
            f"{name} must be {world_size} numbers >= 0, one for each rank, but got {list(splits)}",
        )
    _check(
        x.dim() >= 1 and x.shape[0] == sum(send_splits),
        f"x must have sum(send_splits) = {sum(send_splits)} rows, but got shape {list(x.shape)}",
    )
    out = x.new_empty((sum(recv_splits), *x.shape[1:]))
    x = x.resolve_conj().resolve_neg().contiguous()  # such views hold a flag, which would not travel
    wait([Transfer(_start([out], [x], send_splits, recv_splits, of_group))], group)
    return out


@torch.library.register_fake("fmoe_ext::global_exchange")
def _(x, send_splits, recv_splits, group):
    return x.new_empty((sum(recv_splits), *x.shape[1:]))


def _setup_context(ctx, inputs, output):
    _, ctx.send_splits, ctx.recv_splits, ctx.group = inputs


def _backward(ctx, grad):
    return global_exchange(grad, ctx.recv_splits, ctx.send_splits, ctx.group), None, None, None


register_autograd("fmoe_ext::global_exchange", _backward, _setup_context, places=(0,))


def _check(condition: bool, text: str) -> None:
    if not condition:
        raise RuntimeError(text)
