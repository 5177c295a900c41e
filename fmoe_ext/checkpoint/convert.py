"""Convert a checkpoint of each format that read() knows into one of FORMATS, by way of our layout.

`fmoe checkpoint` (cli.py) is the caller. Tensors are StoredTensors, read while they are written: one at a time for
safetensors, all of a rank for "fastmoe", and all of the model for "fmoe_ext".
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from fmoe_ext.checkpoint import deepspeed, fastmoe, huggingface, megatron, store
from fmoe_ext.checkpoint.errors import CheckpointError
from fmoe_ext.checkpoint.families import LAYOUTS
from fmoe_ext.checkpoint.files import made_folder
from fmoe_ext.checkpoint.manifest import MODEL, Manifest
from fmoe_ext.checkpoint.model_folder import ModelFolder
from fmoe_ext.checkpoint.model_state import describe_layers
from fmoe_ext.checkpoint.routing import routing_of_config
from fmoe_ext.checkpoint.safetensors_file import StoredTensor, verify_safetensors, write_safetensors
from fmoe_ext.checkpoint.saving import model_metadata, noted_routing

FORMATS = ("fmoe_ext", "safetensors", *(f"hf-{layout}" for layout in LAYOUTS), "fastmoe")


@dataclass
class Checkpoint:
    """A checkpoint as read() describes it, whatever its format."""

    format: str
    tensors: dict[str, StoredTensor]  # the model's, in our layout
    files: list[Path]  # those with its tensors
    step: int = 0
    manifest: Manifest | None = None  # of one of ours
    routing: dict[str, Any] = field(default_factory=dict)  # {layer: what its gate computes}, if said
    left_out: list[str] = field(default_factory=list)  # names of what was not read

    def verify(self, progress: Callable[[int], Any] | None = None) -> int:
        """Check the checksums -> how many of the files have one."""
        if self.manifest is not None:
            store.verify(self.files[0].parent if self.files else Path(), self.manifest, progress)
            return len(self.files)
        return sum(verify_safetensors(file, progress) for file in self.files if file.suffix == ".safetensors")


def read(*paths: str | Path, mp_rank: str | None = None, trust: bool = False) -> Checkpoint:
    """Read a folder of ours, FastMoE, DeepSpeed, Hugging Face or Megatron-core, or a safetensors file, as a Checkpoint.

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
    # DeepSpeed before ours: both have a file `latest`
    if deepspeed.is_deepspeed(path):
        return Checkpoint("deepspeed", *deepspeed.read_deepspeed(path, mp_rank, trust))
    # Ours before the others: their files may lie beside a checkpoint of ours
    ours = store.has_checkpoint(path)
    if not ours and (folder := ModelFolder(path)).paths:
        tensors, converted = huggingface.read_model(folder)
        format = "huggingface" if converted else "safetensors"
        routing = noted_routing(folder.paths[0])
        # A state dict does not say what gates compute: our files note it, Hugging Face's config.json says it
        if not routing and converted and (options := routing_of_config(folder.config)):
            if "output_scale" in options:
                raise CheckpointError(
                    f"{folder.folder}/config.json multiplies the output of each MoE layer by "
                    f"{options['output_scale']}, which a converted checkpoint cannot say: read it with import_model()"
                )
            layers = describe_layers({name: tensor.shape for name, tensor in tensors.items()})
            routing = {name: options for name in layers}
        return Checkpoint(format, tensors, folder.paths, routing=routing)
    if not ours and megatron.is_torch_dist(path):
        tensors, files, step, left_out = megatron.read_torch_dist(path)
        return Checkpoint("torch_dist", tensors, files, step, left_out=left_out)
    if not ours and fastmoe.is_fastmoe(path):
        return Checkpoint("fastmoe", *fastmoe.read_fastmoe(path, mp_rank, trust))
    path = store.find(path)
    manifest = Manifest.read(path)
    tensors = store.model_tensors(path, manifest)
    files = [path / name for name in manifest.files]
    return Checkpoint("fmoe_ext", tensors, files, manifest.step, manifest, manifest.routing)


def write(
    path: str | Path,
    checkpoint: Checkpoint,
    format: str,
    num_ranks: int = 1,
    progress: Callable[[int], Any] | None = None,
) -> None:
    """Write the model of a Checkpoint in one of FORMATS; atomically.

    "hf-..." writes path/model.safetensors, or path itself if it ends in .safetensors; the config is not ours to write:
    routing.needed_config() has what it must say. "fastmoe" writes files for num_ranks data-parallel ranks.
    progress(bytes) is called for what has been read. Raises CheckpointError, and leaves nothing behind, for what the
    format does not have.
    """
    path = Path(path)
    if format == "safetensors" and path.is_dir():
        raise CheckpointError(f"{path} is a folder: name a file, as {path / 'model.safetensors'}")
    if format == "fmoe_ext" and store.has_checkpoint(path):
        raise CheckpointError(
            f"{path} has a checkpoint already: a run that resumes there would take this one, which has no optimizer. "
            "Name another folder"
        )

    # Report progress as tensors are read
    def counting(read: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def read_and_count(*rows: int) -> torch.Tensor:
            value = read(*rows)
            if progress is not None:
                progress(value.nbytes)
            return value

        return read_and_count

    tensors = {  # without parts(): whole tensors or rows of them are read
        name: StoredTensor(t.shape, t.dtype, counting(t.read), counting(t.rows))
        for name, t in checkpoint.tensors.items()
    }
    of_megatron = megatron.expert_layers(tensors)
    # Experts under Megatron's own names are kept by read(): give them ours, or refuse
    if of_megatron and format.startswith("hf-"):
        raise CheckpointError(
            f"{', '.join(sorted(of_megatron)) or '(root)'}: experts under Megatron-core's own names, in a model whose "
            f"attention has Megatron's names too, are not converted to {format}: `--to fmoe_ext` gives them ours"
        )
    if of_megatron and format != "safetensors":  # safetensors keeps the names
        tensors = megatron.from_megatron_core(tensors)
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
