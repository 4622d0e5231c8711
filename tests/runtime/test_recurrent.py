"""Streams with their state in the driver: the short way does what the long way does, and refuses what that refuses, word for word."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import anyio
import numpy as np
import pytest
from numpy.typing import NDArray

import aionn
from aionn.runtime.executing.recurrent import RecurrentSteps, Step
from aionn.testing import FakeDevice, identity_model
from tests.leaks import leak_check

pytestmark = pytest.mark.anyio

ROLES: dict[str, Any] = {"inputs": ("state",), "outputs": ("stateN",)}


@pytest.fixture
def fake() -> Iterator[FakeDevice]:
    """Adds 1 to all it is given."""
    with FakeDevice() as device:
        device.tell(outputs_offset=1.0)
        yield device


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each call that asked: whether it went the short way."""
    asked: list[bool] = []
    begin = RecurrentSteps.begin

    def watched(self: RecurrentSteps, *arguments: Any) -> Step | None:
        step = begin(self, *arguments)
        asked.append(step is not None)
        return step

    monkeypatch.setattr(RecurrentSteps, "begin", watched)
    return asked


def model(shape: tuple[int | str, ...] = (4,)) -> aionn.Model:
    return aionn.Model.from_onnx(identity_model({"x": (3,), "state": shape}, outputs=["y", "stateN"]))


def x(number: float = 0) -> NDArray[np.float32]:
    return np.full(3, number, np.float32)


async def test_all_steps_but_the_first_go_the_short_way(fake: FakeDevice, short: list[bool]) -> None:
    async with leak_check(), aionn.Runtime() as runtime:
        compilation = await runtime.compile(model(), devices=(fake.name,))
        async with compilation.burst() as burst, await compilation.allocate(**ROLES) as state:
            await state.reset(5)
            before = burst.statistics()["copied_bytes"]
            for number in range(20):
                outputs = await burst.compute({"x": x(number), "state": state}, outputs={"stateN": state}, measure_timing=number % 2 == 1)
                assert list(outputs) == ["y"]
                np.testing.assert_array_equal(outputs["y"], x(number + 1))
                assert (outputs.timing is None) == (number % 2 == 0)
            del outputs
            assert short == [True] * 19
            assert burst.statistics()["copied_bytes"] - before == 20 * x().nbytes
            assert burst.statistics()["computed"] == 20
            np.testing.assert_array_equal(await state.snapshot(), [25, 25, 25, 25])
            await state.reset(1)
            await burst.compute({"x": x(), "state": state}, outputs={"stateN": state})
            np.testing.assert_array_equal(await state.snapshot(), [2, 2, 2, 2])
            assert short == [True] * 20


async def test_two_memories_in_turn_go_the_short_way(fake: FakeDevice, short: list[bool]) -> None:
    async with leak_check(), aionn.Runtime() as runtime:
        compilation = await runtime.compile(model(), devices=(fake.name,))
        async with compilation.burst() as burst, await compilation.allocate(**ROLES) as a, await compilation.allocate(**ROLES) as b:
            await a.reset()
            now, then = a, b
            for number in range(9):
                await burst.compute({"x": x(), "state": now}, outputs={"stateN": then})
                now, then = then, now
                np.testing.assert_array_equal(await now.snapshot(), np.full(4, number + 1))
                np.testing.assert_array_equal(await then.snapshot(), np.full(4, number))
            assert short == [True] * 8


async def test_memories_that_are_only_read_or_only_written_go_the_short_way(fake: FakeDevice, short: list[bool]) -> None:
    async with leak_check(), aionn.Runtime() as runtime:
        two = aionn.Model.from_onnx(identity_model({"x": (4,), "state": (4,)}, outputs=["y", "stateN"]))
        compilation = await runtime.compile(two, devices=(fake.name,))
        async with (
            compilation.burst() as burst,
            await compilation.allocate(inputs=("x", "state")) as read,
            await compilation.allocate(outputs=("stateN",)) as written,
        ):
            await read.reset(3)
            for _ in range(3):
                assert await burst.compute({"x": read, "state": read}, outputs={"stateN": written}) == {"y": pytest.approx([4] * 4)}
                outputs = await burst.compute({"x": read, "state": np.ones(4, np.float32)})
                np.testing.assert_array_equal(outputs["stateN"], [2, 2, 2, 2])
                del outputs
            np.testing.assert_array_equal(await written.snapshot(), [4, 4, 4, 4])
            for _ in range(3):
                await burst.compute({"x": read, "state": read}, outputs={"stateN": written})
            assert short[-2:] == [True, True]


async def test_outputs_that_the_app_still_holds_are_not_overwritten(fake: FakeDevice, short: list[bool]) -> None:
    async with leak_check(), aionn.Runtime() as runtime:
        compilation = await runtime.compile(model(), devices=(fake.name,))
        async with compilation.burst() as burst, await compilation.allocate(**ROLES) as state:
            await state.reset()
            kept = [(await burst.compute({"x": x(n), "state": state}, outputs={"stateN": state}))["y"] for n in range(12)]
            assert [float(y[0]) for y in kept] == [n + 1 for n in range(12)]
            assert short == [True] * 11
            del kept


async def test_a_state_whose_shape_is_open_follows_its_shape(fake: FakeDevice, short: list[bool]) -> None:
    async with leak_check(), aionn.Runtime() as runtime:
        compilation = await runtime.compile(model(("N",)), devices=(fake.name,))
        async with compilation.burst() as burst, await compilation.allocate(**ROLES) as state:
            for extent in (3, 3, 5, 2):
                await state.copy_from(np.full(extent, 10, np.float32))
                for _ in range(3):
                    await burst.compute({"x": x(), "state": state}, outputs={"stateN": state})
                np.testing.assert_array_equal(await state.snapshot(), np.full(extent, 13))
                assert state.shape == (extent,)


Call = dict[str, Any]
WRONG: dict[str, Callable[[dict[str, Any]], tuple[Call, Call]]] = {
    "no x": lambda m: ({"state": m["state"]}, {"stateN": m["state"]}),
    "another name": lambda m: ({"z": x(), "state": m["state"]}, {"stateN": m["state"]}),
    "x of another shape": lambda m: ({"x": np.zeros(5, np.float32), "state": m["state"]}, {"stateN": m["state"]}),
    "x of another type": lambda m: ({"x": np.zeros(3), "state": m["state"]}, {"stateN": m["state"]}),
    "x is None": lambda m: ({"x": None, "state": m["state"]}, {"stateN": m["state"]}),
    "an output that is none": lambda m: ({"x": x(), "state": m["state"]}, {"nowhere": m["state"]}),
    "an array as an output": lambda m: ({"x": x(), "state": m["state"]}, {"stateN": np.zeros(4, np.float32)}),
    "a closed memory": lambda m: ({"x": x(), "state": m["closed"]}, {"stateN": m["closed"]}),
    "a memory that may not be read": lambda m: ({"x": x(), "state": m["written"]}, {"stateN": m["state"]}),
    "a memory that may not be written": lambda m: ({"x": x(), "state": m["state"]}, {"stateN": m["read"]}),
    "a memory of another compilation": lambda m: ({"x": x(), "state": m["foreign"]}, {"stateN": m["foreign"]}),
    "a memory that was never filled": lambda m: ({"x": x(), "state": m["empty"]}, {"stateN": m["empty"]}),
    "a memory that is being advanced": lambda m: ({"x": x(), "state": m["busy"]}, {"stateN": m["busy"]}),
}


@pytest.mark.parametrize("anyio_backend", [pytest.param(("asyncio", {"use_uvloop": True}), id="uvloop")])
async def test_what_is_wrong_is_said_as_on_the_long_way(fake: FakeDevice, short: list[bool]) -> None:
    async with leak_check(), aionn.Runtime() as runtime:
        compilation = await runtime.compile(model(), devices=(fake.name,))
        other = await runtime.compile(model(), devices=(fake.name,))
        memories = {
            **{name: await compilation.allocate(**ROLES) for name in ("state", "closed", "empty", "busy")},
            "read": await compilation.allocate(inputs=("state",)),
            "written": await compilation.allocate(outputs=("stateN",)),
            "foreign": await other.allocate(**ROLES),
        }
        for name in ("state", "read", "foreign", "busy"):
            await memories[name].reset(1)
        await memories["closed"].aclose()
        memories["busy"]._state.uses.advancing = True  # as one in flight has it: asked before anything else
        async with compilation.burst() as burst:
            for what, arguments in WRONG.items():
                await burst.compute({"x": x(), "state": memories["state"]}, outputs={"stateN": memories["state"]})
                inputs, outputs = arguments(memories)
                before = len(short)
                with pytest.raises(aionn.AionnError) as told:
                    await burst.compute(inputs, outputs=outputs)
                assert len(short) == before + 1, what  # it did ask
                async with compilation.burst() as fresh:
                    with pytest.raises(aionn.AionnError) as expected:
                        await fresh.compute(inputs, outputs=outputs)
                    assert len(short) == before + 1, what  # it did not
                # The buffers of a memory have numbers of their own, nothing else differs.
                assert (type(told.value), str(told.value)) == (type(expected.value), str(expected.value)), what
            memories["busy"]._state.uses.advancing = False
            await burst.compute({"x": x(), "state": memories["state"]}, outputs={"stateN": memories["state"]})
            assert short[-1]
            np.testing.assert_array_equal(await memories["state"].snapshot(), np.full(4, 1 + len(WRONG) + 1))
            np.testing.assert_array_equal(await memories["busy"].snapshot(), np.ones(4))
            assert burst.statistics()["in_flight"] == burst.statistics()["pinned_frames"] == 0


async def test_a_step_that_fails_leaves_the_state_as_it_was(fake: FakeDevice, short: list[bool]) -> None:
    async with leak_check(), aionn.Runtime() as runtime:
        compilation = await runtime.compile(model(), devices=(fake.name,))
        async with compilation.burst() as burst, await compilation.allocate(**ROLES) as state:
            await state.reset()
            for _ in range(3):
                await burst.compute({"x": x(), "state": state}, outputs={"stateN": state})
            fake.fail("not today")
            for _ in range(2):
                with pytest.raises(aionn.ExecutionError, match="not today"):
                    await burst.compute({"x": x(), "state": state}, outputs={"stateN": state})
            fake.behave()
            fake.tell(outputs_offset=1.0)
            await burst.compute({"x": x(), "state": state}, outputs={"stateN": state})
            np.testing.assert_array_equal(await state.snapshot(), [4, 4, 4, 4])
            assert short == [True] * 5
            assert burst.statistics()["failed"] == 2


async def test_a_caller_that_leaves_a_step_does_not_leave_half_of_it(fake: FakeDevice, short: list[bool]) -> None:
    async with leak_check(), aionn.Runtime() as runtime:
        compilation = await runtime.compile(model(), devices=(fake.name,))
        async with compilation.burst() as burst, await compilation.allocate(**ROLES) as state:
            await state.reset()

            async def step() -> None:
                await burst.compute({"x": x(), "state": state}, outputs={"stateN": state})

            await step()
            await step()
            fake.hang()
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(step)
                await fake.heard("run")
                for use in (step, state.reset, state.snapshot):
                    with pytest.raises(aionn.CallerError, match="in flight"):
                        await use()
                tasks.cancel_scope.cancel()
            assert short == [True, True, False]
            assert burst.statistics()["pinned_frames"] == 1  # the driver may still be writing there
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(step)  # waits for the driver
                await anyio.wait_all_tasks_blocked()
                fake.tell(hang=())
            np.testing.assert_array_equal(await state.snapshot(), [4, 4, 4, 4])
            assert burst.statistics()["pinned_frames"] == 0


async def test_a_step_is_refused_while_its_state_is_being_filled(fake: FakeDevice, short: list[bool]) -> None:
    async with leak_check(), aionn.Runtime() as runtime:
        compilation = await runtime.compile(model(), devices=(fake.name,))
        async with compilation.burst() as burst, await compilation.allocate(**ROLES) as state:
            await state.reset()

            async def step() -> None:
                await burst.compute({"x": x(), "state": state}, outputs={"stateN": state})

            await step()
            await step()
            driver = next(device.pid for device in runtime.devices if device.pid)
            computed = burst.statistics()["computed"]
            os.kill(driver, signal.SIGSTOP)  # so that the copy stays under way for as long as this asks
            try:
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(state.reset, 7)
                    await anyio.wait_all_tasks_blocked()
                    assert state._state.uses.filling == 1
                    for _ in range(3):
                        with pytest.raises(aionn.CallerError, match="being filled"), anyio.fail_after(30):
                            await step()
                    assert short == [True] + [False] * 3
                    assert burst.statistics()["in_flight"] == 0  # nothing was sent
                    assert burst.statistics()["pinned_frames"] == 0
                    os.kill(driver, signal.SIGCONT)
            finally:
                os.kill(driver, signal.SIGCONT)
            await step()
            np.testing.assert_array_equal(await state.snapshot(), [8, 8, 8, 8])
            assert short[-1]
            assert burst.statistics()["computed"] == computed + 1


@pytest.mark.parametrize("left", ["reset", "snapshot"])
async def test_a_step_waits_for_a_copy_whose_caller_has_left(fake: FakeDevice, short: list[bool], left: str) -> None:
    async with leak_check(), aionn.Runtime() as runtime:
        compilation = await runtime.compile(model(), devices=(fake.name,))
        async with (
            compilation.burst() as burst,
            await compilation.allocate(**ROLES) as state,
            await compilation.allocate(outputs=("stateN",)) as written,
        ):
            await state.reset()
            for memory in (state, written):

                async def step(target: aionn.DeviceMemory = memory) -> None:
                    await burst.compute({"x": x(), "state": state}, outputs={"stateN": target})

                await step()
                await step()
                short.clear()
                driver = next(device.pid for device in runtime.devices if device.pid)
                os.kill(driver, signal.SIGSTOP)
                try:
                    async with anyio.create_task_group() as tasks:
                        tasks.start_soon(getattr(memory, left))
                        await anyio.wait_all_tasks_blocked()
                        tasks.cancel_scope.cancel()
                    assert memory._state.uses.left_copies == 1  # the driver will make the copy
                    async with anyio.create_task_group() as tasks:
                        tasks.start_soon(step)
                        await anyio.wait_all_tasks_blocked()
                        assert burst.statistics()["in_flight"] == 0
                        os.kill(driver, signal.SIGCONT)
                finally:
                    os.kill(driver, signal.SIGCONT)
                assert short == [False]
            steps = 1 if left == "reset" else 3
            np.testing.assert_array_equal(await state.snapshot(), np.full(4, steps))
            np.testing.assert_array_equal(await written.snapshot(), np.full(4, steps + 1))


async def test_a_driver_that_dies_in_a_step_takes_the_state_with_it(fake: FakeDevice, short: list[bool]) -> None:
    async with leak_check(), aionn.Runtime() as runtime:
        compilation = await runtime.compile(model(), devices=(fake.name,))
        async with compilation.burst() as burst:
            state = await compilation.allocate(**ROLES)
            await state.reset()

            async def step() -> None:
                await burst.compute({"x": x(), "state": state}, outputs={"stateN": state})

            await step()
            await step()
            fake.hang()
            async with anyio.create_task_group() as tasks:

                async def lost() -> None:
                    with pytest.raises(aionn.DeviceMemoryLostError):
                        await step()

                tasks.start_soon(lost)
                await fake.heard("run")
                os.kill(next(device.pid for device in runtime.devices if device.pid), signal.SIGKILL)
            assert short == [True, True]
            with pytest.raises(aionn.DeviceMemoryLostError):
                await step()
            fake.tell(hang=())
            state = await compilation.allocate(**ROLES)
            await state.reset(7)
            await step()
            await step()
            np.testing.assert_array_equal(await state.snapshot(), [9, 9, 9, 9])
            assert short[-1]


@pytest.mark.parametrize("way", ["long", "short"])
async def test_the_state_of_a_failed_step_is_free_when_its_inputs_are_reported(fake: FakeDevice, short: list[bool], way: str) -> None:
    reported: list[Any] = []
    async with leak_check(), aionn.Runtime() as runtime:
        compilation = await runtime.compile(model(), devices=(fake.name,))
        compilation._parts.compiled.on_failure = lambda _, error, inputs: reported.append((error, inputs))
        async with compilation.burst() as burst, await compilation.allocate(**ROLES) as state:
            await state.reset(5)
            for _ in range(1 if way == "long" else 3):
                await burst.compute({"x": x(), "state": state}, outputs={"stateN": state})
            burst._recurrent = None if way == "long" else burst._recurrent
            fake.fail()
            with anyio.fail_after(20), pytest.raises(aionn.ExecutionError, match="failed on demand") as raised:
                await burst.compute({"x": x(7), "state": state}, outputs={"stateN": state})
            (error, inputs) = reported[0]
            assert error is raised.value
            np.testing.assert_array_equal(inputs["x"], x(7))
            np.testing.assert_array_equal(inputs["state"], np.full(4, 6 if way == "long" else 8, np.float32))
            assert short == ([] if way == "long" else [True] * 3)
        reported.clear()
        del raised, error, inputs
