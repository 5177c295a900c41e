"""FastMoE's further gates against loops in float64: ZeroGate, NoisyGate, DCGate, SwipeGate, FasterGate."""

import functools
import math

import pytest
import torch

from fmoe_ext import FMoE
from fmoe_ext.gates import DCGate, FasterGate, NaiveGate, NoisyGate, SwipeGate, ZeroGate, gen_faster_gate

D = 6


def tokens(num=20, seed=1):
    return torch.randn(num, D, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def make(cls, *args, seed=0, **options):
    torch.manual_seed(seed)
    return cls(D, *args, **options).double()


@pytest.mark.parametrize("top_k", [1, 2, 3])
def test_zero_gate(top_k):
    layer = FMoE(4, D, top_k=top_k, gate=ZeroGate, expert=lambda d: torch.nn.Linear(d, d)).double()
    x = tokens()
    topk_idx, topk_weights = layer.gate(x)
    assert topk_idx.tolist() == [[0] * top_k] * 20
    assert topk_weights.sum(1).tolist() == pytest.approx([1] * 20)
    torch.testing.assert_close(layer(x), layer.experts[0](x), rtol=1e-6, atol=1e-6)


def normal_cdf(x):
    return 0.5 * (1 + math.erf(x / math.sqrt(2)))


def noisy_loss_by_loops(gate, x, noise):
    clean = x @ gate.w_gate
    stddev = torch.log1p(torch.exp(x @ gate.w_noise)) + 1e-2
    noisy = clean + noise * stddev
    num_experts, top_k = clean.shape[1], gate.top_k
    importance, load = [0.0] * num_experts, [0.0] * num_experts
    for t in range(len(x)):
        best = sorted(range(num_experts), key=lambda e, t=t: -noisy[t, e].item())
        weights = noisy[t, best[:top_k]].softmax(-1)
        for e in range(num_experts):
            if e in best[:top_k]:
                importance[e] += weights[best.index(e)].item()
            without = sorted((noisy[t, j].item() for j in range(num_experts) if j != e), reverse=True)
            if top_k < num_experts:
                load[e] += normal_cdf((clean[t, e].item() - without[top_k - 1]) / stddev[t, e].item())
            else:
                load[e] += 1

    def cv2(values):
        values = torch.tensor(values, dtype=torch.float64)
        return (values.var() / values.mean() ** 2).item()

    return cv2(importance) + cv2(load)


@pytest.mark.parametrize("top_k", [1, 2, 4, 5])
def test_noisy_gate_loss_is_shazeer_et_al(top_k):
    gate, x = make(NoisyGate, 5, 1, top_k), tokens()
    torch.manual_seed(3)
    topk_idx, topk_weights, noisy = gate(x, return_all_scores=True)
    torch.manual_seed(3)
    noise = torch.randn_like(noisy)
    assert gate.get_loss().item() == pytest.approx(noisy_loss_by_loops(gate, x, noise), rel=1e-9)
    values, expected = noisy.topk(top_k)
    assert torch.equal(topk_idx, expected)
    torch.testing.assert_close(topk_weights, values.softmax(-1))
    assert not torch.equal(noisy, x @ gate.w_gate)


def test_noisy_gate_in_eval_has_no_noise_and_a_finite_loss():
    gate, x = make(NoisyGate, 5, 1, 2), tokens()
    gate.eval()
    topk_idx, topk_weights = gate(x)
    values, expected = (x @ gate.w_gate).topk(2)
    assert torch.equal(topk_idx, expected)
    importance = torch.zeros(20, 5, dtype=torch.float64).scatter(1, expected, values.softmax(-1)).sum(0)
    load = expected.flatten().bincount(minlength=5).double()
    cv2 = importance.var() / importance.mean() ** 2 + load.var() / load.mean() ** 2
    torch.testing.assert_close(gate.get_loss(), cv2)


def test_noisy_gate_gradients():
    gate = make(NoisyGate, 4, 1, 2)

    def weights_and_loss(x, w_gate, w_noise):
        torch.manual_seed(11)
        _, topk_weights = torch.func.functional_call(gate, {"w_gate": w_gate, "w_noise": w_noise}, x)
        return topk_weights, gate.get_loss()

    parameters = [p.detach().clone().requires_grad_() for p in (gate.w_gate, gate.w_noise)]
    assert torch.autograd.gradcheck(weights_and_loss, (tokens(6).requires_grad_(), *parameters))


def test_dc_gate_capacity():
    x = tokens(20)
    gate = make(DCGate, 4, 1, capacity=(0.2, 0.4), random_routing=False)
    topk_idx, _, logits = gate(x, return_all_scores=True)
    taken, expected = [0] * 4, logits.topk(2).indices
    for k in range(2):
        for t in range(20):
            e = expected[t, k].item()
            taken[e] += 1
            if taken[e] > math.ceil(0.2 * 20):
                expected[t, k] = -1
    assert torch.equal(topk_idx, expected)
    assert (expected == -1).any()


def test_swipe_gate_on_one_worker_is_naive():
    swipe, naive, x = make(SwipeGate, 4, 1, 3), make(NaiveGate, 4, 1, 3), tokens()
    for ours, theirs in zip(swipe(x), naive(x), strict=True):
        assert torch.equal(ours, theirs)


def swipe_by_loops(columns, tokens_per_rank, num_expert):
    """columns: choices of all ranks, [T] for each k."""
    room = [count * len(columns) for count in tokens_per_rank]
    result = []
    for k, column in enumerate(columns):
        admitted = list(column)
        full = []
        for t, e in enumerate(column):
            if room[e // num_expert] > 0:
                room[e // num_expert] -= 1
            else:
                full.append(t)
        for t in full:
            rank = next(w for w, left in enumerate(room) if left > 0)
            room[rank] -= 1
            admitted[t] = rank * num_expert + k % num_expert
        result.append(admitted)
    return result


class Others:
    """Ranks whose choices are known: this one is number `rank`."""

    def __init__(self, rank, parts):
        self.rank = rank
        self.parts = parts

    def gather(self, x, same_size=False):
        self.parts[self.rank] = x
        return self.parts


@pytest.mark.parametrize("rank", [0, 2])
def test_swipe_once(rank):
    torch.manual_seed(2)
    sizes, num_expert = [5, 0, 7], 2
    gate = SwipeGate(D, num_expert, 3, 2)
    everyone = torch.randint(0, 4, (12, 2))  # rank 2 is never wanted
    begin = sum(sizes[:rank])
    mine = everyone[begin : begin + sizes[rank]]
    expected = swipe_by_loops(everyone.t().tolist(), sizes, num_expert)
    capacity = torch.tensor(sizes) * 2
    for k in range(2):
        gate.ranks = Others(rank, list(everyone[:, k].split(sizes)))
        column, capacity = gate.swipe_once(mine[:, k], capacity, k % num_expert)
        assert column.tolist() == expected[k][begin : begin + sizes[rank]]
    assert capacity.tolist() == [0, 0, 0]


@pytest.mark.parametrize("normalize", [True, False])
def test_swipe_gate_gathers_once_and_weighs_as_naive(normalize):
    gate, x = make(SwipeGate, 2, 3, 2, normalize=normalize), tokens(5)
    others, calls = [torch.randint(0, 4, (size, 2)) for size in (4, 7)], []

    class Ranks(Others):
        def gather(self, x, same_size=False):
            calls.append(x)
            return [x, *others]

    gate.ranks = Ranks(0, [])
    topk_idx, topk_weights, logits = gate(x, return_all_scores=True)
    first = logits.topk(2).indices
    expected = swipe_by_loops(torch.cat([first, *others]).t().tolist(), [5, 4, 7], 2)
    assert len(calls) == 1 and topk_idx.t().tolist() == [column[:5] for column in expected]
    chosen = logits.gather(1, topk_idx)
    weights = chosen.softmax(1) if normalize else logits.softmax(1).gather(1, topk_idx)
    torch.testing.assert_close(topk_weights, weights)


def test_swipe_once_with_the_room_of_one_rank():
    """FastMoE's call: each rank hands in its own room as a scalar, and gets what is left of it."""
    gate = SwipeGate(D, 2, 3, 2)
    everyone, rooms = torch.randint(0, 4, (12,)), torch.tensor([5, 1, 9])

    class Ranks(Others):
        def gather(self, x, same_size=False):
            return super().gather(x) if x.shape[0] != 1 else list(rooms.split(1))

    gate.ranks = Ranks(0, list(everyone.split((5, 0, 7))))
    moved, left = gate.swipe_once(everyone[:5], rooms[0], 0)
    gate.ranks = Others(0, list(everyone.split((5, 0, 7))))
    expected, all_left = gate.swipe_once(everyone[:5], rooms, 0)
    assert torch.equal(moved, expected) and left.dim() == 0 and left == all_left[0]


def test_swipe_gate_needs_its_ranks():
    with pytest.raises(RuntimeError, match="between 2 ranks, but its ranks= knows 1"):
        make(SwipeGate, 4, 2, 2)(tokens())


@pytest.mark.parametrize("fraction", [0, 0.2, 1])
@pytest.mark.parametrize("node", [0, 1])
def test_faster_gate_keeps_tokens_in_the_node(fraction, node):
    gate, x = make(FasterGate, 2, 4, node, gpus_per_node=2, outgoing_fraction=fraction), tokens(30)
    topk_idx, topk_weights, logits = gate(x, return_all_scores=True)
    local = range(4 * node, 4 * node + 4)
    best = logits.topk(2).indices.tolist()
    outside = [t for t in range(30) if best[t][0] not in local]
    allowed = int(fraction * 30)
    assert len(outside) > 6
    if len(outside) > allowed:
        leaving = sorted(outside, key=lambda t: -logits[t, best[t][0]].item())[:allowed]
        for t in range(30):
            at_home = sorted(local, key=lambda e, t=t: -logits[t, e].item())
            expected = [best[t][0], at_home[0]] if t in leaving else at_home[:2]
            assert topk_idx[t].tolist() == expected, t
    else:
        assert topk_idx.tolist() == best
    torch.testing.assert_close(topk_weights, logits.gather(1, topk_idx).softmax(-1))
    c = torch.tensor([row[0] for row in best]).bincount(minlength=8) / 30
    torch.testing.assert_close(gate.get_loss(), (c * logits.softmax(-1).mean(0)).mean() * 64)


def test_gen_faster_gate_builds_a_layer():
    layer = FMoE(
        4, D, gate=gen_faster_gate(0), expert=lambda d: torch.nn.Linear(d, d), gate_bias=False
    ).double()
    x = tokens()
    assert isinstance(layer.gate, FasterGate)
    assert layer.gate.gate.bias is None
    values, idx = (x @ layer.gate.gate.weight.T).topk(2)
    per_expert = torch.stack([expert(x) for expert in layer.experts], 1)
    expected = (values.softmax(-1)[..., None] * per_expert[torch.arange(20)[:, None], idx]).sum(1)
    torch.testing.assert_close(layer(x), expected)


def test_faster_gate_defaults_come_from_the_environment(monkeypatch):
    monkeypatch.setenv("FMOE_TOPO_GPUS_PER_NODE", "2")
    monkeypatch.setenv("FMOE_TOPO_OUTGOING_FRACTION", "0.5")
    gate = FasterGate(D, 2, 4, 1)
    assert gate.is_local.tolist() == [False] * 4 + [True] * 4
    assert gate.outgoing_fraction == 0.5


@pytest.mark.bad_indices
def test_rejects():
    with pytest.raises(
        ValueError, match=r"node_rank must be in \[0, 1\).*got 2; FMoE passes it only through"
    ):
        FMoE(4, D, top_k=2, gate=FasterGate, expert=lambda d: torch.nn.Linear(d, d))
    with pytest.raises(ValueError, match="top_k must be 2, but got 3"):
        gen_faster_gate(0)(D, 4, 1, 3)
    with pytest.raises(ValueError, match="outgoing_fraction must be between 0 and 1, but got 2"):
        FasterGate(D, 4, 1, 0, outgoing_fraction=2)
    with pytest.raises(ValueError, match="gpus_per_node must be at least 1, but got 0"):
        FasterGate(D, 4, 1, 0, gpus_per_node=0)
    for cls in (NoisyGate, SwipeGate):
        with pytest.raises(ValueError, match="top_k must be between 1 and the 4 experts, but got 5"):
            cls(D, 4, 1, 5)
    with pytest.raises(ValueError, match="top_k must be at least 1, but got 0"):
        ZeroGate(D, 4, 1, 0)
    with pytest.raises(ValueError, match="capacity must be two positive factors"):
        DCGate(D, 4, 1, capacity=(0, 1))
    with pytest.raises(ValueError, match="DCGate chooses two experts: topk must be 2, but got 1"):
        DCGate(D, 4, 1, topk=1)
    with pytest.raises(ValueError, match=r"inp must have shape \[T, d_model=6\], but got \[3, 5\]"):
        functools.partial(NoisyGate, D, 4, 1)()(torch.randn(3, 5))
