"""Streams with their state in the driver: each step is an execution that advances the state once, and reuses what the step before made."""

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
from aionn.burst.packets import encode_request_body
from aionn.hal.types import Request
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


def model(shape: tuple[int | str, ...] = (4,)) -> aionn.Model:
    return aionn.Model.from_onnx(identity_model({"x": (3,), "state": shape}, outputs=["y", "stateN"]))


def x(number: float = 0) -> NDArray[np.float32]:
    return np.full(3, number, np.float32)


async def test_a_step_is_not_encoded_again(fake: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """A frame remembers the two requests of a state whose buffers change places, so the driver knows them again, too."""
    encoded: list[object] = []

    def encode(request: Request, *given: Any, **named: Any) -> bytes:
        encoded.append(request)
        return encode_request_body(request, *given, **named)

    monkeypatch.setattr("aionn.runtime.executing.link.encode_request_body", encode)
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
            frames = burst.statistics()["frames"]
            assert frames <= 2
            assert len(encoded) <= frames * 4  # two buffers, with and without times
            assert burst.statistics()["copied_bytes"] - before == 20 * x().nbytes
            assert burst.statistics()["computed"] == 20
            np.testing.assert_array_equal(await state.snapshot(), [25, 25, 25, 25])
            await state.reset(1)
            await burst.compute({"x": x(), "state": state}, outputs={"stateN": state})
            np.testing.assert_array_equal(await state.snapshot(), [2, 2, 2, 2])


async def test_two_memories_may_be_used_in_turn(fake: FakeDevice) -> None:
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


async def test_memories_may_be_only_read_or_only_written(fake: FakeDevice) -> None:
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


async def test_outputs_that_the_app_still_holds_are_not_overwritten(fake: FakeDevice) -> None:
    async with leak_check(), aionn.Runtime() as runtime:
        compilation = await runtime.compile(model(), devices=(fake.name,))
        async with compilation.burst() as burst, await compilation.allocate(**ROLES) as state:
            await state.reset()
            kept = [(await burst.compute({"x": x(n), "state": state}, outputs={"stateN": state}))["y"] for n in range(12)]
            assert [float(y[0]) for y in kept] == [n + 1 for n in range(12)]
            del kept


async def test_a_state_whose_shape_is_open_follows_its_shape(fake: FakeDevice) -> None:
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
WRONG: dict[str, tuple[str, Callable[[dict[str, Any]], tuple[Call, Call]]]] = {
    "no x": (r"without \['x'\]", lambda m: ({"state": m["state"]}, {"stateN": m["state"]})),
    "another name": (r"without \['x'\] and with \['z'\]", lambda m: ({"z": x(), "state": m["state"]}, {"stateN": m["state"]})),
    "x of another shape": (
        r"input 'x': shape \(5,\) does not fit",
        lambda m: ({"x": np.zeros(5, np.float32), "state": m["state"]}, {"stateN": m["state"]}),
    ),
    "x of another type": (
        "input 'x': dtype float64 does not fit",
        lambda m: ({"x": np.zeros(3), "state": m["state"]}, {"stateN": m["state"]}),
    ),
    "x is None": (
        "input 'x': expected a NumPy array, got NoneType",
        lambda m: ({"x": None, "state": m["state"]}, {"stateN": m["state"]}),
    ),
    "an output that is none": (
        r"outputs name \['nowhere'\], which the model does not have; its outputs are \['y', 'stateN'\]",
        lambda m: ({"x": x(), "state": m["state"]}, {"nowhere": m["state"]}),
    ),
    "an array as an output": (
        "output 'stateN': a driver cannot write into a ndarray",
        lambda m: ({"x": x(), "state": m["state"]}, {"stateN": np.zeros(4, np.float32)}),
    ),
    "a closed memory": ("this device memory has been closed", lambda m: ({"x": x(), "state": m["closed"]}, {"stateN": m["closed"]})),
    "a memory that may not be read": (
        r"input 'state': this device memory was allocated for inputs \(\) and outputs \('stateN',\)",
        lambda m: ({"x": x(), "state": m["written"]}, {"stateN": m["state"]}),
    ),
    "a memory that may not be written": (
        r"output 'stateN': this device memory was allocated for inputs \('state',\) and outputs \(\)",
        lambda m: ({"x": x(), "state": m["state"]}, {"stateN": m["read"]}),
    ),
    "a memory of another compilation": (
        "input 'state': this device memory belongs to another compilation, or to an earlier driver",
        lambda m: ({"x": x(), "state": m["foreign"]}, {"stateN": m["foreign"]}),
    ),
    "a memory that was never filled": (
        "device buffer [0-9]+ is not initialized",
        lambda m: ({"x": x(), "state": m["empty"]}, {"stateN": m["empty"]}),
    ),
    "a memory that is being advanced": (
        "an execution that advances this device memory is in flight",
        lambda m: ({"x": x(), "state": m["busy"]}, {"stateN": m["busy"]}),
    ),
}


@pytest.mark.parametrize("anyio_backend", [pytest.param(("asyncio", {"use_uvloop": True}), id="uvloop")])
async def test_what_is_wrong_is_said_in_the_middle_of_a_stream_as_at_its_begin(fake: FakeDevice) -> None:
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
            for what, (words, arguments) in WRONG.items():
                await burst.compute({"x": x(), "state": memories["state"]}, outputs={"stateN": memories["state"]})
                inputs, outputs = arguments(memories)
                with pytest.raises(aionn.AionnError, match=words) as told:
                    await burst.compute(inputs, outputs=outputs)
                async with compilation.burst() as fresh:
                    with pytest.raises(aionn.AionnError) as expected:
                        await fresh.compute(inputs, outputs=outputs)
                assert (type(told.value), str(told.value)) == (type(expected.value), str(expected.value)), what
            memories["busy"]._state.uses.advancing = False
            await burst.compute({"x": x(), "state": memories["state"]}, outputs={"stateN": memories["state"]})
            np.testing.assert_array_equal(await memories["state"].snapshot(), np.full(4, 1 + len(WRONG) + 1))
            np.testing.assert_array_equal(await memories["busy"].snapshot(), np.ones(4))
            assert burst.statistics()["in_flight"] == burst.statistics()["pinned_frames"] == 0


async def test_a_step_that_fails_leaves_the_state_as_it_was(fake: FakeDevice) -> None:
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
            assert burst.statistics()["failed"] == 2


async def test_a_caller_that_leaves_a_step_does_not_leave_half_of_it(fake: FakeDevice) -> None:
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
            assert burst.statistics()["pinned_frames"] == 1  # the driver may still be writing there
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(step)  # waits for the driver
                await anyio.wait_all_tasks_blocked()
                fake.tell(hang=())
            np.testing.assert_array_equal(await state.snapshot(), [4, 4, 4, 4])
            assert burst.statistics()["pinned_frames"] == 0


async def test_a_step_is_refused_while_its_state_is_being_filled(fake: FakeDevice) -> None:
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
                    assert burst.statistics()["in_flight"] == 0  # nothing was sent
                    assert burst.statistics()["pinned_frames"] == 0
                    os.kill(driver, signal.SIGCONT)
            finally:
                os.kill(driver, signal.SIGCONT)
            await step()
            np.testing.assert_array_equal(await state.snapshot(), [8, 8, 8, 8])
            assert burst.statistics()["computed"] == computed + 1


@pytest.mark.parametrize("left", ["reset", "snapshot"])
async def test_a_step_waits_for_a_copy_whose_caller_has_left(fake: FakeDevice, left: str) -> None:
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
            steps = 1 if left == "reset" else 3
            np.testing.assert_array_equal(await state.snapshot(), np.full(4, steps))
            np.testing.assert_array_equal(await written.snapshot(), np.full(4, steps + 1))


async def test_a_driver_that_dies_in_a_step_takes_the_state_with_it(fake: FakeDevice) -> None:
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
            with pytest.raises(aionn.DeviceMemoryLostError):
                await step()
            fake.tell(hang=())
            state = await compilation.allocate(**ROLES)
            await state.reset(7)
            await step()
            await step()
            np.testing.assert_array_equal(await state.snapshot(), [9, 9, 9, 9])


@pytest.mark.parametrize("steps", [1, 3])
async def test_the_state_of_a_failed_step_is_free_when_its_inputs_are_reported(fake: FakeDevice, steps: int) -> None:
    reported: list[Any] = []
    async with leak_check(), aionn.Runtime() as runtime:
        compilation = await runtime.compile(model(), devices=(fake.name,))
        compilation._parts.compiled.on_failure = lambda _, error, inputs: reported.append((error, inputs))
        async with compilation.burst() as burst, await compilation.allocate(**ROLES) as state:
            await state.reset(5)
            for _ in range(steps):
                await burst.compute({"x": x(), "state": state}, outputs={"stateN": state})
            fake.fail()
            with anyio.fail_after(20), pytest.raises(aionn.ExecutionError, match="failed on demand") as raised:
                await burst.compute({"x": x(7), "state": state}, outputs={"stateN": state})
            (error, inputs) = reported[0]
            assert error is raised.value
            np.testing.assert_array_equal(inputs["x"], x(7))
            np.testing.assert_array_equal(inputs["state"], np.full(4, 5 + steps, np.float32))
        reported.clear()
        del raised, error, inputs
