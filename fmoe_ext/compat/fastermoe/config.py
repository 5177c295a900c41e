"""fmoe.fastermoe.config."""

from typing import Any

from fmoe_ext import _env


def float_from_env(key: str, default: Any = -1) -> float:
    """The value of an environment variable as a float, default if it is not set."""
    text = _env.unlisted(key)
    return default if text is None else float(text)


def switch_from_env(key: str, default: Any = False) -> bool:
    """Whether an environment variable is "1" or "ON", default if it is not set."""
    text = _env.unlisted(key)
    return default if text is None else text in ("1", "ON")
