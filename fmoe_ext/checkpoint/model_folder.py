"""Find and read a model's folder, laid out as on the Hugging Face hub, and never a file outside of it.

    config.json                      what Transformers builds the model from
    model.safetensors.index.json     {tensor: file}, where the weights are in several files (shards)
    model-00001-of-00002.safetensors, ...      or one model.safetensors

local_path() finds the folder by its path or its name on the hub. ModelFolder reads config.json and the index at once,
and the headers of the shards when its tensors are asked for.

Such a folder may be a stranger's: the index names files, config.json may name the index or a single file, and each
entry may be a link. files.inside() looks each of them up. Transformers follows any link: call check(), which looks at
every entry, before it loads a model. read_config() bounds the number of layers, because a config.json of a few bytes
could make Transformers build any number of modules.
"""

import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import torch

from fmoe_ext.checkpoint.errors import CheckpointError
from fmoe_ext.checkpoint.files import inside, read_json
from fmoe_ext.checkpoint.safetensors_file import StoredTensor, read_unmapped
from fmoe_ext.checkpoint.shards import CONFIG, INDEX, check_is_whole

T = TypeVar("T")

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
MAX_LAYERS = 1000  # bound where there are no files whose number of tensors bounds it

_REPOSITORY = re.compile(r"[a-z0-9][\w.-]*/[a-z0-9][\w.-]*", re.ASCII | re.IGNORECASE)
_FILE = re.compile(r".*\.(safetensors|gguf|json|pth?|bin|np[yz])")
# What Transformers reads of a repository beside the weights, where the repository has it
_SMALL_FILES = ("*.json", "*.jinja", "*.model", "merges.txt", "vocab.txt")


def local_path(model: str | Path, files: Sequence[str] | None = None, **options: Any) -> Path:
    """Find the path of a model, given as a path or as the name of a repository in the cache of the Hugging Face hub.

    Nothing is downloaded. A Path is taken as it is, and so is a text under which something exists. Other texts are
    looked up in the cache if they have an owner, as Qwen/Qwen3-30B-A3B; one word alone is a path that does not exist.
    files: what the folder must have; by default config.json, the weights, and whatever else Transformers reads, as far
    as the cache knows that the repository has it. options: revision and cache_dir of huggingface_hub.
    Raises CheckpointError, with the command that downloads it, if the cache lacks the model or has only a part of it.
    """
    path = Path(model)
    if not isinstance(model, str) or not _REPOSITORY.fullmatch(model) or os.path.lexists(path):
        return path
    # "runs/models" typed for "runs/model" is no name on the hub: return it, and its reader says that it does not exist
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
    # Ask the cache, which raises if it knows files of the repository that it does not have
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
        if not hasattr(error, "snapshot_path"):  # of IncompleteSnapshotError, which older versions lack
            if is_slip:
                return path
            raise CheckpointError(
                f"{model} does not exist, and no model of this name is in the cache of the Hugging Face hub: check "
                f"the path, or run {command} (nothing is downloaded here)"
            ) from None
        folder, incomplete = Path(error.snapshot_path), error
    # A download may have been interrupted: look for each file that is needed
    if files is not None:
        wanted = [folder / name for name in files]
    else:  # the configuration and the weights
        # config.json may name an index or a single file; else there are the usual names, GGUF files, or pickles
        wanted = [folder / CONFIG]
        index, single = _names_of_weights(folder, read_config_json(folder))
        if index not in ("", INDEX) and not (folder / index).exists():
            wanted.append(folder / index)
        elif weights := ModelFolder(folder).paths:
            wanted += weights
        elif (gguf := min(folder.glob("*.gguf"), default=None)) is not None:
            raise CheckpointError(f"{folder} has GGUF files: give one of them, as {gguf}")
        elif not any(folder.glob("*.bin")):  # the reader explains why pickles are not read
            wanted.append(folder / single)
    missing = [file.name for file in wanted if not file.exists()]
    if missing or incomplete:
        more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
        lacks = f"it lacks {', '.join(missing[:5])}{more}" if missing else incomplete
        raise CheckpointError(
            f"the cache of the Hugging Face hub has only a part of {model}, in {folder}: {lacks}. Run {command}, which "
            f"goes on where it ended{'' if missing else ', or give that folder if they were left out on purpose'}"
        )
    return folder


def usual_dtype(tensors: Iterable[StoredTensor]) -> torch.dtype | None:
    """Return the float dtype that most bytes of a model have, for config.json's dtype; None without floats."""
    counts: Counter[torch.dtype] = Counter()
    for tensor in tensors:
        if tensor.dtype in FLOATS:
            counts[tensor.dtype] += tensor.num_bytes
    return max(counts, key=lambda dtype: (counts[dtype], -FLOATS.index(dtype)), default=None)


class ModelFolder:
    """A model's folder, or one safetensors file."""

    folder: Path
    config: dict[str, Any]  # config.json, {} without one
    weight_map: dict[str, Any]  # {tensor: file} of the index, {} without one
    paths: list[Path]  # the safetensors files, there or not; [] for a folder that holds something else
    packed: str  # the format that experts had before expert_layers.decode(); "" for plain ones

    def __init__(self, folder: str | Path, folders: Sequence[Path] = ()) -> None:
        """folders: others, on other disks perhaps, where files that the index names may be instead.

        Raises CheckpointError for JSON that is damaged, for names that lead outside, and for weights of two models.
        """
        # One file, a single file in a folder, or an index
        self.folder = path = Path(folder)
        self.config, self.weight_map, self.paths, self.packed = {}, {}, [], ""
        if path.suffix == ".safetensors":
            self.paths = [path]
            return
        self.config = read_config_json(path)
        index, single = _names_of_weights(path, self.config)
        if not index or not (path / index).exists():
            if index not in ("", INDEX):
                raise CheckpointError(f"{path} lacks {index}, which its config.json names")
            self.paths = [inside(path, single)] if (path / single).exists() else []
            return
        self.weight_map = read_json(inside(path, index)).get("weight_map", {})
        if not isinstance(self.weight_map, dict) or not self.weight_map:
            raise CheckpointError(f"{path / index} is damaged: it has no weight_map")
        named = set()
        for name in self.weight_map.values():
            found = [inside(place, name) for place in (path, *folders)]
            # the first folder stands for all where none has the file: the reader says that it is missing
            named.add(next((file for file in found if file.exists()), found[0]))
        self.paths = sorted(named)
        # Both a single file and an index: one of the two is left from an earlier model
        if single and (path / single).exists() and single not in self.weight_map.values():
            if any(file.exists() for file in self.paths):
                raise CheckpointError(
                    f"{path} has {single} and {index}, which names other files: remove the model that is not wanted"
                )
            self.paths = [inside(path, single)]  # the index is of an earlier model

    @cached_property
    def files(self) -> dict[Path, list[str]]:
        """Return {file: names of its tensors}."""
        return {file: list(found) for file, found in self._contents.items()}

    @cached_property
    def tensors(self) -> dict[str, StoredTensor]:
        """Return {name: tensor} of all files; CheckpointError if there are none, or two of them have the same name."""
        tensors: dict[str, StoredTensor] = {}
        for file, found in self._contents.items():
            if found.keys() & tensors.keys():
                raise CheckpointError(f"{file} has tensors that another file of the folder has too")
            tensors |= found
        return tensors

    @cached_property
    def _contents(self) -> dict[Path, dict[str, StoredTensor]]:
        if not self.paths:
            gguf = min(self.folder.glob("*.gguf"), default=None)
            remedy = "give a model's folder" if gguf is None else f"give the file {gguf}"
            raise CheckpointError(f"{self.folder} has no model.safetensors and no index of several: {remedy}")
        return self.without_replaced({file: read_unmapped(file)[0] for file in self.paths})

    @cached_property
    def quantization(self) -> dict[str, Any]:
        """Return quantization_config of config.json, or what Model Optimizer writes beside it; {} for a plain model."""
        text = self.config.get("text_config")  # of the language model inside a larger one
        found = self.config.get("quantization_config")
        if not found and isinstance(text, dict):
            found = text.get("quantization_config")
        if not found and (self.folder / "hf_quant_config.json").exists():
            details = read_json(inside(self.folder, "hf_quant_config.json")).get("quantization")
            found = {"quant_method": "modelopt", **details} if isinstance(details, dict) else {}
        return found if isinstance(found, dict) else {}

    def without_replaced(self, files: Mapping[Path, Mapping[str, T]]) -> dict[Path, dict[str, T]]:
        """Drop copies of tensors: return {file: its tensors} without those that the index places in another file.

        Raises CheckpointError if Transformers, which takes a tensor from the last file that has it, would read another.
        """
        places = self.weight_map
        # {tensor: names of the files that have it}
        holders: dict[str, list[str]] = {}
        for file, tensors in files.items():
            for name in tensors:
                holders.setdefault(name, []).append(file.name)
        for name, held in holders.items():
            if places.get(name) in held and places[name] != max(held):
                raise CheckpointError(
                    f"{self.folder}: {name} is in {' and '.join(sorted(held))}; the index names {places[name]}, but "
                    f"Transformers reads {max(held)}, the last by name: leave the tensor in one file"
                )
        return {
            file: {
                name: value
                for name, value in tensors.items()
                if places.get(name, file.name) == file.name or places[name] not in holders[name]
            }
            for file, tensors in files.items()
        }

    def check(self) -> None:
        """Raise CheckpointError unless everything that Transformers would read lies in the folder, links resolved.

        A folder of the hub's cache passes: its files are links into `blobs` beside it. A PEFT adapter does not: it
        names a base model that may be anywhere.
        """
        path = self.folder
        for entry in path.iterdir():
            inside(path, entry.name)
        if (path / "adapter_config.json").exists():
            raise CheckpointError(
                f"{path} has adapter_config.json, which names another model to read: load it with PEFT, call "
                "merge_and_unload(), and give the model itself"
            )
        # before Transformers reads it: no code of a hub is run, and each index names files of this folder only
        _refuse_hub_code(path, self.config)
        for index in path.glob("*.index*.json"):
            weight_map = read_json(index).get("weight_map")
            for name in weight_map.values() if isinstance(weight_map, dict) else [weight_map]:
                inside(path, name)

    def check_plain(self) -> None:
        """Raise CheckpointError if the weights are quantised."""
        quantization = self.config.get("quantization_config")
        # FP8 weights are floating point, too, but mean nothing without scales
        odd = [
            name for name, t in self.tensors.items() if t.dtype.is_floating_point and t.dtype not in FLOATS
        ]
        if quantization or odd:
            kind = quantization.get("quant_method") if isinstance(quantization, dict) else odd[:1]
            raise CheckpointError(
                f"{self.folder} is quantised ({kind}), which is not decoded here: dequantise the model to bfloat16 "
                "first"
            )

    def make_config(self) -> Any:
        """Make Transformers' configuration from config.json, without quantization_config.

        Raises CheckpointError for what read_config() refuses, and for more layers than the files have tensors.
        """
        config = read_config(self.folder, len(self.tensors))
        if hasattr(config, "quantization_config"):
            del config.quantization_config
        return config


def read_config_json(path: Path) -> dict[str, Any]:
    """Read config.json of a folder; {} if there is none, CheckpointError if a save into the folder was cut short."""
    if (path / CONFIG).exists():
        return read_json(inside(path, CONFIG))
    check_is_whole(path)
    return {}


def _names_of_weights(path: Path, config: Mapping[str, Any]) -> tuple[str, str]:
    """Return the names (index, single file) of weights: the usual ones, or the one that config.json names and ""."""
    named = config.get("transformers_weights")
    if named is None:
        return INDEX, "model.safetensors"
    inside(path, named)
    if not named.endswith((".safetensors", ".safetensors.index.json")):
        raise CheckpointError(
            f"{path}: transformers_weights is {named}, which is no safetensors file or index"
        )
    return (named, "") if named.endswith(".json") else ("", named)


@contextmanager
def errors_of_transformers(path: Path, name: str = "config.json") -> Iterator[None]:
    """Raise CheckpointError in place of what Transformers raises for a folder, errors that have no common class."""
    try:
        yield
    except (ImportError, MemoryError, CheckpointError):
        raise
    except Exception as error:
        kind = type(error).__name__
        raise CheckpointError(f"{path} has a {name} that Transformers refuses: {kind}: {error}") from error


def read_config(folder: Path, num_tensors: int | None = None) -> Any:
    """Let Transformers make the configuration of a folder's config.json, or of one JSON file.

    num_tensors: in the folder's files, if that is known. Raises CheckpointError for anything that Transformers refuses,
    for code of a hub, and for more layers than there are tensors.
    """
    import transformers

    is_file = folder.suffix == ".json" and not folder.is_dir()
    said = read_json(folder) if is_file else read_config_json(folder)
    if not said:
        raise CheckpointError(f"{folder} has no config.json")
    check_values(folder, said, num_tensors)
    with errors_of_transformers(folder):
        return transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)


def model_class(config: Any) -> Any:
    """Return Transformers' class that generates text from a configuration: the one that it names, if that is known.

    Models that see images name a ...ForConditionalGeneration. AutoModelForCausalLM would build only their language
    model, or nothing. Raises CheckpointError for configurations of other models.
    """
    from transformers.models.auto import modeling_auto as auto

    tables = (
        auto.MODEL_FOR_CAUSAL_LM_MAPPING,
        auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
        auto.MODEL_FOR_MULTIMODAL_LM_MAPPING,
    )
    found = [table[type(config)] for table in tables if type(config) in table]
    # a table has one class for a configuration, or several
    classes: list[Any] = []
    for entry in found:
        classes += entry if isinstance(entry, (tuple, list)) else [entry]
    if not classes:
        raise CheckpointError(f"{type(config).__name__} is no configuration of a model that generates text")
    named = (getattr(config, "architectures", None) or [None])[0]
    return next((one for one in classes if one.__name__ == named), classes[0])


def check_values(folder: Path, said: Mapping[str, Any], num_tensors: int | None = None) -> None:
    """Raise CheckpointError for a config.json of a fmoefied model, with code of a hub, or with too many layers.

    said: its values. Too many are more than there are tensors, or than MAX_LAYERS if their number is not known.
    """
    # the entry of huggingface/record.py, which from_pretrained() has taken out
    if said.get("fmoe_ext") is not None:
        raise CheckpointError(
            f"{folder} has a fmoefied model, as the entry fmoe_ext of its config.json says: only "
            "fmoe_ext.huggingface.from_pretrained(folder) reads it"
        )
    with errors_of_transformers(folder):
        _refuse_hub_code(folder, said)
        most = MAX_LAYERS if num_tensors is None else num_tensors
        for values in (said, *(part for part in said.values() if isinstance(part, dict))):
            for key, count in values.items():
                # num_hidden_layers, n_layer, num_decoder_layers, ...; also in parts such as text_config
                is_number = key.startswith("n") and key.endswith(("layers", "layer"))
                if is_number and isinstance(count, (int, float)) and not 0 <= count <= most:
                    there = f"only {most} tensors" if num_tensors is not None else f"no models of over {most}"
                    raise CheckpointError(f"{folder}: config.json has {count} layers, but there are {there}")


def _refuse_hub_code(path: Path, config: Any) -> None:
    """Raise CheckpointError for a configuration whose kernels Transformers would load from a hub, and run."""
    for key, value in config.items() if isinstance(config, dict) else ():
        if key.endswith(("attn_implementation", "experts_implementation")) and "/" in str(value):
            raise CheckpointError(
                f"{path}/config.json says {key} {value!r}, code of a hub, which is not run: remove the key, and call "
                "set_attn_implementation() on the model if you want it"
            )
        _refuse_hub_code(path, value)
