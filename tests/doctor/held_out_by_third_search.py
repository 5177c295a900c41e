"""Published mistakes that a third search found: THIRD_SEARCH[thread] = (invariant, subject).

They were written down, and committed, before the doctor was run on any of them, when its rules were those of the second
search and of the change after it. It named eight of ten by the invariant that was written down, and one by another.
"""

import torch
import torch.nn.functional as F

from tests.doctor.museum import Top1, biased, moe_with, move_bias, router_with, subject
from tests.doctor.plain import EXPERTS, Model


def noise_in_evaluation_too():
    def scores(self, x):
        logits = F.linear(x, self.weight)
        return (logits + 0.3 * torch.randn_like(logits)).softmax(-1)

    return subject(moe_with(router_with(scores=scores)))


def softmax_over_the_tokens():
    return subject(moe_with(router_with(scores=lambda self, x: F.linear(x, self.weight).softmax(0))))


def weights_of_the_biased_softmax():
    def forward(self, x):
        scores = self.scores(x)
        rank = (F.linear(x, self.weight) + self.expert_bias).softmax(-1)
        weights, index = rank.topk(self.top_k, dim=-1)
        return scores, weights, index

    return subject(model=biased(router=router_with(forward=forward)))


def gates_are_in_no_bucket():
    def optimizer(model):
        return torch.optim.AdamW([p for n, p in model.named_parameters() if ".router." not in n], 1e-3)

    return subject(optimizer=optimizer)


def hard_routing_without_a_gradient():
    def weights(self, chosen):
        return torch.ones_like(chosen) / chosen.shape[-1]

    return subject(moe_with(router_with(weights=weights)))


def balance_of_a_full_capacity():
    def balance_loss(self, scores, index, valid):
        even = torch.full((EXPERTS,), 1 / EXPERTS, dtype=scores.dtype)  # dummy tokens fill every expert
        share = scores / scores.sum(-1, keepdim=True)
        return EXPERTS * (even * share.mean(0)).sum()

    return subject(moe_with(balance_loss=balance_loss), padded=None)


def padding_mask_is_not_passed():
    class Forgets(Model):
        def forward(self, tokens, valid=None):
            return super().forward(tokens)

    return subject(model=Forgets)


def jitter_is_written_into_the_code():
    def build(router_jitter_noise):
        torch.manual_seed(0)
        model = Model()
        model.router_jitter_noise = router_jitter_noise
        return model

    return subject(model=lambda: build(0.0), options={"router_jitter_noise": lambda: build(0.2)})


def top_1_is_normalised_over_tokens():
    def weights(self, chosen):
        return chosen / chosen.norm(dim=0, keepdim=True)

    return subject(type("Layer", (Top1,), {"router_class": router_with(weights=weights)}))


def padding_moves_the_bias():
    def step(model, optimizer, batches, loss):
        optimizer.zero_grad()
        for part in batches:
            (loss(model, part) / len(batches)).backward()
        optimizer.step()
        for block in model.blocks:
            move_bias(block, block.last)  # of all rows, those of padding too

    def count(self, index):
        self.last = index

    return subject(model=biased(count), step=step)


THIRD_SEARCH = {
    "MoCE-IR#19": ("evaluation", noise_in_evaluation_too),
    "soft-mixture-of-experts#1": ("batch", softmax_over_the_tokens),
    "vLLM-metax#270": ("choice-bias", weights_of_the_biased_softmax),
    "DeepSpeed#4482": ("optimizer", gates_are_in_no_bucket),
    "Automodel#2071": ("router-gradient", hard_routing_without_a_gradient),
    "Megatron-LM#1617": ("balance-in-loss", balance_of_a_full_capacity),
    "Megatron-LM#4776": ("balance-padding", padding_mask_is_not_passed),
    "vllm#35499": ("options", jitter_is_written_into_the_code),
}
SEEN_ELSEWHERE = {
    "megablocks#87": ("balance-size", top_1_is_normalised_over_tokens)
}  # it was thought to be "batch"
AFTER_A_THIRD_CHANGE = {"torchtitan#4168": ("balance-padding", padding_moves_the_bias)}
