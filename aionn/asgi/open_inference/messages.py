"""The JSON of a request for inference, and what it asks of a model. No I/O.

Invariant
    An `ModelRequest` names every input that the model needs, once, with the model's type and a shape that fits it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Annotated, Any, Literal

import msgspec
import numpy as np

from aionn.asgi.open_inference.refusals import RequestRefusal
from aionn.asgi.open_inference.tensors import DATATYPES, MOST_AXES, datatype, only_binary, shape_of
from aionn.hal.types import Operand, OperandType

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
