"""DistributedGroupedDataParallel, clip_grad_norm_ and init_groups against one process on the whole batch."""

import copy
import os
import pickle
import sys

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint

from fmoe_ext.distributed import DistributedGroupedDataParallel, clip_grad_norm_, init_groups


class TwoExperts(nn.Module):
    """A dense layer, then "experts": column e of the output belongs to expert e, held by e's rank of the ep group.

    Every rank computes only its own columns of every rank's rows: what an exchange would bring about.
    """

    def __init__(self, num_experts=2):
        super().__init__()
        torch.manual_seed(0)
        self.dense = nn.Linear(4, 4, dtype=torch.float64)
        self.experts = nn.ParameterList(
            nn.Parameter(torch.randn(4, dtype=torch.float64)) for _ in range(num_experts)
        )
        self.unused = nn.Parameter(torch.ones(3, dtype=torch.float64))
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x):
        hidden = self.dense(x).tanh()
        return torch.stack([hidden @ expert for expert in self.experts], 1)


def loss_of(out):
    return (out.square() * torch.arange(1, out.shape[1] + 1)).sum(1).mean()


def batch(rank, rows=3):
    return torch.randn(rows, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(rank))


def reference(num_ranks):
    model = TwoExperts()
    loss_of(model(torch.cat([batch(rank) for rank in range(num_ranks)]))).backward()
    return model


def assert_same_grads(model, expected):
    for (name, p), q in zip(model.named_parameters(), expected.parameters(), strict=True):
        if q.grad is None:
            assert p.grad is None, name
        else:
            torch.testing.assert_close(
                p.grad, q.grad, rtol=1e-12, atol=1e-15, msg=lambda text, name=name: f"{name}: {text}"
            )


def replicas_by_every_path():
    """All parameters replicated: explicit and automatic reduction, accumulation, reduce_after, fp32, small buckets."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    expected = reference(world_size)
    for options in ({}, {"auto_allreduce": True}, {"auto_allreduce": True, "bucket_mb": 1e-5}):
        model = TwoExperts()
        if rank:
            nn.init.zeros_(model.dense.weight)  # to be overwritten by the first rank's
        model = DistributedGroupedDataParallel(model, **options)
        loss_of(model(batch(rank))).backward()
        model.allreduce_params()
        assert_same_grads(model.module, expected)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        loss_of(model(batch(rank))).backward()  # accumulated on top of what was reduced
        optimizer.step()  # ends the automatic reduction: the unused parameter never reported
        if not options:
            model.allreduce_params()
        doubled = copy.deepcopy(expected)
        for p, q in zip(doubled.parameters(), expected.parameters(), strict=True):
            p.grad = None if q.grad is None else 2 * q.grad
        assert_same_grads(model.module, doubled)
        model.zero_grad()
        with model.no_sync():
            loss_of(model(batch(rank))).backward()
        loss_of(model(batch(rank))).backward()
        model.allreduce_gradients(reduce_after=True)
        assert_same_grads(model.module, doubled)

    model = DistributedGroupedDataParallel(TwoExperts())
    loss_of(model(batch(rank))).backward()
    model.allreduce_params(no_scale=True)
    torch.testing.assert_close(
        model.module.dense.bias.grad, world_size * expected.dense.bias.grad, rtol=1e-12, atol=0
    )


def missing_gradients():
    """Ranks that skip parameters, or the whole backward, count as zero."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for auto in (False, True):
        model = DistributedGroupedDataParallel(TwoExperts(), auto_allreduce=auto, bucket_mb=1e-5)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        out = model(batch(rank))
        if rank == 1:
            out[:, 1].sum().backward()
        if not auto:
            model.allreduce_params()
        optimizer.step()
        single = TwoExperts()
        single(batch(1))[:, 1].sum().div(world_size).backward()
        assert_same_grads(model.module, single)


def half_precision_sum():
    """1 + 3 * 2^-9 in bfloat16: every addition of 2^-9 to 1 is lost, but a sum in float32 rounds up to 1 + 2^-7."""
    module = nn.Linear(1, 1, bias=False).bfloat16()
    model = DistributedGroupedDataParallel(module, expert_grads="sum", fp32_allreduce=True)
    module.weight.grad = torch.full((1, 1), 1.0 if dist.get_rank() == 0 else 2.0**-9, dtype=torch.bfloat16)
    model.allreduce_params(no_scale=True)
    assert module.weight.grad.item() == 1 + 2.0**-7


def expert_layout(ep, slice_):
    """Experts of the ranks of an ep group, each computing its column for the inputs of the whole group."""
    groups = init_groups(ep=ep, slice=slice_)
    mine = dist.get_rank(groups.ep)
    num_data = dist.get_world_size(groups.data)
    data_index = dist.get_rank(groups.data)
    expected = reference(num_data)

    full = TwoExperts()
    local = TwoExperts(1)
    local.load_state_dict({k: v for k, v in full.state_dict().items() if "experts" not in k}, strict=False)
    local.experts[0].data.copy_(torch.stack(list(full.experts))[mine])
    local.experts[0].dp_comm = "moe"
    if dist.get_world_size(groups.experts) == 1:
        local.experts[0].dp_comm = "none"
    model = DistributedGroupedDataParallel(local, auto_allreduce=True, **groups.data_parallel_kwargs())

    # What the exchange does: the expert's gradient sums over its ep group's rows, 1/slice of them in each slice.
    # Dense gradients are those of the rank's own loss.
    own = copy.deepcopy(full)
    loss_of(own(batch(data_index))).backward()
    members = [dist.get_group_rank(groups.data, r) for r in dist.get_process_group_ranks(groups.ep)]
    others = copy.deepcopy(full)
    others.zero_grad()
    for index in members:
        (loss_of(others(batch(index))) / slice_).backward()
    model(batch(data_index))
    surrogate = (local.experts[0] * others.experts[mine].grad).sum()
    for name, p in local.dense.named_parameters():
        surrogate = surrogate + (p * own.dense.get_parameter(name).grad).sum()
    surrogate.backward()
    model.allreduce_params()
    torch.testing.assert_close(local.experts[0].grad, expected.experts[mine].grad, rtol=1e-12, atol=1e-15)
    torch.testing.assert_close(local.dense.weight.grad, expected.dense.weight.grad, rtol=1e-12, atol=1e-15)

    plain = [p for p in expected.parameters() if p.grad is not None]
    for norm_type in (2.0, 3.0, -1.0, "inf"):
        single = torch.nn.utils.clip_grad_norm_(plain, 1e9, norm_type)
        torch.testing.assert_close(clip_grad_norm_(model, 1e9, norm_type), single, rtol=1e-12, atol=0)
    for norm_type in (0, -torch.inf, torch.nan):
        with pytest.raises(ValueError, match="norm_type must be a number other than 0"):
            clip_grad_norm_(model, 1e9, norm_type)
    torch.nn.utils.clip_grad_norm_(plain, 0.01)
    clip_grad_norm_(model, 0.01)
    torch.testing.assert_close(local.experts[0].grad, expected.experts[mine].grad, rtol=1e-10, atol=0)


def fastmoe_scale():
    """expert_grads="sum" leaves what has no copies alone."""
    module = nn.Linear(2, 2, dtype=torch.float64)
    module.weight.dp_comm = "none"
    for choice, factor in (("sum", 1.0), ("mean", 1 / dist.get_world_size())):
        model = DistributedGroupedDataParallel(module, auto_allreduce=True, expert_grads=choice)
        model.zero_grad()
        model(torch.ones(1, 2, dtype=torch.float64)).sum().backward()
        assert torch.equal(module.weight.grad, torch.full_like(module.weight, factor))
        assert torch.equal(module.bias.grad, torch.ones_like(module.bias))
        del model  # takes its hooks along


def state_dict_and_buffers():
    rank = dist.get_rank()
    model = DistributedGroupedDataParallel(TwoExperts(), broadcast_buffers=True)
    keys = set(model.state_dict())
    assert keys == {"module." + key for key in model.module.state_dict()}
    bare = {key: value + 1 for key, value in model.module.state_dict().items()}
    model.load_state_dict(bare)
    assert all(torch.equal(model.module.state_dict()[key], value) for key, value in bare.items())
    model.load_state_dict({"module." + key: value - 1 for key, value in bare.items()})
    model.module.steps.fill_(rank + 7)
    model(batch(rank))
    assert model.module.steps == 7


def errors_name_the_rank():
    rank = dist.get_rank()
    with pytest.raises(ValueError, match=r"rank 3 has \(2, None, 1\), the others have \(4, None, 1\)"):
        init_groups(ep=2 if rank == 3 else 4)
    with pytest.raises(
        ValueError, match=r"dp \* ep \* slice must be the number of ranks, 4, but got 1 \* 3 \* 1"
    ):
        init_groups(ep=3)
    with pytest.raises(ValueError, match=r"must be the number of ranks, 4, but got 4 \* 0 \* 1"):
        init_groups(ep=0)
    with pytest.raises(ValueError, match=r"must be the number of ranks, 4, but got 4 \* 4 \* 0"):
        init_groups(slice=0)
    with pytest.raises(ValueError, match=r"parameters tagged 'dp' must be the same.*rank 2 has.*\[5, 2\]"):
        DistributedGroupedDataParallel(nn.Linear(2, 5 if rank == 2 else 4))
    module = nn.Linear(2, 2)
    module.weight.dp_comm = "tower"
    with pytest.raises(ValueError, match="parameter 'weight' is tagged 'tower', for which there is no group"):
        DistributedGroupedDataParallel(module)
    with pytest.raises(TypeError, match="unexpected argument 'bukets'"):
        DistributedGroupedDataParallel(nn.Linear(2, 2), bukets=3)
    with pytest.raises(ValueError, match="expert_grads must be"):
        DistributedGroupedDataParallel(nn.Linear(2, 2), expert_grads="max")
    with pytest.raises(TypeError, match="must be a DistributedGroupedDataParallel, but got Linear"):
        clip_grad_norm_(nn.Linear(2, 2), 1.0)


def zero_and_grad_scaler():
    rank, world_size = dist.get_rank(), dist.get_world_size()
    module = TwoExperts()
    single = reference(world_size)
    model = DistributedGroupedDataParallel(module, auto_allreduce=True)
    optimizer = ZeroRedundancyOptimizer(module.parameters(), torch.optim.Adam, lr=0.1)
    plain = torch.optim.Adam(single.parameters(), lr=0.1)
    loss_of(model(batch(rank))).backward()
    model.allreduce_params()
    optimizer.step()
    plain.step()
    for p, q in zip(module.parameters(), single.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-10, atol=1e-12)

    # one rank's expert overflows: every rank must skip the step
    module = nn.Linear(2, 2)
    module.weight.dp_comm = "none"
    model = DistributedGroupedDataParallel(module, auto_allreduce=True, share_overflow=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for overflow in (True, False):
        before = module.bias.detach().clone()
        optimizer.zero_grad()
        factor = float("inf") if overflow and rank == 1 else 1.0
        scaler.scale((module.weight * factor).sum() + model(torch.ones(1, 2)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        assert torch.equal(before, module.bias) == overflow
        assert scaler.get_scale() == 2.0


class UsedTwice(nn.Module):
    """A block that is used twice between two others, recomputed or not; all three have the same weights if tied."""

    def __init__(self, how, tied=False):
        super().__init__()
        torch.manual_seed(0)
        self.how = how
        self.stem, self.block, self.head = (nn.Linear(4, 4, dtype=torch.float64) for _ in range(3))
        if tied:
            self.stem.weight = self.head.weight

    def forward(self, x):
        x = self.stem(x).tanh()
        for _ in range(2):
            if self.how == "plain":
                x = self.block(x).tanh()
            else:
                x = checkpoint(self._again, x, use_reentrant=self.how == "reentrant")
        return self.head(x)

    def _again(self, x):
        return self.block(x).tanh()


def modules_used_twice():
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for how in ("plain", "non-reentrant", "reentrant"):
        for tied in (False, True):
            expected = UsedTwice("plain", tied)
            loss_of(expected(torch.cat([batch(r) for r in range(world_size)]))).backward()
            for auto, bucket_mb in ((False, 25), (True, 25), (True, 1e-5)):
                model = DistributedGroupedDataParallel(
                    UsedTwice(how, tied), auto_allreduce=auto, bucket_mb=bucket_mb
                )
                if how == "reentrant" and bucket_mb < 1:
                    with pytest.raises(
                        RuntimeError, match=r"parameter 'block\.\w+' came while.*use_reentrant=False"
                    ):
                        loss_of(model(batch(rank))).backward()
                    continue
                loss_of(model(batch(rank))).backward()
                if not auto:
                    model.allreduce_params()
                assert_same_grads(model.module, expected)

    # every bucket is complete after the first of the two: the second is reduced by the step
    block = nn.Linear(4, 4, dtype=torch.float64)
    with torch.no_grad():
        block.weight.copy_(UsedTwice("plain").block.weight)
        block.bias.zero_()
    expected = copy.deepcopy(block)
    loss_of(expected(expected(torch.cat([batch(r) for r in range(world_size)])).tanh())).backward()
    model = DistributedGroupedDataParallel(block, auto_allreduce=True)
    hidden = checkpoint(model, batch(rank).requires_grad_(), use_reentrant=True).tanh()
    loss_of(checkpoint(model, hidden, use_reentrant=True)).backward()
    torch.optim.SGD(model.parameters(), lr=0.0).step()
    assert_same_grads(block, expected)


def several_backward_passes():
    rank, world_size = dist.get_rank(), dist.get_world_size()
    single = TwoExperts()
    for _ in range(3):
        loss_of(single(torch.cat([batch(r) for r in range(world_size)]))).backward()
    model = DistributedGroupedDataParallel(TwoExperts(), auto_allreduce=True, bucket_mb=1e-5)
    with model.no_sync():
        for _ in range(2):
            loss_of(model(batch(rank))).backward()
    loss_of(model(batch(rank))).backward()
    clip_grad_norm_(model, 1e9)  # ends the reduction: "unused" has no gradient
    assert_same_grads(model.module, single)
    model.zero_grad()
    small_last = DistributedGroupedDataParallel(
        nn.ModuleList(nn.Linear(2, 2) for _ in range(2)), auto_allreduce=True, bucket_mb=1e-5
    )
    small_last.module[1](torch.ones(1, 2)).sum().backward()
    with pytest.raises(
        RuntimeError, match=r"parameter '1\.\w+' came while its first was being reduced.*no_sync"
    ):
        small_last.module[1](torch.ones(1, 2)).sum().backward()
    small_last.allreduce_params()


def tags_that_change():
    """dp_comm is read at the reduction, as in FastMoE, or refused by name where gradients have another scale."""
    rank = dist.get_rank()
    x = torch.full((1, 2), rank + 1.0, dtype=torch.float64)
    mine, mean = x.expand(2, 2), torch.full((2, 2), 1.5, dtype=torch.float64)
    for auto in (False, True):
        for choice in ("sum", "mean"):
            module = nn.Linear(2, 2, dtype=torch.float64)
            model = DistributedGroupedDataParallel(module, auto_allreduce=auto, expert_grads=choice)
            module.weight.dp_comm = "none"
            model(x).sum().backward()
            model.allreduce_params()
            assert torch.equal(module.weight.grad, mine if choice == "sum" else mine / 2)
            assert torch.equal(module.bias.grad, torch.ones_like(module.bias))
            model.zero_grad()
            module.weight.dp_comm = "world"
            model(x).sum().backward()
            model.allreduce_params()
            assert torch.equal(module.weight.grad, mean)
    module = nn.Linear(2, 2, dtype=torch.float64)
    model = DistributedGroupedDataParallel(module, expert_grads="sum")
    model(x).sum().backward()
    module.weight.dp_comm = "none"  # between backward and reduction
    model.allreduce_params()
    assert torch.equal(module.weight.grad, mine)

    model = DistributedGroupedDataParallel(nn.Linear(2, 2, dtype=torch.float64))
    model(x).sum().backward()
    model.module.weight.dp_comm = "none"
    with pytest.raises(
        RuntimeError, match="parameter 'weight' was tagged 'none' in place of 'dp' after its gradient"
    ):
        model.allreduce_params()
    model.zero_grad()
    model.module.weight.dp_comm = "tower"
    with pytest.raises(ValueError, match="parameter 'weight' is tagged 'tower', for which there is no group"):
        model(x)


def test_modules_used_twice(pool):
    pool.run(modules_used_twice, world_size=2)


def test_several_backward_passes(pool):
    pool.run(several_backward_passes, world_size=2)


def test_tags_that_change(pool):
    pool.run(tags_that_change, world_size=2)


@pytest.mark.parametrize("world_size", [1, 2])
def test_replicas(pool, world_size):
    pool.run(replicas_by_every_path, world_size=world_size)


def test_missing_gradients(pool):
    pool.run(missing_gradients, world_size=2)


def test_half_precision_sum(pool):
    pool.run(half_precision_sum, world_size=4)


@pytest.mark.parametrize(("world_size", "ep", "slice_"), [(2, 2, 1), (4, 2, 1), (4, 2, 2)])
def test_expert_layouts_and_clipping(pool, world_size, ep, slice_):
    pool.run(expert_layout, ep, slice_, world_size=world_size)


def test_fastmoe_scale(pool):
    pool.run(fastmoe_scale, world_size=2)


def test_state_dict_and_buffers(pool):
    pool.run(state_dict_and_buffers, world_size=2)


def test_errors_name_the_rank(pool):
    pool.run(errors_name_the_rank, world_size=4)


def test_zero_and_grad_scaler(pool):
    pool.run(zero_and_grad_scaler, world_size=2)


def wrap_often():
    model, groups = TwoExperts(), init_groups(ep=1).data_parallel_kwargs()
    wrappers = [DistributedGroupedDataParallel(model, **groups)]
    threads = len(os.listdir("/proc/self/task"))
    wrappers += [DistributedGroupedDataParallel(model, **groups) for _ in range(8)]
    assert len(os.listdir("/proc/self/task")) <= threads + 2
    assert wrappers[0].groups == wrappers[-1].groups


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_wrappers_share_their_groups_and_threads(pool):
    pool.run(wrap_often, world_size=2)


def copy_and_pickle():
    model = DistributedGroupedDataParallel(TwoExperts())
    for act in (copy.deepcopy, AveragedModel, pickle.dumps):
        with pytest.raises(TypeError, match=r"copy or save its \.module"):
            act(model)
    x = torch.randn(3, 4, dtype=torch.float64)
    assert torch.equal(AveragedModel(model.module)(x), model(x))
    assert torch.equal(pickle.loads(pickle.dumps(model.module))(x), model(x))


def test_copies_and_pickles_are_refused(pool):
    pool.run(copy_and_pickle, world_size=2)
