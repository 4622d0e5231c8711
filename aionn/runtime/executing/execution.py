"""`Execution`: one execution, from its arguments to its outputs.

It finds the channel, places its arguments, copies arrays into a frame, sends the request, and waits for the answer. Then it makes the
outputs, or runs again with more room where the driver found too little. `transitions` has its states. A burst's usual frame is a shortcut
beside it (`streaming.burst`).

    Execution            `compute`: the caller waits for everything, and leaves when it is cancelled
    values               its arguments are values, which have no place in a frame
    starting             `start`: it is sent at once where that can be done, and no task waits for it
    fallback             one more execution elsewhere
    Channel              the control socket, or a burst's queues, to one driver or to those of a plan

Invariants
    Nothing is awaited between the choice of a channel and the sending. Where device memory or a frame must be waited for, all that was
    placed is given back. The channel is chosen again then, because its driver may have died, or another one may serve.
    One pin of the frame, and everything else that is placed, is held until the driver has answered, or never will, or will not run the
    request because its caller has left. It is held until the outputs are made, too, if the caller still waits for them.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar
from weakref import WeakSet

import msgspec
import numpy as np

from aionn import trace
from aionn.errors import (
    AionnError,
    CallerError,
    DeadlineError,
    DeviceBusyError,
    DeviceMemoryLostError,
    DriverDiedError,
    DriverHungError,
    ExecutionError,
    MemoryAllocationError,
    OutputInsufficientSizeError,
    lost_with,
)
from aionn.hal.model import PooledModel
from aionn.hal.options import CallOptions
from aionn.hal.types import ErrorStatus, Request, Result
from aionn.memory.pool import FramePool, FramesInFlightError, MemoryFrame
from aionn.memory.region import Region
from aionn.pages.app_layout import COMPUTED, COPIED_BYTES, DIED, FAILED, FELL_BACK, HUNG, LATE, REFUSED, Kind
from aionn.pages.app_page import BurstSlot
from aionn.remote.device import RemoteBuffer, RemotePreparedModel
from aionn.runtime.executing.arguments import Arguments, FrameLayout, Outputs, failure_of
from aionn.runtime.executing.frames import Frames, fill
from aionn.runtime.executing.placement import Placement, check_frame, check_outputs, contents_of, is_placed, place, states_of
from aionn.runtime.executing.transitions import AFTER, ANSWER, LEFT, PLACE, PUT_BACK, SEND, SETTLE, SETTLED, WAITING, WIDEN, Act

if TYPE_CHECKING:
    from aionn.runtime.executing.admission import Admission
    from aionn.runtime.executing.device_state import DeviceState
    from aionn.runtime.record import Record
    from aionn.runtime.serving.planned_execution import PlannedExecution
    from aionn.runtime.serving.planned_model import Prepared
    from aionn.runtime.serving.serving import CompiledModel, Serving

T = TypeVar("T")

_NONE = ErrorStatus.NONE

NO_ANSWER = "the driver's answer did not come"


class Channel(Protocol):
    """What carries requests to the driver of one serving: the control socket, or a burst's queues."""

    @property
    def serving(self) -> Serving: ...

    def send(self, execution: Execution) -> Awaitable[object]:
        """Send an execution whose arguments are placed, and wait for its answer.

        `execution.answered` is called once, whatever happens: with the driver's answer, or with None when there will be none.
        """
        ...


Route = Callable[[int | None], Awaitable[Channel]]
"""Returns the channel to send over, by a deadline. It is the right one until the next await."""


class InLoop(Protocol):
    """Awaits a coroutine in the runtime's loop, from another thread, for so long."""

    def __call__(self, work: Coroutine[Any, Any, T], deadline_ns: int | None) -> Awaitable[T]: ...


class FallsBack(Protocol):
    """Runs a call that failed on `serving` once more elsewhere. Returns None if the caller gets `error`."""

    async def __call__(self, serving: Serving, error: ExecutionError, result: Result, call: Call) -> Outputs | None: ...


# What native code counts for usual frames is counted here for all other executions.
_ENDS: tuple[tuple[type[BaseException] | tuple[type[BaseException], ...], int], ...] = (
    (DriverHungError, HUNG),
    (DriverDiedError, DIED),
    (DeadlineError, LATE),
    ((CallerError, DeviceBusyError, ExecutionError, MemoryAllocationError), REFUSED),
)


class Shown:
    """A slot of the page for executions, and under which texts the page shows it.

    The device and the stage change with a swap. What was counted before then stays with the device and the stage before.

    Attributes:
        counts: the slot.
    """

    def __init__(self, record: Record, kind: Kind, compilation: BurstSlot, model: str, now: tuple[str, str], burst: str = "") -> None:
        """`kind`: BURST or SINGLE. `compilation`: the slot of its compilation. `model`: the compilation's name. `now`: device and stage."""
        page, self._runtime = record.page, record.name
        self._page = page
        self._past = Kind.PAST_BURSTS if kind is Kind.BURST else Kind.PAST_SINGLES
        self._model, self._burst = page.named("model", model, self._runtime), page.named("burst", burst, self._runtime)
        self._now = now
        self.counts = page.slot(kind, self._model, *now, self._burst, self._runtime, parent=compilation)
        self._count_with_past()

    def on(self, device: str, stage: str) -> None:
        """Count what comes from now on for this device and stage."""
        if self._now == (device, stage):
            return
        self._now = device, stage
        self._page.rename(self.counts, self._model, device, stage, self._burst, self._runtime)
        self._count_with_past()

    def _count_with_past(self) -> None:
        self._page.follow(self.counts, self._page.past(self._past, self._model, *self._now, self._burst, self._runtime))


class Executor(msgspec.Struct, frozen=True):
    """What the executions over one burst have in common, or the trials of one compilation.

    Attributes:
        arguments, frames: how arguments are laid out, and where.
        compiled: what the app's executions are reported to, or None for trials.
        counts: a slot of the app's statistics page; see `Burst.statistics`.
        failures: errors that are counted as `failed`, as long as they live.
        fallback: gets calls that a driver has answered with an error, or None (`executing.fallback`).
        shown: under which texts the page shows `counts`. None for trials.
        admission: refuses the app's executions while too many wait, or None.
        in_loop: awaits something of the runtime's loop, for executions in another thread, whose waits end at deadlines by themselves. None
            where executions run in that loop.
    """

    arguments: Arguments
    frames: Frames
    compiled: CompiledModel | None
    counts: BurstSlot = msgspec.field(default_factory=BurstSlot)
    failures: WeakSet[BaseException] = msgspec.field(default_factory=WeakSet)
    fallback: FallsBack | None = None
    shown: Shown | None = None
    in_loop: InLoop | None = None
    admission: Admission | None = None

    def there(self, work: Coroutine[Any, Any, T]) -> Awaitable[T]:
        """Return what awaits `work` in the runtime's loop."""
        return work if self.in_loop is None else self.in_loop(work, None)

    def ended(self, error: BaseException) -> None:
        """Count a call that ended with an error, unless that was counted when the driver answered."""
        if error in self.failures:
            return
        for kinds, counter in _ENDS:
            if isinstance(error, kinds):
                self.counts.add(counter, 1)
                return

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
    options: CallOptions
    placed: Mapping[str, Any]
    own: tuple[FrameLayout, MemoryFrame] | None = None

    def value(self, name: str) -> Any:
        """Return what the app gave for an input."""
        return self.placed[name] if name in self.placed else self.inputs[name]

    def completed(self, arguments: Arguments) -> Call:
        """Return the same with the defaults of inputs that were left out."""
        return self._replace(inputs=arguments.complete(self.inputs), placed=arguments.complete(self.placed))

    def with_arguments(self, inputs: Mapping[str, Any], outputs: Mapping[str, Any], placed: Mapping[str, Any] | None = None) -> Call:
        """Return the same with other arguments, and without a frame of the app's. `placed` is `inputs` if it is left out."""
        return Call(inputs, outputs, self.options, inputs if placed is None else placed)

    @property
    def placing(self) -> bool:
        """Whether some arguments do not lie in the frame."""
        if self.outputs or not self.placed:
            return bool(self.outputs)
        return any(type(value) is not np.ndarray and is_placed(value) for value in self.placed.values())


class Execution:
    """One execution. `run` it once.

    Attributes:
        call: as it was asked for, with defaults.
        channel: that it was sent over, if it was. layout, frame, placement: where its arguments lie. placing: whether some do not lie in
            the frame.
        state: see `transitions`. result: the answer. failed: the answer that is an error, if one came.
    """

    __slots__ = (
        "_planned",
        "_room",
        "_route",
        "_spare",
        "call",
        "channel",
        "executor",
        "failed",
        "frame",
        "layout",
        "placement",
        "placing",
        "result",
        "state",
    )

    layout: FrameLayout

    def __init__(self, executor: Executor, route: Route, call: Call) -> None:
        self.executor = executor
        self._route = route
        self.call = call.completed(executor.arguments) if executor.arguments.defaults and call.own is None else call
        self.placing = self.call.placing
        self.channel: Channel | None = None
        self.state = WAITING
        self.frame: MemoryFrame | None = None
        self.placement: Placement | None = None
        self.result: Result | None = None
        self.failed: Result | None = None
        self._planned: PlannedExecution | None = None
        self._room: FrameLayout | None = None  # the layout that the next frame must have
        self._spare: tuple[FramePool, MemoryFrame] | None = None  # a frame that was waited for, until it is used

    # --- what `compute` waits for ---------------------------------------------------------------------------------------

    def run(self, first: tuple[Channel, FrameLayout, Result] | None = None) -> Coroutine[Any, Any, Outputs]:
        """Return the outputs, once they are there.

        Args:
            first: the answer of a usual frame that has no outputs, with its channel and layout.

        Raises:
            CallerError: a name, shape or dtype does not fit; nothing was sent.
            DeadlineError: no answer in time.
            ExecutionError: the driver answered that it failed.
            MemoryAllocationError: there is no memory for frames of these shapes.
            DriverDiedError, DriverHungError: the driver is gone. `DeviceMemoryLostError` where device memory went with it.
        """
        bound = self.call.options.deadline_ns is not None and self.executor.in_loop is None
        return self._run_by_deadline(first) if bound else self._run(first)

    async def _run_by_deadline(self, first: tuple[Channel, FrameLayout, Result] | None) -> Outputs:
        from aionn.tasks import ending_by  # a thread without a loop does not come here

        with ending_by(self.call.options.deadline_ns, NO_ANSWER):
            return await self._run(first)

    async def _run(self, first: tuple[Channel, FrameLayout, Result] | None) -> Outputs:
        try:
            if first is not None:
                self.channel, self.layout, self.result = first
                if not self.widen():
                    raise await self._failure()
            while (found := await self._run_once()) is None:
                pass
            return found
        except ExecutionError as error:
            found = await self._fall_back(error)
            if found is None:
                raise
            return found
        except DriverDiedError as error:
            if self.placement is None or not self.placement.used or isinstance(error, DeviceMemoryLostError):
                raise
            raise lost_with(error.device, error) from error
        finally:
            if self._spare is not None:
                self._spare[1].settled(None)
            self._settle()

    async def _run_once(self) -> Outputs | None:
        """Run once. Returns None if there was too little room, or no frame was free."""
        call, executor, compiled = self.call, self.executor, self.executor.compiled
        try:
            if self.placing:
                check_outputs(executor.arguments.outputs, call.outputs)
                if compiled is not None and compiled.sampling is not None:
                    await compiled.sampling.take_placed(call.inputs, call.placed)
                states = states_of(call.placed, call.outputs)
                channel = await self.choose(states)
                serving = channel.serving
                self.hold(serving, *self.placed(serving.model, serving.prepared, states), self._lease)
                if compiled is not None and compiled.held_back:  # since the channel was chosen
                    self._act(PUT_BACK)
                    return None
            else:
                if self._room is None and call.own is None:  # a wrong call connects to no driver
                    self._room = executor.arguments.layout(executor.arguments.shapes_of(call.inputs))
                channel = self.channel = await self._route(call.options.deadline_ns)
                self.hold(channel.serving, None, {}, self._lease)
                if compiled is not None and compiled.sampling is not None:
                    compiled.sampling.take(call.inputs)
        except FramesInFlightError as crowded:
            self._act(PUT_BACK)
            await self._wait_for_frame(crowded.pool)
            return None
        self._act(SEND)
        await channel.send(self)
        result = self.result
        assert result is not None
        if result.status is _NONE:
            outputs = self.outputs(channel.serving)
            self._act(SETTLE)
            return outputs
        if not self.widen():
            raise await self._failure()
        self._act(WIDEN)
        return None

    async def choose(self, states: Mapping[DeviceState, bool]) -> Channel:
        """Choose the channel, while every device memory is ready. Where one must be waited for, the channel is chosen again."""
        while True:
            channel = self.channel = await self._route(self.call.options.deadline_ns)
            for state, advances in states.items():
                if not state.is_ready(advance=advances):
                    break
            else:
                return channel
            for state, advances in states.items():
                await self.executor.there(state.ready(advance=advances))

    def placed(
        self, model: PooledModel, prepared: Prepared, states: Mapping[DeviceState, bool]
    ) -> tuple[Placement, dict[str, tuple[int, ...]]]:
        """Place the arguments that are not arrays; see `place`."""
        return place(model, self.executor.arguments.outputs, prepared, self.call.placed, self.call.outputs, states)

    def _lease(self, pool: FramePool) -> MemoryFrame:
        """Return the frame that was waited for, or a free one of the pool, but not before those who wait."""
        spare, self._spare = self._spare, None
        if spare is not None:
            if spare[0] is pool:
                return spare[1]
            spare[1].settled(None)
        if pool.crowded:
            raise FramesInFlightError(pool)
        return pool.lease()

    async def _wait_for_frame(self, pool: FramePool) -> None:
        """Wait for a frame and keep it, while it is worked out anew where the other arguments lie."""
        self._spare = pool, await self.executor.frames.wait(pool, self.call.options.deadline_ns)

    async def _failure(self) -> AionnError:
        """Report an answer that is an error. Returns what it means to the caller.

        What it holds is given back first. The report reads its inputs, and a second try elsewhere may need them.
        """
        self._act(SETTLE)
        self.failed = result = self.result
        assert result is not None
        assert self.channel is not None
        if self.placing:
            return await self.executor.placed_failure(self.channel.serving, result, self.call)
        return self.executor.failure(self.channel.serving, result, self.call.inputs)

    async def _fall_back(self, error: ExecutionError) -> Outputs | None:
        """Run the call elsewhere after an answer that is an error, where that is allowed. Returns None if it is not, or fails too."""
        executor, result, channel = self.executor, self.failed, self.channel
        if executor.fallback is None or result is None or channel is None or isinstance(error, OutputInsufficientSizeError):
            return None
        outputs = await executor.fallback(channel.serving, error, result, self.call)
        executor.counts.add(FELL_BACK, outputs is not None)
        return outputs

    # --- what every execution does --------------------------------------------------------------------------------------

    def _act(self, act: Act) -> None:
        """Follow `transitions`, and give back what is held where they say so."""
        self.state, over = AFTER[self.state, act]
        if not over:
            return
        frame, self.frame = self.frame, None
        if frame is not None:
            frame.settled(None)
        placement, self.placement = self.placement, None
        if placement is not None:
            placement.settle(self.result)

    def _settle(self) -> None:
        """Give the caller its outcome, unless it has it. A driver that still has the request keeps what it may touch, and nothing else."""
        if self.state is SETTLED:
            return
        self._act(SETTLE)
        if self.state is LEFT:
            if self.placement is not None:
                self.placement.left()
            self.channel = None
            del self._route, self.call, self.executor

    def hold(
        self,
        serving: Serving | None,
        placement: Placement | None,
        shapes: Mapping[str, tuple[int, ...]],
        lease: Callable[[FramePool], MemoryFrame],
    ) -> None:
        """Take over what was placed, and copy the arrays into a frame.

        Args:
            serving: what will run, if that is known.
            placement: of the arguments that lie elsewhere, if there are any. shapes: of the inputs among them.

        Raises:
            FramesInFlightError: no frame is free.
        """
        call, executor = self.call, self.executor
        self._act(PLACE)
        self.placement, self.result, self._planned = placement, None, None
        own = call.own if self._room is None else None
        if own is not None:
            layout = own[0]
            if shapes:
                check_frame(layout, shapes)
        else:
            layout = self._room or executor.arguments.layout(executor.arguments.shapes_of(call.inputs, shapes))
        self.layout, between = layout, between_bytes(serving, layout)
        if own is not None and layout.frame_bytes + between <= own[1].pool.frame_bytes:
            own[1].pins += 1
            self.frame = own[1]
        else:
            self.frame = lease(executor.frames.pool(layout, between))
            executor.counts.add(COPIED_BYTES, fill(self.frame, layout, call.inputs, placement.inputs if placement is not None else ()))

    @property
    def lent(self) -> MemoryFrame:
        """The frame that the driver may touch."""
        assert self.frame is not None
        return self.frame

    def request(self) -> tuple[Request, list[Region | RemoteBuffer]]:
        """Return the request, and its pools: the frame's region, and those that arguments lie in elsewhere."""
        frame, placement = self.lent, self.placement
        if placement is None:
            return self.layout.request(frame.offset), [frame.region]
        return placement.request(self.layout, frame.offset), [frame.region, *placement.pools]

    def planned(self, plan: Prepared) -> PlannedExecution:
        """Return the same execution as its steps on several devices. What it holds has its place."""
        assert not isinstance(plan, RemotePreparedModel)
        layout = self.layout
        self._planned = plan.execution(layout.shapes, self.lent.offset + layout.frame_bytes, *self.request(), self.call.options)
        return self._planned

    def answered(self, result: Result | None) -> None:
        """Note the driver's answer, or that none will come (None). A channel calls this once."""
        self.result = result
        self._act(ANSWER)

    def widen(self) -> bool:
        """Return whether the outputs, or the tensors between two steps, had too little room, and the next frame has enough."""
        result, layout, arguments = self.result, self.layout, self.executor.arguments
        assert result is not None
        if self._planned is not None and self._planned.again:
            self._room = layout
            return True
        if not arguments.may_retry(layout, result, self.placement.outputs if self.placement is not None else ()):
            return False
        self._room = arguments.widen(tuple(shape for _, _, shape, _ in layout.inputs), result.output_shapes)
        return True

    def outputs(self, serving: Serving) -> Outputs:
        """Return the outputs of an execution that has been answered well. Counts it.

        Raises:
            ExecutionError: the driver's answer contradicts the request.
        """
        executor, layout, frame, result, call = self.executor, self.layout, self.lent, self.result, self.call
        assert result is not None
        executor.counts.add(COMPUTED, 1)
        shapes = result.output_shapes
        if shapes:
            self.layout = executor.arguments.fit(layout, shapes)
            if self.layout is not layout:
                executor.frames.outgrown(frame.pool)
        arrays = layout.outputs_in(frame, shapes, call.outputs)
        if frame.pool.crowded:
            arrays = {name: array.copy() for name, array in arrays.items()}
        outputs = Outputs(arrays, serving.stage, result.timing if call.options.measure_timing else None)
        if self.placement is not None and self.placement.held:
            outputs.update(self.placement.arrays(serving.model, result))
        return outputs


def between_bytes(serving: Serving | None, layout: FrameLayout) -> int:
    """Return the room in a frame for the tensors between the steps of a plan. Only a plan has such tensors."""
    prepared = None if serving is None else serving.prepared
    return 0 if prepared is None or isinstance(prepared, RemotePreparedModel) else prepared.between_bytes(layout.shapes)
