"""A model as the sequence of layers that a pipeline cuts."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

FULL_ATTENTION = (None, "full_attention")
MASKED_ATTENTION = ("sdpa", "eager")


def layers_of(model: nn.Module) -> list[nn.Module]:
    """The layers of a model, each called with what the one before returns, a tensor or a tuple of tensors.

    A model is an nn.Sequential, a module with a method pipeline_layers() that returns such a list (modules that share
    its parameters), or a decoder of Transformers of Llama's form (Llama, Mistral, Mixtral, Qwen2, Qwen3, their MoE
    variants, OLMoE), called with input_ids [B, S] and causal attention.
    Raises TypeError for other models, ValueError for a decoder whose attention is not causal over all tokens.
    """
    if isinstance(model, nn.Sequential):
        return list(model)
    own: Any = getattr(model, "pipeline_layers", None)
    if own is not None:
        return list(own())
    base = getattr(model, "model", None)
    if all(hasattr(base, name) for name in ("embed_tokens", "layers", "norm", "rotary_emb")):
        return _decoder_layers(model, base)
    raise TypeError(
        f"{type(model).__name__} cannot be cut: give an nn.Sequential, a decoder of Transformers with "
        "model.embed_tokens, model.layers, model.norm and model.rotary_emb, or a module with a method "
        "pipeline_layers() -> its layers in order"
    )


def _decoder_layers(model: Any, base: Any) -> list[nn.Module]:
    kinds = set(getattr(model.config, "layer_types", None) or ())
    window = getattr(model.config, "sliding_window", None)
    if not kinds <= set(FULL_ATTENTION) or (window is not None and not kinds):
        raise ValueError(
            f"{type(model).__name__} has attention of other kinds than full causal attention (layer_types "
            f"{sorted(kinds)}, sliding_window {window}), which a pipeline would not honour: set sliding_window=None, "
            "or give it a method pipeline_layers()"
        )
    attention = getattr(model.config, "_attn_implementation", "sdpa")
    if attention not in MASKED_ATTENTION:
        raise ValueError(
            f"{type(model).__name__} computes attention by {attention!r}, which takes no mask of numbers: load "
            f"it with attn_implementation= one of {', '.join(map(repr, MASKED_ATTENTION))}, or give it a method "
            "pipeline_layers()"
        )
    if getattr(model.config, "output_router_logits", False):
        raise ValueError(
            f"{type(model).__name__} adds its router's loss itself (output_router_logits), which stages do not: fmoefy "
            "it, and pass Pipeline(balance_weight=)"
        )
    blocks = [_DecoderBlock(layer, base.rotary_emb) for layer in base.layers]
    head: nn.Module = nn.Sequential(base.norm, model.lm_head)
    return [base.embed_tokens, *blocks, head]


class _DecoderBlock(nn.Module):
    """A block of a decoder of Transformers, which makes its own mask and rotation: only x travels."""

    def __init__(self, layer: nn.Module, rotary: nn.Module):
        super().__init__()
        self.layer = layer
        self.rotary = rotary

    def forward(self, x: Tensor) -> Tensor:
        positions = torch.arange(x.shape[1], device=x.device)
        later = positions[None] > positions[:, None]
        mask = torch.zeros_like(later, dtype=x.dtype).masked_fill(later, torch.finfo(x.dtype).min)
        out = self.layer(
            x,
            attention_mask=mask.expand(x.shape[0], 1, -1, -1),
            position_ids=positions[None],
            position_embeddings=self.rotary(x, positions[None]),
        )
        return out[0] if isinstance(out, tuple) else out


def part_of(model: nn.Module, layers: list[nn.Module]) -> nn.Module:
    """The modules of a model that some of its layers use, under the names that they have in the model.

    Its state_dict() is a part of the model's. Raises ValueError for a parameter that no module of the model has.
    """
    used = {id(module) for layer in layers for module in layer.modules()}
    part = nn.Module()
    for path, module in _outermost(model, used):
        _place(part, path, module)
    found = {id(p) for p in part.parameters()}
    if lost := [n for layer in layers for n, p in layer.named_parameters() if id(p) not in found]:
        raise ValueError(
            f"{lost[0]} of a pipeline layer is a parameter of no module of {type(model).__name__}: layers must be made "
            "of the model's own modules"
        )
    return part


def _outermost(module: nn.Module, used: set[int], path: str = "") -> Iterator[tuple[str, nn.Module]]:
    for name, child in module._modules.items():
        if child is None:
            continue
        full = f"{path}.{name}" if path else name
        if id(child) in used:
            yield full, child
        else:
            yield from _outermost(child, used, full)


def _place(part: nn.Module, path: str, module: nn.Module) -> None:
    *parents, name = path.split(".")
    for parent in parents:
        if parent not in part._modules:
            part.add_module(parent, nn.Module())
        part = part.get_submodule(parent)
    part.add_module(name, module)
