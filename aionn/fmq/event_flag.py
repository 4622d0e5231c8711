"""The event flag word of a queue: 32 bits that one side sets and another consumes, with libfmq's semantics.

`wake(mask)` sets bits. If one of them was not set yet, all its waiters wake. Threads and libfmq peers sleep on the word
itself (futex). Asyncio tasks sleep on their side's eventfd, armed with the bits they await. `wait` takes the bits it
finds. The bits NOT_FULL and NOT_EMPTY belong to the queue. After the first wait for them by futex, each commit sets them
(`MessageQueue.read_in_thread`). The two highest bits wake threads at the queue's end. The other 28 are free.

As in libfmq, each bit may have one waiter. Of two, one could take the bit and leave the other asleep.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from aionn.errors import CallerError, DeadlineError
from aionn.fmq._ring import Ring
from aionn.fmq.waiting import WaitingRoom

_RESERVED = 0xC0000000
"""RING_FLIP_CLOSED and RING_FLIP_LOCAL of ring.h."""


def deadline_after(timeout_s: float | None) -> int:
    """Return a CLOCK_MONOTONIC deadline in ns, as `Ring.wait_flag` wants it, or -1 without a timeout."""
    return -1 if timeout_s is None else time.monotonic_ns() + max(0, round(timeout_s * 1e9))


class EventFlag:
    """The event flag of one queue as one of its sides uses it.

    The word is part of the queue, and every wait ends with the queue (`CallerError`, `QueueClosedError`).
    """

    def __init__(self, ring: Ring, tasks: WaitingRoom | None, raise_if_over: Callable[[], None]) -> None:
        self._ring = ring
        self._tasks = tasks
        self._raise_if_over = raise_if_over

    def wake(self, mask: int) -> None:
        """Set bits and wake their waiters. A mask of 0 does nothing."""
        if mask:
            _check(mask)
            self._ring.wake_flag(mask)

    def wait_in_thread(self, mask: int, timeout_s: float | None = None) -> int:
        """Sleep in this thread until a bit of `mask` is set, without the GIL. Take and return the bits of it that are set.

        Bits that are set already are taken even if the time is up.

        Raises:
            DeadlineError: no bit came in `timeout_s` seconds.
            QueueClosedError, or the error given to `end`: the queue is over, so no bit will come.
            CallerError: the mask has no bit or a reserved one, or the queue has no event flag word or is closed here.
        """
        _check(mask)
        deadline_ns = deadline_after(timeout_s)
        self._ring.await_futex(mask)
        while not (taken := self._ring.wait_flag(mask, deadline_ns)):
            self._raise_if_over()
            if 0 <= deadline_ns <= time.monotonic_ns():
                # A wake may have come between the kernel's time-out and here.
                if taken := self._ring.take_flag(mask):
                    break
                raise DeadlineError(f"event flag bits {mask:#x} were not set within {timeout_s} s; the peer may be busy, try again later")
        return taken

    async def wait(self, mask: int, deadline_ns: int | None = None) -> int:
        """Wait as `wait_in_thread`, in a task. A task that is cancelled has taken nothing.

        Raises:
            DeadlineError: CLOCK_MONOTONIC passed `deadline_ns`.
            CallerError: as `wait_in_thread`, or the queue has no eventfds (unsynchronized, or made by a libfmq peer).
        """
        _check(mask)
        if self._tasks is None:
            raise CallerError("this queue has no eventfds, so no task can await its event flag; use wait_in_thread in a worker thread")

        def attempt() -> int | None:
            if taken := self._ring.take_flag(mask):
                return taken
            return self._raise_if_over()

        return await self._tasks.until(attempt, 0, mask=mask, deadline_ns=deadline_ns)


def _check(mask: int) -> None:
    if mask & _RESERVED or not 0 < mask < 2**32:
        raise CallerError(f"event flag mask {mask:#x}: expected at least one of the lower 30 bits and no other")
