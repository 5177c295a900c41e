"""The process that touches the GPU: checks and races kernels, and says each step before it takes it.

prove.py starts it and reads its messages: Ready or NotAvailable first, then a Start before each step and what the step
gave behind it (Judged, Race, TorchWin), and Finished at the end.
"""

import faulthandler
import multiprocessing
import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection

from fmoe_ext.gpu import kernels as gpu_kernels
from fmoe_ext.gpu.checks import Checker
from fmoe_ext.gpu.proof import PORTABLE, Key, Race, TorchWin, Verdict, load, taken_with
from fmoe_ext.gpu.races import Judged, Races, Start
from fmoe_ext.gpu.target import Target, Unavailable


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
        checker = Checker(self.target)
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
