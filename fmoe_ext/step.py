"""One forward of a layer: begin() takes padding and other slices off its tokens, Step.end() puts them back.

    moe_inp -> Batch.take -> _Slices.cut -> gate, experts -> _fill_masked -> _Slices.join -> Batch.put_back
               no padding    this rank's                     mask_dict       all slices      zeros for padding

A step also knows whether activation checkpointing repeats an earlier forward (recompute.py), whose padding, choices
and exchanges it then reuses. Gates, and the hooks that count or log their choices, do not get the step as an argument:
while a layer calls its gate, they ask for the step of their thread, by is_counted(), count_choices(), run_or_replay().
A compiled graph has no such step.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar, Token
from typing import Any, Protocol

import torch
from torch.nn.utils.rnn import PackedSequence

from fmoe_ext import ops
from fmoe_ext.ops._split import is_selective
from fmoe_ext.ops.outside_graphs import is_exporting
from fmoe_ext.recompute import Forward, Forwards, can_be_repeated, is_repeated
from fmoe_ext.tokens import (
    Batch,
    Nest,
    batch_is,
    check_tensor,
    current_batch,
    is_inside_a_block,
    leaves_of,
    map_structure,
    with_valid,
)


class _Slices(Protocol):
    """Ranks with the same input, of which each computes a part of the tokens (ep.ranks.SliceGroup)."""

    def cut(self, x: Nest) -> Nest: ...

    def join(self, x: Nest) -> Nest: ...


class Step:
    """One forward of a layer: its tokens, and what is known of them."""

    __slots__ = (  # noqa: RUF023 - by use, not by name
        "x", "gate_x", "batch", "forward", "is_repeated", "is_counted", "selected", "is_traced", "is_selective",
        "before_exchange", "_forwards", "_slices", "_mask", "_mask_dict", "_block", "_outer", "_counts",
    )  # fmt: skip

    def __init__(
        self,
        batch: Batch,
        forward: Forward | None,
        is_repeated: bool,
        is_counted: bool,
        is_traced: bool = False,
    ):
        self.x: Nest = None  # the tokens to compute, without padding and other slices
        self.gate_x: Nest = None  # what the gate sees of them
        self.batch = batch  # which tokens are real
        self.forward = forward  # what a repetition reuses; None if nothing can repeat this forward
        self.is_repeated = is_repeated  # this forward is the repetition
        self.is_counted = is_counted  # its choices count for loads and biases
        # the gate's choices before capacity dropped any, if it notes them
        self.selected: torch.Tensor | None = None
        self.is_traced = is_traced  # part of a compiled graph
        self.is_selective = False  # inside a selective checkpoint, which names operators
        self.before_exchange: list[torch.Tensor] = []  # of a graph: what the exchange has to wait for
        self._forwards: Forwards | None = None  # where to keep this forward for its repetition
        self._slices: _Slices | None = None
        self._mask: torch.Tensor | None = None  # FMoE's mask of the tokens in x
        self._mask_dict: Mapping[int, Any] | None = None
        self._block: Any = None  # batch_is() while the gate runs
        self._outer: Token[Step | None] | None = None  # to reset _running to the step of a layer around this
        self._counts: list[tuple[torch.Tensor, torch.Tensor]] = []  # (choices [T, K], of each expert [E])

    @property
    def first(self) -> torch.Tensor:
        """Return the first tensor of x."""
        x: torch.Tensor = self.x if isinstance(self.x, torch.Tensor) else leaves_of(self.x)[0]
        return x

    def __enter__(self) -> Step:
        """Make this the step that gates and telemetry ask, and its batch the current one."""
        self._outer = _running.set(self)
        # without facts about the batch, and outside of blocks that have some, there is nothing to set
        if self.batch.num_tokens is not None or is_inside_a_block():
            self._block = batch_is(self.batch)
            self._block.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        assert self._outer is not None
        if self._block is not None:
            self._block.__exit__(*error)
        _running.reset(self._outer)

    def drop_masked(self, topk_idx: torch.Tensor) -> torch.Tensor:
        """Return topk_idx [T, K], -1 for the tokens that a mask sends to no expert."""
        mask = self._mask
        if mask is None:
            return topk_idx
        if mask.numel() != topk_idx.shape[0]:
            raise ValueError(
                f"mask must have one entry for each of the {topk_idx.shape[0]} tokens, "
                f"but got shape {list(mask.shape)}"
            )
        return torch.where(_of_rows(mask, topk_idx) != 0, -1, topk_idx)

    def end(self, out: Nest, topk_weights: torch.Tensor, beside: Nest, training: bool) -> Nest:
        """Complete out [T, *]: fill in masked tokens, add the shared experts' part, join slices, put padding back."""
        if self._mask is not None and self._mask_dict is not None:
            mask, mask_dict = self._mask, self._mask_dict
            out = map_structure(lambda leaf: _fill_masked(leaf, topk_weights, mask, mask_dict), out)
        if beside is not None:
            out = out + beside
        if self._slices is not None:
            out = self._slices.join(out)
        out = self.batch.put_back(out)
        # last: the record of this forward lives as long as the graph node of its output
        if self.forward is not None and self._forwards is not None and self.is_counted:
            self._forwards.keep(self.forward, out, training)
        return out

    def run_or_replay(self, exchange: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Call exchange(), which needs other ranks; a repeated forward returns what its original got, without them."""
        return exchange() if self.forward is None else self.forward.run_or_replay(exchange)

    def exchange_counts(self, exchange: Callable[[], torch.Tensor], group: str) -> torch.Tensor:
        """Exchange counts of rows between the ranks of a group, given by its name; a repetition replays them.

        A rank without tokens cannot find its original, and exchanges again. If the group has one, so do all others.
        """
        # in the repetition every rank replays; where one could not, all exchange once more, to agree on its counts
        counts = self.run_or_replay(exchange)
        lost = self.forward is not None and self.is_repeated and group in self.forward.groups_with_empty_rank
        return exchange() if lost else counts

    def note_empty_rank(self, has_empty_rank: bool, group: str) -> None:
        """Remember for the repetition whether one of the ranks of a group has no tokens."""
        if has_empty_rank and self.forward is not None and not self.is_repeated:
            self.forward.groups_with_empty_rank.add(group)

    def count(self, topk_idx: torch.Tensor, num_experts: int) -> torch.Tensor:
        """Count the choices of each expert [E]; the same tensor of choices is counted once. Do not write into it."""
        for counted, counts in self._counts:
            if counted is topk_idx:
                return counts
        self.note_counts(topk_idx, ops.count_tokens(topk_idx, num_experts))
        return self._counts[-1][1]

    def note_counts(self, topk_idx: torch.Tensor, counts: torch.Tensor) -> None:
        """Keep counts [E] of topk_idx for count()."""
        self._counts.append((topk_idx, counts))


# a context variable: threads that run one layer at the same time have a step each
_running: ContextVar[Step | None] = ContextVar("the forward that runs", default=None)


def current_step() -> Step | None:
    """Return the step of the layer that calls its gate; None outside of this call and in compiled graphs."""
    return None if (torch.compiler.is_dynamo_compiling() or torch.compiler.is_exporting()) else _running.get()


def begin(
    forwards: Forwards,
    slices: _Slices | None,
    moe_inp: Nest,
    valid: torch.Tensor | None,
    mask: torch.Tensor | None,
    mask_dict: Mapping[int, Any] | None,
    training: bool,
    gate_inp: Nest | None = None,
) -> Step:
    """Begin the step of a forward. moe_inp: a tensor [T, *] or a nest of them; other arguments: FMoE."""
    # 1. Check the input: plain tensors of a floating dtype with one T. A single tensor, the usual case, is found fast.
    both = moe_inp if gate_inp is None else (moe_inp, gate_inp)
    if type(both) is torch.Tensor:
        leaves = [both]
    else:
        if isinstance(moe_inp, PackedSequence):
            check_tensor("moe_inp", moe_inp)
        leaves = [both] if isinstance(both, torch.Tensor) else leaves_of(both)
        for leaf in leaves:
            if type(leaf) is not torch.Tensor and isinstance(leaf, torch.Tensor):
                check_tensor("moe_inp", leaf)
    num_tokens = _check(leaves)
    if gate_inp is not None:
        _check(leaves_of(gate_inp), "gate_inp")
    # 2. Find out which tokens are real, and whether this forward repeats another; a compiled graph never does.
    if torch.compiler.is_dynamo_compiling() or torch.compiler.is_exporting():
        if is_exporting():
            _refuse_onnx()
        batch = current_batch() if valid is None else with_valid(current_batch(), valid)
        batch.check(num_tokens)
        step = Step(batch, None, False, True, is_traced=True)
    else:
        if torch.jit.is_tracing():
            _refuse_onnx()
        step = _find_or_begin(forwards, leaves[0], valid, training)
    # 3. Take padding, then the other ranks' slices, off the tokens and off the mask.
    if step.batch.rows is not None:
        both = step.batch.take(both)
    if mask is not None:
        mask = step.batch.take(mask.flatten())
    if slices is not None:
        both, mask = slices.cut(both), None if mask is None else slices.cut(mask)
    step.x, step.gate_x = (both, both) if gate_inp is None else both
    step._slices, step._mask, step._mask_dict = slices, mask, mask_dict
    return step


def _refuse_onnx() -> None:
    """Raise RuntimeError inside torch.onnx.export, whether by torch.export (dynamo=True) or by torch.jit.trace."""
    if torch.onnx.is_in_onnx_export():
        raise RuntimeError(
            "ONNX has no operators for an FMoE layer: export the model with torch.export.export() and "
            "torch.export.save(), or compile it with torch._inductor.aoti_compile_and_package()"
        )


def _find_or_begin(
    forwards: Forwards, first: torch.Tensor, valid: torch.Tensor | None, training: bool
) -> Step:
    """Begin a step: with the record of its original for a repetition, with a new record if it may be repeated."""
    repeats = is_repeated()
    # a selective checkpoint compares the operators of both forwards: there a repetition computes everything again
    forward = forwards.find(first) if repeats and not is_selective() else None
    if forward is not None:
        return Step(forward.batch, forward, True, False)
    batch = current_batch() if valid is None else with_valid(current_batch(), valid)
    batch.check(first.shape[0])
    step = Step(batch, None, False, not (repeats or _uncounted.get()))
    if repeats or can_be_repeated(training or batch.rows is not None):
        if is_selective():
            if current_batch().num_tokens is not None:
                raise RuntimeError(
                    "a selective checkpoint repeats the forward outside of valid_tokens(), packed_sequences() and "
                    "token_ids(): pass valid= to the layer, or use torch.utils.checkpoint without context_fn"
                )
            step.is_selective = True
        else:
            step.forward, step._forwards = forwards.begin(first, batch), forwards
    return step


def _check(leaves: list[Any], name: str = "moe_inp") -> int:
    """Return T, the number of tokens of all leaves; ValueError if they differ, TypeError for integer tokens."""
    # the usual case first, in little host time
    x = leaves[0] if len(leaves) == 1 else None
    if isinstance(x, torch.Tensor) and x.is_floating_point() and x.dim() > 0:
        return x.shape[0]
    sizes = [x.shape[0] if isinstance(x, torch.Tensor) and x.dim() > 0 else None for x in leaves]
    if not sizes or sizes[0] is None or any(size != sizes[0] for size in sizes):
        kinds = [list(x.shape) if isinstance(x, torch.Tensor) else type(x).__name__ for x in leaves]
        raise ValueError(f"{name} must be tensors [T, *] with one number of tokens T, but got {kinds}")
    dtypes = {x.dtype for x in leaves}
    if not any(dtype.is_floating_point or dtype.is_complex for dtype in dtypes):
        raise TypeError(f"{name} must have tokens of a floating dtype, but got {', '.join(map(str, dtypes))}")
    return sizes[0]


_uncounted: ContextVar[bool] = ContextVar("forwards only look ahead", default=False)


@contextmanager
def uncounted() -> Iterator[None]:
    """Let forwards in the block count neither for loads nor for biases, as those that look ahead at microbatches."""
    token = _uncounted.set(True)
    try:
        yield
    finally:
        _uncounted.reset(token)


def is_counted() -> bool:
    """Return whether this forward counts for loads and biases: it is neither repeated nor uncounted()."""
    if torch.compiler.is_dynamo_compiling() or torch.compiler.is_exporting():
        return True
    step = _running.get()
    return not (is_repeated() or _uncounted.get()) if step is None else step.is_counted


def count_choices(topk_idx: torch.Tensor, num_experts: int) -> torch.Tensor:
    """Count the choices of each expert [num_experts] int64, the same choices once a step. Do not write into it."""
    step = current_step()
    return ops.count_tokens(topk_idx, num_experts) if step is None else step.count(topk_idx, num_experts)


_counting = threading.Lock()  # of add_counts(): threads that run one layer add to the same counters


def add_counts(total: torch.Tensor, counts: torch.Tensor) -> None:
    """Add counts to total, in place, also where threads add to the same total at the same time."""
    if torch.compiler.is_dynamo_compiling() or torch.compiler.is_exporting():
        total.add_(counts)
        return
    with _counting:
        total.add_(counts)


def note_selected(topk_idx: torch.Tensor) -> None:
    """Keep the choices of a gate before capacity drops any, for a repetition."""
    step = current_step()
    if step is not None:
        step.selected = topk_idx


def run_or_replay(exchange: Callable[[], torch.Tensor]) -> torch.Tensor:
    """Step.run_or_replay() of the running step."""
    step = current_step()
    return exchange() if step is None else step.run_or_replay(exchange)


def forward_of_layer(gate: object) -> Forward | None:
    """Return the record that this forward leaves, or finds if it is repeated; None if nothing can repeat it.

    RuntimeError if a checkpoint repeats it and there is no record: a gate outside of a layer, a selective checkpoint.
    """
    step = current_step()
    if step is not None:
        if step.forward is None and is_repeated():
            raise RuntimeError(
                f"the loss of {type(gate).__name__} spans several microbatches, and a selective checkpoint repeats its "
                "layer without a record of which: use torch.utils.checkpoint without context_fn"
            )
        return step.forward
    if is_repeated():
        raise RuntimeError(
            f"a checkpoint repeats {type(gate).__name__} outside of an FMoE layer: which forward, and of which "
            "microbatch, is unknown; checkpoint the layer, or what has it inside"
        )
    return None


def _fill_masked(
    out: torch.Tensor, topk_weights: torch.Tensor, mask: torch.Tensor, mask_dict: Mapping[int, Any]
) -> torch.Tensor:
    """Fill out [T, *] where mask (T entries) is a key of mask_dict: with its value (scalar, [*], [K, *]), weighted."""
    # a filling counts as the result of each of the token's K choices, so that it is weighted as they are
    of_rows = _of_rows(mask, out)
    for value, filling in mask_dict.items():
        filling = torch.as_tensor(filling, dtype=topk_weights.dtype, device=out.device)
        filling = filling.expand(topk_weights.shape[1], *out.shape[1:])  # [K, *]
        weighted = torch.tensordot(topk_weights, filling, dims=1).to(out.dtype)  # [T, *]
        out = torch.where(of_rows == value, weighted, out)
    return out


def _of_rows(mask: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Shape mask to [T, 1, ...], which selects rows of [T, *]."""
    return mask.to(rows.device).reshape(-1, *(1 for _ in rows.shape[1:]))
