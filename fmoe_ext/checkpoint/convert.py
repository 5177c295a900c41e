"""Any checkpoint to any other: what a path holds, its tensors in our layout, and how each format is written."""

from dataclasses import dataclass
from pathlib import Path

from fmoe_ext.checkpoint import fastmoe, huggingface, store
from fmoe_ext.checkpoint.errors import CheckpointError
from fmoe_ext.checkpoint.safetensors_file import (
    StoredTensor,
    verify_safetensors,
    write_safetensors,
)
from fmoe_ext.checkpoint.saving import model_metadata

FORMATS = ("fmoe_ext", "safetensors", "hf-fused", "hf-qwen3_moe", "hf-mixtral", "fastmoe")


@dataclass
class Checkpoint:
    """A checkpoint of any format: the model's tensors {name: StoredTensor} in our layout, the files it consists of."""

    format: str
    tensors: dict
    files: list
    step: int = 0
    manifest: store.Manifest | None = None

    def verify(self, progress=None):
        """Checks the checksums; returns how many of the files have one."""
        if self.manifest is not None:
            store.verify(self.files[0].parent, self.manifest, progress)
            return len(self.files)
        return sum(verify_safetensors(file, progress) for file in self.files if file.suffix == ".safetensors")


def read(*paths, mp_rank=None, trust=False):
    """The checkpoint at a path: a folder of ours, of FastMoE or of Hugging Face, or a safetensors file.

    Several paths: the files (torch.save) of FastMoE's ranks, rank 0 first; one such file is a job of one rank.
    mp_rank, trust: fastmoe.read_fastmoe. Raises CheckpointError for anything else, and for what is damaged.
    """
    paths = [Path(path) for path in paths]
    for path in paths:
        if not path.exists():
            raise CheckpointError(f"{path} does not exist")
    path = paths[0]
    if len(paths) > 1 or path.suffix in (".pt", ".pth"):
        return Checkpoint("fastmoe", *fastmoe.read_files(paths, trust))
    ours = store.has_checkpoint(path)
    if not ours and (files := huggingface.model_files(path)):
        tensors, converted = huggingface.read_model(files)
        return Checkpoint("huggingface" if converted else "safetensors", tensors, files)
    if not ours and fastmoe.is_fastmoe(path):
        return Checkpoint("fastmoe", *fastmoe.read_fastmoe(path, mp_rank, trust))
    path = store.find(path)
    manifest = store.Manifest.read(path)
    files = [path / name for name in manifest.files]
    return Checkpoint("fmoe_ext", store.model_tensors(path, manifest), files, manifest.step, manifest)


def write(path, checkpoint, format, num_ranks=1, progress=None):
    """Writes the model of a Checkpoint in one of FORMATS; atomically.

    "hf-..." writes path/model.safetensors, or path itself if it ends in .safetensors; the config is not ours to write.
    "fastmoe" writes files for num_ranks data-parallel ranks. progress(bytes) is called for what has been read.
    """
    path, tensors = Path(path), _counted(checkpoint.tensors, progress or (lambda num_bytes: None))
    if format == "safetensors":
        write_safetensors(path, tensors, model_metadata(tensors))
    elif format.startswith("hf-"):
        file = path if path.suffix == ".safetensors" else path / "model.safetensors"
        write_safetensors(file, huggingface.to_huggingface(tensors, format.removeprefix("hf-")))
    elif format == "fastmoe":
        fastmoe.write_fastmoe(path, tensors, num_ranks, checkpoint.step)
    elif format == "fmoe_ext":
        whole = {store.MODEL + name: tensor.read() for name, tensor in tensors.items()}
        store.write_checkpoint(path, whole, store.Manifest(step=checkpoint.step))
    else:
        raise CheckpointError(f"format must be one of {', '.join(FORMATS)}, but got {format!r}")


def _counted(tensors, progress):
    def counting(read):
        def read_and_count(*rows):
            value = read(*rows)
            progress(value.nbytes)
            return value

        return read_and_count

    return {k: StoredTensor(t.shape, t.dtype, counting(t.read), counting(t.rows)) for k, t in tensors.items()}
