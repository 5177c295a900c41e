"""Load what save_pretrained() saved of a fmoefied Transformers model: huggingface.from_pretrained().

The entry "fmoe_ext" of config.json (record.py) says what the dense model was and which MLPs became which MoE layers. So
loading repeats what the user did: build the dense model with Transformers, fmoefy each noted layer with the noted
options, then load the tensors, all of them or none. The folder may be a stranger's: the entry is checked before
anything is built from it. Before memory is taken, the dense model is made on the meta device, and its size and those of
the MoE layers are compared with the bytes of the files.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fmoe_ext._require import require
from fmoe_ext.checkpoint.errors import CheckpointError
from fmoe_ext.checkpoint.files import inside
from fmoe_ext.checkpoint.model_folder import (
    ModelFolder,
    check_values,
    errors_of_transformers,
    local_path,
    read_config_json,
)
from fmoe_ext.gates import find_gate
from fmoe_ext.huggingface.record import KEY, take_record
from fmoe_ext.models.fmoefy import find_targets, replace
from fmoe_ext.models.target import Options

# Weights of the dense model for each byte of the files. At a byte a weight 1 would do, but the MLPs that became MoE
# layers are not in the files, and hidden_hidden_size= may have made all experts of a layer smaller than its MLP was
_MOST_WEIGHTS = 8
_SMALL = 2**26  # numbers in buffers that Transformers computes (masks, positions), of which files have none


def from_pretrained(
    folder: str | Path,
    *,
    gate: Any = None,
    activation: Any = None,
    dtype: torch.dtype | Literal["auto"] | None = None,
    **moe_kwargs: Any,
) -> nn.Module:
    """Load the fmoefied model that model.save_pretrained(folder) saved -> the same model, in eval().

    folder: with config.json and model.safetensors or its parts, or its name in the hub's cache. gate, activation,
    moe_kwargs: what fmoefy was given and a file cannot hold (your own gate or activation); an error says which is
    missing.
    dtype: None or "auto" takes each tensor's own in the files, so that the model has the same bits.
    Raises ValueError for a folder of another kind, and for tensors that do not fit the model; CheckpointError for
    damaged JSON, for an entry that fmoefy did not write, for sizes that the files are too small for, and for files and
    links outside the folder.
    Equivalent to: AutoModel....from_pretrained(folder), were the model a dense one.

    Example:

        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> config = LlamaConfig(vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
        ...     num_attention_heads=2, num_key_value_heads=2)
        >>> model = fmoe_ext.fmoefy(LlamaForCausalLM(config), num_experts=4).eval()
        >>> model.save_pretrained("experts")
        >>> ids = torch.tensor([[1, 2, 3]])
        >>> torch.equal(from_pretrained("experts")(ids).logits, model(ids).logits)
        True
    """
    transformers = require("transformers", "from_pretrained()")
    from safetensors.torch import load_file

    if dtype == "auto":  # Transformers' name for it
        dtype = None
    if not isinstance(dtype, torch.dtype | None):
        raise TypeError(f"dtype must be a torch.dtype, None or 'auto', but is {dtype!r}")
    parallel = moe_kwargs.keys() & {"moe_group", "world_size"}
    if parallel:
        raise ValueError(
            f"{', '.join(sorted(parallel))}: from_pretrained loads all experts into one process. On several, fmoefy a "
            "model there, and fmoe_ext.checkpoint.load(folder, model) reads each rank's experts"
        )
    # The entry of config.json.
    folder = local_path(folder)
    config_file = folder / "config.json"
    values = read_config_json(folder)
    if not values:
        raise ValueError(f"{folder} has no config.json: give a folder that save_pretrained has written")
    if values.get(KEY) is None:
        raise ValueError(
            f"{config_file} is not of a fmoefied model: load it with Transformers' from_pretrained"
        )
    with errors_of_transformers(folder):
        values = _with_floats(values)
    record = take_record(values, str(config_file))
    assert record is not None

    # The files, whose bytes bound what may be built.
    files = ModelFolder(folder)
    if not files.paths:
        raise ValueError(f"{folder} must hold model.safetensors, or its parts with their index")
    for file in files.paths:
        if not file.is_file():
            raise ValueError(f"{folder} must hold {file.name!r}, which its index names")

    # The dense model.
    check_values(folder, values)
    with errors_of_transformers(folder):
        config = transformers.CONFIG_MAPPING[values["model_type"]].from_dict(values)
    names = config.architectures
    name = names[0] if isinstance(names, list) and names else ""
    model_class: Any = getattr(transformers, str(name), None)
    if not isinstance(model_class, type) or not issubclass(model_class, transformers.PreTrainedModel):
        raise ValueError(f"{config_file}: architectures names no model of Transformers: {name!r}")
    with errors_of_transformers(folder), torch.device("meta"):
        unfilled = model_class(copy.deepcopy(config))
    _check_sizes(files, record, unfilled)
    with errors_of_transformers(folder):
        model: Any = model_class(config).to(dtype or config.dtype or torch.get_default_dtype())

    # Its MoE layers. An argument that the entry lacks of some layers is for these alone: it has the others' value.
    given = {"gate": gate, "activation": activation, **moe_kwargs}
    given = {name: value for name, value in given.items() if value is not None}
    lacking = {name for entry in record["layers"] for name in entry["missing"]}
    for i, entry in enumerate(record["layers"]):
        own = {n: value for n, value in given.items() if n in entry["missing"] or n not in lacking}
        _rebuild(model, entry, own, f"{config_file}: {KEY}.layers[{i}]")
    model.config._name_or_path = str(folder)

    # The tensors.
    tensors: dict[str, Tensor] = {}
    for found in files.without_replaced({file: load_file(file) for file in files.paths}).values():
        tensors |= found
    if dtype is None:  # a gate may be wider than the rest, whose dtype config.json has
        for name, value in (*model.named_parameters(), *model.named_buffers()):
            if name in tensors and tensors[name].is_floating_point():
                value.data = value.data.to(tensors[name].dtype)
    _load(folder, model, tensors)
    if inside(folder, "generation_config.json").exists():
        with errors_of_transformers(folder, "generation_config.json"):
            model.generation_config = transformers.GenerationConfig.from_pretrained(folder)
    return model.eval()


def _check_sizes(files: ModelFolder, record: dict[str, Any], dense: nn.Module) -> None:
    """Raise CheckpointError for MoE layers, or a dense model on the meta device, that are too large for the files."""
    num_bytes = sum(file.stat().st_size for file in files.paths)
    most = _MOST_WEIGHTS * num_bytes
    for what, tensors, bound in (
        ("weights", dense.parameters(), most),
        ("numbers in buffers", dense.buffers(), max(most, _SMALL)),
    ):
        if (count := sum(t.numel() for t in tensors)) > bound:
            raise CheckpointError(
                f"{files.folder / 'config.json'} makes a {type(dense).__name__} of {count:,} {what}, but files of "
                f"{num_bytes:,} bytes have {bound:,} at most. Take the folder as model.save_pretrained() wrote it"
            )
    total = 0
    for i, entry in enumerate(record["layers"]):
        sizes = [entry["options"].get(name) for name in ("latent_size", "shared_expert_hidden")]
        # the layer itself refuses what is no number above 0
        latent, shared = (size if isinstance(size, int) and size > 0 else 0 for size in sizes)
        width = latent or entry["d_model"]
        # one of each expert's two weights, or the gate's where that is larger, and one of the latent's and shared
        # expert's: a byte each at least
        total += entry["num_experts"] * max(entry["d_hidden"] * width, entry["d_model"])
        total += entry["d_model"] * (latent + shared)
        if total > num_bytes:
            raise CheckpointError(
                f"{files.folder / 'config.json'}: {KEY}.layers[{i}] has num_experts {entry['num_experts']}, d_model "
                f"{entry['d_model']}, d_hidden {entry['d_hidden']} and options {entry['options']}, and with those "
                f"before it {total:,} weights or more, but the files have {num_bytes:,} bytes. Take the folder as "
                "model.save_pretrained() wrote it"
            )


def _with_floats(value: Any) -> Any:
    """Return values of config.json with infinities and NaNs, which Transformers writes as {"__float__": "Infinity"}."""
    if isinstance(value, dict):
        if value.keys() == {"__float__"}:
            return float(value["__float__"])
        return {key: _with_floats(part) for key, part in value.items()}
    return [_with_floats(part) for part in value] if isinstance(value, list) else value


def _rebuild(model: nn.Module, entry: Mapping[str, Any], given: dict[str, Any], where: str) -> None:
    """Put the MoE layer of an entry in its place, its weights not yet loaded. where: names the entry in errors."""
    missing = {name: was for name, was in entry["missing"].items() if name not in given}
    if missing:
        what = ", ".join(f"{name}= (it was {was})" for name, was in missing.items())
        raise ValueError(f"{entry['path']} cannot be built from the file alone: pass {what}")
    gate = given.get("gate")
    if gate is None:
        gate = functools.partial(find_gate(entry["gate"]["name"]), **entry["gate"]["options"])
    path = entry["path"]
    options = Options(
        num_experts=entry["num_experts"],
        distributed_experts=False,
        hidden_hidden_size=entry["d_hidden"],
        top_k=entry["top_k"],
        gate=gate,
        activation=given.get("activation", entry["activation"]),
        d_model=entry["d_model"],
        # the MoE layer of a torch layer is its linear1 (models/plain.py), and match= points at the torch layer
        match=(lambda at, module: path in (at, f"{at}.linear1")) if entry["matched"] else None,
        moe_kwargs=entry["options"]
        | {"bias": entry["bias"]}
        | {name: value for name, value in given.items() if name not in ("gate", "activation")},
    )
    try:
        kind, targets = find_targets(model, options)
        targets = [target for target in targets if target.path == path]
        if not targets:
            raise ValueError(f"{type(model).__name__} has no MLP at {path!r}")
        replace(model, kind, targets, options)
    except Exception as error:  # a gate may raise anything for options that are not its own
        if given:  # the caller's arguments, not the file, may be wrong
            raise
        kind = type(error).__name__
        raise CheckpointError(
            f"{where}, with path {path!r}, gate {entry['gate']} and options {entry['options']}, makes no MoE layer: "
            f"{kind}: {error}. Take the folder as model.save_pretrained() wrote it"
        ) from error


def _load(folder: Path, model: Any, tensors: dict[str, Tensor]) -> None:
    """Load all tensors; ValueError unless they are the model's.

    A name may be missing if its tensor is tied to one that is there, or if Transformers computes it.
    """
    state = model.state_dict()
    # tied parameters have one place in memory, and a file has one of their names
    places = {name: (value.data_ptr() or id(value), tuple(value.shape)) for name, value in state.items()}
    there = {place for name, place in places.items() if name in tensors}
    computed = model._keys_to_ignore_on_save or ()  # such as Marian's positions, which are sines
    missing = [name for name, place in places.items() if place not in there and name not in computed]
    unknown = tensors.keys() - state.keys()
    wrong = [name for name in tensors.keys() & state.keys() if tensors[name].shape != state[name].shape]
    if missing or unknown or wrong:
        raise ValueError(
            f"the tensors of {folder} do not fit {type(model).__name__}: missing {sorted(missing)[:5]}, "
            f"unknown {sorted(unknown)[:5]}, of another shape {sorted(wrong)[:5]}. {folder / 'config.json'} has the "
            f"sizes, those of MoE layers in {KEY}.layers. Take the folder as model.save_pretrained() wrote it"
        )
    model.load_state_dict(tensors, strict=False)
