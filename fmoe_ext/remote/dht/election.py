"""Elections: which record of a uid most of the nearest nodes vouch for, and how many show a claim to a beam search.

Nodes do not agree with each other; the node that asks counts. Each node has one vote, or a liar could repeat itself,
and everybody breaks ties the same way, so that all who see the same nodes name the same owner.
"""

from collections import Counter
from collections.abc import Mapping, Sequence

from fmoe_ext.remote.dht.node import Holder, Nearby
from fmoe_ext.remote.dht.records import SignedRecord, uid_key
from fmoe_ext.remote.dht.storage import Refusal
from fmoe_ext.remote.discovery import DiscoveryError


def elect(holders: Sequence[Holder], uid: str, now: float) -> SignedRecord | None:
    """The record that most nodes vouch for, of those that live and whose owner has said nothing newer."""
    words = [record for at in holders for record in at.records if record.uid == uid]
    last: dict[str, SignedRecord] = {}
    for record in words:
        if record.owner not in last or last[record.owner].sequence < record.sequence:
            last[record.owner] = record
    live = [record for record in last.values() if record.is_live(now)]
    candidates = {record.owner for record in live}
    votes: Counter[str] = Counter()
    for at in holders:  # a node stands for one owner, however many records it repeats
        kept = [r for r in at.records if r.uid == uid and not r.is_withdrawn and r.owner in candidates]
        first = min(kept, key=lambda r: (not r.is_live(now), r.fence, r.owner), default=None)
        if first is not None:
            votes[first.owner] += 1
    return _winner(live, votes) if live else None


def is_granted(mine: SignedRecord, said: Sequence[Refusal | None], now: float) -> bool:
    """True if a claim wins among the nodes nearest to its key; DiscoveryError if none of them keeps it."""
    votes = Counter({mine.owner: said.count(None)})
    others = [r.holder for r in said if r is not None and r.holder is not None]
    live = [r for r in others if r.uid == mine.uid and r.is_live(now)]
    votes.update(r.owner for r in live)
    if not votes[mine.owner] and not live:
        reasons = {r.reason for r in said if r is not None}
        raise DiscoveryError(f"no node of the DHT keeps the record of {mine.uid}: {sorted(reasons)[:3]}")
    return _winner([mine, *live], votes).owner == mine.owner


def _winner(live: Sequence[SignedRecord], votes: Mapping[str, int]) -> SignedRecord:
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
