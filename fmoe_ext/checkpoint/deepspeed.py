"""Read DeepSpeed-MoE's checkpoints (of deepspeed.moe.layer.MoE), which have a file for each expert of each layer.

    latest                                                         name of the newest folder
    global_step10/mp_rank_00_model_states.pt                       "module": everything but experts
    global_step10/layer_0_expert_3_mp_rank_00_model_states.pt      expert 3 of the first MoE layer

    theirs   deepspeed_moe.gate.wg.weight [E, D], deepspeed_moe.experts.deepspeed_experts.<e>.*
    ours     gate.gate.weight [E, D], experts.htoh4.*, experts.h4toh.* [E, *]; experts.<e>.* for other experts than MLPs

`fmoe checkpoint` reads files by read_deepspeed(); from_deepspeed() converts a state dict in memory. State of optimizers
is not read: ZeRO flattens it over ranks.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fmoe_ext.checkpoint.errors import CheckpointError
from fmoe_ext.checkpoint.fastmoe import load_file
from fmoe_ext.checkpoint.files import inside, read_text
from fmoe_ext.checkpoint.model_state import B1, B2, W1, W2
from fmoe_ext.checkpoint.safetensors_file import StoredTensor, as_given, as_stored, joined

_LATEST = "latest"
_MODEL_FILE = re.compile(r"(?P<mp>mp_rank_\d{2})_model_states\.pt")
_EXPERT_FILE = re.compile(
    r"(?:layer_(?P<layer>\d{1,6})_)?expert_(?P<expert>\d{1,6})_(?P<mp>mp_rank_\d{2})_model_states\.pt"
)
_GATE = re.compile(r"(?P<layer>(?:.*\.)?)deepspeed_moe\.gate\.wg\.weight")
_EXPERTS = "deepspeed_moe.experts.deepspeed_experts."
_GATED = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))  # of SwiGLU, as Transformers names them


def is_deepspeed(path: Path) -> bool:
    """True for a folder with checkpoints of a DeepSpeed engine, and for the folder of one."""
    try:
        folder = _newest(Path(path))
    except CheckpointError:  # our checkpoints have a file `latest`, too: store.py reads those
        return False
    return folder.is_dir() and any(_MODEL_FILE.fullmatch(file.name) for file in folder.glob("mp_rank_*.pt"))


def _newest(path: Path) -> Path:
    """Return the folder of one step: path itself, or the one that its file "latest" names."""
    if not (path / _LATEST).is_file():
        return path
    # DeepSpeed's tags are any text; only those that are names of a folder beside it are followed
    tag = read_text(inside(path, _LATEST))
    if not re.fullmatch(r"[\w.-]{1,200}", tag):
        raise CheckpointError(
            f"{path / _LATEST} must hold the name of a folder beside it, but holds {tag[:80]!r}"
        )
    return inside(path, tag)


def read_deepspeed(
    path: Path, mp_rank: str | None = None, trust: bool = False
) -> tuple[dict[str, StoredTensor], list[Path], int]:
    """Read the model of a DeepSpeed checkpoint -> ({name: StoredTensor} in our layout, files, step).

    path: the folder of one step, or the one above, whose file "latest" names it. mp_rank: which part of a
    tensor-parallel model, as "mp_rank_00"; needed where there are several, which are not merged. trust: run the code in
    files with pickled objects (client_state).
    Raises CheckpointError for other folders, for missing experts, and for files that need trust.
    """
    folder = _newest(Path(path))
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is no folder" if folder.exists() else f"{folder} does not exist")
    models = {m["mp"]: file for file in sorted(folder.iterdir()) if (m := _MODEL_FILE.fullmatch(file.name))}
    if not models:
        raise CheckpointError(
            f"{folder} has no mp_rank_*_model_states.pt: give the folder of one step of a DeepSpeed engine, or the one "
            f"above, whose file {_LATEST} names it"
        )
    if mp_rank is None and len(models) > 1:
        raise CheckpointError(f"{folder} has several model-parallel parts, name one: {', '.join(models)}")
    part = mp_rank or next(iter(models))
    if part not in models:
        raise CheckpointError(f"{folder} has no {part}, only {', '.join(models)}")
    # The model without experts, then every expert's file of this part
    content = load_file(models[part], trust)
    if content.get("ds_autoep_layers"):
        raise CheckpointError(
            f"{models[part]} is of AutoEP, whose experts are parts of a Transformers model: save that with "
            "engine.save_16bit_model() and read the folder it makes"
        )
    module = content.get("module")
    if not isinstance(module, dict):
        raise CheckpointError(f'{models[part]} has no "module", so it is no checkpoint of a DeepSpeed engine')
    files, tensors = [models[part]], dict(module)
    for file in sorted(folder.iterdir()):
        if (match := _EXPERT_FILE.fullmatch(file.name)) and match["mp"] == part:
            files.append(file)
            tensors |= load_file(file, trust)
    step = content.get("global_steps", 0)
    stored = {name: StoredTensor.of(t) for name, t in tensors.items() if hasattr(t, "shape")}
    return from_deepspeed(stored), files, step if isinstance(step, int) else 0


def from_deepspeed(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Convert layers of deepspeed.moe.layer.MoE in a state dict to the names of our layers.

    Values are tensors or StoredTensors, experts numbered over all ranks. Experts of two matrices (nn.Linear), or of
    SwiGLU's three under Transformers' names, become those of FMoETransformerMLP; others keep their parameters' names,
    as FMoE(expert=...) has them. `mlp` and `coefficient` of use_residual=True keep their names: our layers have no such
    part. Raises CheckpointError if experts are missing or differ.
    """
    tensors, lazy = as_stored(state_dict)
    out: dict[str, StoredTensor] = {}
    prefixes = {match["layer"]: t.shape[0] for key, t in tensors.items() if (match := _GATE.fullmatch(key))}
    for key, tensor in tensors.items():
        match = _GATE.fullmatch(key)
        if match is None:
            if _EXPERTS not in key:
                out[key] = tensor
            elif key.partition(_EXPERTS)[0] not in prefixes:
                raise CheckpointError(
                    f"{key} is of an expert, but there is no {key.partition(_EXPERTS)[0]}deepspeed_moe.gate"
                )
            continue
        # A layer is where a gate is: collect its experts by number
        prefix = match["layer"]
        out[prefix + "gate.gate.weight"] = tensor
        found: dict[int, dict[str, StoredTensor]] = {}  # {expert: {parameter: tensor}}
        for name, part in tensors.items():
            number, _, rest = name.removeprefix(prefix + _EXPERTS).partition(".")
            if name.startswith(prefix + _EXPERTS) and number.isdecimal():
                found.setdefault(int(number), {})[rest] = part
        num_experts = prefixes[prefix]
        if sorted(found) != list(range(num_experts)):
            absent = sorted(set(range(num_experts)) - found.keys())
            raise CheckpointError(
                f"{prefix}deepspeed_moe.gate is for {num_experts} experts, but "
                f"{f'there is none of {absent[:8]}' if absent else f'there are {len(found)}'}"
            )
        experts = [found[e] for e in range(num_experts)]
        if any(expert.keys() != experts[0].keys() for expert in experts):
            raise CheckpointError(f"the experts of {prefix}deepspeed_moe do not have the same parameters")
        # As one tensor if they are MLPs of ours, else under their own names
        columns = {rest: [expert[rest] for expert in experts] for rest in experts[0]}
        fused = _fused(f"{prefix}deepspeed_moe", columns)
        if fused is not None:
            out |= {prefix + name: part for name, part in fused.items()}
        else:
            for rest, column in columns.items():
                out |= {f"{prefix}experts.{e}.{rest}": part for e, part in enumerate(column)}
    return as_given(out, lazy)


def _fused(layer: str, columns: Mapping[str, list[StoredTensor]]) -> dict[str, StoredTensor] | None:
    """Make htoh4 and h4toh from {parameter: each expert's}; None if the experts are no MLPs of ours."""
    # SwiGLU by the names of its three matrices, two-layer MLPs by the shapes of their two
    weights = [name for name, column in columns.items() if len(column[0].shape) == 2]
    stems = [name.removesuffix("weight").removesuffix(".") for name in weights]
    for gate, up, down in _GATED:
        if {stem.rpartition(".")[2] for stem in stems} == {gate, up, down} and len(columns) == 3:
            of = {stem.rpartition(".")[2]: columns[name] for stem, name in zip(stems, weights, strict=True)}
            return {W1: joined(layer, of[gate], of[up]), W2: joined(layer, of[down])}
    shapes = [columns[name][0].shape for name in weights]
    if len(shapes) != 2 or shapes[0] != shapes[1][::-1]:  # [H, D] and [D, H]
        return None
    biases = [f"{stem}.bias" for stem in stems]
    if columns.keys() not in ({*weights}, {*weights, *biases}):
        return None
    names = [*zip((W1, W2), weights, strict=True), *zip((B1, B2), biases, strict=True)]
    return {ours: joined(layer, columns[theirs]) for ours, theirs in names if theirs in columns}
