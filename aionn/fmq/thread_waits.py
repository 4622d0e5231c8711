"""`ThreadWaits`: what an end of a burst, a connection and frames need of an event loop, in a thread that runs none.

The thread waits only inside a call that it makes. It sleeps in native code without the GIL, until a descriptor is ready, a timer is due, or
another thread has called `call_soon_threadsafe`. Then it runs the callbacks, and goes on with what it waits for. So a coroutine whose waits
are all of this kind never suspends, and `completed` runs it like a function.

A signal ends the sleep in the main thread. Python runs its handler there, and an exception of the handler ends the call.

Invariants
    One thread at a time is inside. The owner's lock sees to that.
    Callbacks run only in `wait` and `turn`.
    `call_soon_threadsafe` may be called from any thread, a finalizer or a signal handler, also after `close`.
"""

from __future__ import annotations

import heapq
import itertools
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Generator
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeAlias, TypeVar

from aionn.fmq._ring import wait_for
from aionn.loopless import leave_in_child

if TYPE_CHECKING:
    import asyncio

T = TypeVar("T")


class Waited(Generic[T]):
    """A result or an error that a callback sets once. Awaiting it waits in this thread."""

    __slots__ = ("__weakref__", "_cancelled", "_done", "_error", "_result", "_waits")

    def __init__(self, waits: ThreadWaits) -> None:
        self._waits = waits
        self._done = self._cancelled = False
        self._error: BaseException | None = None
        self._result: T | None = None

    def done(self) -> bool:
        return self._done

    def cancelled(self) -> bool:
        return self._cancelled

    def cancel(self) -> bool:
        """Count it as done from now on, because its caller has left."""
        changed, self._done = not self._done, True
        self._cancelled = self._cancelled or changed
        return changed

    def set_result(self, result: T) -> None:
        if not self._done:  # its caller may have left
            self._result, self._done = result, True

    def set_exception(self, error: BaseException) -> None:
        if not self._done:
            self._error, self._done = error, True

    def exception(self) -> BaseException | None:
        return self._error

    def result(self) -> T:
        if self._error is not None:
            try:
                raise self._error
            finally:
                del self  # the error's traceback would hold this object, and this object holds the error
        return self._result  # type: ignore[return-value]  # set by then

    def __await__(self) -> Generator[Any, None, T]:
        if not self._done:
            self._waits.wait(self)
        yield from ()  # this makes it a generator, which never suspends
        return self.result()


class Timer:
    """A callback at a time. `cancel` may come late."""

    __slots__ = ("_cancelled", "callback")

    def __init__(self, callback: Callable[[], object]) -> None:
        self.callback = callback
        self._cancelled = False

    def cancel(self) -> None:
        self._cancelled = True

    def cancelled(self) -> bool:
        return self._cancelled


class ThreadWaits:
    """The waits of one blocking burst.

    Attributes:
        calls: what other threads have left for the thread that waits.
        timers: time, number and timer, the earliest first.
    """

    call_soon = None
    """Nothing runs between two calls, so nothing can be left for soon. `Caller` sees by this that it must not leave anything."""

    def __init__(self) -> None:
        self.calls: deque[Callable[[], object]] = deque()
        self.timers: list[tuple[int, int, Timer]] = []
        self._numbers = itertools.count()
        self._watched: dict[int, dict[int, Callable[[], object]]] = {}  # by descriptor, and by EPOLLIN or EPOLLOUT
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        try:
            self._epoll = select.epoll()
        except BaseException:
            os.close(self._wake_fd)
            raise
        self._epoll.register(self._wake_fd, select.EPOLLIN)
        self._waking = threading.RLock()  # a handler of a signal may come here while its thread is inside
        self._closed = False
        leave_in_child(self)

    def fileno(self) -> int:
        """Return a descriptor that can be read when any of the watched ones is ready, or another thread has called."""
        return self._epoll.fileno()

    # --- what they need of a loop --------------------------------------------------------------------------------------

    def create_future(self) -> Waited[Any]:
        return Waited(self)

    def call_later(self, seconds: float, callback: Callable[..., object], *args: object) -> Timer:
        timer = Timer(partial(callback, *args))
        heapq.heappush(self.timers, (time.monotonic_ns() + int(seconds * 1e9), next(self._numbers), timer))
        return timer

    def call_soon_threadsafe(self, callback: Callable[..., object], *args: object) -> None:
        """Run a callback in the thread that waits, or in the next one that does."""
        self.calls.append(partial(callback, *args))
        with self._waking:
            if not self._closed:
                os.eventfd_write(self._wake_fd, 1)

    def add_reader(self, fd: int, callback: Callable[..., object], *args: object) -> None:
        self._watch(fd, select.EPOLLIN, partial(callback, *args) if args else callback)

    def remove_reader(self, fd: int) -> None:
        self._watch(fd, select.EPOLLIN, None)

    def add_writer(self, fd: int, callback: Callable[..., object], *args: object) -> None:
        self._watch(fd, select.EPOLLOUT, partial(callback, *args) if args else callback)

    def remove_writer(self, fd: int) -> None:
        self._watch(fd, select.EPOLLOUT, None)

    def is_closed(self) -> bool:
        return self._closed

    def _watch(self, fd: int, event: int, callback: Callable[[], object] | None) -> None:
        """Call back when the event comes. None ends that, before the descriptor is closed."""
        if self._closed:
            return
        known = self._watched.pop(fd, None)
        wanted = {**(known or {}), event: callback}
        found = {event: call for event, call in wanted.items() if call is not None}
        if found:
            self._watched[fd] = found
        if known and found:
            self._epoll.modify(fd, sum(found))
        elif found:
            self._epoll.register(fd, sum(found))
        elif known:
            with suppress(FileNotFoundError):  # the handler of a signal has kept it from being registered
                self._epoll.unregister(fd)

    # --- waiting -------------------------------------------------------------------------------------------------------

    def wait(self, waited: Waited[Any]) -> None:
        """Return when `waited` is done.

        Raises:
            BaseException: what a handler of a signal has raised. `waited` may be done later.
        """
        self.turn()
        while not waited.done():
            wait_for(self._epoll.fileno(), self.timers[0][0] if self.timers else 0)
            for fd, events in self._epoll.poll(0):
                if fd == self._wake_fd:
                    os.eventfd_read(fd)
                for event, callback in list(self._watched.get(fd, {}).items()):
                    if events & (event | select.EPOLLERR | select.EPOLLHUP):
                        callback()
            self.turn()

    def turn(self) -> None:
        """Run what other threads have left here, and the timers that are due."""
        while self.calls:
            self.calls.popleft()()
        timers = self.timers
        while timers and (timers[0][2].cancelled() or timers[0][0] <= time.monotonic_ns()):
            timer = heapq.heappop(timers)[2]
            if not timer.cancelled():
                timer.callback()

    def close(self) -> None:
        """Close the descriptors. Nothing is called any more."""
        with self._waking:
            if not self._closed:
                self._closed = True
                os.close(self._wake_fd)
                self._epoll.close()
        self._watched.clear()
        self.timers.clear()
        self.calls.clear()

    def leave(self) -> None:
        """Close what a child of fork has of it. Another thread of the parent may be inside."""
        self._waking = threading.RLock()
        self.close()


Loop: TypeAlias = "asyncio.AbstractEventLoop | ThreadWaits"
"""What an object waits by."""
