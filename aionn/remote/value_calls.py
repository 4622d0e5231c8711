"""Calls that carry values (`remote.values`): the app's end and the driver's.

Data up to `INLINE_BYTES` travels in the message. Larger data lies in one sealed memory, whose descriptor travels beside the message.
What takes time in proportion to its size is done in a thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import anyio.to_thread
import numpy as np

from aionn.errors import CallerError, ExecutionError
from aionn.hal.types import ErrorStatus, MemoryKind, Operand, Result
from aionn.hal.values import ValuesResult
from aionn.memory.region import MappingError, Region
from aionn.remote.calls import ExecutedValues, ExecuteValues, Fd, LentMemory, Values
from aionn.remote.channel import Descriptors
from aionn.remote.connection import Connection
from aionn.remote.values import Encoded, decoded

T = TypeVar("T")

INLINE_BYTES = 64 * 1024
"""A memory and its descriptor cost more than a copy of so many bytes."""

IN_LOOP_BYTES = 256 * 1024
"""Copies up to this size are made in the event loop."""

_MANY = 2000
"""Values with up to so many elements in lists, maps and arrays of strings are checked in the event loop."""


async def aside(large: bool, work: Callable[[], T]) -> T:
    """Do what takes time in proportion to its size: at once, or in a thread if that is large."""
    return await anyio.to_thread.run_sync(work) if large else work()


async def encoded_values(operands: Mapping[str, Operand], values: Mapping[str, Any], what: str) -> Encoded:
    sizes = (value.size if isinstance(value, np.ndarray) and value.dtype.kind in "OUT" else _length(value) for value in values.values())
    return await aside(sum(sizes) > _MANY, lambda: Encoded(operands, values, what))


def _length(value: Any) -> int:
    return len(value) if isinstance(value, list | tuple | dict) else 0


async def laid_out(encoded: Encoded) -> tuple[Values, Region | None]:
    """Return values for a message, and the sealed memory that holds their data if it is large. The caller closes the memory."""
    if encoded.size_bytes <= INLINE_BYTES:
        inline = bytearray(encoded.size_bytes)
        encoded.write(memoryview(inline))
        return Values(encoded.tree, bytes(inline)), None
    region = Region.allocate(encoded.size_bytes, freezable=True)
    try:
        await aside(encoded.size_bytes > IN_LOOP_BYTES, lambda: encoded.write(region.view()))
        region.freeze()
        return Values(encoded.tree, b"", LentMemory(region.description, Fd(region.fileno()))), region
    except BaseException:
        region.close()
        raise


@contextmanager
def received_data(values: Values, descriptors: Descriptors, *, reserved: bool = False) -> Iterator[memoryview]:
    """Yield the data that came with a message. Its mapping lasts as long as arrays over it.

    Args:
        reserved: as for `Descriptors.attach`.

    Raises:
        CallerError: it is the memory of a file, which its sender could cut off while it is read here. Or as `Descriptors.attach`.
    """
    memory = values.memory
    if memory is None:
        yield memoryview(values.data)
        return
    kind = memory.description.kind
    if kind is not MemoryKind.ASHMEM:
        raise CallerError(f"the data of values lies in memory of kind {kind.value}; send it in {MemoryKind.ASHMEM.value}")
    region = descriptors.attach(memory, reserved=reserved)
    try:
        yield region.view()
    finally:
        region.close()


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

    def answered(found: ExecutedValues | BaseException) -> None:
        if settled is not None:
            settled(None if isinstance(found, BaseException) else found.result)

    region: Region | None = None
    try:
        encoded = await encoded_values(operands[0], inputs, "input")
        body_values, region = await laid_out(encoded)
        body = ExecuteValues(prepared, body_values, bool(measure_timing), deadline_ns)
    except BaseException as error:
        answered(error)
        if region is not None:
            region.close()
        raise
    try:
        executed, descriptors = await connection.call(body, answered)
    finally:
        if region is not None:
            region.close()
    try:
        if executed.result.status is not ErrorStatus.NONE:
            return ValuesResult(executed.result, {}, encoded.size_bytes)
        with received_data(executed.outputs, descriptors, reserved=True) as data:
            tree = executed.outputs.tree
            large = len(tree) + len(data) > IN_LOOP_BYTES
            outputs = await aside(large, lambda: decoded(operands[1], tree, data, "output", owned=True))
            return ValuesResult(executed.result, outputs, encoded.size_bytes + len(data))
    except (CallerError, MappingError) as error:
        wrong = f"the driver's answer contradicts the model: {error}"
        raise ExecutionError(wrong, status=ErrorStatus.GENERAL_FAILURE) from error
    finally:
        descriptors.close()
