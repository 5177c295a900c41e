"""A new token on a CPU, with fewer operators: attention, rotary positions, norms and gates.

torch's attention for 16 bits takes ten times as long there for one query, its product of 16 bits with one row calls
code for all processors, and Transformers' rotary positions and norms are sixteen and seven operators.
"""

from __future__ import annotations

import functools
import inspect
import types
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fmoe_ext.finetune.streaming import sixteen_bits, token_attention, token_layer
from fmoe_ext.finetune.streaming.packed_linear import GATES
from fmoe_ext.finetune.streaming.sixteen_bits import SIXTEEN_BITS, is_slow
from fmoe_ext.finetune.streaming.token_attention import MOST
from fmoe_ext.frozen import decode

NAME = "fmoe_sdpa"
POSITIONS = 64  # whose sines and cosines are computed at once


def use(model: Any) -> None:
    """Has a model compute new tokens so: attention that is Transformers' "sdpa", rotary positions, norms and gates.

    A norm, an attention or a gate gets a class that is derived from its own, if that calls what is known here by its
    code. Everything else, and every other call, stays as it was.
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    if model.config._attn_implementation == "sdpa" and not any(
        map(_names_sdpa, set(map(type, model.modules())))
    ):
        AttentionInterface.register(NAME, attention)
        AttentionMaskInterface.register(NAME, sdpa_mask)
        model.set_attn_implementation(NAME)
    sixteen_bits.use(model)
    for path, module in model.named_modules():
        cls: Any = type(module)
        if cls is nn.ModuleList and path.endswith("layers"):
            module.__class__ = ModuleList
        derived = _derived(cls, is_gate=path.endswith(GATES))
        if derived is not None:
            module.__class__ = derived


def _names_sdpa(cls: type) -> bool:
    """True for a class whose own code asks for the attention's name: sparse attention has its mask by that alone."""
    functions = (inspect.unwrap(value) for value in vars(cls).values() if inspect.isfunction(value))
    constants = (constant for function in functions for constant in function.__code__.co_consts)
    return any("sdpa" in constant for constant in constants if isinstance(constant, (str, tuple)))


class ModuleList(nn.ModuleList):
    """A list of layers whose whole slice is itself: models take one for each token, and making it takes 90 us."""

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice) and index.indices(len(self)) == (0, len(self), 1):
            return self
        return super().__getitem__(index)


@functools.cache
def _derived(cls: Any, is_gate: bool) -> type | None:
    """A class with another forward and the same name; None if its forward has nothing that is known here."""
    from transformers.models.llama import modeling_llama as llama

    plain = inspect.unwrap(cls.forward)
    used = _globals_of(plain)
    forward: Any = None
    if _is_same(cls.forward, llama.LlamaRMSNorm.forward):
        forward = _norm(cls.forward)
    elif _is_same(used.get("apply_rotary_pos_emb"), llama.apply_rotary_pos_emb):
        ours = _with_global(plain, "apply_rotary_pos_emb", _rotary(llama.apply_rotary_pos_emb))
        if any(_is_same(plain, inspect.unwrap(known)) for known in _attention_forwards()):
            ours = token_attention.forward_of(ours, attention, NAME, _is_norm)
        forward = _decorated_as(cls.forward, ours)
    elif _is_same(plain, inspect.unwrap(llama.LlamaRotaryEmbedding.forward)):
        forward = _sines(cls.forward)
    elif _is_same(plain, inspect.unwrap(llama.LlamaDecoderLayer.forward)):
        ours = token_layer.forward_of(plain, NAME, _is_norm, _is_attention, _is_block)
        forward = _decorated_as(cls.forward, ours)
    elif is_gate and _is_same(cls.forward, _softmax_gate()):
        forward = _gate(_with_global(cls.forward, "F", _Functional()))
    elif is_gate and used.get("F") is nn.functional:
        forward = _decorated_as(cls.forward, _with_global(plain, "F", _Functional()))
    if forward is None:
        return None

    def reduce(self: Any, protocol: Any) -> tuple[Any, ...]:
        # the class has the name of its own, by which pickle would find that
        _, _, *state = super(derived, self).__reduce_ex__(max(2, protocol))
        return (_new, (cls, is_gate), *state)

    body = {"forward": forward, "__reduce_ex__": reduce}
    derived: Any = type(cls.__name__, (cls,), body | {"__module__": cls.__module__, "__doc__": cls.__doc__})
    return derived


def _new(cls: Any, is_gate: bool) -> Any:
    derived: Any = _derived(cls, is_gate) or cls
    return derived.__new__(derived)


def _attention_forwards() -> list[Any]:
    """Of attention without and with norms of heads; Mistral's and Qwen2's name their window."""
    from transformers.models.llama.modeling_llama import LlamaAttention
    from transformers.models.mistral.modeling_mistral import MistralAttention
    from transformers.models.qwen2.modeling_qwen2 import Qwen2Attention
    from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention

    return [c.forward for c in (LlamaAttention, MistralAttention, Qwen2Attention, Qwen3Attention)]


def _softmax_gate() -> Any:
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

    return Qwen3MoeTopKRouter.forward


def _is_same(one: Any, other: Any) -> bool:
    """True for functions of the same code, as copies in other files of Transformers are."""
    codes = (getattr(f, "__code__", None) for f in (one, other))
    return len({(c.co_code, c.co_names, _constants(c)) if c else None for c in codes}) == 1


def _constants(code: types.CodeType) -> tuple[Any, ...]:
    """Constants of a function, without the text that explains it."""
    return tuple(c for c in code.co_consts if not isinstance(c, str))


def _globals_of(forward: Any) -> dict[str, Any]:
    """Values that a function finds under global names; empty for what is no plain function."""
    code = getattr(forward, "__code__", None)
    if code is None or code.co_freevars:
        return {}
    return {name: forward.__globals__[name] for name in code.co_names if name in forward.__globals__}


def _with_global(forward: Any, name: str, value: Any) -> Any:
    """A function that finds something else under a global name."""
    ours = types.FunctionType(
        forward.__code__, {**forward.__globals__, name: value}, "forward", forward.__defaults__
    )
    ours.__kwdefaults__ = forward.__kwdefaults__
    return ours


def _decorated_as(forward: Any, ours: Any) -> Any:
    """Ours in the place of the function under the decorators of forward: Transformers 5.24 renames an argument so."""
    inner = getattr(forward, "__wrapped__", None)
    if inner is None:
        return ours
    inside = _decorated_as(inner, ours)
    cells = tuple(
        types.CellType(inside) if c.cell_contents is inner else c for c in forward.__closure__ or ()
    )
    outside = types.FunctionType(
        forward.__code__, forward.__globals__, "forward", forward.__defaults__, cells
    )
    outside.__kwdefaults__, outside.__wrapped__ = forward.__kwdefaults__, inside  # type: ignore[attr-defined]
    return outside


def _norm(theirs: Any) -> Any:
    def forward(self: Any, hidden_states: Tensor) -> Tensor:
        x, weight = hidden_states, self.weight
        is_token = x.dim() > 2 and x.shape[1] == 1 and x.numel() <= MOST  # [B, 1, D] or [B, 1, heads, D]
        if is_token and x.dtype == weight.dtype != torch.float16 and decode.is_wanted(x):
            return decode.rms_norm(x, weight, self.variance_epsilon)
        y: Tensor = theirs(self, x)
        return y

    forward.is_norm = True  # type: ignore[attr-defined]
    return forward


def _is_norm(module: Any) -> bool:
    return getattr(type(module).forward, "is_norm", False)


def _is_attention(module: Any) -> bool:
    """True for attention of ours without decorators other than Transformers' own, which rename arguments."""
    forward: Any = type(module).forward
    while hasattr(forward, "__wrapped__") and forward.__globals__["__name__"].startswith(
        "transformers.utils"
    ):
        forward = forward.__wrapped__
    return getattr(forward, "is_of_token", False)


def _is_block(module: Any) -> bool:
    """True for experts and a gate that _gate() computes."""
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock as Block

    has_gate = getattr(type(module._modules.get("gate")), "forward", None)
    return _is_same(type(module).forward, Block.forward) and getattr(has_gate, "is_gate", False)


def _rotary(theirs: Any) -> Any:
    def apply_rotary_pos_emb(
        q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1
    ) -> tuple[Tensor, Tensor]:
        is_token = unsqueeze_dim == 1 and cos.dim() == 3 and q.shape[2] == 1 and q.shape[0] == cos.shape[0]
        is_whole = q.shape[3] == k.shape[3] == cos.shape[2] and q.dtype == k.dtype == cos.dtype
        if is_token and is_whole and q.dtype != torch.float16 and decode.is_wanted(q):
            return decode.rotate(q, cos, sin), decode.rotate(k, cos, sin)
        turned: tuple[Tensor, Tensor] = theirs(q, k, cos, sin, unsqueeze_dim)
        return turned

    return apply_rotary_pos_emb


def _sines(theirs: Any) -> Any:
    """A forward of Llama's rotary embedding that computes a few positions by NumPy: torch wakes threads for them.

    Those of one token are kept for the POSITIONS that follow.
    """

    def forward(self: Any, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        kind, frequencies = self.rope_type, self.inv_freq
        is_fixed = isinstance(kind, str) and "dynamic" not in kind and kind != "longrope"
        is_few = position_ids.dim() == 2 and position_ids.shape[1] == 1 and position_ids.shape[0] <= 64
        if is_fixed and is_few and frequencies.dtype == torch.float32 and decode.is_wanted(x):
            scaling = self.attention_scaling
            if position_ids.shape[0] > 1 or frequencies.is_inference():
                return _sines_of(position_ids.numpy(), frequencies, scaling, x.dtype)
            at = int(position_ids)
            first = at - at % POSITIONS
            facts = first, frequencies._version, scaling, x.dtype
            known = self.__dict__.get("fmoe_sines")
            if known is None or known[0] is not frequencies or known[1] != facts:
                positions = np.arange(first, first + POSITIONS)[:, None]
                found = _sines_of(positions, frequencies, scaling, x.dtype)
                self.fmoe_sines = known = frequencies, facts, found
            cos, sin = known[2]
            return cos[at - first : at - first + 1], sin[at - first : at - first + 1]
        turned: tuple[Tensor, Tensor] = theirs(self, x, position_ids)
        return turned

    return forward


def _sines_of(
    positions: np.ndarray[Any, Any], frequencies: Tensor, scaling: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Cosines and sines of positions [B, 1] -> [B, 1, width] each."""
    angles = positions.astype(np.float32)[..., None] * frequencies.numpy()
    wide = np.concatenate((angles, angles), -1, dtype=np.float64)
    cos, sin = (torch.from_numpy(f(wide) * scaling).to(dtype) for f in (np.cos, np.sin))
    return cos, sin


def _gate(theirs: Any) -> Any:
    """A forward of Qwen3-MoE's gate with one operator for one row."""

    def forward(self: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x, weight = hidden_states, self.weight
        is_row = x.numel() == x.shape[-1] and x.dtype == weight.dtype
        if is_row and decode.is_wanted(x):
            return decode.route(x.reshape(1, -1), weight, self.top_k, self.norm_topk_prob)
        found: tuple[Tensor, Tensor, Tensor] = theirs(self, x)
        return found

    forward.is_gate = True  # type: ignore[attr-defined]
    return forward


class _Functional:
    """torch.nn.functional, but linear() of one row, and of 16 bits where torch is slow, is our product."""

    def __getattr__(self, name: str) -> Any:
        return getattr(nn.functional, name)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        is_row = bias is None and x.numel() == x.shape[-1] and x.dtype == weight.dtype
        if is_row and decode.is_wanted(x):
            return decode.linear(x, weight)
        if is_slow(x) and x.dtype == weight.dtype:
            return sixteen_bits.linear(x, weight, bias)
        return nn.functional.linear(x, weight, bias)


def attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """Transformers' sdpa_attention_forward.

    One query of 16 bits, and more of them where torch multiplies these slowly, are computed in float32 and rounded.
    """
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if query.shape[2] == 1 and query.dtype in SIXTEEN_BITS and decode.is_wanted(query):
        mask = attention_mask
        is_known = options.keys().isdisjoint(("position_bias", "cache")) and not options.get("dropout")
        is_plain = mask is None or tuple(mask.shape) == (query.shape[0], 1, 1, key.shape[2])
        if is_known and is_plain and key.stride(3) == value.stride(3) == 1 and key.dtype == query.dtype:
            scale = options.get("scaling") or query.shape[3] ** -0.5
            rows = None if mask is None else mask[:, 0, 0]
            return decode.attend(query, key, value, rows, scale), None
    dtype = query.dtype
    if is_slow(query):
        query, key, value = query.float(), key.float(), value.float()
        if attention_mask is not None and attention_mask.dtype == dtype:
            attention_mask = attention_mask.float()
    out, _ = sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    return out.to(dtype), None
