"""Copying large inputs: every byte arrives, and the driver is told once, when little is left to do."""

from __future__ import annotations

import math
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import anyio.lowlevel
import numpy as np
import pytest
from numpy.typing import NDArray

import aionn
from aionn import trace
from aionn.errors import CallerError
from aionn.remote.calls import HasRequest
from aionn.runtime.executing import frames
from aionn.runtime.executing.arguments import Arguments
from aionn.runtime.executing.frames import Frames, fill_large
from aionn.runtime.executing.link import Link
from aionn.runtime.model import Model
from aionn.runtime.streaming.burst import Burst
from aionn.runtime.streaming.connection import BurstConnection
from aionn.testing import FakeDevice
from aionn.testing.models import identity_model
from tests.leaks import leak_check


@pytest.mark.anyio
@pytest.mark.parametrize("layout", ["plain", "strided"])
@pytest.mark.parametrize(
    "shapes", [[(1, 700)], [(1, 3)], [(1, 100), (1, 100)], [(1, 500), (1, 2)], [(1, 2), (1, 500)], [(1, 1)] * 5, [(1, 256)], [(1, 257)]]
)
async def test_large_inputs_arrive_whole(shapes: list[tuple[int, ...]], layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "LAST_BYTES", 1024)
    names = [f"input{index}" for index in range(len(shapes))]
    model = Model.from_onnx(identity_model(dict(zip(names, shapes, strict=True))))
    arguments = Arguments(model)
    chance = np.random.default_rng(5)
    inputs: dict[str, NDArray[Any]] = {}
    for name, shape in zip(names, shapes, strict=True):
        array = chance.random((2 * shape[0], *shape[1:]), np.float32)
        inputs[name] = array[::2] if layout == "strided" else array[: shape[0]].copy()
    places_of = arguments.layout(arguments.shapes_of(inputs))
    pool = Frames(2).pool(places_of)
    frame = pool.lease()
    missing: list[int] = []

    def soon() -> None:
        places = places_of.inputs_in(frame)
        missing.append(sum(int((places[name] != array).sum()) * 4 for name, array in inputs.items()))

    fill_large(frame, places_of, inputs, soon)
    assert all(np.array_equal(place, inputs[name]) for name, place in places_of.inputs_in(frame).items())
    total = sum(4 * math.prod(shape) for shape in shapes)
    assert len(missing) == 1
    if layout == "plain":
        assert missing == [min(1024, total)]
    assert not frame.held()
    pool.close()
    with pytest.raises(CallerError):
        pool.lease()


@pytest.mark.anyio
async def test_a_stream_of_large_inputs_lets_the_loop_run_before_each() -> None:
    turns = 0

    async def other_task() -> None:
        nonlocal turns
        while True:
            turns += 1
            await anyio.lowlevel.checkpoint()

    picture = np.zeros((1, frames.LARGE_BYTES), np.uint8)
    model = Model.from_onnx(identity_model({"input": picture.shape}, np.uint8))
    async with aionn.Runtime() as runtime, anyio.create_task_group() as app:
        compiled = await runtime.compile(model, devices=("reference",))
        async with compiled.burst() as burst:
            await burst.compute({"input": picture})
            assert burst._connection.usual[0] is not None  # what follows is a stream, which yields whenever its answers come
            app.start_soon(other_task)
            for value in range(30):
                picture[...] = value
                before = turns
                outputs = await burst.compute({"input": picture})
                assert outputs["input_out"][0, -1] == outputs["input_out"][0, 0] == value
                assert turns > before
            app.cancel_scope.cancel()


@pytest.mark.anyio
@pytest.mark.parametrize("elements", [16, frames.LARGE_BYTES // 4])
async def test_a_later_frame_of_another_dtype_is_refused_and_never_cast(elements: int) -> None:
    model = Model.from_onnx(identity_model({"input": (1, elements)}))
    async with aionn.Runtime() as runtime:
        compiled = await runtime.compile(model, devices=("reference",))
        async with compiled.burst() as burst:
            good = np.full((1, elements), 1.5, np.float32)
            for _ in range(3):
                assert (await burst.compute({"input": good}))["input_out"][0, -1] == 1.5
            assert burst._connection.usual[0] is not None  # the next one may take the short way
            for dtype in (np.float64, np.float16, np.int32):
                with pytest.raises(aionn.CallerError, match="float32"):
                    await burst.compute({"input": good.astype(dtype)})
            assert burst.statistics()["computed"] == 3


@pytest.mark.anyio
@pytest.mark.parametrize("end", ["the burst is closed", "its link is replaced", "its link is of no use"])
async def test_a_link_that_ends_leaves_nothing_of_it_in_the_driver(end: str) -> None:
    model = Model.from_onnx(identity_model({"input": (4,)}))
    async with aionn.Runtime() as runtime:
        compiled = await runtime.compile(model, devices=("reference",))
        async with compiled.burst() as burst:
            await burst.compute({"input": np.zeros(4, np.float32)})
            burst_connection = burst._connection
            assert isinstance(burst_connection, BurstConnection)
            link, serving = burst_connection.link, burst_connection._compiled.serving
            assert isinstance(link, Link)
            assert serving is not None
            if end == "its link is of no use":
                change = await burst_connection.prepare(serving)
                assert isinstance(change._link, Link)
                link = change._link
            part = link._parts[0]
            connection, number = part.prepared.device.connection, part.context.number
            found, _ = await connection.call(HasRequest(number, 1))  # the driver has the burst
            assert not found
            if end == "its link is replaced":
                change = await burst_connection.prepare(serving)
                change.commit()
                await change.release_old()
            elif end == "its link is of no use":
                await link.aclose(aionn.CallerError("another stage has been swapped in"))
            else:
                await burst.aclose()
            with pytest.raises(aionn.CallerError, match="does not exist"):
                await connection.call(HasRequest(number, 1))


@pytest.mark.anyio
async def test_a_usual_frame_in_flight_stays_pinned_when_its_caller_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    anew = 0
    general = Burst._execute

    async def counted(self: Burst, *arguments: Any) -> Any:
        nonlocal anew
        anew += 1
        return await general(self, *arguments)

    monkeypatch.setattr(Burst, "_execute", counted)
    model = aionn.Model.from_onnx(identity_model({"x": (4,)}))
    with FakeDevice() as fake:
        async with leak_check(), aionn.Runtime() as runtime:
            compilation = await runtime.compile(model, devices=(fake.name,))
            async with compilation.burst() as burst:

                async def compute(number: float) -> None:
                    outputs = await burst.compute({"x": np.full(4, number, np.float32)})
                    np.testing.assert_array_equal(next(iter(outputs.values())), np.full(4, number))

                await compute(1)
                for in_flight, number in enumerate((2, 3), 1):
                    fake.hang()
                    async with anyio.create_task_group() as tasks:
                        tasks.start_soon(compute, number)
                        await (fake.heard("run") if in_flight == 1 else anyio.wait_all_tasks_blocked())
                        assert burst.statistics()["in_flight"] == in_flight
                        tasks.cancel_scope.cancel()
                    assert burst.statistics()["in_flight"] == in_flight  # the driver has not answered
                    assert burst.statistics()["pinned_frames"] == 1  # it may still be writing into the first one, and never runs the second
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(compute, 4)
                    await anyio.wait_all_tasks_blocked()
                    assert burst.statistics()["pinned_frames"] == 2  # in a frame of its own
                    fake.behave()
                assert anew == 1  # all but the first were usual frames
                assert (burst.statistics()["in_flight"], burst.statistics()["pinned_frames"]) == (0, 0)
                await compute(5)


@asynccontextmanager
async def queue_of_a_busy_driver(fake: FakeDevice, depth: int) -> AsyncIterator[Burst]:
    """Yield a burst whose requests lie in the queue until `fake.behave()`, because the driver runs one of another burst."""
    x = np.zeros(4, np.float32)
    async with leak_check(), aionn.Runtime() as runtime, anyio.create_task_group() as tasks:
        compilation = await runtime.compile(aionn.Model.from_onnx(identity_model({"x": (4,)})), devices=(fake.name,))
        async with compilation.burst() as busy, compilation.burst(depth=depth) as burst:
            await busy.compute({"x": x})
            await burst.compute({"x": x})
            fake.hang()
            tasks.start_soon(busy.compute, {"x": x})
            await fake.heard("run")
            yield burst
            await compute_checked(burst, 7)  # answers come in order, so those of withdrawn requests have come before
            assert (burst.statistics()["in_flight"], burst.statistics()["pinned_frames"]) == (0, 0)


async def compute_checked(burst: Burst, number: float) -> None:
    outputs = await burst.compute({"x": np.full(4, number, np.float32)})
    np.testing.assert_array_equal(next(iter(outputs.values())), np.full(4, number))


@pytest.mark.anyio
@pytest.mark.parametrize("late", [False, True])
async def test_a_call_that_leaves_the_queue_lets_the_next_one_in_at_once(late: bool) -> None:
    with FakeDevice() as fake:
        async with queue_of_a_busy_driver(fake, depth=1) as burst, anyio.create_task_group() as calls:
            with anyio.CancelScope() as leaving:
                async with anyio.create_task_group() as tasks:
                    if late:
                        with pytest.raises(aionn.DeadlineError, match="the driver's answer did not come"):
                            await burst.compute({"x": np.zeros(4, np.float32)}, timeout_s=0.001)
                    else:
                        tasks.start_soon(compute_checked, burst, 1)
                        await anyio.wait_all_tasks_blocked()
                    calls.start_soon(compute_checked, burst, 2)
                    await anyio.wait_all_tasks_blocked()
                    assert burst.statistics()["in_flight"] == 1 + late  # without `late` the second one waits for the first one
                    leaving.cancel()
            assert burst.statistics()["in_flight"] == 2
            with pytest.raises(aionn.DeadlineError, match="a free place did not come"):  # the second one has the only place
                await burst.compute({"x": np.zeros(4, np.float32)}, timeout_s=0.001)
            fake.behave()


@pytest.mark.anyio
@pytest.mark.parametrize("depth", [1, 2, 8])
async def test_a_storm_of_cancelled_calls_leaves_twice_the_depth_in_flight_at_most(depth: int) -> None:
    with FakeDevice() as fake:
        async with queue_of_a_busy_driver(fake, depth) as burst:
            for _ in range(3):
                async with anyio.create_task_group() as storm:
                    for number in range(3 * depth):
                        storm.start_soon(compute_checked, burst, number)
                    await anyio.wait_all_tasks_blocked()
                    storm.cancel_scope.cancel()
            assert burst.statistics()["in_flight"] == 2 * depth  # the queue holds so many
            with pytest.raises(aionn.DeadlineError, match="a free place did not come"):
                await burst.compute({"x": np.zeros(4, np.float32)}, timeout_s=0.001)
            async with anyio.create_task_group() as calls:
                for number in range(3 * depth):
                    calls.start_soon(compute_checked, burst, number)
                await anyio.wait_all_tasks_blocked()
                assert burst.statistics()["in_flight"] == 2 * depth
                fake.behave()


@pytest.mark.anyio
async def test_calls_beside_those_that_leave_get_their_own_answers_and_no_more_than_twice_the_depth_is_in_flight() -> None:
    depth, chance, seen = 3, random.Random(30), list[int]()
    with FakeDevice() as fake:
        async with queue_of_a_busy_driver(fake, depth) as burst:

            async def call(number: int, turns: int | None) -> None:
                with anyio.CancelScope() as leaving:
                    async with anyio.create_task_group() as tasks:
                        tasks.start_soon(compute_checked, burst, number)
                        for _ in range(turns or 0):
                            await anyio.lowlevel.checkpoint()
                            seen.append(burst.statistics()["in_flight"])
                        if turns is not None:
                            leaving.cancel()

            async with anyio.create_task_group() as calls:
                for number in range(300):
                    calls.start_soon(call, number, chance.choice((None, 2, 3, 5, 8, 13)))
                    if number == 30:
                        await anyio.wait_all_tasks_blocked()
                        assert max(seen) > depth
                        fake.behave()  # from here on the driver takes requests while callers leave
                    if number > 30:
                        await anyio.lowlevel.checkpoint()
    assert max(seen) <= 2 * depth


def answers(burst: Burst) -> int:
    """How many requests of this burst's link were answered, at once or by a look."""
    assert isinstance(burst._connection.link, Link)
    caller = burst._connection.link.controller.caller
    return caller.answers + caller.answers_at_once


@pytest.fixture
def anew(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The inputs of each call that did not take the path of a usual frame."""
    general, seen = Burst._execute, []

    async def noted(self: Burst, inputs: Any, *arguments: Any) -> Any:
        seen.append(inputs)
        return await general(self, inputs, *arguments)

    monkeypatch.setattr(Burst, "_execute", noted)
    return seen


@pytest.mark.anyio
async def test_a_usual_frame_takes_its_way_while_it_is_traced(anew: list[object]) -> None:
    model = aionn.Model.from_onnx(identity_model({"x": (4,)}))
    async with aionn.Runtime() as runtime:
        compilation = await runtime.compile(model, devices=("reference",))
        async with compilation.burst(depth=64) as burst:
            await burst.compute({"x": np.zeros(4, np.float32)})
            before = answers(burst)

            async def compute(number: float) -> None:
                outputs = await burst.compute({"x": np.full(4, number, np.float32)})
                np.testing.assert_array_equal(next(iter(outputs.values())), np.full(4, number))

            with trace.record() as recording:
                for number in range(20):
                    await compute(number)
                async with anyio.create_task_group() as tasks:
                    for number in range(64):
                        tasks.start_soon(compute, number)
            assert (len(anew), answers(burst) - before) == (1, 84)
            for name in ("burst.queue_wait", "burst.execute"):
                spans = [span for span in recording.spans if span.name == name]
                assert len({span.attributes["identity"] for span in spans}) == len(spans) == 84
            statistics = burst.statistics()
            assert (statistics["computed"], statistics["in_flight"], statistics["pinned_frames"]) == (85, 0, 0)


@pytest.mark.anyio
async def test_a_usual_frame_past_its_deadline_stays_pinned_while_the_driver_may_run_it(anew: list[object]) -> None:
    model = aionn.Model.from_onnx(identity_model({"x": (4,)}))
    inputs = {"x": np.zeros(4, np.float32)}
    with FakeDevice() as fake:
        async with leak_check(), aionn.Runtime() as runtime:
            compilation = await runtime.compile(model, devices=(fake.name,))
            async with compilation.burst() as burst:
                await burst.compute(inputs)
                await burst.compute(inputs, timeout_s=100)
                fake.hang()
                for _ in range(2):  # the timer that is set for later serves these, too
                    with pytest.raises(aionn.DeadlineError):
                        await burst.compute(inputs, timeout_s=0.02)
                assert (burst.statistics()["in_flight"], burst.statistics()["pinned_frames"]) == (2, 1)
                fake.behave()
                await burst.compute(inputs)
                assert (burst.statistics()["in_flight"], burst.statistics()["pinned_frames"]) == (0, 0)
                assert len(anew) == 1


@pytest.mark.anyio
async def test_inputs_that_a_usual_frame_does_not_fit_are_refused_as_the_first_ones_are(anew: list[object]) -> None:
    model = aionn.Model.from_onnx(identity_model({"x": (2, 3)}))
    good = np.arange(6, dtype=np.float32).reshape(2, 3)
    wrong: list[Any] = [
        {},
        {"y": good},
        {"x": good, "y": good},
        {"x": good.astype(np.float64)},
        {"x": good.T},
        {"x": good.tolist()},
        {"x": None},
        [good],
    ]
    async with aionn.Runtime() as runtime:
        compilation = await runtime.compile(model, devices=("reference",))
        said: list[list[str]] = []
        for usual in (False, True):
            said.append([])
            async with compilation.burst() as burst:
                if usual:
                    await burst.compute({"x": good})
                for inputs in wrong:
                    with pytest.raises(aionn.CallerError) as refused:
                        await burst.compute(inputs)
                    said[-1].append(str(refused.value))
                assert burst.statistics()["pinned_frames"] == 0
                before, general = answers(burst), len(anew)
                if usual:
                    strided = np.zeros((2, 6), np.float32)[:, ::2]
                    strided[...] = good
                    np.testing.assert_array_equal((await burst.compute({"x": strided}))["x_out"], good)
                    assert (answers(burst) - before, len(anew)) == (1, general)
        assert said[0] == said[1]
