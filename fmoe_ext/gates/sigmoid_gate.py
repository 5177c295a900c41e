import torch

from fmoe_ext import ops
from fmoe_ext.gates.scored_gate import ScoredGate


class SigmoidGate(ScoredGate):
    """The gate of DeepSeek-V3: sigmoid scores, balanced by a bias instead of an auxiliary loss.

    The bias is added to the scores for the selection only; after every optimizer step update_bias() raises it by
    bias_update_speed for experts with less than the mean load and lowers it for those with more (Wang et al. 2024,
    "Auxiliary-loss-free load balancing"). The usual way to call it:

        optimizer.register_step_post_hook(lambda *_: fmoe_ext.gates.update_biases(model))

    DeepSeek-V3: top_k=8, num_groups=8, topk_groups=4, scale=2.5 (`routed_scaling_factor`), balance_loss="sequence",
    balance_weight=1e-4, gate_bias=False. Kimi K2 and GLM-4.5: the same with one group. bias_update_speed=0: no bias.
    A group ranks by the sum of its two best biased scores. Other arguments: ScoredGate.

    expert_bias [E] is a buffer (`e_score_correction_bias` of the published checkpoints), pending_load [E] the choices
    counted in training since the last update. Forwards repeated by activation checkpointing count twice, which does
    not change the direction of the update.
    """

    score = "sigmoid"

    def __init__(
        self,
        d_model,
        num_expert,
        world_size,
        top_k=2,
        gate_bias=True,
        *,
        bias_update_speed=1e-3,
        balance_loss=None,
        **options,
    ):
        super().__init__(
            d_model, num_expert, world_size, top_k, gate_bias, balance_loss=balance_loss, **options
        )
        if bias_update_speed < 0:
            raise ValueError(f"bias_update_speed must not be negative, but got {bias_update_speed}")
        self.bias_update_speed = bias_update_speed
        self.register_buffer("expert_bias", torch.zeros(self.tot_expert))
        self.register_buffer("pending_load", torch.zeros(self.tot_expert, dtype=torch.int64))

    def select(self, logits):
        topk_idx, topk_weights = self.topk(
            logits,
            self.top_k,
            self.score,
            self.normalize,
            self.scale,
            bias=self.expert_bias.to(logits.dtype),
            num_groups=self.num_groups,
            topk_groups=self.topk_groups,
        )
        if self.training:
            self.pending_load += ops.count_tokens(topk_idx, self.tot_expert)
        return topk_idx, topk_weights

    def probabilities(self, logits):
        scores = logits.sigmoid()
        return scores / scores.sum(-1, keepdim=True)

    def balance_choices(self, logits, topk_idx):
        """The top_k of the scores without the bias, as in equation 18 of the DeepSeek-V3 report."""
        return ops.topk_gate(logits.detach(), self.top_k, self.score)[0]

    @torch.no_grad()
    def update_bias(self):
        """One step of the bias from the load of all workers since the last one; no host synchronisation."""
        load = self.workers.sum(self.pending_load).to(torch.float32)
        self.expert_bias = self.expert_bias.float()  # where .half() or .bfloat16() had cast it
        self.expert_bias += self.bias_update_speed * torch.sign(load.mean() - load)
        self.pending_load.zero_()


def update_biases(model):
    """Calls update_bias() of every SigmoidGate of a model; to be called after each optimizer step."""
    for module in model.modules():
        if isinstance(module, SigmoidGate):
            module.update_bias()
