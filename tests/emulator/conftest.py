import emu_build
import pytest
import torch


@pytest.fixture(autouse=True)
def one_torch_thread(one_thread):
    """The emulator runs on one thread, and the oracles are small: idle threads that spin only cost time."""


@pytest.fixture(scope="session")
def needs_compiler():
    if reason := emu_build.missing():
        pytest.skip(f"the emulator cannot be built: {reason}")


class Emulated:
    """The operators of a namespace; backward ones are called as autograd calls them, without gradients."""

    def __init__(self, ops):
        self.ops = ops

    def __getattr__(self, name):
        op = getattr(self.ops, name)
        if "_backward" not in name:
            return op
        call = torch.no_grad()(lambda *args: op(*args))
        call.default = op.default
        return call


@pytest.fixture(scope="session")
def emulated(needs_compiler):
    """torch.ops.fmoe_ext_emu: the ops of _C_cuda, same host code and kernels, run by the emulator on CPU tensors."""
    return Emulated(emu_build.load_ops())
