"""`StepRequests`: the request for the whole model as one request per step, and what the answers say about shapes.

The request of a step names pieces of the same pools as the whole request, and of the memory of the boundary tensors. Nothing is copied.
A tensor has the same place where it is made and where it is read.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from math import prod
from typing import Any

from aionn.hal.types import DataLocation, ErrorStatus, IMemory, OutputShape, Request, RequestArgument, Result
from aionn.memory.region import Region
from aionn.memory.requests import Extent, check_homes, check_request
from aionn.remote.device import RemoteBuffer
from aionn.runtime.serving.boundaries import BoundaryLayouts
from aionn.runtime.serving.wiring import Wiring

Pool = IMemory | RemoteBuffer
Shape = tuple[int, ...]

_NO_VALUE = RequestArgument(DataLocation(0, 0, 0), (), has_no_value=True)
FALSE = "the driver's answer contradicts the request"


class StepRequests:
    """The requests of the steps of one execution.

    Attributes:
        size_bytes: of the memory that the boundary tensors need.
        answered: tensors whose shapes a driver has said.
    """

    def __init__(self, wiring: Wiring, layouts: BoundaryLayouts, request: Request, pools: Sequence[Pool]) -> None:
        self._wiring = wiring
        self._layouts = layouts
        self._request = request
        self._pools = list(pools)
        self._boundary_pool = len(pools)
        self._known, self._omitted = wiring.known_shapes(request), wiring.omitted(request)
        self._layout = layouts.layout(self._known, self._omitted)
        self._wider: dict[str, tuple[int, int]] = {}  # pool and room of tensors that outgrew their place
        self._shapes: dict[str, Shape | None] = {}  # of the tensors made so far
        self.size_bytes = self._layout.size_bytes
        self.answered: set[str] = set()

    def refusal(self) -> Result | None:
        """Return why the whole request is wrong, or None. A step sees only its own part of it."""
        wiring = self._wiring
        inputs, outputs = list(wiring.input_operands.items()), list(wiring.output_operands.items())
        sizes = [0 if isinstance(pool, RemoteBuffer) else pool.size_bytes for pool in self._pools]
        wrong = check_request(inputs, outputs, self._request, sizes)
        if wrong is None and len(self._pools) > 1:
            wrong = check_homes(inputs, outputs, self._request, [_home(pool) for pool in self._pools])
        return None if wrong is None else Result(ErrorStatus.INVALID_ARGUMENT, message=wrong)

    def expect(self) -> bool:
        """Take the shapes of all tensors for what is asked of the steps. Returns False if one is open until it has been computed."""
        for step in self._wiring.steps:
            for name in step.prepared.outputs:
                if name in self._wiring.inputs:
                    continue  # handed through: every step reads it where the app has put it
                if self._is_given(name) or name in self._layout.places:
                    shape = self._asked_shape(name)
                    if shape is None:
                        return False
                    self._shapes[name] = shape
        return True

    def surprises(self, number: int, result: Result) -> bool:
        """Return whether a step has made a tensor of another shape than `expect` took for it."""
        outputs = self._wiring.steps[number].prepared.outputs
        made = zip(outputs, result.output_shapes, strict=False)
        return any(self._shapes.get(name, shape.dimensions) != shape.dimensions for name, shape in made)

    def add_memory(self, region: Region) -> int:
        """Add memory for boundary tensors. The first piece has those of the layout. Returns its number among the pools."""
        self._pools.append(region)
        return len(self._pools) - 1

    # --- requests ------------------------------------------------------------------------------------------------------

    def key(self, number: int) -> tuple[Any, ...] | None:
        """Return what the request of a step depends on beside the whole request and the boundary memory. None: do not remember it."""
        if self._wider:
            return None
        inputs = self._wiring.steps[number].prepared.inputs
        return number, self._layout, tuple(self._shapes[name] for name in inputs if name in self._shapes)

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
        place, shape = self._output(name).location, self._shapes[name]
        if shape is None or isinstance(self._pools[place.pool_index], RemoteBuffer):
            return RequestArgument(place, ())  # the whole of a device memory
        length = prod(shape) * self._wiring.made[name].element_bytes
        return RequestArgument(DataLocation(place.pool_index, place.offset, length), shape)

    def _output(self, name: str) -> RequestArgument:
        if self._is_given(name):
            return self._request.outputs[self._wiring.outputs[name]]
        if name not in self._layout.places:
            return _NO_VALUE  # no step reads it
        wider = self._wider.get(name)
        if wider is not None:
            return RequestArgument(DataLocation(wider[0], 0, wider[1]), ())
        offset, length = self._layout.places[name]
        return RequestArgument(DataLocation(self._boundary_pool, offset, length), self._layout.shapes[name] or ())

    def _is_given(self, name: str) -> bool:
        """Return whether the app has given the memory of a tensor, as an output of the model."""
        return name in self._wiring.outputs and name not in self._omitted

    # --- answers -------------------------------------------------------------------------------------------------------

    def note(self, number: int, result: Result) -> str | None:
        """Note what a step has made. Returns why the answer contradicts the request, or None."""
        outputs, answered = self._wiring.steps[number].prepared.outputs, result.output_shapes
        if answered and len(answered) != len(outputs):
            return f"{FALSE}: {len(answered)} shapes came for {len(outputs)} outputs"
        for index, name in enumerate(outputs):
            asked = self._output(name)
            if asked.has_no_value:
                continue
            shape = answered[index].dimensions if answered else self._asked_shape(name)
            in_place = isinstance(self._pools[asked.location.pool_index], RemoteBuffer)
            if shape is None and not in_place:
                return f"{FALSE}: no shape came for output {name!r}"
            if answered:
                self.answered.add(name)
                if name in self._wiring.made and not in_place and not self._fits(name, shape or ()):
                    return f"{FALSE}: output {name!r} has no room for the shape {shape}"
            self._shapes[name] = shape
        return None

    def _asked_shape(self, name: str) -> Shape | None:
        if self._is_given(name):
            return self._known[len(self._wiring.inputs) + self._wiring.outputs[name]]
        return None if name in self._wider else self._layout.shapes[name]

    def _fits(self, name: str, shape: Shape) -> bool:
        room = self._output(name).location.length
        return min(shape, default=0) >= 0 and prod(shape) * self._wiring.made[name].element_bytes <= room

    def outgrown(self, number: int, result: Result) -> dict[str, int]:
        """Return the bytes that boundary tensors need, for which a step had too little room. Nothing if that is not what it lacked."""
        outputs, answered = self._wiring.steps[number].prepared.outputs, result.output_shapes
        if len(answered) != len(outputs):
            return {}
        short = {name: shape.dimensions for name, shape in zip(outputs, answered, strict=True) if not shape.is_sufficient}
        for name, shape in short.items():
            if name not in self._layout.places or min(shape, default=0) < 0 or self._fits(name, shape):
                return {}
        self._layouts.learn(self._known, self._omitted, short)
        return {name: prod(shape) * self._wiring.made[name].element_bytes for name, shape in short.items()}

    def widen(self, room: Mapping[str, tuple[int, int]]) -> None:
        """Let boundary tensors lie elsewhere from now on. `room`: the number of the pool and its bytes, by name."""
        self._wider.update(room)

    def learn(self) -> None:
        """Remember the shapes of boundary tensors for the next execution with the same inputs."""
        seen = {name: shape for name in self._layout.places if name in self.answered and (shape := self._shapes[name]) is not None}
        if seen:
            self._layouts.learn(self._known, self._omitted, seen)

    def output_shapes(self, short: Collection[str] = ()) -> tuple[OutputShape, ...]:
        """Return the shapes of the model's outputs, as far as they are known. `short`: those that did not fit."""
        first = len(self._wiring.inputs)
        found = []
        for name, number in self._wiring.outputs.items():
            shape = self._shapes.get(name)
            if shape is None:
                shape = self._known[first + number] or ()
            found.append(OutputShape(shape, name not in short))
        return tuple(found)

    def insufficient(self, number: int, result: Result) -> tuple[OutputShape, ...]:
        """Return the shapes of the model's outputs where a step had too little room for one. Nothing if the answer is wrong."""
        outputs, answered = self._wiring.steps[number].prepared.outputs, result.output_shapes
        if len(answered) != len(outputs):
            return ()
        made = {name: shape for name, shape in zip(outputs, answered, strict=True) if self._is_given(name)}
        short = [name for name, shape in made.items() if not shape.is_sufficient]
        if not short:
            return ()
        self._shapes.update((name, shape.dimensions) for name, shape in made.items())
        return self.output_shapes(short)


def _home(pool: Pool) -> Extent | None:
    if not isinstance(pool, Region):
        return None
    begin = pool.description.offset_bytes
    return pool.inode(), begin, begin + pool.size_bytes
