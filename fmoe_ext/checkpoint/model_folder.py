"""A model's Hugging Face folder, read a tensor at a time."""

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from fmoe_ext.checkpoint.errors import CheckpointError
from fmoe_ext.checkpoint.huggingface import model_config, model_files, without_replaced
from fmoe_ext.checkpoint.safetensors_file import StoredTensor, read_unmapped

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def usual_dtype(tensors: Iterable[StoredTensor]) -> torch.dtype | None:
    """Finds the float dtype that most bytes of a model have: the one that config.json names; None without floats."""
    counts: Counter[torch.dtype] = Counter()
    for tensor in tensors:
        if tensor.dtype in FLOATS:
            counts[tensor.dtype] += tensor.num_bytes
    return max(counts, key=lambda dtype: (counts[dtype], -FLOATS.index(dtype)), default=None)


class Base:
    """A model's folder: files {file: names in it}, tensors {name: StoredTensor}, config.

    folders: others, where files that its index names may be instead.
    packed: the format that its experts had before checkpoint.packed.decode(); "" for plain ones.
    """

    def __init__(self, folder: Path, folders: Sequence[Path] = ()):
        self.folder = Path(folder)
        self.packed = ""
        files = model_files(self.folder, folders)
        if not files:
            gguf = min(self.folder.glob("*.gguf"), default=None)
            remedy = "give a model's folder" if gguf is None else f"give the file {gguf}"
            raise CheckpointError(f"{folder} has no model.safetensors and no index of several: {remedy}")
        self.config: dict[str, Any] = model_config(self.folder)
        self.files: dict[Path, list[str]] = {}
        self.tensors: dict[str, StoredTensor] = {}
        read = {file: read_unmapped(file)[0] for file in files}
        for file, found in without_replaced(self.folder, read).items():
            if found.keys() & self.tensors.keys():
                raise CheckpointError(f"{file} has tensors that another file of the folder has too")
            self.files[file] = list(found)
            self.tensors |= found

    def check_plain(self) -> None:
        """Raises CheckpointError if the weights are quantised."""
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
