"""Wrappers that would average different experts are refused; those that keep them apart go on working."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from fmoe_ext import FMoE, FMoETransformerMLP
from fmoe_ext.distributed import init_groups
from tests import fake_deepspeed

D = 4


def make_model(separate=False, **options):
    options = {"world_size": dist.get_world_size(), **options}
    torch.manual_seed(dist.get_rank())
    if separate:
        layer = FMoE(2, D, expert=lambda d: nn.Linear(d, d), **options)
    else:
        layer = FMoETransformerMLP(2, D, 3, **options)
    return nn.Sequential(nn.Linear(D, D), layer, nn.Linear(D, D))


def experts_of(model):
    return [p.detach().clone() for p in model[1].experts.parameters()]


def names_the_layer(wrapper):
    return pytest.raises(
        ValueError,
        match=rf"(?s)experts of layer '1' differ between the ranks \[0, 1\] .*{wrapper}.*\[0, 1\].*Either .*; or let "
        "every rank have all experts.* distributed_experts=False",
    )


def averaging_wrappers():
    for separate in (False, True):
        model = make_model(separate)
        before = experts_of(model)
        with names_the_layer("DistributedDataParallel would overwrite and average"):
            DistributedDataParallel(model)
        assert all(torch.equal(p, q) for p, q in zip(experts_of(model), before, strict=True))


def frozen_experts():
    """DistributedDataParallel does not average them, but overwrites them without init_sync=False."""
    model = make_model()
    model[1].experts.requires_grad_(False)
    before = experts_of(model)
    with names_the_layer("DistributedDataParallel would overwrite and average"):
        DistributedDataParallel(model)
    DistributedDataParallel(model, init_sync=False)
    assert all(torch.equal(p, q) for p, q in zip(experts_of(model), before, strict=True))


def inner_modules(model, inner):
    experts = model[1].experts
    parts = {
        "": [],
        "layer": [model[1]],
        "experts": experts if isinstance(experts, nn.ModuleList) else [experts],
    }
    return parts[inner]


def sharding_wrappers():
    x = torch.randn(3, D)
    for separate in (False, True):
        for used_before in (False, True):
            for inner in ("", "layer", "experts"):
                model = make_model(separate)
                if used_before:
                    model(x).sum().backward()
                for module in inner_modules(model, inner):
                    fully_shard(module)
                fully_shard(model)
                with pytest.raises(
                    ValueError, match=r"fully_shard would make one parameter .*ignored_params="
                ):
                    model(x)
    fully_shard(model := make_model())
    with names_the_layer("fully_shard"):
        model(x)


def train_step(wrapped, x):
    """The wrapper lives until the backward has ended: one that is collected before reduces nothing on its rank."""
    wrapped(x).sum().backward()


def what_keeps_experts_apart():
    """Ignored experts under either wrapper, and wrappers over the ranks that hold the same experts."""
    x = torch.randn(3, D)
    model = make_model()
    experts = experts_of(model)
    fully_shard(model, ignored_params=set(model[1].experts.parameters()))
    model(x).sum().backward()
    assert all(torch.equal(p, q) for p, q in zip(model[1].experts.parameters(), experts, strict=True))

    model = make_model()
    experts = experts_of(model)
    names = [name for name, _ in model.named_parameters() if "experts" in name]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)
    train_step(DistributedDataParallel(model), x)
    assert all(torch.equal(p, q) for p, q in zip(model[1].experts.parameters(), experts, strict=True))

    train_step(DistributedDataParallel(make_model(world_size=1)), x)


def same_experts_groups():
    """Two ranks of each expert group, two groups: both wrappers over the ranks with the same experts."""
    x = torch.randn(3, D)
    groups = init_groups(ep=2)
    model = make_model(world_size=2, moe_group=groups.ep)
    train_step(DistributedDataParallel(model, process_group=groups.experts), x)

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "ep"))
    for inner in (True, False):
        model = make_model(world_size=2, moe_group=mesh["ep"])
        expected = copy_of_replica_zero(model, groups.experts)
        if inner:
            fully_shard(model[1].experts, mesh=mesh["copies"])
        fully_shard(model, mesh=mesh["copies"])
        torch.testing.assert_close(model(x), expected(x))
        model(x).sum().backward()


def copy_of_replica_zero(model, group):
    for p in model.parameters():
        dist.broadcast(p.data, dist.get_process_group_ranks(group)[0], group=group)
    twin = make_model(world_size=2, moe_group=model[1].moe_group)
    twin.load_state_dict(model.state_dict())
    return twin


def under_deepspeed():
    """Seen at the next forward, also of a model that has run before. The same experts on both ranks are allowed."""
    x = torch.randn(5, D)
    with fake_deepspeed.installed() as Engine:
        for separate in (False, True):
            model = make_model(separate)
            model(x)
            engine = Engine(model)
            with names_the_layer("DeepSpeed copied the experts of its first rank"):
                engine(x)
        for model, group in ((make_model(world_size=1), None), (make_model(), dist.new_group([0]))):
            assert torch.equal(Engine(model, group=group)(x), model(x))


def test_deepspeed(pool):
    pool.run(under_deepspeed, world_size=2)


def test_distributed_data_parallel(pool):
    pool.run(averaging_wrappers, world_size=2)


def test_distributed_data_parallel_over_frozen_experts(pool):
    pool.run(frozen_experts, world_size=2)


def test_fully_shard(pool):
    pool.run(sharding_wrappers, world_size=2)


def test_experts_kept_apart(pool):
    pool.run(what_keeps_experts_apart, world_size=2)
    pool.run(same_experts_groups, world_size=4)
