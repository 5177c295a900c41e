import pytest
import torch


@pytest.fixture
def one_thread():
    """For many tiny calls, where waking a second thread takes longer than the work."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
