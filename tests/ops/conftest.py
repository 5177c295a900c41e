import pytest
import torch

from tests.ops import instruction_sets


@pytest.fixture
def one_thread():
    """For many tiny calls, where waking a second thread takes longer than the work."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def _instruction_set(name):
    others = () if name == "portable" else (pytest.mark.cpu("one of its instruction sets"),)
    return pytest.param(name, marks=others)


@pytest.fixture(params=map(_instruction_set, instruction_sets.ISAS))
def isa(request):
    """Every instruction set of the CPU kernels, one after the other."""
    with instruction_sets.restored():
        instruction_sets.use(request.param)
        yield request.param
