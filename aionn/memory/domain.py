"""Memory domains: roles, dimensions and state of one buffer that lives in a driver. Pure logic, no I/O.

A `DeviceBuffer` is memory that executions of prepared models use in place; only copies of the whole move its bytes in
and out. It may be used only in the roles it was allocated for: (prepared model, input or output, index). `device_buffers`
has the registry of them and their use in requests.

Refusals: `CallerError` is INVALID_ARGUMENT; `ExecutionError` carries its own status (GENERAL_FAILURE). HAL 1.3:
IDevice::allocate, IBuffer.

Invariants
    A buffer has any number of readers or one writer, never both: a second writer is refused, nobody waits.
    is_initialized is set by a successful copy_from or execution and cleared by a failed one; a request or copy that was
    refused because another holds the buffer changes nothing.
    Current dimensions are the initial ones with every open axis filled by the last success, never by the one before it.
    An output that comes out in another shape than its model declares opens the initial dimensions, as far as neither desc nor an
    input role says them (`bound_dimensions`).
    An initialized buffer has memory of exactly the bytes of its current dimensions.
    Arrays over its bytes are kept only of its present memory, or of that which an execution is writing (`_shown`).
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from aionn.errors import CallerError, ExecutionError
from aionn.hal.types import BufferDesc, BufferRole, ErrorStatus, Operand, OperandType

__all__ = ["DeviceBuffer", "Dimensions", "ModelInfo", "Role", "combine_dimensions", "combine_roles", "full_shape", "given"]

Dimensions = tuple[int, ...] | None
"""Extents, 0 for an open one; None while even the rank is open; () is a scalar."""

Direction = Literal["input", "output"]


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """A prepared model, as far as buffers are concerned.

    Attributes:
        id: names the prepared model in this process; never given to another one.
        inputs, outputs: its operands, in order.
    """

    id: int
    inputs: tuple[Operand, ...]
    outputs: tuple[Operand, ...]


@dataclass(frozen=True, slots=True)
class Role:
    """A permitted use of a buffer: input or output `index` of the prepared model with that id."""

    model_id: int
    direction: Direction
    index: int


def combine_dimensions(first: Dimensions, second: Dimensions) -> Dimensions:
    """What two descriptions of one shape say together; a known extent fills an open one.

    Raises:
        CallerError: they contradict each other, in rank or in an extent that both know.
    """
    if first is None or second is None:
        return second if first is None else first
    if len(first) != len(second):
        raise CallerError(f"dimensions {first} and {second} have different ranks")
    if any(a and b and a != b for a, b in zip(first, second, strict=True)):
        raise CallerError(f"dimensions {first} and {second} contradict each other; an extent of 0 is open")
    return tuple(a or b for a, b in zip(first, second, strict=True))


def given(dimensions: tuple[int, ...]) -> Dimensions:
    """Dimensions of a request, a copy or a desc, where () says nothing."""
    if any(extent < 0 for extent in dimensions):
        raise CallerError(f"dimensions {dimensions}: an extent is negative; an open one is written 0")
    return dimensions or None


def full_shape(dimensions: Dimensions) -> tuple[int, ...] | None:
    """The shape, or None while an extent is open."""
    return None if dimensions is None or 0 in dimensions else dimensions


def combine_roles(
    desc: BufferDesc, models: Sequence[ModelInfo | None], input_roles: Sequence[BufferRole], output_roles: Sequence[BufferRole]
) -> tuple[frozenset[Role], OperandType, Dimensions, Dimensions]:
    """What a buffer for those uses must be: its roles, element type, initial dimensions, and what desc and input roles say of those.
    Rules of IDevice::allocate.

    Args:
        desc: extents to combine with those of the roles; () says nothing.
        models: the prepared models the roles point into; None for one that is not this driver's.
        input_roles, output_roles: at least one together.

    Raises:
        CallerError: a rule is broken; the message says which.
    """
    if not models:
        raise CallerError("a device buffer without prepared models: it has roles in at least one")
    known = [model for model in models if model is not None]
    if len(known) != len(models):
        raise CallerError("a device buffer for a prepared model that is not this driver's, or has been closed")
    roles: set[Role] = set()
    first: OperandType | None = None
    dimensions = bound = given(desc.dimensions)
    uses: Iterable[tuple[Direction, BufferRole]] = [*(("input", r) for r in input_roles), *(("output", r) for r in output_roles)]
    for direction, asked in uses:
        role, operand = _checked_role(direction, asked, known)
        if role in roles:
            raise CallerError(f"{direction} {asked.io_index} of one prepared model is given as a role twice")
        roles.add(role)
        first = first or operand.type
        if operand.type is not first:
            raise CallerError(f"{direction} {asked.io_index} holds {operand.type.value}, another role {first.value}; all hold the same")
        try:
            dimensions = combine_dimensions(dimensions, operand.dimensions)
        except CallerError as error:
            raise CallerError(f"{direction} {asked.io_index} of model {asked.model_index}: {error}") from None
        if direction == "input":
            bound = dimensions
    if first is None:
        raise CallerError("a device buffer without roles: say which inputs and outputs it is for")
    return frozenset(roles), first, dimensions, bound


def _checked_role(direction: Direction, asked: BufferRole, models: Sequence[ModelInfo]) -> tuple[Role, Operand]:
    if not 0 <= asked.model_index < len(models):
        raise CallerError(f"{direction} role in model {asked.model_index} of {len(models)}; there is no such model")
    model = models[asked.model_index]
    operands = model.inputs if direction == "input" else model.outputs
    if not 0 <= asked.io_index < len(operands):
        raise CallerError(
            f"{direction} {asked.io_index} of model {asked.model_index}, which has {len(operands)}; there is no such {direction}"
        )
    if not 0.0 < asked.frequency <= 1.0:  # not a NaN either
        raise CallerError(f"{direction} {asked.io_index}: frequency {asked.frequency}; it is more than 0 and at most 1")
    return Role(model.id, direction, asked.io_index), operands[asked.io_index]


def _as_bytes(buffer: Any) -> NDArray[np.uint8]:
    try:
        return np.frombuffer(buffer, np.uint8)
    except (ValueError, BufferError, TypeError) as error:
        raise CallerError(f"a {type(buffer).__name__} cannot be copied as bytes: {error}; give a C-contiguous buffer") from None


class KeepsUse(Protocol):
    """A request that may keep memory of a buffer between its uses."""

    def forget_use(self) -> None: ...


class DeviceBuffer:
    """Memory in the driver. Made by `DeviceBuffers.allocate`; freed by `DeviceBuffers.free`.

    Thread-safe; one lock guards the states of all buffers of a registry, never their bytes.

    Attributes:
        token: names it in requests; positive.
        type: element type, the same in all roles.
        roles: the uses it was allocated for.
        initial_dimensions: what desc and roles say together; an open axis may differ from execution to execution.
        bound_dimensions: what desc and input roles say together; what an output's declaration adds may prove wrong.
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
        self._dimensions = initial_dimensions
        self._memory: NDArray[np.uint8] | None = None
        self._shown: tuple[NDArray[np.uint8], tuple[int, ...], NDArray[Any], NDArray[Any]] | None = None
        self._initialized = False
        self._readers, self._written = 0, False
        self._kept_by: weakref.WeakSet[KeepsUse] = weakref.WeakSet()
        if (shape := full_shape(initial_dimensions)) is not None:
            self._memory = self.room(shape)

    @property
    def is_initialized(self) -> bool:
        """Whether it holds the result of a successful copy or execution."""
        return self._initialized

    @property
    def dimensions(self) -> Dimensions:
        """Current extents: the last success's, or the initial ones (0: open) where there is none."""
        return self._dimensions

    @property
    def size_bytes(self) -> int | None:
        """Bytes at the current dimensions, or None while they are open."""
        shape = full_shape(self._dimensions)
        return None if shape is None else self._bytes_of(shape)

    def copy_from(self, source: Any, dimensions: tuple[int, ...] = ()) -> None:
        """Fill the whole buffer. Blocks while it copies, without the GIL.

        Args:
            source: bytes-like, C-contiguous, exactly as long as the buffer at these dimensions.
            dimensions: extents to give it, all known; () where the initial ones are.

        Raises:
            CallerError: sizes or dimensions do not fit. The buffer is then uninitialized, whatever it was.
            ExecutionError: another execution or copy uses the buffer; nothing has changed.
            MemoryAllocationError: it would have to grow and cannot. It is then uninitialized.
        """
        self.fill_from(lambda: source, dimensions)

    def fill_from(self, opened: Callable[[], Any], dimensions: tuple[int, ...]) -> None:
        """As `copy_from`, with bytes that `opened` returns. What it raises is a failed copy, too."""
        self.begin_writing("copied into")
        shape: tuple[int, ...] | None = None
        room: NDArray[np.uint8] | None = None
        try:
            asked = given(dimensions)
            if asked is not None and 0 in asked:
                raise CallerError(f"dimensions {dimensions}: a copy fills the whole buffer, so every extent must be known (not 0)")
            combined = full_shape(self.combined(asked, self.initial_dimensions))
            if combined is None:
                raise CallerError(f"the buffer's dimensions {self.initial_dimensions} are open; a copy into it must give them")
            data, needed = _as_bytes(opened()), self._bytes_of(combined)
            if data.size != needed:
                raise CallerError(f"{data.size} bytes for a buffer of {needed}, {combined} of {self.type.value}; copies are whole")
            room = self.room(combined)
            np.copyto(room, data)
            shape = combined
        finally:
            self.end_writing(shape, room)

    def copy_to(self, target: Any) -> None:
        """Copy the whole buffer out. Never changes its state. Blocks while it copies, without the GIL.

        Args:
            target: writable bytes-like, C-contiguous, exactly as long as the buffer.

        Raises:
            CallerError: the sizes differ, or `target` is read-only.
            ExecutionError: the buffer is not initialized, or something is writing to it.
        """
        out = _as_bytes(target)
        if not out.flags.writeable:
            raise CallerError("the memory to copy into is mapped read-only; give writable memory")
        # A wrong size is told first, as in the reference, also where there is nothing to copy yet.
        size = self.size_bytes
        if size is not None and out.size != size:
            raise CallerError(f"{out.size} bytes for the contents of a buffer of {size}; copies are whole")
        memory, _ = self.begin_reading()
        try:
            if out.size != memory.size:  # its shape changed between the question and the hold
                raise CallerError(f"{out.size} bytes for the contents of a buffer of {memory.size}; copies are whole")
            np.copyto(out, memory)
        finally:
            self.end_reading()

    # --- what `device_buffers` asks ------------------------------------------------------------------------------

    def combined(self, asked: Dimensions, own: Dimensions) -> Dimensions:
        """`combine_dimensions`, with the buffer's token in the error."""
        try:
            return combine_dimensions(asked, own)
        except CallerError as error:
            raise CallerError(f"device buffer {self.token}: {error}") from None

    def room(self, shape: tuple[int, ...]) -> NDArray[np.uint8]:
        """Memory of exactly that shape's size: the one at hand, or a new one that `end_writing` puts in its place."""
        needed = self._bytes_of(shape)
        if self._memory is not None and self._memory.size == needed:
            return self._memory
        return np.frombuffer(self._reserve(needed), np.uint8)

    def as_array(self, memory: NDArray[np.uint8], shape: tuple[int, ...], *, writeable: bool) -> NDArray[Any]:
        """The same bytes in the buffer's type and that shape.

        For the same memory and shape it is the same object as last time: engines know by that what they have bound already.
        """
        shown = self._shown
        if shown is None or shown[0] is not memory or shown[1] != shape:
            array = memory.view(self.type.dtype).reshape(shape)
            fixed = array.view()
            fixed.flags.writeable = False
            shown = self._shown = (memory, shape, array, fixed)
        return shown[2] if writeable else shown[3]

    def begin_reading(self) -> tuple[NDArray[np.uint8], tuple[int, ...]]:
        """Hold it as one of its readers, until `end_reading`: its bytes and their shape."""
        with self._lock:
            if self._written:
                raise self._busy("read", "written to")
            self.check_initialized()
            memory, shape = self._memory, full_shape(self._dimensions)
            assert memory is not None
            assert shape is not None
            self._readers += 1
        return memory, shape

    def end_reading(self) -> None:
        with self._lock:
            self._readers -= 1

    def begin_writing(self, how: str) -> None:
        """Hold it as its only user, until `end_writing` or `withdraw_writing`."""
        with self._lock:
            if self._written or self._readers:
                raise self._busy(how, "written to" if self._written else "read")
            self._written = True

    def end_writing(self, shape: tuple[int, ...] | None, memory: NDArray[np.uint8] | None) -> None:
        """Let go of it after a success that left that shape in that memory, or after a failure (None, or anything)."""
        with self._lock:
            self._written = False
            self._initialized = shape is not None
            self._dimensions = self.initial_dimensions if shape is None else shape
            if shape is not None:
                self._memory = memory
            if self._shown is not None and self._shown[0] is not self._memory:
                self._shown = None  # it would keep memory that is no longer the buffer's
                self.forget_uses()

    def open_dimensions(self) -> None:
        """An output has come out in another shape than its model declares: only desc and input roles count from now on."""
        with self._lock:
            self.initial_dimensions = self.bound_dimensions
            self.forget_uses()

    def withdraw_writing(self) -> None:
        """Let go of it without having begun: its state stays as it was."""
        with self._lock:
            self._written = False

    def keep_use(self, request: KeepsUse) -> None:
        """A request keeps a use of it ready, with its memory."""
        self._kept_by.add(request)

    def forget_uses(self) -> None:
        """It is freed, or has other memory: requests let go of what they keep of it."""
        for request in list(self._kept_by):
            request.forget_use()
        self._kept_by.clear()

    def check_initialized(self) -> None:
        """Raise GENERAL_FAILURE if there is nothing to read."""
        if not self._initialized:
            raise ExecutionError(
                f"device buffer {self.token} is not initialized: nothing has been copied or computed into it, or that failed; "
                "copy_from it first",
                status=ErrorStatus.GENERAL_FAILURE,
            )

    def _bytes_of(self, shape: tuple[int, ...]) -> int:
        return prod(shape) * self.type.element_bytes

    def _busy(self, how: str, other: str) -> ExecutionError:
        return ExecutionError(
            f"device buffer {self.token} cannot be {how} while another execution or copy has it {other}; "
            "await the one before the other, or use two buffers in turn",
            status=ErrorStatus.GENERAL_FAILURE,
        )
