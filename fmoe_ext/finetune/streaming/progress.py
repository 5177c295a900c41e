"""Report how far a step through the layers of a stream is, tokens per second and time left: stream(progress=)."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import NamedTuple, TypeAlias


class Progress(NamedTuple):
    """State of a step after one of its layers."""

    done: int  # layers, counted once forward and, in training, once more backward
    total: int
    seconds: float  # since the step began
    tokens: int  # of the step

    @property
    def tokens_per_second(self) -> float:
        """Tokens of the step in its time so far, by the share of the layers that are done."""
        return self.tokens * self.done / self.total / max(self.seconds, 1e-9)

    @property
    def seconds_left(self) -> float:
        """Time for the other layers, if they take as long as those that are done."""
        return self.seconds * (self.total - self.done) / self.done


Listener: TypeAlias = Callable[[Progress], None]


def print_progress(progress: Progress) -> None:
    """Write the progress to one line of standard error."""
    end = "\n" if progress.done == progress.total else ""
    print(
        f"\rlayer {progress.done} of {progress.total}, {progress.tokens_per_second:.1f} tokens/s, "
        f"{progress.seconds_left:.0f} s left ",
        end=end,
        file=sys.stderr,
        flush=True,
    )


class Steps:
    """Counts the layers of a step for a listener. Streamed.forward calls begin() before its first layer."""

    def __init__(self, num_layers: int, listener: Listener) -> None:
        self._num_layers, self._listener = num_layers, listener
        self._begun = time.monotonic()
        self._done = 0

    def after(self, index: int, tokens: int, *, is_backward: bool, is_training: bool) -> None:
        """Note that the experts of layer `index` were computed."""
        # the backward goes from the last layer (num_layers + 1 done) to the first (2 * num_layers)
        self._done = 2 * self._num_layers - index if is_backward else index + 1
        total = self._num_layers * (2 if is_training else 1)
        self._listener(Progress(self._done, total, time.monotonic() - self._begun, tokens))

    def begin(self) -> None:
        """Note the first layer of a forward."""
        self._begun = time.monotonic()
