"""The process that touches the GPU: checks and races kernels, and says each step before it takes it.

prove.py starts it and reads its messages: Ready or NotAvailable first, then a Start before each step and what the step
gave behind it (Judged, Race, TorchWin), and Finished at the end.

A check runs a kernel twice, in a CUDA graph and on two streams. No fixed tolerance tells a wrong kernel from a rounded
one. A kernel's error from float64 is therefore compared with the error of plain PyTorch in the same dtype, and with the
error of the portable kernels (testing.assert_close). A second run must give the same bits: races between threads show
there first. Races against the clock are in races.py.
"""

import faulthandler
import itertools
import multiprocessing
import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from multiprocessing.connection import Connection

import torch

from fmoe_ext import frozen, ops
from fmoe_ext.gpu import kernels as gpu_kernels
from fmoe_ext.gpu.cases import WEIGHTS, Case, Inputs, Results, main_gradients, results
from fmoe_ext.gpu.proof import PORTABLE, Key, Race, TorchWin, Verdict, load, taken_with
from fmoe_ext.gpu.races import Judged, Races, Start
from fmoe_ext.gpu.target import Target, Unavailable
from fmoe_ext.gpu.torch_path import tf32
from fmoe_ext.testing import assert_close

_REFERENCES = (ops.expert_mlp_ref, ops.grouped_gemm_ref, frozen.frozen_mlp_ref)


@dataclass(frozen=True)
class Ready:
    """The device answers."""

    key: Key
    taken_with: str  # driver and torch
    sources: Mapping[str, str]  # digest of each kernel
    known: Mapping[str, Verdict]  # of kernels that need no check


@dataclass(frozen=True)
class NotAvailable:
    """There is no such device, or it cannot be used."""

    reason: str


@dataclass(frozen=True)
class Finished:
    """The last message before the process ends."""

    done: bool = True  # False: the device has failed in this process, and another one is to go on


Message = Ready | NotAvailable | Start | Judged | Race | TorchWin | Finished


def serve(
    connection: Connection, target: Target, judged: dict[str, Verdict], race: bool, missing: bool
) -> None:
    """Check every kernel that is not judged yet, then race those that are proved: the main function of a child.

    judged: verdicts of earlier children. missing: take over those of a proof of this compute capability.
    """
    faulthandler.enable()  # a crash shows its traceback

    def end_with_parent() -> None:
        # a kernel that hangs must not hold the GPU after its parent was killed
        parent = multiprocessing.parent_process()
        assert parent is not None
        parent.join()
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()
    # 1. Start CUDA, and leave the choice of kernels to the checks: neither FMOE_GPU_KERNELS nor an old proof decides.
    try:
        key = target.connect()
    except Unavailable as error:
        connection.send(NotAvailable(str(error)))
        return
    gpu_kernels.SELECTION.stop()
    # 2. Say which kernels there are, and which need no check.
    kernels, sources = gpu_kernels.names(), gpu_kernels.sources()
    proof = load(key, sources) if missing else None
    # a proof of the compute capability says which kernels are right, not which are fast
    known = {
        name: v if v.state == "failed" else Verdict("proved")
        for name, v in (proof.verdicts if proof else {}).items()
        if v.state != "untested"
    }
    connection.send(Ready(key, taken_with(), sources, known))
    # 3. Check the others, the portable kernels first, and race those that are right.
    work = Work(connection, target, {**known, **judged})
    judged = dict(work.judged)
    done = work.check([name for name in (PORTABLE, *kernels) if name not in judged])
    if done and race:
        work.race([name for name in kernels if work.judged[name].state == "proved"])
    connection.send(Finished(done))


class Work:
    """The checks and races of one child; judged: verdicts so far, of earlier children too."""

    def __init__(self, connection: Connection, target: Target, judged: dict[str, Verdict]) -> None:
        self.send = connection.send
        self.target = target
        self.judged = judged

    def check(self, kernels: Sequence[str]) -> bool:
        """Check these kernels -> False if this process cannot use the device any further."""
        checker = _Checker(self.target)
        for name in kernels:
            # the checks compare a kernel with the portable ones
            if name != PORTABLE and self.judged[PORTABLE].state != "proved":
                self._judge(name, Verdict("untested", "the portable kernels are not proved"))
                continue
            self.send(Start(f"checking {name}", (name,)))
            try:
                self._judge(name, checker.verdict(name))
            except RuntimeError as error:  # after a fault, CUDA gives nothing but errors to the process
                self._judge(name, Verdict("failed", f"{type(error).__name__}: {str(error).splitlines()[0]}"))
                return False
        return True

    def race(self, kernels: list[str]) -> None:
        """Race these kernels, and send the events."""
        for event in Races(self.target, kernels).run():
            if isinstance(event, Judged):
                self._judge(event.kernel, event.verdict)
            else:
                self.send(event)

    def _judge(self, kernel: str, verdict: Verdict) -> None:
        self.judged[kernel] = verdict
        self.send(Judged(kernel, verdict))


class _Checker:
    """Checks the kernels of one target; what they are compared with is computed once."""

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
