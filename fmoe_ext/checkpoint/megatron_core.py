"""Folders of Megatron-core (torch_dist) and other folders of torch.distributed.checkpoint; names of Megatron's experts.

    latest_checkpointed_iteration.txt
    iter_0000010/.metadata, __<rank>_<n>.distcp       tensors, in any layout
    iter_0000010/common.pt                            everything else: not read

Layers that are all alike are one tensor with the layers in front, under a name without numbers.
"""

import functools
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch

from fmoe_ext.checkpoint.errors import CheckpointError
from fmoe_ext.checkpoint.files import inside, read_text
from fmoe_ext.checkpoint.model_state import MEGATRON_EXPERTS
from fmoe_ext.checkpoint.safetensors_file import StoredTensor
from fmoe_ext.checkpoint.store import stored_tensors
from fmoe_ext.checkpoint.torch_metadata import read_metadata

TRACKER = "latest_checkpointed_iteration.txt"
_ITERATION = re.compile(r"iter_(\d{7,})")
_OF_OPTIMIZER = "optimizer."
_MAX_LAYERS = 10**5
LAYERS = re.compile(r"(?P<layers>(?:.*\.)?layers)\.(?P<rest>(?!\d+\.).+)")


def iteration_folder(path: Path) -> Path:
    """Finds the folder of one iteration: path itself, or the one that the tracker file in it names."""
    if not (path / TRACKER).exists():
        return path
    text = read_text(inside(path, TRACKER))
    if not re.fullmatch(r"release|\d{1,18}", text, re.ASCII):
        raise CheckpointError(f"{path / TRACKER} must hold a number or 'release', but holds {text[:80]!r}")
    folder = inside(path, "release" if text == "release" else f"iter_{int(text):07d}")
    if not folder.is_dir():
        raise CheckpointError(f"{path / TRACKER} says {text}, but there is no {folder.name}")
    return folder


def is_torch_dist(path: Path) -> bool:
    """True if a path is a folder of torch.distributed.checkpoint, or a Megatron folder with one."""
    return path.is_dir() and (iteration_folder(path) / ".metadata").exists()


def read_torch_dist(path: Path) -> tuple[dict[str, StoredTensor], list[Path], int, list[str]]:
    """(the model's {name: StoredTensor}, files, iteration, keys of what is left out) of such a folder.

    What is no tensor is left out, since reading it would run code of the file, and so is the optimizer's state.
    """
    folder = iteration_folder(path)
    saved, others = read_metadata(inside(folder, ".metadata"))
    left_out = [*others, *(key for key in saved if key.startswith(_OF_OPTIMIZER))]
    tensors = stored_tensors(folder, {key: t for key, t in saved.items() if key not in left_out})
    files = sorted({inside(folder, chunk.file) for t in saved.values() for chunk in t.chunks})
    iteration = _ITERATION.fullmatch(folder.name)
    return _by_layer(tensors), files, int(iteration[1]) if iteration else 0, left_out


def _by_layer(tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Each layer's own tensor where Megatron has one for all: layers.mlp.* [L, *] -> layers.<i>.mlp.* [*]."""
    separate = {}
    for key, tensor in tensors.items():
        match = LAYERS.fullmatch(key)
        if match is None or not tensor.shape:
            separate[key] = tensor
            continue
        if tensor.shape[0] > _MAX_LAYERS:
            raise CheckpointError(
                f"{key} is of {tensor.shape[0]} layers; more than {_MAX_LAYERS} are not read"
            )
        for i in range(tensor.shape[0]):
            read = functools.partial(_layer, tensor, i)
            separate[f"{match['layers']}.{i}.{match['rest']}"] = StoredTensor(
                tensor.shape[1:], tensor.dtype, read
            )
    return separate


def _layer(tensor: StoredTensor, i: int) -> torch.Tensor:
    return tensor.rows(i, i + 1)[0]


def expert_layers(names: Iterable[str]) -> set[str]:
    """Finds the layers that have experts under Megatron-core's own names."""
    return {match["layer"] or "" for name in names if (match := MEGATRON_EXPERTS.fullmatch(name))}
