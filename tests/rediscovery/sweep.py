"""Audits every MoE architecture of the installed Transformers under ep 2 and tp 2: `python sweep.py [NAME ...]`.

Prints a line for each: architecture, plan, and equal, the first difference, or the error.
"""

import functools
import sys
import unittest.mock

from transformers.distributed import DistributedConfig

from fmoe_ext.audit import AuditError, PlanRecipe, audit_plan
from fmoe_ext.audit.plans.transformers import from_pretrained
from fmoe_ext.testing import DistributedPool
from tests.huggingface import moe_architectures

PLANS = {"ep 2": {"tp_size": 2, "ep_size": 2, "tp_plan": {}}, "tp 2": {"tp_size": 2}}
WORLD = 2


def parallelize(options, model, rank, world):
    return from_pretrained(model, distributed_config=DistributedConfig(**options))


def tiny_model(architecture):
    """A tiny model whose vocabulary two ranks can share."""
    sizes = dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), 64)
    with unittest.mock.patch.dict(moe_architectures.SIZES, sizes):
        return moe_architectures.tiny_model(architecture)


def recipe_of(architecture, plan):
    """The recipe of one architecture under one plan; its tiny model has no zero parameter."""
    return PlanRecipe(
        model=functools.partial(tiny_model, architecture),
        parallelize=functools.partial(parallelize, PLANS[plan]),
        noise=0.0,
    )


def outcome(architecture, plan, pool):
    """equal, the first difference, or the error, as text."""
    try:
        report = audit_plan(recipe_of(architecture, plan), pool=pool, timeout=240.0)
    except AuditError as error:
        return f"cannot: {' '.join(str(error).split())[-200:]}"
    if report.error is not None:
        return f"failed: {' '.join(report.error.strip().splitlines()[-1].split())[:300]}"
    return "equal" if report.ok else f"DIFFERENT {report.first}"


def main(names):
    with DistributedPool(WORLD) as pool:
        for name in names or moe_architectures.architectures():
            for plan in PLANS:
                print(f"{name} | {plan} | {outcome(name, plan, pool)}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
