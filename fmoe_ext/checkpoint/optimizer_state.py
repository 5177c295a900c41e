"""The state of an optimizer by the names of its parameters: tensors "optimizer.<entry>.<parameter>", the rest plain."""

import torch
from torch.distributed.tensor import DTensor

from fmoe_ext.checkpoint.errors import CheckpointError

PREFIX = "optimizer."


def take(optimizer, model):
    """(tensors, record) of an optimizer on a ModelState; the tensors of moved experts are brought back. Collective."""
    tensors, groups, params, values = {}, [], {}, {}
    for number, group in enumerate(optimizer.param_groups):
        groups.append({key: value for key, value in group.items() if key != "params"})
        for param in group["params"]:
            name = model.name_of(param)
            params[name] = number
            for entry, value in optimizer.state.get(param, {}).items():
                if "." in entry:
                    raise CheckpointError(f"the optimizer's state {entry!r} of {name} has a dot in its name")
                if not isinstance(value, torch.Tensor):
                    values.setdefault(name, {})[entry] = value
                elif value.shape == param.shape or _has_rows(model, name, value):
                    tensors[f"{PREFIX}{entry}.{name}"] = model.as_part(name, model.in_order(name, value))
                else:
                    tensors[f"{PREFIX}{entry}.{name}"] = value
    record = {"type": type(optimizer).__name__, "groups": groups, "params": params, "values": values}
    return tensors, record


def merge_records(records):
    """One record of what the ranks' optimizers have; groups with the same options become one."""
    merged = {"type": records[0]["type"], "groups": [], "params": {}, "values": {}}
    for record in records:
        for name, number in record["params"].items():
            options = record["groups"][number]
            if options not in merged["groups"]:
                merged["groups"].append(options)
            merged["params"].setdefault(name, merged["groups"].index(options))
        merged["values"].update(record["values"])
    return merged


def names(optimizer, model):
    """The names of the parameters of an optimizer; none without one."""
    groups = [] if optimizer is None else optimizer.param_groups
    return {model.name_of(param) for group in groups for param in group["params"]}


def compare(optimizer, model, record, names_of_all):
    """Raises CheckpointError if an optimizer cannot take what is saved. names_of_all: of every rank's optimizer."""
    if record["type"] != type(optimizer).__name__:
        raise CheckpointError(
            f"the optimizer is {type(optimizer).__name__}, but the checkpoint has the state of {record['type']}"
        )
    missing, extra = names_of_all - record["params"].keys(), record["params"].keys() - names_of_all
    if missing:
        raise CheckpointError(f"the checkpoint has no optimizer state for {', '.join(sorted(missing))}")
    if extra:
        raise CheckpointError(
            f"the checkpoint has optimizer state for others too: {', '.join(sorted(extra))}"
        )
    for i, group in enumerate(optimizer.param_groups):
        saved = {record["params"][model.name_of(param)] for param in group["params"]}
        if len(saved) > 1:
            raise CheckpointError(
                f"the parameters of the optimizer's group {i} were in {len(saved)} groups with different options"
            )


class Loading:
    """Room for the state that a checkpoint has for an optimizer; commit() hands it over once it is filled.

    record, saved: the checkpoint's record and {key: StoredTensor or other with shape and dtype}.
    parts: {key: tensor} for the checkpoint to fill, rows of experts as DTensor.
    """

    def __init__(self, optimizer, model, record, saved):
        self.optimizer = optimizer
        self.record = record
        self.names = {p: model.name_of(p) for group in optimizer.param_groups for p in group["params"]}
        entries = {}
        for key in saved:
            if key.startswith(PREFIX):
                _, entry, name = key.split(".", 2)
                entries.setdefault(name, []).append((entry, key))
        self.parts, self._state = {}, {}
        for group in optimizer.param_groups:
            for param in group["params"]:
                name = self.names[param]
                self._state[param] = dict(record["values"].get(name, {}))
                for entry, key in entries.get(name, []):
                    tensor, part = _make_room(model, name, param, entry, saved[key], group)
                    self._state[param][entry] = tensor
                    self.parts[key] = part

    def commit(self):
        for param, state in self._state.items():
            if state:
                self.optimizer.state[param] = state
            else:
                self.optimizer.state.pop(param, None)
        for group in self.optimizer.param_groups:
            if not group["params"]:
                continue
            number = self.record["params"][self.names[group["params"][0]]]
            for key, value in self.record["groups"][number].items():
                if isinstance(group.get(key), torch.Tensor):
                    group[key].fill_(value)
                else:
                    group[key] = tuple(value) if isinstance(value, list) else value


def _make_room(model, name, param, entry, saved, group):
    """(the local tensor, what the checkpoint fills) for one entry of a parameter's state."""
    shape, device = list(saved.shape), param.device
    if entry == "step" and not (group.get("capturable") or group.get("fused")):
        device = "cpu"  # where the optimizers of PyTorch keep it
    if isinstance(param, DTensor) and saved.shape == tuple(param.shape):
        tensor = torch.zeros_like(param.detach(), dtype=saved.dtype)
        return tensor, tensor
    rows = model.local_rows(name)
    if rows is None or not model.follows(name, shape):
        tensor = torch.zeros(shape, dtype=saved.dtype, device=device)
        return tensor, tensor
    tensor = torch.zeros([rows[1] - rows[0], *shape[1:]], dtype=saved.dtype, device=device)
    return tensor, model.as_part(name, tensor)


def _has_rows(model, name, value):
    rows = model.local_rows(name)
    return (
        rows is not None
        and value.dim() > 0
        and value.dim() == model.tensors[name].dim()
        and value.shape[0] == rows[1] - rows[0]
    )
