"""Writes GGUF, the file of llama.cpp: models that have an architecture there, in its names.

llama.cpp computes a model by a graph that is fixed for each architecture: what a configuration says beyond the keys of
that graph would be ignored in silence, so check_writable() refuses it by name. Tensors differ from Transformers' in
name and layout (transforms.py). Each is a StoredTensor that is read and rearranged when it is written, so that memory
holds one at a time.
"""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from fmoe_ext.checkpoint.errors import CheckpointError
from fmoe_ext.checkpoint.files import explained
from fmoe_ext.checkpoint.safetensors_file import StoredTensor
from fmoe_ext.gguf.architecture import Architecture, first_layer
from fmoe_ext.gguf.architectures import ARCHITECTURES
from fmoe_ext.gguf.metadata import FREQUENCIES, architecture_for
from fmoe_ext.gguf.vocabulary import Vocabulary

DOWNLOAD = "pip install gguf"
CONVOLUTIONS = (".ssm_conv1d.weight", ".shortconv.conv.weight")
_NAMES = MappingProxyType({torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"})


def check_writable(config: Any) -> Architecture:
    """Finds the architecture of a configuration; CheckpointError, by name, for what llama.cpp computes otherwise."""
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
    path: Path, tensors: Mapping[str, StoredTensor], config: Any, vocabulary: Vocabulary | None = None
) -> None:
    """Writes a model in Transformers' names in memory to one file, a tensor at a time; float64 becomes float32.

    path: a file that does not exist. vocabulary: None for a file that takes token ids alone. Raises CheckpointError for
    what llama.cpp has no place for.
    """
    gguf = _import_gguf()
    architecture = check_writable(config)
    named = dict(_parts(tensors, architecture, config))
    writer = gguf.GGUFWriter(path, architecture.name)
    types = {}
    for name, tensor in named.items():
        is_vector = len(tensor.shape) < 2 or 1 in tensor.shape or name.endswith(CONVOLUTIONS)
        # llama.cpp computes with vectors and gates in float32, and has no float64
        is_float32 = is_vector or ".ffn_gate_inp" in name or tensor.dtype not in _NAMES
        types[name] = torch.float32 if is_float32 else tensor.dtype
    try:
        with explained(path, sum(tensor.num_bytes for tensor in named.values())):
            write_facts(writer, config, architecture)
            if vocabulary is None:
                writer.add_tokenizer_model("no_vocab")
            else:
                vocabulary.write(writer)
            for name, tensor in named.items():
                dtype = types[name]
                num_bytes = tensor.num_bytes // tensor.dtype.itemsize * dtype.itemsize
                kind = getattr(gguf.GGMLQuantizationType, _NAMES[dtype])
                writer.add_tensor_info(name, tensor.shape, None, num_bytes, kind)
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()
            for name, tensor in named.items():
                value = tensor.read().to(types[name]).cpu().contiguous()
                writer.write_tensor_data(value.reshape(-1).view(torch.uint8).numpy())
    finally:
        with suppress(OSError):  # of buffers that a full disk did not take, which has been said
            writer.close()


def write_facts(writer: Any, config: Any, architecture: Architecture) -> None:
    """Adds to a GGUFWriter what llama.cpp needs to know of a model beside its tensors."""
    writer.add_name(config.architectures[0])
    add = {
        bool: writer.add_bool,
        int: writer.add_uint32,
        float: writer.add_float32,
        str: writer.add_string,
        list: writer.add_array,
    }
    for key, value in architecture.fields(config).items():
        add[type(value)](f"{architecture.name}.{key}", value)


def _parts(
    tensors: Mapping[str, StoredTensor], architecture: Architecture, config: Any
) -> Iterator[tuple[str, StoredTensor]]:
    """(name in the file, tensor) of a model's tensors."""
    for name, transform in architecture.tensors(config, tensors).items():
        tensor = tensors[name]
        shapes = [part.shape for part in transform.write(torch.empty(tensor.shape, device="meta"))]
        for i, (part, shape) in enumerate(zip(transform.parts, shapes, strict=True)):
            # each part reads the tensor again: kept, it would stay in memory until the last part is written
            read = lambda tensor=tensor, write=transform.write, i=i: write(tensor.read())[i]  # noqa: E731
            yield part, StoredTensor(tuple(shape), tensor.dtype, read)
    factors = architecture.factors(config)
    if factors is not None:
        yield FREQUENCIES, StoredTensor(tuple(factors.shape), torch.float32, lambda: factors)


def _import_gguf() -> Any:
    try:
        import gguf
    except ImportError as error:
        raise CheckpointError(f"format='gguf' needs the package gguf ({error}): {DOWNLOAD}") from error
    return gguf
