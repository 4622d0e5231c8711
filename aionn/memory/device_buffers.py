"""The device buffers of one driver: by token, and held by the requests that use them. Pure logic, no I/O.

    DeviceBuffers.allocate  -> a buffer with a token
    DeviceBuffers.use       -> the buffers of one request: all are checked, then all are held, before anything runs
    DeviceBuffers.request   -> the same for a request that comes again and again: what cannot change is checked once
    BufferUse.succeed       -> the request's outputs are initialized; without it they become uninitialized
    DeviceBuffers.free      -> the token ends; the bytes live until the executions that hold them end

`domain` says what the refusals mean: `CallerError` is INVALID_ARGUMENT, and `ExecutionError` carries its status. HAL 1.3:
the memory rules of IPreparedModel::execute.

Invariants
    A token is never given out twice, and a prepared model is known by an id that is never used twice. So a stale token
    or a closed model cannot mean a living one. The reference reuses tokens, and keys roles by pointer.
    The buffers of a request are held all or none, so two requests that want the same two cannot each get one.
    A `BufferRequest` names buffers by their tokens. The use it keeps ready (`_ready`) holds them and their memory. A buffer
    that is freed, or gets other memory, makes the request drop that use. So a freed buffer's bytes go while requests still
    name it.

Called from the event loop and from execution threads.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from aionn.errors import CallerError, ExecutionError
from aionn.hal.types import BufferDesc, BufferRole, ErrorStatus, RequestArgument
from aionn.memory.buffer_use import BufferUse, ReadyUse
from aionn.memory.device_buffer import DeviceBuffer
from aionn.memory.domain import Dimensions, ModelInfo, Role, combine_for_buffer, combine_roles, full_shape, given

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

    def free(self, token: int) -> None:
        """Forget a buffer, if the token is known. Executions that hold it keep its bytes until they end."""
        with self._lock:
            buffer = self._buffers.pop(token, None)
            if buffer is not None:
                buffer.forget_uses()

    def clear(self) -> None:
        """Forget all buffers, because their client is gone."""
        with self._lock:
            for token in list(self._buffers):
                self.free(token)

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
            use.withdraw()
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
