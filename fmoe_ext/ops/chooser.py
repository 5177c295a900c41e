"""Let gpu/ choose kernels for CUDA tensors; without CUDA kernels there is nothing to choose.

Operators call before() and while_compiling() here, an exchange over NCCL reserve(). ops/ must not import gpu/, which is
above it: instead, gpu/kernels.py registers its chooser when it is imported.
"""

from collections.abc import Callable
from typing import Final


class Chooser:
    """The interface of a chooser; this one has nothing to choose."""

    def before(self, t: object) -> None:
        """Choose kernels for the device of t; called before each product of t."""

    def while_compiling(self, t: object) -> None:
        """Choose kernels for the device of t; called by fake kernels, since a compiled graph does not call before()."""

    def reserve(self, owner: object, sms: int, is_done: Callable[[], bool]) -> Callable[[], object]:
        """Keep SMs of a GPU free for other kernels, until owner is collected, is_done() or the result is called.

        is_done is asked before a product outside of compiled graphs.
        """
        return lambda: None


_CHOOSERS: Final[list[Chooser]] = [Chooser()]  # the last one chooses


def register(chooser: Chooser) -> None:
    """Let this chooser choose from now on."""
    _CHOOSERS.append(chooser)


def before(t: object) -> None:
    _CHOOSERS[-1].before(t)


def while_compiling(t: object) -> None:
    _CHOOSERS[-1].while_compiling(t)


def reserve(owner: object, sms: int, is_done: Callable[[], bool]) -> Callable[[], object]:
    return _CHOOSERS[-1].reserve(owner, sms, is_done)
