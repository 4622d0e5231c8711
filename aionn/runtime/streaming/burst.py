"""`Burst`: a stream of executions to one driver over shared memory, as an app uses it.

A burst outlives its driver: when that dies, awaiting calls end with `DriverDiedError`, and the next use connects to a new
one. Frames belong to the burst, not to the connection; the new driver asks for their memories by the same slots.

Invariants
    `_link` is alive or None; a dead one is replaced under `_connecting`, by one task. A living one is replaced by a swap (`install`).
    `_held` holds `_link` for the finalizer. Nothing that the loop or the driver's connection knows refers to the burst, so one that
    the app drops is collected, and then closed.
    A frame is pinned by its lease (the app's, or that of a running `compute`) and by each request in flight over it.
"""

from __future__ import annotations

import asyncio
import weakref
from asyncio import _get_running_loop  # the public one raises where there is no loop, and is then caught at every call
from collections.abc import AsyncGenerator, Callable, Container, Coroutine, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any

import anyio
import numpy as np

from aionn import trace
from aionn.burst import PoolReference, encode_request_body
from aionn.errors import AionnError, CallerError, ExecutionError
from aionn.hal.types import ErrorStatus, ExecutionPreference, Result
from aionn.memory import pool as memory_pool
from aionn.remote.device import RemoteBuffer
from aionn.runtime.executing.arguments import Outputs, Shapes, Way, check_mapping, failure_of
from aionn.runtime.executing.frames import LARGE_BYTES, Frames, Spare, fill, fill_large
from aionn.runtime.executing.link import Link, open_link, release
from aionn.runtime.executing.placement import Placement, is_placed, place
from aionn.runtime.executing.recurrent import RecurrentWay, Step
from aionn.runtime.streaming import stream
from aionn.runtime.streaming.frame import Frame, check_frame
from aionn.tasks import call_soon_from_anywhere, deadline_of, ending_by

if TYPE_CHECKING:
    from aionn.runtime.compilation import Compilation
    from aionn.runtime.serving.compiled_model import Serving

_REMEMBERED_BODIES = 64
"""So many encoded requests are remembered per frame."""

_NO_ANSWER = "the burst's answer did not come"

_NONE = ErrorStatus.NONE  # each look into an enumeration costs as much as a small copy

QUEUE_CAPACITY = 1024
"""Datums per queue, as NNAPI's bursts have: about a hundred requests of a small model."""


class Burst:
    """A stream of executions. Made by `Compilation.burst()`, used in `async with`."""

    def __init__(self, compilation: Compilation, *, depth: int, queue_capacity: int) -> None:
        self._compilation = compilation
        self._loop = compilation._loop
        self._compiled = compilation._compiled
        self._names = tuple(compilation.model.inputs)
        self._arguments = compilation._arguments
        self._depth = depth
        self._queue_capacity = queue_capacity
        self._frames = Frames(exact=compilation._static)
        # Of the request before: a stream's next one mostly has the same shapes.
        self._last: tuple[Way, memory_pool.FramePool] | tuple[None, None] = (None, None)
        self._recurrent: RecurrentWay | None = None
        self._link: Link | None = None
        self._held: list[Link] = []
        self._finalizer = weakref.finalize(self, call_soon_from_anywhere, self._loop, release, self._frames, self._held)
        self._finalizer.atexit = False
        self._connecting = anyio.Lock()
        self._streams: set[stream.Stream] = set()
        self._open = False
        self._counts = {"computed": 0, "failed": 0, "connections": 0, "dropped": 0, "copied_bytes": 0, "driver_busy_ns": 0}

    async def __aenter__(self) -> Burst:
        if self._open:
            raise CallerError("this burst is open already; call compilation.burst() for another one")
        self._open = True
        try:
            await self._connect(None)
        except BaseException:
            self._open = False
            raise
        self._compiled.bursts.add(self)
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """End the burst: calls that still wait get `CallerError`; queues, frames and the driver's part are freed."""
        if not self._open or self._compilation._runtime._inherited:
            return
        self._compilation._runtime._check_loop()
        self._open = False
        for running in list(self._streams):
            running.cancel()
        self._compiled.bursts.discard(self)
        try:
            if self._link is not None:
                await self._link.aclose(CallerError("the burst was closed while this call waited"))
        finally:
            self._end()

    def _end(self) -> None:
        """As `aclose`, without waiting. What `aclose` has begun is not done twice."""
        self._open = False
        for running in list(self._streams):
            running.cancel()
        self._compiled.bursts.discard(self)
        self._link = None
        self._finalizer.detach()
        release(self._frames, self._held)

    async def _connect(self, deadline_ns: int | None) -> Link:
        """The live link; a new one if there is none."""
        async with self._connecting:
            while True:
                if not self._open:
                    raise CallerError("the burst is not open; use it inside `async with compilation.burst() as burst`")
                link = self._link
                if link is not None and link.controller.ended_by is None:
                    return link
                serving = await self._compilation._live(deadline_ns)
                with trace.span("burst.connect", device=serving.device):
                    link = await self.link_to(serving)
                if serving is self._compiled.serving and self._open:
                    self.install(link)
                    return link
                await link.aclose(CallerError("another stage has been swapped in"))

    # --- what a swap asks ----------------------------------------------------------------------------------------------

    async def link_to(self, serving: Serving) -> Link:
        """A link that is not in use yet."""
        low_power = self._compilation.preference is ExecutionPreference.LOW_POWER
        return await open_link(serving, self._frames, self._depth, self._queue_capacity, low_power)

    def install(self, link: Link) -> Link | None:
        """Use `link` from now on; the one before, which is to be closed, as a link is that a closed burst has no use for."""
        if not self._open:
            return link
        before, self._link = self._link, link
        self._held[:] = [link]
        self._frames.on_gone = link.forget_memory
        self._counts["connections"] += 1
        return before

    async def wait_idle(self) -> None:
        """Until nothing is in flight."""
        if self._link is not None:
            await self._link.controller.wait_idle()

    def count_from_now(self) -> None:
        """The shortest way counts nothing: leave it until `CompiledModel.watched` is over."""
        self._last = (None, None)

    async def _lease(self, shapes: Shapes, deadline_ns: int | None = None) -> tuple[Way, memory_pool.Frame]:
        self._compilation._runtime._check_loop()
        if not self._open:
            raise CallerError("the burst is not open; use it inside `async with compilation.burst() as burst`")
        way = self._arguments.way(shapes)
        return way, await self._frames.lease(way, deadline_ns)

    def frame(self, shapes: Mapping[str, Sequence[int]] | None = None) -> Frame:
        """Shared memory to write one request's inputs into: `async with burst.frame() as frame`.

        Args:
            shapes: of inputs with open dimensions, by name; the others' are known.

        Raises:
            CallerError: a shape is missing or does not fit the model.
        """
        return Frame(self, self._arguments.check_shapes(shapes or {}))

    async def compute(
        self,
        inputs: Mapping[str, Any] | Frame,
        *,
        outputs: Mapping[str, Any] | None = None,
        measure_timing: bool = False,
        timeout_s: float | None = None,
    ) -> Outputs:
        """Run the model once and wait for its outputs. Several tasks may call at once; requests go in order.

        Args:
            inputs: one array per model input, by name, copied once into shared memory; or a `Frame` of this burst, sent as
                it is. Shapes and dtypes as `Model.inputs` says; open dimensions (0) may have any extent from 1.
                A `Memory`, `HardwareBuffer` or `DeviceMemory` may stand for any array and is used in place.
            outputs: where outputs are to be written instead, by name: a `DeviceMemory` (it is then missing from the result;
                one that is also an input is advanced: a recurrent state) or a `Memory`.
            measure_timing: fill `.timing` of the result.
            timeout_s: seconds after which this call ends with `DeadlineError`. It ends nothing else: whether the driver hangs is
                judged by what it gets done (`Runtime(hang_s=)`), and the frame stays its own until it has answered.

        Returns:
            One array per output, by name: views of the burst's memory, valid until the next `compute` on this burst.
            Copy what must live longer. While other calls wait for a free frame they are copies, and the frame is theirs.

        Raises:
            CallerError: a name, shape or dtype does not fit; nothing was sent.
            DeadlineError: no answer in time.
            ExecutionError: the driver answered that it failed.
            MemoryAllocationError: there is no memory for frames of these shapes.
            DriverDiedError, DriverHungError: the driver is gone; the next call starts a new one. `DeviceMemoryLostError` where a
                `DeviceMemory` among the arguments went with it.
        """
        if _get_running_loop() is not self._loop:
            self._compilation._runtime._check_open()  # it says what is wrong
        deadline_ns = None if timeout_s is None else deadline_of(timeout_s)
        way, pool = self._last
        if way is not None and way.input_bytes >= LARGE_BYTES:
            # The copy holds the loop up for long: it runs before each, so that the answer may be had at once after it.
            await asyncio.sleep(0)
            way, pool = self._last
        link = self._link
        if way is None or pool is None or outputs or link is None or link.controller.ended_by is not None or not way.fits(inputs):
            if self._recurrent is not None and type(inputs) is dict:
                step = self._begin_step(self._recurrent, inputs, outputs or {})
                if step is not None and (stepped := await self._step(step, inputs, measure_timing, deadline_ns)) is not None:
                    return stepped
            with ending_by(deadline_ns, _NO_ANSWER):
                return await self._compute_anew(inputs, outputs or {}, measure_timing, deadline_ns)
        # A stream's usual frame, in one piece: each call less is a tenth of a microsecond of the few that a round trip takes.
        try:
            frame = pool.lease()
        except memory_pool.FramesInFlightError:
            with ending_by(deadline_ns, _NO_ANSWER):
                return await self._compute_anew(inputs, {}, measure_timing, deadline_ns)
        try:
            arrays = frame.arrays
            controller = link.controller
            if way.input_bytes < LARGE_BYTES:
                for name, place in (arrays.get(way) or way.inputs_in(frame)).items():
                    place[...] = inputs[name]
            else:
                fill_large(frame, way, inputs, controller.soon)
            body = frame.bindings.get((way, measure_timing)) or self._body(way, frame, measure_timing)
            answer = controller.at_once(body, deadline_ns)
            if not isinstance(answer, tuple):
                frame.pins += 1
                answer = await controller.execute(body, frame.settled, deadline_ns, answer)
            result, busy_ns = answer
            counts = self._counts
            counts["copied_bytes"] += way.input_bytes
            counts["driver_busy_ns"] += busy_ns
            if result.status is _NONE:
                if pool.crowded:
                    return self._outputs(link, result, way, frame, measure_timing)
                counts["computed"] += 1
                shapes = result.output_shapes
                found = None if shapes else arrays.get(way.outputs_key)
                return Outputs(found or way.outputs_in(frame, shapes), link.device, result.timing if measure_timing else None)
        finally:
            frame.settled(None)
        with ending_by(deadline_ns, _NO_ANSWER):
            return await self._retry_or_raise(result, way, inputs, measure_timing, deadline_ns)

    async def _compute_anew(
        self, inputs: Mapping[str, Any] | Frame, outputs: Mapping[str, Any], measure_timing: bool, deadline_ns: int | None
    ) -> Outputs:
        """`compute` for all but a stream's usual frame: new shapes, frames, arguments that lie elsewhere, a new driver."""
        if isinstance(inputs, Frame):
            if inputs._burst is not self:
                raise CallerError("this frame belongs to another burst")
            way, frame = inputs._leased()
            if frame.pins > 1:
                raise CallerError("this frame is in flight: wait for its outputs, or get another one with burst.frame()")
            if outputs or inputs._placed:
                return await self._compute_placed(inputs, inputs._placed, outputs, (way, frame), measure_timing, deadline_ns)
            found = await self._send(way, frame, inputs, measure_timing, deadline_ns)
        else:
            if type(inputs) is not dict:
                check_mapping(inputs)
            if outputs or any(type(value) is not np.ndarray and is_placed(value) for value in inputs.values()):
                return await self._compute_placed(inputs, inputs, outputs, None, measure_timing, deadline_ns)
            way, frame = await self._lease(self._arguments.shapes_of(inputs), deadline_ns)
            if not self._compiled.watched:
                self._last = (way, self._frames.pool(way))
            try:
                self._counts["copied_bytes"] += fill(frame, way, inputs)
                found = await self._send(way, frame, inputs, measure_timing, deadline_ns)
            finally:
                frame.settled(None)
        return found if isinstance(found, Outputs) else await self._retry_or_raise(found, way, inputs, measure_timing, deadline_ns)

    def _begin_step(self, recurrent: RecurrentWay, inputs: dict[str, Any], outputs: Mapping[str, Any]) -> Step | None:
        """A stream's usual step with its state in the driver; None: this is none."""
        link, compiled = self._link, self._compiled
        if link is None or link.controller.ended_by is not None or compiled.watched or compiled.sampling is not None or compiled.gate.shut:
            return None
        return recurrent.begin(link, inputs, outputs)

    async def _step(self, step: Step, inputs: dict[str, Any], measure_timing: bool, deadline_ns: int | None) -> Outputs | None:
        """The outputs of a step; None: an output was larger than declared, so nothing was computed and the long way has room for it."""
        try:
            result, busy_ns = await step.link.controller.execute(step.body(inputs, measure_timing), step, deadline_ns)
            counts = self._counts
            counts["copied_bytes"] += step.way.copied_bytes
            counts["driver_busy_ns"] += busy_ns
            if result.status is not ErrorStatus.NONE:
                if step.way.widened(self._arguments, result):
                    self._recurrent = None
                    return None
                raise self._failure(result)
            counts["computed"] += 1
            return Outputs(step.way.outputs_in(step.frame, result), step.link.device, result.timing if measure_timing else None)
        except BaseException as error:
            step.leave(error)
            raise
        finally:
            step.frame.settled(None)

    async def _compute_placed(
        self,
        inputs: Mapping[str, Any],
        placed_inputs: Mapping[str, Any],
        outputs: Mapping[str, Any] | None,
        leased: tuple[Way, memory_pool.Frame] | None,
        measure_timing: bool,
        deadline_ns: int | None,
    ) -> Outputs:
        """The way of arguments that do not all lie in the frame. `leased`: the app's own frame, which holds its arrays."""
        wider: Way | None = None
        with Spare(self._frames, deadline_ns) as spare:
            while True:
                link = await self._live_link(deadline_ns)
                try:
                    with link.serving.used():
                        found, wider = await self._try_placed(
                            link, wider, inputs, placed_inputs, outputs, leased, measure_timing, deadline_ns, spare
                        )
                except memory_pool.FramesInFlightError as crowded:
                    await spare.wait(crowded.pool)
                else:
                    if found is not None:
                        return found

    async def _try_placed(
        self,
        link: Link,
        wider: Way | None,
        inputs: Mapping[str, Any],
        placed_inputs: Mapping[str, Any],
        outputs: Mapping[str, Any] | None,
        leased: tuple[Way, memory_pool.Frame] | None,
        measure_timing: bool,
        deadline_ns: int | None,
        spare: Spare,
    ) -> tuple[Outputs | None, Way | None]:
        """The outputs; or a way with room for them. Holds nothing when it raises."""
        if self._compiled.sampling is not None:
            await self._compiled.sampling.take_placed(inputs, placed_inputs)
        placement, placed_shapes = await place(link.serving.model, self._arguments.outputs, link.prepared, placed_inputs, outputs)
        try:
            if leased is not None and wider is None:
                way, frame = leased
                check_frame(way, placed_shapes)
            else:
                way = wider or self._arguments.way(self._arguments.shapes_of(inputs, placed_shapes))
                frame = spare.lease(self._frames.pool(way))
                self._counts["copied_bytes"] += fill(frame, way, inputs, placement.inputs)
        except BaseException:
            placement.release()
            raise
        try:
            with placement.awaited():
                result = await self._execute(way, frame, measure_timing, deadline_ns, link, placement)
            if not self._arguments.may_retry(way, result, placement.outputs):
                own = placement.arrays(link.serving.model, result) if result.status is ErrorStatus.NONE else []
                found = self._outputs(link, result, way, frame, measure_timing, outputs or ())
                found.update(own)
                if leased is None:
                    self._recurrent = RecurrentWay.of(way, self._frames.pool(way), inputs, outputs or {})
                return found, None
            return None, self._arguments.widen(tuple(shape for _, _, shape, _ in way.inputs), result.output_shapes)
        finally:
            if leased is None or frame is not leased[1]:
                frame.settled(None)

    async def _send(
        self, way: Way, frame: memory_pool.Frame, inputs: Mapping[str, Any], measure_timing: bool, deadline_ns: int | None
    ) -> Outputs | Result:
        """The outputs; or the answer of a driver that has none."""
        link = await self._live_link(deadline_ns)
        if self._compiled.sampling is not None:
            self._compiled.sampling.take(inputs)
        result = await self._execute(way, frame, measure_timing, deadline_ns, link)
        return result if result.status is not _NONE else self._outputs(link, result, way, frame, measure_timing)

    async def _retry_or_raise(
        self, result: Result, way: Way, inputs: Mapping[str, Any], measure_timing: bool, deadline_ns: int | None
    ) -> Outputs:
        """Once more with room for outputs of the shapes that the driver has told, or raise. It may wait: its caller holds no frame."""
        if not self._arguments.may_retry(way, result):
            raise self._failure(result, inputs)
        wider = self._arguments.widen(tuple(shape for _, _, shape, _ in way.inputs), result.output_shapes)
        self._last = (None, None)
        roomy = await self._frames.lease(wider, deadline_ns)
        try:
            self._counts["copied_bytes"] += fill(roomy, wider, inputs)
            link = await self._live_link(deadline_ns)
            result = await self._execute(wider, roomy, measure_timing, deadline_ns, link)
            return self._outputs(link, result, wider, roomy, measure_timing)
        finally:
            roomy.settled(None)

    async def _live_link(self, deadline_ns: int | None) -> Link:
        """The link to send over. It is the right one until the next await."""
        while True:
            if self._compiled.gate.shut:
                await self._compiled.gate.passed(deadline_ns)
            link = self._link
            if link is not None and link.controller.ended_by is None:
                return link
            link = await self._connect(deadline_ns)
            if not self._compiled.gate.closed:
                return link

    async def _execute(
        self,
        way: Way,
        frame: memory_pool.Frame,
        measure_timing: bool,
        deadline_ns: int | None,
        link: Link,
        placement: Placement | None = None,
    ) -> Result:
        pool = self._frames.pool(way)
        pool.pin(frame)
        settled: Callable[[Result | None], None] = frame.settled
        if placement is None:
            body = frame.bindings.get((way, measure_timing)) or self._body(way, frame, measure_timing)
        else:
            settled = partial(placement.settled_in, frame)
            try:
                body = self._placed_body(way, frame, measure_timing, placement)
            except BaseException:
                settled(None)
                raise
        if self._compiled.watched:
            settled = link.serving.entered(settled, deadline_ns)
            if placement is None:
                link.serving.use.count()
        result, busy_ns = await link.controller.execute(body, settled, deadline_ns)
        self._counts["driver_busy_ns"] += busy_ns
        return result

    def _body(self, way: Way, frame: memory_pool.Frame, measure_timing: bool) -> bytes:
        """The encoded request of a frame: sent again, it costs no more than the identity behind it."""
        body = encode_request_body(way.request(frame.offset), (PoolReference(frame.slot),), measure_timing, framed=True)
        frame.bindings[way, measure_timing] = body
        return body

    def _placed_body(self, way: Way, frame: memory_pool.Frame, measure_timing: bool, placement: Placement) -> bytes:
        """The encoded request of a placement, remembered with the frame: a state that swaps two buffers has two."""
        references = {
            pool: PoolReference(-1, pool.token) if isinstance(pool, RemoteBuffer) else PoolReference(self._frames.slot_of(pool))
            for pool in placement.pools
        }
        key = (way, measure_timing, placement.key(references))
        body: bytes | None = frame.bindings.get(key)
        if body is None:
            pools = (PoolReference(frame.slot), *references.values())
            body = encode_request_body(placement.request(way, frame.offset), pools, measure_timing, framed=True)
            if len(frame.bindings) >= _REMEMBERED_BODIES:
                frame.bindings.clear()
            frame.bindings[key] = body
        return body

    def _outputs(
        self, link: Link, result: Result, way: Way, frame: memory_pool.Frame, measure_timing: bool, elsewhere: Container[str] = ()
    ) -> Outputs:
        if result.status is not ErrorStatus.NONE:
            raise self._failure(result)
        self._counts["computed"] += 1
        arrays = way.outputs_in(frame, result.output_shapes, elsewhere)
        if self._frames.pool(way).crowded:
            arrays = {name: array.copy() for name, array in arrays.items()}
        return Outputs(arrays, link.device, result.timing if measure_timing else None)

    def _failure(self, result: Result, inputs: Mapping[str, Any] | None = None) -> AionnError:
        self._counts["failed"] += 1
        error = failure_of(result, self._compilation.model, self._compilation.device)
        if self._link is not None and isinstance(error, ExecutionError):
            self._compiled.failed(self._link.serving, error, inputs)
        return error

    def map(
        self, frames: stream.Frames, *, policy: stream.Policy = "block", depth: int = 2, deadline_s: float | None = None
    ) -> AsyncGenerator[stream.StreamResult, None]:
        """Run a stream of inputs through the burst: `async for result in burst.map(camera())`. Results come in order.

        Args:
            frames: an iterable or async iterable of inputs by name, as for `compute`.
            policy: what becomes of a frame for which there is no place: "block" (the source waits), "latest" (it replaces
                the one that waits, which is dropped) or "reject" (the stream ends with `ExecutionError`).
            depth: so many frames are in flight or answered and not yet taken.
            deadline_s: how old a frame may become, in seconds from its arrival from the source until its answer. Past it the
                stream ends with `DeadlineError`; with policy "latest" that frame is dropped.

        Raises:
            CallerError: an argument is wrong. While iterating: whatever `compute` or the source raises.
        """
        return stream.Stream(self, frames, policy, depth, deadline_s).results()

    def _start_task(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self._compilation._runtime._check_loop()
        if not self._open:
            raise CallerError("the burst is not open; use it inside `async with compilation.burst() as burst`")
        self._compilation._runtime._tasks.start_soon(work)

    def statistics(self) -> dict[str, int]:
        """Counts since the burst was made.

        computed, failed: executions answered well, or with an error. connections: drivers this burst has had.
        dropped: frames of streams that were never answered (see `map`).
        copied_bytes: written into frames by `compute`. driver_busy_ns: the driver's time on our requests. in_flight:
        requests unanswered now. frames, free_frames, pinned_frames, shared_bytes: of the burst's memory.
        """
        in_flight = self._link.controller.in_flight if self._link is not None else 0
        return {**self._counts, "in_flight": in_flight, **self._frames.count()}
