"""A model in a GGUF file: weights outside of the experts by name, as Transformers has them."""

import re
from pathlib import Path
from typing import Any

import torch

from fmoe_ext import frozen
from fmoe_ext.checkpoint import gguf_keys
from fmoe_ext.checkpoint.errors import CheckpointError
from fmoe_ext.checkpoint.families import FAMILIES
from fmoe_ext.checkpoint.huggingface import model_config, refuse_hub_code
from fmoe_ext.checkpoint.methods import PackedTensor
from fmoe_ext.checkpoint.safetensors_file import StoredTensor
from fmoe_ext.frozen.formats import GGUF

IN_LAYER = re.compile(r"blk\.(\d+)\.(.+)")
SHARED_GATE = "ffn_gate_inp_shexp.weight"  # [D] there, [1, D] in Transformers


def read_config(file: Path, reader: Any) -> Any:
    """The configuration that the config.json beside an open GGUF file has, or the file itself.

    Raises CheckpointError for metadata that it does not compute with.
    """
    import transformers

    try:
        fields = {key: field.contents() for key, field in reader.fields.items()}
    except (ValueError, IndexError, KeyError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{file} has damaged metadata: {error}") from error
    if (file.parent / "config.json").exists():
        refuse_hub_code(file.parent, model_config(file.parent))
        config = transformers.AutoConfig.from_pretrained(file.parent, local_files_only=True)
    else:
        shapes = {t.name: tuple(int(n) for n in reversed(t.shape)) for t in reader.tensors}
        config = gguf_keys.config_of(file, fields, shapes)
    gguf_keys.check(file, fields, config)
    return config


def outside_experts(file: Path, reader: Any, config: Any, dtype: torch.dtype) -> dict[str, StoredTensor]:
    """{name in Transformers: tensor, a PackedTensor where a kernel decodes its type} of what is no expert.

    Raises CheckpointError for a file that is damaged, and for names that are not known.
    """
    family = FAMILIES.get(config.model_type)
    if family is None or family.gguf is None:
        known = ", ".join(name for name, other in FAMILIES.items() if other.gguf)
        raise CheckpointError(f"{file}: GGUF is read for {known}, but this model is {config.model_type}")
    found = {}
    for tensor in reader.tensors:
        if "_exps." in tensor.name:
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
        found[_name(file, tensor.name)] = _stored(file, tensor, heads, dtype)
    return found


def _name(file: Path, name: str) -> str:
    match = IN_LAYER.fullmatch(name)
    if match and match[2] == SHARED_GATE:
        return f"model.layers.{match[1]}.mlp.shared_expert_gate.weight"
    rest, names = (match[2], gguf_keys.INSIDE) if match else (name, gguf_keys.OUTSIDE)
    for theirs, ours in names.items():
        if rest.startswith(ours):
            full = theirs + rest.removeprefix(ours)
            return f"model.layers.{match[1]}.{full}" if match else full
    raise CheckpointError(f"{file}: {name} has no name in Transformers that is known here")


def _stored(file: Path, tensor: Any, heads: int | None, dtype: torch.dtype) -> StoredTensor:
    from gguf.quants import dequantize

    shape = tuple(int(n) for n in reversed(tensor.shape))
    name = tensor.tensor_type.name.lower()
    if name in GGUF and len(shape) == 2:

        def packed() -> frozen.Quantized:
            # a copy in memory, whatever becomes of the file
            rows = _halves(torch.from_numpy(tensor.data.copy()), heads)
            return frozen.Quantized(name, rows[None])

        return PackedTensor(shape, dtype, packed)
    if tensor.name.endswith(SHARED_GATE):
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
