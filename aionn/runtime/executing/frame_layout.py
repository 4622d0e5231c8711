"""How a frame is laid out for one set of input shapes (`FrameLayout`), what counts as an array, and the outputs of an execution."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from math import prod
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from aionn.errors import CallerError, ExecutionError, UnknownNameError, refuse_coroutine
from aionn.hal.model import Model
from aionn.hal.types import DataLocation, ErrorStatus, Operand, OutputShape, Request, RequestArgument, Timing
from aionn.memory.pool import MemoryFrame, aligned

Shapes = tuple[tuple[int, ...], ...]

_READABLE = (1, 3, 11)
"""DLPack's numbers of memory that the CPU reads: its own, and that which CUDA or ROCm has pinned."""


def as_array(name: str, value: Any) -> NDArray[Any]:
    """Return what an app passes for an input as an array, without a copy.

    That is an array, a NumPy scalar, or an object of another library that offers one (`__array_interface__`, `__dlpack__`). Plain
    Python numbers have no dtype to check.

    Raises:
        CallerError: the object offers no array, or none that the CPU can read.
    """
    if isinstance(value, np.ma.MaskedArray):
        raise CallerError(f"input {name!r}: a model knows no mask; pass {name}.filled(value), or {name}.data for what lies under it")
    if isinstance(value, np.ndarray | np.generic):
        return np.asarray(value)
    kind = type(value).__name__
    try:
        if hasattr(value, "__array_interface__"):
            return np.asarray(value)
    except Exception as error:  # the other library's
        why = " ".join(str(error).split()).rstrip(".")
        raise CallerError(f"input {name!r}: this {kind} cannot be read as an array ({why}); pass a NumPy array of it") from error
    if not hasattr(value, "__dlpack__") or not hasattr(value, "__dlpack_device__"):
        refuse_coroutine(value, f"input {name!r}")
        raise CallerError(f"input {name!r}: expected a NumPy array, got {kind}; pass np.asarray(value, dtype=...)")
    try:
        device = int(value.__dlpack_device__()[0])
        if device in _READABLE:
            return np.from_dlpack(value)
    except Exception as error:  # the other library's: the tensor needs gradients, or has a type that NumPy lacks
        why = " ".join(str(error).split()).rstrip(".")
        raise CallerError(f"input {name!r}: this {kind} cannot be read through DLPack ({why}); pass a NumPy array of it") from error
    raise CallerError(
        f"input {name!r}: this {kind} lies in a device's memory (DLPack's type {device}); pass a copy in the CPU's memory, as {name}.cpu()"
    )


class Outputs(dict[str, NDArray[Any]]):
    """Outputs of one execution by name.

    Attributes:
        timing: `hal.Timing` in microseconds if it was asked for, else None.
        device: name of the device that computed them.
        stage: name of the stage that computed them; the device's own name outside staged compilations.
    """

    __slots__ = ("device", "stage", "timing")

    def __init__(
        self, values: Mapping[str, NDArray[Any]] | Sequence[tuple[str, NDArray[Any]]], device: str, timing: Timing | None = None
    ) -> None:
        self.update(values)
        self.timing = timing
        self.device = device
        self.stage = device

    def __missing__(self, name: object) -> NoReturn:
        raise UnknownNameError(f"the model has no output {name!r} here; the outputs are {list(self)}")


class FrameLayout:
    """How a frame is laid out for one set of input shapes.

    Attributes:
        frame_bytes: size of the frame.
        inputs: (name, dtype, shape, offset) per input.
        outputs: (name, dtype, shape or None while open, offset, length) per output.
        shapes: of all inputs, and then of all outputs.
        declared: of each output the shape that the model declares for these inputs; None while open.
        known: whether every output's shape is, as the model declares it.
        answered: whether the room for outputs comes from an answer, and not from the model or a guess.
        input_bytes: of all inputs together.
    """

    __slots__ = (
        "_believed",
        "answered",
        "declared",
        "frame_bytes",
        "input_bytes",
        "inputs",
        "known",
        "outputs",
        "outputs_key",
        "shapes",
    )

    def __init__(
        self,
        model: Model,
        believed: dict[str, Operand],
        input_shapes: Shapes,
        declared: Sequence[tuple[int, ...] | None],
        room: Sequence[int],
    ) -> None:
        """
        Args:
            believed: see `Arguments.outputs`.
            declared: see the attribute.
            room: bytes for each output whose shape is not known, or not believed.
        """
        self._believed = believed
        self.declared = declared
        self.input_bytes = 0
        self.answered = False
        self.outputs_key = object()
        at, inputs, outputs = 0, [], []
        for (name, operand), shape in zip(model.inputs.items(), input_shapes, strict=True):
            inputs.append((name, operand.type.dtype, shape, at))
            length = prod(shape) * operand.type.element_bytes
            self.input_bytes += length
            at += aligned(length or 1)
        for (name, operand), told, length in zip(model.outputs.items(), declared, room, strict=True):
            known = told if believed[name].dimensions == operand.dimensions else None
            size = length if known is None else prod(known) * operand.type.element_bytes
            outputs.append((name, operand.type.dtype, known, at, size))
            at += aligned(size or 1)
        self.shapes = (*input_shapes, *(output[2] for output in outputs))
        self.known = None not in self.shapes
        self.frame_bytes = aligned(at or 1)
        self.inputs, self.outputs = tuple(inputs), tuple(outputs)

    def request(self, frame_offset: int) -> Request:
        """Return the request of a frame that begins at that byte of pool 0."""
        inputs, outputs = [], []
        for _, dtype, shape, offset in self.inputs:
            inputs.append(RequestArgument(DataLocation(0, frame_offset + offset, prod(shape) * dtype.itemsize), shape))
        for _, _, shape_or_none, offset, length in self.outputs:
            outputs.append(RequestArgument(DataLocation(0, frame_offset + offset, length), shape_or_none or ()))
        return Request(tuple(inputs), tuple(outputs))

    def lacks_room(self, index: int, answered: OutputShape) -> bool:
        """Return whether an output may be of that shape, and has no room for it."""
        _, dtype, _, _, length = self.outputs[index]
        return min(answered.dimensions, default=0) >= 0 and prod(answered.dimensions) * dtype.itemsize > length

    def learn(self, index: int, answered: tuple[int, ...]) -> None:
        """Note that an output has that shape. If the model declares another one, its declaration is not believed from now on."""
        name, _, shape, _, _ = self.outputs[index]
        if shape not in (None, answered):
            self._believed[name] = Operand(self._believed[name].type, None)

    def fits(self, inputs: Mapping[str, Any]) -> bool:
        """Return whether these are plain arrays of exactly this layout's shapes and dtypes. A stream asks for each later frame."""
        if type(inputs) is not dict or len(inputs) != len(self.inputs):
            return False  # a `Frame` is not a dict
        for name, dtype, shape, _ in self.inputs:
            array = inputs.get(name)
            if type(array) is not np.ndarray or array.shape != shape or (array.dtype is not dtype and array.dtype != dtype):
                return False
        return True

    def inputs_in(self, frame: MemoryFrame) -> dict[str, NDArray[Any]]:
        """Return the inputs' places in the frame, by name."""
        return frame.arrays.get(self) or frame.cut(self, self.inputs)

    def _known_places(self) -> list[tuple[str, np.dtype[Any], tuple[int, ...], int]]:
        return [(name, dtype, shape, offset) for name, dtype, shape, offset, _ in self.outputs if shape is not None]

    def outputs_in(
        self, frame: MemoryFrame, shapes: Sequence[OutputShape] = (), elsewhere: Collection[str] = ()
    ) -> Mapping[str, NDArray[Any]]:
        """Return the outputs in the frame, by name.

        Args:
            shapes: the driver's answer; empty if all are as asked.
            elsewhere: names of outputs that do not lie in the frame.

        Raises:
            ExecutionError: the driver's answer contradicts this request.
        """
        if not shapes and self.known:
            key = (self.outputs_key, *elsewhere) if elsewhere else self.outputs_key
            found = frame.arrays.get(key)
            return frame.cut(key, [place for place in self._known_places() if place[0] not in elsewhere]) if found is None else found
        places = []
        if shapes and len(shapes) != len(self.outputs):
            raise false_shapes(f"{len(shapes)} shapes came for {len(self.outputs)} outputs")
        for index, (name, dtype, shape, offset, length) in enumerate(self.outputs):
            if name in elsewhere:
                continue
            # A driver that has not seen the declaration fail says nothing of an output that came out as declared.
            answered = shapes[index].dimensions if shapes else self.declared[index]
            if answered is None:
                raise false_shapes(f"none came for output {name!r}")
            if min(answered, default=0) < 0 or prod(answered) * dtype.itemsize > length:
                raise false_shapes(f"output {name!r} of shape {answered} has room for {length} bytes")
            if answered != shape:
                self.learn(index, answered)
            places.append((name, dtype, answered, offset))
        return frame.cut((self, *[place[2] for place in places], *[place[0] for place in places]), places)


def false_shapes(found: str) -> ExecutionError:
    """Return the error for a driver's answer that contradicts the request."""
    return ExecutionError(f"the driver's answer contradicts the request: {found}", status=ErrorStatus.GENERAL_FAILURE)
