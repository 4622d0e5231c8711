"""Values of an execution as bytes, and back: strings, sequences, maps and optionals. The calls that carry them.

A value is a tree in MessagePack. Its form follows from its type, so the tree names no types.

    tensor      [shape, offset]              the elements lie in the data, from `offset` on
    strings     [shape, offset, length]      u32 lengths of all elements, then their UTF-8
    sequence    [element, ...]
    map         [[key, ...], [value, ...]]   a value that is a scalar stands here itself
    optional    null, or [value]

The data is one block of bytes, which travels beside the tree.

The peer is not trusted to be correct. A tree is decoded against the declared type, so no tree is deeper than its type. Each tensor lies
behind the one before it, inside the data. So a small message cannot stand for much memory.

Data up to `INLINE_BYTES` travels in the message. Larger data lies in one sealed memory, whose descriptor travels beside the message.
What takes time in proportion to its size is done in a thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from math import prod
from typing import Any, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from aionn.errors import CallerError, ExecutionError
from aionn.hal.types import ErrorStatus, MemoryKind, Operand, OperandType, Result
from aionn.hal.values import ValueKind, ValuesResult, ValueType, joined_texts, split_texts
from aionn.memory.region import MappingError, Region
from aionn.remote.calls import ExecutedValues, ExecuteValues, Fd, LentMemory, Values
from aionn.remote.connection import Connection, Descriptors
from aionn.tasks import run_in_thread

MAX_TREE_BYTES = 128 * 2**20
MAX_TENSORS = 2**20
"""Bounds of one execution's inputs, and of its outputs."""

_ALIGNMENT_BYTES = 64
_MAX_RANK = 64
_MAX_ELEMENTS = 2**48
"""More elements than any machine's memory holds, and few enough for NumPy to count their bytes."""


class _Misfit(Exception):
    """A value, or a part of a tree, that does not fit its type. `path` leads from the input or output to it."""

    def __init__(self, why: str, path: str = "") -> None:
        super().__init__(why)
        self.why, self.path = why, path

    def inside(self, key: object) -> _Misfit:
        """Return this error as one of an element at `key`."""
        self.path = f"[{key!r}]{self.path}"
        return self


class Encoded:
    """Values that have been checked and laid out.

    Attributes:
        tree: as it stands in the message.
        size_bytes: of the data.
    """

    def __init__(self, operands: Mapping[str, Operand], values: Mapping[str, Any], what: str) -> None:
        """Check values against their types. `what`: "input" or "output", for the sentence.

        Raises:
            CallerError: a name or a value does not fit. The sentence has the path to it.
        """
        _check_names(operands, values, what)
        self.size_bytes = 0
        self._parts: list[tuple[int, NDArray[Any] | bytes]] = []
        self._shapes_checked = what == "input"  # files do declare wrong shapes of outputs
        tree = []
        for name, operand in operands.items():
            try:
                tree.append(self._node(operand, values[name]))
            except _Misfit as error:
                raise CallerError(f"{what} {name!r}{error.path}: {error.why}") from None
        self.tree = msgspec.msgpack.encode(tree)
        if len(self.tree) > MAX_TREE_BYTES or len(self._parts) > MAX_TENSORS:
            raise CallerError(
                f"the {what}s have {len(self._parts)} tensors and need a message of {len(self.tree)} bytes, but at most {MAX_TENSORS} and "
                f"{MAX_TREE_BYTES} are allowed; use fewer or larger tensors"
            )

    def write(self, target: memoryview) -> None:
        """Copy the data to where it travels."""
        for offset, part in self._parts:
            if isinstance(part, bytes):
                target[offset : offset + len(part)] = part
            else:
                np.ndarray(part.shape, part.dtype, target, offset if part.nbytes else 0)[...] = part

    def _node(self, operand: Operand, value: Any) -> Any:
        if not isinstance(operand, ValueType):
            return self._tensor(operand, value)
        if operand.kind is ValueKind.OPTIONAL:
            return None if value is None else [self._node(operand.element, value)]
        if operand.kind is ValueKind.SEQUENCE:
            if not isinstance(value, list | tuple):
                raise _wrong(f"a list, for {operand}", value)
            return _each(self._node, operand.element, range(len(value)), value)
        if not isinstance(value, Mapping):
            raise _wrong(f"a dict, for {operand}", value)
        return [_keys(operand.key, value), _each(self._held, operand.element, value, value.values())]

    def _held(self, operand: Operand, value: Any) -> Any:
        """Return a value of a map. A scalar stands in the tree."""
        if isinstance(operand, ValueType) or (isinstance(value, np.ndarray) and value.ndim):
            return self._node(operand, value)
        return _scalar(operand.type, value.item() if isinstance(value, np.ndarray | np.generic) else value)

    def _tensor(self, operand: Operand, value: Any) -> list[Any]:
        array = _as_array(operand, value)
        if self._shapes_checked and not operand.accepts(array.shape):
            raise _Misfit(f"shape {array.shape} does not fit the model's {operand.dimensions}; open dimensions are 0")
        if operand.type is OperandType.STRING:
            text = _joined(array)
            return [array.shape, self._place(text, len(text)), len(text)]
        return [array.shape, self._place(array, array.nbytes)]

    def _place(self, part: NDArray[Any] | bytes, size_bytes: int) -> int:
        offset = -(-self.size_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        self._parts.append((offset, part))
        self.size_bytes = offset + size_bytes
        return offset


def _each(node: Callable[[Operand, Any], Any], operand: Operand, keys: Iterable[object], items: Iterable[Any]) -> list[Any]:
    """Return each item as a node, or back. An error says which item it was."""
    made: list[Any] = []
    try:
        for item in items:
            made.append(node(operand, item))
    except _Misfit as error:
        raise error.inside(next(islice(keys, len(made), None))) from None
    return made


def _check_names(operands: Mapping[str, Operand], values: Mapping[str, Any], what: str) -> None:
    missing = [name for name in operands if name not in values]
    unknown = [name for name in values if name not in operands]
    if missing or unknown:
        problems = [*([f"without {missing}"] if missing else []), *([f"with {unknown}, which the model does not have"] if unknown else [])]
        raise CallerError(f"{what}s {' and '.join(problems)}; the model's {what}s are {list(operands)}")


def _wrong(expected: str, found: Any) -> _Misfit:
    return _Misfit(f"expected {expected}, got {type(found).__name__}")


def _as_array(operand: Operand, value: Any) -> NDArray[Any]:
    wanted = f"a NumPy array of {operand.type.value}"
    if isinstance(value, np.ma.MaskedArray):
        raise _Misfit("a model knows no mask; pass the array's filled(value), or its data for what lies under the mask")
    if not isinstance(value, np.ndarray | np.generic) and not hasattr(value, "__array_interface__"):
        raise _wrong(wanted, value)
    array = np.asarray(value)
    if operand.type is OperandType.STRING and array.dtype.kind in "UT":
        return array.astype(object)  # what NumPy makes of a list of texts
    if array.dtype != operand.type.dtype:
        raise _Misfit(f"expected {wanted}, got one of dtype {array.dtype}; aionn casts nothing, so convert it first")
    return array


def _joined(array: NDArray[Any]) -> bytes:
    parts = []
    for index, item in enumerate(array.flat):
        if not isinstance(item, str):
            raise _Misfit(f"expected str as every element, got {type(item).__name__} at {index}; decode bytes first")
        parts.append(_utf8(item, f"the text at {index}"))
    return joined_texts(parts)


def _utf8(text: str, what: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise _Misfit(f"{what} is not Unicode ({error.reason}); pass text without surrogates") from error


def _keys(kind: OperandType | None, keys: Iterable[Any]) -> list[Any]:
    found = []
    for key in keys:
        try:
            found.append(_scalar(kind or OperandType.INT64, key.item() if isinstance(key, np.generic) else key))
        except _Misfit as error:
            raise _Misfit(f"key {key!r}: {error.why}") from None
    return found


def _scalar(kind: OperandType, value: Any) -> Any:
    """Check a number, a truth value or a text that stands in the tree."""
    if kind is OperandType.STRING:
        if isinstance(value, str):
            _utf8(value, "the text")
            return value
    elif type(value) is _PYTHON_TYPES.get(kind):
        if type(value) is int:
            bounds: Any = np.iinfo(kind.dtype)
            if not bounds.min <= value <= bounds.max:
                raise _Misfit(f"{value} does not fit {kind.value}")
        return value
    elif _PYTHON_TYPES.get(kind) is float and type(value) is int:
        try:
            return float(value)
        except OverflowError:
            raise _Misfit(f"an integer of {value.bit_length()} bits does not fit {kind.value}") from None
    raise _wrong(f"a value of type {kind.value}", value)


_PYTHON_TYPES = {
    kind: {"f": float, "i": int, "u": int, "b": bool}[kind.dtype.kind]
    for kind in OperandType
    if kind.in_numpy and kind.dtype.kind in "fiub"
}
"""What a scalar of a type is in Python."""


# --- back ------------------------------------------------------------------------------------------------------------


class _Decoding:
    """Reads trees against their types. `owned`: arrays get copies."""

    def __init__(self, data: memoryview, owned: bool) -> None:
        self._data, self._owned, self._end, self._tensors = data, owned, 0, 0

    def node(self, operand: Operand, node: Any) -> Any:
        if not isinstance(operand, ValueType):
            return self._tensor(operand, node)
        if node is None and operand.kind is ValueKind.OPTIONAL:
            return None
        items = _list(node)
        if operand.kind is ValueKind.SEQUENCE:
            return _each(self.node, operand.element, range(len(items)), items)
        if operand.kind is ValueKind.OPTIONAL:
            return self.node(operand.element, _counted(items, 1)[0])
        keys, values = map(_list, _counted(items, 2))
        if len(keys) != len(values):
            raise _Misfit(f"a map has {len(keys)} keys and {len(values)} values")
        return dict(zip(_keys(operand.key, keys), _each(self._held, operand.element, keys, values), strict=True))

    def _held(self, operand: Operand, node: Any) -> Any:
        if isinstance(operand, ValueType) or isinstance(node, list):
            return self.node(operand, node)
        return _scalar(operand.type, node)

    def _tensor(self, operand: Operand, node: Any) -> NDArray[Any]:
        self._tensors += 1
        if self._tensors > MAX_TENSORS:
            raise _Misfit(f"more than {MAX_TENSORS} tensors came in one message")
        strings = operand.type is OperandType.STRING
        shape, offset, *length = _counted(_list(node), 3 if strings else 2)
        extents = tuple(_list(shape))
        if len(extents) > _MAX_RANK or not all(type(number) is int and number >= 0 for number in (*extents, offset, *length)):
            raise _Misfit(f"{extents} at {offset} is not the place of a tensor")
        if prod(extent or 1 for extent in extents) > _MAX_ELEMENTS:
            raise _Misfit(f"an array of shape {extents} is too large")
        size_bytes = length[0] if strings else prod(extents) * operand.type.element_bytes
        if offset < self._end or offset + size_bytes > len(self._data):
            raise _Misfit(
                f"a tensor lies in bytes {offset} to {offset + size_bytes} of data, which has {self._end} to {len(self._data)} left"
            )
        self._end = offset + size_bytes
        if strings:
            return split_texts(self._data[offset : self._end], extents)
        if offset % operand.type.element_bytes:
            raise _Misfit(f"a tensor begins at byte {offset}, which is not a multiple of {operand.type.element_bytes}")
        array: NDArray[Any] = np.ndarray(extents, operand.type.dtype, self._data, offset if size_bytes else 0)
        return array.copy() if self._owned else array


def _list(node: Any) -> list[Any]:
    if not isinstance(node, list):
        raise _Misfit(f"{type(node).__name__} stands where a list belongs")
    return node


def _counted(items: list[Any], count: int) -> list[Any]:
    if len(items) != count:
        raise _Misfit(f"{len(items)} items stand where {count} belong")
    return items


def decoded(operands: Mapping[str, Operand], tree: bytes, data: memoryview, what: str, *, owned: bool) -> dict[str, Any]:
    """Return the values of a message.

    Args:
        owned: whether arrays are copies. Otherwise they are read-only views of `data`.

    Raises:
        CallerError: the message does not fit the types.
    """
    values: dict[str, Any] = {}
    try:
        if len(tree) > MAX_TREE_BYTES:
            raise _Misfit(f"{len(tree)} bytes came, but at most {MAX_TREE_BYTES} are allowed")
        nodes = _counted(_list(msgspec.msgpack.decode(tree)), len(operands))
        decoding = _Decoding(data.toreadonly(), owned)
        for (name, operand), node in zip(operands.items(), nodes, strict=True):
            values[name] = decoding.node(operand, node)
    except (_Misfit, msgspec.DecodeError, ValueError, RecursionError, OverflowError, TypeError) as error:
        at = [name for name in operands if name not in values][:1]
        where = f"{what} {at[0]!r}{error.path}" if isinstance(error, _Misfit) and at else f"the {what}s"
        raise CallerError(f"{where} came in a form that does not fit: {error}") from error
    return values


T = TypeVar("T")

INLINE_BYTES = 64 * 1024
"""A memory and its descriptor cost more than a copy of so many bytes."""

IN_LOOP_BYTES = 256 * 1024
"""Copies up to this size are made in the event loop."""

_MANY = 2000
"""Values with up to so many elements in lists, maps and arrays of strings are checked in the event loop."""


async def aside(large: bool, work: Callable[[], T]) -> T:
    """Do what takes time in proportion to its size: at once, or in a thread if that is large."""
    return await run_in_thread(work) if large else work()


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
