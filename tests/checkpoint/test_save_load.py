"""save() and load() in one process: bitwise, complete or absent, one clear error for everything that does not fit."""

import copy
import os
import time
from pathlib import Path

import pytest
import torch
from torch import nn

from fmoe_ext import checkpoint
from fmoe_ext.checkpoint import CheckpointError, store
from tests.checkpoint.trained_models import D, E, Model, by_group, equal, train
from tests.forked import run_python

ROOT = Path(__file__).resolve().parents[2]
OPTIMIZERS = {
    "adam": lambda model: torch.optim.Adam(model.parameters(), amsgrad=True),
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    "sgd-without-state": lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    "adamw-groups": lambda model: by_group(
        model, lr=torch.tensor(0.01), betas=(0.8, 0.9), capturable=False, foreach=False
    ),
    "adafactor": lambda model: torch.optim.Adafactor(model.parameters()),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_goes_on_as_if_nothing_had_happened(tmp_path, name):
    model, other = Model(), Model(seed=1)
    optimizer, of_other = OPTIMIZERS[name](model), OPTIMIZERS[name](other)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    train(model, optimizer, range(2))
    scheduler.step()
    path = checkpoint.save(tmp_path, model, optimizer, step=2, extra={"scheduler": scheduler.state_dict()})
    assert path == tmp_path / "step-00000002"
    before = {n: p.data_ptr() for n, p in other.named_parameters()}
    manifest = checkpoint.load(tmp_path, other, of_other)
    assert manifest.step == 2 and manifest.extra["scheduler"]["last_epoch"] == 1
    assert equal(model, other) and before == {n: p.data_ptr() for n, p in other.named_parameters()}
    ours, theirs = of_other.state_dict(), optimizer.state_dict()
    assert ours["param_groups"] == theirs["param_groups"]
    assert ours["state"].keys() == theirs["state"].keys()
    for index, entries in theirs["state"].items():
        assert ours["state"][index].keys() == entries.keys()
        for entry, value in entries.items():
            mine = ours["state"][index][entry]
            assert (
                torch.equal(mine, value) and mine.dtype == value.dtype
                if torch.is_tensor(value)
                else mine == value
            )
    assert train(model, optimizer, range(2, 5)) == train(other, of_other, range(2, 5))


def test_names_in_groups_of_an_optimizer_stay_its_own(tmp_path):
    """AdamW(model.named_parameters()) keeps names beside parameters, which other groups have in another order."""
    model, other = Model(), Model(seed=1)
    optimizer = torch.optim.AdamW(model.named_parameters(), lr=0.01)
    train(model, optimizer, range(2))
    checkpoint.save(tmp_path, model, optimizer)
    named = [*other.named_parameters()][::-1]
    of_other = torch.optim.AdamW([{"params": named[:3]}, {"params": named[3:]}], lr=0.5)
    checkpoint.load(tmp_path, other, of_other)
    names = [[name for name, _ in named[:3]], [name for name, _ in named[3:]]]
    assert [group["param_names"] for group in of_other.param_groups] == names
    assert [group["lr"] for group in of_other.param_groups] == [0.01, 0.01]
    checkpoint.save(tmp_path, other, of_other, step=1)  # and from two groups into one
    checkpoint.load(tmp_path, model, optimizer)
    assert optimizer.param_groups[0]["param_names"] == [name for name, _ in model.named_parameters()]
    assert train(model, optimizer, range(2, 4)) == train(other, of_other, range(2, 4))


def test_way_of_computing_a_step_is_that_of_the_loading_program(tmp_path):
    """Saved by a fused optimizer of a GPU, `fused` and the devices of steps did not fit each other afterwards."""
    model, other = Model(), Model(seed=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    train(model, optimizer, range(2))
    checkpoint.save(tmp_path, model, optimizer)
    plain = torch.optim.AdamW(other.parameters(), lr=0.5, foreach=True)
    checkpoint.load(tmp_path, other, plain)
    options = plain.param_groups[0]
    assert (options["lr"], options["fused"], options["foreach"]) == (0.01, None, True)
    assert train(model, optimizer, range(2, 3)) == train(other, plain, range(2, 3))  # losses before the step
    torch.testing.assert_close(dict(other.named_parameters()), dict(model.named_parameters()))


def test_wrappers_leave_no_trace(tmp_path):
    model = Model()
    checkpoint.save(tmp_path, nn.DataParallel(nn.Sequential(nn.DataParallel(model))))
    other = nn.Sequential(Model(seed=1))
    checkpoint.load(tmp_path, torch.compile(other))
    assert equal(model, other[0])


def test_dtypes(tmp_path):
    model = Model()
    model.moe.gate.expert_bias += torch.randn(E)
    checkpoint.save(tmp_path, model)
    half = Model(seed=1).bfloat16()
    with pytest.raises(
        CheckpointError, match=r"before.weight is torch.bfloat16 in the model and torch.float32"
    ):
        checkpoint.load(tmp_path, half)
    checkpoint.load(tmp_path, half, cast=True)
    assert torch.equal(half.before.weight, model.before.weight.bfloat16())
    assert torch.equal(half.moe.gate.expert_bias, model.moe.gate.expert_bias)  # buffers stay what they were


def test_keep_and_latest(tmp_path):
    model = Model()
    for step in (1, 2, 2, 3):
        checkpoint.save(tmp_path, model, step=step, keep=2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step-00000002-1", "step-00000003"]
    checkpoint.save(tmp_path, model, step=1, keep=3)  # gone back and trained on from there
    assert checkpoint.load(tmp_path, model).step == 1
    assert checkpoint.load(tmp_path / "step-00000002-1", model).step == 2
    (tmp_path / "latest").write_text("step-00000009")
    with pytest.raises(
        CheckpointError, match=r"names step-00000009, which has no manifest\.json .*step-00000003"
    ):
        checkpoint.load(tmp_path, model)
    with pytest.raises(CheckpointError, match="keep must be at least 1, or None for all, but got 0"):
        checkpoint.save(tmp_path, model, keep=0)
    with pytest.raises(CheckpointError, match=r"no checkpoint in .*nowhere"):
        checkpoint.load(tmp_path / "nowhere", model)


def test_extra_keeps_the_keys_of_dicts(tmp_path):
    """JSON would make text of them: a MultiStepLR whose milestones are text never lowers the rate."""
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[2, 2, 3])
    extra = {"scheduler": scheduler.state_dict(), "seen": {1: 0.5, "1": {None: True}}, "__items__": [1]}
    nested = {"only": {"__items__": [[3, 4]]}}
    checkpoint.save(tmp_path, model, extra=extra | nested)
    loaded = checkpoint.load(tmp_path, model).extra
    assert loaded["seen"] == {1: 0.5, "1": {None: True}} and loaded["only"] == nested["only"]
    scheduler.load_state_dict(loaded["scheduler"])
    rates = []
    for _ in range(3):
        optimizer.step()
        scheduler.step()
        rates += scheduler.get_last_lr()
    assert rates == pytest.approx([1.0, 0.01, 0.001])
    with pytest.raises(
        CheckpointError, match=r"extra must be plain values \(JSON\): tuple \(1, 2\) as a key"
    ):
        checkpoint.save(tmp_path, model, extra={"places": {(1, 2): 3}})


def test_keep_where_the_clock_was_set_back(tmp_path):
    """huggingface/transformers#26961: the newest is the one that was written last, whatever its folder's time says."""
    model = Model()
    for step in (1, 2):
        path = checkpoint.save(tmp_path, model, step=step)
        tomorrow = time.time() + 86400 + step
        os.utime(path, (tomorrow, tomorrow))
    for step in (3, 4):
        checkpoint.save(tmp_path, model, step=step, keep=2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step-00000003", "step-00000004"]
    assert checkpoint.load(tmp_path, model).step == 4


@pytest.mark.parametrize("damage", ["truncated", "flipped", "deleted"])
@pytest.mark.parametrize("file", ["__0_0.distcp", "manifest.json"])
def test_damage_is_found(tmp_path, damage, file):
    model, other = Model(), Model(seed=1)
    checkpoint.save(tmp_path, model, step=1)
    path = checkpoint.save(tmp_path, model, step=2) / file
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    if damage == "flipped":
        path.write_bytes(content)
    elif damage == "truncated":
        path.write_bytes(content[:-5])
    else:
        path.unlink()
    before = {key: value.clone() for key, value in other.state_dict().items()}
    with pytest.raises(CheckpointError, match=f"{file}.*(damaged|truncated|missing)|has no {file}"):
        checkpoint.load(tmp_path, other)
    assert all(torch.equal(value, before[key]) for key, value in other.state_dict().items())
    if file == "__0_0.distcp":
        with pytest.raises(CheckpointError, match="complete checkpoints there: step-00000001"):
            checkpoint.load(tmp_path, other)
    checkpoint.load(tmp_path / "step-00000001", other)
    assert equal(model, other)


def save_and_die(folder):
    """Saves again and again, killed one moment later each time: before a file or a name changes or is made durable."""
    torch.set_num_threads(1)
    model = Model()
    optimizer = torch.optim.Adam(model.parameters())
    train(model, optimizer, range(1))
    checkpoint.save(folder, model, optimizer, step=1, keep=2)
    survived, step = 0, 1
    for fatal in range(1000):
        child = os.fork()
        if child == 0:
            die_at(fatal)
            with torch.no_grad():
                model.before.bias.fill_(fatal)
            checkpoint.save(folder, model, optimizer, step=2, keep=2)
            os._exit(0)
        killed = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -9
        other = Model(seed=1)
        manifest = checkpoint.load(folder, other, torch.optim.Adam(other.parameters()))
        assert manifest.step in (step, 2) and (manifest.step == 2 or killed), (fatal, manifest.step)
        step = manifest.step
        if not killed:
            assert other.before.bias.tolist() == [fatal] * D
            break
        survived += 1
    folders = sorted(path.name for path in Path(folder).iterdir())
    assert folders[0] == "latest" and len(folders) == 3, folders  # and nothing of the interrupted ones
    print("survived", survived)


def die_at(fatal):
    count = -1

    def counted(function):
        def call(*args, **kwargs):
            nonlocal count
            count += 1
            if count == fatal:
                os.kill(os.getpid(), 9)
            return function(*args, **kwargs)

        return call

    for name in ("fsync", "replace", "rename", "mkdir", "unlink", "rmdir"):
        setattr(os, name, counted(getattr(os, name)))


def test_killed_at_any_moment(tmp_path):
    code = f"from test_save_load import save_and_die; save_and_die({str(tmp_path)!r})"
    folders = os.pathsep.join([str(Path(__file__).parent), str(ROOT)])
    done = run_python(code, env={**os.environ, "PYTHONPATH": folders}, timeout=600)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[-1]) >= 20, done.stdout


def test_failed_save_leaves_the_last_one(tmp_path):
    model = Model()
    checkpoint.save(tmp_path, model, step=1)
    model.before.weight = nn.Parameter(torch.empty(D, D, device="meta"))  # has no data to write
    with pytest.raises(CheckpointError, match=r"writing .*step-00000002: rank 0: .*meta tensor; no data"):
        checkpoint.save(tmp_path, model, step=2)
    assert checkpoint.load(tmp_path, Model()).step == 1


def test_manifest_is_read_before_older_checkpoints_go(tmp_path, monkeypatch):
    model = nn.Linear(2, 3)
    checkpoint.save(tmp_path, model, step=1, keep=1)
    monkeypatch.setattr(store, "describe_layers", lambda shapes: ["no object"])
    with pytest.raises(CheckpointError, match="'layers' is"):
        checkpoint.save(tmp_path, model, step=2, keep=1)
    assert checkpoint.load(tmp_path, model).step == 1


@pytest.mark.parametrize("optimizer", ["AdamW", "SGD", "RMSprop"])
def test_cast_takes_the_optimizer_along(tmp_path, optimizer):
    """Numbers of steps stay float32, as torch has them."""

    def make(dtype):
        model = nn.Linear(D, D).to(dtype)
        options = {} if optimizer == "AdamW" else {"momentum": 0.9}
        return model, getattr(torch.optim, optimizer)(model.parameters(), lr=0.01, **options)

    def step(model, optimizer):
        optimizer.zero_grad()
        model(torch.ones(3, D, dtype=model.weight.dtype)).square().sum().backward()
        optimizer.step()

    model, saved = make(torch.bfloat16)
    step(model, saved)
    checkpoint.save(tmp_path, model, saved)
    other, loaded = make(torch.float32)
    checkpoint.load(tmp_path, other, loaded, cast=True)
    expected = copy.deepcopy(model).float()
    of_expected = getattr(torch.optim, optimizer)(expected.parameters())
    of_expected.load_state_dict(saved.state_dict())
    for a, b in zip(loaded.state.values(), of_expected.state.values(), strict=True):
        assert a.keys() == b.keys()
        for entry in a:
            if a[entry] is not None:
                assert a[entry].dtype == torch.float32 and torch.equal(a[entry], b[entry])
    step(other, loaded)
    step(expected, of_expected)
    assert torch.equal(other.weight, expected.weight)


def test_cast_leaves_state_that_had_a_dtype_of_its_own(tmp_path):
    """Moments in float32 of bfloat16 parameters; and an optimizer that has chosen float32 already keeps it."""
    model, other = nn.Linear(D, D).bfloat16(), nn.Linear(D, D).half()
    saved, loaded = (torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (model, other))
    for param in model.parameters():
        saved.state[param]["momentum_buffer"] = torch.randn(param.shape)
    checkpoint.save(tmp_path / "float32", model, saved)
    checkpoint.load(tmp_path / "float32", other, loaded, cast=True)
    for a, b in zip(saved.state.values(), loaded.state.values(), strict=True):
        assert torch.equal(a["momentum_buffer"], b["momentum_buffer"])
        assert b["momentum_buffer"].dtype == torch.float32
    for param in model.parameters():
        saved.state[param]["momentum_buffer"] = torch.randn(param.shape, dtype=torch.bfloat16)
    checkpoint.save(tmp_path / "bfloat16", model, saved)
    checkpoint.load(tmp_path / "bfloat16", other, loaded, cast=True)
    for a, b in zip(saved.state.values(), loaded.state.values(), strict=True):
        assert torch.equal(a["momentum_buffer"].float(), b["momentum_buffer"])
        assert b["momentum_buffer"].dtype == torch.float32


def test_checkpoint_that_is_read_stays(tmp_path, monkeypatch):
    """A saver with keep=1 comes between opening, verifying and filling; the next save without a reader removes it."""
    model, other = nn.Linear(2, 3), nn.Linear(2, 3)
    first = checkpoint.save(tmp_path, model, step=1, keep=1)
    read_into, values = store.read_into, model.weight.detach().clone()

    def save_first(*args):
        nn.init.zeros_(model.weight)
        checkpoint.save(tmp_path, model, step=2, keep=1)
        read_into(*args)

    monkeypatch.setattr(store, "read_into", save_first)
    assert checkpoint.load(tmp_path, other).step == 1
    assert torch.equal(other.weight, values) and first.exists()
    monkeypatch.undo()
    checkpoint.save(tmp_path, model, step=3, keep=1)
    assert [path.name for path in sorted(tmp_path.glob("step-*"))] == ["step-00000003"]


def test_latest_is_read_again_where_a_saver_was_faster(tmp_path, monkeypatch):
    """Between reading the name of the newest checkpoint and opening it, a save with keep=1 removes it."""
    model, other = nn.Linear(2, 3), nn.Linear(2, 3)
    checkpoint.save(tmp_path, model, step=1, keep=1)
    steps = iter([2, 3])
    for name in ("read_text", "read_locked"):  # of find(), and of held_open()
        function = getattr(store, name)

        def late(path, function=function, name=name):
            result = function(path) if name == "read_text" else None
            if (step := next(steps, None)) is not None:
                checkpoint.save(tmp_path, model, step=step, keep=1)
            return function(path) if result is None else result

        monkeypatch.setattr(store, name, late)
    assert checkpoint.load(tmp_path, other).step == 3
    assert equal(model, other)
