"""pytest --device cuda|emulated|torch: the tests of operators and layers through the CUDA kernels, or torch's.

cuda      Tensors that a test makes without naming a device are made on the GPU.
emulated  The operators run the kernels of cuda/ on the emulator instead of those of csrc/; tensors stay on the CPU.
torch     grouped_gemm and expert_mlp run what FMOE_GPU_KERNELS=torch takes on a GPU; tensors stay on the CPU.
"""

import functools
import gc
import multiprocessing.forkserver
import os
import re
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path

import hypothesis
import pytest
import torch

from fmoe_ext import ops
from fmoe_ext.gpu import torch_path
from fmoe_ext.testing import DistributedPool
from tests.on_cuda import OnCuda
from tests.ops import instruction_sets

pytest_plugins = ["leftovers"]

HERE = Path(__file__).parent
# Examples of a fuzz test: make test, and make test-all, which passes --hypothesis-profile=whole.
for profile, examples in {"quick": 100, "whole": 500}.items():
    hypothesis.settings.register_profile(profile, max_examples=examples)
ON_ANY_DEVICE = (
    "ops",
    "gates",
    "test_layers.py",
    "test_linear.py",
    "test_transformer.py",
    "test_transformer_arguments.py",
    "test_balance.py",
)


def pytest_addoption(parser):
    parser.addoption("--device", default="cpu", choices=["cpu", "cuda", "emulated", "torch"])


def pytest_configure(config):
    if not config.getoption("--hypothesis-profile"):
        hypothesis.settings.load_profile("quick")
    if "PYTEST_XDIST_WORKER" in os.environ:
        torch.set_num_threads(1)  # processes of a parallel run share the cores
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # programs that tests start too
    if torch.cuda.is_available():
        torch._inductor.config.compile_threads = 1  # Triton's compile workers would outlive the run
    if config.getoption("--device") == "cuda" and not config.option.collectonly:
        reason = ops.cuda_module_missing or (None if torch.cuda.is_available() else "there is no CUDA device")
        if reason:
            raise pytest.UsageError(f"--device cuda: {reason}")


def pytest_collection_modifyitems(config, items):
    items.sort(
        key=lambda item: item.get_closest_marker("long") is None
    )  # at the end one would keep one core alone
    device = config.getoption("--device")
    if device == "cpu":
        return
    kept = []
    for item in items:
        if item.path.relative_to(HERE).parts[0] in ON_ANY_DEVICE:
            if marker := item.get_closest_marker("cpu"):
                item.add_marker(pytest.mark.skip(reason=f"about the CPU: {marker.args[0]}"))
            kept.append(item)
    config.hook.pytest_deselected(items=[item for item in items if item not in set(kept)])
    items[:] = kept


@pytest.hookimpl(tryfirst=True)  # before fixtures of modules
def pytest_runtest_setup(item):
    """Lets each test draw the same numbers at every run, whatever ran before it."""
    torch.manual_seed(0)


# What ranks of a pool import, by a word of the test's file.
OF_RANKS = {
    "": ("fmoe_ext.testing", "fmoe_ext.audit.run", "torch._dynamo"),  # optimizers import the last
    "compile": ("torch._inductor.compile_fx", "torch._dynamo.backends.debugging"),
    "transformers": ("transformers.models.qwen3_moe.modeling_qwen3_moe", "transformers.trainer", "peft"),
    "torchtitan": ("test_torchtitan",) if all(map(find_spec, ("torchtitan", "triton"))) else (),
    "megatron": (
        "eager_megatron",
        "megatron.core.models.gpt",
        "megatron.core.optimizer",
        "megatron.core.pipeline_parallel.schedules",
    ),
}
text_of = functools.cache(Path.read_text)


def pytest_collection_finish(session):
    """Starts the server that pools and tests.forked fork from: it imports once what takes each process seconds."""
    gc.freeze()  # modules and tests stay: a collection need not look at a million objects
    of_pools = {item.path for item in session.items if "pool" in getattr(item, "fixturenames", ())}
    of_pools |= {item.path for item in session.items if "run_distributed" in text_of(item.path)}
    forks = re.compile(r"tests\.(forked|pages)")
    files = of_pools | {item.path for item in session.items if forks.search(text_of(item.path))}
    if session.config.option.collectonly or not files:
        return
    words = [word for word in OF_RANKS if any(word in text_of(file) for file in files)]
    server = multiprocessing.forkserver
    server.set_forkserver_preload([module for word in words for module in OF_RANKS[word]])
    if of_pools:
        server.ensure_running()


@pytest.fixture
def clean_state(tmp_path, monkeypatch):
    """A folder of its own, as a program started there has, and PyTorch's global state put back afterwards."""
    monkeypatch.chdir(tmp_path)
    state = torch.get_rng_state()
    yield tmp_path
    torch.set_rng_state(state)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@pytest.fixture(scope="session")
def emulated_in_the_place_of_cpu():
    import emu_build

    if reason := emu_build.missing():
        pytest.skip(f"the emulator cannot be built: {reason}")
    emulated = emu_build.load_ops()
    emulated.set_device(90, 3)
    library = torch.library.Library("fmoe_ext", "IMPL")
    for name in emu_build.OPERATORS:
        library.impl(name, getattr(emulated, name).default, "CPU", allow_override=True)
    yield
    del library  # its registrations live as long as it does


@pytest.fixture(scope="session")
def torch_path_in_the_place_of_cpu():
    library = torch_path.install("CPU")
    yield
    del library  # its registrations live as long as it does


def _instruction_set(name):
    others = () if name == "portable" else (pytest.mark.cpu("one of its instruction sets"),)
    return pytest.param(name, marks=others)


@pytest.fixture(params=map(_instruction_set, instruction_sets.ISAS))
def isa(request):
    """Every instruction set of the CPU kernels, one after the other."""
    with instruction_sets.restored():
        instruction_sets.use(request.param)
        yield request.param


@pytest.fixture(autouse=True)
def on_device(request, monkeypatch):
    device = request.config.getoption("--device")
    bad_indices = request.node.get_closest_marker("bad_indices") is not None
    if device == "cuda" and bad_indices:
        monkeypatch.setenv("FMOE_DEBUG", "1")  # they raise as on the CPU
    if device in ("emulated", "torch"):
        if bad_indices:
            pytest.skip(
                "kernels check no index values; on a CUDA tensor FMOE_DEBUG=1 does (tests/ops/test_debug.py)"
            )
        name = "emulated" if device == "emulated" else "torch_path"
        request.getfixturevalue(f"{name}_in_the_place_of_cpu")
    with OnCuda() if device == "cuda" else nullcontext():
        yield


@pytest.fixture
def one_thread():
    """For many tiny calls, where waking a second thread takes longer than the work."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def one_process_group():
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="session")
def pool():
    """Two ranks that stay, because an import of Transformers takes each of them longer than most tests."""
    with DistributedPool(2) as pool:
        yield pool
