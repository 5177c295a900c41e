"""QuantileGate: a bias that one step moves to where every expert gets its even share of the tokens.

SigmoidGate's bias goes a fixed amount up or down at each step. Here it is computed: an expert gets T K / E tokens if
its bias is the lead over the other experts that T K / E tokens exceed. even_quantile() finds it over the tokens of all
ranks without gathering them.
"""

from collections.abc import Mapping
from typing import Any

import torch

from fmoe_ext import ops
from fmoe_ext.gates.base_gate import OneRank, Ranks
from fmoe_ext.gates.scored_gate import ScoredGate
from fmoe_ext.step import add_counts, is_counted

SCORES = ("softmax", "sigmoid", "sqrtsoftplus")
_DIGIT = 8  # bits of a value that one round of counts over the ranks finds


class QuantileGate(ScoredGate):
    """Balanced by a bias that one step moves where every expert has its even share: Megatron's "quantile_balancing".

    Each token takes the top_k of logits - quantile_bias; the weights are the scores of the chosen logits, by score
    "softmax", "sigmoid" or "sqrtsoftplus", which normalize and scale treat as in SoftmaxGate and SigmoidGate.

    A token's lead for an expert is its logit less the best logit - bias that the token does not choose. A forward in
    training finds the lead of each expert that T * top_k / E tokens exceed: the exact quantile of the tokens of all
    ranks (Megatron: the mean of each data-parallel rank's). At a step of a torch.optim optimizer with a parameter of
    the gate, the bias becomes ema * bias + (1 - ema) * quantile, less its mean. After several forwards the quantile is
    the mean of theirs. Where no such optimizer steps, call update_bias() after each step.

    balance_loss is None unless given. Other arguments: ScoredGate without groups.

    Example:

        >>> gate = QuantileGate(d_model=2, num_expert=2, world_size=1, top_k=1, gate_bias=False)
        >>> gate.gate.weight.data.copy_(torch.eye(2)).shape
        torch.Size([2, 2])
        >>> x = torch.tensor([[3.0, 0.0], [2.0, 0.0]])
        >>> gate(x)[0].flatten().tolist()  # the first expert is better for both tokens
        [0, 0]
        >>> gate.update_bias()
        >>> gate.quantile_bias  # a token takes the first expert if its logit is more than 2 above the other
        tensor([ 1., -1.])
        >>> gate(torch.tensor([[3.0, 0.0], [1.9, 0.0]]))[0].flatten().tolist()
        [0, 1]
    """

    quantile_bias: torch.Tensor  # [E] float32, taken off the logits for the selection only
    quantile_sum: torch.Tensor  # [E] float32, quantiles of the forwards since the last update
    num_quantiles: torch.Tensor  # how many forwards

    def __init__(
        self,
        d_model: int,
        num_expert: int,
        world_size: int,
        top_k: int = 2,
        gate_bias: bool = True,
        *,
        score: str = "softmax",
        ema: float = 0.0,
        balance_loss: str | Mapping[str, float] | None = None,
        **options: Any,
    ) -> None:
        for name in ("num_groups", "topk_groups", "group_best"):
            if name in options:
                raise ValueError(f"QuantileGate has no {name}, but got {name}={options[name]!r}")
        if score not in SCORES:
            raise ValueError(f"score must be one of {SCORES}, but got {score!r}")
        if not 0 <= ema < 1:
            raise ValueError(f"ema must be in [0, 1), but got {ema}")
        super().__init__(
            d_model, num_expert, world_size, top_k, gate_bias, balance_loss=balance_loss, **options
        )
        self.score = score
        self.ema = ema
        self.register_buffer("quantile_bias", torch.zeros(self.num_experts))
        self.register_buffer("quantile_sum", torch.zeros(self.num_experts), persistent=False)
        self.register_buffer("num_quantiles", torch.zeros((), dtype=torch.int64), persistent=False)
        self._follow_optimizers()

    def reset_parameters(self) -> None:
        """Begin without a bias; after .to_empty() of a gate made on the meta device."""
        super().reset_parameters()
        for buffer in (self.quantile_bias, self.quantile_sum, self.num_quantiles):
            buffer.zero_()

    @property
    def moves_bias(self) -> bool:
        return True

    def after_optimizer_step(self) -> None:
        """Call update_bias(); optimizer_steps.py calls this after an optimizer's step."""
        super().after_optimizer_step()
        self.update_bias()

    @torch.no_grad()
    def update_bias(self) -> None:
        """Move the bias to the quantiles of the forwards since the last update; without any it stays."""
        self._keep_float32()
        quantile = self.quantile_sum / self.num_quantiles.clamp(min=1)
        bias = self.ema * self.quantile_bias + (1.0 - self.ema) * quantile
        bias = bias - bias.mean()
        self.quantile_bias.copy_(torch.where(self.num_quantiles > 0, bias, self.quantile_bias))
        self.quantile_sum.zero_()
        self.num_quantiles.zero_()

    def select(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self._keep_float32()
        scores = logits.detach()
        biased = scores - self.quantile_bias
        ranks_more = self.training and self.top_k < self.num_experts  # in a repeated forward too
        ranked = ops.topk_gate(biased, self.top_k + ranks_more)[0]
        if ranks_more and is_counted():
            best_left = biased.gather(1, ranked[:, self.top_k :])  # [T, 1], the best that is not chosen
            lead = scores - best_left  # [T, E]
            found = even_quantile(lead, self.top_k, self.ranks)  # [E]
            if found is not None:
                add_counts(self.quantile_sum, found.nan_to_num(nan=0.0, posinf=torch.inf, neginf=-torch.inf))
                add_counts(self.num_quantiles, (~found.isnan()).any())
        topk_idx = self.choose(lambda: ranked[:, : self.top_k].contiguous())
        return topk_idx, self.weigh(logits, topk_idx)

    def _keep_float32(self) -> None:
        if self.quantile_bias.dtype != torch.float32:  # where .half() or .bfloat16() had cast it
            # forwards that train will write to them, which inference tensors refuse
            with torch.inference_mode(False):
                self.quantile_bias = self.quantile_bias.to(torch.float32)
                self.quantile_sum = self.quantile_sum.to(torch.float32)


def even_quantile(values: torch.Tensor, top_k: int, ranks: Ranks) -> torch.Tensor | None:
    """Find the value of each column of values [T, E] that T * top_k // E entries exceed, T the tokens of all ranks.

    None without tokens; NaN in a compiled graph over several ranks. The same bits on every rank, and for any division
    of the tokens over ranks; NaN counts as the least. Over several ranks it is a radix selection: values become
    integers of the same order, and for each digit of 8 bits, the highest first, the ranks sum how many values that
    agree so far have each digit. The one where the wanted place falls is the next digit: four sums of [E, 256] counts
    for float32, and no rank sees the others' values.
    """
    values = values.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    num_experts = values.shape[1]
    if isinstance(ranks, OneRank):
        place = values.shape[0] * top_k // num_experts
        return values.topk(place + 1, dim=0).values[-1] if values.shape[0] else None
    mine = torch.full((1,), values.shape[0], device=values.device)
    num_tokens = torch.cat(ranks.gather(mine, same_size=True)).sum()
    if not (torch.compiler.is_dynamo_compiling() or torch.compiler.is_exporting()) and num_tokens == 0:
        return None
    # [E]: how many values are above the wanted one, among those that agree with it in the digits found so far
    num_above = (num_tokens * top_k // num_experts).expand(num_experts)
    # integers of the same order: negative floats have their bits turned; + 0 makes 0 of -0
    bits_of = torch.int64 if values.dtype == torch.float64 else torch.int32
    mask = torch.iinfo(bits_of).max
    keys = (values + 0.0).view(bits_of)
    keys = torch.where(keys < 0, keys ^ mask, keys)  # [T, E]
    fits = torch.ones_like(keys, dtype=torch.bool)  # [T, E]: agrees with the digits found so far
    found = torch.zeros(num_experts, dtype=keys.dtype, device=keys.device)
    first = torch.arange(num_experts, device=keys.device) << _DIGIT
    bits = 8 * values.element_size()
    for shift in range(bits - _DIGIT, -1, -_DIGIT):
        digits = (keys >> shift) & (2**_DIGIT - 1)
        if shift == bits - _DIGIT:
            digits ^= 2 ** (_DIGIT - 1)  # the sign: negative keys come first
        # how many fitting values of each expert have each digit, over all ranks: [E, 2**_DIGIT]
        counts = torch.zeros(num_experts << _DIGIT, dtype=torch.int64, device=keys.device)
        counts.scatter_add_(0, (first + digits).flatten(), fits.flatten().long())
        counts = torch.stack(ranks.gather(counts, same_size=True)).sum(0).view(num_experts, -1)
        above = counts.sum(1, keepdim=True) - counts.cumsum(1)  # [E, 2**_DIGIT], with a larger digit
        # the digit is the least with no more than num_above values above it
        digit = (above > num_above[:, None]).sum(1)
        num_above = num_above - above.gather(1, digit[:, None])[:, 0]
        fits &= digits == digit
        if shift == bits - _DIGIT:
            digit = digit ^ 2 ** (_DIGIT - 1)
        found |= digit.to(keys.dtype) << shift
    quantile = torch.where(found < 0, found ^ mask, found).view(values.dtype)  # back to floats
    return (
        torch.where(num_tokens > 0, quantile, torch.nan)
        if (torch.compiler.is_dynamo_compiling() or torch.compiler.is_exporting())
        else quantile
    )
