"""SoftmaxGate, SigmoidGate and UniformGate against loops written from the papers, in float64."""

import pytest
import torch

from fmoe_ext.gates import (
    BiasedSoftmaxGate,
    GShardGate,
    NormedGate,
    SigmoidGate,
    SoftmaxGate,
    SqrtSoftplusGate,
    SwitchGate,
    UniformGate,
    update_biases,
)
from fmoe_ext.gates.scores import scores_of

D, E = 6, 8


def make(cls, top_k=2, seed=0, **options):
    torch.manual_seed(seed)
    return cls(D, E, 1, top_k, **options).double()


def tokens(num=32, seed=1):
    return torch.randn(num, D, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def logits_of(gate, x):
    return x @ gate.gate.weight.T + gate.gate.bias


@pytest.mark.parametrize("top_k", [1, 2, 4, E])
@pytest.mark.parametrize("normalize", [True, False])
def test_softmax_gate(top_k, normalize):
    gate, x = make(SoftmaxGate, top_k, normalize=normalize, scale=1.5), tokens()
    topk_idx, topk_weights, logits = gate(x, return_all_scores=True)
    torch.testing.assert_close(logits, logits_of(gate, x))
    for t, row in enumerate(logits_of(gate, x)):
        probability = torch.exp(row) / torch.exp(row).sum()
        best = sorted(range(E), key=lambda e: -row[e].item())[:top_k]
        assert topk_idx[t].tolist() == best
        expected = probability[best]
        if normalize:
            after = torch.exp(row[best]) / torch.exp(row[best]).sum()  # softmax after the top-k
            torch.testing.assert_close(expected / expected.sum(), after)
            expected = after
        torch.testing.assert_close(topk_weights[t], 1.5 * expected)


def deepseek_v3(scores, bias, top_k, num_groups, topk_groups, scale, group_best):
    """One token, as the report and the reference inference code say."""
    biased = scores + bias
    group_size = len(scores) // num_groups
    rank = []
    for g in range(num_groups):
        members = biased[g * group_size : (g + 1) * group_size]
        rank.append(sum(sorted(members.tolist())[-group_best:]))
    kept = sorted(range(num_groups), key=lambda g: -rank[g])[:topk_groups]
    eligible = [e for e in range(len(scores)) if e // group_size in kept]
    chosen = sorted(eligible, key=lambda e: -biased[e].item())[:top_k]
    return chosen, scale * scores[chosen] / scores[chosen].sum()


@pytest.mark.parametrize(
    ("top_k", "options", "group_best"), [(4, {}, 2), (3, {}, 1), (3, {"group_best": 2}, 2)]
)
def test_sigmoid_gate_is_deepseek_v3(top_k, options, group_best):
    """K // topk_groups scores rank a group in the report; 2, whatever K, in the inference code."""
    gate = make(SigmoidGate, top_k=top_k, num_groups=4, topk_groups=2, scale=2.5, **options)
    gate.expert_bias.copy_(torch.linspace(-0.3, 0.3, E))
    x = tokens(200)
    topk_idx, topk_weights = gate(x)
    changed = 0
    for t, row in enumerate(logits_of(gate, x)):
        scores = 1 / (1 + torch.exp(-row))
        chosen, weights = deepseek_v3(scores, gate.expert_bias, top_k, 4, 2, 2.5, group_best)
        assert topk_idx[t].tolist() == chosen
        torch.testing.assert_close(topk_weights[t], weights)
        changed += chosen != deepseek_v3(scores, torch.zeros(E), top_k, 4, 2, 2.5, group_best)[0]
    assert changed > 20, "the bias must matter in this test"


@pytest.mark.parametrize("options", [{}, {"num_groups": 4, "topk_groups": 2, "group_best": 2}])
def test_norm_eps_is_added_to_the_sum_of_the_weights(options):
    gate, plain = (make(SigmoidGate, 3, scale=2.0, norm_eps=eps, **options) for eps in (0.5, 0.0))
    chosen, weights = gate(tokens())
    scores = logits_of(gate, tokens()).sigmoid().gather(1, chosen)
    torch.testing.assert_close(weights, 2 * scores / (scores.sum(1, keepdim=True) + 0.5))
    assert torch.equal(chosen, plain(tokens())[0])
    assert plain.weights_vary is None and "norm_eps=0.5" in gate.weights_vary


def test_bias_of_logits_moves_choices_past_any_score():
    """Scores are at most 1, logits are not: a bias decides otherwise than one that is added to the scores."""
    gate = make(SigmoidGate, 3, biased="logits", norm_eps=1e-6)
    gate.expert_bias.copy_(torch.linspace(-0.5, 0.5, E))
    x = 4 * tokens(200)
    chosen, weights = gate(x)
    logits = logits_of(gate, x)
    assert torch.equal(chosen, (logits + gate.expert_bias).topk(3).indices)
    scores = logits.sigmoid().gather(1, chosen)
    torch.testing.assert_close(weights, scores / (scores.sum(1, keepdim=True) + 1e-6))
    gate.biased = "scores"
    assert not torch.equal(chosen, gate(x)[0])


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"norm_eps": -1.0}, "norm_eps must not be negative"),
        ({"biased": "weights"}, 'biased must be "scores" or "logits"'),
        (
            {"biased": "logits", "num_groups": 2, "topk_groups": 1},
            "cannot be limited to groups: .*got 2 and 1",
        ),
    ],
)
def test_options_that_a_gate_does_not_compute_are_refused(options, says):
    with pytest.raises(ValueError, match=says):
        make(SigmoidGate, 1, **options)


def test_biased_softmax_gate_is_ernie_4_5():
    """The bias moves the choice; the weights are the softmax of the chosen, divided by their sum."""
    gate = make(BiasedSoftmaxGate, top_k=3)
    gate.expert_bias.copy_(torch.linspace(-0.1, 0.1, E))
    x = tokens(100)
    topk_idx, topk_weights = gate(x)
    probabilities = logits_of(gate, x).detach().softmax(-1)
    chosen = (probabilities + gate.expert_bias).topk(3).indices
    assert torch.equal(topk_idx, chosen) and not torch.equal(chosen, probabilities.topk(3).indices)
    weights = probabilities.gather(1, chosen)
    torch.testing.assert_close(topk_weights, weights / weights.sum(1, keepdim=True))
    assert gate.get_loss().item() == 0


@pytest.mark.parametrize("normalize", [True, False])
def test_sqrt_softplus_gate_is_deepseek_v4(normalize):
    gate = make(SqrtSoftplusGate, top_k=3, scale=1.5, normalize=normalize)
    gate.expert_bias.copy_(torch.linspace(-0.1, 0.1, E))
    x = tokens(100)
    topk_idx, topk_weights = gate(x)
    scores = torch.nn.functional.softplus(logits_of(gate, x)).sqrt()
    chosen = (scores + gate.expert_bias).topk(3).indices
    assert torch.equal(topk_idx, chosen) and not torch.equal(chosen, scores.topk(3).indices)
    weights = scores.gather(1, chosen)
    expected = weights / weights.sum(1, keepdim=True) if normalize else weights
    torch.testing.assert_close(topk_weights, 1.5 * expected)
    grads = [
        torch.autograd.grad((w * torch.tensor([1.0, 2.0, 4.0])).sum(), gate.gate.weight)[0]
        for w in (topk_weights, 1.5 * expected)
    ]
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_scores_far_below_zero_keep_their_gradient(dtype):
    """softplus(-160) is zero in float32, and the gradient of its root would be no number."""
    logits = torch.tensor([[-160.0, -20.5, -19.5, 0.0, 30.0]], dtype=dtype, requires_grad=True)
    scores = scores_of(logits, "sqrtsoftplus")
    wide = logits.detach().double()
    expected = torch.where(
        wide < -20, (wide / 2).exp(), torch.nn.functional.softplus(wide, threshold=50).sqrt()
    )
    torch.testing.assert_close(
        scores.double(), expected, rtol=1e-5 if dtype == torch.float32 else 1e-8, atol=0
    )
    (grad,) = torch.autograd.grad(scores.sum(), logits)
    assert grad.isfinite().all() and (grad[0, 1:] > 0).all()


def test_bias_has_no_gradient_and_no_weight_in_the_loss():
    gate = make(SigmoidGate)
    topk_idx, topk_weights = gate(tokens())
    assert not gate.expert_bias.requires_grad
    assert gate.get_loss().item() == 0
    (topk_weights * torch.tensor([1.0, 2.0])).sum().backward()
    assert gate.gate.weight.grad.abs().max() > 0


def test_update_bias_is_one_signed_step():
    gate = make(SigmoidGate, bias_update_speed=0.25)
    gate.pending_load.copy_(torch.tensor([9, 1, 4, 4, 4, 4, 4, 2]))
    update_biases(torch.nn.Sequential(gate))
    assert gate.expert_bias.tolist() == [-0.25, 0.25, 0, 0, 0, 0, 0, 0.25]
    assert gate.pending_load.sum() == 0


def test_bias_of_a_frozen_gate_stays():
    frozen, trained = (SigmoidGate(D, E, 1, top_k=1) for _ in range(2))
    frozen.requires_grad_(False)
    for gate in (frozen, trained):
        gate(torch.ones(10, D))
    update_biases(torch.nn.Sequential(frozen, trained))
    assert not frozen.expert_bias.any() and trained.expert_bias.all()


def test_update_bias_counts_exactly_beyond_what_float32_holds():
    gate = SigmoidGate(D, 2, 1, 1, bias_update_speed=0.25)
    gate.pending_load.copy_(torch.tensor([2**25 + 1, 2**25 - 1]))
    gate.update_bias()
    assert gate.expert_bias.tolist() == [-0.25, 0.25]


def test_load_is_counted_in_training_only():
    gate = make(SigmoidGate)
    gate.eval()
    gate(tokens())
    assert gate.pending_load.sum() == 0
    gate.train()
    topk_idx, _ = gate(tokens())
    assert torch.equal(gate.pending_load, topk_idx.flatten().bincount(minlength=E))


def test_bias_balances_a_skewed_gate():
    torch.manual_seed(0)
    gate = SigmoidGate(D, E, 1, 2, bias_update_speed=0.005)
    with torch.no_grad():
        gate.gate.bias.copy_(torch.linspace(1.5, -1.5, E))  # expert 0 is everybody's favourite
    curve = []
    for _ in range(250):
        topk_idx, _ = gate(torch.randn(512, D))
        load = topk_idx.flatten().bincount(minlength=E)
        curve.append((load.max() / load.double().mean()).item())
        gate.update_bias()
    picture = "\n".join(
        f"step {i:3} {'#' * round(10 * v)} {v:.2f}" for i, v in enumerate(curve) if i % 20 == 0
    )
    final = sum(curve[-20:]) / 20
    assert curve[0] > 2, f"largest load / mean load:\n{picture}"
    assert final < 1.25, f"largest load / mean load:\n{picture}"


def test_sequence_loss_of_deepseek_v3():
    gate = make(SigmoidGate, balance_loss="sequence", seq_len=8, balance_weight=0.5)
    gate.expert_bias.copy_(torch.linspace(0.4, -0.4, E))
    x = tokens(16)
    gate(x)
    scores = logits_of(gate, x).sigmoid()
    total = 0.0
    for sequence in scores.split(8):
        probability = sequence / sequence.sum(1, keepdim=True)
        for e in range(E):
            chosen = sum(int(e in row.topk(2).indices) for row in sequence)  # equation 18: without the bias
            total = total + E / (2 * 8) * chosen * probability[:, e].mean()
    torch.testing.assert_close(gate.get_loss(), 0.5 * total / 2)


def test_several_balance_losses_are_summed_by_their_weights():
    x = tokens(16)
    losses = {"global": 1.5, "sequence": 0.25, "running": 2.0}
    together = make(SoftmaxGate, balance_loss=losses, seq_len=8, balance_weight=0.5, z_weight=0.1)
    together(x)
    total, values = 0.0, {}
    for kind, weight in losses.items():
        alone = make(SoftmaxGate, balance_loss=kind, seq_len=8 if kind == "sequence" else None)
        alone(x)
        values[kind] = alone.get_loss()
        total = total + 0.5 * weight * values[kind]
    z = make(SoftmaxGate, balance_loss=None, z_weight=0.1)
    z(x)
    torch.testing.assert_close(together.get_loss(), total + z.get_loss(), rtol=1e-12, atol=0)
    assert together.balance_values == {kind: value.detach() for kind, value in values.items()}


def test_balance_loss_changes_between_steps():
    """A gate computes the losses that are assigned; it had kept those that it was made with."""
    gate, x = make(SigmoidGate), tokens()
    gate(x)
    assert gate.get_loss() == 0
    for value in ("global", "running", {"global": 0.5}, "running"):
        gate.balance_loss = value
        gate(x)
        expected = make(SigmoidGate, balance_loss=value)
        expected(x)
        assert gate.balance_loss == value
        assert gate.get_loss() == expected.get_loss() > 0
    optimizer = torch.optim.SGD(gate.parameters(), lr=0.0)
    optimizer.step()
    assert gate.running_load.sum() == 0
    with pytest.raises(ValueError, match='balance_loss="sequence" needs seq_len'):
        gate.balance_loss = "sequence"
    gate.balance_loss = None
    gate(x)
    assert gate.get_loss() == 0


def test_loss_is_the_weighted_sum():
    x = tokens()
    balance = make(SoftmaxGate)
    balance(x)
    z = make(SoftmaxGate, balance_loss=None, z_weight=1.0)
    z(x)
    both = make(SoftmaxGate, balance_weight=0.3, z_weight=0.2)
    both(x)
    torch.testing.assert_close(z.get_loss(clear=False), logits_of(z, x).logsumexp(1).square().mean())
    torch.testing.assert_close(both.get_loss(), 0.3 * balance.get_loss() + 0.2 * z.get_loss())


def test_jitter_multiplies_the_input_in_training():
    gate, x = make(SoftmaxGate, jitter=0.2), tokens()
    torch.manual_seed(5)
    *_, logits = gate(x, return_all_scores=True)
    torch.manual_seed(5)
    noise = torch.rand_like(x) * 0.4 + 0.8
    torch.testing.assert_close(logits, logits_of(gate, x * noise))
    gate.eval()
    *_, logits = gate(x, return_all_scores=True)
    torch.testing.assert_close(logits, logits_of(gate, x))


def test_uniform_gate():
    gate, x = make(UniformGate, top_k=3), tokens(16)
    topk_idx, topk_weights = gate(x)
    assert topk_idx.flatten().tolist() == [i % E for i in range(16 * 3)]
    for t, row in enumerate(logits_of(gate, x)):
        torch.testing.assert_close(topk_weights[t], row[topk_idx[t]].softmax(-1))
    topk_weights[:, 0].sum().backward()
    assert gate.gate.weight.grad.abs().max() > 0


def test_capacity_by_position():
    gate, x = make(SoftmaxGate, capacity_factor=0.5), tokens()
    topk_idx, topk_weights, logits = gate(x, return_all_scores=True)
    capacity, taken, expected = 4, [0] * E, logits.topk(2).indices.clone()  # ceil(0.5 * 32 * 2 / 8)
    for k in range(2):
        for t in range(32):
            e = expected[t, k].item()
            taken[e] += 1
            if taken[e] > capacity:
                expected[t, k] = -1
    assert torch.equal(topk_idx, expected)
    assert (topk_idx == -1).any()
    torch.testing.assert_close(topk_weights, logits.topk(2).values.softmax(-1))  # not renormalised


def test_capacity_by_score():
    gate, x = make(SoftmaxGate, capacity_factor=0.5, drop_policy="score", normalize=False), tokens()
    topk_idx, topk_weights, logits = gate(x, return_all_scores=True)
    chosen = logits.topk(2).indices
    for e in range(E):
        claims = [
            (-topk_weights[t, k].item(), k, t) for t in range(32) for k in range(2) if chosen[t, k] == e
        ]
        kept = {(t, k) for _, k, t in sorted(claims)[:4]}
        assert kept == {(t, k) for t in range(32) for k in range(2) if topk_idx[t, k] == e}
    assert torch.equal(topk_idx[topk_idx >= 0], chosen[topk_idx >= 0])


@pytest.mark.parametrize("cls", [SoftmaxGate, SigmoidGate, UniformGate])
def test_gradients_of_weights_and_loss(cls):
    gate = make(cls, balance_loss="global", z_weight=0.1, normalize=False)

    def both(x, weight):
        gate.eval()
        topk_idx, topk_weights = torch.func.functional_call(gate, {"gate.weight": weight}, x)
        return topk_weights, gate.get_loss()

    x, weight = tokens(5).requires_grad_(), gate.gate.weight.detach().clone().requires_grad_()
    assert torch.autograd.gradcheck(both, (x, weight))


@pytest.mark.bad_indices
def test_rejects():
    for options, message in {
        "num_groups": ({"num_groups": 3}, "num_groups must divide the 8 experts, but got 3"),
        "topk_groups": ({"num_groups": 4, "topk_groups": 5}, "between 1 and the 4 groups, but got 5"),
        "top_k": ({"top_k": 3, "num_groups": 4}, "top_k must be at most the 2 experts of 1 of 4 groups"),
        "too many": ({"top_k": 9}, "top_k must be between 1 and the 8 experts, but got 9"),
        "capacity": (
            {"capacity_factor": 0},
            "capacity_factor must be positive, or None for no limit, but got 0",
        ),
        "balance": ({"balance_weight": -1}, "balance_weight must not be negative, but got -1"),
        "z": ({"z_weight": -1}, "z_weight must not be negative, but got -1"),
        "scale": ({"scale": float("nan")}, "scale must be a positive number, but got nan"),
        "policy": ({"drop_policy": "random"}, "drop_policy must be one of .*'random'"),
        "loss": ({"balance_loss": "local"}, "balance_loss must be one of .*'local'"),
        "losses": ({"balance_loss": {"global": 1, "local": 1}}, "or several with a weight for each, but got"),
        "no losses": ({"balance_loss": {}}, "balance_loss must be one of"),
        "weight": ({"balance_loss": {"global": -1}}, "weight of balance_loss 'global' must not be negative"),
        "seq_len": ({"balance_loss": "sequence"}, "needs seq_len"),
        "seq_len in several": ({"balance_loss": {"global": 1, "sequence": 1}}, "needs seq_len"),
        "seq_len alone": ({"seq_len": 8}, "seq_len=8 is for balance_loss="),
        "jitter": ({"jitter": 1.5}, r"jitter must be in \[0, 1\), but got 1.5"),
    }.values():
        with pytest.raises(ValueError, match=message):
            make(SoftmaxGate, **options)
    with pytest.raises(ValueError, match="bias_update_speed must not be negative, but got -1"):
        make(SigmoidGate, bias_update_speed=-1)
    for kind in (SwitchGate, GShardGate):
        with pytest.raises(ValueError, match=r"two positive factors .*, but got 1\.2"):
            kind(8, 8, 1, capacity=1.2)
    with pytest.raises(ValueError, match="switch_eps must not be negative"):
        SwitchGate(8, 8, 1, switch_eps=-0.1)


def test_nan_logits_give_nan_weights():
    gate, x = make(SoftmaxGate), tokens(4)
    x[1, 0] = torch.nan
    _, topk_weights = gate(x)
    assert topk_weights[1].isnan().all()
    assert topk_weights[[0, 2, 3]].isfinite().all()


def test_normed_gate_is_gemmas_router():
    modeling = pytest.importorskip("transformers.models.gemma4.modeling_gemma4")
    config = modeling.Gemma4TextConfig(hidden_size=D, num_experts=E, top_k_experts=2)
    router = modeling.Gemma4TextRouter(config).double()
    gate = NormedGate(D, E, 1, 2, gate_bias=False, rms_eps=config.rms_norm_eps).double()
    torch.manual_seed(0)
    for ours, theirs in zip(
        (gate.gate.weight, gate.input_scale, gate.expert_scale),
        (router.proj.weight, router.scale, router.per_expert_scale),
        strict=True,
    ):
        theirs.data.normal_()
        ours.data.copy_(theirs.data)
    x = torch.randn(20, D, dtype=torch.float64)
    (topk_idx, topk_weights), (_, weights, chosen) = gate(x), router(x)
    assert torch.equal(topk_idx, chosen)
    torch.testing.assert_close(
        topk_weights, weights.double(), rtol=1e-6, atol=1e-6
    )  # Transformers' in float32
