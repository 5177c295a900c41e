"""Tokens that a layer's mask sends to no expert, and what they get instead."""

from collections.abc import Mapping
from typing import Any

import torch

from fmoe_ext.routing import Nest, map_structure


def drop_masked(topk_idx: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """topk_idx [T, K], -1 where mask (T entries) != 0; ValueError for another number of entries."""
    if mask.numel() != topk_idx.shape[0]:
        raise ValueError(
            f"mask must have one entry for each of the {topk_idx.shape[0]} tokens, "
            f"but got shape {list(mask.shape)}"
        )
    return torch.where(_of_rows(mask, topk_idx) != 0, -1, topk_idx)


def fill_masked(
    out: Nest, topk_weights: torch.Tensor, mask: torch.Tensor | None, mask_dict: Mapping[int, Any] | None
) -> Nest:
    """out [T, *] or a nest; where mask (T entries) is a key of mask_dict, its value (scalar, [*], [K, *]), weighted."""
    if mask is None or mask_dict is None:
        return out
    return map_structure(lambda leaf: _fill(leaf, topk_weights, mask, mask_dict), out)


def _fill(
    out: torch.Tensor, topk_weights: torch.Tensor, mask: torch.Tensor, mask_dict: Mapping[int, Any]
) -> torch.Tensor:
    of_rows = _of_rows(mask, out)
    for value, filling in mask_dict.items():
        filling = torch.as_tensor(filling, dtype=topk_weights.dtype, device=out.device)
        filling = filling.expand(topk_weights.shape[1], *out.shape[1:])  # [K, *]
        weighted = torch.tensordot(topk_weights, filling, dims=1).to(out.dtype)  # [T, *]
        out = torch.where(of_rows == value, weighted, out)
    return out


def _of_rows(mask: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """mask [T, 1, ...], shaped to select rows of [T, *]."""
    return mask.to(rows.device).reshape(-1, *(1 for _ in rows.shape[1:]))
