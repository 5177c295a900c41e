"""The state of one expert: as a message, and on disk."""

import os
from collections import OrderedDict
from pathlib import Path

import torch

from fmoe_ext.remote.discovery import check_uid
from fmoe_ext.remote.server.host import ExpertHost, Hosted
from fmoe_ext.remote.server.ledger import End, Ledger, Term
from fmoe_ext.remote.wire import WHOLE, Message, WireError, decode, encode

_IDS, _IDS_VERSIONS = "applied.ids", "applied.versions"
_ID_BYTES = 16


def read_state(host: ExpertHost, uid: str) -> Message:
    """A copy of all that makes an expert what it is."""
    expert = host.find(uid)
    ledger = expert.ledger
    tensors = {f"weight/{name}": p.clone() for name, p in host.parameters(uid).items()}
    tensors |= {f"optimizer/{key}": value.clone() for key, value in _optimizer_tensors(expert).items()}
    ids = [bytes.fromhex(request_id) for request_id in ledger.applied]
    tensors[_IDS] = (
        torch.frombuffer(bytearray(b"".join(ids)), dtype=torch.uint8)
        if ids
        else torch.empty(0, dtype=torch.uint8)
    )
    tensors[_IDS_VERSIONS] = torch.tensor(list(ledger.applied.values()), dtype=torch.int64)
    meta = {
        "uid": uid,
        "version": str(ledger.version),
        "term": str(end_of_weights(ledger).term.number),
        "term_leader": end_of_weights(ledger).term.leader,
        "requests": str(ledger.num_requests),
        "class": host.expert_class.name,
        "hidden_dim": str(host.hidden_dim),
        "optimizer": host.training.optimizer,
    }
    return Message(tensors, meta)


def write_state(host: ExpertHost, message: Message) -> None:
    """Makes an expert what read_state() saw, hosting it first if need be; WireError if it is of another kind."""
    uid, version = message.meta.get("uid", ""), _number(message, "version")
    requests = _number(message, "requests")
    for key, ours in (
        ("class", host.expert_class.name),
        ("hidden_dim", str(host.hidden_dim)),
        ("optimizer", host.training.optimizer),
    ):
        if message.meta.get(key) != ours:
            raise WireError(
                f"the state of {uid} has {key}={message.meta.get(key)}, but this server has {ours}"
            )
    host.add([uid])
    expert = host.find(uid)
    expert.ledger.broken = "a copy was not installed to its end"
    _copy_all(_named(message, "weight/"), host.parameters(uid), uid)
    _load_optimizer(expert, _named(message, "optimizer/"))
    number = _number(message, "term") if "term" in message.meta else 0  # older checkpoints have none
    term = Term(number, message.meta.get("term_leader", ""))
    expert.ledger.install(End(term, version), _read_ids(message), requests)


def end_of_weights(ledger: Ledger) -> End:
    """The end of the log as far as the weights have it, on the thread that computes."""
    with ledger.lock:
        for logged in ledger.tail:
            if logged.previous.version == ledger.version:
                return logged.previous
        return ledger.end


def _number(message: Message, key: str) -> int:
    text = message.meta.get(key, "")
    if not (text.isascii() and text.isdecimal() and len(text) <= 18):
        raise WireError(f"{key} of a state must be a number, but is {text[:50]!r}")
    return int(text)


def digest(host: ExpertHost, uid: str) -> str:
    """16 hexadecimal digits that differ when a bit of the weights differs."""
    return host.digest(uid)


def _optimizer_tensors(expert: Hosted) -> dict[str, torch.Tensor]:
    if expert.optimizer is None:
        return {}
    state = expert.optimizer.state_dict()["state"]
    return {
        f"{place}/{key}": value
        for place, entries in state.items()
        for key, value in entries.items()
        if isinstance(value, torch.Tensor)
    }


def _load_optimizer(expert: Hosted, tensors: dict[str, torch.Tensor]) -> None:
    if expert.optimizer is None:
        return
    whole = expert.optimizer.state_dict()
    state: dict[int, dict[str, torch.Tensor]] = {}
    num_parameters = len(whole["param_groups"][0]["params"])
    for key, value in tensors.items():
        place, _, name = key.partition("/")
        if not place.isdecimal() or int(place) >= num_parameters:
            raise WireError(f"the state of {expert.uid} has an optimizer entry for parameter {place[:50]!r}")
        state.setdefault(int(place), {})[name] = value
    expert.optimizer.load_state_dict({**whole, "state": state})


def _copy_all(given: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], uid: str) -> None:
    for name, p in wanted.items():
        x = given.get(name)
        if x is None or x.shape != p.shape or x.dtype != p.dtype:
            is_there = "is missing" if x is None else f"is {x.dtype} {list(x.shape)}"
            raise WireError(f"{name} in the state of {uid} {is_there}, but must be {p.dtype} {list(p.shape)}")
    with torch.no_grad():
        for name, p in wanted.items():
            p.copy_(given[name])


def _read_ids(message: Message) -> "OrderedDict[str, int]":
    ids, versions = message.tensors.get(_IDS), message.tensors.get(_IDS_VERSIONS)
    if ids is None or versions is None or ids.dtype != torch.uint8 or versions.dtype != torch.int64:
        raise WireError("the state has no list of applied requests")
    if ids.numel() != _ID_BYTES * versions.numel():
        raise WireError(f"{ids.numel()} bytes of ids for {versions.numel()} applied requests")
    data = bytes(ids.tolist())
    keys = [data[n : n + _ID_BYTES].hex() for n in range(0, len(data), _ID_BYTES)]
    return OrderedDict(zip(keys, versions.tolist(), strict=True))


def _named(message: Message, prefix: str) -> dict[str, torch.Tensor]:
    return {n.removeprefix(prefix): x for n, x in message.tensors.items() if n.startswith(prefix)}


SUFFIX = ".safetensors"


class Checkpoints:
    """The folder of a server's checkpoints."""

    def __init__(self, folder: Path):
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        for left_over in self.folder.glob(f"*{SUFFIX}.tmp-*"):  # of a process that was killed while it wrote
            left_over.unlink(missing_ok=True)

    def save(self, state: Message) -> None:
        """Writes, syncs, then takes the place of the file before: a crash leaves the old one or the new one."""
        path = self.path(state.meta["uid"])
        temporary = path.with_name(f"{path.name}.tmp-{os.getpid()}")
        with open(temporary, "wb") as file:
            file.write(encode(state))
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        folder = os.open(self.folder, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def load(self, uid: str) -> Message | None:
        """The state that was saved last, None without one; WireError, with the file's name, if it cannot be read."""
        path = self.path(uid)
        if not path.exists():
            return None
        try:
            return decode(path.read_bytes(), WHOLE)
        except WireError as error:
            raise WireError(
                f"the checkpoint {path} is broken ({error}): restore it, or move it away"
            ) from None

    def uids(self) -> list[str]:
        return sorted(path.name.removesuffix(SUFFIX) for path in self.folder.glob(f"*{SUFFIX}"))

    def path(self, uid: str) -> Path:
        return self.folder / f"{check_uid(uid)}{SUFFIX}"
