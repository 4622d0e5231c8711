"""Lanes by themselves: jobs in order, their end, threads that cannot be started. tests/burst/test_lanes.py has them with bursts."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Mapping
from typing import Any

import anyio
import anyio.to_thread
import pytest
from numpy.typing import NDArray

from aionn.driver.lanes import Lane, Lanes
from aionn.errors import CallerError, ExecutionError
from aionn.hal import ErrorStatus, ExecutionReport
from aionn.pages.page import private_slot
from tests.descriptors import free_descriptors

pytestmark = pytest.mark.anyio


class Nothing:
    """An executable that is never run."""

    def run(self, inputs: Mapping[str, NDArray[Any]], outputs: Mapping[str, NDArray[Any]], timing: bool) -> ExecutionReport:
        raise AssertionError("no request comes here")


def made(count: int) -> tuple[Lanes, list[Lane]]:
    lanes = [Lane(Nothing(), private_slot()) for _ in range(count)]
    return Lanes("test", lanes), lanes


def threads_of() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("test ")]


async def threads_end() -> None:
    """A thread that has reported its end is listed for a moment more."""
    for thread in threads_of():
        await anyio.to_thread.run_sync(thread.join, 10)
        assert not thread.is_alive()


async def test_jobs_of_one_lane_keep_their_order_also_when_their_callers_leave() -> None:
    lanes, _ = made(1)
    seen: list[int] = []
    go = threading.Event()

    async def call(number: int) -> None:
        def job(lane: Lane) -> None:
            assert go.wait(10)
            seen.append(number)

        await lanes.run(job)

    tasks = [asyncio.get_running_loop().create_task(call(number)) for number in range(4)]
    await anyio.wait_all_tasks_blocked()
    tasks[1].cancel()
    go.set()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert seen == [0, 1, 2, 3]
    await lanes.aclose()
    await threads_end()


async def test_jobs_run_beside_each_other_each_on_its_own_executable() -> None:
    lanes, each = made(3)
    together = threading.Barrier(3)
    used: set[int] = set()

    def job(lane: Lane) -> None:
        used.add(id(lane.executable))
        together.wait(10)  # all three are inside at once

    for _ in range(20):
        used.clear()
        async with anyio.create_task_group() as callers:
            for _ in range(3):
                callers.start_soon(lanes.run, job)
        assert used == {id(lane.executable) for lane in each}
    await lanes.aclose()


async def test_every_job_is_run_although_the_lanes_close() -> None:
    lanes, _ = made(2)
    begun, go = threading.Semaphore(0), threading.Event()
    done: list[int] = []

    def job(lane: Lane) -> None:
        begun.release()
        assert go.wait(10)
        done.append(1)

    async with anyio.create_task_group() as callers:
        for _ in range(7):
            callers.start_soon(lanes.run, job)
        assert await anyio.to_thread.run_sync(lambda: begun.acquire(timeout=30))
        callers.start_soon(lanes.aclose)
        await anyio.wait_all_tasks_blocked()
        go.set()
    assert len(done) == 7
    await threads_end()


async def test_a_job_that_hangs_holds_the_end_up_for_a_bounded_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aionn.driver.lanes.CLOSE_S", 0.05)
    lanes, _ = made(1)
    go = threading.Event()
    caller = asyncio.get_running_loop().create_task(lanes.run(lambda lane: go.wait(60)))
    await anyio.wait_all_tasks_blocked()
    with anyio.fail_after(30):
        await lanes.aclose()
    (thread,) = threads_of()
    go.set()
    assert await caller
    await anyio.to_thread.run_sync(thread.join, 10)
    assert not thread.is_alive()


async def test_an_error_of_a_job_is_its_callers() -> None:
    lanes, _ = made(1)

    def fail(lane: Lane) -> None:
        raise StopIteration("no more")

    with pytest.raises(RuntimeError, match="no more"):
        await lanes.run(fail)
    assert await lanes.run(lambda lane: 3) == 3
    await lanes.aclose()


async def test_nothing_of_a_job_is_kept_once_it_is_answered() -> None:
    class Large:
        pass

    lanes, _ = made(1)
    for _ in range(300):
        large: Any = Large()
        gone = weakref.ref(large)

        def job(lane: Lane, large: Any = large) -> type:
            return type(large)

        call = lanes.run(job)
        del large, job
        assert await call is Large
        del call
        assert gone() is None
    await lanes.aclose()


async def test_a_lane_that_cannot_start_is_one_sentence_and_ends_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    start = threading.Thread.start
    started: list[threading.Thread] = []

    def refuse_the_second(thread: threading.Thread) -> None:
        if thread.name == "test 1":
            raise RuntimeError("can't start new thread")
        if thread.name.startswith("test "):
            started.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse_the_second)
    with pytest.raises(ExecutionError, match=r"cannot start the threads of a model: can't start new thread; raise its limits") as refused:
        made(3)
    assert refused.value.status is ErrorStatus.RESOURCE_EXHAUSTED_TRANSIENT
    assert len(started) == 1
    for thread in started:
        await anyio.to_thread.run_sync(thread.join, 10)
        assert not thread.is_alive()


async def held(lanes: Lanes, count: int) -> tuple[threading.Event, list[asyncio.Task[bool]]]:
    """Begin so many jobs, each on a lane of its own. They go on at the event."""
    go, begun = threading.Event(), threading.Semaphore(0)

    def job(lane: Lane) -> bool:
        begun.release()
        return go.wait(30)

    calls = [asyncio.get_running_loop().create_task(lanes.run(job)) for _ in range(count)]
    for _ in calls:
        assert await anyio.to_thread.run_sync(lambda: begun.acquire(timeout=30))
    return go, calls


async def test_a_further_thread_starts_when_the_last_free_lane_takes_work() -> None:
    lanes, _ = made(4)
    for count, threads in ((1, [2]), (2, [3, 4]), (3, [4]), (4, [4])):
        go, calls = await held(lanes, count)
        assert len(threads_of()) in threads  # a lane that has just given its answer may still count
        go.set()
        assert all(await asyncio.gather(*calls))
    await lanes.aclose()
    await threads_end()


async def test_a_further_thread_that_is_refused_is_said_once_and_the_others_serve(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    lanes, _ = made(4)

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        go, calls = await held(lanes, 1)
        patch.setattr(threading.Thread, "start", refuse)
        calls.append(asyncio.get_running_loop().create_task(lanes.run(lambda lane: go.wait(30))))
        with anyio.fail_after(30):
            while not caplog.messages:  # noqa: ASYNC110 -- another thread logs
                await anyio.sleep(0.01)
    go.set()
    assert all(await asyncio.gather(*calls))
    go, calls = await held(lanes, 2)
    go.set()
    assert all(await asyncio.gather(*calls))
    assert caplog.messages == ["a model is served by 2 threads, because the system refused another one: can't start new thread"]
    assert len(threads_of()) == 2
    await lanes.aclose()
    await threads_end()


async def test_lanes_without_descriptors_are_one_sentence() -> None:
    with free_descriptors(1), pytest.raises(ExecutionError, match="cannot start the threads"):
        made(1)
    lanes, _ = made(1)
    assert await lanes.run(lambda lane: 1) == 1
    await lanes.aclose()


async def test_a_job_after_the_end_is_refused_and_waits_for_nothing() -> None:
    lanes, _ = made(2)
    await lanes.aclose()
    with anyio.fail_after(30), pytest.raises(CallerError, match="released; prepare the model again"):
        await lanes.run(lambda lane: 1)
    await lanes.aclose()
