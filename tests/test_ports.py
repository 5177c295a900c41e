"""tests.ports: no two processes get one port, and the system gives it to nobody."""

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests import ports


def test_ports_lie_outside_the_ephemeral_range_and_differ():
    low, high = ports.ephemeral()
    if next(ports.firsts(low, high)) in range(low, high + 1):
        pytest.skip(f"the ephemeral range, {low} to {high}, leaves no port")
    given = [ports.free_port() for _ in range(50)]
    assert len(set(given)) == 50
    assert all(1024 <= port < low or high < port < 65536 for port in given)


def test_process_beside_this_one_gets_other_ports():
    code = "from tests.ports import free_port; print([free_port() for _ in range(398)])"
    root = Path(ports.__file__).parents[1]
    own = ports.Slice()
    ours = {own.next() for _ in range(398)}
    said = subprocess.run([sys.executable, "-c", code], cwd=root, check=True, capture_output=True, text=True)
    assert len(ours) == 398
    assert not ours & set(map(int, said.stdout.strip("[]\n").split(",")))


def test_port_that_is_taken_is_not_given():
    own = ports.Slice()
    first = own.next()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", first + 1))
        assert own.next() == first + 2


@pytest.mark.parametrize(("low", "high"), [(32_768, 60_999), (1_024, 60_000), (16_000, 65_535)])
def test_slices_keep_out_of_the_range_as_long_as_there_are_others(low, high):
    firsts = list(ports.firsts(low, high))
    outside = [first for first in firsts if not low <= first <= high]
    assert firsts[: len(outside)] == outside and len(outside) >= 10
    assert all(
        first >= 1024 and (first + ports.SLICE <= low or high < first <= 65_536 - ports.SLICE)
        for first in outside
    )


def test_range_that_is_all_there_is_has_slices_too():
    firsts = list(ports.firsts(1_024, 65_535))
    assert len(firsts) > 100 and all(1_024 <= first <= 65_536 - ports.SLICE for first in firsts)
