"""The steps of a plan in one process: devices of a script answer, so each answer is what a test needs."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, cast

import anyio
import numpy as np
import pytest

import aionn
from aionn.graph.steps import Step
from aionn.hal import DataLocation, ErrorStatus, Operand, OperandType, OutputShape, Request, RequestArgument, Result, Timing
from aionn.hal.options import CallOptions
from aionn.memory.region import Region
from aionn.remote.device import RemotePreparedModel
from aionn.runtime.serving.boundaries import Boundary, BoundaryLayout
from aionn.runtime.serving.planned_execution import StepFailure
from aionn.runtime.serving.planned_model import PlannedModel, PlannedStep

pytestmark = pytest.mark.anyio

DONE = Result(ErrorStatus.NONE)
SHORT = Result(ErrorStatus.OUTPUT_INSUFFICIENT_SIZE)
BETWEEN = 4096
"""Where the tensors between the steps begin."""


class Scripted:
    """A prepared step. It adds 1 to its first input, unless it is told otherwise.

    Attributes:
        answers: to give instead, one after the other. seen: the requests. waits: for this, before it answers.
    """

    def __init__(self, name: str, inputs: Mapping[str, Operand], outputs: Mapping[str, Operand]) -> None:
        connection = SimpleNamespace(ended_by=None)
        self.instances = 1
        self.device = SimpleNamespace(name=name, version="1", restarted=False, connection=connection)
        self.inputs, self.outputs = inputs, outputs
        self.answers: list[Result] = []
        self.seen: list[Request] = []
        self.waits: anyio.Event | None = None
        self.left = 0

    async def execute(
        self, request: Request, pools: Sequence[Any], timing: bool, deadline_ns: int | None, settled: Callable[[Result | None], None]
    ) -> Result:
        self.seen.append(request)
        result = self.answers.pop(0) if self.answers else DONE
        if self.waits is not None:
            try:
                await self.waits.wait()
            except BaseException:
                self.left += 1
                self.settle = settled
                raise
        if result.status is ErrorStatus.NONE:
            self.run(request, pools)
        settled(result)
        return result

    def run(self, request: Request, pools: Sequence[Any]) -> None:
        source = _array(request.inputs[0], pools)
        for argument in request.outputs:
            if not argument.has_no_value:
                target = _array(argument, pools)
                target[: source.size] = source[: target.size] + 1

    def release(self) -> None:
        pass


def _array(argument: RequestArgument, pools: Sequence[Region]) -> Any:
    place = argument.location
    return np.frombuffer(pools[place.pool_index].view(), np.float32, place.length // 4, place.offset)


def vector(extent: int = 4) -> Operand:
    return Operand(OperandType.FLOAT32, (extent,))


def planned(
    *steps: tuple[str, Mapping[str, Operand], Mapping[str, Operand]], outputs: Mapping[str, Operand]
) -> tuple[PlannedModel, list[Scripted]]:
    made = [Scripted(*step) for step in steps]
    model = SimpleNamespace(inputs={"x": vector()}, outputs=outputs)
    parts = [
        PlannedStep(Step(device.device.name, (number,), (), tuple(device.inputs), tuple(device.outputs)), cast(RemotePreparedModel, device))
        for number, device in enumerate(made)
    ]
    return PlannedModel(cast(Any, model), parts), made


def three(middle: Operand | None = None) -> tuple[PlannedModel, list[Scripted]]:
    between = middle or vector()
    return planned(
        ("a", {"x": vector()}, {"t": between}),
        ("b", {"t": between}, {"u": vector()}),
        ("c", {"u": vector()}, {"y": vector()}),
        outputs={"y": vector()},
    )


def request(*, room: int = 16) -> tuple[Request, Region]:
    region = Region.allocate(BETWEEN + 2**20)
    np.frombuffer(region.view(), np.float32, 4)[:] = (1, 2, 3, 4)
    arguments = RequestArgument(DataLocation(0, 0, 16), (4,)), RequestArgument(DataLocation(0, 64, room), ())
    return Request((arguments[0],), (arguments[1],)), region


async def run(
    plan: PlannedModel,
    whole: Request,
    region: Region,
    *,
    measure_timing: bool = False,
    deadline_ns: int | None = None,
    settled: Callable[[Result | None], None] = lambda result: None,
) -> Result:
    """Run all steps as an execution does over control calls."""
    planned = plan.execution(((4,), (4,)), BETWEEN, whole, [region], CallOptions(measure_timing, deadline_ns))
    return await planned.run(planned.execute, settled, check=True)


async def test_steps_run_in_order_over_the_same_pools() -> None:
    plan, devices = three()
    whole, region = request()
    settled: list[Result | None] = []
    assert await run(plan, whole, region, settled=settled.append) == DONE
    assert list(np.frombuffer(region.view(), np.float32, 4, 64)) == [4, 5, 6, 7]
    assert settled == [DONE]
    assert [len(device.seen) for device in devices] == [1, 1, 1]


async def test_a_deadline_is_looked_at_between_two_steps() -> None:
    plan, devices = three()
    whole, region = request()

    def late(request: Request, pools: Sequence[Any]) -> None:
        while time.monotonic_ns() < deadline_ns:
            pass

    devices[0].run = late  # type: ignore[method-assign]
    deadline_ns = time.monotonic_ns() + 1_000_000
    result = await run(plan, whole, region, deadline_ns=deadline_ns)
    assert result.status is ErrorStatus.MISSED_DEADLINE_TRANSIENT
    assert result.message == "step 2 of 3, on device 'b': the deadline had passed before the step began"
    assert [len(device.seen) for device in devices] == [1, 0, 0]


@pytest.mark.parametrize(
    "answer",
    [
        Result(ErrorStatus.OUTPUT_INSUFFICIENT_SIZE, (OutputShape((4,), False),), message="it says so"),
        Result(ErrorStatus.OUTPUT_INSUFFICIENT_SIZE, (OutputShape((-4,), False),), message="it says so"),
        Result(ErrorStatus.OUTPUT_INSUFFICIENT_SIZE, (), message="it says so"),
        Result(ErrorStatus.OUTPUT_INSUFFICIENT_SIZE, (OutputShape((9,), False),) * 2, message="it says so"),
        Result(ErrorStatus.NONE, (OutputShape((400_000,)),)),
        Result(ErrorStatus.NONE, (OutputShape((4,)),) * 2),
    ],
    ids=["room for it", "negative", "no shapes", "too many", "beyond its room", "two for one"],
)
async def test_a_step_whose_answer_contradicts_its_request_fails_with_its_name(answer: Result) -> None:
    plan, devices = three()
    whole, region = request()
    devices[1].answers = [answer] * 5
    result = await run(plan, whole, region)
    assert isinstance(result, StepFailure)
    assert (result.step, result.status) == (1, ErrorStatus.GENERAL_FAILURE)
    assert "step 2 of 3, on device 'b': the driver's answer contradicts the request" in result.message
    assert len(devices[1].seen) == 1


async def test_an_open_boundary_tensor_without_a_shape_in_the_answer_fails() -> None:
    plan, _ = three(Operand(OperandType.FLOAT32, (0,)))
    whole, region = request()
    result = await run(plan, whole, region)
    assert "no shape came for output 't'" in result.message


async def test_a_boundary_tensor_that_grows_from_run_to_run_gets_twice_its_size_and_the_plan_runs_again() -> None:
    plan, devices = three(Operand(OperandType.FLOAT32, (0,)))
    whole, region = request()
    short = Result(ErrorStatus.OUTPUT_INSUFFICIENT_SIZE, (OutputShape((5000,), False),), message="short")
    devices[0].answers = [short, Result(ErrorStatus.NONE, (OutputShape((5000,)),))]
    devices[0].run = lambda request, pools: None  # type: ignore[method-assign]
    assert await run(plan, whole, region) == SHORT
    assert (await run(plan, whole, region)).status is ErrorStatus.NONE
    assert [len(device.seen) for device in devices] == [2, 1, 1]
    assert devices[1].seen[0].inputs[0].dimensions == (5000,)
    assert devices[1].seen[0].inputs[0].location.length == 20_000
    (layout,) = plan._layouts._layouts.values()
    assert layout.places["t"][1] == 20_480
    grown = OutputShape((8000,), False)
    devices[0].answers = [Result(short.status, (grown,)), Result(ErrorStatus.NONE, (OutputShape((8000,)),))]
    assert await run(plan, whole, region) == SHORT
    assert (await run(plan, whole, region)).status is ErrorStatus.NONE
    (layout,) = plan._layouts._layouts.values()
    assert layout.places["t"][1] == 64_000, "each retry costs a run"


async def test_a_boundary_tensor_of_another_shape_than_declared_is_not_believed_again() -> None:
    plan, devices = three()
    whole, region = request()
    devices[0].answers = [Result(ErrorStatus.NONE, (OutputShape((2,)),)), Result(ErrorStatus.NONE, (OutputShape((2,)),))]
    for seen in range(2):
        await run(plan, whole, region)
        assert devices[1].seen[seen].inputs[0].dimensions == (2,)
    assert devices[0].seen[0].outputs[0].dimensions == (4,)
    assert devices[0].seen[1].outputs[0].dimensions == (), "left open"


async def test_an_empty_boundary_tensor_is_handed_over() -> None:
    plan, devices = three(Operand(OperandType.FLOAT32, (0,)))
    whole, region = request()
    devices[0].answers = [Result(ErrorStatus.NONE, (OutputShape((0,)),))]
    devices[0].run = devices[1].run = lambda request, pools: None  # type: ignore[method-assign]
    assert (await run(plan, whole, region)).status is ErrorStatus.NONE
    assert (devices[1].seen[0].inputs[0].dimensions, devices[1].seen[0].inputs[0].location.length) == ((0,), 0)


@pytest.mark.parametrize("step", range(3))
async def test_memory_comes_back_when_the_driver_has_answered_and_not_when_the_caller_leaves(step: int) -> None:
    plan, devices = three()
    whole, region = request()
    settled: list[Result | None] = []
    devices[step].waits = anyio.Event()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(lambda: run(plan, whole, region, settled=settled.append))
        await anyio.wait_all_tasks_blocked()
        tasks.cancel_scope.cancel()
    assert devices[step].left == 1
    assert settled == [], "the driver may still write into the frame"
    devices[step].settle(DONE)
    assert settled == [DONE if step == 2 else None], "an execution whose caller has left runs no further step"
    assert [len(device.seen) for device in devices] == [1] * (step + 1) + [0] * (2 - step)


async def test_the_time_is_the_sum_and_unknown_where_one_step_cannot_say_it() -> None:
    plan, devices = three()
    whole, region = request()
    for device, timing in zip(devices, (Timing(1, 10), Timing(2, 20), Timing(4, 40)), strict=True):
        device.answers = [Result(ErrorStatus.NONE, timing=timing)]
    assert (await run(plan, whole, region, measure_timing=True)).timing == Timing(7, 70)
    for device, timing in zip(devices, (Timing(1, 10), Timing(in_driver_us=20), Timing(4, 40)), strict=True):
        device.answers = [Result(ErrorStatus.NONE, timing=timing)]
    assert (await run(plan, whole, region, measure_timing=True)).timing == Timing(in_driver_us=70)


async def test_steps_that_do_not_fit_together_are_refused() -> None:
    with pytest.raises(aionn.CompilationError, match="step 1 reads 'v', which no step before it makes"):
        planned(("a", {"x": vector()}, {"t": vector()}), ("b", {"v": vector()}, {"y": vector()}), outputs={"y": vector()})
    with pytest.raises(aionn.CompilationError, match="no step makes the output 'z'"):
        planned(("a", {"x": vector()}, {"y": vector()}), outputs={"y": vector(), "z": vector()})


def test_boundary_tensors_that_are_never_needed_at_once_share_bytes() -> None:
    boundaries = [Boundary(f"t{number}", 4, number, number + 1) for number in range(10)]
    layout = BoundaryLayout.of(boundaries, {boundary.name: (1024,) for boundary in boundaries}, {})
    assert layout.size_bytes == 2 * 4096
    for one in boundaries:
        for other in boundaries:
            if one is not other and one.made <= other.read and other.made <= one.read:
                begin, end = layout.places[one.name][0], layout.places[other.name][0]
                assert abs(begin - end) >= 4096
