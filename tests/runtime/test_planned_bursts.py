"""Bursts and device memory of a plan: as on a simple model, and what cannot be is one sentence."""

from __future__ import annotations

import gc
import os
import signal
import time
import weakref

import anyio
import anyio.lowlevel
import numpy as np
import pytest

import aionn
from aionn import trace
from aionn.runtime.executing.link import Link, PlannedLink
from aionn.testing import FakeDevice
from tests.leaks import driver_pids, leak_check
from tests.runtime.partial_engines import LeftFake, RightFake
from tests.runtime.planned_models import (
    LEFT,
    ORT,
    REF,
    RIGHT,
    chain,
    compiled,
    made,
    node,
    numbers,
    plan_of,
    serving_of,
    woven,
    woven_outputs,
)

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("surroundings")]


def recurrent() -> bytes:
    """`state_out` = `state` + x in the steps of one device, before and after a step of the other one."""
    return made(
        [
            node("ref_grow", "Add", ["state", "x"], ["grown"]),
            node("ort_double", "Add", ["grown", "x"], ["middle"]),
            node("ref_back", "Sub", ["middle", "x"], ["state_out"]),
            node("ref_out", "Neg", ["middle"], ["y"]),
        ],
        {"x": [2, 3], "state": [2, 3]},
        {"y": [2, 3], "state_out": [2, 3]},
    )


async def test_the_requests_of_a_burst_run_in_order_and_several_are_in_different_steps_at_once() -> None:
    with FakeDevice(LeftFake) as left, FakeDevice(RightFake) as right:
        async with compiled(chain(("left", "right")), LEFT, RIGHT) as (_, compilation), compilation.burst(depth=4) as burst:
            await burst.compute({"input": numbers((1, 16))})
            ended: list[int] = []

            async def one(number: int) -> None:
                found = await burst.compute({"input": numbers((1, 16), number)})
                np.testing.assert_array_equal(found["output"], numbers((1, 16), number))
                ended.append(number)

            right.hang("run")
            left.behave()
            async with anyio.create_task_group() as tasks:
                for number in range(8):
                    tasks.start_soon(one, number)
                await right.heard("run")
                for _ in range(3):
                    await left.heard("run")  # later requests are in the first step, while one hangs in the second
                assert burst.statistics()["in_flight"] >= 4
                assert ended == []
                right.behave()
            assert ended == list(range(8))
            assert burst.statistics()["in_flight"] == 0
            assert burst.statistics()["computed"] == 9


async def test_usual_frames_of_a_plan_take_no_short_way_and_are_not_encoded_again() -> None:
    async with compiled(woven((3, 5)), REF, ORT) as (_, compilation), compilation.burst() as burst:
        x, y = numbers((3, 5), 1), numbers((3, 5), 2)
        for _ in range(4):
            assert (await burst.compute({"x": x, "y": y})).keys() == {"mid", "end"}
        assert isinstance(burst._connection.link, PlannedLink)
        assert burst._connection.usual == (None, None, None)
        (pool,) = burst._executor.frames._pools.values()
        assert [len(frame.bindings) for frame in pool._frames] == [4], "one encoded request per step"


@pytest.mark.parametrize("victim", [LEFT, RIGHT])
async def test_a_driver_of_a_plan_that_dies_ends_the_calls_that_need_it_within_100_ms_and_the_burst_goes_on(victim: str) -> None:
    x = numbers((1, 16))
    with FakeDevice(LeftFake) as left, FakeDevice(RightFake) as right:
        fake = left if victim == LEFT else right
        async with leak_check(), compiled(chain(("left", "right")), LEFT, RIGHT) as (_, compilation), compilation.burst() as burst:
            await burst.compute({"input": x})
            fake.hang("run")
            errors: list[tuple[float, BaseException]] = []

            async def one() -> None:
                try:
                    await burst.compute({"input": x})
                except aionn.AionnError as error:
                    errors.append((time.monotonic(), error))

            async with anyio.create_task_group() as tasks:
                for _ in range(3):
                    tasks.start_soon(one)
                os.kill(await fake.heard("run"), signal.SIGKILL)
                killed = time.monotonic()
            assert len(errors) == 3
            assert all(isinstance(error, aionn.DriverDiedError) and error.device == victim for _, error in errors)
            assert max(at for at, _ in errors) - killed < 1.0, "0.1 s on a quiet machine"
            fake.behave()
            np.testing.assert_array_equal((await burst.compute({"input": x}))["output"], x)
            assert burst.statistics()["connections"] == 2
            assert len(driver_pids()) == 2


async def test_a_burst_follows_swaps_from_a_plan_to_a_simple_model_and_back() -> None:
    x, y = numbers((3, 5), 1), numbers((3, 5), 2)
    async with leak_check(), compiled(woven((3, 5)), REF, ORT) as (runtime, compilation), compilation.burst() as burst:
        model = aionn.Model.from_onnx(woven((3, 5)))
        others = [await runtime.compile(model, devices=devices) for devices in (("onnxruntime",), (REF, ORT))]
        kinds = []
        for other in (*others, None):
            np.testing.assert_array_equal((await burst.compute({"x": x, "y": y}))["end"], woven_outputs(x, y)["end"])
            kinds.append(type(burst._connection.link))
            if other is not None:
                await compilation._parts.compiled.swap(serving_of(other))
        assert kinds == [PlannedLink, Link, PlannedLink]


async def test_a_frame_that_was_leased_before_a_swap_to_a_plan_is_copied_into_one_with_room() -> None:
    x, y = numbers((3, 5), 1), numbers((3, 5), 2)
    async with leak_check(), aionn.Runtime() as runtime:
        model = aionn.Model.from_onnx(woven((3, 5)))
        compilation = await runtime.compile(model, devices=("onnxruntime",))
        plan = await runtime.compile(model, devices=(REF, ORT))
        async with compilation.burst() as burst, burst.frame() as frame, burst.frame() as other:
            frame["x"][:], frame["y"][:] = x, y
            other["x"][:], other["y"][:] = y, y
            np.testing.assert_array_equal((await burst.compute(frame))["end"], woven_outputs(x, y)["end"])
            await compilation._parts.compiled.swap(serving_of(plan))
            for _ in range(2):
                np.testing.assert_array_equal((await burst.compute(frame))["end"], woven_outputs(x, y)["end"])
            np.testing.assert_array_equal((await burst.compute(other))["end"], woven_outputs(y, y)["end"])
            for leased in (frame, other):
                np.testing.assert_array_equal(leased["x"], x if leased is frame else y)
                np.testing.assert_array_equal(leased["y"], y)
            async with burst.frame() as roomy:
                roomy["x"][:], roomy["y"][:] = x, y
                copied = burst.statistics()["copied_bytes"]
                np.testing.assert_array_equal((await burst.compute(roomy))["end"], woven_outputs(x, y)["end"])
                assert burst.statistics()["copied_bytes"] == copied, "sent as it is"


async def test_a_state_that_lives_in_the_steps_of_one_device_stays_there() -> None:
    async with (
        compiled(recurrent(), REF, ORT) as (_, compilation),
        compilation.burst() as burst,
        await compilation.allocate(inputs=("state",), outputs=("state_out",)) as state,
    ):
        await state.copy_from(np.zeros((2, 3), np.float32))
        wanted = np.zeros((2, 3), np.float32)
        for seed in range(10):
            x = np.round(numbers((2, 3), seed) * 64)  # sums without rounding
            compute = burst.compute if seed % 2 else compilation.compute
            found = await compute({"x": x, "state": state}, outputs={"state_out": state})
            wanted = wanted + x
            np.testing.assert_array_equal(found["y"], -(wanted + x))
        np.testing.assert_array_equal(await state.snapshot(), wanted)


async def test_device_memory_for_roles_in_several_drivers_is_refused_with_their_names_and_the_way_out() -> None:
    async with compiled(woven((3, 5)), REF, ORT) as (_, compilation):
        for inputs, outputs, found in (
            (("x",), (), f"input 'x' is used on '{REF}' and '{ORT}'"),
            ((), ("mid",), f"output 'mid' is used on '{ORT}' and '{REF}'"),
        ):
            with pytest.raises(aionn.CallerError) as refused:
                await compilation.allocate(inputs=inputs, outputs=outputs)
            assert found in str(refused.value)
            assert "aionn.Memory" in str(refused.value)
        async with await compilation.allocate(inputs=("y",), outputs=("end",)) as memory:
            x, y = numbers((3, 5), 1), numbers((3, 5), 2)
            await memory.copy_from(y)
            await compilation.compute({"x": x, "y": memory}, outputs={"end": memory})
            np.testing.assert_array_equal(await memory.snapshot(), woven_outputs(x, y)["end"])


async def test_a_state_does_not_advance_when_a_later_step_fails() -> None:
    model = made(
        [node("left_0", "Identity", ["state"], ["state_out"]), node("right_0", "Identity", ["state_out"], ["output"])],
        {"state": [1, 4]},
        {"state_out": [1, 4], "output": [1, 4]},
    )
    # `state_out` is read on the other device, so the app's own memory is what both can have.
    with FakeDevice(LeftFake) as left, FakeDevice(RightFake) as right:
        async with compiled(model, LEFT, RIGHT) as (_, compilation), compilation.burst() as burst:
            with pytest.raises(aionn.CallerError, match="several"):
                await compilation.allocate(inputs=("state",), outputs=("state_out",))
            async with await compilation.allocate(inputs=("state",)) as state:
                await state.copy_from(np.ones((1, 4), np.float32))
                left.tell(outputs_offset=1.0)
                for compute in (burst.compute, compilation.compute):
                    right.fail("no", "run")
                    with pytest.raises(aionn.ExecutionError, match="step 2 of 2"):
                        await compute({"state": state})
                    right.behave()
                    found = await compute({"state": state})
                    np.testing.assert_array_equal(found["state_out"], np.full((1, 4), 2, np.float32))
                    np.testing.assert_array_equal(await state.snapshot(), np.ones((1, 4), np.float32))


async def test_a_burst_that_is_closed_with_requests_in_flight_leaves_their_memory_to_the_driver() -> None:
    x = numbers((1, 16))
    with FakeDevice(LeftFake), FakeDevice(RightFake) as right:
        async with leak_check(), compiled(chain(("left", "right")), LEFT, RIGHT) as (_, compilation):
            burst = compilation.burst()
            await burst.__aenter__()
            await burst.compute({"input": x})
            (pool,) = burst._executor.frames._pools.values()
            (region,) = pool.regions.values()
            right.hang("run")
            async with anyio.create_task_group() as tasks:

                async def one() -> None:
                    with pytest.raises(aionn.CallerError, match="closed while this call waited"):
                        await burst.compute({"input": x})

                tasks.start_soon(one)
                await right.heard("run")
                tasks.start_soon(burst.aclose)
                await anyio.wait_all_tasks_blocked()
                with pytest.raises(aionn.CallerError, match="not open"):
                    await burst.compute({"input": x})  # the driver may still write there, so no other execution may have it
                right.behave()
            assert region.closed
            np.testing.assert_array_equal((await compilation.compute({"input": x}))["output"], x)


async def test_a_plan_that_one_dead_driver_ended_is_given_back_in_the_others() -> None:
    x = numbers((1, 16))
    with FakeDevice(LeftFake), FakeDevice(RightFake) as right:
        async with compiled(chain(("left", "right")), LEFT, RIGHT) as (_, compilation), compilation.burst() as burst:
            await burst.compute({"input": x})
            before = plan_of(compilation)
            survivor = before.steps[0].prepared.device
            right.crash("run")
            with pytest.raises(aionn.DriverDiedError):
                await burst.compute({"input": x})
            right.behave()
            await burst.compute({"input": x})
            with anyio.fail_after(30):
                while before.steps[0].prepared.number in survivor._models or len(survivor._bursts) > 1:  # in either order
                    await anyio.lowlevel.checkpoint()
            assert len(survivor._models) == 1
            assert len(survivor._bursts) == 1


async def test_an_unused_plan_is_given_back_in_all_its_drivers_and_its_next_use_works() -> None:
    x, y = numbers((3, 5), 1), numbers((3, 5), 2)
    async with compiled(woven((3, 5)), REF, ORT, idle_s=0.2) as (_, compilation), compilation.burst() as burst:
        rested = anyio.Event()

        def hear(event: trace.Span | trace.Counter) -> None:
            if event.name == "compilation.idle":
                rested.set()

        await burst.compute({"x": x, "y": y})
        plan = plan_of(compilation)
        with trace.listen(hear), anyio.fail_after(30):
            await rested.wait()
            assert serving_of(compilation).asleep
        assert burst._connection.link is None
        for _ in range(3):
            np.testing.assert_array_equal((await burst.compute({"x": x, "y": y}))["end"], woven_outputs(x, y)["end"])
        assert plan_of(compilation) is not plan


async def test_a_burst_over_a_plan_that_is_dropped_is_freed_in_all_its_drivers() -> None:
    x, y = numbers((3, 5), 1), numbers((3, 5), 2)
    async with compiled(woven((3, 5)), REF, ORT) as (_, compilation):
        devices = {id(planned.prepared.device): planned.prepared.device for planned in plan_of(compilation).steps}.values()
        burst = await compilation.burst().__aenter__()
        await burst.compute({"x": x, "y": y})
        assert [len(device._bursts) for device in devices] == [2, 2], "one per step"
        dropped = weakref.ref(burst._connection)
        del burst
        gc.collect()
        assert dropped() is None
        with anyio.fail_after(30):
            while any(device._bursts for device in devices):
                await anyio.lowlevel.checkpoint()
