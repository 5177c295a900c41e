import sys
from pathlib import Path

import pytest
import torch

import fmoe_ext.ops  # noqa: F401  (the schemas)

sys.path.insert(0, str(Path(__file__).parent))
import emu_build

OPS = (
    "count_tokens",
    "sort_tokens",
    "apply_capacity",
    "permute",
    "unpermute",
    "unpermute_backward",
    "topk_gate",
    "topk_gate_backward",
    "grouped_gemm",
    "grouped_gemm_backward",
    "expert_mlp",
    "expert_mlp_backward",
)


@pytest.fixture(autouse=True)
def one_torch_thread():
    """The emulator runs on one thread, and the oracles are small: idle threads that spin only cost time."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def needs_compiler():
    if reason := emu_build.missing():
        pytest.skip(f"the emulator cannot be built: {reason}")


@pytest.fixture(scope="session")
def emulated(needs_compiler):
    """torch.ops.fmoe_ext_emu: the ops of _C_cuda, same host code and kernels, run by the emulator on CPU tensors."""
    library = torch.library.Library("fmoe_ext_emu", "DEF")
    for name in OPS:
        schema = str(getattr(torch.ops.fmoe_ext, name).default._schema)
        library.define(schema.removeprefix("fmoe_ext::"))
    torch.ops.load_library(str(emu_build.build("plain", emu_build.OPS)[0]))
    yield torch.ops.fmoe_ext_emu
    del library  # the definitions live as long as this object
