"""fmoefy for dense Hugging Face models, recognised by the structure of their layers, not by their names.

Three structures: an MLP module (Llama, Qwen3, Mistral, Gemma, Phi, GPT-2, ViT, T5, ...), which may add the residual
itself (BLOOM, MPT); `intermediate` and `output` side by side, the second with dropout, residual and LayerNorm (BERT and
its kin); fc1 and fc2 in the layer itself (OPT, BART, Whisper, ...).
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from fmoe_ext.integrations.recognize import is_linear, pair, read_mlp, weight_shape
from fmoe_ext.integrations.target import Options, Target
from fmoe_ext.layers import FMoE

KIND = "Hugging Face Transformers"
LOOKED_FOR = (
    "modules of the transformers package inside numbered layers: an MLP of two or three linear layers, "
    "`intermediate` and `output`, or `fc1` and `fc2` beside an attention (what is MoE already stays: "
    "fmoe_ext.integrations.huggingface runs its experts)"
)
# The gates of Transformers' own MoE models have no bias either, so that the layers can become theirs.
MOE_KWARGS = MappingProxyType({"gate_bias": False})


def find(model: nn.Module, options: Options) -> list[Target]:
    """The MLPs of a Transformers model that is dense, in the order of the model."""
    if "transformers" not in sys.modules:
        return []
    targets = list(_walk(model, "", None, "", options.activation))
    # where the activation alone is not known, the given one stands in (init="upcycle" refuses)
    readable = [
        target for target in targets if not target.dense.why_unreadable or target.dense.w2 is not None
    ]
    if targets and not readable:
        module = getattr(targets[0].parent, targets[0].attribute)
        raise ValueError(
            f"{targets[0].path} ({type(module).__name__}) looks like an MLP, but {targets[0].dense.why_unreadable}"
        )
    return readable


def _walk(module: nn.Module, path: str, parent: Any, attribute: str, activation: Any) -> Iterator[Target]:
    if isinstance(module, FMoE) or hasattr(module, "experts"):
        return  # an MoE layer, or one with shared experts
    in_layers = any(name.isdigit() for name in path.split("."))
    if in_layers and any(c.__module__.startswith("transformers") for c in type(module).__mro__):
        if _has_bert_structure(module):
            yield _bert_target(path, module)
            return
        if _has_fc_beside_attention(module):
            yield _fc_target(path, module)
            return
        if _has_mlp_shapes(module):
            yield _mlp_target(path, module, parent, attribute, activation)
            return
    for name, child in module.named_children():
        yield from _walk(child, f"{path}.{name}" if path else name, module, name, activation)


def _mlp_target(path: str, module: nn.Module, parent: Any, attribute: str, activation: Any) -> Target:
    adds_residual = _adds_residual(module)
    reading = read_mlp(_WithoutResidual(module) if adds_residual else module, activation)

    def wrap(moe: nn.Module) -> nn.Module:
        return AddsResidual(reading.wrap(moe)) if adds_residual else reading.wrap(moe)

    return Target(path, parent, attribute, reading.dense, wrap, notes=reading.notes, moe_kwargs=MOE_KWARGS)


def _adds_residual(module: nn.Module) -> bool:
    return list(inspect.signature(module.forward).parameters)[1:] == ["residual"]


class _WithoutResidual(nn.Module):
    """mlp(x, residual) for a residual of zeros, so that it can be read like any other."""

    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        self.mlp = mlp

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(x, torch.zeros_like(x))


class AddsResidual(nn.Module):
    """The MoE layer in the place of an MLP that is called with the residual and adds it."""

    def __init__(self, moe: nn.Module) -> None:
        super().__init__()
        self.moe = moe

    def forward(self, hidden_states: Tensor, residual: Tensor) -> Tensor:
        return residual + self.moe(hidden_states)


def _has_bert_structure(layer: nn.Module) -> bool:
    first = getattr(layer, "intermediate", None)
    second = getattr(layer, "output", None)
    return (
        is_linear(getattr(first, "dense", None))
        and is_linear(getattr(second, "dense", None))
        and hasattr(first, "intermediate_act_fn")
    )


def _bert_target(path: str, layer: Any) -> Target:
    def finish() -> None:
        layer.output.dense = nn.Identity()

    first = layer.intermediate
    dense = pair(first.dense, layer.output.dense, first.intermediate_act_fn)
    path = f"{path}.intermediate"
    return Target(path, layer, "intermediate", dense, finish=finish, moe_kwargs=MOE_KWARGS)


def _has_fc_beside_attention(layer: nn.Module) -> bool:
    return (
        is_linear(getattr(layer, "fc1", None))
        and is_linear(getattr(layer, "fc2", None))
        and callable(getattr(layer, "activation_fn", None))
        and any("attn" in name or "attention" in name for name, _ in layer.named_children())
    )


def _fc_target(path: str, layer: Any) -> Target:
    p = getattr(layer, "activation_dropout", 0.0)

    def finish() -> None:
        layer.activation_fn = nn.Identity()
        layer.fc2 = nn.Identity()
        if p:
            layer.activation_dropout = 0.0

    dense = pair(layer.fc1, layer.fc2, layer.activation_fn)
    notes = (f"its dropout ({p}) between the linear layers is left out",) if p else ()
    return Target(f"{path}.fc1", layer, "fc1", dense, finish=finish, notes=notes, moe_kwargs=MOE_KWARGS)


def _has_mlp_shapes(module: nn.Module) -> bool:
    """Two linear layers d -> H or 2H -> d, or three d -> H, d -> H, H -> d, in whatever order."""
    shapes = [weight_shape(m) for m in module.children() if is_linear(m)]
    if len(shapes) == 2:
        (rows, d_model), (d_out, d_hidden) = shapes
        return d_out == d_model and rows in (d_hidden, 2 * d_hidden)
    if len(shapes) != 3:
        return False
    return any(shapes[i] == shapes[j] == shapes[k][::-1] for i, j, k in ((0, 1, 2), (0, 2, 1), (1, 2, 0)))
