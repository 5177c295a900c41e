import sys

import pytest

from fmoe_ext import compat


@pytest.fixture
def fmoe_installed():
    """`import fmoe` means fmoe_ext.compat during the test."""
    compat.install()
    yield
    for name in [name for name in sys.modules if name == "fmoe" or name.startswith("fmoe.")]:
        del sys.modules[name]
