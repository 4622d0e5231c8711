"""Bursts through the public face, in two processes: the runtime rows of NNAPI's tests, and what upstream never tested.

Upstream has no test that kills the peer during a burst's execution, none with several in flight, none of a hung peer.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import psutil
import pytest
from numpy.typing import NDArray

import aionn
from aionn.testing import FakeDevice
from aionn.testing.models import identity_model
from tests.leaks import driver_pids
from tests.runtime.uneven_engine import UnevenEngine
from tests.stopping import stop

pytestmark = pytest.mark.anyio


def numbered(number: float) -> dict[str, NDArray[np.float32]]:
    return {"input": np.full((1, 16), number, np.float32)}


@asynccontextmanager
async def compiled(model: bytes | None = None, hang_s: float = 10.0, **options: Any) -> AsyncIterator[tuple[FakeDevice, aionn.Compilation]]:
    with FakeDevice() as fake:
        async with aionn.Runtime(hang_s=hang_s) as runtime:
            yield fake, await runtime.compile(aionn.Model.from_onnx(model or identity_model()), devices=(fake.name,), **options)


async def test_burst_compute_null() -> None:
    async with compiled() as (_, compilation), compilation.burst() as burst:
        nothings: list[Any] = [None, {}, {"input": None}, {None: None}, (), 0, burst, compilation]
        for _ in range(2):  # before and after an execution, which has a shorter way
            for nothing in nothings:
                for outputs in ({}, {"input_out": None}):
                    with pytest.raises(aionn.CallerError):
                        await burst.compute(nothing, outputs=outputs)
            assert (await burst.compute(numbered(1)))["input_out"][0, 0] == 1


async def test_burst_compute_bad_compilation() -> None:
    """No compilation exists before it is finished; one that was closed makes no burst, and a burst that is not open computes nothing."""
    async with compiled() as (_, compilation):
        closed = compilation.burst()
        with pytest.raises(aionn.CallerError):
            await closed.compute(numbered(1))
        await compilation.aclose()
        with pytest.raises(aionn.CallerError):
            async with compilation.burst():
                pass


async def test_burst_compute_different_compilations() -> None:
    """A frame of one burst is refused by another; the burst it belongs to takes it."""
    async with compiled() as (_, compilation), compilation.burst() as one, compilation.burst() as other, one.frame() as frame:
        frame["input"][:] = 3
        with pytest.raises(aionn.CallerError, match="another burst"):
            await other.compute(frame)
        assert (await one.compute(frame))["input_out"][0, 0] == 3


@pytest.mark.usefixtures("both_ways")
async def test_burst_compute_concurrent() -> None:
    """NNAPI lets one of two concurrent calls fail; here both are answered, each with its own."""
    async with compiled() as (_, compilation), compilation.burst(depth=2) as burst:
        got: dict[int, float] = {}

        async def call(number: int) -> None:
            got[number] = float((await burst.compute(numbered(number)))["input_out"][0, 0])

        async with anyio.create_task_group() as tasks:
            for number in range(20):
                tasks.start_soon(call, number)
        assert got == {number: float(number) for number in range(20)}


async def test_a_frame_in_flight_is_refused_a_second_time() -> None:
    """Execution usability: an execution that runs cannot be started again; when it has ended its frame can."""
    async with compiled() as (fake, compilation), compilation.burst() as burst, burst.frame() as frame:
        fake.hang()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(burst.compute, frame)
            await fake.heard("run")
            with pytest.raises(aionn.CallerError, match="in flight"):
                await burst.compute(frame)
            fake.behave()
        await burst.compute(frame)


async def test_results_that_are_held_are_never_overwritten() -> None:
    async with compiled() as (_, compilation), compilation.burst() as burst:
        held = [(await burst.compute(numbered(number)))["input_out"] for number in range(40)]
        views = [(await burst.compute(numbered(number)))["input_out"][0, 3:5] for number in range(40)]
        flipped = [(await burst.compute(numbered(number)))["input_out"].T[::-1] for number in range(10)]
        raw = [memoryview((await burst.compute(numbered(number)))["input_out"][0]) for number in range(10)]
        for _ in range(100):
            await burst.compute(numbered(-1))
        assert [array[0, 0] for array in held] == list(range(40))
        assert [array[0] for array in views] == list(range(40))
        assert [array[0, 0] for array in flipped] == list(range(10))
        assert [view[0] for view in raw] == list(range(10))
    assert [array[0, 0] for array in held] == list(range(40))  # also when the burst is closed
    assert [array[0] for array in views] == list(range(40))


async def test_a_stream_that_holds_nothing_needs_two_frames() -> None:
    async with compiled() as (_, compilation), compilation.burst() as burst:
        for number in range(200):
            outputs = await burst.compute(numbered(number))
        assert outputs["input_out"][0, 0] == 199
        assert burst.statistics()["frames"] == 2


@pytest.mark.usefixtures("both_ways")
async def test_a_cancelled_request_keeps_its_frame_until_the_driver_has_answered() -> None:
    async with compiled() as (fake, compilation), compilation.burst() as burst:
        fake.hang()
        with anyio.CancelScope() as scope:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(burst.compute, numbered(1))
                await fake.heard("run")
                scope.cancel()
        assert burst.statistics()["pinned_frames"] == 1
        fake.behave()
        assert (await burst.compute(numbered(2)))["input_out"][0, 0] == 2
        assert burst.statistics()["pinned_frames"] == 0


@pytest.mark.usefixtures("both_ways")
async def test_every_caller_of_a_killed_driver_is_told_and_the_next_call_starts_another() -> None:
    async with compiled() as (fake, compilation), compilation.burst() as burst:
        await burst.compute(numbered(0))
        await fake.heard("run")
        fake.hang()
        errors: list[BaseException] = []

        async def call(number: int) -> None:
            try:
                await burst.compute(numbered(number))
            except aionn.DriverDiedError as error:
                errors.append(error)

        with anyio.fail_after(20):
            async with anyio.create_task_group() as tasks:
                for number in range(12):  # eight in flight, four wait for a turn
                    tasks.start_soon(call, number)
                pid = await fake.heard("run")
                os.kill(pid, signal.SIGKILL)
        assert len(errors) == 12
        assert len({id(error) for error in errors}) == 12  # each has its own, with its own traceback
        fake.behave()
        assert (await burst.compute(numbered(5)))["input_out"][0, 0] == 5
        assert burst.statistics()["pinned_frames"] == 0


@pytest.mark.parametrize("how", ["stopped", "spinning with the GIL", "hanging in its engine"])
async def test_a_driver_that_does_not_answer_is_declared_hung_killed_and_replaced(how: str) -> None:
    async with compiled(hang_s=0.3) as (fake, compilation), compilation.burst() as burst:
        for number in range(20):  # short enough by now for the driver to run it on its loop
            await burst.compute(numbered(number))
        for _ in range(20):
            pid = await fake.heard("run")
        if how == "stopped":
            stop(pid)
        else:
            fake.hang(with_gil=how == "spinning with the GIL")
        errors: list[BaseException] = []

        async def call(timeout_s: float | None) -> None:
            try:
                await burst.compute(numbered(1), timeout_s=timeout_s)
            except aionn.AionnError as error:
                errors.append(error)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(call, 0.05)
            for _ in range(3):
                tasks.start_soon(call, None)
        kinds = sorted(type(error).__name__ for error in errors)
        assert kinds == ["DeadlineError", "DriverHungError", "DriverHungError", "DriverHungError"]
        fake.behave()
        assert (await burst.compute(numbered(7)))["input_out"][0, 0] == 7


@pytest.mark.usefixtures("both_ways")
async def test_another_burst_loses_nothing_when_a_request_of_one_fails() -> None:
    async with compiled() as (fake, compilation), compilation.burst() as one, compilation.burst() as other:
        await other.compute(numbered(1))
        fake.fail("no luck")
        for _ in range(3):
            with pytest.raises(aionn.ExecutionError, match="no luck"):
                await one.compute(numbered(1))
        fake.behave()
        assert (await other.compute(numbered(2)))["input_out"][0, 0] == 2
        assert (await one.compute(numbered(3)))["input_out"][0, 0] == 3


async def test_outputs_of_open_shapes_of_any_size_come_whole() -> None:
    """The first request of a shape has too little room; the second one has what the driver told."""
    async with compiled(identity_model({"x": ("N", "M")}, outputs=("y",))) as (_, compilation), compilation.burst() as burst:
        for rows, columns in ((1, 1), (300, 700), (3, 5), (700, 300), (1, 1)):
            x = np.arange(rows * columns, dtype=np.float32).reshape(rows, columns)
            np.testing.assert_array_equal((await burst.compute({"x": x}))["y"], x)


async def test_a_burst_closed_within_a_frame_and_under_waiting_calls_leaves_plain_errors() -> None:
    async with compiled() as (fake, compilation):
        fake.hang()
        errors: list[BaseException] = []

        async def call(burst: aionn.Burst) -> None:
            try:
                await burst.compute(numbered(1))
            except aionn.AionnError as error:
                errors.append(error)

        async with compilation.burst(depth=1) as burst, anyio.create_task_group() as tasks, burst.frame():
            for _ in range(3):
                tasks.start_soon(call, burst)
            await fake.heard("run")
            tasks.start_soon(burst.aclose)
            await anyio.wait_all_tasks_blocked()
            fake.behave()
        assert [type(error) for error in errors] == [aionn.CallerError] * 3


async def many_in_flight(seconds: float, bursts: int, callers: int, *, cancel: bool) -> int:
    """Callers on each burst, each checking that its answer is its own; how many were answered."""
    answered = 0
    async with compiled() as (_, compilation):
        ends = time.monotonic() + seconds

        async def caller(burst: aionn.Burst, seed: int) -> None:
            nonlocal answered
            turn = 0
            while time.monotonic() < ends:
                turn += 1
                number = float(seed * 100_000 + turn % 100_000)
                with anyio.CancelScope() as scope:
                    if cancel and (turn * 31 + seed) % 17 == 0:
                        scope.cancel()
                    outputs = await burst.compute(numbered(number))
                    assert outputs["input_out"][0, 15] == np.float32(number)
                    answered += 1

        async def one_burst(first: int) -> None:
            async with compilation.burst() as burst, anyio.create_task_group() as tasks:
                for seed in range(first, first + callers):
                    tasks.start_soon(caller, burst, seed)

        with anyio.fail_after(seconds + 60):
            async with anyio.create_task_group() as tasks:
                for index in range(bursts):
                    tasks.start_soon(one_burst, index * callers)
    return answered


@pytest.mark.parametrize("cancel", [False, True], ids=["plain", "with cancellations"])
async def test_eight_in_flight_for_a_while_without_a_lost_answer(cancel: bool) -> None:
    assert await many_in_flight(1.5, bursts=1, callers=10, cancel=cancel) > 100


async def test_several_bursts_of_one_driver_side_by_side() -> None:
    assert await many_in_flight(1.5, bursts=4, callers=4, cancel=True) > 100


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("bursts", [1, 8])
async def test_eight_in_flight_for_minutes_without_a_lost_answer(bursts: int) -> None:
    assert await many_in_flight(180, bursts=bursts, callers=10, cancel=True) > 100_000


def held_by(pid: int) -> tuple[int, int, int]:
    """Resident bytes, descriptors and threads of a process."""
    process = psutil.Process(pid)
    return process.memory_info().rss, process.num_fds(), process.num_threads()


@pytest.mark.soak
@pytest.mark.timeout(900)
async def test_a_million_frames_grow_neither_app_nor_driver() -> None:
    async with compiled() as (_, compilation), compilation.burst() as burst:
        taken = numbered(1)
        pids = [os.getpid()]
        before: list[tuple[int, int, int]] = []
        for number in range(1_050_000):
            if number == 50_000:
                pids += driver_pids()
                before = [held_by(pid) for pid in pids]
            await burst.compute(taken)
        after = [held_by(pid) for pid in pids]
        assert len(pids) > 1
        for (rss, fds, threads), (rss_after, fds_after, threads_after) in zip(before, after, strict=True):
            assert rss_after - rss < 4 << 20
            assert (fds_after, threads_after) <= (fds, threads)


async def test_a_long_run_after_short_ones_does_not_stall_the_other_models_of_its_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    with FakeDevice(UnevenEngine) as fake:
        async with aionn.Runtime() as runtime:
            model = aionn.Model.from_onnx(identity_model())
            one = await runtime.compile(model, devices=(fake.name,))
            async with one.burst() as burst:
                for number in range(20):
                    await burst.compute(numbered(number))
                pids = {await fake.heard("run") for _ in range(20)}
                other = await runtime.compile(model, devices=(fake.name,))
                async with other.burst() as other_burst:
                    fake.hang("slow")
                    answered = anyio.Event()

                    async def long_run() -> None:
                        assert (await burst.compute(numbered(-1)))["input_out"][0, 0] == -1
                        answered.set()

                    with anyio.fail_after(20):
                        async with anyio.create_task_group() as tasks:
                            tasks.start_soon(long_run)
                            pids.add(await fake.heard("slow"))
                            for number in range(20):
                                assert (await other_burst.compute(numbered(number)))["input_out"][0, 0] == number
                                assert (await other.compute(numbered(number)))["input_out"][0, 0] == number
                            assert not answered.is_set()
                            fake.behave()
                assert len(pids) == 1
