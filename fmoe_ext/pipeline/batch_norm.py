"""Keep batch norms from counting a microbatch twice under a checkpoint, which runs its forward again in the backward.

Recomputing is the context of the second forward (stage.py, compat's Pipe): momentum is 0 in it, so that running mean
and variance stay, and the count of batches is set back.
"""

from collections.abc import Iterable
from contextvars import ContextVar

from torch import nn
from torch.nn import BatchNorm1d, BatchNorm2d, BatchNorm3d

BATCH_NORMS = (BatchNorm1d, BatchNorm2d, BatchNorm3d)

_recomputing: ContextVar[bool] = ContextVar("a checkpoint runs its forward again", default=False)


def batch_norms_of(module: nn.Module) -> list[nn.Module]:
    """List the batch norms of torch in a module."""
    return [m for m in module.modules() if isinstance(m, BATCH_NORMS)]


def is_recomputing() -> bool:
    """Return True in the second forward of a checkpoint that has a Recomputing."""
    return _recomputing.get()


class Recomputing:
    """The context of a checkpoint's second forward: batch norms among modules count nothing twice."""

    def __init__(self, modules: Iterable[nn.Module]):
        norms = (m for m in modules if isinstance(m, BATCH_NORMS))
        # without running statistics there is no count, and nothing to move
        self._norms = [(m, m.num_batches_tracked) for m in norms if m.num_batches_tracked is not None]

    def __enter__(self) -> None:
        self._token = _recomputing.set(True)
        self._before = [(norm.momentum, count.clone()) for norm, count in self._norms]
        for norm, _ in self._norms:
            norm.momentum = 0.0

    def __exit__(self, *_: object) -> None:
        _recomputing.reset(self._token)
        for (norm, count), (momentum, count_before) in zip(self._norms, self._before, strict=True):
            norm.momentum = momentum
            count.copy_(count_before)
