"""Beam search: the best live experts of a grid for each token, asking discovery one level at a time."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fmoe_ext.remote.discovery import Discovery, DiscoveryError, ExpertRecord, check_prefix


@dataclass(frozen=True)
class Found:
    """Experts, and for each token which of them, best first; -1 where there are no more."""

    records: list[ExpertRecord]
    topk_idx: torch.Tensor  # [T, beam_size] into records


async def beam_search(
    discovery: Discovery,
    prefix: str,
    scores: Sequence[torch.Tensor],
    beam_size: int,
    timeout: float = 5.0,
) -> Found:
    """The beam_size live experts with the highest sum of scores, as far as a beam of that width finds them.

    scores: one [T, n] for each dimension of the grid; expert prefix.i.j scores scores[0][t, i] + scores[1][t, j].
    Asks discovery once a dimension and once for the records; DiscoveryError if that takes longer than timeout.
    Exact for one dimension.
    """
    deadline = time.monotonic() + timeout
    num_tokens = scores[0].shape[0]
    prefixes = [check_prefix(prefix)]
    beam_prefix = torch.zeros(num_tokens, 1, dtype=torch.int64)  # [T, B] into prefixes; -1: none
    beam_score = torch.zeros(num_tokens, 1, dtype=scores[0].dtype)
    for axis in scores:
        live = await discovery.successors(prefixes, timeout=_left(deadline, prefix, timeout))
        alive = torch.zeros(len(prefixes) + 1, axis.shape[1], dtype=torch.bool)  # the last row: no prefix
        for n, name in enumerate(prefixes):
            alive[n, [place for place in live[name] if place < axis.shape[1]]] = True
        candidates = beam_score[:, :, None] + axis.detach().cpu()[:, None, :]  # [T, B, n]
        candidates = candidates.masked_fill(~alive[beam_prefix], -torch.inf).flatten(1)
        best = candidates.topk(min(beam_size, candidates.shape[1]), dim=1)
        parent, place = best.indices // axis.shape[1], best.indices % axis.shape[1]
        extended = beam_prefix.gather(1, parent) * axis.shape[1] + place
        extended = extended.masked_fill(best.values == -torch.inf, -1)
        beam_score = best.values
        used, beam_prefix = _number(extended)
        prefixes = [f"{prefixes[code // axis.shape[1]]}.{code % axis.shape[1]}" for code in used]
    records = await discovery.get(prefixes, timeout=_left(deadline, prefix, timeout))
    return _drop_dead(records, beam_prefix)


def _left(deadline: float, prefix: str, timeout: float) -> float:
    """Seconds until a deadline; DiscoveryError once it has passed."""
    left = deadline - time.monotonic()
    if left <= 0:
        raise DiscoveryError(f"the search below {prefix} was not done within {timeout:.3g} s")
    return left


def _number(codes: torch.Tensor) -> tuple[list[int], torch.Tensor]:
    """The different codes >= 0, and for each element which of them it is; -1 stays."""
    used, index = codes.unique(return_inverse=True)
    has_none = bool((used[:1] < 0).any())
    return used[int(has_none) :].tolist(), index - int(has_none)


def _drop_dead(records: Sequence[ExpertRecord | None], topk_idx: torch.Tensor) -> Found:
    kept = [n for n, record in enumerate(records) if record is not None]
    number = torch.full((len(records) + 1,), -1)  # its last entry: no expert
    number[kept] = torch.arange(len(kept))
    renamed = number[topk_idx]
    order = (renamed < 0).to(torch.int8).argsort(dim=1, stable=True)  # the living first
    return Found([r for r in records if r is not None], renamed.gather(1, order))
