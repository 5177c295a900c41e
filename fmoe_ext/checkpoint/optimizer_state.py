"""Save and load the state of an optimizer by the names of its parameters, so that it fits any parallel layout.

    tensors   "optimizer.<entry>.<parameter>", as optimizer.exp_avg.layers.0.mlp.experts.htoh4.weight
    record    plain values for the manifest: class, options of groups, {parameter: its group}, state that is no tensor

An optimizer numbers its parameters; the numbers differ between layouts, so names replace them. State of fused experts
[E, *] that are spread over ranks must have a row for each expert, which moves with the expert, or be one number (a
step), which belongs to all. State of any other shape means nothing in another layout, and is refused.

take() collects the state on saving. On loading compare() checks, Loading makes room, and its commit() gives it to the
optimizer, with the saved options of its groups.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from fmoe_ext._sharded import is_zero_redundancy
from fmoe_ext.checkpoint.errors import CheckpointError
from fmoe_ext.checkpoint.model_state import ModelState, packed_kind
from fmoe_ext.checkpoint.safetensors_file import StoredTensor

PREFIX = "optimizer."
_OF_PARAMETERS = ("params", "param_names")  # of a group; its other entries are options
# how and where a step is computed: the loading program's choice, on its own device, and not the saving one's
_OF_PROGRAM = ("capturable", "foreach", "fused")


def take(optimizer: Optimizer, model: ModelState) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Collect the state of an optimizer on a ModelState -> (tensors, record), rows in the order of experts. Collective.

    Raises CheckpointError, before any communication, for state of experts that has no part for each expert.
    """
    # Check everything, and note which tensors are rows of experts
    _refuse_zero_redundancy(optimizer)
    has_rows = set()  # (parameter, entry) whose tensors are rows of experts
    for param in (p for group in optimizer.param_groups for p in group["params"]):
        name = model.name_of(param)
        for entry, value in optimizer.state.get(param, {}).items():
            if "." in entry:
                raise CheckpointError(f"the optimizer's state {entry!r} of {name} has a dot in its name")
            kind = packed_kind(value) if isinstance(value, torch.Tensor) else None
            if kind is not None:
                raise CheckpointError(
                    f"the optimizer's state {entry!r} of {name} is a {kind}, whose values are not in one tensor: use "
                    "torch.save(optimizer.state_dict()) beside the model's checkpoint, or an optimizer of PyTorch"
                )
            if not isinstance(value, torch.Tensor) or model.local_rows(name) is None:
                continue
            shape, whole = tuple(value.shape), model.global_shape(name)
            if shape not in ((), tuple(param.shape)) and isinstance(param, DTensor):
                raise CheckpointError(
                    f"the optimizer's state {entry!r} {list(shape)} of {name} {list(param.shape)}, whose experts "
                    "are sharded (DTensor), cannot be saved: use an optimizer with state like the parameter (Adam, SGD)"
                )
            if _is_by_expert(name, entry, shape, tuple(param.shape)):
                # the same for the shapes over all ranks, which are all that load() sees: it must not refuse later
                _is_by_expert(name, entry, (whole[0], *shape[1:]), whole)
                has_rows.add((name, entry))
    # Collect
    tensors: dict[str, torch.Tensor] = {}
    groups: list[dict[str, Any]] = []
    params: dict[str, int] = {}
    values: dict[str, dict[str, Any]] = {}
    for number, group in enumerate(optimizer.param_groups):
        groups.append({key: value for key, value in group.items() if key not in _OF_PARAMETERS})
        for param in group["params"]:
            name = model.name_of(param)
            params[name] = number
            for entry, value in optimizer.state.get(param, {}).items():
                if not isinstance(value, torch.Tensor):
                    values.setdefault(name, {})[entry] = value
                elif (name, entry) in has_rows:
                    tensors[f"{PREFIX}{entry}.{name}"] = model.as_part(name, model.in_order(name, value))
                else:
                    tensors[f"{PREFIX}{entry}.{name}"] = value
    record = {"type": type(optimizer).__name__, "groups": groups, "params": params, "values": values}
    return tensors, record


def _refuse_zero_redundancy(optimizer: Optimizer) -> None:
    if is_zero_redundancy(optimizer):
        raise CheckpointError(
            "the state of ZeroRedundancyOptimizer is spread over the ranks by its own rule: save the model without "
            "optimizer, and beside it optimizer.consolidate_state_dict() and torch.save(optimizer.state_dict()) of a "
            "rank; or use FSDP2, which shards a plain optimizer's state"
        )


def _is_by_expert(name: str, entry: str, shape: tuple[int, ...], param: tuple[int, ...]) -> bool:
    """True if state of this shape has a row for each expert of a parameter [E, *]; False if it is one number for all.

    Rows have tensors like the parameter, and for [E, H, D] means over H or D, as Adafactor's: [E, H, 1], [E, 1, D],
    [E, H], [E, D], [E]. Raises CheckpointError for others, such as Adafactor's mean of a bias [E, H] over the experts
    of a rank, which exists in no other layout.
    """
    if shape == ():
        return False
    if shape == param:
        return True
    if len(param) == 3:
        num_experts, *widths = param
        # A mean over the experts has the same shape if E is one of the widths: refuse, because it could be either
        kept = {(num_experts, *rest) for rest in _means(*widths)}
        if shape in kept and not (num_experts > 1 and shape in set(_means(*widths)) | {tuple(widths)}):
            return True
    raise CheckpointError(
        f"the optimizer's state {entry!r} {list(shape)} of {name} {list(param)} has not one part for each expert: "
        "with expert parallelism it cannot be saved for other layouts. Use an optimizer that keeps state like the "
        "parameter (Adam, SGD), experts without bias, or save without optimizer"
    )


def _means(rows: int, columns: int) -> tuple[tuple[int, ...], ...]:
    """List the shapes of means over a matrix's columns, rows or both."""
    return (rows, 1), (1, columns), (1, 1), (rows,), (columns,), ()


def merge_records(records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Merge the records of the ranks' optimizers; groups with the same options become one."""
    merged: dict[str, Any] = {"type": records[0]["type"], "groups": [], "params": {}, "values": {}}
    for record in records:
        for name, number in record["params"].items():
            options = record["groups"][number]
            # ranks number their groups differently, so a group is identified by its options
            if options not in merged["groups"]:
                merged["groups"].append(options)
            merged["params"].setdefault(name, merged["groups"].index(options))
        merged["values"] = record["values"] | merged["values"]  # the lowest rank's win
    return merged


def names(optimizer: Optimizer | None, model: ModelState) -> set[str]:
    """Return the names of an optimizer's parameters; none without one."""
    groups = [] if optimizer is None else optimizer.param_groups
    return {model.name_of(param) for group in groups for param in group["params"]}


def compare(optimizer: Optimizer, model: ModelState, record: dict[str, Any], names_of_all: set[str]) -> None:
    """Raise CheckpointError if an optimizer cannot take what is saved. names_of_all: parameters of all ranks."""
    _refuse_zero_redundancy(optimizer)
    if record["type"] != type(optimizer).__name__:
        raise CheckpointError(
            f"the optimizer is {type(optimizer).__name__}, but the checkpoint has the state of {record['type']}"
        )
    # over all ranks, because each has the optimizer of its own experts
    missing, extra = names_of_all - record["params"].keys(), record["params"].keys() - names_of_all
    if missing:
        raise CheckpointError(f"the checkpoint has no optimizer state for {', '.join(sorted(missing))}")
    if extra:
        raise CheckpointError(
            f"the checkpoint has optimizer state for others too: {', '.join(sorted(extra))}"
        )
    # A group of this optimizer gets the options of one saved group
    for i, group in enumerate(optimizer.param_groups):
        saved = {record["params"][model.name_of(param)] for param in group["params"]}
        if len(saved) > 1:
            raise CheckpointError(
                f"the parameters of the optimizer's group {i} were in {len(saved)} groups with different options"
            )


class Loading:
    """Room for an optimizer's state from a checkpoint: the optimizer changes at commit(), once all of it is read."""

    parts: dict[str, torch.Tensor]  # {key: tensor} for the checkpoint to fill, rows of experts as DTensor

    def __init__(
        self,
        optimizer: Optimizer,
        model: ModelState,
        record: dict[str, Any],  # of the checkpoint
        saved: Mapping[str, StoredTensor],  # {key: tensor} of the checkpoint, or what has shape and dtype
        dtypes: Mapping[str, torch.dtype],  # {name: dtype} of the parameters in the checkpoint
    ):
        self.optimizer = optimizer
        self.record = record
        self.names = {p: model.name_of(p) for group in optimizer.param_groups for p in group["params"]}
        entries: dict[str, list[tuple[str, str]]] = {}
        for key in saved:
            if key.startswith(PREFIX):
                entry, _, name = key.removeprefix(PREFIX).partition(".")
                entries.setdefault(name, []).append((entry, key))
        self.parts = {}
        self._state: dict[torch.Tensor, dict[str, Any]] = {}
        for group in optimizer.param_groups:
            for param in group["params"]:
                name = self.names[param]
                self._state[param] = dict(record["values"].get(name, {}))
                for entry, key in entries.get(name, []):
                    dtype, now = saved[key].dtype, optimizer.state.get(param, {}).get(entry)
                    # The parameter was saved in another dtype: cast its state, too, but not numbers such as steps
                    if param.dtype != dtypes[name] and saved[key].shape != ():
                        if isinstance(now, torch.Tensor):
                            dtype = now.dtype
                        elif dtype == dtypes[name]:
                            # not if it was another one: float32 moments of a bfloat16 parameter stay float32
                            dtype = param.dtype
                    device = param.device
                    if entry == "step" and not (group.get("capturable") or group.get("fused")):
                        device = torch.device("cpu")  # where the optimizers of PyTorch keep it
                    tensor, part = self._room(model, param, entry, saved[key].shape, dtype, device)
                    self._state[param][entry] = tensor
                    self.parts[key] = part

    def _room(
        self,
        model: ModelState,
        param: torch.Tensor,
        entry: str,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Allocate one entry of a parameter's state -> (the local tensor, what the checkpoint fills)."""
        name = self.names[param]
        # like the parameter, sharded as it is; one number for all, or a tensor that every rank has; rows of experts
        if isinstance(param, DTensor) and shape == tuple(param.shape):
            tensor = torch.zeros_like(param.detach(), dtype=dtype)
            return tensor, tensor
        rows = model.local_rows(name)
        if rows is None or not _is_by_expert(name, entry, shape, model.global_shape(name)):
            tensor = torch.zeros(shape, dtype=dtype, device=device)
            return tensor, tensor
        if isinstance(param, DTensor):  # has the rows of some of this rank's experts
            tensor = torch.zeros_like(param.detach(), dtype=dtype)
        else:
            tensor = torch.zeros([rows[1] - rows[0], *shape[1:]], dtype=dtype, device=device)
        return tensor, model.as_part(name, tensor)

    def commit(self) -> None:
        """Give the optimizer its state, and the options of its groups."""
        for param, state in self._state.items():
            if state:
                self.optimizer.state[param] = state
            else:
                self.optimizer.state.pop(param, None)
        for group in self.optimizer.param_groups:
            if not group["params"]:
                continue
            # compare() has checked that all parameters of the group were in one saved group
            number = self.record["params"][self.names[group["params"][0]]]
            for key, value in self.record["groups"][number].items():
                if key in _OF_PROGRAM:
                    continue
                # an option in a tensor, as a capturable optimizer's learning rate, keeps its memory
                if isinstance(group.get(key), torch.Tensor):
                    group[key].fill_(value)
                else:
                    group[key] = tuple(value) if isinstance(value, list) else value
