"""Executions of a plan: one request is split over the steps, and every path gives the same results."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import closing
from functools import partial
from typing import Any

import anyio
import numpy as np
import pytest

import aionn
from aionn import trace
from aionn.hal import UNKNOWN_TIME_US, DataLocation, ErrorStatus, OutputShape, Request, RequestArgument, Result
from aionn.hal.options import CallOptions
from aionn.memory.region import Region
from aionn.runtime.executing.arguments import Outputs
from aionn.runtime.executing.execution import Call
from aionn.runtime.streaming.connection import BurstConnection
from aionn.testing import FakeDevice
from tests.leaks import leak_check
from tests.runtime.partial_engines import LeftFake, RightFake, UntimedFake
from tests.runtime.planned_models import (
    LEFT,
    ORT,
    REF,
    RIGHT,
    UNTIMED,
    chain,
    compiled,
    filtering,
    numbers,
    plan_of,
    serving_of,
    woven,
    woven_outputs,
)

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("surroundings")]


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, bool]]:
    """One loop: `test_planned_bursts` and `test_fenced_plans` run on both."""
    return "asyncio", {"use_uvloop": True}


def same(found: Mapping[str, Any], wanted: Mapping[str, Any], names: Sequence[str] = ()) -> None:
    assert set(found) == set(names or wanted)
    for name in names or wanted:
        np.testing.assert_array_equal(found[name], wanted[name])


async def over_control_calls(compilation: aionn.Compilation, inputs: dict[str, Any], **options: Any) -> Outputs:
    """Compute as `compute` does with what a burst's packets cannot carry."""
    call = Call(inputs, options.pop("outputs", {}), CallOptions(**options), inputs)
    return await compilation._parts.kept._without_packets(call)


@pytest.mark.parametrize("shape", [(3, 5), ("N", 5)], ids=["static", "open"])
async def test_all_paths_of_a_plan_give_the_same_results(shape: Sequence[int | str]) -> None:
    async with compiled(woven(shape), REF, ORT) as (_, compilation):
        assert [planned.step.device for planned in plan_of(compilation).steps] == [REF, ORT, REF, ORT]
        x, y = numbers((3, 5), 1), numbers((3, 5), 2)
        wanted = woven_outputs(x, y)
        same(await compilation.compute({"x": x, "y": y}), wanted)
        same(await over_control_calls(compilation, {"x": x, "y": y}), wanted)
        async with compilation.burst() as burst:
            for _ in range(5):
                same(await burst.compute({"x": x, "y": y}), wanted)
            async with burst.frame({"x": (3, 5), "y": (3, 5)}) as frame:
                frame["x"][:], frame["y"][:] = x, y
                same(await burst.compute(frame), wanted)

            async def source() -> AsyncIterator[aionn.Frame]:
                for seed in range(20):
                    frame = await burst.lease({"x": (3, 5), "y": (3, 5)})
                    frame["x"][:], frame["y"][:] = numbers((3, 5), seed), y
                    yield frame

            seen = 0
            async for result in burst.map(source(), depth=4):
                same(result.outputs, woven_outputs(numbers((3, 5), seen), y))
                seen += 1
            assert seen == 20
        with aionn.Memory.allocate(60) as memory, aionn.Memory.allocate(60) as middle:
            memory.array(np.float32, (3, 5))[:] = x
            found = await compilation.compute({"x": memory, "y": y}, outputs={"mid": middle})
            same(found, wanted)
            np.testing.assert_array_equal(middle.array(np.float32, (3, 5)), wanted["mid"])


async def test_a_boundary_tensor_of_unknown_shape_gets_more_room_when_it_needs_it_and_its_step_runs_again() -> None:
    few, many = np.zeros(20_000, np.float32), numbers((20_000,)) ** 2 + 1
    few[:3] = 1, 2, 3
    async with compiled(filtering(), REF, ORT) as (_, compilation):
        plan = plan_of(compilation)
        for path in (compilation.compute, lambda inputs: over_control_calls(compilation, inputs)):
            plan._layouts._layouts.clear()
            with trace.record() as recording:
                same(await path({"x": few}), {"end": -2 * few[:3]})
                for _ in range(3):
                    same(await path({"x": many}), {"end": -2 * many})
                    same(await path({"x": few}), {"end": -2 * few[:3]})
            widened = [dict(event.attributes) for event in recording.counters if event.name == "plan.widened"]
            assert widened == [{"device": REF, "tensors": ["kept"]}, {"device": ORT, "tensors": ["twice"]}], "it was learned"


async def test_a_main_output_without_room_ends_the_execution_at_once_with_the_shapes_that_are_known() -> None:
    async with compiled(woven(("N", 5)), REF, ORT) as (_, compilation):
        plan = plan_of(compilation)
        x = numbers((3, 5))
        with closing(Region.allocate(4096)) as region:
            np.frombuffer(region.view(), np.float32, 30).reshape(2, 15)[:] = x.reshape(-1)
            places = [RequestArgument(DataLocation(0, offset, 60), (3, 5)) for offset in (0, 64)]
            short = RequestArgument(DataLocation(0, 128, 40), ())
            request = Request(tuple(places), (short, RequestArgument(DataLocation(0, 256, 60), (3, 5))))
            settled: list[Result | None] = []
            with trace.record() as recording:
                planned = plan.execution(((3, 5), (3, 5), None, (3, 5)), 512, request, [region], CallOptions())
                result = await planned.run(planned.execute, settled.append, check=True)
        assert result.status is ErrorStatus.OUTPUT_INSUFFICIENT_SIZE
        assert result.output_shapes == (OutputShape((3, 5), False), OutputShape((3, 5), True))
        assert result.message.startswith(f"step 2 of 4, on device {ORT!r}: ")
        assert settled == [result]
        assert [event.attributes["step"] for event in recording.spans if event.name == "plan.step"] == [0, 1], "later steps do not run"


async def test_an_output_over_an_input_is_refused_although_no_step_sees_both() -> None:
    async with compiled(woven((3, 5)), REF, ORT) as (_, compilation):
        with aionn.Memory.allocate(60) as memory:
            for path in (compilation.compute, lambda inputs, outputs: over_control_calls(compilation, inputs, outputs=outputs)):
                with pytest.raises(aionn.CallerError, match=r"output 'mid': its bytes .* overlap those of input 'y'"):
                    await path({"x": numbers((3, 5)), "y": memory}, outputs={"mid": memory})


async def test_the_time_of_a_plan_is_the_sum_of_its_steps_and_unknown_where_one_is_unknown() -> None:
    x = numbers((3, 5))
    async with compiled(woven((3, 5)), REF, ORT) as (_, compilation):
        for path in (compilation.compute, lambda inputs, measure_timing: over_control_calls(compilation, inputs, measure_timing=True)):
            found = await path({"x": x, "y": x}, measure_timing=True)
            assert found.timing is not None
            assert 4 <= found.timing.on_device_us <= found.timing.in_driver_us < 10**7
            assert found.device == found.stage == f"{REF}+{ORT}"
    with FakeDevice(LeftFake), FakeDevice(RightFake) as right:
        right.delay(0.02, "run")
        async with compiled(chain(("left", "right", "left", "right")), LEFT, RIGHT) as (_, compilation):
            timing = (await compilation.compute({"input": numbers((1, 16))}, measure_timing=True)).timing
            assert timing is not None
            assert 40_000 <= timing.on_device_us <= timing.in_driver_us < 10**7, "both steps that were slow"
    with FakeDevice(LeftFake), FakeDevice(UntimedFake):
        async with compiled(chain(("left", "right")), LEFT, UNTIMED) as (_, compilation):
            timing = (await compilation.compute({"input": numbers((1, 16))}, measure_timing=True)).timing
            assert timing is not None
            assert timing.on_device_us == UNKNOWN_TIME_US
            assert timing.in_driver_us < 10**7


async def test_a_deadline_that_passes_in_one_step_ends_the_execution_and_later_steps_do_not_run() -> None:
    x = numbers((1, 16))
    with FakeDevice(LeftFake) as left, FakeDevice(RightFake) as right:
        async with compiled(chain(("left", "right")), LEFT, RIGHT) as (_, compilation), compilation.burst() as burst:
            for path in (burst.compute, compilation.compute):
                await path({"input": x})
                left.hang("run")
                with pytest.raises(aionn.DeadlineError):
                    await path({"input": x}, timeout_s=0.05)
                right.fail("it must not run", "run")
                left.behave()
                right.behave()
                np.testing.assert_array_equal((await path({"input": x}))["output"], x)
            serving_of(compilation).check_alive()


async def test_a_failure_names_the_step_and_its_device() -> None:
    x = numbers((1, 16))
    with FakeDevice(LeftFake), FakeDevice(RightFake) as right:
        async with compiled(chain(("left", "right", "left")), LEFT, RIGHT) as (_, compilation), compilation.burst() as burst:
            right.fail("out of patience", "run")
            for path in (burst.compute, compilation.compute, partial(over_control_calls, compilation)):
                with pytest.raises(aionn.ExecutionError, match=f"step 2 of 3, on device '{RIGHT}': .*out of patience") as failed:
                    await path({"input": x})
                assert failed.value.status is ErrorStatus.GENERAL_FAILURE
            right.behave()
            for path in (burst.compute, compilation.compute, partial(over_control_calls, compilation)):
                np.testing.assert_array_equal((await path({"input": x}))["output"], x)


@pytest.mark.parametrize("step", range(3))
@pytest.mark.parametrize("path", ["burst", "control"])
async def test_a_driver_that_dies_in_a_step_ends_the_call_with_its_name_and_the_next_call_works(step: int, path: str) -> None:
    x = numbers((1, 16))
    homes = ("left", "right", "left")
    with FakeDevice(LeftFake) as left, FakeDevice(RightFake) as right:
        fake, name = (right, RIGHT) if homes[step] == "right" else (left, LEFT)
        async with leak_check(), compiled(chain(homes), LEFT, RIGHT) as (_, compilation), compilation.burst() as burst:
            compute = burst.compute if path == "burst" else partial(over_control_calls, compilation)
            await compute({"input": x})
            fake.crash("run", after=(2, 1, 3)[step])
            began_s = time.monotonic()
            with pytest.raises(aionn.DriverDiedError) as died:
                while True:
                    await compute({"input": x})
            assert died.value.device == name
            assert time.monotonic() - began_s < 30
            fake.behave()
            np.testing.assert_array_equal((await compute({"input": x}))["output"], x)


@pytest.mark.parametrize("path", ["burst", "compute", "control"])
async def test_a_caller_that_is_cancelled_in_a_step_leaves_no_memory_behind_and_changes_no_other_result(path: str) -> None:
    """The hung step goes on after its caller has left, and no one uses the frame until it has answered."""
    first, second = numbers((1, 16), 1), numbers((1, 16), 2)
    with FakeDevice(LeftFake) as left, FakeDevice(RightFake) as right:
        async with compiled(chain(("left", "right", "left")), LEFT, RIGHT) as (_, compilation), compilation.burst() as burst:
            computes: dict[str, Callable[..., Any]] = {
                "burst": burst.compute,
                "compute": compilation.compute,
                "control": partial(over_control_calls, compilation),
            }
            compute = computes[path]
            await compute({"input": first})
            kept = compilation._parts.kept
            own = {"burst": burst._connection, "compute": kept.connection}.get(path)
            executor = kept._large if own is None else own.executor
            assert executor is not None
            for fake in (left, right):
                fake.hang("run")
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(partial(compute, {"input": first}))
                    await fake.heard("run")
                    tasks.cancel_scope.cancel()
                assert executor.frames.count()["pinned_frames"] == 1, "a driver may still write there"
                fake.behave()
                for _ in range(3):
                    np.testing.assert_array_equal((await compute({"input": second}))["output"], second)
                await serving_of(compilation).wait_idle()
                assert executor.frames.count()["pinned_frames"] == 0


async def test_a_hundred_concurrent_calls_with_cancelled_ones_among_them_give_their_own_results() -> None:
    async with compiled(woven(("N", 5)), REF, ORT) as (_, compilation), compilation.burst(depth=4) as burst:
        paths = (burst.compute, compilation.compute, partial(over_control_calls, compilation))

        async def one(number: int) -> None:
            x, y = numbers((1 + number % 3, 5), number), numbers((1 + number % 3, 5), -number + 1000)
            with anyio.move_on_after(0.002 if number % 7 == 0 else None):
                same(await paths[number % 3]({"x": x, "y": y}), woven_outputs(x, y))
                done.append(number)

        for _ in range(3):
            done: list[int] = []
            async with anyio.create_task_group() as tasks:
                for number in range(100):
                    tasks.start_soon(one, number)
            assert len(done) >= 80
        connection = burst._connection
        assert isinstance(connection, BurstConnection)
        await connection.wait_idle()
        with anyio.fail_after(30):
            await serving_of(compilation).wait_idle()
        assert burst._executor.frames.count()["pinned_frames"] == 0
