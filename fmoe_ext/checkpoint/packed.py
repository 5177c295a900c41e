"""Experts in packed formats, as published files name them."""

from collections.abc import Container, Iterator

import torch

from fmoe_ext import frozen
from fmoe_ext.checkpoint.errors import CheckpointError
from fmoe_ext.checkpoint.expert_files import Layer, Part, part_of
from fmoe_ext.checkpoint.families import FAMILIES
from fmoe_ext.checkpoint.layouts import BLOCKS
from fmoe_ext.checkpoint.methods import Decoded, Matrix, PackedTensor, kind_of
from fmoe_ext.checkpoint.model_folder import FLOATS, ModelFolder
from fmoe_ext.checkpoint.safetensors_file import StoredTensor

INTEGERS = (torch.int64, torch.int32, torch.bool)  # of buffers


def outside_experts(
    base: ModelFolder, used: Container[str], dtype: torch.dtype
) -> Iterator[tuple[str, StoredTensor]]:
    """(name, tensor) of what is left of a folder beside `used`; packed weights are read decoded to dtype.

    Those of methods.KINDS whose rows are packed one by one are a PackedTensor. Raises CheckpointError for
    formats that are not decoded.
    """
    kind = kind_of(base)
    for name, tensor in base.tensors.items():
        if name in used:
            continue
        stem = None if kind is None else kind.stem_of(name)
        if kind is not None and stem is not None and kind.has(base, stem):
            yield kind.plain_name(name), _decoded_matrix(base, kind.matrix(base, stem), dtype)
        elif kind is not None and kind.is_beside(name):
            continue
        elif tensor.dtype in FLOATS or (tensor.dtype in INTEGERS and ".weight" not in name):
            yield name, tensor
        else:
            raise CheckpointError(
                f"{base.folder}: {name} is {tensor.dtype}, packed in a format that is not decoded here: dequantise the "
                "model to bfloat16 first"
            )


def _decoded_matrix(base: ModelFolder, matrix: Matrix | Decoded, dtype: torch.dtype) -> StoredTensor:
    tensors = base.tensors  # of now: checkpoint.packed.decode() gives the base others
    if isinstance(matrix, Matrix) and matrix.has_rows:
        return PackedTensor(matrix.shape, dtype, lambda: matrix.packed(tensors))
    return StoredTensor(matrix.shape, dtype, lambda: matrix.decode(tensors, dtype))


STACKED = ("experts.gate_up_proj", "experts.down_proj")


def prefixes(path: str) -> Iterator[str]:
    """Prefixes that tensors of the experts module at a path may have in files."""
    stem, _, block = path.removesuffix(".experts").rpartition(".")
    for name in dict.fromkeys((block, *BLOCKS)):
        yield f"{stem}.{name}." if stem else f"{name}."


def mxfp4_layer(base: ModelFolder, path: str) -> tuple[Layer, set[str]] | None:
    """The layer of MXFP4 experts: <name>_blocks [E, out, in / 32, 16] and <name>_scales [E, out, in / 32] in uint8.

    None if the folder has no such blocks. Raises CheckpointError for scales that are missing or do not fit.
    """
    prefix = next((p for p in prefixes(path) if f"{p}{STACKED[0]}_blocks" in base.tensors), None)
    if prefix is None:
        return None
    parts: dict[str, Part] = {}
    used = set()
    shapes = []
    for weight, stacked in zip(("w1", "w2"), STACKED, strict=True):
        blocks, scales = (f"{prefix}{stacked}_{kind}" for kind in ("blocks", "scales"))
        for name in (blocks, scales):
            if name not in base.tensors:
                raise CheckpointError(f"{base.folder} lacks {name}")
        shape = base.tensors[blocks].shape
        if len(shape) != 4 or shape[3] != 16 or base.tensors[scales].shape != shape[:3]:
            raise CheckpointError(
                f"{base.folder}: {blocks} {list(shape)} and {scales} {list(base.tensors[scales].shape)} do not fit: "
                "expected [E, out, in / 32, 16] and [E, out, in / 32]"
            )
        for part, name in (("data", blocks), ("scale", scales)):
            parts[f"{weight}.{part}"] = part_of(base, base.tensors[name].shape[1:], [[name]] * shape[0])
            used.add(name)
        shapes.append((shape[0], shape[1], shape[2] * 32))
    interleaved = f"{prefix}{STACKED[0]}_bias" in base.tensors

    def build(tensors: dict[str, object]) -> tuple[frozen.Quantized, frozen.Quantized]:
        return (
            frozen.Quantized("mxfp4", tensors["w1.data"], tensors["w1.scale"], None, interleaved),  # type: ignore[arg-type]
            frozen.Quantized("mxfp4", tensors["w2.data"], tensors["w2.scale"]),  # type: ignore[arg-type]
        )

    return Layer(path, (shapes[0], shapes[1]), parts, build), used  # type: ignore[arg-type]


def decode(base: ModelFolder) -> None:
    """Puts the values of packed experts, in bfloat16 and under the names of a plain model, in their place in a base.

    They are decoded when they are read, an expert at a time. base.packed names their format.
    """
    family = FAMILIES.get(str(base.config.get("model_type", "")))
    turned = family is not None and family.files.interleaved
    for name in [name for name in base.tensors if name.endswith("_blocks")]:
        stem = name.removesuffix("_blocks")
        data, scale = base.tensors.pop(name), base.tensors.pop(f"{stem}_scales", None)
        if scale is None:
            raise CheckpointError(f"{base.folder} lacks {stem}_scales")
        base.tensors[stem] = _decoded_mxfp4(data, scale, turned)
        for names in base.files.values():
            if f"{stem}_scales" in names:
                names.remove(f"{stem}_scales")
            if name in names:
                names[names.index(name)] = stem
        base.packed = "mxfp4"
    kind = kind_of(base)
    if kind is not None:
        left = dict(outside_experts(base, (), torch.bfloat16))
        for names in base.files.values():
            # the scales of a weight may be in another file than the weight itself
            names[:] = [n for n in (kind.plain_name(name) for name in names) if n in left]
        base.tensors = left
        base.packed = base.quantization["quant_method"]
    if base.packed:
        base.config = {key: value for key, value in base.config.items() if key != "quantization_config"}
        base.quantization = {}


def _decoded_mxfp4(data: StoredTensor, scale: StoredTensor, turned: bool) -> StoredTensor:
    E, out, blocks = scale.shape
    shape = (E, blocks * 32, out) if turned else (E, out, blocks * 32)

    def rows(first: int, end: int) -> torch.Tensor:
        packed = frozen.Quantized("mxfp4", data.rows(first, end), scale.rows(first, end))
        weight = packed.dequantize(torch.bfloat16)
        return weight.mT.contiguous() if turned else weight

    def parts() -> Iterator[torch.Tensor]:
        return (rows(e, e + 1) for e in range(E))

    return StoredTensor(shape, torch.bfloat16, lambda: rows(0, E), rows, parts)
