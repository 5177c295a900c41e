"""Write GGUF, the file of llama.cpp, for models that have an architecture there: write_gguf().

llama.cpp computes a model by a graph that is fixed for each architecture. What a configuration says beyond that graph's
keys would be ignored in silence, so check_writable() refuses it by name. Tensors differ from Transformers' in name and
layout (transforms.py). Each is a StoredTensor that is read, rearranged and perhaps packed when it is written: memory
holds one tensor, or of a packed weight one expert in float32 and the packed bytes of all.
"""

import itertools
import math
from collections import Counter
from collections.abc import Container, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from fmoe_ext import frozen
from fmoe_ext.checkpoint.errors import CheckpointError
from fmoe_ext.checkpoint.files import explained
from fmoe_ext.checkpoint.safetensors_file import StoredTensor
from fmoe_ext.frozen.quantized import FITTED
from fmoe_ext.gguf.architecture import NEXTN, Architecture, first_layer
from fmoe_ext.gguf.architectures import ARCHITECTURES
from fmoe_ext.gguf.metadata import FREQUENCIES, architecture_for
from fmoe_ext.gguf.packings import SCALED, rows_of
from fmoe_ext.gguf.transforms import TensorTransform
from fmoe_ext.gguf.vocabulary import Vocabulary

_CONVOLUTIONS = (".ssm_conv1d.weight", ".shortconv.conv.weight")
_NAMES = MappingProxyType({torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"})
# {packing that is written: llama.cpp's name for files that have most weights in it}
PACKED = MappingProxyType(
    {"q4_k": "MOSTLY_Q4_K_S", "q8_0": "MOSTLY_Q8_0", "mxfp4": "MOSTLY_MXFP4_MOE", "nvfp4": "MOSTLY_NVFP4"}
)
_WIDER = "q8_0"  # for rows that are no whole blocks of another packing, as llama.cpp's own tool does
_NOTHING: Mapping[str, str] = MappingProxyType({})
_NO_TENSORS: Mapping[str, torch.Tensor] = MappingProxyType({})


def check_writable(config: Any) -> Architecture:
    """Find a configuration's architecture; CheckpointError, by name, for what llama.cpp would compute otherwise."""
    _import_gguf()
    architecture = architecture_for(config.model_type)
    if architecture is None:
        known = ", ".join(sorted(kind.model_type for kind in ARCHITECTURES))
        raise CheckpointError(
            f"gguf is written for {known}, but this model is {config.model_type}: export it as that, then run "
            "llama.cpp's convert_hf_to_gguf.py on the folder"
        )
    for name, is_wrong in architecture.refused(config).items():
        if is_wrong:
            value = getattr(first_layer(config), name, None)
            raise CheckpointError(
                f"{name}={value} has no place in GGUF's {architecture.name}: llama.cpp's graph for it computes another "
                "model"
            )
    return architecture


def write_gguf(
    path: Path,
    tensors: Mapping[str, StoredTensor],
    config: Any,
    vocabulary: Vocabulary | None = None,
    packings: Mapping[str, str] = _NOTHING,
    num_heads: int = 0,
    importance: Mapping[str, torch.Tensor] = _NO_TENSORS,
) -> dict[str, int]:
    """Write a model, under the names of Transformers' modules, to one file, a tensor at a time -> {type: how many}.

    path: a file that does not exist. vocabulary: None for a file that takes token ids alone. packings: {name in
    Transformers: a name in PACKED} of weights to round to the nearest values; experts are read by their parts().
    importance: {name in Transformers: how much the errors of values count}, float that broadcasts to the weight.
    num_heads: layers behind those of the configuration that are heads for the tokens after the next.
    float64 becomes float32. Raises CheckpointError for what llama.cpp has no place for.
    """
    gguf = _import_gguf()
    float32 = gguf.GGMLQuantizationType.F32
    architecture = check_writable(config)
    if older := {packing.upper() for packing in packings.values()} - {*gguf.GGMLQuantizationType.__members__}:
        raise CheckpointError(
            f"the installed package gguf has no type {min(older)}: pip install -U gguf (0.19 has it)"
        )
    # Names, shapes and types of all tensors come first, because the header has them
    named = _parts(tensors, architecture, config, packings, importance)
    types = {name: _type_of(name, tensor, packing, named) for name, (tensor, packing, _) in named.items()}
    # The header with all metadata, then the descriptions of all tensors, then their values in the same order
    writer = gguf.GGUFWriter(path, architecture.name)
    try:
        with explained(path, sum(tensor.num_bytes for tensor, *_ in named.values())):
            write_facts(writer, config, architecture, num_heads)
            if packings:
                writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
                most = max(packings.values(), key=[*packings.values()].count)
                writer.add_file_type(gguf.LlamaFileType[PACKED[most]])
            if vocabulary is None:
                writer.add_tokenizer_model("no_vocab")
            else:
                vocabulary.write(writer)
            for name, (tensor, *_) in named.items():
                kind = gguf.GGMLQuantizationType[types[name]]
                block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
                num_bytes = math.prod(tensor.shape) // block * block_bytes
                writer.add_tensor_info(name, tensor.shape, None, num_bytes, kind)
                if types[name].lower() == SCALED:
                    count = tensor.shape[0] if len(tensor.shape) == 3 else 1
                    writer.add_tensor_info(_factors_of(name), (count,), None, 4 * count, float32)
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()
            for name, (tensor, _, weighs) in named.items():
                for values in _values(tensor, types[name].lower(), weighs):
                    writer.write_tensor_data(values.cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    finally:
        with suppress(OSError):  # close() flushes: a full disk, which has raised already, would raise again
            writer.close()
    return dict(Counter(name.lower() for name in types.values()))


def _type_of(name: str, tensor: StoredTensor, packing: str | None, named: Container[str]) -> str:
    """Return the name of GGUF's type for a tensor."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    is_vector = len(tensor.shape) < 2 or 1 in tensor.shape or name.endswith(_CONVOLUTIONS)
    # llama.cpp computes with vectors, gates, norms and biases in float32, and has no float64
    if is_vector or ".ffn_gate_inp" in name or name.endswith((".bias", "_norm.weight")):
        return "F32"
    for wanted in (packing, _WIDER) if packing else ():
        # NVFP4 needs the name of a factor: Gemma 4's router has it already, and llama.cpp's halves of kv_b have none
        is_free = _factors_of(name) not in named and (len(tensor.shape) == 2 or "_exps." in name)
        block = GGML_QUANT_SIZES[GGMLQuantizationType[wanted.upper()]][0]
        if (is_free or wanted != SCALED) and tensor.shape[-1] % block == 0:
            return wanted.upper()
    return _NAMES.get(tensor.dtype, "F32")


def _factors_of(name: str) -> str:
    """Return the name of the factors beside a weight in NVFP4."""
    return f"{name.removesuffix('weight')}scale"


def _values(tensor: StoredTensor, kind: str, weighs: StoredTensor | None = None) -> Iterator[torch.Tensor]:
    """Yield a tensor's values as the file has them in a type, then the factors of NVFP4; packs an expert at a time.

    weighs: the importance of its values, of the same shape.
    """
    if kind not in PACKED:
        dtype = next(dtype for dtype, name in _NAMES.items() if name.lower() == kind)
        yield tensor.read().to(dtype)
        return
    # A packed weight: its experts one by one, then all rows, then the factors of NVFP4
    rows, factors = [], []
    by = itertools.repeat(None) if weighs is None or kind not in FITTED else weighs.parts()
    for part in tensor.parts():
        of_part = next(by)
        rank = (None,) * (3 - part.dim())  # [out, in] as the weight [1, out, in] of one expert
        packed = frozen.quantize(part[rank], kind, None if of_part is None else of_part[rank])
        rows.append(rows_of(packed))
        if packed.zero is not None:
            factors.append(packed.zero[:, 0, 0])
    yield torch.cat(rows)
    if factors:
        yield torch.cat(factors)


def write_facts(writer: Any, config: Any, architecture: Architecture, num_heads: int = 0) -> None:
    """Add a configuration's metadata to a GGUFWriter, each key in the type of its value."""
    writer.add_name((config.architectures or [config.model_type])[0])
    add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    add[list] = writer.add_array
    fields = architecture.fields(config)
    if num_heads:
        # lists with an item a layer (glm-dsa has some) stay as they are: llama.cpp wants no items for heads
        fields |= {"block_count": fields["block_count"] + num_heads, NEXTN: num_heads}
    for key, value in fields.items():
        add[type(value)](f"{architecture.name}.{key}", value)


def _in_file(
    source: StoredTensor, transform: TensorTransform, i: int, shape: tuple[int, ...]
) -> StoredTensor:
    """Return part i of a tensor as the file has it; stacked experts have parts() of one expert each."""
    # Each part reads the tensor again: if it was kept, it would stay in memory until the last part is written
    read = lambda: transform.write(source.read())[i]  # noqa: E731
    parts = None
    if "_exps." in transform.parts[i]:  # transforms of experts work on one expert [1, *] as on all
        parts = lambda: (transform.write(one)[i] for one in source.parts())  # noqa: E731
    return StoredTensor(shape, source.dtype, read, parts=parts)


def _parts(
    tensors: Mapping[str, StoredTensor],
    architecture: Architecture,
    config: Any,
    packings: Mapping[str, str],
    importance: Mapping[str, torch.Tensor],
) -> dict[str, tuple[StoredTensor, str | None, StoredTensor | None]]:
    """Return {name in the file: (tensor, its packing, importance of its values)} of a model's tensors."""
    named: dict[str, tuple[StoredTensor, str | None, StoredTensor | None]] = {}
    for name, transform in architecture.tensors(config, tensors).items():
        tensor = tensors[name]
        shapes = [part.shape for part in transform.write(torch.empty(tensor.shape, device="meta"))]
        weighs = None
        if name in importance:  # it is rearranged like the values, an expert at a time
            spread = importance[name].expand(tensor.shape)
            read, parts = lambda s=spread: s, lambda s=spread: iter(s.split(1))
            weighs = StoredTensor(tensor.shape, spread.dtype, read, parts=parts)
        for i, (part, shape) in enumerate(zip(transform.parts, shapes, strict=True)):
            named[part] = (
                _in_file(tensor, transform, i, tuple(shape)),
                packings.get(name),
                None if weighs is None else _in_file(weighs, transform, i, tuple(shape)),
            )
    # Some architectures have a tensor that no parameter stands for
    factors = architecture.rope_factors(config)
    if factors is not None:
        named[FREQUENCIES] = StoredTensor(tuple(factors.shape), torch.float32, lambda: factors), None, None
    return named


def _import_gguf() -> Any:
    try:
        import gguf
    except ImportError as error:
        raise CheckpointError(f"format='gguf' needs the package gguf ({error}): pip install gguf") from error
    return gguf
