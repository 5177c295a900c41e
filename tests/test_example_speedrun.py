"""examples/speedrun: a split that leaks nothing, four models of one size, runs that go on bit for bit, the figures."""

import importlib
import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.forked import run_file

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "examples/speedrun"
pytestmark = pytest.mark.usefixtures("one_thread")  # threads wait for each other in steps this small
MODULES = ("sources", "models", "contest", "results", "data")


@pytest.fixture(scope="module")
def example():
    """Its modules, whose names other examples may use too."""
    before, kept = sys.path[:], {name: sys.modules.pop(name, None) for name in MODULES}
    sys.path.insert(0, str(EXAMPLE))
    yield SimpleNamespace(**{name: importlib.import_module(name) for name in MODULES[:-1]})
    sys.path[:] = before
    for name, module in kept.items():
        sys.modules.pop(name, None)
        if module is not None:
            sys.modules[name] = module


def package(root, name, **files):
    folder = root / name
    folder.mkdir()
    for file, text in files.items():
        (folder / f"{file}.py").write_text(text)
    return name, sorted(folder.glob("*.py"))


def lines(word, number):
    return "\n".join(f"{word}_{i} = {i}" for i in range(number))


def texts_of(tensor):
    return bytes(tensor.tolist()).split(b"\0")


def runs_of(text):
    kept = [line.strip() for line in text.split(b"\n") if line.strip()]
    return {tuple(kept[i : i + 8]) for i in range(len(kept) - 7)}


def assert_apart(corpus):
    """No text and no eight lines in succession are in both parts."""
    train, valid = texts_of(corpus.train), texts_of(corpus.valid)
    assert not set(train) & set(valid)
    assert not set().union(*map(runs_of, train)) & set().union(*map(runs_of, valid))


def test_split_is_by_package_and_leaves_copies_out(example, tmp_path):
    sources, licence = example.sources, lines("licence", 12)
    names = [f"package{i}" for i in range(40)]
    chosen = [name for name in names if sources.place_of_name(name) < sources.VALIDATION_SHARE]
    assert 0 < len(chosen) < 10
    packages = {}
    for name in names:
        files = {
            "own": f"{licence}\n\n{lines(name, 30)}",
            "vendored": lines("vendored", 30),
            "near": lines("near", 30).replace("near_29", f"{name}_near"),
            "short": f"{lines('common', 7)}\n{lines(name + '_short', 9)}",
        }
        packages |= [package(tmp_path, name, **files)]
    corpus = sources.load_text(packages, 1 << 20)
    assert_apart(corpus)
    train, valid = (b"\n".join(texts_of(part)) for part in (corpus.train, corpus.valid))
    for name in names:
        assert (f"{name}_17 = 17".encode() in valid) == (name in chosen)
        assert (f"{name}_17 = 17".encode() in train) == (name not in chosen)
    assert b"licence_3" in train and b"vendored_3" in train and b"near_3" in train
    assert not any(word in valid for word in (b"licence_", b"vendored_", b"= 3\nnear_4"))
    assert b"common_6" in valid  # seven lines that both have are left in


def test_split_of_what_is_installed(example):
    corpus = example.sources.load_text(example.sources.installed_packages(), 1 << 20)
    assert 1 << 20 <= len(corpus.train) < 1.3 * 2**20 and len(corpus.valid) > 20_000
    assert_apart(corpus)
    assert b"def " in bytes(corpus.valid.tolist())


def test_too_few_packages_are_refused(example, tmp_path):
    with pytest.raises(example.sources.DataError, match="1 packages hold too little text"):
        example.sources.load_text(dict([package(tmp_path, "one", a=lines("x", 20))]), 1000)


def filled(model, seed=1):
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator, dtype=p.dtype) / 4)
    return model


def test_recipe_on_grouped_mm_and_on_ours_is_one_layer(example):
    """Output, gradients and the bias after two steps, in float64 where the scores of the first are in float32."""
    torch.manual_seed(0)
    theirs = filled(example.models.MLPS["grouped_mm"](32, 128))
    ours = example.models.MLPS["ours"](32, 128)
    names = {"gate.weight": "gate.gate.weight", "up": "experts.htoh4.weight", "down": "experts.h4toh.weight"}
    names |= {"shared.up.weight": "shared_experts.mlp.htoh4.weight"}
    names |= {"shared.down.weight": "shared_experts.mlp.h4toh.weight"}
    own = dict(ours.named_parameters())
    assert {names[name] for name, _ in theirs.named_parameters()} == own.keys()
    with torch.no_grad():
        for name, p in theirs.named_parameters():
            own[names[name]].copy_(p.view_as(own[names[name]]))
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.0)
    for seed in range(2):
        x = torch.randn(3, 50, 32, generator=torch.Generator().manual_seed(seed))
        results = []
        for mlp in (theirs, ours):
            inputs = x.clone().requires_grad_()
            mlp.zero_grad()
            out = mlp(inputs)
            out.square().sum().backward()
            results.append((out, inputs.grad, {n: p.grad for n, p in mlp.named_parameters()}))
        theirs.balance(), optimizer.step()
        (out, grad, grads), (got, got_grad, got_grads) = results
        for a, b in ((got, out), (got_grad, grad), *((got_grads[names[n]], g) for n, g in grads.items())):
            torch.testing.assert_close(a, b.view_as(a), rtol=1e-4, atol=1e-4 * b.abs().max().item())
        assert torch.equal(ours.gate.expert_bias, theirs.expert_bias) and theirs.expert_bias.abs().sum() > 0


@pytest.mark.parametrize("name", ["dense", "grouped_mm", "ours", "fine"])
def test_model(example, name):
    """It starts as a guess, sees no later byte, is capped, and learns a text by heart."""
    models, size = example.models, example.models.SIZES["test"]
    torch.manual_seed(0)
    model = models.GPT(name, size)
    tokens = torch.randint(256, (2, 24))
    loss = example.contest.cross_entropy(model(tokens), tokens)
    assert abs(loss.item() - math.log(256)) < 0.01
    filled(model)
    logits, other = model(tokens), tokens.clone()
    other[:, 12:] += 1
    changed = model(other % 256) - logits
    assert changed[:, :12].abs().max() < 1e-4 < changed[:, 12:].abs().max() and logits.abs().max() <= 15
    torch.manual_seed(0)
    model, text = models.GPT(name, size), torch.randint(256, (2, 25))
    optimizers = model.optimizers(0.5)
    trained = [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
    assert sorted(map(id, trained)) == sorted(map(id, model.parameters()))
    for _ in range(30):
        loss = example.contest.cross_entropy(model(text[:, :-1]), text[:, 1:])
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        model.after_step()
    assert loss < 1.0


def test_active_parameters_are_equal(example):
    for size in (example.models.SIZES["cpu"], example.models.SIZES["cpu-wide"]):
        counts = example.results.parameters(size)
        dense = counts["dense"][1]
        assert counts["dense"][0] == dense
        for name in ("grouped_mm", "ours", "fine"):
            total, active = counts[name]
            assert total > 1.8 * dense and 0.97 * dense < active < 1.02 * dense


@pytest.mark.parametrize("name", ["grouped_mm", "ours", "fine"])
def test_every_expert_has_tokens_at_the_highest_rate(example, corpus, name):
    run = example.contest.Run(
        Path("none"), example.models.SIZES["test"], torch.device("cpu"), name, 0, 2.0, 1e9
    )
    model, optimizers = run.build()
    run.record.seconds = 1e8  # past the warm-up
    loads = []
    for _ in range(25):
        run.step(model, optimizers, corpus)
        run.record.steps += 1
        loads.append(run.busiest)
    collapsed = {"grouped_mm": 4, "ours": 4, "fine": 8}[name]
    assert sum(loads[-5:]) / 5 < 0.75 * collapsed


@pytest.fixture
def clock(example, monkeypatch):
    """A step takes a sixteenth of a second."""
    now = iter(range(10**6))
    monkeypatch.setattr(example.contest.time, "perf_counter", lambda: next(now) / 16)


@pytest.fixture(scope="module")
def corpus(example):
    text = (ROOT / "tests/test_example_speedrun.py").read_bytes()
    return example.sources.Corpus(*[example.sources.as_tensor(text)] * 2, "this file")


@pytest.mark.parametrize("name", ["dense", "grouped_mm", "ours", "fine"])
def test_slices_go_on_bit_for_bit(example, clock, corpus, tmp_path, name):
    size = example.models.SIZES["test"]

    def new_run(folder):
        return example.contest.Run(tmp_path / folder, size, torch.device("cpu"), name, 3, 0.5, 1.0)

    whole = new_run("whole")
    whole.train(corpus, 1.0)
    while not (part := new_run("parts")).record.is_done:
        part.train(corpus, 0.3)
    assert whole.record.steps == part.record.steps == 16 and part.record.slices == 4
    assert [*map(tuple, part.record.curve)] == whole.record.curve and len(whole.record.curve) == 4
    assert whole.record.bits < 7
    states = [run.build()[0].state_dict() for run in (whole, new_run("parts"))]
    assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])
    assert len(list((tmp_path / "parts").glob("*/state-*.pt"))) == 1


def test_rate_that_is_too_high_ends_its_run(example, clock, corpus, tmp_path):
    size = example.models.SIZES["test"]
    run = example.contest.Run(tmp_path, size, torch.device("cpu"), "dense", 0, 1e30, 1.0)
    run.train(corpus, 1.0)
    assert (
        run.record.diverged and run.record.is_done and run.record.bits == math.inf and run.record.steps < 16
    )


def fake_run(example, name, factor, bits):
    record = example.contest.Record(name, 0, factor, 1.0, seconds=1.0, curve=[(1.0, bits)])
    return SimpleNamespace(record=record)


@pytest.mark.parametrize(("best", "tried"), [(1.0, 3), (4.0, 5), (0.25, 5), (64.0, 5)])
def test_sweep_goes_on_while_the_best_is_at_an_end(example, best, tried):
    def new_run(name, factor):
        return fake_run(example, name, factor, abs(math.log2(factor / best)))

    sweep = example.contest.Sweep(new_run, ["dense"])
    assert sweep.next_run() is None
    assert sweep.best("dense") == min(best, 8.0) and len(sweep.runs["dense"]) == tried


def test_runs_take_turns(example):
    runs = [fake_run(example, name, 1.0, 1.0) for name in "abc"]
    for run, (slices, seconds) in zip(runs, ((2, 0.5), (1, 0.9), (0, 1.0)), strict=True):
        run.record.slices, run.record.seconds = slices, seconds
    assert example.contest.next_run(runs) is runs[1]


def test_figures_of_the_summary(example):
    size, record = example.models.SIZES["test"], example.contest.Record
    records = []
    for seed in (0, 1):
        records += [
            record("dense", seed, 1.0, 10.0, 10.0, 100, 5, False, [(5.0, 3.0), (10.0, 2.0)], [1.0, 1.0]),
            record(
                "ours",
                seed,
                2.0,
                10.0,
                10.0,
                90,
                5,
                False,
                [(5.0, 2.5), (7.0, 1.5 + seed), (10.0, 1.5)],
                [2.0, 3.0, 1.0 + seed],
            ),
        ]
    records.append(record("fine", 0, 1.0, 10.0, 5.0, 90, 5, False, [(5.0, 2.5)], [1.5]))  # not done
    summary = example.results.summarize(records, size)
    assert summary.keys() == {"dense", "ours"}
    assert summary["dense"]["of_dense_seconds_to_its_loss"] == 1.0
    ours = summary["ours"]
    assert ours["of_dense_tokens_per_second"] == pytest.approx(0.9)
    assert ours["tokens_per_second"] == pytest.approx(9 * size.windows * size.context)
    # seed 0 crosses 2.0 halfway from 5 to 7 s; seed 1 goes from (7, 2.5) to (10, 1.5)
    assert ours["of_dense_seconds_to_its_loss"] == pytest.approx((0.6 + 0.85) / 2)
    assert ours["bits_per_byte"] == 1.5 and ours["deviation"] == 0.0
    assert example.results.seconds_to([(1.0, 3.0)], 2.0) is None
    table = example.results.table(summary, example.results.parameters(size))
    assert [line.split()[-2:] for line in table.splitlines()[1:]] == [["1.00", "1.00"], ["0.72", "2.17"]]


def command(*options, check=True):
    return run(EXAMPLE / "speedrun.py", *options, check=check)


def run(path, *options, check=True):
    done = run_file(path, *options, cwd=ROOT, timeout=600)
    assert not check or done.returncode == 0, done.stderr
    return done


@pytest.mark.long
def test_program_from_start_to_samples_in_two_pieces(tmp_path):
    options = ("--size", "test", "--train-seconds", 0.2, "--seeds", 1, "--factor", 1, "--slice", 0.1)
    options += ("--threads", 1, "--out", tmp_path, "--models", "fine", "ours")
    first = command(*options, "--seconds", 0.01)
    assert "the same command goes on" in first.stdout and not (tmp_path / "samples.txt").exists()
    assert "picture.png, results.json, samples.txt" in command(*options).stdout
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["summary"].keys() == {"dense", "ours", "fine"}
    for run in results["runs"]:
        assert run["seconds"] >= 0.2 and run["steps"] > 0 and run["curve"][-1][1] > 0
    assert results["machine"]["threads"] == 1 and results["settings"]["size"]["width"] == 64
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "samples.txt").read_text(errors="replace").count("--- ") == 3
    refused = command(*options, "--seeds", 2, check=False)
    assert refused.returncode == 1 and "runs with other settings" in refused.stderr


@pytest.mark.slow
def test_models_of_the_gpu_run_on_the_cpu():
    out = command("--size", "gpu", "--dry-run").stdout
    assert out.count("M active, loss 5.5") == 4


def test_options_that_cannot_be():
    refused = command("--slice", 0, check=False)
    assert refused.returncode == 2 and "--slice must be positive, but is 0.0" in refused.stderr


def test_seconds_of_the_parts_of_a_step():
    out = run(EXAMPLE / "parts.py", "--size", "test", "--steps", "2").stdout.splitlines()
    assert out[0].split()[1:6] == ["forward", "backward", "Muon", "AdamW", "step"] and len(out) == 5
    for line in out[1:]:
        *parts, step, ratio = map(float, line.split()[-6:])
        assert step > 0 and abs(sum(parts) - step) <= 0.05 * step + 3 and ratio > 0


def test_map_of_seconds_has_a_ratio_of_every_width_and_step(tmp_path):
    picture = tmp_path / "map.png"
    run(EXAMPLE / "parts.py", "--map", picture, "--steps", 1, "--widths", 64, "--windows", 1)
    found = json.loads(picture.with_suffix(".json").read_text())
    assert found["widths"] == [64] and found["tokens"] == [512]
    assert set(found["ratios"]) == {"grouped_mm", "ours", "fine"}
    assert all(0 < ratio < 100 for (row,) in found["ratios"].values() for ratio in row)
    assert all(len(row) == 1 for (row,) in found["ratios"].values())
    assert picture.read_bytes().startswith(b"\x89PNG")
