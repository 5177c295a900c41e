"""Published mistakes that a second search found: SECOND_SEARCH[thread] = (invariant, subject).

They were written down before the doctor was run on any of them, after its rules of tests/doctor/museum_wiring.py.
Then it named seven of ten.
"""

import torch
import torch.nn.functional as F
from torch import nn

from tests.doctor.museum import Adapted, biased, moe_with, move_bias, router_with, subject
from tests.doctor.plain import EXPERTS, D, Expert, MoE, loss


class WithShared(MoE):
    """A shared expert with a gate beside the routed ones."""

    def __init__(self, top_k=2, bias=False):
        super().__init__(top_k, bias)
        self.shared, self.shared_gate = Expert(), nn.Linear(D, 1)


def routed_experts_alone_are_returned():
    def mix(self, x, weights, index):
        whole = x + self.shared(x) * self.shared_gate(x).sigmoid()
        routed = MoE.mix(self, x, weights, index)
        whole = whole + routed
        return routed

    return subject(type("Layer", (WithShared,), {"mix": mix}))


def shared_gate_is_not_used():
    def mix(self, x, weights, index):
        return MoE.mix(self, x, weights, index) + self.shared(x)

    return subject(type("Layer", (WithShared,), {"mix": mix}))


def weights_of_the_corrected_softmax():
    def forward(self, x):
        scores = self.scores(x)
        weights, index = (scores + self.expert_bias).topk(self.top_k, dim=-1)
        return scores, weights, index

    def build():
        torch.manual_seed(0)
        model = biased(router=router_with(forward=forward))()
        for block in model.blocks:
            block.router.expert_bias.normal_(std=0.01)
        return model

    return subject(model=build, loss=loss)


def probabilities_gathered_without_a_graph():
    def part(self, expert, x, weight, number):
        gathered = torch.empty_like(weight)
        gathered.copy_(weight.detach())
        return expert(x) * gathered

    return subject(moe_with(part=part))


def outputs_are_not_weighted():
    return subject(moe_with(part=lambda self, expert, x, weight, number: expert(x)))


def balance_loss_is_constant():
    def balance_loss(self, scores, index, valid):
        everywhere = torch.ones_like(scores).mean(0)  # every expert counts as chosen
        return (everywhere * (scores / scores.sum(-1, keepdim=True)).mean(0)).sum()

    return subject(moe_with(balance_loss=balance_loss))


def bias_moves_beside_a_frozen_router():
    def step(model, optimizer, batches, loss):
        optimizer.zero_grad()
        for part in batches:
            (loss(model, part) / len(batches)).backward()
        optimizer.step()
        for block in model.blocks:
            move_bias(block, block.last)

    def count(self, index):
        self.last = index

    made = subject(model=biased(count), step=step)
    for block in made.model.blocks:
        block.router.requires_grad_(False)
    return made


class Packed(Adapted):
    """Reads the columns of a neighbour's adapter."""

    def forward(self, x):
        return Expert.forward(self, x) + x @ self.lora_A.T @ self.lora_B.roll(1, 1).T


def adapter_columns_in_another_order():
    return subject(moe_with(expert=Packed), adapted=["experts"])


def balance_over_layers_together():
    def parts(model, batch):
        logits = model(**batch)[batch["valid"]]
        task = F.cross_entropy(logits, (batch["tokens"][batch["valid"]] * 5 + 2) % logits.shape[-1])
        scores, chosen = (
            torch.stack(x).mean(0) for x in zip(*(block.seen for block in model.blocks), strict=True)
        )
        return task, EXPERTS * (scores * chosen).sum()

    def balance_loss(self, scores, index, valid):
        keep = valid.flatten()
        self.seen = scores[keep].mean(0), F.one_hot(index[keep], EXPERTS).to(scores).mean((0, 1))
        return torch.zeros(())

    def total(model, batch):
        task, balance = parts(model, batch)
        return task + 0.1 * balance

    return subject(moe_with(balance_loss=balance_loss), parts=parts, loss=total)


def rows_go_back_to_other_tokens():
    def mix(self, x, weights, index):
        y = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            token, slot = torch.where(index == number)
            y = y.index_add(0, token.flip(0), self.part(expert, x[token], weights[token, slot, None], number))
        return y

    return subject(moe_with(mix=mix))


SECOND_SEARCH = {
    "JAXformer#21": ("used", routed_experts_alone_are_returned),
    "NousResearch/torchtitan#36": ("used", shared_gate_is_not_used),
    "transformers#39581": ("choice-bias", weights_of_the_corrected_softmax),
    "Automodel#2995": ("router-gradient", probabilities_gathered_without_a_graph),
    "deliverance#88": ("router-gradient", outputs_are_not_weighted),
    "transformers#28093": ("balance-in-loss", balance_loss_is_constant),
    "torchtitan#1340": ("batch", rows_go_back_to_other_tokens),
}
AFTER_ANOTHER_CHANGE = {"mcore-bridge#195": ("frozen", bias_moves_beside_a_frozen_router)}
MISSED_AGAIN = {
    "unsloth-zoo#1269": adapter_columns_in_another_order,
    "transformers#28255": balance_over_layers_together,
}
