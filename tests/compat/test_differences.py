"""Rows of the table of intended differences in docs/fastmoe.md; those that need processes: tests/distributed."""

import math
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import fmoe_ext.compat as fmoe
from fmoe_ext.compat.functions import prepare_forward
from fmoe_ext.compat.gates import DCGate, GShardGate, NaiveGate, NoisyGate, SwitchGate, ZeroGate
from fmoe_ext.compat.gates.faster_gate import gen_faster_gate
from fmoe_ext.experts import FusedExperts, to_per_expert_layout

E, D = 4, 6
DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "fastmoe.md"


def tokens(num=40):
    return torch.randn(num, D, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def make(cls, *args, **options):
    torch.manual_seed(0)
    return cls(D, E, 1, *args, **options).double()


def test_every_row_names_a_test():
    table = (
        DOCUMENT.read_text().split("| FastMoE | here | for the old behaviour | test |\n")[1].split("\n\n")[0]
    )
    rows = table.splitlines()[1:]
    assert len(rows) >= 20
    for row in rows:
        if row.startswith("| `fmoefy` "):
            continue  # tested with Megatron-LM
        path, name = row.rsplit("`", 2)[1].split("::")
        source = DOCUMENT.parents[1] / path
        assert f"def {name}(" in source.read_text(), row


def test_order_and_drops_are_deterministic():
    gate = torch.randint(-1, E, (3000, 2), generator=torch.Generator().manual_seed(0))
    pos, *_ = prepare_forward(gate, E, 1)
    flat = gate.flatten()
    assert torch.equal(pos, torch.cat([(flat == e).nonzero().flatten() for e in range(E)]))
    limited = [make(SwitchGate, capacity=(0.5, 0.5)).eval()(tokens())[0] for _ in range(2)]
    assert torch.equal(*limited)
    assert (limited[0] == -1).any()


def test_naive_gate_with_one_choice():
    x = tokens().requires_grad_()
    gate = make(NaiveGate, 1)
    topk_weights = gate(x)[1]
    assert torch.equal(topk_weights, torch.ones_like(topk_weights))
    gate = make(NaiveGate, 1, normalize=False)
    _, topk_weights, logits = gate(x, return_all_scores=True)
    torch.testing.assert_close(topk_weights, logits.softmax(-1).max(1, keepdim=True).values)
    topk_weights.sum().backward()
    assert gate.gate.weight.grad.abs().max() > 0


@pytest.mark.parametrize("gate", [NoisyGate, ZeroGate, gen_faster_gate(0)], ids=["noisy", "zero", "faster"])
def test_gates_that_crashed_work(gate):
    torch.manual_seed(0)
    layer = fmoe.FMoE(E, D, gate=gate, top_k=2, expert=lambda d: nn.Linear(d, d)).double()
    for training in (True, False):
        layer.train(training)
        torch.manual_seed(1)
        out = layer(tokens())
        torch.manual_seed(1)
        topk_idx, topk_weights = layer.gate(tokens())
        each = torch.stack([expert(tokens()) for expert in layer.experts], 1)
        expected = (topk_weights[..., None] * each[torch.arange(40)[:, None], topk_idx]).sum(1)
        torch.testing.assert_close(out, expected, rtol=1e-6, atol=1e-6)


def test_gshard_loss_and_capacity_count_all_experts():
    """FastMoE's formulas with all experts in the place of the local ones: the same on one rank."""
    gate = make(GShardGate, capacity=(0.6, 0.6), random_routing=False)
    topk_idx, _, logits = gate(tokens(), return_all_scores=True)
    first = logits.argmax(1)
    c, m = first.bincount(minlength=E) / 40, logits.softmax(-1).mean(0)
    torch.testing.assert_close(gate.get_loss(), torch.mean(c * m) * E**2)
    capacity = math.ceil(0.6 * 40) * 2 // E
    assert topk_idx[topk_idx >= 0].bincount(minlength=E).max() == capacity
    dc = make(DCGate, capacity=(0.6, 0.6), random_routing=False)
    wanted = dc(tokens(), return_all_scores=True)[2].topk(2).indices.flatten().bincount(minlength=E)
    kept = dc(tokens())[0]
    assert torch.equal(kept[kept >= 0].bincount(minlength=E), wanted.clamp(max=math.ceil(0.6 * 40)))


def test_switch_gate_as_the_paper_and_as_fastmoe():
    x = tokens()
    gate = make(SwitchGate, capacity=(0.5, 0.5), switch_eps=0.2)
    torch.manual_seed(3)
    *_, logits = gate(x, return_all_scores=True)
    torch.manual_seed(3)
    noise = torch.rand_like(x) * 0.4 + 0.8
    torch.testing.assert_close(logits, gate.gate(x * noise))
    f = logits.argmax(1).bincount(minlength=E) / 40
    torch.testing.assert_close(gate.get_loss(), E * (f * logits.softmax(-1).mean(0)).sum())

    old = make(SwitchGate, capacity=(0.5, 0.5), switch_eps=0.2, additive_noise=True, fastmoe_loss=True)
    torch.manual_seed(3)
    topk_idx, _, logits = old(x, return_all_scores=True)
    torch.manual_seed(3)
    torch.testing.assert_close(logits, old.gate(x) + torch.rand(40, E, dtype=x.dtype) * 0.4 + 0.8)
    kept = topk_idx[topk_idx >= 0]
    assert len(kept) < 40
    f, p = kept.bincount(minlength=E) / len(kept), logits.softmax(-1).sum(0) / len(kept)
    torch.testing.assert_close(old.get_loss(), E * (f * p).sum())


@pytest.mark.parametrize("renormalize", [False, True])
def test_dropped_choices(renormalize):
    class Dropping(NaiveGate):
        def forward(self, inp):
            topk_idx, topk_weights = super().forward(inp)
            return topk_idx.masked_fill(
                torch.arange(len(inp))[:, None] % 3 == torch.tensor([1, 2]), -1
            ), topk_weights

    torch.manual_seed(0)
    layer = fmoe.FMoE(E, D, gate=Dropping, expert=lambda d: nn.Linear(d, d), renormalize=renormalize).double()
    x = tokens()
    topk_idx, topk_weights = layer.gate(x)
    for t, row in enumerate(layer(x)):
        kept = [(e, w) for e, w in zip(topk_idx[t].tolist(), topk_weights[t], strict=True) if e >= 0]
        total = sum(w for _, w in kept) if renormalize else 1
        torch.testing.assert_close(row, sum(w / total * layer.experts[e](x[t]) for e, w in kept))


def test_native_errors_are_exceptions():
    with pytest.raises(RuntimeError, match=r"topk_idx must be in \[-1, 4\)"):
        prepare_forward(torch.tensor([[0, 4]]), E, 1)


def test_forward_reads_nothing_on_the_host():
    with FakeTensorMode():
        layer = fmoe.FMoETransformerMLP(num_expert=E, d_model=D, d_hidden=8, gate=GShardGate)
        out = layer(torch.empty(40, D))
    assert out.shape == (40, D)


def test_transformer_mlp_is_fused():
    layer = fmoe.FMoETransformerMLP(num_expert=E, d_model=D, d_hidden=8)
    assert isinstance(layer.experts, FusedExperts)
    assert layer.state_dict()["experts.htoh4.weight"].shape == (E, 8, D)
    split = to_per_expert_layout(layer.state_dict())
    assert torch.equal(split["experts.2.htoh4.weight"], layer.experts.htoh4.weight[2:3])
