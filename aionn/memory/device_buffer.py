"""One buffer that lives in a driver: its memory, its state, and the copies in and out. Pure logic, no I/O.

A `DeviceBuffer` is memory that executions of prepared models use in place. Only copies of the whole buffer move its bytes
in and out. `domain` has the rules for its roles and dimensions. `device_buffers` holds the buffers of one request.

Refusals: `CallerError` is INVALID_ARGUMENT. `ExecutionError` carries its status (GENERAL_FAILURE). HAL 1.3: IBuffer.

Invariants
    A buffer has any number of readers or one writer, never both. A second writer is refused. Neither side ever waits.
    A successful `copy_from` or execution sets `is_initialized`, and a failed one clears it. A request or copy that was
    refused because another holds the buffer changes nothing.
    Current dimensions are the initial ones with every open axis filled by the last success, never by the one before it.
    An output that comes out in another shape than its model declares opens the initial dimensions. The extents that desc
    or an input role give stay known (`bound_dimensions`).
    An initialized buffer has memory of exactly the bytes of its current dimensions.
    Arrays over its bytes are kept only of its present memory, or of the memory that an execution is writing (`_shown`).
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from math import prod
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from aionn.errors import CallerError, ExecutionError
from aionn.hal.types import ErrorStatus, OperandType
from aionn.memory.domain import Dimensions, Role, combine_for_buffer, full_shape, given


def _as_bytes(buffer: Any) -> NDArray[np.uint8]:
    try:
        return np.frombuffer(buffer, np.uint8)
    except (ValueError, BufferError, TypeError) as error:
        raise CallerError(f"a {type(buffer).__name__} cannot be copied as bytes: {error}; give a C-contiguous buffer") from None


class KeepsUse(Protocol):
    """A request that may keep memory of a buffer between its uses."""

    def forget_use(self) -> None:
        """Drop that memory, because the buffer has been freed or has other memory now."""
        ...


class DeviceBuffer:
    """Memory in the driver. `DeviceBuffers.allocate` makes it and `DeviceBuffers.release` frees it.

    It may be used from any thread. One lock guards the states of all buffers of a registry, but never their bytes.

    Attributes:
        token: names it in requests; positive.
        type: element type, the same in all roles.
        roles: the uses it was allocated for.
        initial_dimensions: what desc and roles say together. An open axis may differ from execution to execution.
        bound_dimensions: what desc and input roles say together. What an output's declaration adds may prove wrong.
        memory: its present bytes. None before the first success of a buffer with open dimensions.
        check: asked before each reservation, in any thread, by how many bytes the buffer grows. What it raises is the answer.
    """

    def __init__(
        self,
        token: int,
        type: OperandType,  # noqa: A002  (Operand's own word)
        roles: frozenset[Role],
        initial_dimensions: Dimensions,
        bound_dimensions: Dimensions,
        reserve: Callable[[int], Any],
        lock: threading.RLock,
    ) -> None:
        self.token, self.type, self.roles = token, type, roles
        self.initial_dimensions, self.bound_dimensions = initial_dimensions, bound_dimensions
        self._reserve, self._lock = reserve, lock
        self.check: Callable[[int], None] | None = None
        self._dimensions = initial_dimensions
        self.memory: NDArray[np.uint8] | None = None
        self._shown: tuple[NDArray[np.uint8], tuple[int, ...], NDArray[Any], NDArray[Any]] | None = None
        self._initialized = False
        self._readers, self._written = 0, False
        self._kept_by: weakref.WeakSet[KeepsUse] = weakref.WeakSet()
        if (shape := full_shape(initial_dimensions)) is not None:
            self.memory = self.room(shape)

    @property
    def is_initialized(self) -> bool:
        """Return whether it holds the result of a successful copy or execution."""
        return self._initialized

    @property
    def dimensions(self) -> Dimensions:
        """Return the current extents: those of the last success, or the initial ones, in which 0 is open."""
        return self._dimensions

    @property
    def size_bytes(self) -> int | None:
        """Return the bytes at the current dimensions, or None while they are open."""
        shape = full_shape(self._dimensions)
        return None if shape is None else _size_of(shape, self.type)

    def copy_from(self, source: Any, dimensions: tuple[int, ...] = ()) -> None:
        """Fill the whole buffer. Block while it copies, without the GIL.

        Args:
            source: bytes-like, C-contiguous, exactly as long as the buffer at these dimensions.
            dimensions: extents to give it, all known; () if the initial ones are all known.

        Raises:
            CallerError: sizes or dimensions do not fit. The buffer is uninitialized afterwards, in every case.
            ExecutionError: another execution or copy uses the buffer. Nothing has changed.
            MemoryAllocationError: the buffer would have to grow and cannot. It is uninitialized afterwards.
        """
        self.fill_from(lambda: source, dimensions)

    def fill_from(self, opened: Callable[[], Any], dimensions: tuple[int, ...]) -> None:
        """Fill the buffer as `copy_from` does, with the bytes that `opened` returns. An error of `opened` is a failed copy."""
        self.begin_writing("copied into")
        shape: tuple[int, ...] | None = None
        room: NDArray[np.uint8] | None = None
        try:
            asked = given(dimensions)
            if asked is not None and 0 in asked:
                raise CallerError(f"dimensions {dimensions}: a copy fills the whole buffer, so every extent must be known (not 0)")
            combined = full_shape(combine_for_buffer(self.token, asked, self.initial_dimensions))
            if combined is None:
                raise CallerError(f"the buffer's dimensions {self.initial_dimensions} are open; a copy into it must give them")
            data, needed = _as_bytes(opened()), _size_of(combined, self.type)
            if data.size != needed:
                raise CallerError(
                    f"{data.size} bytes were given for a buffer of {needed} bytes, {combined} of {self.type.value}; copy the whole buffer"
                )
            room = self.room(combined)
            np.copyto(room, data)
            shape = combined
        finally:
            self.end_writing(shape, room)

    def copy_to(self, target: Any) -> None:
        """Copy the whole buffer out, without a change of its state. Block while it copies, without the GIL.

        Args:
            target: writable bytes-like, C-contiguous, exactly as long as the buffer.

        Raises:
            CallerError: the sizes differ, or `target` is read-only.
            ExecutionError: the buffer is not initialized, or something is writing to it.
        """
        out = _as_bytes(target)
        if not out.flags.writeable:
            raise CallerError("the memory to copy into is mapped read-only; give writable memory")
        # As in the reference, a wrong size is reported first, even for a buffer without contents.
        size = self.size_bytes
        if size is not None and out.size != size:
            raise _wrong_room(out.size, size)
        memory, _ = self.begin_reading()
        try:
            if out.size != memory.size:  # its shape has changed since `size_bytes` was read
                raise _wrong_room(out.size, memory.size)
            np.copyto(out, memory)
        finally:
            self.end_reading()

    # --- for `device_buffers` --------------------------------------------------------------------------------------

    def room(self, shape: tuple[int, ...]) -> NDArray[np.uint8]:
        """Return memory of exactly that shape's size: the present memory, or new memory for `end_writing`."""
        needed = _size_of(shape, self.type)
        if self.memory is not None and self.memory.size == needed:
            return self.memory
        if self.check is not None:
            self.check(needed - (0 if self.memory is None else self.memory.size))
        return np.frombuffer(self._reserve(needed), np.uint8)

    def as_array(self, memory: NDArray[np.uint8], shape: tuple[int, ...], *, writeable: bool) -> NDArray[Any]:
        """Return the same bytes in the buffer's type and that shape.

        The same memory and shape give the same object as last time, by which engines recognise what they have bound already.
        """
        shown = self._shown
        if shown is None or shown[0] is not memory or shown[1] != shape:
            array = memory.view(self.type.dtype).reshape(shape)
            fixed = array.view()
            fixed.flags.writeable = False
            shown = self._shown = (memory, shape, array, fixed)
        return shown[2] if writeable else shown[3]

    def begin_reading(self) -> tuple[NDArray[np.uint8], tuple[int, ...]]:
        """Hold the buffer as one of its readers, until `end_reading`. Return its bytes and their shape."""
        with self._lock:
            if self._written:
                raise _busy(self.token, "read", "written to")
            self.check_initialized()
            memory, shape = self.memory, full_shape(self._dimensions)
            assert memory is not None
            assert shape is not None
            self._readers += 1
        return memory, shape

    def end_reading(self) -> None:
        with self._lock:
            self._readers -= 1

    def begin_writing(self, how: str) -> None:
        """Hold the buffer as its only user, until `end_writing` or `undo_writing`."""
        with self._lock:
            if self._written or self._readers:
                raise _busy(self.token, how, "written to" if self._written else "read")
            self._written = True

    def read_again(self, memory: NDArray[np.uint8], dimensions: Dimensions) -> bool:
        """Hold the buffer as `begin_reading` does if it still has that content. Return whether it does. Call with the lock held."""
        if self._written or not self._initialized or self.memory is not memory or self._dimensions != dimensions:
            return False
        self._readers += 1
        return True

    def write_again(self, memory: NDArray[np.uint8]) -> bool:
        """Hold the buffer as `begin_writing` does if it still has that memory. Return whether it does. Call with the lock held."""
        if self._written or self._readers or self.memory is not memory:
            return False
        self._written = True
        return True

    def end_writing(self, shape: tuple[int, ...] | None, memory: NDArray[np.uint8] | None) -> None:
        """Release the buffer after a success, which left that shape in that memory, or after a failure (`shape` None)."""
        with self._lock:
            self._written = False
            self._initialized = shape is not None
            self._dimensions = self.initial_dimensions if shape is None else shape
            if shape is not None:
                self.memory = memory
            if self._shown is not None and self._shown[0] is not self.memory:
                self._shown = None  # the arrays would keep memory that is no longer the buffer's
                self.forget_uses()

    def open_dimensions(self) -> None:
        """Use only desc and input roles from now on: an output came out in another shape than its model declares."""
        with self._lock:
            self.initial_dimensions = self.bound_dimensions
            self.forget_uses()

    def undo_writing(self) -> None:
        """Release the buffer before anything was written. Its state stays as it was."""
        with self._lock:
            self._written = False

    def keep_use(self, request: KeepsUse) -> None:
        """Remember a request that keeps a use of this buffer ready, with its memory."""
        self._kept_by.add(request)

    def forget_uses(self) -> None:
        """Make all requests drop what they keep of this buffer, because it is freed or has other memory."""
        for request in list(self._kept_by):
            request.forget_use()
        self._kept_by.clear()

    def check_initialized(self) -> None:
        """Raise an `ExecutionError` (GENERAL_FAILURE) if the buffer has no contents."""
        if not self._initialized:
            raise ExecutionError(
                f"device buffer {self.token} is not initialized: nothing has been copied or computed into it, or that failed; "
                "copy_from it first",
                status=ErrorStatus.GENERAL_FAILURE,
            )


def _size_of(shape: tuple[int, ...], element: OperandType) -> int:
    return prod(shape) * element.element_bytes


def _wrong_room(given_bytes: int, buffer_bytes: int) -> CallerError:
    return CallerError(f"memory of {given_bytes} bytes was given for the contents of a buffer of {buffer_bytes}; give exactly that many")


def _busy(token: int, how: str, other: str) -> ExecutionError:
    return ExecutionError(
        f"device buffer {token} cannot be {how} while another execution or copy has it {other}; "
        "await the one before the other, or use two buffers in turn",
        status=ErrorStatus.GENERAL_FAILURE,
    )
