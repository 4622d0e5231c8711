"""Joined runs that fail, mix rows, or kill the driver; requests that are late or whose callers leave while others run."""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path

import anyio
import numpy as np
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper

import aionn
from aionn.errors import DeadlineError, DriverDiedError
from tests.joining.engine import BAD, HELD, NAME, SLOW

pytestmark = pytest.mark.anyio

CALLERS = 8


@pytest.fixture(autouse=True)
def with_lanes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIONN_LANES", "1")


@pytest.fixture
def rows_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[list[float]]]:
    """Returns the rows of each run of the engine so far."""
    path = tmp_path / "runs"
    path.touch()
    monkeypatch.setenv("AIONN_JOINED_RUNS", str(path))
    return lambda: [[float(row) for row in line.split()] for line in path.read_text().splitlines()]


def doubling(name: str = "doubling") -> aionn.Model:
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 4])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 4])
    graph = helper.make_graph([helper.make_node("Add", ["x", "x"], ["y"])], name, [x], [y])
    return aionn.Model.from_onnx(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]).SerializeToString())


def row(value: float) -> NDArray[np.float32]:
    return np.full((1, 4), value, np.float32)


def runtime_of() -> aionn.Runtime:
    return aionn.Runtime(start=(), sandbox="off")  # the engine writes a file of the test's


async def until(holds: Callable[[], bool]) -> None:
    with anyio.fail_after(60):
        while not holds():  # noqa: ASYNC110 - a file has no event
            await anyio.sleep(0.005)


async def calls(compilation: aionn.Compilation, rounds: int, callers: int = CALLERS) -> None:
    """Make calls side by side, and check that each gets its own answer."""

    async def one(caller: int) -> None:
        for number in range(rounds):
            value = 1 + caller + 100 * (number % 7)
            found = await compilation.compute({"x": row(value)})
            np.testing.assert_array_equal(found["y"], 2 * row(value))

    async with anyio.create_task_group() as tasks:
        for caller in range(callers):
            tasks.start_soon(one, caller)


@pytest.mark.parametrize("act", ["raise", "cancel"])
async def test_a_joined_run_that_fails_is_repeated_row_by_row_and_its_size_rests(
    act: str, rows_run: Callable[[], list[list[float]]], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("AIONN_JOINED_ACT", act)
    async with runtime_of() as runtime:
        compilation = await runtime.compile(doubling(), devices=(NAME,), batch=aionn.Batching())
        with caplog.at_level(logging.WARNING):
            await calls(compilation, 40)
        assert sum(len(rows) > 1 for rows in rows_run()) == 1  # and not again
        assert compilation.batching is not None
        assert compilation.batching.most_rows == 1
        assert [record.message for record in caplog.records if "a joined run of" in record.message] != []


async def test_bad_inputs_of_a_caller_do_not_count_against_the_size(
    rows_run: Callable[[], list[list[float]]], caplog: pytest.LogCaptureFixture
) -> None:
    """Two callers give rows that no run computes, all the time. The others get their answers, and go on to share runs."""
    async with runtime_of() as runtime:
        compilation = await runtime.compile(doubling(), devices=(NAME,), batch=aionn.Batching())
        ends, refused = anyio.Event(), 0

        async def bad() -> None:
            nonlocal refused
            while not ends.is_set():
                with pytest.raises(aionn.ExecutionError, match="this row cannot be computed"):
                    await compilation.compute({"x": row(BAD)})
                refused += 1

        with caplog.at_level(logging.WARNING):
            await calls(compilation, 60)  # until sizes are known
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(bad)
                tasks.start_soon(bad)
                await calls(compilation, 40)
                ends.set()
        joined = [rows for rows in rows_run() if len(rows) > 1]
        assert sum(BAD in rows for rows in joined) > 10  # it did not go alone
        assert refused > 20
        assert "a joined run of" not in caplog.text
        assert compilation.batching is not None
        assert compilation.batching.most_rows >= 4


async def test_a_kernel_that_mixes_rows_later_is_found_and_turned_off(
    rows_run: Callable[[], list[list[float]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answers are right nevertheless for the run that was compared, since its rows were run again alone."""
    monkeypatch.setenv("AIONN_JOINED_ACT", "mix")
    async with runtime_of() as runtime:
        compilation = await runtime.compile(doubling(), devices=(NAME,), batch=aionn.Batching(verify_every=1))
        await calls(compilation, 60)
        found = compilation.batching
        assert found is not None
        assert not found.allowed
        assert "differed from one of its rows alone" in found.reason
        before = len(rows_run())
        await calls(compilation, 5)
        assert {len(rows) for rows in rows_run()[before:]} == {1}


async def test_a_death_in_a_joined_run_reaches_all_of_its_callers(
    rows_run: Callable[[], list[list[float]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """After two such deaths the requests of the model are joined no more, so the calls of the third round are all answered."""
    monkeypatch.setenv("AIONN_JOINED_ACT", "die")
    async with runtime_of() as runtime:
        compilation = await runtime.compile(doubling(), devices=(NAME,), batch=aionn.Batching())
        for died in (True, True, False):
            ends: list[bool] = []

            async def one(caller: int, died: bool = died, ends: list[bool] = ends) -> None:
                try:
                    number = 0
                    while number < 60 or (died and not ends):  # under load, many calls are answered before some meet in a run
                        await compilation.compute({"x": row(1 + caller)})
                        number += 1
                        if died and ends:
                            return  # it was answered just before the death
                    ends.append(False)
                except DriverDiedError:
                    ends.append(True)

            async with anyio.create_task_group() as tasks:
                for caller in range(CALLERS):
                    tasks.start_soon(one, caller)
            assert set(ends) == {died}
            assert len(ends) == CALLERS if not died else len(ends) > 1
            found = await compilation.compute({"x": row(3)})
            np.testing.assert_array_equal(found["y"], 2 * row(3))
        assert compilation.batching is not None
        assert compilation.batching.reason == "2 drivers died within joined runs of this model"
        assert compilation._parts.kept_model.joined_deaths == 2
        await runtime.swap(compilation, doubling("another"))
        assert compilation._parts.kept_model.joined_deaths == 0
        assert compilation.batching.reason == ""


async def test_a_fault_in_a_lane_ends_the_driver_at_once(
    rows_run: Callable[[], list[list[float]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its request is never answered. The caller need not wait until a driver without progress counts as hung."""
    monkeypatch.setenv("AIONN_JOINED_ACT", "fault")
    async with runtime_of() as runtime:
        compilation = await runtime.compile(doubling(), devices=(NAME,), batch=aionn.Batching())
        async with compilation.burst() as burst:
            with pytest.raises(DriverDiedError) as died:
                await burst.compute({"x": row(1)})
        assert died.value.exit_code == -signal.SIGABRT
        assert "'NoneType' object is not callable" in "".join(died.value.__notes__)


async def test_a_late_or_left_request_behind_a_long_run_ends_in_time_and_a_late_one_never_runs(
    rows_run: Callable[[], list[list[float]]],
) -> None:
    async with runtime_of() as runtime:
        compilation = await runtime.compile(doubling(), devices=(NAME,), batch=aionn.Batching())
        await calls(compilation, 3)
        late = 77.0
        ended: list[float] = []

        async def long() -> None:
            await compilation.compute({"x": row(SLOW)})

        async def with_deadline() -> None:
            began_s = time.monotonic()
            with pytest.raises(DeadlineError):
                await compilation.compute({"x": row(late)}, timeout_s=0.02)
            ended.append(time.monotonic() - began_s)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(long)
            await anyio.sleep(0.05)
            tasks.start_soon(with_deadline)
        await calls(compilation, 3)
        assert ended[0] < 0.15
        assert not any(late in rows for rows in rows_run())


@pytest.mark.parametrize("batch", [None, aionn.Batching()], ids=["alone", "joined"])
@pytest.mark.parametrize("of", ["one burst", "a burst each"])
@pytest.mark.every_combination
async def test_a_call_that_is_cancelled_while_it_is_queued_never_runs(
    rows_run: Callable[[], list[list[float]]], batch: aionn.Batching | None, of: str, tmp_path: Path
) -> None:
    """The rows are in no run of the engine, also if a call was cancelled by `Task.cancel`. The calls beside them are answered.

    A call's frame is free at once, while the driver is still busy with the run before.
    """
    left, stayed = [71.0, 72.0, 73.0], [81.0, 82.0]
    async with runtime_of() as runtime, AsyncExitStack() as stack:
        compilation = await runtime.compile(doubling(), devices=(NAME,), batch=batch)
        shared = await stack.enter_async_context(compilation.burst(depth=8))
        bursts = {
            value: shared if of == "one burst" else await stack.enter_async_context(compilation.burst()) for value in (HELD, *left, *stayed)
        }

        async def call(value: float) -> None:
            found = await bursts[value].compute({"x": row(value)})
            np.testing.assert_array_equal(found["y"], 2 * row(value))

        for value in (*stayed, *stayed):
            await call(value)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(call(HELD))
            await until(lambda: [HELD] in rows_run())
            before = len(rows_run())
            leaving = [tasks.create_task(call(value)) for value in left]
            for value in stayed:
                tasks.create_task(call(value))
            await anyio.wait_all_tasks_blocked()
            for task in leaving:
                task.cancel()
            await asyncio.wait(leaving)
            pinned = {burst: burst.statistics()["pinned_frames"] for burst in bursts.values()}
            assert sum(pinned.values()) == 1 + len(stayed)  # that of the run, and those of the calls that still wait
            assert len(rows_run()) == before
            (tmp_path / "runs.go").touch()
        for value in stayed:
            await call(value)
        ran = [value for rows in rows_run() for value in rows]
        assert not set(left).intersection(ran)
        assert [ran.count(value) for value in stayed] == [4, 4]


async def test_without_batching_nothing_is_joined(rows_run: Callable[[], list[list[float]]]) -> None:
    async with runtime_of() as runtime:
        compilation = await runtime.compile(doubling(), devices=(NAME,))
        await calls(compilation, 20)
        assert {len(rows) for rows in rows_run()} == {1}
        assert compilation.batching is None
        assert compilation.statistics()["runs"] == 0


async def test_without_lanes_the_device_says_that_it_joins_nothing(
    rows_run: Callable[[], list[list[float]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AIONN_LANES", "0")
    async with runtime_of() as runtime:
        compilation = await runtime.compile(doubling(), devices=(NAME,), batch=aionn.Batching())
        await calls(compilation, 5)
        found = compilation.batching
        assert found is not None
        assert (found.allowed, found.axes, found.most_rows) == (False, {}, 1)
        assert "AIONN_LANES=0" in found.reason
        assert {len(rows) for rows in rows_run()} == {1}


async def test_a_wrong_argument_says_what_is_right() -> None:
    async with runtime_of() as runtime:
        with pytest.raises(aionn.CallerError, match=r"batch of type int; give an aionn\.Batching, or None"):
            await runtime.compile(doubling(), batch=16)  # type: ignore[arg-type]


async def test_one_burst_does_not_own_the_batches(rows_run: Callable[[], list[list[float]]]) -> None:
    """One burst has 32 requests in flight, seven have one each. Each of the seven is in every run, or in the next."""
    async with runtime_of() as runtime:
        compilation = await runtime.compile(doubling(), devices=(NAME,), batch=aionn.Batching(max_rows=8))
        await calls(compilation, 60, callers=16)  # until sizes are known
        assert compilation.batching is not None
        assert compilation.batching.most_rows == 8
        waits: list[int] = []
        ends = anyio.Event()

        async def hungry(burst: aionn.Burst) -> None:
            while not ends.is_set():
                await burst.compute({"x": row(1)})

        async def modest(number: int) -> None:
            async with compilation.burst() as burst:
                for _ in range(100):
                    before = compilation.statistics()["runs"]
                    await burst.compute({"x": row(1 + number)})
                    waits.append(compilation.statistics()["runs"] - before)
            ends.set()

        async with compilation.burst(depth=32) as deep, anyio.create_task_group() as tasks:
            for _ in range(32):
                tasks.start_soon(hungry, deep)
            for number in range(1, 8):
                tasks.start_soon(modest, number)
        # The run in progress, its own one, and those that ended before the app looked. The hungry burst alone fills four runs.
        assert sorted(waits)[len(waits) // 2] <= 3
