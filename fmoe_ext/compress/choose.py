"""Choose which experts of a layer stay when a model is pruned: prune.py calls best(), with merge= best_merged().

Every layer keeps the same number, as config.json has only one. best() keeps the highest scores. best_merged() lets an
expert that goes live on in a similar one that stays: their weights are averaged by use. Both ideas of merging are
M-SMoE's (Li et al., 2024, https://arxiv.org/abs/2310.01334); M-SMoE keeps all rows of the router, but a folder of
Transformers has one row for each expert, so rows are averaged too.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


def best(scores: Tensor, number: int, groups: int = 1) -> list[int]:
    """Return the `number` best experts by scores [E], equally many of each group, ascending; of equals the first."""
    in_groups = scores.view(groups, -1)
    order = torch.argsort(in_groups, dim=1, descending=True, stable=True)[:, : number // groups]
    offset = torch.arange(groups, device=scores.device)[:, None] * in_groups.shape[1]
    found: list[int] = (order + offset).flatten().sort().values.tolist()
    return found


def similarities(matrices: Iterable[Tensor]) -> Tensor:
    """Return the cosine of each pair of experts, all weights of one as one vector: [E, E] float64, 0 on the diagonal.

    matrices: each a projection of all experts, [E, n]. They are read one at a time, so an iterator saves memory.
    """
    products: Tensor | None = None
    for matrix in matrices:
        wide = matrix.to(torch.promote_types(matrix.dtype, torch.float32))
        product = (wide @ wide.T).double()
        products = product if products is None else products + product
    if products is None:
        raise ValueError("there are no weights to compare")
    norms = products.diagonal().clamp(min=1e-300).sqrt()  # an expert of zeros is similar to none
    return (products / norms / norms[:, None]).fill_diagonal_(0)


def best_merged(
    scores: Tensor, count: Tensor, cosine: Tensor, number: int, least: float
) -> dict[int, dict[int, float]]:
    """Choose the experts that stay -> {expert that stays: {expert whose weights it is made of: share}}.

    1. While more than `number` are left: of the most similar pair, if its cosine is at least `least`, the expert with
       the lower score goes. 2. Then the lowest scores go, until `number` are left. 3. Each expert that goes is merged
       into the most similar one that stays, or dropped if their cosine is below `least`. Shares follow `count`: an
       expert without tokens has none, unless all of a group are without. Of equal scores the first stays.
    scores [E] float64, count [E] int64: tokens of each expert, cosine [E, E].
    """
    # 1. The worse of each similar pair
    pairs = cosine.clone()
    gone: list[int] = []
    while scores.numel() - len(gone) > number and pairs.max() >= least:
        pair = divmod(int(pairs.argmax()), scores.numel())
        goes = min(pair, key=lambda e: (float(scores[e]), -e))
        gone.append(goes)
        pairs[goes] = pairs[:, goes] = -torch.inf  # it is in no pair any more
    # 2. The lowest scores
    worst_first = reversed(torch.argsort(scores, descending=True, stable=True).tolist())
    others = [e for e in worst_first if e not in gone]
    gone += others[: max(0, scores.numel() - len(gone) - number)]
    # 3. Who is merged into whom, by their shares of tokens
    stay = sorted(set(range(scores.numel())) - set(gone))
    groups = {e: [e] for e in stay}
    for e in gone:
        nearest = max(stay, key=lambda other: float(cosine[e, other]))
        if cosine[e, nearest] >= least:
            groups[nearest].append(e)
    shares = {}
    for e, group in groups.items():
        total = int(count[group].sum())
        if total:
            shares[e] = {other: int(count[other]) / total for other in group if count[other]}
        else:  # no token chose any of them: the one that stays is kept as it is
            shares[e] = {e: 1.0}
    return shares
