"""Requests on an engine. Each is bound to its bytes once, and runs on a lane of the prepared model.

Invariants
    `Executable.run` is never entered twice at once, because each lane has an executable.
    A bound execution holds views of its memories. They stay mapped until the run is over, even when their owners have dropped them.
    The engine gets no array for an output in `BoundModel.disproved`, because a run has shown that the model declares a wrong shape.
    Such an output is open: its shape stands in each answer, and its bytes are copied to their place.
    Every run begins and ends in its lane's slot of the statistics page, also a run that fails. `lanes` sees to that.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from aionn.burst.executors import result_of
from aionn.driver.engine_errors import noted, report_bug, sentence_of, way_out
from aionn.driver.lanes import Lane, Lanes
from aionn.errors import AionnError, CallerError, text_of
from aionn.hal.engine import Executable, ExecutionReport
from aionn.hal.types import ErrorStatus, Operand, OutputShape, Request, RequestArgument, Result, Timing
from aionn.memory.device_buffers import BufferRequest, BufferUse, DeviceBuffers
from aionn.memory.region import Region
from aionn.memory.requests import Extent, check_homes, check_request, input_shape, output_shape

logger = logging.getLogger("aionn.driver")

_DONE = Result(ErrorStatus.NONE)


class Arrays(msgspec.Struct):
    """The arrays of a request by name, in the model's order. They hold while so many outputs are disproved.

    Attributes:
        layout: what `joining.joined_runs` has made of them.
    """

    disproved: int
    inputs: dict[str, NDArray[Any]]
    outputs: dict[str, NDArray[Any]]
    layout: Any = None


class Held(msgspec.Struct, frozen=True):
    """A request whose device buffers are held for a joined run. It ends in `BoundExecution.settle` or `undo`."""

    use: BufferUse | None
    arrays: Arrays

    def undo(self) -> None:
        """Release the buffers of a request whose row was not run. Their states stay as they were. Does nothing after `settle`."""
        if self.use is not None:
            self.use.undo()


class Kinds(Protocol):
    """What decides which requests may share a run; see `joining.joined_runs`."""

    def kind_of(self, static: object, pools: int, files: bool) -> int: ...
    def rows_of(self, given: Mapping[str, NDArray[Any]]) -> int: ...


class BoundExecution:
    """One checked request with its arrays. Satisfies `burst.IBoundExecution`.

    Attributes:
        kind: requests with equal numbers may be joined into one run. 0: this one is never joined.
        rows: how many rows it has.
        tokens: of the buffers of the device that it uses.
        place: the memory with its inputs and outputs, and from where to where they lie in it. None without such memory.
    """

    kind = 0
    rows = 1
    tokens: frozenset[int] = frozenset()
    place: Extent | None = None

    def __init__(
        self,
        inputs: Mapping[str, NDArray[Any]],
        outputs: Mapping[str, NDArray[Any]],
        places: Mapping[str, NDArray[np.uint8]],
        model: BoundModel,
        omitted: frozenset[str],
        domain: DomainUse | None = None,
        files: Sequence[Region] = (),
        written: Sequence[Region] = (),
    ) -> None:
        """
        Args:
            outputs: arrays for the outputs whose shapes are known.
            places: the bytes given for each output that is not in a device buffer.
            omitted: outputs that the request does not want.
            files: memories that are files and may be cut off.
            written: those files that get outputs.
        """
        self.serial = domain is not None
        self._domain = domain
        self._files = files
        self._written = written
        self._inputs = inputs
        self._outputs = outputs
        self._places = places
        self._omitted = omitted
        self._is_open = len(outputs) < len(places)
        self._names = [name for name, _ in model.outputs]
        self._model = model
        self._disproved = model.disproved
        self._seen = len(model.disproved)
        self._held: Held | None = None

    async def execute(self, measure_timing: bool, deadline_ns: int | None) -> Result:
        def job(lane: Lane) -> Result:
            if deadline_ns is not None and time.monotonic_ns() >= deadline_ns:
                return Result(
                    ErrorStatus.MISSED_DEADLINE_TRANSIENT, message="the deadline had passed before the device began the execution"
                )
            return self.run(lane, measure_timing)

        return await self._model.lanes.run(job)

    def run(self, lane: Lane, measure_timing: bool) -> Result:
        began_ns = time.monotonic_ns() if measure_timing else 0
        begun: list[Region] = []
        try:
            for region in self._files:
                region.begin_use()
                begun.append(region)
            if len(self._disproved) != self._seen:
                self._open_disproved()
            if self._domain is None:
                report = lane.executable.run(self._inputs, self._outputs, measure_timing)
                if self._is_open or (report.outputs and not self._omitted.issuperset(report.outputs)):
                    self._learn(report.outputs, self._outputs)
                    shapes, insufficient = self._place(report.outputs, {})
                else:
                    shapes, insufficient = (), ""
            else:
                report, shapes, insufficient = self._run_in_domain(lane.executable, self._domain, measure_timing)
            for region in self._written:
                region.flush()
        except (Exception, SystemExit) as error:  # every error of an engine fails this execution and nothing else
            return failed_run(error, self._model.device)
        finally:
            if begun:
                _end_use(begun)
        if insufficient:
            return Result(ErrorStatus.OUTPUT_INSUFFICIENT_SIZE, shapes, message=insufficient)
        if not measure_timing:
            return Result(ErrorStatus.NONE, shapes) if shapes else _DONE
        return self._succeeded(shapes, report.on_device_ns, began_ns)

    def warm_up(self, lane: Lane) -> bool:
        """Run with copies of the inputs and drop the outputs, for warm caches. It shows in the lane's slot and does not count.

        Returns False if this request cannot be run like that: it uses memory of the device or a file, or its outputs have unknown shapes.
        """
        if self._domain is not None or self._files or self._is_open or len(self._disproved) != self._seen:
            return False
        lane.slot.begin()
        try:
            inputs, outputs = lane.scratch_for("input", self._inputs), lane.scratch_for("output", self._outputs)
            for name, array in inputs.items():
                np.copyto(array, self._inputs[name])  # the app may write into the frame meanwhile, and engines trust what they have checked
            lane.executable.run(inputs, outputs, False)
        finally:
            lane.slot.drop()
        return True

    def _open_disproved(self) -> None:
        """Hand the engine no array for outputs whose declared shape has proven wrong since the last run."""
        self._seen = len(self._disproved)
        self._outputs = {name: array for name, array in self._outputs.items() if name not in self._disproved}
        self._is_open = len(self._outputs) < len(self._places)

    def _learn(self, made: Mapping[str, NDArray[Any]], wanted: Mapping[str, NDArray[Any]]) -> None:
        """Remember outputs whose shape differs from that of the array which the engine got for them."""
        for name, array in wanted.items():
            if name in made and made[name].shape != array.shape and name not in self._disproved:
                self._model.disproved.add(name)
                logger.info("output %r has shape %s, but the model declares %s", name, made[name].shape, array.shape)

    def _run_in_domain(
        self, executable: Executable, domain: DomainUse, measure_timing: bool
    ) -> tuple[ExecutionReport, tuple[OutputShape, ...], str]:
        """Run with buffers that the device owns. Hold them until the run is over, and set their state by its outcome."""
        with domain.request.use() as use:
            arrays = self._arrays_in(use, domain)
            report = executable.run(arrays.inputs, arrays.outputs, measure_timing)
            return report, *self._settle_in(use, arrays.outputs, report.outputs)

    def _arrays_in(self, use: BufferUse, domain: DomainUse) -> Arrays:
        """Return the arrays of the request, with those that lie in buffers of the device."""
        known: Arrays | None = use.arguments
        if known is None or known.disproved != self._seen:
            inputs, outputs = {}, dict(self._outputs)
            for index, name in enumerate(domain.names):  # in the model's order, as always
                array = use.inputs.get(index, self._inputs.get(name))
                if array is not None:
                    inputs[name] = array
            for index, place in use.outputs.items():
                if place is not None and self._names[index] not in self._disproved:
                    outputs[self._names[index]] = place
            known = use.arguments = Arrays(self._seen, inputs, outputs)
        return known

    def _settle_in(
        self, use: BufferUse, outputs: Mapping[str, NDArray[Any]], made: Mapping[str, NDArray[Any]]
    ) -> tuple[tuple[OutputShape, ...], str]:
        """Set the state of the device's buffers after a run. Returns what `_place` returns."""
        if use.closed and not self._is_open and self._omitted.issuperset(made):
            use.succeed()
            return (), ""
        self._learn(made, outputs)
        in_domain = {self._names[index]: index for index in use.outputs}
        shapes, insufficient = self._place(made, in_domain)
        if not insufficient:
            computed = {i: made[name] for name, i in in_domain.items() if name not in outputs or name in made}
            filled = use.succeed(computed)
            shapes = tuple(OutputShape(filled[i], True) if i in filled else shape for i, shape in enumerate(shapes))
        return shapes, insufficient

    # ---- as a row of a joined run ---------------------------------------------------------------------------------------

    def hold(self) -> Held:
        """Hold what a joined run needs of this request.

        Raises:
            AionnError: a device buffer cannot be used now.
        """
        if len(self._disproved) != self._seen:
            self._open_disproved()
        if self._domain is not None:
            use = self._domain.request.use()
            return Held(use, self._arrays_in(use, self._domain))
        if self._held is None or self._held.arrays.disproved != self._seen:
            self._held = Held(None, Arrays(self._seen, dict(self._inputs), dict(self._outputs)))
        return self._held

    def settle(self, held: Held, made: Mapping[str, NDArray[Any]], on_device_ns: int | None, began_ns: int) -> Result:
        """Return the answer for a row that a joined run has computed. Its outputs are in their arrays, or in `made`.

        Args:
            on_device_ns: what the engine measured for the joined run.
            began_ns: when the joined run began, or 0 if no timing is wanted.
        """
        if held.use is not None:
            with held.use:
                shapes, insufficient = self._settle_in(held.use, held.arrays.outputs, made)
        elif self._is_open or (made and not self._omitted.issuperset(made)):
            self._learn(made, self._outputs)
            shapes, insufficient = self._place(made, {})
        else:
            return self._succeeded((), on_device_ns, began_ns)
        if insufficient:
            return Result(ErrorStatus.OUTPUT_INSUFFICIENT_SIZE, shapes, message=insufficient)
        return self._succeeded(shapes, on_device_ns, began_ns)

    def _succeeded(self, shapes: tuple[OutputShape, ...], on_device_ns: int | None, began_ns: int) -> Result:
        if not began_ns:
            return Result(ErrorStatus.NONE, shapes) if shapes else _DONE
        in_driver_us = (time.monotonic_ns() - began_ns) // 1000
        timing = Timing(in_driver_us=in_driver_us)
        if on_device_ns is not None:
            timing = Timing(min(on_device_ns // 1000, in_driver_us), in_driver_us)
        return Result(ErrorStatus.NONE, shapes, timing)

    def _place(self, made: Mapping[str, NDArray[Any]], elsewhere: Mapping[str, object]) -> tuple[tuple[OutputShape, ...], str]:
        """Copy what the engine has made to its place. Return all shapes, and a sentence about what did not fit, or "".

        Args:
            elsewhere: the outputs in device buffers.
        """
        shapes, insufficient = [], ""
        for name in self._names:
            known, place = self._outputs.get(name), self._places.get(name)
            if place is None or name in elsewhere or (known is not None and name not in made):
                shapes.append(OutputShape(() if known is None else known.shape))
                continue
            array = np.asarray(made[name], order="C")  # ascontiguousarray would make a scalar's shape (1,)
            fits = array.nbytes <= place.nbytes
            if fits:
                place[: array.nbytes] = array.reshape(-1).view(np.uint8)
            else:
                found = f"output {name!r} of shape {array.shape} needs {array.nbytes} bytes, but {place.nbytes} were given"
                insufficient = insufficient or found
            shapes.append(OutputShape(tuple(array.shape), fits))
        return tuple(shapes), insufficient


class DomainUse(msgspec.Struct, frozen=True):
    """A request's use of buffers that the device owns, and the names of all inputs by index."""

    request: BufferRequest
    names: tuple[str, ...]


class BoundPool(msgspec.Struct, frozen=True):
    """A pool of a request as the device has it: its bytes, or the token of a buffer that the device owns.

    Attributes:
        bytes: all bytes in place, with shape (size_bytes,), or None for a token.
        token: names a buffer that the device owns.
        file: the file that the bytes belong to, or None. It may be cut off before a run, and is flushed after it was written to.
        home: where the bytes really are, so that the same bytes are recognised in another pool.
    """

    bytes: NDArray[np.uint8] | None
    token: int | None = None
    file: Region | None = None
    home: Extent | None = None


def bind(model: BoundModel, request: Request, pools: Sequence[BoundPool]) -> BoundExecution:
    """Check `request` against the model and the pools' sizes, and make its arrays.

    Raises:
        CallerError: the request is wrong (INVALID_ARGUMENT). The text says where.
    """
    wrong = check_request(model.inputs, model.outputs, request, [0 if pool.bytes is None else pool.bytes.nbytes for pool in pools])
    if wrong is None and (len(pools) > 1 or model.constants):
        wrong = check_homes(model.inputs, model.outputs, request, [pool.home for pool in pools], model.constants)
    if wrong is not None:
        raise CallerError(wrong)
    given: dict[str, NDArray[Any]] = {}
    for (name, operand), argument in zip(model.inputs, request.inputs, strict=True):
        if argument.has_no_value:
            continue
        place = pools[argument.location.pool_index].bytes
        if place is not None:
            array = _array(place, argument, operand, input_shape(operand, argument), f"input {name!r}")
            array.flags.writeable = False
            given[name] = array
    wanted: dict[str, NDArray[Any]] = {}
    places: dict[str, NDArray[np.uint8]] = {}
    written: dict[int, Region] = {}
    for (name, operand), argument in zip(model.outputs, request.outputs, strict=True):
        if argument.has_no_value:
            continue
        pool = pools[argument.location.pool_index]
        if pool.bytes is None:
            continue
        if not pool.bytes.flags.writeable:
            raise CallerError(f"output {name!r} lies in memory that may not be written to; give writable memory for it")
        if pool.file is not None:
            written[argument.location.pool_index] = pool.file
        places[name] = pool.bytes[argument.location.offset :][: argument.location.length]
        shape = output_shape(operand, argument)
        if shape is not None and name not in model.disproved:
            wanted[name] = _array(pool.bytes, argument, operand, shape, f"output {name!r}")
    domain = None
    tokens = tuple(pool.token for pool in pools)
    if any(token is not None for token in tokens):
        held = model.buffers.request(model.id, request.inputs, request.outputs, tokens)
        domain = DomainUse(held, tuple(name for name, _ in model.inputs))
    files = tuple(pool.file for pool in pools if pool.file is not None)
    omitted = frozenset(name for (name, _), argument in zip(model.outputs, request.outputs, strict=True) if argument.has_no_value)
    bound = BoundExecution(given, wanted, places, model, omitted, domain, files, tuple(written.values()))
    if model.joining is not None:
        _prepare_to_join(bound, model.joining, request, pools, given, tuple(wanted.items()))
    return bound


def _prepare_to_join(
    bound: BoundExecution,
    kinds: Kinds,
    request: Request,
    pools: Sequence[BoundPool],
    given: Mapping[str, NDArray[Any]],
    wanted: Sequence[tuple[str, NDArray[Any]]],
) -> None:
    """Note what decides with which other requests this one may share a run."""
    arguments = [one for one in (*request.inputs, *request.outputs) if not one.has_no_value]
    used = {one.location.pool_index for one in arguments}
    in_memory = [index for index in used if pools[index].bytes is not None]
    bound.tokens = frozenset(token for index in used if (token := pools[index].token) is not None)
    if len(in_memory) == 1 and (home := pools[in_memory[0]].home) is not None:
        spans = [one.location for one in arguments if one.location.pool_index == in_memory[0]]
        begin, end = min(span.offset for span in spans), max(span.offset + span.length for span in spans)
        bound.place = home[0], home[1] + begin, home[1] + end
    arrays = tuple((name, array.shape, array.dtype) for name, array in (*given.items(), *wanted))
    where = tuple(None if one.has_no_value else pools[one.location.pool_index].bytes is None for one in (*request.inputs, *request.outputs))
    files = any(pools[index].file is not None for index in used)
    bound.kind = kinds.kind_of((arrays, where), len(in_memory), files)
    bound.rows = kinds.rows_of(given)


class BoundModel(msgspec.Struct, frozen=True):
    """What the requests of one prepared model share.

    Attributes:
        id: a number that no other prepared model of this process ever has.
        constants: where those constants lie that other processes may have mapped. No output may be written there.
        disproved: outputs that had another shape than the model declares. Names are only added.
        device: the device's name, for the log.
        joining: joins its requests, or None.
    """

    id: int
    inputs: Sequence[tuple[str, Operand]]
    outputs: Sequence[tuple[str, Operand]]
    lanes: Lanes
    buffers: DeviceBuffers
    constants: Sequence[Extent] = ()
    disproved: set[str] = msgspec.field(default_factory=set)
    device: str = ""
    joining: Kinds | None = None


def failed_run(error: BaseException, device: str) -> Result:
    """Return the answer for a run that raised an error. A bug of the engine is logged."""
    if isinstance(error, AionnError):
        return result_of(error)
    if isinstance(error, MemoryError):
        return Result(ErrorStatus.RESOURCE_EXHAUSTED_TRANSIENT, message=f"the engine ran out of memory: {text_of(error)}")
    return Result(ErrorStatus.GENERAL_FAILURE, message=noted(f"{sentence_of(error)}{way_out(error)}", report_bug(error, device, "run")))


def _end_use(files: Sequence[Region]) -> None:
    for region in files:
        try:
            region.end_use()
        except AionnError as error:
            logger.warning("%s", error)  # the run is over, and its answer is right


def _array(place: NDArray[np.uint8], argument: RequestArgument, operand: Operand, shape: tuple[int, ...], word: str) -> NDArray[Any]:
    if not operand.in_frames:  # NumPy would take the bytes for Python's objects
        raise CallerError(f"{word} is of type {operand.word}, which no request with memory has; use execute_values")
    array: NDArray[Any] = np.ndarray(shape, operand.type.dtype, buffer=place.data, offset=argument.location.offset)
    if not array.flags.aligned:  # engines read whole elements, and a copy would surprise a caller who gave memory to avoid one
        raise CallerError(
            f"{word} begins at byte {argument.location.offset} of its memory, but elements of {operand.type.value} begin at multiples of "
            f"{operand.type.element_bytes} bytes; move it to such a place"
        )
    return array
