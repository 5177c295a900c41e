"""Saver: write changed experts to disk after each period, and read all files again now and then to find damage.

A Server with --checkpoint_dir has one. What cannot be written is counted and shown (failures), and tried again after
the next period.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

from fmoe_ext.remote import protocol
from fmoe_ext.remote.server.checkpoints import Checkpoints, Damaged
from fmoe_ext.remote.server.host import ExpertHost, ExpertMissing
from fmoe_ext.remote.server.ledger import End
from fmoe_ext.remote.server.pages import Metrics
from fmoe_ext.remote.server.state import end_of_state, end_of_weights
from fmoe_ext.remote.wire import Message

T = TypeVar("T")
log = logging.getLogger("fmoe_ext.remote")
_CHECK_SECONDS = 600.0  # between two readings of all checkpoints
PATIENCE = 60.0  # seconds that a server, when it shuts down, gives the disk for each expert


class Saver:
    """Keeps the experts of a server on a disk, which may be slow, full or broken: all access is on other threads."""

    def __init__(
        self,
        checkpoints: Checkpoints,
        host: ExpertHost,
        metrics: Metrics,
        read_state: Callable[[str], Awaitable[Message]],
    ):
        self.checkpoints, self.host, self.metrics, self.read_state = checkpoints, host, metrics, read_state
        self.saved: dict[str, End] = {}  # uid: the end on disk
        self.failures: dict[str, str] = {}  # uid: why the last attempt failed
        self.damaged: list[str] = []  # files put aside
        self.late = 0.0  # seconds that a save had taken when that was last logged; 0.0 once one took less than a period
        self.is_stuck = False  # the last save gave up: one expert took the disk more than `patience` seconds
        self.checked_at = 0.0  # time.time() at which all files had last been read again; 0.0: not yet
        self._writing = ""  # uid, for the log
        self._turn = asyncio.Lock()  # held by each save, so that an older state never overwrites a newer one

    # ---------------------------------------------------------------- reading

    async def load(self, uids: Sequence[str]) -> tuple[list[Message], dict[str, Damaged]]:
        """Load experts' checkpoints -> the states of those that have one, and why others are damaged."""
        states, damaged = [], {}
        for uid in uids:
            try:
                state = await self._call(self.checkpoints.load, uid)
            except Damaged as error:
                damaged[uid] = error
                continue
            if state is not None:
                states.append(state)
                self.saved[uid] = end_of_state(state)
        return states, damaged

    async def set_aside(self, uid: str, error: Damaged) -> None:
        """Rename a damaged file, to keep it; raise `error` and rename nothing if it is whole when read again."""
        name = await self._call(self.checkpoints.set_aside, uid)
        if name is None:
            raise error
        self.saved.pop(uid, None)
        self.damaged.append(name)
        self.metrics.add("checkpoints_damaged_total")
        version = "a version that cannot be read" if error.version is None else f"version {error.version}"
        log.error("%s: %s; the file is kept as %s. It held %s of the expert", uid, error, name, version)

    async def check_at_rest(self, bytes_per_second: float) -> None:
        """Read every file once, at a bounded rate; set a damaged one aside, and write the expert anew."""
        for uid in await self._call(self.checkpoints.uids):
            try:
                # one chunk at a time on another thread; 0: the end
                steps = self.checkpoints.check(uid)
                while count := await self._call(next, steps, 0):
                    await asyncio.sleep(count / bytes_per_second)
            except Damaged as error:
                with contextlib.suppress(Damaged):  # whole at the second reading
                    await self.set_aside(uid, error)
                    await self.save()
        self.checked_at = time.time()

    async def check_regularly(self, bytes_per_second: float) -> None:
        while True:
            try:
                await self.check_at_rest(bytes_per_second)
            except OSError as error:
                log.error("checkpoints cannot be checked: %s", error)
            await asyncio.sleep(_CHECK_SECONDS)

    # ---------------------------------------------------------------- writing

    async def save_regularly(self, period: float) -> None:
        """Save after each period, for ever, and log a save that takes longer than a period."""

        async def say_late(begin: float) -> None:
            # logged after one period, then at each doubling, so that a disk which hangs for a day does not fill the log
            seconds = period
            while True:
                await asyncio.sleep(begin + seconds - time.monotonic())
                self.late = time.monotonic() - begin
                seconds = 2 * self.late
                text = "the checkpoint of %s is late: this save has taken %.1f s, --checkpoint_period is %g s"
                log.warning(text, self._writing, self.late, period)

        while True:
            await asyncio.sleep(period)
            begin = time.monotonic()
            # a task of its own: a save on a disk that hangs never returns, so it cannot log that
            watch = asyncio.create_task(say_late(begin))
            try:
                await self.save()
            finally:
                watch.cancel()
            seconds = time.monotonic() - begin
            self.metrics.time("checkpoint_seconds", seconds)
            if seconds <= period:
                self.late = 0.0

    async def save(self, patience: float | None = None) -> dict[str, str]:
        """Write every expert that has changed since it was last written -> {uid: why it could not be written}.

        patience: seconds for one expert; the disk is not tried again after one that takes longer.
        """
        async with self._turn:
            # one after the other: while the disk is slow, only one expert's copy is in memory
            for uid, expert in list(self.host.experts.items()):
                if expert.ledger.broken:
                    continue  # its weights cannot be trusted: the file keeps the last good ones
                if self.saved.get(uid) == end_of_weights(expert.ledger):
                    self.failures.pop(uid, None)
                    continue
                await self._save(uid, patience)
            self.failures = {uid: why for uid, why in self.failures.items() if uid in self.host.experts}
            return dict(self.failures)

    async def _save(self, uid: str, patience: float | None = None) -> None:
        self._writing = uid
        try:
            if self.is_stuck:  # at an earlier expert of this last save: a thread still waits for the disk
                raise TimeoutError
            state = await self.read_state(uid)
            await asyncio.wait_for(self._call(self.checkpoints.save, state), patience)
        except ExpertMissing:
            return  # it is hosted no more
        except Exception as error:  # the next expert is written even if this one cannot be
            timeouts = TimeoutError, asyncio.TimeoutError  # two classes before Python 3.11
            # ETIMEDOUT is a TimeoutError too, with a number: a disk that answers so is not stuck
            is_late = isinstance(error, timeouts) and getattr(error, "errno", None) is None
            self.is_stuck = patience is not None and is_late
            why = f"the disk did not answer within {patience:g} s" if self.is_stuck else f"{error}"
            self.metrics.add("checkpoint_failures_total")
            self.failures[uid] = why
            log.error("%s is not saved: %s", uid, why)
        else:
            self.saved[uid] = end_of_state(state)
            self.failures.pop(uid, None)

    async def end(self, save: bool) -> None:
        """Release the folder's lock, unless a thread still writes; save: write what has changed before that."""
        if save:
            await self.save(PATIENCE)
        if not self.is_stuck:  # else a thread still writes there: the lock ends with the process
            await asyncio.to_thread(self.checkpoints.end)

    def describe_unsaved(self) -> str:
        """Return in one line what the disk lacks, and why; "" if it has everything."""
        lines = []
        for uid, why in sorted(self.failures.items()):
            expert = self.host.experts.get(uid)
            now = "?" if expert is None else expert.version
            on_disk = self.saved[uid].version if uid in self.saved else "none"
            lines.append(f"{uid} (version {now}, on disk {on_disk}: {why})")
        return "; ".join(lines)

    def describe(self, uid: str) -> dict[str, str]:
        """Return the version on disk, and why the last attempt to write a newer one failed."""
        saved = {protocol.SAVED: str(self.saved[uid].version)} if uid in self.saved else {}
        failed = {protocol.UNSAVED: self.failures[uid][:500]} if uid in self.failures else {}
        return saved | failed

    def status(self) -> dict[str, Any]:
        """Return damaged files, checked_at and late, for the status page."""
        return {"damaged": self.damaged, "checked": self.checked_at, "late": self.late}

    async def _call(self, function: Callable[..., T], *arguments: Any) -> T:
        """Call function(*arguments) on another thread."""
        return await asyncio.to_thread(function, *arguments)
