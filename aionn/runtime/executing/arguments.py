"""The arguments of an execution: checked, laid out in a frame, and described in a request.

Shapes and dtypes are never converted: a float64 array for a float32 input is refused, a strided one is simply copied. The
layout of a frame for one set of input shapes is worked out once (`FrameLayout`) and remembered. A stream of equal frames pays for it once.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from math import prod
from typing import Any

import numpy as np

from aionn.errors import AionnError, CallerError, DeadlineError, ExecutionError, OutputInsufficientSizeError, refuse_coroutine
from aionn.escapes import escaped
from aionn.graph.shapes import resolve_shapes
from aionn.hal.model import Model
from aionn.hal.types import ErrorStatus, Operand, OutputShape, Result
from aionn.hal.values import default_of, outside_frames
from aionn.memo import Memo
from aionn.memory.memory import extents_of
from aionn.memory.region import PAGE_BYTES
from aionn.runtime.executing.frame_layout import FrameLayout, Shapes, as_array

_REMEMBERED = 64
_FIRST_GUESS_BYTES = 4096
"""Room for an output of unknown shape before the model has run once with these input shapes, at least."""


class Arguments:
    """The arguments that one model takes. Remembers the layout for each set of input shapes.

    Attributes:
        names: of the model's inputs, in its order.
        defaults: by name what an input holds where an app leaves it out.
        values: whether the model has strings, sequences, maps or optionals, which have no place in a frame.
        outputs: operands of the model's outputs by name. One that came out in another shape than the model declares has no
            dimensions: files do declare wrong shapes.
    """

    def __init__(self, model: Model) -> None:
        self._model = model
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
        return tuple(name for name, operand in self._model.outputs.items() if self.outputs[name].dimensions != operand.dimensions)

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
            guess = max(_FIRST_GUESS_BYTES, 2 * sum(prod(s) for s in input_shapes) * 4)
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
        return self._make(input_shapes, room, answered=True)

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
        return self._make(input_shapes, room, answered=True)

    def _make(self, input_shapes: Shapes, room: Sequence[int], *, answered: bool = False) -> FrameLayout:
        """Return a layout with that room for open outputs; at least what the model declares, since a new driver still goes by that."""
        found = resolve_shapes(self._model.outputs, self._model.inputs, dict(zip(self.names, input_shapes, strict=True)))
        # A request cannot say that an output will be empty (0 is an open extent), so the driver says it.
        declared = [None if shape is None or 0 in shape else shape for shape in map(found.get, self.outputs)]
        roomy = [
            max(length, 0 if shape is None else prod(shape) * operand.type.element_bytes)
            for operand, shape, length in zip(self.outputs.values(), declared, room, strict=True)
        ]
        layout = FrameLayout(self._model, self.outputs, input_shapes, declared, roomy)
        layout.answered = answered
        self._layouts[input_shapes] = layout
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


def failure_of(result: Result, model: Model, device: str) -> AionnError:
    """Return what a result that is not NONE means to the caller."""
    status = result.status
    why, _, place = escaped(result.message).partition("\nat ")  # the last line says where the engine has a bug
    error = _failure(status, why or "the driver gave no reason", result, model, device)
    if place:
        error.add_note(f"at {place}")
    return error


def _failure(status: ErrorStatus, why: str, result: Result, model: Model, device: str) -> AionnError:
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
