"""Find out whether the rows of a model's inputs stay apart: run it with several rows, and compare each row with the same row alone.

The name of an axis proves nothing, and neither does shape inference. So a model is run on made-up rows before its requests are joined.

    alone        each row of a run with 4 rows equals the run of that row alone
    neighbours   a row keeps its value when all other rows are replaced by others, made 1e30, or made NaN
    places       the rows of each output lie along one axis, which the shapes at two sizes show

That is a test and no proof. `joining` compares again while it runs (`Batching.verify_every`).
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from aionn.errors import AionnError, text_of
from aionn.hal.batching import Batching, RowAxes
from aionn.hal.engine import Executable
from aionn.hal.model import PooledModel
from aionn.hal.types import Operand

logger = logging.getLogger("aionn.driver")

_ROWS = 4
_EXTENTS = (64, 32, 256, 512, 576, 128, 16, 8, 4, 2, 1)
"""What is tried for open axes that have no rows, such as a picture's height. The first one with which the model runs is used."""
_INTEGERS = (256, 2)
"""Below which number integers stay where the graph shows no table for them. The first one with which the model runs is used."""
_LARGE = 1e30

Arrays = dict[str, NDArray[Any]]
Axes = Mapping[str, int | None]


class _Refused(Exception):
    """Requests for the model are not joined. The text is the reason."""


def axes_of(model: PooledModel, batching: Batching) -> tuple[tuple[str, int | None], ...] | str:
    """Return the axis of the rows of each input, or the reason why rows cannot be joined."""
    named = None if batching.axes is None else dict(batching.axes)
    found: dict[str, int | None] = {}
    for name, operand in model.inputs.items():
        dimensions = operand.dimensions
        if not operand.in_frames or dimensions is None:
            return f"input {name!r} is no tensor of numbers with a known rank"
        if named is None:
            found[name] = next((axis for axis, extent in enumerate(dimensions) if extent == 0), None)
            continue
        axis = found[name] = named.pop(name, None)
        if axis is not None and axis >= len(dimensions):
            return f"input {name!r} has {len(dimensions)} axes, but Batching(axes=) names axis {axis}"
        if axis is not None and dimensions[axis] != 0:
            return f"axis {axis} of input {name!r} has the fixed extent {dimensions[axis]}; export the model with an open axis there"
    if named:
        return f"Batching(axes=) names {', '.join(map(repr, named))}, which the model has not; its inputs are {sorted(model.inputs)}"
    if all(axis is None for axis in found.values()):
        return "no input has an open axis; export the model with an open batch axis"
    return tuple(found.items())


def probed(executable: Executable, model: PooledModel, batching: Batching) -> RowAxes:
    """Return what `probe` finds, and log why nothing is joined."""
    found = probe(executable, model, batching)
    if found.reason:
        logger.warning("no requests of this model are joined, because %s", found.reason)
    return found


def probe(executable: Executable, model: PooledModel, batching: Batching) -> RowAxes:
    """Return whether requests for the model may be joined, and along which axes. Blocks, and raises nothing of the engine's."""
    axes = axes_of(model, batching)
    if isinstance(axes, str):
        return RowAxes(axes)
    if not model.graph:
        return RowAxes(f"a model of format {model.format!r} has no graph to look at")
    from aionn.graph.rows import row_facts  # brings `onnx`, which few drivers need

    facts = row_facts(model, [name for name, axis in axes if axis is not None])
    if facts.mixes:
        return RowAxes(facts.mixes)
    try:
        return _Probe(executable, model.inputs, dict(axes), batching).judge(facts.limits, facts.equals)
    except _Refused as refused:
        return RowAxes(str(refused))


class _Probe:
    def __init__(self, executable: Executable, inputs: Mapping[str, Operand], axes: Axes, batching: Batching) -> None:
        self._executable, self._inputs, self._axes, self._batching = executable, inputs, axes, batching
        self._random = np.random.default_rng(0)
        self._integers = _INTEGERS[0]

    def judge(self, limits: Mapping[str, int], equals: Mapping[str, Iterable[float]]) -> RowAxes:
        given, shared = self._working(limits, equals)
        rows = [given, *(self._made(given, limits) for _ in range(_ROWS - 1))]
        alone = [self._run(row, shared) for row in rows]
        joined = self._run(joined_rows(rows, self._axes), shared)
        outputs = _output_axes(alone[0], joined, _ROWS)
        exact = self._batching.tolerance == "exact"
        self._compare(alone, joined, outputs, "rows together differ from the same rows alone", exact)
        for count in range(2, self._batching.max_rows + 1) if exact else ():
            chosen = [index % _ROWS for index in range(count)]
            found = self._run(joined_rows([rows[index] for index in chosen], self._axes), shared)
            self._compare(
                [alone[index] for index in chosen], found, outputs, f"{count} rows together differ from the same rows alone", True
            )
        for how, keep in itertools.product(_REPLACED, (0, 1, _ROWS - 1)):
            others = [row if index == keep else _replaced(row, how, lambda row: self._made(row, limits)) for index, row in enumerate(rows)]
            found = self._run(joined_rows(others, self._axes), shared)
            kept = _row_of(found, outputs, keep)
            wrong = _differing(_row_of(joined, outputs, keep), kept, exact)
            if wrong:
                raise _Refused(f"row {keep} of output {wrong!r} changes when the other rows are {_REPLACED[how]}")
        return RowAxes("", tuple(self._axes.items()), tuple(outputs.items()))

    def _compare(self, alone: list[Arrays], joined: Arrays, outputs: Mapping[str, int], what: str, exact: bool) -> None:
        for index, single in enumerate(alone):
            wrong = _differing(single, _row_of(joined, outputs, index), exact)
            if wrong:
                word = "in their bits" if exact else "by more than 1e-5 + 1e-4 of their value"
                raise _Refused(f"{what}, in output {wrong!r} {word}")

    def _working(self, limits: Mapping[str, int], equals: Mapping[str, Iterable[float]]) -> tuple[Arrays, Arrays]:
        """Return one row, and the inputs that all rows share, with which the model runs."""
        why = ""
        extents = _EXTENTS if self._has_other_axes() else (1,)
        for extent, integers, shared in itertools.product(extents, _INTEGERS, list(self._shared(equals))):
            self._integers = integers
            row = self._row(extent, limits)
            try:
                self._run(row, shared)
            except _Refused as refused:
                why = why or str(refused)
            else:
                return row, shared
        raise _Refused(f"the model runs on no made-up inputs ({why})")

    def _has_other_axes(self) -> bool:
        return any(0 in self._without_rows(name, operand) for name, operand in self._inputs.items())

    def _without_rows(self, name: str, operand: Operand) -> tuple[int, ...]:
        axis = self._axes[name]
        return tuple(extent for index, extent in enumerate(operand.dimensions or ()) if index != axis)

    def _row(self, extent: int, limits: Mapping[str, int]) -> Arrays:
        made = {}
        for name, operand in self._inputs.items():
            axis = self._axes[name]
            if axis is not None:
                shape = tuple(1 if index == axis else size or extent for index, size in enumerate(operand.dimensions or ()))
                made[name] = np.zeros(shape, operand.type.dtype)
        return self._made(made, limits)

    def _made(self, like: Arrays, limits: Mapping[str, int]) -> Arrays:
        """Return random inputs of these shapes."""
        made = {}
        for name, array in like.items():
            if array.dtype.kind in "fV" or array.dtype.kind == "c":
                made[name] = self._random.uniform(-1, 1, array.shape).astype(array.dtype)
            else:
                made[name] = self._random.integers(0, max(1, limits.get(name, self._integers)), array.shape).astype(array.dtype)
        return made

    def _shared(self, equals: Mapping[str, Iterable[float]]) -> Iterator[Arrays]:
        """Yield contents for the inputs that all rows share: what the graph compares them with, their default, 1, and 0."""
        names = [name for name, axis in self._axes.items() if axis is None]
        choices = []
        for name in names:
            operand = self._inputs[name]
            shape, dtype = tuple(extent or 1 for extent in operand.dimensions or ()), operand.type.dtype
            known: list[NDArray[Any]] = [np.full(shape, value).astype(dtype) for value in (*equals.get(name, ()), 1, 0)]
            if operand.default is not None:
                known.insert(0, np.frombuffer(operand.default.content, dtype).reshape(operand.default.shape))
            choices.append(known)
        for chosen in itertools.islice(itertools.product(*choices), 16):
            yield dict(zip(names, chosen, strict=True))

    def _run(self, rows: Arrays, shared: Arrays) -> Arrays:
        given = {name: np.array(rows[name] if name in rows else shared[name], order="C") for name in self._inputs}
        try:
            made = self._executable.run(given, {}, False).outputs
        except (Exception, SystemExit) as error:  # every error of an engine is an answer here
            why = text_of(error) if isinstance(error, AionnError) else f"{type(error).__name__}: {text_of(error)}"
            raise _Refused(f"a run with {_rows_in(rows, self._axes)} made-up rows failed: {why}") from error
        return {name: np.array(array) for name, array in made.items()}


_REPLACED = {"others": "replaced by others", "large": f"made {_LARGE:g}", "nan": "made NaN"}


def _replaced(row: Arrays, how: str, made: Callable[[Arrays], Arrays]) -> Arrays:
    others = made(row)
    if how == "others":
        return others
    value = _LARGE if how == "large" else np.nan
    with np.errstate(over="ignore"):
        return {
            name: np.full(array.shape, value).astype(array.dtype) if array.dtype.kind in "fV" else array for name, array in others.items()
        }


def joined_rows(rows: Iterable[Arrays], axes: Axes) -> Arrays:
    """Return arrays that hold all these rows, one behind the other."""
    rows = list(rows)
    return {name: np.concatenate([row[name] for row in rows], axis=axes[name] or 0) for name in rows[0]}


def _rows_in(rows: Arrays, axes: Axes) -> int:
    return next(int(array.shape[axes[name] or 0]) for name, array in rows.items())


def _row_of(outputs: Arrays, axes: Mapping[str, int], index: int) -> Arrays:
    return {name: np.take(array, [index], axis=axes[name]) for name, array in outputs.items()}


def _output_axes(single: Arrays, joined: Arrays, count: int) -> dict[str, int]:
    found = {}
    for name, array in joined.items():
        one = single[name].shape
        axes = [axis for axis, extent in enumerate(array.shape) if axis < len(one) and (one[axis], extent) == (1, count)]
        others = len(axes) == 1 and len(one) == array.ndim
        if not others or any(one[axis] != extent for axis, extent in enumerate(array.shape) if axis != axes[0]):
            raise _Refused(f"output {name!r} has the shape {one} for one row and {array.shape} for {count}, so it has no axis of rows")
        found[name] = axes[0]
    return found


class Closeness(NamedTuple):
    """How far an element may differ: by `absolute`, and by `relative` of its value."""

    absolute: float
    relative: float


_CLOSE = Closeness(1e-5, 1e-4)


def _differing(single: Mapping[str, NDArray[Any]], found: Mapping[str, NDArray[Any]], exact: bool) -> str:
    """Return the first output that differs, or ""."""
    for name, array in single.items():
        if not alike(array, found[name], exact):
            return name
    return ""


def alike(single: NDArray[Any], found: NDArray[Any], exact: bool) -> bool:
    """Return whether a row of a joined run is close enough to the same row alone. NaN equals NaN."""
    if single.shape != found.shape:
        return False
    if exact or single.dtype.kind not in "fcV":
        return single.tobytes() == found.tobytes()
    one, other = (array.astype(np.complex128 if single.dtype.kind == "c" else np.float64) for array in (single, found))
    return bool(np.allclose(other, one, rtol=_CLOSE.relative, atol=_CLOSE.absolute, equal_nan=True))
