"""FMOE_GPU_KERNELS: what is chosen, when, with which words; the file that a proof is kept in."""

import dataclasses
import json
import os
import re
import shutil
import threading
import warnings
from types import SimpleNamespace

import pytest
import sources_digest
import torch

from fmoe_ext import info, ops
from fmoe_ext.gpu import kernels as gpu_kernels
from fmoe_ext.gpu import proof as gpu_proof
from fmoe_ext.gpu.proof import Key, Proof, Race, Verdict
from fmoe_ext.gpu.torch_path import tf32_allowed
from fmoe_ext.ops import expert_mlp, grouped_gemm
from tests.gpu.targets import define_switches
from tests.ops.test_expert_mlp import Problem
from tests.ops.test_grouped_gemm import make_inputs

KEY, SOURCES = Key("NVIDIA H100 80GB HBM3", 90), "0123"
TAKEN_WITH = "driver 550.54.15, torch 2.13.0"
KERNELS = ("up.128x256", "rows_by_weight.128x192", "grad_weight.128x256")
MODES = ("auto", "proved", "all", "portable", "torch")


def proof(portable="proved", key=KEY, **states):
    verdicts = {name: Verdict(state.replace("_", " "), "why", SOURCES) for name, state in states.items()}
    return Proof(
        key,
        TAKEN_WITH,
        "2026-11-22T00:00:00+00:00",
        {"portable": Verdict(portable, "why", SOURCES), **verdicts},
    )


FOUND = {"up.128x256": "proved", "rows_by_weight.128x192": "slow", "grad_weight.128x256": "failed"}


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
    found = proof(**{**FOUND, "rows_by_weight.128x192": "beaten"})
    assert gpu_kernels.choose("proved", KERNELS, found).kernels == {"up.128x256", "rows_by_weight.128x192"}


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
        self.by_torch: list[str] = []
        self.library = define_switches(
            lambda: list(KERNELS), self.switch, lambda: [0] * len(KERNELS), let_torch=self.let_torch
        )

    def let_torch(self, classes):
        self.by_torch = classes

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
    with pytest.warns(UserWarning, match="python -m fmoe_ext.gpu prove") as caught:
        call()
    assert caught[0].filename == __file__, "the line that called the operator"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        call()
        Problem(5, 2, 3, 8, 8, torch.float32).call(expert_mlp, Problem(5, 2, 3, 8, 8, torch.float32).tensors)
    assert switches.on == []


def win(product="grad_weight"):
    return gpu_proof.TorchWin(product, "16 bits", "few", 2.0, 1.0)


def test_kernels_learn_which_products_torch_won(switches, monkeypatch):
    """And have torch's product at hand; what several devices agree on, if there are several."""
    keys = [KEY, Key("NVIDIA H200", 90)]
    dataclasses.replace(proof(**FOUND), torch_wins=(win(), win("up"))).save()
    dataclasses.replace(proof(key=keys[1], **FOUND), torch_wins=(win("up"),)).save()
    chosen = selection(monkeypatch, keys.__getitem__)
    chosen.prepare()
    call()
    assert sorted(switches.by_torch) == ["grad_weight/16 bits/few", "up/16 bits/few"]
    a, b, offs = torch.randn(9, 16), torch.randn(9, 24), torch.tensor([4, 9], dtype=torch.int32)
    product = torch.ops.fmoe_ext._torch_grouped_mm(a, b, offs, True, False)
    torch.testing.assert_close(product, torch.stack([a[:4].mT @ b[:4], a[4:].mT @ b[4:]]))
    chosen.before(On(1))
    assert switches.by_torch == ["up/16 bits/few"]


class On:
    """A tensor of another device."""

    def __init__(self, index):
        self.device, self.get_device = torch.device("cpu"), lambda: index


def test_another_model_of_the_capability_is_used_and_raced_once(switches, monkeypatch, caplog):
    """Right kernels are right there as well; how fast, this device finds out in a process of its own."""
    other = Key("NVIDIA GH200 480GB", 90)
    proof(**FOUND).save()
    started = []

    def start(command, **_):
        started.append(command)
        return SimpleNamespace(wait=lambda: None)

    monkeypatch.setattr(gpu_kernels.torch.cuda, "mem_get_info", lambda device: (2**36, 2**37))
    monkeypatch.setattr(gpu_kernels.subprocess, "Popen", start)
    for _ in range(2):  # two processes
        selection(monkeypatch, lambda device: other).prepare()
        call()
        assert switches.on == ["up.128x256"]
    (command,) = started
    assert command[1:] == ["-m", "fmoe_ext.gpu", "prove", "--missing", "--device", "0"]
    assert "NVIDIA GH200 480GB has no races of its own yet" in caplog.text
    os.utime(other.path().with_suffix(".json.racing"), (0, 0))  # a process that was ended
    selection(monkeypatch, lambda device: other).prepare()
    call()
    assert len(started) == 2
    proof(key=other, **{**FOUND, "up.128x256": "slow"}).save()
    selection(monkeypatch, lambda device: other).prepare()
    call()
    assert switches.on == [] and len(started) == 2


def test_races_that_cannot_be_started_do_not_end_a_forward(switches, monkeypatch, caplog):
    proof(**FOUND).save()

    def refuse(*_, **__):
        raise BlockingIOError("no room for a process")

    monkeypatch.setattr(gpu_kernels.torch.cuda, "mem_get_info", lambda device: (2**36, 2**37))
    monkeypatch.setattr(gpu_kernels.subprocess, "Popen", refuse)
    selection(monkeypatch, lambda device: Key("NVIDIA GH200 480GB", 90)).prepare()
    call()
    assert switches.on == ["up.128x256"]
    assert "the races of NVIDIA GH200 480GB could not be started: no room for a process" in caplog.text


def test_full_gpu_is_not_raced(monkeypatch):
    started = []
    monkeypatch.setattr(gpu_kernels.torch.cuda, "mem_get_info", lambda device: (2**33, 2**37))
    monkeypatch.setattr(gpu_kernels.subprocess, "Popen", lambda *_, **__: started.append(1))
    gpu_kernels.race(0, KEY)
    assert not started


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
    keys = [KEY, Key("NVIDIA H200", 90)]
    proof(**FOUND).save()
    proof(key=keys[1], **dict.fromkeys(KERNELS, "proved")).save()
    chosen = selection(monkeypatch, keys.__getitem__)
    chosen.prepare()

    chosen.before(On(1))
    assert switches.on == list(KERNELS)
    chosen.before(On(0))
    assert switches.on == ["up.128x256"]


def test_other_threads_wait_until_a_choice_is_in_force(switches, monkeypatch):
    """A thread that asked meanwhile computed with the kernels of before, right or not."""
    proof(**FOUND).save()
    chosen = selection(monkeypatch)
    chosen.prepare()
    seen, usual = [], gpu_kernels.switch_on
    other = threading.Thread(target=lambda: (chosen.before(On(0)), seen.append(switches.on)))

    def switch_on(kernels):
        other.start()
        other.join(0.2)  # it has to wait for us
        usual(kernels)

    monkeypatch.setattr(gpu_kernels, "switch_on", switch_on)
    chosen.before(On(0))
    other.join()
    assert seen == [["up.128x256"]]


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
DIGESTS = dict.fromkeys(("portable", *KERNELS), SOURCES)


def load(key, sources=DIGESTS):
    return gpu_proof.load(key, sources)


def test_file(cache):
    races = (Race("op", "T 1", "portable", 1.0, None, 2.0),)
    whole = Proof(KEY, TAKEN_WITH, "now", proof(**FOUND).verdicts, races, (win("up"),))
    path = whole.save()
    assert path.parent == cache and path.name == "nvidia-h100-80gb-hbm3.json"
    assert load(KEY) == whole
    assert list(cache.iterdir()) == [path]
    content = json.loads(path.read_text())
    assert content["key"] == {"gpu": KEY.gpu, "capability": 90}
    assert content["verdicts"]["rows_by_weight.128x192"] == {
        "state": "slow",
        "reason": "why",
        "sources": SOURCES,
    }


def test_proof_of_another_capability_is_ignored():
    proof(**FOUND).save()
    assert load(Key(KEY.gpu, 100)) is None and load(Key("NVIDIA B200", 100)) is None
    found = load(Key("NVIDIA GH200 480GB", 90))
    assert found.is_of_another and found.verdicts == proof(**FOUND).verdicts


def test_edit_voids_proofs_that_it_reaches():
    """The verdict and races of a kernel whose sources changed, and torch's wins over its product; no others."""
    races = tuple(
        Race("op", "T 1", kernel, 1.0, 1.0, 2.0) for kernel in ("up.128x256", "grad_weight.128x256")
    )
    wins = (win("up"), win("main_grad"), win("grad_input"))
    dataclasses.replace(proof(**FOUND), races=races, torch_wins=wins).save()
    found = load(KEY, {**DIGESTS, "grad_weight.128x256": "4567"})
    changed = found.verdicts.pop("grad_weight.128x256")
    assert changed == Verdict("untested", "it changed since it was proved")
    assert found.verdicts == {k: v for k, v in proof(**FOUND).verdicts.items() if k != "grad_weight.128x256"}
    assert found.races == races[:1] and found.torch_wins == (win("up"), win("grad_input"))
    assert load(KEY, {**DIGESTS, "portable": "4567"}).torch_wins == ()
    assert load(KEY, dict.fromkeys(DIGESTS, "4567")) is None


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        "\x00\xff",
        '{"format": 4}',
        '{"format": 3}',
        '{"format": 4, "key": 3}',
        '{"format": 4, "key": KEY, "taken_with": "", "date": "", "verdicts": {"up": {"state": "good"}}, "races": []}',
        '{"format": 4, "key": KEY, "taken_with": "", "date": "", "verdicts": {"up": 1}, "races": []}',
        '{"format": 4, "key": KEY, "taken_with": "", "date": "", "verdicts": {}, "races": [{}]}',
    ],
)
def test_proof_broken_file_warns_and_is_ignored(text, cache):
    cache.mkdir(parents=True)
    KEY.path().write_text(text.replace("KEY", json.dumps(vars(KEY))))
    with pytest.warns(
        UserWarning, match=r"cannot be read and is taken as absent .*gpu prove writes it again"
    ) as caught:
        assert load(KEY) is None
    assert len(caught) == 1
    proof(**FOUND).save()
    assert load(KEY) == proof(**FOUND)


def test_proof_of_the_package_is_used_until_the_user_proves(monkeypatch, tmp_path):
    monkeypatch.setattr(gpu_proof, "SHIPPED", tmp_path / "proofs")
    shipped, own = proof(**FOUND), proof(portable="failed")
    (tmp_path / "proofs").mkdir()
    os.replace(shipped.save(), gpu_proof.SHIPPED / KEY.name())
    assert load(KEY) == shipped
    own.save()
    assert load(KEY) == own
    KEY.path().write_text("{")
    with pytest.warns(UserWarning, match="cannot be read"):
        assert load(KEY) == shipped


def test_shipped_proofs_are_about_kernels_of_this_tree():
    """Kernels changed since, if this fails: take their verdicts out of the proof, or take a new one."""
    known = set(sources_digest.digests(["-std=c++20", "-O3"]).values())
    for file in gpu_proof.SHIPPED.glob("*.json"):
        found = json.loads(file.read_text())
        assert file.name == Key(**found["key"]).name()
        assert {verdict["sources"] for verdict in found["verdicts"].values()} <= known, file.name


def test_shipped_proof_of_an_h200_serves_its_compute_capability(cache):
    digests = sources_digest.digests(["-std=c++20", "-O3"])
    table = (sources_digest.ROOT / "cuda" / "select.h").read_text()
    entries = dict(re.findall(r'\{"(\w+\.\w+)", Product::\w+, "(\w+)"', table))
    sources = {"portable": digests["portable"], **{name: digests[file] for name, file in entries.items()}}
    assert len(sources) == 8
    own = gpu_proof.load(Key("NVIDIA H200", 90), sources)
    assert set(own.in_state("proved")) == set(sources) and not own.is_of_another and own.races
    assert gpu_proof.load(Key("NVIDIA H100 80GB HBM3", 90), sources).is_of_another
    assert gpu_proof.load(Key("NVIDIA A100-SXM4-80GB", 80), sources) is None


def test_digests_change_with_words_of_what_a_kernel_reaches(tmp_path):
    root = tmp_path / "tree"
    for folder in ("cuda", "csrc"):
        shutil.copytree(sources_digest.ROOT / folder, root / folder)
    first = sources_digest.digests(root=root)
    assert first == sources_digest.digests()
    hopper = {name for name in first if name != "portable"}
    assert {"sm90_up", "sm90_grad_weight"} <= hopper

    def changed(name, old, new):
        file = root / name
        text = file.read_text()
        assert old in text
        file.write_text(text.replace(old, new))  # all: the first may stand in a comment
        found = sources_digest.digests(root=root)
        file.write_text(text)
        return {name for name in first if found[name] != first[name]}

    assert changed("cuda/sm90.cuh", "//", "//  another word\n //") == set()
    assert changed("cuda/launchers.h", "void launch_count_tokens(", "int launch_count_tokens(") == set()
    assert changed("cuda/sm90_up.cu", "kernel", "kernel1") == {"sm90_up"}
    assert changed("cuda/permute.cu", "kernel", "kernel1") == {"portable"}
    assert changed("cuda/sm90.cuh", "struct", "struct1") == hopper
    assert changed("csrc/activation.h", "int64_t", "int32_t") == {"portable", *hopper}
    for name, old in (("cuda/select.h", "512"), ("cuda/ops_cuda.cpp", "Tensor")):
        assert changed(name, old, f"{old}1") == set()  # which kernel is chosen, not what it computes
    assert sources_digest.digests(["-O0"]).items().isdisjoint(first.items())


def test_proof_failed_write_keeps_old_file(monkeypatch, cache):
    old = proof(**FOUND)
    old.save()

    def no_space(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", no_space)
    with pytest.raises(OSError, match="No space left"):
        proof().save()
    assert load(KEY) == old and len(list(cache.iterdir())) == 1


def test_cache_folder(monkeypatch, tmp_path):
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert KEY.path().parent == tmp_path / ".cache" / "fmoe_ext" / "gpu"


def test_without_a_home_the_package_s_proofs_are_used(monkeypatch, tmp_path):
    def no_home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(gpu_proof.Path, "home", no_home)
    monkeypatch.setattr(gpu_proof, "SHIPPED", tmp_path)
    assert load(KEY) is None
    content = {**dataclasses.asdict(proof(**FOUND)), "format": 4}
    content.pop("is_of_another")
    (tmp_path / KEY.name()).write_text(json.dumps(content))
    assert load(KEY) == proof(**FOUND)
    with pytest.raises(OSError, match="home directory"):
        proof(**FOUND).save()
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1 << 40, 1 << 40))
    gpu_kernels.race(0, KEY)  # starts nothing: there is no place to note it


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
def test_summary_says_what_computes():
    def first_line(**states):
        return gpu_proof.summary(proof(**states))[0].rpartition(": ")[2]

    assert first_line(**{**FOUND, "rows_by_weight.128x192": "beaten"}) == "up.128x256, rows_by_weight.128x192"
    assert first_line(**dict.fromkeys(FOUND, "beaten")) == ", ".join(FOUND)
    assert first_line(**dict.fromkeys(FOUND, "slow")) == "the portable kernels alone"
    assert first_line(portable="failed", **FOUND) == "torch's grouped_mm alone"


def test_info(switches):
    lines = info.gpu_kernels_in_use([KEY])
    assert lines == [
        ("GPU kernels", "FMOE_GPU_KERNELS=auto"),
        ("  device 0", "nothing proved: run `python -m fmoe_ext.gpu prove`"),
    ]
    proof(**FOUND).save()
    assert [text for _, text in info.gpu_kernels_in_use([KEY])[1:]] == [
        f"proved 2026-11-22T00:00:00+00:00 with {TAKEN_WITH}: up.128x256",
        "off, failed: grad_weight.128x256 (why)",
        "off, slow: rows_by_weight.128x192 (why)",
    ]
    assert "GPU kernels" in info.report()


@pytest.mark.filterwarnings("ignore:Warning only once for all operators")
def test_tensors_of_a_device_without_kernels_are_refused_with_the_remedy():
    """As those of CUDA where the module is not built, or of ROCm; here the CPU's."""
    library = ops._refuse_tensors("CPU", "reinstall with FMOE_CUDA=1 and nvcc")
    with pytest.raises(RuntimeError, match="reinstall with FMOE_CUDA=1 and nvcc"):
        ops.count_tokens(torch.tensor([[0]]), 1)
    with pytest.raises(RuntimeError, match="reinstall with FMOE_CUDA=1 and nvcc"):
        ops.apply_capacity(torch.tensor([[0]]), 1, 1)
    with pytest.raises(RuntimeError, match="reinstall with FMOE_CUDA=1 and nvcc"):
        call()
    del library
    assert ops.count_tokens(torch.tensor([[0]]), 1).tolist() == [1]


def test_names_of_a_build_without_cuda_kernels():
    if ops.cuda_module_missing is None:
        pytest.skip("the CUDA kernels are loaded")
    # torch.ops may hold what another test defined: 2.11 keeps names of libraries that are gone.
    assert "fmoe_ext::_gpu_kernels" not in torch._C._dispatch_get_all_op_names()
