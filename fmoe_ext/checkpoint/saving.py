"""Save and load models and optimizers, from any parallel layout into any other: save(), load(), export_safetensors().

A layout leaves no trace in a checkpoint. ModelState gives every tensor a name that all layouts share. A rank that has
some experts of a layer gives its rows as its part of a DTensor [E, *]; torch.distributed.checkpoint writes each part
once, and on loading reads for every rank the rows that it has now:

    saved by 2 ranks   rows 0 1 2 3 | 4 5 6 7        loaded by 4 ranks   rows 0 1 | 2 3 | 4 5 | 6 7

So any number of ranks loads what any other number saved, and no rank gathers the experts of others.

load() checks before it changes: wrong checksums, and a model or an optimizer that does not fit, raise the same error on
every rank (errors.together) while the model is as it was.
"""

import json
import operator
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from fmoe_ext.checkpoint import optimizer_state, store
from fmoe_ext.checkpoint.errors import CheckpointError, gather, together
from fmoe_ext.checkpoint.files import locked, made_folder
from fmoe_ext.checkpoint.huggingface import read_model
from fmoe_ext.checkpoint.manifest import MODEL, Manifest, decode_keys, encode_keys
from fmoe_ext.checkpoint.model_folder import ModelFolder, local_path
from fmoe_ext.checkpoint.model_state import ModelState, describe_layers
from fmoe_ext.checkpoint.routing import check_config, check_routing, routing_of
from fmoe_ext.checkpoint.safetensors_file import (
    OURS,
    StoredTensor,
    read_safetensors,
    verify_safetensors,
    write_safetensors,
)

_VERSION_OF_FILES = 1  # of our entry in the metadata of a safetensors file


@torch.no_grad()
def save(
    folder: str | Path,
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    step: int = 0,
    extra: dict[str, Any] | None = None,
    keep: int | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> Path:
    """Save a model, and an optimizer with its state, as the newest checkpoint of a folder -> its path.

    The layout leaves no trace: any number of expert-parallel and data-parallel ranks may load what any other saved.
    All ranks of the job call it, between steps, on one file system; without process group it works the same. A tensor
    that several ranks have is taken from the lowest of them; a warning names those whose values differ. extra: a dict
    of plain values (JSON); load() returns it, to each rank its own if there are as many ranks. keep: how many
    checkpoints stay in the folder. A crash at any moment leaves the earlier checkpoints as they were.

    Raises CheckpointError, with the same text on every rank, if one fails.
    Equivalent, in one process: torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path).

    Example:

        >>> mlp = fmoe_ext.FMoETransformerMLP(num_expert=4, d_model=8, d_hidden=16, gate="softmax")
        >>> optimizer = torch.optim.AdamW(mlp.parameters())
        >>> folder = save("out", mlp, optimizer, step=100)
        >>> fmoe_ext.checkpoint.load("out", mlp, optimizer).step
        100
    """
    # Check the arguments; an error on one rank is raised on all
    record = None
    with together("saving", process_group):
        if keep is not None and (type(keep) is not int or keep < 1):
            raise CheckpointError(f"keep must be at least 1, or None for all, but got {keep!r}")
        try:
            step = operator.index(step)
        except TypeError:
            raise CheckpointError(f"step must be an integer, but got {step!r}") from None
        if step < 0:
            raise CheckpointError(f"step must not be negative, but got {step}")
        if not isinstance(extra, dict | None):
            raise CheckpointError(
                f"extra must be a dict, but got a {type(extra).__name__}: give it a name, as extra={{'values': ...}}"
            )
        state = ModelState(model)
        extra = _checked_json(extra or {}, "extra")
    # {key: tensor, or this rank's part of a DTensor} of the model, then of the optimizer
    tensors = {
        MODEL + name: state.as_part(name, state.in_order(name, value))
        for name, value in state.tensors.items()
    }
    with together("saving the optimizer", process_group):
        if optimizer is not None:
            of_optimizer, record = optimizer_state.take(optimizer, state)
            tensors.update(of_optimizer)
            record = _checked_json(record, "the options of the optimizer")
    # Each rank's optimizer has its own experts, and perhaps other groups: the manifest has one record of them all
    records = gather(record, process_group)
    without = [rank for rank, other in enumerate(records) if other is None]
    if 0 < len(without) < len(records):
        raise CheckpointError(f"saving: ranks {without} gave no optimizer, the others did")
    merged = None if record is None else optimizer_state.merge_records([r for r in records if r is not None])
    routing = {name: routing_of(layer) for name, layer in state.layers.items()}
    extras = gather(extra, process_group)
    manifest = Manifest(step=step, extra=extras[0], optimizer=merged, routing=routing)
    manifest.keep_extras(extras)
    return store.write_checkpoint(Path(folder), tensors, manifest, keep, process_group)


@torch.no_grad()
def load(
    path: str | Path,
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    cast: bool = False,
    verify: bool = True,
    process_group: dist.ProcessGroup | None = None,
) -> Manifest:
    """Load what save() saved in any layout, into a model of this one -> Manifest, with step and extra.

    path: a checkpoint, or a folder of checkpoints (its latest); or, without optimizer, a .safetensors file of a whole
    model, a Hugging Face folder or its name in the hub's cache, of which each rank reads its own experts only. The
    model must have the same tensors of the same shapes; cast=True accepts parameters of other dtypes, buffers take the
    dtype of the checkpoint.
    The optimizer's state is cast with its parameter, except state that is kept in another dtype on purpose (a float32
    copy of a bfloat16 parameter). verify=False skips the checksums. Experts that had been moved between ranks are back
    in the order of their numbers afterwards.
    Manifest.extra is what this rank gave to save(); in a job of another number of ranks it is rank 0's on every rank,
    with a warning where ranks had given different values, all of which are in Manifest.extras.

    Raises CheckpointError, with the same text on every rank and before anything is changed, for wrong checksums,
    missing or extra tensors, other shapes and dtypes, other numbers of experts, gates and experts that compute
    something else (top_k, activation) and models whose state_dict() returns copies.

    Example:

        >>> mlp = fmoe_ext.FMoETransformerMLP(num_expert=4, d_model=8, d_hidden=16, gate="softmax")
        >>> folder = fmoe_ext.checkpoint.save("out", mlp, step=100, extra={"loss": 2.5})
        >>> manifest = load("out", mlp)
        >>> manifest.step, manifest.extra
        (100, {'loss': 2.5})
    """
    # Find out what the path is; the first rank decides for all
    path = gather(path, process_group)[0]
    has_ranks = dist.is_initialized()
    rank = dist.get_rank(process_group) if has_ranks else 0
    with ExitStack() as until_loaded:
        with together(f"loading {path}", process_group):
            path = local_path(path)
            folder = None if store.has_checkpoint(path) else ModelFolder(path)
            if folder is not None and not folder.paths:
                folder = None
            if rank == 0 and folder is None:  # held open by one rank: no save(keep=) removes it meanwhile
                path = until_loaded.enter_context(store.held_open(path))
        path = gather(path, process_group)[0]  # one checkpoint for all, also where another job is saving
        # Read the descriptions of what is saved, and check its bytes
        with together(f"loading {path}", process_group):
            state = ModelState(model)
            source = _Folder(path) if folder is None else _Files(folder, state)
            if optimizer is not None and source.manifest.optimizer is None:
                raise CheckpointError(f"{source.path} has no optimizer state")
            if verify:
                source.verify(process_group)
            mine = set(state.tensors), optimizer_state.names(optimizer, state)
        # Names that any rank has: a checkpoint may not have others
        names, names_in_optimizer = (
            set().union(*sets) for sets in zip(*gather(mine, process_group), strict=True)
        )
        # Compare it with the model and the optimizer, and make room for the optimizer's state
        with together(f"loading {source.path}", process_group):
            _compare(state, names, source.tensors, cast)
            source.check(state)
            state.check_can_be_filled()
            loading = None
            record = source.manifest.optimizer
            if optimizer is not None and record is not None:
                optimizer_state.compare(optimizer, state, record, names_in_optimizer)
                dtypes = {name: tensor.dtype for name, tensor in source.tensors.items()}
                loading = optimizer_state.Loading(optimizer, state, record, source.saved, dtypes)
        with together(f"loading {source.path}", process_group):
            # Nothing was changed so far. Reading may still fail now, and leave the model half loaded
            for name, value in state.tensors.items():
                if state.is_buffer(name) and value.dtype != source.tensors[name].dtype:
                    state.give_dtype(name, source.tensors[name].dtype)
            source.fill(state, loading)
            if loading is not None:
                loading.commit()
            state.put_in_order()
        source.manifest.take_extra(rank, dist.get_world_size(process_group) if has_ranks else 1)
        return source.manifest


@torch.no_grad()
def export_safetensors(
    path: str | Path, model: nn.Module, *, process_group: dist.ProcessGroup | None = None
) -> None:
    """Write a whole model, of any layout, to one safetensors file; load() reads it into any layout.

    All ranks call it; the first writes the file, from parts that the ranks have left beside it, while the others wait.
    A tensor that several ranks have is taken from the lowest of them; a warning names those whose values differ.
    Metadata of the file: "fmoe_ext" (version; layers: number of experts, widths; routing: what each gate computes) and
    "sha256".

    Example:

        >>> mlp = fmoe_ext.FMoETransformerMLP(num_expert=4, d_model=8, d_hidden=16, gate="softmax")
        >>> export_safetensors("model.safetensors", mlp)
        >>> manifest = fmoe_ext.checkpoint.load("model.safetensors", mlp)
    """
    path = Path(path)
    with gathered(path, model, process_group) as whole:
        if whole is not None:
            write_safetensors(path, whole.tensors, model_metadata(whole.tensors, whole.routing))


@dataclass
class Whole:
    """A whole model, as gathered() gives it to the first rank."""

    tensors: dict[str, StoredTensor]  # in memory, or in a checkpoint beside the file if ranks had parts
    routing: dict[str, Any]  # {layer: what its gate computes}


@contextmanager
def gathered(
    path: Path, model: nn.Module | ModelState, process_group: dist.ProcessGroup | None = None
) -> Iterator[Whole | None]:
    """Yield the whole model on the first rank, to be written to path, and None on the others, which wait. Collective.

    Ranks that have a part of it leave their parts beside path. If the body fails, every rank raises the error.
    """
    is_first = not dist.is_initialized() or dist.get_rank(process_group) == 0
    parts = path.with_name(f".{path.name}.parts")
    with ExitStack() as until_written:
        with together(f"writing {path}", process_group):
            state = model if isinstance(model, ModelState) else ModelState(model)
            routing = {name: routing_of(layer) for name, layer in state.layers.items()}
            if is_first:
                until_written.enter_context(made_folder(path.parent))
                # one job at a time writes to a path; the parts are removed before the lock is released
                lock = path.with_name(f".{path.name}.lock")
                until_written.enter_context(locked(lock, f"writing {path}"))
                until_written.callback(shutil.rmtree, parts, ignore_errors=True)
        whole = Whole({name: StoredTensor.of(value) for name, value in state.tensors.items()}, routing)
        # With parts of a model on several ranks, a checkpoint beside path carries them to the first one
        if any(gather(state.is_part(), process_group)):
            saved = save(parts, state.model, process_group=process_group)
            with together(f"writing {path}", process_group):
                if is_first:
                    whole.tensors = store.model_tensors(saved, Manifest.read(saved))
        else:  # every rank has all: nothing is written but by the first, only the copies are compared
            copies: dict[store.Place, Callable[[], torch.Tensor]]
            copies = {(name, ()): value.detach for name, value in state.tensors.items()}
            store.compare_replicas(copies, process_group)
        with together(f"writing {path}", process_group):
            yield whole if is_first else None


def model_metadata(tensors: Mapping[str, Any], routing: Mapping[str, Any] | None = None) -> dict[str, str]:
    """Make our metadata of a safetensors file, for tensors {name: tensor}; routing: {layer: what its gate computes}."""
    layers = describe_layers({name: tensor.shape for name, tensor in tensors.items()})
    return {
        OURS: json.dumps({"version": _VERSION_OF_FILES, "layers": layers, "routing": dict(routing or {})})
    }


def noted_routing(file: Path) -> dict[str, Any]:
    """Return {layer: what its gate computes} as model_metadata() noted it in a safetensors file; {} for others."""
    try:
        noted = json.loads(read_safetensors(file)[1].get(OURS, "{}")).get("routing", {})
    except (ValueError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{file} is damaged: its metadata {OURS!r} is no JSON object") from error
    return noted if isinstance(noted, dict) and all(isinstance(v, dict) for v in noted.values()) else {}


class _Folder:
    """A checkpoint of save() as a source of load(); _Files is the other kind. `tensors` are the model's, by name."""

    def __init__(self, path: Path):
        self.path = store.find(path)
        self.manifest = Manifest.read(self.path)
        self._places = self.manifest.saved(self.path)
        self.saved = store.stored_tensors(self.path, self._places)  # every tensor
        self.tensors = store.of_model(self.saved)  # the model's

    def check(self, state: ModelState) -> None:
        check_routing(self.manifest.routing, state.layers.items(), "the checkpoint")

    def verify(self, process_group: dist.ProcessGroup | None) -> None:
        store.verify(self.path, self.manifest, process_group=process_group)

    def fill(self, state: ModelState, loading: optimizer_state.Loading | None) -> None:
        parts = {MODEL + name: state.as_part(name, value) for name, value in state.tensors.items()}
        store.read_into(self.path, self._places, parts | ({} if loading is None else loading.parts))


class _Files:
    """Safetensors files of a whole model as a source of load(), in our layout or in one of Hugging Face's."""

    def __init__(self, folder: ModelFolder, state: ModelState):
        self.path = folder.folder
        self.files = folder.paths
        self.tensors, _ = read_model(folder, state.tensors)
        # Hugging Face's files have tied tensors once: the other names get the same tensor
        there = {id(value): name for name, value in state.tensors.items() if name in self.tensors}
        for name, value in state.tensors.items():
            if name not in self.tensors and id(value) in there:
                self.tensors[name] = self.tensors[there[id(value)]]
        self._config = folder.config
        self.saved = self.tensors
        layers = describe_layers({name: tensor.shape for name, tensor in self.tensors.items()})
        self.manifest = Manifest(step=0, layers=layers)

    def check(self, state: ModelState) -> None:
        check_config(self._config, state.layers.items())
        check_routing(noted_routing(self.files[0]), state.layers.items(), str(self.files[0]))

    def verify(self, process_group: dist.ProcessGroup | None) -> None:
        for file in store.share(self.files, process_group):
            verify_safetensors(file)

    def fill(self, state: ModelState, loading: optimizer_state.Loading | None) -> None:
        for name, value in state.tensors.items():
            rows = state.local_rows(name)
            saved = self.tensors[name].read() if rows is None else self.tensors[name].rows(*rows)
            if isinstance(value, DTensor):
                saved = distribute_tensor(saved, value.device_mesh, value.placements, src_data_rank=None)
            value.copy_(saved)


def _compare(state: ModelState, names: set[str], saved: Mapping[str, StoredTensor], cast: bool) -> None:
    """Raise CheckpointError that lists all differences between a model and what is saved, if there are any.

    names: those of all ranks together. cast: parameters may have other dtypes. Buffers always may.
    """
    layers = describe_layers({name: tensor.shape for name, tensor in saved.items()})
    # A different number of experts explains many other differences: only that is said
    experts = [
        f"layer {name or '(root)'} has {layer.num_experts} experts in the model, "
        f"{layers[name]['num_experts']} in the checkpoint"
        for name, layer in state.layers.items()
        if name in layers and layers[name]["num_experts"] != layer.num_experts
    ]
    if experts:
        raise CheckpointError("; ".join(experts))
    missing, extra = sorted(names - saved.keys()), sorted(saved.keys() - names)
    problems = [f"missing in the checkpoint: {', '.join(missing)}"] if missing else []
    problems += [f"not in the model: {', '.join(extra)}"] if extra else []
    for name, value in state.tensors.items():
        if name not in saved:
            continue
        shape, tensor = state.global_shape(name), saved[name]
        if tensor.shape != shape:
            problems.append(
                f"{name} is {list(shape)} in the model and {list(tensor.shape)} in the checkpoint"
            )
        elif tensor.dtype != value.dtype and not cast and not state.is_buffer(name):
            problems.append(
                f"{name} is {value.dtype} in the model and {tensor.dtype} in the checkpoint (cast=True converts)"
            )
    if problems:
        raise CheckpointError("; ".join(problems))


def _checked_json(value: Any, what: str) -> Any:
    """Return a value as load() will give it back; CheckpointError for values that JSON does not have."""

    def number(value: Any) -> Any:  # learning rates may be tensors
        if isinstance(value, torch.Tensor) and value.numel() == 1:
            return value.item()
        raise TypeError(f"{type(value).__name__} {value!r}")

    try:
        return decode_keys(json.loads(json.dumps(encode_keys(value), default=number)))
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{what} must be plain values (JSON): {error}") from error
