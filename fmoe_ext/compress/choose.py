"""Choose the experts that stay: the best of each layer, as many in every layer, for config.json has one number."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fmoe_ext.checkpoint.errors import CheckpointError

TOP_K = (
    "num_experts_per_tok",
    "num_experts_per_token",
    "experts_per_token",
    "moe_topk",
    "moe_k",
    "top_k_experts",
)


def number_to_keep(
    num_experts: int, keep: float | None, experts: int | None, config: Mapping[str, Any]
) -> int:
    """The number of experts that stay in each layer, of num_experts.

    keep: a share of them, above 0 and up to 1, rounded to the nearest; experts: their number instead. config: of the
    text model. Raises CheckpointError if neither or both are given, for fewer than a token chooses, and for a number
    that the groups of a group-limited router do not divide.
    """
    if (keep is None) == (experts is None):
        raise CheckpointError("give either keep, a share of the experts, or experts, their number")
    if keep is not None and not 0 < keep <= 1:
        raise CheckpointError(f"keep must be above 0 and at most 1, but got {keep}")
    number = max(1, round(num_experts * keep)) if keep is not None else int(experts or 0)
    if not 1 <= number <= num_experts:
        raise CheckpointError(f"the model has {num_experts} experts a layer, so {number} cannot stay")
    top_k = next((int(config[name]) for name in TOP_K if config.get(name)), 1)
    groups = int(config.get("n_group") or 1)
    if number < top_k:
        raise CheckpointError(f"a token chooses {top_k} experts, so {number} are too few")
    if number % groups:
        raise CheckpointError(
            f"the router chooses among {groups} groups of experts, so {number} must be a multiple of {groups}"
        )
    if groups > 1 and number // groups < 2:
        raise CheckpointError(
            f"a group of experts is scored by its best two experts, so {number} in {groups} are too few"
        )
    chosen_groups = int(config.get("topk_group") or groups)
    if number // groups * chosen_groups < top_k:
        raise CheckpointError(
            f"a token chooses {top_k} experts of {chosen_groups} groups, so {number // groups} a group are too few"
        )
    return number


def best(scores: Tensor, number: int, groups: int = 1) -> list[int]:
    """The experts of the highest scores [E], as many in each group, in their old order; the first of equals."""
    in_groups = scores.view(groups, -1)
    order = torch.argsort(in_groups, dim=1, descending=True, stable=True)[:, : number // groups]
    offset = torch.arange(groups, device=scores.device)[:, None] * in_groups.shape[1]
    found: list[int] = (order + offset).flatten().sort().values.tolist()
    return found
