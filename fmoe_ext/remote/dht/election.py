"""Elections: which record of a uid most of the nearest nodes vouch for, and how many show a claim to a beam search."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from fmoe_ext.remote.dht.node import Holder, Nearby
from fmoe_ext.remote.dht.records import SignedRecord, uid_key
from fmoe_ext.remote.dht.storage import Refusal


def elect(holders: Sequence[Holder], uid: str, now: float) -> SignedRecord | None:
    """The record that most nodes vouch for, of those that live and whose owner has said nothing newer."""
    words = [record for at in holders for record in at.records if record.uid == uid]
    last: dict[str, SignedRecord] = {}
    for record in words:
        if record.owner not in last or last[record.owner].sequence < record.sequence:
            last[record.owner] = record
    live = [record for record in last.values() if record.is_live(now)]
    votes = Counter(
        owner for at in holders if (owner := _vote(at, uid, {r.owner for r in live}, now)) is not None
    )
    return winner(live, votes) if live else None


def _vote(at: Holder, uid: str, candidates: Collection[str], now: float) -> str | None:
    """The owner that a node stands for: one, however many records it repeats."""
    kept = [r for r in at.records if r.uid == uid and not r.is_withdrawn and r.owner in candidates]
    first = min(kept, key=lambda r: (not r.is_live(now), r.fence, r.owner), default=None)
    return None if first is None else first.owner


def winner(live: Sequence[SignedRecord], votes: Mapping[str, int]) -> SignedRecord:
    """Most votes, then the oldest claim, then any order on which all agree."""
    return min(live, key=lambda record: (-votes[record.owner], record.fence, record.owner))


def live_uids(nearby: Nearby, now: float) -> list[str]:
    return [record.uid for at in nearby.holders for record in at.records if record.is_live(now)]


def num_showing(mine: SignedRecord, said: Mapping[int, Sequence[Refusal | None]], now: float) -> int:
    """The nodes that show a uid below each of its prefixes, at least; another owner's record shows it as well.

    said: by key, what the nodes nearest to it have said about the record.
    """

    def shows(refusal: Refusal | None) -> bool:
        holder = None if refusal is None else refusal.holder
        return refusal is None or (holder is not None and holder.uid == mine.uid and holder.is_live(now))

    return min(sum(map(shows, words)) for key, words in said.items() if key != uid_key(mine.uid))
