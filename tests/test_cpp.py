"""The C++ headers train as Python does, to the bit; they are built once by CMake into build/cpp_tests."""

import fcntl
import functools
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

import fmoe_ext
from fmoe_ext import checkpoint, gates, info
from fmoe_ext.testing import run_distributed
from tests import sanitized

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build" / "cpp_tests"
STEPS, FEW_STEPS, TOKENS = 100, 10, 24
SIZES = {"num_expert": 4, "d_model": 8, "d_hidden": 16}
SOFTMAX_SHARED = {
    "gate": "softmax",
    "activation": "geglu_tanh",
    "shared_expert_hidden": 12,
    "shared_expert_gate": True,
}
# As options_of() in tests/cpp/parity.cpp has them.
CASES = {
    "naive": {},
    "softmax": {
        "gate": functools.partial(gates.SoftmaxGate, z_weight=0.1, capacity_factor=1.25, scale=1.5),
        "activation": "swiglu",
        "bias": False,
    },
    "sigmoid": {
        "gate": functools.partial(
            gates.SigmoidGate, scale=2.5, bias_update_speed=0.01, balance_loss="global"
        ),
        "gate_bias": False,
        "activation": "silu",
    },
    "noisy": {"gate": "noisy", "activation": "relu"},
    "switch": {"gate": "switch", "top_k": 1, "activation": "gelu_tanh"},
    "gshard": {"gate": "gshard", "activation": "geglu"},
    "shared": SOFTMAX_SHARED,
    "valid": SOFTMAX_SHARED,
    "bfloat16": SOFTMAX_SHARED,
}


@pytest.fixture(scope="module")
def built():
    """The folder of the build, up to date; its operators are those of Python's package."""
    if shutil.which("cmake") is None:
        pytest.skip("cmake is not installed")
    if shutil.which(os.environ.get("CXX") or "c++") is None:
        pytest.skip("no C++ compiler is installed")
    BUILD.mkdir(parents=True, exist_ok=True)
    with open(BUILD / "tests.lock", "w") as lock:  # every worker of pytest-xdist comes here
        fcntl.flock(lock, fcntl.LOCK_EX)
        build(ROOT / "tests" / "cpp", BUILD, info.cmake_prefix_path())
    return BUILD


def build(source, folder, prefix, *options):
    run("cmake", "-S", source, "-B", folder, f"-DCMAKE_PREFIX_PATH={prefix}", *options)
    run("cmake", "--build", folder, "-j2", "--target", "run_parity")


def run(*command, **options):
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, **options)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def train_with_operators_of_this_checkout(name, folder, *options, **env):
    """Builds libfmoe.so too, into build/`name`, and trains every case for some steps -> {case: tensors}."""
    where = ROOT / "build" / name
    build(ROOT, where, torch.utils.cmake_prefix_path, "-DFMOE_TESTS=ON", *options)
    for case in CASES:
        save_file(make_inputs(case, steps=FEW_STEPS), folder / f"{case}.in.safetensors")
    run(where / "tests/cpp/run_parity", folder, *CASES, env={**os.environ, **env})
    return {case: load_file(folder / f"{case}.out.safetensors") for case in CASES}


@sanitized.long_unless_passed()
@pytest.mark.filterwarnings("ignore:.*has no balance loss")
def test_sanitizers_find_nothing(tmp_path):
    """Headers and operators built with AddressSanitizer and UBSan: the values of Python."""
    no_leaks = {"ASAN_OPTIONS": "detect_leaks=0"}  # LibTorch keeps its registries
    sanitized = train_with_operators_of_this_checkout(
        "cpp_sanitized", tmp_path, "-DFMOE_SANITIZE=ON", **no_leaks
    )
    for name, found in sanitized.items():
        expected = train(name, make_inputs(name, steps=FEW_STEPS))
        torch.testing.assert_close(found, expected, check_dtype=False)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*has no balance loss")
def test_libfmoe_same_bits_as_python(built, tmp_path):
    """As test_same_bits_as_python, whose operators are the package's, built by setup.py from the same sources."""
    threads = {"OMP_NUM_THREADS": str(torch.get_num_threads())}
    parity = f"-DFMOE_PARITY={built / 'libparity.so'}"
    for name, found in train_with_operators_of_this_checkout("libfmoe", tmp_path, parity, **threads).items():
        check_same(found, train(name, make_inputs(name, steps=FEW_STEPS)))


def make_inputs(name, rank=0, steps=STEPS):
    """{name: tensor} of a case: the tokens of every step."""
    generator = torch.Generator().manual_seed(rank)
    tokens = TOKENS + rank
    inputs = {"inputs": torch.randn(steps, tokens, SIZES["d_model"], generator=generator)}
    if name == "valid":
        inputs["valid"] = torch.rand(tokens, generator=generator) < 0.7
    if name == "bfloat16":
        inputs["inputs"] = inputs["inputs"].bfloat16()
    return inputs


def train(name, given, **spread):
    """Trains as parity.cpp does -> the same tensors."""
    torch.manual_seed(7)
    layer = fmoe_ext.FMoETransformerMLP(**(SIZES | CASES[name] | spread))
    results = {f"first.{key}": value.clone() for key, value in layer.state_dict().items()}
    layer.to(given["inputs"].dtype)
    optimizer = torch.optim.SGD(layer.parameters(), 0.1)
    records = {}
    for tokens in given["inputs"]:
        optimizer.zero_grad()
        x = tokens.clone().requires_grad_()
        y = layer(x, given.get("valid"))
        loss = y.square().mean() + 0.1 * gates.total_loss(layer)
        loss.backward()
        step = {"loss": loss.detach(), "y": y.detach(), "grad.x": x.grad}
        step |= {f"grad.{key}": p.grad.clone() for key, p in layer.named_parameters()}
        optimizer.step()
        for key, value in step.items():
            records.setdefault(key, []).append(value)
    results |= {key: torch.stack(values) for key, values in records.items()}
    return results | {f"last.{key}": value for key, value in layer.state_dict().items()}


def check_same(found, expected):
    assert found.keys() == expected.keys()
    different = [key for key in expected if not torch.equal(found[key], expected[key])]
    assert not different, different


@pytest.fixture(scope="module")
def trained(built, tmp_path_factory):
    """The folder with what the program without Python has written of every case."""
    folder = tmp_path_factory.mktemp("parity")
    for name in CASES:
        save_file(make_inputs(name), folder / f"{name}.in.safetensors")
    env = {**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())}
    run(built / "run_parity", folder, *CASES, env=env)
    return folder


@pytest.mark.filterwarnings("ignore:.*has no balance loss")
@pytest.mark.parametrize("name", CASES)
def test_same_bits_as_python(trained, name):
    """100 steps: first weights, losses, outputs, every gradient and the last weights."""
    expected = train(name, make_inputs(name))
    check_same(load_file(trained / f"{name}.out.safetensors"), expected)
    assert expected["loss"].isfinite().all() and len(expected["loss"]) == STEPS


def train_rank(folder, names, library):
    """One rank of a gloo group: trains by the C++ layer and by Python's on one group, one after the other."""
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.ops.load_library(library)
    spread = {"world_size": size, "num_expert": SIZES["num_expert"] // size}
    for name in names:
        mine = f"{name}.{rank}"
        given = make_inputs(name, rank, STEPS if name == "shared" else FEW_STEPS)
        save_file(given, f"{folder}/{mine}.in.safetensors")
        torch.ops.fmoe_parity.run_case(folder, mine, dist.group.WORLD.group_name)
        check_same(load_file(f"{folder}/{mine}.out.safetensors"), train(name, given, **spread))


@pytest.mark.parametrize(
    "size, names",
    [(2, ("shared", "softmax", "sigmoid", "noisy", "bfloat16")), (4, ("valid", "gshard", "switch"))],
)
def test_same_bits_on_ranks(built, tmp_path, size, names):
    """Ranks with different numbers of tokens share experts; one case has 100 steps."""
    run_distributed(train_rank, size, str(tmp_path), names, str(built / "libparity.so"))


def device_of_counts(library):
    torch.ops.load_library(library)
    groups = [
        dist.group.WORLD,
        dist.new_group(backend="cuda:gloo"),
        dist.new_group(backend="cpu:gloo,cuda:gloo"),
    ]
    return [torch.ops.fmoe_parity.counts_on(group.group_name) for group in groups]


def test_gates_count_where_the_group_has_a_backend(built):
    """A group of NCCL alone reduces no tensor of the CPU; here gloo takes its part."""
    for devices in run_distributed(device_of_counts, 2, str(built / "libparity.so")):
        assert devices == ["cpu", "cuda", "cpu"]


def write_if_new(path, text):
    """Keeps the time of a file that has this text, so that a second run builds nothing."""
    if not path.exists() or path.read_text() != text:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def check_first_program(printed, folder):
    """The program trained, and Python loads what it saved."""
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", printed)]
    assert len(losses) == 4 and losses[-1] < 0.7 * losses[0]
    layer = fmoe_ext.FMoETransformerMLP(8, 16, 32, "swiglu", gate="softmax")
    checkpoint.load(folder / "out", layer)
    assert layer.gate.gate.weight.isfinite().all()


def test_first_program_of_the_page(built, tmp_path):
    """tests/cpp takes it from docs/cpp.md."""
    check_first_program(run(built / "run_parity", cwd=tmp_path), tmp_path)


@pytest.mark.long
def test_first_program_by_the_commands_of_the_page():
    """A stranger's program of at most 30 lines, built by the commands of docs/cpp.md."""
    page = (ROOT / "docs" / "cpp.md").read_text()
    code = dict(re.findall(r"^```(cmake|cpp|sh)\n(.*?)^```$", page, re.MULTILINE | re.DOTALL))
    assert len(code["cpp"].splitlines()) <= 30
    folder = ROOT / "build" / "cpp_page"
    write_if_new(folder / "CMakeLists.txt", code["cmake"])
    write_if_new(folder / "main.cpp", code["cpp"])
    shutil.rmtree(folder / "out", ignore_errors=True)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    check_first_program(run("bash", "-euc", code["sh"], cwd=folder, env={**os.environ, "PATH": path}), folder)


HEADER = b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}'
BROKEN = {
    "empty": (b"", "is no safetensors file, or truncated: it has 0 bytes"),
    "long header": (
        (2**60).to_bytes(8, "little") + HEADER,
        "its header says that it is 1152921504606846976 long",
    ),
    "truncated": (len(HEADER).to_bytes(8, "little") + HEADER + b"1234", "its header needs 70"),
    "more bytes": (len(HEADER).to_bytes(8, "little") + HEADER + b"1" * 9, "its header needs 70"),
    "lying shape": (HEADER.replace(b"[2]", b"[3]"), "a has 8 bytes, but its shape and dtype need 12"),
    "overflow": (HEADER.replace(b"[2]", b"[4611686018427387904,2]"), "is no size"),
    "product": (HEADER.replace(b"[2]", b"[999999999999,999999999999]"), "is too large"),
    "negative": (HEADER.replace(b"[2]", b"[-2]"), "is no size"),
    "gap": (HEADER.replace(b"[0,8]", b"[4,12]"), "a begins at 4, the tensor before it ends at 0"),
    "dtype": (HEADER.replace(b"F32", b"F31"), "unknown dtype F31 of a"),
    "twice": (HEADER.replace(b'"dtype"', b'"dtype":"F32","dtype"'), "a name comes twice"),
    "control character": (HEADER.replace(b"a", b"\n", 1), "a string has a control character"),
    "json": (HEADER[:-1], "it ends too early"),
    "deep": (b"[" * 1000, "nested too deeply"),
}


@pytest.mark.parametrize("what", BROKEN)
def test_broken_files_are_refused_by_name(built, tmp_path, what):
    content, error = BROKEN[what]
    if not content[8:].startswith(b"{") and content:
        content = len(content).to_bytes(8, "little") + content + b"x" * 8
    path = tmp_path / "naive.in.safetensors"
    path.write_bytes(content)
    done = subprocess.run([built / "run_parity", tmp_path, "naive"], capture_output=True, text=True)
    assert done.returncode == 1 and error in done.stderr and str(path) in done.stderr, done.stderr[:500]


def test_failed_write_leaves_no_file(built, tmp_path):
    torch.ops.load_library(built / "libparity.so")
    torch.ops.fmoe_parity.write_file(f"{tmp_path}/file", torch.ones(2))
    assert torch.equal(load_file(tmp_path / "file")["x"], torch.ones(2))
    with pytest.raises(NotImplementedError):  # a tensor without values
        torch.ops.fmoe_parity.write_file(f"{tmp_path}/file", torch.ones(2, device="meta"))
    (tmp_path / "folder/inside").mkdir(parents=True)
    with pytest.raises(RuntimeError, match="folder"):
        torch.ops.fmoe_parity.write_file(f"{tmp_path}/folder", torch.ones(2))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder"]
    assert torch.equal(load_file(tmp_path / "file")["x"], torch.ones(2))


def errors_of(call, *arguments):
    with pytest.raises((RuntimeError, ValueError, TypeError)) as error:
        call(*arguments)
    return str(error.value).split("\nException raised")[0]


@pytest.mark.parametrize(
    "x, valid",
    [
        (torch.zeros(3, 7), None),
        (torch.zeros(3, 8, dtype=torch.int64), None),
        (torch.zeros(3, 8), torch.tensor([1.0, 0.5, 0.0])),
        (torch.zeros(3, 8), torch.ones(4)),
        (torch.zeros(3, 8, dtype=torch.float64), None),
    ],
)
def test_errors_have_the_texts_of_python(built, x, valid):
    torch.ops.load_library(built / "libparity.so")
    layer = fmoe_ext.FMoETransformerMLP(**SIZES)
    assert errors_of(torch.ops.fmoe_parity.forward, x, valid) == errors_of(layer, x, valid)


def test_noisy_gate_with_excluded_experts(built):
    """Logits of -inf: the loss and its gradient are finite, and Python's to the bit."""
    torch.ops.load_library(built / "libparity.so")
    x = torch.rand(6, 3, generator=torch.Generator().manual_seed(1)) + 0.5
    w_gate, w_noise = torch.linspace(-1, 1, 24).view(2, 3, 4)
    w_gate = w_gate.index_fill(1, torch.tensor([0, 3]), -torch.inf)  # top_k are left, none behind them
    gate = gates.NoisyGate(3, 4, 1)
    gate.load_state_dict({"w_gate": w_gate, "w_noise": w_noise})
    torch.manual_seed(0)
    gate(x)
    loss = gate.get_loss()
    expected = [loss.detach(), *torch.autograd.grad(loss, gate.w_noise)]
    assert all(t.isfinite().all() for t in expected)
    found = torch.ops.fmoe_parity.noisy_loss(x, w_gate, w_noise)
    assert all(map(torch.equal, found, expected))


def test_huggingface_folder(built, tmp_path):
    """Qwen's names and Mixtral's for each expert, in two files with an index."""
    torch.ops.load_library(built / "libparity.so")
    layer = fmoe_ext.FMoETransformerMLP(4, 8, 16, "swiglu", gate="softmax", bias=False, gate_bias=False)
    whole = torch.nn.ModuleDict({"mlp": layer})
    x = torch.randn(5, 8)
    for layout in ("qwen3_moe", "mixtral", "fused"):
        state = checkpoint.to_huggingface(whole.state_dict(), layout)
        folder = tmp_path / layout
        folder.mkdir()
        names = sorted(state)
        files = {name: f"model-0000{1 + (i % 2)}-of-00002.safetensors" for i, name in enumerate(names)}
        for file in set(files.values()):
            save_file({n: state[n].contiguous() for n in names if files[n] == file}, folder / file)
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
        assert torch.equal(torch.ops.fmoe_parity.forward_of_folder(str(folder), x), layer(x))
        for new in ("a.safetensors", "overlay.safetensors"):  # of a later fine-tune; the older tensors stay
            down = [name for name in names if "down_proj" in name or "w2" in name]
            save_file({n: state[n] * 2 for n in down}, folder / new)
            index = {"weight_map": files | dict.fromkeys(down, new)}
            (folder / "model.safetensors.index.json").write_text(json.dumps(index))
            forward = functools.partial(torch.ops.fmoe_parity.forward_of_folder, str(folder), x)
            if new == "a.safetensors":
                with pytest.raises(
                    RuntimeError, match=r"is in two files, and the index names another than .*model-"
                ):
                    forward()
            else:
                torch.testing.assert_close(forward(), 2 * layer(x))
            (folder / new).unlink()


def test_config_names_the_files_of_the_weights(built, tmp_path):
    """transformers_weights of config.json, beside files with the usual names."""
    torch.ops.load_library(built / "libparity.so")
    layer = fmoe_ext.FMoETransformerMLP(4, 8, 16, "swiglu", gate="softmax", bias=False, gate_bias=False)
    state = checkpoint.to_huggingface(torch.nn.ModuleDict({"mlp": layer}).state_dict(), "qwen3_moe")
    x = torch.randn(5, 8)
    save_file({n: t.contiguous() for n, t in state.items()}, tmp_path / "mine.safetensors")
    save_file({n: t * 0 for n, t in state.items()}, tmp_path / "model.safetensors")
    index = {"weight_map": dict.fromkeys(state, "mine.safetensors")}
    (tmp_path / "mine.safetensors.index.json").write_text(json.dumps(index))

    def forward(named):
        (tmp_path / "config.json").write_text(json.dumps({"transformers_weights": named}))
        return torch.ops.fmoe_parity.forward_of_folder(str(tmp_path), x)

    assert torch.equal(forward("mine.safetensors"), layer(x))
    assert torch.equal(forward("mine.safetensors.index.json"), layer(x))
    assert not forward(None).any()
    (tmp_path / "mine.bin").touch()
    for named, message in (
        ("absent.safetensors", r"absent\.safetensors is missing"),
        ("mine.bin", "no safetensors file or index"),
        ("../mine.safetensors", "is no name of a file in this folder"),
        (3, "is no name of a file in this folder"),
    ):
        with pytest.raises(RuntimeError, match=message):
            forward(named)


def layer_of_parity():
    torch.manual_seed(3)
    return fmoe_ext.FMoETransformerMLP(4, 8, 16, "swiglu", gate="softmax", bias=False, gate_bias=False)


def save_spread(folder):
    layer = layer_of_parity()
    layer.spread()
    model = torch.nn.ModuleDict({"mlp": layer})
    checkpoint.save(folder, model, torch.optim.AdamW(model.parameters()), step=3)


def test_folder_of_checkpoint_save(built, tmp_path):
    """Reads the newest step that two ranks saved, and a step by its own name; refuses damaged files by name."""
    torch.ops.load_library(built / "libparity.so")
    read = torch.ops.fmoe_parity.forward_of_folder
    x, layer = torch.randn(5, 8), layer_of_parity()
    run_distributed(save_spread, 2, tmp_path / "saved")
    (step,) = (tmp_path / "saved").glob("step-*")
    parts = sorted(step.glob("*.distcp"))
    assert len(parts) == 2
    for folder in (tmp_path / "saved", step):
        assert torch.equal(read(str(folder), x), layer(x))
    manifest = json.loads((step / "manifest.json").read_text())
    weight = manifest["tensors"]["model.mlp.experts.htoh4.weight"]

    def refused(text):
        with pytest.raises(RuntimeError, match=re.escape(text)) as error:
            read(str(step), x)
        assert str(step) in str(error.value)

    def changed(**entries):
        tensors = manifest["tensors"] | {"model.mlp.experts.htoh4.weight": weight | entries}
        (step / "manifest.json").write_text(json.dumps(manifest | {"tensors": tensors}))

    first, second = weight["chunks"]
    for entries, text in [
        ({"chunks": [first]}, "its parts are not together [4, 32, 8]"),
        ({"chunks": [first, [[3, 0, 0], *second[1:]]]}, "has a part that is outside of it"),
        ({"chunks": [first, [[0, 0, 0], *second[1:]]]}, "has parts that overlap"),
        ({"chunks": [first, [*second[:2], "../x", *second[3:]]]}, "is no name of a file in this folder"),
        ({"chunks": [first, [*second[:3], 10**12, second[4]]]}, "is truncated: it has no"),
        ({"chunks": [first, [*second[:3], second[3] + 1, second[4] - 1]]}, "cannot be read"),
        ({"shape": [10**18 - 1, 10**18 - 1]}, "is too large"),
        ({"dtype": "float64"}, "expected Double"),
        ({"dtype": "object"}, 'has dtype "object"'),
    ]:
        changed(**entries)
        refused(text)
    changed()
    os.truncate(parts[1], 100)
    refused("is truncated")
    parts[1].unlink()
    refused("is missing")
    (step / "manifest.json").write_text("{")
    refused("it ends too early")
