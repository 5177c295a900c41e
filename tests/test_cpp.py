"""The C++ headers train as Python does, to the bit; they are built once by CMake into build/cpp."""

import functools
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
from fmoe_ext import checkpoint, gates

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build" / "cpp"
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
        "gate": functools.partial(gates.SigmoidGate, scale=2.5, bias_update_speed=0.01, balance_loss="global"),
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
def built(tmp_path_factory):
    """The folder of the build, up to date."""
    if shutil.which("cmake") is None:
        pytest.skip("cmake is not installed")
    if shutil.which(os.environ.get("CXX") or "c++") is None:
        pytest.skip("no C++ compiler is installed")
    prefix = f"-DCMAKE_PREFIX_PATH={torch.utils.cmake_prefix_path}"
    run("cmake", "-S", ROOT, "-B", BUILD, "-DFMOE_TESTS=ON", prefix)
    run("cmake", "--build", BUILD, "-j2")
    return BUILD


def run(*command, **options):
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, **options)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


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
    """What parity.cpp does, in Python -> the same tensors."""
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
    run(built / "tests/cpp/run_parity", folder, *CASES, env=env)
    return folder


@pytest.mark.filterwarnings("ignore:.*has no balance loss")
@pytest.mark.parametrize("name", CASES)
def test_same_bits_as_python(trained, name):
    """100 steps: first weights, losses, outputs, every gradient and the last weights."""
    expected = train(name, make_inputs(name))
    check_same(load_file(trained / f"{name}.out.safetensors"), expected)
    assert expected["loss"].isfinite().all() and len(expected["loss"]) == STEPS


def train_rank(rank, size, folder, names, library):
    """One rank of a gloo group: trains by the C++ layer and by Python's on one group, one after the other."""
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    torch.ops.load_library(library)
    spread = {"world_size": size, "num_expert": SIZES["num_expert"] // size}
    for name in names:
        mine = f"{name}.{rank}"
        given = make_inputs(name, rank, STEPS if name == names[0] else FEW_STEPS)
        save_file(given, f"{folder}/{mine}.in.safetensors")
        torch.ops.fmoe_parity.run_case(folder, mine, dist.group.WORLD.group_name)
        check_same(load_file(f"{folder}/{mine}.out.safetensors"), train(name, given, **spread))
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.parametrize(
    "size, names", [(2, ("shared", "softmax", "sigmoid", "noisy", "bfloat16")), (4, ("valid", "gshard", "switch"))]
)
def test_same_bits_on_ranks(built, tmp_path, size, names):
    """Ranks with different numbers of tokens share the experts of a C++ layer as those of Python's; the first case 100 steps."""
    arguments = (size, str(tmp_path), names, str(built / "tests/cpp/libparity.so"))
    torch.multiprocessing.spawn(train_rank, arguments, nprocs=size)


def test_first_program_of_the_page(built, tmp_path):
    """A stranger's program of at most 30 lines, built by the commands of docs/cpp.md, trains; Python loads it."""
    page = (ROOT / "docs" / "cpp.md").read_text()
    code = dict(re.findall(r"^```(cmake|cpp|sh)\n(.*?)^```$", page, re.MULTILINE | re.DOTALL))
    assert len(code["cpp"].splitlines()) <= 30
    (tmp_path / "CMakeLists.txt").write_text(code["cmake"])
    (tmp_path / "first.cpp").write_text(code["cpp"])
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    printed = run("bash", "-euc", code["sh"], cwd=tmp_path, env={**os.environ, "PATH": path})
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", printed)]
    assert len(losses) == 4 and losses[-1] < 0.5 * losses[0]
    layer = fmoe_ext.FMoETransformerMLP(8, 16, 32, "swiglu", gate="softmax")
    checkpoint.load(tmp_path / "out", layer)
    assert layer.gate.gate.weight.isfinite().all()
