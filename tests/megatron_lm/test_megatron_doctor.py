"""Megatron-core's own MoE models raise no alarm."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from fmoe_ext import doctor
from tests.sweeps import rest_is_slow

pytest.importorskip("megatron.core", reason="pip install megatron-core")
import megatron_layouts as layouts
from megatron_models import model_of, on_cpu
from megatron_pair import config_of

pytestmark = pytest.mark.usefixtures("one_megatron_rank")

OPTIONS = {
    "softmax": {},
    "sigmoid with a bias": {
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_topk_scaling_factor": 2.5,
    },
    "balance loss": {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.01},
    "z loss": {"moe_z_loss_coeff": 0.001},
    "sinkhorn": {"moe_router_load_balancing_type": "sinkhorn", "moe_router_topk": 1},
    "softmax before the top k": {"moe_router_pre_softmax": True},
    "shared expert": {"moe_shared_expert_intermediate_size": 16},
}


def loss(model, batch):
    logits = model(batch["tokens"], batch["positions"], None)
    return F.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten())


def examined(options, **training):
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    config = config_of(**OPTIONS[options])
    spec = on_cpu(get_gpt_layer_local_spec(num_experts=8, normalization=config.normalization))

    def build():
        return model_of(config, spec)

    (tokens, targets), *_ = layouts.microbatches(0)
    positions = torch.arange(layouts.SEQ_LEN).expand_as(tokens)
    batch = {"tokens": tokens, "targets": targets, "positions": positions}
    torch.manual_seed(1)
    with torch.compiler.set_stance("force_eager"):
        return doctor.check(doctor.Subject(build(), batch, loss=loss, build=build, **training))


@pytest.mark.parametrize(
    "options", rest_is_slow(OPTIONS, ["sigmoid with a bias", "sinkhorn", "shared expert"])
)
def test_gpt_of_megatron_raises_no_alarm(options):
    report = examined(options, recompute=partial(checkpoint, use_reentrant=True))  # as Megatron recomputes
    assert report.ok, str(report)
    decided = {finding.invariant for finding in report.findings if finding.verdict == "ok"}
    assert {
        "router-gradient",
        "expert-gradient",
        "optimizer",
        "evaluation",
        "drops",
        "recomputation",
    } <= decided


def test_megatron_counts_tokens_twice_when_recomputed_without_reentrance():
    report = examined("sigmoid with a bias")
    assert report.named() == {"bias-once"}, str(report)
