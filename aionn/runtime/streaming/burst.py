"""`Burst`: a stream of executions to one driver over shared memory, as an app uses it.

A burst has one shortcut, its usual frame: plain arrays of the same shapes as the request before. Everything else is an `Execution` over
the burst's link.

Invariant
    A frame is pinned by its lease (the app's, or that of a running `compute`) and by each request in flight over it.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

from aionn import trace
from aionn.burst.controller import ExecutionBurstController, Sent
from aionn.errors import CallerError, MemoryAllocationError
from aionn.hal.options import CallOptions
from aionn.hal.types import ErrorStatus, Result
from aionn.loopless import AsyncOnly, deadline_of, other_tasks
from aionn.memory.pool import FramesInFlightError, MemoryFrame
from aionn.pages.app_layout import COMPUTED, CONNECTIONS, COPIED_BYTES, DRIVER_BUSY_NS, DROPPED, FAILED, FELL_BACK
from aionn.runtime.executing.arguments import FrameLayout, Outputs, check_mapping
from aionn.runtime.executing.execution import Call, Execution
from aionn.runtime.executing.frames import LARGE_BYTES, fill_large
from aionn.runtime.executing.link import Link, plain_body
from aionn.runtime.executing.retrying import Retries, retried
from aionn.runtime.streaming.any_connection import AnyConnection
from aionn.runtime.streaming.frame import Frame, begin_from_thread, lease_of, leases_here, placed_in

if TYPE_CHECKING:
    from aionn.runtime.streaming.stream import Frames, Policy, StreamResult

_NONE = ErrorStatus.NONE  # each look into an enumeration costs as much as a small copy

_STATISTICS = {
    "computed": COMPUTED,
    "failed": FAILED,
    "fell_back": FELL_BACK,
    "connections": CONNECTIONS,
    "dropped": DROPPED,
    "copied_bytes": COPIED_BYTES,
    "driver_busy_ns": DRIVER_BUSY_NS,
}


class Burst(AsyncOnly):
    """A stream of executions. Made by `Compilation.burst()`, used in `async with`.

    Examples:
        >>> async with compilation.burst() as burst:
        ...     outputs = await burst.compute({"x": x})
        ...     async with burst.frame() as frame:  # without a copy
        ...         frame["x"][:] = 1
        ...         outputs = await burst.compute(frame)
        >>> burst.statistics()["computed"]
        2
    """

    def __init__(self, connection: AnyConnection, warm_up: Callable[[], Awaitable[None]] | None = None) -> None:
        """`warm_up`: runs the model when the burst is opened, before its first frame."""
        self._warm_up = warm_up
        self._connection = connection
        self._loop, self._running_loop = connection.loop, connection.running_loop
        self._executor = connection.executor
        self._counts = connection.executor.counts

    async def __aenter__(self) -> Burst:
        await self._connection.open()
        if self._warm_up is not None:
            try:
                await self._warm_up()
            except BaseException:
                await self._connection.aclose()
                raise
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

    def lease(self, shapes: Mapping[str, Sequence[int]] | None = None) -> Frame:
        """Return a frame to write in place and to yield to `map`, alone or in an `aionn.Item`.

        Write `frame = await burst.lease()` in a task. In another thread, such as that of a generator, write `frame = burst.lease()`: the
        call waits until it has a frame. The stream owns a frame that its source has yielded, sends it without a copy and returns it. Do
        not keep views of it. A frame that is not yielded returns when it is collected, or when the stream of its source ends.

        Args:
            shapes: of inputs with open dimensions, by name; the others' are known.

        Raises:
            CallerError: a shape is missing or does not fit the model, or the burst is closed.
            MemoryAllocationError: there is no memory for one more frame of these shapes. The app may hold too many.
        """
        frame = Frame(self._connection, self._executor.arguments.check_shapes(shapes or {}), leases_here.get())
        if self._running_loop() is None:
            begin_from_thread(frame)
        return frame

    async def compute(
        self,
        inputs: Mapping[str, Any] | Frame,
        *,
        outputs: Mapping[str, Any] | None = None,
        measure_timing: bool = False,
        timeout_s: float | None = None,
        retry: int | Retries = 0,
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
            retry: how often the call is made again after its driver has died, in a new driver. `timeout_s` bounds all of it. A call
                of a driver that hangs is not made again. Device memory cannot be among the arguments then, because its contents are lost.

        Returns:
            One array per output, by name: views of the burst's memory. They keep their values as long as the app holds them. A second
            `compute` with the same `Frame` overwrites its outputs. Outputs that are held take memory, each as much as a whole frame with
            its inputs, so copy what must live long. A frame for several devices also has the tensors between their steps. While other
            calls wait for a free frame, the outputs are copies, and the frame goes to those calls.

        Raises:
            CallerError: a name, shape or dtype does not fit; nothing was sent.
            DeadlineError: no answer in time.
            DeviceBusyError: too many calls wait (`Batching.max_waiting`); nothing was sent.
            ExecutionError: the driver answered that it failed.
            MemoryAllocationError: there is no memory for a frame of these shapes. The app may hold the outputs of many others.
            DriverDiedError, DriverHungError: the driver is gone; the next call starts a new one. `DeviceMemoryLostError` where a
                `DeviceMemory` among the arguments went with it.
        """
        if retry:
            return await retried(self.compute, inputs, outputs, measure_timing, timeout_s, retry, placed_in(inputs))
        try:
            if self._running_loop() is not self._loop:
                self._connection.check_here()
            deadline_ns = None if timeout_s is None else deadline_of(timeout_s)
            layout, pool, link = self._connection.usual
            if layout is not None and layout.input_bytes >= LARGE_BYTES:
                # The copy holds the loop up for long. Yield first, so that a waiting answer is delivered before it.
                await other_tasks()
                layout, pool, link = self._connection.usual
            if layout is None or pool is None or link is None or outputs or type(inputs) is not dict:
                return await self._execute(inputs, outputs or {}, CallOptions(measure_timing, deadline_ns))
            # A stream's usual frame, in one piece: each call less is a tenth of a microsecond of the few that a round trip takes.
            try:
                frame = pool.lease()
            except (FramesInFlightError, CallerError, MemoryAllocationError):
                return await self._execute(inputs, {}, CallOptions(measure_timing, deadline_ns))
            try:
                arrays, caller = frame.arrays, link.controller.caller
                body = frame.bindings.get((layout, measure_timing)) or plain_body(layout, frame, measure_timing)
                if layout.input_bytes < LARGE_BYTES:
                    answer = caller.post(arrays.get(layout) or layout.inputs_in(frame), inputs, body, deadline_ns or 0)
                else:
                    answer = _post_large(link.controller, layout, frame, inputs, body, deadline_ns)
                if answer is not None:
                    if not isinstance(answer, tuple):
                        future = answer
                        try:
                            answer = await future
                        except BaseException:
                            frame.pins += caller.leave(future, frame.settled)  # a request in flight takes the pin over
                            raise
                        if answer is None:
                            raise link.controller.why_over()
                    result, _ = answer
                    if result.status is _NONE:
                        self._counts.computed(layout.input_bytes)
                        shapes = result.output_shapes
                        outcome = (not shapes and arrays.get(layout.outputs_key)) or layout.outputs_in(frame, shapes)
                        if pool.crowded:
                            outcome = {name: array.copy() for name, array in outcome.items()}
                        return Outputs(outcome, link.device, result.timing if measure_timing else None)
            finally:
                frame.settled(None)
            if answer is None:
                return await self._execute(inputs, {}, CallOptions(measure_timing, deadline_ns))
            return await self._with_more_room((link, layout, result), inputs, CallOptions(measure_timing, deadline_ns))
        except BaseException as error:
            self._executor.ended(error)
            raise

    async def _with_more_room(self, first: tuple[Link, FrameLayout, Result], inputs: dict[str, Any], options: CallOptions) -> Outputs:
        """Go on after a usual frame whose answer has no outputs."""
        self._counts.add(COPIED_BYTES, first[1].input_bytes)
        self._connection.count_from_now()  # the next frame needs the wider layout
        return await Execution(self._executor, self._connection.route, Call(inputs, {}, options, inputs)).run(first)

    async def _execute(self, inputs: Mapping[str, Any] | Frame, outputs: Mapping[str, Any], options: CallOptions) -> Outputs:
        """Compute everything but a usual frame: other shapes, an app's frame, arguments elsewhere, a new driver."""
        connection = self._connection
        if type(inputs) is not dict and isinstance(inputs, Frame):
            own, placed = lease_of(inputs, connection)
            if own[1].pins > 1:
                raise CallerError("this frame is in flight: wait for its outputs, or get another one with burst.frame()")
            call = Call(inputs, outputs, options, placed, own)
            with trace.captured_at(inputs.captured_ns):
                return await Execution(self._executor, connection.route, call).run()
        if connection.closed:
            connection.check_open()
        if type(inputs) is not dict:
            check_mapping(inputs)
        execution = Execution(self._executor, connection.route, Call(inputs, outputs, options, inputs))
        found = await execution.run()
        if not execution.placing:
            connection.expect(execution.layout, execution.channel)
        return found

    def map(
        self, frames: Frames, *, policy: Policy = "block", depth: int = 2, deadline_s: float | None = None
    ) -> AsyncGenerator[StreamResult, None]:
        """Run a stream of inputs through the burst: `async for result in burst.map(camera())`. Results come in order.

        Args:
            frames: what yields inputs by name, as for `compute`, or frames from `lease`, or either of them in an `aionn.Item`. An async
                iterable is iterated in a task. A collection, such as a list or a tuple, is iterated in place. Any other iterable, such as
                a generator, may block: it is iterated in a daemon thread, in a copy of the caller's context.
            policy: what becomes of a frame for which there is no place. With "block" the source waits. With "latest" the frame
                replaces the one that waits, which is dropped. With "reject" the stream ends with `ExecutionError`.
            depth: the most frames that may be in flight, or answered and not yet taken, at the same time.
            deadline_s: how old a frame may become, in seconds from its arrival from the source until its answer. An older frame
                ends the stream with `DeadlineError`. With policy "latest" it is dropped instead, as is a frame that is refused
                with `DeviceBusyError`.

        A stream that ends, also by a driver's death, closes a generator that it was given. Give the next stream a new one.

        A stream that is closed while its source blocks in a thread ends within a second. One WARNING of the logger "aionn.runtime" names
        the source. Its thread stays until the source returns, closes the generator then, and holds no frame meanwhile.

        Raises:
            CallerError: an argument is wrong. While iterating: whatever `compute` or the source raises.
        """
        from aionn.runtime.streaming.stream import Stream, StreamOptions  # a stream has tasks, which a burst of threads has not

        return Stream(self.compute, self._connection, frames, StreamOptions(policy, depth, deadline_s)).results()

    def statistics(self) -> dict[str, int]:
        """Return counts since the burst was made.

        computed, failed: executions answered well, or with an error.
        fell_back: those of the failed that another device has computed (see docs/how-to/several-devices.md).
        connections: drivers that this burst has had.
        dropped: frames that a stream's source has yielded and that were never answered: replaced by a newer one, late, rejected, refused,
            lost with the driver, or in hand when the stream ended.
        copied_bytes: written into frames by `compute`.
        driver_busy_ns: the driver's time on our requests.
        in_flight: requests unanswered now.
        frames, free_frames, pinned_frames: pieces of shared memory for one request each. A pinned one is leased or in flight.
        shared_bytes: the burst's memory for them: that of depth + 1 frames at most, and of one for each leased or whose outputs the app
            holds.
        """
        link = self._connection.link
        in_flight = link.in_flight if link is not None else 0
        counts = {name: self._counts.get(counter) for name, counter in _STATISTICS.items()}
        return {**counts, "in_flight": in_flight, **self._executor.frames.count()}


class _AdmittedBurst(Burst):
    """A burst of a compilation that refuses calls while too many wait."""

    async def compute(
        self,
        inputs: Mapping[str, Any] | Frame,
        *,
        outputs: Mapping[str, Any] | None = None,
        measure_timing: bool = False,
        timeout_s: float | None = None,
        retry: int | Retries = 0,
    ) -> Outputs:
        """See `Burst.compute`."""
        admission = self._executor.admission
        if retry or admission is None:  # each attempt comes here again
            return await _compute(self, inputs, outputs=outputs, measure_timing=measure_timing, timeout_s=timeout_s, retry=retry)
        # As `Admission.run`, without its calls.
        place = admission.enter(None if timeout_s is None else deadline_of(timeout_s), self._executor.ended)
        try:
            return await _compute(self, inputs, outputs=outputs, measure_timing=measure_timing, timeout_s=timeout_s)
        finally:
            admission.leave(place)


_compute = Burst.compute


def burst_over(connection: AnyConnection, warm_up: Callable[[], Awaitable[None]] | None = None) -> Burst:
    """Return an app's burst. `warm_up`: runs the model when the burst is opened, before its first frame."""
    return (Burst if connection.executor.admission is None else _AdmittedBurst)(connection, warm_up)


def _post_large(
    controller: ExecutionBurstController,
    layout: FrameLayout,
    frame: MemoryFrame,
    inputs: dict[str, Any],
    body: bytes,
    deadline_ns: int | None,
) -> Sent:
    """Send a usual frame that takes longer to copy than a driver to wake up. As `Caller.post`."""
    if not layout.fits(inputs):
        return None
    fill_large(frame, layout, inputs, controller.soon)
    return controller.caller.send(body, None, deadline_ns or 0)
