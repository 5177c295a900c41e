"""A model in a GGUF file: weights outside of the experts by name, as Transformers has them."""

import re
from pathlib import Path
from typing import Any

import torch

from fmoe_ext import frozen
from fmoe_ext.checkpoint import gguf_keys
from fmoe_ext.checkpoint.errors import CheckpointError
from fmoe_ext.checkpoint.families.family import Family
from fmoe_ext.checkpoint.gguf_config import config_of
from fmoe_ext.checkpoint.gguf_names import OUTSIDE, in_transformers
from fmoe_ext.checkpoint.huggingface import model_config, refuse_hub_code
from fmoe_ext.checkpoint.methods import PackedTensor
from fmoe_ext.checkpoint.safetensors_file import StoredTensor

IN_LAYER = re.compile(r"blk\.(\d+)\.(.+)")
SHARED_GATE = "ffn_gate_inp_shexp.weight"  # [D] there, [1, D] in Transformers
BIAS = "exp_probs_b.bias"  # [E] there


def read_config(file: Path, reader: Any) -> Any:
    """The configuration that the config.json beside an open GGUF file has, or the file itself.

    Raises CheckpointError for metadata that it does not compute with.
    """
    import transformers

    fields = _fields(file, reader)
    if (file.parent / "config.json").exists():
        refuse_hub_code(file.parent, model_config(file.parent))
        config = transformers.AutoConfig.from_pretrained(file.parent, local_files_only=True)
    else:
        shapes = {t.name: tuple(int(n) for n in reversed(t.shape)) for t in reader.tensors}
        config = config_of(file, fields, shapes)
    gguf_keys.check(file, fields, config)
    return config


def _fields(file: Path, reader: Any) -> gguf_keys.Fields:
    try:
        return {key: field.contents() for key, field in reader.fields.items()}
    except (ValueError, IndexError, KeyError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{file} has damaged metadata: {error}") from error


def outside_experts(file: Path, reader: Any, config: Any, dtype: torch.dtype) -> dict[str, StoredTensor]:
    """{name in Transformers: tensor, a PackedTensor where frozen.FORMATS has its format} of what is no expert.

    Heads for the tokens after the next are left out. Raises CheckpointError for a file that is damaged, and for names
    that are not known.
    """
    fields = _fields(file, reader)
    family = gguf_keys.family_of(file, fields)
    if family.name != config.model_type:
        raise CheckpointError(
            f"{file}: general.architecture is {fields['general.architecture']}, but config.json has {config.model_type}"
        )
    assert family.gguf is not None
    last = config.num_hidden_layers if gguf_keys.num_heads(fields, family) else None
    found = {}
    for tensor in reader.tensors:
        match = IN_LAYER.fullmatch(tensor.name)
        if "_exps." in tensor.name or (match and last is not None and int(match[1]) >= last):
            continue
        if tensor.name == "rope_freqs.weight":
            if (tensor.data != 1).any():
                raise CheckpointError(
                    f"{file}: rope_freqs.weight scales frequencies, which is not computed here"
                )
            continue
        heads = None
        if family.gguf.turns_pairs and (match := re.fullmatch(r"blk\.\d+\.attn_([qk])\.weight", tensor.name)):
            heads = config.num_attention_heads if match[1] == "q" else config.num_key_value_heads
        found[_name(file, tensor.name, family)] = _stored(file, tensor, heads, dtype, family)
    return found


def _name(file: Path, name: str, family: Family) -> str:
    match = IN_LAYER.fullmatch(name)
    full = None
    if match:
        inside = in_transformers(match[2], family)
        full = inside and f"model.layers.{match[1]}.{inside}"
    else:
        for theirs, ours in OUTSIDE.items():
            if name.startswith(ours):
                full = theirs + name.removeprefix(ours)
    if full is None:
        raise CheckpointError(f"{file}: {name} has no name in Transformers that is known here")
    return full


def _stored(file: Path, tensor: Any, heads: int | None, dtype: torch.dtype, family: Family) -> StoredTensor:
    from gguf.quants import dequantize

    shape = tuple(int(n) for n in reversed(tensor.shape))
    name = tensor.tensor_type.name.lower()
    if name in frozen.FORMATS and len(shape) == 2:

        def packed() -> frozen.Quantized:
            # a copy in memory, whatever becomes of the file
            rows = _halves(torch.from_numpy(tensor.data.copy()), heads)
            return frozen.Quantized(name, rows[None])

        return PackedTensor(shape, dtype, packed)
    is_row = family.in_modules.bias_is_row and tensor.name.endswith(BIAS)
    if is_row or tensor.name.endswith(SHARED_GATE):
        shape = (1, *shape)

    def read() -> torch.Tensor:
        try:
            values = dequantize(tensor.data, tensor.tensor_type)
        except (NotImplementedError, ValueError) as error:
            raise CheckpointError(f"{file}: {tensor.name} cannot be decoded: {error}") from error
        return _halves(torch.from_numpy(values.copy()).to(dtype).reshape(shape), heads)

    return StoredTensor(shape, dtype, read)


def _halves(rows: torch.Tensor, heads: int | None) -> torch.Tensor:
    """Rows of a head with neighbours rotated, as llama.cpp has them, in Transformers' order: halves rotated."""
    return rows if heads is None else rows.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)
