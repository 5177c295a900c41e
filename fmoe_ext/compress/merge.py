"""Merge experts that resemble each other: weights and rows of the router, averaged by the tokens of each.

Grouping around experts that stay, and the average by use, are those of M-SMoE (Li et al., 2024,
https://arxiv.org/abs/2310.01334). It keeps all rows of the router; a folder of Transformers has one for each expert.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from fmoe_ext.checkpoint.errors import CheckpointError
from fmoe_ext.checkpoint.model_folder import FLOATS
from fmoe_ext.checkpoint.safetensors_file import StoredTensor

Shares: TypeAlias = Mapping[int, Mapping[int, float]]  # {expert that stays: {expert: its share}}, of a layer


def similarities(matrices: Iterable[Tensor]) -> Tensor:
    """Cosine of each two experts [E, E] float64, 0 on the diagonal. matrices: weights [E, n], one a projection."""
    products: Tensor | None = None
    for matrix in matrices:
        wide = matrix.to(torch.promote_types(matrix.dtype, torch.float32))
        product = (wide @ wide.T).double()  # summed by projection: one is in memory
        products = product if products is None else products + product
    if products is None:
        raise ValueError("there are no weights to compare")
    norms = products.diagonal().clamp(min=1e-300).sqrt()
    return (products / norms / norms[:, None]).fill_diagonal_(0)


def choose(
    scores: Tensor, count: Tensor, cosine: Tensor, number: int, least: float
) -> dict[int, dict[int, float]]:
    """{expert that stays: {expert: share of it in the merged one}}.

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
        # experts that no token chose have no average: the one that stays is kept as it is
        shares[e] = (
            {other: int(count[other]) / total for other in group if count[other]} if total else {e: 1.0}
        )
    return shares


def merged(name: str, parts: Mapping[int, StoredTensor], shares: Mapping[int, float]) -> StoredTensor:
    """Averages experts' tensors; a single one keeps its bytes. Raises CheckpointError for packed ones."""
    first = next(iter(parts.values()))
    if len(shares) == 1:
        return parts[next(iter(shares))]
    if any(part.dtype not in FLOATS for part in parts.values()):
        raise CheckpointError(f"{name} is packed: merging would round it again. Prune without merging")

    def read() -> Tensor:
        total = sum(part.read().double() * shares[e] for e, part in parts.items() if e in shares)
        return torch.as_tensor(total, device="cpu").to(first.dtype)

    return StoredTensor(first.shape, first.dtype, read)


def mixed(stored: StoredTensor, dim: int, shares: Shares, behind: Sequence[int]) -> StoredTensor:
    """Averages the entries of a router's tensor or of a stack of experts along dim; those behind stay."""
    mixes = [*shares.values(), *({e: 1.0} for e in behind)]
    shape = (*stored.shape[:dim], len(mixes), *stored.shape[dim + 1 :])
    if stored.dtype not in FLOATS and any(len(mix) > 1 for mix in mixes):
        raise CheckpointError(f"a tensor {list(stored.shape)} of experts is packed: prune without merging")

    def parts() -> Iterator[Tensor]:
        whole = stored.read() if dim else None
        for mix in mixes:
            rows = {e: stored.rows(e, e + 1) if whole is None else whole.narrow(dim, e, 1) for e in mix}
            if len(mix) == 1:
                yield next(iter(rows.values()))
            else:
                total = sum(rows[e].double() * share for e, share in mix.items())
                yield torch.as_tensor(total, device="cpu").to(stored.dtype)

    whole = StoredTensor(shape, stored.dtype, lambda: torch.cat([*parts()], dim))
    return whole if dim else StoredTensor(shape, stored.dtype, whole.read, parts=parts)
