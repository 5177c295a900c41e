"""MoE layers of Hugging Face models in three layouts, and the same in ours.

    "fused"      gate.weight, experts.gate_up_proj [E, 2H, D], experts.down_proj [E, D, H]: modules of Transformers 5
    "qwen3_moe"  gate.weight, experts.<e>.{gate,up,down}_proj.weight: files of Qwen, OLMoE, DeepSeek, GLM, ...
    "mixtral"    the same as w1 (gate), w3 (up), w2 (down), the layer is called block_sparse_moe: files of Mixtral
    ours         gate.gate.weight, experts.htoh4.weight [E, 2H, D], experts.h4toh.weight [E, D, H]:
                 FMoETransformerMLP(activation="swiglu", bias=False, gate_bias=False)

All other tensors pass through under their names.
"""

import json
import re

import torch

from fmoe_ext.checkpoint.errors import CheckpointError
from fmoe_ext.checkpoint.safetensors_file import StoredTensor, read_safetensors

LAYOUTS = ("fused", "qwen3_moe", "mixtral")
PER_EXPERT = (  # gate, up, down
    ("qwen3_moe", ("gate_proj.weight", "up_proj.weight", "down_proj.weight")),
    ("mixtral", ("w1.weight", "w3.weight", "w2.weight")),
)
OURS = re.compile(r"((?:.*\.)?)experts\.htoh4\.weight")


def from_huggingface(state_dict):
    """A state dict in any of the Hugging Face layouts -> the same in ours; values are tensors or StoredTensors.

    Of several layers each may have its own layout. A layer called block_sparse_moe becomes mlp.
    Raises CheckpointError where experts are missing or shapes do not fit.
    """
    tensors, lazy = _stored(state_dict)
    gates = {
        key: key.removesuffix("gate.weight") for key in tensors if re.fullmatch(r"(.*\.)?gate\.weight", key)
    }
    layers = {key: found for key, prefix in gates.items() if (found := _experts_of(tensors, prefix))}
    used = {name for _, _, names in layers.values() for name in names}
    out = {}
    for key, tensor in tensors.items():
        if key in layers:
            w1, w2, _ = layers[key]
            num_experts, rows, d_model = w1.shape
            if tensor.shape != (num_experts, d_model) or w2.shape != (num_experts, d_model, rows // 2):
                raise CheckpointError(
                    f"{key} {list(tensor.shape)}, gate and up {list(w1.shape)} and down {list(w2.shape)} of experts do "
                    "not fit: expected [E, D], [E, 2H, D] and [E, D, H]"
                )
            layer = _renamed(gates[key], "block_sparse_moe", "mlp")
            out[f"{layer}gate.gate.weight"] = tensor
            out[f"{layer}experts.htoh4.weight"] = w1
            out[f"{layer}experts.h4toh.weight"] = w2
        elif key not in used:
            out[key] = tensor
    return _returned(out, lazy)


def to_huggingface(state_dict, layout="fused"):
    """A state dict in our layout -> the same in a Hugging Face layout: "fused", "qwen3_moe" or "mixtral".

    Raises CheckpointError for biases that are not zero: these models have none.
    """
    if layout not in LAYOUTS:
        raise CheckpointError(f"layout must be one of {', '.join(LAYOUTS)}, but got {layout!r}")
    tensors, lazy = _stored(state_dict)
    prefixes = {match[1] for key in tensors if (match := OURS.fullmatch(key))}
    if not prefixes:
        raise CheckpointError("there is no FMoETransformerMLP (experts.htoh4.weight) to convert")
    out = {}
    for key, tensor in tensors.items():
        prefix = next((p for p in prefixes if key.startswith((f"{p}experts.", f"{p}gate."))), None)
        name = None if prefix is None else key.removeprefix(prefix)
        if name in ("experts.htoh4.bias", "experts.h4toh.bias", "gate.gate.bias"):
            if tensor.read().any():
                raise CheckpointError(
                    f"{key} is not zero, but Hugging Face's experts and gates have no bias: build the layer with "
                    "bias=False, gate_bias=False"
                )
            continue
        layer = _renamed(prefix, "mlp", "block_sparse_moe") if prefix and layout == "mixtral" else prefix
        if name == "gate.gate.weight":
            out[f"{layer}gate.weight"] = tensor
        elif name in ("experts.htoh4.weight", "experts.h4toh.weight"):
            if name == "experts.htoh4.weight":
                _check_swiglu(prefix, tensor, tensors.get(f"{prefix}experts.h4toh.weight"))
            out |= _split(layer, name, tensor, layout)
        elif prefix is not None:
            raise CheckpointError(f"{key} has no place in a Hugging Face layer")
        else:
            out[key] = tensor
    return _returned(out, lazy)


def model_files(path):
    """The safetensors files of a model: path itself, or those of a Hugging Face folder; [] if it is neither."""
    if path.suffix == ".safetensors":
        return [path]
    index = path / "model.safetensors.index.json"
    if index.exists():
        return [path / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
    return [path / "model.safetensors"] if (path / "model.safetensors").exists() else []


def read_model(files):
    """({name: StoredTensor} in our layout, whether it was in one of Hugging Face's) of all files together."""
    tensors = {}
    for file in files:
        tensors |= read_safetensors(file)[0]
    if not _is_huggingface(tensors):
        return tensors, False
    return from_huggingface(tensors), True


def _is_huggingface(names):
    """Whether tensors of these names have an MoE layer in a Hugging Face layout."""
    leaves = tuple(f".{leaf}" for _, leaves in PER_EXPERT for leaf in leaves)
    return any(
        re.search(r"(^|\.)experts\.(gate_up_proj|\d+\..*)$", name)
        and name.endswith((".gate_up_proj", *leaves))
        for name in names
    )


def _experts_of(tensors, prefix):
    """(w1 [E, 2H, D], w2 [E, D, H], names used) of a layer; None if it has no experts."""
    fused = f"{prefix}experts.gate_up_proj", f"{prefix}experts.down_proj"
    if all(name in tensors for name in fused):
        return tensors[fused[0]], tensors[fused[1]], fused
    for _, leaves in PER_EXPERT:
        names = re.compile(rf"{re.escape(prefix)}experts\.(\d+)\.({'|'.join(map(re.escape, leaves))})")
        found = {(int(m[1]), m[2]): key for key in tensors if (m := names.fullmatch(key))}
        if not found:
            continue
        num_experts = 1 + max(e for e, _ in found)
        missing = [
            f"{prefix}experts.{e}.{leaf}"
            for e in range(num_experts)
            for leaf in leaves
            if (e, leaf) not in found
        ]
        if missing:
            raise CheckpointError(f"missing: {', '.join(missing)}")
        gate, up, down = ([tensors[found[e, leaf]] for e in range(num_experts)] for leaf in leaves)
        return _joined(prefix, gate, up), _joined(prefix, down), tuple(found.values())
    return None


def _joined(prefix, *columns):
    """One tensor [E, sum of rows, *] of lists of E tensors [rows, *]."""
    for column in columns:
        if any(t.shape != column[0].shape or t.dtype != column[0].dtype for t in column):
            raise CheckpointError(
                f"the experts of {prefix} differ in shape: {[list(t.shape) for t in column]}"
            )
    num_rows = sum(column[0].shape[0] for column in columns)
    shape = (len(columns[0]), num_rows, *columns[0][0].shape[1:])

    def rows(first, end):
        experts = zip(*(column[first:end] for column in columns), strict=True)
        return torch.stack([torch.cat([t.read() for t in parts]) for parts in experts])

    return StoredTensor(shape, columns[0][0].dtype, lambda: rows(0, shape[0]), rows)


def _split(layer, name, tensor, layout):
    if layout == "fused":
        return {f"{layer}experts.{'gate_up_proj' if name == 'experts.htoh4.weight' else 'down_proj'}": tensor}
    gate, up, down = dict(PER_EXPERT)[layout]
    num_experts, num_rows, width = tensor.shape
    parts = [(gate, 0, num_rows // 2), (up, num_rows // 2, num_rows)]
    if name == "experts.h4toh.weight":
        parts = [(down, 0, num_rows)]
    return {
        f"{layer}experts.{e}.{leaf}": _part(tensor, e, first, end)
        for e in range(num_experts)
        for leaf, first, end in parts
    }


def _part(tensor, e, first, end):
    return StoredTensor(
        (end - first, tensor.shape[2]), tensor.dtype, lambda: tensor.rows(e, e + 1)[0, first:end]
    )


def _check_swiglu(prefix, w1, w2):
    if w2 is None or len(w1.shape) != 3 or w1.shape[1] != 2 * w2.shape[2]:
        raise CheckpointError(
            f"{prefix}experts: htoh4.weight {list(w1.shape)} and h4toh.weight {w2 and list(w2.shape)} are no SwiGLU "
            "experts: expected [E, 2H, D] and [E, D, H]"
        )


def _renamed(prefix, old, new):
    return re.sub(rf"(^|\.){old}\.$", rf"\g<1>{new}.", prefix)


def _stored(state_dict):
    """({name: StoredTensor}, whether they were so already)."""
    lazy = any(isinstance(value, StoredTensor) for value in state_dict.values())
    return {k: v if isinstance(v, StoredTensor) else StoredTensor.of(v) for k, v in state_dict.items()}, lazy


def _returned(tensors, lazy):
    return tensors if lazy else {key: tensor.read().clone() for key, tensor in tensors.items()}
