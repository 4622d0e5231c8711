"""Threads for compiling and loading in a driver, side by side. `lanes` has the threads for executions.

The threads of `aionn.tasks` do not fit, because the end of a loop or of a process waits for them, and an engine may never return.

All threads here are daemons. Use this module from the loop only: jobs are submitted there, and their answers come there.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
import queue
import threading
import weakref
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, Generic, TypeVar

from aionn.loopless import Answer

logger = logging.getLogger("aionn.driver")

T = TypeVar("T")

MOST_OF_AN_APP = 2
"""How many blocking calls of one app run at once in a driver that apps share."""

calling_app: ContextVar[int] = ContextVar("aionn_calling_app", default=0)
"""The app of the call that this task answers, or 0 for the driver's owner."""


# musl keeps no arenas, and has neither function.
_malloc_trim, _mallopt = (getattr(ctypes.CDLL(None), name, None) for name in ("malloc_trim", "mallopt"))
_M_ARENA_MAX = -8


def bound_arenas() -> None:
    """Let the C library have one arena for each usable CPU, unless the environment sets malloc.

    It makes up to eight for each, and a driver has that many threads. Each arena keeps what its fullest moment left in it. In a shared
    driver whose 100 apps came and went, 16 arenas kept 3 MB more than 2.
    """
    if _mallopt is not None and not {"MALLOC_ARENA_MAX", "GLIBC_TUNABLES"} & os.environ.keys():
        _mallopt(_M_ARENA_MAX, len(os.sched_getaffinity(0)))


def trim_arenas() -> None:
    """Give memory that is free in the C library's arenas back to the system. That took 4 ms after a model of 160 MB."""
    if _malloc_trim is not None:
        _malloc_trim(0)


class Job(Generic[T]):
    """One call for a thread. The loop that made it gets the answer."""

    __slots__ = ("_answer", "_call", "_done", "_loop")

    def __init__(self, call: Callable[..., T], answer: Answer[T], done: Callable[[], object] | None = None) -> None:
        """`done` is called by the loop when the call is over, however it ended."""
        self._call: Callable[..., T] | None = call
        self._answer = answer
        self._done = done
        self._loop = asyncio.get_running_loop()

    def do(self, *arguments: Any) -> None:
        """Make the call in this thread, once, and send its result or its error to the loop."""
        call, self._call = self._call, None
        assert call is not None
        result: Any = None
        error: BaseException | None = None
        try:
            result = call(*arguments)
        except BaseException as raised:
            error = raised
        del call, arguments  # before the answer, so that a caller with the answer can rely on nothing of the request being held here
        try:
            self._loop.call_soon_threadsafe(self._settle, result, error)
        except RuntimeError:
            return  # the loop is closed, because the process ends

    def _settle(self, result: Any, error: BaseException | None) -> None:
        if self._done is not None:
            self._done()
        if error is None:
            self._answer.set(result)
        else:
            # A future refuses StopIteration, which would silently end the task that awaits it.
            self._answer.fail(RuntimeError(f"a blocking call raised {error!r}") if isinstance(error, StopIteration) else error)


class SerialThread:
    """A thread that runs one job after the other, in order. It starts at the first submission."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: queue.SimpleQueue[Job[Any] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, job: Callable[[], T], done: Callable[[], object] | None = None) -> Answer[T]:
        """Submit a job and return its answer without waiting. The loop calls `done` when the job is over, however it ended."""
        answer: Answer[T] = Answer(asyncio.get_running_loop())
        if self._thread is None:
            thread = threading.Thread(target=self._work, name=self._name, daemon=True)
            thread.start()  # raises where the system allows no more threads; the next caller tries again
            self._thread = thread
        self._jobs.put(Job(job, answer, done))
        return answer

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job.do()
            del job  # now, and not only at the next request

    def close(self) -> None:
        """Let the thread end when it has done all submitted jobs."""
        self._jobs.put(None)


class Threads:
    """Runs blocking calls side by side, at most `at_once` with a waiting caller.

    The thread that finished last works next. The C library gives each thread an arena of memory, so the next model reuses what the last
    one left there, instead of new memory from the kernel. A call whose caller has left goes on without delaying other calls.

    An app of a shared driver takes no turn of the others. It has `MOST_OF_AN_APP` turns, and a call that it has left keeps its turn. So
    calls that never end hold up their app alone, and make no more threads.
    """

    def __init__(self, name: str, at_once: int) -> None:
        self._name, self._at_once = name, at_once
        self._turns = asyncio.Semaphore(at_once)
        self._turns_of: weakref.WeakValueDictionary[int, asyncio.Semaphore] = weakref.WeakValueDictionary()  # by app, while it has calls
        self._idle: list[SerialThread] = []
        self._busy: set[SerialThread] = set()
        self._closed = False

    async def run(self, job: Callable[[], T]) -> T:
        """Run `job` and return its result, or raise its error. A cancelled caller leaves, and the job runs on."""
        app = calling_app.get()
        if not app:
            async with self._turns:
                return await self._submit(job).wait()
        turns = self._turns_of.setdefault(app, asyncio.Semaphore(MOST_OF_AN_APP))
        await turns.acquire()
        try:
            answer = self._submit(job, turns.release)
        except BaseException:
            turns.release()
            raise
        return await answer.wait()

    def behind(self, job: Callable[[], None]) -> None:
        """Run `job` after the caller's present step, unless the threads are closed by then.

        The caller does not wait, and the log records an error of the job.
        """

        def logged() -> None:
            try:
                job()
            except Exception:
                logger.exception("%s: work that was left for the time after an answer failed", self._name)

        def submit() -> None:
            if not self._closed:
                self._submit(logged)

        asyncio.get_running_loop().call_soon(submit)

    def _submit(self, job: Callable[[], T], over: Callable[[], None] = lambda: None) -> Answer[T]:
        thread = self._idle.pop() if self._idle else SerialThread(self._name)
        answer = thread.submit(job, lambda: self._done(thread, over))
        self._busy.add(thread)
        return answer

    def _done(self, thread: SerialThread, over: Callable[[], None]) -> None:
        over()
        self._busy.discard(thread)
        if self._closed or len(self._idle) >= self._at_once:
            thread.close()
        else:
            self._idle.append(thread)

    def close(self) -> None:
        """Let every thread end when it is done, also one whose answer the loop has not seen yet."""
        self._closed = True
        for thread in (*self._idle, *self._busy):
            thread.close()
        self._idle.clear()
