"""`PlannedExecution`: one execution of a plan. It splits the request for the whole model into one request per step.

The request of a step names pieces of the same pools as the whole request, and of one more: the memory of the boundary tensors. So nothing
is copied on the way. A step's request is sent when the step before has answered.

Invariants
    At most one request of an execution is in flight.
    `settled` is called once, and boundary memory is given back then: no driver can touch the pools any more. That may be after the
    caller has left. An execution whose caller has left runs no further step.
    A step that had too little room for a boundary tensor has changed nothing but its outputs, so it may run again.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from aionn import trace
from aionn.hal.types import (
    NO_TIMING,
    UNKNOWN_TIME_US,
    DataLocation,
    ErrorStatus,
    IMemory,
    OutputShape,
    Request,
    RequestArgument,
    Result,
    Timing,
)
from aionn.memory.region import Region
from aionn.memory.requests import Extent, check_homes, check_request
from aionn.remote.device import RemoteBuffer, RemotePreparedModel
from aionn.runtime.serving.boundaries import BoundaryLayouts, BoundaryMemory
from aionn.runtime.serving.wiring import PlannedStep, Wiring

Pool = IMemory | RemoteBuffer
Settled = Callable[[Result | None], None]
Shape = tuple[int, ...]

_NO_VALUE = RequestArgument(DataLocation(0, 0, 0), (), has_no_value=True)


@dataclass(frozen=True, slots=True)
class StepFailure(Result):
    """The answer of a plan one of whose steps has failed.

    Attributes:
        step: its number.
    """

    step: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Planned:
    """What the executions of one plan have in common."""

    wiring: Wiring
    layouts: BoundaryLayouts
    memory: BoundaryMemory


class PlannedExecution:
    """One execution. Made for one `run`.

    Attributes:
        measure_timing, deadline_ns: as they were asked for.
        boundary: the memory of boundary tensors, while the execution runs.
    """

    def __init__(
        self,
        planned: Planned,
        request: Request,
        pools: Sequence[Pool],
        measure_timing: bool,
        deadline_ns: int | None,
        settled: Settled | None,
    ) -> None:
        self._planned = planned
        self._wiring = planned.wiring
        self._request = request
        self.measure_timing = measure_timing
        self.deadline_ns = deadline_ns
        self._settled = settled
        self._pools = list(pools)
        self._boundary_pool = len(pools)
        self._known, self._omitted = planned.wiring.known_shapes(request), planned.wiring.omitted(request)
        self._layout = planned.layouts.layout(self._known, self._omitted)
        self._wider: dict[str, tuple[int, int]] = {}  # pool and room of tensors that outgrew their place
        self._leased: list[Region] = []
        self._shapes: dict[str, Shape | None] = {}  # of the tensors made so far
        self._answered: set[str] = set()  # those whose shapes a driver has said
        self._timings: list[Timing] = []
        self._sent = self._in_flight = self._left = self._over = False  # a step was; one is; the caller has; `settled` was called
        self._last: tuple[int, Result | None] = (0, None)

    # --- running -------------------------------------------------------------------------------------------------------

    async def run(self, send: Callable[[PlannedExecution, int, Settled], Awaitable[Result]]) -> Result:
        """Run all steps. `send` sends the request of a step; it calls its last argument as `RemotePreparedModel.execute` says.

        Raises:
            AionnError: whatever `send` raises.
            MemoryAllocationError: there is no memory for the boundary tensors.
        """
        result: Result | None = None
        try:
            self._lease(self._layout.size_bytes)
            for number in range(len(self._wiring.steps)):
                result = await self._run_step(number, send)
                if result is not None:
                    return result
            result = self._whole()
            return result
        finally:
            if self._in_flight:
                self._left = True
            else:
                self.end(result if result is not None else self._outcome())

    async def _run_step(self, number: int, send: Callable[[PlannedExecution, int, Settled], Awaitable[Result]]) -> Result | None:
        """Run one step. Returns the answer of the whole execution if it ends here."""
        planned = self._wiring.steps[number]
        device = planned.prepared.device.name
        while True:
            if number and self.deadline_ns is not None and time.monotonic_ns() >= self.deadline_ns:
                return self._failure(number, ErrorStatus.MISSED_DEADLINE_TRANSIENT, "the deadline had passed before the step began")
            self._in_flight = self._sent = True
            with trace.span("plan.step", device=device, step=number):
                result = await send(self, number, lambda answer: self._step_settled(number, answer))
            if result.status is ErrorStatus.NONE:
                wrong = self._note(planned, result)
                return None if wrong is None else self._failure(number, ErrorStatus.GENERAL_FAILURE, wrong)
            if result.status is not ErrorStatus.OUTPUT_INSUFFICIENT_SIZE:
                return self._failure(number, result.status, result.message)
            if not self._widen(planned, result):
                return self._insufficient(number, result)

    def _step_settled(self, number: int, result: Result | None) -> None:
        """Note that no driver can touch the pools now: the step has been answered, or never will be."""
        self._in_flight = False
        self._last = number, result
        if self._left:
            self.end(self._outcome())

    def _outcome(self) -> Result | None:
        """Return what the last answer makes of the execution whose caller has left, or None if it has not come to its end."""
        number, result = self._last
        if result is None or number < len(self._wiring.steps) - 1:
            return None
        if result.status is ErrorStatus.NONE and self._note(self._wiring.steps[number], result) is None:
            return self._whole()
        return None

    def end(self, result: Result | None) -> None:
        """Give back what the execution held, once."""
        if self._over:
            return
        self._over = True
        leased, self._leased = self._leased, []
        number, last = self._last
        # A burst that is closed ends its requests, and the driver may still be busy with one. Its memory is not used again then.
        written = last is None and self._sent and self.prepared(number).device.connection.ended_by is None
        for region in leased:
            if written:
                region.close()
            else:
                self._planned.memory.give_back(region)
        if self._settled is not None:
            self._settled(result)

    def _lease(self, size_bytes: int) -> int:
        """Lease boundary memory. Returns its number among the pools."""
        region = self._planned.memory.lease(size_bytes)
        self._leased.append(region)
        self._pools.append(region)
        return len(self._pools) - 1

    # --- the requests of the steps -------------------------------------------------------------------------------------

    @property
    def boundary(self) -> Region:
        return self._leased[0]

    def prepared(self, number: int) -> RemotePreparedModel:
        return self._wiring.steps[number].prepared

    def key(self, number: int) -> tuple[Any, ...] | None:
        """Return what the request of a step depends on beside the whole request and `boundary`. None: do not remember it."""
        if self._wider:
            return None
        planned = self._wiring.steps[number].prepared
        return number, self._layout, tuple(self._shapes[name] for name in planned.inputs if name in self._shapes)

    def split(self, number: int) -> tuple[Request, list[Pool]]:
        """Return the request of a step, and its pools."""
        prepared = self._wiring.steps[number].prepared
        numbers: dict[int, int] = {}
        pools: list[Pool] = []

        def with_pool(argument: RequestArgument) -> RequestArgument:
            if argument.has_no_value:
                return argument
            place = argument.location
            pool = numbers.get(place.pool_index)
            if pool is None:
                pool = numbers[place.pool_index] = len(pools)
                pools.append(self._pools[place.pool_index])
            return RequestArgument(DataLocation(pool, place.offset, place.length), argument.dimensions)

        inputs = tuple(with_pool(self._input(name)) for name in prepared.inputs)
        outputs = tuple(with_pool(self._output(name)) for name in prepared.outputs)
        return Request(inputs, outputs), pools

    def _input(self, name: str) -> RequestArgument:
        if name not in self._shapes:
            return self._request.inputs[self._wiring.inputs[name]]
        made, shape = self._output(name), self._shapes[name]
        if shape is None:  # the whole of a device memory
            return RequestArgument(made.location, ())
        place, length = made.location, prod(shape) * self._wiring.made[name].element_bytes
        return RequestArgument(DataLocation(place.pool_index, place.offset, length), shape)

    def _output(self, name: str) -> RequestArgument:
        number = self._wiring.outputs.get(name)
        if number is not None and name not in self._omitted:
            return self._request.outputs[number]
        if name not in self._layout.places:
            return _NO_VALUE  # no step reads it
        wider = self._wider.get(name)
        if wider is not None:
            return RequestArgument(DataLocation(wider[0], 0, wider[1]), ())
        offset, length = self._layout.places[name]
        return RequestArgument(DataLocation(self._boundary_pool, offset, length), self._layout.shapes[name] or ())

    # --- the answers of the steps --------------------------------------------------------------------------------------

    def _note(self, planned: PlannedStep, result: Result) -> str | None:
        """Note what a step has made. Returns why the answer contradicts the request, or None."""
        outputs, answered = planned.prepared.outputs, result.output_shapes
        if answered and len(answered) != len(outputs):
            return f"the driver's answer contradicts the request: {len(answered)} shapes came for {len(outputs)} outputs"
        for index, name in enumerate(outputs):
            asked = self._output(name)
            if asked.has_no_value:
                continue
            shape = answered[index].dimensions if answered else self._asked_shape(name)
            if shape is None and not isinstance(self._pools[asked.location.pool_index], RemoteBuffer):
                return f"the driver's answer contradicts the request: no shape came for output {name!r}"
            if answered:
                self._answered.add(name)
                if name in self._wiring.made and not self._fits(name, asked, shape or ()):
                    return f"the driver's answer contradicts the request: output {name!r} has no room for the shape {shape}"
            self._shapes[name] = shape
        if self.measure_timing:
            self._timings.append(result.timing)
        return None

    def _asked_shape(self, name: str) -> Shape | None:
        number = self._wiring.outputs.get(name)
        if number is not None and name not in self._omitted:
            return self._known[len(self._wiring.inputs) + number]
        return self._layout.shapes[name] if name not in self._wider else None

    def _fits(self, name: str, asked: RequestArgument, shape: Shape) -> bool:
        if isinstance(self._pools[asked.location.pool_index], RemoteBuffer):
            return True
        return min(shape, default=0) >= 0 and prod(shape) * self._wiring.made[name].element_bytes <= asked.location.length

    def _widen(self, planned: PlannedStep, result: Result) -> bool:
        """Give boundary tensors more room. Returns False if that is not what the step lacked."""
        outputs, answered = planned.prepared.outputs, result.output_shapes
        short = {name: shape.dimensions for name, shape in zip(outputs, answered, strict=False) if not shape.is_sufficient}
        if len(answered) != len(outputs) or not short:
            return False
        for name, shape in short.items():
            if name not in self._layout.places or self._fits(name, self._output(name), shape):
                return False
        trace.count("plan.widened", device=planned.prepared.device.name, tensors=list(short))
        self._planned.layouts.learn(self._known, self._omitted, short)
        for name, shape in short.items():
            length = prod(shape) * self._wiring.made[name].element_bytes
            self._wider[name] = self._lease(length), length
        return True

    def _whole(self) -> Result:
        """Return the answer of the plan, all of whose steps have run."""
        seen = {name: shape for name in self._layout.places if name in self._answered and (shape := self._shapes[name]) is not None}
        if seen:
            self._planned.layouts.learn(self._known, self._omitted, seen)
        shapes = self._output_shapes({}) if self._answered else ()
        return Result(ErrorStatus.NONE, shapes, _sum(self._timings) if self.measure_timing else NO_TIMING)

    def _output_shapes(self, short: Mapping[str, Shape]) -> tuple[OutputShape, ...]:
        """Return the shapes of the model's outputs, as far as they are known. `short`: those that did not fit."""
        found = []
        for name, number in self._wiring.outputs.items():
            shape = short.get(name, self._shapes.get(name)) or self._known[len(self._wiring.inputs) + number]
            found.append(OutputShape(shape or (), name not in short))
        return tuple(found)

    def _insufficient(self, number: int, result: Result) -> Result:
        """Return the answer where the room that the app gave for an output was too small. Later steps have not run."""
        outputs, answered = self._wiring.steps[number].prepared.outputs, result.output_shapes
        short: dict[str, Shape] = {}
        made: dict[str, Shape] = {}
        for name, shape in zip(outputs, answered, strict=False):
            if name in self._wiring.outputs and name not in self._omitted:
                (made if shape.is_sufficient else short)[name] = shape.dimensions
        if not short or len(answered) != len(outputs):
            return self._failure(number, ErrorStatus.GENERAL_FAILURE, f"the driver's answer contradicts the request: {result.message}")
        self._shapes.update(made)
        failure = self._failure(number, result.status, result.message)
        return StepFailure(failure.status, self._output_shapes(short), message=failure.message, step=number)

    def _failure(self, number: int, status: ErrorStatus, message: str) -> StepFailure:
        steps = self._wiring.steps
        device = steps[number].prepared.device.name
        why = message or "the driver gave no reason"
        return StepFailure(status, message=f"step {number + 1} of {len(steps)}, on device {device!r}: {why}", step=number)

    # --- before it runs ------------------------------------------------------------------------------------------------

    def refusal(self) -> Result | None:
        """Return why the whole request is wrong, or None. A step sees only its own part of it."""
        wiring, request = self._wiring, self._request
        inputs, outputs = list(wiring.input_operands.items()), list(wiring.output_operands.items())
        wrong = check_request(inputs, outputs, request, [0 if isinstance(pool, RemoteBuffer) else pool.size_bytes for pool in self._pools])
        if wrong is None and len(self._pools) > 1:
            wrong = check_homes(inputs, outputs, request, [_home(pool) for pool in self._pools])
        return None if wrong is None else Result(ErrorStatus.INVALID_ARGUMENT, message=wrong)


def _home(pool: Pool) -> Extent | None:
    if not isinstance(pool, Region):
        return None
    begin = pool.description.offset_bytes
    return pool.inode(), begin, begin + pool.size_bytes


def _sum(timings: Sequence[Timing]) -> Timing:
    """Return the time of all steps together. It is unknown where that of one is."""
    device, driver = [timing.on_device_us for timing in timings], [timing.in_driver_us for timing in timings]
    return Timing(*(UNKNOWN_TIME_US if UNKNOWN_TIME_US in times else sum(times) for times in (device, driver)))
