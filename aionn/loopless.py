"""What an object needs that may belong to an event loop or to a thread without one: deadlines, answers, ends, and the child of a fork.

A callback sets an `Answer`, and one task or thread awaits it. `leave_in_child` and `is_ours` keep a child of `os.fork` away from what its
parent owns. `tasks` has what needs a loop.

A client without a loop imports this module, so it imports asyncio only where a loop runs.
"""

from __future__ import annotations

import math
import operator
import os
import select
import time
import weakref
from collections.abc import Callable, Generator
from types import coroutine
from typing import TYPE_CHECKING, Any, Generic, NoReturn, Protocol, TypeVar, overload

from aionn.errors import CallerError

if TYPE_CHECKING:
    import asyncio
    from types import TracebackType
    from typing import Self

T = TypeVar("T")


class AsyncOnly:
    """What is used in `async with`. A plain `with` raises an error that says so."""

    __slots__ = ()

    if not TYPE_CHECKING:  # a type checker reports a plain `with` by itself

        def __enter__(self) -> NoReturn:
            name = type(self).__name__
            raise CallerError(f"a {name} is used in `async with`, and this is a plain `with`; write `async with ...` in an async function")

        def __exit__(self, *_: object) -> None:
            """Python asks for it before it calls `__enter__`."""


class AsyncClosed(AsyncOnly):
    """An object that `async with` closes when its body ends."""

    __slots__ = ()

    async def aclose(self) -> None:
        raise NotImplementedError

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.aclose()


class ClosedByWith:
    """An object that `with` and `async with` close when their body ends. Closing never waits."""

    __slots__ = ()

    def close(self) -> None:
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def running_loop() -> asyncio.AbstractEventLoop:
    """Return the asyncio or uvloop loop of this task.

    Raises:
        CallerError: no loop runs, or the task runs under another async library.
    """
    import asyncio  # it is there already, if a loop runs

    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        raise CallerError("no asyncio or uvloop event loop runs in this thread; use aionn.run(main), or a portal's call()") from None


def deadline_of(timeout_s: float | None) -> int | None:
    """Return now plus a timeout, in CLOCK_MONOTONIC nanoseconds that fit into 63 bits. None and infinity give None.

    Raises:
        CallerError: the timeout is not a positive number of seconds.
    """
    seconds = checked_seconds("timeout_s", timeout_s)
    return None if seconds is None else min(time.monotonic_ns() + int(min(seconds * 1e9, 2.0**63)), 2**63 - 1)


def checked_name(what: str, name: object) -> str:
    """Return the name of a runtime, a compilation or a burst. None is an empty name.

    Raises:
        CallerError: it is not a text of one line.
    """
    if name is None:
        return ""
    if not isinstance(name, str) or not name or not name.isprintable():
        raise CallerError(f"{what}: name={name!r}; give a text of one line, or None")
    return name


def checked_seconds(name: str, value: float | None) -> float | None:
    """Return the seconds that an argument gives. None and infinity give None.

    Raises:
        CallerError: the argument is not a positive number of seconds.
    """
    if value is None:
        return None
    try:
        seconds = math.nan if isinstance(value, str | bytes | bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        seconds = math.nan
    if not seconds > 0:
        raise CallerError(f"{name} is {value!r}; give a number of seconds above 0, or None for no limit")
    return None if math.isinf(seconds) else seconds


def checked_count(name: str, value: object, least: int, most: int | None = None) -> int:
    """Return the whole number that an argument gives, which may be a NumPy integer.

    Raises:
        CallerError: the argument is not a whole number from `least` to `most`.
    """
    try:
        number = least - 1 if isinstance(value, bool) else operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = least - 1
    if number < least or (most is not None and number > most):
        allowed = f"at least {least}" if most is None else f"from {least} to {most}"
        raise CallerError(f"{name}={value!r}; give a whole number, {allowed}")
    return number


@overload
def seconds_until(deadline_ns: int) -> float: ...


@overload
def seconds_until(deadline_ns: int | None) -> float | None: ...


def seconds_until(deadline_ns: int | None) -> float | None:
    """Return the seconds until a deadline (CLOCK_MONOTONIC), at least 0. Returns None without a deadline."""
    return None if deadline_ns is None else max(0.0, (deadline_ns - time.monotonic_ns()) / 1e9)


def is_readable(fd: int, within_s: float = 0.0) -> bool:
    """Return whether a descriptor can be read, such as a pidfd whose process has ended. Waits for it in this thread."""
    (waiting := select.poll()).register(fd, select.POLLIN)
    return bool(waiting.poll(within_s * 1000))


def time_left(deadline_ns: int | None) -> float | None:
    """Return `seconds_until` as a timeout, for a call that bounds itself. A deadline that has passed leaves a nanosecond."""
    return None if deadline_ns is None else max(seconds_until(deadline_ns), 1e-9)


class LeftInChild(Protocol):
    """An object that a child of `os.fork` shares with its parent."""

    def leave(self) -> None:
        """Give up the child's share, in the child. Do not signal, send, write, unregister or wait."""
        ...


_shared: weakref.WeakSet[LeftInChild] = weakref.WeakSet()


_loops: weakref.WeakKeyDictionary[Called, int] = weakref.WeakKeyDictionary()


def leave_in_child(shared: LeftInChild) -> None:
    """Let `shared.leave()` be called in each child that this process forks from now on."""
    _shared.add(shared)


def is_ours(loop: Called) -> bool:
    """Return whether this process made the loop. A child of fork must do nothing in its parent's loop."""
    return _loops.setdefault(loop, os.getpid()) == os.getpid()


class Called(Protocol):
    """A loop, or the waits of a thread, that other threads may call."""

    def is_closed(self) -> bool: ...
    def call_soon_threadsafe(self, callback: Callable[..., object], /, *args: Any) -> object: ...


def call_soon_from_anywhere(loop: Called, callback: Callable[..., object], *args: object) -> None:
    """Run a callback in the loop. For finalizers, which may run in any thread, after the loop's end, and in a child of fork."""
    if loop.is_closed() or not is_ours(loop):
        return
    try:
        loop.call_soon_threadsafe(callback, *args)
    except RuntimeError:
        return  # the loop closed meanwhile


def _in_child() -> None:
    """Separate the child from everything that it shares with its parent through aionn.

    The epoll descriptor is shared, too. A descriptor that the child's copy of the loop unregisters would no longer be watched in the
    parent. So the number of the epoll descriptor gets a new epoll in the child.
    """
    for loop in list(_loops):
        fd = -1 if loop.is_closed() else _epoll_of(loop)
        if fd >= 0:
            with select.epoll() as fresh:
                os.dup2(fresh.fileno(), fd, inheritable=False)
    for shared in list(_shared):
        shared.leave()


def _epoll_of(loop: Called) -> int:
    """Return the epoll descriptor on which asyncio's or uvloop's loop waits, or -1 if the loop uses no epoll."""
    backend = getattr(loop, "_get_backend_id", None)  # uvloop's
    if backend is not None:
        return int(backend())
    waiting = getattr(getattr(loop, "_selector", None), "fileno", None)  # asyncio's, where its selector is an epoll
    return -1 if waiting is None else int(waiting())


os.register_at_fork(after_in_child=_in_child)


class Futures(Protocol):
    """A loop, or the waits of a thread, in which one may wait."""

    def create_future(self) -> Any: ...


class Answer(Generic[T]):
    """A result or an error that a callback sets once and at most one task awaits.

    Setting it after its caller has left is allowed, because a caller may leave at any time.
    """

    __slots__ = ("_future",)

    def __init__(self, loop: Futures) -> None:
        self._future: asyncio.Future[T] = loop.create_future()

    def set(self, result: T) -> None:
        """Set the result. Does nothing if the answer is settled."""
        if not self._future.done():
            self._future.set_result(result)

    def fail(self, error: BaseException) -> None:
        """Set an error. Does nothing if the answer is settled."""
        if not self._future.done():
            self._future.set_exception(error)
            # If the caller has left, the loop must not report the error as never retrieved.
            self._future.exception()

    def cancel(self) -> None:
        """Count the answer as settled from now on, because its caller has stopped waiting."""
        self._future.cancel()

    @property
    def done(self) -> bool:
        """Whether a result or an error was set, or the answer was abandoned."""
        return self._future.done()

    @property
    def result(self) -> T | None:
        """The result, or None if the answer is not set, has failed or was abandoned."""
        future = self._future
        return None if not future.done() or future.cancelled() or future.exception() is not None else future.result()

    async def wait(self) -> T:
        """Wait for the result, or raise the error."""
        try:
            return await self._future
        finally:
            del self  # the error's traceback would hold the answer, and the answer holds the error


@coroutine
def other_tasks() -> Generator[None, None, None]:
    """Let the other tasks of the loop run once. A thread without a loop has none."""
    yield
