"""One model in any parallel layout, and the same model in one process on the whole batch."""

import contextlib
import os

import torch
import torch.distributed as dist
from torch import nn

from fmoe_ext import FMoE, FMoETransformerMLP
from fmoe_ext.distributed import DistributedGroupedDataParallel, clip_grad_norm_, init_groups
from fmoe_ext.gates import NaiveGate

D, H, E, K = 6, 5, 4, 2


class Model(nn.Module):
    """A dense layer, two MoE layers, a dense layer; x + moe(x) twice. experts: "fused" or "separate"."""

    def __init__(self, num_expert, gate=NaiveGate, experts="fused", top_k=K, **options):
        super().__init__()
        self.before = nn.Linear(D, D)
        options = dict(num_expert=num_expert, d_model=D, top_k=top_k, gate=gate, **options)
        tag = options.pop("expert_dp_comm", "none")
        if experts == "fused":
            layers = [FMoETransformerMLP(d_hidden=H, activation="swiglu", **options) for _ in range(2)]
        else:
            layers = [FMoE(expert=lambda d: nn.Linear(d, d), **options) for _ in range(2)]
        for layer in layers:
            layer.mark_parallel_comm(tag)
        self.moe = nn.ModuleList(layers)
        self.after = nn.Linear(D, 1)

    def forward(self, x):
        x = self.before(x)
        for layer in self.moe:
            x = x + layer(x)
        return self.after(x.tanh())

    def gate_loss(self):
        losses = [layer.gate.get_loss() for layer in self.moe]
        return sum(loss for loss in losses if loss is not None)


@contextlib.contextmanager
def ranks_per_node(number):
    """Groups that are first asked for their nodes in the block have nodes of so many ranks."""
    os.environ["FMOE_RANKS_PER_NODE"] = str(number)
    try:
        yield
    finally:
        del os.environ["FMOE_RANKS_PER_NODE"]


def fill(module, dtype, seed=0):
    """Values that depend on a parameter's name only."""
    for name, p in sorted(module.named_parameters()):
        generator = torch.Generator().manual_seed(seed + sum(name.encode()) * 7919)
        p.data = torch.randn(p.shape, dtype=torch.float64, generator=generator).div(2).to(dtype)
    return module.to(dtype)


def local_part(name, value, rank, size, experts):
    """Part of a full parameter that an expert-parallel rank holds; None if it is on other ranks."""
    if ".experts." not in name:
        return name, value
    e = E // size
    if experts == "fused":
        return name, value[rank * e : (rank + 1) * e]
    head, tail = name.split(".experts.")
    number, rest = tail.split(".", 1)
    if int(number) // e != rank:
        return None, None
    return f"{head}.experts.{int(number) % e}.{rest}", value


def batch(index, step, rows, dtype):
    generator = torch.Generator().manual_seed(1000 * step + index)
    x = torch.randn(rows, D, dtype=torch.float64, generator=generator)
    y = torch.randn(rows, 1, dtype=torch.float64, generator=generator)
    return x.to(dtype), y.to(dtype)


def loss_of(model, x, y, total):
    """This part of the mean over `total` tokens."""
    return (model(x) - y).square().sum() / total


def grads_of(model):
    return {n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}


def one_process(rows, dtype, steps, optimizer=torch.optim.Adam, gate_loss=0.5, **options):
    """Losses and full gradients of each step: {name: gradient}; rows: tokens of each part of the batch."""
    model = fill(Model(E, **options), dtype)
    optimizer = optimizer(model.parameters(), lr=0.05)
    history = []
    for step in range(steps):
        optimizer.zero_grad()
        parts = [batch(i, step, n, dtype) for i, n in enumerate(rows)]
        x, y = (torch.cat(column) for column in zip(*parts, strict=True))
        loss = loss_of(model, x, y, max(len(x), 1)) + gate_loss * model.gate_loss()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        history.append((loss.detach(), norm, grads_of(model)))
        optimizer.step()
    return history


def local_model(groups, dtype, experts="fused", **options):
    """The rank's part of the model that one_process() trains."""
    rank, size = dist.get_rank(groups.ep), dist.get_world_size(groups.ep)
    model = Model(
        E // size,
        experts=experts,
        world_size=size,
        moe_group=groups.ep,
        slice_group=groups.slice,
        gate_group=groups.world,
        expert_dp_comm="moe",
        **options,
    )
    of_whole = ("gate", "top_k", "shared_expert_hidden", "latent_size")
    whole = {name: options[name] for name in of_whole if name in options}
    full = fill(Model(E, experts=experts, **whole), dtype)
    held = [local_part(n, v, rank, size, experts) for n, v in full.state_dict().items()]
    model.to(dtype).load_state_dict({n: v for n, v in held if n is not None})
    return model


def local_loss(model, rows, step, groups, dtype, gate_loss=0.5):
    """(this rank's loss, the part of it that all ranks share), whose mean over the ranks is that of one process."""
    index, num_data = dist.get_rank(groups.data), dist.get_world_size(groups.data)
    x, y = batch(index, step, rows[index], dtype)
    loss = loss_of(model, x, y, max(sum(rows), 1) / num_data)
    moe = getattr(model, "module", model)
    return loss, gate_loss * moe.gate_loss()


def in_layout(
    rows,
    dtype,
    steps,
    ep,
    slice_,
    optimizer=torch.optim.Adam,
    gate_loss=0.5,
    experts="fused",
    between=None,
    **options,
):
    """The same training in a layout; every rank's history, with the gradients of what it holds."""
    groups = init_groups(ep=ep, slice=slice_)
    model = DistributedGroupedDataParallel(
        local_model(groups, dtype, experts, **options),
        auto_allreduce=True,
        bucket_mb=1e-4,
        **groups.data_parallel_kwargs(),
    )
    optimizer = optimizer(model.parameters(), lr=0.05)
    history = []
    for step in range(steps):
        if between is not None:
            between(model.module, optimizer, step)
        optimizer.zero_grad()
        loss, shared = local_loss(model, rows, step, groups, dtype, gate_loss)
        (loss + shared).backward()
        model.allreduce_params()
        total = loss.detach().clone()
        dist.all_reduce(total, group=groups.data)
        norm = clip_grad_norm_(model, 0.5)
        history.append(
            (
                total / dist.get_world_size(groups.data) + torch.as_tensor(shared).detach(),
                norm,
                in_order(model.module, grads_of(model.module)),
            )
        )
        optimizer.step()
    return history, dist.get_rank(groups.ep), dist.get_world_size(groups.ep)


def in_order(model, grads):
    """Gradients of all experts of the ep group in their order, [E, *]; then the part that this rank held at first."""
    ordered = {}
    for name, grad in grads.items():
        layer = model.moe[int(name.split(".")[1])] if ".experts." in name else None
        if layer is not None and layer.expert_placement is not None:
            everyone = [torch.empty_like(grad) for _ in range(layer.world_size)]
            dist.all_gather(everyone, grad, group=layer.moe_group)
            whole = torch.cat(everyone)[layer.expert_placement.argsort()]
            grad = whole.split(layer.num_expert)[dist.get_rank(layer.moe_group)]
        ordered[name] = grad
    return ordered


def assert_equal_training(rows, steps=3, ep=2, slice_=1, tolerance=1e-12, options=None, layout_options=None):
    """In float64: losses, norms and every gradient of every step, and with them the parameters."""
    options = options or {}
    expected = one_process(rows, torch.float64, steps, **options)
    history = in_layout(rows, torch.float64, steps, ep, slice_, **options, **(layout_options or {}))
    assert_equal_histories(expected, *history, tolerance, options.get("experts", "fused"))


def assert_equal_histories(expected, history, rank, size, tolerance=1e-12, experts="fused"):
    """Results of one_process() and in_layout()."""
    for step, (ours, theirs) in enumerate(zip(history, expected, strict=True)):
        for name, a, b in (("loss", ours[0], theirs[0]), ("norm", ours[1], theirs[1])):
            error = (a - b).abs() / b.abs().clamp(min=1e-300)
            assert error <= tolerance * 10, f"step {step}: {name} {a} instead of {b}"
        scale = max(g.abs().max() for g in theirs[2].values())
        for name, full in theirs[2].items():
            name, value = local_part(name, full, rank, size, experts)
            if name is not None:
                error = (ours[2][name] - value).abs().max() / scale
                assert error <= tolerance, f"step {step}: gradient of {name} is off by {error:.2e}"
