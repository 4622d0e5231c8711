"""Task groups inside and plain exceptions outside, bounded shields, one-shot answers.

A caller who enters one of aionn's `async with` blocks has started no task and must be able to write `except DriverDiedError`.
So `ungrouped` undoes anyio's wrapping. `Answer` is what a callback sets and one task awaits.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

import anyio

from aionn.errors import CallerError, DeadlineError

T = TypeVar("T")


@contextmanager
def ungrouped() -> Iterator[None]:
    """Take a task group's wrapping off the one exception it holds. To be put around exactly one task group.

    A group of two or more passes unchanged: none of them is to be lost. A group that the body itself raised stays a group.
    """
    try:
        yield
    except BaseExceptionGroup as group:
        if len(group.exceptions) != 1:
            raise
        only = group.exceptions[0]
        context = only.__context__
        try:
            raise only
        finally:
            only.__context__ = context  # not "during handling of" a group that the caller must not see


@contextmanager
def bounded_shield(seconds: float) -> Iterator[anyio.CancelScope]:
    """Finish what must be finished though the caller is cancelled, but for no longer than that."""
    with anyio.move_on_after(seconds, shield=True) as scope:
        yield scope


@contextmanager
def ending_by(deadline_ns: int | None, what: str) -> Iterator[None]:
    """End the body at a deadline (CLOCK_MONOTONIC) as if its caller had left; None: let it take its time.

    Raises:
        DeadlineError: the body was ended; `what` begins its sentence.
    """
    if deadline_ns is None:
        yield
        return
    with anyio.move_on_after(max(0.0, (deadline_ns - time.monotonic_ns()) / 1e9)) as scope:
        yield
    if scope.cancelled_caught:
        raise DeadlineError(f"{what} by the deadline; the driver may still be busy with it")


def running_loop() -> asyncio.AbstractEventLoop:
    """The asyncio or uvloop loop of this task.

    Raises:
        CallerError: no loop runs, or the task runs under another async library.
    """
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        raise CallerError("aionn needs a running asyncio or uvloop event loop; start one with aionn.run(main)") from None


def deadline_of(timeout_s: float | None) -> int | None:
    """Return now plus a timeout, in CLOCK_MONOTONIC nanoseconds that fit into 63 bits. None and infinity give None.

    Raises:
        CallerError: it is not a positive number of seconds.
    """
    if timeout_s is None:
        return None
    try:
        seconds = float(timeout_s)
    except (TypeError, ValueError):
        seconds = math.nan
    if not seconds > 0:
        raise CallerError(f"timeout_s={timeout_s!r}: a timeout is more than 0 seconds, or None for none")
    if math.isinf(seconds):
        return None
    return min(time.monotonic_ns() + int(seconds * 1e9), 2**63 - 1)


class Answer(Generic[T]):
    """A result or an error that is set once from a callback and awaited by at most one task.

    Setting it when nobody waits any more is no error: a caller may leave at any time.
    """

    __slots__ = ("_future",)

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._future: asyncio.Future[T] = loop.create_future()

    def set(self, result: T) -> None:
        if not self._future.done():
            self._future.set_result(result)

    def fail(self, error: BaseException) -> None:
        if not self._future.done():
            self._future.set_exception(error)
            # If the caller has left, the loop must not report an error without a reader.
            self._future.exception()

    def abandon(self) -> None:
        """Nobody waits any more: from now on it counts as settled."""
        self._future.cancel()

    @property
    def settled(self) -> bool:
        return self._future.done()

    @property
    def result(self) -> T | None:
        """What was set, or None while nothing is, or if it failed or was abandoned."""
        future = self._future
        return None if not future.done() or future.cancelled() or future.exception() is not None else future.result()

    async def wait(self) -> T:
        return await self._future
