"""`Attempt`: one general execution, from its arguments to its outputs.

It leases a frame, copies the arrays into it, finds the channel, sends the request, and waits for the answer. Then it makes the outputs,
or tries again with more room where the driver found too little. A burst's usual frame is a shortcut beside it (`streaming.burst`).

The order depends on the arguments:

    arguments in arrays     frame, then channel: a driver may die during the wait for a frame, and the channel must lead to a live one
    arguments elsewhere     channel, then placement and frame: where device memory lies depends on the driver

Nothing is awaited between the choice of a channel, or the placement, and the sending.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Mapping
from functools import partial
from typing import Any, NamedTuple, Protocol
from weakref import WeakSet

import msgspec
import numpy as np

from aionn import trace
from aionn.errors import AionnError, ExecutionError, OutputInsufficientSizeError
from aionn.hal.types import ErrorStatus, Result
from aionn.memory.pool import Frame, FramesInFlightError
from aionn.pages import BurstSlot, private_counts
from aionn.pages.app_layout import COMPUTED, COPIED_BYTES, FAILED, FELL_BACK
from aionn.runtime.executing.arguments import Arguments, failure_of
from aionn.runtime.executing.counted import Shown, count_end
from aionn.runtime.executing.frame_layout import FrameLayout, Outputs
from aionn.runtime.executing.frames import Frames, Spare, fill
from aionn.runtime.executing.placement import Placement, check_frame, contents_of, is_placed, place
from aionn.runtime.serving.compiled_model import CompiledModel
from aionn.runtime.serving.serving import Serving
from aionn.tasks import ending_by

NO_ANSWER = "the driver's answer did not come"


class Channel(Protocol):
    """What carries requests to the driver of one serving: the control socket, or a burst's queues."""

    @property
    def serving(self) -> Serving: ...

    def send(
        self,
        layout: FrameLayout,
        frame: Frame,
        placement: Placement | None,
        measure_timing: bool,
        deadline_ns: int | None,
        settled: Callable[[Result | None], None],
    ) -> Awaitable[tuple[Result, int]]:
        """Send a request and wait for its answer. Returns the answer, and the driver's time in nanoseconds where it is known.

        `settled` is called once, whatever happens: with the driver's answer, or with None when there will be none.
        """
        ...


Route = Callable[[int | None], Awaitable[Channel]]
"""Returns the channel to send over, by a deadline. It is the right one until the next await."""


class FallsBack(Protocol):
    """Runs a call that failed on `serving` once more elsewhere. Returns None if the caller gets `error`."""

    async def __call__(self, serving: Serving, error: ExecutionError, result: Result, call: Call) -> Outputs | None: ...


class Executor(msgspec.Struct, frozen=True):
    """What the executions over one burst have in common, or the trials of one compilation.

    Attributes:
        arguments, frames: how arguments are laid out, and where.
        compiled: what the app's executions are reported to, or None for trials.
        counts: a slot of the app's statistics page; see `Burst.statistics`.
        failures: errors that are counted as `failed`, as long as they live.
        fallback: gets calls that a driver has answered with an error, or None (`executing.fallback`).
        shown: under which texts the page shows `counts`. None for trials.
    """

    arguments: Arguments
    frames: Frames
    compiled: CompiledModel | None
    counts: BurstSlot = msgspec.field(default_factory=private_counts)
    failures: WeakSet[BaseException] = msgspec.field(default_factory=WeakSet)
    fallback: FallsBack | None = None
    shown: Shown | None = None

    def ended(self, error: BaseException) -> None:
        """Count a call that ended with an error."""
        count_end(self.counts, error, self.failures)

    def failure(self, serving: Serving, result: Result, inputs: Mapping[str, Any] | None) -> AionnError:
        """Count an answer that is an error, and report it. Returns what it means to the caller."""
        error = self._counted(serving, result)
        if self.compiled is not None and isinstance(error, ExecutionError):
            self.compiled.failed(serving, error, inputs)
        return error

    async def placed_failure(self, serving: Serving, result: Result, call: Call) -> AionnError:
        """Do the same as `failure` where some inputs are memory.

        Memory that cannot be read fails on every stage: it has no contents, or its file was cut off. Such a failure is not reported.
        """
        compiled, inputs = self.compiled, None
        if compiled is not None and compiled.on_failure is not None and serving.alive:
            model = serving.model
            try:
                inputs = await contents_of(model.inputs, {name: call.value(name) for name in model.inputs})
            except ExecutionError:
                return self._counted(serving, result)
            except AionnError as error:
                trace.count("execution.inputs_unread", reason=str(error))
        return self.failure(serving, result, inputs)

    def _counted(self, serving: Serving, result: Result) -> AionnError:
        self.counts.add(FAILED, 1)
        error = failure_of(result, serving.model, serving.device)
        self.failures.add(error)
        return error


class Call(NamedTuple):
    """One execution as it was asked for.

    Attributes:
        inputs: arrays by name. outputs: where outputs are to be written instead, by name.
        placed: inputs among which some may lie elsewhere.
        own: the app's own frame and its layout, which holds the arrays already.
    """

    inputs: Mapping[str, Any]
    outputs: Mapping[str, Any]
    measure_timing: bool
    deadline_ns: int | None
    placed: Mapping[str, Any]
    own: tuple[FrameLayout, Frame] | None = None

    def value(self, name: str) -> Any:
        """Return what the app gave for an input."""
        return self.placed[name] if name in self.placed else self.inputs[name]

    def completed(self, arguments: Arguments) -> Call:
        """Return the same with the defaults of inputs that were left out."""
        return self._replace(inputs=arguments.complete(self.inputs), placed=arguments.complete(self.placed))

    @property
    def placing(self) -> bool:
        """Whether some arguments do not lie in the frame."""
        if self.outputs or not self.placed:
            return bool(self.outputs)
        return any(type(value) is not np.ndarray and is_placed(value) for value in self.placed.values())


class Attempt:
    """One execution. Made for one `run`.

    Attributes:
        layout: for the next frame of these shapes. channel: that it was sent over. placing: whether some arguments did not lie in the
            frame. All are known after `run`. failed: the answer that is an error, if one came.
    """

    __slots__ = ("_call", "_executor", "_route", "_wider", "channel", "failed", "layout", "placing")

    layout: FrameLayout
    channel: Channel
    placing: bool

    def __init__(self, executor: Executor, route: Route, call: Call) -> None:
        self._executor = executor
        self._route = route
        defaults = executor.arguments.defaults and call.own is None
        self._call = call.completed(executor.arguments) if defaults else call
        self._wider: FrameLayout | None = None
        self.failed: Result | None = None

    def run(self) -> Coroutine[Any, Any, Outputs]:
        """Return the outputs, once they are there.

        Raises:
            CallerError: a name, shape or dtype does not fit; nothing was sent.
            DeadlineError: no answer in time.
            ExecutionError: the driver answered that it failed.
            MemoryAllocationError: there is no memory for frames of these shapes.
            DriverDiedError, DriverHungError: the driver is gone. `DeviceMemoryLostError` where device memory went with it.
        """
        return self._run() if self._call.deadline_ns is None else self._run_by_deadline()

    async def _run_by_deadline(self) -> Outputs:
        with ending_by(self._call.deadline_ns, NO_ANSWER):
            return await self._run()

    async def _run(self) -> Outputs:
        call = self._call
        self.placing = call.placing
        try:
            if self.placing:
                with Spare(self._executor.frames, call.deadline_ns) as spare:
                    while (found := await self._run_placed(spare)) is None:
                        pass
            else:
                while (found := await self._run_in_frame()) is None:
                    pass
        except ExecutionError as error:
            found = await self._fall_back(error)
            if found is None:
                raise
        return found

    async def _fall_back(self, error: ExecutionError) -> Outputs | None:
        """Run the call elsewhere after an answer that is an error, where that is allowed. Returns None if it is not, or fails too."""
        executor, result = self._executor, self.failed
        if executor.fallback is None or result is None or isinstance(error, OutputInsufficientSizeError):
            return None
        with ending_by(self._call.deadline_ns, NO_ANSWER):
            outputs = await executor.fallback(self.channel.serving, error, result, self._call)
        executor.counts.add(FELL_BACK, outputs is not None)
        return outputs

    async def resume(self, channel: Channel, layout: FrameLayout, result: Result) -> Outputs:
        """Return the outputs after a first answer without any: try again with more room, or raise."""
        self.channel, self.layout, self.placing = channel, layout, False
        try:
            self._widen_or_raise(channel, layout, None, result)
        except ExecutionError as error:
            found = await self._fall_back(error)
            if found is None:
                raise
            return found
        return await self.run()

    async def _run_in_frame(self) -> Outputs | None:
        """Run once with all arguments in the frame. Returns None if there was too little room."""
        call, executor = self._call, self._executor
        leased = None
        try:
            if call.own is not None and self._wider is None:
                layout, frame = call.own
            else:
                layout = self._wider or executor.arguments.layout(executor.arguments.shapes_of(call.inputs))
                frame = leased = await executor.frames.lease(layout, call.deadline_ns)
                executor.counts.add(COPIED_BYTES, fill(frame, layout, call.inputs))
            channel = await self._route(call.deadline_ns)
            compiled = executor.compiled
            if compiled is not None and compiled.sampling is not None:
                compiled.sampling.take(call.inputs)
            return await self._send(channel, layout, frame, None)
        finally:
            if leased is not None:
                leased.settled(None)

    async def _run_placed(self, spare: Spare) -> Outputs | None:
        """Run once with arguments that do not all lie in the frame. Returns None if there was too little room, or no frame was free."""
        channel = await self._route(self._call.deadline_ns)
        try:
            with channel.serving.used():
                return await self._place_and_send(channel, spare)
        except FramesInFlightError as crowded:
            await spare.wait(crowded.pool)
            return None

    async def _place_and_send(self, channel: Channel, spare: Spare) -> Outputs | None:
        call, executor = self._call, self._executor
        if executor.compiled is not None and (sampling := executor.compiled.sampling) is not None:
            await sampling.take_placed(call.inputs, call.placed)
        serving, arguments = channel.serving, executor.arguments
        placement, placed_shapes = await place(serving.model, arguments.outputs, serving.prepared, call.placed, call.outputs)
        frame = None
        try:
            if call.own is not None and self._wider is None:
                layout, own = call.own
                check_frame(layout, placed_shapes)
            else:
                layout = self._wider or arguments.layout(arguments.shapes_of(call.inputs, placed_shapes))
                own = frame = spare.lease(executor.frames.pool(layout))
                executor.counts.add(COPIED_BYTES, fill(frame, layout, call.inputs, placement.inputs))
        except BaseException:
            placement.release()
            if frame is not None:
                frame.settled(None)
            raise
        try:
            with placement.awaited():
                return await self._send(channel, layout, own, placement)
        finally:
            if frame is not None:
                frame.settled(None)

    async def _send(self, channel: Channel, layout: FrameLayout, frame: Frame, placement: Placement | None) -> Outputs | None:
        """Send a filled frame. The request holds a second pin, which ends with the driver's answer or its death."""
        call, executor = self._call, self._executor
        self.layout, self.channel = layout, channel
        settled: Callable[[Result | None], None] = frame.settled if placement is None else partial(placement.settled_in, frame)
        frame.pins += 1
        result, _ = await channel.send(layout, frame, placement, call.measure_timing, call.deadline_ns, settled)
        if result.status is not ErrorStatus.NONE:
            if placement is not None and not self._may_retry(layout, placement, result):
                self.failed = result
                raise await executor.placed_failure(channel.serving, result, call)
            self._widen_or_raise(channel, layout, placement, result)
            return None
        executor.counts.add(COMPUTED, 1)
        self.layout = executor.arguments.fit(layout, result.output_shapes)
        if self.layout is not layout:
            executor.frames.outgrown(layout)
        serving = channel.serving
        arrays = layout.outputs_in(frame, result.output_shapes, call.outputs)
        if executor.frames.pool(layout).crowded:
            arrays = {name: array.copy() for name, array in arrays.items()}
        outputs = Outputs(arrays, serving.stage, result.timing if call.measure_timing else None)
        if placement is not None:
            outputs.update(placement.arrays(serving.model, result))
        return outputs

    def _widen_or_raise(self, channel: Channel, layout: FrameLayout, placement: Placement | None, result: Result) -> None:
        """Use a layout with more room for the next try, after an answer without outputs; or raise what the answer means."""
        if not self._may_retry(layout, placement, result):
            self.failed = result
            raise self._executor.failure(channel.serving, result, self._call.inputs)
        self._wider = self._executor.arguments.widen(tuple(shape for _, _, shape, _ in layout.inputs), result.output_shapes)

    def _may_retry(self, layout: FrameLayout, placement: Placement | None, result: Result) -> bool:
        return self._executor.arguments.may_retry(layout, result, placement.outputs if placement is not None else ())
