"""What replicas say to each other, as messages."""

from dataclasses import dataclass

import torch

from fmoe_ext.remote.server.host import Request, Update
from fmoe_ext.remote.wire import Message, WireError

SERVICE = "fmoe.Replicas"
APPEND, JOIN = f"/{SERVICE}/Append", f"/{SERVICE}/Join"
READY, HOST = f"/{SERVICE}/Ready", f"/{SERVICE}/Host"
_ID_BYTES = 16


@dataclass(frozen=True)
class Entry:
    """An update in the log of an expert. fence: of the leader that made it; last_fence: of the update before it;
    digest: of the weights after it, "" if not taken. Without an update: "is your log where mine is?"."""

    uid: str
    fence: int
    version: int
    last_fence: int
    update: Update | None = None
    digest: str = ""


def entry_message(entry: Entry) -> Message:
    meta = {
        "uid": entry.uid,
        "fence": str(entry.fence),
        "version": str(entry.version),
        "last_fence": str(entry.last_fence),
        "digest": entry.digest,
    }
    tensors: dict[str, torch.Tensor] = {}
    if entry.update is not None:
        ids = b"".join(bytes.fromhex(r.request_id or "0" * 2 * _ID_BYTES) for r in entry.update.requests)
        tensors["ids"] = torch.frombuffer(bytearray(ids), dtype=torch.uint8)
        for n, request in enumerate(entry.update.requests):
            tensors |= {f"{n}/{i}": x for i, x in enumerate(request.inputs)}
            tensors[f"{n}/grad"] = request.grad
    return Message(tensors, meta)


def read_entry(message: Message) -> Entry:
    """The entry in a message; WireError if there is none."""
    uid = message.meta.get("uid", "")
    version = number(message, "version")
    ids = message.tensors.get("ids")
    update = None
    if ids is not None:
        if ids.dtype != torch.uint8 or ids.dim() != 1 or ids.numel() % _ID_BYTES or not ids.numel():
            raise WireError("the ids of an update must be 16 bytes each")
        names = [bytes(one.tolist()).hex() for one in ids.split(_ID_BYTES)]
        update = Update(uid, version, tuple(_request(message, n, name) for n, name in enumerate(names)))
    fence, last_fence = number(message, "fence"), number(message, "last_fence")
    return Entry(uid, fence, version, last_fence, update, message.meta.get("digest", ""))


def number(message: Message, key: str) -> int:
    text = message.meta.get(key, "")
    if not (text.isascii() and text.isdecimal() and len(text) <= 18):
        raise WireError(f"{key} must be a number, but is {text[:50]!r}")
    return int(text)


def _request(message: Message, n: int, name: str) -> Request:
    inputs: list[torch.Tensor] = []
    grad = message.tensors.get(f"{n}/grad")
    while (x := message.tensors.get(f"{n}/{len(inputs)}")) is not None:
        inputs.append(x)
    if grad is None or not inputs:
        raise WireError(f"request {n} of the update is not complete")
    return Request(name if name.strip("0") else "", tuple(inputs), grad)
