"""FastMoE's names for Megatron-LM v2.2 to v3.0.2, on a stand-in with its structure: megatron.get_args, mpu, layers."""

import functools
import random
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import fmoe_ext
from fmoe_ext.compat.megatron import (
    DistributedDataParallel,
    MegatronMLP,
    add_balance_log,
    get_balance_profile,
    load_checkpoint,
    patch_forward_step,
    patch_loss_func_v2_5,
    patch_model_provider,
    reset_gate_hook,
    save_checkpoint,
)
from fmoe_ext.compat.megatron.checkpoint import get_fmoe_checkpoint_name
from fmoe_ext.gates import GShardGate, SwitchGate
from fmoe_ext.megatron import fmoefy
from fmoe_ext.testing import DistributedError, DistributedPool

D, LAYERS = 8, 2
STACK = {"v2.2": "transformer", "v2.5": "encoder", "v3.0.2": "encoder"}


class ParallelMLP(nn.Module):
    """Megatron's MLP: the bias of the second product is returned, not added."""

    def __init__(self):
        super().__init__()
        self.dense_h_to_4h = nn.Linear(D, 4 * D)
        self.dense_4h_to_h = nn.Linear(4 * D, D)
        self.activation_func = F.gelu

    def forward(self, x):
        hidden = self.activation_func(self.dense_h_to_4h(x))
        return F.linear(hidden, self.dense_4h_to_h.weight), self.dense_4h_to_h.bias


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(D), ParallelMLP()

    def forward(self, x):
        output, bias = self.mlp(self.norm(x))
        return x + output + bias


class Model(nn.Module):
    """model.language_model.<stack>.layers, as Megatron's GPTModel."""

    def __init__(self, stack="encoder", **_):
        super().__init__()
        self.language_model = nn.Module()
        block = nn.Module()
        block.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        setattr(self.language_model, stack, block)
        self.stack = stack

    @property
    def layers(self):
        return getattr(self.language_model, self.stack).layers

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x

    def state_dict_for_save_checkpoint(self, *args, **kwargs):
        return {"language_model": self.language_model.state_dict(*args, **kwargs)}

    def load_state_dict(self, state):
        self.language_model.load_state_dict(state["language_model"])


def install_megatron(tp=1, **options):
    """The modules of a Megatron whose groups are those of the job, tensor-parallel ranks next to each other."""
    args = dict(
        hidden_size=D, ffn_hidden_size=4 * D, num_layers=LAYERS, top_k=2, num_experts=4, balance_strategy=None,
        balance_loss_weight=0.5, tensor_model_parallel_size=tp, pipeline_model_parallel_size=1, init_method_std=0.02,
        hidden_hidden_size=16, distributed_experts=True, rank=0, fp16=False, no_save_optim=False, no_load_optim=False,
        finetune=False, no_load_rng=False, is_v3=False,
    )  # fmt: skip
    args = SimpleNamespace(**(args | options))
    world = dist.get_world_size() if dist.is_initialized() else 1
    rank = dist.get_rank() if dist.is_initialized() else 0
    args.rank, groups = rank, {}
    if dist.is_initialized():
        data = [list(range(first, world, tp)) for first in range(tp)]
        tensor = [list(range(first, first + tp)) for first in range(0, world, tp)]
        for kind, lists in (("data", data), ("tensor", tensor)):
            for ranks in lists:
                group = dist.new_group(ranks)
                if rank in ranks:
                    groups[kind] = group
    tracker = SimpleNamespace(states=None)
    tracker.set_states = lambda states: setattr(tracker, "states", states)
    mpu = SimpleNamespace(
        is_pipeline_last_stage=lambda: True,
        get_data_parallel_group=lambda: groups["data"],
        get_tensor_model_parallel_group=lambda: groups["tensor"],
        get_data_parallel_rank=lambda: rank // tp,
        get_data_parallel_world_size=lambda: world // tp,
        get_tensor_model_parallel_rank=lambda: rank % tp,
        get_pipeline_model_parallel_world_size=lambda: 1,
        get_cuda_rng_tracker=lambda: tracker,
    )
    checkpointing = ModuleType("megatron.checkpointing")
    checkpointing.__dict__.update(_checkpointing(args))
    megatron = ModuleType("megatron")
    megatron.get_args, megatron.mpu, megatron.checkpointing = lambda: args, mpu, checkpointing
    return {"megatron": megatron, "megatron.mpu": mpu, "megatron.checkpointing": checkpointing}, args


def _checkpointing(args):
    """Save as Megatron's checkpointing does on the ranks that call it."""

    def name(folder, iteration, release=False):
        return str(Path(folder, f"iter_{iteration:07d}", "mp_rank_00", "model_optim_rng.pt"))

    def tracker(folder):
        return str(Path(folder, "latest_checkpointed_iteration.txt"))

    def save(iteration, model, optimizer, lr_scheduler):
        state = {"iteration": iteration, "model": model[0].module.state_dict_for_save_checkpoint()}
        state["optimizer"], state["args"] = optimizer.state_dict(), args
        generators = {"random_rng_state": random.getstate(), "np_rng_state": numpy.random.get_state()}
        generators |= {"torch_rng_state": torch.get_rng_state(), "rng_tracker_states": {"tensor": 7}}
        if torch.cuda.is_available():
            generators["cuda_rng_state"] = torch.cuda.get_rng_state()
        state |= {"rng_state": [generators]} if args.is_v3 else generators
        if lr_scheduler is not None:
            state["opt_param_scheduler" if args.is_v3 else "lr_scheduler"] = lr_scheduler.state_dict()
        Path(name(args.save, iteration)).parent.mkdir(parents=True, exist_ok=True)
        torch.save(state, name(args.save, iteration))
        dist.barrier()
        Path(tracker(args.save)).write_text(str(iteration))
        dist.barrier()

    def load(model, optimizer, lr_scheduler, load_arg="load"):
        folder = getattr(args, load_arg)
        iteration = int(Path(tracker(folder)).read_text())
        state = torch.load(name(folder, iteration), weights_only=False)
        model[0].module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        dist.barrier()
        return iteration

    def names(folder, iteration, use_distributed_optimizer, release=False):
        return (name(folder, iteration, release),) * 2

    return {
        **({"get_checkpoint_names": names} if args.is_v3 else {"get_checkpoint_name": name}),
        "get_checkpoint_tracker_filename": tracker,
        "save_checkpoint": save,
        "load_checkpoint": load,
        "set_checkpoint_version": lambda version: None,
        "update_num_microbatches": lambda consumed_samples: None,
    }


@pytest.fixture
def megatron(monkeypatch):
    """install(**options) -> args; the stand-in is gone after the test."""

    def install(**options):
        modules, args = install_megatron(**options)
        for name in [name for name in sys.modules if name == "megatron" or name.startswith("megatron.")]:
            monkeypatch.delitem(sys.modules, name)
        for name, module in modules.items():
            monkeypatch.setitem(sys.modules, name, module)
        return args

    return install


def tokens(rows=12):
    return torch.randn(3, rows // 3, D, generator=torch.Generator().manual_seed(0)).double()


@pytest.mark.parametrize("stack", ["transformer", "encoder", "decoder"])
def test_fmoefy_finds_the_layers_of_every_version(megatron, stack):
    megatron(balance_strategy="gshard")
    model = fmoefy(Model(stack), 4)
    layer = model.layers[1].mlp
    assert model.fmoe_report.kind == "Megatron-LM before Megatron-core"
    assert [r.path for r in model.fmoe_report.replaced] == [
        f"language_model.{stack}.layers.{i}.mlp" for i in range(2)
    ]
    assert (layer.num_experts, layer.d_hidden, layer.top_k, type(layer.gate)) == (4, 16, 2, GShardGate)
    assert f"language_model.{stack}.layers.0.mlp.experts.htoh4.weight" in model.state_dict()
    output, bias = layer(tokens().float())
    assert output.shape == (3, 4, D) and bias.tolist() == [0] * D


def test_fmoefy_needs_no_version_but_heeds_it(megatron):
    megatron()
    with pytest.raises(ValueError, match="has no MLP that fmoefy knows"):
        fmoefy(Model("encoder"), 4, megatron_version="v2.2")
    with pytest.raises(ValueError, match=r"megatron_version must be one of 'v2.2', .*, but got 'v9'"):
        fmoefy(Model("encoder"), 4, megatron_version="v9")
    fmoefy(Model("encoder"), 4, megatron_version="v2.5")


def test_upcycled_model_equals_dense(megatron):
    megatron()
    model = Model().double()
    dense = model(tokens())
    fmoefy(model, 4, init="upcycle")
    assert (model(tokens()) - dense).abs().max() <= 1e-12 * dense.abs().max()


def test_options_come_from_the_arguments(megatron):
    args = megatron(balance_strategy="switch", top_k=1)
    args.fmoe_num_experts = 6
    layer = fmoefy(Model(), hidden_hidden_size=20).layers[0].mlp
    assert (layer.num_experts, layer.d_hidden, layer.top_k, type(layer.gate)) == (6, 20, 1, SwitchGate)


def test_profile_of_every_layer(megatron):
    megatron()
    model = fmoefy(Model(), 4)
    assert get_balance_profile()["Lmax-over-Lmean"] == [None, None]
    chosen = []
    for layer in model.layers:
        layer.mlp.gate.register_forward_hook(lambda gate, args, output: chosen.append(output[0]))
    model(tokens().float())
    loads = [idx.flatten().bincount(minlength=4).float() for idx in chosen]
    profile = get_balance_profile()
    for layer, load in enumerate(loads):
        assert profile["Lmax-over-Lmean"][layer].item() == pytest.approx((load.max() / load.mean()).item())


@pytest.mark.parametrize("version", ["v2.2", "v2.5", "v3.0.2"])
def test_patch_model_provider(megatron, version):
    megatron()
    built = []

    def model_provider(**kwargs):
        built.append(kwargs)
        return Model(STACK[version])

    stage = {} if version == "v2.2" else {"pre_process": True, "post_process": False}
    model = patch_model_provider(model_provider, gate=SwitchGate, Megatron_Version=version)(**stage)
    assert built == [stage]
    assert {(m.mlp.d_hidden, m.mlp.num_experts, type(m.mlp.gate)) for m in model.layers} == {
        (16, 4, SwitchGate)
    }
    with pytest.raises(ValueError, match=r"Megatron_Version must be one of .*, but got 'v1'"):
        patch_model_provider(model_provider, Megatron_Version="v1")


def test_patched_training_step_adds_the_balance_loss(megatron):
    megatron(balance_strategy="gshard")
    x = tokens().float()

    def loss_func(output):
        return output.square().mean(), {"lm loss": 1.0}

    for version in STACK:
        model = fmoefy(Model(STACK[version]), 4)
        if version == "v2.2":
            step = patch_forward_step(lambda data, model, received: loss_func(model(x)), version)
            loss, figures = step(None, model, None)
        else:
            step = patch_forward_step(lambda data, model: (model(x), loss_func), version)
            output, patched, balance_loss = step(None, model)
            loss, figures = patched(output)
            torch.testing.assert_close(figures["gshard_loss"], balance_loss.detach())
        expected = 0.5 * sum(layer.mlp.gate.get_loss(clear=False) for layer in model.layers) / LAYERS
        torch.testing.assert_close(figures["gshard_loss"], expected.detach())
        assert figures["lm loss"] == 1.0
        loss.backward()
        assert model.layers[0].mlp.gate.gate.weight.grad.abs().max() > 0


def test_v2_2_adds_the_loss_of_the_last_stage_alone(megatron, monkeypatch):
    """A step of another stage returns what it sends on, and no loss."""
    megatron(balance_strategy="gshard")
    monkeypatch.setattr(sys.modules["megatron.mpu"], "is_pipeline_last_stage", lambda: False)
    model, sent = fmoefy(Model("transformer"), 4), []
    step = patch_forward_step(lambda data, model, received: sent.append(model(received)) or sent[0], "v2.2")
    assert step(None, model, tokens().float()) is sent[0]
    assert model.layers[0].mlp.gate.get_loss(clear=False).requires_grad


def test_without_balance_strategy_nothing_is_patched(megatron):
    megatron()
    function = lambda: None  # noqa: E731
    assert patch_forward_step(function) is function
    assert patch_loss_func_v2_5(function) is function


def test_names_need_megatron(monkeypatch):
    for name in [name for name in sys.modules if name == "megatron" or name.startswith("megatron.")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(RuntimeError, match="from megatron import get_args"):
        patch_forward_step(None)
    with pytest.raises(RuntimeError, match="from megatron import get_args"):
        fmoefy(Model(), 4)


# On several processes


def train_on_ranks(tp, steps, folder=None):
    """Losses of one model in FastMoE's way; with a folder, the files of a checkpoint that continues as if not saved."""
    return with_megatron(_train_on_ranks, steps, folder, tp=tp, save=folder, load=folder)


def with_megatron(function, *arguments, **options):
    """function(args, *arguments) in a process of the pool, where the stand-in is installed."""
    modules, args = install_megatron(**options)
    before = {name: sys.modules.pop(name) for name in list(sys.modules) if name.split(".")[0] == "megatron"}
    sys.modules.update(modules)
    try:
        return function(args, *arguments)
    finally:
        for name in modules:
            del sys.modules[name]
        sys.modules.update(before)


def split_mlps(model, rank, num_ranks):
    """Part of the MLPs on a tensor-parallel rank."""
    for layer in model.layers:
        first, second = layer.mlp.dense_h_to_4h, layer.mlp.dense_4h_to_h
        first.weight = nn.Parameter(first.weight.chunk(num_ranks)[rank])
        first.bias = nn.Parameter(first.bias.chunk(num_ranks)[rank])
        second.weight = nn.Parameter(second.weight.chunk(num_ranks, 1)[rank])


def _train_on_ranks(args, steps, folder):
    torch.manual_seed(0)
    tp = args.tensor_model_parallel_size
    num_data = dist.get_world_size() // tp
    index = dist.get_rank() // tp
    model = Model().double()
    split_mlps(model, dist.get_rank() % tp, tp)
    model = DistributedDataParallel(fmoefy(model, 4))
    inner = torch.optim.Adam(model.parameters(), lr=0.05)
    optimizer = SimpleNamespace(  # Megatron's wrapper of an optimizer
        optimizer=inner, state_dict=inner.state_dict, load_state_dict=inner.load_state_dict
    )
    losses = []

    def step(number):
        x = torch.randn(4, 2, D, generator=torch.Generator().manual_seed(number)).double()
        inner.zero_grad()
        loss = model(x.tensor_split(num_data)[index]).square().mean()
        loss.backward()
        model.allreduce_params()
        inner.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append((total / dist.get_world_size()).item())

    for number in range(steps):
        step(number)
    if folder is not None:
        save_checkpoint(steps, [model], optimizer, None)
        saved = [p.detach().clone() for p in model.parameters()]
        for number in range(steps, steps + 2):
            step(number)
        continued = losses[steps:]
        assert load_checkpoint([model], optimizer, None) == steps
        assert all(torch.equal(p, q) for p, q in zip(model.parameters(), saved, strict=True))
        losses.clear()
        for number in range(steps, steps + 2):
            step(number)
        assert losses == continued
        return sorted(p.relative_to(folder).as_posix() for p in Path(folder).rglob("*.pt"))
    return losses


@pytest.fixture(scope="module")
def pool():
    with DistributedPool(2) as pool:
        yield pool


def test_layouts_equal_one_process(pool):
    (expected,) = pool.run(train_on_ranks, 1, 3, world_size=1)
    for tp in (1, 2):
        for losses in pool.run(train_on_ranks, tp, 3):
            assert losses == pytest.approx(expected, rel=1e-12)


def test_checkpoint_files_of_fastmoe(pool, tmp_path):
    files = pool.run(train_on_ranks, 1, 2, str(tmp_path))[1]
    assert files == [
        "iter_0000002/mp_rank_00/model_optim_rng.pt",
        "iter_0000002/mp_rank_00_dp_rank_0001/model_optim_rng.pt",
    ]
    local = torch.load(tmp_path / files[1], weights_only=False)
    names = set(local["model"]["language_model"])
    assert names and all(".mlp.experts." in name for name in names)
    assert set(local) == {"model", "optimizer"}


class CopyingOptimizer:
    """Megatron's optimizer in fp16 and bf16: float32 copies of the parameters, which another optimizer updates."""

    def __init__(self, params, is_patched):
        self.params, self.copies = list(params), []
        for p in self.params:
            self.copies.append(p.detach().float().clone())
            if is_patched and hasattr(p, "dp_comm"):  # FastMoE's patch
                self.copies[-1].dp_comm = p.dp_comm
        self.optimizer = torch.optim.SGD(self.copies, lr=0.05)

    def state_dict(self):
        return {"optimizer": {"state": {}}, "fp32_from_fp16_params": [self.copies]}

    def load_state_dict(self, state):
        (self.copies,) = state["fp32_from_fp16_params"]

    def reload_model_params(self):
        self.copies = [p.detach().float().clone() for p in self.params]


def resume(folder, is_patched=True, **options):
    return with_megatron(_resume, is_patched, save=folder, load=folder, bf16=True, **options)


def _resume(_, is_patched):
    """Return the state of a rank after it loads a checkpoint; generators and scheduler of rank r are seeded with r."""
    model = DistributedDataParallel(fmoefy(Model(), 4).bfloat16())
    optimizer = CopyingOptimizer(model.parameters(), is_patched)
    scheduler = SimpleNamespace(state={"rank": dist.get_rank()})
    scheduler.state_dict = lambda: scheduler.state
    scheduler.load_state_dict = lambda state: setattr(scheduler, "state", state)

    def seed(number):
        random.seed(number)
        numpy.random.seed(number)
        torch.manual_seed(number)

    seed(dist.get_rank())
    saved = [p.detach().clone() for p in optimizer.params]
    save_checkpoint(1, [model], optimizer, scheduler)
    seed(10 + dist.get_rank())
    scheduler.state = None
    for p in optimizer.params:
        p.data += 1
    optimizer.copies = [torch.zeros_like(p) for p in optimizer.copies]
    iteration = load_checkpoint([model], optimizer, scheduler)
    assert all(map(torch.equal, optimizer.params, saved))
    copies_are_theirs = all(torch.equal(c, p.float()) for c, p in zip(optimizer.copies, saved, strict=True))
    draws = random.random(), numpy.random.rand(), torch.rand(()).item()
    tracker = sys.modules["megatron"].mpu.get_cuda_rng_tracker()
    return iteration, scheduler.state, copies_are_theirs, draws, tracker.states


def draws_of(seed):
    generator = torch.Generator().manual_seed(seed)
    draws = random.Random(seed).random(), numpy.random.RandomState(seed).rand()
    return (*draws, torch.rand((), generator=generator).item())


@pytest.mark.parametrize("is_v3", [False, True])
def test_rank_resumes_as_rank_0_does(pool, tmp_path, is_v3):
    """Its experts and their float32 copies are its own; generators and scheduler go on from rank 0's."""
    (_, there) = pool.run(functools.partial(resume, is_v3=is_v3), str(tmp_path))
    assert there == (1, {"rank": 0}, True, draws_of(0), {"tensor": 7})
    # as the options say: neither; v3.0.2 copies the weights that were loaded
    options = {"is_v3": is_v3, "no_load_rng": True, "no_load_optim": True}
    (_, there) = pool.run(functools.partial(resume, **options), str(tmp_path))
    assert there == (1, None, is_v3, draws_of(11), None)


def log_of_stages(args, stages):
    """Scalars that the last rank writes: stage 0 has two layers, stage 1 one, stage 2 none."""
    rank = dist.get_rank()
    sys.modules["megatron.mpu"].get_pipeline_model_parallel_rank = lambda: stages[rank]
    profile = [[1.0 + rank, 3.0], [5.0 + rank], []][stages[rank]]
    reset_gate_hook(len(profile))
    get_balance_profile()["Lmax-over-Lmean"][:] = profile
    scalars = {}
    writer = SimpleNamespace(add_scalar=lambda tag, value, step: scalars.update({tag: value}))
    add_balance_log(None, writer if rank == 1 else None, 9)
    assert get_balance_profile()["Lmax-over-Lmean"] == [None] * len(profile)
    reset_gate_hook(0)
    return scalars


@pytest.mark.parametrize(
    ("stages", "layers"),
    [([0, 0], [1.5, 3.0]), ([0, 1], [1.0, 3.0, 6.0]), ([0, 2], [1.0, 3.0])],
    ids=["data parallel", "two stages", "a stage without"],
)
def test_balance_log_over_pipeline_stages(pool, stages, layers):
    expected = {f"balance-Lmax-over-Lmean/layer-{i}": value for i, value in enumerate(layers)}
    expected["balance-Lmax-over-Lmean/all"] = sum(layers) / len(layers)
    assert pool.run(functools.partial(with_megatron, log_of_stages), stages) == [{}, expected]


def test_copies_that_no_tag_tells_apart(pool, tmp_path):
    """They were left out, and a rank loaded those of rank 0's experts."""
    with pytest.raises(DistributedError, match="have no dp_comm, and would not be saved"):
        pool.run(functools.partial(resume, is_patched=False), str(tmp_path))


def test_distributed_optimizer_is_refused_by_name(megatron):
    """Rank 0 would wait for the others, which write FastMoE's files."""
    megatron(use_distributed_optimizer=True)
    for call in (lambda: save_checkpoint(1, None, None, None), lambda: load_checkpoint(None, None, None)):
        with pytest.raises(ValueError, match=r"--use-distributed-optimizer .*: leave the option out"):
            call()


def test_checkpoint_name_and_missing_file(megatron, monkeypatch, tmp_path):
    megatron(load=str(tmp_path))
    mpu = sys.modules["megatron.mpu"]
    monkeypatch.setattr(mpu, "get_pipeline_model_parallel_world_size", lambda: 2)
    monkeypatch.setattr(mpu, "get_pipeline_model_parallel_rank", lambda: 1, raising=False)
    monkeypatch.setattr(mpu, "get_data_parallel_rank", lambda: 3)
    name = get_fmoe_checkpoint_name("c", 7)
    assert name == "c/iter_0000007/mp_rank_00_001_dp_rank_0003/model_optim_rng.pt"
    assert load_checkpoint(None, None, None) == 0
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("7")
    with pytest.raises(FileNotFoundError, match="is missing: the checkpoint was saved with fewer than the 1"):
        load_checkpoint(None, None, None)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("seven")
    with pytest.raises(ValueError, match="must hold a number or 'release', but holds 'seven'"):
        load_checkpoint(None, None, None)


def test_megatron_mlp_is_the_layer_of_its_arguments(megatron):
    args = megatron(balance_strategy="switch", top_k=1)
    layer = MegatronMLP(args, 0).double()
    plain = fmoe_ext.FMoETransformerMLP(4, D, 16, top_k=1, gate=SwitchGate).double()
    plain.load_state_dict(layer.state_dict())
    output, bias = layer.eval()(tokens())
    assert torch.equal(output, plain.eval()(tokens())) and not bias.any()


def test_old_path_names_the_new_one():
    with pytest.raises(
        ImportError, match=r"megatron\.save_checkpoint is fmoe_ext\.compat\.megatron\.save_checkpoint"
    ):
        exec("from fmoe_ext.megatron import save_checkpoint", {})
