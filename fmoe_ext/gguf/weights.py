"""A model in a GGUF file: weights outside of the experts, as Transformers has them."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from fmoe_ext import frozen
from fmoe_ext.checkpoint.errors import CheckpointError
from fmoe_ext.checkpoint.methods import PackedTensor
from fmoe_ext.checkpoint.safetensors_file import StoredTensor
from fmoe_ext.gguf.experts import check_factors
from fmoe_ext.gguf.file import GgufFile
from fmoe_ext.gguf.metadata import FREQUENCIES, architecture_of, own_fields
from fmoe_ext.gguf.packings import PIECES, SCALED
from fmoe_ext.gguf.packings import packed as quantized
from fmoe_ext.gguf.transforms import TensorTransform

# What gguf_layers() reads: stacked weights, and factors of those in NVFP4
OF_EXPERTS = re.compile(r"blk\.\d+\.ffn_(gate|up|down|gate_up)_exps\.(weight|scale)")


def outside_experts(
    file: GgufFile, config: Any, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype
) -> dict[str, StoredTensor]:
    """{name in Transformers: tensor, a PackedTensor where a kernel decodes its type} of what is no expert.

    shapes: of the parameters and buffers of the configuration's model. Heads for the tokens after the next are left
    out. Raises CheckpointError for a tensor of the file that the model lacks or has in another shape, and for one that
    is there in part.
    """
    architecture, path = architecture_of(file, config), file.path
    if architecture.model_type != config.model_type:
        raise CheckpointError(
            f"{path}: general.architecture is {file.architecture}, but config.json has {config.model_type}"
        )
    tensors = {tensor.name: tensor for tensor in file.tensors}
    transforms = architecture.tensors(config, shapes)
    taken = {part for transform in transforms.values() for part in transform.parts}
    scales = {}  # {weight outside of the experts: its factor}
    for name, tensor in tensors.items():
        weight = tensors.get(f"{name.removesuffix('scale')}weight") if name.endswith(".scale") else None
        if weight is not None and name not in taken and not OF_EXPERTS.fullmatch(name):
            check_factors(path, tensor, weight.tensor_type.name.lower(), 1)
            scales[weight.name] = tensor
    found, used = {}, {FREQUENCIES, *(factor.name for factor in scales.values())}
    for name, transform in transforms.items():
        parts = [tensors[part] for part in transform.parts if part in tensors]
        own = _own_factors(transform, tensors)
        if own is not None:
            found[name] = StoredTensor(shapes[name], wide_of(dtype), own.to(wide_of(dtype)).clone)
        elif parts and not all(part.name.endswith("_exps.weight") for part in parts):
            for part in transform.parts:
                if part not in tensors:
                    raise CheckpointError(f"{path} lacks {part}")
            factors = [scales[part] for part in transform.parts if part in scales]
            found[name] = _stored(path, parts, transform, factors, dtype)
            used.update(transform.parts)
            if tuple(found[name].shape) != shapes[name]:
                raise CheckpointError(
                    f"{path}: {name} is {list(found[name].shape)} in the file, but {list(shapes[name])} by its metadata"
                )
    is_cut = architecture.num_heads(own_fields(architecture, file.values()))
    for name in tensors.keys() - used:
        # blocks behind the last layer are heads for the tokens after the next
        number = int(name.split(".")[1]) if re.match(r"blk\.\d+\.", name) else -1
        is_head = is_cut and number >= config.num_hidden_layers
        # input_scale: of a setting that rounds inputs
        if not is_head and not name.endswith(".input_scale") and not OF_EXPERTS.fullmatch(name):
            raise CheckpointError(
                f"{path}: {name} has no name in Transformers' {config.model_type} of this configuration"
            )
    return found


def wide_of(dtype: torch.dtype) -> torch.dtype:
    """The dtype of parameters that stay wide in a model of 16 bits."""
    return torch.promote_types(dtype, torch.float32)


def _own_factors(transform: TensorTransform, tensors: Mapping[str, Any]) -> torch.Tensor | None:
    """Ones for a router's factors of experts in NVFP4, whose own factors in the file have them; None for others."""
    scale = transform.parts[0]
    weight = tensors.get(f"{scale.removesuffix('scale')}weight") if scale.endswith("_exps.scale") else None
    if weight is None or weight.tensor_type.name.lower() != SCALED:
        return None
    return torch.ones(int(weight.shape[-1]), device="cpu")


def _stored(
    path: Path, parts: list[Any], transform: TensorTransform, factors: list[Any], dtype: torch.dtype
) -> StoredTensor:
    """Makes a tensor of its parts in the file, read when it is used, and packed if a kernel decodes its type."""
    shapes = [tuple(int(n) for n in reversed(part.shape)) for part in parts]
    try:
        # on the meta device: parts that do not fit are found before values are read
        shape = tuple(transform.read(*(torch.empty(s, device="meta") for s in shapes)).shape)
    except (RuntimeError, IndexError, ValueError) as error:
        raise CheckpointError(
            f"{path}: {', '.join(transform.parts)} do not fit the metadata: {error}"
        ) from error
    kinds = {part.tensor_type.name.lower() for part in parts}
    kind = next(iter(kinds))
    is_packed = transform.has_rows and kinds <= PIECES.keys() and len(kinds) == 1
    if factors and not (is_packed and len(parts) == 1):
        raise CheckpointError(f"{path}: {factors[0].name} scales a weight whose values are rearranged")
    wide = wide_of(dtype)

    def packed() -> frozen.Quantized:
        # a copy in memory, whatever becomes of the file
        rows = transform.read(*(torch.from_numpy(part.data.copy()) for part in parts))
        return quantized(kind, rows, torch.from_numpy(factors[0].data.copy()) if factors else None)

    def read() -> torch.Tensor:
        return transform.read(*(_decoded(path, part) for part in parts)).to(wide)

    if is_packed and all(len(s) == 2 for s in shapes):
        return PackedTensor(shape, dtype, packed)
    return StoredTensor(shape, wide, read)


def _decoded(path: Path, tensor: Any) -> torch.Tensor:
    from gguf.quants import dequantize

    try:
        values = dequantize(tensor.data, tensor.tensor_type)
    except (NotImplementedError, ValueError) as error:
        raise CheckpointError(f"{path}: {tensor.name} cannot be decoded: {error}") from error
    return torch.from_numpy(values.copy())
