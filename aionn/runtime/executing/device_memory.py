"""`DeviceMemory`: a tensor that lives in the driver, between executions. Recurrent state that never crosses the wall.

One may stand for an input and an output of the same execution (a state and its successor). The device works with two
buffers then, which change places when the execution has succeeded; a failed one leaves the state as it was.

It is lost with its driver, and says so: `DeviceMemoryLostError`, never zeros.

Invariants
    `_front` holds the tensor; `_back` is allocated before the first execution that reads and writes it, with the same roles.
    While such an execution is in flight (`_advancing`) nothing else may use the memory: it would see the state before, or
    be lost when the two change places. While it is being filled (`_filling`) it cannot be advanced, for the same reason.
    `_uses` counts the executions that may still be touching it, also those whose callers have left; only `settled` ends one.
    `_left_copies` counts the copies that the driver may still be busy with and whose callers have left; `ready` waits for them.
    `emptied` is set by a copy into it that failed before it was sent. What the driver holds is then not to be read.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from math import prod
from types import TracebackType
from typing import TYPE_CHECKING, Any

import anyio
import numpy as np
from numpy.typing import NDArray

from aionn import trace
from aionn.errors import AionnError, CallerError, DeviceMemoryLostError, DriverDiedError, DriverHungError, ExecutionError, again
from aionn.hal.types import BufferDesc, BufferRole, ErrorStatus, Operand
from aionn.memory.domain import Dimensions, combine_dimensions, full_shape, given
from aionn.memory.hardware_buffer import HardwareBuffer
from aionn.memory.memory import Memory, extents_of
from aionn.memory.region import Region
from aionn.remote.control import Done
from aionn.remote.device import RemoteBuffer, RemotePreparedModel
from aionn.tasks import call_soon_from_anywhere, deadline_of, ending_by

if TYPE_CHECKING:
    from aionn.runtime.compilation import Compilation

CLOSE_S = 2.0
"""The driver is given this long to finish what uses a memory that is closed, and to free it. It frees it later all the same."""


class DeviceMemory:
    """A tensor in the driver. Made by `Compilation.allocate`; freed by `aclose`, with the runtime, or when collected.

    It may be used as the inputs and outputs it was allocated for: as a value of `inputs`, or of `outputs=`, of `compute`.
    Before the first use as an input it must be filled: by `copy_from`, `reset`, or an execution that writes it. After a
    `copy_from` or an execution that failed to write it, it must be filled again. An execution that reads and writes it leaves
    it as it was.

    Uses that contradict each other are refused, never raced: `CallerError` here, or `ExecutionError` by the driver. A
    use after a call that ended early (`DeadlineError`, a cancelled task) waits until the driver is done with that call.

    Attributes:
        inputs, outputs: names of the operands it may stand for.
        type: element type (`hal.OperandType`).
        fills: how often the app has filled it, or begun to. fresh: no execution has used it since.
        emptied: whether the last `copy_from` was refused.

    Example:
        >>> state = await compilation.allocate(inputs=("state",), outputs=("stateN",))
        >>> await state.reset()
        >>> outputs = await burst.compute({"input": x, "state": state}, outputs={"stateN": state})
        >>> kept = await state.snapshot()
        Two buffers in turn, where the state before is still wanted:
        >>> await burst.compute({"input": x, "state": a}, outputs={"stateN": b}); a, b = b, a
    """

    def __init__(self, compilation: Compilation, prepared: RemotePreparedModel, buffer: RemoteBuffer, roles: DeviceRoles) -> None:
        self._compilation = compilation
        self._prepared = prepared
        self._roles = roles
        self._front = buffer
        self._back: RemoteBuffer | None = None
        self._allocating = anyio.Lock()
        self._advancing = False
        self._caller_left = False
        self._filling = 0
        self._left_copies = 0
        self.fills = 0
        self.fresh = True
        self.emptied = False
        self._uses = 0
        self._settled: asyncio.Event | None = None  # made by who waits: most executions end with nobody waiting for that
        self._closed = False
        self._shape = roles.shape
        self.inputs = roles.inputs
        self.outputs = roles.outputs
        self.type = roles.operand.type
        self._buffers = [buffer]
        self._finalizer = weakref.finalize(self, _release_soon, asyncio.get_running_loop(), self._buffers)
        self._finalizer.atexit = False

    def __repr__(self) -> str:
        return f"DeviceMemory(inputs={self.inputs!r}, outputs={self.outputs!r}, shape={self._shape!r})"

    @property
    def shape(self) -> tuple[int, ...] | None:
        """The shape of the last tensor it was filled with; None while that is open."""
        return self._shape

    @property
    def size_bytes(self) -> int | None:
        """Bytes of the tensor; None while its shape is open."""
        return None if self._shape is None else prod(self._shape) * self.type.element_bytes

    @property
    def closed(self) -> bool:
        """Whether `aclose` has been called."""
        return self._closed

    async def __aenter__(self) -> DeviceMemory:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Free it in the driver. Executions that use it finish first, and are waited for no longer than `CLOSE_S`."""
        if self._closed or self._compilation._runtime._inherited:
            return
        self._compilation._runtime._check_loop()
        self._closed = True
        self._finalizer.detach()
        try:
            with anyio.move_on_after(CLOSE_S):
                while self._uses and self._ended_by() is None:
                    await self._next_end()
                for buffer in self._buffers:
                    await buffer.aclose()
        except AionnError as error:
            trace.count("device_memory.free_failed", reason=str(error))  # its driver is gone, and it with it
        finally:
            for buffer in self._buffers:
                buffer.release()  # a caller who is cancelled or late does not leave it behind

    def _ended_by(self) -> BaseException | None:
        return self._prepared.device.connection.ended_by

    async def _next_end(self) -> None:
        """Until an execution or a copy that uses it has ended."""
        if self._settled is None:
            self._settled = asyncio.Event()
        await self._settled.wait()

    def check_alive(self) -> None:
        """Raise if it can no longer be used.

        Raises:
            CallerError: it has been closed, or the runtime has.
            DeviceMemoryLostError: its driver has ended.
        """
        if self._closed:
            raise CallerError("this device memory has been closed; allocate it again")
        ended_by = self._ended_by()
        if isinstance(ended_by, CallerError):
            raise again(ended_by)
        if ended_by is not None:
            raise lost_with(self._prepared.device.name, ended_by) from ended_by

    async def ready(self) -> None:
        """Return when it can be used; wait for nothing but executions and copies whose callers have left.

        Raises:
            CallerError: as `check_alive`; or an execution that advances it is in flight, and somebody awaits that.
            DeviceMemoryLostError: its driver has ended.
        """
        self._compilation._runtime._check_loop()
        self.check_alive()
        while self._left_copies or (self._advancing and self._caller_left):
            await self._next_end()
            self.check_alive()
        self.check_free()

    def check_free(self) -> None:
        """Raise if an execution that advances it is in flight, or it can no longer be used."""
        self.check_alive()
        if self._advancing:
            raise CallerError("an execution that advances this device memory is in flight; await it before the next use")

    def check_filled(self) -> None:
        """Raise as the driver does for a memory without contents, if the last copy into it was refused before it was sent."""
        if self.emptied:
            raise ExecutionError(
                "this device memory is not initialized: the last copy_from was refused; fill it again", status=ErrorStatus.GENERAL_FAILURE
            )

    async def copy_from(
        self,
        source: NDArray[Any] | Memory | HardwareBuffer | DeviceMemory,
        shape: tuple[int, ...] | None = None,
        *,
        timeout_s: float | None = None,
    ) -> None:
        """Fill it. A copy that fails leaves it without contents, as after `allocate`, unless an execution uses it now.

        Args:
            source: an array of its dtype and shape; a `Memory` or `HardwareBuffer` of exactly its bytes, read in place by
                the driver; or another `DeviceMemory`, here or in another driver.
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
        await self.ready()
        if source is self:
            return
        try:
            part, found = await self._source_of(source, shape)
        except AionnError:
            if not self._uses:
                self.emptied, self._shape = True, self._roles.shape
            raise
        with part:
            await self.ready()
            await self._fill(part, found)

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
        array = np.asarray(source)
        if array.dtype != self.type.dtype:
            raise CallerError(
                f"device memory of {self.type.value} cannot be filled from an array of {array.dtype}; nothing is cast in silence"
            )
        if not self._roles.operand.accepts(array.shape) or 0 in array.shape:
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
            shape = self._shape
        return source.locate(self._roles.operand, shape)

    async def _contents_of(self, source: DeviceMemory) -> tuple[Memory, tuple[int, ...]]:
        await source.ready()
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

    async def _fill(self, source: Memory, shape: tuple[int, ...]) -> None:
        def over(filled: bool) -> None:
            self._filling -= 1
            if filled:  # also where nobody waits for it any more
                self._shape = shape
                self.fresh, self.emptied = True, False
                self._compilation._compiled.memory_filled()

        self._filling += 1
        self.fills += 1
        with self._copying(over) as settled:
            await self._front.copy_from(source, shape, settled)

    async def copy_to(self, target: Memory | HardwareBuffer | None = None, *, timeout_s: float | None = None) -> NDArray[Any]:
        """Its contents: into `target`, or into a new array. `timeout_s`: seconds after which the call ends with `DeadlineError`.

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
        await self.ready()
        if target is not None and not isinstance(target, Memory | HardwareBuffer):
            raise CallerError(
                f"copy_to a {type(target).__name__}: device memory is copied into a Memory or HardwareBuffer; snapshot() gives an array"
            )
        self.check_filled()
        shape, size = self._shape, self.size_bytes
        if shape is None or size is None:
            raise CallerError("this device memory's shape is open until something fills it; copy_from or compute into it first")
        if target is not None:
            # A user of its own: the app may close the target meanwhile.
            place = target[:] if isinstance(target, Memory) else target.locate(Operand(self.type, shape))[0]
            with place as part, self._copying() as settled:
                await self._front.copy_to(part, settled)
                return part.array(self.type.dtype, shape)
        with Memory(Region.allocate(size)) as memory, self._copying() as settled:
            await self._front.copy_to(memory, settled)
            return memory.array(self.type.dtype, shape).copy()

    async def snapshot(self, *, timeout_s: float | None = None) -> NDArray[Any]:
        """Its contents as an array of the caller's own; `copy_from` brings them back, here or in another driver.

        Raises:
            CallerError, ExecutionError, DeadlineError, DeviceMemoryLostError: as `copy_to`.
        """
        return await self.copy_to(timeout_s=timeout_s)

    async def reset(self, value: float = 0, *, timeout_s: float | None = None) -> None:
        """Fill it with one value, which its element type can hold: 2.5 is none for int8, and refused.

        Raises:
            CallerError, ExecutionError, DeadlineError, DeviceMemoryLostError: as `copy_from`.
        """
        if self._shape is None:
            raise CallerError("this device memory's shape is open; fill it once with copy_from(array)")
        if not _holds(self.type.dtype, value):
            raise CallerError(f"device memory of {self.type.value} cannot be filled with {value!r}; nothing is cast in silence")
        await self.copy_from(np.full(self._shape, value, self.type.dtype), timeout_s=timeout_s)

    @contextmanager
    def _copying(self, over: Callable[[bool], None] | None = None) -> Iterator[Callable[[object], None]]:
        """A copy that the driver makes; it gets what is yielded as `settled`. `over` is told whether it was made, once it is over."""
        answered = left = False

        def settled(answer: object) -> None:
            nonlocal answered
            if answered:
                return
            answered = True
            if over is not None:
                over(isinstance(answer, Done))
            if left:
                self._left_copies -= 1
                self._tell()

        try:
            with self._losing():
                yield settled
        except Exception:
            settled(None)  # unless the driver has answered, nothing was sent
            raise
        finally:
            if not answered:  # the caller has been cancelled; the driver goes on
                left = True
                self._left_copies += 1

    @contextmanager
    def _losing(self) -> Iterator[None]:
        """The end of the driver is the loss of this memory."""
        try:
            yield
        except (DriverDiedError, DriverHungError) as error:
            raise lost_with(self._prepared.device.name, error) from error

    # --- what an execution asks ---------------------------------------------------------------------------------------

    def stands_for(self, prepared: RemotePreparedModel, name: str, roles: tuple[str, ...]) -> bool:
        """Whether it may be that input or output of an execution now, where the driver is alive. `roles`: `inputs` or `outputs`."""
        busy = self._advancing or self._left_copies or self.emptied
        return self._prepared is prepared and not self._closed and not busy and name in roles

    async def partner(self) -> None:
        """See that there is a second buffer, for executions that read and write the memory.

        Raises:
            MemoryAllocationError: the driver cannot have it now.
        """
        if self._back is not None:
            return  # without the lock: taking it costs a turn of the loop, which is more than a small model's whole run
        async with self._allocating:
            if self._back is None and not self._closed:
                with self._losing():
                    back = await self._roles.allocate(self._prepared)
                self._buffers.append(back)
                self._back = back
                if self.closed:
                    back.release()

    def begin(self, *, advance: bool) -> None:
        """An execution is about to use it.

        Raises:
            CallerError: it would advance what is being filled. (`check_free` has been asked.)
        """
        if advance:
            if self._filling:
                raise CallerError("this device memory is being filled; await that before an execution advances it")
            self._advancing, self._caller_left = True, False
        self.fresh = False
        self._uses += 1

    def leave(self) -> None:
        """The execution's caller has gone, answered or not."""
        self._caller_left = True

    def end(self, *, advanced: bool | None) -> None:
        """The execution is over, or never was. `advanced`: whether the buffers change places; None: it only used it."""
        if advanced is not None:
            self._advancing = False
            if advanced:
                assert self._back is not None
                self._front, self._back = self._back, self._front
        self._uses -= 1
        self._tell()

    def _tell(self) -> None:
        """An execution or a copy has ended: to all who wait for that."""
        if self._settled is not None:
            settled, self._settled = self._settled, None
            settled.set()

    def written(self, shape: tuple[int, ...]) -> None:
        """An execution has written it, in that shape. One that it cannot have is a lie of the driver's, and no news."""
        if not self._roles.operand.accepts(shape) and self._roles.bound.accepts(shape):
            self._roles.operand = self._roles.bound
        if self._roles.operand.accepts(shape) and min(shape, default=1) > 0:
            self._shape = shape


class DeviceRoles:
    """What a device memory may stand for: names and indices of operands, checked against the model.

    Attributes:
        operand: what all roles and the asked shape say together.
        bound: what the inputs and the asked shape say; an output may come out in another shape than the model declares.
        shape: its extents where all are known.
    """

    def __init__(self, compilation: Compilation, inputs: Iterable[str], outputs: Iterable[str], shape: Iterable[int] | None) -> None:
        model = compilation.model
        inputs, outputs = _names("inputs", inputs), _names("outputs", outputs)
        if not inputs and not outputs:
            raise CallerError("device memory without a role: name the inputs or outputs it will stand for")
        extents = () if shape is None else extents_of(shape)
        dimensions: Dimensions = given(extents)
        bound = dimensions
        operands: list[Operand] = []
        for names, known, what in ((inputs, model.inputs, "inputs"), (outputs, compilation._arguments.outputs, "outputs")):
            unknown = [name for name in names if not isinstance(name, str) or name not in known]
            if unknown:
                raise CallerError(f"{what}={unknown!r}: name {what} of the model in a tuple; they are {list(known)}")
            if len(set(names)) < len(names):
                raise CallerError(f"{what}={names!r}: a name is given twice")
            for name in names:
                operands.append(known[name])
                if known[name].type is not operands[0].type:
                    raise CallerError(f"{what[:-1]} {name!r} holds {known[name].type.value}, another role {operands[0].type.value}")
                try:
                    dimensions = combine_dimensions(dimensions, known[name].dimensions)
                except CallerError as error:
                    raise CallerError(f"{what[:-1]} {name!r}: {error}") from None
                if what == "inputs":
                    bound = dimensions
        self.inputs, self.outputs = inputs, outputs
        self._input_roles = [BufferRole(0, list(model.inputs).index(name)) for name in inputs]
        self._output_roles = [BufferRole(0, list(model.outputs).index(name)) for name in outputs]
        self._desc = BufferDesc(extents)
        self.operand = Operand(operands[0].type, dimensions)
        self.bound = Operand(operands[0].type, bound)
        self.shape = full_shape(dimensions)

    async def allocate(self, prepared: RemotePreparedModel) -> RemoteBuffer:
        return await prepared.device.allocate(self._desc, [prepared], self._input_roles, self._output_roles)


def _names(what: str, names: Iterable[str]) -> tuple[str, ...]:
    if isinstance(names, str):
        raise CallerError(f"{what}={names!r}: give names in a tuple, as in {what}=({names!r},)")
    try:
        return tuple(names)
    except TypeError:
        raise CallerError(f"{what}={names!r}: expected names in a tuple, got {type(names).__name__}") from None


def _holds(dtype: np.dtype[Any], value: object) -> bool:
    """Whether an element of that type can be this number: exactly, or for a float type rounded."""
    if not isinstance(value, int | float | np.number | np.bool_):
        return False
    if dtype.kind in "iu":
        try:
            whole = int(value)
        except (OverflowError, ValueError):  # infinite, or no number at all
            return False
        limits = np.iinfo(dtype)
        return bool(whole == value and limits.min <= whole <= limits.max)
    with np.errstate(all="ignore"):
        held = dtype.type(value)
    return bool(np.isfinite(held) == np.isfinite(value)) if dtype.kind == "f" else bool(held == value)


def lost_with(device: str, error: BaseException) -> DeviceMemoryLostError:
    """What the end of a driver means to the memory in it."""
    return DeviceMemoryLostError(device, error.exit_code if isinstance(error, DriverDiedError) else None)


def _release_soon(loop: asyncio.AbstractEventLoop, buffers: list[RemoteBuffer]) -> None:
    """A collected device memory gives its buffers back."""
    for buffer in buffers:
        call_soon_from_anywhere(loop, buffer.release)
