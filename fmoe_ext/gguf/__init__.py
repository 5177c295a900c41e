"""GGUF, the file of llama.cpp: what its metadata say of a model, and what it calls a model's tensors."""

from typing import Any

import torch

from fmoe_ext.checkpoint import gguf_config, gguf_keys
from fmoe_ext.gguf.file import GgufFile

__all__ = ["check", "config_of"]


def config_of(file: GgufFile) -> Any:
    """Makes the configuration of Transformers that a file's metadata and tensors say; CheckpointError for others."""
    shapes = {tensor.name: tuple(int(n) for n in reversed(tensor.shape)) for tensor in file.tensors}
    factors = next((tensor.data for tensor in file.tensors if tensor.name == "rope_freqs.weight"), None)
    given = None if factors is None else torch.from_numpy(factors.copy())
    return gguf_config.config_of(file.path, file.values(), shapes, given)


def check(file: GgufFile, config: Any) -> None:
    """Raises CheckpointError, by name, for the first key of a file that a configuration does not compute with."""
    gguf_keys.check(file.path, file.values(), config)
