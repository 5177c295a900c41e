"""State dicts and folders of Hugging Face models, their MoE layers in any layout of families/, and the same in ours.

All other tensors pass through under their names.
"""

import os
import re
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from torch import nn

from fmoe_ext.checkpoint.errors import CheckpointError
from fmoe_ext.checkpoint.families import LAYOUTS
from fmoe_ext.checkpoint.families.family import UP_DOWN, Layout
from fmoe_ext.checkpoint.files import inside, read_json
from fmoe_ext.checkpoint.layouts import (
    BLOCKS,
    GATE_NAMES,
    LATENT,
    PER_EXPERT,
    PLACES,
    STACKED,
    UNGATED,
    W1,
    W2,
    find_layer,
    to_layout,
)
from fmoe_ext.checkpoint.model_state import ModelState
from fmoe_ext.checkpoint.routing import check_writable, routing_of
from fmoe_ext.checkpoint.safetensors_file import StoredTensor, as_stored, read_safetensors
from fmoe_ext.checkpoint.shards import CONFIG, INDEX, check_is_whole

StateDict: TypeAlias = "Mapping[str, Any]"  # values are tensors or StoredTensors
T = TypeVar("T")

MAX_LAYERS = 1000  # of a configuration without files that could say how many there are

_REPOSITORY = re.compile(r"[a-z0-9][\w.-]*/[a-z0-9][\w.-]*", re.ASCII | re.IGNORECASE)
_FILE = re.compile(r".*\.(safetensors|gguf|json|pth?|bin|np[yz])")
# What Transformers reads of a repository beside the weights, where the repository has it
_SMALL_FILES = ("*.json", "*.jinja", "*.model", "merges.txt", "vocab.txt")

BLOCK = re.compile(rf"(^|\.)({'|'.join(BLOCKS)})\.$")
EXPERTS = re.compile(
    rf"(?:.*\.)?(?:experts\.\d+\.(?:{'|'.join(re.escape(leaf) for leaves in PER_EXPERT for leaf in leaves)})"
    rf"|experts\.\d+\.(?:{'|'.join(map(re.escape, UP_DOWN))})"
    rf"|{'|'.join(re.escape(first) for first, _ in (*STACKED, *UNGATED))})"
)
OURS = re.compile(r"((?:.*\.)?)experts\.htoh4\.weight")  # not of shared_experts.mlp


def from_huggingface(state_dict: StateDict, names: Container[str] = ()) -> dict[str, Any]:
    """A state dict in any of the Hugging Face layouts -> the same in ours; values are tensors or StoredTensors.

    Of several layers each may have its own layout. A layer called block_sparse_moe becomes mlp, unless names, those of
    the model's tensors, have it under its own name.
    Raises CheckpointError where experts are missing or shapes do not fit.
    """
    tensors, lazy = as_stored(state_dict)
    out: dict[str, StoredTensor] = {}
    used: set[str] = set()
    for key in tensors:
        layer, gate, found = _layer_of_gate(tensors, key)
        if found:
            _check_shapes(key, found[0])
            if place := PLACES.get(gate):
                layer = f"{layer}{place}."
            elif f"{layer}{W1}" not in names:
                layer = _renamed(layer, "mlp")
            out |= {layer + name: tensor for name, tensor in found[0].items()}
            used |= found[1]
        else:
            out[key] = tensors[key]
    return _returned({key: tensor for key, tensor in out.items() if key not in used}, lazy)


def _layer_of_gate(
    tensors: Mapping[str, StoredTensor], key: str
) -> tuple[str, str, tuple[dict[str, StoredTensor], set[str]] | None]:
    """(prefix of the layer whose gate a tensor is, the gate's name, find_layer() of it); None for other tensors."""
    for gate in GATE_NAMES:
        layer = key.removesuffix(f"{gate}.weight")
        if layer != key and (not layer or layer.endswith(".")):
            found = find_layer(tensors, layer, gate)
            if found:
                return layer, gate, found
    return key, "", None


def _check_shapes(gate: str, layer: Mapping[str, StoredTensor]) -> None:
    w1, w2 = layer[W1], layer[W2]
    num_experts, rows, width = w1.shape
    shape = layer["gate.gate.weight"].shape
    narrow = layer.get(LATENT[0])
    expected = (num_experts, width) if narrow is None else (num_experts, narrow.shape[1])
    fits = (
        len(w2.shape) == 3 and w2.shape[:2] == (num_experts, width) and rows in (w2.shape[2], 2 * w2.shape[2])
    )
    if shape != expected or not fits or (narrow is not None and narrow.shape[0] != width):
        raise CheckpointError(
            f"{gate} {list(shape)}, gate and up {list(w1.shape)} and down {list(w2.shape)} of experts do "
            "not fit: expected [E, D], [E, 2H, D] and [E, D, H]"
        )


def to_huggingface(
    state_dict: "nn.Module | StateDict",
    layout: str | Layout = "fused",
    routing: Mapping[str, Mapping[str, Any]] | None = None,
) -> dict[str, Any]:
    """Converts a model or a state dict in our layout -> the same in a Hugging Face layout, one of LAYOUTS.

    routing: {layer: what its gate computes}, as Manifest.routing has it; taken from a model. A bare state dict does
    not say what its gates compute, so that nothing can be checked.
    Raises CheckpointError for what the layout has no place for (biases that are not zero, shared experts), and for
    gates that compute something else than a layer of that format.

    Example:

        >>> mlp = fmoe_ext.FMoETransformerMLP(num_experts=2, d_model=8, d_hidden=16, activation="swiglu",
        ...     gate="softmax", bias=False, gate_bias=False)
        >>> tensors = to_huggingface(mlp, "mixtral")
        >>> tensors["experts.0.w1.weight"].shape
        torch.Size([16, 8])
    """
    if isinstance(state_dict, nn.Module):
        state = ModelState(state_dict)
        routing = {name: routing_of(layer) for name, layer in state.layers.items()}
        if any(state.local_rows(name) is not None for name in state.tensors):
            raise CheckpointError("this rank has a part of the experts only: use export_safetensors() first")
        tensors, lazy = as_stored(state.tensors)[0], False
    else:
        tensors, lazy = as_stored(state_dict)
    if isinstance(layout, str) and layout not in LAYOUTS:
        raise CheckpointError(f"layout must be one of {', '.join(LAYOUTS)}, but got {layout!r}")
    into = LAYOUTS[layout] if isinstance(layout, str) else layout
    layers, out = _by_layer(tensors)
    if not layers:
        adapters = ": merge the adapters first, by model.merge_and_unload()"
        raise CheckpointError(
            "there is no FMoETransformerMLP (experts.htoh4.weight) to convert"
            f"{adapters if any('.lora_' in name for name in tensors) else ''}"
        )
    for prefix, layer in layers.items():
        converted = to_layout(prefix, layer, into)
        if isinstance(layout, str):
            check_writable(routing or {}, prefix, layout)
        renamed = prefix.removesuffix(f"{into.place}.") if into.place else _renamed(prefix, into.block)
        out |= {renamed + name: tensor for name, tensor in converted.items()}
    return _returned(out, lazy)


def _by_layer(
    tensors: Mapping[str, StoredTensor],
) -> tuple[dict[str, dict[str, StoredTensor]], dict[str, StoredTensor]]:
    """({prefix of an MoE layer: {name in it: tensor}}, the other tensors)."""
    names = (match for key in tensors if (match := OURS.fullmatch(key)))
    layers: dict[str, dict[str, StoredTensor]] = {match[1]: {} for match in names}
    others = {}
    for key, tensor in tensors.items():
        parts = ((p, (f"{p}experts.", f"{p}gate.", f"{p}shared_experts.", f"{p}latent.")) for p in layers)
        prefix = next((p for p, begins in parts if key.startswith(begins)), None)
        if prefix is None:
            others[key] = tensor
        else:
            layers[prefix][key.removeprefix(prefix)] = tensor
    return layers, others


def local_path(model: str | Path, files: Sequence[str] | None = None, **options: Any) -> Path:
    """Finds the path of a model, given as a path or as the name of a repository in the cache of the Hugging Face hub.

    Nothing is downloaded. A Path is a path, as is a text under which something is; the path need not exist. Of names,
    those with an owner are looked up, as Qwen/Qwen3-30B-A3B: a word alone is a folder that is missing.
    files: what the folder must have, by default config.json, the weights, and whatever else Transformers reads of it,
    as far as the cache knows that the repository has it. options: revision and cache_dir of huggingface_hub.
    Raises CheckpointError, with the command that downloads it, for a name that the cache does not have, or in part.
    """
    path = Path(model)
    if not isinstance(model, str) or not _REPOSITORY.fullmatch(model) or os.path.lexists(path):
        return path
    # "runs/models" beside "runs/model" is a slip: its reader says that there is no such path
    is_slip = path.parent.exists() or _FILE.fullmatch(model) is not None
    command = f"`hf download {model}`"
    if options.get("revision") is not None:
        command = f"`hf download {model} --revision {options['revision']}`"
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError
    except ImportError as error:
        if is_slip:
            return path
        raise CheckpointError(
            f"{model} does not exist; if it is the name of a model of the Hugging Face hub: "
            f"pip install huggingface_hub, and run {command} (nothing is downloaded here)"
        ) from error
    incomplete = None
    try:
        folder = Path(
            snapshot_download(
                model,
                local_files_only=True,
                allow_patterns=list(_SMALL_FILES if files is None else files),
                ignore_patterns=["*/*"],
                **options,
            )
        )
    except HFValidationError:  # "a--b/c", which no repository is called
        return path
    except LocalEntryNotFoundError as error:
        if not hasattr(error, "snapshot_path"):  # that of IncompleteSnapshotError, which older versions lack
            if is_slip:
                return path
            raise CheckpointError(
                f"{model} does not exist, and no model of this name is in the cache of the Hugging Face hub: check "
                f"the path, or run {command} (nothing is downloaded here)"
            ) from None
        folder, incomplete = Path(error.snapshot_path), error
    wanted = _wanted_files(folder) if files is None else [folder / name for name in files]
    missing = [file.name for file in wanted if not file.exists()]
    if missing or incomplete:
        more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
        lacks = f"it lacks {', '.join(missing[:5])}{more}" if missing else incomplete
        raise CheckpointError(
            f"the cache of the Hugging Face hub has only a part of {model}, in {folder}: {lacks}. Run {command}, which "
            f"goes on where it ended{'' if missing else ', or give that folder if they were left out on purpose'}"
        )
    return folder


def _wanted_files(folder: Path) -> list[Path]:
    """Lists the configuration and the weights that a folder of the hub's cache must have, there or not."""
    config = folder / CONFIG
    index, single = _names_of_model(folder)
    if index not in ("", INDEX) and not (folder / index).exists():
        return [config, folder / index]
    if weights := model_files(folder):
        return [config, *weights]
    if (gguf := min(folder.glob("*.gguf"), default=None)) is not None:
        raise CheckpointError(f"{folder} has GGUF files: give one of them, as {gguf}")
    # What there is to say of pickles, the readers say
    return [config] if any(folder.glob("*.bin")) else [config, folder / single]


def model_files(path: Path, folders: Sequence[Path] = ()) -> list[Path]:
    """Lists the safetensors files of a model: path itself, or those of a Hugging Face folder; [] if it is neither.

    folders: others, where a file that the folder's index names may be instead.
    """
    if path.suffix == ".safetensors":
        return [path]
    index, single = _names_of_model(path)
    places = weight_map(path)
    if not places:
        if index not in ("", INDEX):
            raise CheckpointError(f"{path} lacks {index}, which its config.json names")
        return [inside(path, single)] if (path / single).exists() else []
    files_there = set()
    for name in places.values():
        found = [inside(folder, name) for folder in (path, *folders)]
        # the first folder stands for all where none has the file: the reader says that it is missing
        files_there.add(next((file for file in found if file.exists()), found[0]))
    files = sorted(files_there)
    if single and (path / single).exists() and single not in places.values():
        if any(file.exists() for file in files):
            raise CheckpointError(
                f"{path} has {single} and {index}, which names other files: remove the model that is not wanted"
            )
        return [inside(path, single)]  # the index of an earlier model
    return files


def _names_of_model(path: Path) -> tuple[str, str]:
    """(index, single file) of a folder's weights: what config.json names, "" for the other, or the usual names."""
    named = model_config(path).get("transformers_weights")
    if named is None:
        return INDEX, "model.safetensors"
    inside(path, named)
    if not named.endswith((".safetensors", ".safetensors.index.json")):
        raise CheckpointError(
            f"{path}: transformers_weights is {named}, which is no safetensors file or index"
        )
    return (named, "") if named.endswith(".json") else ("", named)


def weight_map(path: Path) -> dict[str, Any]:
    """{tensor: file} of the index of a folder; {} without one."""
    index, _ = _names_of_model(path)
    if not index or not (path / index).exists():
        return {}
    places = read_json(inside(path, index)).get("weight_map")
    if not isinstance(places, dict) or not places:
        raise CheckpointError(f"{path / index} is damaged: it has no weight_map")
    return places


def without_replaced(path: Path, files: Mapping[Path, Mapping[str, T]]) -> dict[Path, dict[str, T]]:
    """{file: its tensors} of a folder, without those that its index has in another of the files.

    Raises CheckpointError where Transformers, which takes a tensor from the last file that has it, reads another one.
    """
    places = weight_map(path)
    holders: dict[str, list[str]] = {}
    for file, tensors in files.items():
        for name in tensors:
            holders.setdefault(name, []).append(file.name)
    for name, held in holders.items():
        if places.get(name) in held and places[name] != max(held):
            raise CheckpointError(
                f"{path}: {name} is in {' and '.join(sorted(held))}; the index names {places[name]}, but Transformers "
                f"reads {max(held)}, the last by name: leave the tensor in one file"
            )
    return {
        file: {
            name: value
            for name, value in tensors.items()
            if places.get(name, file.name) == file.name or places[name] not in holders[name]
        }
        for file, tensors in files.items()
    }


def check_folder(path: Path) -> None:
    """Raises CheckpointError unless all that Transformers would read of a model's folder lies in it, links resolved.

    A folder of the hub's cache passes: its files are links into `blobs` beside it. An adapter of PEFT does not: it
    names a base model anywhere.
    """
    for entry in path.iterdir():
        inside(path, entry.name)
    if (path / "adapter_config.json").exists():
        raise CheckpointError(
            f"{path} has adapter_config.json, which names another model to read: load it with PEFT, call "
            "merge_and_unload(), and give the model itself"
        )
    config = model_config(path)
    refuse_hub_code(path, config)
    named = config.get("transformers_weights")
    names = [] if named is None else [named]
    for index in path.glob("*.index*.json"):
        weight_map = read_json(index).get("weight_map")
        names += weight_map.values() if isinstance(weight_map, dict) else [weight_map]
    for name in names:
        inside(path, name)


@contextmanager
def errors_of_transformers(path: Path, name: str = "config.json") -> Iterator[None]:
    """Raises CheckpointError for the errors of Transformers in what a folder holds, which have no common class."""
    try:
        yield
    except (ImportError, MemoryError, CheckpointError):
        raise
    except Exception as error:
        kind = type(error).__name__
        raise CheckpointError(f"{path} has a {name} that Transformers refuses: {kind}: {error}") from error


def read_config(folder: Path, num_tensors: int | None = None) -> Any:
    """Reads the configuration that Transformers makes of a folder's config.json, or of one JSON file.

    num_tensors: in the folder's files, if that is known. Raises CheckpointError for anything that Transformers refuses,
    for code of a hub, and for more layers than there are tensors, before so many of anything are made.
    """
    import transformers

    is_file = folder.suffix == ".json" and not folder.is_dir()
    said = read_json(folder) if is_file else model_config(folder)
    if not said:
        raise CheckpointError(f"{folder} has no config.json")
    check_values(folder, said, num_tensors)
    with errors_of_transformers(folder):
        return transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)


def check_values(folder: Path, said: Mapping[str, Any], num_tensors: int | None = None) -> None:
    """Raises CheckpointError for a config.json with code of a hub, or with more layers than read_config() takes."""
    with errors_of_transformers(folder):
        refuse_hub_code(folder, said)
        most = MAX_LAYERS if num_tensors is None else num_tensors
        for values in (said, *(part for part in said.values() if isinstance(part, dict))):
            for key, count in values.items():
                is_number = key.startswith("n") and key.endswith(("layers", "layer"))
                if is_number and isinstance(count, (int, float)) and not 0 <= count <= most:
                    there = f"only {most} tensors" if num_tensors is not None else f"no models of over {most}"
                    raise CheckpointError(f"{folder}: config.json has {count} layers, but there are {there}")


def refuse_hub_code(path: Path, config: Any) -> None:
    """Raises CheckpointError for a configuration whose kernels Transformers would load from a hub, and run."""
    for key, value in config.items() if isinstance(config, dict) else ():
        if key.endswith(("attn_implementation", "experts_implementation")) and "/" in str(value):
            raise CheckpointError(
                f"{path}/config.json says {key} {value!r}, code of a hub, which is not run: remove the key, and call "
                "set_attn_implementation() on the model if you want it"
            )
        refuse_hub_code(path, value)


def model_config(path: Path) -> dict[str, Any]:
    """config.json of a Hugging Face folder; {} for anything else, CheckpointError for half of a save."""
    if (path / CONFIG).exists():
        return read_json(inside(path, CONFIG))
    check_is_whole(path)
    return {}


def read_model(files: Iterable[Path], names: Container[str] = ()) -> tuple[dict[str, StoredTensor], bool]:
    """({name: StoredTensor} in our layout, whether it was in one of Hugging Face's) of all files together."""
    tensors: dict[str, StoredTensor] = {}
    found = {file: read_safetensors(file)[0] for file in files}
    if len(found) > 1:
        found = without_replaced(next(iter(found)).parent, found)
    for of_file in found.values():
        tensors |= of_file
    if not is_huggingface(tensors):
        return tensors, False
    return from_huggingface(tensors, names), True


def is_huggingface(names: Iterable[str]) -> bool:
    """True if tensors of these names have an MoE layer in a Hugging Face layout."""
    return any(EXPERTS.fullmatch(name) for name in names)


def _renamed(prefix: str, block: str) -> str:
    """Renames the prefix of a layer that is called as in one of the layouts, with another name for it."""
    return BLOCK.sub(rf"\g<1>{block}.", prefix)


def _returned(tensors: dict[str, StoredTensor], lazy: bool) -> dict[str, Any]:
    return tensors if lazy else {key: tensor.read().clone() for key, tensor in tensors.items()}
