"""Joined runs: requests of several bursts that a lane runs as the rows of one batch.

A lane takes a request as always. If no other lane is free, it takes what has piled up behind that request, too (`fmq.Lane.join`). It copies
each row into memory of the lane, runs once, and copies each row's outputs to their places. All answers are written at once.

Which requests go together
    A request gets a `kind` when it is bound: its shapes, its types, and the outputs that it wants. Only requests of one kind are joined.
    Inputs without an axis of rows must have equal bytes. A buffer of the device is in one request of a run, and so is a place in memory.
    A request that does not fit follows in the same turn of the lane.

How many rows
    `Sizes` measures runs by powers of two. It goes up while that pays, and never beyond what paid.

Invariants
    A request's outputs and its device buffers change only after its row has been computed.
    A joined run that fails is repeated row by row, once. So an error reaches only the row that causes it.
    Executions of one lane use its memory one after the other. No two lanes share any.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from aionn import trace
from aionn.burst.executors import Bound, result_of
from aionn.burst.packets import decode_result, result_identity_datum
from aionn.driver.engine_errors import sentence_of
from aionn.driver.execution import BoundExecution, Held
from aionn.driver.joining.sizes import Sizes
from aionn.driver.lanes import Lane
from aionn.errors import AionnError, text_of
from aionn.fmq import Lane as NativeLane
from aionn.hal.batching import MOST_ROWS, Batching, RowAxes
from aionn.hal.types import ErrorStatus
from aionn.pages import layout as words_of

logger = logging.getLogger("aionn.driver")

_TIMED_EVERY = 8
"""One of so many single runs is timed, except while single runs are tried. A lone caller pays for each look at the clock."""
_ALIGNMENT = 64
_MOST_BATCHES = 256
"""A lane keeps arrays for so many sizes of joined runs, then makes them anew."""


class Layout(msgspec.Struct, frozen=True, eq=False):
    """The arrays of one row, and those of a batch of such rows.

    Attributes:
        inputs, outputs: by name the shape and the dtype of one request's array, and the axis of its rows.
        rows: how many rows one request has.
    """

    inputs: tuple[tuple[str, tuple[int, ...], np.dtype[Any], int | None], ...]
    outputs: tuple[tuple[str, tuple[int, ...], np.dtype[Any], int], ...]
    rows: int


class Batch(msgspec.Struct, frozen=True):
    """Arrays for a joined run of some requests, and in them the part of each request.

    Attributes:
        gathers: for each request, by name, where its input goes. Of inputs that all share, only the first request has one.
        scatters: for each request, by name, where its output stands.
    """

    inputs: dict[str, NDArray[Any]]
    outputs: dict[str, NDArray[Any]]
    gathers: list[dict[str, NDArray[Any]]]
    scatters: list[dict[str, NDArray[Any]]]


class Joining:
    """The joined runs of one prepared model.

    Attributes:
        axes: what the device has found out about the model's rows.
        off: why no requests are joined any more, or "".
    """

    def __init__(self, batching: Batching, axes: RowAxes, device: str, words: memoryview | None = None) -> None:
        """`words`: those of the slot that shows the model, or None."""
        self.axes, self.sizes = axes, Sizes(batching)
        self.off = axes.reason
        self._words = memoryview(bytearray(8 * words_of.SLOT_WORDS)).cast("Q") if words is None else words
        self._expected_ns = 0
        self._untimed = 0  # so many single runs to come are not timed
        self._words[words_of.JOIN_MOST] = 1 if self.off else self.sizes.most
        self._batching, self._device, self._wait_ns = batching, device, 1000 * batching.max_wait_us
        self._inputs, self._outputs = dict(axes.inputs), dict(axes.outputs)
        self._layouts: dict[object, Layout] = {}
        self._kinds: dict[object, int] = {}
        self._verify_in = batching.verify_every

    def leave_page(self) -> None:
        """Write no more to the page, because the slot gets another model. A run that still goes on is not shown."""
        self._words = memoryview(bytearray(8 * words_of.SLOT_WORDS)).cast("Q")

    # ---- when a request is bound ----------------------------------------------------------------------------------------

    def kind_of(self, static: object, pools: int, files: bool) -> int:
        """Return the kind of a request with these shapes and names, or 0 if it is never joined.

        Args:
            pools: how many memories it lies in, without buffers of the device. With several, some are the app's own.
            files: whether some of them are files.
        """
        if self.off or files or pools > 1:
            return 0
        return self._kinds.setdefault(static, len(self._kinds) + 1)

    def rows_of(self, given: Mapping[str, NDArray[Any]]) -> int:
        """Return how many rows a request has, by its inputs outside of the device. A device's buffer alone counts as one row."""
        return next((int(given[name].shape[axis]) for name, axis in self._inputs.items() if axis is not None and name in given), 1)

    def layout_of(self, inputs: Mapping[str, NDArray[Any]], outputs: Mapping[str, NDArray[Any]]) -> Layout | None:
        """Return the layout of a request with these arrays. None: one of them has no row, or they have different numbers of rows."""
        axes = self._inputs
        shapes = tuple((name, array.shape, array.dtype, axes[name]) for name, array in inputs.items())
        made = tuple((name, array.shape, array.dtype, self._outputs[name]) for name, array in outputs.items())
        known = self._layouts.get((shapes, made))
        if known is None and len(rows := {shape[axis] for _, shape, _, axis in (*shapes, *made) if axis is not None}) == 1:
            known = self._layouts.setdefault((shapes, made), Layout(shapes, made, rows.pop()))
        return known

    # ---- in the thread of a lane ----------------------------------------------------------------------------------------

    def run(self, lane: Lane, native: NativeLane, first: Bound) -> bytes | list[bytes]:
        """Run the request that a lane has taken, together with what has piled up. Return the answer of each."""
        execution: Any = first.execution
        most = self.sizes.most
        if most > 1 and execution.kind and not self.off:
            if native.deadline_ns:
                most = self._most_by(native.deadline_ns)
            requests = most // execution.rows if execution.rows > 1 else most
            if requests > 1:
                until_ns = time.monotonic_ns() + self._wait_ns if self._wait_ns else 0
                more = native.join(requests - 1, self._expected_ns, until_ns)
                if more:
                    return self._run_all(lane, [first, *more], until_ns - self._wait_ns if until_ns else time.monotonic_ns())
        return self._run_alone(lane, first)  # the way of a lone caller, who pays for each call here

    def _most_by(self, deadline_ns: int) -> int:
        """Return how many rows may be joined to a request with that deadline."""
        most = self.sizes.most
        left_ns = deadline_ns - time.monotonic_ns()
        while most > 1 and self.sizes.run_ns(most) > left_ns:
            most //= 2
        return most

    def _run_alone(self, lane: Lane, bound: Bound) -> bytes:
        rows: int = getattr(bound.execution, "rows", 1)
        if rows == 1 and self._untimed > 0:  # lanes count down at the same time
            self._untimed -= 1
            answer = bound(lane)
            self._words[words_of.SIZE_RUNS] += 1
            return answer
        began_ns = time.monotonic_ns()
        answer = bound(lane)
        took_ns = time.monotonic_ns() - began_ns
        if rows == 1 and not self.sizes.tries_single:
            self._untimed = _TIMED_EVERY - 1
        self._count(rows, took_ns, 1 + self._untimed)
        return answer

    def _run_all(self, lane: Lane, bounds: Sequence[Bound], taken_ns: int) -> list[bytes]:
        """Run these requests. `taken_ns`: when the lane had taken the first one."""
        answers: dict[int, bytes] = {}
        left = list(enumerate(bounds))
        while left:
            together, later = self._hold(lane, left, answers)
            if len(together) > 1:
                self._run_together(lane, together, answers, taken_ns)
            else:
                for number, bound, held in together:
                    held.undo()
                    answers[number] = self._run_alone(lane, bound)
            left = later
        return [answers[number] for number in range(len(bounds))]

    def _hold(
        self, lane: Lane, left: Sequence[tuple[int, Bound]], answers: dict[int, bytes]
    ) -> tuple[list[tuple[int, Bound, Held]], list[tuple[int, Bound]]]:
        """Hold the memory of requests that go together with the first one. Return them, and those that come later."""
        together: list[tuple[int, Bound, Held]] = []
        later: list[tuple[int, Bound]] = []
        tokens: set[int] = set()
        places: dict[object, list[tuple[int, int]]] = {}
        layout: Layout | None = None
        shared: list[bytes] = []
        for number, bound in left:
            execution: BoundExecution = bound.execution  # type: ignore[assignment]
            conflicts = not tokens.isdisjoint(execution.tokens) or _overlaps(places, execution.place)
            tokens.update(execution.tokens)  # also of a request that comes later, so that none overtakes it
            if execution.place is not None:
                home, begin, end = execution.place
                places.setdefault(home, []).append((begin, end))
            if conflicts or (together and layout is None):
                later.append((number, bound))
                continue
            try:
                held = execution.hold()
            except (AionnError, MemoryError):  # the run itself finds the same, and answers it
                answers[number] = self._run_alone(lane, bound)
                continue
            own: Layout | None = held.arrays.layout
            if own is None:
                own = held.arrays.layout = self.layout_of(held.arrays.inputs, held.arrays.outputs)
            if not together:
                layout = own
                shared = [] if own is None else _shared_of(own, held)
            elif (
                own is None
                or own is not layout
                or (len(together) + 1) * own.rows > self._batching.max_rows  # rows in buffers of the device are known only now
                or _shared_of(own, held) != shared
            ):
                held.undo()
                later.append((number, bound))
                continue
            together.append((number, bound, held))
        return together, later

    def _run_together(self, lane: Lane, together: Sequence[tuple[int, Bound, Held]], answers: dict[int, bytes], taken_ns: int) -> None:
        began_ns = time.monotonic_ns()
        timed = together[0][1].measure_timing
        requests = len(together)
        layout = together[0][2].arrays.layout
        assert layout is not None  # a request without one is alone
        rows = requests * layout.rows
        try:
            batch = self._batch_of(lane, layout, requests)
            for (_, _, held), places in zip(together, batch.gathers, strict=True):
                inputs = held.arrays.inputs
                for name, place in places.items():
                    place[...] = inputs[name]
            gathered_ns = time.monotonic_ns()
            self._words[words_of.JOIN_NOW] += 1
            try:
                report = lane.executable.run(batch.inputs, batch.outputs, timed)
            finally:
                self._words[words_of.JOIN_NOW] -= 1
            ran_ns = time.monotonic_ns()
            made = self._rows_made(report.outputs, requests, rows)
            if self._must_verify() and not self._verified(lane, together[0][2], batch, made[0]):
                raise _MixedError("a row of a joined run differs from the same row alone")
            verified_ns = time.monotonic_ns()
        except BaseException as error:  # as in `Bound`; it may belong to any of the rows
            self._repeat(lane, together, rows, answers, error)
            return
        for index, (number, bound, held) in enumerate(together):
            execution: Any = bound.execution
            try:
                outputs = held.arrays.outputs
                for name, place in batch.scatters[index].items():
                    if name not in made[index]:
                        outputs[name][...] = place
                result = execution.settle(held, made[index], report.on_device_ns, began_ns if timed else 0)
            except BaseException as error:  # it is that row's own
                result = result_of(error)
            finally:
                held.undo()
            answers[number] = bound.bodies.of(result)
        ended_ns = time.monotonic_ns()
        self._count(rows, ended_ns - verified_ns + ran_ns - began_ns)
        if trace.active:
            trace.span_at(
                "driver.batch",
                began_ns,
                ended_ns,
                rows=rows,
                waited_us=(began_ns - taken_ns) // 1000,
                gather_us=(gathered_ns - began_ns) // 1000,
                run_us=(ran_ns - gathered_ns) // 1000,
                scatter_us=(ended_ns - verified_ns) // 1000,
            )

    def _rows_made(self, made: Mapping[str, NDArray[Any]], requests: int, rows: int) -> list[dict[str, NDArray[Any]]]:
        """Return the part of each request in outputs that the engine has made itself, or in another shape than the array given for it."""
        parts: list[dict[str, NDArray[Any]]] = [{} for _ in range(requests)]
        each = rows // requests
        for name, array in made.items():
            axis = self._outputs.get(name)
            if axis is None or axis >= array.ndim or array.shape[axis] != rows:
                raise _MixedError(f"output {name!r} has the shape {array.shape} for {rows} rows")
            for index, part in enumerate(parts):
                part[name] = array[(*(slice(None),) * axis, slice(index * each, (index + 1) * each))]
        return parts

    def _repeat(
        self, lane: Lane, together: Sequence[tuple[int, Bound, Held]], rows: int, answers: dict[int, bytes], error: BaseException
    ) -> None:
        """Run each request alone, because their joined run has failed. It counts against the size only if none of them fails alone."""
        for _, _, held in together:
            held.undo()
        why = sentence_of(error) if isinstance(error, Exception) else text_of(error)
        if isinstance(error, _MixedError):
            self.off = self.off or text_of(error)
            self._words[words_of.JOIN_OFF], self._words[words_of.JOIN_MOST] = 1, 1
            logger.warning("device %r joins no more requests of this model, because %s", self._device, why)
        for number, bound, _ in together:
            answers[number] = self._run_alone(lane, bound)
        if isinstance(error, _MixedError):
            return
        if all(decode_result(answers[number] + result_identity_datum(0, 0)).result.status is ErrorStatus.NONE for number, _, _ in together):
            self.sizes.failed(rows)
            logger.warning("a joined run of %d rows failed (%s), but not each request alone; fewer rows are joined now", rows, why)
        else:
            logger.info("a joined run of %d rows failed (%s), and so did a request alone", rows, why)

    def _batch_of(self, lane: Lane, layout: Layout, requests: int) -> Batch:
        """Return the lane's arrays for so many requests. They are the same each time, so that an engine binds them once."""
        batch = lane.batches.get((layout, requests))
        if batch is None:
            if len(lane.batches) >= _MOST_BATCHES:
                lane.batches.clear()
                lane.rooms.clear()
            batch = lane.batches[layout, requests] = _made_batch(lane.rooms, layout, requests, self._batching.max_rows)
        return batch

    def _must_verify(self) -> bool:
        self._verify_in -= 1
        if self._verify_in > 0:
            return False
        self._verify_in = self._batching.verify_every
        return True

    def _verified(self, lane: Lane, held: Held, batch: Batch, made: Mapping[str, NDArray[Any]]) -> bool:
        """Return whether the first row of a joined run equals that row alone."""
        from aionn.driver.joining.probing import alike  # few runs are verified

        inputs = {name: np.array(batch.gathers[0][name], order="C") for name in held.arrays.inputs}
        single, exact = lane.executable.run(inputs, {}, False).outputs, self._batching.tolerance == "exact"
        return all(alike(single[name], array, exact) for name, array in {**batch.scatters[0], **made}.items())

    def _count(self, rows: int, took_ns: int, runs: int = 1) -> None:
        """Count a run that was timed. `runs`: with those like it that are not."""
        sizes, words = self.sizes, self._words
        size = min(max(rows, 1), MOST_ROWS).bit_length() - 1
        if 0 < rows <= self._batching.max_rows:
            sizes.note(rows, took_ns, runs)
        if rows > 1:
            words[words_of.JOIN_ROWS] += rows
        words[words_of.JOIN_MOST] = 1 if self.off else sizes.most
        words[words_of.SIZE_RUNS + size] += 1
        if size < len(sizes.row_ns):
            words[words_of.SIZE_ROW_NS + size] = int(sizes.row_ns[size])
        self._expected_ns = sizes.run_ns(sizes.most)


class _MixedError(Exception):
    """A joined run has shown that the rows of the model do not stay apart."""


def _shared_of(layout: Layout, held: Held) -> list[bytes]:
    return [held.arrays.inputs[name].tobytes() for name, _, _, axis in layout.inputs if axis is None]


def _overlaps(places: Mapping[object, Iterable[tuple[int, int]]], place: tuple[object, int, int] | None) -> bool:
    if place is None:
        return False
    home, begin, end = place
    return any(begin < other_end and other_begin < end for other_begin, other_end in places.get(home, ()))


def _made_batch(rooms: dict[object, NDArray[np.uint8]], layout: Layout, requests: int, most: int) -> Batch:
    """Make the arrays for so many requests. Batches of the same layout lie in the same memory, which has room for `most` requests."""
    gathers: list[dict[str, NDArray[Any]]] = [{} for _ in range(requests)]
    scatters: list[dict[str, NDArray[Any]]] = [{} for _ in range(requests)]
    sides: tuple[dict[str, NDArray[Any]], dict[str, NDArray[Any]]] = {}, {}
    for side, operands, parts in zip(sides, (layout.inputs, layout.outputs), (gathers, scatters), strict=True):
        for name, shape, dtype, axis in operands:
            count = 1 if axis is None else requests
            whole = tuple(extent * (count if index == axis else 1) for index, extent in enumerate(shape))
            size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
            room = rooms.get((layout, name))
            if room is None:
                room = rooms[layout, name] = _aligned(size * most)
            array = side[name] = room[: size * count].view(dtype).reshape(whole)
            for index in range(count):
                before = (slice(None),) * (axis or 0)
                place = array if axis is None else array[(*before, slice(index * shape[axis], (index + 1) * shape[axis]))]
                parts[index][name] = place
    return Batch(*sides, gathers, scatters)


def _aligned(size_bytes: int) -> NDArray[np.uint8]:
    memory = np.empty(size_bytes + _ALIGNMENT, np.uint8)  # pages that no batch has reached take no memory
    begin = -memory.ctypes.data % _ALIGNMENT
    return memory[begin : begin + size_bytes]
