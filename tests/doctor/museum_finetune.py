"""Mistakes of finetuning: deltas that no merge applies, files of another orientation, norms of other gradients."""

import torch
from torch import nn

from tests.doctor.museum import exhibit, moe_with, subject
from tests.doctor.plain import HIDDEN, D, Expert, MoE

RANK = 2


class Lora(Expert):
    """An expert with an adapter of its second matrix: A [R, HIDDEN], B [D, R]."""

    def __init__(self):
        super().__init__()
        self.lora_A = nn.Parameter(torch.randn(RANK, HIDDEN))
        self.lora_B = nn.Parameter(torch.zeros(D, RANK))

    def forward(self, x):
        h = nn.functional.gelu(self.up(x))
        return self.down(h) + h @ self.lora_A.T @ self.lora_B.T


def merge(model, delta=lambda expert: expert.lora_B @ expert.lora_A):
    """Add each expert's delta to its matrix and drop the adapter."""
    with torch.no_grad():
        for expert in (m for m in model.modules() if isinstance(m, Lora)):
            expert.down.weight += delta(expert)
            expert.lora_B.zero_()
    return model


def delta_that_falls_back(expert):
    """The orientation is guessed of the larger side; what does not fit counts as no delta."""
    weight = expert.down.weight
    delta = (
        (expert.lora_B @ expert.lora_A)
        if weight.shape[1] > weight.shape[0]
        else expert.lora_A.T @ expert.lora_B.T
    )
    return delta if delta.shape == weight.shape else torch.zeros_like(weight)


@exhibit("merged", "unsloth#6387")
def no_delta_of_the_experts_is_merged():
    return subject(moe_with(expert=Lora), merge=lambda model: merge(model, delta_that_falls_back))


@exhibit("merged", "unsloth-zoo#885")
def deltas_of_some_experts_are_merged():
    def some(model):
        for block in model.blocks:
            block.experts[3].lora_B.data.zero_()
        return merge(model)

    return subject(moe_with(expert=Lora), merge=some)


@exhibit("checkpoint", "Automodel#3626")
def adapter_file_of_the_other_orientation():
    def save(model):
        return {n: v.T.contiguous() if "lora_" in n else v for n, v in model.state_dict().items()}

    def load(model, saved):  # takes the numbers in the order in which they lie
        shapes = {n: v.shape for n, v in model.state_dict().items()}
        return model.load_state_dict({n: v.reshape(shapes[n]) for n, v in saved.items()}, strict=False)

    return subject(moe_with(expert=Lora), save=save, load=load)


def clip(model, max_norm, count=lambda name: 1):
    """torch.nn.utils.clip_grad_norm_, with gradients that count more or less often in the norm."""
    grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    norm = sum(count(n) * g.square().sum() for n, g in grads.items()) ** 0.5
    for grad in grads.values():
        grad.mul_((max_norm / norm).clamp(max=1))
    return norm


@exhibit("clip-norm", "Megatron-LM#5916")
def norm_without_some_experts():
    return subject(clip=lambda model, most: clip(model, most, lambda name: "experts.3" not in name))


@exhibit("clip-norm", None)
def norm_with_experts_twice():
    return subject(clip=lambda model, most: clip(model, most, lambda name: 1 + ("experts" in name)))


@exhibit("clip-norm", "Automodel#3816")
def every_rank_clips_by_its_own_norm():
    def each(model, max_norm):
        whole = clip(model, float("inf"))
        for ours in ((0, 1), (2, 3)):  # the experts of one rank, and what all ranks have
            names = [f"experts.{e}." for e in ours]
            norm = sum(
                p.grad.square().sum()
                for n, p in model.named_parameters()
                if "experts" not in n or any(e in n for e in names)
            )
            for name, p in model.named_parameters():
                if any(e in name for e in names):
                    p.grad.mul_((max_norm / norm**0.5).clamp(max=1))
        return whole

    return subject(clip=each)


class Capacity(MoE):
    """Each expert takes so many tokens at most; nothing says so."""

    most = 20

    def mix(self, x, weights, index):
        y = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            token, slot = (found[: self.most] for found in torch.where(index == number))
            y = y.index_add(0, token, self.part(expert, x[token], weights[token, slot, None], number))
        return y + 1e-3 * x  # no row is zero


@exhibit("drops", None)
def choices_beyond_a_hidden_limit_are_dropped():
    return subject(Capacity)


def healthy_finetuning():
    """Models without a mistake at which these rules might bark."""
    yield "merged adapters", subject(moe_with(expert=Lora), merge=merge)
    yield "clipping by one norm", subject(clip=clip)
    yield "torch's clipping", subject(clip=lambda m, most: nn.utils.clip_grad_norm_(m.parameters(), most))
    yield "clipping that returns nothing", subject(clip=lambda m, most: clip(m, most) and None)
