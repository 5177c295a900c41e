"""The GPU as `fmoe gpu prove` uses it, in the child process only: which problems it gets, and how it is timed.

Tests use an emulated one, without a GPU.
"""

import math
import time
from collections.abc import Callable, Sequence

import torch

from fmoe_ext import ops
from fmoe_ext.gpu import kernels as gpu_kernels
from fmoe_ext.gpu.cases import CASES, RACES, Case, Results
from fmoe_ext.gpu.proof import Key

_WARM_UP = 0.02  # seconds that a function runs before it is timed
_REPETITIONS = 10  # of which the median counts
_BUSY = 4096  # rows and columns of the products that keep the device busy
_BUSY_FLOPS = 1e15  # a second, at which a device computes them; a slower one is only kept busy for longer


class Unavailable(RuntimeError):
    """There is no such GPU, or it cannot be used; the text says why."""


def captured(function: Callable[[], Results]) -> Callable[[], Results]:
    """Capture function as a CUDA graph: a call of the result replays it on what its inputs hold by then."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        # what is made at the first use, as cuBLAS's workspace, must not be made in a capture
        for _ in range(2):
            function()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = function()

    def replay() -> Results:
        graph.replay()
        return found

    return replay


class Target:
    """CUDA device `index`; made anywhere, used only after connect()."""

    dtypes: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float16)
    cases: Sequence[Case] = CASES
    races: Sequence[Case] = RACES
    rounds = 3  # of a race: the median drops one disturbed measurement
    missing = ops.cuda_module_missing  # why there are no kernels to prove; known without touching the GPU

    def __init__(self, index: int = 0) -> None:
        self.index = index

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", self.index)

    def connect(self) -> Key:
        """Start CUDA on the device -> the model of GPU that the proof is about; Unavailable if that fails."""
        count = torch.cuda.device_count()
        if not 0 <= self.index < count:
            raise Unavailable(f"there is no CUDA device {self.index}: torch sees {count}")
        try:
            torch.cuda.set_device(self.index)
            torch.cuda.synchronize()
            return gpu_kernels.key_of(self.index)
        except RuntimeError as error:
            raise Unavailable(f"CUDA device {self.index} cannot be used: {error}") from error

    def synchronize(self) -> None:
        """Wait for the device; a kernel's fault is raised here."""
        torch.cuda.synchronize()

    def milliseconds(self, function: Callable[[], object]) -> float:
        """Return the median time of a call of function on the device, without the host's time to launch it."""
        # 1. Warm up, and find the host's time for the launches of a call.
        host = math.inf
        stop = time.monotonic() + _WARM_UP
        while time.monotonic() < stop:
            start = time.perf_counter()
            function()
            host = min(host, time.perf_counter() - start)
            torch.cuda.synchronize()
        # 2. Keep the device busy for about as long as the host needs for all launches: the host gets ahead, and the
        # events below lie behind one another in a full queue.
        a = torch.zeros(_BUSY, _BUSY, dtype=torch.bfloat16, device=self.device)
        out = torch.empty_like(a)
        for _ in range(min(1000, math.ceil(_REPETITIONS * host * _BUSY_FLOPS / (2 * _BUSY**3)))):
            torch.mm(a, a, out=out)
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(_REPETITIONS)]
        for begin, end in events:
            begin.record()
            function()
            end.record()
        torch.cuda.synchronize()
        return sorted(begin.elapsed_time(end) for begin, end in events)[_REPETITIONS // 2]

    def captured(self, function: Callable[[], Results]) -> Callable[[], Results]:
        """Call captured(); the emulated device has no graphs."""
        return captured(function)

    def side_by_side(self, functions: Sequence[Callable[[], Results]]) -> list[Results]:
        """Run functions at the same time, each on a stream of its own, and return their results."""
        streams = [torch.cuda.Stream() for _ in functions]
        found = []
        for stream, function in zip(streams, functions, strict=True):
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                found.append(function())
        for stream in streams:
            torch.cuda.current_stream().wait_stream(stream)
        return found
