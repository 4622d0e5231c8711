"""The app's end of a burst: requests in flight (NNAPI's ExecutionBurstController, with several at once).

A caller writes its packet, looks for the answer for a moment (`spin_policy`), and sleeps. A caller that looks settles every answer
it finds, also those of other callers. A caller that is alone writes and looks in one native call (`at_once`). There `_caller` recognises by
their bytes the answers that have come before, and leaves every other answer to `execute`. Cancelling a caller does not cancel the
driver. Only the driver's answer or its death gives back what the request holds (`settled`).

Invariants
    An identity is in `_in_flight` until it is answered or the burst ends. It enters before the loop can run after its packet is
    written. So no caller waits on a burst that has ended, and no frame is reused while the driver may still write to it.
    While any request is in flight the result queue is armed (`_armed`), or its event is pending, or `_look_again` is scheduled
    (`_looking`), or its caller looks right now.
    `_caller` remembers only answers that `decode_result` has accepted, and takes nothing else out of the queue.
    `_armed` is True from a successful arming until the event has been seen, because the peer clears the shared word.
    `_suspended` callers wait and have not resumed yet.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from functools import partial
from typing import cast

from aionn import trace
from aionn.burst.packets import (
    DATUM_BYTES,
    PacketError,
    decode_result,
    identity_datum,
    is_framed_result,
    read_result_identity,
    split_results,
)
from aionn.burst.spin_policy import APP_WINDOW_NS, INLINE_NS, SOON, YIELD_NS, SpinPolicy, apart
from aionn.errors import AionnError, CallerError, DeadlineError, ExecutionError, again
from aionn.fmq import Caller, MessageQueue, QueueClosedError, QueueCorruptedError
from aionn.hal.types import ErrorStatus, Result
from aionn.memo import Memo
from aionn.tasks import leave_in_child, running_loop, seconds_until

_REMEMBERED = 256
"""How many different answers are remembered decoded."""


Settled = Callable[[Result | None], None]
"""Called with the answer to a request, or with None if it was not sent or will never be answered."""


class _InFlight:
    """A request in flight. `began_ns` is when it was sent, `sleeps` how often the burst had slept until then."""

    __slots__ = ("answer", "began_ns", "result", "service_ns", "settled", "sleeps", "timer")

    def __init__(self, settled: Settled | None, began_ns: int, sleeps: int) -> None:
        self.settled = settled
        self.began_ns = began_ns
        self.sleeps = sleeps
        self.result: Result | None = None
        self.service_ns = 0
        self.answer: asyncio.Future[None] | None = None
        self.timer: asyncio.TimerHandle | None = None


class ExecutionBurstController:
    """Requests in flight on one burst. Owns both queues.

    Args:
        requests: queue of 24-byte datums that the driver reads.
        results: queue of 24-byte datums that the driver writes.
        depth: how many requests may be in flight. Further callers wait for their turn, in order.
        low_power: never stay awake while waiting.

    Attributes:
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
    ) -> None:
        self._loop = running_loop()
        self._requests = requests
        self._results = results
        self._depth = depth
        self._spin = SpinPolicy(APP_WINDOW_NS, low_power=low_power)
        self._in_flight: dict[int, _InFlight] = {}
        self._turns: dict[asyncio.Future[None], None] = {}
        self._writing = 0
        self._last_id = 0
        self._armed = False
        self._sleeps = 0
        self._looking = False
        self._looking_until_ns = 0
        self._joined = False  # whether a caller has begun to wait since `_look_again` looked last
        self._suspended = 0
        # Whole framed answers without their identity, decoded. Only what `decode_result` has accepted is in it.
        self._decoded: Memo[bytes, Result] = Memo(_REMEMBERED)
        self._caller = Caller(requests, results)
        self.ended_by: BaseException | None = None
        self.lost = 0
        self._yield_by_ns = 0
        self._result_fd = results.reader_fd
        self._loop.add_reader(self._result_fd, self._event)
        leave_in_child(self)

    @property
    def in_flight(self) -> int:
        """How many requests are in flight."""
        return len(self._in_flight)

    def at_once(self, body: bytes, deadline_ns: int | None = None, *, traced: bool = False) -> tuple[Result, int] | int:
        """Send a request and get its answer without an await, if that is possible and the driver is quick.

        The caller holds what the request needs until this returns. With `traced` the caller reports the spans, if there is a listener.

        Returns:
            The answer, as `execute` does. Or a number to call `execute` with, before the loop runs: the request has been sent
            under this number, and is unanswered. Or 0 if the request has not been sent.
        """
        # A caller that is alone waits right here. Suspending and resuming a task costs more time than many answers take.
        if self._in_flight or self._suspended or self._turns or not self._spin.brisk or self.ended_by is not None:
            return 0
        if trace.active and not traced:
            return 0
        if self._armed:  # for a request whose caller has left
            self._results.disarm_reader()
            self._armed = False
        identity = self._last_id + 1
        answer = self._caller.call(body, identity, deadline_ns or 0, self._yield_by_ns, INLINE_NS)
        if answer is False:  # `execute` finds out why, or lets the loop run
            return 0
        self._last_id = identity
        if answer is not None:
            return cast("tuple[Result, int]", answer)
        self._in_flight[identity] = _InFlight(None, time.monotonic_ns() - INLINE_NS, self._sleeps)
        return identity

    def soon(self) -> None:
        """Announce a request, so that a sleeping driver wakes up meanwhile. The caller has let the loop run just before."""
        if self._spin.allowed:
            self._caller.nudge(SOON)
            self._yield_by_ns = time.monotonic_ns() + 2 * YIELD_NS  # what is left to copy takes that long at most

    async def execute(
        self, body: bytes, settled: Settled | None = None, deadline_ns: int | None = None, sent: int | None = None
    ) -> tuple[Result, int]:
        """Send one request and wait for its answer.

        Args:
            body: the request without its identity (`encode_request_body`, framed).
            settled: called exactly once. It gets the result when the driver has answered, or None if the driver has gone or
                nothing was sent. It must not raise.
            deadline_ns: when the caller gets `DeadlineError`, whatever the driver does. In CLOCK_MONOTONIC.
            sent: the number that `at_once` has returned for this request.

        Returns:
            The result, and how long the driver was busy with it in ns.

        Raises:
            CallerError: the request is larger than the queue. Nothing was written.
            DeadlineError: the answer did not come by the deadline.
            AionnError: the reason why the burst ended.
        """
        began_ns = time.monotonic_ns()
        identity = sent if sent is not None else self.at_once(body, deadline_ns, traced=True)
        if isinstance(identity, tuple):
            result, service_ns = identity
            if settled is not None:
                settled(result)
            if trace.active:
                _trace(result, self._last_id, service_ns, began_ns)
            return identity
        in_flight = self._in_flight
        if identity:
            entry = in_flight[identity]
            entry.settled = settled
            self._look()  # settle answers that `at_once` has left in the queue
        else:
            entry = _InFlight(settled, began_ns, self._sleeps)
            try:
                if self._turns or len(in_flight) >= self._depth or self.ended_by is not None:
                    await self._turn(entry, deadline_ns)
                identity = self._last_id = self._last_id + 1
                in_flight[identity] = entry
                if self._writing or not self._caller.send(body, identity, deadline_ns or 0):
                    await self._write_when_room(entry, body + identity_datum(identity, deadline_ns), deadline_ns)
            except BaseException as error:
                self._not_sent(entry, error)
                if self.ended_by is not None and isinstance(error, AionnError):
                    raise (over := self._why_over()) from over.__cause__
                raise
        if entry.result is None and self.ended_by is None:
            entry.answer = answer = self._loop.create_future()
            self._suspended += 1
            try:
                if self._looking:
                    self._joined = True
                else:
                    self._watch()
                if deadline_ns is not None:
                    self._time(entry, identity, deadline_ns)
                await answer
            finally:
                self._suspended -= 1
        found = entry.result
        if found is None:
            raise self._why_over()
        if trace.active:
            _trace(found, identity, entry.service_ns, entry.began_ns)
        return found, entry.service_ns

    # ---- sending ------------------------------------------------------------------------------------------------------

    async def _turn(self, entry: _InFlight, deadline_ns: int | None) -> None:
        """Wait until fewer than `depth` requests are in flight. First come, first served."""
        if self.ended_by is not None:
            raise self._why_over()
        turn: asyncio.Future[None] = self._loop.create_future()
        self._turns[turn] = None
        timer = None
        if deadline_ns is not None:
            timer = self._loop.call_later(seconds_until(deadline_ns), _fail_late, turn, "a free place")
        try:
            await turn
        except BaseException:
            del self._turns[turn]
            self._next_turn()  # the turn may have come already, so pass it on
            raise
        finally:
            self._turns.pop(turn, None)
            if timer is not None:
                timer.cancel()
        if self.ended_by is not None:
            raise self._why_over()
        entry.began_ns, entry.sleeps = time.monotonic_ns(), self._sleeps

    def _next_turn(self) -> None:
        free = self._depth - len(self._in_flight)
        for turn in self._turns:
            if free <= 0:
                return
            if not turn.done():
                turn.set_result(None)
            elif turn.cancelled() or turn.exception() is not None:
                continue  # this caller leaves without taking its place
            free -= 1

    async def _write_when_room(self, entry: _InFlight, packet: bytes, deadline_ns: int | None) -> None:
        """Wait until the driver has read enough of the queue, and write. Writers keep their order."""
        if len(packet) > self._requests.capacity * DATUM_BYTES:
            raise CallerError(
                f"the request has {len(packet) // DATUM_BYTES} datums, but the burst's queue holds {self._requests.capacity}; "
                "open the burst with a larger queue_capacity"
            )
        self._writing += 1
        try:
            await self._requests.write_blocking(packet, deadline_ns)
        finally:
            self._writing -= 1
        entry.began_ns, entry.sleeps = time.monotonic_ns(), self._sleeps

    def _not_sent(self, entry: _InFlight, error: BaseException) -> None:
        """Free the place of a request that was not written, and give back what it held. A write is all or nothing."""
        in_flight = self._in_flight
        if in_flight and entry in in_flight.values():
            del in_flight[next(identity for identity, other in in_flight.items() if other is entry)]
        if isinstance(error, AionnError) and not isinstance(error, CallerError | DeadlineError):
            self.end(error)  # the queue is closed or broken, so no request can be written any more
        self._next_turn()
        self._settle(entry)

    # ---- waiting ------------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        """Make sure that the answer to the request that has just been sent will be seen."""
        budget_ns = self._budget_ns()
        if budget_ns and apart(self._requests.publish_writer_cpu(), self._results.writer_cpu()):
            if self._armed:
                # This end is awake and needs no event. An event that is already under way comes as a spurious callback.
                self._results.disarm_reader()
                self._armed = False
            self._looking = True
            self._looking_until_ns = time.monotonic_ns() + budget_ns
            self._loop.call_soon(self._look_again)
        else:
            self._keep_watch()

    def _budget_ns(self) -> int:
        caller, awake = self._caller, self._spin
        if caller.waits:
            awake.watched(caller.waits, INLINE_NS)
            caller.waits = 0
        return awake.budget_ns()

    def _look_again(self) -> None:
        """Look once per iteration of the loop, for all callers. Sleep only if nothing came within the budget."""
        now_ns = time.monotonic_ns()
        self._yield_by_ns = now_ns + YIELD_NS
        self._look(now_ns)
        if self._joined:
            self._joined = False
            self._looking_until_ns = now_ns + self._budget_ns()
        if self._in_flight and now_ns < self._looking_until_ns:
            self._loop.call_soon(self._look_again)
        else:
            self._looking = False
            self._keep_watch()

    def _time(self, entry: _InFlight, identity: int, deadline_ns: int | None) -> None:
        if deadline_ns is not None and entry.timer is None and identity in self._in_flight:
            entry.timer = self._loop.call_later(seconds_until(deadline_ns), self._late, entry, identity)

    def _late(self, entry: _InFlight, identity: int) -> None:
        if entry.answer is not None:
            self._look()  # an answer that lies in the queue counts
            if identity not in self._in_flight:
                return
            _fail_late(entry.answer, "the driver's answer")

    def _event(self) -> None:
        if self.ended_by is not None:
            return  # this callback was on its way when the burst ended
        self._results.clear_reader_event()
        self._armed = False
        now_ns = time.monotonic_ns()
        self._yield_by_ns = now_ns + YIELD_NS
        self._look(now_ns)
        self._keep_watch()

    def _keep_watch(self) -> None:
        """Keep the invariant: while a request is in flight, something will make this end look again."""
        while self._in_flight and not self._armed and not self._looking and self.ended_by is None:
            if self._results.arm_reader():
                self._armed = True
                self._sleeps += 1
                return
            self._look(expected=True)

    # ---- answers ------------------------------------------------------------------------------------------------------

    def _look(self, now_ns: int = 0, *, expected: bool = False) -> None:
        """Settle every answer that lies in the queue.

        Args:
            now_ns: set if the loop has run. Then the wait for the last answer found decides whether to stay awake.
            expected: the queue did not allow this end to sleep. If it has no answer now, it is at its end.
        """
        if self.ended_by is not None:
            return
        try:
            results = self._results
            available = results.available_to_read()
            entry = None
            if available:
                for result, service_ns, identity in self._caller.take():
                    entry = self._answered(identity, service_ns, result)
                available = results.available_to_read()  # the first of these is an answer that has not come before
            elif expected:
                available = 1
            if available:
                datums = results.read(available)
                if datums:
                    entry = self._take(datums)
            if entry is not None and now_ns:
                self._spin.waited(now_ns - entry.began_ns, slept=self._sleeps != entry.sleeps)
        except AionnError as error:
            self.end(error)

    def _take(self, datums: bytes) -> _InFlight | None:
        """Settle these answers, and return the last one."""
        entry = None
        for packet in split_results(datums):
            result = self._decode(packet)
            entry = self._answered(*read_result_identity(packet), result)
        return entry

    def _decode(self, packet: bytes) -> Result:
        if not is_framed_result(packet):
            raise PacketError(f"the driver answered with {len(packet)} bytes that are not a framed result")
        key = packet[:-DATUM_BYTES]
        result = self._decoded.get(key)
        if result is None:
            result = decode_result(packet).result
            self._decoded[key] = result
        self._caller.remember(key, result)
        return result

    def _answered(self, identity: int, service_ns: int, result: Result) -> _InFlight:
        entry = self._in_flight.pop(identity, None)
        if entry is None:
            raise PacketError(f"the driver answered request {identity}, which is not in flight")
        entry.service_ns = service_ns
        entry.result = result
        self._settle(entry)
        if self._turns:
            self._next_turn()
        return entry

    def _settle(self, entry: _InFlight) -> None:
        """Give back what the request held, once, and wake its caller."""
        settled, entry.settled = entry.settled, None
        if entry.timer is not None:
            entry.timer.cancel()
        if entry.answer is not None and not entry.answer.done():
            entry.answer.set_result(None)
        if settled is not None:
            settled(entry.result)

    async def wait_idle(self) -> None:
        """Wait until every request that has been sent, or waits for its turn, is settled. Only those requests bear the cost."""
        while self._in_flight:
            entry = next(reversed(self._in_flight.values()))
            idle = asyncio.Event()
            entry.settled = partial(_settle_and_set, entry.settled, idle)
            await idle.wait()

    # ---- the end ------------------------------------------------------------------------------------------------------

    def end(self, error: BaseException) -> None:
        """End the burst: take in what the driver still published, then give every caller `error`. Idempotent.

        Call it when the driver can write no more, or when its writes do not matter any more.
        """
        if self.ended_by is not None:
            return
        self._drain_last()
        self.ended_by = error
        self._loop.remove_reader(self._result_fd)
        in_flight, self._in_flight = self._in_flight, {}
        self.lost = len(in_flight)
        for entry in in_flight.values():
            self._settle(entry)
        for turn in self._turns:
            if not turn.done():
                turn.set_result(None)
        self._requests.close()
        self._results.close()

    def _why_over(self) -> BaseException:
        """Return `ended_by` for one more caller. An app does not know queues and packets, so their errors become an `ExecutionError`."""
        error = self.ended_by
        assert error is not None  # only the end settles a request without an answer
        if not isinstance(error, QueueClosedError | QueueCorruptedError | PacketError):
            return again(error)
        why = f"the driver has ended this burst and lost the request ({error}); the next use of the burst connects anew"
        lost = ExecutionError(why, status=ErrorStatus.DEVICE_UNAVAILABLE)
        lost.__cause__ = again(error)
        return lost

    def leave(self) -> None:
        """Make every later request fail, in a child of fork. The requests in flight and the event are the parent's."""
        self.ended_by = self.ended_by or CallerError("this burst belongs to the parent process; open a runtime in this process")

    def _drain_last(self) -> None:
        try:
            available = self._results.available_to_read()
            datums = self._results.read(available) if available else None
            if datums:
                self._take(datums)
        except AionnError as error:
            trace.count("burst.last_answers_lost", reason=str(error))


def _settle_and_set(settled: Settled | None, idle: asyncio.Event, result: Result | None) -> None:
    if settled is not None:
        settled(result)
    idle.set()


def _trace(result: Result, identity: int, service_ns: int, began_ns: int) -> None:
    """Report the spans of a request. The driver reports how long it was busy. The rest was spent in the queues and in waking up."""
    ended_ns = time.monotonic_ns()
    busy_from_ns = max(began_ns, ended_ns - service_ns)
    trace.span_at("burst.queue_wait", began_ns, busy_from_ns, identity=identity)
    trace.span_at("burst.execute", busy_from_ns, ended_ns, identity=identity, status=result.status.name)


def _fail_late(future: asyncio.Future[None], what: str) -> None:
    if not future.done():
        future.set_exception(DeadlineError(f"{what} did not come by the deadline; the driver may still be busy with it"))
