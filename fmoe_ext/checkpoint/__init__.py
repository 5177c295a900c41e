"""Save a model in one parallel layout and load it in any other; convert checkpoints from and to other formats.

    from fmoe_ext import checkpoint

    checkpoint.save("out", model, optimizer, step=step, keep=2)
    step = checkpoint.load("out", model, optimizer).step

`python -m fmoe_ext.checkpoint inspect|merge|convert PATH` works on the files.
"""

from fmoe_ext.checkpoint.deepspeed import from_deepspeed
from fmoe_ext.checkpoint.errors import CheckpointError
from fmoe_ext.checkpoint.fastmoe import merge_fastmoe, read_fastmoe, write_fastmoe
from fmoe_ext.checkpoint.huggingface import from_huggingface, to_huggingface
from fmoe_ext.checkpoint.megatron import from_megatron_core, to_megatron_core
from fmoe_ext.checkpoint.saving import export_safetensors, load, save

__all__ = [
    "CheckpointError",
    "export_safetensors",
    "from_deepspeed",
    "from_huggingface",
    "from_megatron_core",
    "load",
    "merge_fastmoe",
    "read_fastmoe",
    "save",
    "to_huggingface",
    "to_megatron_core",
    "write_fastmoe",
]
