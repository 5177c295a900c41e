"""A layer of a new token in two operators: attention and experts, each with the norm before it and its residual."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor

from fmoe_ext.finetune.streaming.packed_linear import PackedLinear
from fmoe_ext.finetune.streaming.token_attention import MOST, Hooks, room_of
from fmoe_ext.frozen import Quantized, decode
from fmoe_ext.huggingface.experts import NAME, activation_of

Test: TypeAlias = Callable[[Any], bool]  # of a module


def forward_of(theirs: Any, name: str, is_norm: Test, is_attention: Test, is_block: Test) -> Any:
    """A forward of Llama's or Qwen3-MoE's layer, by few operators for a new token in bfloat16, else theirs.

    name: of the attention interface that the operator stands for. The tests are True for Llama's norm, for attention
    with token_attention.forward_of(), for a block of experts whose gate is decode.route().
    """

    name_of_cache = "cache" if "cache" in inspect.signature(theirs).parameters else "past_key_values"

    def forward(
        self: Any,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past: Any = None,
        use_cache: bool | None = False,
        position_embeddings: Any = None,
        **options: Any,
    ) -> Tensor:
        x, past = hidden_states, options.pop(name_of_cache, past)
        is_token = x.dim() == 3 and x.shape[1] == 1 and x.numel() <= MOST and x.dtype == torch.bfloat16
        rows = None
        if is_token and decode.is_wanted(x):
            half = _half_of(self, _AttentionHalf, is_norm, is_attention)
            if half.is_usable(self, name, options):
                rows = half.run(x, attention_mask, past, position_embeddings)
        if rows is None:
            given = x, attention_mask, position_ids, past, use_cache, position_embeddings
            result: Tensor = theirs(self, *given, **options)
            return result
        experts = _half_of(self, _ExpertsHalf, is_norm, is_block)
        out = experts.run(rows) if experts.is_usable(self) else None
        if out is not None:
            return out.view(x.shape)
        x = rows.view(x.shape)
        y: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return y

    return forward


def _half_of(layer: Any, kind: Any, *tests: Test) -> Any:
    """The half of a layer that was made for the modules that it has now."""
    half = layer.__dict__.get(kind.__name__)
    if half is None or half.modules != kind.modules_of(layer):
        half = kind(kind.modules_of(layer), *tests)
        layer.__dict__[kind.__name__] = half
    return half


class _Half:
    """Modules of a layer, and whether an operator stands for their calls."""

    def __init__(self, modules: list[Any]) -> None:
        self.modules = modules
        self.hooks = Hooks([m for m in modules if m is not None])
        self.fits = False

    def __reduce__(self) -> Any:
        return type(None), ()  # a copy of the layer makes its own


class _AttentionHalf(_Half):
    @staticmethod
    def modules_of(layer: Any) -> list[Any]:
        attention = layer._modules.get("self_attn")
        own = {} if attention is None else attention._modules
        names = "q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm"
        return [layer._modules.get("input_layernorm"), attention, *map(own.get, names)]

    def __init__(self, modules: list[Any], is_norm: Test, is_attention: Test) -> None:
        super().__init__(modules)
        norm, attention, *linear, q_norm, k_norm = modules
        self.norms = [m for m in (norm, q_norm, k_norm) if m is not None]
        if not all(type(m) is PackedLinear and m.bias is None for m in linear):
            return
        heads = None if q_norm is None and k_norm is None else (q_norm, k_norm)
        self.fits = is_attention(attention) and norm is not None and all(map(is_norm, self.norms))
        self.fits &= heads is None or (
            None not in heads and q_norm.variance_epsilon == k_norm.variance_epsilon
        )
        if self.fits:
            eps = 0.0 if heads is None else q_norm.variance_epsilon
            self.constants = norm.variance_epsilon, eps, attention.scaling
            self.operator = decode.TokenAttention([m._packed for m in linear])
            self.width, self.groups = attention.head_dim, linear[1].out_features // attention.head_dim

    def is_usable(self, layer: Any, name: str, options: dict[str, Any]) -> bool:
        if not self.fits or not self.hooks.are_bare():
            return False
        attention = self.modules[1]
        is_ours = attention.config._attn_implementation == name
        drops = options.get("dropout") or (attention.training and attention.attention_dropout)
        return is_ours and not drops and "position_bias" not in options

    def run(self, x: Tensor, mask: Tensor | None, past: Any, positions: Any) -> Tensor | None:
        """x [B, 1, D] -> [B, D]; None where the operator would not compute the same."""
        batch, factors = x.shape[0], [norm.weight for norm in self.norms]
        if positions is None or any(f.dtype != x.dtype for f in factors):
            return None
        cos, sin = positions
        if cos.dim() != 3 or cos.dtype != x.dtype or cos.shape[1:] != (1, self.width):
            return None
        shape = batch, self.groups, self.width
        found = room_of(past, self.modules[1].layer_idx, shape, shape, x.dtype)
        if found is None:
            return None
        layer, room = found
        if mask is not None:
            if tuple(mask.shape) != (batch, 1, 1, room.length + 1):
                return None
            mask = mask[:, 0, 0]
        if cos.shape[0] != batch:
            cos, sin = (t.expand(batch, -1, -1) for t in positions)
        norm, *heads = factors
        y = self.operator(
            x.reshape(batch, -1),
            norm,
            heads or (None, None),
            (cos, sin),
            room.buffers(),
            room.length,
            mask,
            self.constants,
        )
        layer.keys, layer.values = room.advance()
        return y


class _ExpertsHalf(_Half):
    @staticmethod
    def modules_of(layer: Any) -> list[Any]:
        block = layer._modules.get("mlp")
        own = {} if block is None else block._modules
        experts = own.get("experts")
        act_fn = None if experts is None else experts._modules.get("act_fn")
        return [layer._modules.get("post_attention_layernorm"), block, own.get("gate"), experts, act_fn]

    def __init__(self, modules: list[Any], is_norm: Test, is_block: Test) -> None:
        super().__init__(modules)
        norm, block, _, experts, _ = modules
        self.activation = ""
        self._made: Any = (None, None, None)
        if None not in modules and is_norm(norm) and is_block(block) and hasattr(experts, "streamed"):
            has_more = experts.has_bias or getattr(experts, "has_post_expert_norm", False)
            self.activation = "" if has_more else activation_of(experts, True) or ""
        self.fits = bool(self.activation)

    def is_usable(self, layer: Any) -> bool:
        return self.fits and self.hooks.are_bare() and self.modules[3].config._experts_implementation == NAME

    def run(self, x: Tensor) -> Tensor | None:
        """x [B, D] -> [B, D]; None where the operator would not compute the same."""
        norm, _, gate, experts, _ = self.modules
        factors, weight = norm.weight, gate.weight
        if x.shape[0] != 1 or not x.dtype == factors.dtype == weight.dtype == experts.streamed.dtype:
            return None
        weights = experts.streamed.for_few(experts, gate.top_k)
        if weights is None or not all(isinstance(w, Quantized) for w in weights):
            return None
        w1, w2, operator = self._made
        if weights[0] is not w1 or weights[1] is not w2:
            operator = decode.TokenExperts(weights[0], weights[1], self.activation)
            self._made = *weights, operator
        y: Tensor = operator(x, factors, norm.variance_epsilon, weight, gate.top_k, gate.norm_topk_prob)
        return y
