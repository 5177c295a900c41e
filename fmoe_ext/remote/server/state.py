"""Read and write the state of one expert as a message: followers copy it, checkpoints hold it, audits compute with it.

weight/NAME, buffer/NAME             parameters and persistent buffers
optimizer/PLACE/NAME                 moments of the parameter at this place in the optimizer
applied.ids, applied.versions        ids of the last requests, uint8 [16 n], and the version of each, int64 [n]:
                                     a server that goes on from here must recognise a gradient that comes again
metadata                             the end of the log that the weights have, the number of gradients, and class,
                                     width and optimizer, which must be the reader's
"""

from collections import OrderedDict

import torch

from fmoe_ext.remote.server.host import ExpertHost
from fmoe_ext.remote.server.ledger import ID_BYTES, End, Ledger, Term, pack_ids, unpack_ids
from fmoe_ext.remote.server.options import STATE_NAMES
from fmoe_ext.remote.wire import Message, WireError

_IDS, _IDS_VERSIONS = "applied.ids", "applied.versions"


def read_state(host: ExpertHost, uid: str) -> Message:
    """Return a copy of an expert's state, on the thread that computes."""
    expert = host.find(uid)
    ledger, end = expert.ledger, end_of_weights(expert.ledger)
    tensors = {f"weight/{name}": p.clone() for name, p in host.parameters(uid).items()}
    tensors |= {f"buffer/{name}": x.clone() for name, x in host.buffers(uid).items()}
    moments = {} if expert.optimizer is None else expert.optimizer.state_dict()["state"]
    for place, entries in moments.items():
        for name, value in entries.items():
            if isinstance(value, torch.Tensor):
                tensors[f"optimizer/{place}/{name}"] = value.clone()
    tensors[_IDS] = pack_ids(ledger.applied)
    tensors[_IDS_VERSIONS] = torch.tensor(list(ledger.applied.values()), dtype=torch.int64, device="cpu")
    meta = {
        "uid": uid,
        "version": str(ledger.version),
        **end.term.meta("term"),
        "requests": str(ledger.num_requests),
        "class": host.expert_class.name,
        "hidden_dim": str(host.hidden_dim),
        "optimizer": host.training.optimizer,
    }
    return Message(tensors, meta)


def write_state(host: ExpertHost, message: Message) -> None:
    """Give an expert the state in a message, hosting it first if it is new here; WireError if it does not fit.

    An error in the middle leaves the expert marked as broken. On the thread that computes.
    """
    # 1. of the same kind as the experts here
    uid = message.meta.get("uid", "")
    requests = message.number("requests")
    kind = {"class": host.expert_class.name, "hidden_dim": str(host.hidden_dim)}
    for key, ours in {**kind, "optimizer": host.training.optimizer}.items():
        if message.meta.get(key) != ours:
            given = f"{key}={message.meta.get(key)}"
            raise WireError(f"the state of {uid} has {given}, but this server has {ours}")
    # 2. weights and buffers
    host.add([uid])
    expert = host.find(uid)
    expert.ledger.broken = "a copy was not installed to its end"  # until install() clears it
    _copy_all(_named(message, "weight/"), host.parameters(uid), uid)
    buffers = _named(message, "buffer/")  # a state of an earlier release has none
    _copy_all(buffers, {name: x for name, x in host.buffers(uid).items() if name in buffers}, uid)
    # 3. the optimizer's moments; none if it has made no step
    if expert.optimizer is not None:
        names = set(STATE_NAMES[host.training.optimizer])
        state: dict[int, dict[str, torch.Tensor]] = {}
        parameters = expert.optimizer.param_groups[0]["params"]
        for key, value in _named(message, "optimizer/").items():
            place, _, name = key.partition("/")
            if not (place.isascii() and place.isdecimal()) or int(place) >= len(parameters):
                raise WireError(f"the state of {uid} has an optimizer entry for parameter {place[:50]!r}")
            if name not in names or value.shape not in (torch.Size(), parameters[int(place)].shape):
                what = f"{name[:50]!r} {list(value.shape)}"
                raise WireError(f"the state of {uid} has {what} for parameter {place}")
            state.setdefault(int(place), {})[name] = value
        if incomplete := [place for place, entries in state.items() if entries.keys() != names]:
            raise WireError(
                f"the state of {uid} lacks entries of the optimizer for parameters {incomplete[:9]}"
            )
        expert.optimizer.load_state_dict({**expert.optimizer.state_dict(), "state": state})
    # 4. the history
    expert.ledger.install(end_of_state(message), read_ids(message), requests)


def end_of_state(message: Message) -> End:
    """Return the end of the log that a state's weights have."""
    term = Term.read(message, "term") if "term" in message.meta else Term()  # older checkpoints have none
    return End(term, message.number("version"))


def end_of_weights(ledger: Ledger) -> End:
    """Return the end of the log as far as the weights have it; on the thread that computes."""
    # the log may be ahead: the first update in the tail that follows the weights' version says where they are
    with ledger.lock:
        for update in ledger.tail:
            if update.previous.version == ledger.version:
                return update.previous
        return ledger.end


def _copy_all(given: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], uid: str) -> None:
    # all are checked before the first is copied, so that one that does not fit changes none
    for name, p in wanted.items():
        x = given.get(name)
        if x is None or x.shape != p.shape or x.dtype != p.dtype:
            is_there = "is missing" if x is None else f"is {x.dtype} {list(x.shape)}"
            raise WireError(f"{name} in the state of {uid} {is_there}, but must be {p.dtype} {list(p.shape)}")
    with torch.no_grad():
        for name, p in wanted.items():
            p.copy_(given[name])


def read_ids(message: Message) -> "OrderedDict[str, int]":
    """Return the version of each remembered request of a state, by request id, oldest first."""
    ids, versions = message.tensors.get(_IDS), message.tensors.get(_IDS_VERSIONS)
    if ids is None or versions is None or ids.dtype != torch.uint8 or versions.dtype != torch.int64:
        raise WireError("the state has no list of applied requests")
    if ids.numel() != ID_BYTES * versions.numel():
        raise WireError(f"{ids.numel()} bytes of ids for {versions.numel()} applied requests")
    return OrderedDict(zip(unpack_ids(ids), versions.tolist(), strict=True))


def _named(message: Message, prefix: str) -> dict[str, torch.Tensor]:
    return {n.removeprefix(prefix): x for n, x in message.tensors.items() if n.startswith(prefix)}
