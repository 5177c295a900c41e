import sys

import pytest

from fmoe_ext import compat
from fmoe_ext.testing import DistributedPool


@pytest.fixture(scope="session")
def pool():
    with DistributedPool(2) as pool:
        yield pool


@pytest.fixture
def fmoe_installed():
    """`import fmoe` means fmoe_ext.compat during the test."""
    compat.install()
    yield
    for name in [name for name in sys.modules if name == "fmoe" or name.startswith("fmoe.")]:
        del sys.modules[name]
