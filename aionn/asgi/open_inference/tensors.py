"""Tensors as the protocol carries them: as JSON, and as raw bytes (little-endian, row-major). No I/O.

A tensor of texts ("BYTES") has for each element its length in 4 bytes, and then its UTF-8. `FP16` and `BF16` travel as raw bytes only.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from types import GenericAlias
from typing import Annotated, Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from aionn.asgi.open_inference.refusals import RequestRefusal
from aionn.hal.types import Operand, OperandType

DATATYPES = {
    OperandType.BOOL: "BOOL",
    OperandType.UINT8: "UINT8",
    OperandType.UINT16: "UINT16",
    OperandType.UINT32: "UINT32",
    OperandType.UINT64: "UINT64",
    OperandType.INT8: "INT8",
    OperandType.INT16: "INT16",
    OperandType.INT32: "INT32",
    OperandType.INT64: "INT64",
    OperandType.FLOAT16: "FP16",
    OperandType.FLOAT32: "FP32",
    OperandType.FLOAT64: "FP64",
    OperandType.BFLOAT16: "BF16",
    OperandType.STRING: "BYTES",
}
"""The protocol's name of each element type. It has none for the other types of ONNX."""

MOST_AXES = 32
"""The most axes that a tensor may have. NumPy 1 takes no more."""
_LENGTH_BYTES = 4
_FEW_BYTES = 2**12
"""So many bytes are copied in less time than a view of them is made."""


def datatype(operand: Operand) -> str:
    """Return the protocol's name of an operand's type. Types that the protocol lacks have aionn's name in capitals."""
    if operand.word == operand.type.value and operand.type in DATATYPES:
        return DATATYPES[operand.type]
    return operand.word.upper()


def shape_of(operand: Operand) -> list[int]:
    """Return an operand's shape as metadata has it: -1 for an open extent, and [-1] where even the rank is open."""
    return [-1] if operand.dimensions is None else [extent or -1 for extent in operand.dimensions]


def only_binary(operand: Operand) -> bool:
    """Return whether tensors of that type cannot travel as JSON."""
    return operand.type in (OperandType.FLOAT16, OperandType.BFLOAT16)


# ---- raw bytes --------------------------------------------------------------------------------------------------------


def array_of(name: str, operand: Operand, shape: Sequence[int], data: memoryview) -> NDArray[Any]:
    """Return the array that raw bytes are. Numbers are not copied.

    Raises:
        Refusal: the bytes of texts have another form; or a truth value is neither 0 nor 1. The number of bytes has been checked before.
    """
    if operand.type is OperandType.STRING:
        return _texts(name, shape, data)
    array: NDArray[Any] = np.frombuffer(data, operand.type.dtype) if len(data) else np.empty(0, operand.type.dtype)
    if operand.type is OperandType.BOOL:
        check_bools(name, array)
    return array.reshape(tuple(shape))


def check_bools(name: str, data: NDArray[Any]) -> None:
    """Raise `RequestRefusal` if a byte of a tensor of truth values is neither 0 nor 1. Engines do not define what such a value does."""
    if data.size and data.view(np.uint8).max() > 1:
        raise RequestRefusal(400, f"input {name!r}: a BOOL is the byte 0 or 1, but the request has another one")


def _texts(name: str, shape: Sequence[int], data: memoryview) -> NDArray[Any]:
    count, at = prod(shape), 0
    found: list[str] = []
    while at < len(data):
        begin = at + _LENGTH_BYTES
        at = begin + int.from_bytes(data[at:begin], "little")
        if begin > len(data) or at > len(data):
            raise RequestRefusal(400, f"input {name!r}: element {len(found)} of the BYTES tensor goes beyond the end of its data")
        try:
            found.append(str(data[begin:at], "utf-8"))
        except UnicodeDecodeError as error:
            raise RequestRefusal(400, f"input {name!r}: element {len(found)} is not a text in UTF-8 ({error.reason})") from error
    if len(found) != count:
        raise RequestRefusal(400, f"input {name!r}: its data has {len(found)} elements, but its shape {list(shape)} has {count}")
    return _array_of_texts(found).reshape(tuple(shape))


def _array_of_texts(texts: list[str]) -> NDArray[Any]:
    array = np.empty(len(texts), object)
    array[:] = texts
    return array


def as_bytes(array: NDArray[Any]) -> bytes | memoryview:
    """Return a tensor as raw bytes. Many numbers are not copied if they lie in row-major order."""
    if array.dtype.hasobject:
        encoded = [text.encode("utf-8", "surrogateescape") for text in array.reshape(-1).tolist()]
        return b"".join(part for text in encoded for part in (len(text).to_bytes(_LENGTH_BYTES, "little"), text))
    if array.nbytes <= _FEW_BYTES:
        return array.tobytes()
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


# ---- JSON -------------------------------------------------------------------------------------------------------------


def from_json(name: str, operand: Operand, shape: Sequence[int], data: msgspec.Raw) -> NDArray[Any]:
    """Return the array that a JSON list is: nested as its shape says, or flat in row-major order.

    Raises:
        Refusal: it is not such a list; or an element has another type, or does not fit into the type.
    """
    if only_binary(operand):
        raise RequestRefusal(400, f"input {name!r}: {datatype(operand)} does not travel as JSON; send it as binary data")
    depth = _depth(memoryview(data))
    if depth not in (1, len(shape)):
        raise RequestRefusal(400, f"input {name!r}: give its data as a flat list, or nested as its shape {list(shape)} says")
    element = _ELEMENTS.get(operand.type, float)
    for _ in range(depth):
        element = GenericAlias(list, (element,))
    try:
        values = msgspec.json.decode(data, type=element)
        array = _array_of_values(operand, values, depth)
    except (msgspec.DecodeError, ValueError, OverflowError, FloatingPointError) as error:
        raise RequestRefusal(400, f"input {name!r}: its data does not fit {datatype(operand)} of shape {list(shape)}: {error}") from error
    if array.size != prod(shape) or array.shape not in (tuple(shape), (array.size,)):
        raise RequestRefusal(400, f"input {name!r}: its data has the shape {list(array.shape)}, which does not fit {list(shape)}")
    return array.reshape(tuple(shape))


def _depth(data: memoryview) -> int:
    """Return how many lists a JSON text opens at its beginning, as far as arrays have axes."""
    depth = 0
    for byte in data[: 4 * MOST_AXES]:
        if byte == ord("["):
            depth += 1
        elif byte not in b" \t\r\n":
            break
    return depth


_INT_BITS = {
    OperandType.UINT8: (0, 2**8 - 1),
    OperandType.UINT16: (0, 2**16 - 1),
    OperandType.UINT32: (0, 2**32 - 1),
    OperandType.INT8: (-(2**7), 2**7 - 1),
    OperandType.INT16: (-(2**15), 2**15 - 1),
    OperandType.INT32: (-(2**31), 2**31 - 1),
}
_ELEMENTS: dict[OperandType, Any] = {
    **{kind: Annotated[int, msgspec.Meta(ge=least, le=most)] for kind, (least, most) in _INT_BITS.items()},
    OperandType.INT64: int,  # NumPy raises an OverflowError for larger ones
    OperandType.UINT64: Annotated[int, msgspec.Meta(ge=0)],
    OperandType.BOOL: bool,
    OperandType.STRING: str,
}


def _array_of_values(operand: Operand, values: list[Any], depth: int) -> NDArray[Any]:
    if operand.type is OperandType.STRING:
        array = np.array(values, object)
        if array.ndim != depth:  # lists of several lengths became elements
            raise ValueError("its lists have several lengths")
        return array
    if operand.type is OperandType.FLOAT32:
        with np.errstate(over="raise"):
            return np.array(values, np.float64).astype(np.float32)
    return np.array(values, operand.type.dtype)


def as_json(name: str, operand: Operand, array: NDArray[Any]) -> list[Any]:
    """Return a tensor as a flat list for JSON.

    Raises:
        Refusal: it has values that JSON cannot carry.
    """
    if only_binary(operand):
        raise _no_json(name, f"a tensor of type {datatype(operand)}")
    if operand.type in (OperandType.FLOAT32, OperandType.FLOAT64) and not np.isfinite(array).all():
        raise _no_json(name, "NaN or infinity")
    values: list[Any] = array.reshape(-1).tolist()
    if operand.type is OperandType.STRING and not all(text.isascii() or _is_unicode(text) for text in values):
        raise _no_json(name, "a text that is not UTF-8")
    return values


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _no_json(name: str, what: str) -> RequestRefusal:
    return RequestRefusal(400, f"output {name!r} has {what}, which JSON cannot carry; ask for it as binary data")
