"""Attention of a new token: queries, keys and values by one operator, and a cache that is not copied for each token."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from fmoe_ext.finetune.streaming.packed_linear import PackedLinear
from fmoe_ext.frozen import decode

MOST = 1 << 16  # elements of new tokens for which one thread computes norms
SPARE = 256  # tokens for which a cache gets room at once, or a quarter of what it has


def forward_of(theirs: Any, attend: Any, name: str, is_norm: Callable[[Any], bool]) -> Any:
    """A forward of the attention of Llama or Qwen3, by few operators for a new token, else by theirs.

    attend: the attention interface that is registered as `name`; is_norm: True for modules that are Llama's norm.
    """
    is_new = "cache" in inspect.signature(theirs).parameters  # Transformers 5.24
    name_of_cache = "cache" if is_new else "past_key_values"

    def forward(
        self: Any,
        hidden_states: Tensor,
        position_embeddings: Any = None,
        attention_mask: Tensor | None = None,
        past: Any = None,
        **options: Any,
    ) -> tuple[Tensor, Tensor | None]:
        past = options.pop(name_of_cache, past)
        found = None
        if self.config._attn_implementation == name and not (self.training and self.attention_dropout):
            found = _inputs(self, hidden_states, position_embeddings, is_norm)
        if found is None:
            given = hidden_states, position_embeddings, attention_mask, past
            result: tuple[Tensor, Tensor | None] = theirs(self, *given, **options)
            return result
        query, key, value = found
        if past is not None:
            also = {"kwargs": options} if is_new else {}
            key, value = append(past, key, value, self.layer_idx, **also)
        out, weights = attend(self, query, key, value, attention_mask, scaling=self.scaling, **options)
        return self.o_proj(out.reshape(*hidden_states.shape[:-1], -1)), weights

    forward.is_of_token = True  # type: ignore[attr-defined]
    return forward


def _inputs(
    attention: Any, x: Tensor, positions: Any, is_norm: Callable[[Any], bool]
) -> tuple[Tensor, Tensor, Tensor] | None:
    """Queries, keys and values [B, heads, 1, width]; None where the operator would not compute the same."""
    is_token = x.dim() == 3 and x.shape[1] == 1 and x.numel() <= MOST and x.dtype != torch.float16
    if positions is None or not is_token or not decode.is_wanted(x):
        return None
    cos, sin = positions
    linear = [attention.q_proj, attention.k_proj, attention.v_proj]
    norms: list[Any] = [getattr(attention, name, None) for name in ("q_norm", "k_norm")]
    has_norms = norms[0] is not None
    if not all(type(m) is PackedLinear and m.bias is None for m in linear):
        return None
    if has_norms and not all(m.weight.dtype == x.dtype and is_norm(m) for m in norms):
        return None
    if has_norms and norms[0].variance_epsilon != norms[1].variance_epsilon:
        return None
    if not _are_bare(attention, [*linear, *norms] if has_norms else linear):
        return None
    if cos.dim() != 3 or cos.dtype != x.dtype or cos.shape[1:] != (1, attention.head_dim):
        return None
    if cos.shape[0] != x.shape[0]:
        cos, sin = (t.expand(x.shape[0], -1, -1) for t in (cos, sin))
    weights = [m._packed for m in linear]
    factors = [m.weight if has_norms else None for m in norms]
    eps = norms[0].variance_epsilon if has_norms else 0.0
    return decode.attention_inputs(x.view(x.shape[0], -1), weights, factors, cos, sin, eps)


def _are_bare(attention: Any, modules: list[Any]) -> bool:
    """True if calling each module runs the forward of its class and nothing else."""
    hooks = attention.__dict__.get("fmoe_hooks")
    if hooks is None or hooks.modules != modules:
        attention.fmoe_hooks = hooks = Hooks(modules)
    return bool(hooks.are_bare())


class Hooks:
    """Tables of the forward hooks of some modules and of all modules, which handles of hooks refer to."""

    def __init__(self, modules: list[Any]) -> None:
        self.modules = modules
        handles: list[Any] = [
            register_module_forward_pre_hook(_nothing),
            register_module_forward_hook(_nothing),
        ]
        for module in modules:
            handles += [module.register_forward_pre_hook(_nothing), module.register_forward_hook(_nothing)]
        self.tables = [handle.hooks_dict_ref() for handle in handles]
        for handle in handles:
            handle.remove()

    def are_bare(self) -> bool:
        """True if calling each module runs the forward of its class and nothing else."""
        return not any(self.tables) and not any("forward" in module.__dict__ for module in self.modules)

    def __reduce__(self) -> Any:
        return type(None), ()  # a copy of the attention makes its own


def _nothing(*args: Any) -> None:
    pass


def append(past: Any, key: Tensor, value: Tensor, index: int, **also: Any) -> tuple[Tensor, Tensor]:
    """past.update(key, value, index, **also) for one token [B, heads, 1, width], in place where that would copy.

    A tensor that was returned before keeps its values: a cache that was cut, reordered or assigned gets other memory.
    """
    keys, values = ((*t.shape[:2], t.shape[3]) for t in (key, value))
    found = room_of(past, index, keys, values, key.dtype) if key.dtype == value.dtype else None
    if found is None:
        updated: tuple[Tensor, Tensor] = past.update(key, value, index, **also)
        return updated
    layer, room = found
    for buffer, new in zip(room.buffers(), (key, value), strict=True):
        buffer.narrow(2, room.length, 1).copy_(new)
    layer.keys, layer.values = room.advance()
    return layer.keys, layer.values


def room_of(
    past: Any, index: int, keys: tuple[int, ...], values: tuple[int, ...], dtype: torch.dtype
) -> tuple[Any, _Room] | None:
    """A layer of a cache and its room for one more token; None if it is not one that concatenates its tensors.

    keys, values: [B, heads, width] of the token.
    """
    from transformers import cache_utils

    if type(past) is not cache_utils.DynamicCache or past.offloading or index >= len(past.layers):
        return None
    layer: Any = past.layers[index]
    known: Any = cache_utils.DynamicLayer
    if type(layer) is not known or not layer.is_initialized or layer.keys.dim() != 4:
        return None
    for old, new in ((layer.keys, keys), (layer.values, values)):
        shape = old.shape
        if (*shape[:2], shape[3]) != new or old.dtype != dtype or not decode.is_wanted(old):
            return None
    room = layer.__dict__.get("fmoe_room")
    if room is None or not room.is_of(layer):
        layer.fmoe_room = room = _Room(layer)
    return layer, room


class _Room:
    """Memory for more tokens behind the keys and values of a layer of a cache, which are views of it."""

    def __init__(self, layer: Any) -> None:
        self.keys, self.values = layer.keys, layer.values
        self.length = self.keys.shape[2]
        self._buffers: list[Tensor] | None = None
        self._size = self.length

    def is_of(self, layer: Any) -> bool:
        """True if the layer has the tensors that advance() returned last, and they may be written to."""
        is_mine = self.keys is layer.keys and self.values is layer.values
        return is_mine and self.keys.is_inference() == torch.is_inference_mode_enabled()

    def buffers(self) -> tuple[Tensor, Tensor]:
        """Keys and values, with room for one token at least behind `length`."""
        if self._buffers is None or self.length == self._size:
            self._size = self.length + max(SPARE, self.length // 4)
            self._buffers = [_with_room(t, self._size) for t in (self.keys, self.values)]
        keys, values = self._buffers
        return keys, values

    def advance(self) -> tuple[Tensor, Tensor]:
        """Keys and values with the token that was written behind `length`."""
        keys, values = self.buffers()
        self.length += 1
        self.keys, self.values = keys.narrow(2, 0, self.length), values.narrow(2, 0, self.length)
        return self.keys, self.values


def _with_room(tensor: Tensor, length: int) -> Tensor:
    batch, heads, old, width = tensor.shape
    buffer = tensor.new_empty((batch, heads, length, width))
    buffer.narrow(2, 0, old).copy_(tensor)
    return buffer
