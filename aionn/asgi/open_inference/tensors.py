"""Tensors as the protocol carries them: as JSON, and as raw bytes (little-endian, row-major). No I/O.

A tensor of texts ("BYTES") has for each element its length in 4 bytes, and then its UTF-8. `FP16` and `BF16` travel as raw bytes only.

The JSON of a request for inference says what it asks of a model (`ModelRequest`).

Invariant
    An `ModelRequest` names every input that the model needs, once, with the model's type and a shape that fits it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from types import GenericAlias
from typing import Annotated, Any, Literal

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


_KNOWN = frozenset(DATATYPES.values())
_SHARED_MEMORY = "shared_memory_region"
_CHECKED = (OperandType.BOOL, OperandType.STRING)
"""Not every byte is a value of these types, so each is looked at."""


class InputMessage(msgspec.Struct):
    name: str
    shape: list[Annotated[int, msgspec.Meta(ge=0)]]
    datatype: str
    parameters: dict[str, Any] = {}
    data: msgspec.Raw = msgspec.Raw()


class OutputMessage(msgspec.Struct):
    name: str
    parameters: dict[str, Any] = {}


class RequestMessage(msgspec.Struct):
    inputs: list[InputMessage]
    id: str = ""
    parameters: dict[str, Any] = {}
    outputs: list[OutputMessage] = []


@dataclass(frozen=True, slots=True)
class Tensor:
    """One input of a request.

    Attributes:
        binary_bytes: the size of its raw bytes, or None if its values are in `data` as JSON.
        dtype: of its raw bytes, if they are numbers and any bytes are values of the type. Else None.
    """

    name: str
    operand: Operand
    shape: tuple[int, ...]
    binary_bytes: int | None
    data: msgspec.Raw
    dtype: np.dtype[np.generic] | None


@dataclass(slots=True)
class ModelRequest:
    """What a request asks of a model. Requests with the same JSON share one.

    Attributes:
        id: by which the client knows the request. Empty if the request has no id.
        inputs: in the order in which their raw bytes follow the JSON.
        outputs: by name, in the order of the answer, whether the client wants raw bytes.
        timeout_s: seconds in which the client wants the answer, or None.
        timing: whether the client wants to know how long the model took.
        binary_bytes: how many raw bytes follow the JSON.
        raw: which of the outputs the client wants as raw bytes.
        answered: the JSON of the last answer and the shapes that it names, if nothing else of the answer is in it. Else empty.
    """

    id: str
    inputs: tuple[Tensor, ...]
    outputs: Mapping[str, bool]
    timeout_s: float | None
    timing: bool
    binary_bytes: int = field(init=False)
    raw: Literal["all", "some", "none"] = field(init=False)
    answered: tuple[bytes, list[tuple[int, ...]] | None] = (b"", None)

    def __post_init__(self) -> None:
        self.binary_bytes = sum(tensor.binary_bytes or 0 for tensor in self.inputs)
        self.raw = "none" if not any(self.outputs.values()) else "all" if all(self.outputs.values()) else "some"


_DECODER = msgspec.json.Decoder(RequestMessage)


def decoded(text: bytes | memoryview) -> RequestMessage:
    """Return the JSON of a request.

    Raises:
        Refusal: it is not JSON, or has another form than the protocol's.
    """
    try:
        return _DECODER.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RequestRefusal(400, f"the request does not have the form that the Open Inference Protocol prescribes: {error}") from error


def asked_of(message: RequestMessage, inputs: Mapping[str, Operand], outputs: Mapping[str, Operand]) -> ModelRequest:
    """Return what a request asks of a model with these inputs and outputs.

    Raises:
        Refusal: they do not go together, or the request asks for what is not supported.
    """
    if message.parameters.get("sequence_id") or message.parameters.get("sequence_start") or message.parameters.get("sequence_end"):
        raise RequestRefusal(400, "this server keeps no state for a sequence; send the state as an input, and take it from an output")
    tensors = tuple(_tensor(one, inputs) for one in message.inputs)
    names = {tensor.name for tensor in tensors}
    if len(names) < len(tensors):
        raise RequestRefusal(400, "the request has an input twice; give each input once")
    missing = [name for name, operand in inputs.items() if name not in names and operand.default is None]
    if missing:
        raise RequestRefusal(400, f"the request has no input {missing[0]!r}; the model's inputs are {list(inputs)}")
    return ModelRequest(
        message.id,
        tensors,
        _wanted(message, outputs),
        _timeout_s(message.parameters),
        _flag("the request", message.parameters, "aionn_timing", False),
    )


def _tensor(message: InputMessage, inputs: Mapping[str, Operand]) -> Tensor:
    name, shape = message.name, tuple(message.shape)
    operand = inputs.get(name)
    if operand is None:
        raise RequestRefusal(400, f"the model has no input {name!r}; its inputs are {list(inputs)}")
    wanted = datatype(operand)
    if wanted not in _KNOWN:
        raise RequestRefusal(400, f"input {name!r} of the model is of type {operand.word}, which the Open Inference Protocol lacks")
    if message.datatype not in _KNOWN:
        raise RequestRefusal(
            400, f"input {name!r}: {message.datatype!r} is not a datatype; the datatypes are {', '.join(DATATYPES.values())}"
        )
    if message.datatype != wanted:
        raise RequestRefusal(400, f"input {name!r}: the datatype {message.datatype} does not fit the model's {wanted}; values are not cast")
    if not operand.accepts(shape):
        raise RequestRefusal(400, f"input {name!r}: the shape {list(shape)} does not fit the model's {shape_of(operand)}")
    if len(shape) > MOST_AXES:  # of a model that takes any rank
        raise RequestRefusal(400, f"input {name!r}: the shape {list(shape)} has {len(shape)} axes; give at most {MOST_AXES}")
    if max(shape, default=0) >= 2**31 or prod(max(extent, 1) for extent in shape) * max(operand.type.element_bytes, 1) >= 2**63:
        # Such a tensor may have no elements, and so no data. Neither NumPy nor a burst takes it.
        raise RequestRefusal(400, f"input {name!r}: the shape {list(shape)} is beyond what an array can have")
    if _SHARED_MEMORY in message.parameters:
        raise RequestRefusal(400, f"input {name!r}: this server takes no shared memory; send the data in the request")
    size = message.parameters.get("binary_data_size")
    in_json = bool(memoryview(message.data))
    if (size is None) is not in_json:
        raise RequestRefusal(400, f"input {name!r}: give either its data or the parameter binary_data_size")
    if size is not None:
        _check_size(name, operand, shape, size)
    elif only_binary(operand):
        raise RequestRefusal(400, f"input {name!r}: {wanted} does not travel as JSON; send it as binary data")
    dtype = None if size is None or operand.type in _CHECKED else operand.type.dtype
    return Tensor(name, operand, shape, size, message.data, dtype)


def _check_size(name: str, operand: Operand, shape: tuple[int, ...], size: Any) -> None:
    if type(size) is not int or size < 0:
        raise RequestRefusal(400, f"input {name!r}: binary_data_size is {size!r}; give a number of bytes")
    needed = prod(shape) * operand.type.element_bytes
    if operand.type is not OperandType.STRING and size != needed:
        raise RequestRefusal(
            400, f"input {name!r}: binary_data_size is {size}, but {datatype(operand)} of shape {list(shape)} has {needed} bytes"
        )


def _wanted(message: RequestMessage, outputs: Mapping[str, Operand]) -> Mapping[str, bool]:
    """Return which outputs the client wants, and which of them as raw bytes. By default it wants all, as JSON."""
    binary = _flag("the request", message.parameters, "binary_data_output", False)
    asked: Iterable[OutputMessage] = message.outputs or [OutputMessage(name) for name in outputs]
    found: dict[str, bool] = {}
    for one in asked:
        operand = outputs.get(one.name)
        if operand is None:
            raise RequestRefusal(400, f"the model has no output {one.name!r}; its outputs are {list(outputs)}")
        if one.name in found:
            raise RequestRefusal(400, f"the request asks for output {one.name!r} twice; ask once")
        if one.parameters.get("classification"):
            raise RequestRefusal(400, f"output {one.name!r}: this server does not classify; leave out the parameter classification")
        if _SHARED_MEMORY in one.parameters:
            raise RequestRefusal(400, f"output {one.name!r}: this server takes no shared memory; the answer has the data")
        if datatype(operand) not in _KNOWN:
            raise RequestRefusal(
                400,
                f"output {one.name!r} is of type {operand.word}, which the Open Inference Protocol lacks; ask for other outputs",
            )
        found[one.name] = _flag(f"output {one.name!r}", one.parameters, "binary_data", binary)
        if only_binary(operand) and not found[one.name]:
            raise RequestRefusal(400, f"output {one.name!r}: {datatype(operand)} does not travel as JSON; ask for it as binary data")
    return found


def _flag(where: str, parameters: Mapping[str, Any], name: str, otherwise: bool) -> bool:
    value = parameters.get(name, otherwise)
    if not isinstance(value, bool):
        raise RequestRefusal(400, f"{where}: the parameter {name} is {value!r}; give true or false")
    return value


def _timeout_s(parameters: Mapping[str, Any]) -> float | None:
    value = parameters.get("timeout")
    if value is None or value == 0:  # in Triton, 0 stands for no timeout
        return None
    if type(value) is not int or not 0 < value < 2**63:
        raise RequestRefusal(400, f"the parameter timeout is {value!r}; give a positive number of microseconds")
    return value / 1e6
