"""Task groups inside and plain exceptions outside, bounded shields, one-shot answers, and what a fork's child may not touch.

A caller who enters one of aionn's `async with` blocks has started no task and must be able to write `except DriverDiedError`.
So `ungrouped` undoes anyio's wrapping. `OwnedTasks` is a task group that any task of the loop may open and close. `Answer` is
what a callback sets and one task awaits. `leave_in_child` and `is_ours` keep a child of `os.fork` from what its parent owns.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import select
import time
import weakref
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, Generic, Protocol, TypeVar

import anyio
from anyio.abc import TaskGroup

from aionn.errors import CallerError, DeadlineError

logger = logging.getLogger("aionn.runtime")

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
    """Finish what must be finished though the caller is cancelled, within that time."""
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
    except (TypeError, ValueError, OverflowError):
        seconds = math.nan
    if not seconds > 0:
        raise CallerError(f"timeout_s={timeout_s!r}: a timeout is more than 0 seconds, or None for none")
    if math.isinf(seconds):
        return None
    return min(time.monotonic_ns() + int(min(seconds * 1e9, 2.0**63)), 2**63 - 1)


class Tasks(Protocol):
    """Where tasks are started: `OwnedTasks`, or a task group of anyio's."""

    def start_soon(self, work: Callable[..., Coroutine[Any, Any, Any]], /, *args: Any, name: str | None = None) -> object: ...


class OwnedTasks:
    """A task group in a separate task. Any task of the loop may open it, start tasks in it and close it.

    A task group ends with the task that entered it, and must be left by that task. So a task made for it enters it, and nothing
    that happens to the tasks that open or close it reaches the group. What ends the group, however it ends, is followed by `closing`.

    Invariants
        `closing` runs once, before the group's tasks are cancelled; it must end in bounded time, also when it is cancelled.
        A task that raises ends the group. `failure` is then its error, which is logged, and which `aclose` raises once.
        A task that ends with `CancelledError` ends nothing else.
        In a child of `os.fork` nothing of this runs.

    Attributes:
        failure: the error of a task that has ended the group.
    """

    def __init__(self, closing: Callable[[], Awaitable[None]], name: str) -> None:
        self._closing = closing
        self._name = name
        self._pid = os.getpid()
        self._stands = asyncio.Event()
        self._asked = asyncio.Event()
        self._group: TaskGroup | None = None
        self._owner: asyncio.Task[None] | None = None
        self._members: weakref.WeakSet[asyncio.Task[Any]] = weakref.WeakSet()
        self.failure: BaseException | None = None

    async def open(self) -> None:
        """Return when tasks can be started. A caller that is cancelled meanwhile has asked for the end."""
        self._owner = running_loop().create_task(self._live(), name=self._name)
        _forget_at_loop_end(self._owner)
        try:
            await self._stands.wait()
        except BaseException:
            self._asked.set()
            raise

    def start_soon(self, work: Callable[..., Coroutine[Any, Any, Any]], /, *args: Any, name: str | None = None) -> None:
        """Start a task.

        Raises:
            CallerError: the group has ended.
        """
        if self._group is None:
            raise CallerError("the runtime was closed")
        self._group.start_soon(self._guarded, work, args, name=name)

    async def aclose(self, wait_s: float) -> None:
        """End the group and wait for that, for at most `wait_s` seconds. A task that is cancelled leaves at once; the end goes on.

        One of the group's own tasks does not wait: the group's end waits for it.

        Raises: what has ended the group, if that was an error.
        """
        self._asked.set()
        if self._owner is None or os.getpid() != self._pid or asyncio.current_task() in self._members:
            return
        with bounded_shield(wait_s):
            await asyncio.wait([self._owner])
        failure, self.failure = self.failure, None
        if failure is not None:
            raise failure

    async def _live(self) -> None:
        try:
            async with anyio.create_task_group() as group:
                self._group = group
                self._stands.set()
                try:
                    await self._asked.wait()
                finally:
                    try:
                        if os.getpid() == self._pid:
                            await self._closing()
                    finally:
                        self._group = None
                        group.cancel_scope.cancel()
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            self._fail(error)
        finally:
            self._group = None
            self._stands.set()

    async def _guarded(self, work: Callable[..., Coroutine[Any, Any, Any]], args: tuple[Any, ...]) -> None:
        task = asyncio.current_task()
        assert task is not None
        _forget_at_loop_end(task)
        self._members.add(task)
        try:
            await work(*args)
        except asyncio.CancelledError:
            return  # to the group the end of a task; anyio would end all the others with it

    def _fail(self, error: BaseException) -> None:
        if isinstance(error, BaseExceptionGroup):
            for part in error.exceptions:
                self._fail(part)
        elif not isinstance(error, KeyboardInterrupt | SystemExit):  # the loop has raised those already
            self.failure = self.failure or error
            logger.error("a task of the %s failed, which ends it", self._name, exc_info=error)


def _forget_at_loop_end(task: asyncio.Task[None]) -> None:
    """Let asyncio not complain of this task where an app closes its loop without `aclose`."""
    setattr(task, "_log_destroy_pending", False)  # noqa: B010  (asyncio's own switch, which its stubs do not name)


class LeftInChild(Protocol):
    """What a child of `os.fork` shares with its parent."""

    def leave(self) -> None:
        """Give up the child's share. Signal, send, write and unregister nothing, wait for nothing."""
        ...


_shared: weakref.WeakSet[LeftInChild] = weakref.WeakSet()
_loops: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, int] = weakref.WeakKeyDictionary()


def leave_in_child(shared: LeftInChild) -> None:
    """Have `shared.leave()` called in each child that this process forks from now on."""
    _shared.add(shared)


def is_ours(loop: asyncio.AbstractEventLoop) -> bool:
    """Whether this process made the loop. A child of fork must do nothing in its parent's: it has none of the parent's threads."""
    return _loops.setdefault(loop, os.getpid()) == os.getpid()


def call_soon_from_anywhere(loop: asyncio.AbstractEventLoop, callback: Callable[..., object], *args: object) -> None:
    """Run a callback in the loop, for finalizers: the collector may run in any thread, after the loop's end, and in a child of fork."""
    if loop.is_closed() or not is_ours(loop):
        return
    try:
        loop.call_soon_threadsafe(callback, *args)
    except RuntimeError:
        return  # the loop closed meanwhile


def _in_child() -> None:
    """Part the child from all that it shares with its parent through aionn.

    An epoll descriptor is shared, too: a descriptor that the child's copy of the loop gives up would no longer be watched in the
    parent. So the child's number gets a new epoll.
    """
    for loop in list(_loops):
        fd = -1 if loop.is_closed() else _epoll_of(loop)
        if fd >= 0:
            with select.epoll() as fresh:
                os.dup2(fresh.fileno(), fd, inheritable=False)
    for shared in list(_shared):
        shared.leave()


def _epoll_of(loop: asyncio.AbstractEventLoop) -> int:
    """The descriptor through which asyncio's or uvloop's loop waits; -1 if it has another way."""
    backend = getattr(loop, "_get_backend_id", None)  # uvloop's
    if backend is not None:
        return int(backend())
    waiting = getattr(getattr(loop, "_selector", None), "fileno", None)  # asyncio's, where its selector is an epoll
    return -1 if waiting is None else int(waiting())


os.register_at_fork(after_in_child=_in_child)


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
