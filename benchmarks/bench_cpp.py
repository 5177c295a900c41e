"""Time of a small layer's step in C++ and in Python, in turn, one thread: python -m benchmarks.bench_cpp LIBPARITY.

LIBPARITY: the library that tests/test_cpp.py builds of tests/cpp/parity.cpp, whose operator step_seconds times C++.
"""

import statistics
import sys
import time

import torch

import fmoe_ext

ROUNDS, STEPS = 20, 50


def python_seconds(tokens, steps):
    """Seconds of each step, as step_seconds() in tests/cpp/parity.cpp measures them."""
    layer = fmoe_ext.FMoETransformerMLP(8, 64, 64, "swiglu", gate="softmax", bias=False)
    x, grad = torch.randn(tokens, 64), torch.ones(tokens, 64)
    seconds = []
    for _ in range(steps):
        begin = time.perf_counter()
        layer(x).backward(grad)
        layer.zero_grad()
        seconds.append(time.perf_counter() - begin)
    return seconds


def main(library):
    torch.ops.load_library(library)
    torch.set_num_threads(1)
    for tokens in (1, 64):
        times = {"C++": [], "Python": []}
        for _ in range(ROUNDS):
            times["C++"].append(statistics.median(torch.ops.fmoe_parity.step_seconds(tokens, STEPS)))
            times["Python"].append(statistics.median(python_seconds(tokens, STEPS)))
        ratio = statistics.median(c / p for c, p in zip(times["C++"], times["Python"], strict=True))
        text = ", ".join(f"{name} {statistics.median(values) * 1e6:.0f} us" for name, values in times.items())
        print(f"T = {tokens}: {text}; C++ takes {ratio:.2f} of Python's time")


if __name__ == "__main__":
    main(sys.argv[1])
