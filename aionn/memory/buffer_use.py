"""The device buffers of one request, held from its check to its end. Pure logic, no I/O.

    BufferUse       holds buffers one by one, and releases all of them at once
    ReadyUse        a `BufferUse` that the same request takes again, while nothing about its buffers has changed

Invariants
    Every use ends in `close` or `withdraw`, and holds nothing after that.
    A `ReadyUse` keeps the memory of its buffers, also while it holds none. Its request drops it when that memory is out of use.

Called from the event loop and from execution threads.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aionn.errors import ExecutionError
from aionn.hal.types import ErrorStatus, Operand
from aionn.memory.device_buffer import DeviceBuffer
from aionn.memory.domain import Dimensions
from aionn.tasks import ClosedByWith

_Held = tuple[DeviceBuffer, NDArray[np.uint8], tuple[int, ...]]
"""A buffer, its memory, and the shape of what lies there or is written there."""


class BufferUse(ClosedByWith):
    """The device buffers of one request, held from its check to its end. `DeviceBuffers.use` makes it.

    A context manager. Its end releases the buffers, and outputs become uninitialized unless `succeed` was called.

    Attributes:
        inputs: by input index the buffer's contents: an array in its current shape, read-only.
        outputs: by output index where to write: an array in its shape. None while the shape is open: `succeed` takes
            the computed array then.
        closed: whether every output has a known shape.
        arguments: what the executor of the request has made of its arrays. A `ReadyUse` keeps it for the next execution.
    """

    __slots__ = ("_open", "_read", "_rooms", "_write", "arguments", "closed", "inputs", "outputs")

    def __init__(self) -> None:
        self.arguments: Any = None
        self.closed = True
        self.inputs: dict[int, NDArray[Any]] = {}
        self.outputs: dict[int, NDArray[Any] | None] = {}
        self._read: list[_Held] = []
        self._write: dict[int, DeviceBuffer] = {}
        self._rooms: dict[int, NDArray[np.uint8]] = {}
        self._open: dict[int, Dimensions] = {}

    def read(self, index: int, buffer: DeviceBuffer) -> None:
        """Hold `buffer` as input `index`.

        Raises:
            ExecutionError: the buffer is not initialized, or something is writing to it.
        """
        memory, shape = buffer.begin_reading()
        self._read.append((buffer, memory, shape))
        self.inputs[index] = buffer.as_array(memory, shape, writeable=False)

    def write(self, index: int, buffer: DeviceBuffer) -> None:
        """Hold `buffer` as output `index`.

        Raises:
            ExecutionError: another execution or copy uses the buffer.
        """
        buffer.begin_writing("written to")
        self._write[index] = buffer

    def reserve(self, index: int, dimensions: Dimensions, shape: tuple[int, ...] | None) -> None:
        """Find memory for a held output of that shape. `dimensions` says what is known while the shape is open (None).

        Raises:
            MemoryAllocationError: the memory cannot be had now.
        """
        if shape is None:
            self.outputs[index], self._open[index], self.closed = None, dimensions, False
        else:
            buffer = self._write[index]
            room = self._rooms[index] = buffer.room(shape)
            self.outputs[index] = buffer.as_array(room, shape, writeable=True)

    def again(self, lock: threading.RLock) -> ReadyUse | None:
        """Return a use of the same buffers that can be taken again. None: an output is open, or will get other memory.

        Call it with the buffers' lock held.
        """
        writes = []
        for index, buffer in self._write.items():
            place = self.outputs[index]
            if place is None or self._rooms[index] is not buffer.memory:
                return None
            writes.append((buffer, self._rooms[index], place.shape))
        return ReadyUse(self.inputs, self.outputs, lock, tuple(self._read), tuple(writes))

    def succeed(self, computed: Mapping[int, NDArray[Any]] | None = None) -> dict[int, tuple[int, ...]]:
        """End a successful execution: outputs are initialized, in the shapes they have now.

        Args:
            computed: by index the arrays of outputs that had no array to be written into, or came out in another shape.

        Returns:
            The shape of each output by index.

        Raises:
            ExecutionError: GENERAL_FAILURE, because a result is missing or does not fit its buffer's dimensions. (Never
                OUTPUT_INSUFFICIENT_SIZE: the caller cannot give a bigger buffer.) The outputs are uninitialized then.
            MemoryAllocationError: a result needs more memory than there is. The outputs are uninitialized then.
        """
        shapes: dict[int, tuple[int, ...]] = {}
        computed = computed or {}
        for index, buffer in self._write.items():
            place = self.outputs[index]
            if place is None or index in computed:
                declared = None if place is None else place.shape
                place = computed.get(index)
                if place is not None and declared is not None and place.shape != declared:
                    buffer.open_dimensions()
                    self._open[index] = buffer.initial_dimensions
                _check_result(index, buffer, self._open.get(index, declared), place)
                assert place is not None
                room = self._rooms[index] = buffer.room(place.shape)
                np.copyto(buffer.as_array(room, place.shape, writeable=True), place)
            shapes[index] = place.shape
        write, self._write = self._write, {}
        for index, buffer in write.items():
            buffer.end_writing(shapes[index], self._rooms[index])
        return shapes

    def withdraw(self) -> None:
        """Release the buffers of an execution that never began. All states stay as they were."""
        write, self._write = self._write, {}
        for buffer in write.values():
            buffer.withdraw_writing()
        self.close()

    def close(self) -> None:
        """Release the buffers. Outputs without a success are uninitialized from now on. A second call does nothing."""
        write, self._write = self._write, {}
        read, self._read = self._read, []
        self.inputs, self.outputs, self._rooms = {}, {}, {}
        for buffer in write.values():
            buffer.end_writing(None, None)
        for buffer, _, _ in read:
            buffer.end_reading()


class ReadyUse(BufferUse):
    """The use of a request without open outputs. It is made once, and taken again while nothing about its buffers has changed."""

    __slots__ = ("_held", "_lock", "_reads", "_shapes", "_writes")

    def __init__(
        self,
        inputs: dict[int, NDArray[Any]],
        outputs: dict[int, NDArray[Any] | None],
        lock: threading.RLock,
        reads: tuple[_Held, ...],
        writes: tuple[_Held, ...],
    ) -> None:
        super().__init__()
        self.inputs, self.outputs = inputs, outputs
        self._lock = lock
        self._reads = reads
        self._writes = writes
        self._shapes = {index: array.shape for index, array in outputs.items() if array is not None}
        self._held = False

    def take(self) -> bool:
        """Hold all buffers, or none if something has changed or is in use. Return whether they are held.

        Call it with the buffers' lock held.
        """
        if self._held:
            return False
        reading = writing = 0
        for buffer, memory, shape in self._reads:
            if not buffer.read_again(memory, shape):
                break
            reading += 1
        else:
            for buffer, memory, _ in self._writes:
                if not buffer.write_again(memory):
                    break
                writing += 1
            else:
                self._held = True
                return True
        for buffer, _, _ in self._reads[:reading]:
            buffer.end_reading()
        for buffer, _, _ in self._writes[:writing]:
            buffer.withdraw_writing()
        return False

    def succeed(self, computed: Mapping[int, NDArray[Any]] | None = None) -> dict[int, tuple[int, ...]]:
        if computed:
            return self._succeed_anew(computed)
        self._release(_succeeded)
        return self._shapes

    def _succeed_anew(self, computed: Mapping[int, NDArray[Any]]) -> dict[int, tuple[int, ...]]:
        """Succeed as a plain use: an output has another shape than it had whenever this use was taken before."""
        self._held = False
        with BufferUse() as use:  # its end releases the buffers
            use.outputs = self.outputs
            use._read = list(self._reads)
            for index, (buffer, memory, _) in zip(self._shapes, self._writes, strict=True):
                use._write[index], use._rooms[index] = buffer, memory
            return use.succeed(computed)

    def withdraw(self) -> None:
        self._release(_withdrawn)

    def close(self) -> None:
        self._release(_failed)

    def _release(self, end: Callable[[DeviceBuffer, NDArray[np.uint8], tuple[int, ...]], None]) -> None:
        if self._held:
            with self._lock:
                self._held = False
                for buffer, _, _ in self._reads:
                    buffer.end_reading()
                for buffer, memory, shape in self._writes:
                    end(buffer, memory, shape)


def _succeeded(buffer: DeviceBuffer, memory: NDArray[np.uint8], shape: tuple[int, ...]) -> None:
    buffer.end_writing(shape, memory)


def _withdrawn(buffer: DeviceBuffer, _memory: NDArray[np.uint8], _shape: tuple[int, ...]) -> None:
    buffer.withdraw_writing()


def _failed(buffer: DeviceBuffer, _memory: NDArray[np.uint8], _shape: tuple[int, ...]) -> None:
    buffer.end_writing(None, None)


def _check_result(index: int, buffer: DeviceBuffer, dimensions: Dimensions, result: NDArray[Any] | None) -> None:
    if result is None:
        wrong = "the execution gave no result for it"
    elif result.dtype != buffer.type.dtype:
        wrong = f"its result is {result.dtype}, the buffer holds {buffer.type.value}"
    elif not Operand(buffer.type, dimensions).accepts(result.shape):
        wrong = f"its result has the shape {result.shape}, buffer and request allow {dimensions}"
    elif result.size == 0:
        wrong = f"its result {result.shape} is empty, and a buffer holds at least one element"
    else:
        return
    raise ExecutionError(f"output {index}, device buffer {buffer.token}: {wrong}", status=ErrorStatus.GENERAL_FAILURE)
