from collections.abc import Iterator
from contextlib import contextmanager

import torch

from fmoe_ext import _env


class _Switch:
    """Present mode of the native kernels, where torch.compile can read and guard it."""

    is_on = False


_switch = _Switch()


def is_batch_invariant() -> bool:
    """True if a row's result must not depend on the rows beside it."""
    return _switch.is_on


def use_batch_invariant(on: bool) -> None:
    """Has every product give a row the same bits whatever other rows there are, or no longer.

    Holds for the whole process, as torch.use_deterministic_algorithms does; docs/routing.md has its limits and cost.
    """
    torch.ops.fmoe_ext._set_batch_invariant(on)
    _switch.is_on = on


@contextmanager
def batch_invariant() -> Iterator[None]:
    """use_batch_invariant(True) inside the block, and what it was before afterwards.

    Example:

        >>> layer = fmoe_ext.FMoETransformerMLP(num_expert=4, d_model=8, d_hidden=16)
        >>> x = torch.randn(5, 8)
        >>> with batch_invariant():
        ...     torch.equal(layer(x)[:1], layer(x[:1]))
        True
    """
    before = is_batch_invariant()
    use_batch_invariant(True)
    try:
        yield
    finally:
        use_batch_invariant(before)


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    """x.sigmoid(); in the mode by a softmax of two, which torch computes in the same way wherever an element stands.

    Where a tensor ends between two of its vectors, torch takes another exponential function than inside.
    """
    if not is_batch_invariant():
        return x.sigmoid()
    return torch.stack((x, torch.zeros_like(x)), -1).softmax(-1)[..., 0]


def kernels_depend_on_batch(t: torch.Tensor) -> str | None:
    """Why the kernels of t's device do not keep the promise; None where they do."""
    mode = _env.get("FMOE_GPU_KERNELS")
    if not t.is_cuda or mode == "portable":
        return None
    return f"of the CUDA kernels the portable ones do, but FMOE_GPU_KERNELS is {mode!r}: set it to portable"
