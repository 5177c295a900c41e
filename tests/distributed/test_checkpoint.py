"""Checkpoints across layouts: saved on 4 expert-parallel ranks, loaded on 2 and 1, bitwise, and the same training after."""

import functools
import os
import re
import signal

import pytest
import torch
import torch.distributed as dist

from fmoe_ext import SigmoidGate, checkpoint
from fmoe_ext.distributed import DistributedGroupedDataParallel, init_groups
from fmoe_ext.ep.placement import move_experts
from fmoe_ext.gates import update_biases
from fmoe_ext.testing import DistributedError, DistributedPool
from tests.distributed.layouts import E, Model, batch, fill, local_part, loss_of

ROWS = [5, 8, 3, 4]  # tokens of the four parts of each batch
SGD = functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=True)
ADAM = functools.partial(torch.optim.Adam, lr=0.05)
GATE = functools.partial(SigmoidGate, bias_update_speed=0.01)


class Job:
    """A model, its optimizer and its part of the batches, on this rank of a layout; ep=None: without process group."""

    def __init__(self, ep=None, optimizer=ADAM, experts="fused", seed=0):
        self.ep, self.rank, self.parts, options = ep or 1, 0, range(4), {}
        if ep is not None:
            self.groups = init_groups(ep=ep)
            self.rank = dist.get_rank(self.groups.ep)
            share = 4 // dist.get_world_size()
            self.parts = range(dist.get_rank() * share, (dist.get_rank() + 1) * share)
            options = dict(world_size=ep, moe_group=self.groups.ep, gate_group=self.groups.world)
        self.experts = experts
        bare = Model(E // self.ep, gate=GATE, experts=experts, expert_dp_comm="moe", **options)
        self.bare = fill(bare, torch.float64, seed)
        self.model = self.bare
        if ep is not None:
            kwargs = self.groups.data_parallel_kwargs()
            self.model = DistributedGroupedDataParallel(self.bare, auto_allreduce=True, **kwargs)
        self.optimizer = optimizer(self.model.parameters())

    def train(self, steps):
        losses = []
        for step in steps:
            self.optimizer.zero_grad()
            columns = zip(*(batch(i, step, ROWS[i], torch.float64) for i in self.parts), strict=True)
            x, y = (torch.cat(column) for column in columns)
            ranks = 1 if self.model is self.bare else dist.get_world_size()
            loss = loss_of(self.model, x, y, sum(ROWS) / ranks)
            loss.backward()
            if ranks > 1:
                self.model.allreduce_params()
                dist.all_reduce(loss := loss.detach().clone())
            losses.append(loss.item() / ranks)
            self.optimizer.step()
            update_biases(self.bare)
        return losses

    def state(self):
        """{name: tensor} of parameters, buffers and the optimizer, as this rank has them."""
        tensors = {n: t.detach().clone() for n, t in self.bare.state_dict().items() if "placement" not in n}
        for name, param in self.bare.named_parameters():
            for entry, value in self.optimizer.state[param].items():
                tensors[f"{entry} of {name}"] = torch.as_tensor(value).clone()
        return tensors



def assert_part_of(whole, state, rank, ep, experts):
    """What a rank has is bitwise its part of the state of one process."""
    expected = {}
    for name, value in whole.items():
        is_step = value.dim() == 0 and experts == "fused"  # one for all experts
        mine, part = (name, value) if is_step else local_part(name, value, rank, ep, experts)
        if mine is not None:
            expected[mine] = part
    assert state.keys() == expected.keys()
    different = [name for name in state if not torch.equal(state[name], expected[name])]
    assert not different, different


def save_in_layout(folder, ep, optimizer, experts, moved):
    job = Job(ep, optimizer, experts)
    job.train(range(2))
    if moved:
        for layer in job.bare.moe:
            move_experts(layer, [2, 0, 3, 1], job.optimizer)
    for group in job.optimizer.param_groups:
        group["lr"] = 0.03
    checkpoint.save(folder, job.model, job.optimizer, step=2, extra={"note": "half way"})
    if moved:
        for layer in job.bare.moe:
            move_experts(layer, range(E), job.optimizer)
    return job.state(), job.train(range(2, 5))


def load_in_layout(folder, ep, optimizer, experts, whole, moved):
    job = Job(ep, optimizer, experts, seed=1)
    if moved:  # before loading: where experts were does not matter
        for layer in job.bare.moe:
            move_experts(layer, [1, 0, 3, 2], job.optimizer)
    manifest = checkpoint.load(folder, job.model, job.optimizer)
    assert (manifest.step, manifest.extra) == (2, {"note": "half way"})
    assert_part_of(whole, job.state(), job.rank, ep, experts)
    assert job.optimizer.param_groups[0]["lr"] == 0.03
    return job.train(range(2, 5))


@pytest.mark.parametrize(
    ("optimizer", "experts", "moved"),
    [(ADAM, "fused", False), (SGD, "fused", True), (ADAM, "separate", False)],
    ids=["adam", "sgd-moved", "adam-separate"],
)
def test_saved_on_four_ranks(pool, tmp_path, optimizer, experts, moved):
    results = pool.run(save_in_layout, tmp_path, 4, optimizer, experts, moved)
    expected = results[0][1]
    one = Job(None, optimizer, experts, seed=1)
    assert checkpoint.load(tmp_path, one.model, one.optimizer).layers["moe.1"]["num_experts"] == E
    whole = one.state()
    for rank, (state, _) in enumerate(results):
        assert_part_of(whole, state, rank, 4, experts)
    assert one.optimizer.param_groups[0]["lr"] == 0.03
    assert one.train(range(2, 5)) == pytest.approx(expected, rel=1e-12)
    for ep, world_size in ((2, 2), (2, 4)):
        losses = pool.run(load_in_layout, tmp_path, ep, optimizer, experts, whole, moved, world_size=world_size)
        assert losses[0] == pytest.approx(expected, rel=1e-12), (ep, world_size)
