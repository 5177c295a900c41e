"""Published mistakes that a search for what hurt users found: BY_SEARCH[thread] = (invariant, subject).

They were written down, and committed, before the doctor was run on any of them. Then it named eight of twelve.
"""

import copy

import torch
import torch.nn.functional as F
from torch import nn

from fmoe_ext.doctor.subject import train_step
from tests.doctor.museum import Adapted, biased, moe_with, move_bias, router_with, subject
from tests.doctor.plain import EXPERTS, D, Model, Router


def experts(model):
    return [p for n, p in model.named_parameters() if ".experts." in n]


def others(model):
    return [p for n, p in model.named_parameters() if ".experts." not in n]


def optimizer_of_discarded_experts():
    def optimizer(model):
        return torch.optim.AdamW([*others(model), *experts(copy.deepcopy(model))])

    return subject(optimizer=optimizer)


class WrongNoise(Router):
    """Draws noise by the weight of the scores; the weight of the noise is idle."""

    def __init__(self, top_k=2, bias=False):
        super().__init__(top_k, bias)
        self.noise_weight = nn.Parameter(0.1 * torch.randn(EXPERTS, D))

    def scores(self, x):
        logits = F.linear(x, self.weight)
        if self.training:
            logits = logits + torch.randn_like(logits) * F.softplus(F.linear(x, self.weight))
        return logits.softmax(-1)


def noise_of_the_wrong_weight():
    return subject(moe_with(WrongNoise))


def balance_of_counts_alone():
    def balance_loss(self, scores, index, valid):
        chosen = F.one_hot(index, EXPERTS).to(scores).mean((0, 1))
        return EXPERTS * chosen.square().sum()

    return subject(moe_with(balance_loss=balance_loss), padded=None)


def bias_moves_at_every_microbatch():
    def step(model, optimizer, batches, loss):
        optimizer.zero_grad()
        for batch in batches:
            (loss(model, batch) / len(batches)).backward()
            for block in model.blocks:
                move_bias(block, block.last)
        optimizer.step()

    def count(self, index):
        self.last = index

    return subject(model=biased(count), step=step, padded=None)  # it counts padding, too


def bias_of_no_layer_moves():
    def step(model, optimizer, batches, loss):
        train_step(model, optimizer, batches, loss)
        for block in model.blocks:
            if block is model.blocks[0]:
                return  # balancing is off here, and the loop ends instead of going on
            move_bias(block, block.last)

    def count(self, index):
        self.last = index

    return subject(model=biased(count), step=step)


def normalisation_is_missing():
    def build(norm_topk_prob):
        torch.manual_seed(0)
        model = Model()
        model.norm_topk_prob = norm_topk_prob
        return model

    return subject(model=lambda: build(False), options={"norm_topk_prob": lambda: build(True)})


def softmax_over_the_chosen_alone():
    def build(norm_topk_prob):
        def weights(self, chosen):
            chosen = chosen.log().softmax(-1)
            return chosen / chosen.sum(-1, keepdim=True) if norm_topk_prob else chosen

        torch.manual_seed(0)
        return Model(moe_with(router_with(weights=weights)))

    return subject(model=lambda: build(False), options={"norm_topk_prob": lambda: build(True)})


def adapters_skipped_when_loading():
    def save(model):
        return {n: v for n, v in model.state_dict().items() if "lora" not in n}

    return subject(moe_with(expert=Adapted), save=save)


def balance_doubles_beside_padding():
    def balance_loss(self, scores, index, valid):
        keep = valid.flatten()
        chosen = F.one_hot(index[keep], EXPERTS).to(scores).mean((0, 1))
        return EXPERTS * (chosen * scores[keep].mean(0)).sum() * keep.numel() / keep.sum()

    return subject(moe_with(balance_loss=balance_loss))


class ForgetsExperts(torch.optim.AdamW):
    """Restores the state of its first group alone."""

    def load_state_dict(self, state):
        known = set(state["param_groups"][0]["params"])
        super().load_state_dict(state | {"state": {k: v for k, v in state["state"].items() if k in known}})


def second_optimizer_not_restored():
    def optimizer(model):
        return ForgetsExperts([{"params": others(model)}, {"params": experts(model)}], lr=1e-2)

    return subject(optimizer=optimizer)


def sigmoid_router_balanced_by_softmax():
    def scores(self, x):
        self.logits = F.linear(x, self.weight)
        return self.logits.sigmoid()

    def balance_loss(self, scores, index, valid):
        keep = valid.flatten()
        chosen = F.one_hot(index[keep], EXPERTS).to(scores).mean((0, 1))
        return EXPERTS * (chosen * self.router.logits[keep].softmax(-1).mean(0)).sum()

    return subject(moe_with(router_with(scores=scores), balance_loss=balance_loss))


def balance_vanishes_with_small_scores():
    def balance_loss(self, scores, index, valid):
        keep = valid.flatten()
        share = scores[keep] / (scores[keep].sum(-1, keepdim=True) + 1e-20)
        chosen = F.one_hot(index[keep], EXPERTS).to(scores).mean((0, 1))
        return EXPERTS * (chosen * share.mean(0)).sum()

    def scores(self, x):
        return F.linear(x, self.weight).sigmoid()

    return subject(moe_with(router_with(scores=scores), balance_loss=balance_loss))


def bias_of_the_last_layer_is_skipped():
    def step(model, optimizer, batches, loss):
        train_step(model, optimizer, batches, loss)
        move_bias(model.blocks[0], model.blocks[0].last)

    def count(self, index):
        self.last = index

    return subject(model=biased(count), step=step, padded=None)  # it counts padding, too


BY_SEARCH = {
    "DeepSpeed#8377": ("optimizer", optimizer_of_discarded_experts),
    "transformers#28205": ("balance-in-loss", balance_of_counts_alone),
    "torchtitan#1304": ("bias-once", bias_moves_at_every_microbatch),
    "torchtitan#1448": ("options", normalisation_is_missing),
    "mlxcel#391": ("options", softmax_over_the_chosen_alone),
    "Automodel#1325": ("checkpoint", adapters_skipped_when_loading),
    "Megatron-LM#7452": ("balance-padding", balance_doubles_beside_padding),
    "Megatron-LM#761": ("optimizer-checkpoint", second_optimizer_not_restored),
}
AFTER_A_CHANGE = {
    "SliME#3": ("router-gradient", noise_of_the_wrong_weight),
    "torchtitan#4494": ("bias-once", bias_of_the_last_layer_is_skipped),
}
MISSED = {
    "torchtitan#3686": bias_of_no_layer_moves,
    "Megatron-LM#1438": sigmoid_router_balanced_by_softmax,
    "Megatron-LM#1545": balance_vanishes_with_small_scores,
}
