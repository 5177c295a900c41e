import eager_megatron  # noqa: F401
import megatron_layouts
import pytest

from fmoe_ext.testing import DistributedPool


@pytest.fixture(scope="session")
def pool():
    """Four gloo processes for all tests; pool.run(fn, *args, world_size=2) uses the first two."""
    with DistributedPool(4) as pool:
        yield pool


@pytest.fixture(autouse=True)
def groups_of_megatron(request):
    """Megatron keeps its groups in a module; later tests are not to share the cores with their threads."""
    pool = request.getfixturevalue("pool") if "megatron" in request.module.__name__ else None
    yield
    if pool is not None:
        pool.run(megatron_layouts.destroy)
