"""Small values in the DHT, as records below the prefix of their key, one coordinate an owner."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fmoe_ext.remote.dht.records import MAX_METADATA_TEXT, SignedRecord
from fmoe_ext.remote.discovery import MAX_COORDINATE

MAX_VALUE = 1024  # characters of a value as JSON
ENDPOINT = "value:1"  # of records that lead to no server
_KIND = "value::"


@dataclass(frozen=True)
class Value:
    """A value, the time.time() at which it expires, and the public key of its owner."""

    value: Any
    expiration_time: float
    owner: str


def prefix_of(key: str) -> str:
    """The prefix below which the values of a key lie."""
    return _KIND + hashlib.sha256(key.encode()).hexdigest()[:32]


def uid_of(key: str, owner: str) -> str:
    """The uid of an owner's value."""
    return f"{prefix_of(key)}.{_coordinate(owner)}"


def is_misplaced(uid: str, owner: str) -> bool:
    """True for a value in a place that belongs to another owner."""
    prefix, _, coordinate = uid.partition(".")
    return prefix.startswith(_KIND) and coordinate != str(_coordinate(owner))


def dump_value(value: Any) -> dict[str, str]:
    """A value as the metadata of a record; ValueError for one that is too large or no JSON."""
    try:
        text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"a value must be JSON (numbers, text, lists, dicts): {error}") from None
    if len(text) > MAX_VALUE:
        raise ValueError(f"a value has at most {MAX_VALUE} characters as JSON, but this one has {len(text)}")
    starts = range(0, len(text), MAX_METADATA_TEXT)
    return {str(n): text[start : start + MAX_METADATA_TEXT] for n, start in enumerate(starts)}


def load_value(record: SignedRecord, expires: float) -> Value | None:
    """The value in a record; None if there is none."""
    metadata: Mapping[str, str] = record.metadata
    text = "".join(metadata.get(str(n), "") for n in range(len(metadata)))
    try:
        return Value(json.loads(text), expires, record.owner)
    except (ValueError, RecursionError):
        return None


def _coordinate(owner: str) -> int:
    return int(owner[:16], 16) & MAX_COORDINATE
