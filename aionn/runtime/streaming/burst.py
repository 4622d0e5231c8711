"""`Burst`: a stream of executions to one driver over shared memory, as an app uses it.

A burst has one shortcut, its usual frame: plain arrays of the same shapes as the request before. It has a variant for a stream that
keeps its state in the driver (`executing.recurrent`). Everything else is an `Attempt` over the burst's link.

Invariant
    A frame is pinned by its lease (the app's, or that of a running `compute`) and by each request in flight over it.
"""

from __future__ import annotations

import asyncio
from asyncio import _get_running_loop  # the public one raises where there is no loop, and is then caught at every call
from collections.abc import AsyncGenerator, Mapping, Sequence
from types import TracebackType
from typing import Any

from aionn.errors import CallerError
from aionn.hal.types import ErrorStatus
from aionn.memory.pool import FramesInFlightError
from aionn.runtime.executing.arguments import Outputs, check_mapping
from aionn.runtime.executing.attempt import Attempt, Call
from aionn.runtime.executing.bodies import plain_body
from aionn.runtime.executing.frames import LARGE_BYTES, fill_large
from aionn.runtime.executing.link import Link
from aionn.runtime.executing.recurrent import RecurrentSteps, Step
from aionn.runtime.streaming import stream
from aionn.runtime.streaming.connection import BurstConnection
from aionn.runtime.streaming.frame import Frame, lease_of
from aionn.tasks import deadline_of

_NONE = ErrorStatus.NONE  # each look into an enumeration costs as much as a small copy

QUEUE_CAPACITY = 1024
"""Datums per queue, as NNAPI's bursts have: about a hundred requests of a small model."""


class Burst:
    """A stream of executions. Made by `Compilation.burst()`, used in `async with`."""

    def __init__(self, connection: BurstConnection) -> None:
        self._connection = connection
        self._loop = connection.session.loop
        self._executor = connection.executor
        self._counts = connection.executor.counts
        self._recurrent: RecurrentSteps | None = None

    async def __aenter__(self) -> Burst:
        await self._connection.open()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """End the burst: calls that still wait get `CallerError`; queues, frames and the driver's part are freed."""
        await self._connection.aclose()

    def frame(self, shapes: Mapping[str, Sequence[int]] | None = None) -> Frame:
        """Return shared memory to write one request's inputs into: `async with burst.frame() as frame`.

        Args:
            shapes: of inputs with open dimensions, by name; the others' are known.

        Raises:
            CallerError: a shape is missing or does not fit the model.
        """
        return Frame(self._connection, self._executor.arguments.check_shapes(shapes or {}))

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
            outputs: where outputs are to be written instead, by name: a `Memory` or a `DeviceMemory`. An output in a `DeviceMemory` is
                missing from the result. A `DeviceMemory` that is also an input is a recurrent state: it has the new value afterwards.
            measure_timing: fill `.timing` of the result.
            timeout_s: seconds after which this call ends with `DeadlineError`. It ends nothing else. Whether the driver hangs is
                judged by what it gets done (`Runtime(hang_s=)`), and the frame stays reserved until the driver has answered.

        Returns:
            One array per output, by name: views of the burst's memory. They keep their values as long as the app holds them. A second
            `compute` with the same `Frame` overwrites its outputs. Outputs that are held take memory, each as much as a whole frame with
            its inputs, so copy what must live long. While other calls wait for a free frame, the outputs are copies, and the frame goes
            to those calls.

        Raises:
            CallerError: a name, shape or dtype does not fit; nothing was sent.
            DeadlineError: no answer in time.
            ExecutionError: the driver answered that it failed.
            MemoryAllocationError: there is no memory for a frame of these shapes. The app may hold the outputs of many others.
            DriverDiedError, DriverHungError: the driver is gone; the next call starts a new one. `DeviceMemoryLostError` where a
                `DeviceMemory` among the arguments went with it.
        """
        if _get_running_loop() is not self._loop:
            self._connection.session.check_open()  # it says what is wrong
        deadline_ns = None if timeout_s is None else deadline_of(timeout_s)
        layout, pool, link = self._connection.usual
        if layout is not None and layout.input_bytes >= LARGE_BYTES:
            # The copy holds the loop up for long. Yield first, so that a waiting answer is delivered before it.
            await asyncio.sleep(0)
            layout, pool, link = self._connection.usual
        if layout is None or pool is None or link is None or outputs or link.controller.ended_by is not None or not layout.fits(inputs):
            if self._recurrent is not None and type(inputs) is dict:
                step = self._begin_step(self._recurrent, inputs, outputs or {})
                if step is not None and (stepped := await self._step(step, inputs, measure_timing, deadline_ns)) is not None:
                    return stepped
            return await self._attempt(inputs, outputs or {}, measure_timing, deadline_ns)
        # A stream's usual frame, in one piece: each call less is a tenth of a microsecond of the few that a round trip takes.
        try:
            frame = pool.lease()
        except FramesInFlightError:
            return await self._attempt(inputs, {}, measure_timing, deadline_ns)
        try:
            arrays = frame.arrays
            controller = link.controller
            if layout.input_bytes < LARGE_BYTES:
                place: Any
                for name, place in (arrays.get(layout) or layout.inputs_in(frame)).items():
                    place[...] = inputs[name]
                place = None  # or the frame would count as held when it goes to another caller below
            else:
                fill_large(frame, layout, inputs, controller.soon)
            body = frame.bindings.get((layout, measure_timing)) or plain_body(layout, frame, measure_timing)
            answer = controller.at_once(body, deadline_ns)
            if not isinstance(answer, tuple):
                frame.pins += 1
                answer = await controller.execute(body, frame.settled, deadline_ns, answer)
            result, busy_ns = answer
            counts = self._counts
            counts["copied_bytes"] += layout.input_bytes
            counts["driver_busy_ns"] += busy_ns
            if result.status is _NONE:
                counts["computed"] += 1
                shapes = result.output_shapes
                found = None if shapes else arrays.get(layout.outputs_key)
                outcome = found or layout.outputs_in(frame, shapes)
                if pool.crowded:
                    outcome = {name: array.copy() for name, array in outcome.items()}
                return Outputs(outcome, link.device, result.timing if measure_timing else None)
        finally:
            frame.settled(None)
        self._connection.count_from_now()  # the next frame needs the wider layout
        call = Call(inputs, {}, measure_timing, deadline_ns, inputs)
        return await Attempt(self._executor, self._connection.route, call).resume(link, layout, result)

    async def _attempt(
        self, inputs: Mapping[str, Any] | Frame, outputs: Mapping[str, Any], measure_timing: bool, deadline_ns: int | None
    ) -> Outputs:
        """Compute all but a stream's usual frame: new shapes, frames, arguments that lie elsewhere, a new driver."""
        connection = self._connection
        if isinstance(inputs, Frame):
            own, placed = lease_of(inputs, connection)
            if own[1].pins > 1:
                raise CallerError("this frame is in flight: wait for its outputs, or get another one with burst.frame()")
            call = Call(inputs, outputs, measure_timing, deadline_ns, placed, own)
            return await Attempt(self._executor, connection.route, call).run()
        connection.check_open()
        if type(inputs) is not dict:
            check_mapping(inputs)
        call = Call(inputs, outputs, measure_timing, deadline_ns, inputs)
        attempt = Attempt(self._executor, connection.route, call)
        found = await attempt.run()
        if attempt.placing:
            self._recurrent = RecurrentSteps.of(attempt.layout, self._executor.frames.pool(attempt.layout), inputs, outputs)
        elif isinstance(attempt.channel, Link):
            connection.expect(attempt.layout, attempt.channel)
        return found

    def _begin_step(self, recurrent: RecurrentSteps, inputs: dict[str, Any], outputs: Mapping[str, Any]) -> Step | None:
        """Begin a stream's usual step with its state in the driver. Returns None if these arguments are not such a step."""
        link = self._connection.plain_link()
        return None if link is None else recurrent.begin(link, inputs, outputs)

    async def _step(self, step: Step, inputs: dict[str, Any], measure_timing: bool, deadline_ns: int | None) -> Outputs | None:
        """Return the outputs of a step. Returns None if an output was larger than declared: nothing was computed, and an `Attempt` has
        room for it."""
        try:
            result, busy_ns = await step.link.controller.execute(step.body(inputs, measure_timing), step, deadline_ns)
            counts = self._counts
            counts["copied_bytes"] += step.steps.copied_bytes
            counts["driver_busy_ns"] += busy_ns
            if result.status is not _NONE:
                if step.steps.widened(self._executor.arguments, result):
                    self._recurrent = None
                    return None
                raise await self._executor.placed_failure(step.link.serving, result, Call(inputs, {}, measure_timing, deadline_ns, inputs))
            counts["computed"] += 1
            return Outputs(step.steps.outputs_in(step.frame, result), step.link.device, result.timing if measure_timing else None)
        except BaseException as error:
            step.leave(error)
            raise
        finally:
            step.frame.settled(None)

    def map(
        self, frames: stream.Frames, *, policy: stream.Policy = "block", depth: int = 2, deadline_s: float | None = None
    ) -> AsyncGenerator[stream.StreamResult, None]:
        """Run a stream of inputs through the burst: `async for result in burst.map(camera())`. Results come in order.

        Args:
            frames: an iterable or async iterable of inputs by name, as for `compute`.
            policy: what becomes of a frame for which there is no place. With "block" the source waits. With "latest" the frame
                replaces the one that waits, which is dropped. With "reject" the stream ends with `ExecutionError`.
            depth: the most frames that may be in flight, or answered and not yet taken, at the same time.
            deadline_s: how old a frame may become, in seconds from its arrival from the source until its answer. An older frame
                ends the stream with `DeadlineError`. With policy "latest" it is dropped instead.

        Raises:
            CallerError: an argument is wrong. While iterating: whatever `compute` or the source raises.
        """
        return stream.Stream(self.compute, self._connection, frames, stream.StreamOptions(policy, depth, deadline_s)).results()

    def statistics(self) -> dict[str, int]:
        """Return counts since the burst was made.

        computed, failed: executions answered well, or with an error.
        connections: drivers that this burst has had.
        dropped: frames of streams that were never answered (see `map`).
        copied_bytes: written into frames by `compute`.
        driver_busy_ns: the driver's time on our requests.
        in_flight: requests unanswered now.
        frames, free_frames, pinned_frames: pieces of shared memory for one request each. A pinned one is leased or in flight.
        shared_bytes: the burst's memory for them: that of depth + 1 frames at most, and of one for each leased or whose outputs the app
            holds.
        """
        link = self._connection.link
        in_flight = link.controller.in_flight if link is not None else 0
        return {**self._counts, "in_flight": in_flight, **self._executor.frames.count()}
