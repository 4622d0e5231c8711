"""Calls that carry values (`remote.values`): the app's end and the driver's.

Data up to `INLINE_BYTES` travels in the message. Larger data lies in one sealed memory, whose descriptor travels beside the message.
What takes time in proportion to its size is done in a thread.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import anyio.to_thread
import numpy as np

from aionn.errors import AionnError, CallerError, ExecutionError
from aionn.hal.interfaces import IPreparedModel
from aionn.hal.types import ErrorStatus, MemoryDescription, MemoryKind, Operand, Result
from aionn.hal.values import ValuesResult
from aionn.memory.region import MappingError, Region
from aionn.remote.channel import Descriptors
from aionn.remote.connection import Connection
from aionn.remote.control import ExecutedValues, ExecuteValues, ReplyBody
from aionn.remote.received import attached
from aionn.remote.values import Encoded, decoded

T = TypeVar("T")

INLINE_BYTES = 64 * 1024
"""A memory and its descriptor cost more than a copy of so many bytes."""

_IN_LOOP_BYTES = 256 * 1024
"""Copies up to this size are made in the event loop."""

_MANY = 2000
"""Values with up to so many elements in lists, maps and arrays of strings are checked in the event loop."""


async def _aside(large: bool, work: Callable[[], T]) -> T:
    """Do what takes time in proportion to its size: at once, or in a thread if that is large."""
    return await anyio.to_thread.run_sync(work) if large else work()


async def _encoded(operands: Mapping[str, Operand], values: Mapping[str, Any], what: str) -> Encoded:
    sizes = (value.size if isinstance(value, np.ndarray) and value.dtype.kind in "OUT" else _length(value) for value in values.values())
    return await _aside(sum(sizes) > _MANY, lambda: Encoded(operands, values, what))


def _length(value: Any) -> int:
    return len(value) if isinstance(value, list | tuple | dict) else 0


async def _laid(encoded: Encoded) -> tuple[bytes, Region | None]:
    """Return the data of values: bytes for the message, or a sealed memory, which the caller closes."""
    if encoded.size_bytes <= INLINE_BYTES:
        inline = bytearray(encoded.size_bytes)
        encoded.write(memoryview(inline))
        return bytes(inline), None
    region = Region.allocate(encoded.size_bytes, freezable=True)
    try:
        await _aside(encoded.size_bytes > _IN_LOOP_BYTES, lambda: encoded.write(region.view()))
        region.freeze()
    except BaseException:
        region.close()
        raise
    return b"", region


class _Data:
    """The data that came with a message. Its mapping lasts as long as arrays over it."""

    def __init__(self, inline: bytes, memory: MemoryDescription | None, descriptors: Descriptors, *, reserved: bool = False) -> None:
        """Map the memory, if there is one.

        Args:
            reserved: as for `received.attached`.

        Raises:
            CallerError: it is the memory of a file, which its sender could cut off while it is read here. Or as `received.attached`.
        """
        if memory is not None and memory.kind is not MemoryKind.ASHMEM:
            raise CallerError(f"the data of values lies in memory of kind {memory.kind.value}; send it in {MemoryKind.ASHMEM.value}")
        self._region = None if memory is None else attached(descriptors.take(), memory, reserved=reserved)
        self.view = memoryview(inline) if self._region is None else self._region.view()

    def __enter__(self) -> memoryview:
        return self.view

    def __exit__(self, *_: object) -> None:
        if self._region is not None:
            self._region.close()


async def call_values(
    connection: Connection,
    prepared: int,
    operands: tuple[Mapping[str, Operand], Mapping[str, Operand]],
    inputs: Mapping[str, Any],
    measure_timing: bool,
    deadline_ns: int | None,
    settled: Callable[[Result | None], None] | None = None,
) -> ValuesResult:
    """Execute a model in its driver.

    `operands`: of the model's inputs and outputs. The other arguments are as for `RemotePreparedModel.execute`.
    """

    def answered(reply: ReplyBody | None) -> None:
        if settled is not None:
            settled(reply.result if isinstance(reply, ExecutedValues) else None)

    region: Region | None = None
    try:
        encoded = await _encoded(operands[0], inputs, "input")
        inline, region = await _laid(encoded)
        memory = None if region is None else region.description
        body = ExecuteValues(prepared, encoded.tree, inline, memory, bool(measure_timing), deadline_ns)
        fds: Sequence[int] = () if region is None else (region.fileno(),)
    except BaseException:
        answered(None)
        if region is not None:
            region.close()
        raise
    try:
        executed, descriptors = await connection.call(body, ExecutedValues, fds, answered)
    finally:
        if region is not None:
            region.close()
    try:
        if executed.result.status is not ErrorStatus.NONE:
            return ValuesResult(executed.result, {}, encoded.size_bytes)
        with _Data(executed.data, executed.memory, descriptors, reserved=True) as data:
            large = len(executed.tree) + len(data) > _IN_LOOP_BYTES
            outputs = await _aside(large, lambda: decoded(operands[1], executed.tree, data, "output", owned=True))
            return ValuesResult(executed.result, outputs, encoded.size_bytes + len(data))
    except (CallerError, MappingError) as error:
        wrong = f"the driver's answer contradicts the model: {error}"
        raise ExecutionError(wrong, status=ErrorStatus.GENERAL_FAILURE) from error
    finally:
        descriptors.close()


async def serve_values(prepared: IPreparedModel, body: ExecuteValues, descriptors: Descriptors) -> tuple[ExecutedValues, Region | None]:
    """Execute what a client asked for. Returns the answer, and the memory that travels beside it, which the caller closes."""
    from aionn.burst.executors import result_of

    execute = getattr(prepared, "execute_values", None)
    try:
        if execute is None:
            raise CallerError("the device of this model executes tensors of numbers only; use another device")
        with _Data(body.data, body.memory, descriptors) as data:
            large = len(body.tree) + len(data) > _IN_LOOP_BYTES
            inputs = await _aside(large, lambda: decoded(prepared.inputs, body.tree, data, "input", owned=False))
            result, outputs, _ = await execute(inputs, body.measure_timing, body.deadline_ns)
            if result.status is not ErrorStatus.NONE:
                return ExecutedValues(result), None
            try:
                encoded = await _encoded(prepared.outputs, outputs, "output")
            except CallerError as error:
                fault = f"{error}; the fault lies in the engine"
                return ExecutedValues(Result(ErrorStatus.GENERAL_FAILURE, message=fault)), None
            inline, region = await _laid(encoded)  # while the inputs are mapped, because an output may be one of them
            return ExecutedValues(result, encoded.tree, inline, None if region is None else region.description), region
    except AionnError as error:
        return ExecutedValues(result_of(error)), None
