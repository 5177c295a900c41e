"""Timing of forward and backward on a GPU with events, and by the clock on a CPU, for the bench_gpu_* programs.

A step to be timed is two functions, forward() -> out and backward(out). time_interleaved() measures several in turn,
measure_ceilings() what the device can do at best; Device counts the memory and the launches of a call.
"""

import statistics
import time

import torch

from benchmarks import roofline


class Device:
    """A CUDA device; or the CPU, on which every step can be tried out and no figure means anything."""

    def __init__(self, name):
        self.name = name
        self.is_cuda = name == "cuda"

    def synchronize(self):
        if self.is_cuda:
            torch.cuda.synchronize()

    def mark(self):
        """A moment on the device's time line."""
        if not self.is_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, start, end):
        return start.elapsed_time(end) / 1e3 if self.is_cuda else end - start

    def peak_bytes(self, step):
        """Growth of allocated memory at its highest during step; None on the CPU."""
        if not self.is_cuda:
            step()
            return None
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before

    def launches(self, step):
        """Kernels and copies that step starts on the device; None on the CPU."""
        if not self.is_cuda:
            step()
            return None
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            step()
            torch.cuda.synchronize()
        return sum(event.device_type == torch.autograd.DeviceType.CUDA for event in profile.events())


def time_round(device, steps, calls):
    """Seconds of (forward, backward) a call, over `calls` calls that take the input sets in turn."""
    marks = []
    for call in range(calls):
        forward, backward = steps[call % len(steps)]
        start = device.mark()
        out = forward()
        middle = device.mark()
        backward(out)
        marks.append((start, middle, device.mark()))
        del out
    device.synchronize()
    forward, backward = zip(*((device.seconds(a, b), device.seconds(b, c)) for a, b, c in marks), strict=True)
    return statistics.median(forward), statistics.median(backward)


def time_interleaved(device, steps, seconds_a_round, rounds):
    """{name: [(forward, backward) of each round]}; steps: {name: [(forward, backward) of each input set]}.

    All implementations take turns, so that drift of clocks and temperature meets all alike.
    """
    calls = {}
    for name, sets in steps.items():
        time_round(device, sets, len(sets))  # compiles, tunes and fills the allocator
        forward, backward = time_round(device, sets, len(sets))
        calls[name] = max(len(sets), min(60, int(seconds_a_round / (forward + backward))))
    measured = {name: [] for name in steps}
    for _ in range(rounds):
        for name, sets in steps.items():
            measured[name].append(time_round(device, sets, calls[name]))
    return measured


def measure_ceilings(device, size, repeats):
    """FLOP/s of a bfloat16 product of random matrices and bytes/s of a copy, the best of some repeats."""
    a, b = (torch.randn(size, size, device=device.name).to(torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    source = torch.randn(size * size * 4, device=device.name)
    target = torch.empty_like(source)

    def best(step):
        times = []
        for _ in range(repeats):
            start = device.mark()
            step()
            end = device.mark()
            device.synchronize()
            times.append(device.seconds(start, end))
        return min(times)

    product = best(lambda: torch.mm(a, b, out=out))
    copy = best(lambda: target.copy_(source))
    return roofline.Ceilings(2 * size**3 / product, 2 * source.nbytes / copy)
