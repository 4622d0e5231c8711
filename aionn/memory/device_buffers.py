"""The device buffers of one driver: by token, and held by the requests that use them. Pure logic, no I/O.

    DeviceBuffers.allocate  -> a buffer with a token
    DeviceBuffers.use       -> the buffers of one request: all are checked, then all are held, before anything runs
    DeviceBuffers.request   -> the same for a request that comes again and again: what cannot change is checked once
    BufferUse.succeed       -> the request's outputs are initialized; without it they become uninitialized
    DeviceBuffers.release   -> the token ends; the bytes live until the executions that hold them end

    BufferUse       holds the buffers of one request one by one, from its check to its end, and releases all of them at once
    ReadyUse        a `BufferUse` that the same request takes again, while nothing about its buffers has changed

`domain` says what the refusals mean: `CallerError` is INVALID_ARGUMENT, and `ExecutionError` carries its status. HAL 1.3:
the memory rules of IPreparedModel::execute.

Invariants
    A token is never given out twice, and a prepared model is known by an id that is never used twice. So a stale token
    or a closed model cannot mean a living one. The reference reuses tokens, and keys roles by pointer.
    The buffers of a request are held all or none, so two requests that want the same two cannot each get one.
    A `BufferRequest` names buffers by their tokens. The use it keeps ready (`_ready`) holds them and their memory. A buffer
    that is freed, or gets other memory, makes the request drop that use. So a freed buffer's bytes go while requests still
    name it.
    Every use ends in `close` or `undo`, and holds nothing after that.
    A `ReadyUse` keeps the memory of its buffers, also while it holds none. Its request drops it when that memory is out of use.

Called from the event loop and from execution threads.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aionn.errors import CallerError, ExecutionError
from aionn.hal.types import BufferDesc, BufferRole, ErrorStatus, Operand, RequestArgument
from aionn.loopless import ClosedByWith
from aionn.memory.device_buffer import DeviceBuffer
from aionn.memory.domain import Dimensions, ModelInfo, Role, combine_for_buffer, combine_roles, full_shape, given

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

    def undo(self) -> None:
        """Release the buffers of an execution that never began. All states stay as they were."""
        write, self._write = self._write, {}
        for buffer in write.values():
            buffer.undo_writing()
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
            buffer.undo_writing()
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

    def undo(self) -> None:
        self._release(_undone)

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


def _undone(buffer: DeviceBuffer, _memory: NDArray[np.uint8], _shape: tuple[int, ...]) -> None:
    buffer.undo_writing()


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


_LAST_TOKEN = 2**32 - 1  # HAL 1.3: uint32_t


class DeviceBuffers:
    """The buffers of one driver, or of one client of it, by token."""

    def __init__(self, reserve: Callable[[int], Any] = bytearray) -> None:
        """Make an empty registry.

        Args:
            reserve: called with a size in bytes, returns writable, zeroed memory of that size (`memory.region.reserve`,
                `bytearray`), or raises MemoryAllocationError.
        """
        self._reserve = reserve
        self._lock = threading.RLock()
        self._buffers: dict[int, DeviceBuffer] = {}
        self._tokens = itertools.count(1)

    def __len__(self) -> int:
        return len(self._buffers)

    def allocate(
        self,
        desc: BufferDesc,
        models: Sequence[ModelInfo | None],
        input_roles: Sequence[BufferRole],
        output_roles: Sequence[BufferRole],
    ) -> DeviceBuffer:
        """Make a buffer for those uses. The arguments are those of `combine_roles`.

        Its memory is reserved now. If desc and roles leave extents open, each use that fills them in reserves the memory.

        Raises:
            CallerError: a rule of IDevice::allocate is broken; the message says which.
            ExecutionError: no token is left (RESOURCE_EXHAUSTED_PERSISTENT).
            MemoryAllocationError: the memory cannot be had now.
        """
        roles, element, dimensions, bound = combine_roles(desc, models, input_roles, output_roles)
        token = next(self._tokens)
        if token > _LAST_TOKEN:
            raise ExecutionError(
                "this driver has used all of its 2^32 buffer tokens; restart the driver", status=ErrorStatus.RESOURCE_EXHAUSTED_PERSISTENT
            )
        buffer = DeviceBuffer(token, element, roles, dimensions, bound, self._reserve, self._lock)
        with self._lock:
            self._buffers[token] = buffer
        return buffer

    def get(self, token: int) -> DeviceBuffer:
        """Return the living buffer with that token.

        Raises:
            CallerError: the token was never given out, or its buffer was freed.
        """
        buffer = self._buffers.get(token)
        if buffer is None:
            raise CallerError(f"token {token} names no device buffer of this driver; it was never given out, or its buffer was freed")
        return buffer

    def release(self, token: int) -> None:
        """Forget a buffer, if the token is known. Executions that hold it keep its bytes until they end."""
        with self._lock:
            buffer = self._buffers.pop(token, None)
            if buffer is not None:
                buffer.forget_uses()

    def clear(self) -> None:
        """Forget all buffers, because their client is gone."""
        with self._lock:
            for token in list(self._buffers):
                self.release(token)

    def use(
        self, model_id: int, inputs: Sequence[RequestArgument], outputs: Sequence[RequestArgument], tokens: Sequence[int | None]
    ) -> BufferUse:
        """Check every use of a device buffer in a request that `check_request` has passed, then hold them all, or none.

        The order is the reference's: tokens, then inputs (role, initialized, dimensions), then outputs (used once,
        role, dimensions). Buffers that another request holds are refused last. Call it when the request's turn has come,
        not when it arrives, because its outputs belong to it from here on.

        Args:
            model_id: whose execution it is.
            inputs, outputs: the request's arguments. Omitted ones, and those in ordinary pools, are passed over.
            tokens: one per pool of the request; None for a pool of ordinary memory.

        Raises:
            CallerError: INVALID_ARGUMENT.
            ExecutionError: an input is not initialized, or another request uses a buffer (GENERAL_FAILURE).
            MemoryAllocationError: an output whose extents this request fills in cannot be reserved.
        """
        return self.request(model_id, inputs, outputs, tokens).use()

    def request(
        self, model_id: int, inputs: Sequence[RequestArgument], outputs: Sequence[RequestArgument], tokens: Sequence[int | None]
    ) -> BufferRequest:
        """Make a request whose `use` may be called for each of its executions. Arguments as `use`. Check nothing yet."""
        return BufferRequest(self, model_id, inputs, outputs, tokens)


class BufferRequest:
    """The device buffers of one request that may be executed again and again. `DeviceBuffers.request` makes it.

    The first use checks roles and double uses, which belong to the tokens and cannot change. Each use checks whether a buffer
    has been freed, is initialized, has other dimensions by now, or is held by another request.
    """

    def __init__(
        self,
        buffers: DeviceBuffers,
        model_id: int,
        inputs: Sequence[RequestArgument],
        outputs: Sequence[RequestArgument],
        tokens: Sequence[int | None],
    ) -> None:
        self._buffers = buffers
        self._model_id = model_id
        self._inputs = inputs
        self._outputs = outputs
        self._tokens = tuple((index, token) for index, token in enumerate(tokens) if token is not None)
        # What the last check has found: (index, token, dimensions that were right) of each input, and
        # (index, token, dimensions, their full shape) of each output.
        self._reads: tuple[tuple[int, int, Dimensions], ...] | None = None
        self._writes: tuple[tuple[int, int, Dimensions, tuple[int, ...] | None], ...] = ()
        self._initial: tuple[tuple[int, Dimensions], ...] = ()
        self._ready: ReadyUse | None = None

    def use(self) -> BufferUse:
        """Hold all its buffers, as `DeviceBuffers.use`.

        Raises:
            CallerError, ExecutionError, MemoryAllocationError: as `DeviceBuffers.use`, in the same order.
        """
        ready = self._ready
        if ready is not None:
            with self._buffers._lock:
                if self._ready is ready and ready.take():
                    return ready
        use = BufferUse()
        if not self._tokens:
            return use
        living = self._buffers._buffers
        try:
            with self._buffers._lock:
                reads = self._reads
                if reads is None or not self._still_right(reads):
                    reads = self._check()
                for index, token, _ in reads:
                    use.read(index, living[token])
                for index, token, _, _ in self._writes:
                    use.write(index, living[token])
            for index, _, dimensions, filled in self._writes:  # outside the lock, because it takes long to reserve memory
                use.reserve(index, dimensions, filled)
            self._keep_ready(use)
        except BaseException:
            use.undo()
            raise
        return use

    def _keep_ready(self, use: BufferUse) -> None:
        """Make the next use of the buffers' present memory cheap."""
        with self._buffers._lock:
            living = self._buffers._buffers
            if any(token not in living for _, token in self._tokens):
                return  # freed meanwhile
            self._ready = use.again(self._buffers._lock)
            if self._ready is not None:
                for _, token in self._tokens:
                    living[token].keep_use(self)

    def forget_use(self) -> None:
        """Drop what is kept, because a buffer has been freed or has other memory."""
        self._ready = None

    def _still_right(self, reads: tuple[tuple[int, int, Dimensions], ...]) -> bool:
        living = self._buffers._buffers
        for _, token in self._tokens:
            if token not in living:
                return False
        for token, initial in self._initial:
            if living[token].initial_dimensions != initial:
                return False
        for _, token, dimensions in reads:
            buffer = living[token]
            if not buffer.is_initialized or buffer.dimensions != dimensions:
                return False
        return True

    def _check(self) -> tuple[tuple[int, int, Dimensions], ...]:
        """Check everything, in the order of `DeviceBuffers.use`."""
        buffers = {index: self._buffers.get(token) for index, token in self._tokens}
        reading = _readings(self._model_id, self._inputs, buffers)
        writing = _writings(self._model_id, self._outputs, buffers, {buffer.token for _, buffer in reading})
        self._writes = tuple((index, buffer.token, dimensions, full_shape(dimensions)) for index, buffer, dimensions in writing)
        self._initial = tuple((buffer.token, buffer.initial_dimensions) for _, buffer, _ in writing)
        self._reads = reads = tuple((index, buffer.token, buffer.dimensions) for index, buffer in reading)
        return reads


def _readings(model_id: int, inputs: Sequence[RequestArgument], buffers: Mapping[int, DeviceBuffer]) -> list[tuple[int, DeviceBuffer]]:
    found = []
    for index, argument in enumerate(inputs):
        buffer = None if argument.has_no_value else buffers.get(argument.location.pool_index)
        if buffer is not None:
            _check_permitted(buffer, Role(model_id, "input", index))
            buffer.check_initialized()
            combine_for_buffer(buffer.token, given(argument.dimensions), buffer.dimensions)
            found.append((index, buffer))
    return found


def _writings(
    model_id: int, outputs: Sequence[RequestArgument], buffers: Mapping[int, DeviceBuffer], used: set[int]
) -> list[tuple[int, DeviceBuffer, Dimensions]]:
    found = []
    for index, argument in enumerate(outputs):
        # An omitted output names pool 0 as well, although it does not use that pool, which may be a token.
        buffer = None if argument.has_no_value else buffers.get(argument.location.pool_index)
        if buffer is not None:
            if buffer.token in used:
                raise CallerError(f"output {index}: device buffer {buffer.token} is also an input or another output of this request")
            used.add(buffer.token)
            _check_permitted(buffer, Role(model_id, "output", index))
            found.append((index, buffer, combine_for_buffer(buffer.token, given(argument.dimensions), buffer.initial_dimensions)))
    return found


def _check_permitted(buffer: DeviceBuffer, role: Role) -> None:
    if role not in buffer.roles:
        raise CallerError(
            f"device buffer {buffer.token} was not allocated to be {role.direction} {role.index} of this prepared model; "
            "name that role when allocating it"
        )
