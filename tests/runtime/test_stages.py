"""Stages and swaps with fake devices; `test_stage_failures` has what may go wrong.

The stream here is a task that computes without a pause; each answer is compared with what was asked. Nothing waits for
time: the quick stage is told to be slow, so that the better one is faster beyond doubt.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest

import aionn
from aionn import trace
from aionn.runtime.staging import measuring, stages
from aionn.testing import FakeDevice, identity_model
from tests.leaks import leak_check
from tests.runtime.staged_streams import SHAPE, frame, rejected, staged, streaming
from tests.scaled_model import scaled_model

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> Any:
    """uvloop alone: nothing here depends on the loop, and each test starts three processes."""
    return ("asyncio", {"use_uvloop": True})


@pytest.fixture(autouse=True)
def state_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


@pytest.fixture
def model() -> aionn.Model:
    return aionn.Model.from_onnx(identity_model({"x": SHAPE}, outputs=["y"]))


@pytest.mark.parametrize("cached", [False, True])
async def test_the_better_stage_takes_over_once_and_no_frame_is_lost(
    quick: FakeDevice, best: FakeDevice, model: aionn.Model, tmp_path: Path, cached: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stages, "RUNS", 3)
    with trace.record() as recording:
        async with leak_check(), aionn.Runtime() as runtime:
            compilation = await staged(runtime, model, quick, best, tmp_path / "cache" if cached else None)
            assert [stage.state for stage in compilation.stages] == ["serving", "waiting"]
            async with streaming(compilation) as stream:
                await compilation.wait_for_stage(best.name, timeout_s=30)
                await stream.goes_on()
                assert stream.stages == [quick.name, best.name]
                outputs = await compilation.compute(frame(7))
                assert (outputs.stage, outputs["y"][0, 0]) == (best.name, 7)
            assert [stage.state for stage in compilation.stages] == ["replaced", "serving"]
            assert compilation.stages[1].made_by == "worker"
            assert compilation.stages[1].comparison is not None
            assert compilation.stages[1].comparison.worst == {"y": 0.0}
            # This stream leaves no gaps: it was held, for single runs, and each was counted.
            assert recording.total("stage.held") == compilation.stages[1].comparison.holds >= 4
            assert compilation.device == best.name
            with anyio.fail_after(60):
                while not recording.total("stage.released"):  # a task of the runtime does that after the swap
                    await anyio.lowlevel.checkpoint()
    assert recording.total("stage.swapped") == recording.total("stage.released") == 1
    assert {"stage.compile", "stage.load", "stage.swap"} <= {span.name for span in recording.spans}


async def test_calls_that_come_at_once_are_held_and_none_is_lost(
    quick: FakeDevice, best: FakeDevice, model: aionn.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stages, "RUNS", 3)
    answered: dict[str, int] = {}

    async with leak_check(), aionn.Runtime() as runtime:
        compilation = await staged(runtime, model, quick, best)

        async def call(number: int) -> None:
            while answered.get(best.name, 0) < 100:
                outputs = await compilation.compute(frame(number))
                assert outputs["y"][0, 0] == number
                answered[outputs.stage] = answered.get(outputs.stage, 0) + 1

        async with anyio.create_task_group() as tasks:
            for number in range(4):
                tasks.start_soon(call, number)
            await compilation.wait_for_stage(best.name, timeout_s=30)
        assert answered.keys() == {quick.name, best.name}


async def test_a_second_start_begins_with_the_better_stage(quick: FakeDevice, best: FakeDevice, model: aionn.Model, tmp_path: Path) -> None:
    async with aionn.Runtime() as runtime:
        compilation = await staged(runtime, model, quick, best, tmp_path / "cache")
        await compilation.compute(frame(1))
        await compilation.wait_for_stage(best.name, timeout_s=30)
    async with aionn.Runtime() as runtime:
        compilation = await staged(runtime, model, quick, best, tmp_path / "cache")
        assert compilation.outcomes[0].kind.name == "HIT"
        assert [stage.state for stage in compilation.stages] == ["skipped", "serving"]
        assert (await compilation.compute(frame(1))).stage == best.name


async def test_a_stage_with_other_outputs_is_rejected_and_remembered(
    quick: FakeDevice, best: FakeDevice, model: aionn.Model, tmp_path: Path
) -> None:
    best.tell(outputs_offset=0.5)
    for reason in ("output 'y': 16 of 16 elements are off by up to 0.5", "as an earlier comparison found"):
        async with leak_check(), aionn.Runtime() as runtime:
            compilation = await staged(runtime, model, quick, best, tmp_path / "cache")
            async with streaming(compilation) as stream:
                assert reason in await rejected(compilation, best)
                assert stream.stages == [quick.name]


async def test_a_stream_that_may_not_be_held_and_leaves_no_gap_keeps_its_stage(
    quick: FakeDevice, best: FakeDevice, model: aionn.Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stages, "COMPARE_S", 0.5)
    monkeypatch.setattr(measuring.Meter, "may_hold", lambda meter, most_s: False)  # as with deadlines that leave no room
    with trace.record() as recording:
        async with leak_check(), aionn.Runtime() as runtime:
            compilation = await staged(runtime, model, quick, best, tmp_path / "cache")
            async with streaming(compilation) as stream:
                assert "its speed could not be decided within 0.5 s" in await rejected(compilation, best)
                assert stream.stages == [quick.name]
    assert recording.total("stage.held") == 0
    # It is not known to be bad or good: it is stored, and has to show itself.
    async with leak_check(), aionn.Runtime() as runtime:
        compilation = await staged(runtime, model, quick, best, tmp_path / "cache")
        assert [stage.state for stage in compilation.stages] == ["serving", "waiting"]
        await compilation.wait_for_stage(best.name, timeout_s=30)
        assert compilation.stages[1].made_by == "cache"


async def test_a_stage_that_declines_to_be_stored_is_compiled_in_its_own_driver(
    quick: FakeDevice, best: FakeDevice, model: aionn.Model, tmp_path: Path
) -> None:
    best.tell(decline=True)
    async with leak_check(), aionn.Runtime() as runtime:
        compilation = await staged(runtime, model, quick, best, tmp_path / "cache")
        await compilation.wait_for_stage(best.name, timeout_s=30)
        assert compilation.stages[1].made_by == "driver"


@pytest.mark.timeout(400)  # its worker starts with the highest niceness
@pytest.mark.usefixtures("workers_in_the_background")
async def test_leaving_in_the_middle_of_a_background_compile_leaves_nothing(
    quick: FakeDevice, best: FakeDevice, model: aionn.Model, tmp_path: Path
) -> None:
    async with leak_check(), aionn.Runtime() as runtime:
        best.hang("compile")
        compilation = await staged(runtime, model, quick, best, tmp_path / "cache")
        compilation._parts.staging._wanted.set()  # type: ignore[union-attr]
        worker = await best.heard("compile")
        assert runtime._opened.devices.worker_pids == [worker]
        assert os.getpriority(os.PRIO_PROCESS, worker) == 19
        assert os.sched_getscheduler(worker) == os.SCHED_BATCH
        assert len(os.sched_getaffinity(worker)) == 1
    best.behave()
    async with leak_check(), aionn.Runtime() as runtime:
        compilation = await staged(runtime, model, quick, best, tmp_path / "cache")
        await compilation.wait_for_stage(best.name, timeout_s=200)


async def test_device_memory_moves_along(quick: FakeDevice, best: FakeDevice) -> None:
    model = aionn.Model.from_onnx(identity_model({"x": SHAPE, "state": SHAPE}, outputs=["y", "stateN"]))
    async with leak_check(), aionn.Runtime() as runtime:
        compilation = await staged(runtime, model, quick, best)
        async with await compilation.allocate(inputs=("state",), outputs=("stateN",)) as state:
            await state.copy_from(np.full(SHAPE, 3, np.float32))
            async with compilation.burst() as burst:
                inputs = {"x": frame(1)["x"], "state": state}
                assert (await burst.compute(inputs, outputs={"stateN": state})).stage == quick.name
                await compilation.wait_for_stage(best.name, timeout_s=30)
                np.testing.assert_array_equal(await state.snapshot(), np.full(SHAPE, 3, np.float32))
                assert (await burst.compute(inputs, outputs={"stateN": state})).stage == best.name
                np.testing.assert_array_equal(await state.snapshot(), np.full(SHAPE, 3, np.float32))


# --- an app's own new version --------------------------------------------------------------------------------------------


async def test_a_new_model_takes_over_an_open_burst_at_one_frame(model: aionn.Model) -> None:
    first = aionn.Model.from_onnx(scaled_model(np.full(64, 2, np.float32)))
    second = aionn.Model.from_onnx(scaled_model(np.full(64, 3, np.float32)))
    async with leak_check(), aionn.Runtime() as runtime:
        compilation = await runtime.compile(first, devices=("reference",))
        factors: list[float] = []
        swapped = anyio.Event()

        async def frames() -> AsyncIterator[dict[str, Any]]:
            while not swapped.is_set() or factors[-1] == 2:
                yield {"x": np.ones(64, np.float32)}

        async def swap() -> None:
            with pytest.raises(aionn.CallerError, match="inputs are"):
                await runtime.swap(compilation, model)
            await runtime.swap(compilation, second)
            swapped.set()

        async with compilation.burst() as burst, anyio.create_task_group() as tasks:
            seqs = []
            async for result in burst.map(frames(), depth=2):
                if not factors:
                    tasks.start_soon(swap)
                seqs.append(result.seq)
                factors.append(float(result.outputs["y"][0]))
                del result  # its outputs are views of the burst's memory
        assert seqs == list(range(len(seqs)))
        assert sorted(factors) == factors
        assert set(factors) == {2.0, 3.0}
        assert compilation.model is second


async def test_a_new_model_that_cannot_run_is_refused_and_the_old_one_serves(best: FakeDevice, model: aionn.Model) -> None:
    other = aionn.Model.from_onnx(identity_model({"x": SHAPE}, outputs=["y"]))
    async with leak_check(), aionn.Runtime() as runtime:
        compilation = await runtime.compile(model, devices=(best.name,))
        for act in ("compile", "load"):
            best.fail("broken version", act)
            with pytest.raises(aionn.CompilationError, match="broken version"):
                await runtime.swap(compilation, other)
            best.behave()
            assert (await compilation.compute(frame(2)))["y"][0, 0] == 2
            assert compilation.model is model


async def test_a_missing_input_beside_memory_is_an_error_with_its_name(quick: FakeDevice, best: FakeDevice, model: aionn.Model) -> None:
    async with aionn.Runtime() as runtime:
        compilation = await runtime.compile(model, mode="staged", stages=(quick.name, best.name))
        with aionn.Memory.allocate(64) as memory, pytest.raises(aionn.CallerError, match=r"without \['x'\]"):
            await compilation.compute({"other": memory})  # a sample is taken before the names are checked
