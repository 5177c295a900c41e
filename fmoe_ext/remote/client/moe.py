"""RemoteMixtureOfExperts: a layer of experts on other machines, which come and go while it trains.

Experts form a grid, uid_prefix.i.j, and a linear gate scores each coordinate: expert i.j has the sum of both scores.
For each batch, _mix() searches the best live experts of each sample (beam_search.py), calls each expert once with the
rows of all samples that chose it (Batch), and weighs the answers by softmax. Experts that fail are left out, as long as
k_min of each sample's experts answer. RemoteSwitchMixtureOfExperts chooses one expert a sample and adds a balance loss.
"""

import logging
import math
from collections import Counter
from collections.abc import Sequence, Set
from dataclasses import dataclass, field

import torch
from torch import nn

from fmoe_ext import ops
from fmoe_ext.gates import OneRank, balance_loss
from fmoe_ext.remote import loop
from fmoe_ext.remote.beam_search import Found, beam_search
from fmoe_ext.remote.client.client import Client, Handle, Settings
from fmoe_ext.remote.client.expert import MARGIN, Batch, Call, Directory
from fmoe_ext.remote.discovery import Discovery, check_prefix, coordinates
from fmoe_ext.remote.errors import ExpertGone
from fmoe_ext.remote.security import Credentials

log = logging.getLogger("fmoe_ext.remote")


class RemoteMixtureOfExperts(nn.Module):
    """Choose k_best live experts a sample by a linear gate over a grid; sum their outputs by a softmax of its scores.

    in_features: last dimension of the input; grid_size: one size for each coordinate of the uids; dht: a Directory
    (such as DHT) or any Discovery; uid_prefix: what comes before the coordinates. k_min: experts that must answer each
    sample, or forward raises ExpertGone (allow_zero_outputs=True: such samples get the sum over those that did answer,
    zeros without any); backward_k_min: experts of each sample whose gradients must arrive, or backward raises it;
    patience: seconds to wait for an expert that another server is taking over. timeout_after_k_min: seconds that the
    other experts have once k_min (backward_k_min) have answered every sample. forward_timeout: seconds for the search,
    and again for the calls. Experts that fail in forward have no weight, in backward no gradient: training goes on
    without them. After Learning@home (Ryabinin and Gusev 2020) and hivemind's class of this name.
    """

    def __init__(
        self,
        in_features: int,
        grid_size: Sequence[int],
        dht: Directory | Discovery,
        uid_prefix: str,
        k_best: int,
        k_min: int = 1,
        forward_timeout: float = 10.0,
        backward_timeout: float = 10.0,
        backward_k_min: int = 1,
        allow_zero_outputs: bool = False,
        patience: float = 0.0,
        compression: str = "none",
        credentials: Credentials | None = None,
        timeout_after_k_min: float | None = None,
    ):
        super().__init__()
        if not 1 <= k_min <= k_best:
            raise ValueError(f"k_min must be between 1 and k_best={k_best}, but got {k_min}")
        self.in_features, self.grid_size = in_features, tuple(grid_size)
        self.uid_prefix = check_prefix(uid_prefix)
        self.k_best, self.k_min, self.backward_k_min = k_best, k_min, backward_k_min
        self.allow_zero_outputs, self.timeout_after_k_min = allow_zero_outputs, timeout_after_k_min
        settings = Settings(
            compression, forward_timeout, backward_timeout, info_timeout=forward_timeout, patience=patience
        )
        discovery = dht.discovery if isinstance(dht, Directory) else dht
        self.client = Client(discovery, settings, credentials)
        self.proj = nn.Linear(in_features, sum(self.grid_size))
        self._handles: dict[str, Handle] = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [B, *, in_features] -> [B, *], one output for each sample; a sequence is gated by the mean over it."""
        return self._mix(x, self._scores(x))[0]

    def _scores(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        # -> one [B, n] for each dimension of the grid
        if x.dim() < 2 or x.shape[-1] != self.in_features:
            raise ValueError(f"x must have shape [B, ..., {self.in_features}], but got {list(x.shape)}")
        of_samples = x if x.dim() == 2 else x.flatten(1, -2).mean(1)
        return self.proj(of_samples).split(self.grid_size, dim=-1)

    def _mix(self, x: torch.Tensor, scores: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the weighted sum of the outputs of each sample's experts, and their coordinates [T, K, dimensions].

        Shapes: T samples, K choices, N experts.
        """
        # 1. the best live experts of each sample
        found = self._search(scores)
        topk_idx = found.topk_idx.to(x.device)  # [T, K] into the N found; -1: none
        # 2. one call an expert, with the rows of all samples that chose it
        routing = ops.sort_tokens(topk_idx, max(1, len(found.records)))
        rows = ops.permute(x.flatten(1), routing.row_idx, routing.inverse)  # [rows, *], sorted by expert
        counts = routing.tokens_per_expert.tolist()
        calls = []
        for record, part in zip(found.records, rows[: sum(counts)].split(counts), strict=False):
            # a handle outlives the batch: it has the schema, the usual time, and what the expert has acknowledged
            handle = self._handles.setdefault(record.uid, self.client.handle(record.uid, record))
            handle.record = record
            calls.append(Call(self.client, handle, (part.view(-1, *x.shape[1:]),)))
        batch = _KMinBatch(
            calls,
            tolerant=True,
            grace=self.timeout_after_k_min,
            k_min=self.k_min,
            backward_k_min=self.backward_k_min,
            choices=topk_idx,
        )
        outputs = batch.run() if calls else [None]
        kinds = Counter((y.dtype, y.shape[1:]) for y in outputs if y is not None)
        # dtype and shape are those that most experts return: one liar must not make the others misfits
        if kinds:
            ((kind, _),) = kinds.most_common(1)
            usual = next(y for y in outputs if y is not None and (y.dtype, y.shape[1:]) == kind)
            outputs = batch.refuse_misfits(outputs, [usual] * len(outputs))
        # 3. k_min of them must have answered each sample
        answered = torch.tensor([error is None for error in batch.failed] or [False], device=topk_idx.device)
        alive = answered[topk_idx.clamp(min=0)] & (topk_idx >= 0)  # [T, K]: choices whose expert answered
        fewest = int(alive.sum(1).min()) if alive.shape[0] else self.k_min
        if fewest < self.k_min and not self.allow_zero_outputs:
            failures = zip(batch.calls, batch.failed, strict=True)
            reasons = [f"{call.handle.uid}: {error}" for call, error in failures if error is not None]
            if found.missing:
                reasons.append(_unfound(found))
            if not found.records:
                reasons.append(f"discovery names no live expert below {self.uid_prefix}")
            raise ExpertGone(
                f"{fewest} of {len(found.records)} experts of {self.uid_prefix} answered for some sample, but "
                f"k_min={self.k_min} are needed; {'; '.join(reasons[:3])}"
            )
        # 4. the weights: a softmax over the scores of those that did; an expert has the sum of its coordinates' scores
        uids = [coordinates(r.uid) for r in found.records] or [(0,) * len(scores)]
        places = torch.tensor(uids, device="cpu").to(topk_idx.device)  # [N, dimensions of the grid]
        chosen = places[topk_idx.clamp(min=0)]  # [T, K, dimensions]
        parts = [axis.gather(1, chosen[..., n]) for n, axis in enumerate(scores)]
        logits = torch.stack(parts).sum(0)  # [T, K]
        if logits.dtype != torch.float64:
            logits = logits.float()
        # the lowest number instead of -inf: a sample without a living expert gets zeros, not NaN
        floor = torch.finfo(logits.dtype).min
        weights = logits.masked_fill(~alive, floor).softmax(-1) * alive
        # 5. their weighted sum; an expert that did not answer has rows of zeros, and no weight
        some = next((y for y in outputs if y is not None), x[:0])
        width, shape = math.prod(some.shape[1:]), some.shape[1:]
        flat = [
            some.new_zeros(int(count), width) if y is None else y.flatten(1)
            for y, count in zip(outputs, counts, strict=True)
        ]
        num_dropped = routing.row_idx.shape[0] - sum(y.shape[0] for y in flat)
        y = torch.cat([*flat, some.new_zeros(num_dropped, width)])
        return ops.unpermute(y, routing.row_idx, routing.inverse, weights).view(-1, *shape), chosen

    def _search(self, scores: tuple[torch.Tensor, ...]) -> Found:
        # chosen by discovery on the loop, without a gradient
        timeout = self.client.settings.forward_timeout
        assert self.client.discovery is not None
        masked = [axis.detach() for axis in scores]
        # Experts that failed lately are left out, if a coordinate is one expert: in a grid of more dimensions it would
        # leave out many others.
        if len(self.grid_size) == 1:
            gone = [coordinates(uid)[0] for uid, handle in self._handles.items() if handle.is_gone]
            index = torch.tensor(gone, dtype=torch.int64, device=masked[0].device)
            masked[0] = masked[0].index_fill(1, index, -torch.inf)
        search = beam_search(self.client.discovery, self.uid_prefix, masked, self.k_best, timeout)
        found = loop.run(search, timeout + MARGIN)
        self.client.counts["keys not found in time"] += len(found.missing)
        if found.missing:
            log.warning("%s", _unfound(found))
        return found


@dataclass
class _KMinBatch(Batch):
    """A Batch that knows which samples chose which experts, and ends early once k_min have answered each sample."""

    k_min: int = 1  # experts that must answer a sample
    backward_k_min: int = 1  # experts whose gradients must reach a sample, or backward raises ExpertGone
    # [T, K] into calls; -1: no expert
    choices: torch.Tensor = field(default_factory=lambda: torch.empty(0, 1, dtype=torch.int64, device="cpu"))

    def is_enough(self, succeeded: Set[int], is_forward: bool) -> bool:
        """True if of each sample's experts k_min (backward_k_min) succeeded, or all if it has fewer."""
        wanted, device = self.k_min if is_forward else self.backward_k_min, self.choices.device
        arrived = torch.tensor([n in succeeded for n in range(len(self.calls))], device=device)
        num_arrived = (arrived[self.choices.clamp(min=0)] & (self.choices >= 0)).sum(1)
        return bool((num_arrived >= (self.choices >= 0).sum(1).clamp(max=wanted)).all())

    def backward(
        self, inputs: Sequence[Sequence[torch.Tensor]], grads: Sequence[torch.Tensor]
    ) -> list[tuple[torch.Tensor, ...] | None]:
        # experts that failed in forward get no gradient, so none of theirs can be missing
        failed = torch.tensor([error is not None for error in self.failed], device=self.choices.device)
        self.choices = self.choices.masked_fill(failed[self.choices.clamp(min=0)], -1)
        found = super().backward(inputs, grads)
        if not self.is_enough({n for n, tensors in enumerate(found) if tensors is not None}, False):
            reasons = [str(error) for error in self.grad_failed if error is not None]
            raise ExpertGone(
                f"gradients of some sample reached fewer than backward_k_min={self.backward_k_min} experts: "
                f"{reasons[:3]}"
            )
        return found


def _unfound(found: Found) -> str:
    more = f" and {len(found.missing) - 3} more" if len(found.missing) > 3 else ""
    return (
        f"the search had no answer in time for {len(found.missing)} of {found.num_asked} keys: "
        f"{', '.join(found.missing[:3])}{more}"
    )


class RemoteSwitchMixtureOfExperts(RemoteMixtureOfExperts):
    """The Switch Transformer's layer over remote experts: one expert a sample, jittered scores, a balance loss.

    Returns (output, loss). The output is the expert's times its probability, the product over the grid's dimensions;
    with k_best > 1 it is RemoteMixtureOfExperts's. loss = mean over the dimensions of n * sum_i f_i * p_i (n places,
    f_i: share of the samples whose highest score is place i's, whether an expert lives there or not, p_i: its mean
    probability), 1 when balanced, with a gradient for the gate. Only the gate sees the jitter, in training.
    grid_utilization[d]: the shares f_i of dimension d, averaged over forwards in training with utilization_alpha as
    the weight of the newest.
    """

    def __init__(
        self,
        in_features: int,
        grid_size: Sequence[int],
        dht: Directory | Discovery,
        uid_prefix: str,
        jitter_eps: float = 1e-2,
        k_best: int = 1,
        utilization_alpha: float = 0.1,
        **options: object,
    ):
        super().__init__(in_features, grid_size, dht, uid_prefix, k_best, **options)  # type: ignore[arg-type]
        if not 0 < utilization_alpha <= 1:
            raise ValueError(f"utilization_alpha must be above 0 and at most 1, but got {utilization_alpha}")
        self.jitter_eps, self.utilization_alpha = jitter_eps, utilization_alpha
        for n, size in enumerate(self.grid_size):
            self.register_buffer(f"_utilization_{n}", torch.full((size,), 1.0 / size))

    @property
    def grid_utilization(self) -> list[torch.Tensor]:
        """[n] for each dimension of the grid, each with the sum 1; uniform before the first forward."""
        return [getattr(self, f"_utilization_{n}") for n in range(len(self.grid_size))]

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        noisy = x
        if self.training and self.jitter_eps:
            noisy = x * (torch.rand_like(x) * (2 * self.jitter_eps) + (1 - self.jitter_eps))
        scores = self._scores(noisy)
        probabilities = [axis.softmax(-1) for axis in scores]
        if self.training:
            for average, p in zip(self.grid_utilization, probabilities, strict=True):
                if p.shape[0]:
                    chosen = p.argmax(-1).bincount(minlength=p.shape[-1]) / p.shape[0]
                    average.lerp_(chosen.to(average.dtype), self.utilization_alpha)
        losses = [balance_loss(p, p.argmax(-1, keepdim=True), OneRank()) for p in probabilities]
        y, chosen = self._mix(x, scores)
        # a softmax over one choice has no gradient: weigh by the probability of the expert that was chosen
        if self.k_best == 1:
            of_places = [p.gather(1, chosen[:, :, n]).squeeze(1) for n, p in enumerate(probabilities)]
            weight = torch.stack(of_places).prod(0)
            y = y * weight.view(-1, *(1 for _ in y.shape[1:]))
        return y, torch.stack(losses).mean()
