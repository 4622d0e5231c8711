"""Values of an execution as bytes, and back: strings, sequences, maps and optionals, and the calls that carry them.

A value is a tree in MessagePack. Its form follows from its type, so the tree names no types.

    tensor      [shape, offset]              the elements lie in the data, from `offset` on
    strings     [shape, offset, length]      u32 lengths of all elements, then their UTF-8
    sequence    [element, ...]
    map         [[key, ...], [value, ...]]   a value that is a scalar stands here itself
    optional    null, or [value]

The data is one block of bytes: in the message if it is small, else in one sealed memory whose descriptor travels beside the message.

The peer is not trusted to be correct. A tree is decoded against the declared type, so no tree is deeper than its type. Each tensor lies
behind the one before it, inside the data. So a small message cannot stand for much memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

import anyio.to_thread
import msgspec
import numpy as np
from numpy.typing import NDArray

from aionn.errors import AionnError, CallerError, ExecutionError
from aionn.hal.interfaces import IPreparedModel
from aionn.hal.types import ErrorStatus, MemoryDescription, Operand, OperandType, Result
from aionn.hal.values import ValueKind, ValueType
from aionn.memory.region import Region
from aionn.remote.channel import Descriptors
from aionn.remote.connection import Connection
from aionn.remote.control import ExecutedValues, ExecuteValues, ReplyBody
from aionn.remote.received import attached

INLINE_BYTES = 64 * 1024
"""Data up to this size travels in the message. A memory and its descriptor cost more than so long a copy."""

MAX_TREE_BYTES = 128 * 2**20
MAX_TENSORS = 2**20
"""Bounds of one execution's inputs, and of its outputs."""

_ALIGNMENT_BYTES = 64
_IN_LOOP_BYTES = 256 * 1024
"""Copies up to this size are made in the event loop. Larger ones are made in a thread."""

_LENGTH = np.dtype("<u4")


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
        check_names(operands, values, what)
        self.size_bytes = 0
        self._parts: list[tuple[int, NDArray[Any] | bytes]] = []
        self._shapes_checked = what == "input"  # files do declare wrong shapes of outputs
        tree = [self._node(operand, values[name], f"{what} {name!r}") for name, operand in operands.items()]
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
                np.ndarray(part.shape, part.dtype, target, offset)[...] = part

    def _node(self, operand: Operand, value: Any, path: str) -> Any:
        if not isinstance(operand, ValueType):
            return self._tensor(operand, value, path)
        if operand.kind is ValueKind.OPTIONAL:
            return None if value is None else [self._node(operand.element, value, path)]
        if operand.kind is ValueKind.SEQUENCE:
            if not isinstance(value, list | tuple):
                raise _wrong(path, f"a list, for {operand}", value)
            return [self._node(operand.element, item, f"{path}[{index}]") for index, item in enumerate(value)]
        if not isinstance(value, Mapping):
            raise _wrong(path, f"a dict, for {operand}", value)
        keys = [_key(operand.key, key, path) for key in value]
        return [keys, [self._held(operand.element, item, f"{path}[{key!r}]") for key, item in value.items()]]

    def _held(self, operand: Operand, value: Any, path: str) -> Any:
        """Return a value of a map. A scalar stands in the tree."""
        if isinstance(operand, ValueType) or (isinstance(value, np.ndarray) and value.ndim):
            return self._node(operand, value, path)
        return _scalar(operand.type, value.item() if isinstance(value, np.ndarray | np.generic) else value, path)

    def _tensor(self, operand: Operand, value: Any, path: str) -> list[Any]:
        array = _as_array(operand, value, path)
        if self._shapes_checked and not operand.accepts(array.shape):
            raise CallerError(f"{path}: shape {array.shape} does not fit the model's {operand.dimensions}; open dimensions are 0")
        if operand.type is OperandType.STRING:
            text = _text(array, path)
            return [array.shape, self._place(text, len(text)), len(text)]
        return [array.shape, self._place(array, array.nbytes)]

    def _place(self, part: NDArray[Any] | bytes, size_bytes: int) -> int:
        offset = -(-self.size_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        self._parts.append((offset, part))
        self.size_bytes = offset + size_bytes
        return offset


def check_names(operands: Mapping[str, Operand], values: Mapping[str, Any], what: str) -> None:
    """Raise a `CallerError` unless there is exactly one value for each input, or output."""
    missing = [name for name in operands if name not in values]
    unknown = [name for name in values if name not in operands]
    if missing or unknown:
        problems = [*([f"without {missing}"] if missing else []), *([f"with {unknown}, which the model does not have"] if unknown else [])]
        raise CallerError(f"{what}s {' and '.join(problems)}; the model's {what}s are {list(operands)}")


def _wrong(path: str, expected: str, found: Any) -> CallerError:
    return CallerError(f"{path}: expected {expected}, got {type(found).__name__}")


def _as_array(operand: Operand, value: Any, path: str) -> NDArray[Any]:
    wanted, dtype = f"a NumPy array of {operand.type.value}", operand.type.dtype
    if isinstance(value, np.ma.MaskedArray):
        raise CallerError(f"{path}: a model knows no mask; pass the array's filled(value), or its data for what lies under the mask")
    if not isinstance(value, np.ndarray | np.generic) and not hasattr(value, "__array_interface__"):
        raise _wrong(path, wanted, value)
    array = np.asarray(value)
    if operand.type is OperandType.STRING and array.dtype.kind in "UT":
        return array.astype(object)  # what NumPy makes of a list of texts
    if array.dtype != dtype:
        raise CallerError(f"{path}: expected {wanted}, got one of dtype {array.dtype}; aionn casts nothing, so convert it first")
    return array


def _text(array: NDArray[Any], path: str) -> bytes:
    parts = []
    for index, item in enumerate(array.flat):
        if not isinstance(item, str):
            raise CallerError(f"{path}: expected str as every element, got {type(item).__name__} at {index}; decode bytes first")
        try:
            parts.append(item.encode())
        except UnicodeEncodeError as error:
            raise CallerError(f"{path}: the text at {index} is not Unicode ({error.reason}); pass text without surrogates") from error
    return np.fromiter(map(len, parts), _LENGTH, len(parts)).tobytes() + b"".join(parts)


def _key(kind: OperandType | None, key: Any, path: str) -> int | str:
    if kind is OperandType.STRING:
        if isinstance(key, str):
            return str(key)
    elif isinstance(key, int | np.integer) and not isinstance(key, bool):
        return int(_scalar(kind or OperandType.INT64, int(key), f"{path}: key {key!r}"))
    raise _wrong(path, f"keys of type {'str' if kind is OperandType.STRING else 'int'}", key)


def _scalar(kind: OperandType, value: Any, path: str) -> Any:
    """Check a number, a truth value or a text that stands in the tree."""
    dtype = kind.dtype
    if kind is OperandType.STRING:
        fits = isinstance(value, str)
    elif dtype.kind == "b":
        fits = isinstance(value, bool)
    elif dtype.kind == "f":
        fits = isinstance(value, int | float) and not isinstance(value, bool)
    else:
        fits = dtype.kind in "iu" and isinstance(value, int) and not isinstance(value, bool)
        bounds: Any = np.iinfo(dtype) if fits else None
        if fits and not bounds.min <= value <= bounds.max:
            raise CallerError(f"{path}: {value} does not fit {kind.value}")
    if not fits:
        raise _wrong(path, f"a value of type {kind.value}", value)
    return float(value) if dtype.kind == "f" else value


# --- back ------------------------------------------------------------------------------------------------------------


class _Decoding:
    """Reads trees against their types. `owned`: arrays get memory of their own."""

    def __init__(self, data: memoryview, owned: bool) -> None:
        self._data, self._owned, self._end, self._tensors = data, owned, 0, 0

    def node(self, operand: Operand, node: Any, path: str) -> Any:
        if not isinstance(operand, ValueType):
            return self._tensor(operand, node, path)
        if node is None and operand.kind is ValueKind.OPTIONAL:
            return None
        items = _list(node, path)
        if operand.kind is ValueKind.SEQUENCE:
            return [self.node(operand.element, item, f"{path}[{index}]") for index, item in enumerate(items)]
        if operand.kind is ValueKind.OPTIONAL:
            return self.node(operand.element, _counted(items, 1, path)[0], path)
        keys, values = (_list(each, path) for each in _counted(items, 2, path))
        if len(keys) != len(values):
            raise CallerError(f"{path}: a map has {len(keys)} keys and {len(values)} values")
        return {_key(operand.key, key, path): self._held(operand.element, item, path) for key, item in zip(keys, values, strict=True)}

    def _held(self, operand: Operand, node: Any, path: str) -> Any:
        if isinstance(operand, ValueType) or isinstance(node, list):
            return self.node(operand, node, path)
        return _scalar(operand.type, node, path)

    def _tensor(self, operand: Operand, node: Any, path: str) -> NDArray[Any]:
        self._tensors += 1
        if self._tensors > MAX_TENSORS:
            raise CallerError(f"{path}: more than {MAX_TENSORS} tensors came in one message")
        strings = operand.type is OperandType.STRING
        shape, offset, *length = _counted(_list(node, path), 3 if strings else 2, path)
        extents = tuple(_list(shape, path))
        if len(extents) > 64 or not all(type(number) is int and number >= 0 for number in (*extents, offset, *length)):
            raise CallerError(f"{path}: {extents} at {offset} is not the place of a tensor")
        size_bytes = length[0] if strings else prod(extents) * operand.type.element_bytes
        if offset < self._end or offset + size_bytes > len(self._data):
            raise CallerError(f"{path}: a tensor lies in bytes {offset} to {offset + size_bytes}, outside of the {len(self._data)} bytes of data")
        self._end = offset + size_bytes
        if max(extents, default=0) > np.iinfo(np.intp).max or prod(filter(None, extents)) > np.iinfo(np.intp).max // 16:
            raise CallerError(f"{path}: an array of shape {extents} is too large")
        if strings:
            return _texts(self._data[offset : self._end], extents, path)
        if offset % operand.type.element_bytes:
            raise CallerError(f"{path}: a tensor begins at byte {offset}, which is not a multiple of {operand.type.element_bytes}")
        array: NDArray[Any] = np.ndarray(extents, operand.type.dtype, self._data, offset if size_bytes else 0)
        return array.copy() if self._owned else array


def _texts(place: memoryview, shape: tuple[int, ...], path: str) -> NDArray[Any]:
    count = prod(shape)
    begin = count * _LENGTH.itemsize
    if begin > len(place):
        raise CallerError(f"{path}: {count} texts cannot lie in {len(place)} bytes")
    lengths = np.frombuffer(place, _LENGTH, count).tolist()  # a copy: the peer may still write to the memory
    if begin + sum(lengths) != len(place):
        raise CallerError(f"{path}: texts of {sum(lengths)} bytes do not fill {len(place) - begin} bytes")
    texts = np.empty(count, object)
    for index, length in enumerate(lengths):
        texts[index] = str(place[begin : begin + length], "utf-8")
        begin += length
    return texts.reshape(shape)


def _list(node: Any, path: str) -> list[Any]:
    if not isinstance(node, list):
        raise CallerError(f"{path}: {type(node).__name__} stands where a list belongs")
    return node


def _counted(items: list[Any], count: int, path: str) -> list[Any]:
    if len(items) != count:
        raise CallerError(f"{path}: {len(items)} items stand where {count} belong")
    return items


def decoded(operands: Mapping[str, Operand], tree: bytes, data: memoryview, what: str, *, owned: bool) -> dict[str, Any]:
    """Return the values of a message.

    Args:
        owned: whether arrays get memory of their own. Otherwise they are read-only views of `data`.

    Raises:
        CallerError: the message does not fit the types.
    """
    try:
        if len(tree) > MAX_TREE_BYTES:
            raise CallerError(f"the {what}s came as {len(tree)} bytes, but at most {MAX_TREE_BYTES} are allowed")
        nodes = _counted(_list(msgspec.msgpack.decode(tree), what), len(operands), what)
        decoding = _Decoding(data.toreadonly(), owned)
        return {name: decoding.node(operand, node, f"{what} {name!r}") for (name, operand), node in zip(operands.items(), nodes, strict=True)}
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, OverflowError) as error:
        raise CallerError(f"the {what}s came as bytes that are not values: {error}") from error


# --- calls -----------------------------------------------------------------------------------------------------------


async def _aside(size_bytes: int, work: Callable[[], Any]) -> Any:
    """Do what takes time in proportion to its bytes: at once, or in a thread."""
    return work() if size_bytes <= _IN_LOOP_BYTES else await anyio.to_thread.run_sync(work)


async def _laid(encoded: Encoded) -> tuple[bytes, Region | None]:
    """Return the data of values: bytes for the message, or a sealed memory, which the caller closes."""
    if encoded.size_bytes <= INLINE_BYTES:
        inline = bytearray(encoded.size_bytes)
        encoded.write(memoryview(inline))
        return bytes(inline), None
    region = Region.allocate(encoded.size_bytes, freezable=True)
    try:
        await _aside(encoded.size_bytes, lambda: encoded.write(region.view()))
        region.freeze()
    except BaseException:
        region.close()
        raise
    return b"", region


class _Data:
    """The data that came with a message. Its mapping lasts as long as arrays over it."""

    def __init__(self, inline: bytes, memory: MemoryDescription | None, descriptors: Descriptors) -> None:
        self._region = None if memory is None else attached(descriptors.take(), memory)
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
) -> tuple[Result, dict[str, Any], int]:
    """Execute a model in its driver. Returns the result, the outputs by name, and the bytes of data in both directions.

    `operands`: of the model's inputs and outputs. The other arguments are as for `RemotePreparedModel.execute`.
    """

    def answered(reply: ReplyBody | None) -> None:
        if settled is not None:
            settled(reply.result if isinstance(reply, ExecutedValues) else None)

    region: Region | None = None
    try:
        encoded = Encoded(operands[0], inputs, "input")
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
            return executed.result, {}, encoded.size_bytes
        with _Data(executed.data, executed.memory, descriptors) as data:
            outputs = await _aside(len(data), lambda: decoded(operands[1], executed.tree, data, "output", owned=True))
            return executed.result, outputs, encoded.size_bytes + len(data)
    except CallerError as error:
        wrong = f"the driver's answer contradicts the model: {error}"
        raise ExecutionError(wrong, status=ErrorStatus.GENERAL_FAILURE) from error
    finally:
        descriptors.close()


async def serve_values(prepared: IPreparedModel, body: ExecuteValues, descriptors: Descriptors) -> tuple[ExecutedValues, Region | None]:
    """Execute what a client asked for. Returns the answer, and the memory that travels beside it, which the caller closes."""
    from aionn.burst import result_of

    execute = getattr(prepared, "execute_values", None)
    try:
        if execute is None:
            raise CallerError("the device of this model executes tensors of numbers only; use another device")
        with _Data(body.data, body.memory, descriptors) as data:
            inputs = await _aside(len(data), lambda: decoded(prepared.inputs, body.tree, data, "input", owned=False))
            result, outputs = await execute(inputs, body.measure_timing, body.deadline_ns)
            if result.status is not ErrorStatus.NONE:
                return ExecutedValues(result), None
            try:
                encoded = Encoded(prepared.outputs, outputs, "output")
            except CallerError as error:
                fault = f"{error}; the fault lies in the engine"
                return ExecutedValues(Result(ErrorStatus.GENERAL_FAILURE, message=fault)), None
            inline, region = await _laid(encoded)  # while the inputs are mapped, because an output may be one of them
            return ExecutedValues(result, encoded.tree, inline, None if region is None else region.description), region
    except AionnError as error:
        return ExecutedValues(result_of(error)), None
