"""Threads for blocking work in a driver: a model's executions in their order, compiling and loading side by side.

anyio's worker threads do not fit. A job there passes the loop three times before it begins and once when it is done. That takes
0.2 ms, which is too long for a verified hit of a small model. The end of the process also waits for those threads, and an engine may
never return.

All threads here are daemons. Use this module from the loop only: jobs are submitted there, and their answers come there.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import anyio

from aionn.tasks import Answer

logger = logging.getLogger("aionn.driver")

T = TypeVar("T")
_Job = tuple[Callable[[], Any], Answer[Any], Callable[[], object] | None, asyncio.AbstractEventLoop]


class SerialThread:
    """A thread that runs one job after the other, in order. It starts at the first submission."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._pending = 0

    @property
    def idle(self) -> bool:
        """Whether every submitted job has been answered. Ask on the loop."""
        return self._pending == 0

    async def run(self, job: Callable[[], T]) -> T:
        """Run `job` and return its result, or raise its error. A cancelled caller leaves, and the job runs on."""
        return await self.submit(job).wait()

    def submit(self, job: Callable[[], T], done: Callable[[], object] | None = None) -> Answer[T]:
        """Submit a job and return its answer without waiting. The loop calls `done` when the job is over, however it ended."""
        loop = asyncio.get_running_loop()
        answer: Answer[T] = Answer(loop)
        if self._thread is None:
            thread = threading.Thread(target=self._work, name=self._name, daemon=True)
            thread.start()  # raises where the system allows no more threads; the next caller tries again
            self._thread = thread
        self._pending += 1
        self._jobs.put((job, answer, done, loop))
        return answer

    def _work(self) -> None:
        while (item := self._jobs.get()) is not None:
            job, answer, done, loop = item
            result: Any = None
            error: BaseException | None = None
            try:
                result = job()
            except BaseException as raised:
                error = raised
            del item, job  # before the answer, so that a caller with the answer can rely on nothing of the request being held here
            try:
                loop.call_soon_threadsafe(self._settle, answer, done, result, error)
            except RuntimeError:
                return  # the loop is closed, because the process ends
            del answer, done, loop, result, error  # now, and not only at the next request

    def _settle(self, answer: Answer[Any], done: Callable[[], object] | None, result: Any, error: BaseException | None) -> None:
        self._pending -= 1
        if done is not None:
            done()
        if error is None:
            answer.set(result)
        else:
            # A future refuses StopIteration, which would silently end the task that awaits it.
            answer.fail(RuntimeError(f"a blocking call raised {error!r}") if isinstance(error, StopIteration) else error)

    def close(self) -> None:
        """Let the thread end when it has done all submitted jobs."""
        self._jobs.put(None)


class Threads:
    """Runs blocking calls side by side, at most `at_once` with a waiting caller.

    The thread that finished last works next. The C library gives each thread an arena of memory, so the next model reuses what the last
    one left there, instead of new memory from the kernel. A call whose caller has left goes on without delaying other calls.
    """

    def __init__(self, name: str, at_once: int) -> None:
        self._name, self._at_once = name, at_once
        self._turns = anyio.Semaphore(at_once, fast_acquire=True)
        self._idle: list[SerialThread] = []
        self._closed = False

    async def run(self, job: Callable[[], T]) -> T:
        """Run `job` and return its result, or raise its error. A cancelled caller leaves, and the job runs on."""
        async with self._turns:
            return await self._submit(job).wait()

    def behind(self, job: Callable[[], None]) -> None:
        """Run `job` after the caller's present step. The caller does not wait, and the log records an error of the job."""

        def logged() -> None:
            try:
                job()
            except Exception:
                logger.exception("%s: work that was left for the time after an answer failed", self._name)

        asyncio.get_running_loop().call_soon(self._submit, logged)

    def _submit(self, job: Callable[[], T]) -> Answer[T]:
        thread = self._idle.pop() if self._idle else SerialThread(self._name)
        return thread.submit(job, lambda: self._done(thread))

    def _done(self, thread: SerialThread) -> None:
        if self._closed or len(self._idle) >= self._at_once:
            thread.close()
        else:
            self._idle.append(thread)

    def close(self) -> None:
        """Let every thread end when it is done."""
        self._closed = True
        while self._idle:
            self._idle.pop().close()
