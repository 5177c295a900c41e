"""Checkpoints across layouts: saved on 4 ranks, loaded on 2 and 1, bitwise; the training goes on alike."""

import functools
import os
import signal
import warnings

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import Shard, distribute_tensor

from fmoe_ext import FMoETransformerMLP, SigmoidGate, SoftmaxGate, checkpoint
from fmoe_ext.distributed import DistributedGroupedDataParallel, init_groups
from fmoe_ext.planning.placement import move_experts
from fmoe_ext.testing import DistributedError, DistributedPool
from tests.distributed.layouts import D, E, H, Model, batch, fill, local_part, loss_of

ROWS = [5, 8, 3, 4]  # tokens of the four parts of each batch
SGD = functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=True)
ADAM = functools.partial(torch.optim.Adam, lr=0.05)
TIMEOUT = 300.0  # a busy machine is slow
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
        return losses

    def state(self):
        """{name: tensor} of parameters, buffers and the optimizer, as this rank has them."""
        tensors = {n: t.detach().clone() for n, t in self.bare.state_dict().items() if "placement" not in n}
        for name, param in self.bare.named_parameters():
            for entry, value in self.optimizer.state[param].items():
                tensors[f"{entry} of {name}"] = torch.as_tensor(value).clone()
        return tensors


def assert_part_of(whole, state, rank, ep, experts):
    """The state of a rank is bitwise its part of the state of one process."""
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
    results = pool.run(save_in_layout, tmp_path, 4, optimizer, experts, moved, timeout=TIMEOUT)
    expected = results[0][1]
    one = Job(None, optimizer, experts, seed=1)
    assert checkpoint.load(tmp_path, one.model, one.optimizer).layers["moe.1"]["num_experts"] == E
    whole = one.state()
    for rank, (state, _) in enumerate(results):
        assert_part_of(whole, state, rank, 4, experts)
    assert one.optimizer.param_groups[0]["lr"] == 0.03
    assert one.train(range(2, 5)) == pytest.approx(expected, rel=1e-12)
    for ep, world_size in ((2, 2), (2, 4)):
        losses = pool.run(
            load_in_layout,
            tmp_path,
            ep,
            optimizer,
            experts,
            whole,
            moved,
            world_size=world_size,
            timeout=TIMEOUT,
        )
        assert losses[0] == pytest.approx(expected, rel=1e-12), (ep, world_size)


def export_and_load_back(path):
    job = Job(4)
    job.train(range(1))
    checkpoint.export_safetensors(path, job.model)
    whole = [job.state()]
    job.train(range(1, 2))
    checkpoint.load(path, job.model)
    loaded = job.state()
    assert all(torch.equal(value, loaded[name]) for name, value in whole[0].items() if " of " not in name)


def load_file(path, whole):
    job = Job(2, seed=1)
    checkpoint.load(path, job.model)
    parameters = {name: value for name, value in job.state().items() if " of " not in name}
    assert_part_of(whole, parameters, job.rank, 2, "fused")


def test_single_file(pool, tmp_path):
    path = tmp_path / "model.safetensors"
    pool.run(export_and_load_back, path, timeout=TIMEOUT)
    assert [p.name for p in tmp_path.iterdir()] == ["model.safetensors"]
    one = Job(seed=1)
    checkpoint.load(path, one.model)
    pool.run(load_file, path, one.state(), world_size=2, timeout=TIMEOUT)


def make_bare(**options):
    gate = functools.partial(SoftmaxGate, gate_bias=False)
    return FMoETransformerMLP(
        E // options.get("world_size", 1), D, H, "swiglu", bias=False, gate=gate, **options
    )


def load_huggingface(folder, whole):
    layer = torch.nn.ModuleDict({"mlp": make_bare(world_size=2)})
    checkpoint.load(folder, layer)
    assert_part_of(whole, layer.state_dict(), dist.get_rank(), 2, "fused")


def test_huggingface_folder(pool, tmp_path):
    whole = torch.nn.ModuleDict({"mlp": make_bare()}).state_dict()
    for layout in ("fused", "qwen3_moe", "mixtral"):
        folder = tmp_path / layout
        folder.mkdir()
        tensors = checkpoint.to_huggingface(whole, layout)
        save_file(
            {name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors"
        )
        pool.run(load_huggingface, folder, whole, world_size=2, timeout=TIMEOUT)


class Sharded(torch.nn.Module):
    """A dense layer whose weight is spread over the ranks, as by FSDP, beside experts."""

    def __init__(self, seed, **options):
        super().__init__()
        torch.manual_seed(seed)
        self.dense = torch.nn.Linear(4, 6)
        self.moe = FMoETransformerMLP(E // options.get("world_size", 1), D, H, **options)
        for name, param in fill(self, torch.float64, seed).named_parameters():
            param.grad = torch.full_like(param, 0.1 * len(name))
        if options:
            mesh = init_device_mesh("cpu", (2,))
            self.dense.weight = torch.nn.Parameter(
                distribute_tensor(self.dense.weight.data, mesh, [Shard(0)])
            )
            grad = torch.full((6, 4), 0.1 * len("dense.weight"), dtype=torch.float64)
            self.dense.weight.grad = distribute_tensor(grad, mesh, [Shard(0)])
        self.optimizer = torch.optim.Adam(self.parameters())


def save_sharded(folder):
    model = Sharded(0, world_size=2)
    model.optimizer.step()
    checkpoint.save(folder, model, model.optimizer)
    expected = (
        model.dense.weight.full_tensor(),
        model.optimizer.state[model.dense.weight]["exp_avg"].full_tensor(),
    )
    other = Sharded(1, world_size=2)
    checkpoint.load(folder, other, other.optimizer)
    loaded = (
        other.dense.weight.full_tensor(),
        other.optimizer.state[other.dense.weight]["exp_avg"].full_tensor(),
    )
    assert all(torch.equal(a, b) for a, b in zip(loaded, expected, strict=True))
    checkpoint.export_safetensors(folder / "model.safetensors", model)
    again = Sharded(1, world_size=2)
    checkpoint.load(folder / "model.safetensors", again)
    assert torch.equal(again.dense.weight.full_tensor(), expected[0])


def test_sharded_dense_parameters(pool, tmp_path):
    pool.run(save_sharded, tmp_path, world_size=2, timeout=TIMEOUT)
    one, expected = Sharded(1), Sharded(0)
    expected.optimizer.step()
    checkpoint.load(tmp_path, one, one.optimizer)
    for a, b in zip(one.dense.parameters(), expected.dense.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-14, atol=1e-14)
        torch.testing.assert_close(one.optimizer.state[a]["exp_avg"], expected.optimizer.state[b]["exp_avg"])


def text_of_error(action, *args):
    with pytest.raises(checkpoint.CheckpointError) as error:
        action(*args)
    return str(error.value)


def save_twice(folder):
    job = Job(2)
    job.train(range(1))
    for step in (1, 2):
        checkpoint.save(folder, job.model, job.optimizer, step=step)


def load_with_faults(folder):
    """The texts of the errors on this rank, for faults that only one of the ranks sees."""
    job = Job(2, seed=1)
    before = job.state()
    newest = folder / "step-00000002"
    odd = dist.get_rank() == 1
    texts = [text_of_error(checkpoint.load, folder, job.model, job.optimizer)]  # one file is damaged
    load = functools.partial(checkpoint.load, newest, verify=False)
    if odd:
        job.bare.after.extra = torch.nn.Parameter(torch.zeros(2))
    texts.append(text_of_error(load, job.model))
    if odd:
        del job.bare.after.extra
        job.bare.after.weight.data = torch.zeros(1, 7, dtype=torch.float64)
    texts.append(text_of_error(load, job.model))
    if odd:
        job.bare.after.weight.data = before["after.weight"].clone()
    texts.append(text_of_error(load, fill(Model(4, gate=GATE, world_size=2), torch.float64)))
    texts.append(
        text_of_error(load, job.model, torch.optim.SGD(job.model.parameters()) if odd else job.optimizer)
    )
    after = job.state()
    assert all(torch.equal(value, after[name]) for name, value in before.items())
    checkpoint.load(folder / "step-00000001", job.model, job.optimizer)
    return texts


def test_one_error_on_every_rank(pool, tmp_path):
    pool.run(save_twice, tmp_path, world_size=2, timeout=TIMEOUT)
    data = tmp_path / "step-00000002" / "__1_0.distcp"
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)
    first, second = pool.run(load_with_faults, tmp_path, world_size=2, timeout=TIMEOUT)
    assert first == second
    damaged, missing, shape, num_experts, optimizer = first
    assert "__1_0.distcp is damaged" in damaged and "complete checkpoints there: step-00000001" in damaged
    assert "missing in the checkpoint: after.extra" in missing
    assert "rank 1: after.weight is [1, 7] in the model and [1, 6] in the checkpoint" in shape
    assert "layer moe.0 has 8 experts in the model, 4 in the checkpoint" in num_experts
    assert "rank 1: the optimizer is SGD, but the checkpoint has the state of Adam" in optimizer


def save_on_own_disk(folder):
    """The text of the error, and what is left on this rank's disk."""
    own = folder / f"disk-{dist.get_rank()}"
    own.mkdir()
    job, before = Job(2), os.getcwd()
    os.chdir(own)
    try:
        text = text_of_error(
            checkpoint.save, "/proc/self/cwd/saved", job.model
        )  # another folder on each rank
    finally:
        os.chdir(before)
    return text, sorted(path.name for path in own.rglob("*") if path.name != ".lock")


def test_disks_of_their_own_are_named_and_keep_no_part(pool, tmp_path):
    for text, left in pool.run(save_on_own_disk, tmp_path, world_size=2, timeout=TIMEOUT):
        assert "is it on a file system that all ranks share?" in text
        assert left == ["saved"]


def refuse_zero_redundancy(folder):
    zero = functools.partial(ZeroRedundancyOptimizer, optimizer_class=torch.optim.Adam, lr=0.05)
    job = Job(2, optimizer=zero)
    job.train(range(1))
    optimizer = job.optimizer
    assert "consolidate_state_dict" in text_of_error(checkpoint.save, folder, job.model, optimizer)
    assert not folder.exists()
    checkpoint.save(folder, job.model, torch.optim.Adam(job.model.parameters()))
    assert "consolidate_state_dict" in text_of_error(checkpoint.load, folder, job.model, optimizer)
    checkpoint.load(folder, job.model)
    with pytest.raises(ValueError, match="cannot move with experts"):
        move_experts(job.bare.moe[0], list(reversed(range(E))), optimizer)


def test_refuses_zero_redundancy(pool, tmp_path):
    pool.run(refuse_zero_redundancy, tmp_path / "new", world_size=2, timeout=TIMEOUT)


def die_while_saving(folder, rank, function):
    job = Job(2)
    job.train(range(2))
    if dist.get_rank() == rank:
        setattr(os, function, lambda *args: os.kill(os.getpid(), signal.SIGKILL))
    checkpoint.save(folder, job.model, job.optimizer, step=3)


@pytest.fixture(scope="module")
def faulty_pool():
    """A small pool of its own: its processes are replaced after every failure."""
    with DistributedPool(2) as pool:
        yield pool


def test_rank_killed_while_saving(faulty_pool, tmp_path):
    faulty_pool.run(save_twice, tmp_path, timeout=TIMEOUT)
    for rank, function in ((1, "fsync"), (0, "replace")):  # while writing its tensors; when all is written
        with pytest.raises(DistributedError) as error:
            faulty_pool.run(die_while_saving, tmp_path, rank, function, timeout=TIMEOUT)
        assert f"rank {rank}: the process ended with exit code -9" in str(error.value)
        assert f"rank {1 - rank}: Traceback" in str(error.value)
        assert "CheckpointError: another rank does not answer, it may have died" in str(error.value)
        one = Job(seed=1)
        assert checkpoint.load(tmp_path, one.model, one.optimizer).step == 2
    assert checkpoint.save(tmp_path, one.model, one.optimizer, step=3, keep=1) == tmp_path / "step-00000003"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-00000003"]


class HuggingFaceAdafactor(torch.optim.Optimizer):
    """Keeps what Adafactor of Transformers keeps: means over rows [E, H] and over columns [E, D]."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self):
        for param in self.param_groups[0]["params"]:
            square = param.grad.square()
            state = {"step": 1, "row": square.mean(-1), "column": square.mean(-2)}
            self.state[param] = state if param.dim() > 1 else {"step": 1}


FACTORED = {"torch": torch.optim.Adafactor, "huggingface": HuggingFaceAdafactor}


def factored(kind, bias, seed=0, **options):
    num_local = E // options.get("world_size", 1)
    layer = FMoETransformerMLP(num_local, D, H, bias=bias, gate=GATE, **options)
    fill(layer, torch.float64, seed)
    optimizer = FACTORED[kind](layer.experts.parameters())
    first = dist.get_rank() * num_local if options else 0
    for param in layer.experts.parameters():
        whole = torch.arange(E * param[0].numel(), dtype=param.dtype).reshape(E, *param.shape[1:]).add(seed)
        param.grad = whole.mul(0.37).sin()[first : first + num_local]
    optimizer.step()
    return layer, optimizer


def save_factored(folder, kind):
    layer, optimizer = factored(kind, bias=False, world_size=dist.get_world_size())
    checkpoint.save(folder, layer, optimizer)
    return [layer.state_dict(), optimizer.state_dict()["state"]]


def load_factored(folder, kind):
    layer, optimizer = factored(kind, bias=False, seed=5, world_size=dist.get_world_size())
    checkpoint.load(folder, layer, optimizer)
    return optimizer.state_dict()["state"]


@pytest.mark.parametrize("kind", FACTORED)
def test_factored_state_moves_to_other_layouts(pool, tmp_path, kind):
    """Each expert's rows of a factored state are those that it had, on 2 ranks and in one process."""
    saved = [state for _, state in pool.run(save_factored, tmp_path, kind, timeout=TIMEOUT)]
    layer, optimizer = factored(kind, bias=False, seed=5)
    checkpoint.load(tmp_path, layer, optimizer)
    one = optimizer.state_dict()["state"]
    two = pool.run(load_factored, tmp_path, kind, world_size=2, timeout=TIMEOUT)
    for index, entries in one.items():
        for entry, value in entries.items():
            parts = [state[index][entry] for state in saved]
            if not torch.is_tensor(value) or value.dim() == 0:
                assert all(part == value for part in parts), entry
                continue
            assert torch.equal(torch.cat(parts), value), entry
            assert torch.equal(torch.cat([state[index][entry] for state in two]), value), entry


def save_factored_biases(folder, kind):
    layer, optimizer = factored(kind, bias=True, world_size=2)
    text = text_of_error(checkpoint.save, folder, layer, optimizer)
    return text, sorted(folder.iterdir())


@pytest.mark.parametrize("kind", FACTORED)
def test_means_over_experts_are_refused(pool, tmp_path, kind):
    """Before anything is written: they are of the experts of one rank, and no other layout has the same."""
    for text, files in pool.run(save_factored_biases, tmp_path, kind, world_size=2, timeout=TIMEOUT):
        assert "experts.htoh4.bias" in text and "has not one part for each expert" in text
        assert files == []


class Normed(torch.nn.Module):
    """Each rank's own batches pass through it."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.linear = torch.nn.Linear(D, D)
        self.norm = torch.nn.BatchNorm1d(D)

    def forward(self, x):
        return self.norm(self.linear(x))


def save_replicas(folder):
    model = torch.nn.parallel.DistributedDataParallel(Normed())
    bare = model.module
    torch.manual_seed(dist.get_rank())
    model(torch.randn(8, D))
    extra = {"rng": torch.get_rng_state().tolist(), "note": "both"}
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        checkpoint.save(folder / "norm", model, extra=extra)
        bare.norm.reset_running_stats()
        checkpoint.save(folder / "equal", model, extra={"note": "both"})
        with torch.no_grad():
            bare.linear.bias[dist.get_rank()] *= -1  # of each rank another sign
        checkpoint.save(folder / "signs", model)
        checkpoint.export_safetensors(folder / "signs.safetensors", model)
    names = "linear.bias", "running_mean", "running_var", "weight"
    warned = [str(w.message) for w in found if "replicated tensors" in str(w.message)]
    stage = torch.nn.Linear(D, 2 + dist.get_rank())
    refused = text_of_error(checkpoint.save, folder / "stages", stage)
    exported = text_of_error(checkpoint.export_safetensors, folder / "stages.safetensors", stage)
    assert "one name stands for one tensor" in exported
    state = {name: value.clone() for name, value in bare.state_dict().items()}
    return [[name for name in names if name in text] for text in warned], refused, state, extra


def load_extra(folder):
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        manifest = checkpoint.load(folder / "norm", Normed())
    texts = [str(w.message) for w in found if "extra" in str(w.message)]
    return manifest.extra, manifest.extras, texts


def test_replicas_come_from_one_rank(pool, tmp_path):
    """torch's planner took running_mean from rank 1 and running_var from rank 0, and kept rank 0's `extra` alone."""
    results = pool.run(save_replicas, tmp_path, world_size=2, timeout=TIMEOUT)
    first, second = results
    assert first[0] == [["running_mean", "running_var"], ["linear.bias"], ["linear.bias"]] and second[0] == []
    for _, refused, _, _ in results:
        assert "model.weight is float32 [3, 6] on rank 1 and float32 [2, 6] on rank 0" in refused
    model = Normed()
    torch.manual_seed(0)
    model(torch.randn(8, D))
    one = Normed()
    with pytest.warns(
        UserWarning, match=r"2 ranks saved `extra` with different values of 'rng', and 1 load it"
    ):
        manifest = checkpoint.load(tmp_path / "norm", one)
    for name, value in model.state_dict().items():
        assert torch.equal(one.state_dict()[name], value), name
    extras = [extra for _, _, _, extra in results]
    assert extras[0] != extras[1]
    assert manifest.extra == extras[0] and manifest.extras == extras and manifest.version == 3
    of_ranks = pool.run(load_extra, tmp_path, world_size=2, timeout=TIMEOUT)
    assert of_ranks == [(extra, extras, []) for extra in extras]
    four = pool.run(load_extra, tmp_path, timeout=TIMEOUT)
    assert all(extra == extras[0] and len(texts) == 1 for extra, _, texts in four)
    equal = checkpoint.load(tmp_path / "equal", one)
    assert equal.extra == {"note": "both"} and equal.extras == [] and equal.version == 2


def load_wrapped(folder):
    from torch.distributed.fsdp import FullyShardedDataParallel

    torch.manual_seed(1)
    model = FullyShardedDataParallel(torch.nn.Linear(D, D), device_id=torch.device("cpu"))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    refused = text_of_error(checkpoint.load, folder, model)
    after = model.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    return refused


def test_fully_sharded_data_parallel_is_refused(pool, tmp_path):
    checkpoint.save(tmp_path, torch.nn.Linear(D, D))
    for refused in pool.run(load_wrapped, tmp_path, world_size=2, timeout=TIMEOUT):
        assert "state_dict() of FullyShardedDataParallel returns copies of 'weight' and 1 other" in refused
