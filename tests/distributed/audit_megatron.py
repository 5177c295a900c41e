"""A GPTModel of Megatron-core as a Recipe: its DistributedDataParallel, finalize_model_grads, and mistakes to find."""

import functools
from contextlib import contextmanager
from dataclasses import replace

import megatron_layouts as layouts
import torch
import torch.distributed as dist
import torch.nn.functional as F
from audit_shared import Noise
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.transformer.moe import moe_utils
from on_cpu import megatron_on_cpu

from fmoe_ext.audit import Recipe

VOCAB, SEQ_LEN, SAMPLES = 16, 6, 4  # fewer samples than tokens: what blocks return is [s, b, h]


def build(layout, own=False, noise=False, **options):
    """GPTModel with moe_layer_spec, or with Megatron's own MoELayer."""
    from gpt import make_chunks
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec

    from fmoe_ext.megatron import moe_layer_spec

    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None  # 0.16 reads the name, and defines it with Transformer Engine only
    sizes = {"num_layers": 2, "num_moe_experts": 4, "moe_ffn_hidden_size": 8, "add_bias_linear": False}
    with megatron_on_cpu():
        layouts.initialize(ep=layout.ep)
        config = layouts.config_of(**sizes, **options)
        mlp = get_moe_module_spec(use_te=False, num_experts=4) if own else moe_layer_spec()
        (model,) = make_chunks(config, VOCAB, 2 * SEQ_LEN, mlp=mlp)
    if noise:
        for layer in model.decoder.layers:
            layer.mlp.router.register_forward_pre_hook(Noise())
    return model


def batch(step):
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(VOCAB, (SAMPLES, SEQ_LEN + 1), generator=generator)
    valid = torch.ones(SAMPLES, SEQ_LEN, dtype=torch.bool)
    return {"inputs": tokens[:, :-1], "targets": tokens[:, 1:], "valid": valid}


def loss(model, batch, padding=True):
    positions = torch.arange(batch["inputs"].shape[1]).expand_as(batch["inputs"])
    mask = ~batch["valid"] if padding and not batch["valid"].all() else None
    logits = model(batch["inputs"], positions, None, padding_mask=mask)
    return F.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten())


loss_that_shows_padding = functools.partial(loss, padding=False)


def data_parallel(model, layout):
    with megatron_on_cpu():
        return DistributedDataParallel(model.config, DistributedDataParallelConfig(), model)


def reduce(model):
    with megatron_on_cpu():
        finalize_model_grads([model])


def clip(model, max_norm=0.1, experts=True):
    """By the norm of all gradients; experts are those of this rank."""
    named = [(name, p) for name, p in model.named_parameters() if experts or ".experts." not in name]
    dense, expert = (
        sum(p.main_grad.square().sum() for name, p in named if (".experts." in name) is kind)
        for kind in (False, True)
    )
    if experts:
        dist.all_reduce(expert, group=parallel_state.get_expert_model_parallel_group())
    norm = (dense + expert) ** 0.5
    for _, p in named:
        p.main_grad.mul_((max_norm / norm).clamp(max=1))
    return norm


clip_without_experts = functools.partial(clip, experts=False)


class Momentum(torch.optim.SGD):
    """SGD of main_grad."""

    def __init__(self, model, trained=lambda name: True):
        parameters = [p for name, p in model.named_parameters() if trained(name)]
        super().__init__(parameters, lr=0.1, momentum=0.9)
        self.model = model

    def zero_grad(self, set_to_none=True):
        self.model.zero_grad_buffer()

    def step(self, closure=None):
        parameters = self.param_groups[0]["params"]
        for p in parameters:
            p.grad = p.main_grad
        super().step()
        for p in parameters:
            p.grad = None


def optimizer_without_routers(model):
    return Momentum(model, trained=lambda name: ".gate." not in name)


@contextmanager
def on_cpu(model, microbatches):
    """Balance losses have the scale 1 inside; it is forgotten afterwards, for Megatron's schedules make their own."""
    scaler = moe_utils.MoEAuxLossAutoScaler
    scaler.main_loss_backward_scale = None
    with megatron_on_cpu():
        yield
    scaler.main_loss_backward_scale = None


RECIPE = Recipe(
    build,
    batch,
    loss,
    wrap=data_parallel,
    reduce=reduce,
    clip=clip,
    optimizer=Momentum,
    accumulate=on_cpu,
    leave_out={
        "left": "positions are counted from the first column",
        "reentrant": "layers are called by keyword",
    },
)
BALANCED = replace(RECIPE, build=functools.partial(build, moe_aux_loss_coeff=0.5))
OWN = replace(RECIPE, build=functools.partial(build, own=True))
OWN_BALANCED = replace(RECIPE, build=functools.partial(build, own=True, moe_aux_loss_coeff=0.5))
OWN_WITH_NOISE = replace(RECIPE, build=functools.partial(build, own=True, noise=True))
