"""Writes GGUF, the file of llama.cpp: families that have an architecture there, in its names, without a vocabulary.

llama.cpp computes a model by a graph that is fixed for each architecture: what a configuration says beyond the keys of
that graph would be ignored in silence, so check_writable() refuses it by name. Tensors differ from Transformers' in
name and layout: gate and up of experts apart, rows of q and k in the order of another rotation, norms with their 1
added. Each is a StoredTensor that is read and rearranged when it is written, so that memory holds one at a time.
"""

import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from fmoe_ext.checkpoint import CheckpointError
from fmoe_ext.checkpoint.families import FAMILIES
from fmoe_ext.checkpoint.families.family import Family, Gguf, Layout, TensorTransform
from fmoe_ext.checkpoint.files import explained
from fmoe_ext.checkpoint.gguf_facts import facts, first_layer, rope_of
from fmoe_ext.checkpoint.gguf_names import names_inside, names_outside
from fmoe_ext.checkpoint.layouts import by_rows
from fmoe_ext.checkpoint.safetensors_file import StoredTensor

DOWNLOAD = "pip install gguf"

CONVOLUTIONS = (".ssm_conv1d.weight", ".shortconv.conv.weight")
LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")
ROTATED = re.compile(r"blk\.\d+\.attn_([qk])\.weight")
_NAMES = MappingProxyType({torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"})


def check_writable(family: Family, config: Any) -> Gguf:
    """Finds the architecture of a model; CheckpointError, by name, for what llama.cpp computes otherwise."""
    _import_gguf()
    architecture = family.gguf
    if architecture is None:
        known = ", ".join(name for name, other in FAMILIES.items() if other.gguf)
        raise CheckpointError(
            f"gguf is written for {known}, but this model is {family.name}: export it as that, then run "
            "llama.cpp's convert_hf_to_gguf.py on the folder"
        )
    whole, config = config, first_layer(config)
    routing = family.facts_of(config.to_dict())
    is_fixed = (
        not architecture.says_routing
    )  # the graph normalizes the weights or does not, whatever a key says
    mlp_kinds = getattr(config, "mlp_layer_types", None) or ()
    rope = rope_of(config)
    rope_kind = rope.get("rope_type", "default")
    window = getattr(config, "sliding_window", None)
    if "attention.sliding_window" in architecture.keys:
        is_window_lost = window is None  # the graph has one in any case
    else:
        kinds = getattr(config, "layer_types", None) or ()
        is_used = window and getattr(config, "use_sliding_window", True)
        is_window_lost = bool(is_used and set(kinds) != {"full_attention"})
    wrong = {
        "norm_topk_prob": is_fixed and getattr(config, "norm_topk_prob", True) != architecture.normalizes,
        "hidden_act": getattr(config, "hidden_act", "silu") != "silu",
        "linear_num_heads": getattr(config, "linear_num_heads", config.num_attention_heads)
        != config.num_attention_heads,
        # leading_dense_block_count can say dense layers at the beginning only
        "mlp_layer_types": bool(mlp_kinds) and "dense" in mlp_kinds[mlp_kinds.index("sparse") :],
        "layers_block_type": "mlp" in (getattr(config, "layers_block_type", None) or ()),
        "mlp_only_layers": bool(getattr(config, "mlp_only_layers", None)),
        "n_group": routing.get("num_groups", 1) > 1 and "expert_group_count" not in architecture.keys,
        "rope_interleave": architecture.is_latent and not getattr(config, "rope_interleave", True),
        "clip_qkv": getattr(config, "clip_qkv", None) is not None,
        "sliding_window": is_window_lost,
        "layer_types": architecture.window_period
        and config.layer_types != architecture.window_kinds(config.num_hidden_layers),
        # llama.cpp derives YaRN's attention factor itself; any other kind goes into a tensor of factors
        "rope_parameters": architecture.factors is None
        and rope_kind != "default"
        and (rope_kind != "yarn" or architecture.rounds_yarn or rope.get("attention_factor") is not None),
        "attention_bias": getattr(config, "attention_bias", False) and not architecture.biases,
        "num_key_value_heads": config.num_key_value_heads != config.num_attention_heads
        and not architecture.groups_heads,
    }
    wrong |= {name: getattr(config, name) != value for name, value in architecture.fixed.items()}
    if architecture.refused:
        wrong |= architecture.refused(whole)
    for name, is_wrong in wrong.items():
        if is_wrong:
            value = getattr(config, name, None)
            raise CheckpointError(
                f"{name}={value} has no place in GGUF's {architecture.name}: llama.cpp's graph for it computes another "
                "model"
            )
    return architecture


def write_gguf(path: Path, tensors: Mapping[str, StoredTensor], family: Family, config: Any) -> None:
    """Writes a model in Transformers' names in memory to one file, a tensor at a time; float64 becomes float32.

    path: a file that does not exist. Raises CheckpointError for what llama.cpp has no place for.
    """
    gguf = _import_gguf()
    architecture = check_writable(family, config)
    named = dict(_named(tensors, family, config))
    writer = gguf.GGUFWriter(path, architecture.name)
    types = {}
    for name, tensor in named.items():
        is_vector = len(tensor.shape) < 2 or 1 in tensor.shape or name.endswith(CONVOLUTIONS)
        # llama.cpp computes with vectors and gates in float32, and has no float64
        is_float32 = is_vector or ".ffn_gate_inp" in name or tensor.dtype not in _NAMES
        types[name] = torch.float32 if is_float32 else tensor.dtype
    try:
        with explained(path, sum(tensor.num_bytes for tensor in named.values())):
            write_facts(writer, config, family)
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


def _named(
    tensors: Mapping[str, StoredTensor], family: Family, config: Any
) -> Iterator[tuple[str, StoredTensor]]:
    architecture = family.gguf
    assert architecture is not None
    block, place = f"{family.in_modules.block}.", family.in_modules.place
    inside, outside = names_inside(family), names_outside(family)
    for name, tensor in tensors.items():
        match = LAYER.fullmatch(name)
        parts = _renamed(outside, name, tensor)
        if match:
            rest = match[2]
            rest = f"mlp.{rest.removeprefix(block)}" if rest.startswith(block) else rest
            rest = f"mlp.{rest}" if place and rest.startswith(f"{place}.") else rest
            turned = next((turned for turned in architecture.turned if turned.name == match[2]), None)
            if turned is None:
                parts = _in_layer(rest, tensor, inside, config, family.in_modules)
            else:
                parts = _parts(turned, tensor, config)
        is_added = name.endswith(architecture.added) if architecture.added else False
        for new, part in parts:
            if is_added:  # Transformers computes x * (1 + w); in float64, so that the sum is rounded once
                part = _mapped(part, part.shape, lambda w: w.double() + 1)
            full = f"blk.{match[1]}.{new}" if match else new
            rotated = ROTATED.fullmatch(full) if architecture.turns_pairs else None
            if rotated:
                heads = config.num_attention_heads if rotated[1] == "q" else config.num_key_value_heads
                part = _in_pairs(part, heads)
            yield full, part
    if architecture.factors:
        factors = architecture.factors(config)
        yield "rope_freqs.weight", StoredTensor(tuple(factors.shape), torch.float32, lambda: factors)


def _in_layer(
    name: str, tensor: StoredTensor, inside: Mapping[str, str], config: Any, layout: Layout
) -> Iterator[tuple[str, StoredTensor]]:
    if layout.interleaved and name.startswith("mlp.experts."):
        yield from _in_turn(name.removeprefix("mlp.experts."), tensor)
    elif name == "mlp.experts.gate_up_proj":
        num_experts, rows, d_model = tensor.shape
        half = num_experts, rows // 2, d_model
        yield "ffn_gate_exps.weight", by_rows(tensor, half, lambda w: w[:, : rows // 2])
        yield "ffn_up_exps.weight", by_rows(tensor, half, lambda w: w[:, rows // 2 :])
    elif name == "mlp.experts.up_proj":
        yield "ffn_up_exps.weight", tensor
    elif name == "mlp.experts.down_proj":
        yield "ffn_down_exps.weight", tensor
    elif name == "mlp.shared_expert_gate.weight":
        yield "ffn_gate_inp_shexp.weight", _mapped(tensor, tensor.shape[1:], lambda w: w[0])
    elif name == "self_attn.kv_b_proj.weight":
        yield from _split_latent(tensor, config)
    elif layout.expert_bias and name == f"mlp.{layout.expert_bias}":
        yield "exp_probs_b.bias", _mapped(tensor, tensor.shape[-1:], torch.Tensor.flatten)
    else:
        yield from _renamed(inside, name, tensor)


def _in_turn(name: str, tensor: StoredTensor) -> Iterator[tuple[str, StoredTensor]]:
    """Splits weights [E, in, out] and biases [E, out] of experts whose gate and up take turns in the columns."""
    kind = "bias" if name.endswith("_bias") else "weight"
    num_experts, *inner, columns = tensor.shape
    if name.startswith("down_proj"):
        down = by_rows(tensor, (num_experts, columns, *inner), _transposed)
        yield f"ffn_down_exps.{kind}", down
        return
    shape = num_experts, columns // 2, *inner
    yield f"ffn_gate_exps.{kind}", by_rows(tensor, shape, lambda w: _transposed(w[..., ::2]))
    yield f"ffn_up_exps.{kind}", by_rows(tensor, shape, lambda w: _transposed(w[..., 1::2]))


def _transposed(w: Tensor) -> Tensor:
    return w.mT if w.ndim > 2 else w


def _split_latent(tensor: StoredTensor, config: Any) -> Iterator[tuple[str, StoredTensor]]:
    """Splits kv_b_proj into keys [heads, rank, nope] and values [heads, v, rank]: the graph absorbs the keys in q."""
    heads, rank = config.num_attention_heads, tensor.shape[1]
    nope, width = config.qk_nope_head_dim, config.v_head_dim

    def halves(w: Tensor) -> Tensor:
        return w.unflatten(0, (heads, nope + width))

    yield (
        "attn_k_b.weight",
        _mapped(tensor, (heads, rank, nope), lambda w: halves(w)[:, :nope].transpose(1, 2)),
    )
    yield "attn_v_b.weight", _mapped(tensor, (heads, width, rank), lambda w: halves(w)[:, nope:])


def _renamed(names: Mapping[str, str], name: str, tensor: StoredTensor) -> Iterator[tuple[str, StoredTensor]]:
    for theirs, ours in names.items():
        if name.startswith(theirs):
            yield ours + name.removeprefix(theirs), tensor
            return
    raise CheckpointError(f"{name} has no name in GGUF")


def _parts(turned: TensorTransform, tensor: StoredTensor, config: Any) -> Iterator[tuple[str, StoredTensor]]:
    shapes = turned.write(config, torch.empty(tensor.shape, device="meta"))
    for i, name in enumerate(turned.parts):
        # each part reads the tensor again: kept, it would stay in memory until the last part is written
        yield name, _mapped(tensor, tuple(shapes[i].shape), lambda w, i=i: turned.write(config, w)[i])


def _in_pairs(tensor: StoredTensor, heads: int) -> StoredTensor:
    """Reorders a projection's rows: Transformers rotates halves of a head, llama.cpp neighbours."""

    def turn(w: Tensor) -> Tensor:
        return w.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)

    return _mapped(tensor, tensor.shape, turn)


def _mapped(tensor: StoredTensor, shape: tuple[int, ...], function: Any) -> StoredTensor:
    return StoredTensor(shape, tensor.dtype, lambda: function(tensor.read()))


def write_facts(writer: Any, config: Any, family: Family) -> None:
    """Adds to a GGUFWriter what llama.cpp needs to know of a model beside its tensors."""
    assert family.gguf is not None
    writer.add_name(config.architectures[0])
    add = {
        bool: writer.add_bool,
        int: writer.add_uint32,
        float: writer.add_float32,
        str: writer.add_string,
        list: writer.add_array,
    }
    for key, value in facts(config, family).items():
        add[type(value)](f"{family.gguf.name}.{key}", value)
    writer.add_tokenizer_model("no_vocab")


def _import_gguf() -> Any:
    try:
        import gguf
    except ImportError as error:
        raise CheckpointError(f"format='gguf' needs the package gguf ({error}): {DOWNLOAD}") from error
    return gguf
