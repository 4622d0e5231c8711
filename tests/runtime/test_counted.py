"""How executions and frames are counted on the page: by device, stage and burst, by how they ended, and by age."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator
from typing import Any

import anyio
import numpy as np
import pytest
from numpy.typing import NDArray

import aionn
from aionn.pages.app_layout import Kind, SlotView
from aionn.pages.finding import FoundPage, find_page
from aionn.testing import FakeDevice, identity_model
from tests.runtime.values_models import linear_classifier
from tests.stopping import kill_under

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> Any:
    """No loop matters to what is counted."""
    return ("asyncio", {"use_uvloop": True})


@pytest.fixture
def fake() -> Iterator[FakeDevice]:
    with FakeDevice() as device:
        yield device


@pytest.fixture
async def runtime(fake: FakeDevice) -> AsyncIterator[aionn.Runtime]:
    async with aionn.Runtime(name="counted", start=()) as runtime:
        yield runtime


def slots(kind: Kind) -> list[SlotView]:
    found: FoundPage | None = find_page(os.getpid())
    assert found is not None
    with found:
        view = found.read()
    assert view is not None
    return [slot for slot in view.slots if slot.kind is kind]


def frame(number: int = 0) -> dict[str, NDArray[np.float32]]:
    return {"input": np.full((1, 16), number, np.float32)}


async def compiled(runtime: aionn.Runtime, fake: FakeDevice, **options: Any) -> aionn.Compilation:
    return await runtime.compile(aionn.Model.from_onnx(identity_model()), devices=(fake.name,), **options)


async def test_each_end_of_an_execution_has_a_count(runtime: aionn.Runtime, fake: FakeDevice) -> None:
    compilation = await compiled(runtime, fake, name="vad")
    async with compilation.burst(name="door") as burst:
        await burst.compute(frame())
        await burst.compute(frame())
        with pytest.raises(aionn.CallerError):
            await burst.compute({"nothing": np.zeros(1, np.float32)})
        fake.hang()
        with pytest.raises(aionn.DeadlineError):
            await burst.compute(frame(), timeout_s=0.05)
        fake.behave()
        await burst.compute(frame())
        fake.fail()
        with pytest.raises(aionn.ExecutionError):
            await burst.compute(frame())
        fake.crash()
        with pytest.raises(aionn.DriverDiedError):
            await burst.compute(frame())
        fake.behave()
        await burst.compute(frame())
        (slot,) = slots(Kind.BURST)
    expected = {"computed": 4, "refused": 1, "late": 1, "failed": 1, "died": 1, "hung": 0}
    assert {name: slot.counters[name] for name in expected} == expected
    assert (slot.name, slot.burst, slot.runtime, slot.device, slot.stage) == ("vad", "door", "counted", fake.name[:64], fake.name[:64])
    (past,) = slots(Kind.PAST_BURSTS)
    assert {name: past.counters[name] for name in expected} == expected
    assert (past.name, past.burst, past.runtime) == ("vad", "door", "counted")


async def test_a_driver_that_hangs_is_counted_as_hung(fake: FakeDevice) -> None:
    async with aionn.Runtime(hang_s=0.2, start=()) as runtime:
        compilation = await compiled(runtime, fake)
        fake.hang()
        with pytest.raises(aionn.DriverHungError):
            await compilation.compute(frame())
        (slot,) = slots(Kind.SINGLE)
        assert (slot.counters["hung"], slot.counters["died"]) == (1, 0)


async def test_a_cancelled_call_is_no_failure(runtime: aionn.Runtime, fake: FakeDevice) -> None:
    compilation = await compiled(runtime, fake)
    async with compilation.burst() as burst:
        await burst.compute(frame())
        fake.hang()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(burst.compute, frame())
            await fake.heard("run")
            tasks.cancel_scope.cancel()
        fake.behave()
        await burst.compute(frame())
        (slot,) = slots(Kind.BURST)
        assert [slot.counters[name] for name in ("computed", "refused", "late", "failed", "died", "hung")] == [2, 0, 0, 0, 0, 0]


async def test_single_executions_values_and_starts_count_their_ends(runtime: aionn.Runtime, fake: FakeDevice) -> None:
    compilation = await compiled(runtime, fake)
    await compilation.compute(frame())
    with pytest.raises(aionn.CallerError):
        await compilation.compute({"nothing": np.zeros(1, np.float32)})
    await compilation.start(frame())
    fake.fail()
    with pytest.raises(aionn.ExecutionError):
        await compilation.start(frame())
    fake.hang()
    with pytest.raises(aionn.DeadlineError):
        await compilation.start(frame(), timeout_s=0.05)
    fake.behave()
    found = slots(Kind.SINGLE)
    assert [sum(slot.counters[name] for slot in found) for name in ("computed", "refused", "failed", "late")] == [2, 1, 1, 1]
    await compilation.aclose()
    (past,) = slots(Kind.PAST_SINGLES)
    assert [past.counters[name] for name in ("computed", "refused", "failed", "late")] == [2, 1, 1, 1]


async def test_executions_with_values_count_their_ends() -> None:
    async with aionn.Runtime(start=()) as runtime:
        compilation = await runtime.compile(linear_classifier(["cat", "dog"]), devices=("onnxruntime",), name="classes")
        await compilation.compute({"x": np.zeros((1, 2), np.float32)})
        with pytest.raises(aionn.CallerError):
            await compilation.compute({"x": "a text"})
        (slot,) = slots(Kind.SINGLE)
        assert (slot.name, slot.device, slot.counters["computed"], slot.counters["refused"]) == ("classes", "onnxruntime", 1, 1)


async def test_a_swap_leaves_the_counts_with_the_stage_before() -> None:
    model = aionn.Model.from_onnx(identity_model())
    async with aionn.Runtime(start=()) as runtime:
        compilation = await runtime.compile(
            model,
            mode="staged",
            stages=("reference", "onnxruntime"),
            name="vad",
            stage_policy=aionn.StagePolicy(executions=10**6, min_gain=None),
        )
        async with compilation.burst(name="door") as burst:
            for number in range(5):
                await burst.compute(frame(number))
            await compilation.wait_for_stage("onnxruntime")
            for number in range(3):
                await burst.compute(frame(number))
            by_stage = {
                slot.stage: slot.counters["computed"]
                for slot in (*slots(Kind.PAST_BURSTS), *slots(Kind.BURST))
                if any(slot.counters.values())
            }
            assert by_stage == {"reference": 5, "onnxruntime": 3}
            assert burst.statistics()["computed"] == 8
            (now,) = slots(Kind.BURST)
            assert (now.device, now.stage, now.in_flight) == ("onnxruntime", "onnxruntime", 0)


async def test_frames_of_streams_have_ages_and_reasons_for_their_drops(runtime: aionn.Runtime, fake: FakeDevice) -> None:
    compilation = await compiled(runtime, fake)
    async with compilation.burst() as burst:
        results = [result async for result in burst.map([frame(number) for number in range(6)])]
        (slot,) = slots(Kind.BURST)
        assert (len(results), sum(slot.ages), slot.counters["dropped"]) == (6, 6, 0)
        fake.hang(after=0)
        started = anyio.Event()

        async def source() -> AsyncIterator[dict[str, NDArray[np.float32]]]:
            yield frame()
            await fake.heard("run")
            yield frame()
            yield frame()
            yield frame()
            started.set()

        async with anyio.create_task_group() as tasks:

            async def consume() -> None:
                async for _ in burst.map(source(), policy="latest"):
                    pass

            tasks.start_soon(consume)
            await started.wait()
            fake.behave()
        fake.delay(0.05)
        with pytest.raises(aionn.ExecutionError):
            async for _ in burst.map([frame()] * 4, policy="reject", depth=1):
                pass
        fake.behave()
        (slot,) = slots(Kind.BURST)
        assert slot.counters["dropped_replaced"] == 2
        assert slot.counters["dropped_rejected"] == 1
        assert slot.counters["dropped"] >= 3


async def test_late_frames_are_dropped_as_late(runtime: aionn.Runtime, fake: FakeDevice) -> None:
    compilation = await compiled(runtime, fake)
    async with compilation.burst() as burst:
        fake.hang()
        with pytest.raises(aionn.DeadlineError):
            async for _ in burst.map([frame()], deadline_s=0.05):
                pass
        fake.behave()
        (slot,) = slots(Kind.BURST)
        assert (slot.counters["dropped_late"], slot.counters["dropped"], slot.counters["late"]) == (1, 1, 1)


async def test_the_memory_of_a_burst_is_shown(runtime: aionn.Runtime, fake: FakeDevice) -> None:
    compilation = await compiled(runtime, fake)
    async with compilation.burst() as burst:
        await burst.compute(frame())
        shown = burst.statistics()
        for call in runtime._opened.session.record.each_beat:
            call()()  # type: ignore[misc]
        (slot,) = slots(Kind.BURST)
        assert slot.gauges == (shown["shared_bytes"], shown["free_frames"])
        assert slot.gauges[0] > 0


async def test_a_killed_driver_moves_no_count(runtime: aionn.Runtime, fake: FakeDevice) -> None:
    compilation = await compiled(runtime, fake)
    device = next(one for one in runtime.devices if one.name == fake.name)
    async with compilation.burst() as burst:
        await burst.compute(frame())
        assert device.pid is not None
        await kill_under(device.pid, lambda: burst.compute(frame()))
        await burst.compute(frame())
        (slot,) = slots(Kind.BURST)
        assert [slot.counters[name] for name in ("computed", "died", "connections")] == [2, 1, 2]
        assert slot.in_flight == 0
        assert slots(Kind.PAST_BURSTS)[0].counters["computed"] == 0
