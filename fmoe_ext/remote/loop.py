"""Run one asyncio loop per process, on its own thread: all channels, servers and timers of fmoe_ext.remote live there.

Threads that train or serve call run(coroutine) and wait for the result. So callers of the blocking API need no loop of
their own, and connections are shared by all of them. The commands wait for SIGTERM or SIGINT by end_signals().
"""

import asyncio
import concurrent.futures
import os
import queue
import signal
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from fmoe_ext.remote.errors import CallTimeout

T = TypeVar("T")
# by process id: a forked child finds its parent's entry, and none of its own
_LOOPS: dict[int, asyncio.AbstractEventLoop] = {}


def submit(coroutine: Coroutine[Any, Any, T]) -> "concurrent.futures.Future[T]":
    """Start a coroutine on the loop of this process, from any other thread.

    RuntimeError in a child that was forked after its parent had started the loop: grpc hangs there.
    """
    loop = _LOOPS.get(os.getpid())
    if loop is None and _LOOPS:
        coroutine.close()
        raise RuntimeError(
            "this process was forked from one that had called remote experts, and grpc does not work in it: start it "
            "by multiprocessing's spawn or forkserver (DataLoader: multiprocessing_context=), or fork before the "
            "first call"
        )
    if loop is None:
        mine = asyncio.new_event_loop()
        # of several threads that come here at once, one stores its loop and starts it
        loop = _LOOPS.setdefault(os.getpid(), mine)
        if loop is mine:
            threading.Thread(target=loop.run_forever, name="fmoe-remote", daemon=True).start()
        else:
            mine.close()
    return asyncio.run_coroutine_threadsafe(coroutine, loop)


def run(coroutine: Coroutine[Any, Any, T], timeout: float | None = None) -> T:
    """Run a coroutine on the shared loop and wait, from any other thread; CallTimeout after timeout seconds."""
    future = submit(coroutine)
    try:
        return future.result(timeout)
    except concurrent.futures.TimeoutError:
        # from Python 3.11 on this is the builtin TimeoutError, which the coroutine may have raised itself
        if future.done():
            return future.result()
        future.cancel()
        raise CallTimeout(f"no answer within {timeout} s") from None
    except BaseException:
        future.cancel()
        raise


def end_signals() -> Callable[[float], bool]:
    """Catch SIGTERM and SIGINT from now on -> wait(seconds): True once one came; wait(0.0) waits for ever."""
    # Not a threading.Event: a handler may run while its own thread holds the event's lock, and then waits for itself,
    # for ever. A SimpleQueue may be filled in a handler.
    came: queue.SimpleQueue[int] = queue.SimpleQueue()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: came.put(number))

    def wait(seconds: float) -> bool:
        try:
            came.get(timeout=min(seconds, threading.TIMEOUT_MAX) or None)
        except queue.Empty:
            return False
        return True

    return wait
