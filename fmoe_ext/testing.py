"""Test layers, also your own: assert_close() against a float64 truth, run_distributed() on gloo processes.

If a rank fails, the error has the text of each one that failed, died or did not finish, and no process is left.
"""

import contextlib
import gc
import multiprocessing.connection
import multiprocessing.util
import os
import signal
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fmoe_ext import _env

GRACE = 5.0  # seconds that ranks have left to report, once another has failed or the timeout has passed


def devices() -> list[str]:
    """List the devices that tests run on: the CPU, and the first CUDA device if there is one."""
    return ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]


def assert_close(ours: torch.Tensor, truth: torch.Tensor, plain: torch.Tensor, name: str = "result") -> None:
    """Check |ours - truth| <= 2 * |plain - truth| + 2 * eps(dtype) * |truth|, in the norm and in the largest element.

    ours and plain have the dtype under test (plain: the same formula in plain PyTorch), truth is float64.
    The bound follows dtype and shape by itself. Compare moved data with torch.equal instead.

    Example:

        >>> x, y = torch.randn(8, 8), torch.randn(8, 8)
        >>> truth = x.double() @ y.double()
        >>> assert_close((y.T @ x.T).T, truth, plain=x @ y)
        >>> assert_close(x @ y + 1, truth, plain=x @ y)
        Traceback (most recent call last):
        ...
        AssertionError: ...
    """
    assert ours.shape == truth.shape, f"{name}: shape {tuple(ours.shape)}, expected {tuple(truth.shape)}"
    assert ours.dtype == plain.dtype, f"{name}: dtype {ours.dtype}, expected {plain.dtype}"
    if ours.numel() == 0:
        return
    truth = truth.detach().double().cpu()
    ours_error = (ours.detach().double().cpu() - truth).abs()
    plain_error = (plain.detach().double().cpu() - truth).abs()
    assert torch.isfinite(ours_error).all(), (
        f"{name}: not finite at {(~torch.isfinite(ours_error)).nonzero()[0].tolist()}"
    )
    eps = torch.finfo(ours.dtype).eps
    for measure, reduce in (("norm", torch.linalg.vector_norm), ("largest element", torch.max)):
        limit = 2 * reduce(plain_error) + 2 * eps * reduce(truth.abs())
        error = reduce(ours_error)
        assert error <= limit, (
            f"{name}: error in the {measure} is {error:.3e}, allowed {limit:.3e} "
            f"(plain PyTorch {reduce(plain_error):.3e}), worst at index "
            f"{torch.unravel_index(ours_error.argmax(), ours_error.shape)}"
        )


class DistributedError(AssertionError):
    """Ranks of run_distributed() failed; the text has each one's traceback, exit code or silence."""


def run_distributed(fn: Callable[..., Any], world_size: int, *args: Any, timeout: float = 120.0) -> list[Any]:
    """Call fn(*args) on world_size gloo processes with a default process group -> the list of results by rank.

    fn is a function of a module, and args and results can be pickled. timeout: seconds for the whole call, and so for
    each collective; a rank may take GRACE longer. Raises DistributedError with the text of every rank that failed, died
    or did not finish. No process is left in any case.
    """
    with DistributedPool(world_size) as pool:
        return pool.run(fn, *args, timeout=timeout)


class DistributedPool:
    """Processes that stay: run() any number of functions on all or some of them.

    Starting one takes milliseconds: they are forked from a server (multiprocessing's forkserver) that has imported
    torch and fmoe_ext once for all pools of this program. Each run has a fresh default process group (gloo). After a
    failure the processes are replaced. Processes that a function starts end with the pool, and its temporary files go
    with it.
    """

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._processes: list[_Process] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = (
            None  # where the processes have temporary files
        )

    def __enter__(self) -> "DistributedPool":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(
        self, fn: Callable[..., Any], *args: Any, world_size: int | None = None, timeout: float = 120.0
    ) -> list[Any]:
        """Call fn(*args) on the first world_size processes -> the list of results by rank; see run_distributed."""
        world_size = world_size or self.world_size
        assert world_size <= self.world_size, (
            f"{world_size} ranks, but the pool has {self.world_size} processes"
        )
        if not self._processes:
            self._folder = tempfile.TemporaryDirectory(prefix="ranks-", ignore_cleanup_errors=True)
            self._processes = [_start(self._folder.name) for _ in range(self.world_size)]
            for process in self._processes:
                self._wait_until_ready(process)
        ranks = self._processes[:world_size]
        with tempfile.TemporaryDirectory() as folder:
            job = (fn, args, world_size, str(Path(folder, "store")), timeout)
            try:
                for rank, process in enumerate(ranks):
                    process.connection.send((rank, *job))
                outcomes = _collect(ranks, time.monotonic() + timeout + GRACE)
            except BaseException:  # else the next run would take this one's results for its own
                self._kill()
                raise
        failures = {rank: text for rank, (ok, text) in outcomes.items() if not ok}
        if failures:
            self._kill()
            raise DistributedError("\n".join(f"rank {rank}: {failures[rank]}" for rank in sorted(failures)))
        return [outcomes[rank][1] for rank in range(world_size)]

    def _wait_until_ready(self, process: "_Process") -> None:
        """Wait until the process has begun, so that this does not count for the timeout of a run."""
        try:
            process.connection.recv()
        except EOFError:
            self._kill()
            raise DistributedError(
                "a process ended before it began. Each new process imports the program's main file: what starts "
                'processes belongs there under `if __name__ == "__main__":`'
            ) from None

    def close(self) -> None:
        """End the processes, which have GRACE seconds to clean up."""
        for process in self._processes:
            with contextlib.suppress(OSError):  # it has ended already
                process.connection.send(None)
        deadline = time.monotonic() + GRACE
        for process in self._processes:
            process.handle.join(max(0.0, deadline - time.monotonic()))
        self._kill()

    def _kill(self) -> None:
        for process in self._processes:
            process.kill()
        self._processes = []
        if self._folder is not None:
            self._folder.cleanup()


# How a run goes:
#   this process      the fork server                      a rank
#   _start() -------> has imported torch; forks ---------> _serve(): says "ready", waits for a job
#   run() -----------------(rank, fn, args, ...)---------> a fresh process group, fn(*args), a barrier
#   _collect() <-----------(True, result) or (False, traceback)
# A rank ends with its parent (_end_with_parent), and takes along all that it has started.
@dataclass(frozen=True)
class _Process:
    """A process of a pool, the leader of a process group, so that those which it started can be ended with it."""

    handle: BaseProcess
    connection: Connection

    def kill(self) -> None:
        self.handle.kill()
        with contextlib.suppress(ProcessLookupError):  # nobody is left of the group
            os.killpg(self.handle.pid or 0, signal.SIGKILL)
        self.handle.join()
        self.connection.close()


def _start(folder: str) -> _Process:
    """Start a process with this one's environment, forked from a server that has imported torch once for all pools."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    ours, theirs = context.Pipe()
    handle = context.Process(target=_serve, args=(theirs, folder, _env.everything()), daemon=True)
    handle.start()
    theirs.close()
    return _Process(handle, ours)


def _collect(ranks: Sequence[_Process], deadline: float) -> dict[int, tuple[bool, Any]]:
    """Return {rank: (True, result) or (False, text)} of all ranks; one that is silent at the deadline has failed."""
    outcomes: dict[int, tuple[bool, Any]] = {}
    waiting = {process.connection: rank for rank, process in enumerate(ranks)}
    while waiting:
        ready = multiprocessing.connection.wait(list(waiting), max(0.0, deadline - time.monotonic()))
        if not ready:
            return outcomes | {rank: (False, "did not finish in time") for rank in waiting.values()}
        for connection in ready:
            assert isinstance(connection, Connection)
            rank = waiting.pop(connection)
            try:
                outcomes[rank] = connection.recv()
            except EOFError:
                handle = ranks[rank].handle
                handle.join()
                outcomes[rank] = False, f"the process ended with exit code {handle.exitcode}"
            # the others wait in vain for a rank that has failed
            if not outcomes[rank][0]:
                deadline = min(deadline, time.monotonic() + GRACE)
    return outcomes


def _serve(connection: Connection, folder: str, environment: dict[str, str]) -> None:
    """Run the jobs of a pool, as one of its ranks: the main function of a process."""
    # 1. Set up: a process group of the system, the environment, folders, signals.
    os.setpgid(0, 0)
    gc.freeze()  # collections skip what the server imported, so that its memory pages stay shared
    _env.replace(environment)  # the server has the environment of the first pool
    tempfile.tempdir = folder
    os.putenv("TMPDIR", folder)  # for the processes that this one starts
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C, and ends this process then
    with contextlib.suppress(AttributeError, OSError):  # Linux, where a sandbox allows it
        # with the usual policy gloo's thread preempts the one that waits for its message, and spins
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    connection.send("ready")
    # 2. Jobs, each with a fresh default group, until None comes.
    while (job := connection.recv()) is not None:
        rank, fn, args, world_size, store, timeout = job
        result: tuple[bool, Any]
        try:
            dist.init_process_group(
                "gloo",
                init_method=f"file://{store}",
                rank=rank,
                world_size=world_size,
                timeout=timedelta(seconds=timeout),
            )
            result = True, fn(*args)
            dist.barrier()  # a fast rank that leaves would abort the collectives of a slow one
        except BaseException:
            result = False, traceback.format_exc()
        if dist.is_initialized():
            dist.destroy_process_group()
        gc.collect()  # a group left in a cycle keeps a thread of gloo's, which wakes a hundred times a second
        connection.send(result)
    # 3. End, at once if nothing is left to end: the interpreter would take a second.
    if not multiprocessing.active_children():
        multiprocessing.util._run_finalizers()  # type: ignore[attr-defined]  # unlinks locks, as tqdm's
        os._exit(0)


def _end_with_parent() -> None:
    """Wait for the end of the parent, then kill this process and those that it has started."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os.killpg(0, signal.SIGKILL)
