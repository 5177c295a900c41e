"""batch_invariant(), use_batch_invariant(): the mode in which a row's result does not depend on the rows beside it.

It is on for the whole process (use_batch_invariant) or for a thread (batch_invariant), as torch.no_grad is. The native
kernels have both switches of their own, which they read where an operator is called. torch's functions are replaced on
the thread that turns the mode on, by a TorchFunctionMode (in_order.py), which torch has for each thread. A backward may
run on another thread, or after the block: the gradients of our operators, and a checkpoint's repetition of a layer,
have the mode of their forward.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from fmoe_ext import _env


class _Switch:
    is_on = False  # for the process, or inside a block on any thread: what torch.compile can read and guard
    of_process = False
    num_blocks = 0  # that are open on all threads
    functions: type[TorchFunctionMode] | None = None  # in_order.py's, whose operators import this file


class _Thread(threading.local):
    num_blocks = 0  # that are open on this thread
    num_functions = 0  # reasons to replace torch's functions: blocks, and the mode of the process
    of_process = False  # it turned the mode on for the process, and not off again
    functions: TorchFunctionMode | None = None


_switch = _Switch()
_thread = _Thread()
_lock = threading.Lock()


def is_batch_invariant() -> bool:
    """Return whether a row's result must not depend on the rows beside it."""
    if not _switch.is_on:
        return False
    return (
        torch.compiler.is_dynamo_compiling()
        or torch.compiler.is_exporting()
        or _switch.of_process
        or _thread.num_blocks > 0
    )


def use_batch_invariant(on: bool) -> None:
    """Give a row the same bits in every product whatever other rows there are, or no longer.

    Our operators follow it in the whole process, as with torch.use_deterministic_algorithms; torch's functions on the
    thread that calls it. Inside a block of batch_invariant() the mode stays on. docs/routing.md has limits and cost.
    """
    torch.ops.fmoe_ext._set_batch_invariant(on)
    if on != _thread.of_process:  # another thread may have changed the mode since
        _thread.of_process = on
        _replace_functions(1 if on else -1)
    with _lock:
        _switch.of_process = on
        _switch.is_on = on or _switch.num_blocks > 0


def _count(change: int) -> None:
    _thread.num_blocks += change
    torch.ops.fmoe_ext._set_thread_batch_invariant(_thread.num_blocks > 0)
    with _lock:
        _switch.num_blocks += change
        _switch.is_on = _switch.of_process or _switch.num_blocks > 0


def cover_torch_functions(mode: type[TorchFunctionMode]) -> None:
    """Let the mode replace torch's functions by those of a TorchFunctionMode."""
    _switch.functions = mode


def _replace_functions(change: int) -> None:
    before = _thread.num_functions
    _thread.num_functions += change
    if before == 0 and change > 0 and _switch.functions is not None:
        _thread.functions = _switch.functions()
        _thread.functions.__enter__()
    elif _thread.num_functions == 0 and _thread.functions is not None:
        _thread.functions.__exit__(None, None, None)
        _thread.functions = None


@contextmanager
def batch_invariant_kernels() -> Iterator[None]:
    """Turn the mode on for our kernels alone: for a backward, which computes nothing by torch's functions."""
    _count(1)
    try:
        yield
    finally:
        _count(-1)


@contextmanager
def batch_invariant() -> Iterator[None]:
    """Turn the mode of use_batch_invariant(True) on for this thread inside the block; blocks may end in any order.

    A program of torch.compile cannot tell threads apart: it is in the mode while any thread is inside a block, except
    for its products, and the backward of a compiled program has the mode of the thread that runs it.
    Raises RuntimeError for a block that ends on another thread than it began on.

    Example:

        >>> layer = fmoe_ext.FMoETransformerMLP(num_expert=4, d_model=8, d_hidden=16)
        >>> x = torch.randn(5, 8)
        >>> with batch_invariant():
        ...     torch.equal(layer(x)[:1], layer(x[:1]))
        True
    """
    thread = threading.get_ident()
    _count(1)
    _replace_functions(1)
    try:
        yield
    finally:
        if threading.get_ident() != thread:
            raise RuntimeError(
                "batch_invariant() began on another thread: end the block on the thread that began it"
            )
        _replace_functions(-1)
        _count(-1)


def with_mode_of_forward(
    setup_context: Callable[..., None] | None, backward: Callable[..., Any]
) -> tuple[Callable[..., None], Callable[..., Any]]:
    """Wrap both functions of a gradient, so that backward runs in the mode if the forward did."""

    def setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        if is_batch_invariant():
            ctx.is_batch_invariant = True
        if setup_context is not None:
            setup_context(ctx, inputs, output)

    def in_mode(ctx: Any, *grads: Any) -> Any:
        if getattr(ctx, "is_batch_invariant", False) and not is_batch_invariant():
            with batch_invariant_kernels():
                return backward(ctx, *grads)
        return backward(ctx, *grads)

    return setup, in_mode


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    """Compute x.sigmoid(); in the mode by a softmax of two, which torch computes alike wherever an element stands.

    Where a tensor ends between two of its vectors, torch takes another exponential function than inside.
    """
    if not is_batch_invariant():
        return x.sigmoid()
    return torch.stack((x, torch.zeros_like(x)), -1).softmax(-1)[..., 0]


def kernels_depend_on_batch(t: torch.Tensor) -> str | None:
    """Say why the kernels of t's device do not keep the promise; None where they do."""
    mode = _env.get("FMOE_GPU_KERNELS")
    if not t.is_cuda or mode == "portable":
        return None
    return f"of the CUDA kernels the portable ones do, but FMOE_GPU_KERNELS is {mode!r}: set it to portable"
