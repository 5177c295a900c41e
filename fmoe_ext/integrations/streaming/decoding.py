"""A new token on a CPU: attention in float32, norms in one pass, and gates by our product.

torch's attention for 16 bits takes ten times as long there for one query, its product of 16 bits with one row calls
code for all processors, and an RMSNorm of Transformers is seven operators.
"""

from __future__ import annotations

import functools
import types
from typing import Any

import torch
from torch import Tensor, nn

from fmoe_ext.integrations.streaming.packed_linear import GATES
from fmoe_ext.ops import decode

NAME = "fmoe_sdpa"
MOST = 1 << 16  # elements of new tokens whose norms one thread computes


def use(model: Any) -> None:
    """Has a model compute new tokens so: its attention if it is Transformers' "sdpa", its RMSNorms and its gates.

    A norm or a gate gets a class that is derived from its own. Everything else, and every other call, stays as it was.
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    if model.config._attn_implementation == "sdpa":
        AttentionInterface.register(NAME, attention)
        AttentionMaskInterface.register(NAME, sdpa_mask)
        model.set_attn_implementation(NAME)
    for path, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if not isinstance(weight, nn.Parameter):
            continue
        if _is_rms_norm(type(module)):
            module.__class__ = _derived(OneNorm, type(module))
        elif path.endswith(GATES) and weight.dim() == 2 and _with_our_linear(type(module)):
            module.__class__ = _derived(OneGate, type(module))


class OneNorm(nn.Module):
    """Before the class of an RMSNorm: a new token is normed by one operator."""

    weight: Tensor
    variance_epsilon: float

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight
        is_token = x.dim() > 2 and x.shape[1] == 1 and x.numel() <= MOST  # [B, 1, D] or [B, 1, heads, D]
        if is_token and x.dtype == weight.dtype and decode.is_wanted(x):
            return decode.rms_norm(x, weight, self.variance_epsilon)
        y: Tensor = super().forward(x)
        return y


class OneGate(nn.Module):
    """Before the class of a gate: its forward, but torch.nn.functional.linear of one row is our product."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        if x.numel() == x.shape[-1] and decode.is_wanted(x):
            return _with_our_linear(type(self).__mro__[2])(self, x, *args, **kwargs)
        return super().forward(x, *args, **kwargs)


class _Functional:
    """torch.nn.functional with another linear()."""

    def __getattr__(self, name: str) -> Any:
        return getattr(nn.functional, name)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if bias is None and x.dtype == weight.dtype:
            return decode.linear(x, weight)
        return nn.functional.linear(x, weight, bias)


@functools.cache
def _with_our_linear(cls: Any) -> Any:
    """The forward of a class with our linear product; None if it does not call F.linear by this name."""
    forward = cls.forward
    code = getattr(forward, "__code__", None)
    if code is None or code.co_freevars or forward.__globals__.get("F") is not nn.functional:
        return None
    if not {"F", "linear"} <= set(code.co_names):
        return None
    return types.FunctionType(
        code, {**forward.__globals__, "F": _Functional()}, "forward", forward.__defaults__
    )


@functools.cache
def _derived(mixin: type, cls: type) -> type:
    """A class that is `mixin` before `cls`, with the name of cls."""
    return type(cls.__name__, (mixin, cls), {"__module__": cls.__module__, "__doc__": cls.__doc__})


@functools.cache
def _is_rms_norm(cls: Any) -> bool:
    """True if a class has the forward of LlamaRMSNorm, as most norms of Transformers do, byte for byte."""
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    theirs, ours = (getattr(c.forward, "__code__", None) for c in (cls, LlamaRMSNorm))
    return all(getattr(theirs, n, None) == getattr(ours, n) for n in ("co_code", "co_names", "co_consts"))


def attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """Transformers' sdpa_attention_forward; one query in bfloat16 or float16 is computed in float32 and rounded."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    is_token = query.shape[2] == 1 and query.device.type == "cpu" and not torch.is_grad_enabled()
    dtype = query.dtype
    if is_token and dtype in (torch.bfloat16, torch.float16):
        query, key, value = query.float(), key.float(), value.float()
        if attention_mask is not None and attention_mask.is_floating_point():
            attention_mask = attention_mask.float()
    out, _ = sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    return out.to(dtype), None
