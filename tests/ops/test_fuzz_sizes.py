"""Every operator with every size and number at its limits, in a child process: a value or an error with text.

A division by zero ends a process without an exception (SIGFPE), so the child says what it draws before it calls.
"""

import itertools
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fmoe_ext import ops
from tests.ops.operators import CALLS, NOT_DRAWN, Draw

pytestmark = pytest.mark.cpu("a GPU's kernels are not called with broken memory")
ROOT = Path(__file__).parents[2]
NUMBERS = {int: (0, -1, 2**31, 2**63 - 1), float: (0.0, float("inf"), float("nan"))}


def test_every_operator_is_drawn():
    cpp = "".join(path.read_text() for path in sorted((ROOT / "csrc").glob("*.cpp")))
    python = "".join(path.read_text() for path in sorted((ROOT / "fmoe_ext").rglob("*.py")))
    found = re.findall(r'm\.def\("(\w+)\(', cpp) + re.findall(r'custom_op\(\s*"fmoe_ext::(\w+)"', python)
    assert sorted(found) == sorted([*CALLS, *NOT_DRAWN])


def limits(arguments):
    """(what is at its limit, arguments) of a valid call: each dimension of each tensor 0, each number extreme."""
    yield "valid", arguments
    for name, value in arguments.items():
        if isinstance(value, torch.Tensor):
            changed = [(f"{name} without dimension {d}", value.narrow(d, 0, 0)) for d in range(value.dim())]
            changed.append((f"{name} of zeros", value.new_zeros([0] * value.dim())))
        else:
            changed = [(f"{name}={n}", n) for n in NUMBERS.get(type(value), ())]
        for what, other in changed:
            yield what, {**arguments, name: other}
    no_tensors = {
        k: v.new_zeros([0] * v.dim()) if isinstance(v, torch.Tensor) else v for k, v in arguments.items()
    }
    yield "no elements at all", no_tensors


def draw_all():
    """In the child: a line before each call; at last how many there were of each outcome."""
    torch.set_num_threads(1)
    values = errors = 0
    whole = (3, 2, 3, 4, 4)
    sizes = [
        whole,
        (3, 2, 1, 4, 4),
        *((*whole[:i], 0, *whole[i + 1 :]) for i in (0, 1, 3, 4)),
        (0, 0, 1, 0, 0),
    ]
    for size, (name, operator) in itertools.product(sizes, CALLS.items()):
        call = operator(Draw(size, 0))
        for what, arguments in limits(call.arguments):
            print(f"{name} of {size}: {what}", flush=True)
            try:
                found = call.function(*arguments.values())
            except (RuntimeError, ValueError, TypeError, IndexError) as error:
                assert (len(str(error)) > 10 and what != "valid") or "at least" in str(error), error
                errors += 1
            else:
                values += 1
                if what == "valid":
                    compare(name, call, arguments, found)
    print(f"{values} values, {errors} errors")


def compare(name, call, arguments, found):
    oracle = getattr(ops, f"{name}_ref", None)
    if name == "newton_schulz":
        x, *coefficients, steps = arguments.values()
        expected = ops.newton_schulz_ref(x, coefficients, steps)
    elif oracle is not None:
        expected = oracle(*arguments.values())
    else:
        return
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_limits_of_every_operator_end_in_a_value_or_an_error():
    command = [sys.executable, "-c", "from tests.ops.test_fuzz_sizes import draw_all; draw_all()"]
    child = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    lines = child.stdout.splitlines()
    assert child.returncode == 0, f"{child.returncode} after {lines[-1:]}: {child.stderr[-2000:]}"
    values, errors = map(int, re.fullmatch(r"(\d+) values, (\d+) errors", lines[-1]).groups())
    assert values > 1000 and errors > 1000
