"""Sign and read the DHT's records, which every node may carry and only their owner can write.

discovery.py signs them, and every node checks them as they come in (messages.py). A record says "this expert is at this
endpoint until then", signed with ed25519. It lies under the key of its uid, and under the key of each prefix of the
uid, which is how beam search finds it.
    sequence  orders the records of one owner for a uid: the greatest counts, so an old copy cannot come back
    fence     when the owner claimed the uid: discovery.py elects one owner among the nodes nearest to the key, by how
              many of them have its record, and among equals by the older claim
    expires   ends the record, by the network's time (node.py); an owner that keeps a uid signs anew before that
The signed bytes themselves are sent, and not the fields, because two programs may write the same JSON differently. They
are printable ASCII: an answer holds them as text of its own JSON, and other characters would take six bytes or twelve
each there, so that a stranger's records could make an answer about a prefix larger than any node may send.

A small value for programs (DHT.store) is a record too. Its metadata hold the value, and its uid follows from the key
and 31 bits of the owner, so that only an owner who searched for a key with these bits can take another one's place.
"""

import contextlib
import functools
import hashlib
import json
import os
import re
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from fmoe_ext.remote.discovery import MAX_COORDINATE, MAX_UID_LENGTH, check_uid, prefixes_of
from fmoe_ext.remote.security import check_private, lock_file

ID_BITS = 256  # of nodes' ids and of keys: SHA-256
MAX_RECORD_BYTES = 2048  # of the signed JSON, which is ASCII
MAX_TTL = 3600.0  # seconds that a record may live
MAX_SKEW = 60.0  # seconds that two nodes' ideas of the network's time may differ
_MAX_METADATA, _MAX_METADATA_TEXT = 16, 256  # entries; characters of a key or a value
_MAX_ENDPOINT_LENGTH = 255
_DOMAIN = b"fmoe.dht.record.1\0"  # before the signed bytes: a signature of anything else is no record's
_FIELDS = frozenset(("uid", "endpoint", "owner", "fence", "sequence", "expires", "metadata"))
_ENDPOINT = re.compile(r"(?:\[[0-9A-Fa-f:.]{2,45}(?:%[\w.-]{1,16})?\]|[A-Za-z0-9._-]{1,253}):([0-9]{1,5})")
_VERIFIED = 8192  # records whose signature is not checked again


class BadRecord(ValueError):
    """A record is not what its owner signed, or not what a record must be."""


@dataclass(frozen=True)
class SignedRecord:
    """The place of an expert, as its owner says. endpoint "": the claim was withdrawn."""

    uid: str
    endpoint: str
    owner: str  # public key, 64 hexadecimal digits
    fence: int  # milliseconds since 1970 at which the owner claimed the uid
    sequence: int  # of two records of one owner the one with the greater sequence holds
    expires: float  # seconds since 1970, of the network's clock
    metadata: Mapping[str, str] = field(default_factory=dict, hash=False)
    payload: str = ""  # what was signed
    signature: str = ""  # 128 hexadecimal digits

    @property
    def is_withdrawn(self) -> bool:
        return not self.endpoint

    def is_live(self, now: float) -> bool:
        return now < self.expires and not self.is_withdrawn

    def is_claimed_after(self, moment: float) -> bool:
        return self.fence > moment * 1000


class Identity:
    """The key pair of an owner. If it is kept in a file, a server that restarts still owns its uids."""

    def __init__(self, seed: bytes | None = None):
        self._key = Ed25519PrivateKey.from_private_bytes(os.urandom(32) if seed is None else seed)
        self.public = self._key.public_key().public_bytes_raw().hex()
        self._locked: int | None = None

    @classmethod
    def at(cls, path: Path, alone: bool = False) -> "Identity":
        """Return the identity in a file of 32 bytes, which is made, readable by its owner alone, if it is missing.

        alone: locks the file until unlock(); InUse if another process has locked it.
        """
        if not path.exists():
            # Written whole before it gets its name. A link, unlike a rename, never replaces a file that is there: of
            # several processes that start at once all have the key of the first.
            handle, part = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
            try:
                with open(handle, "wb") as file:
                    file.write(os.urandom(32))
                    file.flush()
                    os.fsync(file.fileno())  # else a power cut could leave the name without the key
                with contextlib.suppress(FileExistsError):
                    os.link(part, path)
            except OSError as error:
                raise OSError(
                    f"the identity {path} cannot be made ({error}): its file system must have room and hard links. "
                    f"Name one on another disk, or make it by `(umask 077; head -c 32 /dev/urandom > {path})`"
                ) from None
            finally:
                os.unlink(part)
        check_private(path)
        seed = path.read_bytes()
        if len(seed) != 32:
            raise ValueError(
                f"an identity is a file of 32 bytes, but {path} has {len(seed)}: put the file back, or remove it to "
                "start with a new identity"
            )
        identity = cls(seed)
        if alone:
            text = f"another server runs with the identity {path}: stop it, or name another --identity_path"
            identity._locked = lock_file(path, text)
        return identity

    def unlock(self) -> None:
        """Let other processes use the file of the identity."""
        if self._locked is not None:
            os.close(self._locked)
            self._locked = None

    def sign(
        self,
        uid: str,
        endpoint: str,
        fence: int,
        sequence: int,
        expires: float,
        metadata: Mapping[str, str] | None = None,
    ) -> SignedRecord:
        """Make a record of this owner; ValueError for one that no node would keep."""
        values = {
            "uid": uid,
            "endpoint": endpoint,
            "owner": self.public,
            "fence": fence,
            "sequence": sequence,
            "expires": expires,
            "metadata": dict(metadata or {}),
        }
        payload = json.dumps(values, separators=(",", ":"), sort_keys=True)
        # read as from anywhere, which checks every field
        return read_record(payload, self.sign_bytes(_DOMAIN + payload.encode()).hex())

    def sign_bytes(self, data: bytes) -> bytes:
        """Return the signature of bytes, which begin with a domain such as _DOMAIN."""
        return self._key.sign(data)


# Cached by its bytes: every answer to a search repeats records, and checking a signature is slow.
@functools.lru_cache(_VERIFIED)
def read_record(payload: str, signature: str) -> SignedRecord:
    """Return the record in a payload from anywhere; BadRecord if a field is out of bounds or it is not signed."""
    # 1. JSON with these fields; half of a pair of surrogates is no ASCII either
    if len(payload) > MAX_RECORD_BYTES:
        raise BadRecord(f"a record has at most {MAX_RECORD_BYTES} characters, but got {len(payload)}")
    if not (payload.isascii() and payload.isprintable()):
        raise BadRecord("a record must be JSON in printable ASCII, with other characters as \\u1234")
    try:
        values = json.loads(payload)
    except (ValueError, RecursionError):
        raise BadRecord("a record must be JSON") from None
    if not isinstance(values, dict) or values.keys() != _FIELDS:
        raise BadRecord(f"a record has the fields {', '.join(sorted(_FIELDS))}, nothing else")
    # 2. each field
    try:
        uid = check_uid(values["uid"])
    except ValueError as error:
        raise BadRecord(str(error)) from None
    endpoint = check_endpoint(values["endpoint"], may_be_empty=True)
    expires, metadata = values["expires"], values["metadata"]
    # NaN fails the comparison; a whole number may be too large for a float
    if type(expires) not in (int, float) or not 0 <= expires < 1e12:
        raise BadRecord(f"expires must be seconds since 1970, but got {str(expires)[:100]}")
    for name, value, length in (("owner", values["owner"], 64), ("signature", signature, 128)):
        if not isinstance(value, str) or not re.fullmatch(rf"[0-9a-f]{{{length}}}", value):
            raise BadRecord(f"{name} must be {length} hexadecimal digits, but got {str(value)[:200]!r}")
    for name in ("fence", "sequence"):
        if type(values[name]) is not int or not 0 <= values[name] < 1 << 63:
            given = str(values[name])[:100]
            raise BadRecord(f"{name} must be a whole number below 2^63, but got {given}")
    if not isinstance(metadata, dict) or len(metadata) > _MAX_METADATA:
        raise BadRecord(f"metadata must be an object of at most {_MAX_METADATA} entries")
    for key, text in metadata.items():
        if not isinstance(text, str) or max(len(key), len(text)) > _MAX_METADATA_TEXT:
            raise BadRecord(
                f"metadata[{key[:100]!r}] must be text of at most {_MAX_METADATA_TEXT} characters"
            )
    # 3. the signature, last because it takes longest
    owner, counts = values["owner"], (values["fence"], values["sequence"])
    if not is_signed(bytes.fromhex(owner), bytes.fromhex(signature), _DOMAIN + payload.encode()):
        raise BadRecord(f"the record of {uid} is not signed by its owner")
    return SignedRecord(uid, endpoint, owner, *counts, float(expires), metadata, payload, signature)


def is_signed(public: bytes, signature: bytes, data: bytes) -> bool:
    """True if the owner of a public key signed data."""
    try:
        Ed25519PublicKey.from_public_bytes(public).verify(signature, data)
    except (InvalidSignature, ValueError):
        return False
    return True


def check_endpoint(endpoint: Any, may_be_empty: bool = False) -> str:
    """Return endpoint if it is host:port or [IPv6]:port; BadRecord otherwise."""
    if may_be_empty and endpoint == "":
        return ""
    match = _ENDPOINT.fullmatch(endpoint) if isinstance(endpoint, str) else None
    if match is None or len(endpoint) > _MAX_ENDPOINT_LENGTH or not 0 < int(match[1]) < 1 << 16:
        raise BadRecord(f"an endpoint must be host:port or [IPv6]:port, but got {str(endpoint)[:100]!r}")
    return str(endpoint)


def node_id_of(public: str) -> int:
    """Return the id of the node with a public key. It is a hash: a node cannot choose it freely."""
    return _hash(f"node {public}")


def uid_key(uid: str) -> int:
    """Return the key under which the record of an expert lies."""
    return _hash(f"uid {uid}")


def prefix_key(prefix: str) -> int:
    """Return the key under which the records of all experts below a prefix lie."""
    return _hash(f"prefix {prefix}")


@functools.lru_cache(_VERIFIED)
def places_of(uid: str) -> Mapping[int, str | None]:
    """Return {key: prefix} of all records of a uid; its own key has None."""
    assert len(uid) <= MAX_UID_LENGTH
    return {uid_key(uid): None} | {prefix_key(prefix): prefix for prefix, _ in prefixes_of(uid)}


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest(), "big")


_MAX_VALUE = 1024  # characters of a value as JSON
# Characters of its metadata in the record: the other fields have under 300.
_MAX_PIECES = MAX_RECORD_BYTES - 300
ENDPOINT = "value:1"  # of records that are values: a record without an endpoint would be a withdrawal
_KIND = "value::"  # begins the uids of values


@dataclass(frozen=True)
class Value:
    """A value that DHT.store has stored."""

    value: Any
    expiration_time: float  # as time.time()
    owner: str  # public key


def value_prefix(key: str) -> str:
    """Return the prefix below which all owners' values of a key lie."""
    return _KIND + hashlib.sha256(key.encode()).hexdigest()[:32]


def value_uid(key: str, owner: str) -> str:
    """Return the uid of an owner's value."""
    return f"{value_prefix(key)}.{_coordinate(owner)}"


def is_misplaced(uid: str, owner: str) -> bool:
    """True if the uid is that of another owner's value."""
    prefix, _, coordinate = uid.partition(".")
    return prefix.startswith(_KIND) and coordinate != str(_coordinate(owner))


def dump_value(value: Any) -> dict[str, str]:
    """Return a value as metadata of a record: its JSON in pieces "0", "1", ...

    Raises ValueError if it is no JSON, or too large.
    """
    try:
        text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"a value must be JSON (numbers, text, lists, dicts): {error}") from None
    if len(text) > _MAX_VALUE:
        raise ValueError(f"a value has at most {_MAX_VALUE} characters as JSON, but this one has {len(text)}")
    starts = range(0, len(text), _MAX_METADATA_TEXT)
    pieces = {str(n): text[start : start + _MAX_METADATA_TEXT] for n, start in enumerate(starts)}
    # a text's quotes and backslashes are escaped in its JSON, and these escapes once more in the record's
    if (length := len(json.dumps(pieces, separators=(",", ":")))) > _MAX_PIECES:
        raise ValueError(
            f"a value has at most {_MAX_PIECES} characters in its record, which escapes quotes and backslashes of its "
            f"JSON again, but this one has {length}: store less, or text with fewer of them"
        )
    return pieces


def load_value(record: SignedRecord, expires: float) -> Value | None:
    """Return the value in a record; None if there is none, or one that dump_value() refuses (NaN, infinity)."""
    metadata: Mapping[str, str] = record.metadata
    text = "".join(metadata.get(str(n), "") for n in range(len(metadata)))
    try:
        value = json.loads(text)
        json.dumps(value, allow_nan=False)  # Python reads NaN and 1e999
        return Value(value, expires, record.owner)
    except (ValueError, RecursionError):
        return None


def _coordinate(owner: str) -> int:
    return int(owner[:16], 16) & MAX_COORDINATE
