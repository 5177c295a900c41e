"""A program as users of FastMoE write it: it imports fmoe only, and trains with every gate on any number of ranks."""

import torch
import torch.distributed as dist
from fmoe import FMoE, FMoELinear, FMoETransformerMLP
from fmoe.distributed import DistributedGroupedDataParallel
from fmoe.functions import (
    AllGather,
    MOEGather,
    MOEScatter,
    Slice,
    count_by_gate,
    ensure_comm,
    prepare_forward,
)
from fmoe.gates import DCGate, GShardGate, NaiveGate, NoisyGate, SwipeGate, SwitchGate
from fmoe.gates.base_gate import BaseGate
from fmoe.gates.utils import limit_by_capacity
from fmoe.layers import _fmoe_general_global_forward
from fmoe.transformer import _Expert
from fmoe.utils import get_torch_default_comm
from torch import nn

D, H, NUM_EXPERT = 8, 16, 2


class HashGate(BaseGate):
    """A gate of their own, with flat results as FastMoE's simplest gates had them."""

    def __init__(self, d_model, num_expert, world_size, top_k=1):
        super().__init__(num_expert, world_size)

    def forward(self, inp):
        idx = torch.arange(inp.shape[0], device=inp.device) % self.tot_expert
        self.set_loss(torch.zeros(1, requires_grad=True))
        return idx, torch.ones(inp.shape[0], 1, 1, device=inp.device)


class PositionwiseFF(FMoETransformerMLP):
    """The layer of FastMoE's Transformer-XL example."""

    def __init__(self, gate, top_k):
        activation = nn.Sequential(nn.ReLU(), nn.Dropout(0.1))
        world_size = dist.get_world_size()
        super().__init__(NUM_EXPERT, D, H, activation, gate=gate, top_k=top_k, world_size=world_size)
        self.norm = nn.LayerNorm(D)

    def forward(self, inp):
        return self.norm(inp + super().forward(inp))


class MixtureByHand(nn.Module):
    """A layer from the parts: gate, scatter, two linear maps of each expert, gather, weighted sum."""

    def __init__(self):
        super().__init__()
        self.world_size = dist.get_world_size()
        self.gate = NaiveGate(D, NUM_EXPERT, self.world_size, top_k=2)
        self.up, self.down = FMoELinear(NUM_EXPERT, D, H), FMoELinear(NUM_EXPERT, H, D)
        for parameter in (*self.up.parameters(), *self.down.parameters()):
            parameter.dp_comm = "none"

    def forward(self, inp):
        ensure_comm(inp, None)
        idx, score = self.gate(inp)
        pos, lec, gec, fwd_expert_count, fwd_batch_size = prepare_forward(idx, NUM_EXPERT, self.world_size)
        x = MOEScatter.apply(inp, pos // 2, lec, gec, fwd_batch_size, self.world_size)
        x = self.down(torch.relu(self.up(x, fwd_expert_count)), fwd_expert_count)
        x = MOEGather.apply(x, pos, lec, gec, idx.numel(), self.world_size)
        return torch.bmm(score.unsqueeze(1), x.view(-1, 2, D)).squeeze(1)

    def as_layer(self):
        """FMoE with the same parameters."""
        layer = FMoE(NUM_EXPERT, D, self.world_size, top_k=2, gate=NaiveGate)
        layer.gate = self.gate
        layer.experts = _Expert(NUM_EXPERT, D, H, nn.functional.relu)
        layer.experts.htoh4, layer.experts.h4toh = self.up, self.down
        return layer


def train(layer):
    """Loss of each step of a small regression; the balance loss of the gate is part of what is minimised."""
    torch.manual_seed(1)
    model = DistributedGroupedDataParallel(nn.Sequential(layer, nn.Linear(D, 1)))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(dist.get_rank())
    x = torch.randn(64, D, generator=generator)
    y = x[:, :1] * x[:, 1:2]
    losses = []
    for _ in range(30):
        loss = (model(x) - y).square().mean()
        losses.append(loss.item())
        balance = layer.gate.get_loss() if layer.gate.has_loss else 0
        (loss + 0.01 * balance).sum().backward()
        model.allreduce_params()
        optimizer.step()
        optimizer.zero_grad()
    return losses


def check_functions():
    """Check the functions by value."""
    world_size, rank = dist.get_world_size(), dist.get_rank()
    group = get_torch_default_comm()
    gate = torch.tensor([[0, 1], [1, -1], [0, 1], [0, -1]])
    _, lec, gec = count_by_gate(gate, NUM_EXPERT, world_size)
    assert lec.tolist() == [3, 3] + [0] * (2 * world_size - 2)
    assert gec.tolist() == ([3, 3] * world_size if rank == 0 else [0, 0] * world_size)
    new_lec, _, limited = limit_by_capacity(gate, NUM_EXPERT, world_size, 2)
    assert new_lec.tolist()[:2] == ([2, 2] if rank == 0 else [0, 0])
    kept = [[0, 1], [1, -1], [0, -1], [-1, -1]] if rank == 0 else [[-1, -1]] * 4
    assert limited.tolist() == kept
    whole = torch.arange(10.0).view(5, 2)
    parts = Slice.apply(whole, rank, world_size, group)
    assert torch.equal(AllGather.apply(parts, rank, world_size, group), whole)
    doubled = _fmoe_general_global_forward(
        whole, torch.tensor([0, 1, 0, 1, 1]), lambda x, fwd_expert_count: 2 * x, NUM_EXPERT, world_size
    )
    assert torch.equal(doubled, 2 * whole)


def main():
    """The losses of every layer: {name: [loss of each step]}."""
    check_functions()
    torch.manual_seed(0)
    by_hand = MixtureByHand()
    x = torch.randn(12, D)
    torch.testing.assert_close(by_hand(x), by_hand.as_layer()(x))
    losses = {"by hand": train(by_hand)}
    for gate, top_k in (
        (NaiveGate, 2),
        (NoisyGate, 2),
        (GShardGate, 2),
        (DCGate, 2),
        (SwipeGate, 2),
        (SwitchGate, 1),
        (HashGate, 1),
    ):
        torch.manual_seed(0)
        losses[gate.__name__] = train(PositionwiseFF(gate, top_k))
    return losses
