"""An asyncio loop of virtual time, whose processes can be paused and killed between any two steps."""

import asyncio
import contextvars
import inspect

PROCESS = contextvars.ContextVar("process", default=None)


class Process:
    """All that runs in its context stops when it is paused, and never runs again when it is killed."""

    def __init__(self, name, loop):
        self.name, self.loop = name, loop
        self.is_paused = self.is_dead = False
        self.clock_step = 0.0  # seconds by which its clock was set
        self._deferred = []
        self._context = contextvars.copy_context()
        self._context.run(PROCESS.set, self)

    def spawn(self, coroutine):
        """A task of this process."""
        return self._context.run(self.loop.create_task, coroutine)

    def kill(self):
        self.is_dead = True
        self._deferred.clear()

    def pause(self):
        self.is_paused = True

    def resume(self):
        self.is_paused = False
        deferred, self._deferred = self._deferred, []
        for callback, args, context in deferred:
            self.loop.call_soon(callback, *args, context=context)

    def defer(self, callback, args, context):
        self._deferred.append((callback, args, context))


def wall_time():
    """Stands for time.time(): the clock of the process that asks, which can be set."""
    process = PROCESS.get()
    return 1.7e9 if process is None else 1.7e9 + process.loop.time() + process.clock_step


class VirtualLoop(asyncio.BaseEventLoop):
    """Time passes when nothing else is to be done."""

    def __init__(self):
        super().__init__()
        self._now = 0.0
        self._selector = self
        self.tasks = []  # all of them, so that none is collected at a moment of its own
        self.is_draining = False
        self.set_task_factory(self._make_task)
        self.errors = []
        self.set_exception_handler(lambda loop, context: self.errors.append(context))

    def time(self):
        return self._now

    def select(self, timeout):
        if timeout is None:
            raise RuntimeError("nothing will ever happen any more")
        if timeout > 0:
            self._now = max(self._now + timeout, self._scheduled[0]._when if self._scheduled else 0.0)
        return ()

    def _process_events(self, events):
        pass

    def _write_to_self(self):
        pass

    def _make_task(self, loop, coroutine, **options):
        task = asyncio.Task(coroutine, loop=loop, **options)
        self.tasks.append(task)
        return task

    def _call_soon(self, callback, args, context):
        return super()._call_soon(self._guard, (callback, args, context), context)

    def call_at(self, when, callback, *args, context=None):
        return super().call_at(when, self._guard, callback, args, context, context=context)

    def _guard(self, callback, args, context):
        process = PROCESS.get()
        if process is not None and not self.is_draining:
            if process.is_dead:
                return
            if process.is_paused:
                process.defer(callback, args, contextvars.copy_context())
                return
        callback(*args)

    def drain(self):
        """Ends everything that is left."""
        self.is_draining = True
        for _ in range(20):
            left = [task for task in self.tasks if not task.done()]
            if not left:
                break
            for task in left:
                task.cancel()
            self.run_until_complete(asyncio.wait(left, timeout=1.0))
        for task in self.tasks:  # a process that was killed had not begun it
            if inspect.getcoroutinestate(task.get_coro()) == inspect.CORO_CREATED:
                task.get_coro().close()
        self.tasks.clear()
        self.close()
