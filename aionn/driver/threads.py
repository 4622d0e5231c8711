"""Threads for what blocks in a driver: a model's executions in their order, an engine's compiling and loading beside each other.

anyio has threads of its own. A job there goes round the loop three times before it begins and once more when it is done, which is 0.2 ms
that a verified hit of a small model does not have; they are waited for when the process ends, and an engine may never return.

All are daemons. Nothing here is used from a second thread: jobs are submitted, and their answers come, on the loop.
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
    """Runs one thing after the other, in order. Started at the first submission."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._pending = 0

    @property
    def idle(self) -> bool:
        """Whether nothing is submitted and unanswered. Asked on the loop."""
        return self._pending == 0

    async def run(self, job: Callable[[], T]) -> T:
        """What `job` returns or raises. A cancelled caller leaves; the job runs on."""
        return await self.submit(job).wait()

    def submit(self, job: Callable[[], T], done: Callable[[], object] | None = None) -> Answer[T]:
        """As `run`, for whoever waits later or not at all. `done` is called on the loop when the job is over, however it ended."""
        loop = asyncio.get_running_loop()
        answer: Answer[T] = Answer(loop)
        if self._thread is None:
            thread = threading.Thread(target=self._work, name=self._name, daemon=True)
            thread.start()  # raises where there may be no more threads; the next caller tries again
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
            del item, job  # before the answer: who has it may count on nothing of the request being held here
            try:
                loop.call_soon_threadsafe(self._settle, answer, done, result, error)
            except RuntimeError:
                return  # the loop is closed: the process is on its way out
            del answer, done, loop, result, error  # not until the next request

    def _settle(self, answer: Answer[Any], done: Callable[[], object] | None, result: Any, error: BaseException | None) -> None:
        self._pending -= 1
        if done is not None:
            done()
        if error is None:
            answer.set(result)
        else:
            # A future takes no StopIteration: that would end whoever awaits it without a word.
            answer.fail(RuntimeError(f"a blocking call raised {error!r}") if isinstance(error, StopIteration) else error)

    def close(self) -> None:
        """Let the thread end when it has done what was submitted."""
        self._jobs.put(None)


class Threads:
    """Runs blocking calls beside each other, at most `at_once` that somebody waits for.

    The thread that was last done is the next to work: the C library gives a thread its own memory, and what the last model left there
    is not taken from the kernel anew for the next. One whose caller has left goes on by itself and holds nobody up.
    """

    def __init__(self, name: str, at_once: int) -> None:
        self._name, self._at_once = name, at_once
        self._turns = anyio.Semaphore(at_once, fast_acquire=True)
        self._idle: list[SerialThread] = []
        self._closed = False

    async def run(self, job: Callable[[], T]) -> T:
        """What `job` returns or raises. A cancelled caller leaves; the job runs on."""
        async with self._turns:
            return await self._submit(job).wait()

    def behind(self, job: Callable[[], None]) -> None:
        """Run `job` once the caller is done with what it does now. Nobody waits for it, and the log has what it raises."""

        def logged() -> None:
            try:
                job()
            except Exception:
                logger.exception("%s: what was to be done behind an answer failed", self._name)

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
