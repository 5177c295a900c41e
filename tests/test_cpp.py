"""The C++ headers train as Python does, to the bit; they are built once by CMake into build/cpp."""

import functools
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

import fmoe_ext
from fmoe_ext import gates

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build" / "cpp"
STEPS, TOKENS = 100, 24
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


def make_inputs(name, rank=0):
    """{name: tensor} of a case: the tokens of every step."""
    generator = torch.Generator().manual_seed(rank)
    tokens = TOKENS + rank
    inputs = {"inputs": torch.randn(STEPS, tokens, SIZES["d_model"], generator=generator)}
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


def train_rank(rank, size, folder, name, library):
    """One rank of a gloo group: trains by the C++ layer and by Python's on one group, one after the other."""
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store-{name}", size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    torch.ops.load_library(library)
    mine = f"{name}.{rank}"
    given = make_inputs(name, rank)
    save_file(given, f"{folder}/{mine}.in.safetensors")
    torch.ops.fmoe_parity.run_case(folder, mine, dist.group.WORLD.group_name)
    spread = {"world_size": size, "num_expert": SIZES["num_expert"] // size}
    check_same(load_file(f"{folder}/{mine}.out.safetensors"), train(name, given, **spread))
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.parametrize(
    "name, size", [("shared", 2), ("valid", 4), ("softmax", 2), ("gshard", 4), ("bfloat16", 2), ("sigmoid", 2)]
)
def test_same_bits_on_ranks(built, tmp_path, name, size):
    """Ranks with different numbers of tokens share the experts of a C++ layer as they share those of Python's."""
    arguments = (size, str(tmp_path), name, str(built / "tests/cpp/libparity.so"))
    torch.multiprocessing.spawn(train_rank, arguments, nprocs=size)
