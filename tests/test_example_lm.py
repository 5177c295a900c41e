"""examples/lm: tiny runs from the command line's entry point, by the values that they write."""

import dataclasses
import importlib.metadata
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from unittest import mock

import pytest
import torch

import fmoe_ext
from fmoe_ext.gates import GATES
from tests.distributed.example_lm import assert_same_checkpoint, load_checkpoint

EXAMPLE = Path(__file__).parents[1] / "examples" / "lm"
TINY = """
    --d-model=16 --num-layers=2 --num-heads=2 --num-experts=4 --d-hidden=8 --batch-size=4 --seq-len=32
    --warmup=2 --val-windows=4 --log-every=2 --val-every=4 --sample-bytes=8 --device=cpu
    --dtype=float32 --threads=1 --peak-flops=1e9
"""
TIMES = {"seconds", "tokens_per_second", "mfu", "memory_gib"}


@pytest.fixture(scope="module", autouse=True)
def example_on_path():
    threads = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(EXAMPLE)
        patch.setattr(fmoe_ext.cpu, "can_keep_memory", lambda: False)  # it would hold for later tests too
        yield
    torch.set_num_threads(threads)


@pytest.fixture
def text(tmp_path):
    file = tmp_path / "text.txt"
    file.write_text("All work and no play makes Jack a dull boy.\n" * 200)
    return file


def train(text, out, *arguments, pictures=False):
    trainer = importlib.import_module("train")
    with nullcontext() if pictures else mock.patch.object(trainer, "write_pictures"):
        return trainer.main(["--data", str(text), "--out", str(out), *TINY.split(), *arguments])


def metrics(out, timeless=True):
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in r.items() if not (timeless and k in TIMES)} for r in records]


def assert_same_run(ours, other):
    assert metrics(ours) == metrics(other)
    assert_same_checkpoint(ours, other)


def test_training_needs_no_package_of_requirements_test(text, tmp_path):
    root = EXAMPLE.parents[1]
    pinned = re.findall(r"^([\w-]+)==", (root / "requirements-test.txt").read_text(), re.MULTILINE)
    wanted = {name.lower().replace("_", "-") for name in pinned}
    modules = {
        module
        for module, names in importlib.metadata.packages_distributions().items()
        if {name.lower().replace("_", "-") for name in names} <= wanted
    }
    assert {"pytest", "transformers", "safetensors"} <= modules
    arguments = ["train.py", "--data", str(text), "--out", str(tmp_path), *TINY.split(), "--steps=2"]
    program = (
        f"import runpy, sys; sys.modules.update(dict.fromkeys({sorted(modules)})); sys.argv = {arguments}; "
    )
    program += f"sys.path.insert(0, {str(EXAMPLE)!r}); "
    program += f"runpy.run_path({str(EXAMPLE / 'train.py')!r}, run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "curve.png").exists()


def test_run_learns_and_writes_everything(text, tmp_path):
    out = tmp_path / "out"
    options = ("--steps", "30", "--lr", "1e-2", "--prompt", "All w", "--choices")
    assert train(text, out, *options, pictures=True) == 0
    records = metrics(out, timeless=False)
    assert [r["step"] for r in records] == list(range(2, 31, 2))
    assert all(math.isfinite(r["loss"]) and r["tokens_per_second"] > 0 for r in records)
    # logits of unit variance: log 256 and a half
    assert abs(records[0]["loss"] - math.log(256) - 0.5) < 0.35
    assert records[-1]["loss"] < 0.75 * records[0]["loss"]
    assert [r["step"] for r in records if "val_loss" in r] == [4, 8, 12, 16, 20, 24, 28, 30]
    assert records[-1]["val_bits_per_byte"] == records[-1]["val_loss"] / math.log(2)
    assert records[-1]["lr"] == pytest.approx(1e-3)
    load = torch.tensor([r["expert_load"] for r in records])  # [reports, layers with experts, E]
    assert load.shape == (15, 1, 4)
    assert torch.allclose(load.sum(-1), torch.ones(15, 1), atol=1e-3)
    page = (out / "choices.html").read_text()
    assert all(f">{step}</span>" in page for step in (1, 9, 17, 25)) and ">3</span>" in page  # of 4 experts
    for picture in ("curve.png", "expert_load.png"):
        assert (out / picture).read_bytes().startswith(b"\x89PNG")
    assert (out / "sample.txt").read_text().startswith("All w")
    assert not list(out.glob("*.tmp"))


@pytest.mark.parametrize("gate", ["softmax", "sigmoid", "gshard"])  # gshard draws random numbers in training
def test_resume_is_bitwise(text, tmp_path, gate):
    straight, resumed = tmp_path / "straight", tmp_path / "resumed"
    arguments = ("--steps", "6", "--gate", gate)
    assert train(text, straight, *arguments) == 0
    assert train(text, resumed, *arguments, "--stop-after", "3") == 0  # between two reports
    assert load_checkpoint(resumed)[0] == 3
    assert importlib.import_module("train").main(["--resume", "--out", str(resumed)]) == 0
    assert_same_run(straight, resumed)


def test_resume_after_a_crash_repeats_what_was_not_saved(text, tmp_path):
    straight, crashed = tmp_path / "straight", tmp_path / "crashed"
    assert train(text, straight, "--steps", "6") == 0
    assert train(text, crashed, "--steps", "6", "--stop-after", "2") == 0
    with (crashed / "metrics.jsonl").open("a") as file:
        file.write('{"run": "moe", "step": 4, "loss": 9.9}\n{"run": "mo')
    assert train(text, crashed, "--steps", "6", "--resume") == 0
    assert_same_run(straight, crashed)


def test_interrupt_saves_and_resumes(text, tmp_path):
    out = tmp_path / "out"
    command = [
        sys.executable,
        str(EXAMPLE / "train.py"),
        "--data",
        str(text),
        "--out",
        str(out),
        *TINY.split(),
    ]
    environment = os.environ | {"PYTHONPATH": str(Path(fmoe_ext.__file__).parents[1])}
    process = subprocess.Popen(
        [*command, "--steps", "100000"], env=environment, stderr=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 300
    while not (out / "metrics.jsonl").exists() or not (out / "metrics.jsonl").read_text():
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()[1]
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=300) == 130
    assert "Traceback" not in process.communicate()[1]
    step = load_checkpoint(out)[0]
    assert 2 <= step < 100000 and (out / "curve.png").exists()
    assert train(text, out, "--resume", "--steps", str(step + 2)) == 0
    assert load_checkpoint(out)[0] == step + 2
    assert metrics(out)[-1]["step"] == step + 2


def test_compare_trains_both_as_alone(text, tmp_path):
    for name, flags in (("both", ["--compare"]), ("moe", []), ("dense", ["--dense"])):
        options = ("--steps", "6", "--gate", "gshard", *flags)
        assert train(text, tmp_path / name, *options, pictures=name == "dense") == 0
    both = metrics(tmp_path / "both")
    for name in ("moe", "dense"):
        assert [r for r in both if r["run"] == name] == metrics(tmp_path / name)
    assert not (tmp_path / "dense" / "expert_load.png").exists()


def test_new_run_keeps_the_earlier_checkpoint(text, tmp_path):
    assert train(text, tmp_path / "out", "--steps", "2") == 0
    earlier = load_checkpoint(tmp_path / "out")
    assert train(text, tmp_path / "out", "--steps", "3", "--seed", "1") == 0
    (tmp_path / "out" / "checkpoints").rename(tmp_path / "newer")
    (tmp_path / "out" / "checkpoints.old").rename(tmp_path / "out" / "checkpoints")
    step, tensors = load_checkpoint(tmp_path / "out")
    assert step == earlier[0] == 2
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in earlier[1].items())


def test_diverged_run_stops_and_keeps_the_good_checkpoint(text, tmp_path, capsys):
    arguments = ("--steps", "8", "--save-every", "1", "--lr", "1e30", "--warmup", "0", "--clip", "1e30")
    assert train(text, tmp_path / "out", *arguments) == 1
    assert "lower --lr" in capsys.readouterr().err
    saved = tmp_path / "out" / "checkpoints" / "latest"
    assert not saved.exists() or load_checkpoint(tmp_path / "out")[0] < 8


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--steps 0", "0 is not a positive number"),
        (f"--seed {2**63}", "is not below 2^32"),
        ("--lr nan", "nan is not a positive number"),
        ("--top-k 5", "--top-k 5 is more than --num-experts 4"),
        ("--moe-every 3", "--moe-every 3 of --num-layers 2: no block has experts"),
        ("--d-model 18", "--d-model 18 is not a multiple"),
        ("--gate gshard --top-k 1", "topk must be 2, but got 1"),
        ("--dense --compare", "exclude each other"),
        ("--gate unknown", "invalid choice"),
        ("--resume", "--resume: there is no checkpoint in"),
        ("--expert-parallel 2", "--expert-parallel 2 does not divide the number of ranks, 1"),
        ("--data-parallel fsdp2", "--data-parallel fsdp2 shards over ranks"),
    ],
)
def test_bad_arguments(text, tmp_path, capsys, arguments, message):
    with pytest.raises(SystemExit) as stopped:
        train(text, tmp_path / "out", *arguments.split())
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_resume_with_other_settings_is_refused(text, tmp_path, capsys):
    assert train(text, tmp_path / "out", "--steps", "2") == 0
    with pytest.raises(SystemExit):
        train(text, tmp_path / "out", "--resume", "--seed", "7")
    assert "--seed is 0 in" in capsys.readouterr().err


def test_settings_that_cannot_be_read(text, tmp_path, capsys):
    assert train(text, tmp_path / "out", "--steps", "2") == 0
    settings = tmp_path / "out" / "settings.json"
    for content in ("{", "[]", None):
        settings.unlink() if content is None else settings.write_text(content)
        assert train(text, tmp_path / "out", "--resume") == 1
        assert "settings.json is missing or damaged" in capsys.readouterr().err


def test_out_that_is_a_file(text, tmp_path, capsys):
    assert train(text, text, "--steps", "2") == 1
    assert f"train.py: [Errno 17] File exists: '{text}'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "does not exist"),
        (b"", "holds no text"),
        (b"\0\1\2" * 1000, "holds no text"),
        (b"short", "one window needs 33"),
        (b"x" * 300, "the validation text of"),
    ],
)
def test_bad_data(tmp_path, capsys, content, message):
    file = tmp_path / "data.txt"
    if content is not None:
        file.write_bytes(content)
    assert train(file, tmp_path / "out", "--steps", "2") == 1
    assert message in capsys.readouterr().err


def test_folder_is_split_by_file(tmp_path):
    data = importlib.import_module("data")
    for index in range(200):
        (tmp_path / f"{index}.txt").write_text(f"text number {index} of two hundred")
    (tmp_path / ".hidden").write_text("never read")
    (tmp_path / "picture.png").write_bytes(b"\0" * 100)
    corpus = data.load_corpus(tmp_path, seq_len=8)
    train, valid = (set(bytes(part.tolist()).split(b"\0")) for part in (corpus.train, corpus.valid))
    assert train.isdisjoint(valid) and len(train | valid) == 200 and 2 <= len(valid) <= 25
    again = data.load_corpus(tmp_path, seq_len=8)
    assert torch.equal(again.train, corpus.train) and torch.equal(again.valid, corpus.valid)


@pytest.mark.parametrize("names", [("wiki.train.tokens", "wiki.valid.tokens"), ("a.train.txt", "a.val.txt")])
def test_named_split(tmp_path, names):
    for name, content in zip(
        (*names, "wiki.test.tokens"), ("train " * 50, "valid " * 40, "test " * 30), strict=True
    ):
        (tmp_path / name).write_text(content)
    for path in (tmp_path, tmp_path / names[0]):
        corpus = importlib.import_module("data").load_corpus(path, seq_len=8)
        assert bytes(corpus.train.tolist()) == ("train " * 50).strip().encode()
        assert bytes(corpus.valid.tolist()) == ("valid " * 40).strip().encode()


def test_default_corpus_and_batches():
    corpus = importlib.import_module("data").load_corpus(seq_len=64)
    assert len(corpus.train) > 4e6 and 0.01 < len(corpus.valid) / len(corpus.train) < 0.1
    inputs, targets = corpus.batch(step=3, batch_size=4, seq_len=64, seed=1)
    assert inputs.shape == targets.shape == (4, 64) and torch.equal(inputs[:, 1:], targets[:, :-1])
    assert torch.equal(corpus.batch(3, 4, 64, 1)[0], inputs)
    assert not torch.equal(corpus.batch(4, 4, 64, 1)[0], inputs)
    assert not torch.equal(corpus.batch(3, 4, 64, 2)[0], inputs)
    first = corpus.validation_batches(batch_size=3, seq_len=64, num_windows=4)[0][0][0]
    assert torch.equal(first, corpus.valid[:64].long())


@pytest.mark.parametrize(("moe_every", "moe_layers"), [(1, 2), (2, 1)])
def test_dense_model_has_the_active_parameters(moe_every, moe_layers):
    model = importlib.import_module("model")
    shape = dict(d_model=16, num_layers=2, num_heads=2, num_experts=4, d_hidden=8, top_k=2, gate="softmax")
    moe = model.LanguageModel(model.ModelConfig(**shape, moe_every=moe_every))
    total, active = moe.num_parameters()
    assert [type(block.mlp).__name__ for block in moe.blocks[::-1]][:moe_every] == (
        ["FMoETransformerMLP", "DenseMLP"][:moe_every]
    )
    dense, _ = model.LanguageModel(model.ModelConfig(**shape, dense=True)).num_parameters()
    assert active == dense + moe_layers * (16 + 1) * 4  # the gates
    assert total == active + moe_layers * 2 * 3 * 16 * 8  # two idle experts of three matrices


@pytest.mark.parametrize("gate", GATES)
def test_every_gate_trains(text, tmp_path, gate):
    out = tmp_path / "out"
    draws = gate in ("zero", "uniform")  # the extremes of a load
    assert train(text, out, "--steps", "4", "--gate", gate, pictures=draws) == 0
    records = metrics(out)
    assert [r["step"] for r in records] == [2, 4]
    for record in records:
        assert math.isfinite(record["loss"])
        for share, dropped in zip(record["expert_load"], record["dropped_share"], strict=True):
            assert sum(share) == pytest.approx(1, abs=1e-3)
            assert 0 <= dropped < 1
            assert gate != "zero" or share == [1, 0, 0, 0]
            assert gate != "uniform" or max(share) - min(share) < 1e-3
    assert not draws or (out / "expert_load.png").read_bytes().startswith(b"\x89PNG")


def test_learning_rate_schedule():
    learning_rate = importlib.import_module("runs").learning_rate
    arguments = ["--steps", "100", "--warmup", "10", "--lr", "1"]
    options = importlib.import_module("options").build_parser().parse_args(arguments)
    assert learning_rate(options, 1) == pytest.approx(0.1)
    assert learning_rate(options, 10) == 1.0
    assert learning_rate(options, 55) == pytest.approx(0.55)
    assert learning_rate(options, 100) == pytest.approx(0.1)


def test_resume_auto_begins_and_goes_on(text, tmp_path, monkeypatch, capsys):
    straight, restarted = tmp_path / "straight", tmp_path / "restarted"
    assert train(text, straight, "--steps", "6") == 0
    for stop in ("2", "4", "6"):
        assert train(text, restarted, "--steps", "6", "--resume", "auto", "--stop-after", stop) == 0
    assert_same_run(straight, restarted)
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    with pytest.raises(SystemExit):
        train(text, tmp_path / "anew", "--steps", "6")
    assert "add --resume auto" in capsys.readouterr().err


def test_resume_past_the_end_is_refused(text, tmp_path, capsys):
    assert train(text, tmp_path / "out", "--steps", "4") == 0
    assert train(text, tmp_path / "out", "--resume", "--steps", "3") == 1
    assert "is at step 4, past --steps 3" in capsys.readouterr().err


def test_epochs_read_every_window_once():
    data = importlib.import_module("data")
    text = torch.arange(0, 250, dtype=torch.uint8)
    corpus = data.Corpus(text, text, "numbers")
    per_epoch, seq_len = (250 - 7) // 7, 7
    places = [
        place
        for step in range(1, 1 + 2 * per_epoch // 2)
        for place in corpus.batch(step, 2, seq_len, seed=3, order="epochs")[0][:, 0].tolist()
    ]
    first, second = places[:per_epoch], places[per_epoch:]
    for epoch in (first, second):
        assert len(set(epoch)) == len(epoch)
        assert {b - a for a, b in zip(sorted(epoch), sorted(epoch)[1:], strict=False)} == {seq_len}
        assert sorted(epoch) != epoch
    assert first != second and len(places) == 2 * per_epoch
    inputs, targets = corpus.batch(5, 2, seq_len, seed=3, order="epochs")
    assert torch.equal(inputs[:, 1:], targets[:, :-1])


def test_speed_and_memory_are_reported(text, tmp_path):
    assert train(text, tmp_path / "out", "--steps", "2") == 0
    (record,) = metrics(tmp_path / "out", timeless=False)
    model = importlib.import_module("model")
    shape = dict(d_model=16, num_layers=2, num_heads=2, num_experts=4, d_hidden=8, top_k=2, gate="softmax")
    language_model = model.LanguageModel(model.ModelConfig(**shape))
    active = language_model.num_parameters()[1] - 256 * 16
    assert language_model.flops_per_token(32) == 6 * active + 12 * 2 * 16 * 32
    expected = record["tokens_per_second"] * language_model.flops_per_token(32) / 1e9
    assert record["mfu"] == pytest.approx(expected, rel=0.01, abs=1e-4)
    assert 0.05 < record["memory_gib"] < 30
    job = importlib.import_module("job").Job(torch.device("cpu"))
    assert 1e7 < importlib.import_module("speed").measure_peak(job, torch.float32) < 1e14


def test_profile_says_where_the_time_goes(text, tmp_path):
    out = tmp_path / "out"
    begin = time.monotonic()
    assert train(text, out, "--steps", "9", "--compare", "--profile") == 0
    took = time.monotonic() - begin
    found = json.loads((out / "profile.json").read_text())
    seconds = {(r["run"], r["part"], r["phase"]): r["seconds"] for r in found}
    operators = {(r["run"], r["part"], r["phase"]): r["operators"] for r in found}
    for phase in ("forward", "backward"):
        for part in ("attention", "gate", "dispatch", "experts"):
            assert seconds["moe", part, phase] > 0, (part, phase)
            assert part == "attention" or ("dense", part, phase) not in seconds
        # The dense model has dense MLPs in both blocks, the other in one; the operators of a block are the same.
        assert operators["dense", "dense MLP", phase] == 2 * operators["moe", "dense MLP", phase] > 0
        assert seconds["dense", "dense MLP", phase] > 0 < seconds["moe", "dense MLP", phase]
    assert seconds["moe", "optimizer", "optimizer"] > 0
    # Five of nine steps were profiled, at hundreds of operators each.
    assert 1e-4 < 5 * sum(seconds.values()) < took
    assert (out / "profile.png").read_bytes().startswith(b"\x89PNG")


def test_tensorboard_gets_the_metrics(text, tmp_path):
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator", reason="optional")
    out = tmp_path / "out"
    assert train(text, out, "--steps", "6", "--stop-after", "3", "--tensorboard") == 0
    assert train(text, out, "--steps", "6", "--resume") == 0
    read = events.EventAccumulator(str(out / "tensorboard")).Reload()
    written = [(event.step, event.value) for event in read.Scalars("loss/moe")]
    assert written == [(r["step"], pytest.approx(r["loss"], rel=1e-6)) for r in metrics(out)]


@pytest.mark.parametrize(
    ("name", "millions", "active"), [("small", 62, 12), ("medium", 709, 114), ("large", 6714, 1077)]
)
def test_sizes_by_name(name, millions, active):
    options, model = importlib.import_module("options"), importlib.import_module("model")
    parser = options.build_parser()
    parser.set_defaults(**options.SIZES[name])
    chosen = vars(parser.parse_args(["--model", name]))
    shape = {
        field.name: chosen[field.name]
        for field in dataclasses.fields(model.ModelConfig)
        if field.name not in ("ep_size", "layer_options", "dense")
    }
    with torch.device("meta"):
        made = model.LanguageModel(model.ModelConfig(**shape))
    assert [round(count / 1e6) for count in made.num_parameters()] == [millions, active]


def write_config(folder, text):
    path = folder / "settings.yaml"
    path.write_text(text)
    return path


def test_options_come_from_a_file_and_the_command_line_wins(text, tmp_path):
    path = write_config(
        tmp_path, "# a comment\nlr: 2e-3\nnum-experts: 8\nsave_every: 7\ndense: false\nsteps: 9\n"
    )
    assert train(text, tmp_path / "out", "--config", str(path), "--steps", "2") == 0  # TINY has --num-experts
    settings = json.loads((tmp_path / "out/settings.json").read_text())
    assert {name: settings[name] for name in ("lr", "num_experts", "save_every", "dense", "steps")} == {
        **{"lr": 2e-3, "num_experts": 4, "save_every": 7, "dense": False, "steps": 2},
    }
    assert "config" not in settings


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("num_expert: 8", "settings.yaml:1: unknown option num_expert; do you mean num-experts?"),
        ("lr: 1\nlearning: 3", "settings.yaml:2: unknown option learning"),
        ("config: other.yaml", "unknown option config"),
        ("lr: fast", "invalid positive_float value: 'fast' for lr"),
        ("steps: 0", "0 is not a positive number for steps"),
        ("gate: soft", "invalid choice: 'soft'"),
        ("dense: 3", "dense is true or false, but got '3'"),
        ("steps: [1, 2]", "steps takes one value, no list or mapping"),
        ("top-k: 1\ntop_k: 2", "settings.yaml:2: top_k is given twice"),
        ("just text", "must hold `option: value` lines"),
        ("a: [", "settings.yaml cannot be read"),
    ],
)
def test_wrong_file_of_options_is_refused_by_line(lines, message, text, tmp_path, capsys):
    path = write_config(tmp_path, lines)
    assert train(text, tmp_path / "out", "--config", str(path)) == 1
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    path.unlink()
    assert train(text, tmp_path / "out", "--config", str(path)) == 1
    assert f"{path} does not exist" in capsys.readouterr().err
