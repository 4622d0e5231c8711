"""Tasks that wait on one side of a queue: for elements, for room, or for event flag bits.

One persistent `add_reader` serves all of them. A waiter makes an attempt after every wake. It never awaits between the
attempt that succeeds and its return, so a cancelled task has taken nothing. Takers (`taker=True`) take turns in the order
in which they came. Only the first may take, and the next one gets its turn when the first leaves for any reason.

Invariant
    While a waiter whose turn it is sleeps, one of three holds. The side is armed for it, or a token is in the eventfd, or
    the callback that looks for it is about to run. `_settle` restores this invariant when a waiter comes, leaves or wakes.

The errors of a queue, beside `CallerError` and `DeadlineError`, stand here, too.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol, TypeVar

from aionn.errors import AionnError, CallerError, DeadlineError
from aionn.loopless import running_loop

if TYPE_CHECKING:
    import asyncio

T = TypeVar("T")


class SideOfQueue(Protocol):
    """What waiting needs of a queue's side. Counts are elements. A count of 0 waits for flag bits alone."""

    def arm(self, count: int, mask: int, /) -> bool:
        """Arm the side, and return whether to sleep, as `Ring.arm_reader`."""
        ...

    def disarm(self) -> None: ...

    def clear_event(self) -> None: ...

    def satisfied(self, count: int, mask: int) -> bool:
        """Return whether a waiter for that many elements, or for those bits, should look now."""
        ...


class _Waiter:
    __slots__ = ("count", "future", "late", "mask", "taker")

    def __init__(self, future: asyncio.Future[None], count: int, mask: int, taker: bool) -> None:
        self.future = future
        self.count = count
        self.mask = mask
        self.taker = taker
        self.late = False

    def wake(self) -> None:
        if not self.future.done():
            self.future.set_result(None)


class WaitingRoom:
    """The tasks of one process that wait on one side of one queue, all in one event loop."""

    def __init__(self, side: SideOfQueue, fd: int, what: str) -> None:
        self._side = side
        self._arm = side.arm
        self._clear_event = side.clear_event
        self._fd = fd
        self._what = what  # for messages: "elements to read", "room to write"
        self._loop: asyncio.AbstractEventLoop | None = None
        self._waiters: list[_Waiter] = []
        self.takers = 0  # how many waiters are takers; a new taker queues up behind them
        self._armed = False
        self._closed = False

    async def until(
        self, attempt: Callable[[], T | None], count: int, *, mask: int = 0, deadline_ns: int | None = None, taker: bool = False
    ) -> T:
        """Make `attempt` until it returns something other than None, and sleep in between. Its errors end the wait.

        Raises:
            DeadlineError: CLOCK_MONOTONIC passed `deadline_ns`. A last attempt was made.
            QueueClosedError: the queue was closed here meanwhile.
            CallerError: the side is awaited in another event loop.
        """
        if not (taker and self.takers):
            result = attempt()
            if result is not None:
                return result
        loop = self._bind()
        waiter = _Waiter(loop.create_future(), count, mask, taker)
        timer = None if deadline_ns is None else _Alarm(loop, waiter, deadline_ns)
        self._waiters.append(waiter)
        self.takers += taker
        try:
            while True:
                self._settle()
                await waiter.future
                if self._closed:
                    raise QueueClosedError(f"the queue was closed here while a task waited for {self._what}")
                if not taker or self.takers == 1 or self._first_taker() is waiter:
                    result = attempt()
                    if result is not None:
                        return result
                if waiter.late:
                    raise DeadlineError(f"{count} of {self._what} did not come before the deadline; the peer may be busy, try again later")
                waiter.future = loop.create_future()
        finally:
            if timer is not None:
                timer.cancel()
            self._waiters.remove(waiter)
            self.takers -= taker
            if not self._closed and (self._waiters or self._armed):
                self._settle()

    def wake_all(self) -> None:
        """Make every waiter look again, because the queue has come to its end."""
        for waiter in self._waiters:
            waiter.wake()

    def close(self) -> None:
        """Remove the reader and fail every waiter. The descriptor may be closed after this."""
        self._closed = True
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(self._fd)
        self._loop = None
        self.wake_all()

    def _bind(self) -> asyncio.AbstractEventLoop:
        loop = running_loop()
        if self._loop is not loop:
            if self._loop is not None and not self._loop.is_closed():
                raise CallerError("this side of the queue is awaited in another event loop; await it in the loop that awaited it first")
            self._loop = loop
            loop.add_reader(self._fd, self._on_event)
        return loop

    def _first_taker(self) -> _Waiter | None:
        return next((waiter for waiter in self._waiters if waiter.taker), None)

    def _on_event(self) -> None:
        if self._closed:
            return
        self._armed = False  # the writer of the eventfd has swapped the word; a stale token only makes us arm once more
        self._clear_event()
        if len(self._waiters) == 1:
            self._waiters[0].wake()  # the waiter looks itself, and calls `_settle` again if it finds nothing
        else:
            self._settle()

    def _settle(self) -> None:
        """Wake the waiters that may find something, and arm for the others."""
        if len(self._waiters) == 1 and not (waiter := self._waiters[0]).future.done():  # a short cut for the usual case
            self._armed = self._arm(waiter.count, waiter.mask)
            if not self._armed:
                waiter.wake()
            return
        while True:
            first_taker = self._first_taker()
            asleep = [w for w in self._waiters if not w.future.done() and (not w.taker or w is first_taker)]
            if not asleep:
                if self._armed:
                    self._armed = False
                    self._side.disarm()
                return
            count = min((w.count for w in asleep if w.count), default=0)
            mask = 0
            for waiter in asleep:
                mask |= waiter.mask
            self._armed = self._arm(count, mask)
            if self._armed:
                return
            # Not armed, so a waiter has to look. If the peer has turned the counters back meanwhile, all of them look.
            # Each turn of this loop wakes at least one waiter, so no peer can prolong it.
            for waiter in [w for w in asleep if self._side.satisfied(w.count, w.mask)] or asleep:
                waiter.wake()


class _Alarm:
    """A timer that makes a waiter late at its deadline. Loops round timers to their clock, so it reads the true clock again."""

    def __init__(self, loop: asyncio.AbstractEventLoop, waiter: _Waiter, deadline_ns: int) -> None:
        self._loop = loop
        self._waiter = waiter
        self._deadline_ns = deadline_ns
        self._handle: asyncio.TimerHandle | None = None
        self._ring()

    def _ring(self) -> None:
        left_ns = self._deadline_ns - time.monotonic_ns()
        if left_ns > 0:
            self._handle = self._loop.call_later(left_ns / 1e9, self._ring)
        else:
            self._waiter.late = True
            self._waiter.wake()

    def cancel(self) -> None:
        if self._handle is not None:
            self._handle.cancel()


class QueueClosedError(AionnError):
    """The queue was closed: by the peer, and all its elements have been read, or here, while a task waited."""


class QueueCorruptedError(AionnError):
    """A shared counter has an impossible value, because the peer is broken or hostile. Nothing was read or written.

    The queue cannot be repaired. End the peer, and make a new queue.
    """
