"""Tell the layers of a model about a batch where no argument reaches them: its real tokens, sequences, vocabulary ids.

    with valid_tokens(attention_mask), packed_sequences(cu_seqlens), token_ids(input_ids):
        loss = model(batch)

A block adds its facts to the current Batch, which a layer reads when its forward begins. Here are also
nests: lists, tuples and dicts of tensors, which gates and experts of users may take instead of a tensor.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar, Token
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch.nn.utils.rnn import PackedSequence

from fmoe_ext._sharded import is_dtensor

# A tensor [T, *], or a list, tuple or dict of nests with one T.
Nest: TypeAlias = Any


def map_structure(fn: Callable[..., Any], *trees: Nest) -> Nest:
    """Call fn with the corresponding tensors of nests of one structure -> a nest of the results."""
    first = trees[0]
    if isinstance(first, dict):
        return type(first)((key, map_structure(fn, *(tree[key] for tree in trees))) for key in first)
    if isinstance(first, (list, tuple)):
        mapped = [map_structure(fn, *parts) for parts in zip(*trees, strict=True)]
        # a NamedTuple, which has _fields, takes its values apart
        return type(first)(*mapped) if hasattr(first, "_fields") else type(first)(mapped)
    return fn(*trees)


def leaves_of(tree: Nest) -> list[Any]:
    """List the tensors of a nest, in the order in which map_structure visits them."""
    if isinstance(tree, torch.Tensor):
        return [tree]
    leaves: list[Any] = []
    map_structure(leaves.append, tree)
    return leaves


_NEST = "a nest of tensors needs an FMoE with a gate and experts of its own"


def check_tensor(name: str, x: object) -> None:
    """Raise TypeError unless x is a plain tensor, with what to pass instead."""
    if isinstance(x, PackedSequence):
        text = "a PackedSequence: call the layer on x.data, and put the result back with x._replace(data=...)"
    elif not isinstance(x, torch.Tensor):
        is_nest = isinstance(x, (dict, list, tuple))
        text = f"a {type(x).__name__}: {_NEST if is_nest else 'make one with torch.as_tensor(x)'}"
    elif is_dtensor(x):
        text = "a DTensor: pass x.to_local(), and make one of the result with DTensor.from_local()"
    elif x.is_nested:
        text = (
            "a nested tensor: call the layer on x.values() (of torch.jagged), and make one of the result with "
            "torch.nested.nested_tensor_from_jagged(out, x.offsets())"
        )
    else:
        return
    raise TypeError(f"{name} must be a plain tensor, but is {text}")


@dataclass(frozen=True)
class Batch:
    """Facts about the tokens that reach a layer."""

    num_tokens: int | None = None  # T; None if no block or argument says it
    rows: torch.Tensor | None = None  # [V] int64: the real tokens, ascending; None for all
    sequences: torch.Tensor | None = None  # [T] int64: the number of each token's sequence, if given
    ids: torch.Tensor | None = None  # [T] int64: each token's number in the vocabulary, if given

    def check(self, num_tokens: int) -> None:
        """Raise ValueError for another number of tokens."""
        if self.num_tokens not in (None, num_tokens):
            raise ValueError(
                f"valid, token_ids or the packed sequences have {self.num_tokens} entries but the input has "
                f"{num_tokens} tokens. Call a layer whose tokens differ from the model's outside of these blocks, with "
                "its own valid="
            )

    def take(self, x: Nest) -> Nest:
        """Take the real tokens of x [T, *] or a nest."""
        return x if self.rows is None else map_structure(lambda leaf: leaf.index_select(0, self.rows), x)

    def put_back(self, out: Nest) -> Nest:
        """Put out [V, *] or a nest at the places of the real tokens, zero at the others -> [T, *]."""
        if self.rows is None:
            return out
        put_back: Any = (
            _put_rows
            if (torch.compiler.is_dynamo_compiling() or torch.compiler.is_exporting())
            else _PutBack.apply
        )
        return map_structure(lambda leaf: put_back(leaf, self.rows, self.num_tokens), out)

    def sequences_of(self, seq_len: int | None) -> torch.Tensor | None:
        """Return the sequence of each real token, [V]; None where all have seq_len tokens, one after the other."""
        if self.sequences is not None:
            return self.take(self.sequences)
        if self.rows is None or seq_len is None:
            return None
        return self.rows // seq_len


def _put_rows(out: torch.Tensor, rows: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """Put out [V, *] into these rows of zeros -> [T, *]."""
    return out.new_zeros((num_tokens, *out.shape[1:])).index_copy(0, rows, out)


class _PutBack(torch.autograd.Function):
    """_put_rows as a node without a saved tensor (ctx.rows is not one).

    A checkpoint repeats a forward when its first saved tensor is asked for. A saved one here would make ranks with
    padding do so before the exchange of gradients, and ranks without padding after it.
    """

    generate_vmap_rule = True

    forward = staticmethod(_put_rows)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        _, ctx.rows, ctx.num_tokens = inputs

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return grad.index_select(0, ctx.rows), None, None

    @staticmethod
    def jvp(ctx: Any, tangent: torch.Tensor, *_: None) -> torch.Tensor:
        return _put_rows(tangent, ctx.rows, ctx.num_tokens)


# The facts of the blocks are kept twice:
#   _batch   a context variable: each thread (and async task) has its own
#   _open    a plain object, for compiled graphs, which cannot read context variables: the block that was entered last
#            on any thread. A graph checks when it runs that this was its own thread (_of_this_thread).
# B039 is about mutable defaults, and a Batch is frozen.
_batch: ContextVar[Batch] = ContextVar("the tokens that the layers get", default=Batch())  # noqa: B039


class _Open:
    """The state that compiled graphs see: the block that was entered last on any thread."""

    def __init__(self) -> None:
        # all are set here: a compiled graph that first sets an attribute is compiled again at its second call
        self.num_blocks = 0
        # thread: the one that entered the block; a tensor with its number for a block that a graph entered
        self.batch: Batch
        self.thread: int | torch.Tensor
        self.batch, self.thread = _nothing
        self.blocks: list[_Block] = []  # open ones; they end in any order


@dataclass(frozen=True, eq=False)
class _Block:
    """A block that has been entered outside of compiled graphs."""

    batch: Batch
    thread: int
    token: Token[Batch]  # to reset _batch by
    before: tuple[Batch, int | torch.Tensor]  # what graphs saw until this block was entered


_nothing: tuple[Batch, int | torch.Tensor] = Batch(), 0
_open = _Open()
_lock = threading.Lock()  # guards _open
Outer: TypeAlias = "_Block | tuple[Batch, int | torch.Tensor]"


def is_inside_a_block() -> bool:
    """Return whether current_batch() may hold facts."""
    return _open.num_blocks > 0


def current_batch() -> Batch:
    """Return the facts of the blocks around this call."""
    batch, thread = _open.batch, _open.thread
    if not (torch.compiler.is_dynamo_compiling() or torch.compiler.is_exporting()):
        # past torch's recompile_limit a graph may have entered a block around a layer that runs without one
        is_of_graph = isinstance(thread, torch.Tensor) and int(thread) == threading.get_ident()
        return batch if is_of_graph else _batch.get()
    # In a graph: those of _open, checked at each run to be of the thread that runs it.
    if isinstance(thread, torch.Tensor) or thread == 0:
        return batch
    rows, sequences, ids = (
        None if x is None else _of_this_thread(x, thread) for x in (batch.rows, batch.sequences, batch.ids)
    )
    return replace(batch, rows=rows, sequences=sequences, ids=ids)


@torch.library.custom_op("fmoe_ext::of_this_thread", mutates_args=())
def _of_this_thread(x: torch.Tensor, thread: int) -> torch.Tensor:
    """Copy x, a fact from a block of `thread`; RuntimeError on another thread. An operator: graphs call it as it is."""
    if threading.get_ident() != thread:
        raise RuntimeError(
            "a compiled layer runs while another thread is inside valid_tokens(), packed_sequences() or token_ids(), "
            "and cannot tell whose tokens these are: pass valid= to the layer, or run one thread at a time"
        )
    return x.clone()


@_of_this_thread.register_fake
def _(x: torch.Tensor, thread: int) -> torch.Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("fmoe_ext::thread_of", mutates_args=())
def _thread_of(x: torch.Tensor) -> torch.Tensor:
    """Return the number of the thread that runs a graph. x: any tensor; of none, a graph would keep the number."""
    return torch.tensor(threading.get_ident(), device="cpu")


@_thread_of.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty((), dtype=torch.int64, device="cpu")


def enter(batch: Batch) -> Outer:
    """Make current_batch() this one -> what leave() needs."""
    # inside a graph blocks end in order, so that the state before is enough
    if torch.compiler.is_dynamo_compiling() or torch.compiler.is_exporting():
        outer = _open.batch, _open.thread
        fact = next((x for x in (batch.rows, batch.sequences, batch.ids) if x is not None), None)
        _open.batch, _open.thread = batch, 0 if fact is None else _thread_of(fact)
        _open.num_blocks += 1
        return outer
    with _lock:
        block = _Block(batch, threading.get_ident(), _batch.set(batch), (_open.batch, _open.thread))
        _open.blocks.append(block)
        _open.batch, _open.thread = batch, block.thread
        _open.num_blocks += 1
    return block


def leave(outer: Outer) -> None:
    """Make current_batch() the one before enter() again."""
    if isinstance(outer, tuple):
        _open.num_blocks -= 1
        _open.batch, _open.thread = outer
        return
    with _lock:
        was_last = _open.blocks[-1] is outer
        _open.blocks.remove(outer)
        _open.num_blocks -= 1
        if was_last:
            batch, thread = outer.before
            # the block before may have ended meanwhile; then graphs see the last one that is open
            is_of_block = isinstance(thread, int) and thread != 0
            if is_of_block and not any(block.batch is batch for block in _open.blocks):
                last = _open.blocks[-1] if _open.blocks else None
                batch, thread = _nothing if last is None else (last.batch, last.thread)
            _open.batch, _open.thread = batch, thread
    _batch.reset(outer.token)


@contextmanager
def batch_is(batch: Batch) -> Iterator[None]:
    """Set current_batch() inside the block."""
    outer = enter(batch)
    try:
        yield
    finally:
        leave(outer)


def with_valid(batch: Batch, valid: torch.Tensor) -> Batch:
    """Keep only the tokens with valid != 0 as the real ones of batch; copies one number to the host."""
    if valid.is_floating_point() and bool(((valid != 0) & (valid != 1)).any()):
        raise ValueError(
            "valid must be True (1) for real tokens and False (0) for padding, but has other values: an additive "
            "attention mask is valid = mask == 0"
        )
    batch.check(valid.numel())
    # nonzero() waits for a GPU: the number of rows must be known on the host
    rows = valid.detach().flatten().nonzero().squeeze(1)
    all_valid = (
        not (torch.compiler.is_dynamo_compiling() or torch.compiler.is_exporting())
        and rows.shape[0] == valid.numel()
    )
    return replace(batch, num_tokens=valid.numel(), rows=None if all_valid else rows)


def with_ids(batch: Batch, ids: torch.Tensor) -> Batch:
    """Add the numbers of its tokens in the vocabulary to a batch; TypeError for other dtypes."""
    if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise TypeError(f"ids must be integers, but got {ids.dtype}")
    batch.check(ids.numel())
    return replace(batch, num_tokens=ids.numel(), ids=ids.detach().flatten())


@contextmanager
def valid_tokens(mask: torch.Tensor | None) -> Iterator[None]:
    """Make every FMoE layer that is called in the block take the tokens with mask = 0 for padding, as with valid=mask.

    mask: bool or 0 / 1, one entry a token in the order in which the layers get them, [T] or [B, S]; None for no
    padding. The number of real tokens is copied to the host once for all layers. A forward that activation
    checkpointing repeats later has the mask of the original.

    Example:

        >>> layer = fmoe_ext.FMoETransformerMLP(num_expert=4, d_model=8, d_hidden=16)
        >>> x = torch.randn(2, 3, 8)  # the second sequence has one token and two of padding
        >>> with valid_tokens(torch.tensor([[1, 1, 1], [1, 0, 0]])):
        ...     y = layer(x)
        >>> y[1].any(dim=-1).tolist()
        [True, False, False]
    """
    batch = current_batch()
    with batch_is(batch if mask is None else with_valid(batch, mask)):
        yield


@contextmanager
def packed_sequences(cu_seqlens: torch.Tensor) -> Iterator[None]:
    """Tell gates with a loss for each sequence where the sequences end.

    cu_seqlens [B + 1]: 0 and the cumulative ends of the sequences among the T tokens that layers get, as
    flash-attention has them; it replaces the gate's seq_len. Empty sequences count for nothing. Raises ValueError if
    it does not rise from 0.

    Example:

        >>> gate = partial(fmoe_ext.SoftmaxGate, balance_loss="sequence", seq_len=6)
        >>> layer = fmoe_ext.FMoETransformerMLP(num_expert=4, d_model=8, d_hidden=16, gate=gate)
        >>> with packed_sequences(torch.tensor([0, 2, 6])):  # 6 tokens: a sequence of 2 and one of 4
        ...     layer(torch.randn(6, 8)).shape
        torch.Size([6, 8])
    """
    lengths = cu_seqlens.long().flatten().diff()
    if cu_seqlens.dim() != 1 or len(cu_seqlens) < 2 or int(cu_seqlens[0]) != 0 or int(lengths.min()) < 0:
        raise ValueError(f"cu_seqlens must rise from 0 to the number of tokens, but is {cu_seqlens.tolist()}")
    sequences = torch.arange(len(lengths), device=lengths.device).repeat_interleave(lengths)
    batch = current_batch()
    batch.check(len(sequences))
    with batch_is(replace(batch, num_tokens=len(sequences), sequences=sequences)):
        yield


@contextmanager
def token_ids(ids: torch.Tensor) -> Iterator[None]:
    """Make HashGates in the block choose by these ids of the tokens in the vocabulary.

    ids: integers, one entry a token in the order in which the layers get them, [T] or [B, S]. A forward that activation
    checkpointing repeats later has the ids of the original. Raises TypeError for other dtypes.

    Example:

        >>> gate = partial(fmoe_ext.HashGate, vocab_size=100)
        >>> layer = fmoe_ext.FMoETransformerMLP(num_expert=4, d_model=8, d_hidden=16, gate=gate)
        >>> with token_ids(torch.tensor([[5, 7, 5]])):
        ...     layer(torch.randn(1, 3, 8)).shape
        torch.Size([1, 3, 8])
    """
    with batch_is(with_ids(current_batch(), ids)):
        yield
