"""A model in a GGUF file: weights outside of the experts by name, as Transformers has them."""

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from fmoe_ext import frozen
from fmoe_ext.checkpoint import gguf_keys
from fmoe_ext.checkpoint.errors import CheckpointError
from fmoe_ext.checkpoint.families.family import Family, TensorTransform
from fmoe_ext.checkpoint.gguf_names import in_transformers, names_outside
from fmoe_ext.checkpoint.methods import PackedTensor
from fmoe_ext.checkpoint.safetensors_file import StoredTensor
from fmoe_ext.gguf.experts import check_factors
from fmoe_ext.gguf.packings import PIECES, SCALED
from fmoe_ext.gguf.packings import packed as quantized

IN_LAYER = re.compile(r"blk\.(\d+)\.(.+)")
SHARED_GATE = "ffn_gate_inp_shexp.weight"  # [D] there, [1, D] in Transformers
BIAS = "exp_probs_b.bias"  # [E] there
LATENT = ("attn_k_b.weight", "attn_v_b.weight")  # [heads, rank, nope] and [heads, v, rank]
# A tensor of a layer's experts; scales are factors of their weights, which gguf_layers() reads
OF_EXPERTS = re.compile(r"ffn_(gate|up|down|gate_up)_exps\.(weight|bias|scale)")
INPUT_SCALE = ".input_scale"
FREQUENCIES = "rope_freqs.weight"
ROTATED = re.compile(r"blk\.\d+\.attn_([qk])\.(weight|bias)")


def usual_dtype(reader: Any) -> torch.dtype:
    """The dtype of most bytes of an open GGUF file; packed ones count as bfloat16."""
    counts: Counter[torch.dtype] = Counter({torch.bfloat16: 0})
    for tensor in reader.tensors:
        counts[_FLOATS.get(tensor.tensor_type.name, torch.bfloat16)] += int(tensor.n_bytes)
    return max(counts, key=lambda dtype: counts[dtype])


_FLOATS = MappingProxyType({"F64": torch.float64, "F32": torch.float32, "F16": torch.float16})


def outside_experts(file: Path, reader: Any, config: Any, dtype: torch.dtype) -> dict[str, StoredTensor]:
    """{name in Transformers: tensor, a PackedTensor where a kernel decodes its type} of what is no expert.

    Heads for the tokens after the next are left out. Raises CheckpointError for a file that is damaged, and for names
    that are not known.
    """
    wide = torch.promote_types(dtype, torch.float32)  # of parameters that stay so in a model of 16 bits
    fields = reader.values()
    family = gguf_keys.family_of(file, fields, config)
    if family.name != config.model_type:
        raise CheckpointError(
            f"{file}: general.architecture is {fields['general.architecture']}, but config.json has {config.model_type}"
        )
    assert family.gguf is not None
    scales = _scales(file, reader, family)
    # blocks behind the last layer are heads for the tokens after the next
    last = config.num_hidden_layers if gguf_keys.num_heads(fields, family) else None
    found = {}
    groups: dict[str, dict[int, dict[str, Any]]] = {"biases": {}, "latent": {}, "turned": {}}
    _check_factors(file, reader, family, config)
    for tensor in _outside(reader, last, scales, family):
        match = IN_LAYER.fullmatch(tensor.name)
        group = match and _group_of(match[2], family, tensor.name in scales)
        if match and group:
            groups[group].setdefault(int(match[1]), {})[match[2]] = tensor
            continue
        name = _name(file, tensor.name, family)
        if family.gguf.added and name.endswith(family.gguf.added):
            found[name] = _less_one(file, tensor, wide)
        else:
            heads = None
            if family.gguf.turns_pairs and (rotated := ROTATED.fullmatch(tensor.name)):
                is_query = rotated[1] == "q"
                heads = int(config.num_attention_heads if is_query else config.num_key_value_heads)
            found[name] = _stored(file, tensor, heads, dtype, family, scales.get(tensor.name))
    for number, parts in groups["biases"].items():
        found |= _biases(file, number, parts, family, wide)
    for number, parts in groups["turned"].items():
        for transform in family.gguf.turned:
            if any(name in parts for name in transform.parts):
                name = f"model.layers.{number}.{transform.name}"
                found[name] = _of_parts(file, number, transform, parts, config, dtype)
    for number, halves in groups["latent"].items():
        name = f"model.layers.{number}.self_attn.kv_b_proj.weight"
        found[name] = _joined(file, number, [halves.get(half) for half in LATENT], wide)
    return {**_ones(reader, family, wide), **found}


def _ones(reader: Any, family: Family, dtype: torch.dtype) -> dict[str, StoredTensor]:
    """The router's factors of experts in NVFP4, whose own factors in the file have them."""
    scales = family.in_modules.gate_scales
    found: dict[str, StoredTensor] = {}
    if scales is None:
        return found
    for tensor in reader.tensors:
        match = IN_LAYER.fullmatch(tensor.name)
        if match and match[2] == "ffn_down_exps.weight" and tensor.tensor_type.name.lower() == SCALED:
            ones = torch.ones(int(tensor.shape[-1]), dtype=dtype, device="cpu")
            name = f"model.layers.{match[1]}.{scales[1]}"
            found[name] = StoredTensor(tuple(ones.shape), dtype, ones.clone)
    return found


def frequency_factors(reader: Any) -> torch.Tensor | None:
    """The factors of the rotary frequencies in a file; None without."""
    found = next((tensor for tensor in reader.tensors if tensor.name == FREQUENCIES), None)
    return None if found is None else torch.from_numpy(found.data.copy())


def _check_factors(file: Path, reader: Any, family: Family, config: Any) -> None:
    """CheckpointError for factors of frequencies with which the model is not computed."""
    assert family.gguf is not None
    found = frequency_factors(reader)
    expected = family.gguf.factors(config) if family.gguf.factors else None
    if expected is None:
        if found is not None and (found != 1).any():
            raise CheckpointError(f"{file}: {FREQUENCIES} scales frequencies, which is not computed here")
    elif found is None:
        raise CheckpointError(f"{file} lacks {FREQUENCIES}")
    elif not torch.equal(found, expected):
        raise CheckpointError(
            f"{file}: {FREQUENCIES} is {found.tolist()[:8]}, but the model is computed with {expected.tolist()[:8]}"
        )


def _outside(reader: Any, last: int | None, scales: Mapping[str, Any], family: Family) -> Iterator[Any]:
    """The tensors that become some of Transformers' outside of the experts' weights, up to layer `last`."""
    assert family.gguf is not None
    left_out = {FREQUENCIES, *(factor.name for factor in scales.values())}
    weights = {tensor.name: tensor for tensor in reader.tensors}
    for tensor in reader.tensors:
        match = IN_LAYER.fullmatch(tensor.name)
        if tensor.name in left_out or (match and last is not None and int(match[1]) >= last):
            continue
        if tensor.name.endswith(INPUT_SCALE):  # of a setting that rounds inputs
            continue
        experts = match and OF_EXPERTS.fullmatch(match[2])
        of_router = match and match[2] in family.gguf.names.values()  # factors that belong to the router
        if of_router and experts:
            scaled = weights.get(f"{tensor.name.removesuffix('scale')}weight")
            of_router = scaled is None or scaled.tensor_type.name.lower() != SCALED
        if experts and experts[2] != "bias" and not of_router:
            continue
        yield tensor


def _group_of(name: str, family: Family, is_scaled: bool) -> str | None:
    """Name of the group in which a tensor of a layer is put together with others; None for one that stands alone."""
    assert family.gguf is not None
    experts = OF_EXPERTS.fullmatch(name)
    if experts and experts[2] == "bias":
        return "biases"
    if family.gguf.is_latent and name in LATENT:
        return "latent"
    is_turned = any(name in tensor.parts for tensor in family.gguf.turned)
    return "turned" if is_turned and not is_scaled else None


def _name(file: Path, name: str, family: Family) -> str:
    match = IN_LAYER.fullmatch(name)
    full = None
    if match:
        inside = in_transformers(match[2], family)
        full = inside and f"model.layers.{match[1]}.{inside}"
    else:
        for theirs, ours in names_outside(family).items():
            if name.startswith(ours):
                full = theirs + name.removeprefix(ours)
    if full is None:
        raise CheckpointError(f"{file}: {name} has no name in Transformers that is known here")
    return full


def _scales(file: Path, reader: Any, family: Family) -> dict[str, Any]:
    """{name of a weight outside of the experts: its factor}."""
    assert family.gguf is not None
    own = {*family.gguf.names.values()}
    names = {tensor.name: tensor for tensor in reader.tensors}
    found = {}
    for tensor in reader.tensors:
        weight = names.get(f"{tensor.name.removesuffix('scale')}weight")
        if tensor.name.split(".", 2)[-1] in own:
            continue
        if tensor.name.endswith(".scale") and weight is not None and "_exps." not in tensor.name:
            check_factors(file, tensor, weight.tensor_type.name.lower(), 1)
            found[weight.name] = tensor
    return found


def _stored(
    file: Path, tensor: Any, heads: int | None, dtype: torch.dtype, family: Family, factor: Any
) -> StoredTensor:
    shape = tuple(int(n) for n in reversed(tensor.shape))
    name = tensor.tensor_type.name.lower()
    if name in PIECES and len(shape) == 2:

        def packed() -> frozen.Quantized:
            # a copy in memory, whatever becomes of the file
            rows = _halves(torch.from_numpy(tensor.data.copy()), heads)
            return quantized(name, rows, None if factor is None else torch.from_numpy(factor.data.copy()))

        return PackedTensor(shape, dtype, packed)
    is_row = family.in_modules.bias_is_row and tensor.name.endswith(BIAS)
    if is_row or tensor.name.endswith(SHARED_GATE):
        shape = (1, shape[-1])  # files have it with that one row and without

    wide = torch.promote_types(dtype, torch.float32)

    def read() -> torch.Tensor:
        return _halves(_decoded(file, tensor, wide).reshape(shape), heads)

    return StoredTensor(shape, wide, read)


def _decoded(file: Path, tensor: Any, dtype: torch.dtype) -> torch.Tensor:
    from gguf.quants import dequantize

    try:
        values = dequantize(tensor.data, tensor.tensor_type)
    except (NotImplementedError, ValueError) as error:
        raise CheckpointError(f"{file}: {tensor.name} cannot be decoded: {error}") from error
    return torch.from_numpy(values.copy()).to(dtype)


def _biases(
    file: Path, number: int, parts: Mapping[str, Any], family: Family, dtype: torch.dtype
) -> dict[str, StoredTensor]:
    """{name in Transformers: tensor} of the biases of a layer's experts, gate and up in turn."""
    prefix = f"model.layers.{number}.{family.in_modules.block}.experts."
    names = {role: f"ffn_{role}_exps.bias" for role in ("gate", "up", "down")}
    for name in names.values():
        if name not in parts:
            raise CheckpointError(f"{file} lacks blk.{number}.{name}")
    tensors = {role: parts[name] for role, name in names.items()}
    shapes = {role: tuple(int(n) for n in reversed(tensor.shape)) for role, tensor in tensors.items()}
    if len({shapes["gate"], shapes["up"]}) > 1 or any(len(shape) != 2 for shape in shapes.values()):
        raise CheckpointError(f"{file}: the biases of the experts of layer {number} are {shapes}")

    def joined() -> torch.Tensor:
        pair = [_decoded(file, tensors[role], dtype) for role in ("gate", "up")]
        return torch.stack(pair, -1).flatten(1) if family.in_modules.interleaved else torch.cat(pair, 1)

    num_experts, width = shapes["up"]
    return {
        f"{prefix}gate_up_proj_bias": StoredTensor((num_experts, 2 * width), dtype, joined),
        f"{prefix}down_proj_bias": StoredTensor(
            shapes["down"], dtype, lambda: _decoded(file, tensors["down"], dtype)
        ),
    }


def _less_one(file: Path, tensor: Any, dtype: torch.dtype) -> StoredTensor:
    """A norm to which the file adds 1."""

    def read() -> torch.Tensor:
        return (_decoded(file, tensor, torch.float32) - 1).to(dtype)

    return StoredTensor(tuple(int(n) for n in reversed(tensor.shape)), dtype, read)


def _of_parts(
    file: Path,
    number: int,
    transform: TensorTransform,
    parts: Mapping[str, Any],
    config: Any,
    dtype: torch.dtype,
) -> StoredTensor:
    """Computes a layer's tensor from its parts in the file."""
    for name in transform.parts:
        if name not in parts:
            raise CheckpointError(f"{file} lacks blk.{number}.{name}")
    tensors = [parts[name] for name in transform.parts]
    try:
        shapes = [tuple(int(n) for n in reversed(tensor.shape)) for tensor in tensors]
        # on the meta device: parts that do not fit are found before values are read
        shape = tuple(transform.read(config, *(torch.empty(s, device="meta") for s in shapes)).shape)
    except (RuntimeError, IndexError, ValueError) as error:
        raise CheckpointError(
            f"{file}: {', '.join(transform.parts)} of layer {number} do not fit the metadata: {error}"
        ) from error
    kinds = {tensor.tensor_type.name.lower() for tensor in tensors}
    kind = next(iter(kinds))

    wide = torch.promote_types(dtype, torch.float32)

    def read() -> torch.Tensor:
        return transform.read(config, *(_decoded(file, tensor, torch.float32) for tensor in tensors)).to(wide)

    def packed() -> frozen.Quantized:
        rows = (torch.from_numpy(tensor.data.copy()) for tensor in tensors)
        return quantized(kind, transform.read(config, *rows), None)

    if transform.has_rows and len(kinds) == 1 and kind in PIECES:
        return PackedTensor(shape, dtype, packed)
    return StoredTensor(shape, wide, read)


def _joined(file: Path, number: int, halves: list[Any], dtype: torch.dtype) -> StoredTensor:
    """The projection [heads * (nope + v), rank] that widens latent keys and values, of its two halves in a file."""
    for name, half in zip(LATENT, halves, strict=True):
        if half is None:
            raise CheckpointError(f"{file} lacks blk.{number}.{name}")
    (nope, rank, heads), (of_values, width, others) = (list(map(int, half.shape)) for half in halves)
    if (rank, heads) != (of_values, others):
        raise CheckpointError(f"{file}: {LATENT[0]} and {LATENT[1]} of layer {number} do not fit each other")

    def read() -> torch.Tensor:
        keys, values = (_decoded(file, half, dtype) for half in halves)
        return torch.cat([keys.transpose(1, 2), values], 1).flatten(0, 1)

    return StoredTensor((heads * (nope + width), rank), dtype, read)


def _halves(rows: torch.Tensor, heads: int | None) -> torch.Tensor:
    """Rows of a head with neighbours rotated, as llama.cpp has them, in Transformers' order: halves rotated."""
    return rows if heads is None else rows.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)
