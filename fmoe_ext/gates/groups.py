"""Group-limited choices: a token's experts come from its few best groups, which bounds the ranks it is sent to."""

from typing import NamedTuple

import torch

from fmoe_ext import ops
from fmoe_ext.gates.base_gate import scores_of


class Groups(NamedTuple):
    """num_groups groups of neighbouring experts, of which each token takes its topk_groups best.

    A group ranks by the sum of its group_best best scores:
    * 1, SoftmaxGate's default: the best one (DeepSeek-V2, section 2.2.2, "device-limited routing"; its
      `group_limited_greedy`);
    * top_k // topk_groups, SigmoidGate's default (DeepSeek-V3, section 2.1.2, "node-limited routing": the sum of the
      highest K / M affinities; Megatron's `--moe-router-num-groups` for every score). Transformers' DeepseekV3 takes 2
      always, which is the same for the published K = 8 of 4 groups.
    The scores are those that order the experts, the bias included; where the softmax comes after the top-k
    (normalize=True), they are the logits, as in Megatron.
    """

    num_groups: int  # of E / num_groups experts each
    topk_groups: int  # that a token chooses in
    group_best: int  # best scores whose sum ranks a group

    def fit_topk_gate(self, score: str, biased: bool) -> bool:
        """Return whether ops.topk_gate has the score and ranks groups so: by two with sigmoid or a bias, else one."""
        if score == "sqrtsoftplus":
            return False
        ranks_by = 2 if biased or score == "sigmoid" else 1
        return self.topk_groups == self.num_groups or self.group_best == ranks_by

    def choose(
        self, logits: torch.Tensor, top_k: int, score: str, normalize: bool, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """Choose by logits [T, E] and bias [E] -> topk_idx [T, top_k] int64, best first; of equals the lower index."""
        scores = logits
        if score != "softmax" or bias is not None or not normalize:
            scores = scores_of(logits, score)
        if bias is not None:
            scores = scores + bias
        kept = self._kept(scores).repeat_interleave(logits.shape[1] // self.num_groups, dim=1)
        # by logit, which tells apart what a score rounds to one value
        order = logits if bias is None else scores
        return ops.topk_gate(order.masked_fill(~kept, -torch.inf), top_k)[0]

    def _kept(self, scores: torch.Tensor) -> torch.Tensor:
        """Mark the groups that a token keeps: scores [T, E] -> bool [T, num_groups]."""
        in_groups = scores.reshape(-1, self.num_groups, scores.shape[1] // self.num_groups)
        best = in_groups.topk(self.group_best, dim=-1).values
        topk_groups = ops.topk_gate(best.sum(-1), self.topk_groups)[0]
        return torch.zeros(len(scores), self.num_groups, dtype=torch.bool, device=scores.device).scatter_(
            1, topk_groups, True
        )
