"""An owner's record of the warm copies that others keep, so that none of them is behind when it leaves."""

import time
from dataclasses import dataclass

from fmoe_ext.remote import protocol
from fmoe_ext.remote.wire import Message

LONGEST_LOOK = 4.0  # seconds; who claims to look more rarely is not waited for


@dataclass
class _Copy:
    """The best copy of one expert: which version it is, until when its holder should have looked again."""

    version: int = -1
    due: float = 0.0


class CopiesElsewhere:
    """Holders of copies say so in their Info and State calls, with the seconds until they look again."""

    def __init__(self) -> None:
        self.is_leaving = False
        self._copies: dict[str, _Copy] = {}

    def note_look(self, request: Message, uid: str) -> None:
        every = _seconds(request)
        if every is not None:
            self._copies.setdefault(uid, _Copy()).due = time.monotonic() + 2 * every + 1.0

    def note_copy(self, request: Message, uid: str, version: int) -> None:
        if _seconds(request) is not None and uid in self._copies:
            self._copies[uid].version = max(self._copies[uid].version, version)

    def is_awaited(self, uid: str, version: int) -> bool:
        """True if the holder of a copy of an expert will come for this version."""
        copy = self._copies.get(uid)
        return copy is not None and copy.version < version and time.monotonic() < copy.due


def _seconds(request: Message) -> float | None:
    """The seconds between looks of a holder of copies; None for other callers, and for nonsense."""
    try:
        every = float(request.meta[protocol.LOOKS_EVERY][:20])
    except (KeyError, ValueError):
        return None
    return every if 0 < every <= LONGEST_LOOK else None
