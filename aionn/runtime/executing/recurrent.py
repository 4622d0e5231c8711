"""The usual step of a stream that keeps its state in the driver: the same arguments each time, all in arrays or device memories.

There are two ways to run such a step. The long way is an `Execution`: `placement` takes whatever an app passes, and works out anew where
it lies. The short way is here. The steps of a recurrent model differ only in the bytes, and in which of two buffers is read. So this
module checks only these, and uses again what the step before has made.

    RecurrentSteps.of       after a step on the long way: what the next step will look like; None if it has no short way
    RecurrentSteps.begin    whether this is such a step: its memories are in use and its frame is leased then
    Step                  what is sent, and what is given back when it is over

Invariants
    `begin` refuses nothing and changes nothing where it returns None. An `Execution` then says what is wrong, or computes.
    It asks of each device memory, at each step, all that `place` asks. The memory is not closed and is of this prepared model. It has
    a role that it was allocated for, and the shape that the frame is laid out for. No execution in flight advances it.
    A request has the same bytes as on the long way, so that the driver knows it again.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aionn.burst.packets import PoolReference
from aionn.errors import DeviceMemoryLostError, DriverDiedError
from aionn.hal.types import DataLocation, ErrorStatus, Request, RequestArgument, Result
from aionn.memory.pool import Frame, FramePool, FramesInFlightError
from aionn.runtime.executing.arguments import Arguments
from aionn.runtime.executing.device_buffers import lost_with
from aionn.runtime.executing.device_memory import DeviceMemory, state_of
from aionn.runtime.executing.device_state import DeviceState
from aionn.runtime.executing.frame_layout import FrameLayout
from aionn.runtime.executing.link import Link, remember


class RecurrentSteps:
    """What the steps of one stream have in common.

    Attributes:
        copied_bytes: of all its arrays together.
    """

    __slots__ = ("_arrays", "_inputs", "_layout", "_outputs", "_outputs_key", "_pool", "_reads", "_writes", "copied_bytes")

    def __init__(
        self,
        layout: FrameLayout,
        pool: FramePool,
        arrays: list[tuple[str, np.dtype[Any], tuple[int, ...]]],
        reads: list[int],
        writes: list[int],
    ) -> None:
        self._layout = layout
        self._pool = pool
        self._arrays = arrays
        self._inputs = len(layout.inputs)
        self._reads = [(index, layout.inputs[index][0], layout.inputs[index][2]) for index in reads]
        self._writes = [(index, layout.outputs[index][0]) for index in writes]
        self._outputs = [
            (name, dtype, shape, offset)
            for index, (name, dtype, shape, offset, _) in enumerate(layout.outputs)
            if index not in writes and shape is not None
        ]
        self._outputs_key = object()
        self.copied_bytes = sum(dtype.itemsize * int(np.prod(shape)) for _, dtype, shape in arrays)

    @classmethod
    def of(cls, layout: FrameLayout, pool: FramePool, inputs: Mapping[str, Any], outputs: Mapping[str, Any]) -> RecurrentSteps | None:
        """Return the steps that look like this execution, which was right. Returns None if there is no short way for them."""
        if not layout.known or any(type(memory) is not DeviceMemory for memory in outputs.values()):
            return None
        arrays, reads = [], []
        for index, (name, dtype, shape, _) in enumerate(layout.inputs):
            value = inputs.get(name)
            if type(value) is np.ndarray:
                arrays.append((name, dtype, shape))
            elif type(value) is DeviceMemory:
                reads.append(index)
            else:
                return None
        return cls(layout, pool, arrays, reads, [index for index, output in enumerate(layout.outputs) if output[0] in outputs])

    def begin(self, link: Link, inputs: dict[str, Any], outputs: Mapping[str, Any]) -> Step | None:
        """Begin a step with these arguments. Returns None if it needs an `Execution`. The caller ends the frame's lease (`Step.frame`).

        Raises:
            CallerError, MemoryAllocationError: as `FramePool.lease`.
        """
        prepared = link.prepared
        if len(inputs) != self._inputs or type(outputs) is not dict or len(outputs) != len(self._writes):
            return None
        for name, dtype, shape in self._arrays:
            array = inputs.get(name)
            if type(array) is not np.ndarray or array.shape != shape or array.dtype != dtype:
                return None
        used: dict[DeviceState, bool] = {}
        written: list[DeviceState] = []
        tokens = []
        for _, name, shape in self._reads:
            memory = inputs.get(name)
            if type(memory) is not DeviceMemory:
                return None
            state = state_of(memory)
            if not state.stands_for(name, state.buffers.inputs_of(prepared)) or state.shape != shape:
                return None
            used[state] = False
            tokens.append(state.buffers.front.token)
        for _, name in self._writes:
            memory = outputs.get(name)
            if type(memory) is not DeviceMemory:
                return None
            state = state_of(memory)
            if not state.stands_for(name, state.buffers.outputs_of(prepared)) or state in written:
                return None
            buffer = state.buffers.front
            if state in used:
                if state.buffers.back is None or state.uses.filling:
                    return None
                used[state] = True
                buffer = state.buffers.back
            else:
                used[state] = False
            written.append(state)
            tokens.append(buffer.token)
        try:
            frame = self._pool.lease()
        except FramesInFlightError:
            return None
        # Nothing has been awaited since the first question was asked.
        for state, advances in used.items():
            state.begin(advance=advances)
        return Step(self, link, frame, used, written, tuple(tokens))

    def body(self, frame: Frame, tokens: tuple[int, ...], measure_timing: bool) -> bytes:
        """Return the encoded request. Each frame remembers those that it has been used for."""
        key = (self, measure_timing, tokens)
        body: bytes | None = frame.bindings.get(key)
        if body is None:
            request = self._layout.request(frame.offset)
            numbers = {token: number for number, token in enumerate(dict.fromkeys(tokens), 1)}
            inputs, outputs = list(request.inputs), list(request.outputs)
            places = [(inputs, index) for index, _, _ in self._reads] + [(outputs, index) for index, _ in self._writes]
            for (arguments, index), token in zip(places, tokens, strict=True):
                arguments[index] = RequestArgument(DataLocation(numbers[token], 0, 0), ())
            references = tuple(PoolReference(-1, token) for token in numbers)
            body = remember(frame, key, Request(tuple(inputs), tuple(outputs)), references, measure_timing)
        return body

    def fill(self, frame: Frame, inputs: Mapping[str, Any]) -> None:
        """Copy the arrays into the frame."""
        places = self._layout.inputs_in(frame)
        for name, _, _ in self._arrays:
            places[name][...] = inputs[name]

    def outputs_in(self, frame: Frame, result: Result) -> Mapping[str, NDArray[Any]]:
        """Return the outputs that lie in the frame, by name.

        Raises:
            ExecutionError: the driver's answer contradicts this request.
        """
        if result.output_shapes:
            return self._layout.outputs_in(frame, result.output_shapes, [name for _, name in self._writes])
        return frame.arrays.get(self._outputs_key) or frame.cut(self._outputs_key, self._outputs)

    def widened(self, arguments: Arguments, result: Result) -> bool:
        """Return whether the outputs in the frame had too little room. The next frame of these shapes has more then."""
        if not arguments.may_retry(self._layout, result, [index for index, _ in self._writes]):
            return False
        arguments.widen(tuple(shape for _, _, shape, _ in self._layout.inputs), result.output_shapes)
        return True

    def note_shapes(self, written: list[DeviceState], result: Result) -> None:
        """Note which shapes an execution has given to the memories that it has written."""
        if len(result.output_shapes) == len(self._layout.outputs):  # or `outputs_in` refuses it
            for (index, _), state in zip(self._writes, written, strict=True):
                state.written(result.output_shapes[index].dimensions)


class Step:
    """One execution. From `begin` on its memories are in use, until it is called: by the driver's answer, its end, or `body`.

    Attributes:
        link: where to send it. frame: leased for it.
    """

    __slots__ = ("_tokens", "_used", "_written", "frame", "link", "steps")

    def __init__(
        self,
        steps: RecurrentSteps,
        link: Link,
        frame: Frame,
        used: dict[DeviceState, bool],
        written: list[DeviceState],
        tokens: tuple[int, ...],
    ) -> None:
        """`used`: each memory once, and whether its two buffers change places after a success."""
        self.steps = steps
        self.link = link
        self._used = used
        self._written = written
        self._tokens = tokens
        self.frame = frame

    def __call__(self, result: Result | None) -> None:
        """Give back what the request held: the driver has answered, or never will (None)."""
        self.frame.settled(result)
        succeeded = result is not None and result.status is ErrorStatus.NONE
        if succeeded and result is not None and result.output_shapes:
            self.steps.note_shapes(self._written, result)
        for state, advances in self._used.items():
            state.end(advanced=succeeded if advances else None)

    def body(self, inputs: Mapping[str, Any], measure_timing: bool) -> bytes:
        """Fill the frame and return what to send, once. From then on the step is called when it is over."""
        self.frame.pins += 1
        try:
            self.steps.fill(self.frame, inputs)
            return self.steps.body(self.frame, self._tokens, measure_timing)
        except BaseException:
            self(None)
            raise

    def leave(self, error: BaseException) -> None:
        """Note that the caller stopped waiting because of `error`. The next use of its memories waits for the driver's answer.

        Raises:
            DeviceMemoryLostError: the error is the driver's death, and theirs.
        """
        for state in self._used:
            state.uses.leave()
        if isinstance(error, DriverDiedError) and not isinstance(error, DeviceMemoryLostError):
            raise lost_with(error.device, error) from error
