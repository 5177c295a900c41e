"""Pass a Transformers model's attention mask on to its MoE layers, which never see it, as padding.

fmoefy and import_model call heed_attention_masks(). It puts hooks around the forwards of the model: before one, the
mask becomes the Batch (tokens.py) that a user's valid_tokens() would set; after it the outer Batch is back. An FMoE
layer inside leaves the tokens out that the Batch says are padding.

Masks have many forms: [B, S] of 0 and 1; [B, S, K] or [B, heads, S, K], boolean or additive, where a token that may
not attend to itself is padding; a mapping with a mask for each kind of attention. With a key-value cache only the last
columns are for the tokens of this forward. And some models give their layers other tokens than they get themselves:
such layers read the masks that they are given.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fmoe_ext.layers import FMoE
from fmoe_ext.tokens import Batch, current_batch, enter, leave, with_valid

MASKED = -1000.0  # an entry of an additive mask below this leaves its token out


def heed_attention_masks(model: nn.Module) -> None:
    """Make FMoE layers treat the tokens that attention_mask leaves out as padding.

    The innermost Transformers models with FMoE layers read their attention_mask; where a model changes the number of
    tokens, its encoders and layers read their own masks. valid_tokens() around the model takes precedence.
    """
    modeling = sys.modules.get("transformers.modeling_utils")
    if modeling is None:  # then none of its models is here
        return
    models = [m for m in model.modules() if isinstance(m, modeling.PreTrainedModel) and _has_moe(m)]
    for own in models:
        # the innermost models: their mask is as their layers see it, where one around them may have changed it
        if not any(m is not own for m in own.modules() if m in models):
            for m, reader in _readers(own):
                m.register_forward_pre_hook(reader.before, with_kwargs=True)
                m.register_forward_hook(reader.after, always_call=True)


def _readers(model: nn.Module) -> Iterator[tuple[nn.Module, _MaskReader]]:
    """Yield (module, what reads its mask) for a Transformers model, its encoders and its layers."""
    names = _parameters(model)
    has_two_masks = "decoder_input_ids" in names  # FSMT: encoder and decoder are no models of their own
    if not has_two_masks:
        yield model, _MaskReader(names)
    for m in model.modules():
        names = _parameters(m)
        if m is model or isinstance(m, FMoE) or not _has_moe(m) or not any("mask" in name for name in names):
            continue
        # an encoder or decoder of FSMT is read as a model; other modules read their masks only if the tokens differ
        is_half = has_two_masks and "input_ids" in names
        yield m, _MaskReader(names) if is_half else _MaskOfLayerReader(names)


def _parameters(module: nn.Module) -> tuple[str, ...]:
    return tuple(inspect.signature(module.forward).parameters)


def _has_moe(module: nn.Module) -> bool:
    return any(isinstance(m, FMoE) for m in module.modules())


@dataclass(frozen=True)
class _BatchOfModel(Batch):
    """A Batch whose padding comes from a model's attention_mask; check() blames the mask if the tokens are others."""

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
    """Hooks that set the Batch around the forward of a Transformers model. names: the parameters of this forward.

    _open is a stack: a forward may run inside itself, and one that raises closes its Batch, too (always_call).
    """

    def __init__(self, names: tuple[str, ...]) -> None:
        self._names = names
        self._open: list[Any] = []

    # copies of the model run nothing yet: they begin with an empty stack
    def __deepcopy__(self, _: Any) -> _MaskReader:
        return type(self)(self._names)

    def __reduce__(self) -> tuple[type[_MaskReader], tuple[tuple[str, ...]]]:
        return type(self), (self._names,)

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        batch = self._batch(module, dict(zip(self._names, args, strict=False)) | kwargs)
        self._open.append(None if batch is None else enter(batch))

    def after(self, *_: Any) -> None:
        outer = self._open.pop()
        if outer is not None:
            leave(outer)

    def _batch(self, module: nn.Module, given: dict[str, Any]) -> Batch | None:
        """Return the Batch for a forward with these arguments; None to leave the outer one."""
        outer = current_batch()
        mask = given.get("attention_mask")
        if isinstance(mask, Mapping):  # one for each kind of attention
            mask = next(iter(mask.values()), None)
        elif isinstance(given.get("decoder_padding_mask"), Tensor):  # FSMT: True for padding
            mask = given["decoder_padding_mask"] == 0
        # the tokens tell the length of this forward: [B, S] or [B, S, D]
        sources = ("input_ids", "inputs_embeds", *self._names[:1])
        tokens = next((given[name] for name in sources if isinstance(given.get(name), Tensor)), None)
        if outer.rows is not None or not isinstance(mask, Tensor) or tokens is None:
            return None
        if mask.dim() > 2:
            past = given.get("cache", given.get("past_key_values"))  # the former since Transformers 5.24
            mask = _attends_to_itself(mask, tokens, past)
        valid = mask[:, -tokens.shape[1] :]
        name = type(module).__name__
        # its layers get the tokens and, behind them, config.ngram streams of predictions of the same length
        if name == "ProphetNetDecoder":
            config: Any = module.config
            valid = valid.repeat(1, 1 + config.ngram)
        elif name in ("FSMTEncoder", "FSMTDecoder"):  # their layers get [S, B, D]
            valid = valid.t()
        return with_valid(_BatchOfModel(outer.num_tokens, None, outer.sequences, outer.ids, name), valid)


class _MaskOfLayerReader(_MaskReader):
    """Hooks for an encoder or a layer inside the model; they act if it gets another number of tokens than the model."""

    def _batch(self, module: nn.Module, given: dict[str, Any]) -> Batch | None:
        outer = current_batch()
        tokens = given.get(self._names[0])
        # only inside a model whose mask was read, and never in place of the user's valid_tokens()
        if not isinstance(outer, _BatchOfModel) or not isinstance(tokens, Tensor) or tokens.dim() != 3:
            return None
        size = tokens.shape[:2]
        if outer.num_tokens == size.numel():  # the model's mask fits
            return None
        # the first mask that fits the tokens, attention_mask before others
        masks = sorted(
            (name != "attention_mask", name)
            for name, value in given.items()
            if "mask" in name and "padding" not in name and isinstance(value, Tensor)
        )
        for _, name in masks:
            mask = given[name]
            if mask.shape == size:
                return with_valid(_BatchOfModel(model=outer.model), _is_open(mask, mask))
            if mask.dim() in (3, 4) and mask.shape[-1] == size[1] and mask.shape[-2] in (1, size[1]):
                return with_valid(_BatchOfModel(model=outer.model), _attends_to_itself(mask, tokens, None))
        return None


def _attends_to_itself(mask: Tensor, tokens: Tensor, past: Any) -> Tensor:
    """Return valid [B, S] of a mask [B, S or 1, K] or [B, heads, S or 1, K], boolean, 0 / 1 or additive.

    past: the key-value cache, whose tokens have the first columns. Token s is valid if it may attend to itself: the
    entry at column first + s of row s, a diagonal.
    """
    batch, length = tokens.shape[:2]
    if mask.dim() == 4:
        mask = mask[:, 0]
    before = past.get_seq_length() if hasattr(past, "get_seq_length") else mask.shape[-1]
    first = max(0, min(int(before), mask.shape[-1] - length))  # its column of this forward's first token
    return _is_open(mask.expand(batch, length, -1).diagonal(first, dim1=1, dim2=2), mask)


def _is_open(own: Tensor, mask: Tensor) -> Tensor:
    """Return True where an entry leaves its token in. mask: all of it, which shows if it is 0 / 1 or additive."""
    if not own.is_floating_point():
        return own != 0
    is_zero_or_one = ((mask == 0) | (mask == 1)).all() & (mask == 1).any()
    return torch.where(is_zero_or_one, own == 1, own > MASKED)
