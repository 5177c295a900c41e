"""fmoe_ext.audit of GPTModels of Megatron-core: equal with our layer, and what differs where a mistake was seeded."""

from dataclasses import replace

import pytest

pytest.importorskip("megatron.core", reason="pip install megatron-core")
import audit_megatron as models
import audit_plan_megatron as plan
from audit_shared import ONE, PLAIN, audited, first_difference, unreduced

from fmoe_ext.audit import audit_plan


@pytest.mark.long
def test_our_layer_is_equal_in_every_layout(pool):
    axes = {"layouts": ["1", "dp2", "ep2", "dp2xep2"], "padding": ["none", "right"], "dtypes": ["float64"]}
    report = audited(pool, models.BALANCED, **PLAIN | axes | {"recomputation": ["none", "non-reentrant"]})
    assert report.ok, str(report)
    assert len(report.results) == 16
    assert all(worst <= 1e-12 for result in report.results for worst in result.worst.values())
    assert report.results[0].worst.keys() >= {"loss", "gradient", "norm", "clipped", "parameter"}


def test_microbatches_without_a_balance_loss(pool):
    report = audited(pool, models.RECIPE, **ONE | {"layouts": ["ep2"], "accumulation": ["2"]})
    assert report.ok, str(report)


def test_finds_that_megatrons_balance_loss_is_of_each_rank(pool):
    settings = ONE | {"layouts": ["dp2"]}
    assert audited(pool, models.OWN, **settings).ok
    first = first_difference(audited(pool, models.OWN_BALANCED, **settings))
    assert (first.step, first.quantity) == (1, "gradient") and first.error > 1e-6


def test_finds_a_missing_gradient_reduction(pool):
    recipe = replace(models.RECIPE, reduce=unreduced)
    first = first_difference(audited(pool, recipe, **ONE | {"layouts": ["dp2"]}))
    assert (first.step, first.quantity) == (1, "gradient") and first.error > 1e-3
    assert first.name == "output_layer.weight"


def test_finds_a_router_that_sees_padding(pool):
    recipe = replace(models.BALANCED, loss=models.loss_that_shows_padding)
    first = first_difference(audited(pool, recipe, **ONE | {"padding": ["right"]}))
    assert (first.step, first.quantity) == (1, "gradient") and first.error > 1e-6


def test_finds_a_recomputation_that_routes_anew(pool):
    settings = ONE | {"recomputation": ["non-reentrant"]}
    assert audited(pool, models.OWN, **settings).ok
    (failure,) = audited(pool, models.OWN_WITH_NOISE, **settings).failures
    assert "Recomputed values for the following tensors have different metadata" in failure.error
    assert failure.case.recomputation == "non-reentrant"  # experts got other numbers of tokens: torch says so


def test_finds_experts_left_out_of_clipping(pool):
    report = audited(pool, replace(models.RECIPE, clip=models.clip_without_experts), **ONE)
    assert not report.failures and not report.ok
    assert report.facts.clipped_apart and all(".experts." in name for name in report.facts.clipped_apart)
    assert "clipping leaves out decoder.layers.0.mlp.moe.experts." in str(report)


def test_finds_an_optimizer_that_misses_routers(pool):
    report = audited(pool, replace(models.RECIPE, optimizer=models.optimizer_without_routers), **ONE)
    assert not report.failures and not report.ok
    assert report.facts.not_updated == [f"decoder.layers.{i}.mlp.moe.gate.gate.weight" for i in (0, 1)]


def test_experts_over_ranks_under_data_parallel_are_equal(pool):
    report = audit_plan(plan.RECIPE, pool=pool)
    assert report.ok, str(report)
    worst = report.as_dict()["worst"]
    assert worst.keys() >= {"loss", "gradient", "parameter"} and all(x <= 1e-12 for x in worst.values())


def test_summed_expert_gradients_are_named_by_the_expert(pool):
    first = audit_plan(replace(plan.RECIPE, parallelize=plan.summed), pool=pool).first
    assert (first.step, first.quantity) == (1, "gradient") and ".local_experts." in first.name
    assert first.note == "2 times that of one process"


def test_tensor_parallel_ranks_are_refused_by_name(pool):
    report = audit_plan(replace(plan.RECIPE, parallelize=plan.over_tensors), pool=pool)
    assert "tensor parallel 2: Megatron is audited with data and expert parallel ranks alone" in report.error
