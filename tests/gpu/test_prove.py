"""The child process of prove, and what it finds: on a pretended GPU with faults, and on the emulated one."""

import sys
import time
from pathlib import Path

import pytest
import torch

from fmoe_ext.gpu.__main__ import main, run
from fmoe_ext.gpu.prove import prove
from fmoe_ext.gpu.target import Unavailable
from fmoe_ext.ops import gpu_proof
from tests.gpu.targets import EMULATOR, KERNELS, PORTABLE_MS, TORCH_MS, Emulated, Pretend

OTHERS = ("up.a", "rows_by_weight.a", "grad_weight.a")


def states(proof):
    return {name: verdict.state for name, verdict in proof.verdicts.items()}


def prove_quietly(target, **options):
    lines = []
    return prove(target, say=lines.append, **options), lines


def test_a_gpu_without_faults():
    """What is right and fast is proved; what loses to the kernel that would compute without it is off."""
    proof, lines = prove_quietly(Pretend())
    assert list(proof.verdicts) == ["portable", *KERNELS]
    assert states(proof) == {
        **dict.fromkeys(["portable", *OTHERS], "proved"),
        "rows_by_weight.pairs": "slow",
        "odd.a": "untested",
    }
    reason = proof.verdicts["rows_by_weight.pairs"].reason
    assert (
        reason.startswith("grouped_gemm (T 16, K 2, E 4") and "takes 4.000 ms, 3.000 ms without it" in reason
    )
    assert "no use for it" in proof.verdicts["odd.a"].reason
    first, second = (race for race in proof.races if race.operation == "grouped_gemm")
    assert (first.kernel, first.ms, first.without_ms) == ("rows_by_weight.pairs", 4.0, 3.0)
    assert (second.kernel, second.ms, second.without_ms) == ("rows_by_weight.a", 3.0, PORTABLE_MS)
    assert first.torch_ms == TORCH_MS
    assert {race.kernel for race in proof.races} == {*OTHERS, "rows_by_weight.pairs"}
    assert "checking portable" in lines and "checking up.a" in lines


FAULTS = {  # fault: (state, reason)
    "hang": ("failed", "checking up.hang: no answer within 3 s"),
    "segfault": ("failed", "checking up.segfault: the process ended with SIGSEGV"),
    "abort": ("failed", "checking up.abort: the process ended with SIGABRT"),
    "exit": ("failed", "checking up.exit: the process ended with exit code 3"),
    "killed": ("untested", "checking up.killed: the process was killed: the host ran out of memory"),
    "out of memory": ("untested", "out of memory: CUDA out of memory. Tried to allocate 9 GiB."),
    "cuda error": ("failed", "RuntimeError: CUDA error: an illegal memory access was encountered"),
    "wrong": ("failed", "expert_mlp (T 20, K 2, E 4, D 24, H 40, swiglu, ragged, torch.bfloat16): error in"),
    "nan": ("failed", "torch.bfloat16): not finite at [0, 0]"),
    "other bits": ("failed", "has other bits the second time"),
}
END_THE_PROCESS = ("hang", "segfault", "abort", "exit", "killed", "cuda error")


def test_faulty_kernels_are_off_and_the_others_are_proved(tmp_path, capfd):
    log, kernels = tmp_path / "pids", {f"up.{fault}": 5.0 for fault in FAULTS}
    target = Pretend({f"up.{fault}": fault for fault in FAULTS}, log, kernels)
    proof, _ = prove_quietly(target, limit=3.0)
    for fault, (state, reason) in FAULTS.items():
        verdict = proof.verdicts[f"up.{fault}"]
        assert verdict.state == state and reason in verdict.reason, fault
    assert states(proof) == {**states(proof), **dict.fromkeys(["portable", *OTHERS], "proved")}
    assert {race.kernel for race in proof.races} == {*OTHERS, "rows_by_weight.pairs"}
    pids = log.read_text().split()
    assert len(pids) == 1 + len(END_THE_PROCESS)
    assert not any(Path("/proc", pid).exists() for pid in pids)


def test_faults_in_a_race(capfd):
    proof, _ = prove_quietly(Pretend({"grad_weight.a": "races: hang", "up.a": "races: segfault"}), limit=3.0)
    assert states(proof)["grad_weight.a"] == states(proof)["up.a"] == "failed"
    assert "gradient of the rows" in proof.verdicts["grad_weight.a"].reason
    assert "expert_mlp (T 16" in proof.verdicts["up.a"].reason
    assert states(proof)["rows_by_weight.a"] == "proved"
    assert {race.kernel for race in proof.races} == {"rows_by_weight.a", "portable"}


def test_out_of_memory_in_a_race_is_no_verdict():
    proof, _ = prove_quietly(Pretend({"grad_weight.a": "races: out of memory"}))
    assert states(proof)["grad_weight.a"] == "proved"
    assert {race.operation for race in proof.races} == {"grouped_gemm"}


def test_wrong_portable_kernels():
    proof, _ = prove_quietly(Pretend({"portable": "wrong"}))
    assert states(proof) == {"portable": "failed", **dict.fromkeys(KERNELS, "untested")}
    assert not proof.races


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("no gpu", "there is no CUDA device 0: torch sees 0"),
        ("segfault", "the process ended with SIGSEGV"),
    ],
)
def test_a_gpu_that_cannot_be_used(fault, reason, capfd):
    with pytest.raises(Unavailable, match=reason):
        prove_quietly(Pretend({"connect": fault}))


def test_a_gpu_that_never_answers():
    begin = time.monotonic()
    with pytest.raises(Unavailable, match="did not start within the time given"):
        prove_quietly(Pretend({"connect": "hang"}), budget=2.0)
    assert time.monotonic() - begin < 30


def test_out_of_time():
    """What was found until then is kept; the kernel that was being checked is not blamed."""
    proof, lines = prove_quietly(Pretend({"rows_by_weight.a": "hang"}), budget=20.0)
    assert states(proof)["portable"] == "proved"
    assert proof.verdicts["rows_by_weight.a"] == gpu_proof.Verdict("untested", "there was no time left")
    assert lines[-1] == "there is no time left"


def test_command(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert run(Pretend({"up.a": "wrong"}), 60.0, 300.0) == 1
    out = capfd.readouterr().out
    (file,) = (tmp_path / "fmoe_ext" / "gpu").iterdir()
    assert f"kept in {file}" in out
    assert "3 proved, 1 failed, 1 slow, 1 untested" in out
    key = gpu_proof.Key("Pretended GPU", "1.0", torch.__version__, "0123")
    proof = gpu_proof.load(key)
    assert proof.named("proved").keys() == {"portable", "rows_by_weight.a", "grad_weight.a"}
    assert proof.races and proof.races[0].torch_ms == TORCH_MS
    file.parent.chmod(0o500)
    try:
        if not is_writable(file.parent):  # root writes anywhere
            assert run(Pretend(), 60.0, 300.0) == 2
            assert "set XDG_CACHE_HOME" in capfd.readouterr().err
    finally:
        file.parent.chmod(0o700)


def is_writable(folder):
    try:
        (folder / "probe").touch()
        (folder / "probe").unlink()
    except OSError:
        return False
    return True


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu(capfd, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert main(["prove"]) == 2
    assert "nothing was proved: " in capfd.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.fixture
def needs_emulator(monkeypatch):
    monkeypatch.syspath_prepend(str(EMULATOR))
    import emu_build

    if reason := emu_build.missing():
        pytest.skip(f"the emulator cannot be built: {reason}")
    emu_build.build("plain", emu_build.OPS)
    yield
    sys.modules.pop("emu_build", None)


def test_the_emulated_gpu(needs_emulator):
    proof, _ = prove_quietly(Emulated())
    assert {name: v for name, v in proof.verdicts.items() if v.state != "proved"} == {}
    assert {"up.128x256", "grad_hidden.128x128", "portable"} <= proof.verdicts.keys()
    assert {race.kernel.split(".")[0] for race in proof.races} >= {"up", "rows_by_weight", "grad_weight"}


def test_an_emulated_gpu_that_no_kernel_is_for(needs_emulator):
    proof, _ = prove_quietly(Emulated(capability=80))
    assert states(proof).pop("portable") == "proved"
    assert set(states(proof).values()) == {"proved", "untested"}
    assert {race.kernel for race in proof.races} == {"portable"}
