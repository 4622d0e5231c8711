"""Requests on an engine whose outputs are not what the model declares."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from aionn.driver.execution import BoundExecution, BoundModel, BoundPool, bind
from aionn.driver.lanes import Lane, Lanes
from aionn.hal import ErrorStatus, ExecutionReport, Operand, OperandType, Request, RequestArgument
from aionn.hal.types import BufferDesc, BufferRole, DataLocation
from aionn.memory.device_buffers import DeviceBuffers
from aionn.memory.domain import ModelInfo
from aionn.pages.page import private_slot

FLOAT = OperandType.FLOAT32
DECLARED = Operand(FLOAT, (4, 2))


class Truth:
    """An executable whose one output has the shape that a test says; it keeps the shapes of the arrays that it was given."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shape = shape
        self.given: list[tuple[int, ...] | None] = []

    def output(self) -> NDArray[np.float32]:
        return np.arange(1, 1 + int(np.prod(self.shape)), dtype=np.float32).reshape(self.shape)

    def run(self, inputs: Mapping[str, NDArray[Any]], outputs: Mapping[str, NDArray[Any]], timing: bool) -> ExecutionReport:
        array = outputs.get("y")
        self.given.append(None if array is None else array.shape)
        if array is not None and array.shape == self.shape:
            array[...] = self.output()
            return ExecutionReport()
        return ExecutionReport({"y": self.output()})


class Driver:
    """One prepared model x -> y, and a pool of 64 bytes."""

    def __init__(self, truth: Truth, given_bytes: int = 32) -> None:
        self.truth = truth
        self.buffers = DeviceBuffers()
        x = Operand(FLOAT, (0, 2))
        self.lane = Lane(truth, private_slot())
        self.model = BoundModel(1, [("x", x)], [("y", DECLARED)], Lanes("test", []), self.buffers)
        self.info = ModelInfo(1, (x,), (DECLARED,))
        self.pool = np.full(512, 7, np.uint8)
        self.given_bytes = given_bytes
        self.input = RequestArgument(DataLocation(0, 448, 8), (1, 2))

    def bind(self, output: RequestArgument | None = None, *more: BoundPool) -> BoundExecution:
        output = output or RequestArgument(DataLocation(0, 0, self.given_bytes), (4, 2))
        return bind(self.model, Request((self.input,), (output,)), [BoundPool(self.pool), *more])

    def floats(self, count: int) -> list[float]:
        return [float(number) for number in self.pool[: 4 * count].view(np.float32)]


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


SAID = [
    (RuntimeError("the axes\n differ"), "the axes differ"),
    (OSError(5, "no such thing"), "[Errno 5] no such thing"),
    (KeyError("w"), "the engine raised KeyError: 'w'"),
    (TypeError("f() takes 1 argument"), "the engine raised TypeError: f() takes 1 argument"),
    (RuntimeError(), "the engine raised RuntimeError"),
    (SystemExit(3), "the engine raised SystemExit: 3"),
]


@pytest.mark.parametrize(("error", "sentence"), SAID, ids=str)
def test_a_failed_run_carries_the_engines_sentence_and_names_only_bugs(error: BaseException, sentence: str) -> None:
    class Failing(Truth):
        def run(self, inputs: Mapping[str, NDArray[Any]], outputs: Mapping[str, NDArray[Any]], timing: bool) -> ExecutionReport:
            raise error

    driver = Driver(Failing((4, 2)))
    result = driver.bind().run(driver.lane, False)
    said, _, place = result.message.partition("\n")
    assert (result.status, said) == (ErrorStatus.GENERAL_FAILURE, sentence)
    assert ("Failing.run" in place) is ("the engine raised" in sentence and bool(str(error))), "a bug is noted with its place"


@pytest.mark.parametrize("offset", [0, 3, 512])
def test_an_empty_input_is_bound_wherever_in_its_pool_it_lies(offset: int) -> None:
    driver = Driver(Truth((4, 2)))
    driver.input = RequestArgument(DataLocation(0, offset, 0), (0, 2))
    execution = driver.bind()
    assert execution.run(driver.lane, False).status is ErrorStatus.NONE
    assert execution._inputs["x"].shape == (0, 2)


def test_an_output_that_is_smaller_than_declared_is_told_and_open_for_all_executions_from_then_on() -> None:
    driver = Driver(Truth((3, 2)))
    first, bound_before = driver.bind(), driver.bind()
    for execution in (first, first, bound_before, driver.bind()):
        result = execution.run(driver.lane, False)
        assert result.status is ErrorStatus.NONE
        assert [(shape.dimensions, shape.is_sufficient) for shape in result.output_shapes] == [((3, 2), True)]
        assert driver.floats(6) == [1, 2, 3, 4, 5, 6]
        assert driver.pool[24:32].tolist() == [7] * 8
    assert driver.truth.given == [(4, 2), None, None, None]


def test_an_output_that_is_as_declared_after_it_was_not_is_right_too() -> None:
    driver = Driver(Truth((4, 2)))
    execution = driver.bind()
    assert execution.run(driver.lane, False).output_shapes == ()
    driver.truth.shape = (2, 2)
    assert [shape.dimensions for shape in execution.run(driver.lane, False).output_shapes] == [(2, 2)]
    driver.truth.shape = (4, 2)
    assert [shape.dimensions for shape in execution.run(driver.lane, False).output_shapes] == [(4, 2)]
    assert driver.floats(8) == [1, 2, 3, 4, 5, 6, 7, 8]


@pytest.mark.parametrize(("room", "fits"), [(32, False), (47, False), (48, True), (400, True)])
def test_an_output_that_is_larger_than_declared_takes_the_room_that_it_was_given(room: int, fits: bool) -> None:
    driver = Driver(Truth((6, 2)), room)
    for execution in (driver.bind(), driver.bind()):
        result = execution.run(driver.lane, False)
        assert result.status is (ErrorStatus.NONE if fits else ErrorStatus.OUTPUT_INSUFFICIENT_SIZE)
        assert [(shape.dimensions, shape.is_sufficient) for shape in result.output_shapes] == [((6, 2), fits)]
        assert driver.pool[room if not fits else 48 :][:8].tolist() == [7] * 8
        if fits:
            assert driver.floats(12) == list(range(1, 13))


def test_an_output_that_a_request_leaves_out_is_not_told() -> None:
    driver = Driver(Truth((6, 2)))
    assert driver.bind(RequestArgument(DataLocation(0, 0, 0), (), has_no_value=True)).run(driver.lane, False).output_shapes == ()
    assert driver.model.disproved == set()


def test_a_device_buffer_takes_the_true_shape_unless_an_input_role_says_another() -> None:
    driver = Driver(Truth((4, 2)))
    in_buffer = RequestArgument(DataLocation(1, 0, 0), ())
    buffer = driver.buffers.allocate(BufferDesc(), [driver.info], [], [BufferRole(0, 0)])
    execution = driver.bind(in_buffer, BoundPool(None, buffer.token))
    for shape in ((4, 2), (4, 2), (6, 2), (6, 2), (1, 2), (4, 2), (8,)):
        driver.truth.shape = shape
        result = execution.run(driver.lane, False)
        assert result.status is ErrorStatus.NONE, result.message
        assert buffer.dimensions == shape
        out = bytearray(4 * int(np.prod(shape)))
        buffer.copy_to(out)
        np.testing.assert_array_equal(np.frombuffer(out, np.float32).reshape(shape), driver.truth.output())
    assert driver.truth.given == [(4, 2), (4, 2), (4, 2), None, None, None, None]


def test_a_device_buffer_that_an_input_reads_refuses_a_shape_that_this_cannot_have() -> None:
    driver = Driver(Truth((6, 2)))
    in_buffer = RequestArgument(DataLocation(1, 0, 0), ())
    info = ModelInfo(1, (Operand(FLOAT, (4, 2)),), (DECLARED,))
    buffer = driver.buffers.allocate(BufferDesc(), [info], [BufferRole(0, 0)], [BufferRole(0, 0)])
    buffer.copy_from(bytes(32))
    execution = driver.bind(in_buffer, BoundPool(None, buffer.token))
    for _ in range(2):
        result = execution.run(driver.lane, False)
        assert result.status is ErrorStatus.GENERAL_FAILURE
        assert "(6, 2)" in result.message
        assert not buffer.is_initialized
    driver.truth.shape = (4, 2)
    assert execution.run(driver.lane, False).status is ErrorStatus.NONE
    assert buffer.is_initialized
