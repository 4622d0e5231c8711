"""The app's statistics page beside a running runtime: what another process reads is what the app counts."""

from __future__ import annotations

import asyncio
import gc
import os
import select
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import suppress
from functools import partial

import anyio
import numpy as np
import pytest
from numpy.typing import NDArray

import aionn
from aionn.pages.app_layout import Kind, PageView, SlotView
from aionn.pages.finding import FoundPage, find_page
from aionn.pages.page import BEAT_S
from aionn.pages.process_use import of_each_process
from aionn.testing import FakeDevice, identity_model
from tests.apps import App
from tests.leaks import driver_pids, leak_check
from tests.pages.processes import memfds
from tests.stopping import kill_under

pytestmark = pytest.mark.anyio

COUNTED = ("computed", "failed", "connections", "dropped", "copied_bytes", "driver_busy_ns")


def found_pages() -> list[FoundPage]:
    return of_each_process(find_page)[0]


@pytest.fixture
def fake() -> FakeDevice:
    return FakeDevice()


@pytest.fixture
async def compilation(fake: FakeDevice) -> AsyncIterator[aionn.Compilation]:
    with fake:
        async with aionn.Runtime() as runtime:
            yield await runtime.compile(aionn.Model.from_onnx(identity_model()), devices=(fake.name,))


def frame(number: int) -> dict[str, NDArray[np.float32]]:
    return {"input": np.full((1, 16), number, np.float32)}


def look(pid: int | None = None) -> PageView:
    page = find_page(os.getpid() if pid is None else pid)
    assert page is not None
    with page:
        view = page.read()
    assert view is not None
    return view


def slots(kind: Kind) -> list[SlotView]:
    return [slot for slot in look().slots if slot.kind is kind]


def counted(slot: SlotView) -> dict[str, int]:
    return {name: slot.counters[name] for name in COUNTED}


def mapped() -> bool:
    with open("/proc/self/maps", encoding="utf-8") as maps:
        return "aionn-stats" in maps.read()


async def test_a_burst_counts_on_the_page_what_it_says_itself(fake: FakeDevice, compilation: aionn.Compilation) -> None:
    async with compilation.burst() as burst, compilation.burst() as other:
        for number in range(20):
            await burst.compute(frame(number))
        await other.compute(frame(0))
        fake.fail()
        with pytest.raises(aionn.ExecutionError):
            await other.compute(frame(0))
        shown = {slot.number: slot for slot in slots(Kind.BURST)}
        statistics = [{name: one.statistics()[name] for name in COUNTED} for one in (burst, other)]
        assert [counted(shown[number]) for number in sorted(shown)] == statistics
        assert [(one["computed"], one["failed"], one["connections"]) for one in statistics] == [(20, 0, 1), (1, 1, 1)]
        assert statistics[0]["copied_bytes"] == 20 * 64
        assert {(slot.device, slot.stage) for slot in shown.values()} == {(fake.name, fake.name)}
        (compiled,) = slots(Kind.COMPILATION)
        assert {slot.parent for slot in shown.values()} == {compiled.number}
    assert burst.statistics()["computed"] == 20  # also when its slot is another's
    (past,) = slots(Kind.PAST_BURSTS)
    assert (past.counters["computed"], past.counters["failed"]) == (21, 1)
    assert slots(Kind.BURST) == []


async def test_a_burst_that_the_app_drops_leaves_the_page(compilation: aionn.Compilation) -> None:
    burst = compilation.burst()
    await burst.__aenter__()
    await burst.compute(frame(1))
    assert len(slots(Kind.BURST)) == 1
    del burst
    with anyio.fail_after(20):
        while slots(Kind.BURST):
            gc.collect()
            await anyio.sleep(0.01)
    assert slots(Kind.PAST_BURSTS)[0].counters["computed"] == 1


async def test_executions_without_a_burst_are_counted_in_the_burst_that_the_compilation_keeps(compilation: aionn.Compilation) -> None:
    for number in range(3):
        await compilation.compute(frame(number))
    (compiled,) = slots(Kind.COMPILATION)
    (kept,) = slots(Kind.SINGLE)
    assert (kept.counters["computed"], kept.parent) == (3, compiled.number)
    assert slots(Kind.BURST) == []
    assert compiled.parent == slots(Kind.RUNTIME)[0].number


async def test_a_driver_that_is_killed_leaves_no_memory_and_the_counts_go_on(compilation: aionn.Compilation) -> None:
    async with compilation.burst() as burst:
        for turn in range(3):
            await burst.compute(frame(turn))
            (pid,) = driver_pids()
            pages = memfds(pid)
            assert len(pages) == 2  # what it does, and what it is asked for
            assert pages <= memfds(os.getpid())
            await kill_under(pid, partial(burst.compute, frame(turn)))
            with anyio.fail_after(20):
                while pages & memfds():  # noqa: ASYNC110  (another process's end, and shared memory, have no event)
                    await anyio.sleep(0.01)
            await burst.compute(frame(turn))
        (shown,) = slots(Kind.BURST)
        assert shown.counters["connections"] == 4
        assert counted(shown) == {name: burst.statistics()[name] for name in COUNTED}


async def test_the_heartbeat_goes_on_while_the_loop_runs(compilation: aionn.Compilation) -> None:
    (before,) = slots(Kind.RUNTIME)
    with anyio.fail_after(20 + BEAT_S):
        while slots(Kind.RUNTIME)[0].beat_ns == before.beat_ns:  # noqa: ASYNC110  (shared memory has no event)
            await anyio.sleep(0.01)


async def test_two_runtimes_of_a_process_share_a_page_and_the_last_one_closes_it(fake: FakeDevice) -> None:
    async with leak_check():
        with fake:
            async with aionn.Runtime() as one:
                kept = await one.compile(aionn.Model.from_onnx(identity_model()), devices=(fake.name,))
                async with aionn.Runtime() as other:
                    compilation = await other.compile(aionn.Model.from_onnx(identity_model()), devices=(fake.name,))
                    await compilation.compute(frame(1))
                    runtimes, compilations = slots(Kind.RUNTIME), slots(Kind.COMPILATION)
                    assert len(runtimes) == 2
                    assert [slot.parent for slot in compilations] == [slot.number for slot in runtimes]
                    (burst,) = slots(Kind.SINGLE)
                    assert (burst.counters["computed"], burst.parent) == (1, compilations[1].number)
                    pages = found_pages()
                    assert {page.pid for page in pages if page.role == "driver"} >= set(driver_pids())
                    assert [page.pid for page in pages].count(os.getpid()) == 1
                    for page in pages:
                        page.close()
                assert len(slots(Kind.RUNTIME)) == len(slots(Kind.COMPILATION)) == 1
            assert find_page(os.getpid()) is None
            del kept


async def test_a_closed_runtime_leaves_no_page_though_the_app_keeps_its_bursts(fake: FakeDevice) -> None:
    with fake:
        async with aionn.Runtime() as runtime:
            compilation = await runtime.compile(aionn.Model.from_onnx(identity_model()), devices=(fake.name,))
            burst = compilation.burst()
            await burst.__aenter__()
            await burst.compute(frame(1))
    assert find_page(os.getpid()) is None
    assert not mapped()
    assert burst.statistics()["computed"] == 1


APP = """
import asyncio, sys, numpy as np, aionn
from aionn.testing import identity_model

async def main():
    async with aionn.Runtime(start=()) as runtime:
        compilation = await runtime.compile(aionn.Model.from_onnx(identity_model()), devices=("reference",))
        bursts = [compilation.burst() for _ in range(8)]
        for burst in bursts:
            await burst.__aenter__()
        over = asyncio.Event()
        asyncio.get_running_loop().add_reader(0, over.set)
        print("ready", flush=True)
        async def run(burst):
            count = 0
            while not over.is_set():
                await burst.compute({"input": np.full((1, 16), count, np.float32)})
                count += 1
            return count
        counts = await asyncio.gather(*map(run, bursts))
        asyncio.get_running_loop().remove_reader(0)
        input()
        print(sum(counts), flush=True)
        input()

asyncio.run(main())
"""


def begin() -> subprocess.Popen[str]:
    process = App([sys.executable, "-c", APP], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def found(pid: int) -> FoundPage:
    page = find_page(pid)
    assert page is not None
    return page


def test_another_process_reads_eight_running_bursts() -> None:
    process = begin()
    try:
        assert process.stdin is not None
        assert process.stdout is not None
        with found(process.pid) as page:
            before = 0
            while before < 5_000:
                view = page.read()
                assert view is not None
                assert view.total("computed") >= before
                before = view.total("computed")
            process.stdin.write("\n")
            process.stdin.flush()
            count = int(process.stdout.readline())
            view = page.read()
            assert view is not None
            assert view.total("computed") == count
            assert len([slot for slot in view.slots if slot.kind is Kind.BURST]) == 8
    finally:
        process.kill()
        process.communicate()


def test_an_app_that_is_killed_leaves_no_page_and_no_driver() -> None:
    process = begin()
    try:
        drivers = [page for page in found_pages() if page.role == "driver" and _parent(page.pid) == process.pid]
        assert len(drivers) == 1
        assert drivers[0].activity().finished >= 0
        process.send_signal(signal.SIGKILL)
        process.wait()
        with pytest.raises(FileNotFoundError):
            find_page(process.pid)
        with suppress(ProcessLookupError):
            pidfd = os.pidfd_open(drivers[0].pid)
            assert select.select([pidfd], [], [], 20)[0] == [pidfd]
            os.close(pidfd)
        assert drivers[0].pid not in [page.pid for page in found_pages()]
    finally:
        process.kill()
        process.communicate()


def _parent(pid: int) -> int | None:
    """The pid of a process's parent. None if the process has ended, as drivers of other tests do at any time."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8") as file:
            return int(file.read().rpartition(")")[2].split()[1])
    except (FileNotFoundError, ProcessLookupError):
        return None


def test_a_loop_that_ends_with_an_open_runtime_leaves_no_page() -> None:
    async def open_one() -> None:
        await aionn.Runtime().open()
        assert len(slots(Kind.RUNTIME)) == 1

    asyncio.run(open_one())
    assert find_page(os.getpid()) is None
