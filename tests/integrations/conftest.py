import sys

import pytest

from fmoe_ext.testing import DistributedPool


@pytest.fixture(scope="session")
def pool():
    """Two ranks that stay, because each of them imports Transformers, which takes it longer than most tests."""
    with DistributedPool(2) as pool:
        yield pool


@pytest.fixture(autouse=True)
def forget_megatrons_loss_scale():
    """A backward outside of Megatron's schedules leaves a scale [], which they cannot overwrite with theirs [1]."""
    yield
    if moe_utils := sys.modules.get("megatron.core.transformer.moe.moe_utils"):
        moe_utils.MoEAuxLossAutoScaler.main_loss_backward_scale = None
