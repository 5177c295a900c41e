import pytest

from fmoe_ext.finetune.streaming import linear


@pytest.fixture(autouse=True)
def products_of_torch(monkeypatch):
    """Products outside of the experts are torch's on every processor, so that models can be compared to the bit."""
    monkeypatch.setattr(linear, "fast_bfloat16", lambda: True)
    monkeypatch.setattr(linear, "fast_float16", lambda: True)
