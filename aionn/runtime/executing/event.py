"""`Event`: an execution that `Compilation.start` has begun. Its fence lets other executions and processes wait for it.

Invariants
    An event is settled once, and its fence is signalled at the same moment at the latest. A fence is made when somebody needs it.
    A task that awaits an event and is cancelled leaves the execution alone. Only `Event.cancel` cancels it.
    The event owns its fence. The descriptor is closed when the event is settled, or with the event if the app has asked for it.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
from collections.abc import Callable, Generator
from typing import Any

from aionn import trace
from aionn.errors import CallerError, ExecutionError, again
from aionn.hal.types import ErrorStatus, Timing
from aionn.loopless import running_loop
from aionn.memory.limits import allocation_error
from aionn.remote.fences import make_fence, signal_fence
from aionn.runtime.executing.arguments import Outputs

logger = logging.getLogger("aionn.runtime")

_numbers = itertools.count(1)


class Event:
    """An execution that was started. Made by `Compilation.start`.

    `await event` returns its `Outputs`, or raises the error of the execution. Any number of tasks may await it, and it need not be awaited.
    The outputs are views of shared memory, which keep their values as long as the app holds them.

    Attributes:
        name: in errors and log lines.
        since_launch: `hal.Timing` from the sending on, with the wait for dependencies; None unless timing was asked for.
            `Outputs.timing` begins when the dependencies were done.

    Examples:
        >>> with aionn.Memory.allocate(64) as between:  # the second execution reads what the first one writes
        ...     first = compilation.start({"x": x}, outputs={"y": between})
        ...     second = compilation.start({"x": between}, after=(first,), timeout_s=10)
        ...     outputs = await second
        >>> first.done()
        True
    """

    def __init__(self, label: str, loop: asyncio.AbstractEventLoop) -> None:
        """Make an event that is pending. `loop`: of the app's tasks, which runs."""
        self.name = f"{label or 'execution'} #{next(_numbers)}"
        self.since_launch: Timing | None = None
        self._loop = loop
        self._pid = os.getpid()
        self._fence = -1
        self._asked = False
        self._signalled = False  # whether drivers signal its fence
        self._sent: tuple[object, int] | None = None  # to which driver, and how later requests there name it
        self._outputs: Outputs | None = None
        self._error: BaseException | None = None
        self._seen = False
        self._waiters: set[asyncio.Future[None]] = set()
        self._when_settled: list[Callable[[], None]] = []

    def __repr__(self) -> str:
        status = self.status
        return f"<Event {self.name!r} {'pending' if not self.done() else 'cancelled' if status is None else status.name}>"

    def __await__(self) -> Generator[Any, None, Outputs]:
        return self._wait().__await__()

    async def _wait(self) -> Outputs:
        if not self.done():
            if running_loop() is not self._loop:
                raise CallerError("this event belongs to another event loop; await it in the loop that started it, or wait for its fence")
            waiter = self._loop.create_future()
            self._waiters.add(waiter)
            try:
                await waiter
            finally:
                self._waiters.discard(waiter)
        return self.result()

    def done(self) -> bool:
        """Return whether the execution is over: it succeeded, failed or was cancelled."""
        return self._outputs is not None or self._error is not None

    def cancelled(self) -> bool:
        """Return whether `cancel` has ended it."""
        return isinstance(self._error, asyncio.CancelledError)

    @property
    def status(self) -> ErrorStatus | None:
        """The status of the execution, or None while it is pending and after `cancel`. GENERAL_FAILURE stands for every other error."""
        if self._outputs is not None:
            return ErrorStatus.NONE
        if self._error is None or self.cancelled():
            return None
        return _status_of(self._error)

    def result(self) -> Outputs:
        """Return the outputs of an execution that is over, or raise its error. `asyncio.CancelledError` stands for `cancel`.

        Raises:
            CallerError: the execution is not over yet.
        """
        self._seen = True
        if self._error is not None:
            raise again(self._error) if not self.cancelled() else asyncio.CancelledError(str(self._error))
        if self._outputs is None:
            raise CallerError(f"event {self.name!r} is not done; await it")
        return self._outputs

    def exception(self) -> BaseException | None:
        """Return the error of an execution that is over, or None if it succeeded or is pending."""
        self._seen = True
        return self._error

    def cancel(self) -> bool:
        """Cancel the execution. Returns False if it is over already.

        The fence is signalled at once, as a failure. An execution that waits for its dependencies does not begin. One that runs in
        the driver runs on, so memory that was given for its outputs may still be written to for that long.

        Raises:
            CallerError: this is a child of the process that has started the execution.
        """
        if os.getpid() != self._pid:  # the fence is one and the same in both
            raise CallerError(f"event {self.name!r} belongs to the parent process; cancel it there")
        if self.done():
            return False
        settle(self, asyncio.CancelledError(f"event {self.name!r} was cancelled"))
        return True

    def fence(self) -> int:
        """Return a descriptor that is readable once the execution is over, however it ended.

        Wait for it with `poll`, `epoll` or a loop's `add_reader`, in this process or another one, and never read it. The event owns the
        descriptor and closes it when the event is collected. Use `os.dup` for one that lives longer.

        Raises:
            MemoryAllocationError: no file descriptor is left.
        """
        self._asked = True
        return fence_of(self)

    def __del__(self) -> None:
        fence, self._fence = getattr(self, "_fence", -1), -1
        if fence >= 0:
            os.close(fence)
        if getattr(self, "_error", None) is not None and not self._seen and not self.cancelled():
            logger.warning("%s failed, and no task has awaited it: %s", self.name, self._error)


def settle(event: Event, outcome: Outputs | BaseException) -> None:
    """Settle an event with its outputs or its error. Does nothing if the event is settled."""
    if event.done():
        return
    if isinstance(outcome, BaseException):
        event._error = outcome
        trace.count("event.failed", error=type(outcome).__name__)
    else:
        event._outputs = outcome
    if event._fence >= 0:
        signal_fence(event._fence, succeeded=event._outputs is not None)
        if not event._asked:
            fence, event._fence = event._fence, -1
            os.close(fence)
    for waiter in event._waiters:
        if not waiter.done():
            waiter.set_result(None)
    settled, event._when_settled = event._when_settled, []
    for callback in settled:
        callback()


def when_settled(event: Event, callback: Callable[[], None]) -> None:
    """Call `callback` once, when the event is settled, which it is not yet. Callbacks are called in order."""
    event._when_settled.append(callback)


def error_of(event: Event) -> BaseException | None:
    """Return the error of an event without counting it as seen by the app."""
    return event._error


def fence_of(event: Event) -> int:
    """Return the descriptor of an event. It is closed when the event is settled, unless the app has asked for it.

    Raises:
        MemoryAllocationError: no file descriptor is left.
    """
    if event._fence < 0:
        event._fence = new_fence()
        if event.done():  # looked at after the fence is there, because another thread may settle the event
            signal_fence(event._fence, succeeded=event._outputs is not None)
    return event._fence


def signalled_fence_of(event: Event) -> int:
    """Return the descriptor of a pending event which its driver signals from now on."""
    event._signalled = True
    return fence_of(event)


def awaited_fence_of(event: Event) -> int:
    """Return the descriptor of an event for a driver that waits for it. An event of another loop keeps it for the app."""
    return fence_of(event) if running_loop() is event._loop else event.fence()


def is_signalled(event: Event, loop: object) -> bool:
    """Return whether an event can be waited for by its fence alone: its driver signals it, or it belongs to another loop."""
    return event._signalled or event._loop is not loop


def note_sent(event: Event, driver: object, after: int) -> None:
    """Note that the execution lies in a queue of that driver, where `after` names it (`packets.after_request`)."""
    event._sent = driver, after


def after_of(event: Event, driver: object) -> int:
    """Return how a request names the execution that must succeed before, or 0 if it was not sent to that driver."""
    return event._sent[1] if event._sent is not None and event._sent[0] is driver else 0


def failed_dependency(event: Event | None, number: int) -> ExecutionError:
    """Return the error of an execution that did not begin, because what it depends on has failed."""
    which = f"event {event.name!r}" if event is not None else f"dependency {number}"
    error = ExecutionError(f"{which}, on which this execution depends, has failed", status=ErrorStatus.GENERAL_FAILURE)
    if event is not None:
        error.__cause__ = error_of(event)
    return error


def _status_of(error: BaseException) -> ErrorStatus:
    from aionn.burst.executors import result_of
    from aionn.errors import DeadlineError

    if isinstance(error, DeadlineError):
        return ErrorStatus.MISSED_DEADLINE_TRANSIENT if error.transient else ErrorStatus.MISSED_DEADLINE_PERSISTENT
    return result_of(error).status


def new_fence() -> int:
    """Return a new fence, or raise `MemoryAllocationError` where no file descriptor is left."""
    try:
        return make_fence()
    except OSError as error:
        raise allocation_error(8, error) from error
