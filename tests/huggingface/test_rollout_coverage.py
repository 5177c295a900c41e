"""fmoe audit --rollout names operators that batch_invariant() does not cover, even where a text is equal by luck."""

import pytest
import torch
from torch import nn

from fmoe_ext.audit import audit_rollout
from tests.huggingface.rollout_models import (
    EXPERTS,
    SIZES,
    Changed,
    Sometimes,
    Wrapped,
    make_model,
    texts,
    with_mixer,
)
from tests.sweeps import rest_is_slow

transformers = pytest.importorskip("transformers")


@torch.jit.script
def scripted(x):
    return torch.sigmoid(x @ x.mT) @ x


class FirstOf(nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, x):
        return self.module(x)[0]


UNCOVERED = {
    "aten._fft_c2r": lambda x: torch.fft.irfft(torch.fft.rfft(x), 48),
    "aten.mm, computed by torch.ops.aten.mm": lambda x: torch.ops.aten.mm(
        x.flatten(0, 1), torch.eye(48)
    ).view_as(x),
    "aten.bmm": scripted,
    "aten._softmax, computed by softmin": lambda x: nn.functional.softmin(x, -1),
    "aten.mean": lambda x: x.unflatten(-1, (6, 8)).mean((-1, -2))[..., None] + x,
    "aten.index_put": lambda x: torch.zeros_like(x).index_put(
        (torch.arange(len(x)).repeat(2),), torch.cat((x, x)), accumulate=True
    ),
    "aten.angle": lambda x: torch.complex(x, x.cos()).angle(),
    "aten.atan2": lambda x: torch.ops.aten.atan2(x[..., :47], x[..., 1:]).repeat(1, 1, 2)[..., :48],
}
# One that is unknown, one called as an operator, one that TorchScript calls, one of elements whose lengths matter.
QUICK_UNCOVERED = ("aten._fft_c2r", "aten.mm, computed by torch.ops.aten.mm", "aten.bmm", "aten.atan2")


@pytest.mark.parametrize("operator", rest_is_slow(UNCOVERED, QUICK_UNCOVERED))
def test_operators_outside_of_what_is_covered_are_named(operator):
    report = audit_rollout(with_mixer(Changed(UNCOVERED[operator])), texts(2, 9))
    named = [str(one) for one in report.uncovered]
    assert any(operator in one and "model.layers.1.mixer" in one for one in named), str(report)
    assert {one.module for one in report.uncovered} == {"model.layers.1.mixer"}
    assert not report.ok


RARE = {
    "many rows": lambda x: x[..., 0].numel() > 16,
    "few rows": lambda x: x[..., 0].numel() == 1,
    "with gradients": lambda x: torch.is_grad_enabled(),
    "as many rows as with padding": lambda x: x.shape[1] == 12,
}


@pytest.mark.parametrize("when", RARE)
def test_operators_that_only_some_forwards_call_are_named(when):
    report = audit_rollout(with_mixer(Sometimes(RARE[when])), texts(2, 9))
    assert all(way.ok or way.is_impossible for way in report.ways), str(report)
    assert [str(one) for one in report.uncovered] == [
        "aten.mm, computed by torch.ops.aten.mm in model.layers.1.mixer"
    ]
    assert not report.ok and "equal here, but not shown for other texts" in str(report)


def test_operators_of_a_longer_text_are_named():
    config = transformers.MistralConfig(**SIZES, sliding_window=26)
    model = transformers.MistralForCausalLM(config).eval()
    mixer = Sometimes(lambda x: x.shape[1] == 30)  # as a whole
    model.model.layers[1] = Wrapped(model.model.layers[1], mixer, False)
    report = audit_rollout(model)
    assert "model.layers.1.mixer" in str(report.uncovered) and not report.ok, str(report)


def test_search_for_operators_that_raises_is_no_success():
    def refuse(module, args):
        if torch.utils._python_dispatch._get_current_dispatch_mode() is not None:
            raise ValueError("not under a dispatch mode")

    model = make_model("Llama")
    model.model.layers[0].mlp.register_forward_pre_hook(refuse)
    report = audit_rollout(model, texts(2, 9))
    assert not report.ok and "not under a dispatch mode" in report.unsearched
    assert "FAILED     the search for operators that are not covered: " in str(report)
    assert "equal here, but not shown for other texts" in str(report)


def softmax_by_hand(x, dim, dtype=None):
    x = x.to(dtype or x.dtype)
    x = (x - x.amax(dim, keepdim=True)).exp()
    return x / x.sum(dim, keepdim=True)


def test_softmax_by_hand_that_is_equal_by_luck_is_named(monkeypatch):
    """Its sum has zeros behind it, of keys that are masked; bfloat16 hides that, but for one token of hundreds."""
    model = make_model("Llama", torch.bfloat16, num_hidden_layers=1, attn_implementation="eager")
    monkeypatch.setattr(nn.functional, "softmax", softmax_by_hand)
    report = audit_rollout(model, texts(2, 9))
    named = [str(one) for one in report.uncovered]
    assert named == ["aten.sum, computed by sum in model.layers.0.self_attn"], str(report)
    assert all(way.ok for way in report.ways) and not report.ok
    assert str(report).endswith("equal here, but not shown for other texts")


@pytest.mark.parametrize("kind", rest_is_slow(["LSTM", "GRU", "RNN"], ["LSTM"]))
def test_recurrent_modules_are_named(kind):
    torch.manual_seed(0)
    mixer = FirstOf(getattr(nn, kind)(48, 48, batch_first=True))
    report = audit_rollout(with_mixer(mixer), texts(2, 9))
    assert not report.ok
    assert f"computed by {kind.lower()}" in str(report) and "in model.layers.1.mixer.module" in str(report)


def test_linear_attention_is_refused_by_name():
    config = transformers.Qwen3NextConfig(
        **{**SIZES, **EXPERTS, "shared_expert_intermediate_size": 24, "head_dim": 12},
        **{"linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2},
        **{"linear_num_value_heads": 4, "layer_types": ["linear_attention", "full_attention"]},
    )
    report = audit_rollout(transformers.Qwen3NextForCausalLM(config).eval(), texts(1, 8))
    assert not report.ok
    assert "model.layers.0.linear_attn: batch_invariant() promises" in str(report)
    assert "but not with conv1d" in str(report)
