"""Executions that are refused because too many wait: over bursts, calls, starts and blocking bursts, and what stays afterwards."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest

import aionn
from aionn.hal.batching import Batching
from aionn.pages.app_layout import DROPPED_REJECTED
from aionn.pages.layout import JoinedRuns
from aionn.runtime.executing.admission import Admission
from tests.joining.engine import HELD, NAME
from tests.joining.test_failures import doubling, row, until

pytestmark = pytest.mark.anyio


@pytest.fixture
def held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Rows with the value HELD wait until this file is there."""
    monkeypatch.setenv("AIONN_LANES", "1")
    monkeypatch.setenv("AIONN_JOINED_RUNS", str(tmp_path / "runs"))
    (tmp_path / "runs").touch()
    go = tmp_path / "runs.go"
    yield go
    go.touch()


def rss_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@asynccontextmanager
async def compiled(**asked: Any) -> AsyncIterator[aionn.Compilation]:
    async with aionn.Runtime(start=(), sandbox="off") as runtime:  # the engine writes a file of the test's
        yield await runtime.compile(doubling(), devices=(NAME,), batch=aionn.Batching(**asked))


async def one_round(compilation: aionn.Compilation, bursts: list[aionn.Burst], held: Path) -> None:
    """Make 300 requests, of which the first is held. All refusals come while the engine still runs it."""
    held.unlink(missing_ok=True)  # noqa: ASYNC240 - a small file
    busy: list[aionn.DeviceBusyError] = []
    answered = 0

    async def call(number: int) -> None:
        nonlocal answered
        compute = bursts[number % 5].compute if number % 5 < 4 else compilation.compute
        value = HELD if not number else float(number)
        try:
            found = await compute({"x": row(value)})
        except aionn.DeviceBusyError as error:
            busy.append(error)
            return
        np.testing.assert_array_equal(found["y"], 2 * row(value))
        answered += 1

    async with asyncio.TaskGroup() as tasks:
        for number in range(300):
            tasks.create_task(call(number))
        await until(lambda: len(busy) == 44)
        assert answered == 0
        held.touch()  # noqa: ASYNC240
    assert (answered, len(busy)) == (256, 44)
    assert {(error.queue, error.transient) for error in busy} == {(256, True)}
    assert all(0 <= error.waited_s < 60 for error in busy)


async def test_of_300_requests_at_once_256_are_answered_and_44_refused_while_the_model_runs(held: Path) -> None:
    """Over 10 rounds, in which the app's memory does not grow."""
    sizes = []
    async with compiled() as compilation, AsyncExitStack() as stack:
        bursts = [await stack.enter_async_context(compilation.burst(depth=32)) for _ in range(4)]
        for _ in range(10):
            await one_round(compilation, bursts, held)
            sizes.append(rss_bytes())
        assert min(sizes[5:]) < max(sizes[:5]) + 2**20
        assert sum(burst.statistics()["failed"] for burst in bursts) == 0  # the driver has refused nothing


async def test_bursts_calls_starts_streams_and_threads_wait_together(held: Path) -> None:
    async with compiled(max_waiting=4) as compilation, AsyncExitStack() as stack:
        burst = await stack.enter_async_context(compilation.burst())
        stream = await stack.enter_async_context(compilation.burst())
        await compilation.compute({"x": row(1)})
        opened, found = threading.Event(), []
        admission = compilation._parts.bursts.admission
        assert admission is not None

        def in_thread() -> None:
            with compilation.blocking() as blocking:
                opened.set()
                found.append(blocking.compute({"x": row(3)})["y"])

        async def refused(call: Callable[[], Any]) -> None:
            with pytest.raises(aionn.DeviceBusyError, match=r"4 executions of this compilation wait, and Batching\(max_waiting=4\)"):
                await call()

        async with asyncio.TaskGroup() as tasks:
            first = tasks.create_task(burst.compute({"x": row(HELD)}))
            await until(lambda: f"{HELD:g}" in held.with_name("runs").read_text())  # the engine runs it, and nothing else
            kept = tasks.create_task(compilation.compute({"x": row(1)}))
            event = compilation.start({"x": row(2)})
            thread = threading.Thread(target=in_thread)
            thread.start()
            await until(lambda: opened.is_set() and len(admission._waiting) == 4)
            await refused(lambda: burst.compute({"x": row(4)}))
            await refused(lambda: burst.compute({"x": row(4)}, retry=1))
            await refused(lambda: compilation.compute({"x": row(4)}))
            with pytest.raises(aionn.DeviceBusyError):
                compilation.start({"x": row(4)})
            with compilation.blocking() as blocking, pytest.raises(aionn.DeviceBusyError):
                await anyio.to_thread.run_sync(lambda: blocking.compute({"x": row(4)}))
            with pytest.raises(aionn.DeviceBusyError):
                async for _ in stream.map([{"x": row(5)}]):
                    raise AssertionError("the frame was computed")
            assert [result async for result in stream.map([{"x": row(5)}], policy="latest")] == []
            kept.cancel()
            await asyncio.wait([kept])
            late = tasks.create_task(compilation.compute({"x": row(6)}))  # the place of a caller that has left is free
            await asyncio.sleep(0)
            held.touch()  # noqa: ASYNC240
            np.testing.assert_array_equal((await event)["y"], 2 * row(2))
        thread.join()
        np.testing.assert_array_equal(found[0], 2 * row(3))
        np.testing.assert_array_equal(late.result()["y"], 2 * row(6))
        np.testing.assert_array_equal(first.result()["y"], 2 * row(HELD))
        assert stream.statistics()["dropped"] == stream._counts.get(DROPPED_REJECTED) == 2
        assert not admission._waiting
        with pytest.raises(aionn.CallerError):
            compilation.start({"x": row(1), "other": row(1)})
        assert not admission._waiting
        await compilation.compute({"x": row(1)})


class Measured:
    """Stands for what serves, with times of its runs."""

    def __init__(self, runs: JoinedRuns | None, instances: int = 1) -> None:
        self.serving = self.prepared = self
        self.instances = instances
        self._runs = runs

    def joined_runs(self) -> JoinedRuns | None:
        return self._runs


def runs_of(count: int, row_ms: float, most: int = 1) -> JoinedRuns:
    return JoinedRuns(count, count, most, False, (count, *[0] * 6), (int(row_ms * 1e6), *[0] * 6))


def uncounted(error: BaseException) -> None:
    pass


def enter(admission: Admission, deadline_ns: int) -> None:
    admission.enter(deadline_ns, uncounted)


def waits(admission: Admission, many: int) -> None:
    for _ in range(many):
        admission.enter(None, uncounted)


def by(left_ms: float) -> int:
    return time.monotonic_ns() + int(left_ms * 1e6)


def test_a_deadline_that_those_before_it_miss_is_refused_where_20_runs_were_measured() -> None:
    measured: Any = Measured(runs_of(20, row_ms=100))
    admission = Admission(Batching(), measured)
    waits(admission, 11)
    with pytest.raises(aionn.DeviceBusyError, match=r"11 executions .* wait, and take 1000\.0 ms or more, but this one has 9"):
        enter(admission, by(999))
    enter(admission, by(60_000))
    enter(admission, by(-1))  # one that is late already is answered as late
    for known in (Measured(runs_of(19, row_ms=100)), Measured(None), Measured(runs_of(20, row_ms=100, most=16)), Measured(runs_of(20, 1))):
        admission = Admission(Batching(), known)  # type: ignore[arg-type]
        waits(admission, 11)
        enter(admission, by(900))


def test_several_lanes_share_what_waits() -> None:
    measured: Any = Measured(runs_of(20, row_ms=100), instances=2)
    admission = Admission(Batching(), measured)
    waits(admission, 12)
    enter(admission, by(900))
    with pytest.raises(aionn.DeviceBusyError):
        enter(admission, by(300))
