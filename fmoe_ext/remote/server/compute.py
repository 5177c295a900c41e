"""The thread that computes: one a device, fed by a FairQueue."""

import concurrent.futures
import threading
import traceback
from collections.abc import Callable
from typing import TypeVar

from fmoe_ext.remote.server.fair_queue import FairQueue, Job
from fmoe_ext.remote.server.host import ExpertHost

T = TypeVar("T")


class ComputeThread:
    """Runs batches and tasks of a queue through a host until stop()."""

    def __init__(self, host: ExpertHost, queue: FairQueue):
        self.host, self.queue = host, queue
        self.num_batches = 0
        self.num_jobs = 0
        self.num_crashes = 0
        self._thread = threading.Thread(target=self._run, name="fmoe-compute", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout: float = 10.0) -> None:
        """Finishes what waits, then ends."""
        self.queue.close()
        self._thread.join(timeout)

    def call(self, function: Callable[[], T]) -> "concurrent.futures.Future[T]":
        """function() on the computing thread, between two batches."""
        future: concurrent.futures.Future[T] = concurrent.futures.Future()

        def task() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)

        self.queue.put_task(task)
        return future

    def _run(self) -> None:
        while (work := self.queue.take()) is not None:
            if callable(work):
                work()
            elif work:
                self.num_batches += 1
                self.num_jobs += len(work)
                self._run_batch(work)

    def _run_batch(self, batch: list[Job]) -> None:
        try:
            self.host.run(batch)
        except Exception as error:  # whatever happens, the next batch is served
            self.num_crashes += 1
            traceback.print_exc()
            for job in batch:
                job.done(error)
