import math

import torch

from fmoe_ext import ops
from fmoe_ext.gates.base_gate import OneWorker
from fmoe_ext.gates.naive_gate import NaiveGate


class SwitchGate(NaiveGate):
    """The gate of the Switch Transformer: top-1 weighted by its probability, jitter, capacity, balance loss.

    * training multiplies the input by noise, uniform in [1 - switch_eps, 1 + switch_eps];
    * an expert takes ceil(capacity * T * K / E) choices, T the tokens of all workers, with capacity[0] in
      training and capacity[1] in evaluation; the others become -1. capacity=None drops nothing;
    * loss = E * sum_e f_e * p_e: f_e the share of choices of expert e before any is dropped, p_e its mean
      probability over all tokens. 1 when balanced.
    additive_noise=True adds the noise to the logits, fastmoe_loss=True computes f_e from the choices that
    were kept and divides p_e by their number, both as FastMoE does.
    """

    def __init__(
        self,
        d_model,
        num_expert,
        world_size,
        topk=1,
        switch_eps=0.1,
        capacity=(1.2, 2.4),
        gate_bias=True,
        *,
        additive_noise=False,
        fastmoe_loss=False,
        workers=None,
    ):
        super().__init__(d_model, num_expert, world_size, topk, gate_bias=gate_bias, normalize=False)
        if capacity is not None and (len(capacity) != 2 or min(capacity) <= 0):
            raise ValueError(
                f"capacity must be two positive factors (training, evaluation), but got {capacity}"
            )
        self.switch_eps = switch_eps
        self.capacity = capacity
        self.additive_noise = additive_noise
        self.fastmoe_loss = fastmoe_loss
        self.workers = OneWorker() if workers is None else workers

    def forward(self, inp, return_all_scores=False):
        """As NaiveGate.forward; the weights are probabilities among all experts."""
        logits = self._noisy_logits(inp)
        chosen, topk_weights = self.topk(logits, self.top_k, normalize=False)
        num_tokens = self.workers.num_tokens(inp.shape[0])
        topk_idx = self._drop_over_capacity(chosen, num_tokens)
        self.set_loss(self._balance_loss(logits, topk_idx if self.fastmoe_loss else chosen, num_tokens))
        if return_all_scores:
            return topk_idx, topk_weights, logits
        return topk_idx, topk_weights

    def _noisy_logits(self, inp):
        if not self.training or self.switch_eps == 0:
            return self.logits(inp)
        if self.additive_noise:
            logits = self.logits(inp)
            return logits + self._noise(logits)
        wide = inp.to(torch.promote_types(inp.dtype, torch.float32))
        return self.logits(wide * self._noise(wide))

    def _noise(self, like):
        return torch.rand_like(like) * (2 * self.switch_eps) + (1 - self.switch_eps)

    def _drop_over_capacity(self, topk_idx, num_tokens):
        if self.capacity is None:
            return topk_idx
        factor = self.capacity[0 if self.training else 1]
        capacity = math.ceil(factor * num_tokens * self.top_k / self.tot_expert)
        return self.workers.apply_capacity(topk_idx, self.tot_expert, capacity)

    def _balance_loss(self, logits, topk_idx, num_tokens):
        num_choices = self.workers.sum(ops.count_tokens(topk_idx, self.tot_expert))  # [E]
        prob_sum = self.workers.sum(logits.softmax(-1).sum(0))  # [E]
        total = num_choices.sum().clamp(min=1)
        divisor = total if self.fastmoe_loss else max(num_tokens, 1)
        f = num_choices.to(prob_sum.dtype) / total
        return self.tot_expert * torch.sum(f * (prob_sum / divisor))
