"""Messages between replicas."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fmoe_ext.remote.server.ledger import End, Logged, Request, Term, Update
from fmoe_ext.remote.wire import Message, WireError

SERVICE = "fmoe.Replicas"
APPEND, JOIN = f"/{SERVICE}/Append", f"/{SERVICE}/Join"
READY, HOST = f"/{SERVICE}/Ready", f"/{SERVICE}/Host"
_ID_BYTES = 16


@dataclass(frozen=True)
class Append:
    """A leader's update, or without one a probe: does your log end at `end`?"""

    uid: str
    term: Term  # of the leader who sends it
    committed: int
    end: End
    logged: Logged | None = None


@dataclass(frozen=True)
class Reply:
    """end, seen: of the log of the server that answers."""

    is_accepted: bool
    end: End
    seen: Term
    reason: str = ""


def append_message(append: Append) -> Message:
    logged = append.logged
    meta = {
        "uid": append.uid,
        "committed": str(append.committed),
        **_term("term", append.term),
        **_end("end", append.end),
    }
    if logged is None:
        return Message({}, meta)
    meta |= {**_end("previous", logged.previous), "digest": logged.digest}
    return Message(_tensors(logged.update.requests), meta)


def read_append(message: Message) -> Append:
    """The append in a message; WireError if there is none."""
    uid, end = message.meta.get("uid", ""), _read_end(message, "end")
    logged = None
    if "ids" in message.tensors:
        update = Update(uid, end.version, _requests(message))
        logged = Logged(_read_end(message, "previous"), end, update, message.meta.get("digest", ""))
    return Append(uid, _read_term(message, "term"), number(message, "committed"), end, logged)


def reply_message(reply: Reply) -> Message:
    meta = {"accepted": str(int(reply.is_accepted)), "reason": reply.reason[:500]}
    return Message({}, {**meta, **_term("seen", reply.seen), **_end("end", reply.end)})


def read_reply(message: Message) -> Reply:
    accepted = number(message, "accepted") == 1
    return Reply(
        accepted, _read_end(message, "end"), _read_term(message, "seen"), message.meta.get("reason", "")
    )


def number(message: Message, key: str) -> int:
    """A number of the metadata; WireError if it is none."""
    text = message.meta.get(key, "")
    if not (text.isascii() and text.isdecimal() and len(text) <= 18):
        raise WireError(f"{key} must be a number, but is {text[:50]!r}")
    return int(text)


def text(message: Message, key: str) -> str:
    """A text of the metadata; WireError if it is missing."""
    value = message.meta.get(key)
    if not value:
        raise WireError(f"the call does not say {key}")
    return value


def _term(key: str, term: Term) -> dict[str, str]:
    return {key: str(term.number), f"{key}_leader": term.leader}


def _read_term(message: Message, key: str) -> Term:
    return Term(number(message, key), message.meta.get(f"{key}_leader", ""))


def _end(key: str, end: End) -> dict[str, str]:
    return {**_term(f"{key}_term", end.term), f"{key}_version": str(end.version)}


def _read_end(message: Message, key: str) -> End:
    return End(_read_term(message, f"{key}_term"), number(message, f"{key}_version"))


def _tensors(requests: Sequence[Request]) -> dict[str, torch.Tensor]:
    """One tensor an input, whatever the number of requests."""
    ids = b"".join(bytes.fromhex(r.request_id or "0" * 2 * _ID_BYTES) for r in requests)
    inputs = [_joined(parts) for parts in zip(*(r.inputs for r in requests), strict=True)]
    return {
        "ids": torch.frombuffer(bytearray(ids), dtype=torch.uint8),
        "rows": torch.tensor([r.grad.shape[0] for r in requests], dtype=torch.int64),
        "grad": _joined([r.grad for r in requests]),
        **{str(n): x for n, x in enumerate(inputs)},
    }


def _joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def _requests(message: Message) -> tuple[Request, ...]:
    given = dict(message.tensors)
    ids, rows, grad = (given.pop(key, None) for key in ("ids", "rows", "grad"))
    inputs = [given[str(n)] for n in range(len(given)) if str(n) in given]
    if ids is None or rows is None or grad is None or not inputs or len(inputs) != len(given):
        raise WireError("an update needs ids, rows, grad and inputs")
    if ids.dtype != torch.uint8 or ids.dim() != 1 or ids.numel() != rows.numel() * _ID_BYTES:
        raise WireError("the ids of an update must be 16 bytes for each request")
    counts = rows.tolist() if rows.dtype == torch.int64 and rows.dim() == 1 else []
    total = sum(counts)
    if not counts or min(counts) < 1 or any(x.dim() < 1 or x.shape[0] != total for x in (grad, *inputs)):
        raise WireError("the rows of an update do not add up")
    names = [bytes(one.tolist()).hex() for one in ids.split(_ID_BYTES)]
    parts = zip(names, grad.split(counts), zip(*(x.split(counts) for x in inputs), strict=True), strict=True)
    return tuple(Request(name if name.strip("0") else "", tuple(xs), g) for name, g, xs in parts)
