"""`DeviceMemory`: a tensor that lives in the driver, between executions. Recurrent state never leaves the driver.

One memory may stand for an input and an output of the same execution (a state and its successor). `device_state` says who uses it now.

A device memory is lost with its driver. The next use raises `DeviceMemoryLostError`, and never reads zeros.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import anyio
import numpy as np
from numpy.typing import NDArray

from aionn import trace
from aionn.errors import AionnError, CallerError
from aionn.hal.types import Operand, OperandType
from aionn.loopless import AsyncClosed, deadline_of
from aionn.memory.hardware_buffer import HardwareBuffer
from aionn.memory.memory import Memory
from aionn.memory.region import Region
from aionn.runtime.executing.arguments import as_array
from aionn.runtime.executing.device_buffers import BufferPair, DeviceRoles
from aionn.runtime.executing.device_state import DeviceState, Holding
from aionn.runtime.executing.placement import TensorInDriver, state_of
from aionn.runtime.preparing.kept_model import KeptModel
from aionn.tasks import ending_by

CLOSE_S = 2.0
"""The driver is given this long to finish what uses a memory that is closed, and to free it. It frees it later all the same."""


class DeviceMemory(TensorInDriver, AsyncClosed):
    """A tensor in the driver. Made by `Compilation.allocate` or `Runtime.allocate`; freed by `aclose`, with the runtime, or when collected.

    It may be used as the inputs and outputs it was allocated for: as a value of `inputs`, or of `outputs=`, of `compute`.
    Before the first use as an input it must be filled: by `copy_from`, `reset`, or an execution that writes it. After a
    `copy_from` or an execution that failed to write it, it must be filled again. If an execution that reads and writes it
    fails, it keeps the state from before.

    Uses that contradict each other are refused, never raced: `CallerError` here, or `ExecutionError` by the driver. A
    use after a call that ended early (`DeadlineError`, a cancelled task) waits until the driver is done with that call.

    Attributes:
        inputs, outputs: names of the operands it may stand for.
        type: element type (`hal.OperandType`).

    Examples:
        >>> state = await compilation.allocate(inputs=("state",), outputs=("stateN",))
        >>> await state.reset()
        >>> outputs = await burst.compute({"input": x, "state": state}, outputs={"stateN": state})
        >>> kept = await state.snapshot()
        >>> await state.copy_from(kept)

        Use two memories in turn, where the state before is still wanted:

        >>> outputs = await burst.compute({"input": x, "state": state}, outputs={"stateN": other})
        >>> state, other = other, state
    """

    def __init__(self, kept_models: Sequence[KeptModel], buffers: BufferPair) -> None:
        self._kept_models = tuple(kept_models)  # while an app holds memory of a compilation, its model stays prepared
        self._state = DeviceState(kept_models[0].session, buffers)
        self._roles = buffers.roles
        self.inputs = buffers.roles.inputs
        self.outputs = buffers.roles.outputs
        self.type = buffers.roles.operand.type
        self._holdings = [Holding(self._state, part) for part in range(len(kept_models))]  # compilations know them weakly
        for kept_model, holding in zip(kept_models, self._holdings, strict=True):
            kept_model.compiled.members.add(holding)

    def __repr__(self) -> str:
        return f"DeviceMemory(inputs={self.inputs!r}, outputs={self.outputs!r}, shape={self._state.shape!r})"

    @property
    def shape(self) -> tuple[int, ...] | None:
        """The shape of the last tensor it was filled with; None while that is open."""
        return self._state.shape

    @property
    def size_bytes(self) -> int | None:
        """Bytes of the tensor; None while its shape is open."""
        return self._state.size_bytes

    @property
    def closed(self) -> bool:
        """Whether `aclose` has been called."""
        return self._state.closed

    async def aclose(self) -> None:
        """Free it in the driver. Executions that use it finish first, and are waited for no longer than `CLOSE_S`."""
        state = self._state
        if not state.close():
            return
        try:
            with anyio.move_on_after(CLOSE_S):
                while state.uses.executions and state.buffers.ended_by is None:
                    await state.uses.next_end()
                for buffer in state.buffers.all:
                    await buffer.aclose()
        except AionnError as error:
            trace.count("device_memory.free_failed", reason=str(error))  # its driver is gone, and the memory with it
        finally:
            state.buffers.release()  # a caller who is cancelled or late does not leave it behind

    async def copy_from(
        self,
        source: NDArray[Any] | Memory | HardwareBuffer | DeviceMemory,
        shape: tuple[int, ...] | None = None,
        *,
        timeout_s: float | None = None,
    ) -> None:
        """Fill it. A copy that fails leaves it without contents, as after `allocate`, unless an execution uses it now.

        Args:
            source: an array of its dtype and shape, or another `DeviceMemory`, here or in another driver. The driver reads a `Memory`
                or `HardwareBuffer` of exactly its bytes in place.
            shape: of a `Memory`'s bytes, where more than one extent of this memory is open.
            timeout_s: seconds after which the call ends with `DeadlineError`; the driver may fill the memory all the same.

        Raises:
            CallerError: dtype, shape or size does not fit; or an execution that advances this memory is in flight.
            ExecutionError: an execution uses it now, and nothing has changed; or `source` holds nothing.
            DeadlineError: the driver had not filled it in time.
            DeviceMemoryLostError: its driver has ended.
        """
        with ending_by(deadline_of(timeout_s), "the device memory was not filled"):
            await self._copy_from(source, shape)

    async def _copy_from(self, source: NDArray[Any] | Memory | HardwareBuffer | DeviceMemory, shape: tuple[int, ...] | None = None) -> None:
        await self._state.ready()
        if source is self:
            return
        try:
            part, found = await self._source_of(source, shape)
        except AionnError:
            self._state.refused()
            raise
        with part:
            await self._state.ready()
            await self._state.fill(part, found)

    async def _source_of(
        self, source: NDArray[Any] | Memory | HardwareBuffer | DeviceMemory, shape: tuple[int, ...] | None
    ) -> tuple[Memory, tuple[int, ...]]:
        """Return memory that the driver can copy from, and the shape of the tensor in it. The caller closes the memory."""
        if isinstance(source, DeviceMemory):
            return await self._contents_of(source)
        if isinstance(source, Memory | HardwareBuffer):
            return self._locate(source, shape)
        if isinstance(source, np.ma.MaskedArray):
            raise CallerError("device memory keeps no mask; pass array.filled(value), or array.data for what lies under the mask")
        array = as_array((*self.inputs, *self.outputs)[0], source) if hasattr(source, "__dlpack_device__") else np.asarray(source)
        if array.dtype != self.type.dtype:
            raise CallerError(
                f"device memory of {self.type.value} cannot be filled from an array of {array.dtype}; nothing is cast in silence"
            )
        if 0 in array.shape:
            raise CallerError(
                f"device memory cannot be filled from an array of shape {array.shape}, for it holds at least one element; "
                "pass the empty array itself as the input"
            )
        if not self._roles.operand.accepts(array.shape):
            raise CallerError(
                f"device memory of dimensions {self._roles.operand.dimensions} cannot be filled from an array of shape {array.shape}"
            )
        memory = Memory(Region.allocate(array.nbytes))
        np.copyto(memory.array(array.dtype, array.shape), array)
        return memory, array.shape

    def _locate(self, source: Memory | HardwareBuffer, shape: tuple[int, ...] | None) -> tuple[Memory, tuple[int, ...]]:
        if isinstance(source, HardwareBuffer):
            return source.locate(self._roles.operand)
        if shape is None and source.size_bytes == self.size_bytes:
            shape = self._state.shape
        return source.locate(self._roles.operand, shape)

    async def _contents_of(self, source: DeviceMemory) -> tuple[Memory, tuple[int, ...]]:
        await state_of(source).ready()
        found, size = source.shape, source.size_bytes
        if found is None or size is None:
            raise CallerError("the device memory to copy from has not been filled; copy_from or compute into it first")
        if source.type is not self.type or not self._roles.operand.accepts(found):
            raise CallerError(
                f"device memory {self.type.value} {self._roles.operand.dimensions} cannot be filled from one of {source.type.value} {found}"
            )
        memory = Memory(Region.allocate(size))
        try:
            await source.copy_to(memory)
        except BaseException:
            memory.close()
            raise
        return memory, found

    async def copy_to(self, target: Memory | HardwareBuffer | None = None, *, timeout_s: float | None = None) -> NDArray[Any]:
        """Copy its contents into `target`, or into a new array. `timeout_s`: seconds after which the call ends with `DeadlineError`.

        Args:
            target: a `Memory` of exactly its bytes; or a `HardwareBuffer` that is the tensor, as for `copy_from`.

        Returns:
            An array of its dtype and shape: over `target`, or the caller's own.

        Raises:
            CallerError: `target` has another size, or is not that tensor; or an execution that advances this memory is in flight.
            ExecutionError: it is not initialized, or is being written now.
            DeadlineError: the driver had not copied it in time.
            DeviceMemoryLostError: its driver has ended.
        """
        with ending_by(deadline_of(timeout_s), "the device memory was not copied"):
            return await self._copy_to(target)

    async def _copy_to(self, target: Memory | HardwareBuffer | None) -> NDArray[Any]:
        await self._state.ready()
        if target is not None and not isinstance(target, Memory | HardwareBuffer):
            raise CallerError(
                f"copy_to a {type(target).__name__}: device memory is copied into a Memory or HardwareBuffer; snapshot() gives an array"
            )
        self._state.check_filled()
        shape, size = self._state.shape, self.size_bytes
        if shape is None or size is None:
            raise CallerError("this device memory's shape is open until something fills it; copy_from or compute into it first")
        if target is not None:
            # A user of its own: the app may close the target meanwhile.
            place = target[:] if isinstance(target, Memory) else target.locate(Operand(self.type, shape))[0]
            with place as part, self._state.copying() as settled:
                await self._state.buffers.front.copy_to(part, settled)
                return part.array(self.type.dtype, shape)
        with Memory(Region.allocate(size)) as memory, self._state.copying() as settled:
            await self._state.buffers.front.copy_to(memory, settled)
            return memory.array(self.type.dtype, shape).copy()

    async def snapshot(self, *, timeout_s: float | None = None) -> NDArray[Any]:
        """Return its contents as an array of the caller's. `copy_from` brings them back, here or in another driver.

        Raises:
            CallerError, ExecutionError, DeadlineError, DeviceMemoryLostError: as `copy_to`.
        """
        return await self.copy_to(timeout_s=timeout_s)

    async def reset(self, value: float = 0, *, timeout_s: float | None = None) -> None:
        """Fill it with one value, which its element type can hold. An int8 memory, for example, refuses 2.5.

        Raises:
            CallerError, ExecutionError, DeadlineError, DeviceMemoryLostError: as `copy_from`.
        """
        if self._state.shape is None:
            raise CallerError("this device memory's shape is open; allocate it with shape=(...), or fill it once with copy_from(array)")
        if not _holds(self.type, value):
            raise CallerError(f"device memory of {self.type.value} cannot be filled with {value!r}; nothing is cast in silence")
        await self.copy_from(np.full(self._state.shape, value, self.type.dtype), timeout_s=timeout_s)


def _holds(kind: OperandType, value: object) -> bool:
    """Return whether an element of that type can be this number: exactly, or for a float type rounded."""
    if not isinstance(value, int | float | np.number | np.bool_):
        return False
    dtype = kind.dtype
    if kind.value.startswith(("int", "uint")):
        try:
            whole = int(value)
        except (OverflowError, ValueError):  # infinite, or no number at all
            return False
        limits: Any = _about(kind).iinfo(dtype)
        return bool(whole == value and limits.min <= whole <= limits.max)
    with np.errstate(all="ignore"):
        held = dtype.type(value)
    if kind is OperandType.BOOL:
        return bool(held == value)
    # The types of 4 and 6 bits have no infinity, and take their largest number instead.
    fits = kind.in_numpy or not np.isfinite(value) or abs(float(value)) <= float(_about(kind).finfo(dtype).max)
    return bool(fits and np.isfinite(held) == np.isfinite(value))


def _about(kind: OperandType) -> Any:
    """Return the package that knows the limits of a type."""
    if kind.in_numpy:
        return np
    import ml_dtypes

    return ml_dtypes


async def allocate(kept_models: Sequence[KeptModel], roles: DeviceRoles, deadline_ns: int | None) -> DeviceMemory:
    """Return device memory in the driver that serves. `kept_models`: of the compilations, one for each part of `roles`.

    Raises:
        CallerError: several drivers run these inputs and outputs.
        AionnError: the driver cannot have it.
    """
    with ExitStack() as held:
        for kept_model in kept_models:
            held.enter_context(kept_model.compiled.use.hold())
        while True:
            servings = [await kept_model.live(deadline_ns) for kept_model in kept_models]
            with trace.span("allocate", device=servings[0].device):
                buffer = await roles.allocate([serving.prepared for serving in servings])
            if all(serving is kept_model.compiled.serving for serving, kept_model in zip(servings, kept_models, strict=True)):
                return DeviceMemory(kept_models, BufferPair([serving.prepared for serving in servings], buffer, roles))
            buffer.release()  # another stage has been swapped in meanwhile
