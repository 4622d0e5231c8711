"""The arguments of an execution: checked (`Arguments`), laid out in a frame (`FrameLayout`), described in a request; and its `Outputs`.

Shapes and dtypes are never converted: a float64 array for a float32 input is refused, a strided one is simply copied. The
layout of a frame for one set of input shapes is worked out once (`FrameLayout`) and remembered. A stream of equal frames pays for it once.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Mapping, Sequence
from math import prod
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from aionn.errors import (
    AionnError,
    CallerError,
    DeadlineError,
    ExecutionError,
    OutputInsufficientSizeError,
    UnknownNameError,
    refuse_coroutine,
)
from aionn.escapes import escaped
from aionn.graph.shapes import resolve_shapes
from aionn.hal.model import PooledModel
from aionn.hal.types import DataLocation, ErrorStatus, Operand, OutputShape, Request, RequestArgument, Result, Timing
from aionn.hal.values import default_of, outside_frames
from aionn.memo import Memo
from aionn.memory.memory import extents_of
from aionn.memory.pool import MemoryFrame, aligned
from aionn.memory.region import PAGE_BYTES

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
        expected: of each output the shape that the model declares for these inputs or that an answer had; None while open.
        known: whether every output's shape is expected, and no answer has shown another one.
        answered: whether the room for outputs comes from an answer, and not from the model or a guess.
        input_bytes: of all inputs together.
    """

    __slots__ = (
        "_believed",
        "answered",
        "expected",
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
        model: PooledModel,
        believed: dict[str, Operand],
        input_shapes: Shapes,
        declared: Sequence[tuple[int, ...] | None],
        room: Sequence[int],
        answered: Sequence[OutputShape],
    ) -> None:
        """
        Args:
            believed: see `Arguments.outputs`.
            declared: of each output the shape that the model declares for these inputs; None while open.
            room: bytes for each output whose shape is not declared, or not believed.
            answered: the shapes in an answer to such inputs, or nothing.
        """
        self._believed = believed
        seen = [None if 0 in shape.dimensions else shape.dimensions or None for shape in answered] or declared
        self.expected = [after if told is None else told for told, after in zip(declared, seen, strict=True)]
        self.input_bytes = 0
        self.answered = bool(answered)
        self.outputs_key = object()
        at, inputs, outputs = 0, [], []
        for (name, operand), shape in zip(model.inputs.items(), input_shapes, strict=True):
            inputs.append((name, operand.type.dtype, shape, at))
            length = prod(shape) * operand.type.element_bytes
            self.input_bytes += length
            at += aligned(length or 1)
        for (name, operand), told, shape_or_none, length in zip(model.outputs.items(), declared, self.expected, room, strict=True):
            is_believed = believed[name].dimensions == operand.dimensions
            size = prod(told) * operand.type.element_bytes if is_believed and told is not None else length
            outputs.append((name, operand.type.dtype, shape_or_none if is_believed else None, at, size))
            at += aligned(size or 1)
        self.shapes = (*input_shapes, *[output[2] for output in outputs])
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
            answered = shapes[index].dimensions if shapes else self.expected[index]
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


_REMEMBERED = 64
_FIRST_GUESS_BYTES = 4096
"""Room for an output of unknown shape before the model has run once with these input shapes, at least."""


class Arguments:
    """The arguments that one model takes. Remembers the layout for each set of input shapes.

    Attributes:
        model: whose arguments they are.
        names: of the model's inputs, in its order.
        defaults: by name what an input holds where an app leaves it out.
        values: whether the model has strings, sequences, maps or optionals, which have no place in a frame.
        outputs: operands of the model's outputs by name. One that came out in another shape than the model declares has no
            dimensions: files do declare wrong shapes.
    """

    def __init__(self, model: PooledModel) -> None:
        self.model = model
        self.outputs = dict(model.outputs)
        self.names = tuple(model.inputs)
        self.values = bool(outside_frames(model))
        self._operands = tuple(model.inputs.items())
        self._checks = tuple((name, operand, operand.type.dtype) for name, operand in self._operands)
        self.defaults = {name: default for name, operand in self._operands if (default := default_of(operand)) is not None}
        self._layouts: Memo[Shapes, FrameLayout] = Memo(_REMEMBERED)

    @property
    def disproved(self) -> tuple[str, ...]:
        """Names of outputs that came out in another shape than the model declares."""
        return tuple(name for name, operand in self.model.outputs.items() if self.outputs[name].dimensions != operand.dimensions)

    def complete(self, inputs: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the inputs with the defaults of those that are left out."""
        if len(inputs) == len(self.names) or not self.defaults:
            return inputs
        return {**{name: array for name, array in self.defaults.items() if name not in inputs}, **inputs}

    def shapes_of(self, inputs: Mapping[str, Any], placed: Mapping[str, tuple[int, ...]] | None = None) -> Shapes:
        """Check names, dtypes and shapes. Returns the shapes, in the model's order. `placed`: shapes of inputs that are not arrays.

        Raises:
            CallerError: all that does not fit, what would, and nothing is done.
        """
        shapes, wrong = [], []
        named, cause = len(inputs) == len(self.names), None
        for name, operand, dtype in self._checks:
            array = inputs.get(name)
            if type(array) is not np.ndarray:
                if placed is not None and name in placed:
                    shapes.append(placed[name])
                    continue
                if array is None and name not in inputs:
                    named = False
                    continue
                try:
                    array = as_array(name, array)
                except CallerError as error:
                    wrong.append(str(error))
                    cause = cause or error.__cause__
                    continue
            shape = array.shape
            if array.dtype != dtype:
                package = "np" if operand.type.in_numpy else "ml_dtypes"
                wrong.append(
                    f"input {name!r}: dtype {array.dtype} does not fit the model's {dtype}. Nothing is cast in silence; "
                    f"pass {name}.astype({package}.{dtype}) if that is meant"
                )
            if shape != operand.dimensions and not operand.accepts(shape):
                wrong.append(_misfit(name, operand, shape))
            shapes.append(shape)
        if not named:
            wrong.insert(0, self._wrong_names(inputs))
        if wrong:
            raise CallerError(". Also, ".join(wrong)) from cause
        return tuple(shapes)

    def check_shapes(self, shapes: Mapping[str, Sequence[int]]) -> Shapes:
        """Check shapes alone, as `shapes_of` does. An input that the model knows in full may be left out."""
        if not isinstance(shapes, Mapping):
            raise CallerError(f"shapes: expected a dict of shapes by input name, got {type(shapes).__name__}")
        unknown = shapes.keys() - set(self.names)
        if unknown:
            raise CallerError(f"shapes name {sorted(unknown)}, which the model does not have; its inputs are {list(self.names)}")
        chosen, wrong = [], []
        for name, operand in self._operands:
            if name in self.defaults and name not in shapes:
                chosen.append(self.defaults[name].shape)
                continue
            shape = extents_of(shapes.get(name, operand.dimensions or ()))
            if name not in shapes and (operand.dimensions is None or 0 in operand.dimensions):
                wrong.append(
                    f"input {name!r} has open dimensions {operand.dimensions}: say its shape, as in frame(shapes={{{name!r}: (...)}})"
                )
            elif not operand.accepts(shape):
                wrong.append(_misfit(name, operand, shape))
            chosen.append(shape)
        if wrong:
            raise CallerError(". Also, ".join(wrong))
        return tuple(chosen)

    def usual_layout(self) -> FrameLayout | None:
        """Return the layout that every request has if the model knows the shapes of all its inputs, else None."""
        if self.values or any(operand.size_bytes is None for operand in self.model.inputs.values()):
            return None
        return self.layout(self.check_shapes({}))

    def _wrong_names(self, inputs: Mapping[str, Any]) -> str:
        given, wanted = set(inputs), set(self.names)
        problems = []
        if missing := sorted(wanted - given - self.defaults.keys()):
            problems.append(f"without {missing}")
        if unknown := sorted(map(str, given - wanted)):
            problems.append(f"with {unknown}, which the model does not have")
        return f"inputs {' and '.join(problems)}; the model's inputs are {list(self.names)}"

    def layout(self, input_shapes: Shapes) -> FrameLayout:
        """Return how a frame with these inputs is laid out."""
        layout = self._layouts.get(input_shapes)
        if layout is None:
            guess = max(_FIRST_GUESS_BYTES, 2 * sum(map(prod, input_shapes)) * 4)
            layout = self._make(input_shapes, [guess] * len(self.outputs))
        return layout

    def widen(self, input_shapes: Shapes, answered: Sequence[OutputShape]) -> FrameLayout:
        """Return a layout with room for outputs of these shapes, after the driver found too little.

        An output that outgrows the room of an answer before has other shapes for the same inputs. It gets twice what it needs, because
        each retry costs a run.
        """
        before = self.layout(input_shapes)
        if not any(before.lacks_room(index, shape) for index, shape in enumerate(answered)):
            return before  # another request has found the same
        room = []
        for index, ((_, dtype, _, _, length), shape) in enumerate(zip(before.outputs, answered, strict=True)):
            needed = prod(shape.dimensions) * dtype.itemsize
            room.append(needed * 2 if before.answered and before.lacks_room(index, shape) else max(length, needed))
        return self._make(input_shapes, room, answered)

    def fit(self, layout: FrameLayout, answered: Sequence[OutputShape]) -> FrameLayout:
        """Return a layout without the room that a guess had given to outputs of these shapes, or `layout` if it was not a guess."""
        if layout.known or layout.answered or not answered:
            return layout
        input_shapes = tuple(shape for _, _, shape, _ in layout.inputs)
        current = self._layouts.get(input_shapes)
        if current is not layout and current is not None:
            return current  # the answer to another request over such a frame came before
        room = [  # whole pages, so that small outputs whose size varies seldom need a second run
            -(-max(1, prod(shape.dimensions) * dtype.itemsize) // PAGE_BYTES) * PAGE_BYTES
            for (_, dtype, _, _, _), shape in zip(layout.outputs, answered, strict=True)
        ]
        return self._make(input_shapes, room, answered)

    def _make(self, input_shapes: Shapes, room: Sequence[int], answered: Sequence[OutputShape] = ()) -> FrameLayout:
        """Return a layout with that room for open outputs; at least what the model declares, since a new driver still goes by that.

        `answered`: an answer to such inputs. An output whose shape the model leaves open is expected in the same shape again, so that
        engines write it in place, and answers need no shapes. Where that fails, its shape is left open from then on, as where a file
        declares a wrong one.
        """
        found = resolve_shapes(self.model.outputs, self.model.inputs, dict(zip(self.names, input_shapes, strict=True)))
        # A request cannot say that an output will be empty (0 is an open extent), so the driver says it.
        declared = [None if shape is None or 0 in shape else shape for shape in map(found.get, self.outputs)]
        roomy = [
            max(length, 0 if shape is None else prod(shape) * operand.type.element_bytes)
            for operand, shape, length in zip(self.outputs.values(), declared, room, strict=True)
        ]
        layout = self._layouts[input_shapes] = FrameLayout(self.model, self.outputs, input_shapes, declared, roomy, answered)
        return layout

    def may_retry(self, layout: FrameLayout, result: Result, placed: Container[int] = ()) -> bool:
        """Return whether more room would help: the answer has shapes, and an output in the frame (not `placed`) did not fit.

        Where an output has room for its shape and the driver calls it too little, a retry would never end.
        """
        if result.status is not ErrorStatus.OUTPUT_INSUFFICIENT_SIZE or len(result.output_shapes) != len(layout.outputs):
            return False
        short = [index for index, shape in enumerate(result.output_shapes) if not shape.is_sufficient]
        for index in short:
            if layout.lacks_room(index, result.output_shapes[index]):
                layout.learn(index, result.output_shapes[index].dimensions)
        return bool(short) and all(index not in placed and layout.lacks_room(index, result.output_shapes[index]) for index in short)


def check_mapping(inputs: Any) -> None:
    """Refuse inputs without names.

    Raises:
        CallerError: they are not a mapping.
    """
    if not isinstance(inputs, Mapping):
        refuse_coroutine(inputs, "what was passed for the inputs")
        raise CallerError(
            f"expected inputs as a mapping, got {type(inputs).__name__}; pass one array per input by name, as in {{'input': x}}"
        )


def _misfit(name: str, operand: Operand, shape: tuple[int, ...]) -> str:
    return f"input {name!r}: shape {shape} does not fit the model's {operand.dimensions}; open dimensions are 0"


def failure_of(result: Result, model: PooledModel, device: str) -> AionnError:
    """Return what a result that is not NONE means to the caller."""
    status = result.status
    why, _, place = escaped(result.message).partition("\nat ")  # the last line says where the engine has a bug
    error = _failure(status, why or "the driver gave no reason", result, model, device)
    if place:
        error.add_note(f"at {place}")
    return error


def _failure(status: ErrorStatus, why: str, result: Result, model: PooledModel, device: str) -> AionnError:
    match status:
        case ErrorStatus.INVALID_ARGUMENT:
            return CallerError(f"device {device!r} refused the request: {why}")
        case ErrorStatus.MISSED_DEADLINE_TRANSIENT | ErrorStatus.MISSED_DEADLINE_PERSISTENT:
            return DeadlineError(f"device {device!r}: {why}", transient=status is ErrorStatus.MISSED_DEADLINE_TRANSIENT)
        case ErrorStatus.OUTPUT_INSUFFICIENT_SIZE:
            shapes = {name: answered.dimensions for name, answered in zip(model.outputs, result.output_shapes, strict=False)}
            return OutputInsufficientSizeError(f"device {device!r}: {why}", status=status, shapes=shapes)
        case _:
            return ExecutionError(f"device {device!r} failed ({status.name}): {why}", status=status)
