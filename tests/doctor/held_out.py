"""Published mistakes that were added after the doctor was written: HELD_OUT[name] = (invariant, thread, subject)."""

import torch
import torch.nn.functional as F

from tests.doctor.museum import Adapted, biased, moe_with, router_with, scaled_gradient, subject
from tests.doctor.plain import EXPERTS, Model, parts


def bias_dropped_by_conversion():
    def save(model):
        return {n: v for n, v in model.state_dict().items() if "expert_bias" not in n}

    return subject(model=biased(), save=save)


def balance_keeps_the_dimension_of_k():
    def balance_loss(self, scores, index, valid):
        return (F.one_hot(index, EXPERTS).to(scores).mean(0) * scores.mean(0)).sum() * EXPERTS

    layer = moe_with(balance_loss=balance_loss)

    def with_top_k(k):
        torch.manual_seed(0)
        return Model(layer, top_k=k)

    return subject(layer, padded=None, with_top_k=with_top_k)


def scaling_skipped_after_normalising():
    def build(scale):
        def weights(self, chosen):
            return chosen / chosen.sum(-1, keepdim=True) if self.top_k > 1 else chosen * scale

        torch.manual_seed(0)
        return Model(moe_with(router_with(weights=weights)))

    return subject(model=lambda: build(1.0), options={"routed_scaling_factor": lambda: build(2.5)})


def gradient_doubled_by_expert_parallelism():
    def part(self, expert, x, weight, number):
        return scaled_gradient(expert(x), 2) * weight

    return subject(moe_with(part=part))


def balance_weight_ignored():
    def build(coefficient):
        torch.manual_seed(0)
        model = Model()
        model.router_aux_loss_coef = coefficient
        return model

    def trained(model, batch):
        return parts(model, batch)[0]  # as if the configuration were that of a dense model

    options = {"router_aux_loss_coef": lambda: build(1.0)}
    return subject(model=lambda: build(0.1), loss=trained, options=options)


def adapter_leaves_out_up_proj():
    return subject(moe_with(expert=Adapted), adapted=["experts", "up_proj"])


def balance_of_a_padded_map():
    def balance_loss(self, scores, index, valid):
        load = torch.full(
            (EXPERTS,), 1 / EXPERTS, dtype=scores.dtype
        )  # capacity is padded: all loads are equal
        return EXPERTS * (load * scores.mean(0)).sum()

    return subject(moe_with(balance_loss=balance_loss), padded=None)


def every_rank_loads_the_first_experts():
    def build():
        model = Model()
        for block in model.blocks:
            for number in (2, 3):
                block.experts[number].load_state_dict(block.experts[number - 2].state_dict())
        return model

    return subject(model=build)


HELD_OUT = {
    "bias_dropped_by_conversion": ("checkpoint", "DeepSpeed#8358", bias_dropped_by_conversion),
    "balance_keeps_the_dimension_of_k": ("balance-size", "minimind#797", balance_keeps_the_dimension_of_k),
    "scaling_skipped_after_normalising": ("options", "sglang#31449", scaling_skipped_after_normalising),
    "gradient_doubled_by_expert_parallelism": (
        "gradient-size",
        "pytorch#160285",
        gradient_doubled_by_expert_parallelism,
    ),
    "balance_weight_ignored": ("options", "trl#7222", balance_weight_ignored),
    "adapter_leaves_out_up_proj": ("adapter-targets", "unsloth#11014", adapter_leaves_out_up_proj),
    "balance_of_a_padded_map": ("balance-in-loss", "Megatron-LM#1617", balance_of_a_padded_map),
    "every_rank_loads_the_first_experts": (
        "experts-differ",
        "DeepSpeed#6589",
        every_rank_loads_the_first_experts,
    ),
}
