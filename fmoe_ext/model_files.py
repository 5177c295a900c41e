"""Open and check a model's files, a folder's or a GGUF file, for stream, prune, repack, info and formats.quantized.

    files = open_model("Qwen/Qwen3-30B-A3B")    a name in the hub's cache, a folder, a GGUF file, the first part of one
    files.config                                what Transformers computes
    weights = files.of(model)                   the files as the parameters of that model, on the meta device or not
    weights.layers, weights.others(dtype)       experts of each layer by byte ranges; every other tensor by name

Nothing is read into memory before a tensor is asked for. A folder has its tensors under names that Transformers'
own tables turn into parameters (weight_names.py); a GGUF file has llama.cpp's, and says in its metadata what is to be
computed (the room gguf). What both have in common ends in the same two things: a Layer for each experts module, and a
StoredTensor for the rest, a PackedTensor where a kernel computes with the bytes as they lie.
"""

from __future__ import annotations

import functools
import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fmoe_ext import gguf
from fmoe_ext.checkpoint.errors import CheckpointError
from fmoe_ext.checkpoint.expert_files import Layer
from fmoe_ext.checkpoint.expert_layers import layer_of, mxfp4_layer, outside_experts
from fmoe_ext.checkpoint.files import copy_file, inside
from fmoe_ext.checkpoint.methods import kind_of
from fmoe_ext.checkpoint.model_folder import (
    ModelFolder,
    errors_of_transformers,
    local_path,
    read_config,
    usual_dtype,
)
from fmoe_ext.checkpoint.safetensors_file import StoredTensor
from fmoe_ext.checkpoint.shards import CONFIG
from fmoe_ext.checkpoint.weight_names import WeightNames, up_of

_COPIED = (".json", ".txt", ".model", ".jinja")  # of the tokenizer and the configuration
_GATES = ("gate", "router")  # ends of names: their few columns decide which experts are chosen


def open_model(model: str | Path | ModelFiles, folders: Sequence[str | Path] = ()) -> ModelFiles:
    """Open the files of a model, a name in the hub's cache included; an opened one is returned.

    folders: others, on other disks perhaps, where shards that the folder's index names may be instead.
    Raises CheckpointError for what is neither folder nor GGUF file, for files that are damaged or lead outside of the
    folder, and for a configuration that does not fit them.
    """
    if isinstance(model, ModelFiles):
        return model
    path = local_path(model)
    files: ModelFiles
    if path.is_dir():
        files = FolderModel(path, [Path(other) for other in folders])
    elif path.suffix == ".gguf" and path.is_file():
        if folders:
            raise CheckpointError(f"{path} is one file: folders= is for the shards of a folder")
        files = GgufModel(inside(path.parent, path.name))
    else:
        raise CheckpointError(f"{path} is no folder and no GGUF file: models are read from local files")
    depth = getattr(files.config.get_text_config(), "num_hidden_layers", 0)
    # a damaged config.json must not make a model of a billion layers
    if isinstance(depth, int) and depth > files.num_tensors:
        raise CheckpointError(
            f"{path}: config.json has {depth} layers, but there are only {files.num_tensors} tensors"
        )
    files.dtype = getattr(files.config, "dtype", None) or files.dtype
    return files


def open_config(model: str | Path) -> Any:
    """Read the configuration alone of a folder (which need not have weights), a name, a GGUF file, or a JSON file.

    Raises CheckpointError for what read_config() refuses, and for a GGUF file as open_model() does.
    """
    path = local_path(model, (CONFIG,))
    if path.suffix == ".gguf" and path.is_file():
        return open_model(path).config
    return read_config(path)


class ModelFiles(ABC):
    """The files of a model, of either kind: FolderModel or GgufModel."""

    path: Path  # the folder, or the file
    folder: Path  # where the configuration and the tokenizer are
    config: Any  # of Transformers, as if the weights were plain
    weights: list[Path]  # the files of the weights
    num_tensors: int
    formats: dict[str, int]  # {dtype or type of GGUF: bytes of its tensors}
    packed_by: str  # quantization method that config.json names, "" for plain weights and for GGUF
    dtype: torch.dtype  # that config.json names, else of most weights; packed ones count as bfloat16

    def skeleton(self) -> Any:
        """Make the configuration's language model on the meta device, with towers for images if it must have them."""
        import transformers
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

        is_text = type(self.config) in MODEL_FOR_CAUSAL_LM_MAPPING
        auto: Any = transformers.AutoModelForCausalLM if is_text else transformers.AutoModelForImageTextToText
        with errors_of_transformers(self.path), torch.device("meta"):
            return auto.from_config(self.config)

    @abstractmethod
    def of(self, model: nn.Module) -> ModelWeights:
        """Return the weights of a model of this configuration; CheckpointError where the files have others."""

    @property
    def inputs(self) -> list[Path]:
        """Return the files that a job reads, by which it knows them again."""
        return [file for file in (*self.weights, self.folder / CONFIG) if file.exists()]

    @abstractmethod
    def copy_beside(self, out: Path, with_index: bool = False) -> None:
        """Copy what belongs to the weights (configuration, tokenizer), with the index of the weights if asked."""


@dataclass(frozen=True)
class ModelWeights:
    """The files of a model as the parameters of one."""

    layers: dict[str, Layer]  # {path of an experts module: its experts}
    # {name in Transformers' files: tensor} of what is no expert, by the dtype that packed ones decode to
    others: Callable[[torch.dtype], dict[str, StoredTensor]]
    # The parameter that a tensor of others becomes as it is; None if Transformers makes it of several
    parameter: Callable[[str], str | None]
    unloaded: Collection[str] = ()  # names in others that become no parameter (checkpoint/unloaded.py)


class FolderModel(ModelFiles):
    """A folder with config.json and safetensors files, packed by one of checkpoint.methods or not."""

    def __init__(self, path: Path, folders: Sequence[Path] = ()) -> None:
        self.path = self.folder = path
        self.base = ModelFolder(path, folders)
        self.base.check()  # before Transformers, which follows any link, reads config.json
        self.config = self.base.make_config()
        tensors = self.base.tensors.values()
        self.dtype = usual_dtype(tensors) or torch.bfloat16
        self.kind = kind_of(self.base)  # of packing; those that are not read are refused here
        self.weights = self.base.paths
        self.num_tensors = len(tensors)
        self.formats = Counter()
        for tensor in tensors:
            self.formats[str(tensor.dtype).removeprefix("torch.")] += tensor.num_bytes
        self.packed_by = str(self.base.quantization.get("quant_method", ""))

    def names(self, model: nn.Module) -> WeightNames:
        """Return the names that the parameters of a model have in the files; of packed ones, those of a plain model."""
        names: Iterable[str] = self.base.tensors
        if (kind := self.kind) is not None:
            names = {kind.plain_name(name) for name in names if not kind.is_beside(name)}
        return WeightNames(self.base, model, names)

    def of(self, model: nn.Module) -> ModelWeights:
        base, names = self.base, self.names(model)
        layers: dict[str, Layer] = {}
        used: set[str] = set()  # tensors of experts
        for path, experts in experts_modules(model).items():
            # GPT-OSS's own packed experts first; then those of the other methods, or plain ones, by their names
            found = mxfp4_layer(base, path)
            if found is None:
                up, down = f"{path}.{up_of(experts)}", f"{path}.down_proj"
                in_files = names.experts(up), names.experts(down)
                if in_files[0] is None or in_files[1] is None:
                    name = up if in_files[0] is None else down
                    raise CheckpointError(f"{base.folder} has no tensors for {name}: {names.nearest(name)}")
                found = layer_of(base, self.kind, path, (in_files[0], in_files[1]))
            layers[path] = found[0]
            used |= found[1]
        others = functools.partial(outside_experts, base, self.kind, used)
        return ModelWeights(layers, others, names.renamed.get, frozenset(names.unloaded))

    def copy_beside(self, out: Path, with_index: bool = False) -> None:
        copy_small_files(self.base, out, with_index)


def copy_small_files(base: ModelFolder, out: Path, with_index: bool = False) -> None:
    """Copy configuration and tokenizer of a folder, and the index of its weights if asked."""
    for entry in sorted(base.folder.iterdir()):
        is_index = entry.name.endswith("index.json")
        if entry.suffix in _COPIED and entry.is_file() and (with_index or not is_index):
            copy_file(inside(base.folder, entry.name), out / entry.name)


class GgufModel(ModelFiles):
    """A GGUF file, or one in several parts, with or without config.json beside it."""

    def __init__(self, file: Path) -> None:
        self.path, self.folder = file, file.parent
        self.file = gguf.open_gguf(file)
        self.experts = gguf.gguf_layers(self.file)
        # config.json beside the file goes before the file's metadata, and must fit it
        with errors_of_transformers(self.folder):
            has_json = (self.folder / CONFIG).exists()
            count = len(self.file.tensors)
            self.config = read_config(self.folder, count) if has_json else gguf.config_of(self.file)
            gguf.check(self.file, self.config)
        self.weights = self.file.files
        self.num_tensors = len(self.file.tensors)
        self.formats, self.packed_by = Counter(), ""
        for tensor in self.file.tensors:
            self.formats[tensor.tensor_type.name] += tensor.n_bytes
        floats = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16}
        # the dtype of most bytes; packed weights of any type count as bfloat16, to which they decode
        counts = Counter({torch.bfloat16: 0})
        for name, num_bytes in self.formats.items():
            counts[floats.get(name, torch.bfloat16)] += num_bytes
        self.dtype = max(counts, key=lambda dtype: counts[dtype])

    def of(self, model: nn.Module) -> ModelWeights:
        shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
        layers: dict[str, Layer] = {}
        # GGUF has the experts by the number of the layer, Transformers by the path of the module
        for path in experts_modules(model):
            number = re.search(r"\.layers\.(\d+)\.", f".{path}.")
            layer = self.experts.get(int(number[1])) if number else None
            if layer is None:
                raise CheckpointError(f"{self.path} has no blk.N.ffn_down_exps.weight for {path}")
            layers[path] = replace(layer, path=path)
        others = functools.partial(gguf.outside_experts, self.file, self.config, shapes)
        return ModelWeights(layers, others, lambda name: name)

    def copy_beside(self, out: Path, with_index: bool = False) -> None:
        if (self.folder / CONFIG).exists():
            copy_file(inside(self.folder, CONFIG), out / CONFIG)


def experts_modules(model: nn.Module) -> Mapping[str, Any]:
    """Return {path: module} of the experts that Transformers lets others compute."""
    return {path: module for path, module in model.named_modules() if hasattr(module, "is_transposed")}


def linear_layers(skeleton: Any) -> dict[str, nn.Linear]:
    """Return {name of the weight: layer} of the linear layers that may stay packed: all but gates and tied ones."""
    # a parameter with several names is tied
    names: dict[int, list[str]] = {}
    for name, parameter in skeleton.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    is_tied = getattr(skeleton.config.get_text_config(), "tie_word_embeddings", False)
    head = skeleton.get_output_embeddings() if is_tied else None
    return {
        f"{path}.weight": layer
        for path, layer in skeleton.named_modules()
        if type(layer) is nn.Linear
        and not path.endswith(_GATES)
        and layer is not head
        and len(names[id(layer.weight)]) == 1
    }
