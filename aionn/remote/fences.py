"""Fences: eventfds that are readable once an execution is over. Any number of processes wait on one, and none reads it.

Waiting takes nothing, because the waiters poll and never read. The counter holds how the execution ended: `SUCCESS` is added to it
after a success, `FAILURE` after a failure. So a counter of at least `FAILURE` is a failure, also where both were added. A waiter sees the
counter in /proc/self/fdinfo. Descriptors of an app's own say only that they are readable.

Invariants
    A wait leaves no descriptor watched by the loop, however it ends.
    `Waits.close` ends every wait with `CallerError`.
"""

from __future__ import annotations

import os
import select
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from aionn.burst.executors import result_of
from aionn.errors import AionnError, CallerError, DeadlineError, DriverDiedError, DriverHungError, ExecutionError
from aionn.fmq.descriptors import is_eventfd
from aionn.hal.interfaces import IBuffer, IPreparedModel
from aionn.hal.types import NO_TIMING, UNKNOWN_TIME_US, Dependency, ErrorStatus, FencedResult, IMemory, Request, Result, Timing
from aionn.loopless import running_loop

if TYPE_CHECKING:
    import asyncio

SUCCESS = 1
FAILURE = 2**32


def make_fence() -> int:
    """Return a new fence that is not signalled. The caller owns the descriptor."""
    return os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)


def signal_fence(fd: int, *, succeeded: bool) -> None:
    """Make a fence readable. A failure that follows a success makes the fence one of a failure.

    A process that shares the fence shares O_NONBLOCK and could clear it. So this looks first, because a write could wait for room. It does
    not write if the fence says the outcome already, as it does after a driver has signalled it.
    One risk remains: a process that fills the counter between the two calls. Linux writes to an eventfd without a wait by O_NONBLOCK only:
    `pwritev2` with RWF_NOWAIT, `splice` and AIO are refused, and it cannot be opened again.
    """
    if not _says(fd, succeeded):
        with suppress(BlockingIOError):  # it was filled meanwhile, so it says failure
            os.eventfd_write(fd, SUCCESS if succeeded else FAILURE)


def _says(fd: int, succeeded: bool) -> bool:
    """Return whether a fence needs no signal. A counter below `FAILURE` has room for both signals."""
    (looking := select.poll()).register(fd, select.POLLIN | select.POLLOUT)
    event = sum(found for _, found in looking.poll(0))
    if not event & select.POLLIN:
        return False
    if succeeded or not event & select.POLLOUT:  # a full counter says failure
        return True
    try:
        return (_count(fd) or 0) >= FAILURE
    except OSError:  # no free descriptor, or no /proc; only a hostile process fills a counter
        return False


def check_fence(fd: int) -> None:
    """Return if the descriptor can be signalled.

    Raises:
        CallerError: it is not an eventfd.
    """
    try:
        right = is_eventfd(fd)
    except OSError:
        right = False
    if not right:
        raise CallerError(f"descriptor {fd} is not an eventfd; give a fence that an event has made")


def outcome_of(fd: int) -> bool | None:
    """Return whether the execution behind a fence succeeded, or None while it is not over."""
    count = _count(fd)
    return None if not count else count < FAILURE


def _count(fd: int) -> int | None:
    """Return the counter of an eventfd without taking it. Returns None for another descriptor."""
    info = os.open(f"/proc/self/fdinfo/{fd}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        _, found, rest = os.read(info, 4096).partition(b"eventfd-count:")
    finally:
        os.close(info)
    return int(rest.split(maxsplit=1)[0], 16) if found else None


def check_pollable(fd: int) -> None:
    """Return if the loop can wait until the descriptor is readable.

    Raises:
        CallerError: it is not open, or always counts as readable, as a regular file does.
    """
    with select.epoll() as poll:
        try:
            poll.register(fd, select.EPOLLIN)
        except PermissionError:
            raise CallerError(f"descriptor {fd} cannot be waited for, because it is a file; give an eventfd, a pipe or a socket") from None
        except (OSError, ValueError, OverflowError) as error:
            raise CallerError(f"descriptor {fd} cannot be waited for ({error}); give an open eventfd, pipe or socket") from None


class Waits:
    """The waits for dependencies of one prepared model. Use it from the loop."""

    def __init__(self) -> None:
        self._running: set[asyncio.Future[int | None]] = set()
        self._closed = False

    def close(self) -> None:
        """End every wait, and refuse later ones."""
        self._closed = True
        for over in list(self._running):
            if not over.done():
                over.set_exception(_released())

    async def done(self, after: Sequence[Dependency], deadline_ns: int | None) -> int | None:
        """Wait until all dependencies are done. Returns the index of the first that is seen to have failed, or None.

        Raises:
            DeadlineError: they were not done by the deadline.
            CallerError: a descriptor cannot be waited for, or the prepared model was released.
        """
        if self._closed:
            raise _released()
        pending = _readable_later(after)
        if isinstance(pending, int):
            return pending
        if not pending:
            return None
        loop = running_loop()
        over: asyncio.Future[int | None] = loop.create_future()
        watched: set[int] = set()

        def readable(index: int) -> None:
            fd = after[index].fd
            loop.remove_reader(fd)
            watched.discard(fd)
            if over.done():
                return
            try:
                if _failed(after[index]):
                    over.set_result(index)
                elif not watched:
                    over.set_result(None)
            except OSError as error:
                over.set_exception(_unread(error))

        def late() -> None:
            if not over.done():
                over.set_exception(DeadlineError("the executions that this one depends on were not done by the deadline"))

        timer = None
        if deadline_ns is not None:
            timer = loop.call_later(max(0.0, (deadline_ns - time.monotonic_ns()) / 1e9), late)
        self._running.add(over)
        try:
            for index in pending:
                try:
                    loop.add_reader(after[index].fd, readable, index)
                except OSError as error:
                    raise CallerError(f"dependency {index} cannot be waited for ({error.strerror}); give an eventfd or a pipe") from None
                watched.add(after[index].fd)
            return await over
        finally:
            self._running.discard(over)
            if timer is not None:
                timer.cancel()
            for fd in watched:
                loop.remove_reader(fd)


def _readable_later(after: Sequence[Dependency]) -> list[int] | int:
    """Return the indices of the dependencies that are not done yet, or the index of one that has failed."""
    poll = select.poll()
    for dependency in after:
        poll.register(dependency.fd, select.POLLIN)
    events = dict(poll.poll(0)) if after else {}
    if any(event & select.POLLNVAL for event in events.values()):
        raise CallerError("a dependency is not an open descriptor; give an event, or an open eventfd")
    pending: dict[int, int] = {}  # each descriptor once
    for index, dependency in enumerate(after):
        try:
            if dependency.fd not in events:
                pending[dependency.fd] = index
            elif _failed(dependency):
                return index
        except OSError as error:
            raise _unread(error) from error
    return list(pending.values())


def _failed(dependency: Dependency) -> bool:
    return dependency.is_event and outcome_of(dependency.fd) is not True


def _unread(error: OSError) -> ExecutionError:
    return ExecutionError(
        f"the outcome of a dependency cannot be read ({error.strerror}); raise the limit of open files (ulimit -n)",
        status=ErrorStatus.RESOURCE_EXHAUSTED_TRANSIENT,
    )


def _released() -> CallerError:
    return CallerError("the request names a prepared model that has been released; prepare the model again")


async def execute_fenced_by(
    prepared: IPreparedModel,
    request: Request,
    pools: Sequence[IMemory | IBuffer],
    after: Sequence[Dependency],
    fence: int,
    measure_timing: bool,
    deadline_ns: int | None,
    waits: Waits | None = None,
) -> FencedResult:
    """Make a fenced execution of an ordinary one; see `IPreparedModel.execute_fenced`."""
    check_fence(fence)
    settled = False
    try:
        began_ns = time.monotonic_ns()
        failed = None
        try:
            failed = await (waits or Waits()).done(after, deadline_ns)
            if failed is None:
                result = await prepared.execute(request, pools, measure_timing, deadline_ns)
            else:
                result = dependency_failed(failed)
        except (DriverDiedError, DriverHungError):
            raise  # the driver of a step, where the app waits for the steps of a plan
        except AionnError as error:
            result = refusal(error)
        found = FencedResult(result, failed, since_launch(result, time.monotonic_ns() - began_ns))
        settled = True
        signal_outcome(fence, request, result)
        return found
    finally:
        if not settled:
            signal_fence(fence, succeeded=False)


def signal_outcome(fence: int, request: Request, result: Result) -> None:
    """Signal the fence of a request that is over, unless its outputs are not what the request says. The caller decides about those."""
    if result.status is ErrorStatus.OUTPUT_INSUFFICIENT_SIZE:
        return
    if result.status is ErrorStatus.NONE and not as_asked(request, result):
        return
    signal_fence(fence, succeeded=result.status is ErrorStatus.NONE)


def as_asked(request: Request, result: Result) -> bool:
    """Return whether every output has the shape that the request gives for it."""
    return all(
        len(asked.dimensions) == len(shape.dimensions)
        and all(want in (0, got) for want, got in zip(asked.dimensions, shape.dimensions, strict=True))
        for asked, shape in zip(request.outputs, result.output_shapes, strict=False)
        if asked.dimensions and not asked.has_no_value
    )


def dependency_failed(index: int) -> Result:
    """Return the result of an execution that did not begin, because what it depends on has failed."""
    return Result(ErrorStatus.GENERAL_FAILURE, message=f"dependency {index} of the execution failed, so the execution did not begin")


def refusal(error: AionnError) -> Result:
    """Return the result for an error of the wait."""
    if isinstance(error, DeadlineError):
        return Result(ErrorStatus.MISSED_DEADLINE_TRANSIENT, message=str(error))
    return result_of(error)


def since_launch(result: Result, passed_ns: int) -> Timing:
    """Return the time since the launch, where the result has a time since the dependencies were done."""
    if result.timing.in_driver_us == UNKNOWN_TIME_US:
        return NO_TIMING
    return Timing(result.timing.on_device_us, max(passed_ns // 1000, result.timing.in_driver_us))
