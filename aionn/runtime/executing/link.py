"""A burst's connection to what serves: two queues to each driver, the app's ends and the drivers' listeners. And requests as it sends them.

    Link           to one driver
    PlannedLink    to the drivers of a plan, with two queues for each step. A request goes from step to step. While it is in a later step,
                   the next one is in an earlier step.

A burst has one link. Only during a swap it has a second link, which is not in use yet. Both links use the same frames, because a driver
asks for the memory behind a slot when it first sees the slot. The drivers of a plan have the frames under the same slots, so a frame is
used in place by every step. Each frame remembers the encoded requests that it was used for.

Invariants
    `PlannedLink.in_flight` counts the requests that a driver may still touch the memory of, also between two steps.
    When one driver of a plan ends, the others go on with what they have. The requests that reach the dead one end with its error.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from aionn import trace
from aionn.burst.controller import ExecutionBurstController
from aionn.burst.packets import DATUM_BYTES, PoolReference, after_request, encode_request_body, enough_datums
from aionn.errors import AionnError, CallerError
from aionn.fmq import SOON, MessageQueue
from aionn.hal.types import Result
from aionn.loopless import call_soon_from_anywhere
from aionn.memory.pool import MemoryFrame
from aionn.pages.app_layout import DRIVER_BUSY_NS
from aionn.pages.app_page import BurstSlot
from aionn.remote.device import RemoteBuffer, RemoteBurstContext, RemotePreparedModel
from aionn.runtime.executing.arguments import FrameLayout
from aionn.runtime.executing.execution import Execution, Executor, between_bytes
from aionn.runtime.executing.frames import Frames
from aionn.runtime.executing.frames import expect as expect_frame
from aionn.runtime.executing.placement import Placement

if TYPE_CHECKING:
    import asyncio

    from aionn.runtime.serving.planned_execution import PlannedExecution
    from aionn.runtime.serving.serving import CompiledModel, Serving

CLOSE_S = 2.0
"""The driver is given this long to free what it holds for a burst; its process frees the rest when it ends."""

_REMEMBERED = 64
"""A frame remembers so many encoded requests, then it forgets all of them."""


class LinkOptions(msgspec.Struct, frozen=True):
    """How a burst is connected.

    Attributes:
        depth: so many requests may be in flight at once.
        low_power: whether the app's end never stays awake while it waits.
        patience_s: the driver is asked about a request that is unanswered for longer.
        anticipate: whether the driver may run the model shortly before it expects a request.
        name: of the burst, as the app named it, or empty.
    """

    depth: int
    low_power: bool
    patience_s: float
    anticipate: bool = False
    name: str = ""


class DriverQueues:
    """The queues to one driver, for one prepared model."""

    __slots__ = ("context", "controller", "prepared")

    def __init__(self, prepared: RemotePreparedModel, controller: ExecutionBurstController, context: RemoteBurstContext) -> None:
        self.prepared = prepared
        self.controller = controller
        self.context = context


class Link:
    """A connection to one driver. Made by `open_link`; closed by `aclose`. An `Execution` is sent over it (`Channel`).

    Attributes:
        plain: whether a request goes to one driver, so that a usual frame may take the short way.
        device: the name of what computes, for outputs.
    """

    __slots__ = ("_compiled", "_frames", "_loop", "_parts", "controller", "device", "prepared", "serving")

    plain = True

    def __init__(
        self, serving: Serving, parts: list[DriverQueues], compiled: CompiledModel, frames: Frames, in_flight: _InFlight | None = None
    ) -> None:
        """`in_flight`: counts the requests of a plan."""
        self.serving = serving
        self.prepared = serving.prepared
        self.device = serving.stage
        self.controller = parts[0].controller
        self._parts = parts
        self._compiled = compiled
        self._frames = frames
        self._loop = frames.loop
        for part in parts:
            part.prepared.device.connection.when_ended(part.controller, partial(_driver_ended, serving, part.controller, in_flight))

    @property
    def alive(self) -> bool:
        return self.controller.ended_by is None

    @property
    def in_flight(self) -> int:
        """How many requests have been sent and are not answered."""
        return self.controller.in_flight

    async def wait_idle(self) -> None:
        """Return when all requests that have been sent, or wait for their turn, are settled."""
        await self.controller.wait_idle()

    def nudge(self) -> None:
        """Announce a request."""
        self.controller.caller.nudge(SOON)

    def send(self, execution: Execution) -> Awaitable[object]:
        """Send one request over the queues; see `Channel`."""
        try:
            body = self.body(execution)
        except BaseException:
            execution.answered(None)
            raise
        return self.controller.execute(body, self._entered(execution), execution.call.options.deadline_ns)

    def body(self, execution: Execution) -> bytes:
        """Return the request of an execution whose arguments are placed.

        Raises:
            PacketError: a packet cannot carry it.
        """
        layout, placement, measure_timing = execution.layout, execution.placement, execution.call.options.measure_timing
        if placement is None or not (placement.inputs or placement.outputs):
            return plain_body(layout, execution.lent, measure_timing)
        return placed_body(layout, execution.lent, self._frames, placement, measure_timing)

    def start(self, execution: Execution, body: bytes, after: int) -> int:
        """Send a request that no task awaits, and return how later ones name it (`packets.after_request`).

        `execution.answered` is called once, as for `send`. Returns -1 if the request must wait for room in the queue, and was not sent.

        Args:
            after: an earlier request to this driver, which must succeed before, or 0.
        """
        settled = self._entered(execution)
        identity = self.controller.caller.start(body, settled, execution.call.options.deadline_ns or 0, after)
        if identity is None:
            settled(None)
            return -1
        return after_request(self._parts[0].context.number, identity)

    def make_late(self, sent: int) -> None:
        """Let the driver answer a started request without running it, if it has not begun. `sent` is from `start`."""
        self.controller.caller.make_late(sent & 0xFFFFFFFF)

    def _entered(self, execution: Execution) -> Callable[[Result | None], None]:
        """Count an execution that begins, while somebody watches. Returns what is to be called with its answer."""
        if not self._compiled.watched:
            return execution.answered
        self.serving.use.count()
        return self.serving.entered(execution.answered, execution.call.options.deadline_ns)

    async def aclose(self, error: AionnError) -> None:
        """Free queues and the drivers' parts. Calls that still wait get `error`."""
        self._end(error)
        for part in self._parts:
            await _close_context(part.context)

    def release(self, error: AionnError) -> None:
        """Close without waiting; see `aclose`."""
        self._end(error)
        for part in self._parts:
            part.context.release()

    def _end(self, error: AionnError) -> None:
        for part in self._parts:
            part.prepared.device.connection.cancel_when_ended(part.controller)
            part.controller.end(error)

    def forget_outdated(self) -> None:
        """Let the drivers unmap memory that has come with the link, and has been released before the link was in use."""
        for slot in {slot for part in self._parts for slot in part.context.brought}:
            if slot not in self._frames.regions:
                self.forget_memory(slot)

    def forget_memory(self, slot: int) -> None:
        """Let the drivers unmap an app's memory that has been closed, perhaps by the collector in another thread."""
        for part in self._parts:
            call_soon_from_anywhere(self._loop, part.context.forget_memory, slot)


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
        import asyncio  # only a task of a loop waits here

        while self.count:
            if self._idle is None:
                self._idle = asyncio.Event()
            await self._idle.wait()


class PlannedLink(Link):
    """A connection to the drivers of a plan."""

    __slots__ = ("_counts", "_in_flight")

    plain = False

    def __init__(self, serving: Serving, parts: list[DriverQueues], compiled: CompiledModel, frames: Frames, counts: BurstSlot) -> None:
        self._counts = counts
        self._in_flight = _InFlight()
        super().__init__(serving, parts, compiled, frames, self._in_flight)

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

    async def send(self, execution: Execution) -> None:
        """Send one request over the queues of each step in turn; see `Channel`."""
        settled: Callable[[Result | None], None] = execution.answered
        placement, layout = execution.placement, execution.layout
        try:
            settled = self._entered(execution)
            self._in_flight.count += 1
            settled = partial(self._settle, settled)
            planned = execution.planned(self.prepared)
            whole = layout, planned.options.measure_timing, None if placement is None else placement.key(self._frames.slot_of)
        except BaseException:
            settled(None)
            raise
        send = partial(self._send, planned, execution.lent, whole)
        await planned.run(send, settled, check=placement is not None)  # a plain frame's request is right

    async def _send(
        self, planned: PlannedExecution, frame: MemoryFrame, whole: tuple[Any, ...], number: int, settled: Callable[[Result | None], None]
    ) -> Result:
        """Send the request of one step, and wait for its answer. `whole`: what the requests of all steps depend on."""
        try:
            key = whole, planned.key(number)
            body: bytes | None = frame.bindings.get(key)
            if body is None:
                request, pools = planned.request(number)
                own = PoolReference(frame.slot)
                references = [own if pool is frame.region else _reference_of(pool, self._frames) for pool in pools]
                body = encode_request_body(request, references, planned.options.measure_timing, framed=True)
                keep(frame, key, body)
        except BaseException:
            settled(None)
            raise
        result, busy_ns = await self._parts[number].controller.execute(body, settled, planned.options.deadline_ns)
        if number:
            self._counts.add(DRIVER_BUSY_NS, busy_ns)  # the first step's queues count for themselves
        return result

    def _settle(self, settled: Callable[[Result | None], None], result: Result | None) -> None:
        try:
            settled(result)
        finally:
            self._in_flight.end()


Reach = Callable[[RemotePreparedModel], Awaitable[RemotePreparedModel]]
"""Returns a prepared model as a burst reaches it, if that is not over the connection of the runtime."""


async def open_link(
    serving: Serving, compiled: CompiledModel, executor: Executor, options: LinkOptions, reach: Reach | None = None
) -> Link:
    """Connect to the drivers of `serving`. `executor`: of the burst's executions.

    Raises:
        AionnError: a driver is gone, or cannot open a burst; nothing is left.
    """
    prepared, frames, counts = serving.prepared, executor.frames, executor.counts
    usual = executor.arguments.usual_layout()
    expect = None if usual is None else partial(expect_frame, frames, usual, between_bytes(serving, usual))
    if isinstance(prepared, RemotePreparedModel):
        return Link(serving, [await _part(prepared, frames, options, counts, expect, reach)], compiled, frames)
    parts: list[DriverQueues] = []
    try:
        for step in prepared.steps:  # a request counts once
            parts.append(await _part(step.prepared, frames, options, BurstSlot() if parts else counts, expect, reach))
    except BaseException:
        for part in parts:
            part.controller.end(CallerError("the burst could not be opened"))
            part.context.release()
        raise
    return PlannedLink(serving, parts, compiled, frames, counts)


def release(frames: Frames, held: list[Link]) -> None:
    """Free the queues, the frames and the drivers' part of a burst that is over, or has been collected."""
    for link in held:
        link.release(CallerError("the burst was closed while this call waited"))
    held.clear()
    frames.close()


async def _close_context(context: RemoteBurstContext) -> None:
    """Let the driver free its part of a burst."""
    from aionn.tasks import bounded_shield  # a thread without a loop does not wait for that

    # Bounded: a driver that hangs must not hold up the app. It loses the client's memory by the closed queues all the same.
    try:
        with bounded_shield(CLOSE_S):
            await context.aclose()
    except AionnError as gone:
        trace.count("burst.close_failed", reason=str(gone))


async def _part(
    prepared: RemotePreparedModel,
    frames: Frames,
    options: LinkOptions,
    counts: BurstSlot,
    expect: Callable[[], None] | None,
    reach: Reach | None,
) -> DriverQueues:
    """Connect to the driver of a prepared model, with queues that suit it. `expect`: makes the first frame, if its layout is known."""
    if reach is not None:
        prepared = await reach(prepared)
    operands = (*prepared.inputs.values(), *prepared.outputs.values())
    requests = MessageQueue.create(DATUM_BYTES, enough_datums(operands, 2 * options.depth))  # as many withdrawn ones may lie beside others
    try:
        results = MessageQueue.create(DATUM_BYTES, enough_datums(operands, options.depth))
    except BaseException:
        requests.close()
        raise
    controller = ExecutionBurstController(
        requests,
        results,
        depth=options.depth,
        low_power=options.low_power,
        patience_s=options.patience_s,
        counts=counts,
        loop=frames.loop,
    )
    try:
        if expect is not None:
            expect()  # after the queues, which are needed more, if descriptors are few
        context = await prepared.configure_execution_burst(frames, requests.descriptor(), results.descriptor(), options.anticipate)
    except BaseException:
        controller.end(CallerError("the burst could not be opened"))
        raise
    controller.ask = context.ask
    for queue in (requests, results):
        queue.forget_descriptor()
    return DriverQueues(prepared, controller, context)


def _driver_ended(serving: Serving, controller: ExecutionBurstController, in_flight: _InFlight | None, error: BaseException) -> None:
    """End the queues to a driver with it. It must not hold the link.

    The controller alone counts the usual requests of one driver. A plan's request in another step is lost, too, unless that is the last.
    """
    lost = in_flight is not None and in_flight.count
    controller.end(error)
    if lost or controller.lost:
        serving.lost = True


# --- requests as a burst sends them. A frame that is sent again is not encoded again. ---


def plain_body(layout: FrameLayout, frame: MemoryFrame, measure_timing: bool) -> bytes:
    """Return the request of a frame that holds all arguments. Sent again, it costs no more than the identity behind it."""
    body: bytes | None = frame.bindings.get((layout, measure_timing))
    if body is None:
        body = encode_request_body(layout.request(frame.offset), (PoolReference(frame.slot),), measure_timing, framed=True)
        keep(frame, (layout, measure_timing), body)
    return body


def placed_body(layout: FrameLayout, frame: MemoryFrame, frames: Frames, placement: Placement, measure_timing: bool) -> bytes:
    """Return the request of a frame and a placement. A state that swaps two buffers has two."""
    key = (layout, measure_timing, placement.key(frames.slot_of))
    body: bytes | None = frame.bindings.get(key)
    if body is None:
        references = (PoolReference(frame.slot), *(_reference_of(pool, frames) for pool in placement.pools))
        body = encode_request_body(placement.request(layout, frame.offset), references, measure_timing, framed=True)
        keep(frame, key, body)
    return body


def _reference_of(pool: Any, frames: Frames) -> PoolReference:
    """Return how a packet names memory beside the frame: a driver's buffer by its token, an app's memory by its slot."""
    return PoolReference(-1, pool.token) if isinstance(pool, RemoteBuffer) else PoolReference(frames.slot_of(pool))


def keep(frame: MemoryFrame, key: Any, body: bytes) -> None:
    """Remember an encoded request with its frame."""
    if len(frame.bindings) >= _REMEMBERED:
        frame.bindings.clear()
    frame.bindings[key] = body
