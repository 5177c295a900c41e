"""Published mistakes of MoE models: EXHIBITS[name] = (invariant, thread or None if made here, subject)."""

import torch
import torch.nn.functional as F
from torch import nn

from fmoe_ext.doctor import Subject
from fmoe_ext.doctor.subject import train_step
from tests.doctor.plain import EXPERTS, Expert, Model, MoE, Router, batch, loss, parts

EXHIBITS = {}


def exhibit(invariant, thread):
    """Register a function that returns the Subject of a published mistake."""

    def register(function):
        EXHIBITS[function.__name__] = (invariant, thread, function)
        return function

    return register


def subject(moe=MoE, model=None, **changed):
    def build():
        return Model(moe) if model is None else model()

    torch.manual_seed(0)
    options = {"loss": loss, "parts": parts, "balance_weight": 0.1, "padded": batch(3), "build": build}
    return Subject(build(), batch(), **(options | changed))


def moe_with(router=None, expert=None, **methods):
    """A MoE class with another router, expert class or methods."""
    classes = {"router_class": router or Router, "expert_class": expert or Expert}
    return type("OtherMoE", (MoE,), {**classes, **methods})


def router_with(**methods):
    return type("OtherRouter", (Router,), methods)


class Top1(MoE):
    """Routes to one expert."""

    def __init__(self, top_k=1, bias=False):
        super().__init__(1, bias)


def normalised(self, chosen):
    return chosen / chosen.sum(-1, keepdim=True)


@exhibit("router-gradient", "minimind#858")
def top_1_normalised():
    return subject(type("Layer", (Top1,), {"router_class": router_with(weights=normalised)}))


@exhibit("router-gradient", "Megatron-LM#894")
def softmax_after_top_1():
    after = router_with(weights=lambda self, chosen: chosen.log().softmax(-1))
    return subject(type("Layer", (Top1,), {"router_class": after}))


@exhibit("router-gradient", "Robust-MoE-Dual-Model#2")
def router_without_gradient():
    return subject(moe_with(router_with(weights=lambda self, chosen: chosen.detach())))


@exhibit("finite", "vmoe#218")
def square_root_of_zero():
    def part(self, expert, x, weight, number):
        y = expert(x) * weight
        return y + (y - y).norm(dim=-1, keepdim=True) * 0 + (y - y).square().sum(-1, keepdim=True).sqrt()

    return subject(moe_with(part=part))


@exhibit("finite", "transformers#48205")
def uninitialised_rows():
    def part(self, expert, x, weight, number):
        dirty = torch.full_like(weight, torch.inf)
        return torch.where(weight > 2, (expert(x) * weight) * dirty, expert(x) * weight)

    return subject(moe_with(part=part))


def scaled_gradient(y, factor):
    return y * factor - (y * (factor - 1)).detach()


@exhibit("gradient-size", "DeepSpeed#6545")
def expert_gradient_times_ranks():
    def part(self, expert, x, weight, number):
        state = {n: scaled_gradient(p, 2) for n, p in expert.named_parameters()}
        return torch.func.functional_call(expert, state, x) * weight

    return subject(moe_with(part=part))


@exhibit("gradient-size", "transformers#48687")
def router_gradient_of_local_experts():
    def part(self, expert, x, weight, number):
        return expert(x) * (weight.detach() if number == 0 else weight)

    return subject(moe_with(part=part))


@exhibit("expert-gradient", "Megatron-DeepSpeed#89")
def expert_outside_the_graph():
    def part(self, expert, x, weight, number):
        return (expert(x).detach() if number == 1 else expert(x)) * weight

    return subject(moe_with(part=part))


def equal_experts(model):
    for block in model.blocks:
        for expert in block.experts[1:]:
            expert.load_state_dict(block.experts[0].state_dict())
    return model


@exhibit("experts-differ", "Muon#65")
def one_expert_copied():
    return subject(model=lambda: equal_experts(Model()))


@exhibit("experts-differ", "PaddleRec#721")
def constant_initialisation():
    def build():
        model = Model()
        for block in model.blocks:
            for p in block.experts.parameters():
                nn.init.constant_(p, 0.1)
        return model

    return subject(model=build)


@exhibit("optimizer", None)
def experts_left_out_of_the_optimizer():
    def optimizer(model):
        return torch.optim.AdamW([p for n, p in model.named_parameters() if "experts" not in n], 1e-3)

    return subject(optimizer=optimizer)


def frozen_router():
    model = Model()
    for block in model.blocks:
        block.router.requires_grad_(False)
    return model


@exhibit("frozen", None)
def frozen_router_moves():
    def step(model, optimizer, batches, loss):
        train_step(model, optimizer, batches, loss)
        with torch.no_grad():
            for block in model.blocks:
                block.router.weight.mul_(0.999)

    return subject(model=frozen_router, step=step)


@exhibit("balance-size", "transformers#43688")
def balance_grows_with_k():
    def balance_loss(self, scores, index, valid):
        return EXPERTS * (F.one_hot(index, EXPERTS).to(scores).sum(1).mean(0) * scores.mean(0)).sum()

    layer = moe_with(balance_loss=balance_loss)
    return subject(layer, padded=None, with_top_k=lambda k: _of_top_k(layer, k))


def _of_top_k(layer, k):
    torch.manual_seed(0)
    return Model(layer, top_k=k)


@exhibit("balance-size", "Automodel#1408")
def balance_times_tokens():
    def balance_loss(self, scores, index, valid):
        return MoE.balance_loss(self, scores, index, valid) * len(scores)

    return subject(moe_with(balance_loss=balance_loss), padded=None, balance_weight=0.1)


@exhibit("balance-padding", "transformers#28505")
def padding_in_the_balance_loss():
    def balance_loss(self, scores, index, valid):
        return MoE.balance_loss(self, scores, index, None)

    return subject(moe_with(balance_loss=balance_loss))


@exhibit("balance-padding", "Megatron-LM#1984")
def padding_in_the_counts():
    def balance_loss(self, scores, index, valid):
        load = F.one_hot(index, EXPERTS).to(scores).mean((0, 1))
        return EXPERTS * (load * scores[valid.flatten()].mean(0)).sum()

    return subject(moe_with(balance_loss=balance_loss))


@exhibit("balance-in-loss", "trl#7009")
def trainer_drops_the_balance_loss():
    return subject(loss=lambda model, batch: parts(model, batch)[0])


@exhibit("balance-in-loss", "Automodel#1408")
def balance_without_gradient():
    def dropped(model, batch):
        task, balance = parts(model, batch)
        return task + 0.1 * balance.detach()

    return subject(loss=dropped)


@exhibit("balance-in-loss", "transformers#48886")
def balance_never_set():
    def balance_loss(self, scores, index, valid):
        return scores.new_zeros(())

    return subject(moe_with(balance_loss=balance_loss))


def move_bias(self, index):
    load = F.one_hot(index, EXPERTS).double().mean((0, 1))
    self.router.expert_bias.add_(0.01 * (load.mean() - load).sign())


def biased(count=None, router=Router):
    layer = moe_with(router, count=count or (lambda self, index: None))
    return lambda: Model(layer, bias=True)


@exhibit("bias-once", "torchtitan#1593")
def bias_moves_again_in_recomputation():
    def count(self, index):
        if self.training:
            move_bias(self, index)

    return subject(model=biased(count))


@exhibit("bias-once", None)
def bias_moves_in_evaluation():
    return subject(model=biased(move_bias))


@exhibit("recomputation", "transformers#47467")
def recomputed_routing_drifts():
    def scores(self, x):
        self.calls = getattr(self, "calls", 0) + 1
        return (F.linear(x, self.weight) * (1 + 0.3 * (self.calls % 2))).softmax(-1)

    return subject(moe_with(router_with(scores=scores)))


@exhibit("evaluation", "transformers#33969")
def jitter_in_evaluation():
    def scores(self, x):
        return F.linear(x * (0.9 + 0.2 * torch.rand_like(x)), self.weight).softmax(-1)

    return subject(moe_with(router_with(scores=scores)))


@exhibit("evaluation", "MoLE#7")
def other_top_k_in_evaluation():
    def forward(self, x):
        self.top_k = 2 if self.training else 3
        return Router.forward(self, x)

    return subject(moe_with(router_with(forward=forward)))


@exhibit("batch", None)
def routing_sees_the_batch():
    def scores(self, x):
        return (F.linear(x - x.mean(0), self.weight) * 3).softmax(-1)

    return subject(moe_with(router_with(scores=scores)))


@exhibit("drops", None)
def tokens_dropped_in_silence():
    def mix(self, x, weights, index):
        y = MoE.mix(self, x, weights, index)
        return torch.cat([y[: len(y) // 2], torch.zeros_like(y[len(y) // 2 :])])

    return subject(moe_with(mix=mix))


class Unsaved(Router):
    """Keeps its bias out of the state_dict."""

    def __init__(self, top_k=2, bias=True):
        super().__init__(top_k, False)
        self.register_buffer("expert_bias", torch.zeros(EXPERTS), persistent=False)


@exhibit("checkpoint", "FlagScale#412")
def bias_not_saved():
    return subject(model=biased(router=Unsaved))


@exhibit("checkpoint", "torchtitan#1222")
def bias_replaced():
    def step(model, optimizer, batches, loss):
        train_step(model, optimizer, batches, loss)
        for block in model.blocks:
            block.router.expert_bias = block.router.expert_bias + 0.01

    held = {}

    def save(model):  # a checkpointer that asks once for the tensors
        return held.setdefault(id(model), model.state_dict())

    return subject(model=biased(), step=step, save=save)


@exhibit("checkpoint", "KempnerForge#202")
def half_of_the_experts_saved():
    def save(model):
        return {n: v for n, v in model.state_dict().items() if "experts.3" not in n and "experts.2" not in n}

    return subject(save=save)


@exhibit("optimizer-checkpoint", None)
def optimizer_of_half_of_the_experts_saved():
    def save_optimizer(optimizer):
        state = optimizer.state_dict()
        half = {n: v for n, v in state["state"].items() if n < len(state["state"]) // 2}
        return {"state": half, "param_groups": state["param_groups"]}

    return subject(save_optimizer=save_optimizer)


@exhibit("options", "sglang-jax#1282")
def scaling_factor_ignored():
    def build():
        torch.manual_seed(0)
        model = Model()
        model.scaling_factor = 2.5  # nothing reads it
        return model

    return subject(options={"routed_scaling_factor": build})


class Adapted(Expert):
    """An expert with a low-rank adapter."""

    acts = True

    def __init__(self):
        super().__init__()
        self.lora_A = nn.Parameter(torch.randn(2, 12))
        self.lora_B = nn.Parameter(torch.zeros(12, 2))

    def forward(self, x):
        return super().forward(x) + (x @ self.lora_A.T @ self.lora_B.T if self.acts else 0)


@exhibit("adapters", "unsloth-zoo#1242")
def adapter_that_no_forward_uses():
    return subject(moe_with(expert=type("Inert", (Adapted,), {"acts": False})), adapted=["experts"])


@exhibit("adapter-targets", "unsloth#6936")
def adapter_of_missing_modules():
    return subject(moe_with(expert=Adapted), adapted=["gate_up_proj"])
