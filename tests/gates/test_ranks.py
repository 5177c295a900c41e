"""Several ranks, each with a part of the batch, choose, drop and count as one rank with all of it."""

import copy
import functools
import threading

import pytest
import torch

from fmoe_ext import ops
from fmoe_ext.gates import (
    DCGate,
    ExpertChoiceGate,
    FasterGate,
    GShardGate,
    NoisyGate,
    QuantileGate,
    SigmoidGate,
    SinkhornGate,
    SoftmaxGate,
    SwitchGate,
    UniformGate,
)

D, E, K = 6, 4, 2
SIZES = (8, 0, 16)  # tokens of each rank


class ThreadRanks:
    """OneRank's interface for threads: what each hands in, all get, in the order of the ranks."""

    def __init__(self, rank, slots, barrier):
        self.rank, self.slots, self.barrier = rank, slots, barrier

    def _share(self, x):
        self.slots[self.rank] = x.clone() if isinstance(x, torch.Tensor) else x
        self.barrier.wait()
        shared = list(self.slots)
        self.barrier.wait()
        return shared

    def num_tokens(self, num_local_tokens):
        return sum(self._share(num_local_tokens))

    def first_token(self, num_local_tokens):
        return sum(self._share(num_local_tokens)[: self.rank])

    def sum(self, x):
        return sum(self._share(x))

    def gather(self, x, same_size=False):
        return [part.detach() for part in self._share(x)]

    def apply_capacity(self, topk_idx, num_experts, capacity):
        parts = self._share(topk_idx)
        kept = ops.apply_capacity(torch.cat(parts), num_experts, capacity)
        return kept.split([part.shape[0] for part in parts])[self.rank]


def on_threads(function, gate):
    """function(gate of the rank, rank) on a thread for each rank; the gates share their parameters."""
    slots, barrier = [None] * len(SIZES), threading.Barrier(len(SIZES), timeout=120)
    results, errors = [None] * len(SIZES), []

    def work(rank):
        try:
            mine = copy.copy(gate)  # the same parameters, its own loss and ranks
            mine.ranks = ThreadRanks(rank, slots, barrier)
            results[rank] = function(mine, rank)
        except BaseException as error:
            errors.append(error)
            barrier.abort()

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(len(SIZES))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results


CASES = {
    "switch": functools.partial(SwitchGate, topk=K, switch_eps=0, capacity=(0.7, 0.7)),
    "switch, FastMoE's loss": functools.partial(
        SwitchGate, topk=K, switch_eps=0, capacity=(0.7, 0.7), fastmoe_loss=True
    ),
    "gshard": functools.partial(GShardGate, random_routing=False, capacity=(0.7, 0.7)),
    "dc": functools.partial(DCGate, random_routing=False, capacity=(0.3, 0.3)),
    "noisy": NoisyGate,
    "faster": functools.partial(FasterGate, node_rank=0),
    "softmax": functools.partial(SoftmaxGate, z_weight=0.1, capacity_factor=0.7),
    "softmax, sequences": functools.partial(SoftmaxGate, balance_loss="sequence", seq_len=8),
    "softmax, by score": functools.partial(
        SoftmaxGate, capacity_factor=0.7, drop_policy="score", normalize=False
    ),
    "sigmoid": functools.partial(SigmoidGate, balance_loss="global"),
    "expert choice": ExpertChoiceGate,
    "sinkhorn": functools.partial(SinkhornGate, capacity_factor=0.7),
    "quantile": functools.partial(QuantileGate, z_weight=0.1, balance_loss="global"),
    "uniform": functools.partial(UniformGate, capacity_factor=0.7),
}


@pytest.mark.parametrize("name", CASES)
def test_same_choices_loss_and_gradients(name):
    torch.manual_seed(0)
    gate = CASES[name](D, E, 1).double()
    if name == "noisy":
        gate.eval()  # the noise is drawn by each rank
    x = torch.randn(sum(SIZES), D, dtype=torch.float64, requires_grad=True)
    topk_idx, topk_weights = gate(x)
    loss = gate.get_loss()

    def run(mine, rank):
        choices, weights = mine(x.split(SIZES)[rank])
        return choices, weights, mine.get_loss()

    parts = on_threads(run, gate)
    assert torch.equal(torch.cat([part[0] for part in parts]), topk_idx)
    weights = torch.cat([part[1] for part in parts])
    torch.testing.assert_close(weights, topk_weights, rtol=1e-12, atol=1e-14)
    inputs = [x, *gate.parameters()]
    expected = torch.autograd.grad(loss + topk_weights.sin().sum(), inputs, allow_unused=True)
    for _, _, rank_loss in parts:  # every rank has the loss of the whole batch
        torch.testing.assert_close(rank_loss, loss, rtol=1e-12, atol=0)
        ours = torch.autograd.grad(
            rank_loss + weights.sin().sum(), inputs, allow_unused=True, retain_graph=True
        )
        for a, b in zip(ours, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-13)


def test_bias_follows_the_load_of_all_ranks():
    torch.manual_seed(0)
    gate = SigmoidGate(D, E, 1).double()
    loads = torch.tensor([[9, 0, 0, 0], [0, 4, 4, 4], [0, 0, 3, 8]])

    def update(mine, rank):
        mine._buffers = {"expert_bias": loads.new_zeros(E).float(), "pending_load": loads[rank].clone()}
        mine.update_bias()
        return mine.expert_bias

    for bias in on_threads(update, gate):
        torch.testing.assert_close(bias, torch.tensor([-1.0, 1.0, 1.0, -1.0]) * 1e-3)  # loads 9, 4, 7, 12
