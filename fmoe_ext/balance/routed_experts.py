"""Exchange recorded choices with inference engines: an array [tokens, layers, K] of expert numbers for each sequence.

vLLM returns integers as `routed_experts` (and `prompt_routed_experts` before it), SGLang base64 of int32, without a row
for the last token. Both count only the layers that have experts, in order, and number experts as the checkpoint does.

A RoutingReplay has tokens of a whole batch in one dimension [B * S], padding included or left out; `valid` [B, S] says
which row belongs to which sequence.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from typing import Any

import torch

from fmoe_ext.balance.replay import CHOOSE_ANEW, Choices, RoutingReplay
from fmoe_ext.gates import ExpertChoiceGate


def routed_experts(
    replay: RoutingReplay,
    valid: torch.Tensor | None = None,
    *,
    sequence_first: bool = False,
    forward: int = -1,
) -> list[torch.Tensor]:
    """Return the choices of a forward: an int16 tensor [tokens, layers, K] for each sequence.

    valid [B, S]: bool or 0 / 1, 0 for padding, whose rows are left out; None for one sequence of all tokens. The replay
    may have recorded all tokens or, under valid_tokens(), the real ones. sequence_first: the model's tokens were
    [S, B], as Megatron's are. forward: the number of the recorded forward. Raises ValueError for gates or sizes that
    do not fit, RuntimeError for gates of which nothing was recorded.
    Equivalent to: torch.stack([choices[name][forward].kept for name in choices], 1)[rows of the sequence].

    Example:

        >>> mlp = fmoe_ext.FMoETransformerMLP(num_experts=4, d_model=8, d_hidden=16, top_k=2)
        >>> replay = fmoe_ext.RoutingReplay(mlp)
        >>> with replay.record():
        ...     _ = mlp(torch.randn(2, 3, 8))
        >>> [choices.shape for choices in routed_experts(replay, valid=torch.tensor([[1, 1, 1], [1, 1, 0]]))]
        [torch.Size([3, 1, 2]), torch.Size([2, 1, 2])]
    """
    replay.check_recorded()
    # [tokens, layers, K], and then the rows of each sequence
    kept = [replay.choices[name][forward].kept for name in replay.views]
    if any(part.shape != kept[0].shape for part in kept):
        raise ValueError(f"the gates chose {[list(part.shape) for part in kept]}, not all [tokens, K] alike")
    rows = torch.stack(kept, 1).to(torch.int16).cpu()
    if valid is None:
        return [rows]
    mask = valid.bool().cpu()
    places = _places(mask, sequence_first)
    if rows.shape[0] == int(mask.sum()):
        # recorded under valid_tokens(): a real token's row is its number among the real ones
        order = (mask.t() if sequence_first else mask).flatten().long().cumsum(0) - 1
        places = [order[place] for place in places]
    elif rows.shape[0] != mask.numel():
        raise ValueError(
            f"{rows.shape[0]} tokens were recorded, but valid has {mask.numel()}, {int(mask.sum())} of them real"
        )
    return [rows[place] for place in places]


def load_routed_experts(
    replay: RoutingReplay,
    arrays: Sequence[Any],
    valid: torch.Tensor | None = None,
    *,
    sequence_first: bool = False,
) -> None:
    """Set replay.choices from arrays, for one forward of a batch.

    arrays: for each sequence what torch.as_tensor makes [tokens, layers, K] of (tensor, numpy array, lists), integers.
    Tokens without a row, at a sequence's end, and those whose choices are all -1 choose anew when played. Other
    arguments: routed_experts(). Raises ValueError for another number of sequences, tokens, layers or experts, and for
    an ExpertChoiceGate.

    Example:

        >>> mlp = fmoe_ext.FMoETransformerMLP(num_experts=4, d_model=8, d_hidden=16, top_k=2)
        >>> replay = fmoe_ext.RoutingReplay(mlp)
        >>> load_routed_experts(replay, [torch.tensor([[[3, 0]], [[1, 2]]])])  # one sequence of two tokens
        >>> with replay.play():
        ...     mlp.gate(torch.randn(2, 8))[0].tolist()
        [[3, 0], [1, 2]]
    """
    for name, view in replay.views.items():
        if isinstance(view.module, ExpertChoiceGate):
            raise ValueError(
                f"{name} is an ExpertChoiceGate, whose experts choose tokens: no engine decodes so, and K experts for "
                "each token are not its choices. Leave replay.choices as record() made them"
            )
    # 1. where each sequence's tokens are in the batch
    parts = [torch.as_tensor(array, device="cpu").long() for array in arrays]
    if valid is None:
        if len(parts) != 1:
            raise ValueError(f"{len(parts)} sequences need valid [B, S], which says where each is")
        valid = torch.ones(1, parts[0].shape[0], dtype=torch.bool, device="cpu")
    mask = valid.bool().cpu()
    places = _places(mask, sequence_first)
    if len(parts) != len(places):
        raise ValueError(f"there are {len(parts)} arrays, but valid has {len(places)} sequences")
    # 2. the choices of all B * S tokens and layers
    views = replay.views
    top_k = parts[0].shape[-1]
    # a token that no array has, as padding, chooses anew
    whole = torch.full((mask.numel(), len(views), top_k), CHOOSE_ANEW, device="cpu")
    for number, (part, place) in enumerate(zip(parts, places, strict=True)):
        if part.dim() != 3 or part.shape[1:] != whole.shape[1:] or part.shape[0] > len(place):
            raise ValueError(
                f"array {number} is {list(part.shape)}, but the sequence has {len(place)} tokens, the model "
                f"{len(views)} layers with gates: [tokens, {len(views)}, {top_k}] is expected"
            )
        whole[place[: part.shape[0]]] = torch.where((part == -1).all(-1, keepdim=True), CHOOSE_ANEW, part)
    # 3. for each gate its layer, once it fits
    for layer, (name, view) in enumerate(views.items()):
        chosen = whole[:, layer].contiguous()
        if view.top_k not in (None, top_k):
            raise ValueError(f"the arrays have {top_k} choices a token, but {name} makes {view.top_k}")
        if bool(((chosen < 0) & (chosen != CHOOSE_ANEW)).any()) or bool((chosen >= view.num_experts).any()):
            raise ValueError(f"the arrays name experts of {name} that are not in [0, {view.num_experts})")
        replay.choices[name] = [Choices(chosen, chosen)]


def decode_routed_experts(text: str | bytes, num_layers: int, top_k: int) -> torch.Tensor:
    """Decode base64 of int32, as SGLang sends it -> [tokens, num_layers, top_k]; ValueError if it is none of that.

    Example:

        >>> text = fmoe_ext.balance.encode_routed_experts(torch.tensor([[[0, 3]], [[1, 2]]]))
        >>> decode_routed_experts(text, num_layers=1, top_k=2).tolist()
        [[[0, 3]], [[1, 2]]]
    """
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ValueError(f"routed experts are no base64: {error}") from None
    row = 4 * num_layers * top_k  # bytes of a token
    if len(data) % row:
        raise ValueError(
            f"{len(data)} bytes of routed experts are no multiple of {row}, {num_layers} layers of {top_k} int32"
        )
    if not data:  # frombuffer() takes no empty bytes
        return torch.empty(0, num_layers, top_k, dtype=torch.int32, device="cpu")
    numbers = torch.frombuffer(bytearray(data), dtype=torch.int32)
    return numbers.reshape(-1, num_layers, top_k)


def encode_routed_experts(array: torch.Tensor) -> str:
    """Encode integers [tokens, layers, K] as base64 of int32, for decode_routed_experts()."""
    return base64.b64encode(array.to(torch.int32).contiguous().numpy().tobytes()).decode()


def _places(mask: torch.Tensor, sequence_first: bool) -> list[torch.Tensor]:
    """Return, for each sequence of mask [B, S], the places of its real tokens among all B * S."""
    if mask.dim() != 2:
        raise ValueError(f"valid must be [B, S], but is {list(mask.shape)}")
    # [B, S]: the number of each token in the order in which the model has them
    number = torch.arange(mask.numel(), device="cpu")
    number = number.view(mask.shape[1], mask.shape[0]).t() if sequence_first else number.view(mask.shape)
    return [row[real] for row, real in zip(number, mask, strict=True)]
