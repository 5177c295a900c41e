"""Check a kernel against float64 and the portable kernels, repeated, in graphs and on two streams.

No fixed tolerance tells a wrong kernel from a rounded one. A kernel's error from float64 is therefore compared with
the error of plain PyTorch in the same dtype, and with the error of the portable kernels (testing.assert_close). A
second run must give the same bits: races between threads show there first. child.py asks for a verdict on each kernel.
"""

import itertools
from functools import cache

import torch

from fmoe_ext import frozen, ops
from fmoe_ext.gpu import kernels as gpu_kernels
from fmoe_ext.gpu.cases import WEIGHTS, Case, Inputs, Results, main_gradients, results
from fmoe_ext.gpu.proof import PORTABLE, Verdict
from fmoe_ext.gpu.target import Target
from fmoe_ext.gpu.torch_path import tf32
from fmoe_ext.testing import assert_close

_REFERENCES = (ops.expert_mlp_ref, ops.grouped_gemm_ref, frozen.frozen_mlp_ref)


class Checker:
    """Checks kernels of one target; what they are compared with is computed once."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self.expected = cache(self._expected)
        self.portable = cache(self._portable)

    def verdict(self, kernel: str) -> Verdict:
        """Judge a kernel: proved, failed with what is wrong, or untested with why; RuntimeError if the device fails."""
        # alone, so that no other kernel computes its products; the portable ones take those that it does not
        on = () if kernel == PORTABLE else (kernel,)
        gpu_kernels.switch_on(on)
        before = gpu_kernels.runs()
        try:
            with tf32(False):  # else torch rounds the reference
                for check in (self._values, self._graph, self._streams):
                    check(kernel)
                    self.target.synchronize()  # a fault is reported with the check that caused it
        except AssertionError as error:
            return Verdict("failed", str(error))
        except torch.OutOfMemoryError as error:
            return Verdict("untested", f"out of memory: {str(error).splitlines()[0]}")
        if on and gpu_kernels.runs()[kernel] == before[kernel]:
            return Verdict("untested", "this device, or this build, has no use for it")
        return Verdict("proved")

    def _dtypes(self, kernel: str) -> tuple[torch.dtype, ...]:
        return (*self.target.dtypes, torch.float32) if kernel == PORTABLE else self.target.dtypes

    def _inputs(self, case: Case, dtype: torch.dtype, seed: int = 0) -> Inputs:
        return Inputs.of(case, dtype, self.target.device, seed)

    def _run(self, case: Case, inputs: Inputs) -> Results:
        return results(case, inputs) | (main_gradients(case, inputs) if case.T else {})

    def _expected(self, case: Case, dtype: torch.dtype) -> tuple[Results, Results]:
        """Compute (float64, plain PyTorch in the dtype)."""
        inputs = self._inputs(case, dtype)
        truth = results(case, inputs.to(torch.float64), *_REFERENCES)
        plain = results(case, inputs, *_REFERENCES)
        for values in (truth, plain):
            values |= {f"main gradient of {name}": values[f"expert_mlp d{name}"] for name in WEIGHTS}
        return truth, plain

    def _portable(self, case: Case, dtype: torch.dtype) -> Results:
        gpu_kernels.switch_on(())
        return self._run(case, self._inputs(case, dtype))

    def _values(self, kernel: str) -> None:
        """Compare all results of all cases with float64, and those of a second run with the first, to the bit."""
        for case, dtype in itertools.product(self.target.cases, self._dtypes(kernel)):
            truth, plain = self.expected(case, dtype)
            portable = plain if kernel == PORTABLE else self.portable(case, dtype)
            gpu_kernels.switch_on(() if kernel == PORTABLE else (kernel,))
            ours, again = (self._run(case, self._inputs(case, dtype)) for _ in range(2))
            for name, value in ours.items():
                described = f"{name} ({case}, {dtype})"
                assert_close(value, truth[name], plain[name], described)
                assert_close(value, truth[name], portable[name], f"{described}, beside the portable kernels")
                assert torch.equal(value, again[name]), f"{described} has other bits the second time"

    def _graph(self, kernel: str) -> None:
        """Capture a CUDA graph with some tokens, and replay it with others that choose other experts."""
        case, dtype = self.target.cases[0], self._dtypes(kernel)[0]
        held, other = (self._inputs(case, dtype, seed) for seed in (1, 2))
        # if the host read anything of the first tokens, the replay is wrong
        replay = self.target.captured(lambda: results(case, held))
        expected = results(case, other)
        held.copy_(other)
        _assert_same(replay(), expected, "in a CUDA graph")

    def _streams(self, kernel: str) -> None:
        """Run two problems on two streams at once; each must give the bits that it gives alone."""
        case, dtype = self.target.cases[0], self._dtypes(kernel)[0]
        both = [self._inputs(case, dtype, seed) for seed in (3, 4)]
        expected = [results(case, inputs) for inputs in both]
        self.target.synchronize()
        found = self.target.side_by_side([lambda i=i: results(case, i) for i in both])  # type: ignore[misc]
        for one, other in zip(found, expected, strict=True):
            _assert_same(one, other, "on two streams at once")


def _assert_same(ours: Results, expected: Results, where: str) -> None:
    for name, value in ours.items():
        assert torch.equal(value, expected[name]), f"{name} differs {where}"
