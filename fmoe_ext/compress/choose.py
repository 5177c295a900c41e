"""Choose the experts that stay: the best of each layer, as many in every layer, for config.json has one number.

best() keeps the highest scores. best_merged() lets similar experts share one place: grouping around experts that stay,
and averages weighted by use, are M-SMoE's (Li et al., 2024, https://arxiv.org/abs/2310.01334). It keeps all rows of the
router; a folder of Transformers has one for each expert, so rows are averaged too.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


def best(scores: Tensor, number: int, groups: int = 1) -> list[int]:
    """Choose the experts of the highest scores [E], as many in each group, in their old order; the first of equals."""
    in_groups = scores.view(groups, -1)
    order = torch.argsort(in_groups, dim=1, descending=True, stable=True)[:, : number // groups]
    offset = torch.arange(groups, device=scores.device)[:, None] * in_groups.shape[1]
    found: list[int] = (order + offset).flatten().sort().values.tolist()
    return found


def similarities(matrices: Iterable[Tensor]) -> Tensor:
    """Compute the cosine of each two experts: [E, E] float64, 0 on the diagonal.

    matrices: weights [E, n], one a projection; one at a time is in memory.
    """
    products: Tensor | None = None
    for matrix in matrices:
        wide = matrix.to(torch.promote_types(matrix.dtype, torch.float32))
        product = (wide @ wide.T).double()
        products = product if products is None else products + product
    if products is None:
        raise ValueError("there are no weights to compare")
    norms = products.diagonal().clamp(min=1e-300).sqrt()
    return (products / norms / norms[:, None]).fill_diagonal_(0)


def best_merged(
    scores: Tensor, count: Tensor, cosine: Tensor, number: int, least: float
) -> dict[int, dict[int, float]]:
    """Choose the experts that stay -> {one that stays: {expert: its share in the merged one}}.

    The two most similar experts, of a cosine of at least `least`, lose the one with the lower score, until `number`
    are left; then those of the lowest scores go. Each that goes is merged with the most similar one that stays, if
    their cosine is large enough. scores [E] float64, count [E] int64: tokens of each, cosine [E, E].
    """
    left = cosine.clone()
    gone: list[int] = []
    while scores.numel() - len(gone) > number and left.max() >= least:
        one, other = divmod(int(left.argmax()), scores.numel())
        if scores[one] == scores[other]:
            gone.append(max(one, other))
        else:
            gone.append(one if scores[one] < scores[other] else other)
        # -1 is below any cosine: an expert that goes is in no pair any more
        left[gone[-1]] = left[:, gone[-1]] = -1
    for e in torch.argsort(scores, stable=True).tolist():
        if scores.numel() - len(gone) > number and e not in gone:
            gone.append(e)
    stay = sorted(set(range(scores.numel())) - set(gone))
    groups = {e: [e] for e in stay}
    for e in gone:
        nearest = max(stay, key=lambda other: float(cosine[e, other]))
        if cosine[e, nearest] >= least:
            groups[nearest].append(e)
    shares = {}
    for e, group in groups.items():
        total = int(count[group].sum())
        shares[e] = {other: int(count[other]) / total for other in group if count[other]}
        if not total:  # experts that no token chose have no average: the one that stays is kept as it is
            shares[e] = {e: 1.0}
    return shares
