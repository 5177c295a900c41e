"""The attention mask of a Transformers model, as the padding of the MoE layers inside it, which never see the mask."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fmoe_ext.layers import FMoE
from fmoe_ext.tokens import Batch, batch_is, current_batch, with_valid

MASKED = -1000.0  # below it an entry of an additive mask leaves its token out


def heed_attention_masks(model: nn.Module) -> None:
    """Makes FMoE layers treat the tokens that attention_mask leaves out as padding.

    Every Transformers model inside of model that has FMoE layers of its own reads its attention_mask: [B, S], of which
    the last ones count with a key-value cache, or [B, S, K] and [B, heads, S, K], where a token that may not attend to
    itself is padding. valid_tokens() around the model takes precedence.
    """
    models = [m for m in model.modules() if _is_transformers_model(m) and _has_moe(m)]
    for own in models:
        if not any(m is not own for m in own.modules() if m in models):
            reader = _MaskReader(tuple(inspect.signature(own.forward).parameters))
            own.register_forward_pre_hook(reader.before, with_kwargs=True)
            own.register_forward_hook(reader.after, always_call=True)


def _is_transformers_model(module: nn.Module) -> bool:
    modeling = sys.modules.get("transformers.modeling_utils")
    return modeling is not None and isinstance(module, modeling.PreTrainedModel)


def _has_moe(module: nn.Module) -> bool:
    return any(isinstance(m, FMoE) for m in module.modules())


@dataclass(frozen=True)
class _BatchOfModel(Batch):
    """A batch whose padding is that of a model's attention_mask."""

    model: str = ""

    def check(self, num_tokens: int) -> None:
        if self.num_tokens not in (None, num_tokens):
            raise ValueError(
                f"an MoE layer in {self.model} gets {num_tokens} tokens, but its attention_mask is for "
                f"{self.num_tokens}: the model changes the number of tokens, so that the mask does not say which of "
                "them are padding. Call the model inside fmoe_ext.tokens.valid_tokens(mask), a mask of the tokens "
                "that the layer gets, or without attention_mask"
            )


class _MaskReader:
    """valid_tokens() around the forward of a module with these parameters."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self._names = names
        self._open: list[Any] = []

    def __deepcopy__(self, _: Any) -> _MaskReader:
        return _MaskReader(self._names)

    def __reduce__(self) -> tuple[type[_MaskReader], tuple[tuple[str, ...]]]:
        return _MaskReader, (self._names,)

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        outer = current_batch()
        valid = None if outer.rows is not None else self._valid(module, args, kwargs)
        block = None
        if valid is not None:
            batch = _BatchOfModel(outer.num_tokens, None, outer.sequences, type(module).__name__)
            block = batch_is(with_valid(batch, valid))
        self._open.append(block)
        if block is not None:
            block.__enter__()

    def after(self, *_: Any) -> None:
        block = self._open.pop()
        if block is not None:
            block.__exit__(None, None, None)

    def _valid(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
        """attention_mask as one entry for each token of this forward; None for none."""
        given = dict(zip(self._names, args, strict=False)) | kwargs
        mask = given.get("attention_mask")
        if isinstance(mask, Mapping):  # one for each kind of attention
            mask = next(iter(mask.values()), None)
        sources = ("input_ids", "inputs_embeds", *self._names[:1])
        tokens = next((given[name] for name in sources if isinstance(given.get(name), Tensor)), None)
        if not isinstance(mask, Tensor) or tokens is None:
            return None
        if mask.dim() > 2:
            mask = _attends_to_itself(mask, tokens, given.get("past_key_values"))
        return _with_tokens_added(module, mask[:, -tokens.shape[1] :])


def _attends_to_itself(mask: Tensor, tokens: Tensor, past: Any) -> Tensor:
    """[B, S] of a mask [B, S or 1, K] or [B, heads, S or 1, K], boolean, 0 / 1 or additive."""
    batch, length = tokens.shape[:2]
    if mask.dim() == 4:
        mask = mask[:, 0]
    before = past.get_seq_length() if hasattr(past, "get_seq_length") else mask.shape[-1]
    first = max(0, min(int(before), mask.shape[-1] - length))  # its column of this forward's first token
    own = mask.expand(batch, length, -1).diagonal(first, dim1=1, dim2=2)
    if own.is_floating_point():
        return torch.where((mask > 0).any(), own > 0, own > MASKED)
    return own != 0


def _with_tokens_added(module: nn.Module, valid: Tensor) -> Tensor:
    """valid [B, S] with an entry for every token that the layers of a model get, for the models that add some."""
    config: Any = module.config
    kind, length = type(module).__name__, valid.shape[1]
    if kind == "ProphetNetDecoder":  # the tokens, and their predictions for each of the next ones
        return valid.repeat(1, 1 + config.ngram)
    if kind.startswith(("Longformer", "LEDEncoder")):
        windows = config.attention_window
        multiple = windows if isinstance(windows, int) else max(windows)
    elif kind.startswith("BigBird") and getattr(module, "attention_type", "") == "block_sparse":
        multiple = config.block_size
    else:
        return valid
    return F.pad(valid, (0, -length % multiple))
