"""NetworkClock: a time on which the DHT's nodes agree although their hosts' clocks do not; records expire by it.

Every answer in the DHT has the network's time as its sender sees it. A node (node.py), which has one clock, takes the
median of others' answers as its offset from the local clock, so it ends where most nodes are, and a minority cannot
move it far.
"""

import statistics
import time
from collections import OrderedDict
from collections.abc import Callable

MAX_VOICES = 64  # addresses whose clocks are remembered
MAX_OFFSET = 3600.0  # seconds; a clock that is further away than this is ignored
MAX_RATE = 1.0  # seconds a second by which a node that has joined follows the others
LONGEST_PAUSE = 60.0  # seconds; a longer time since the last step counts as this, so that no step is larger


def _uptime() -> float:
    """Return seconds of a clock that cannot be set, and that goes on while the host sleeps, where there is one."""
    boot = getattr(time, "CLOCK_BOOTTIME", None)
    return time.monotonic() if boot is None else time.clock_gettime(boot)


class NetworkClock:
    """The median of the network's time as this node and those that answered it have it; one voice an address.

    A node that joins takes the median of the nodes that it joins. Later it follows by at most MAX_RATE seconds a
    second, so that attackers who win a majority cannot expire all records at once. A node alone begins with its host's
    clock. Setting that clock later has no effect: the local time is the wall clock at the start plus the time since.
    """

    def __init__(self, local: Callable[[], float] | None = None):
        began = time.time() - _uptime()
        self.local = local or (lambda: began + _uptime())
        self._offsets: OrderedDict[str, float] = OrderedDict()
        self._stepped_at = self.local()
        self.offset = 0.0  # seconds that the network is ahead of this host
        self.is_joining = False

    def now(self) -> float:
        return self.local() + self.offset

    def hear(self, address: str, their_time: float, sent: float, received: float) -> None:
        """Take in the network's time as an address has it, read between two moments of the local clock."""
        # 1. the difference to our local clock; within the measurement's error it counts as none to our time
        offset = their_time - (sent + received) / 2
        if abs(offset) > MAX_OFFSET:
            return
        if abs(offset - self.offset) <= (received - sent) / 2:
            offset = self.offset
        # 2. one voice an address, or a host could outvote the others with many ids
        self._offsets[address] = offset
        self._offsets.move_to_end(address)
        while len(self._offsets) > MAX_VOICES:
            self._offsets.popitem(last=False)
        # 3. the median; at once while joining, otherwise in small steps, and with our own voice
        if self.is_joining:
            self.offset = statistics.median(self._offsets.values())
            self._stepped_at = received
        else:
            wanted = statistics.median([self.offset, *self._offsets.values()])
            furthest = MAX_RATE * min(max(0.0, received - self._stepped_at), LONGEST_PAUSE)
            self._stepped_at = received
            self.offset += max(-furthest, min(furthest, wanted - self.offset))

    def seconds_until(self, moment: float) -> float:
        """Return the seconds from now to a moment of the network's time."""
        return moment - self.now()
