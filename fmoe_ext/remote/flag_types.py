"""Types of the flags of fmoe-server and fmoe-dht, which refuse what cannot be."""

import argparse
from collections.abc import Callable
from typing import Any


def _number(kind: type[int] | type[float], least: float, may_be_least: bool) -> Callable[[Any], float]:
    """A type of argparse: numbers from least on, or above it."""

    def read(text: Any) -> float:
        value = kind(text)
        if not (value > least or (may_be_least and value == least)):
            raise argparse.ArgumentTypeError(
                f"must be {'at least' if may_be_least else 'more than'} {least}, but is {text}"
            )
        return value

    read.__name__ = kind.__name__  # what argparse calls it where kind refuses
    return read


POSITIVE, POSITIVE_INT = _number(float, 0, False), _number(int, 1, True)
NOT_NEGATIVE, NOT_NEGATIVE_INT = _number(float, 0, True), _number(int, 0, True)


def endpoint(text: Any) -> str:
    """A type of argparse: host:port or [IPv6]:port; grpc would take port 70000 for 4464."""
    host, colon, number = str(text).rpartition(":")
    if not (host and colon and number.isdecimal() and int(number) < 1 << 16):
        raise argparse.ArgumentTypeError(f"must be host:port or [IPv6]:port, but is {text}")
    return str(text)


def port(text: Any) -> int:
    """A type of argparse: 0 (any) to 65535."""
    if not (str(text).isdecimal() and int(text) < 1 << 16):
        raise argparse.ArgumentTypeError(f"must be a port, 0 to 65535, but is {text}")
    return int(text)
