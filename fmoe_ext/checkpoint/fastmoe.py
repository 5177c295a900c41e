"""Read and write FastMoE's checkpoints: a file for each data-parallel rank, with experts only in all but the first.

    latest_checkpointed_iteration.txt
    iter_0001000/mp_rank_00/model_optim_rng.pt                  rank 0: everything, as Megatron writes it
    iter_0001000/mp_rank_00_dp_rank_0001/model_optim_rng.pt     rank 1: its experts
    (mp_rank_00_003 and mp_rank_00_003_dp_rank_0001 with pipeline stages)

`fmoe checkpoint` and checkpoint.read_fastmoe(), merge_fastmoe() and write_fastmoe() come here.
Rank r holds the experts [r * e, (r + 1) * e), as experts.<i>.htoh4.weight [1, H, D] or experts.htoh4.weight [e, H, D].
The state of the optimizer is not read: FastMoE numbers it by an order that is not in the file.
"""

import argparse
import functools
import pickle
import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from fmoe_ext.checkpoint.errors import CheckpointError
from fmoe_ext.checkpoint.files import (
    atomic_file,
    check_is_file,
    check_torch_file,
    explained,
    inside,
    is_zip_of_torch,
    locked,
    made_folder,
    publish,
    unfinished_of,
    unique,
)
from fmoe_ext.checkpoint.megatron import TRACKER, expert_layers, iteration_folder
from fmoe_ext.checkpoint.model_state import EXPERT_NAME
from fmoe_ext.checkpoint.safetensors_file import StoredTensor

_FILE = "model_optim_rng.pt"
_OF_DISTRIBUTED_OPTIMIZER = "model_rng.pt"  # of Megatron-LM v3.0.2, whose optimizer has files of its own then
_RANK_FOLDER = re.compile(r"(?P<mp>mp_rank_\d{2}(?:_\d{3})?)(?:_dp_rank_(?P<dp>\d{4}))?")
_FUSED_NAMES = ("htoh4.weight", "htoh4.bias", "h4toh.weight", "h4toh.bias")
_GATES = (("gate.weight", 0), ("w_gate", 1))  # (matrix of a gate, its dimension of experts)


def is_fastmoe(path: Path) -> bool:
    """True for a folder that may be FastMoE's: with Megatron's tracker file, or of one iteration.

    One of Megatron-core has the tracker file too: ask megatron.is_torch_dist first.
    """
    path = Path(path)
    files = (_FILE, _OF_DISTRIBUTED_OPTIMIZER)
    return path.is_dir() and (
        (path / TRACKER).exists() or any(any(path.glob(f"mp_rank_*/{f}")) for f in files)
    )


def read_fastmoe(
    path: Path, mp_rank: str | None = None, trust: bool = False
) -> tuple[dict[str, StoredTensor], list[Path], int]:
    """Read the model of a FastMoE checkpoint -> ({name: StoredTensor}, files, iteration), experts in our fused layout.

    path: the folder of one iteration, or the one above (its latest). mp_rank: which model-parallel part, as
    "mp_rank_00" or "mp_rank_00_001"; needed where there are several, which are not merged. Files are read
    without running code in them; trust=True runs it, for files with pickled objects of your own.
    Raises CheckpointError for missing ranks (the last ones are missed by the gates: merge_fastmoe), for ranks that do
    not fit together, for links out of the folder and for files that need trust.
    """
    folder = iteration_folder(Path(path))
    # {model-parallel part: {data-parallel rank: file}}
    ranks: dict[str, dict[int, Path]] = {}
    for entry in sorted(folder.iterdir()):
        match = _RANK_FOLDER.fullmatch(entry.name)
        if match and (entry / _FILE).exists():
            file = inside(inside(folder, entry.name), _FILE)
            ranks.setdefault(match["mp"], {})[int(match["dp"] or 0)] = file
    if not ranks and any(folder.glob(f"mp_rank_*/{_OF_DISTRIBUTED_OPTIMIZER}")):
        raise CheckpointError(
            f"{folder} is of Megatron-LM's distributed optimizer (mp_rank_*/{_OF_DISTRIBUTED_OPTIMIZER}), with which "
            "the experts of ranks above 0 are not saved: save without --use-distributed-optimizer"
        )
    if not ranks:
        raise CheckpointError(f"{folder} has no mp_rank_*/{_FILE}")
    if mp_rank is None and len(ranks) > 1:
        raise CheckpointError(f"{folder} has several model-parallel parts, name one: {', '.join(ranks)}")
    if mp_rank is not None and mp_rank not in ranks:
        raise CheckpointError(f"{folder} has no {mp_rank}, only {', '.join(ranks)}")
    files = ranks[mp_rank or next(iter(ranks))]
    absent = sorted(set(range(max(files) + 1)) - files.keys())
    if absent:
        raise CheckpointError(
            f"{folder} has files up to data-parallel rank {max(files)}, but none of {absent}"
        )
    return read_files([files[rank] for rank in range(len(files))], trust)


def read_files(files: Sequence[Path], trust: bool = False) -> tuple[dict[str, StoredTensor], list[Path], int]:
    """Read the files of all ranks, rank 0 first -> ({name: StoredTensor}, files, iteration).

    Each is a dict with "model", or a state dict, of everything or, from rank 1 on, of experts only.
    """
    # Megatron's files have the model under "model", nested by its parts; a bare state dict is one itself
    contents = [load_file(file, trust) for file in files]
    models = []
    for file, content in zip(files, contents, strict=True):
        model = content.get("model", content)
        if not isinstance(model, dict):
            raise CheckpointError(f'{file}: "model" is a {type(model).__name__}, expected a dict')
        models.append(_flatten(model))
    iteration = contents[0].get("iteration", 0)
    return merge_fastmoe(models), list(files), iteration if isinstance(iteration, int) else 0


def merge_fastmoe(models: Sequence[Mapping[str, Any]]) -> dict[str, StoredTensor]:
    """Merge the state dicts of all ranks, rank 0 first: the experts of all ranks, everything else from rank 0.

    Values are tensors or StoredTensors -> {name: StoredTensor}.
    Raises CheckpointError for ranks that do not fit together, for gaps in the numbers of experts, and for fewer or more
    experts than the layer's gate is for (gate.gate.weight or gate.w_gate; other gates do not show missing last ranks).
    """
    if len(models) > 1 and (of_megatron := expert_layers(models[0])):
        raise CheckpointError(
            f"{', '.join(sorted(of_megatron)) or '(root)'}: experts under Megatron-core's names, whose files of "
            "several ranks are not merged; save with --ckpt-format torch_dist"
        )
    # Layers whose experts are spread over the ranks: those that rank 1 has. Every further rank must have the same names
    spread = _expert_names(models[1]) if len(models) > 1 else {}
    for rank, model in enumerate(models):
        own = _expert_names(model)
        different = set() if rank == 0 else own.keys() ^ spread.keys()
        for layer in spread:
            different |= own.get(layer, set()) ^ spread[layer]
        if different:
            raise CheckpointError(f"ranks {rank} and 1 do not both have {', '.join(sorted(different))}")
    merged: dict[str, StoredTensor] = {}
    # Collect the parts of each layer's experts: {layer: {leaf: (rank, index, tensor)}}
    parts: dict[str, dict[str, list[tuple[int, int, StoredTensor]]]] = {}
    for name, value in models[0].items():
        match = EXPERT_NAME.fullmatch(name)
        if match is None:
            merged[name] = StoredTensor.of(value)
            continue
        holders = models if (match["layer"] or "") in spread else models[:1]
        group = parts.setdefault(f"{match['layer']}.experts" if match["layer"] else "experts", {})
        for rank, model in enumerate(holders):
            part = rank, int(match["index"] or 0), StoredTensor.of(model[name])
            group.setdefault(match["rest"], []).append(part)
    # Join them in the order of the experts: by rank, then by their number on it
    for layer, group in parts.items():
        # a fused layer has one module a rank, with number 0
        modules = {(rank, index) for tensors in group.values() for rank, index, _ in tensors}
        numbers = {index for _, index in modules}
        num_local = len(numbers)
        if max(numbers) != num_local - 1:
            gap = next(e for e in range(num_local) if e not in numbers)
            raise CheckpointError(f"{layer} has experts up to number {max(numbers)}, but no expert {gap}")
        counts: set[int] = set()  # of the layer's experts, by each of its tensors
        for rest, tensors in group.items():
            name = f"{layer}.{rest}"
            tensors.sort(key=lambda item: item[:2])
            ordered = [t for _, _, t in tensors]
            first, shape = ordered[0], ordered[0].shape
            # An expert [1, *] is a row of a fused tensor; a module of the same names has [*] and stays apart
            num_dims = 3 if rest.endswith("weight") else 2
            is_row = rest in _FUSED_NAMES and len(shape) == num_dims and shape[0] == 1
            if name not in models[0] and not is_row:
                merged |= {f"{layer}.{rank * num_local + i}.{rest}": tensor for rank, i, tensor in tensors}
                counts.add(len(modules))
                continue
            if len(ordered) == 1 and rest not in _FUSED_NAMES:  # its rows may be no experts
                merged[name] = first
                continue
            if any(not t.shape for t in ordered):
                raise CheckpointError(
                    f"{name} is a number, but the ranks are joined along a dimension of experts"
                )
            if name not in models[0] and len(ordered) < len(modules):
                raise CheckpointError(f"{layer}: {len(ordered)} of {len(modules)} experts have {rest}")
            if any(t.shape[1:] != shape[1:] or t.dtype != first.dtype for t in ordered):
                raise CheckpointError(
                    f"{name} differs between ranks: {[[*t.shape, str(t.dtype)] for t in ordered]}"
                )
            whole = (sum(t.shape[0] for t in ordered), *shape[1:])
            read = functools.partial(lambda parts: torch.cat([part.read() for part in parts]), ordered)
            merged[name] = StoredTensor(whole, first.dtype, read)
            if rest in _FUSED_NAMES:
                counts.add(whole[0])
        # The gate knows how many experts there are: the missing file of a last rank shows here
        for leaf, dim in _GATES:
            gate = merged.get(f"{layer.removesuffix('experts')}gate.{leaf}")
            if gate is not None and len(gate.shape) == 2 and (wrong := counts - {gate.shape[dim]}):
                raise CheckpointError(
                    f"{layer}: the gate is for {gate.shape[dim]} experts, but the files have {min(wrong)}: "
                    "those of some ranks are missing"
                )
    return merged


def _expert_names(model: Iterable[str]) -> dict[str, set[str]]:
    """Return {layer: names of its experts' tensors}."""
    names: dict[str, set[str]] = {}
    for name in model:
        if (match := EXPERT_NAME.fullmatch(name)) is not None:
            names.setdefault(match["layer"] or "", set()).add(name)
    return names


def write_fastmoe(
    folder: Path, tensors: Mapping[str, StoredTensor], num_ranks: int = 1, iteration: int = 0
) -> None:
    """Write {name: StoredTensor} as FastMoE does for num_ranks data-parallel ranks; atomically.

    "model" in the files is flat: {name: tensor}, one expert an entry. Experts are divided over the ranks.
    """
    folder = Path(folder)
    if num_ranks < 1:
        raise CheckpointError(f"the number of ranks must be at least 1, but got {num_ranks}")
    target = folder / f"iter_{iteration:07d}"
    if target.exists():
        raise CheckpointError(f"{target} exists already")
    for name, tensor in tensors.items():
        match = EXPERT_NAME.fullmatch(name)
        if match is None:
            continue
        if match["rest"] not in _FUSED_NAMES or match["index"] is not None:
            raise CheckpointError(
                f"{name}: only the experts of FMoETransformerMLP can be written for FastMoE"
            )
        if not tensor.shape or tensor.shape[0] % num_ranks != 0:
            num_experts = tensor.shape[0] if tensor.shape else "no"
            raise CheckpointError(f"{name}: {num_experts} experts cannot be divided over {num_ranks} ranks")
    # Write under another name, a rank at a time
    num_bytes = sum(tensor.num_bytes for tensor in tensors.values())
    with made_folder(folder), explained(target, num_bytes), locked(folder / ".lock", f"writing {target}"):
        for abandoned in unfinished_of(target):  # by killed processes: this one has the lock
            shutil.rmtree(abandoned, ignore_errors=True)
        unfinished = target.with_name(f".{target.name}.{unique()}.tmp")
        try:
            for rank in range(num_ranks):
                _write_rank(unfinished, tensors, rank, num_ranks, iteration)
            publish(unfinished, target)  # before the file that names it, which must not name half of one
        except BaseException:
            shutil.rmtree(unfinished, ignore_errors=True)
            raise
        with atomic_file(folder / TRACKER) as file:
            file.write(str(iteration).encode())


def _write_rank(
    folder: Path, tensors: Mapping[str, StoredTensor], rank: int, num_ranks: int, iteration: int
) -> None:
    model: dict[str, torch.Tensor] = {}  # of one rank at a time: freed when this function ends
    for name, tensor in tensors.items():
        match = EXPERT_NAME.fullmatch(name)
        if match is None:
            if rank == 0:
                value = tensor.read().contiguous()
                # torch.save writes a view with all that it is a view of
                model[name] = value if value.untyped_storage().nbytes() == value.nbytes else value.clone()
            continue
        # rows of this rank, each an entry [1, *] under its number on the rank
        num_local = tensor.shape[0] // num_ranks
        prefix = name.removesuffix(match["rest"])
        rows = tensor.rows(rank * num_local, (rank + 1) * num_local)
        for i in range(num_local):
            model[f"{prefix}{i}.{match['rest']}"] = rows[i : i + 1].clone()
    content = {"model": model, "iteration": iteration, "checkpoint_version": 3.0}
    name = "mp_rank_00" if rank == 0 else f"mp_rank_00_dp_rank_{rank:04d}"
    with atomic_file(folder / name / _FILE) as file:
        torch.save(content, file)


def load_file(path: Path, trust: bool) -> dict[Any, Any]:
    """Read a dict that torch.save wrote; code in the file does not run unless it is trusted."""
    import numpy

    check_is_file(path)
    # Beside tensors, Megatron's files have argparse.Namespace ("args") and arrays (random state). Pickled arrays call
    # numpy's _reconstruct, by NumPy 1's name of its module or NumPy 2's
    reconstruct = numpy.empty(0).__reduce__()[0]
    plain_data: list[Any] = [
        *(argparse.Namespace, numpy.ndarray, numpy.dtype, type(numpy.dtype("uint32"))),
        *((reconstruct, f"numpy.{core}.multiarray._reconstruct") for core in ("core", "_core")),
    ]
    try:
        # mapped, a tensor is read when it is used; files of torch before 1.6 are no zips and cannot be mapped
        with open(path, "rb") as file:
            mmap = is_zip_of_torch(file)
            if not trust:
                check_torch_file(file, path)
        with torch.serialization.safe_globals(plain_data):
            content = torch.load(path, map_location="cpu", weights_only=not trust, mmap=mmap)
    except CheckpointError:
        raise
    except pickle.UnpicklingError as error:
        needed = re.search(r"GLOBAL ([\w.]+)", str(error))
        raise CheckpointError(
            f"{path} is damaged, or holds pickled objects ({needed[1] if needed else 'see the cause'}), and unpickling "
            "runs code from the file: if you trust it, pass trust=True (--trust)"
        ) from error
    except Exception as error:  # of torch and zipfile, for damaged content of any kind
        text = f"{path} cannot be read, it may be truncated: {type(error).__name__}: {error}"
        raise CheckpointError(text[:500]) from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds a {type(content).__name__}, expected a dict")
    return content


def _flatten(tree: Mapping[Any, Any], prefix: str = "") -> dict[str, torch.Tensor]:
    """Flatten Megatron's nested state dict -> {name: tensor}; what is no tensor is left out."""
    flat: dict[str, torch.Tensor] = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            flat |= _flatten(value, f"{prefix}{key}.")
        elif isinstance(value, torch.Tensor):
            flat[f"{prefix}{key}".removeprefix("module.")] = value
    return flat
