import emu_build
import pytest
import torch


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
    return emu_build.load_ops()
