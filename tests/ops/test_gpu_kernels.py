"""FMOE_GPU_KERNELS: what is chosen, when, with which words; the file that a proof is kept in."""

import dataclasses
import json
import os
import shutil
import warnings

import pytest
import sources_digest
import torch

from fmoe_ext import info, ops
from fmoe_ext.gpu import kernels as gpu_kernels
from fmoe_ext.gpu import proof as gpu_proof
from fmoe_ext.gpu import torch_path
from fmoe_ext.gpu.proof import Key, Proof, Race, Verdict
from fmoe_ext.gpu.torch_path import tf32, tf32_allowed
from fmoe_ext.ops import expert_mlp, grouped_gemm
from tests.gpu.targets import define_switches
from tests.ops.test_expert_mlp import Problem
from tests.ops.test_grouped_gemm import make_inputs

KEY = Key("NVIDIA H100 80GB HBM3", "0123456789abcdef")
TAKEN_WITH = "driver 550.54.15, torch 2.13.0"
KERNELS = ("up.128x256", "rows_by_weight.64x192", "grad_weight.128x256")
MODES = ("auto", "proved", "all", "portable", "torch")


def proof(portable="proved", key=KEY, **states):
    verdicts = {name: Verdict(state.replace("_", " "), "why") for name, state in states.items()}
    return Proof(
        key, TAKEN_WITH, "2026-11-22T00:00:00+00:00", {"portable": Verdict(portable, "why"), **verdicts}
    )


FOUND = {"up.128x256": "proved", "rows_by_weight.64x192": "slow", "grad_weight.128x256": "failed"}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("FMOE_GPU_KERNELS", raising=False)
    return tmp_path / "fmoe_ext" / "gpu"


# ---- the choice
def test_only_proved_kernels_are_used():
    for mode in ("auto", "proved"):
        choice = gpu_kernels.choose(mode, KERNELS, proof(**FOUND))
        assert choice == gpu_kernels.Choice(frozenset({"up.128x256"}))
    gone = proof(**FOUND, **{"old.kernel": "proved"})  # a name that this build lacks
    assert gpu_kernels.choose("auto", KERNELS, gone).kernels == {"up.128x256"}


def test_beaten_kernels_stay_for_what_torch_cannot_take():
    found = proof(**{**FOUND, "rows_by_weight.64x192": "beaten"})
    assert gpu_kernels.choose("proved", KERNELS, found).kernels == {"up.128x256", "rows_by_weight.64x192"}


@pytest.mark.parametrize("found", [None, proof(**FOUND), proof(portable="failed")])
def test_modes_that_need_no_proof(found):
    choose = gpu_kernels.choose
    assert choose("all", KERNELS, found) == gpu_kernels.Choice(frozenset(KERNELS))
    assert choose("portable", KERNELS, found) == gpu_kernels.Choice(frozenset())
    assert choose("torch", KERNELS, found) == gpu_kernels.Choice(frozenset(), torch=True)


def test_without_a_proof():
    choice = gpu_kernels.choose("auto", KERNELS, None, device=3)
    assert (choice.kernels, choice.torch) == (frozenset(), False)
    assert "`python -m fmoe_ext.gpu prove --device 3` once" in choice.warning
    assert "portable kernels are used" in choice.warning
    with pytest.raises(
        RuntimeError, match=r"run `python -m fmoe_ext.gpu prove` once .* or unset FMOE_GPU_KERNELS"
    ):
        gpu_kernels.choose("proved", KERNELS, None)


def test_portable_kernels_that_failed():
    choice = gpu_kernels.choose("auto", KERNELS, proof("failed", **FOUND))
    assert choice.torch and not choice.kernels
    assert "portable kernels of fmoe_ext failed on CUDA device 0 (why): torch's" in choice.warning
    with pytest.raises(RuntimeError, match="FMOE_GPU_KERNELS=torch"):
        gpu_kernels.choose("proved", KERNELS, proof("failed"))
    assert not gpu_kernels.choose("auto", KERNELS, proof("untested", **FOUND)).torch


# ---- when it is made: CPU tensors stand for those of a GPU
class Switches:
    """The operators of cuda/ops_select.cpp; everything on, as in a module just loaded."""

    def __init__(self):
        self.on, self.calls = list(KERNELS), []
        self.library = define_switches(lambda: list(KERNELS), self.switch, lambda: [0] * len(KERNELS))

    def switch(self, names):
        self.on = names
        self.calls.append(names)


@pytest.fixture
def switches():
    if ops.cuda_module_missing is None:
        pytest.skip("pretends the switches of CUDA kernels, which this build has")
    switches = Switches()
    yield switches
    del switches.library


def selection(monkeypatch, key_of=lambda device: KEY):
    chosen = gpu_kernels.Selection("cpu", key_of)
    monkeypatch.setattr(gpu_kernels, "SELECTION", chosen)
    return chosen


def call():
    x, weight, offs, _, _ = make_inputs(9, 16, 24, [4, 9], torch.bfloat16)
    return grouped_gemm(x, weight, offs)


def test_warns_once_and_takes_the_portable_kernels(switches, monkeypatch):
    selection(monkeypatch).prepare()
    assert switches.on == []  # before any call
    with pytest.warns(UserWarning, match="python -m fmoe_ext.gpu prove"):
        call()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        call()
        Problem(5, 2, 3, 8, 8, torch.float32).call(expert_mlp, Problem(5, 2, 3, 8, 8, torch.float32).tensors)
    assert switches.on == []


@pytest.fixture
def by_torch(monkeypatch):
    """Calls that torch_path computed, by operator."""
    seen, depth = [], []

    def spied(name, function):
        def call(*given):
            seen.extend([name] * (not depth))  # these functions call each other
            depth.append(name)
            try:
                return function(*given)
            finally:
                depth.pop()

        return call

    for names in torch_path.TORCH_OPERATORS.values():
        for name in names:
            monkeypatch.setattr(torch_path, name, spied(name, getattr(torch_path, name)))
    return seen


def gradients(function, *tensors):
    leaves = [t.detach().requires_grad_() for t in tensors]
    y = function(*leaves)
    return [y.detach(), *torch.autograd.grad(y, leaves, torch.ones_like(y))]


def test_torch_computes_what_it_won(switches, monkeypatch, by_torch):
    """By operator, dtype and rows an expert; with a bias, or widths that torch would copy, the kernels compute."""
    x, weight, offs, bias, _ = make_inputs(9, 16, 24, [4, 9], torch.bfloat16)
    many = make_inputs(128, 16, 24, [64, 128], torch.bfloat16)
    expected = gradients(lambda *t: grouped_gemm(*t, offs), x, weight)
    win = gpu_proof.TorchWin("grouped_gemm_backward", "16 bits", "few", 2.0, 1.0)
    dataclasses.replace(proof(**FOUND), torch_wins=(win,)).save()
    chosen = selection(monkeypatch)
    chosen.prepare()
    found = gradients(lambda *t: grouped_gemm(*t, offs), x, weight)
    assert by_torch == ["grouped_gemm_backward"]
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs)
    gradients(lambda *t: grouped_gemm(*t, many[2]), many[0], many[1])  # 64 rows an expert
    gradients(lambda x, w, b: grouped_gemm(x, w, offs, b), x, weight, bias)
    gradients(lambda *t: grouped_gemm(*t, offs), x.float(), weight.float())
    narrow = make_inputs(9, 12, 24, [4, 9], torch.bfloat16)
    gradients(lambda *t: grouped_gemm(*t, narrow[2]), narrow[0], narrow[1])
    assert by_torch == ["grouped_gemm_backward"]
    chosen._take_torch_where(frozenset())
    gradients(lambda *t: grouped_gemm(*t, offs), x, weight)
    assert by_torch == ["grouped_gemm_backward"]


def test_torch_computes_expert_mlp_where_it_won(switches, monkeypatch, by_torch):
    wins = [
        gpu_proof.TorchWin(operator, "tf32", "few", 2.0, 1.0)
        for operator in ("expert_mlp", "expert_mlp_backward")
    ]
    dataclasses.replace(proof(**FOUND), torch_wins=tuple(wins)).save()
    problem = Problem(5, 2, 3, 8, 8, torch.float32, bias=False)
    leaves = [problem.tensors[name] for name in ("x", "w1", "w2")]

    def mlp(x, w1, w2):
        return problem.call(expert_mlp, {**problem.tensors, "x": x, "w1": w1, "w2": w2})

    expected = gradients(mlp, *leaves)
    chosen = selection(monkeypatch)
    chosen.prepare()
    gradients(mlp, *leaves)
    assert by_torch == []  # torch does not allow TF32
    with tf32(True):
        found = gradients(mlp, *leaves)
    assert by_torch == ["expert_mlp", "expert_mlp_backward"]
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs)


def let_torch_win_all(monkeypatch):
    """A proof in which torch's product is faster in bfloat16, and a selection that finds it."""
    wins = [gpu_proof.TorchWin(name, "16 bits", "few", 2.0, 1.0) for name in torch_path.TORCH_OPERATORS]
    dataclasses.replace(proof(**FOUND), torch_wins=tuple(wins)).save()
    selection(monkeypatch).prepare()


def test_missing_tensor_is_refused_by_the_kernel_where_torch_won(switches, monkeypatch):
    let_torch_win_all(monkeypatch)
    x, weight, offs, _, _ = make_inputs(9, 16, 24, [4, 9], torch.bfloat16)
    grouped_gemm(x, weight, offs)  # the first call chooses
    for name, given in (
        ("grouped_gemm", (x, None, offs, None)),
        ("grouped_gemm_backward", (x, None, weight, offs, [True, True, False])),
        ("expert_mlp", (x, None, None, offs, weight, None, weight, None, None, 0, True, False)),
    ):
        with pytest.raises(RuntimeError, match="must be a tensor, but got None"):
            getattr(torch.ops.fmoe_ext, name)(*given)


@torch.no_grad()
def test_needs_of_another_number_are_refused_by_the_kernel_where_torch_won(switches, monkeypatch):
    let_torch_win_all(monkeypatch)
    x, weight, offs, _, grad = make_inputs(9, 16, 24, [4, 9], torch.bfloat16)
    grouped_gemm(x, weight, offs)  # the first call chooses
    with pytest.raises(RuntimeError, match=r"needs must have 3 entries .* but got 1"):
        torch.ops.fmoe_ext.grouped_gemm_backward(grad, x, weight, offs, [True])
    rows = torch.arange(9, dtype=torch.int32)
    w2, h = torch.zeros(2, 16, 24, dtype=torch.bfloat16), torch.zeros(9, 24, dtype=torch.bfloat16)
    given = (x, x, rows, rows[:, None], offs, weight, w2, None, None, h, 0, True, [])
    with pytest.raises(RuntimeError, match=r"needs must have 6 entries .* but got 0"):
        torch.ops.fmoe_ext.expert_mlp_backward(*given)


@pytest.fixture
def precision():
    """Put the precision back that a test has set."""
    yield
    torch.set_float32_matmul_precision("highest")
    for module in (torch.backends.mkldnn.matmul, torch.backends.cuda.matmul, torch.backends):
        module.fp32_precision = "none"


@pytest.mark.parametrize(
    ("say", "allowed"),
    [
        (lambda: None, False),  # torch's default
        (lambda: setattr(torch.backends.cuda.matmul, "fp32_precision", "tf32"), True),
        (lambda: setattr(torch.backends.cuda.matmul, "fp32_precision", "ieee"), False),
        (lambda: setattr(torch.backends, "fp32_precision", "tf32"), True),
        (lambda: torch.set_float32_matmul_precision("high"), True),
        (lambda: torch.set_float32_matmul_precision("highest"), False),
    ],
)
def test_each_switch_of_torch_allows_tf32(precision, say, allowed):
    say()
    assert tf32_allowed() == allowed


def test_first_call_uses_proved_kernels(switches, monkeypatch):
    proof(**FOUND).save()
    selection(monkeypatch).prepare()
    assert switches.on == []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        call()
    assert switches.on == ["up.128x256"]
    num_calls = len(switches.calls)
    call()
    assert len(switches.calls) == num_calls


@pytest.mark.parametrize(("mode", "on"), [("all", list(KERNELS)), ("portable", []), ("torch", [])])
def test_modes_without_a_proof_hold_from_the_start(mode, on, switches, monkeypatch):
    monkeypatch.setenv("FMOE_GPU_KERNELS", mode)
    multiplied = []
    multiply = torch.nn.functional.grouped_mm
    monkeypatch.setattr(
        torch.nn.functional, "grouped_mm", lambda *a, **k: multiplied.append(1) or multiply(*a, **k)
    )

    def no_key(device):
        raise AssertionError("the driver is not asked")

    chosen = selection(monkeypatch, no_key)
    chosen.prepare()
    assert switches.on == on
    x, weight, offs, _, _ = make_inputs(9, 16, 24, [4, 9], torch.bfloat16)
    torch.ops.fmoe_ext.grouped_gemm(x, weight, offs)  # any first call
    assert bool(multiplied) == (mode == "torch")
    del chosen


def test_torch_in_the_place_of_portable_kernels_that_failed(switches, monkeypatch):
    proof("failed").save()
    multiplied = []
    multiply = torch.nn.functional.grouped_mm
    monkeypatch.setattr(
        torch.nn.functional, "grouped_mm", lambda *a, **k: multiplied.append(1) or multiply(*a, **k)
    )
    selection(monkeypatch).prepare()
    with pytest.warns(UserWarning, match="torch's grouped_mm is used"):
        call()
    assert multiplied  # by the first call already


def test_proved_without_a_proof_is_an_error_at_every_call(switches, monkeypatch):
    monkeypatch.setenv("FMOE_GPU_KERNELS", "proved")
    selection(monkeypatch).prepare()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="FMOE_GPU_KERNELS=proved"):
            call()


def test_other_values_are_refused(switches, monkeypatch):
    monkeypatch.setenv("FMOE_GPU_KERNELS", "fast")
    with pytest.raises(
        ValueError, match="FMOE_GPU_KERNELS must be one of auto, proved, all, portable, torch"
    ):
        selection(monkeypatch).prepare()


def test_several_devices_use_what_all_have_proved(switches, monkeypatch):
    keys = [KEY, Key("NVIDIA H200", KEY.sources)]
    proof(**FOUND).save()
    proof(key=keys[1], **dict.fromkeys(KERNELS, "proved")).save()
    chosen = selection(monkeypatch, keys.__getitem__)
    chosen.prepare()

    class On:
        def __init__(self, index):
            self.device, self.get_device = torch.device("cpu"), lambda: index

    chosen.before(On(1))
    assert switches.on == list(KERNELS)
    chosen.before(On(0))
    assert switches.on == ["up.128x256"]


@pytest.mark.cpu("its tensors are those of another device")
def test_selection_without_cuda_kernels_stays_empty(monkeypatch):
    selection(monkeypatch, key_of=None)  # not prepared: no CUDA module was loaded
    call()
    monkeypatch.setattr(gpu_kernels, "SELECTION", gpu_kernels.Selection("cuda", None))
    monkeypatch.setattr(gpu_kernels.SELECTION, "is_prepared", True)
    call()


def test_compiled_calls_choose_while_they_are_compiled(switches, monkeypatch):
    proof(**FOUND).save()
    selection(monkeypatch).prepare()
    x, weight, offs, _, _ = make_inputs(9, 16, 24, [4, 9], torch.float32)
    compiled = torch.compile(grouped_gemm, backend="eager", fullgraph=True)
    compiled(x, weight, offs)
    assert switches.on == ["up.128x256"]


# ---- the file
def test_file(cache):
    whole = Proof(
        KEY, TAKEN_WITH, "now", proof(**FOUND).verdicts, (Race("op", "T 1", "portable", 1.0, None, 2.0),)
    )
    path = whole.save()
    assert path.parent == cache and path.name == "nvidia-h100-80gb-hbm3-0123456789abcdef.json"
    assert gpu_proof.load(KEY) == whole
    assert list(cache.iterdir()) == [path]
    content = json.loads(path.read_text())
    assert content["key"] == {"gpu": KEY.gpu, "sources": KEY.sources}
    assert content["verdicts"]["rows_by_weight.64x192"] == {"state": "slow", "reason": "why"}


@pytest.mark.parametrize("field", ["gpu", "sources"])
def test_proof_other_key_is_ignored(field):
    proof(**FOUND).save()
    assert gpu_proof.load(Key(**{**vars(KEY), field: "other"})) is None


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        "\x00\xff",
        '{"format": 3}',
        '{"format": 1}',
        '{"format": 3, "key": 3}',
        '{"format": 3, "key": KEY, "taken_with": "", "date": "", "verdicts": {"up": {"state": "good"}}, "races": []}',
        '{"format": 3, "key": KEY, "taken_with": "", "date": "", "verdicts": {"up": 1}, "races": []}',
        '{"format": 3, "key": KEY, "taken_with": "", "date": "", "verdicts": {}, "races": [{}]}',
    ],
)
def test_proof_broken_file_warns_and_is_ignored(text, cache):
    cache.mkdir(parents=True)
    KEY.path().write_text(text.replace("KEY", json.dumps(vars(KEY))))
    with pytest.warns(
        UserWarning, match=r"cannot be read and is taken as absent .*gpu prove writes it again"
    ):
        assert gpu_proof.load(KEY) is None
    proof(**FOUND).save()
    assert gpu_proof.load(KEY) == proof(**FOUND)


def test_proof_file_of_other_key_is_refused(cache):
    other = Key(**{**vars(KEY), "sources": "other"})
    os.replace(proof(**FOUND).save(), other.path())
    with pytest.warns(UserWarning, match="it is about"):
        assert gpu_proof.load(other) is None


def test_proof_of_the_package_is_used_until_the_user_proves(monkeypatch, tmp_path):
    monkeypatch.setattr(gpu_proof, "SHIPPED", tmp_path / "proofs")
    shipped, own = proof(**FOUND), proof(portable="failed")
    (tmp_path / "proofs").mkdir()
    os.replace(shipped.save(), gpu_proof.SHIPPED / KEY.name())
    assert gpu_proof.load(KEY) == shipped
    assert gpu_proof.load(Key("NVIDIA H200", KEY.sources)) is None
    own.save()
    assert gpu_proof.load(KEY) == own
    KEY.path().write_text("{")
    with pytest.warns(UserWarning, match="cannot be read"):
        assert gpu_proof.load(KEY) == shipped


def test_shipped_proofs_are_about_the_kernels_of_this_tree():
    """The kernels changed since, if this fails: delete the proof and what README says of it, or take a new one."""
    sources = sources_digest.digest()
    for file in gpu_proof.SHIPPED.glob("*.json"):
        found = json.loads(file.read_text())
        assert file.name == Key(**found["key"]).name()
        assert found["key"]["sources"] == sources, file.name
        assert gpu_proof.load(Key(**found["key"])).verdicts["portable"].state == "proved"


def test_digest_of_kernel_sources_changes_with_words_alone(tmp_path):
    root = tmp_path / "tree"
    for folder in ("cuda", "csrc"):
        shutil.copytree(sources_digest.ROOT / folder, root / folder)
    first = sources_digest.digest(root)
    assert first == sources_digest.digest()

    def after(name, old, new):
        file = root / name
        text = file.read_text()
        assert old in text
        file.write_text(text.replace(old, new, 1))
        found = sources_digest.digest(root)
        file.write_text(text)
        return found

    assert after("cuda/sm90.cuh", "//", "//  another word\n //") == first
    for name, old in (
        ("cuda/sm90.cuh", "struct"),
        ("cuda/sm90_up.cu", "kernel"),
        ("cuda/select.h", "512"),
        ("csrc/activation.h", "int64_t"),
    ):
        assert after(name, old, f"{old}1") != first, name
    assert after("cuda/ops_cuda.cpp", "Tensor", "Tensors") == first  # checks of arguments, no kernel


def test_proof_failed_write_keeps_old_file(monkeypatch, cache):
    old = proof(**FOUND)
    old.save()

    def no_space(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", no_space)
    with pytest.raises(OSError, match="No space left"):
        proof().save()
    assert gpu_proof.load(KEY) == old and len(list(cache.iterdir())) == 1


def test_cache_folder(monkeypatch, tmp_path):
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert KEY.path().parent == tmp_path / ".cache" / "fmoe_ext" / "gpu"


def test_driver_version(tmp_path):
    file = tmp_path / "version"
    file.write_text(
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC 2024\nGCC version: 12.2\n"
    )
    assert gpu_proof.driver_version(file) == "550.54.15"
    file.write_text("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  575.57  Release Build\n")
    assert gpu_proof.driver_version(file) == "575.57"
    assert gpu_proof.driver_version(tmp_path / "none") == "unknown"


# ---- what python -m fmoe_ext.info says
def test_info():
    lines = info.gpu_kernels_in_use([KEY])
    assert lines == [
        ("GPU kernels", "FMOE_GPU_KERNELS=auto"),
        ("  device 0", "nothing proved: run `python -m fmoe_ext.gpu prove`"),
    ]
    proof(**FOUND).save()
    assert [text for _, text in info.gpu_kernels_in_use([KEY])[1:]] == [
        f"proved 2026-11-22T00:00:00+00:00 with {TAKEN_WITH}: up.128x256",
        "off, failed: grad_weight.128x256 (why)",
        "off, slow: rows_by_weight.64x192 (why)",
    ]
    assert "GPU kernels" in info.report()


def test_names_of_a_build_without_cuda_kernels():
    if ops.cuda_module_missing is None:
        pytest.skip("the CUDA kernels are loaded")
    # torch.ops may hold what another test defined: 2.11 keeps names of libraries that are gone.
    assert "fmoe_ext::_gpu_kernels" not in torch._C._dispatch_get_all_op_names()
