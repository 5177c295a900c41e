"""Silent mistakes that users of other libraries reported; docs/museum.md tells what happened and how it looked.

NAMED_ALONE[thread] = (invariant, subject): the doctor names this invariant and no other. NAMED[thread]: this one, and
perhaps others. NOT_SEEN[thread] = subject shows the limits of the doctor, which is silent about it.

They were found by three searches and committed before the doctor was run on any of them, so that its rules could not
be made for them.
"""

import copy

import torch
import torch.nn.functional as F
from torch import nn

from fmoe_ext.doctor.subject import train_step
from tests.doctor.museum import Adapted, Top1, biased, moe_with, move_bias, router_with, subject
from tests.doctor.plain import EXPERTS, D, Expert, Model, MoE, Router, loss


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


NAMED_ALONE = {
    "DeepSpeed#8377": ("optimizer", optimizer_of_discarded_experts),
    "transformers#28205": ("balance-in-loss", balance_of_counts_alone),
    "torchtitan#1304": ("bias-once", bias_moves_at_every_microbatch),
    "torchtitan#1448": ("options", normalisation_is_missing),
    "mlxcel#391": ("options", softmax_over_the_chosen_alone),
    "Automodel#1325": ("checkpoint", adapters_skipped_when_loading),
    "Megatron-LM#7452": ("balance-padding", balance_doubles_beside_padding),
    "Megatron-LM#761": ("optimizer-checkpoint", second_optimizer_not_restored),
    "SliME#3": ("router-gradient", noise_of_the_wrong_weight),  # since a change of the doctor
    "torchtitan#4494": ("bias-once", bias_of_the_last_layer_is_skipped),  # added with that change
}
NAMED = {
    "JAXformer#21": ("used", routed_experts_alone_are_returned),
    "NousResearch/torchtitan#36": ("used", shared_gate_is_not_used),
    "transformers#39581": ("choice-bias", weights_of_the_corrected_softmax),
    "Automodel#2995": ("router-gradient", probabilities_gathered_without_a_graph),
    "deliverance#88": ("router-gradient", outputs_are_not_weighted),
    "transformers#28093": ("balance-in-loss", balance_loss_is_constant),
    "torchtitan#1340": ("batch", rows_go_back_to_other_tokens),
    "mcore-bridge#195": ("frozen", bias_moves_beside_a_frozen_router),  # since a change of the doctor
    "MoCE-IR#19": ("evaluation", noise_in_evaluation_too),
    "soft-mixture-of-experts#1": ("batch", softmax_over_the_tokens),
    "vLLM-metax#270": ("choice-bias", weights_of_the_biased_softmax),
    "DeepSpeed#4482": ("optimizer", gates_are_in_no_bucket),
    "Automodel#2071": ("router-gradient", hard_routing_without_a_gradient),
    "Megatron-LM#1617": ("balance-in-loss", balance_of_a_full_capacity),
    "Megatron-LM#4776": ("balance-padding", padding_mask_is_not_passed),
    "vllm#35499": ("options", jitter_is_written_into_the_code),
    "torchtitan#4168": ("balance-padding", padding_moves_the_bias),  # since a change of the doctor
    "megablocks#87": ("balance-size", top_1_is_normalised_over_tokens),  # it was thought to be "batch"
}
NOT_SEEN = {
    "torchtitan#3686": bias_of_no_layer_moves,
    "Megatron-LM#1438": sigmoid_router_balanced_by_softmax,
    "Megatron-LM#1545": balance_vanishes_with_small_scores,
    "unsloth-zoo#1269": adapter_columns_in_another_order,
    "transformers#28255": balance_over_layers_together,
}
