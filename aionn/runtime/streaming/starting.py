"""`Starts`: the executions that an app has started (`Compilation.start`). Each is an `Event`, and no task waits for it.

A start checks its arguments, copies the arrays into a frame, and sends the request over the burst that all starts of the compilation
share. All of that happens before `start` returns, if the burst is connected, no swap is under way and all device memory is ready. Else a
task of the runtime does the rest. The driver's answer settles the event, in the callback of the queue.

What an execution waits for decides how it is sent. It always has the same frame and the same event.
    nothing, or one execution   over the burst. The request names the one before, and the driver's lanes leave it in its queue until that
    in the same driver          one is over (fmq/lanes_object.h). The app's loop has no part in it.
    executions elsewhere        over the burst, by a task that waits until the other events are settled.
    fences of the app, and      over the control socket, with the fences that the driver waits for and signals. So do the steps of a plan,
    what depends on those       and memory that a packet cannot name.

A request that the driver has forfeited, because the one before has not succeeded there, is decided here. The one before may have been sent
again with more room. An answer that says that an output did not fit leaves the fence alone. Executions after it read outputs in memory in
place. So an output in an app's memory needs its full shape before.

Invariants
    A `Started` is in `_pending` until its event is settled, and its timer is cancelled then.
    A request is sent after the one that it names, and that one was sent before. So requests that wait in queues never wait for each other.
    An event whose request names another one is settled after that one's event, except by a deadline, a cancellation or the driver's end.
    The frame of a request that the driver may run is pinned until the driver has answered or has ended. That holds also where the event
    was settled before.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from aionn.burst.packets import FORFEITED, PacketError
from aionn.errors import CallerError, DeadlineError, DriverDiedError, ExecutionError, lost_with
from aionn.hal.model import short_label
from aionn.hal.options import CallOptions
from aionn.hal.types import ErrorStatus, FencedResult, Result
from aionn.loopless import deadline_of, seconds_until
from aionn.memory.pool import FramePool, FramesInFlightError, MemoryFrame
from aionn.pages.app_layout import FAILED
from aionn.remote.device import Fenced, Found, RemotePreparedModel
from aionn.remote.fences import since_launch
from aionn.runtime.executing.arguments import FrameLayout, check_mapping
from aionn.runtime.executing.control import control_route
from aionn.runtime.executing.dependencies import After, check_shapes, dependencies_of, give_shapes, kept, shape_of
from aionn.runtime.executing.device_state import DeviceState
from aionn.runtime.executing.event import (
    Event,
    after_of,
    error_of,
    failed_dependency,
    is_signalled,
    note_sent,
    settle,
    signalled_fence_of,
    when_settled,
)
from aionn.runtime.executing.execution import Call, Channel, Execution, Executor, between_bytes
from aionn.runtime.executing.frames import fill
from aionn.runtime.executing.link import Link
from aionn.runtime.executing.placement import Placement, check_outputs, is_placed, states_of
from aionn.runtime.executing.transitions import ANSWERED, LEFT, PLACE, SEND, SETTLE, WAITING
from aionn.runtime.serving.serving import Serving
from aionn.runtime.streaming.connection import Connections

IN_FLIGHT = 64
"""So many started executions of one compilation may be pending. It bounds their frames and descriptors."""

_CLOSED = "the compilation, or its runtime, was closed before the execution was over"


class Starts:
    """The started executions of one compilation."""

    def __init__(self, bursts: Connections) -> None:
        """`bursts`: of the compilation."""
        self.kept_model = kept_model = bursts.kept_model
        self.connection = bursts.new(IN_FLIGHT)
        self.executor = self.connection.executor
        self._serving = control_route(kept_model)
        self._pending: set[Started] = set()

    async def route(self, deadline_ns: int | None) -> Channel:
        """Return the link of the burst, or the control socket where several drivers serve (`Route`)."""
        while True:
            channel = await self._serving(deadline_ns)
            if not isinstance(channel.serving.prepared, RemotePreparedModel):
                return channel
            link = await self.connection.route(deadline_ns)
            if link.plain:
                return link

    def start(
        self,
        inputs: Mapping[str, Any],
        after: Iterable[Any],
        outputs: Mapping[str, Any] | None,
        measure_timing: bool,
        timeout_s: float | None,
    ) -> Event:
        """See `Compilation.start`."""
        self.kept_model.check_usable()
        if self.connection.closed:
            self.connection.begin()
        if type(inputs) is not dict:
            check_mapping(inputs)
            inputs = dict(inputs)
        if outputs is not None:
            check_outputs(self.executor.arguments.outputs, outputs)
        deadline_ns = None if timeout_s is None else deadline_of(timeout_s)
        if len(self._pending) >= IN_FLIGHT:
            raise _too_many()
        call = Call(inputs, dict(outputs or ()), CallOptions(bool(measure_timing), deadline_ns), inputs)
        admission = self.executor.admission
        place = 0 if admission is None else admission.enter(deadline_ns, self.executor.ended)
        dependencies: tuple[After, ...] = ()
        try:
            dependencies = dependencies_of(after)
            event = Event(short_label(self.kept_model.model), self.kept_model.session.loop)
            started = Started(self, event, call, dependencies, place)
            started.lay_out()
        except BaseException:
            for dependency in dependencies:
                dependency.close()
            if admission is not None:
                admission.leave(place)
            raise
        self._pending.add(started)
        started.begin()
        return event

    def note_settled(self, started: Started, place: int) -> None:
        """Count an execution that is over. `place`: its place in the admission."""
        self._pending.discard(started)
        if self.executor.admission is not None:
            self.executor.admission.leave(place)
        error = error_of(started.event)
        if error is not None:
            self.executor.ended(error)

    def close(self) -> None:
        """End every execution that is pending. Their fences are signalled as failures."""
        for started in list(self._pending):
            settle(started.event, CallerError(_CLOSED))

    def end(self) -> None:
        """Do the same as `close`, and give the burst back."""
        self.close()
        self.connection.end()


class Started(Execution):
    """One started execution, from its arguments to its event.

    Attributes:
        event: what the app has.
        after: what the execution waits for.
    """

    __slots__ = ("_began_ns", "_place", "_starts", "_stop", "_timer", "_waited", "after", "event")

    def __init__(self, starts: Starts, event: Event, call: Call, after: tuple[After, ...], place: int) -> None:
        """`place`: in the admission, or 0."""
        super().__init__(starts.executor, starts.route, call)
        self.event = event
        self.after = after
        self._starts = starts
        self._place = place
        self._timer: asyncio.TimerHandle | None = None
        self._stop: Callable[[], None] | None = None
        self._waited: After | None = None  # the request that was sent names its execution
        self._began_ns = 0

    # --- before the request is sent --------------------------------------------------------------------------------------

    def lay_out(self) -> None:
        """Check the arguments, and copy the arrays. With device memory they are placed when it is known where that lies."""
        kept_model, call = self._starts.kept_model, self.call
        states = states_of(call.inputs, call.outputs) if self.placing else {}
        serving = kept_model.compiled.serving
        if not states or (serving is not None and all(state.is_ready(advance=advances) for state, advances in states.items())):
            self._place_arguments(serving, states)
            return
        placed = {name: shape_of(value) for name, value in call.inputs.items() if is_placed(value)}
        self.executor.arguments.shapes_of(call.inputs, placed)
        inputs = {name: kept(value) for name, value in call.inputs.items()}
        self.call = call.with_arguments(inputs, {name: kept(value) for name, value in call.outputs.items()})

    def _place_arguments(self, serving: Serving | None, states: Mapping[DeviceState, bool]) -> None:
        """Place the arguments, and copy the arrays into a frame. `states`: see `states_of`."""
        call = self.call
        model = self._starts.kept_model.model if serving is None else serving.model
        prepared: Any = None if serving is None else serving.prepared  # only device memory belongs to one
        placement, shapes = self.placed(model, prepared, states)
        try:
            self.hold(serving, placement, shapes, _lease)
            give_shapes(placement, self.layout, call.outputs)
        except BaseException:
            self._act(SETTLE)
            raise
        self.call = call.with_arguments({}, call.outputs)

    def begin(self) -> None:
        """Send the request now if that can be done, else in a task."""
        kept_model, deadline_ns = self._starts.kept_model, self.call.options.deadline_ns
        if deadline_ns is not None:
            self._timer = kept_model.session.loop.call_later(seconds_until(deadline_ns), self._late)
        when_settled(self.event, self._release_held)
        kept_model.compiled.use.touches += 1
        self._go_on()

    def _go_on(self) -> None:
        """Send the request now if that can be done, else in a task."""
        if self.event.done():
            return
        session, compiled = self._starts.kept_model.session, self._starts.kept_model.compiled
        serving = compiled.serving
        try:
            if self.state is WAITING or serving is None or not serving.alive or compiled.gate.shut or not self._send(serving):
                session.tasks.start_soon(self._later, name=self.event.name)
        except Exception as error:  # the event is the answer, as for every error after the arguments were checked
            settle(self.event, error)

    def _go_on_soon(self) -> None:
        """Go on in the next turn of the loop, because a queue in whose callback this is may be this one."""
        self._starts.kept_model.session.loop.call_soon(self._go_on)

    def _late(self) -> None:
        settle(self.event, DeadlineError("the execution was not over by the deadline; the driver may still be busy with it"))

    async def _later(self) -> None:
        """Send the request when a prepared model serves and every device memory is free."""
        try:
            states = states_of(self.call.inputs, self.call.outputs) if self.state is WAITING else {}
            channel = await self.choose(states)
            if self.event.done():
                return
            if self.state is WAITING:
                self._place_arguments(channel.serving, states)
            if not self._send(channel.serving):  # the queue is full
                self._act(SEND)
                await channel.send(self)
        except asyncio.CancelledError:
            settle(self.event, CallerError(_CLOSED))
            raise
        except Exception as error:  # the task belongs to the runtime, which no execution may end
            settle(self.event, error)

    # --- the request -----------------------------------------------------------------------------------------------------

    def _send(self, serving: Serving) -> bool:
        """Send the request if the driver can wait for its turn, else when that comes. Returns False, and does nothing, without a burst.

        Raises:
            ExecutionError: what it depends on has failed.
            AionnError: it cannot be sent.
        """
        fenced = not isinstance(serving.prepared, RemotePreparedModel)
        pending: list[After] = []
        for number, after in enumerate(self.after):
            if after.failed:
                raise failed_dependency(after.event, number)
            if not after.done:
                pending.append(after)
                fenced = fenced or after.event is None or is_signalled(after.event, self._starts.kept_model.session.loop)
        if fenced:
            self._send_fenced(serving, pending)
            return True
        link = self._starts.connection.link
        if link is None or link.serving is not serving or not link.alive:
            return False
        waited, event = (pending[0], pending[0].event) if pending else (None, None)
        after_number = after_of(event, link.prepared.device) if event is not None and len(pending) == 1 else 0
        if event is None or after_number:
            try:
                body = link.body(self)
            except PacketError:
                self._send_fenced(serving, pending)
                return True
            if self._send_over(link, body, waited, after_number):
                return True
        if event is not None:
            when_settled(event, self._go_on_soon)
        return event is not None

    def _send_over(self, link: Link, body: bytes, waited: After | None, after: int) -> bool:
        """Send the request over the burst. Returns False if the queue has no room for it now."""
        placement, measure_timing = self.placement, self.call.options.measure_timing
        assert placement is not None
        _sample(self, placement)
        self.channel, self._waited = link, waited
        self._began_ns = time.monotonic_ns() if measure_timing else 0
        self._act(SEND)
        sent = link.start(self, body, after)
        if sent < 0:
            self._waited = None
            if not self.event.done():
                self._act(PLACE)
            return self.event.done()
        if not self.event.done():
            note_sent(self.event, link.prepared.device, sent)
            self._stop = partial(link.make_late, sent)
            if waited is not None and waited.event is not None:
                when_settled(waited.event, self._conclude)
        if placement.used:
            placement.left()
        return True

    def answered(self, result: Result | None) -> None:
        """Take the answer that has come over the burst."""
        super().answered(result)
        if self.state is not ANSWERED:
            return
        self._stop = None
        self._conclude()

    def _conclude(self) -> None:
        """Settle the event by the answer, or by the end of the execution that the request names. Both must have come."""
        waited, link, result = self._waited, self.channel, self.result
        if self.event.done():
            return
        try:
            if waited is not None and waited.failed:
                raise _dependency_failed(self.executor, waited.event, self.after.index(waited))
            if self.state is not ANSWERED:
                return
            assert isinstance(link, Link)
            if result is None:
                if link.controller.ended_by is not None:
                    error = link.controller.why_over()
                    used = self.placement is not None and bool(self.placement.used)
                    settle(self.event, lost_with(error.device, error) if used and isinstance(error, DriverDiedError) else error)
            elif waited is None or waited.done:
                if waited is not None and result.message == FORFEITED:
                    self._send_again(link.serving, self.layout)
                    return
                if self._began_ns:
                    self.event.since_launch = since_launch(result, time.monotonic_ns() - self._began_ns)
                self._take(link.serving, result)
        except Exception as error:  # an error here would end the burst
            settle(self.event, error)

    # --- with fences -----------------------------------------------------------------------------------------------------

    def _send_fenced(self, serving: Serving, pending: Sequence[After]) -> None:
        """Send the request over the control socket, with its fences."""
        layout, placement = self.layout, self.placement
        assert placement is not None
        between = between_bytes(serving, layout)
        if layout.frame_bytes + between > self.lent.pool.frame_bytes:
            self._move(layout, between)  # it was placed before it was known what would run
        _sample(self, placement)
        self.channel = None
        fenced = Fenced(*self.request(), [after.dependency for after in pending], signalled_fence_of(self.event))
        self._act(SEND)
        settled = serving.entered(super().answered, self.call.options.deadline_ns)
        serving.use.count()
        try:
            self._stop = self._start(serving, fenced, partial(self._found, serving, settled))
        except BaseException:
            settled(None)
            raise
        placement.left()

    def _start(self, serving: Serving, fenced: Fenced, answered: Callable[[Found], None]) -> Callable[[], None]:
        """Send a request to one driver, or to those of a plan. Returns what ends its wait for dependencies."""
        prepared = serving.prepared
        if isinstance(prepared, RemotePreparedModel):
            return prepared.start_fenced(fenced, self.call.options, answered)
        from aionn.runtime.executing.fenced_plan import FencedPlan  # only plans need it

        planned = self.planned(prepared)
        wrong = planned.refusal()
        if wrong is not None:
            raise self.executor.failure(serving, wrong, None)
        return FencedPlan(planned, fenced, answered, expects=self._room is None).send()

    def _found(self, serving: Serving, settled: Callable[[Result | None], None], found: Found) -> None:
        """Take what the driver has answered, or why it never will."""
        self._stop = None
        uses_states = self.placement is not None and bool(self.placement.used)
        settled(found.result if isinstance(found, FencedResult) else None)
        if self.event.done():
            return
        try:
            if isinstance(found, FencedResult):
                if found.failed is not None:
                    waited = [(number, after.event) for number, after in enumerate(self.after) if after.sent]
                    number, event = waited[found.failed] if 0 <= found.failed < len(waited) else (found.failed, None)
                    raise _dependency_failed(self.executor, event, number)
                if self.call.options.measure_timing:
                    self.event.since_launch = found.since_launch
                self._take(serving, found.result)
            else:
                settle(self.event, lost_with(found.device, found) if uses_states and isinstance(found, DriverDiedError) else found)
        except Exception as error:  # an error here would end the driver's connection
            settle(self.event, error)

    def _take(self, serving: Serving, result: Result) -> None:
        """Settle the event by the driver's answer, or send the request again with more room."""
        executor, placement = self.executor, self.placement
        assert placement is not None
        if result.status is not ErrorStatus.NONE:
            if self.widen():
                assert self._room is not None
                self._send_again(serving, self._room)
                return
            raise executor.failure(serving, result, None if placement.inputs else self.layout.inputs_in(self.lent))
        if result.output_shapes:
            check_shapes(placement, result, list(serving.model.outputs))
        settle(self.event, self.outputs(serving))

    def _send_again(self, serving: Serving, layout: FrameLayout) -> None:
        """Send the request once more, perhaps with more room for its outputs. It keeps its event and what it has placed.

        All that it depends on is done.
        """
        if layout is not self.layout:
            self._move(layout, between_bytes(serving, layout))
        self._act(PLACE)
        for after in self.after:
            after.close()
        self.after, self._waited = (), None
        if isinstance(self.channel, Link):
            self._starts.kept_model.session.tasks.start_soon(self._later, name=self.event.name)
        else:
            self._send_fenced(serving, ())

    def _move(self, layout: FrameLayout, between: int) -> None:
        """Take a frame with more room, and copy the inputs there."""
        before, old, placement = self.layout, self.lent, self.placement
        frame = _lease(self.executor.frames.pool(layout, between))
        self.layout, self.frame = layout, frame
        fill(frame, layout, before.inputs_in(old), placement.inputs if placement is not None else ())
        old.settled(None)

    def _release_held(self) -> None:
        """Give back what the execution holds, once its event is settled. What the driver may still touch is given back with its answer."""
        if self._timer is not None:
            self._timer.cancel()
        self._starts.note_settled(self, self._place)
        for after in self.after:
            after.close()
        stop, self._stop = self._stop, None
        if stop is not None:
            stop()
        self._settle()
        if self.state is LEFT:
            del self._starts
        else:
            self.call = self.call.with_arguments({}, {})


def _sample(started: Started, placement: Placement) -> None:
    """Keep the inputs for the comparison of stages, if one is under way."""
    compiled = started.executor.compiled
    if compiled is not None and compiled.sampling is not None and not placement.inputs:
        compiled.sampling.take(started.layout.inputs_in(started.lent))


def _dependency_failed(executor: Executor, event: Event | None, number: int) -> ExecutionError:
    """Count an execution that was sent and does not run, because what it depends on has failed. Returns its error."""
    executor.counts.add(FAILED, 1)
    error = failed_dependency(event, number)
    executor.failures.add(error)
    return error


def _lease(pool: FramePool) -> MemoryFrame:
    try:
        return pool.lease()
    except FramesInFlightError:
        raise _too_many() from None


def _too_many() -> CallerError:
    return CallerError(f"{IN_FLIGHT} started executions of this compilation are pending; await one of them before the next start")
