"""The child process of prove, and what it finds: on a pretended GPU with faults, and on the emulated one."""

import multiprocessing
import time
from pathlib import Path
from types import SimpleNamespace

import emu_build
import pytest
import torch

from fmoe_ext.gpu import kernels as gpu_kernels
from fmoe_ext.gpu import proof as gpu_proof
from fmoe_ext.gpu.child import Work
from fmoe_ext.gpu.cli import main, run
from fmoe_ext.gpu.proof import summary
from fmoe_ext.gpu.prove import prove
from fmoe_ext.gpu.races import OPERATIONS, PRODUCTS, Course, Race, Races, Start
from fmoe_ext.gpu.target import Target, Unavailable
from tests.gpu.targets import KERNELS, PORTABLE_MS, TORCH_MS, Chosen, Emulated, Pretend

OTHERS = ("up.a", "rows_by_weight.a", "grad_weight.a")


@pytest.fixture(autouse=True)
def start_method(request, monkeypatch):
    """In one test child processes are spawned as users have them, else forked from the server of tests.forked."""
    if request.function is not test_prove_sound_gpu_proves_all:
        forks = SimpleNamespace(get_context=lambda _: multiprocessing.get_context("forkserver"))
        monkeypatch.setattr("fmoe_ext.gpu.prove.multiprocessing", forks)


def states(proof):
    return {name: verdict.state for name, verdict in proof.verdicts.items()}


def prove_quietly(target, **options):
    lines = []
    return prove(target, say=lines.append, **options), lines


def won(proof, numbers):
    return {win.product: win for win in proof.torch_wins if win.numbers == numbers}


EVERY_PRODUCT = {products[0] for products in PRODUCTS.values() if len(products) == 1}


def test_prove_sound_gpu_proves_all():
    """Right and fast kernels are proved; a kernel that loses to the one it replaces is off."""
    proof, lines = prove_quietly(Pretend())
    assert list(proof.verdicts) == ["portable", *KERNELS]
    assert states(proof) == {
        **dict.fromkeys(["portable", *OTHERS], "proved"),
        "rows_by_weight.pairs": "slow",
        "odd.a": "untested",
    }
    reason = proof.verdicts["rows_by_weight.pairs"].reason
    assert reason == (  # 4 / 3 alone, (5 + 4) / (5 + 3) beside up.a
        "1.22 times as long as without it in the mean of 2 races; "
        "grouped_gemm (T 16, K 2, E 4, D 16, H 8, swiglu, even) takes 4.000 ms, 3.000 ms without it"
    )
    assert "no use for it" in proof.verdicts["odd.a"].reason
    first, second, whole = (race for race in proof.races if race.operation == "grouped_gemm")
    assert whole.shape.endswith("float32, TF32 allowed") and whole.kernel == "portable"
    assert (first.kernel, first.ms, first.without_ms) == ("rows_by_weight.pairs", 4.0, 3.0)
    assert (second.kernel, second.ms, second.without_ms) == ("rows_by_weight.a", 3.0, PORTABLE_MS)
    assert first.torch_ms == TORCH_MS
    assert {race.kernel for race in proof.races} == {*OTHERS, "rows_by_weight.pairs", "portable"}
    assert "checking portable" in lines and "checking up.a" in lines


def test_torch_takes_what_it_computes_faster():
    """At 4 ms torch wins every product but that of rows_by_weight.a, 3 ms: it takes 4 + 3 ms of expert_mlp's 5 + 3."""
    proof, lines = prove_quietly(Pretend(torch_ms=4.0))
    wins = won(proof, "16 bits")
    assert wins.keys() == EVERY_PRODUCT - {"rows_by_weight"}
    assert wins["up"] == gpu_proof.TorchWin("up", "16 bits", "few", 8.0, 7.0)
    assert states(proof)["up.a"] == "beaten" and states(proof)["rows_by_weight.a"] == "proved"
    reason = "torch is faster in all of its races: up (16 bits, few) takes 8.000 ms, 7.000 ms by torch"
    assert proof.verdicts["up.a"].reason == reason
    text = summary(proof)
    assert "torch's product for up, 16 bits, under 64 rows per expert: 7.000 ms, ours 8.000" in text
    assert f"beaten: up.a ({reason})" in text
    choice = gpu_kernels.choose("auto", list(KERNELS), proof)
    assert "up/16 bits/few" in choice.torch_wins and "up.a" in choice.kernels


def test_main_gradients_race_apart():
    """Torch's 7 ms lose to 6 of grad_weight.a; without that kernel they win 10, into main gradients as well."""
    assert "main_grad" not in won(prove_quietly(Pretend(torch_ms=7.0))[0], "16 bits")
    proof, _ = prove_quietly(Pretend({"grad_weight.a": "wrong"}, torch_ms=7.0))
    assert won(proof, "16 bits")["main_grad"] == gpu_proof.TorchWin("main_grad", "16 bits", "few", 10.0, 7.0)


@pytest.mark.parametrize(("torch_ms", "products"), [(7.0, EVERY_PRODUCT), (9.6, set())])
def test_torch_takes_float32_where_its_rounded_product_is_faster(torch_ms, products):
    """10 ms a product."""
    proof, _ = prove_quietly(Pretend(torch_ms=torch_ms))
    assert set(won(proof, "tf32")) == products


def test_torch_needs_five_per_cent():
    assert "grad_weight" not in won(prove_quietly(Pretend(torch_ms=5.75))[0], "16 bits")  # 6 ms are 4 % more


def test_torch_takes_all_where_only_portable_kernels_are_there():
    """As on a GPU without kernels of ours: 10 ms a product."""
    proof, _ = prove_quietly(Pretend({name: "wrong" for name in KERNELS}, torch_ms=7.0))
    assert set(won(proof, "16 bits")) == EVERY_PRODUCT
    assert states(proof)["portable"] == "proved"


@pytest.mark.parametrize("mode", ["torch", "proved", "auto"])
def test_neither_the_environment_nor_an_old_proof_decides_what_is_checked(mode, tmp_path, monkeypatch):
    """torch's in place of ours would be found right, and no kernel would have run."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    if mode == "auto":  # after a failure, say of the driver
        failed = {"portable": gpu_proof.Verdict("failed", "wrong", "0123")}
        gpu_proof.Proof(gpu_proof.Key("Pretended GPU", 90), "", "", failed).save()
    found = states(prove_quietly(Chosen(mode))[0])
    assert found == {
        **dict.fromkeys(["portable", *OTHERS], "proved"),
        "rows_by_weight.pairs": "slow",
        "odd.a": "untested",
    }


def test_missing_takes_over_what_is_right_and_races(tmp_path, monkeypatch):
    """Verdicts of another model of the capability: right kernels are raced here, failed ones stay off."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    known = {name: gpu_proof.Verdict("proved", "", "0123") for name in ("portable", *KERNELS)}
    known |= {
        "up.a": gpu_proof.Verdict("failed", "wrong", "0123"),
        "rows_by_weight.a": gpu_proof.Verdict("slow", "there", "0123"),
        "grad_weight.a": gpu_proof.Verdict("proved", "", "of other sources"),
    }
    gpu_proof.Proof(gpu_proof.Key("Other GPU", 90), "", "", known).save()
    proof, lines = prove_quietly(Pretend(), missing=True)
    assert [line for line in lines if line.startswith("checking")] == ["checking grad_weight.a"]
    assert states(proof) == {
        **dict.fromkeys(["portable", "rows_by_weight.a", "grad_weight.a", "odd.a"], "proved"),
        "rows_by_weight.pairs": "slow",
        "up.a": "failed",
    }
    assert {verdict.sources for verdict in proof.verdicts.values()} == {"0123"}
    assert proof.key.gpu == "Pretended GPU" and proof.races


# ---- faults that end the process
FATAL = {  # fault: (state, reason)
    "hang": ("failed", "checking up.hang: no answer within 15 s"),
    "segfault": ("failed", "checking up.segfault: the process ended with SIGSEGV"),
    "abort": ("failed", "checking up.abort: the process ended with SIGABRT"),
    "exit": ("failed", "checking up.exit: the process ended with exit code 3"),
    "killed": (
        "untested",
        "checking up.killed: the process was killed: the host ran out of memory, or somebody ended it",
    ),
    "cuda error": ("failed", "RuntimeError: CUDA error: an illegal memory access was encountered"),
}


@pytest.mark.long
def test_fatal_kernels_are_off_and_the_others_are_proved(tmp_path, capfd):
    log, kernels = tmp_path / "pids", {f"up.{fault}": 5.0 for fault in FATAL}
    faults = {f"up.{fault}": fault for fault in FATAL} | {"grad_weight.a": "races: segfault"}
    proof, _ = prove_quietly(Pretend(faults, log, kernels), limit=15.0)
    for fault, (state, reason) in FATAL.items():
        verdict = proof.verdicts[f"up.{fault}"]
        assert (verdict.state, verdict.reason) == (state, reason), fault
    assert proof.verdicts["grad_weight.a"].state == "failed"
    assert proof.verdicts["grad_weight.a"].reason.endswith("swiglu, even): the process ended with SIGSEGV")
    assert states(proof) == {
        **states(proof),
        **dict.fromkeys(["portable", "up.a", "rows_by_weight.a"], "proved"),
    }
    # races are those of the last process
    assert {race.kernel for race in proof.races} == {
        "portable", "up.a", "rows_by_weight.a", "rows_by_weight.pairs"
    }  # fmt: skip
    pids = log.read_text().split()
    assert len(pids) == 1 + len(FATAL) + 1
    assert not any(Path("/proc", pid).exists() for pid in pids)


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("no gpu", "there is no CUDA device 0: torch sees 0"),
        ("segfault", "the process ended with SIGSEGV"),
        ("hang", "no answer within 1 s"),
    ],
)
def test_prove_unusable_gpu_keeps_findings(fault, reason, capfd):
    with pytest.raises(Unavailable, match=reason):
        prove_quietly(Pretend({"connect": fault}), start_limit=1.0 if fault == "hang" else 120.0)


def test_device_of_a_negative_number_is_refused_by_name(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(Unavailable, match="there is no CUDA device -1: torch sees 1"):
        Target(-1).connect()


def test_out_of_time(monkeypatch):
    """Earlier findings are kept; the kernel that was being checked is not blamed."""
    lines = []
    over = 1000.0  # seconds, more than the budget
    clock = SimpleNamespace(
        monotonic=lambda: time.monotonic() + over * ("checking rows_by_weight.a" in lines)
    )
    monkeypatch.setattr("fmoe_ext.gpu.prove.time", clock)
    proof = prove(Pretend({"rows_by_weight.a": "hang"}), say=lines.append)
    assert states(proof)["portable"] == states(proof)["up.a"] == "proved"
    assert proof.verdicts["rows_by_weight.a"] == gpu_proof.Verdict(
        "untested", "there was no time left", "0123"
    )
    assert lines[-1] == "there is no time left"


# ---- faults that the process survives, in this one
class Sent(list):
    send = list.append


def judge(target, race=False):
    """The verdicts and races of one process, and whether it could go on to the end."""
    target.connect()
    sent, threads = Sent(), torch.get_num_threads()
    try:
        work = Work(sent, target, {})
        done = work.check(["portable", *gpu_kernels.names()])
        if race:
            work.race([name for name in gpu_kernels.names() if work.judged[name].state == "proved"])
    finally:
        target.disconnect()
        torch.set_num_threads(threads)
    return work.judged, sent, done


@pytest.mark.parametrize(
    ("fault", "state", "reason"),
    [
        ("out of memory", "untested", "out of memory: CUDA out of memory. Tried to allocate 9 GiB."),
        (
            "wrong",
            "failed",
            "expert_mlp (T 20, K 2, E 4, D 24, H 40, swiglu, ragged, torch.bfloat16): error in",
        ),
        ("nan", "failed", "torch.bfloat16): not finite at [0, 0]"),
        ("other bits", "failed", "has other bits the second time"),
    ],
)
def test_faults_that_leave_the_process_alive(fault, state, reason):
    verdicts, _, done = judge(Pretend({"up.a": fault}))
    assert done and verdicts["up.a"].state == state and reason in verdicts["up.a"].reason
    assert [verdicts[name].state for name in ("portable", "rows_by_weight.a", "grad_weight.a")] == [
        "proved"
    ] * 3


def test_wrong_portable_kernels():
    verdicts, _, _ = judge(Pretend({"portable": "wrong"}))
    assert verdicts.pop("portable").state == "failed"
    assert {verdict.state for verdict in verdicts.values()} == {"untested"} and len(verdicts) == len(KERNELS)


def test_out_of_memory_in_a_race_is_no_verdict():
    verdicts, sent, _ = judge(Pretend({"grad_weight.a": "races: out of memory"}), race=True)
    assert verdicts["grad_weight.a"].state == "proved"
    races = [event for event in sent if isinstance(event, gpu_proof.Race)]
    assert {race.operation for race in races if "float32" not in race.shape} == set(OPERATIONS[:2])
    stop = next(event for event in sent if isinstance(event, Start) and "out of memory" in event.what)
    assert stop.what.startswith("out of memory: no more races of T 16") and stop.kernels == ()


def test_kernels_of_a_race_are_named_before_their_first_run_is_waited_for():
    """A kernel that hung at a raced shape alone was waited for as torch's or another step's, and stayed on."""
    target, sent, threads = Pretend(), [], torch.get_num_threads()
    target.connect()
    runs, waits = dict(target.counts), []

    def wait():
        waits.append((sent[-1], {kernel for kernel, count in target.counts.items() if count > runs[kernel]}))

    target.synchronize = wait
    try:
        for event in Races(target, list(KERNELS)).run():
            sent.append(event)
            if isinstance(event, Race):  # the end of an operation
                runs.update(target.counts)
    finally:
        target.disconnect()
        torch.set_num_threads(threads)
    assert all(isinstance(start, Start) and ran <= set(start.kernels) for start, ran in waits)
    assert {kernel for _, ran in waits for kernel in ran} >= {"up.a", "rows_by_weight.pairs", "grad_weight.a"}


def test_values_of_a_graph_and_of_streams_are_compared():
    class Stale(Pretend):
        def captured(self, function):
            found = function()
            return lambda: found  # not what the inputs hold by now

    class Racy(Pretend):
        def side_by_side(self, functions):
            return [functions[0](), functions[0]()]

    assert "differs in a CUDA graph" in judge(Stale())[0]["portable"].reason
    assert "differs on two streams at once" in judge(Racy())[0]["portable"].reason


# ---- the command
def test_command(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert run(Pretend({"up.a": "wrong"}), 60.0, 300.0) == 1
    out = capfd.readouterr().out
    (file,) = (tmp_path / "fmoe_ext" / "gpu").iterdir()
    assert f"kept in {file}" in out
    assert "3 proved, 1 failed, 1 slow, 1 untested" in out
    key = gpu_proof.Key("Pretended GPU", 90)
    proof = gpu_proof.load(key, dict.fromkeys(("portable", *KERNELS), "0123"))
    assert proof.in_state("proved").keys() == {"portable", "rows_by_weight.a", "grad_weight.a"}
    assert proof.races and proof.races[0].torch_ms == TORCH_MS


def test_proof_unwritable_folder_is_reported(tmp_path, monkeypatch, capsys):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    proof = gpu_proof.Proof(gpu_proof.Key("a", 90), "driver 1, torch 2", "now", {})
    monkeypatch.setattr("fmoe_ext.gpu.cli.prove", lambda *_, **__: proof)
    assert run(Pretend(), 60.0, 300.0) == 2
    assert "set XDG_CACHE_HOME" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu(capfd, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert main(["prove"]) == 2
    assert "nothing was proved: " in capfd.readouterr().err
    assert not list(tmp_path.iterdir())


def test_prove_without_cuda_build_starts_no_process():
    """Importing torch once more takes seconds, in which the command said nothing."""
    target, lines = Pretend(), []
    target.missing = "these kernels need a GPU that is not a pretended one"
    with pytest.raises(Unavailable, match=target.missing):
        prove(target, say=lines.append)
    assert lines == []


def test_one_bad_race_among_good_ones_is_no_loss():
    """0.9 in six races and 1.2 in one: a mean of 0.94. With 1.2 in all of them the kernel has lost, by the mean."""
    pretend = Pretend()
    races = Races(pretend, ["up.a", "grad_weight.a"])
    for i, operation in enumerate(OPERATIONS):
        course = Course(pretend.races[0], operation, torch.bfloat16)
        for kernel, ms in (("up.a", 1.2 if i == 2 else 0.9), ("grad_weight.a", 1.2)):
            races.races[kernel, course] = Race(operation, course.shape, kernel, ms, 1.0, None)
    kernel, verdict = races._slowest()
    assert (kernel, verdict.state) == ("grad_weight.a", "slow")
    assert verdict.reason.startswith(
        "1.20 times as long as without it in the mean of 7 races; grouped_gemm (T 16"
    )
    races.races = {key: race for key, race in races.races.items() if key[0] == "up.a"}
    assert races._slowest() is None


@pytest.fixture
def needs_emulator():
    if reason := emu_build.missing():
        pytest.skip(f"the emulator cannot be built: {reason}")
    emu_build.build("plain", emu_build.OPS)


@pytest.mark.long
def test_prove_emulated_gpu(needs_emulator):
    kernels = ("up.128x256", "rows_by_weight.128x192", "grad_hidden.128x128", "grad_weight.128x256")
    proof, _ = prove_quietly(Emulated(kernels), limit=600.0, budget=1200.0)
    assert states(proof) == dict.fromkeys(("portable", *kernels), "proved")
    # nothing for the gradient of the rows
    assert {race.kernel for race in proof.races} == {"portable", *kernels}
