"""One asyncio loop a process, on its own thread: every channel, server and timer of fmoe_ext.remote lives there."""

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
_LOOPS: dict[int, asyncio.AbstractEventLoop] = {}  # by process


def submit(coroutine: Coroutine[Any, Any, T]) -> "concurrent.futures.Future[T]":
    """Starts a coroutine on the loop of this process, from any other thread.

    RuntimeError in a child that was forked once there was a loop, where grpc hangs.
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
        loop = _LOOPS.setdefault(os.getpid(), mine)  # one of the threads that come first has made it
        if loop is mine:
            threading.Thread(target=loop.run_forever, name="fmoe-remote", daemon=True).start()
        else:
            mine.close()
    return asyncio.run_coroutine_threadsafe(coroutine, loop)


def run(coroutine: Coroutine[Any, Any, T], timeout: float | None = None) -> T:
    """Runs a coroutine on the shared loop and waits, from any other thread; CallTimeout after timeout seconds."""
    future = submit(coroutine)
    try:
        return future.result(timeout)
    except concurrent.futures.TimeoutError:
        if future.done():  # the coroutine's own error: from Python 3.11 on CallTimeout is of the same kind
            return future.result()
        future.cancel()
        raise CallTimeout(f"no answer within {timeout} s") from None
    except BaseException:
        future.cancel()
        raise


def end_signals() -> Callable[[float], bool]:
    """Takes SIGTERM and SIGINT from now on -> wait(seconds), True once one came; 0.0 waits without end.

    A handler may run while its thread holds the lock of what it waits for: threading.Event then waits for itself, for
    ever. A SimpleQueue may be filled in a handler.
    """
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
