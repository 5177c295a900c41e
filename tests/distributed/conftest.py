import eager_megatron  # noqa: F401
import pytest

from fmoe_ext.testing import DistributedPool


@pytest.fixture(scope="session")
def pool():
    """Four gloo processes for all tests; pool.run(fn, *args, world_size=2) uses the first two."""
    with DistributedPool(4) as pool:
        yield pool
