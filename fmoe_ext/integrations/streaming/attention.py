"""Attention of a new token in float32: torch's kernel for 16 bits takes ten times as long for one query on a CPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

NAME = "fmoe_sdpa"


def use(model: Any) -> None:
    """Makes it the attention of a model that has Transformers' "sdpa"; leaves other kinds of attention alone."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    if model.config._attn_implementation == "sdpa":
        AttentionInterface.register(NAME, attention)
        AttentionMaskInterface.register(NAME, sdpa_mask)
        model.set_attn_implementation(NAME)


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
