"""Parameters that are trained later, or on some ranks only; buffers of any dtype; steps with closures."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fmoe_ext.distributed import DistributedGroupedDataParallel


def two_layers():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2)).double()


def batch(rank):
    return torch.randn(4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(rank))


def train(model, x):
    model(x).square().mean().backward()


def assert_reduced(module):
    """Its gradients are those of one process with the batches of all ranks."""
    whole = two_layers()
    train(whole, torch.cat([batch(rank) for rank in range(dist.get_world_size())]))
    for p, expected in zip(module.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(p.grad, expected.grad, rtol=1e-12, atol=1e-14)


def unfrozen_later(auto_allreduce):
    """The first steps train the head alone (Lightning-AI/pytorch-lightning#20340)."""
    module = two_layers()
    module[0].requires_grad_(False)
    model = DistributedGroupedDataParallel(module, auto_allreduce=auto_allreduce)
    x = batch(dist.get_rank())
    train(model, x)
    model.allreduce_params()
    assert module[0].weight.grad is None
    model.zero_grad()
    module[0].requires_grad_(True)
    train(model, x)
    model.allreduce_params()
    assert_reduced(module)


@pytest.mark.parametrize("auto_allreduce", [False, True])
def test_layers_that_are_unfrozen_are_reduced(pool, auto_allreduce):
    pool.run(unfrozen_later, auto_allreduce, world_size=2)


def replaced_later(auto_allreduce):
    """A parameter that takes the place of another (pytorch/pytorch#12603)."""
    model = DistributedGroupedDataParallel(two_layers(), auto_allreduce=auto_allreduce)
    module = model.module
    module[0].weight = nn.Parameter(module[0].weight.detach().clone())
    train(model, batch(dist.get_rank()))
    model.allreduce_params()
    assert_reduced(module)


@pytest.mark.parametrize("auto_allreduce", [False, True])
def test_parameters_that_are_replaced_are_reduced(pool, auto_allreduce):
    pool.run(replaced_later, auto_allreduce, world_size=2)


def unscaled_gradient():
    module = two_layers()
    module[0].weight.requires_grad_(False)
    module[0].weight.dp_comm = "none"  # as an expert: its gradient is scaled when it comes
    model = DistributedGroupedDataParallel(module)
    module[0].weight.requires_grad_(True)
    train(module, batch(0))
    with pytest.raises(RuntimeError, match=r"'0.weight' is trained since the last forward, and its gradient"):
        model.allreduce_params()


def test_gradient_that_came_unscaled_is_refused(pool):
    pool.run(unscaled_gradient, world_size=2)


def frozen_on_one_rank():
    module = two_layers()
    module[0].weight.requires_grad_(dist.get_rank() > 0)
    with pytest.raises(ValueError, match=r"must be the same on ranks .*frozen"):
        DistributedGroupedDataParallel(module)


def test_parameter_that_one_rank_freezes_is_refused_by_name(pool):
    pool.run(frozen_on_one_rank, world_size=2)


def buffers_of_any_dtype():
    """gloo knows neither int16 nor float8 (pytorch/pytorch#103585)."""
    module, is_first = nn.Linear(2, 2), dist.get_rank() == 0
    dtypes = (torch.int16, torch.bool, torch.complex64, torch.float8_e4m3fn, torch.float64)
    for number, dtype in enumerate(dtypes):
        module.register_buffer(f"of_{number}", torch.full((2, 3), 1.0 if is_first else 0.0).to(dtype))
    module.register_buffer("scalar", torch.tensor(int(is_first), dtype=torch.int16))
    module.register_buffer("empty", torch.empty(0, 3))
    module.register_buffer("transposed", torch.arange(6.0).view(2, 3).t() * is_first)
    DistributedGroupedDataParallel(module)
    assert all(getattr(module, f"of_{number}").to(torch.complex64).eq(1).all() for number in range(5))
    assert module.scalar == 1 and module.transposed.equal(torch.arange(6.0).view(2, 3).t())


def test_buffers_of_any_dtype_are_sent(pool):
    pool.run(buffers_of_any_dtype, world_size=2)


def sparse_gradient():
    model = DistributedGroupedDataParallel(nn.Embedding(5, 3, sparse=True))
    model(torch.tensor([1])).sum().backward()
    with pytest.raises(TypeError, match=r"of shape \[5, 3\] is sparse, .*sparse=False"):
        model.allreduce_params()


def test_sparse_gradient_is_refused_by_name(pool):
    pool.run(sparse_gradient, world_size=2)


class WithUnused(nn.Module):
    """A parameter without gradient, so that the reduction does not end with the backward."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(3, 1).double()
        self.unused = nn.Parameter(torch.ones(1))

    def forward(self, x):
        return self.linear(x)


def steps_with_closure(kind):
    """-> the weights after steps whose backward runs in optimizer.step(), as in Lightning."""
    whole, module = WithUnused(), WithUnused()
    model = DistributedGroupedDataParallel(module, auto_allreduce=True)
    x, together = batch(dist.get_rank()), torch.cat([batch(rank) for rank in range(dist.get_world_size())])
    for trained, rows in ((model, x), (whole, together)):
        optimizer = kind(trained.parameters(), lr=0.1)

        def closure(trained=trained, rows=rows, optimizer=optimizer):
            optimizer.zero_grad()
            loss = trained(rows).square().mean()
            loss.backward()
            return loss

        optimizer.step(closure)
        optimizer.step(closure=closure)
    torch.testing.assert_close(module.linear.weight, whole.linear.weight, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.LBFGS])
def test_reduction_ends_before_a_step_uses_what_its_closure_made(pool, kind):
    pool.run(steps_with_closure, kind, world_size=2)


def backward_that_raised():
    """A step that is left out, for lack of memory say; the next is right after what the error says to call."""
    module = two_layers()
    model = DistributedGroupedDataParallel(module, auto_allreduce=True, bucket_mb=1e-6)

    def no_memory(grad):
        raise MemoryError

    hidden = module[0](batch(0))
    hidden.register_hook(no_memory)
    with pytest.raises(MemoryError):
        train(module[1], hidden)
    with pytest.raises(RuntimeError, match=r"after a backward that raised call allreduce_params\(\)"):
        train(model, batch(dist.get_rank()))
    model.allreduce_params()
    model.zero_grad()
    train(model, batch(dist.get_rank()))
    assert_reduced(module)


def test_training_goes_on_after_a_backward_that_raised(pool):
    pool.run(backward_that_raised, world_size=2)
