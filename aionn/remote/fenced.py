"""The app's end of a fenced execution: one call that is sent at once and answered later."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import NamedTuple

from aionn.errors import CallerError, again
from aionn.hal.interfaces import IBuffer
from aionn.hal.types import Dependency, FencedResult, IMemory, Request
from aionn.remote.connection import Connection
from aionn.remote.control import Execute, Executed, Failure, ReplyBody
from aionn.remote.failures import error_of
from aionn.remote.fences import check_fence, signal_fence
from aionn.tasks import Answer

Found = FencedResult | BaseException
"""The driver's answer, or the error that came in its place."""


class Fenced(NamedTuple):
    """A fenced execution as it is sent; see `IPreparedModel.execute_fenced`."""

    request: Request
    pools: Sequence[IMemory | IBuffer]
    after: Sequence[Dependency]
    fence: int

    @property
    def fds(self) -> list[int]:
        """The descriptors that the driver signals and waits for, in the order of the message."""
        return [self.fence, *(dependency.fd for dependency in self.after)]


def send_fenced(connection: Connection, body: Execute, fds: Sequence[int], settled: Callable[[Found], None]) -> Callable[[], None]:
    """Send a fenced execution, and return without waiting. Returns what asks the driver to end its wait for dependencies.

    `settled` is called once, in the loop. It must not raise.

    Raises:
        AionnError: nothing was sent, and `settled` is not called.
    """
    sent = False

    def answered(reply: ReplyBody | None) -> None:
        if isinstance(reply, Executed):
            settled(FencedResult(reply.result, reply.failed, reply.since_launch))
        elif isinstance(reply, Failure):
            settled(error_of(reply))
        elif sent:
            settled(again(connection.ended_by or CallerError("the connection to the driver has ended")))

    stop = connection.begin(body, Executed, fds, answered)
    sent = True
    return stop


async def fenced_answer(start: Callable[[Callable[[Found], None]], Callable[[], None]], fence: int) -> FencedResult:
    """Start a fenced execution and wait for its answer. Signal a failure where the driver does not answer."""
    check_fence(fence)
    answer: Answer[Found] = Answer(asyncio.get_running_loop())
    found: Found = CallerError("the execution was cancelled by its caller")
    stop: Callable[[], None] | None = None
    try:
        stop = start(answer.set)
        found = await answer.wait()
    finally:
        if isinstance(found, BaseException):
            signal_fence(fence, succeeded=False)
            if stop is not None:
                stop()
    if isinstance(found, BaseException):
        raise found
    return found
