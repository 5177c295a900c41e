"""Let the room gpu choose kernels for CUDA tensors; without CUDA kernels nothing is registered and nothing happens.

ops/ must not import gpu/, which is above it: gpu registers a chooser here instead.
"""

from collections.abc import Callable
from typing import Final


class Chooser:
    """Chooses kernels before a product; this one has nothing to choose."""

    def before(self, t: object) -> None:
        """Choose before each product of a tensor t."""

    def while_compiling(self, t: object) -> None:
        """Choose where a fake kernel runs."""

    def reserve(self, owner: object, sms: int, is_done: Callable[[], bool]) -> Callable[[], object]:
        """Keep SMs of a GPU free while owner lives, until is_done() or until the result is called."""
        return lambda: None


_CHOOSERS: Final[list[Chooser]] = [Chooser()]  # the last one chooses


def register(chooser: Chooser) -> None:
    """Let this one choose from now on."""
    _CHOOSERS.append(chooser)


def before(t: object) -> None:
    _CHOOSERS[-1].before(t)


def while_compiling(t: object) -> None:
    _CHOOSERS[-1].while_compiling(t)


def reserve(owner: object, sms: int, is_done: Callable[[], bool]) -> Callable[[], object]:
    return _CHOOSERS[-1].reserve(owner, sms, is_done)
