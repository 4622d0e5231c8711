"""Arguments that do not lie in the frame: an app's own memory, and memory in the driver, placed into a request.

    ndarray         copied into the frame                               (nothing to do here)
    Memory          used in place: its pool, by slot or descriptor      as input or output
    HardwareBuffer  the same, where its format is the operand's tensor  as input or output
    DeviceMemory    by token; nothing crosses                           as input, output, or both at once

A `Placement` is made for one execution. It keeps the app's memory mapped (`held`) and device memories in use (`used`). `used` also says
for each device memory whether its two buffers change places after a success. Both end when `settle` is called: the driver has answered,
or it has ended. The steps of a recurrent stream are the usual case, and pay for each look here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from aionn.errors import CallerError, refuse_coroutine
from aionn.hal.model import PooledModel
from aionn.hal.types import DataLocation, ErrorStatus, Operand, Request, RequestArgument, Result
from aionn.memory.domain import full_shape
from aionn.memory.hardware_buffer import HardwareBuffer
from aionn.memory.memory import Memory
from aionn.memory.region import Access, Region
from aionn.remote.device import RemoteBuffer
from aionn.runtime.executing.arguments import FrameLayout, as_array, false_shapes

if TYPE_CHECKING:
    from aionn.runtime.executing.device_state import DeviceState
    from aionn.runtime.serving.planned_model import Prepared


class TensorInDriver:
    """An argument that lies in the driver: `DeviceMemory`, which an app allocates with an event loop.

    Attributes:
        inputs, outputs: names of the operands it may stand for.
    """

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    _state: DeviceState

    async def snapshot(self) -> NDArray[Any]:
        """Return a copy of its contents."""
        raise NotImplementedError


def state_of(memory: TensorInDriver) -> DeviceState:
    """Return the state behind a device memory, which an execution uses."""
    return memory._state


class Place(msgspec.Struct, frozen=True):
    """Where one argument lies: bytes of a region, or the whole of a driver's buffer.

    Attributes:
        pool, offset, length: the bytes; a driver's buffer is used as a whole (0, 0).
        shape: of the tensor; () leaves it to the buffer or, of an output, to the driver.
        view: the bytes of an app's memory that an output is written to. They stay mapped while this lives.
    """

    pool: Region | RemoteBuffer
    offset: int
    length: int
    shape: tuple[int, ...]
    view: memoryview | None = None


class Placement:
    """The placed arguments of one execution. Made by `place`; `settle` must be called once."""

    __slots__ = ("held", "inputs", "outputs", "used", "written")

    def __init__(self) -> None:
        self.inputs: dict[int, Place] = {}
        self.outputs: dict[int, Place] = {}
        self.held: list[Memory] = []
        self.used: dict[DeviceState, bool] = {}
        self.written: dict[int, DeviceState] = {}

    @property
    def pools(self) -> list[Region | RemoteBuffer]:
        """The pools beside the frame, each once, in the order in which `request` counts them (from 1)."""
        pools: dict[Region | RemoteBuffer, None] = {}
        for place in (*self.inputs.values(), *self.outputs.values()):
            pools[place.pool] = None
        return list(pools)

    def request(self, layout: FrameLayout, frame_offset: int) -> Request:
        """Return the request of a frame with the placed arguments in their own pools."""
        request = layout.request(frame_offset)
        numbers = {pool: number for number, pool in enumerate(self.pools, 1)}
        inputs = [self._argument(self.inputs.get(i), argument, numbers) for i, argument in enumerate(request.inputs)]
        outputs = [self._argument(self.outputs.get(i), argument, numbers) for i, argument in enumerate(request.outputs)]
        return Request(tuple(inputs), tuple(outputs))

    @staticmethod
    def _argument(place: Place | None, argument: RequestArgument, numbers: Mapping[Region | RemoteBuffer, int]) -> RequestArgument:
        if place is None:
            return argument
        return RequestArgument(DataLocation(numbers[place.pool], place.offset, place.length), place.shape)

    def key(self, slot_of: Callable[[Any], int]) -> tuple[Any, ...]:
        """Return what differs between two placements with different encoded requests. `slot_of`: the slot of an app's memory."""
        found: list[Any] = []
        for places in (self.inputs, self.outputs):
            for index, place in places.items():
                pool = place.pool
                if type(pool) is RemoteBuffer:
                    found.append((index, None, pool.token))
                else:
                    found.append((index, slot_of(pool), place.offset, place.length, place.shape))
            found.append(None)
        return tuple(found)

    def left(self) -> None:
        """Note that no caller awaits the answer. The next use of a device memory waits for it then."""
        for state in self.used:
            state.uses.leave()

    def settle(self, result: Result | None) -> None:
        """Give back what the request held: the driver has answered (with that result), or never will, or nothing was sent (None)."""
        succeeded = result is not None and result.status is ErrorStatus.NONE
        if succeeded and result is not None:
            for index, state in self.written.items():
                state.emptied = False
                if index < len(result.output_shapes):  # `outputs_in` rejects an answer with too few shapes
                    state.written(result.output_shapes[index].dimensions)
        held, self.held = self.held, []
        used, self.used = self.used, {}
        for state, advances in used.items():
            state.end(advanced=succeeded if advances else None)
        for part in held:
            part.close()

    def arrays(self, model: PooledModel, result: Result) -> list[tuple[str, NDArray[Any]]]:
        """Return the outputs that lie in an app's own memory, by name. `FrameLayout.outputs_in` has accepted the number of shapes.

        Raises:
            ExecutionError: the driver's answer contradicts this request.
        """
        answered, found = result.output_shapes, []
        for index, place in self.outputs.items():
            if place.view is not None:
                name, operand = list(model.outputs.items())[index]
                shape = answered[index].dimensions if answered else place.shape or full_shape(operand.dimensions)
                if shape is None:
                    raise false_shapes(f"none came for output {name!r}")
                if min(shape, default=0) < 0 or prod(shape) * operand.type.element_bytes > place.length:
                    raise false_shapes(f"output {name!r} of shape {shape} has room for {place.length} bytes")
                found.append((name, np.ndarray(shape, operand.type.dtype, buffer=place.view)))
        return found


def states_of(inputs: Mapping[str, Any], outputs: Mapping[str, Any]) -> dict[DeviceState, bool]:
    """Return the states of the device memories among the arguments, and whether an execution advances each: it reads and writes it."""
    states = {}
    for value in inputs.values():
        if isinstance(value, TensorInDriver):
            states[state_of(value)] = False
    if outputs:
        read = set(states)
        for value in outputs.values():
            if isinstance(value, TensorInDriver):
                state = state_of(value)
                states[state] = state in read
    return states


def place(
    model: PooledModel,
    believed: Mapping[str, Operand],
    prepared: Prepared,
    inputs: Mapping[str, Any],
    outputs: Mapping[str, Any],
    states: Mapping[DeviceState, bool],
) -> tuple[Placement, dict[str, tuple[int, ...]]]:
    """Place the arguments that are not arrays. Returns the placement, and the shapes of the placed inputs by name.

    Args:
        believed: see `Arguments.outputs`.
        states: as `states_of` says. All are ready (`DeviceState.is_ready`). What is checked here is true until the next await.

    Raises:
        CallerError: something cannot stand for that operand; nothing is held then.
    """
    placement = Placement()
    try:
        shapes = _place_inputs(placement, model, prepared, inputs)
        if outputs:
            _place_outputs(placement, model, believed, prepared, outputs, states)
        for state, advances in states.items():
            state.uses.begin(advance=advances)
            placement.used[state] = advances
    except BaseException:
        placement.settle(None)
        raise
    return placement, shapes


def check_outputs(known: Mapping[str, Operand], outputs: Any) -> None:
    """Raise unless the places for outputs are given by the names of outputs."""
    if type(outputs) is not dict and not isinstance(outputs, Mapping):
        raise CallerError(f"outputs: expected a dict of memories by name, got {type(outputs).__name__}")
    if not outputs.keys() <= known.keys():
        unknown = [name for name in outputs if name not in known]
        raise CallerError(f"outputs name {unknown}, which the model does not have; its outputs are {list(known)}")


def _place_inputs(placement: Placement, model: PooledModel, prepared: Prepared, inputs: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    for index, (name, operand) in enumerate(model.inputs.items()):
        value = inputs.get(name)
        if type(value) is np.ndarray:
            continue
        if isinstance(value, TensorInDriver):
            state = state_of(value)
            roles = state.buffers.inputs_of(prepared)
            if roles is None or name not in roles:
                raise _wrong_role(value, name, roles, "input")
            state.check_filled()
            placement.inputs[index] = Place(state.buffers.front, 0, 0, ())
            if state.shape is None:
                raise CallerError(f"input {name!r}: the device memory has not been filled, so its shape is not known; copy_from it first")
            shapes[name] = state.shape
        elif isinstance(value, Memory | HardwareBuffer):
            part, shape = _located(value, operand, "input", name)
            placement.held.append(part)
            placement.inputs[index] = Place(part.pool, part.offset_bytes, part.size_bytes, shape)
            shapes[name] = shape
    return shapes


def _place_outputs(
    placement: Placement,
    model: PooledModel,
    believed: Mapping[str, Operand],
    prepared: Prepared,
    outputs: Mapping[str, Any],
    states: Mapping[DeviceState, bool],
) -> None:
    for index, (name, operand) in enumerate(model.outputs.items()):
        if name not in outputs:
            continue
        value = outputs[name]
        if isinstance(value, TensorInDriver):
            state = state_of(value)
            roles = state.buffers.outputs_of(prepared)
            if roles is None or name not in roles:
                raise _wrong_role(value, name, roles, "output")
            if state in placement.written.values():
                raise CallerError(f"output {name!r}: this device memory stands for another output of the same execution")
            buffer = state.buffers.back if states[state] else state.buffers.front
            assert buffer is not None
            placement.outputs[index] = Place(buffer, 0, 0, ())
            placement.written[index] = state
        elif isinstance(value, Memory | HardwareBuffer):
            shape: tuple[int, ...] = ()
            disproved = believed[name].dimensions != operand.dimensions
            if isinstance(value, Memory) and (disproved or (operand.size_bytes is None and value.shape is None)):
                part = value[:]  # room for whatever comes out
            else:
                part, shape = _located(value, operand, "output", name)
            placement.held.append(part)
            pool = part.pool
            if pool.access is Access.READ:
                raise CallerError(f"output {name!r}: the memory is mapped for reading only; give memory that may be written")
            placement.outputs[index] = Place(pool, part.offset_bytes, part.size_bytes, shape, part.view())
        else:
            refuse_coroutine(value, f"output {name!r}")
            raise CallerError(f"output {name!r}: a driver cannot write into a {type(value).__name__}; give a Memory or a DeviceMemory")


def _located(value: Memory | HardwareBuffer, operand: Operand, what: str, name: str) -> tuple[Memory, tuple[int, ...]]:
    try:
        return value.locate(operand)
    except CallerError as error:
        raise CallerError(f"{what} {name!r}: {error}") from None


def _wrong_role(memory: TensorInDriver, name: str, roles: tuple[str, ...] | None, what: str) -> CallerError:
    """Return why a device memory cannot stand for an argument."""
    if name not in (memory.inputs if what == "input" else memory.outputs):
        return CallerError(f"{what} {name!r}: this device memory was allocated for inputs {memory.inputs} and outputs {memory.outputs}")
    if roles is None:
        return CallerError(f"{what} {name!r}: this device memory belongs to another compilation, or to an earlier driver of this one")
    return CallerError(f"{what} {name!r}: this device memory was allocated for that {what} of another compilation; name both in allocate")


def is_placed(value: Any) -> bool:
    """Return whether an argument is used where it is rather than copied."""
    return isinstance(value, Memory | HardwareBuffer | TensorInDriver)


def check_frame(layout: FrameLayout, placed_shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise unless memory that stands for an input has the shape that the app's frame was laid out for."""
    for name, _, shape, _ in layout.inputs:
        if placed_shapes.get(name, shape) != shape:
            raise CallerError(f"input {name!r}: memory of shape {placed_shapes[name]} in a frame for {shape}; say frame(shapes=...)")


async def contents_of(operands: Mapping[str, Operand], values: Mapping[str, Any]) -> dict[str, NDArray[Any]]:
    """Return copies of arguments, wherever they lie, with their present contents.

    Raises:
        ExecutionError: some memory has no contents to be read.
        AionnError: some memory cannot be read now.
    """
    copies = {}
    for name, operand in operands.items():
        value = values[name]
        if isinstance(value, TensorInDriver):
            copies[name] = await value.snapshot()
        elif isinstance(value, Memory | HardwareBuffer):
            part, shape = value.locate(operand)
            with part:
                copies[name] = part.array(operand.type.dtype, shape).copy()
        else:
            copies[name] = np.array(as_array(name, value))
    return copies
