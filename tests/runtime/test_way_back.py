"""A better stage that fails once it serves: the stage before takes its place, and a later start knows."""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import numpy as np
import pytest

import aionn
from aionn import trace
from aionn.runtime.staging import way_back
from aionn.testing import FakeDevice, identity_model
from tests.leaks import leak_check
from tests.runtime.staged_streams import SHAPE, Stream, frame, staged

pytestmark = pytest.mark.anyio

MODEL = aionn.Model.from_onnx(identity_model({"x": SHAPE}, outputs=["y"]))
STATEFUL = aionn.Model.from_onnx(identity_model({"x": SHAPE, "state": SHAPE}, outputs=["y", "stateN"]))


@pytest.fixture
def anyio_backend() -> Any:
    return ("asyncio", {"use_uvloop": True})


@pytest.fixture(autouse=True)
def state_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


@asynccontextmanager
async def swapped(
    quick: FakeDevice, best: FakeDevice, cache: Path | None = None, model: aionn.Model = MODEL, runtime: aionn.Runtime | None = None
) -> AsyncIterator[aionn.Compilation]:
    """A compilation whose better stage serves."""
    async with leak_check(grace_s=5), runtime or aionn.Runtime() as runtime:
        compilation = await staged(runtime, model, quick, best, cache, stage_policy=aionn.StagePolicy(min_gain=None))
        if compilation.device != best.name:
            if len(model.inputs) == 1:
                await compilation.compute(frame(1))
            await compilation.wait_for_stage(best.name, timeout_s=60)
        assert compilation.device == best.name
        yield compilation


async def deaths(compilation: aionn.Compilation, count: int) -> None:
    for _ in range(count):
        with pytest.raises(aionn.DriverDiedError):
            await compilation.compute(frame(1))


async def errors(compilation: aionn.Compilation, count: int) -> None:
    for _ in range(count):
        with pytest.raises(aionn.ExecutionError, match="no luck"):
            await compilation.compute(frame(1))


async def until_stage(compilation: aionn.Compilation, name: str) -> None:
    """Executes until that stage answers; errors of the other one are its due."""
    with anyio.fail_after(60):
        while True:
            try:
                outputs = await compilation.compute(frame(7))
            except aionn.ExecutionError:
                continue
            if outputs.stage == name:
                np.testing.assert_array_equal(outputs["y"], frame(7)["x"])
                return


async def test_after_three_deaths_the_stage_before_serves_the_next_execution(quick: FakeDevice, best: FakeDevice, tmp_path: Path) -> None:
    with trace.record() as recording:
        async with swapped(quick, best, tmp_path / "cache") as compilation:
            best.crash()
            await deaths(compilation, 2)
            assert compilation.device == best.name
            await deaths(compilation, 1)
            outputs = await compilation.compute(frame(7))
            assert (outputs.stage, outputs["y"][0, 0]) == (quick.name, 7)
            assert [stage.state for stage in compilation.stages] == ["serving", "rejected"]
            assert "it failed 3 times within 60 s while it served" in compilation.stages[1].reason
            assert "ended by signal 9" in compilation.stages[1].reason
            with pytest.raises(aionn.StageRejected, match="it failed 3 times"):
                await compilation.wait_for_stage(best.name)
    assert recording.total("stage.rejected") == 1
    assert recording.total("stage.failed") == 3


async def test_deaths_in_a_burst_lead_back_too(quick: FakeDevice, best: FakeDevice) -> None:
    async with swapped(quick, best) as compilation, compilation.burst() as burst:
        best.crash()
        for _ in range(3):
            with pytest.raises(aionn.DriverDiedError):
                await burst.compute(frame(1))
        assert (await burst.compute(frame(7))).stage == quick.name
        async with compilation.burst() as another:
            assert (await another.compute(frame(7))).stage == quick.name


async def test_after_three_errors_the_stage_before_is_swapped_in_under_a_stream(quick: FakeDevice, best: FakeDevice) -> None:
    async with swapped(quick, best) as compilation:
        best.fail("no luck")
        await errors(compilation, 3)
        await until_stage(compilation, quick.name)
        assert "ExecutionError" not in compilation.stages[1].reason
        assert "no luck" in compilation.stages[1].reason
        assert [stage.state for stage in compilation.stages] == ["serving", "rejected"]
        stream = Stream(compilation)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(stream.run)
            await stream.goes_on(20)
            tasks.cancel_scope.cancel()
        assert stream.stages == [quick.name]


async def test_a_stream_goes_on_while_the_stage_before_is_swapped_in(quick: FakeDevice, best: FakeDevice) -> None:
    async with swapped(quick, best) as compilation:
        stream = Stream(compilation)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(stream.run)
            await stream.goes_on()
            # Failures of the app's other executions: the stream itself never meets one.
            serving = compilation._parts.compiled.serving
            assert serving is not None
            for _ in range(3):
                compilation._parts.compiled.failed(serving, aionn.ExecutionError("no luck", status=aionn.hal.ErrorStatus.GENERAL_FAILURE))
            with anyio.fail_after(60):
                while quick.name not in stream.stages:
                    await stream.goes_on(1)
            await stream.goes_on()
            assert stream.stages == [best.name, quick.name]
            tasks.cancel_scope.cancel()


async def test_errors_that_lie_further_apart_do_not_count_together(
    quick: FakeDevice, best: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(way_back, "WITHIN_S", 0.0)
    async with swapped(quick, best) as compilation:
        best.crash()
        await deaths(compilation, 3)  # a fourth one waits 6 s for its driver
        assert compilation.stages[1].state == "serving"
        best.behave()
        assert (await compilation.compute(frame(1))).stage == best.name


async def test_inputs_that_the_stage_before_cannot_run_either_are_not_the_stage_s_fault(
    quick: FakeDevice, best: FakeDevice, tmp_path: Path
) -> None:
    async with swapped(quick, best, tmp_path / "cache") as compilation:
        tried: list[str] = []
        original = compilation._parts.staging._way_back._run  # type: ignore[union-attr]
        judged = anyio.Event()

        async def run(serving: Any, inputs: Any, deadline_ns: int) -> Any:
            tried.append(serving.stage)
            try:
                return await original(serving, inputs, deadline_ns)
            finally:
                if len(tried) == 3:
                    judged.set()

        compilation._parts.staging._way_back._run = run  # type: ignore[union-attr]
        quick.fail("no luck")
        best.fail("no luck")
        await errors(compilation, 3)
        with anyio.fail_after(60):
            await judged.wait()
        assert tried == [quick.name] * 3
        quick.behave()
        best.behave()
        assert (await compilation.compute(frame(1))).stage == best.name
        assert compilation.stages[1].state == "serving"
    async with swapped(quick, best, tmp_path / "cache") as compilation:
        assert compilation.stages[0].state == "skipped"  # nothing is held against the stage


async def test_a_caller_s_mistake_is_no_failure(quick: FakeDevice, best: FakeDevice) -> None:
    async with swapped(quick, best) as compilation:
        for _ in range(4):
            with pytest.raises(aionn.CallerError):
                await compilation.compute({"x": np.zeros((2, 2), np.float32)})
        assert len(compilation._parts.staging._way_back._failures) == 0  # type: ignore[union-attr]


@pytest.mark.parametrize("way", ["compute", "burst"])
@pytest.mark.parametrize("what", ["empty device memory", "input file cut off", "output file cut off"])
async def test_memory_that_no_stage_can_read_is_not_the_stage_s_fault(
    quick: FakeDevice, best: FakeDevice, what: str, way: str, tmp_path: Path
) -> None:
    async with swapped(quick, best) as compilation, compilation.burst() as burst:
        compute = compilation.compute if way == "compute" else burst.compute
        with trace.record() as recording:
            for _ in range(4):
                if what == "empty device memory":
                    async with await compilation.allocate(inputs=("x",)) as empty:
                        with pytest.raises(aionn.ExecutionError, match="not initialized"):
                            await compute({"x": empty})
                    continue
                file = tmp_path / "file"
                file.write_bytes(bytes(64))
                with file.open("r+b") as opened, aionn.Memory.from_fd(opened.fileno(), 64) as memory:
                    opened.truncate(10)
                    inputs, outputs = ({"x": memory}, {}) if what == "input file cut off" else (frame(1), {"y": memory})
                    with pytest.raises(aionn.ExecutionError, match="of a file"):
                        await compute(inputs, outputs=outputs)
        assert recording.total("stage.failed") == 0
        assert (await compute(frame(2))).stage == best.name
        assert [stage.state for stage in compilation.stages] == ["replaced", "serving"]


@pytest.mark.parametrize("way", ["compute", "burst"])
async def test_a_stage_that_fails_on_readable_memory_goes_back(quick: FakeDevice, best: FakeDevice, way: str) -> None:
    async with (
        swapped(quick, best, model=STATEFUL) as compilation,
        compilation.burst() as burst,
        await compilation.allocate(inputs=("state",), outputs=("stateN",)) as state,
    ):
        compute = compilation.compute if way == "compute" else burst.compute
        await state.copy_from(np.full(SHAPE, 3, np.float32))
        inputs, outputs = {"x": frame(1)["x"], "state": state}, {"stateN": state}
        for _ in range(3):  # in a burst, the last of them are the usual step of a recurrent stream
            assert (await compute(inputs, outputs=outputs)).stage == best.name
        best.fail("no luck")
        with trace.record() as recording:
            for _ in range(3):
                with pytest.raises(aionn.ExecutionError, match="no luck"):
                    await compute(inputs, outputs=outputs)
        assert recording.total("stage.failed") == 3
        with anyio.fail_after(60):
            while True:
                try:
                    if (await compute(inputs, outputs=outputs)).stage == quick.name:
                        break
                except aionn.ExecutionError:
                    continue
        np.testing.assert_array_equal(await state.snapshot(), np.full(SHAPE, 3, np.float32))


async def test_a_passing_shortage_is_not_the_stage_s_fault(quick: FakeDevice, best: FakeDevice) -> None:
    async with swapped(quick, best) as compilation:
        pid = compilation._parts.session.devices.find(best.name).pid
        assert pid is not None
        limits = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        used = {int(number) for number in os.listdir(f"/proc/{pid}/fd")}
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (min(set(range(len(used) + 1)) - used), limits[1]))
        with trace.record() as recording:
            for _ in range(3):
                memory = aionn.Memory.allocate(frame(1)["x"].nbytes)  # the driver has none of it yet
                with memory, pytest.raises(aionn.ExecutionError, match="RESOURCE_EXHAUSTED_TRANSIENT"):
                    await compilation.compute({"x": memory})
        resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)
        assert recording.total("stage.failed") == 0
        assert (await compilation.compute(frame(2))).stage == best.name


async def test_restarts_by_the_app_are_not_the_stage_s_fault(quick: FakeDevice, best: FakeDevice) -> None:
    async with swapped(quick, best) as compilation, compilation.burst() as burst:
        device = compilation._parts.session.devices.find(best.name)
        with trace.record() as recording:
            for _ in range(4):
                await device.restart()  # idle
                assert (await compilation.compute(frame(2))).stage == best.name
            best.hang("run")
            for compute in (compilation.compute, burst.compute, compilation.compute, burst.compute):

                async def call(compute: Any = compute) -> None:
                    with pytest.raises(aionn.DriverDiedError, match="restarted"):
                        await compute(frame(1))

                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(call)
                    await best.heard("run")
                    await device.restart()
                    await device.restart()  # once more, before the compilation has met the first
        assert recording.total("stage.failed") == 0
        best.behave()
        assert (await burst.compute(frame(2))).stage == best.name
        assert [stage.state for stage in compilation.stages] == ["replaced", "serving"]


async def test_deaths_by_another_model_are_not_the_stage_s_fault(quick: FakeDevice, best: FakeDevice) -> None:
    async with swapped(quick, best, runtime=(runtime := aionn.Runtime())) as compilation, compilation.burst() as burst:
        other = aionn.Model.from_onnx(identity_model({"a": (2, 2)}))
        with trace.record() as recording:
            for _ in range(4):
                async with await runtime.compile(other, devices=(best.name,)) as crasher:
                    best.crash()
                    with pytest.raises(aionn.DriverDiedError):
                        await crasher.compute({"a": np.ones((2, 2), np.float32)})
                    best.behave()
                assert (await compilation.compute(frame(2))).stage == best.name
                assert (await burst.compute(frame(2))).stage == best.name
        assert recording.total("stage.failed") == 0


async def test_deaths_count_in_the_short_way_of_a_burst_and_without_its_caller(quick: FakeDevice, best: FakeDevice) -> None:
    async with swapped(quick, best) as compilation, compilation.burst() as burst:
        with trace.record() as recording:
            for leaves in (False, True, False):
                best.behave()
                for number in range(3):  # the usual frame
                    assert (await burst.compute(frame(number))).stage == best.name
                best.hang("run")
                pid = compilation._parts.session.devices.find(best.name).pid
                assert pid is not None
                if leaves:
                    with pytest.raises(aionn.DeadlineError):
                        await burst.compute(frame(1), timeout_s=0.05)
                    os.kill(pid, signal.SIGKILL)
                else:
                    async with anyio.create_task_group() as tasks:

                        async def call() -> None:
                            with pytest.raises(aionn.DriverDiedError):
                                await burst.compute(frame(1))

                        tasks.start_soon(call)
                        await best.heard("run")
                        os.kill(pid, signal.SIGKILL)
                with anyio.fail_after(20):
                    while compilation._parts.session.devices.find(best.name).pid == pid:
                        await anyio.lowlevel.checkpoint()
            best.behave()
            assert (await burst.compute(frame(7))).stage == quick.name
        assert recording.total("stage.failed") == 3


async def test_a_later_start_does_not_begin_with_the_bad_stage_nor_swap_to_it(quick: FakeDevice, best: FakeDevice, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    async with swapped(quick, best, cache) as compilation:
        best.crash()
        await deaths(compilation, 3)
        assert (await compilation.compute(frame(7))).stage == quick.name
    best.behave()
    async with aionn.Runtime() as runtime:
        compilation = await staged(runtime, MODEL, quick, best, cache)
        assert compilation.device == quick.name
        await compilation.compute(frame(1))
        with pytest.raises(aionn.StageRejected, match="as an earlier comparison found: it failed 3 times"):
            await compilation.wait_for_stage(best.name, timeout_s=60)
    best.tell(version="2")  # another version of the device: what is remembered no longer holds
    async with swapped(quick, best, cache) as compilation:
        assert compilation.device == best.name


async def test_a_stage_that_served_from_the_start_goes_too(quick: FakeDevice, best: FakeDevice, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    async with swapped(quick, best, cache):
        pass
    async with swapped(quick, best, cache) as compilation:
        assert [stage.state for stage in compilation.stages] == ["skipped", "serving"]
        best.crash()
        await deaths(compilation, 3)
        assert (await compilation.compute(frame(7))).stage == quick.name
        assert [stage.state for stage in compilation.stages] == ["serving", "rejected"]
    async with aionn.Runtime() as runtime:
        assert (await staged(runtime, MODEL, quick, best, cache)).device == quick.name


async def test_device_memory_moves_back_with_the_swap(quick: FakeDevice, best: FakeDevice) -> None:
    async with (
        swapped(quick, best, model=STATEFUL) as compilation,
        await compilation.allocate(inputs=("state",), outputs=("stateN",)) as state,
    ):
        await state.copy_from(np.full(SHAPE, 3, np.float32))
        inputs = {"x": frame(1)["x"], "state": state}
        assert (await compilation.compute(inputs, outputs={"stateN": state})).stage == best.name
        serving = compilation._parts.compiled.serving
        assert serving is not None
        for _ in range(3):
            compilation._parts.compiled.failed(serving, aionn.ExecutionError("no luck", status=aionn.hal.ErrorStatus.GENERAL_FAILURE))
        with anyio.fail_after(60):
            while (await compilation.compute(inputs, outputs={"stateN": state})).stage != quick.name:
                pass
        np.testing.assert_array_equal(await state.snapshot(), np.full(SHAPE, 3, np.float32))


async def test_device_memory_is_lost_with_a_dead_driver_and_the_stage_before_serves(quick: FakeDevice, best: FakeDevice) -> None:
    async with swapped(quick, best, model=STATEFUL) as compilation:
        state = await compilation.allocate(inputs=("state",), outputs=("stateN",))
        await state.copy_from(np.full(SHAPE, 3, np.float32))
        best.crash()
        arrays = {"x": frame(1)["x"], "state": frame(2)["x"]}
        for _ in range(3):
            with pytest.raises(aionn.DriverDiedError):
                await compilation.compute(arrays)
        assert (await compilation.compute(arrays)).stage == quick.name
        with pytest.raises(aionn.DeviceMemoryLostError):
            await compilation.compute({"x": frame(1)["x"], "state": state})
        await state.aclose()


async def test_where_the_stage_before_cannot_be_prepared_the_bad_one_goes_on(quick: FakeDevice, best: FakeDevice) -> None:
    async with swapped(quick, best) as compilation:
        best.crash()
        quick.fail("broken meanwhile", "compile")
        await deaths(compilation, 3)
        best.behave()
        assert (await compilation.compute(frame(1))).stage == best.name
        assert compilation.stages[1].state == "serving"


async def test_closing_in_the_middle_of_the_way_back_leaves_nothing(quick: FakeDevice, best: FakeDevice) -> None:
    async with swapped(quick, best) as compilation:
        best.fail("no luck")
        quick.hang("compile")
        await errors(compilation, 3)
        await quick.heard("compile")
