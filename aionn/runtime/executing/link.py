"""A burst's connection to one driver process: two queues, the app's end and the driver's listener. And the requests as it sends them.

A burst has one link. Only during a swap it has a second link, which is not in use yet. Both links use the same frames, because a driver
asks for the memory behind a slot when it first sees the slot. Each frame remembers the encoded requests that it was used for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from aionn import trace
from aionn.burst import DATUM_BYTES, ExecutionBurstController, PoolReference, encode_request_body
from aionn.errors import AionnError, CallerError
from aionn.fmq import SOON, MessageQueue
from aionn.hal.types import Request, Result
from aionn.memory.pool import Frame
from aionn.pages import BurstSlot
from aionn.remote.device import RemotePreparedModel
from aionn.remote.handles import RemoteBuffer, RemoteBurstContext
from aionn.runtime.executing.execution import Execution
from aionn.runtime.executing.frame_layout import FrameLayout
from aionn.runtime.executing.frames import Frames
from aionn.runtime.executing.placement import Placement
from aionn.runtime.serving.compiled_model import CompiledModel
from aionn.runtime.serving.serving import Serving
from aionn.tasks import bounded_shield, call_soon_from_anywhere

CLOSE_S = 2.0
"""The driver is given this long to free what it holds for a burst; its process frees the rest when it ends."""

_REMEMBERED = 64
"""A frame remembers so many encoded requests, then it forgets all of them."""


class LinkOptions(msgspec.Struct, frozen=True):
    """How a burst is connected.

    Attributes:
        depth: so many requests may be in flight at once.
        queue_capacity: datums per queue.
        low_power: whether the app's end never stays awake while it waits.
        patience_s: the driver is asked about a request that is unanswered for longer.
        anticipate: whether the driver may run the model shortly before it expects a request.
        name: of the burst, as the app named it, or empty.
    """

    depth: int
    queue_capacity: int
    low_power: bool
    patience_s: float
    anticipate: bool = False
    name: str = ""


class Link:
    """One connection. Made by `links.open_link`; closed by `aclose`. An `Execution` is sent over it (`Channel`)."""

    __slots__ = ("_compiled", "_frames", "_loop", "context", "controller", "device", "prepared", "serving")

    def __init__(
        self,
        serving: Serving,
        prepared: RemotePreparedModel,
        controller: ExecutionBurstController,
        context: RemoteBurstContext,
        compiled: CompiledModel,
        frames: Frames,
    ) -> None:
        self.serving = serving
        self.prepared = prepared
        self.device = serving.stage
        self.controller = controller
        self.context = context
        self._compiled = compiled
        self._frames = frames
        self._loop = asyncio.get_running_loop()

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
        layout, frame, placement, options = execution.layout, execution.frame, execution.placement, execution.call.options
        settled: Callable[[Result | None], None] = execution.answered
        assert frame is not None
        try:
            if placement is None:
                body = plain_body(layout, frame, options.measure_timing)
            else:
                body = placed_body(layout, frame, self._frames, placement, options.measure_timing)
        except BaseException:
            settled(None)
            raise
        if self._compiled.watched:
            settled = self.serving.entered(settled, options.deadline_ns)
            if placement is None:
                self.serving.use.count()
        return self.controller.execute(body, settled, options.deadline_ns)

    async def aclose(self, error: AionnError) -> None:
        """Free queues and the driver's part. Calls that still wait get `error`."""
        self._end(error)
        await close_context(self.context)

    def release(self, error: AionnError) -> None:
        """Close without waiting; see `aclose`."""
        self._end(error)
        self.context.release()

    def _end(self, error: AionnError) -> None:
        self.prepared.device.connection.forget(self.controller)
        self.controller.end(error)

    def forget_memory(self, slot: int) -> None:
        """Let the driver unmap an app's memory that has been closed, perhaps by the collector in another thread."""
        call_soon_from_anywhere(self._loop, self.context.forget_memory, slot)


async def close_context(context: RemoteBurstContext) -> None:
    """Let the driver free its part of a burst."""
    # Bounded: a driver that hangs must not hold up the app. It loses the client's memory by the closed queues all the same.
    try:
        with bounded_shield(CLOSE_S):
            await context.aclose()
    except AionnError as gone:
        trace.count("burst.close_failed", reason=str(gone))


async def open_queues(
    prepared: RemotePreparedModel, frames: Frames, options: LinkOptions, counts: BurstSlot, capacity: int = 0
) -> tuple[ExecutionBurstController, RemoteBurstContext]:
    """Connect to the driver of a prepared model. `capacity`: datums per queue at least.

    Raises:
        AionnError: the driver is gone, or cannot open a burst; nothing is left.
    """
    capacity = max(options.queue_capacity, capacity)
    requests = MessageQueue.create(DATUM_BYTES, capacity)
    try:
        results = MessageQueue.create(DATUM_BYTES, capacity)
    except BaseException:
        requests.close()
        raise
    controller = ExecutionBurstController(
        requests, results, depth=options.depth, low_power=options.low_power, patience_s=options.patience_s, counts=counts
    )
    try:
        context = await prepared.configure_execution_burst(frames, requests.descriptor(), results.descriptor(), options.anticipate)
    except BaseException:
        controller.end(CallerError("the burst could not be opened"))
        raise
    controller.ask = context.ask
    for queue in (requests, results):
        queue.forget_descriptor()
    return controller, context


def driver_ended(serving: Serving, controller: ExecutionBurstController, error: BaseException) -> None:
    """End the queues to a driver with it. Its usual requests are counted by the controller alone."""
    controller.end(error)
    if controller.lost:
        serving.lost = True


# --- requests as a burst sends them. A frame that is sent again is not encoded again. ---


def plain_body(layout: FrameLayout, frame: Frame, measure_timing: bool) -> bytes:
    """Return the request of a frame that holds all arguments. Sent again, it costs no more than the identity behind it."""
    body: bytes | None = frame.bindings.get((layout, measure_timing))
    if body is None:
        body = encode_request_body(layout.request(frame.offset), (PoolReference(frame.slot),), measure_timing, framed=True)
        keep(frame, (layout, measure_timing), body)
    return body


def placed_body(layout: FrameLayout, frame: Frame, frames: Frames, placement: Placement, measure_timing: bool) -> bytes:
    """Return the request of a frame and a placement. A state that swaps two buffers has two."""
    references = {
        pool: PoolReference(-1, pool.token) if isinstance(pool, RemoteBuffer) else PoolReference(frames.slot_of(pool))
        for pool in placement.pools
    }
    key = (layout, measure_timing, placement.key(references))
    body: bytes | None = frame.bindings.get(key)
    if body is None:
        body = remember(frame, key, placement.request(layout, frame.offset), tuple(references.values()), measure_timing)
    return body


def remember(frame: Frame, key: Any, request: Request, references: tuple[PoolReference, ...], measure_timing: bool) -> bytes:
    """Encode a request whose pools are the frame's and `references`, and keep it with the frame."""
    body = encode_request_body(request, (PoolReference(frame.slot), *references), measure_timing, framed=True)
    keep(frame, key, body)
    return body


def keep(frame: Frame, key: Any, body: bytes) -> None:
    """Remember an encoded request with its frame."""
    if len(frame.bindings) >= _REMEMBERED:
        frame.bindings.clear()
    frame.bindings[key] = body
