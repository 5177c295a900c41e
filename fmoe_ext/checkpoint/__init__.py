"""Save a model in one parallel layout and load it in any other; convert checkpoints from and to other formats.

    from fmoe_ext import checkpoint

    checkpoint.save("out", model, optimizer, step=step, keep=2)
    step = checkpoint.load("out", model, optimizer).step

load() also reads a safetensors file of a whole model, and a Hugging Face folder. Checkpoints of Hugging Face, FastMoE
and Megatron-core are converted both ways, DeepSpeed's to ours:

    from_*(), to_*()                   translate state dicts in memory
    merge_fastmoe()                    merges the state dicts of all of FastMoE's ranks, in memory
    read_fastmoe(), write_fastmoe()    read and write FastMoE's files

Commands read files of all these formats:

    fmoe checkpoint inspect PATH
    fmoe checkpoint merge PATH -o FILE                 write one safetensors file
    fmoe checkpoint convert PATH --to FORMAT -o OUT    write ours, safetensors, FastMoE's or Hugging Face's
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
