"""`Starts`: the executions that an app has started (`Compilation.start`). Each is an `Event`, and no task waits for it.

A start checks its arguments, copies the arrays into a frame, and sends the request. With it go the fences that the driver waits for, and
the one that it signals. All of that happens before `start` returns, if the model is prepared, no swap is under way and no argument is
device memory. Else a task of the runtime does the rest. The driver's answer settles the event, in the callback of the control connection.

An answer that says that an output did not fit leaves the fence alone. The request is sent again with more room, and those who wait for the
fence see one execution. Executions after it read outputs in memory in place. So an output in an app's memory needs its full shape before.

Invariants
    A `Started` is in `_pending` until its event is settled, and its timer is cancelled then.
    The frame of a request is pinned until the driver has answered or has ended, also where the event was settled before.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from aionn.errors import CallerError, DeadlineError, DriverDiedError
from aionn.hal.model import label
from aionn.hal.options import CallOptions
from aionn.hal.types import ErrorStatus, FencedResult, Result
from aionn.loopless import deadline_of, seconds_until
from aionn.memory.pool import FramePool, FramesInFlightError, MemoryFrame
from aionn.pages.app_layout import FAILED
from aionn.remote.device import Fenced, Found, RemotePreparedModel
from aionn.runtime.executing.arguments import FrameLayout, check_mapping
from aionn.runtime.executing.control import control_route
from aionn.runtime.executing.dependencies import After, Dependencies, check_shapes, give_shapes, kept, shape_of
from aionn.runtime.executing.device_buffers import lost_with
from aionn.runtime.executing.event import Event, error_of, failed_dependency, fence_of, settle, when_settled
from aionn.runtime.executing.execution import Call, Execution, Executor, between_bytes
from aionn.runtime.executing.frames import fill
from aionn.runtime.executing.placement import check_outputs, is_placed, states_of
from aionn.runtime.executing.transitions import LEFT, PLACE, SEND, SETTLE, WAITING
from aionn.runtime.preparing.kept_model import KeptModel
from aionn.runtime.serving.serving import Serving

IN_FLIGHT = 64
"""So many started executions of one compilation may be pending. It bounds their frames and descriptors."""

_CLOSED = "the compilation, or its runtime, was closed before the execution was over"


class Starts:
    """The started executions of one compilation."""

    def __init__(self, kept_model: KeptModel, executor: Executor) -> None:
        """`executor`: with frames for `IN_FLIGHT` requests."""
        self.kept_model = kept_model
        self.executor = executor
        self.route = control_route(kept_model)
        self._pending: set[Started] = set()

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
        check_mapping(inputs)
        outputs = {} if outputs is None else outputs
        check_outputs(self.executor.arguments.outputs, outputs)
        deadline_ns = deadline_of(timeout_s)
        if len(self._pending) >= IN_FLIGHT:
            raise _too_many()
        given = dict(inputs)
        call = Call(given, dict(outputs), CallOptions(bool(measure_timing), deadline_ns), given)
        admission = self.executor.admission
        place = 0 if admission is None else admission.enter(deadline_ns, self.executor.ended)
        try:
            with Dependencies(after) as dependencies:
                started = Started(self, Event(label(self.kept_model.model)[:12]), call)
                started.lay_out()
                started.after = dependencies.take()
        except BaseException:
            self._leave(place)
            raise
        self._pending.add(started)
        started.begin(partial(self._done, started, place))
        return started.event

    def _leave(self, place: int) -> None:
        if self.executor.admission is not None:
            self.executor.admission.leave(place)

    def _done(self, started: Started, place: int) -> None:
        self._pending.discard(started)
        self._leave(place)
        error = error_of(started.event)
        if error is not None:
            self.executor.ended(error)

    def close(self) -> None:
        """End every execution that is pending. Their fences are signalled as failures."""
        for started in list(self._pending):
            settle(started.event, CallerError(_CLOSED))

    def end(self) -> None:
        """Do the same as `close`, and give the frames back."""
        self.close()
        self.executor.frames.close()
        self.kept_model.session.page.release(self.executor.counts)


class Started(Execution):
    """One started execution, from its arguments to its event.

    Attributes:
        event: what the app has.
        after: what the execution waits for.
    """

    __slots__ = ("_starts", "_stop", "after", "event")

    def __init__(self, starts: Starts, event: Event, call: Call) -> None:
        super().__init__(starts.executor, starts.route, call)
        self.event = event
        self.after: tuple[After, ...] = ()
        self._starts = starts
        self._stop: Callable[[], None] | None = None

    # --- before the request is sent --------------------------------------------------------------------------------------

    def lay_out(self) -> None:
        """Check the arguments, and copy the arrays. With device memory they are placed when it is known where that lies."""
        kept_model, call = self._starts.kept_model, self.call
        if not states_of(call.inputs, call.outputs):
            self._place(kept_model.compiled.serving)
            return
        placed = {name: shape_of(value) for name, value in call.inputs.items() if is_placed(value)}
        self.executor.arguments.shapes_of(call.inputs, placed)
        inputs = {name: kept(value) for name, value in call.inputs.items()}
        self.call = call.with_arguments(inputs, {name: kept(value) for name, value in call.outputs.items()})

    def _place(self, serving: Serving | None) -> None:
        """Place the arguments, and copy the arrays into a frame."""
        call = self.call
        model = self._starts.kept_model.model if serving is None else serving.model
        prepared: Any = None if serving is None else serving.prepared  # only device memory belongs to one
        placement, shapes = self.placed(model, prepared, states_of(call.inputs, call.outputs))
        try:
            self.hold(serving, placement, shapes, _lease)
            give_shapes(placement, self.layout, call.outputs)
        except BaseException:
            self._act(SETTLE)
            raise
        self.call = call.with_arguments({}, call.outputs)

    def begin(self, over: Callable[[], None]) -> None:
        """Send the request now if that can be done, else in a task. `over` is called when the event is settled."""
        session, compiled = self._starts.kept_model.session, self._starts.kept_model.compiled
        timer = None
        deadline_ns = self.call.options.deadline_ns
        if deadline_ns is not None:
            timer = session.loop.call_later(seconds_until(deadline_ns), self._late)

        def note_settled() -> None:
            if timer is not None:
                timer.cancel()
            over()
            self._release_held()

        when_settled(self.event, note_settled)
        serving = compiled.serving
        if self.state is WAITING or serving is None or not serving.alive or compiled.gate.shut:
            session.tasks.start_soon(self._later, name=self.event.name)
        else:
            compiled.use.touches += 1
            try:
                self._transmit(serving)
            except Exception as error:  # the event is the answer, as for every error after the arguments were checked
                settle(self.event, error)

    def _late(self) -> None:
        settle(self.event, DeadlineError("the execution was not over by the deadline; the driver may still be busy with it"))

    async def _later(self) -> None:
        """Send the request when a prepared model serves and every device memory is free."""
        try:
            serving = (await self.choose(states_of(self.call.inputs, self.call.outputs))).serving
            if self.event.done():
                return
            if self.state is WAITING:
                self._place(serving)
            self._transmit(serving)
        except asyncio.CancelledError:
            settle(self.event, CallerError(_CLOSED))
            raise
        except Exception as error:  # the task belongs to the runtime, which no execution may end
            settle(self.event, error)

    # --- the request -----------------------------------------------------------------------------------------------------

    def _transmit(self, serving: Serving) -> None:
        """Send the request, with its fences."""
        layout, placement = self.layout, self.placement
        assert placement is not None
        between = between_bytes(serving, layout)
        if layout.frame_bytes + between > self.lent.pool.frame_bytes:
            self._move(layout, between)  # it was placed before it was known what would run
        dependencies = []
        for number, after in enumerate(self.after):
            if after.failed:
                raise failed_dependency(after.event, number)
            if not after.done:
                dependencies.append(after.dependency)
        sampling = self._starts.kept_model.compiled.sampling
        if sampling is not None and not placement.inputs:
            sampling.take(layout.inputs_in(self.lent))
        fenced = Fenced(*self.request(), dependencies, fence_of(self.event))
        self._act(SEND)
        settled = serving.entered(self.answered, self.call.options.deadline_ns)
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
                self._take(serving, found)
            elif uses_states and isinstance(found, DriverDiedError):
                settle(self.event, lost_with(found.device, found))
            else:
                settle(self.event, found)
        except Exception as error:  # an error here would end the driver's connection
            settle(self.event, error)

    def _take(self, serving: Serving, found: FencedResult) -> None:
        """Settle the event by the driver's answer, or send the request again with more room."""
        executor, placement, result = self.executor, self.placement, found.result
        assert placement is not None
        if found.failed is not None:
            executor.counts.add(FAILED, 1)
            waited = [(number, after.event) for number, after in enumerate(self.after) if after.sent]
            number, event = waited[found.failed] if 0 <= found.failed < len(waited) else (found.failed, None)
            error = failed_dependency(event, number)
            executor.failures.add(error)
            raise error
        if result.status is not ErrorStatus.NONE:
            if self.widen():
                self._send_wider(serving)
                return
            raise executor.failure(serving, result, None if placement.inputs else self.layout.inputs_in(self.lent))
        check_shapes(placement, result, list(serving.model.outputs))
        outputs = self.outputs(serving)
        if self.call.options.measure_timing:
            self.event.since_launch = found.since_launch
        settle(self.event, outputs)

    def _send_wider(self, serving: Serving) -> None:
        """Send the request again, with more room for its outputs. It keeps its fence and what it has placed."""
        layout = self._room
        assert layout is not None
        if layout is not self.layout:
            self._move(layout, between_bytes(serving, layout))
        self._act(PLACE)
        for after in self.after:
            after.close()
        self.after = ()  # all are done, or the request would not have run
        self._transmit(serving)

    def _move(self, layout: FrameLayout, between: int) -> None:
        """Take a frame with more room, and copy the inputs there."""
        before, old, placement = self.layout, self.lent, self.placement
        frame = _lease(self.executor.frames.pool(layout, between))
        self.layout, self.frame = layout, frame
        fill(frame, layout, before.inputs_in(old), placement.inputs if placement is not None else ())
        old.settled(None)

    def _release_held(self) -> None:
        """Give back what the execution holds, once its event is settled. What the driver may still touch is given back with its answer."""
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


def _lease(pool: FramePool) -> MemoryFrame:
    try:
        return pool.lease()
    except FramesInFlightError:
        raise _too_many() from None


def _too_many() -> CallerError:
    return CallerError(f"{IN_FLIGHT} started executions of this compilation are pending; await one of them before the next start")
