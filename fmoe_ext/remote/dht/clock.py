"""NetworkClock: a time that nodes agree on although their clocks do not."""

import statistics
import time
from collections import OrderedDict
from collections.abc import Callable

MAX_VOICES = 64  # clocks of others that are remembered
MAX_OFFSET = 3600.0  # seconds; a clock that is further away has no voice


class NetworkClock:
    """The median of this host's clock and those of the nodes that answered it.

    Two nodes meet in the middle; among many a wrong clock, their own included, changes nothing. Records expire by
    this time, so neither a host whose clock is late nor one whose clock is early loses its experts.
    """

    def __init__(self, local: Callable[[], float] = time.time):
        self.local = local
        self._offsets: OrderedDict[int, float] = OrderedDict()
        self.offset = 0.0  # seconds that the network is ahead of this host

    def now(self) -> float:
        return self.local() + self.offset

    def hear(self, node_id: int, their_time: float, sent: float, received: float) -> None:
        """Counts a node's clock, read somewhere between two moments of the local one."""
        offset = their_time - (sent + received) / 2
        if abs(offset) > MAX_OFFSET:
            return
        if abs(offset) <= (received - sent) / 2:
            offset = 0.0  # no further away than the measurement can tell
        self._offsets[node_id] = offset
        self._offsets.move_to_end(node_id)
        while len(self._offsets) > MAX_VOICES:
            self._offsets.popitem(last=False)
        self.offset = statistics.median([0.0, *self._offsets.values()])

    def to_local(self, moment: float) -> float:
        """What this host's clock shows at a moment of the network's."""
        return moment - self.offset
