"""Compute the gates' loss of a whole batch, exactly, where it is trained in microbatches.

A gate's loss is a function of sums over all tokens (choices and scores of each expert, logsumexp^2, tokens), for which
the gate asks gate.ranks. A block of this module puts itself around gate.ranks (_Sums) and adds the sums of the other
microbatches. The balance loss is a product of such sums: its gradient for one microbatch needs the choices of all, of
later ones too, which a single pass that frees each microbatch's graph before the next does not have. Hence two exact
forms, and the local one:

* WholeBatch: a first pass without gradients counts, the second trains. It costs a forward;
* all_forwards_first(): one pass, for programs that run every forward before the first backward (GPipe);
* neither: each microbatch has a loss of its own, whose mean is another number (Megatron's "aux_loss", FastMoE).
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from fmoe_ext.gates.base_gate import BaseGate, gates_of
from fmoe_ext.recompute import current_thread
from fmoe_ext.step import forward_of_layer, uncounted


class WholeBatch:
    """Give every microbatch the gates' loss of the whole batch, in two passes.

    The mean of the gradients over the microbatches, which training takes, is the gradient of the whole batch; so too
    under data and expert parallelism. Both passes have the same microbatches in one order. Gates that draw noise draw
    anew in the second, which then counts for its own microbatch and the first for the others. The first runs without
    gradients, and neither bias updates nor load counters see it. Capacities stay those of a microbatch.
    Raises ValueError for a model without a gate that sums over tokens, RuntimeError for more forwards than counted.

    Example:

        >>> mlp = fmoe_ext.FMoETransformerMLP(num_expert=4, d_model=8, d_hidden=16, gate="softmax")
        >>> microbatches = torch.randn(2, 10, 8)
        >>> whole = WholeBatch(mlp)
        >>> with whole.first_pass():
        ...     for x in microbatches:
        ...         y = mlp(x)
        >>> with whole.second_pass():
        ...     for x in microbatches:
        ...         loss = mlp(x).square().mean() + 0.01 * fmoe_ext.gates.total_loss(mlp)
        ...         (loss / len(microbatches)).backward()
    """

    def __init__(self, model: nn.Module):
        self._sums = {gate: _Sums(gate.ranks) for gate in _summing_gates(model)}

    @contextmanager
    def first_pass(self) -> Iterator[None]:
        """Count every forward inside the block, from zero."""
        for sums in self._sums.values():
            sums.recorded = []
        with torch.no_grad(), uncounted(), _in_place(self._sums):
            yield
        for gate in self._sums:
            gate.set_loss(None)  # of a microbatch alone, without a gradient

    @contextmanager
    def second_pass(self) -> Iterator[None]:
        """Give every forward inside the block, and its backward, the sums of the others."""
        for gate, sums in self._sums.items():
            if not sums.recorded:
                raise RuntimeError(f"first_pass() has seen no forward of {type(gate).__name__}")
        others = {gate: _WithOthers(sums) for gate, sums in self._sums.items()}
        with _in_place(others):
            yield


@contextmanager
def all_forwards_first(model: nn.Module) -> Iterator[None]:
    """Compute the gates' loss over all forwards inside the block so far: after the last one, over the whole batch.

    One loss, one backward, exact in one pass: the graphs of all microbatches are alive until then.

    Example:

        >>> mlp = fmoe_ext.FMoETransformerMLP(num_expert=4, d_model=8, d_hidden=16, gate="softmax")
        >>> with all_forwards_first(mlp):
        ...     y = torch.cat([mlp(x) for x in torch.randn(2, 10, 8)])
        ...     (y.square().mean() + 0.01 * fmoe_ext.gates.total_loss(mlp)).backward()
    """
    with _in_place({gate: _SoFar(gate.ranks) for gate in _summing_gates(model)}):
        yield


def loss_share(gate: BaseGate, microbatch: int, rows: Sequence[int]) -> float:
    """Return the weight of one microbatch's gate loss in the loss of the batch. rows: of each microbatch.

    Its share of the rows; inside WholeBatch and all_forwards_first the weight that makes the sum exact.
    """
    sums = _sums_of_thread(gate)
    if sums is not None:
        return sums.share(microbatch, len(rows))
    return rows[microbatch] / max(sum(rows), 1)


def spans_calls(gate: BaseGate) -> bool:
    """Return whether the loss of the gate's last forward spans all forwards: inside all_forwards_first()."""
    return isinstance(_sums_of_thread(gate), _SoFar)


def _sums_of_thread(gate: BaseGate) -> _Sums | None:
    """Find the sums of the block that this thread is in; None outside."""
    ranks = getattr(gate, "_ranks", None)
    while isinstance(ranks, _Sums) and ranks.thread != current_thread():
        ranks = ranks.inner
    return ranks if isinstance(ranks, _Sums) else None


def refuse_all_forwards_first(model: nn.Module, name: str) -> None:
    """Raise RuntimeError inside all_forwards_first(model): `name` runs backwards before the last forward."""
    if any(spans_calls(gate) for gate in gates_of(model)):
        raise RuntimeError(
            f"gates.all_forwards_first() is around {name}, which runs backwards before the last forward: "
            "use gates.WholeBatch, evaluate() in its first pass and train_step() in its second"
        )


def _summing_gates(model: nn.Module) -> list[Any]:
    gates = [gate for gate in gates_of(model) if hasattr(gate, "ranks")]
    if not gates:
        raise ValueError(f"{type(model).__name__} has no gate of fmoe_ext whose loss is a sum over tokens")
    return gates


# guards the chain gate.ranks -> inner -> inner ..., which blocks of several threads change
_lock = threading.Lock()


@contextmanager
def _in_place(sums: Mapping[Any, _Sums]) -> Iterator[None]:
    """Replace gate.ranks by sums[gate], and report each forward to it."""
    with ExitStack() as stack:
        for gate, own in sums.items():
            own.thread = current_thread()
            with _lock:
                own.inner, gate.ranks = gate._ranks, own
            stack.callback(_take_out, gate, own)
            stack.callback(gate.register_forward_pre_hook(own.begin_forward).remove)
        yield


def _take_out(gate: Any, own: _Sums) -> None:
    """Take the sums of a block out of the chain of a gate's ranks; blocks of several threads end in any order."""
    with _lock:
        if gate._ranks is own:
            gate.ranks = own.inner
            return
        around = gate._ranks
        while around.inner is not own:
            around = around.inner
        around.inner = own.inner


class _Running(threading.local):
    """The forward that runs on this thread."""

    microbatch: int | None = None  # its number; None for a forward of a thread outside of the block
    slot = 0  # the number, in the forward, of the next sum that others() is asked for


class _Sums:
    """A gate's ranks that remember the sums of each microbatch, a forward of the thread that is in the block.

    A forward of another thread gets what it would have without the block. _Sums itself is the first pass of WholeBatch.
    """

    def __init__(self, ranks: Any):
        self.inner = ranks  # what the gate has outside of the block
        self.recorded: list[list[torch.Tensor]] = []  # [microbatch][number of the sum in a forward]
        self.thread = current_thread()  # of the block
        self._now = _Running()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def __reduce__(self) -> tuple[Any, ...]:
        return _of_no_thread, (self.inner,)  # of a gate that is copied inside a block

    def of_thread(self) -> Any:
        """Return itself for a forward of the block's thread, for others what they would have without it."""
        if self._now.microbatch is not None:
            return self
        return self.inner.of_thread() if isinstance(self.inner, _Sums) else self.inner

    def begin_forward(self, gate: nn.Module, _: Any) -> None:
        """Number the microbatch of the forward that begins: a hook before the gate's forward."""
        now = self._now
        now.slot, now.microbatch = 0, None
        forward = forward_of_layer(gate)
        # a backward's thread may repeat a forward: what counts is the thread that ran it first
        if (current_thread() if forward is None else forward.thread) != self.thread:
            return
        if forward is not None and forward.microbatch is not None:  # a checkpoint repeats it
            now.microbatch = forward.microbatch
            return
        now.microbatch = self.next_microbatch()
        if forward is not None:
            forward.microbatch = now.microbatch

    def next_microbatch(self) -> int:
        self.recorded.append([])
        return len(self.recorded) - 1

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """Sum over the ranks, and join the sums of other microbatches."""
        own = self.inner.sum(x)
        microbatch = self._now.microbatch
        return own if microbatch is None else self.joined(own, microbatch)

    def joined(self, own: torch.Tensor, microbatch: int) -> torch.Tensor:
        self.recorded[microbatch].append(own.detach())
        return own

    def share(self, microbatch: int, num_microbatches: int) -> float:
        """Return the weight of this microbatch's loss in the loss of the batch."""
        return 1 / num_microbatches

    def others(self, numbers: range, like: torch.Tensor) -> torch.Tensor:
        """Add up what these microbatches recorded for the sum that is asked for now."""
        now = self._now
        parts = [self.recorded[number][now.slot] for number in numbers if number != now.microbatch]
        now.slot += 1
        return sum(parts, torch.zeros_like(like))


def _of_no_thread(inner: Any) -> _Sums:
    """Make the sums of a copied gate, which is in no block: every forward gets what it would have without one."""
    sums = _Sums(inner)
    sums.thread = 0
    return sums


class _WithOthers(_Sums):
    """The second pass of WholeBatch: this microbatch's sum with its gradient, and of the others the first pass's."""

    def __init__(self, first: _Sums):
        super().__init__(first.inner)
        self.recorded = first.recorded
        self._latest = -1

    def next_microbatch(self) -> int:
        self._latest += 1
        if self._latest >= len(self.recorded):
            raise RuntimeError(
                f"first_pass() counted {len(self.recorded)} forwards, but second_pass() has more"
            )
        return self._latest

    def joined(self, own: torch.Tensor, microbatch: int) -> torch.Tensor:
        num_microbatches = len(self.recorded)
        own = own.view_as(own)
        if own.requires_grad:  # the mean over the microbatches will divide by their number
            own.register_hook(lambda grad: grad * num_microbatches)
        return own + self.others(range(num_microbatches), own)


class _SoFar(_Sums):
    """all_forwards_first(): this microbatch's sum and those of earlier ones, with their graphs.

    The last loss is then the whole batch's, and share() counts it alone.
    """

    def joined(self, own: torch.Tensor, microbatch: int) -> torch.Tensor:
        mine = self.recorded[microbatch]
        if len(mine) == self._now.slot:  # not in a forward that a checkpoint repeats
            mine.append(own)
        return own + self.others(range(microbatch), own)

    def share(self, microbatch: int, num_microbatches: int) -> float:
        return float(microbatch == num_microbatches - 1)
