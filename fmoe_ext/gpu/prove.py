"""Prove the kernels of a GPU from a process that never touches it.

A kernel that hangs or faults takes its CUDA context with it, and often its process. So a child does the work and says
each step before it takes it. When the child dies or falls silent, the kernels of its last step are to blame: the
parent notes that, starts a new child and goes on with the kernels that have no verdict yet.

    child (child.py)   Ready   Start(kernel a)  Judged(a)   Start(kernel b) ... silence
    parent             <- budget begins         notes it                        kills it, b has failed, next child

Each child settles at least one kernel, or ends the races, or shows that the GPU cannot be used: so the loop ends.
"""

import math
import multiprocessing
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess

from fmoe_ext.gpu.child import Finished, Message, NotAvailable, Ready, serve
from fmoe_ext.gpu.proof import PORTABLE, Key, Proof, Race, TorchWin, Verdict
from fmoe_ext.gpu.races import Judged, Start
from fmoe_ext.gpu.target import Target, Unavailable

_START_LIMIT = 120.0  # seconds to import torch and start CUDA
_END_LIMIT = 10.0  # seconds that a killed process may take to end


def prove(
    target: Target,
    limit: float = 60.0,
    budget: float = 300.0,
    say: Callable[[str], None] = print,
    start_limit: float = _START_LIMIT,
    missing: bool = False,
) -> Proof:
    """Check and race every kernel of cuda/select.h on a target.

    A kernel that takes longer than limit seconds, ends its process or gives wrong numbers has failed, and the others
    are proved all the same. budget seconds after the GPU has answered, the rest stays untested. say gets a line for
    each step.
    missing: verdicts that hold for these kernels on this compute capability are taken over, and only raced.
    Raises Unavailable if the GPU cannot be used at all.
    """
    return _Prover(target, limit, budget, say, start_limit, missing).run()


@dataclass
class _Child:
    """A process that touches the GPU, and our end of the pipe to it."""

    handle: SpawnProcess
    connection: Connection

    def receive(self, seconds: float) -> Message | None:
        """Return the next message, None if there is none in time; EOFError if the process has ended."""
        return self.connection.recv() if self.connection.poll(max(0.0, seconds)) else None

    def end(self) -> int | None:
        """End the process -> its exit code; None where even SIGKILL does not end it, as in a driver that hangs."""
        self.handle.join(0.5)
        self.handle.kill()
        self.handle.join(_END_LIMIT)
        self.connection.close()
        return self.handle.exitcode


@dataclass
class _Prover:
    """One run of prove(): its options, and what the children have found so far."""

    target: Target
    limit: float  # seconds for one step
    budget: float  # seconds in all, from the GPU's first answer on
    say: Callable[[str], None]
    start_limit: float  # seconds to import torch and start CUDA
    missing: bool  # take over the verdicts of a proof of this compute capability
    deadline: float = math.inf  # time.monotonic()
    key: Key | None = None
    taken_with: str = ""
    kernels: tuple[str, ...] = ()  # of select.h, without the portable ones
    sources: Mapping[str, str] = field(default_factory=dict)  # digest of each kernel
    judged: dict[str, Verdict] = field(default_factory=dict)  # kept from child to child
    races: list[Race] = field(default_factory=list)  # of the last child only
    torch_wins: list[TorchWin] = field(default_factory=list)
    racing: bool = True  # False once a race has killed its child

    def run(self) -> Proof:
        if self.target.missing is not None:
            raise Unavailable(self.target.missing)
        while not self._session():
            pass
        assert self.key is not None
        order = (PORTABLE, *self.kernels)
        spent = Verdict("untested", "there was no time left")
        verdicts = {name: replace(self.judged.get(name, spent), sources=self.sources[name]) for name in order}
        date = datetime.now(timezone.utc).isoformat(timespec="seconds")
        return Proof(self.key, self.taken_with, date, verdicts, tuple(self.races), tuple(self.torch_wins))

    def _session(self) -> bool:
        """Start a child and take its messages -> True if all is done, False if another child is to go on."""
        # races of an earlier child were run with kernels that have failed since
        self.races.clear()
        self.torch_wins.clear()
        self.say(f"starting CUDA device {self.target.index} in a process of its own")
        # spawn: CUDA does not survive a fork
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        arguments = (theirs, self.target, self.judged, self.racing, self.missing)
        handle = context.Process(target=serve, args=arguments, daemon=True)
        handle.start()
        theirs.close()  # else the pipe stays open, and the end of the child would not be seen
        child = _Child(handle, ours)
        under_way: Start | None = None
        try:
            while True:
                # Silence: out of budget, or the step that is under way hangs.
                patience = self.start_limit if under_way is None else self.limit
                left = self.deadline - time.monotonic()
                message = child.receive(min(patience, left))
                if message is None and left <= patience:
                    self.say("there is no time left")
                    return True
                if message is None:
                    self._blame(under_way, Verdict("failed", f"no answer within {patience:.0f} s"))
                    return False
                if isinstance(message, Finished):
                    return message.done
                if isinstance(message, NotAvailable):
                    raise Unavailable(message.reason)
                if isinstance(message, Ready):
                    self.key, self.taken_with, self.sources = message.key, message.taken_with, message.sources
                    self.kernels = tuple(name for name in message.sources if name != PORTABLE)
                    self.judged = {**message.known, **self.judged}
                    self.deadline = min(self.deadline, time.monotonic() + self.budget)
                elif isinstance(message, Start):
                    self.say(message.what)
                    under_way = message
                elif isinstance(message, Judged):
                    self._judge(message.kernel, message.verdict)
                elif isinstance(message, Race):
                    self.races.append(message)
                else:
                    self.torch_wins.append(message)
        except EOFError:  # the child has died; its exit code says of what
            exit_code = child.end()
            if exit_code is not None and exit_code == -signal.SIGKILL:  # not the kernel's fault
                reason = "the process was killed: the host ran out of memory, or somebody ended it"
                verdict = Verdict("untested", reason)
            elif exit_code is not None and exit_code < 0:
                verdict = Verdict("failed", f"the process ended with {signal.Signals(-exit_code).name}")
            else:
                verdict = Verdict("failed", f"the process ended with exit code {exit_code}")
            self._blame(under_way, verdict)
            return False
        finally:
            child.end()

    def _judge(self, kernel: str, verdict: Verdict) -> None:
        self.judged[kernel] = verdict
        self.say(f"  {kernel}: {verdict.state}{verdict.reason and ': '}{verdict.reason}")

    def _blame(self, under_way: Start | None, verdict: Verdict) -> None:
        """Give the verdict to the kernels that ran; if those were torch's, there are no more races."""
        if under_way is None:
            raise Unavailable(verdict.reason)
        if not under_way.kernels:
            self.racing = False
            self.say(f"  no races: {under_way.what}: {verdict.reason}")
        else:
            for kernel in under_way.kernels:
                self._judge(kernel, Verdict(verdict.state, f"{under_way.what}: {verdict.reason}"))
