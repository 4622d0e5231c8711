"""The four ways to execute a compiled model: event (`start`), `compute`, burst, and fenced (`start` after other events).

By the rows of the acceptance list: ExecutionTest's Wait, TimingTest, TrivialTest with fences, DynamicOutputShape, MEMORY_DOMAIN.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import aionn
from aionn.hal.types import UNKNOWN_TIME_US, ErrorStatus
from aionn.testing.models import identity_model
from tests.conformance.devices import ENGINES
from tests.leaks import leaves_nothing
from tests.real_models import carried, some_input
from tests.scaled_model import scaled_model

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, bool]]:
    """One loop: `test_started` runs on both."""
    return "asyncio", {"use_uvloop": True}


WAYS = ("event", "compute", "burst", "fenced")
STATUS_ENGINE = "tests.conformance.status_engine:StatusEngine"
MEANING: Mapping[ErrorStatus, type[aionn.AionnError]] = {
    ErrorStatus.DEVICE_UNAVAILABLE: aionn.ExecutionError,
    ErrorStatus.GENERAL_FAILURE: aionn.ExecutionError,
    ErrorStatus.OUTPUT_INSUFFICIENT_SIZE: aionn.OutputInsufficientSizeError,
    ErrorStatus.INVALID_ARGUMENT: aionn.CallerError,
}


async def execute(compilation: aionn.Compilation, way: str, inputs: Mapping[str, Any], **options: Any) -> aionn.Outputs:
    """Run once that way. Fenced: after an execution of the same compilation that succeeds, and a descriptor of the app's."""
    if way == "compute":
        return await compilation.compute(inputs, **options)
    if way == "burst":
        async with compilation.burst() as burst:
            outputs = await burst.compute(inputs, **options)
            return aionn.Outputs({name: array.copy() for name, array in outputs.items()}, outputs.device, outputs.timing)
    if way == "event":
        return await compilation.start(inputs, **options)
    gate = os.eventfd(0)
    try:
        event = compilation.start(inputs, after=(gate,), **options)
        assert not event.done()
        os.eventfd_write(gate, 1)
        return await event
    finally:
        os.close(gate)


@pytest.fixture(params=list(ENGINES))
def engine(request: pytest.FixtureRequest) -> str:
    return ENGINES[request.param]


@leaves_nothing
async def test_wait_gives_every_status_on_every_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """ExecutionTest Wait x {NONE, DEVICE_UNAVAILABLE, GENERAL_FAILURE, OUTPUT_INSUFFICIENT_SIZE, INVALID_ARGUMENT}."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent.parent.parent))  # where the driver finds the engine
    model = aionn.Model.from_onnx(identity_model({"x": (1, 4)}))
    async with aionn.Runtime() as runtime:
        compilation = await runtime.compile(model, devices=(STATUS_ENGINE,))
        for way in WAYS:
            good = {"x": np.zeros((1, 4), np.float32)}
            assert (await execute(compilation, way, good))["x_out"].tolist() == [[0, 0, 0, 0]]
            for status, meaning in MEANING.items():
                bad = {"x": np.full((1, 4), int(status), np.float32)}
                with pytest.raises(meaning, match=f"failed as asked, with {status.name}") as caught:
                    await execute(compilation, way, bad)
                assert type(caught.value) is meaning
                assert getattr(caught.value, "status", status) == status
            assert (await execute(compilation, way, good))["x_out"].tolist() == [[0, 0, 0, 0]], "a failure fails one execution only"
        for status in MEANING:
            event = compilation.start({"x": np.full((1, 4), int(status), np.float32)})  # a lane may have answered already
            with pytest.raises(aionn.AionnError):
                await event
            assert event.status is status
            dependent = compilation.start({"x": np.zeros((1, 4), np.float32)}, after=(event,))
            with pytest.raises(aionn.ExecutionError, match=event.name):
                await dependent


async def test_timing_on_every_way(engine: str) -> None:
    """TimingTest, fenced pairs included: since the launch is in the event, since the dependencies were done is in the outputs."""
    model = aionn.Model.from_onnx(scaled_model(np.full((1, 8), 2, np.float32)))
    inputs = {"x": np.ones((1, 8), np.float32)}
    async with aionn.Runtime() as runtime:
        compilation = await runtime.compile(model, devices=(engine,))
        for way in WAYS:
            timing = (await execute(compilation, way, inputs, measure_timing=True)).timing
            assert timing is not None
            assert timing.in_driver_us != UNKNOWN_TIME_US
            assert timing.on_device_us == UNKNOWN_TIME_US or timing.on_device_us <= timing.in_driver_us
            assert (await execute(compilation, way, inputs)).timing is None
        first = compilation.start(inputs, measure_timing=True)
        second = compilation.start(inputs, measure_timing=True, after=(first,))
        since_fence = (await second).timing
        assert since_fence is not None
        assert second.since_launch is not None
        assert since_fence.in_driver_us <= second.since_launch.in_driver_us
        assert since_fence.on_device_us == second.since_launch.on_device_us
        unasked = compilation.start(inputs)
        await unasked
        assert unasked.since_launch is None


@leaves_nothing
async def test_trivial_fenced_add_three(engine: str) -> None:
    """TrivialTest.FencedAddThree: the second execution depends on the event of the first. Both are right, through memory."""
    if "fake" in engine:
        pytest.skip("the fake computes nothing")
    model = aionn.Model.from_onnx(scaled_model(np.full((1, 16), 3, np.float32)))
    x = np.arange(16, dtype=np.float32)[None]
    async with aionn.Runtime() as runtime:
        compilation = await runtime.compile(model, devices=(engine,))
        with aionn.Memory.allocate(64) as between:
            first = compilation.start({"x": x}, outputs={"y": between})
            second = compilation.start({"x": between}, after=(first,))
            x[:] = -1  # the arrays were copied
            assert (await first)["y"].tolist() == [[3.0 * i for i in range(16)]]
            assert (await second)["y"].tolist() == [[9.0 * i for i in range(16)]]


@leaves_nothing
async def test_trivial_add_two_with_hardware_buffer_input_and_a_fence(engine: str) -> None:
    """TrivialTest.AddTwoWithHardwareBufferInput: the buffer is filled after the start, and its fence says when."""
    if "fake" in engine:
        pytest.skip("the fake computes nothing")
    model = aionn.Model.from_onnx(scaled_model(np.full((1, 16), 2, np.float32)))
    async with aionn.Runtime() as runtime:
        compilation = await runtime.compile(model, devices=(engine,))
        filled = os.eventfd(0)
        with aionn.HardwareBuffer.allocate(64, 1, format="blob") as buffer:
            event = compilation.start({"x": buffer}, after=(filled,))
            np.frombuffer(buffer.view(), np.float32)[:16] = 5
            os.eventfd_write(filled, 1)
            os.close(filled)
            assert (await event)["y"].tolist() == [[10.0] * 16]


@leaves_nothing
async def test_open_outputs_are_run_again_with_more_room_behind_one_fence(engine: str) -> None:
    """DynamicOutputShape: those who wait for the fence see one execution, however often the request was sent."""
    model = aionn.Model.from_onnx(identity_model({"x": ("n",)}, outputs=["y"]))
    async with aionn.Runtime() as runtime:
        compilation = await runtime.compile(model, devices=(engine,))
        for count in (3, 5000, 7):
            x = np.arange(count, dtype=np.float32)
            first = compilation.start({"x": x})
            second = compilation.start({"x": x}, after=(first,))
            np.testing.assert_array_equal((await second)["y"], x)
            np.testing.assert_array_equal((await first)["y"], x)


@leaves_nothing
@pytest.mark.parametrize("kind", ["ashmem", "mmap_fd", "hardware_buffer_blob", "device"])
async def test_memory_domains_on_the_fenced_way(engine: str, kind: str, tmp_path: Any) -> None:
    """The MEMORY_DOMAIN kind: the arguments in every kind of memory, for a fenced execution."""
    model = aionn.Model.from_onnx(identity_model({"x": (1, 16)}, outputs=["y"]))
    x = np.arange(16, dtype=np.float32)[None]
    async with aionn.Runtime() as runtime:
        compilation = await runtime.compile(model, devices=(engine,))
        if kind == "device":
            given, made = await compilation.allocate(inputs=("x",)), await compilation.allocate(outputs=("y",))
            await given.copy_from(x)
            first = compilation.start({"x": given}, outputs={"y": made})
            last = compilation.start({"x": given}, outputs={"y": made}, after=(first,))
            await last
            np.testing.assert_array_equal(await made.snapshot(), x)
            return
        path = tmp_path / "memory"
        path.write_bytes(bytes(128))

        def memory(offset: int) -> Any:
            if kind == "mmap_fd":
                with open(path, "r+b") as file, aionn.Memory.from_fd(file, 128) as whole:
                    return whole[offset : offset + 64]
            return aionn.Memory.allocate(64) if kind == "ashmem" else aionn.HardwareBuffer.allocate(64, 1, format="blob")

        with memory(0) as given, memory(64) as made:
            first = compilation.start({"x": x}, outputs={"y": given})
            second = compilation.start({"x": given}, outputs={"y": made}, after=(first,))
            np.testing.assert_array_equal((await second)["y"], x)


@leaves_nothing
async def test_a_device_memory_advances_through_started_executions_in_their_order(engine: str) -> None:
    """Each start reads and writes the state, and waits for the start before."""
    if "fake" in engine:
        pytest.skip("the fake computes nothing")
    model = aionn.Model.from_onnx(scaled_model(np.full((1, 4), 2, np.float32)))
    async with aionn.Runtime() as runtime:
        compilation = await runtime.compile(model, devices=(engine,))
        state = await compilation.allocate(inputs=("x",), outputs=("y",))
        await state.copy_from(np.ones((1, 4), np.float32))
        events = [compilation.start({"x": state}, outputs={"y": state}) for _ in range(6)]
        for event in events:
            await event
        assert (await state.snapshot()).tolist() == [[64.0] * 4]


@pytest.mark.parametrize("name", ["silero", "magika"])
async def test_all_ways_give_equal_results_on_a_real_model(name: str) -> None:
    model = aionn.Model.from_onnx(carried(name))
    inputs = {key: some_input(operand, 1) for key, operand in model.inputs.items()}
    async with aionn.Runtime() as runtime:
        compilation = await runtime.compile(model, devices=("onnxruntime",))
        expected = await compilation.compute(inputs)
        for way in WAYS:
            found = await execute(compilation, way, inputs)
            assert found.keys() == expected.keys()
            for key, array in expected.items():
                np.testing.assert_array_equal(found[key], array)
