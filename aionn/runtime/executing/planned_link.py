"""`PlannedLink`: a burst's connection to the drivers of a plan, with a pair of queues for each step.

A request over a `PlannedLink` goes from step to step. Each driver has the frames and the boundary memory under the same slots, so a frame
is used in place by every step. While one request is in a later step, the next one is in an earlier step.

Invariants
    `PlannedLink.in_flight` counts the requests that a driver may still touch the memory of, also between two steps.
    When one driver ends, the others go on with what they have. The requests that reach the dead one end with its error.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

from aionn.burst import ExecutionBurstController, PoolReference, encode_request_body
from aionn.burst.packets import enough_datums
from aionn.errors import AionnError, CallerError
from aionn.fmq import SOON
from aionn.hal.types import Request, Result
from aionn.memory.region import Region
from aionn.pages import BurstSlot, private_counts
from aionn.pages.app_layout import DRIVER_BUSY_NS
from aionn.remote.device import RemotePreparedModel
from aionn.remote.handles import RemoteBuffer, RemoteBurstContext
from aionn.runtime.executing.execution import Execution
from aionn.runtime.executing.frames import Frames
from aionn.runtime.executing.link import LinkOptions, close_context, driver_ended, keep, open_queues
from aionn.runtime.serving.compiled_model import CompiledModel
from aionn.runtime.serving.planned_execution import PlannedExecution
from aionn.runtime.serving.planned_model import PlannedModel
from aionn.runtime.serving.serving import Serving
from aionn.tasks import call_soon_from_anywhere


class _Part:
    """The queues of one step."""

    __slots__ = ("context", "controller", "prepared")

    def __init__(self, prepared: RemotePreparedModel, controller: ExecutionBurstController, context: RemoteBurstContext) -> None:
        self.prepared = prepared
        self.controller = controller
        self.context = context


class _InFlight:
    """How many requests of a link are in flight. A driver's end looks here, and must not hold the link."""

    __slots__ = ("_idle", "count")

    def __init__(self) -> None:
        self.count = 0
        self._idle: asyncio.Event | None = None

    def end(self) -> None:
        self.count -= 1
        if not self.count and self._idle is not None:
            idle, self._idle = self._idle, None
            idle.set()

    async def wait_idle(self) -> None:
        while self.count:
            if self._idle is None:
                self._idle = asyncio.Event()
            await self._idle.wait()


class PlannedLink:
    """The connection of a burst to all drivers of a plan. Made by `links.open_link`; an `Execution` is sent over it (`Channel`)."""

    __slots__ = ("_compiled", "_counts", "_frames", "_in_flight", "_loop", "_parts", "device", "prepared", "serving")

    def __init__(
        self,
        serving: Serving,
        prepared: PlannedModel,
        parts: list[_Part],
        compiled: CompiledModel,
        frames: Frames,
        counts: BurstSlot,
    ) -> None:
        self.serving = serving
        self.prepared = prepared
        self.device = serving.stage
        self._parts = parts
        self._compiled = compiled
        self._frames = frames
        self._counts = counts
        self._in_flight = _InFlight()
        self._loop = asyncio.get_running_loop()
        for part in parts:
            ended = partial(_driver_ended, serving, part.controller, self._in_flight)
            part.prepared.device.connection.when_ended(part.controller, ended)

    @property
    def alive(self) -> bool:
        return all(part.controller.ended_by is None for part in self._parts)

    @property
    def in_flight(self) -> int:
        """How many requests have been sent, and are not answered by the last step."""
        return self._in_flight.count

    async def wait_idle(self) -> None:
        """Return when all requests that have been sent are settled."""
        await self._in_flight.wait_idle()

    def nudge(self) -> None:
        """Announce a request."""
        self._parts[0].controller.caller.nudge(SOON)

    async def send(self, execution: Execution) -> None:
        """Send one request over the queues of each step in turn; see `Channel`."""
        settled: Callable[[Result | None], None] = execution.answered
        options, placement = execution.call.options, execution.placement
        try:
            sending = _Sending(self._parts, self._frames, execution)
            request, pools = sending.whole()
            if self._compiled.watched:
                settled = self.serving.entered(settled, options.deadline_ns)
                if placement is None:
                    self.serving.use.count()
            self._in_flight.count += 1
            settled = partial(self._settled, settled)
            planned = PlannedExecution(self.prepared.planned, request, pools, options.measure_timing, options.deadline_ns, settled)
            refusal = None if placement is None else planned.requests.refusal()
        except BaseException:
            settled(None)
            raise
        if refusal is not None:
            planned.end(refusal)
            return
        try:
            await planned.run(sending.send)
        finally:
            self._counts.add(DRIVER_BUSY_NS, sending.busy_ns - sending.first_ns)  # the first step's queues count for themselves

    def _settled(self, settled: Callable[[Result | None], None], result: Result | None) -> None:
        try:
            settled(result)
        finally:
            self._in_flight.end()

    async def aclose(self, error: AionnError) -> None:
        """Free queues and the drivers' parts. Calls that still wait get `error`."""
        self._end(error)
        for part in self._parts:
            await close_context(part.context)

    def release(self, error: AionnError) -> None:
        """Close without waiting; see `aclose`."""
        self._end(error)
        for part in self._parts:
            part.context.release()

    def _end(self, error: AionnError) -> None:
        for part in self._parts:
            part.prepared.device.connection.forget(part.controller)
            part.controller.end(error)

    def forget_memory(self, slot: int) -> None:
        """Let the drivers unmap memory that has been closed, perhaps by the collector in another thread."""
        for part in self._parts:
            call_soon_from_anywhere(self._loop, part.context.forget_memory, slot)


class _Sending:
    """How one request is sent, step by step.

    Attributes:
        busy_ns: the time of all drivers so far. first_ns: that of the first step.
    """

    __slots__ = ("_frame", "_frames", "_key", "_layout", "_measure", "_parts", "_placement", "busy_ns", "first_ns")

    def __init__(self, parts: list[_Part], frames: Frames, execution: Execution) -> None:
        assert execution.frame is not None
        self._parts = parts
        self._frames = frames
        self._frame = execution.frame
        self._layout = execution.layout
        self._placement = placement = execution.placement
        self._measure = execution.call.options.measure_timing
        self._key: Any = None
        if placement is not None:
            self._key = placement.key({pool: self._reference(pool) for pool in placement.pools})
        self.busy_ns = self.first_ns = 0

    def whole(self) -> tuple[Request, list[Region | RemoteBuffer]]:
        """Return the request for the whole model, and its pools."""
        if self._placement is None:
            return self._layout.request(self._frame.offset), [self._frame.region]
        return self._placement.request(self._layout, self._frame.offset), [self._frame.region, *self._placement.pools]

    def _reference(self, pool: Any) -> PoolReference:
        if pool is self._frame.region:
            return PoolReference(self._frame.slot)
        return PoolReference(-1, pool.token) if isinstance(pool, RemoteBuffer) else PoolReference(self._frames.slot_of(pool))

    async def send(self, execution: PlannedExecution, number: int, settled: Callable[[Result | None], None]) -> Result:
        """Send the request of one step, and wait for its answer. A frame remembers the encoded requests of all steps."""
        try:
            depends = execution.requests.key(number)
            key = (self._layout, self._measure, self._key, self._frames.slot_of(execution.boundary), depends)
            body: bytes | None = None if depends is None else self._frame.bindings.get(key)
            if body is None:
                request, pools = execution.requests.split(number)
                body = encode_request_body(request, [self._reference(pool) for pool in pools], self._measure, framed=True)
                if depends is not None:
                    keep(self._frame, key, body)
        except BaseException:
            settled(None)
            raise
        result, busy_ns = await self._parts[number].controller.execute(body, settled, execution.deadline_ns)
        self.busy_ns += busy_ns
        if not number:
            self.first_ns += busy_ns
        return result


async def open_planned_link(
    serving: Serving, prepared: PlannedModel, compiled: CompiledModel, frames: Frames, options: LinkOptions, counts: BurstSlot
) -> PlannedLink:
    """Connect to the drivers of a plan; see `links.open_link`."""
    parts: list[_Part] = []
    try:
        for planned in prepared.steps:
            step = planned.prepared
            capacity = enough_datums((*step.inputs.values(), *step.outputs.values()))
            own = private_counts() if parts else counts  # a request counts once
            parts.append(_Part(step, *await open_queues(step, frames, options, own, capacity)))
    except BaseException:
        for part in parts:
            part.controller.end(CallerError("the burst could not be opened"))
            part.context.release()
        raise
    return PlannedLink(serving, prepared, parts, compiled, frames, counts)


def _driver_ended(serving: Serving, controller: ExecutionBurstController, in_flight: _InFlight, error: BaseException) -> None:
    """End the queues to a driver with it. A request in another step is lost, too, unless that is the last one."""
    if in_flight.count:
        serving.lost = True
    driver_ended(serving, controller, error)
