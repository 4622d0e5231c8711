"""The app's end of a burst: requests in flight (NNAPI's ExecutionBurstController, with several at once).

`Caller` does what every request needs, in native code: it sends, looks for answers for a moment (`spin_policy`), sleeps, and settles in
one go all answers that have come. caller_object.h holds its invariants. This module does the rest: answers that have not come before,
deadlines that pass, and the end. A request whose caller has left becomes late while it lies in the queue, so that the driver does not
run it. What a request holds is given back (`settled`) by that, if the driver is sure to see it, by the driver's answer, or by its death.

Invariants
    `caller` remembers only answers that `decode_result` has accepted.
    `ended_by` is set before `caller.end` wakes anybody.
    The timer is set for the earliest deadline that `caller` knows, for when the oldest request is overdue, or for an earlier moment.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

from aionn import trace
from aionn.burst.packets import (
    DATUM_BYTES,
    PacketError,
    decode_result,
    is_framed_result,
    read_result_identity,
    split_results,
)
from aionn.burst.spin_policy import APP_WINDOW_NS, INLINE_NS, YIELD_NS, may_stay_awake
from aionn.errors import AionnError, CallerError, DeadlineError, ExecutionError, again
from aionn.fmq import SOON, Caller, MessageQueue, QueueClosedError, QueueCorruptedError
from aionn.fmq.thread_waits import Loop, ThreadWaits, Timer
from aionn.hal.types import ErrorStatus, Result
from aionn.loopless import leave_in_child, running_loop, seconds_until
from aionn.memo import Memo

if TYPE_CHECKING:
    import asyncio

    from typing_extensions import Buffer

_REMEMBERED = 256
"""How many different answers are remembered decoded."""

Settled = Callable[[Result | None], None]
"""Called with the answer to a request, or with None if it was not sent, will never be answered, or never be run."""

Ask = Callable[[int, Callable[[bool], None]], None]
"""Asks the driver about the request with an identity. Calls back with whether the driver still has that request to answer."""

Sent: TypeAlias = "tuple[Result, int] | asyncio.Future[tuple[Result, int] | None] | None"
"""What `Caller.send` returns: the answer, a future of it, or None."""


class ExecutionBurstController:
    """Requests in flight on one burst. Owns both queues.

    Args:
        requests: queue of 24-byte datums that the driver reads.
        results: queue of 24-byte datums that the driver writes.
        depth: how many requests may be in flight, beside as many that were withdrawn. Further ones wait for their turn, in order.
        low_power: never stay awake while waiting.
        patience_s: the driver is asked about a request that is unanswered for longer (`ask`).
        counts: a slot of the statistics page, where requests and their times are counted.
        loop: what it waits by, if that is not the running loop: a thread's waits.

    Attributes:
        caller: the native part. A stream's usual frame is sent there directly (`Burst.compute`).
        ask: asks the driver whether it still has a request to answer. The answer comes by a call. None: the driver is never asked.
        ended_by: why the burst is over, or None while it goes on. Only `end` sets it.
        lost: how many requests were in flight at the end. They are never answered.
    """

    def __init__(
        self,
        requests: MessageQueue,
        results: MessageQueue,
        *,
        depth: int = 8,
        low_power: bool = False,
        patience_s: float = 0.0,
        counts: Buffer | None = None,
        loop: Loop | None = None,
    ) -> None:
        self._loop: Loop = loop or running_loop()
        self._requests = requests
        self._results = results
        # Whole framed answers without their identity, decoded. Only what `decode_result` has accepted is in it.
        self._decoded: Memo[bytes, Result] = Memo(_REMEMBERED)
        self._timer: asyncio.TimerHandle | Timer | None = None
        self.ended_by: BaseException | None = None
        self.lost = 0
        self.ask: Ask | None = None
        self.caller = caller = Caller(requests, results)
        caller.inline_ns, caller.yield_ns = APP_WINDOW_NS if self._loop.call_soon is None else INLINE_NS, YIELD_NS
        self._may_look = may_stay_awake(low_power=low_power)
        window_ns = APP_WINDOW_NS if self._may_look else 0
        calls = (
            self._loop.create_future,
            self._loop.call_soon,
            self._take_unknown,
            self._cannot_send,
            self._wake_by,
            trace.captured_ns.get,
        )
        number = requests.inode  # of this burst, in both processes
        caller.begin(depth, window_ns, calls, counts, number, int(patience_s * 1e9))
        if isinstance(self._loop, ThreadWaits):
            caller.sleep_fd = self._loop.fileno()
        self._result_fd = results.reader_fd
        self._loop.add_reader(self._result_fd, caller.event)
        leave_in_child(self)

    @property
    def in_flight(self) -> int:
        """How many requests have been sent and are not answered."""
        return self.caller.in_flight

    def soon(self) -> None:
        """Announce a request, so that a sleeping driver wakes up meanwhile. The caller has let the loop run just before."""
        if self._may_look:
            self.caller.nudge(SOON)
            self.caller.yield_by_ns = time.monotonic_ns() + 2 * YIELD_NS  # what is left to copy takes that long at most

    async def execute(self, body: bytes, settled: Settled | None = None, deadline_ns: int | None = None) -> tuple[Result, int]:
        """Send one request and wait for its answer.

        Args:
            body: the request without its identity (`encode_request_body`, framed).
            settled: called exactly once. It gets the result when the driver has answered, or None if the driver has gone, nothing was
                sent, or the driver will not run it because its caller has left. It must not raise.
            deadline_ns: when the caller gets `DeadlineError`, whatever the driver does. In CLOCK_MONOTONIC.

        Returns:
            The result, and how long the driver was busy with it in ns.

        Raises:
            CallerError: the request is larger than the queue. Nothing was written.
            DeadlineError: the answer did not come by the deadline.
            AionnError: the reason why the burst ended.
        """
        sent: Sent = self.caller.send(body, settled, deadline_ns or 0)
        if isinstance(sent, tuple):
            return sent
        if sent is None:
            if settled is not None:
                settled(None)
            raise self._why_not_sent(body)
        try:
            answer = await sent
        except BaseException:
            self.caller.leave(sent, None)
            raise
        if answer is None:
            raise self.why_over()
        return answer

    def _why_not_sent(self, body: bytes) -> BaseException:
        if self.ended_by is None and len(body) + DATUM_BYTES > self._requests.capacity * DATUM_BYTES:
            return CallerError(
                f"the request has {len(body) // DATUM_BYTES + 1} datums, but the burst's queue holds {self._requests.capacity}; "
                "send fewer arguments at once, or make the queues larger"
            )
        self._cannot_send()
        return self.why_over()

    def _cannot_send(self) -> None:
        """End the burst, because the request queue takes nothing although no request is in flight."""
        try:
            self._requests.begin_write(1)  # says whether the queue is closed or broken
            self.end(PacketError("the driver answers requests that it has not read"))
        except AionnError as error:
            self.end(error)

    # ---- deadlines ----------------------------------------------------------------------------------------------------

    def _wake_by(self, deadline_ns: int) -> None:
        """Set the timer for a moment that is earlier than all others. Most requests are answered long before, so it is not reset then."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(seconds_until(deadline_ns), self._late)

    def _late(self) -> None:
        self._timer = None
        next_ns, late, (overdue, sent_ns) = self.caller.late()
        for future, sent in late:
            what = "the driver's answer" if sent else "a free place"
            if not future.done():
                future.set_exception(DeadlineError(f"{what} did not come by the deadline; the driver may still be busy with it"))
        if overdue and self.ask is not None and self.ended_by is None:
            self.ask(overdue, partial(self._found, overdue, sent_ns))
        if next_ns and self.ended_by is None:
            self._wake_by(next_ns)

    def _found(self, identity: int, sent_ns: int, known: bool) -> None:
        """End the burst if the driver does not know a request, whose answer has not come meanwhile either."""
        if known or self.ended_by is not None:
            return
        self.caller.event()
        if self.caller.unanswered(identity):
            age_s = (time.monotonic_ns() - sent_ns) / 1e9
            self.end(PacketError(f"the driver knows nothing of a request that was sent {age_s:.1f} s ago, so shared memory was damaged"))

    # ---- answers that `caller` does not know ----------------------------------------------------------------------------

    def _take_unknown(self) -> None:
        """Take all that lies in the result queue, which begins with an answer that has not come before. Or the queue is at its end."""
        try:
            self._take(self._results.read(self._results.available_to_read() or 1) or b"")
        except Exception as error:  # whatever it is, the burst cannot go on without these answers
            self.end(error)
            if isinstance(self._loop, ThreadWaits) and not isinstance(error, AionnError):
                raise  # the handler of a signal has raised it, so the thread's call must get it

    def _take(self, datums: bytes) -> None:
        for packet in split_results(datums):
            result = self._decode(packet)
            identity, service_ns = read_result_identity(packet)
            if not self.caller.answered(identity, service_ns, result):
                if self.ended_by is not None:
                    return  # what an answer has given back has ended the burst
                raise PacketError(f"the driver answered request {identity}, which is not in flight")

    def _decode(self, packet: bytes) -> Result:
        if not is_framed_result(packet):
            raise PacketError(f"the driver answered with {len(packet)} bytes that are not a framed result")
        key = packet[:-DATUM_BYTES]
        result = self._decoded.get(key)
        if result is None:
            result = decode_result(packet).result
            self._decoded[key] = result
        self.caller.remember(key, result)
        return result

    async def wait_idle(self) -> None:
        """Wait until every request that has been sent, or waits for its turn, is settled. Only those requests bear the cost."""
        import asyncio  # only a task of a loop waits here

        while (settled := self.caller.idle()) is not None:
            await asyncio.wait([settled])  # a caller that leaves does not cancel what others may wait for

    # ---- the end ------------------------------------------------------------------------------------------------------

    def end(self, error: BaseException) -> None:
        """End the burst: take in what the driver still published, then give every caller `error`. Idempotent.

        Call it when the driver can write no more, or when its writes do not matter any more.
        """
        if self.ended_by is None:
            self._drain_last()
        if self.ended_by is not None:  # an answer that came last may have ended it, too
            return
        self.ended_by = error
        self._loop.remove_reader(self._result_fd)
        if self._timer is not None:
            self._timer.cancel()
        try:
            self.lost = self.caller.end()
        finally:  # it raises what the handler of a signal has raised meanwhile
            self._requests.close()
            self._results.close()

    def why_over(self) -> BaseException:
        """Return `ended_by` for one more caller. An app does not know queues and packets, so their errors become an `ExecutionError`."""
        error = self.ended_by
        assert error is not None  # only the end settles a request without an answer
        if not isinstance(error, QueueClosedError | QueueCorruptedError | PacketError):
            return again(error)
        why = f"this burst's connection to the driver has ended, and the request is lost ({error}); the next use of the burst connects anew"
        lost = ExecutionError(why, status=ErrorStatus.DEVICE_UNAVAILABLE)
        lost.__cause__ = again(error)
        return lost

    def leave(self) -> None:
        """Make every later request fail, in a child of fork. The requests in flight and the event are the parent's."""
        self.ended_by = self.ended_by or CallerError("this burst belongs to the parent process; open a runtime in this process")

    def _drain_last(self) -> None:
        try:
            available = self._results.available_to_read()
            self._take((self._results.read(available) if available else None) or b"")
        except AionnError as error:
            trace.count("burst.last_answers_lost", reason=str(error))
