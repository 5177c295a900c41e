"""Find the best live experts of a grid for each token by beam search, asking discovery one coordinate at a time.

RemoteMixtureOfExperts (client/moe.py) calls beam_search() once a forward. A token wants the experts with the highest
scores; the score of expert grid.i.j is a sum, scores[0][i] + scores[1][j].
A grid of n x n experts is too large to ask for each, so the search goes down the coordinates:
    1. ask which i live below "grid"; of each token's, keep the beam_size with the highest scores: its *beam*
    2. ask which j live below each "grid.i" of any beam; keep the beam_size pairs with the highest sums; and so on
    3. ask for the records of the uids that are left
That is d + 1 questions for d dimensions, shared by all tokens: prefixes are numbered over the whole batch and each is
asked for once. A prefix that falls out of a beam is lost even if a very good coordinate lies below it, so the result is
exact for one dimension only. Shapes: T tokens, B prefixes in a beam, n places of a dimension, P different prefixes.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from fmoe_ext.remote.discovery import Discovery, DiscoveryError, ExpertRecord, Unanswered, check_prefix

T = TypeVar("T")
PAUSE = 0.05  # seconds until a question without any answer is asked again


@dataclass(frozen=True)
class Found:
    """Experts, and which of them each token chooses."""

    records: list[ExpertRecord]
    topk_idx: torch.Tensor  # [T, beam_size or fewer] into records, best first; -1: no more live experts
    missing: tuple[str, ...] = ()  # prefixes and uids without an answer in time: experts there may live
    num_asked: int = 0  # prefixes and uids that were asked for


async def beam_search(
    discovery: Discovery, prefix: str, scores: Sequence[torch.Tensor], beam_size: int, timeout: float = 5.0
) -> Found:
    """Find the beam_size live experts with the highest sum of scores, as far as a beam of that width reaches them.

    scores: one [T, n] for each dimension of the grid; expert prefix.i.j scores scores[0][t, i] + scores[1][t, j].
    Asks discovery once a dimension and once for the records, each with an equal share of the time that is left. Keys
    without an answer by then are left out and named in Found.missing; DiscoveryError if a step has no answer at all.
    Exact for one dimension.
    """
    deadline, left = time.monotonic() + timeout, len(scores) + 1  # left: questions
    missing: list[str] = []
    num_asked = 0

    async def ask(
        question: Callable[[list[str], float], Awaitable[Mapping[str, T]]], keys: list[str]
    ) -> Mapping[str, T]:
        """Return the answers that come in time; DiscoveryError if none comes before the deadline of the search."""
        nonlocal left, num_asked
        num_asked += len(keys)
        while True:
            seconds = (deadline - time.monotonic()) / left
            if seconds * left <= 0:
                raise DiscoveryError(
                    f"the search below {prefix} was not done within {timeout:.3g} s: "
                    f"no answer for {keys[0]}{f' and {len(keys) - 1} more' if len(keys) > 1 else ''}"
                )
            try:
                found = await question(keys, seconds)
            except Unanswered as error:
                found = error.found
            if found or not keys:
                break
            # not one answer: ask again until the deadline; a directory may fail at once, so leave the loop to others
            await asyncio.sleep(min(PAUSE, max(0.0, deadline - time.monotonic())))
        left -= 1
        missing.extend(key for key in keys if key not in found)
        return found

    num_tokens = scores[0].shape[0]
    prefixes = [check_prefix(prefix)]
    # [T, B] into prefixes, and their sums of scores; -1: no prefix
    beam_prefix = torch.zeros(num_tokens, 1, dtype=torch.int64, device="cpu")
    beam_score = torch.zeros(num_tokens, 1, dtype=scores[0].dtype, device="cpu")

    async def records_of(keys: list[str], seconds: float) -> Mapping[str, ExpertRecord | None]:
        return dict(zip(keys, await discovery.get(keys, timeout=seconds), strict=True))

    for axis in scores:
        live = await ask(lambda keys, seconds: discovery.successors(keys, timeout=seconds), prefixes)
        # [P + 1, n]: the live coordinates below each prefix; none in the last row, where beam_prefix is -1
        alive = torch.zeros(len(prefixes) + 1, axis.shape[1], dtype=torch.bool, device="cpu")
        for row, name in enumerate(prefixes):
            alive[row, [place for place in live.get(name, ()) if place < axis.shape[1]]] = True
        candidates = beam_score[:, :, None] + axis.detach().cpu()[:, None, :]  # [T, B, n]
        candidates = candidates.masked_fill(~alive[beam_prefix], -torch.inf).flatten(1)  # [T, B * n]
        best = candidates.topk(min(beam_size, candidates.shape[1]), dim=1)
        parent, place = best.indices // axis.shape[1], best.indices % axis.shape[1]
        # a code for each longer prefix, parent * n + place; unique() numbers those that any token has kept
        extended = beam_prefix.gather(1, parent) * axis.shape[1] + place
        extended = extended.masked_fill(best.values == -torch.inf, -1)
        beam_score = best.values
        used, index = extended.unique(return_inverse=True)
        has_none = int(bool((used[:1] < 0).any()))  # -1 sorts first and is no prefix: it keeps its number
        beam_prefix = index - has_none
        codes = used[has_none:].tolist()
        prefixes = [f"{prefixes[code // axis.shape[1]]}.{code % axis.shape[1]}" for code in codes]
    found = await ask(records_of, prefixes)
    records = [found.get(uid) for uid in prefixes]
    # an expert may have died since its prefix was found: the living are numbered anew and come first
    kept = [n for n, record in enumerate(records) if record is not None]
    number = torch.full((len(records) + 1,), -1, device="cpu")  # its last entry: no expert
    number[kept] = torch.arange(len(kept), device="cpu")
    renamed = number[beam_prefix]
    order = (renamed < 0).to(torch.int8).argsort(dim=1, stable=True)
    topk_idx = renamed.gather(1, order)
    return Found([r for r in records if r is not None], topk_idx, tuple(missing), num_asked)
