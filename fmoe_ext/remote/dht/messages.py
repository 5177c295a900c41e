"""Encode and decode the messages between DHT nodes: JSON, each part of which is checked and bounded before it is used.

    Ping {}        -> {}
    Find {keys}    -> {found: {key: {peers, records}}}      keys are left out when the answer becomes too long
    Store {items}  -> {refused: [null or {reason, record}]}  one entry per item; null: it was kept
    every message  {id, time}         the sender's id, and the network's time as the sender has it
    every request  {endpoint, nonce}  where the sender listens: "" for nowhere, ":port" for "the address that you see"
An answer is *sealed*: the node's public key (32 bytes), from which its id follows, and a signature of the nonce and the
answer (64 bytes) precede its JSON. So a node can neither answer in another's name nor repeat an old answer.
"""

import functools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from fmoe_ext.remote.dht.records import (
    BadRecord,
    Identity,
    SignedRecord,
    check_endpoint,
    is_signed,
    node_id_of,
    read_record,
)
from fmoe_ext.remote.dht.storage import (
    BUCKET_SIZE,
    MAX_OWNERS,
    MAX_UNDER_PREFIX,
    Peer,
    Refusal,
)

SERVICE = "fmoe.dht"
PING, FIND, STORE = "Ping", "Find", "Store"
METHODS = (PING, FIND, STORE)
MAX_KEYS = 64  # in one Find
MAX_ITEMS = 64  # in one Store
MAX_ANSWER_BYTES = 8 << 20  # room for one prefix with the most experts it may have
FULL_ANSWER_BYTES = 1 << 20  # once an answer is longer than this, no further key is added
MAX_REQUEST_BYTES = 512 << 10
_MAX_REASON = 300  # characters
_MAX_KNOWN_PEERS = 4096  # whose id and endpoint are not parsed again
_DOMAIN, _SEAL_BYTES = b"fmoe.dht.answer.1\0", 32 + 64
_PORT = re.compile(r":[0-9]{1,5}")


class BadMessage(ValueError):
    """A message cannot be decoded; the text says what is wrong with it."""


@dataclass(frozen=True)
class Header:
    """The part that every message has."""

    node_id: int  # of the sender
    time: float  # the network's, as the sender has it
    endpoint: str = ""  # of a request: where the sender listens


@dataclass(frozen=True)
class Found:
    """The answer of one node for a key."""

    peers: Sequence[Peer] = ()  # the nearest to the key that it knows
    records: Sequence[SignedRecord] = ()  # that it keeps under the key


class Item(NamedTuple):
    """A record, and the key under which to keep it."""

    key: int
    record: SignedRecord


@dataclass(frozen=True)
class Request:
    header: Header
    keys: Sequence[int] = ()
    items: Sequence[Item | str] = ()  # a text instead of an item says why it cannot be kept
    nonce: str = ""  # up to 32 hexadecimal digits


@dataclass(frozen=True)
class Answer:
    header: Header
    found: Mapping[int, Found] = field(default_factory=dict)
    refused: Sequence[Refusal | None] = ()


def encode_request(request: Request) -> bytes:
    body = _dump_header(request.header) | {"endpoint": request.header.endpoint}
    if request.nonce:
        body["nonce"] = request.nonce
    if request.keys:
        body["keys"] = [_dump_id(key) for key in request.keys]
    items = [item for item in request.items if not isinstance(item, str)]
    if items:
        body["items"] = [[_dump_id(key), record.payload, record.signature] for key, record in items]
    return json.dumps(body, separators=(",", ":")).encode()


def encode_answer(answer: Answer) -> bytes:
    body = _dump_header(answer.header)
    if answer.found:
        body["found"] = {
            _dump_id(key): {
                "peers": [[_dump_id(peer.node_id), peer.endpoint] for peer in found.peers],
                "records": [[record.payload, record.signature] for record in found.records],
            }
            for key, found in answer.found.items()
        }
    if answer.refused:
        body["refused"] = []
        for refusal in answer.refused:
            holder = refusal and refusal.holder
            record = holder and [holder.payload, holder.signature]
            body["refused"].append(refusal and {"reason": refusal.reason[:_MAX_REASON], "record": record})
    return json.dumps(body, separators=(",", ":")).encode()


def seal(answer: bytes, nonce: str, identity: Identity) -> bytes:
    """Put the node's public key and a signature, which holds for one request, before an answer."""
    return bytes.fromhex(identity.public) + identity.sign_bytes(_sealed(answer, nonce)) + answer


def unseal(data: bytes, nonce: str) -> Answer:
    """Return a sealed answer; BadMessage unless the node with the answer's id has signed it for this request."""
    public, signature, answer = data[:32], data[32:_SEAL_BYTES], data[_SEAL_BYTES:]
    if len(signature) != 64 or not is_signed(public, signature, _sealed(answer, nonce)):
        raise BadMessage("an answer must be signed by its node, for the request that it answers")
    read = decode_answer(answer)
    if read.header.node_id != node_id_of(public.hex()):
        raise BadMessage("a node's id must follow from its key")
    return read


def _sealed(answer: bytes, nonce: str) -> bytes:
    return _DOMAIN + nonce.encode() + b"\0" + answer


def decode_request(data: bytes) -> Request:
    """Return the request in bytes from anywhere; BadMessage if it is not one."""
    body = _load(data, MAX_REQUEST_BYTES)
    endpoint, nonce = body.get("endpoint"), body.get("nonce", "")
    is_port = isinstance(endpoint, str) and _PORT.fullmatch(endpoint) and 0 < int(endpoint[1:]) < 1 << 16
    if not is_port:
        try:
            check_endpoint(endpoint, may_be_empty=True)
        except BadRecord as error:
            raise BadMessage(str(error)) from None
    header = _load_header(body, str(endpoint))
    keys = tuple(_load_id(key) for key in _list("keys", body.get("keys", []), MAX_KEYS))
    items: list[Item | str] = []
    for value in _list("items", body.get("items", []), MAX_ITEMS):
        if not isinstance(value, list) or len(value) != 3:
            raise BadMessage("an item must be [key, payload, signature]")
        key = _load_id(value[0])
        try:
            items.append(Item(key, _load_record(value[1:])))
        except BadRecord as error:  # this item is refused, the others may be kept
            items.append(str(error)[:_MAX_REASON])
    if not isinstance(nonce, str) or not re.fullmatch(r"[0-9a-f]{0,32}", nonce):
        raise BadMessage(f"a nonce has at most 32 hexadecimal digits, but got {str(nonce)[:100]!r}")
    return Request(header, keys, tuple(items), nonce)


def decode_answer(data: bytes) -> Answer:
    """Return the answer in bytes from anywhere; BadMessage if it is not one. Forged records in it are left out."""
    body = _load(data, MAX_ANSWER_BYTES)
    found = body.get("found", {})
    if not isinstance(found, dict) or len(found) > MAX_KEYS:
        raise BadMessage(f"found must be an object of at most {MAX_KEYS} keys")
    refused: list[Refusal | None] = []
    for value in _list("refused", body.get("refused", []), MAX_ITEMS):
        if value is None:  # the item was kept
            refused.append(None)
            continue
        if not isinstance(value, dict) or not isinstance(value.get("reason"), str):
            raise BadMessage("a refusal must say its reason")
        holders = _genuine([value["record"]] if value.get("record") is not None else [])
        reason = value["reason"][:_MAX_REASON].encode(errors="replace").decode()  # it is logged
        refused.append(Refusal(reason, holders[0] if holders else None))
    by_key = {}
    for text, value in found.items():
        key = _load_id(text)
        if not isinstance(value, dict):
            raise BadMessage("what is found must be an object")
        peers = _list("peers", value.get("peers"), BUCKET_SIZE)
        records = _list("records", value.get("records"), max(MAX_OWNERS, MAX_UNDER_PREFIX))
        for peer in peers:
            if not isinstance(peer, list) or len(peer) != 2 or not all(isinstance(x, str) for x in peer):
                raise BadMessage("a node must be [id, endpoint]")
        by_key[key] = Found(tuple(_peer(*peer) for peer in peers), _genuine(records))
    return Answer(_load_header(body), by_key, tuple(refused))


# -------------------------------------------------------------------- parts


def _dump_id(node_id: int) -> str:
    return f"{node_id:064x}"


def _load_id(text: Any) -> int:
    if not isinstance(text, str) or not re.fullmatch(r"[0-9a-f]{64}", text):
        raise BadMessage(f"an id must be 64 hexadecimal digits, but got {str(text)[:100]!r}")
    return int(text, 16)


def _load(data: bytes, max_bytes: int) -> dict[str, Any]:
    if len(data) > max_bytes:
        raise BadMessage(f"a message has at most {max_bytes} bytes, but got {len(data)}")
    try:
        body = json.loads(data)
    except (ValueError, RecursionError):
        raise BadMessage("a message must be JSON") from None
    if not isinstance(body, dict):
        raise BadMessage("a message must be a JSON object")
    return body


def _dump_header(header: Header) -> dict[str, Any]:
    return {"id": _dump_id(header.node_id), "time": header.time}


def _load_header(body: Mapping[str, Any], endpoint: str = "") -> Header:
    moment: Any = body.get("time")
    if type(moment) not in (int, float) or not 0 <= moment < 1e12:  # NaN is refused too: it compares False
        raise BadMessage(f"time must be seconds since 1970, but got {str(moment)[:100]!r}")
    return Header(_load_id(body.get("id")), float(moment), endpoint)


def _list(name: str, value: Any, max_length: int) -> list[Any]:
    if not isinstance(value, list) or len(value) > max_length:
        raise BadMessage(f"{name} must be a list of at most {max_length} entries")
    return value


def _load_record(value: Any) -> SignedRecord:
    """Return the record; BadMessage if it is not a pair of texts, BadRecord if they are not a record."""
    if not isinstance(value, list) or len(value) != 2 or not all(isinstance(text, str) for text in value):
        raise BadMessage("a record must be [payload, signature]")
    return read_record(*value)


@functools.lru_cache(_MAX_KNOWN_PEERS)
def _peer(node_id: str, endpoint: str) -> Peer:
    """Return the node; cached, because answers name the same nodes again and again."""
    try:
        return Peer(_load_id(node_id), check_endpoint(endpoint))
    except BadRecord as error:
        raise BadMessage(str(error)) from None


def _genuine(records: Sequence[Any]) -> tuple[SignedRecord, ...]:
    """Return the records that their owners have signed; leave forged ones out."""
    genuine = []
    for value in records:
        try:
            genuine.append(_load_record(value))
        except BadRecord:
            continue
    return tuple(genuine)
