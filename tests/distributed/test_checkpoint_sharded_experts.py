"""Experts that FSDP2 shards inside an expert-parallel group: saved on 2 x 2 ranks, loaded in other layouts, bitwise."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from fmoe_ext import FMoETransformerMLP, checkpoint
from fmoe_ext.distributed import (
    DistributedGroupedDataParallel,
    clip_grad_norm_,
    fully_shard_experts,
    init_groups,
)
from fmoe_ext.planning.placement import move_experts
from tests.distributed.layouts import E, Model, fill, local_loss, local_model, local_part

ROWS, STEPS = [5, 8, 2, 7], 2


class Job:
    """A model with sharded experts and its optimizer, on this rank of 2 x 2."""

    def __init__(self, seed=0):
        self.groups = init_groups(ep=2)
        self.bare = local_model(self.groups, torch.float64)
        if seed:
            fill(self.bare, torch.float64, seed)
        mesh = DeviceMesh.from_group(self.groups.experts, "cpu")
        for layer in self.bare.moe:
            fully_shard_experts(layer, mesh)
        self.model = DistributedGroupedDataParallel(
            self.bare, auto_allreduce=True, **self.groups.data_parallel_kwargs()
        )
        sharded = [p for p in self.bare.parameters() if isinstance(p, DTensor)]
        others = [p for p in self.bare.parameters() if not isinstance(p, DTensor)]
        self.optimizer = torch.optim.Adam([{"params": sharded}, {"params": others}], lr=0.05)

    def train(self, steps):
        for step in steps:
            self.optimizer.zero_grad()
            sum(local_loss(self.model, ROWS, step, self.groups, torch.float64)).backward()
            self.model.allreduce_params()
            clip_grad_norm_(self.model, 0.5)
            self.optimizer.step()

    def state(self):
        """{name: tensor} of parameters and of the optimizer, experts [e, *] whole on every rank."""
        found = {}
        for name, p in self.bare.named_parameters():
            entries = {f"{key} of {name}": value for key, value in self.optimizer.state[p].items()}
            found |= {name: p.detach(), **entries}
        whole = {
            n: v.full_tensor() if isinstance(v, DTensor) else torch.as_tensor(v) for n, v in found.items()
        }
        return {name: value.clone() for name, value in whole.items()}


def state_of(model, optimizer):
    found = {name: p.detach() for name, p in model.named_parameters()}
    for name, p in model.named_parameters():
        found |= {f"{key} of {name}": torch.as_tensor(v) for key, v in optimizer.state[p].items()}
    return found


def save_sharded(folder):
    job = Job()
    job.train(range(STEPS))
    checkpoint.save(folder, job.model, job.optimizer, step=STEPS)
    before = job.state()
    job.train(range(STEPS, STEPS + 2))
    after = job.state()

    again = Job(seed=1)
    checkpoint.load(folder, again.model, again.optimizer)
    assert_equal(again.state(), before)
    again.train(range(STEPS, STEPS + 2))
    assert_equal(again.state(), after)
    return before


def assert_equal(ours, theirs):
    assert ours.keys() == theirs.keys()
    different = [name for name in ours if not torch.equal(ours[name], theirs[name])]
    assert not different, different


def load_on_four(folder):
    groups = init_groups(ep=4)
    model = fill(local_model(groups, torch.float64), torch.float64, 1)
    optimizer = torch.optim.Adam(model.parameters())
    checkpoint.load(folder, model, optimizer)
    return state_of(model, optimizer)


def parts_of(whole, rank, size):
    """Part of the state of one process that a rank of `size` holds."""
    parts = {}
    for name, value in whole.items():
        is_step = value.dim() == 0
        mine, part = (name, value) if is_step else local_part(name, value, rank, size, "fused")
        if mine is not None:
            parts[mine] = part
    return parts


def test_loaded_in_other_layouts(pool, tmp_path):
    on_two_by_two = pool.run(save_sharded, tmp_path, world_size=4)
    model = fill(Model(E), torch.float64, 1)
    optimizer = torch.optim.Adam(model.parameters())
    checkpoint.load(tmp_path, model, optimizer)
    whole = state_of(model, optimizer)
    trained = [name for name, value in whole.items() if name.startswith("exp_avg of ") and value.any()]
    assert len(trained) > len(whole) / 5
    for rank, state in enumerate(on_two_by_two):
        assert_equal(state, parts_of(whole, rank % 2, 2))
    for rank, state in enumerate(pool.run(load_on_four, tmp_path, world_size=4)):
        assert_equal(state, parts_of(whole, rank, 4))


def save_three_each(folder):
    """3 experts a rank over 2 ranks: 2 of them here, 1 there."""
    groups = init_groups(ep=2)
    torch.manual_seed(dist.get_rank(groups.ep))
    layer = FMoETransformerMLP(3, 4, 5, world_size=2, moe_group=groups.ep)
    expected = {name: value.clone() for name, value in layer.state_dict().items()}
    fully_shard_experts(layer, DeviceMesh.from_group(groups.experts, "cpu"))
    checkpoint.save(folder, layer)
    checkpoint.export_safetensors(folder / "whole.safetensors", layer)
    for p in layer.experts.parameters():
        p.to_local().detach().zero_()
    checkpoint.load(folder / "whole.safetensors", layer)  # each rank its rows of one file
    for name, p in layer.experts.named_parameters():
        assert torch.equal(p.full_tensor(), expected[f"experts.{name}"])
    return {name: value for name, value in expected.items() if "experts." in name}


def test_uneven_shards(pool, tmp_path):
    states = pool.run(save_three_each, tmp_path, world_size=4)
    layer = FMoETransformerMLP(6, 4, 5)
    checkpoint.load(tmp_path, layer)
    for name, value in layer.state_dict().items():
        if "experts." in name:
            assert torch.equal(value, torch.cat([states[0][name], states[1][name]]))


def refuses(folder):
    groups = init_groups(ep=2)
    mesh = DeviceMesh.from_group(groups.experts, "cpu")
    make = lambda: FMoETransformerMLP(2, 4, 6, world_size=2, moe_group=groups.ep)  # noqa: E731
    by_hand, by_width, moved = make(), make(), make()
    fully_shard(by_hand.experts, mesh=mesh)
    fully_shard_experts(by_width, mesh, shard_placement_fn=lambda p: torch.distributed.tensor.Shard(1))
    move_experts(moved, [2, 0, 3, 1])
    fully_shard_experts(moved, mesh)
    for layer, text in (
        (by_hand, r"only what .*fully_shard_experts\(layer, mesh\) has sharded"),
        (by_width, r"only experts that are sharded by expert"),
        (moved, r"its experts were moved between ranks: move them back"),
    ):
        with pytest.raises(checkpoint.CheckpointError, match=text):
            checkpoint.save(folder, layer)


def test_refused_by_name(pool, tmp_path):
    pool.run(refuses, tmp_path, world_size=4)
