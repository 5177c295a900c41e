"""A model's Hugging Face folder, read a tensor at a time, and where experts are in it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fmoe_ext.checkpoint.errors import CheckpointError
from fmoe_ext.checkpoint.huggingface import model_config, model_files
from fmoe_ext.checkpoint.layouts import BLOCKS, PER_EXPERT, STACKED
from fmoe_ext.checkpoint.safetensors_file import StoredTensor, read_unmapped

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Experts:
    """Experts of a layer in a base. names {role: name, with {e} where each expert has its own}; E, in and out widths.

    turned: stored [E, in, out]; interleaved: gate and up in turn.
    """

    names: dict[str, str]
    num_experts: int
    d_model: int
    d_hidden: int
    turned: bool = False
    interleaved: bool = False


class Base:
    """A model's folder: files {file: names in it}, tensors {name: StoredTensor}, config.

    packed: the format that its experts had before checkpoint.packed.decode(); "" for plain ones.
    """

    def __init__(self, folder: Path):
        self.folder = Path(folder)
        self.packed = ""
        files = model_files(self.folder)
        if not files:
            raise CheckpointError(
                f"{folder} has no model.safetensors and no index of several: give a model's folder"
            )
        self.config: dict[str, Any] = model_config(self.folder)
        self.files: dict[Path, list[str]] = {}
        self.tensors: dict[str, StoredTensor] = {}
        for file in files:
            found, _ = read_unmapped(file)
            if found.keys() & self.tensors.keys():
                raise CheckpointError(f"{file} has tensors that another file of the folder has too")
            self.files[file] = list(found)
            self.tensors |= found

    def check_plain(self) -> None:
        """CheckpointError if the weights are quantised."""
        quantization = self.config.get("quantization_config")
        odd = [
            name for name, t in self.tensors.items() if t.dtype.is_floating_point and t.dtype not in FLOATS
        ]
        if quantization or odd:
            kind = quantization.get("quant_method") if isinstance(quantization, dict) else odd[:1]
            raise CheckpointError(
                f"{self.folder} is quantised ({kind}), which is not decoded here: dequantise the model to bfloat16 "
                "first"
            )

    def experts(self, layer: str) -> Experts | None:
        """Experts at a module of the adapter, as model.layers.0.mlp.experts; None if there are none."""
        stem, _, block = layer.removesuffix(".experts").rpartition(".")
        for name in dict.fromkeys((block, *BLOCKS)):
            prefix = f"{stem}.{name}." if stem else f"{name}."
            for gate_up, down in STACKED:
                if {prefix + gate_up, prefix + down} <= self.tensors.keys():
                    return self._stacked(prefix, gate_up, down)
            for leaves in PER_EXPERT:
                if f"{prefix}experts.0.{leaves[0]}" in self.tensors:
                    return self._numbered(prefix, leaves)
        return None

    def _stacked(self, prefix: str, gate_up: str, down: str) -> Experts:
        names = {"gate_up": prefix + gate_up, "down": prefix + down}
        w1, w2 = (self.tensors[name].shape for name in names.values())
        interleaved = f"{prefix}{gate_up}_bias" in self.tensors
        if len(w1) == len(w2) == 3 and w1[0] == w2[0]:
            if w1[1] == 2 * w2[2] and w1[2] == w2[1]:
                return Experts(names, w1[0], w1[2], w2[2], interleaved=interleaved)
            if w1[2] == 2 * w2[1] and w1[1] == w2[2]:
                return Experts(names, w1[0], w1[1], w2[1], True, interleaved)
        raise CheckpointError(
            f"{self.folder}: {names['gate_up']} {list(w1)} and {names['down']} {list(w2)} do not fit"
        )

    def _numbered(self, prefix: str, leaves: tuple[str, str, str]) -> Experts:
        names = {
            r: prefix + "experts.{e}." + leaf for r, leaf in zip(("gate", "up", "down"), leaves, strict=True)
        }
        count = 0
        while names["gate"].format(e=count) in self.tensors:
            count += 1
        shape = self.tensors[names["gate"].format(e=0)].shape
        if len(shape) != 2:
            raise CheckpointError(f"{self.folder}: {names['gate'].format(e=0)} is {list(shape)}, no matrix")
        d_hidden, d_model = shape
        for role, name in names.items():
            expected = (d_model, d_hidden) if role == "down" else (d_hidden, d_model)
            for e in range(count):
                tensor = self.tensors.get(name.format(e=e))
                if tensor is None or tensor.shape != expected:
                    found = None if tensor is None else list(tensor.shape)
                    raise CheckpointError(
                        f"{self.folder}: {name.format(e=e)} is {found}, expected {list(expected)}"
                    )
        return Experts(names, count, d_model, d_hidden)
