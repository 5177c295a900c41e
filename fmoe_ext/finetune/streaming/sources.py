"""The files that stream() reads: a folder with config.json and safetensors files, or a GGUF file."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from fmoe_ext.checkpoint.errors import CheckpointError
from fmoe_ext.checkpoint.expert_files import Layer
from fmoe_ext.checkpoint.expert_layers import layer_of
from fmoe_ext.checkpoint.files import inside
from fmoe_ext.checkpoint.gguf_experts import gguf_layers, open_gguf
from fmoe_ext.checkpoint.huggingface import check_folder, errors_of_transformers, read_config
from fmoe_ext.checkpoint.methods import check_method, kind_of
from fmoe_ext.checkpoint.model_folder import Base, usual_dtype
from fmoe_ext.checkpoint.packed import mxfp4_layer, outside_experts
from fmoe_ext.checkpoint.safetensors_file import StoredTensor
from fmoe_ext.checkpoint.weight_names import WeightNames, up_of
from fmoe_ext.finetune.streaming import gguf


class Source(Protocol):
    """The files of a model, opened once: its configuration, layers of experts, and other tensors.

    use() comes first, then layer(), then others().
    """

    path: Path
    config: Any
    num_tensors: int
    dtype: torch.dtype  # that of most weights; packed ones count as bfloat16

    def use(self, skeleton: Any) -> None:
        """Notes the model whose parameters the files are to become, on the meta device."""

    def layer(self, path: str, experts: nn.Module) -> Layer:
        """The experts of the module at a path; CheckpointError if the files have none in a format that is read."""

    def parameter(self, name: str) -> str | None:
        """The parameter that a tensor of others() becomes as it is; None if Transformers makes it of several."""

    def others(self, dtype: torch.dtype) -> dict[str, StoredTensor]:
        """{name in Transformers: tensor} of what is left beside the layers that were asked for."""


class _Folder:
    """A folder with config.json and safetensors files."""

    def __init__(self, folder: Path, folders: Sequence[Path]) -> None:
        self.path = folder
        self.base = Base(folder, folders)
        self.config: Any = read_config(folder, len(self.base.tensors))
        if hasattr(self.config, "quantization_config"):
            del self.config.quantization_config
        check_method(self.base)
        self.num_tensors = len(self.base.tensors)
        self.dtype = usual_dtype(self.base.tensors.values()) or torch.bfloat16
        self._used: set[str] = set()

    def use(self, skeleton: Any) -> None:
        kind = kind_of(self.base)
        names: Iterable[str] = self.base.tensors
        if kind is not None:
            names = {kind.plain_name(name) for name in names if not kind.is_beside(name)}
        self._names = WeightNames(self.base, skeleton, names)

    def layer(self, path: str, experts: nn.Module) -> Layer:
        found = mxfp4_layer(self.base, path)
        if found is None:
            parameters = f"{path}.{up_of(experts)}", f"{path}.down_proj"
            up, down = (self._names.experts(name) for name in parameters)
            if up is None or down is None:
                name = parameters[up is not None]
                raise CheckpointError(f"{self.path} has no tensors for {name}: {self._names.nearest(name)}")
            found = layer_of(self.base, path, (up, down))
        self._used |= found[1]
        return found[0]

    def parameter(self, name: str) -> str | None:
        return self._names.renamed.get(name)

    def others(self, dtype: torch.dtype) -> dict[str, StoredTensor]:
        return dict(outside_experts(self.base, self._used, dtype))


class _GgufFile:
    """A GGUF file, with or without config.json beside it."""

    def __init__(self, file: Path) -> None:
        self.path = file
        self._reader = open_gguf(file)
        self._layers = gguf_layers(file, self._reader)
        with errors_of_transformers(file.parent):
            self.config: Any = gguf.read_config(file, self._reader)
        self.num_tensors = len(self._reader.tensors)
        self.dtype = gguf.usual_dtype(self._reader)

    def use(self, skeleton: Any) -> None:
        self._class = type(skeleton).__name__
        self._shapes = {name: tuple(tensor.shape) for name, tensor in skeleton.state_dict().items()}

    def parameter(self, name: str) -> str | None:
        return name

    def layer(self, path: str, experts: nn.Module) -> Layer:
        number = re.search(r"\.layers\.(\d+)\.", f".{path}.")
        layer = self._layers.get(int(number[1])) if number else None
        if layer is None:
            raise CheckpointError(f"{self.path} has no blk.N.ffn_down_exps.weight for {path}")
        return replace(layer, path=path)

    def others(self, dtype: torch.dtype) -> dict[str, StoredTensor]:
        found = gguf.outside_experts(self.path, self._reader, self.config, dtype)
        for name, tensor in found.items():
            if name not in self._shapes:
                raise CheckpointError(
                    f"{self.path} has {name}, which {self._class} of this configuration lacks"
                )
            if tensor.shape != self._shapes[name]:
                raise CheckpointError(
                    f"{self.path}: {name} is {list(tensor.shape)} in the file, but {list(self._shapes[name])} by its "
                    "metadata"
                )
        return found


def open_source(path: Path, folders: Sequence[Path] = ()) -> Source:
    """The files of a model, some of them in other folders; CheckpointError for what is neither."""
    if path.suffix == ".gguf" and path.is_file():
        if folders:
            raise CheckpointError(f"{path} is one file: folders= is for the shards of a folder")
        return _GgufFile(inside(path.parent, path.name))
    if not path.is_dir():
        raise CheckpointError(f"{path} is no folder and no GGUF file: stream() reads local files")
    check_folder(path)
    return _Folder(path, folders)
