"""The device buffers of one driver: by token, and held by the requests that use them. Pure logic, no I/O.

    DeviceBuffers.allocate  -> a buffer with a token
    DeviceBuffers.use       -> the buffers of one request: all is checked, then all are held, before anything runs
    DeviceBuffers.request   -> the same for a request that comes again and again: what cannot change is checked once
    BufferUse.succeed       -> the request's outputs are initialized; without it, they are not any more
    DeviceBuffers.free      -> the token is gone; the bytes live until the executions that hold them end

Refusals are as in `domain`: `CallerError` for INVALID_ARGUMENT, `ExecutionError` with its own status. HAL 1.3: the memory
rules of IPreparedModel::execute.

Invariants
    A token is never given out twice, and a prepared model is known by an id that is never used twice: a stale token
    or a closed model cannot alias a living one. (The reference reuses tokens, and keys roles by pointer.)
    The buffers of a request are held all or none, so two requests that want the same two cannot each get one.
    Every `BufferUse` ends in `close` or `withdraw`, and holds nothing after that.
    A `BufferRequest` names buffers by their tokens. The use it keeps ready (`_ready`) holds them and their memory, and is dropped
    when one of them is freed or gets other memory: a freed buffer's bytes go while requests still name it.

Called from the event loop and from execution threads.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from aionn.errors import CallerError, ExecutionError
from aionn.hal.types import BufferDesc, BufferRole, ErrorStatus, Operand, RequestArgument
from aionn.memory.domain import DeviceBuffer, Dimensions, ModelInfo, Role, combine_roles, full_shape, given

__all__ = ["BufferRequest", "BufferUse", "DeviceBuffers"]

_LAST_TOKEN = 2**32 - 1  # HAL 1.3: uint32_t


class BufferUse:
    """The device buffers of one request, held from its check to its end. Made by `DeviceBuffers.use`.

    A context manager: leaving it lets go of them, and outputs become uninitialized unless `succeed` was called.

    Attributes:
        inputs: by input index the buffer's contents: an array in its current shape, read-only.
        outputs: by output index where to write: an array in its shape; None while that is open, and then the
            array computed goes to `succeed`.
        closed: no output is open.
        arguments: what whoever executes the request has made of its arrays; it comes back with them.
    """

    __slots__ = ("_open", "_read", "_rooms", "_write", "arguments", "closed", "inputs", "outputs")

    def __init__(self) -> None:
        self.arguments: Any = None
        self.closed = True
        self.inputs: dict[int, NDArray[Any]] = {}
        self.outputs: dict[int, NDArray[Any] | None] = {}
        self._read: list[DeviceBuffer] = []
        self._write: dict[int, DeviceBuffer] = {}
        self._rooms: dict[int, NDArray[np.uint8]] = {}
        self._open: dict[int, Dimensions] = {}

    def succeed(self, computed: Mapping[int, NDArray[Any]] | None = None) -> dict[int, tuple[int, ...]]:
        """The execution succeeded: outputs are initialized, in the shapes they have now.

        Args:
            computed: by index arrays of those outputs that had no array to be written into, or came out in another shape than that had.

        Returns:
            The shape of each output by index.

        Raises:
            ExecutionError: GENERAL_FAILURE: a result is missing or does not fit its buffer's dimensions. (Never
                OUTPUT_INSUFFICIENT_SIZE: the caller cannot give a bigger buffer.) The outputs are uninitialized then.
            MemoryAllocationError: a result needs more memory than there is. Likewise.
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
        """The execution never began: let go of everything and leave all states as they were."""
        write, self._write = self._write, {}
        for buffer in write.values():
            buffer.withdraw_writing()
        self.close()

    def close(self) -> None:
        """Let go of the buffers. Outputs without a success are uninitialized from now on. Closing twice is harmless."""
        write, self._write = self._write, {}
        read, self._read = self._read, []
        self.inputs, self.outputs, self._rooms = {}, {}, {}
        for buffer in write.values():
            buffer.end_writing(None, None)
        for buffer in read:
            buffer.end_reading()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


class _ReadyUse(BufferUse):
    """The use of a request without open outputs, made once and taken again while nothing about its buffers has changed."""

    __slots__ = ("_held", "_lock", "_reads", "_shapes", "_writes")

    def __init__(
        self,
        use: BufferUse,
        lock: threading.RLock,
        reads: tuple[tuple[DeviceBuffer, NDArray[np.uint8] | None, Dimensions], ...],
        writes: tuple[tuple[DeviceBuffer, NDArray[np.uint8], tuple[int, ...]], ...],
    ) -> None:
        super().__init__()
        self.inputs, self.outputs = use.inputs, use.outputs
        self._lock = lock
        self._reads = reads
        self._writes = writes
        self._shapes = {index: array.shape for index, array in use.outputs.items() if array is not None}
        self._held = False

    def take(self) -> bool:
        """Hold the buffers, or change nothing: something is different, or in use. With the lock held."""
        if self._held:
            return False
        for buffer, memory, dimensions in self._reads:
            if buffer._written or not buffer._initialized or buffer._memory is not memory or buffer._dimensions != dimensions:
                return False
        for buffer, memory, _ in self._writes:
            if buffer._written or buffer._readers or buffer._memory is not memory:
                return False
        for buffer, _, _ in self._reads:
            buffer._readers += 1
        for buffer, _, _ in self._writes:
            buffer._written = True
        self._held = True
        return True

    def succeed(self, computed: Mapping[int, NDArray[Any]] | None = None) -> dict[int, tuple[int, ...]]:
        if computed:
            return self._succeed_anew(computed)
        self._let_go(lambda buffer, memory, shape: buffer.end_writing(shape, memory))
        return self._shapes

    def _succeed_anew(self, computed: Mapping[int, NDArray[Any]]) -> dict[int, tuple[int, ...]]:
        """As a use that is not kept: an output has not the shape that it had whenever this use was taken before."""
        self._held = False
        with BufferUse() as use:  # which lets go of the buffers
            use.outputs = self.outputs
            use._read = [buffer for buffer, _, _ in self._reads]
            for index, (buffer, memory, _) in zip(self._shapes, self._writes, strict=True):
                use._write[index], use._rooms[index] = buffer, memory
            return use.succeed(computed)

    def withdraw(self) -> None:
        self._let_go(lambda buffer, _memory, _shape: buffer.withdraw_writing())

    def close(self) -> None:
        self._let_go(lambda buffer, _memory, _shape: buffer.end_writing(None, None))

    def _let_go(self, end: Callable[[DeviceBuffer, NDArray[np.uint8], tuple[int, ...]], None]) -> None:
        if self._held:
            with self._lock:
                self._held = False
                for buffer, _, _ in self._reads:
                    buffer._readers -= 1
                for buffer, memory, shape in self._writes:
                    end(buffer, memory, shape)


class DeviceBuffers:
    """The buffers of one driver, or of one client of it, by token."""

    def __init__(self, reserve: Callable[[int], Any] = bytearray, tokens: itertools.count[int] | None = None) -> None:
        """
        Args:
            reserve: called with a size in bytes, gives writable, zeroed memory of that size (`memory.region.reserve`,
                `bytearray`); raises MemoryAllocationError where it cannot.
            tokens: where tokens come from; registries of one driver that share it never give out the same one.
        """
        self._reserve = reserve
        self._lock = threading.RLock()
        self._buffers: dict[int, DeviceBuffer] = {}
        self._tokens = itertools.count(1) if tokens is None else tokens

    def __len__(self) -> int:
        return len(self._buffers)

    def allocate(
        self,
        desc: BufferDesc,
        models: Sequence[ModelInfo | None],
        input_roles: Sequence[BufferRole],
        output_roles: Sequence[BufferRole],
    ) -> DeviceBuffer:
        """Make a buffer for those uses; arguments as `combine_roles`.

        Its memory is reserved now; where desc and roles leave extents open, at each use that fills them in.

        Raises:
            CallerError: a rule of IDevice::allocate is broken; the message says which.
            ExecutionError: RESOURCE_EXHAUSTED_PERSISTENT: no token is left.
            MemoryAllocationError: the memory cannot be had now.
        """
        roles, element, dimensions, bound = combine_roles(desc, models, input_roles, output_roles)
        token = next(self._tokens)
        if token > _LAST_TOKEN:
            raise ExecutionError("all 2^32 buffer tokens of this driver have been used", status=ErrorStatus.RESOURCE_EXHAUSTED_PERSISTENT)
        buffer = DeviceBuffer(token, element, roles, dimensions, bound, self._reserve, self._lock)
        with self._lock:
            self._buffers[token] = buffer
        return buffer

    def get(self, token: int) -> DeviceBuffer:
        """The living buffer of that name.

        Raises:
            CallerError: there is none: never was, or it was freed.
        """
        buffer = self._buffers.get(token)
        if buffer is None:
            raise CallerError(f"token {token} names no device buffer of this driver; it was never given out, or its buffer was freed")
        return buffer

    def free(self, token: int) -> None:
        """Forget a buffer. Executions that hold it keep its bytes until they end; an unknown token is no error."""
        with self._lock:
            buffer = self._buffers.pop(token, None)
            if buffer is not None:
                buffer.forget_uses()

    def clear(self) -> None:
        """Forget all: their client is gone."""
        with self._lock:
            for token in list(self._buffers):
                self.free(token)

    def use(
        self, model_id: int, inputs: Sequence[RequestArgument], outputs: Sequence[RequestArgument], tokens: Sequence[int | None]
    ) -> BufferUse:
        """Check every use of a device buffer in a request that `check_request` has passed, then hold them all, or none.

        The order is the reference's: tokens, then inputs (role, initialized, dimensions), then outputs (used once,
        role, dimensions). Buffers that another request holds are refused last. Call it when the request's turn has come,
        not when it arrives: from here on its outputs belong to it.

        Args:
            model_id: whose execution it is.
            inputs, outputs: the request's arguments; those in ordinary pools and omitted ones are passed over.
            tokens: one per pool of the request; None for a pool that is ordinary memory.

        Raises:
            CallerError: INVALID_ARGUMENT.
            ExecutionError: GENERAL_FAILURE: an input is not initialized, or a buffer is in use by another.
            MemoryAllocationError: an output whose extents this request fills in cannot be reserved.
        """
        return self.request(model_id, inputs, outputs, tokens).use()

    def request(
        self, model_id: int, inputs: Sequence[RequestArgument], outputs: Sequence[RequestArgument], tokens: Sequence[int | None]
    ) -> BufferRequest:
        """A request whose `use` may be called for each of its executions. Arguments as `use`; nothing is checked yet."""
        return BufferRequest(self, model_id, inputs, outputs, tokens)


class BufferRequest:
    """The device buffers of one request that may be executed again and again. Made by `DeviceBuffers.request`.

    Roles and double uses belong to the tokens, which are never given out twice: they are checked at the first use. Whether a buffer
    has been freed, is initialized, has other dimensions by now or is held by another is asked at each.
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
        # What the last check has found: (index, token, dimensions that were right), (index, token, dimensions, their full shape).
        self._reads: tuple[tuple[int, int, Dimensions], ...] | None = None
        self._writes: tuple[tuple[int, int, Dimensions, tuple[int, ...] | None], ...] = ()
        self._initial: tuple[tuple[int, Dimensions], ...] = ()
        self._ready: _ReadyUse | None = None

    def use(self) -> BufferUse:
        """Hold all its buffers; see `DeviceBuffers.use`.

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
                    buffer = living[token]
                    memory, shape = buffer.begin_reading()
                    use._read.append(buffer)
                    use.inputs[index] = buffer.as_array(memory, shape, writeable=False)
                for index, token, _, _ in self._writes:
                    buffer = living[token]
                    buffer.begin_writing("written to")
                    use._write[index] = buffer
            for index, _, dimensions, filled in self._writes:  # outside the lock: reserving memory takes its time
                if filled is None:
                    use.outputs[index], use._open[index], use.closed = None, dimensions, False
                else:
                    buffer = use._write[index]
                    room = use._rooms[index] = buffer.room(filled)
                    use.outputs[index] = buffer.as_array(room, filled, writeable=True)
            self._keep_ready(use, reads)
        except BaseException:
            use.withdraw()
            raise
        return use

    def _keep_ready(self, use: BufferUse, reads: tuple[tuple[int, int, Dimensions], ...]) -> None:
        """Make the next use of a buffer's present memory cheap."""
        with self._buffers._lock:
            writes = tuple((buffer, use._rooms.get(index), index) for index, buffer in use._write.items())
            living = self._buffers._buffers
            if not use.closed or any(room is None or room is not buffer._memory for buffer, room, _ in writes):
                return
            if any(token not in living for _, token in self._tokens):
                return  # freed meanwhile
            reading = tuple((buffer, buffer._memory, dimensions) for buffer, (_, _, dimensions) in zip(use._read, reads, strict=True))
            writing = tuple(
                (buffer, room, filled)
                for (buffer, room, _), (_, _, _, filled) in zip(writes, self._writes, strict=True)
                if room is not None and filled is not None
            )
            self._ready = _ReadyUse(use, self._buffers._lock, reading, writing)
            for _, token in self._tokens:
                living[token].keep_use(self)

    def forget_use(self) -> None:
        """A buffer has been freed, or has other memory: let go of all."""
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
        """Ask everything, in the order of `DeviceBuffers.use`."""
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
            buffer.combined(given(argument.dimensions), buffer.dimensions)
            found.append((index, buffer))
    return found


def _writings(
    model_id: int, outputs: Sequence[RequestArgument], buffers: Mapping[int, DeviceBuffer], used: set[int]
) -> list[tuple[int, DeviceBuffer, Dimensions]]:
    found = []
    for index, argument in enumerate(outputs):
        # An omitted output says pool 0, which may be a token: it is not a use of it.
        buffer = None if argument.has_no_value else buffers.get(argument.location.pool_index)
        if buffer is not None:
            if buffer.token in used:
                raise CallerError(f"output {index}: device buffer {buffer.token} is also an input or another output of this request")
            used.add(buffer.token)
            _check_permitted(buffer, Role(model_id, "output", index))
            found.append((index, buffer, buffer.combined(given(argument.dimensions), buffer.initial_dimensions)))
    return found


def _check_permitted(buffer: DeviceBuffer, role: Role) -> None:
    if role not in buffer.roles:
        raise CallerError(
            f"device buffer {buffer.token} was not allocated to be {role.direction} {role.index} of this prepared model; "
            "name that role when allocating it"
        )


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
