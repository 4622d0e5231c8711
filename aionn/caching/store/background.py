"""Work of a cache store that goes on after its caller has left: threads, and the callers that still wait for one.

A disk may hang. So no caller has to wait for it: a cancelled caller leaves at once, and the thread's result is undone later.
The store waits for all of these threads before it closes, lists or prunes.

Used by `cache`, `opening` and `entries`, in the event loop's thread only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import anyio

from aionn.errors import CallerError
from aionn.tasks import Answer, running_loop

__all__ = ["BackgroundWork"]

T = TypeVar("T")


class BackgroundWork:
    """The threads, the waiting callers and the users of one store."""

    def __init__(self) -> None:
        self._users: set[anyio.Event] = set()
        self._running: set[asyncio.Future[Any]] = set()
        self._waiting: set[Answer[Any]] = set()

    def __bool__(self) -> bool:
        """Return whether a thread still works."""
        return bool(self._running)

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Keep `finish` waiting for the block, which may still store something."""
        ended = anyio.Event()
        self._users.add(ended)
        try:
            yield
        finally:
            self._users.discard(ended)
            ended.set()

    def run_later(self, act: Callable[[], object]) -> None:
        """Run `act` in a thread soon. The caller does not wait for it."""
        loop = running_loop()
        done: asyncio.Future[None] = loop.create_future()
        self._running.add(done)

        def begin() -> None:
            try:
                loop.run_in_executor(None, act).add_done_callback(end)
            except RuntimeError:  # the loop ends and takes no more threads: better here than never
                end(None)
                act()

        def end(acted: asyncio.Future[Any] | None) -> None:
            self._running.discard(done)
            done.set_result(None)
            if acted is not None:
                acted.result()  # an error goes to the loop's exception handler, because no caller is left to get it

        # Not at once: the thread would take the interpreter from the caller, whose answer must not wait for `act`.
        loop.call_soon(begin)

    async def ask(self, act: Callable[..., T], *arguments: object, undo: Callable[[T], object] | None = None) -> T:
        """Run `act(*arguments)` in a thread and return its result. A cancelled caller leaves at once; `undo(result)` then runs later.

        Raises:
            CallerError: the store was closed, and the thread has not ended.
        """
        asking = running_loop().run_in_executor(None, partial(act, *arguments))
        waiting: Answer[T] = Answer(running_loop())

        def answered(_: object) -> None:
            self._running.discard(asking)
            try:
                result = asking.result()
            except BaseException as error:
                waiting.fail(error)
            else:
                if not waiting.settled:
                    waiting.set(result)
                elif undo is not None:
                    self.run_later(partial(undo, result))

        self._running.add(asking)
        self._waiting.add(waiting)
        asking.add_done_callback(answered)
        try:
            return await waiting.wait()
        except BaseException:
            if waiting.result is not None and undo is not None:  # the result came together with the cancellation
                self.run_later(partial(undo, waiting.result))
            waiting.abandon()
            raise
        finally:
            self._waiting.discard(waiting)

    async def settled(self) -> None:
        """Wait until no thread works."""
        while self._running:
            await asyncio.wait(self._running)

    async def finish(self) -> None:
        """Wait for the blocks of `in_use`, then for all threads."""
        while self._users:
            await next(iter(self._users)).wait()
        await self.settled()

    def fail_waiting(self) -> None:
        """Raise `CallerError` in every caller that still waits in `ask`."""
        for waiting in self._waiting:
            waiting.fail(CallerError("the cache store was closed"))
