"""Published bugs of parallel plans: the audit names the tensor at a version with the bug, and nothing at a fixed one.

Each case installs the two versions from the package index into an environment of its own.
"""

import json
from typing import NamedTuple

import pytest

from tests.rediscovery import environment

pytestmark = pytest.mark.slow


class Bug(NamedTuple):
    thread: str
    package: str
    wrong: str
    fixed: str
    recipe: str
    tensor: str
    note: str = ""
    options: tuple[str, ...] = ()


GATE = "model.layers.1.mlp.gate.weight"
EXPERT = "moe.deepspeed_moe.experts.deepspeed_experts.1.down.bias"
BUGS = [
    Bug("transformers#48205", "transformers", "5.16.1", "5.17.0", "olmoe_ep_grouped", GATE),
    Bug("transformers#48687", "transformers", "5.17.0", "5.18.0", "olmoe_ep_batched", GATE),
    Bug(
        "DeepSpeed#6545", "deepspeed", "0.15.1", "0.15.4", "deepspeed_zero_ep", EXPERT,
        note="2 times that of one process",
    ),
    Bug("DeepSpeed#7718", "deepspeed", "0.18.2", "0.18.3", "deepspeed_zero2_accumulation", "head.bias"),
    Bug("DeepSpeed#8382", "deepspeed", "0.19.3", "0.19.8", "deepspeed_zero1_buckets", "head.bias"),
    Bug(
        "Automodel#2995", "nemo-automodel", "0.5.0", "0.6.0", "automodel_experts", "router.weight",
        note="zero here",
        options=("--no-deps",),
    ),
    Bug(
        "Automodel#1260", "nemo-automodel", "0.3.0", "0.5.0", "automodel_experts_without_router", "embedding.weight",
        options=("--no-deps",),
    ),
    Bug(
        "Automodel#3822", "nemo-automodel", "0.6.0", "0.7.0",
        "automodel_qwen3_tp", "model.layers.1.self_attn.k_norm.weight",
        options=("--no-deps",),
    ),
]  # fmt: skip


def audited(folder, bug, version):
    python = environment.make(folder, *bug.options, f"{bug.package}=={version}")
    status, output, errors = environment.audit(python, bug.recipe)
    assert status in (0, 1), errors
    output = "\n" + output
    return json.loads(output[output.rindex("\n{\n") :])  # after what the library prints


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.thread)
def test_version_with_the_bug_is_named_and_the_fixed_one_is_equal(tmp_path, bug):
    wrong = audited(tmp_path / "wrong", bug, bug.wrong)
    assert wrong["error"] is None and not wrong["ok"]
    first = wrong["first"]
    assert (first["step"], first["quantity"], first["name"]) == (1, "gradient", bug.tensor)
    assert first["note"] == bug.note
    fixed = audited(tmp_path / "fixed", bug, bug.fixed)
    assert fixed["ok"], fixed["first"] or fixed["error"]
