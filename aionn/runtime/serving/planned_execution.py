"""`PlannedExecution`: one execution of a plan, as one request per step, and what the answers say about shapes.

The request of a step names pieces of the same pools as the request for the whole model. Nothing is copied. A tensor that lies between two
steps has its place behind the arguments, in the frame of the whole request. So it is lent and given back with the frame.

    InTurn                   a step's request is sent when the step before has answered
    executing.fenced_plan    a request is sent as soon as the shapes of its inputs are known, and waits for the step before in its driver

A step that has too little room for a tensor between two steps ends the execution, and the layouts learn what the tensor needs. The whole
plan runs again then (`again`), over a wider frame, because a step changes nothing but its outputs.

Invariants
    At most one request of an `InTurn` is in flight.
    `settled` is called once, when no driver can touch the pools any more. That may be after the caller has left. An execution whose caller
    has left runs no further step.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Sequence
from functools import partial
from math import prod
from typing import Any

from aionn import trace
from aionn.hal.options import CallOptions
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
from aionn.loopless import seconds_until
from aionn.memory.region import Region
from aionn.memory.requests import Extent, check_homes, check_request
from aionn.remote.device import RemoteBuffer, RemotePreparedModel
from aionn.runtime.serving.boundaries import BoundaryLayouts, KnownShapes, Wiring

Pool = IMemory | RemoteBuffer
Shape = tuple[int, ...]
Settled = Callable[[Result | None], None]
Send = Callable[[int, Settled], Awaitable[Result]]
"""Sends the request of the step of that number, and waits for its answer. It calls the other argument as `RemotePreparedModel.execute`."""

_NO_VALUE = RequestArgument(DataLocation(0, 0, 0), (), has_no_value=True)
_FALSE = "the driver's answer contradicts the request"


class StepFailure(Result, frozen=True):
    """The answer of a plan one of whose steps has failed.

    Attributes:
        step: its number.
    """

    step: int = 0


class PlannedExecution:
    """One execution, whose arguments are placed.

    Attributes:
        options: as they were asked for.
        steps: so many.
        again: whether the plan is to run again, in a frame with the room that it needs now.
    """

    def __init__(
        self,
        wiring: Wiring,
        layouts: BoundaryLayouts,
        known: KnownShapes,
        between: int,
        request: Request,
        pools: Sequence[Pool],
        options: CallOptions,
    ) -> None:
        """
        Args:
            known: shapes of the model's inputs and outputs.
            between: where the tensors between the steps begin, in bytes of the first pool.
            request, pools: for the whole model.
        """
        self.options = options
        self.steps = len(wiring.steps)
        self._wiring = wiring
        self._layouts = layouts
        self._known = known
        self._between = between
        self._layout = layouts.layout(known)
        self._request = request
        self._pools = pools
        self._shapes: dict[str, Shape | None] = {}  # of the tensors made so far
        self._answered: set[str] = set()  # tensors whose shapes a driver has said
        self._timings: list[Timing] = []
        self.again = False

    async def run(self, send: Send, settled: Settled, *, check: bool) -> Result:
        """Run one step after the other, unless the request is wrong. `check`: whether it may be wrong.

        Raises:
            AionnError: whatever `send` raises.
        """
        return await InTurn(self, settled).run(send, self.refusal() if check else None)

    async def execute(self, number: int, settled: Settled) -> Result:
        """Send a step as a control call."""
        try:
            request, pools = self.request(number)
        except BaseException:
            settled(None)
            raise
        return await self.prepared(number).execute(request, pools, self.options.measure_timing, self.options.deadline_ns, settled)

    # --- requests ------------------------------------------------------------------------------------------------------

    def refusal(self) -> Result | None:
        """Return why the whole request is wrong, or None. A step sees only its own part of it."""
        wiring = self._wiring
        inputs, outputs = list(wiring.input_operands.items()), list(wiring.output_operands.items())
        sizes = [0 if isinstance(pool, RemoteBuffer) else pool.size_bytes for pool in self._pools]
        wrong = check_request(inputs, outputs, self._request, sizes)
        if wrong is None and len(self._pools) > 1:
            wrong = check_homes(inputs, outputs, self._request, [_home(pool) for pool in self._pools])
        return None if wrong is None else Result(ErrorStatus.INVALID_ARGUMENT, message=wrong)

    def key(self, number: int) -> tuple[Any, ...]:
        """Return what the request of a step depends on beside the whole request."""
        return number, self._layout, tuple([self._shapes.get(name) for name in self.prepared(number).inputs])

    def request(self, number: int) -> tuple[Request, list[Pool]]:
        """Return the request of a step, and its pools."""
        prepared = self.prepared(number)
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
        place, shape = self._output(name).location, self._shapes[name]
        if shape is None or isinstance(self._pools[place.pool_index], RemoteBuffer):
            return RequestArgument(place, ())  # the whole of a device memory
        length = prod(shape) * self._wiring.made[name].element_bytes
        return RequestArgument(DataLocation(place.pool_index, place.offset, length), shape)

    def _output(self, name: str) -> RequestArgument:
        number = self._wiring.outputs.get(name)
        if number is not None:
            return self._request.outputs[number]
        place = self._layout.places.get(name)
        if place is None:
            return _NO_VALUE  # no step reads it
        return RequestArgument(DataLocation(0, self._between + place[0], place[1]), self._layout.shapes[name] or ())

    def _asked_shape(self, name: str) -> Shape | None:
        number = self._wiring.outputs.get(name)
        if number is None:
            return self._layout.shapes[name]
        own = self._wiring.output_operands[name].dimensions
        return self._request.outputs[number].dimensions or (None if own is None or 0 in own else own)

    # --- requests that are sent before the steps before them have answered -----------------------------------------------

    def is_ready(self, number: int) -> bool:
        """Return whether the shapes of all inputs of a step are known."""
        return all(name in self._shapes or name in self._wiring.inputs for name in self.prepared(number).inputs)

    def expect(self, number: int) -> None:
        """Take the shapes that a step is asked for as those of its outputs, where they are known."""
        for name in self.prepared(number).outputs:
            if (name in self._wiring.made or name in self._wiring.outputs) and (shape := self._asked_shape(name)) is not None:
                self._shapes[name] = shape

    def surprises(self, number: int, result: Result) -> bool:
        """Return whether a step has made a tensor of another shape than `expect` took for it."""
        made = zip(self.prepared(number).outputs, result.output_shapes, strict=False)
        return any(self._shapes.get(name, shape.dimensions) != shape.dimensions for name, shape in made)

    # --- answers -------------------------------------------------------------------------------------------------------

    def take(self, number: int, result: Result) -> Result | None:
        """Take the answer of a step. Returns the answer of the whole execution if it ends here."""
        if result.status is ErrorStatus.OUTPUT_INSUFFICIENT_SIZE:
            return self._short(number, result)
        if result.status is not ErrorStatus.NONE:
            return self.failure(number, result.status, result.message)
        wrong = self._note(number, result)
        if wrong is not None:
            return self.failure(number, ErrorStatus.GENERAL_FAILURE, f"{_FALSE}: {wrong}")
        if self.options.measure_timing:
            self._timings.append(result.timing)
        if number < self.steps - 1:
            return None
        seen = {name: shape for name in self._layout.places if name in self._answered and (shape := self._shapes[name]) is not None}
        if seen:
            self._layouts.learn(self._known, seen)  # the next execution with the same inputs knows its shapes
        shapes = self._output_shapes() if self._answered else ()
        return Result(ErrorStatus.NONE, shapes, sum_of(self._timings) if self.options.measure_timing else NO_TIMING)

    def _note(self, number: int, result: Result) -> str | None:
        """Note what a step has made. Returns why the answer contradicts the request, or None."""
        outputs, answered = self.prepared(number).outputs, result.output_shapes
        if answered and len(answered) != len(outputs):
            return f"{len(answered)} shapes came for {len(outputs)} outputs"
        for index, name in enumerate(outputs):
            asked = self._output(name)
            if asked.has_no_value:
                continue
            shape = answered[index].dimensions if answered else self._asked_shape(name)
            in_place = isinstance(self._pools[asked.location.pool_index], RemoteBuffer)
            if shape is None and not in_place:
                return f"no shape came for output {name!r}"
            if answered:
                self._answered.add(name)
                if name in self._wiring.made and not in_place and not self._fits(name, shape or ()):
                    return f"output {name!r} has no room for the shape {shape}"
            self._shapes[name] = shape
        return None

    def run_again(self) -> Result:
        """Let the plan run again. Returns the answer of this execution."""
        self.again = True
        return Result(ErrorStatus.OUTPUT_INSUFFICIENT_SIZE)

    def _fits(self, name: str, shape: Shape) -> bool:
        return min(shape, default=0) >= 0 and prod(shape) * self._wiring.made[name].element_bytes <= self._output(name).location.length

    def _short(self, number: int, result: Result) -> Result:
        """Return the answer where a step had too little room. It has the shapes of the model's outputs if the app gave the room."""
        outputs, answered = self.prepared(number).outputs, result.output_shapes
        made = dict(zip(outputs, answered, strict=True)) if len(answered) == len(outputs) else {}
        short = {name: shape.dimensions for name, shape in made.items() if not shape.is_sufficient}
        places = self._layout.places
        if short and all(name in places and min(shape, default=0) >= 0 and not self._fits(name, shape) for name, shape in short.items()):
            self._layouts.learn(self._known, short)
            trace.count("plan.widened", device=self.prepared(number).device.name, tensors=list(short))
            return self.run_again()
        given = {name: shape.dimensions for name, shape in made.items() if name in self._wiring.outputs}
        if not short.keys() & given.keys():
            return self.failure(number, ErrorStatus.GENERAL_FAILURE, f"{_FALSE}: {result.message}")
        self._shapes.update(given)
        return self.failure(number, result.status, result.message, self._output_shapes(short.keys()))

    def _output_shapes(self, short: Collection[str] = ()) -> tuple[OutputShape, ...]:
        """Return the shapes of the model's outputs, as far as they are known. `short`: those that did not fit."""
        known = {name: shape for name, shape in self._shapes.items() if shape is not None}
        names = self._wiring.outputs
        return tuple([OutputShape(known.get(name, self._asked_shape(name) or ()), name not in short) for name in names])

    def prepared(self, number: int) -> RemotePreparedModel:
        """Return what runs a step."""
        return self._wiring.steps[number].prepared

    def failure(self, number: int, status: ErrorStatus, message: str, shapes: tuple[OutputShape, ...] = ()) -> StepFailure:
        """Return the answer of a plan whose step of that number has failed. It names the step and its device."""
        where = f"step {number + 1} of {self.steps}, on device {self.prepared(number).device.name!r}"
        return StepFailure(status, shapes, message=f"{where}: {message or 'the driver gave no reason'}", step=number)


class InTurn:
    """The steps of one execution, one after the other."""

    __slots__ = ("_in_flight", "_last", "_left", "_planned", "_settled")

    def __init__(self, planned: PlannedExecution, settled: Settled) -> None:
        self._planned = planned
        self._settled = settled
        self._in_flight = self._left = False  # a step is; the caller has
        self._last: tuple[int, Result | None] = (0, None)

    async def run(self, send: Send, result: Result | None) -> Result:
        """Run all steps, unless there is a result already."""
        number = 0
        try:
            while result is None:
                result = await self._step(number, send)
                number += 1
            return result
        finally:
            if self._in_flight:
                self._left = True
            else:
                self._end(result)

    async def _step(self, number: int, send: Send) -> Result | None:
        """Run one step. Returns the answer of the whole execution if it ends here."""
        planned = self._planned
        if number and seconds_until(planned.options.deadline_ns) == 0.0:
            return planned.failure(number, ErrorStatus.MISSED_DEADLINE_TRANSIENT, "the deadline had passed before the step began")
        self._in_flight = True
        with trace.span("plan.step", device=planned.prepared(number).device.name, step=number):
            result = await send(number, partial(self._step_settled, number))
        return planned.take(number, result)

    def _step_settled(self, number: int, result: Result | None) -> None:
        """Note that no driver can touch the pools now: the step has been answered, or never will be."""
        self._in_flight = False
        self._last = number, result
        if self._left:
            self._end(None)

    def _end(self, result: Result | None) -> None:
        """Settle the whole request. Where its caller has left, the last answer may be the answer to all of it."""
        number, last = self._last
        self._settled(self._planned.take(number, last) if result is None and last is not None else result)


def _home(pool: Pool) -> Extent | None:
    if not isinstance(pool, Region):
        return None
    begin = pool.description.offset_bytes
    return pool.inode(), begin, begin + pool.size_bytes


def sum_of(timings: Sequence[Timing]) -> Timing:
    """Return the time of all steps together. It is unknown where that of one is."""
    device, driver = [timing.on_device_us for timing in timings], [timing.in_driver_us for timing in timings]
    return Timing(*(UNKNOWN_TIME_US if UNKNOWN_TIME_US in times else sum(times) for times in (device, driver)))
