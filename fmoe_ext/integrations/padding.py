"""The attention mask of a Transformers model, for the MoE layers inside it, which it does not pass it to."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn

from fmoe_ext.layers import FMoE
from fmoe_ext.tokens import Batch, batch_is, with_valid


def heed_attention_masks(model: nn.Module) -> None:
    """Every Transformers model inside of model that has FMoE layers of its own treats the tokens that its
    attention_mask [B, S] leaves out as padding, on either side; with a key-value cache, the last ones of it.
    """
    models = [m for m in model.modules() if _is_transformers_model(m) and _has_moe(m)]
    for own in models:
        if not any(m is not own for m in own.modules() if m in models):
            reader = _MaskReader()
            own.register_forward_pre_hook(reader.before, with_kwargs=True)
            own.register_forward_hook(reader.after, always_call=True)


def _is_transformers_model(module: nn.Module) -> bool:
    modeling = sys.modules.get("transformers.modeling_utils")
    return modeling is not None and isinstance(module, modeling.PreTrainedModel)


def _has_moe(module: nn.Module) -> bool:
    return any(isinstance(m, FMoE) for m in module.modules())


class _MaskReader:
    """valid_tokens() around the forward of a module."""

    def __init__(self) -> None:
        self._open: list[Any] = []

    def __deepcopy__(self, _: Any) -> _MaskReader:
        return _MaskReader()

    def __reduce__(self) -> tuple[type[_MaskReader], tuple[()]]:
        return _MaskReader, ()

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        valid = _mask_of(args, kwargs)
        block = None if valid is None else batch_is(with_valid(Batch(), valid))
        self._open.append(block)
        if block is not None:
            block.__enter__()

    def after(self, *_: Any) -> None:
        block = self._open.pop()
        if block is not None:
            block.__exit__(None, None, None)


def _mask_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
    """attention_mask as one entry for each token of this forward; None for none, or one of attention itself (4-D)."""
    mask = kwargs.get("attention_mask")
    ids = kwargs.get("input_ids", args[0] if args else None)
    tokens = kwargs.get("inputs_embeds") if ids is None else ids
    if not isinstance(mask, torch.Tensor) or mask.dim() != 2 or not isinstance(tokens, torch.Tensor):
        return None
    return mask[:, -tokens.shape[1] :]
