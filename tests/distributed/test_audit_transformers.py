"""fmoe_ext.audit of models of Transformers: equal where they are trained rightly, and what differs where not."""

import pytest
import torch

from fmoe_ext.audit.cases import AuditError
from fmoe_ext.audit.rollout import audit_rollout
from fmoe_ext.audit.shrink import shrunk_config
from fmoe_ext.audit.source import RandomTokens, loss_of_transformers, sendable

pytest.importorskip("transformers", minversion="5", reason="pip install transformers>=5")
import audit_transformers as models
import transformers
from audit_shared import ONE, audited, clip_without_experts, first_difference, unreduced


def test_audit_right_training_is_equal(pool):
    axes = {"layouts": ["1", "dp2"], "dtypes": ["float64"]}
    axes |= {"accumulation": ["1", "uneven"], "recomputation": ["none", "non-reentrant"]}
    report = audited(pool, models.qwen(), **axes, padding=["none", "right"])
    assert report.ok, str(report)
    assert len(report.results) == 16 and "left out: ep (Transformers' own experts" in str(report)
    assert all(worst <= 1e-6 for result in report.results for worst in result.worst.values())
    assert report.results[0].worst.keys() >= {"output", "loss", "gradient", "parameter"}


def test_all_of_it_at_once(pool):
    axes = {"accumulation": ["uneven"], "recomputation": ["non-reentrant"], "padding": ["right"]}
    report = audited(pool, models.mixtral(), layouts=["dp2"], dtypes=["float64"], **axes)
    assert report.ok, str(report)


def test_reentrant_recomputation_and_padding_behind(pool):
    one = ONE | {"recomputation": ["reentrant"], "padding": ["right"]}
    assert audited(pool, models.qwen(), **one).ok


def test_finds_a_balance_loss_averaged_wrongly(pool):
    """Transformers computes the balance loss over the tokens of one rank and one microbatch."""
    model = models.qwen(output_router_logits=True, router_aux_loss_coef=0.5)
    assert audited(pool, model, **ONE).ok
    for other in ({"layouts": ["dp2"]}, {"accumulation": ["2"]}):
        first = first_difference(audited(pool, model, **ONE | other))
        assert (first.step, first.quantity) == (1, "loss") and first.error > 1e-6


def test_finds_a_missing_gradient_reduction(pool):
    report = audited(pool, models.qwen(), reduce=unreduced, **ONE | {"layouts": ["dp2"]})
    first = first_difference(report)
    assert (first.step, first.quantity, first.name) == (1, "gradient", "lm_head.weight")
    assert first.error > 1e-3


def test_finds_a_router_that_sees_padding(pool):
    settings = ONE | {"padding": ["right"]}
    assert audited(pool, models.qwen(), loss=models.loss_with_balance, **settings).ok
    first = first_difference(audited(pool, models.qwen(), loss=models.loss_that_counts_padding, **settings))
    assert (first.step, first.quantity) == (1, "loss") and first.error > 1e-6


def test_finds_a_recomputation_that_routes_anew(pool):
    parts = {"batch": RandomTokens(models.SIZES["vocab_size"]), "loss": loss_of_transformers}
    assert audited(pool, models.forgetful, **parts, **ONE).ok
    report = audited(pool, models.forgetful, **parts, **ONE | {"recomputation": ["non-reentrant"]})
    (failure,) = report.failures  # experts got other numbers of tokens: torch says so
    assert "Recomputed values for the following tensors have different metadata" in failure.error


def test_finds_experts_left_out_of_clipping(pool):
    report = audited(pool, models.qwen(), clip=clip_without_experts, **ONE)
    assert not report.failures and not report.ok
    assert {name.split(".")[-2] for name in report.facts.clipped_apart} == {"experts"}
    assert "clipping leaves out model.layers.0.mlp.experts." in str(report)


def test_finds_an_optimizer_that_misses_routers(pool):
    report = audited(pool, models.qwen(), optimizer=models.optimizer_without_routers, **ONE)
    assert not report.failures and not report.ok
    assert report.facts.not_updated == [f"model.layers.{i}.mlp.gate.weight" for i in (0, 1)]


def images_model(**text):
    """A model whose configuration is made of text_config and vision_config; text: of the first."""
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 16}
    config = transformers.Qwen3VLMoeConfig(
        text_config={
            **{"vocab_size": 64, "hidden_size": 16, "intermediate_size": 16, "moe_intermediate_size": 8},
            **{"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8},
            **{"num_experts": 4, "num_experts_per_tok": 2},
            **text,
        },
        vision_config={**vision, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
    )
    with torch.device("meta"):
        return transformers.Qwen3VLMoeForConditionalGeneration(config)


def test_model_of_several_configurations_is_trained_at_its_size_or_refused():
    small = images_model()
    made = sendable(small, batch=RandomTokens(64)).build(None)
    assert [p.shape for p in made.parameters()] == [p.shape for p in small.parameters()]
    with pytest.raises(
        AuditError, match=r"Qwen3VLMoe.*\(vision_config, text_config\) are not made small.*at most 16,777,216"
    ):
        sendable(images_model(vocab_size=1 << 20), batch=RandomTokens(64))


def test_model_without_a_vocabulary_is_audited_with_the_batch_that_is_given():
    recipe = sendable(images_model(), batch=RandomTokens(8), loss=loss_of_transformers)
    assert recipe.batch == RandomTokens(8) and recipe.loss is loss_of_transformers


def test_model_without_a_vocabulary_is_refused_with_the_argument_that_helps():
    with pytest.raises(AuditError, match=r"Qwen3VLMoeConfig has no vocab_size.*: give batch="):
        sendable(images_model())
    with pytest.raises(AuditError, match=r"Qwen3VLMoeConfig has no vocab_size.*: give tokens="):
        audit_rollout(images_model())


def test_audit_shrinks_large_configuration():
    config = transformers.DeepseekV3Config()
    small = shrunk_config(config)
    assert (config.hidden_size, config.n_routed_experts) == (7168, 256), "the original stays"
    assert (small.hidden_size, small.n_routed_experts, small.num_hidden_layers) == (32, 4, 2)
    assert (small.n_group, small.topk_group, small.num_experts_per_tok) == (2, 1, 2)
    assert small.norm_topk_prob == config.norm_topk_prob
    model = transformers.AutoModelForCausalLM.from_config(small)
    tokens = torch.arange(12).view(2, 6)
    assert model(input_ids=tokens, labels=tokens).loss.isfinite()
