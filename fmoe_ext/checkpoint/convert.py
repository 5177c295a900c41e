"""Any checkpoint to any other: what a path holds, its tensors in our layout, and how each format is written."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from fmoe_ext.checkpoint import deepspeed, fastmoe, huggingface, megatron_core, store
from fmoe_ext.checkpoint.errors import CheckpointError
from fmoe_ext.checkpoint.families import LAYOUTS
from fmoe_ext.checkpoint.files import made_folder
from fmoe_ext.checkpoint.manifest import MODEL, Manifest
from fmoe_ext.checkpoint.megatron_experts import from_megatron_core
from fmoe_ext.checkpoint.model_folder import ModelFolder
from fmoe_ext.checkpoint.model_state import describe_layers
from fmoe_ext.checkpoint.routing import routing_of_config
from fmoe_ext.checkpoint.safetensors_file import (
    StoredTensor,
    verify_safetensors,
    write_safetensors,
)
from fmoe_ext.checkpoint.saving import model_metadata, noted_routing

FORMATS = ("fmoe_ext", "safetensors", *(f"hf-{layout}" for layout in LAYOUTS), "fastmoe")


@dataclass
class Checkpoint:
    """A checkpoint of any format: the model's tensors in our layout, the files it consists of.

    routing: {layer: what its gate computes}, where the checkpoint says so; left_out: what of it was not read.
    """

    format: str
    tensors: dict[str, StoredTensor]
    files: list[Path]
    step: int = 0
    manifest: Manifest | None = None
    routing: dict[str, Any] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)

    def verify(self, progress: Callable[[int], Any] | None = None) -> int:
        """Checks the checksums; returns how many of the files have one."""
        if self.manifest is not None:
            store.verify(self.files[0].parent if self.files else Path(), self.manifest, progress)
            return len(self.files)
        return sum(verify_safetensors(file, progress) for file in self.files if file.suffix == ".safetensors")


def read(*paths: str | Path, mp_rank: str | None = None, trust: bool = False) -> Checkpoint:
    """A folder of ours or of FastMoE, DeepSpeed, Hugging Face or Megatron-core, or a safetensors file, as a Checkpoint.

    Several paths: the files (torch.save) of FastMoE's ranks, rank 0 first; one such file is a job of one rank.
    mp_rank, trust: fastmoe.read_fastmoe. Raises CheckpointError for anything else, and for what is damaged.
    """
    all_paths = [Path(path) for path in paths]
    for path in all_paths:
        if not path.exists():
            raise CheckpointError(f"{path} does not exist")
    path = all_paths[0]
    if len(paths) > 1 and (folders := [path for path in all_paths if path.is_dir()]):
        raise CheckpointError(f"several paths are the files of FastMoE's ranks, but {folders[0]} is a folder")
    if len(paths) > 1 or (path.suffix in (".pt", ".pth") and path.is_file()):
        return Checkpoint("fastmoe", *fastmoe.read_files(all_paths, trust))
    if deepspeed.is_deepspeed(path):
        return Checkpoint("deepspeed", *deepspeed.read_deepspeed(path, mp_rank, trust))
    ours = store.has_checkpoint(path)
    if not ours and (folder := ModelFolder(path)).paths:
        tensors, converted = huggingface.read_model(folder)
        format = "huggingface" if converted else "safetensors"
        routing = noted_routing(folder.paths[0]) or (_routing_of_folder(folder, tensors) if converted else {})
        return Checkpoint(format, tensors, folder.paths, routing=routing)
    if not ours and megatron_core.is_torch_dist(path):
        tensors, files, step, left_out = megatron_core.read_torch_dist(path)
        return Checkpoint("torch_dist", tensors, files, step, left_out=left_out)
    if not ours and fastmoe.is_fastmoe(path):
        return Checkpoint("fastmoe", *fastmoe.read_fastmoe(path, mp_rank, trust))
    path = store.find(path)
    manifest = Manifest.read(path)
    tensors = store.model_tensors(path, manifest)
    files = [path / name for name in manifest.files]
    return Checkpoint("fmoe_ext", tensors, files, manifest.step, manifest, manifest.routing)


def _routing_of_folder(folder: ModelFolder, tensors: Mapping[str, StoredTensor]) -> dict[str, Any]:
    """Facts about the gates of every layer from config.json; none for a file and for unknown models."""
    options = routing_of_config(folder.config)
    if "output_scale" in options:
        raise CheckpointError(
            f"{folder.folder}/config.json multiplies the output of each MoE layer by {options['output_scale']}, which "
            "a converted checkpoint cannot say: read it with import_model()"
        )
    layers = describe_layers({name: tensor.shape for name, tensor in tensors.items()})
    return {name: options for name in layers} if options else {}


def write(
    path: str | Path,
    checkpoint: Checkpoint,
    format: str,
    num_ranks: int = 1,
    progress: Callable[[int], Any] | None = None,
) -> None:
    """Writes the model of a Checkpoint in one of FORMATS; atomically.

    "hf-..." writes path/model.safetensors, or path itself if it ends in .safetensors; the config is not ours to write:
    routing.needed_config() has what it must say. "fastmoe" writes files for num_ranks data-parallel ranks.
    progress(bytes) is called for what has been read. Raises CheckpointError, and leaves nothing behind, for what the
    format does not have.
    """
    path = Path(path)
    _check_target(path, format)
    tensors = _counted(checkpoint.tensors, progress or (lambda num_bytes: None))
    of_megatron = megatron_core.expert_layers(tensors)
    if of_megatron and format.startswith("hf-"):
        raise CheckpointError(
            f"{', '.join(sorted(of_megatron)) or '(root)'}: experts under Megatron-core's own names, in a model whose "
            f"attention has Megatron's names too, are not converted to {format}: `--to fmoe_ext` gives them ours"
        )
    if of_megatron and format != "safetensors":  # which keeps the names
        tensors = from_megatron_core(tensors)
    if format == "safetensors":
        write_safetensors(path, tensors, model_metadata(tensors, checkpoint.routing))
    elif format.startswith("hf-"):
        file = path if path.suffix == ".safetensors" else path / "model.safetensors"
        layout = format.removeprefix("hf-")
        write_safetensors(file, huggingface.to_huggingface(tensors, layout, checkpoint.routing))
    elif format == "fastmoe":
        fastmoe.write_fastmoe(path, tensors, num_ranks, checkpoint.step)
    elif format == "fmoe_ext":
        whole = {MODEL + name: tensor.read() for name, tensor in tensors.items()}
        with made_folder(path):
            store.write_checkpoint(path, whole, Manifest(step=checkpoint.step, routing=checkpoint.routing))
    else:
        raise CheckpointError(f"format must be one of {', '.join(FORMATS)}, but got {format!r}")


def _check_target(path: Path, format: str) -> None:
    if format == "safetensors" and path.is_dir():
        raise CheckpointError(f"{path} is a folder: name a file, as {path / 'model.safetensors'}")
    if format == "fmoe_ext" and store.has_checkpoint(path):
        raise CheckpointError(
            f"{path} has a checkpoint already: a run that resumes there would take this one, which has no optimizer. "
            "Name another folder"
        )


def _counted(tensors: Mapping[str, StoredTensor], progress: Callable[[int], Any]) -> dict[str, StoredTensor]:
    def counting(read: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def read_and_count(*rows: int) -> torch.Tensor:
            value = read(*rows)
            progress(value.nbytes)
            return value

        return read_and_count

    return {k: StoredTensor(t.shape, t.dtype, counting(t.read), counting(t.rows)) for k, t in tensors.items()}
