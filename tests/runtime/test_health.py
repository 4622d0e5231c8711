"""`Runtime.health`: each state by the real cause of it, seen from the loop and from other threads (rows O9, O10, O11)."""

from __future__ import annotations

import asyncio
import gc
import os
import re
import signal
import sys
import threading
import time
import timeit
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest

import aionn
from aionn.pages.app_layout import Kind
from aionn.pages.finding import find_page
from aionn.pages.layout import Activity
from aionn.runtime import health_watch
from aionn.runtime.health import CompilationHealth
from aionn.runtime.processes import liveness
from aionn.runtime.processes.liveness import Evidence, StallJudge
from aionn.testing import FakeDevice, identity_model
from tests.apps import run_app
from tests.leaks import driver_pids, leak_check
from tests.runtime.uneven_engine import UnevenEngine
from tests.stopping import stop

pytestmark = pytest.mark.anyio

S = 10**9
MODEL = aionn.Model.from_onnx(identity_model())


@pytest.fixture
def anyio_backend() -> Any:
    return ("asyncio", {"use_uvloop": True})


@pytest.fixture(autouse=True)
def _engines(surroundings: None) -> None:
    """Drivers find the tests' engines."""


def numbered(number: float) -> dict[str, Any]:
    return {"input": np.full((1, 16), number, np.float32)}


async def until(seen: Callable[[], Any], seconds: float = 20) -> None:
    with anyio.fail_after(seconds):
        while not seen():  # noqa: ASYNC110  (health has no event)
            await anyio.sleep(0.002)


class Watcher:
    """Polls the health in a thread. The first look is taken before the body.

    Attributes:
        seen: each health with the time at which it was asked for.
        answered: the times at which these were answered. A busy machine may stop the thread between the two.
        stalled: set once the runtime is stalled.
    """

    def __init__(self, runtime: aionn.Runtime, interval_s: float) -> None:
        self._runtime, self._interval_s = runtime, interval_s
        self._over = threading.Event()
        self.stalled = threading.Event()
        self._thread = threading.Thread(target=self._poll)
        self.seen: list[tuple[float, aionn.Health]] = []
        self.answered: list[float] = []

    def _poll(self) -> None:
        while not self._over.wait(self._interval_s):
            self._look()

    def _look(self) -> None:
        asked, health = time.monotonic(), self._runtime.health()
        self.answered.append(time.monotonic())
        self.seen.append((asked, health))
        if health.state == "stalled":
            self.stalled.set()

    @property
    def states(self) -> list[str]:
        """The states in their order, each change once."""
        states = [health.state for _, health in list(self.seen)]
        return [state for number, state in enumerate(states) if number == 0 or states[number - 1] != state]

    @property
    def compiling(self) -> list[CompilationHealth]:
        """What was shown of compilations whose step was the compile."""
        return [one for _, health in list(self.seen) for one in health.compilations if one.step == "compiling"]

    def first(self, state: str) -> tuple[float, aionn.Health]:
        return next((at, health) for at, health in self.seen if health.state == state)

    def __enter__(self) -> Watcher:
        self._look()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()


# --- the states ----------------------------------------------------------------------------------------------------------


async def test_from_before_the_opening_to_after_the_end(fake: FakeDevice) -> None:
    async with leak_check():
        runtime = aionn.Runtime(start=())
        assert str(runtime.health()) == "the runtime is starting: it has not been opened yet"
        await runtime.open()
        assert str(runtime.health()) == "the runtime is starting: no compilation serves yet"
        fake.hang("compile")
        compiling = asyncio.ensure_future(runtime.compile(MODEL, devices=(fake.name,), name="detector"))
        await fake.heard("compile")
        health = runtime.health()
        assert (health.state, health.live, health.ready) == ("compiling", True, False)
        (shown,) = health.compilations
        assert (shown.name, shown.required, shown.state, shown.step, shown.device) == (
            "detector",
            True,
            "preparing",
            "compiling",
            fake.name,
        )
        assert [(device.name, device.state) for device in health.devices] == [(fake.name, "compiling")]
        assert f"compilation 'detector' is in preparation on {fake.name!r}, compiling for " in str(health)
        fake.behave()
        compilation = await compiling
        health = runtime.health()
        assert (str(health), health.live, health.ready) == ("the runtime is serving", True, True)
        assert [(one.state, one.device) for one in health.compilations] == [("serving", fake.name)]
        await compilation.aclose()
        assert str(runtime.health()) == "the runtime is serving"  # all that is required, which is nothing
        assert runtime.health().compilations == ()
        closing = asyncio.ensure_future(runtime.aclose())
        await asyncio.sleep(0)
        health = runtime.health()
        assert (health.state, health.live, health.ready) == ("closing", True, False)
        await closing
        health = runtime.health()
        assert (str(health), health.live, health.ready) == ("the runtime is closed", False, False)


async def test_a_compile_that_fails_or_is_cancelled_is_the_callers_and_leaves_no_trace(fake: FakeDevice) -> None:
    async with aionn.Runtime(start=()) as runtime:
        fake.fail("no", "compile")
        with pytest.raises(aionn.CompilationError):
            await runtime.compile(MODEL, devices=(fake.name,))
        assert str(runtime.health()) == "the runtime is starting: no compilation serves yet"
        fake.behave()
        fake.hang("compile")
        compiling = asyncio.ensure_future(runtime.compile(MODEL, devices=(fake.name,)))
        await fake.heard("compile")
        compiling.cancel()
        await asyncio.wait([compiling])
        assert runtime.health().compilations == ()


async def test_a_compilation_that_is_not_required_holds_nothing_up(fake: FakeDevice) -> None:
    async with aionn.Runtime(start=()) as runtime:
        detector = await runtime.compile(MODEL, devices=(fake.name,), name="detector")
        fake.hang("compile")
        side = asyncio.ensure_future(runtime.compile(MODEL, devices=(fake.name,), name="side", required=False))
        await fake.heard("compile")
        health = runtime.health()
        assert health.state == "serving"
        assert {one.name: (one.state, one.required) for one in health.compilations} == {
            "detector": ("serving", True),
            "side": ("preparing", False),
        }
        fake.behave()
        await side
        await detector.aclose()


async def test_a_jit_compilation_is_ready_and_its_first_use_is_a_compile(fake: FakeDevice) -> None:
    async with aionn.Runtime(start=()) as runtime:
        compilation = await runtime.compile(MODEL, devices=(fake.name,), mode="jit")
        health = runtime.health()
        assert (health.state, health.compilations[0].state) == ("serving", "on demand")
        fake.hang("compile")
        running = asyncio.ensure_future(compilation.compute(numbered(1)))
        await fake.heard("compile")
        health = runtime.health()
        assert (health.state, len(health.compilations), health.compilations[0].step) == ("compiling", 1, "compiling")
        fake.behave()
        await running
        assert runtime.health().state == "serving"


async def test_waiting_for_another_process_is_compiling(fake: FakeDevice, tmp_path: Path) -> None:
    """The lock does not distinguish two runtimes of one process from two processes."""
    async with aionn.Runtime(start=()) as one, aionn.Runtime(start=()) as other:
        fake.hang("compile")
        first = asyncio.ensure_future(one.compile(MODEL, devices=(fake.name,), cache_dir=tmp_path))
        await fake.heard("compile")
        second = asyncio.ensure_future(other.compile(MODEL, devices=(fake.name,), cache_dir=tmp_path, name="detector"))
        await until(lambda: "waiting" in str(other.health()))
        health = other.health()
        assert (health.state, health.compilations[0].step) == ("compiling", "waiting for another process that compiles it")
        fake.behave()
        compiled = [await first, await second]
        assert [one.outcomes[0].kind.value for one in compiled] == ["miss", "hit"]
        assert other.health().state == "serving"


async def test_a_compilation_of_which_the_app_holds_only_a_burst_is_watched(fake: FakeDevice) -> None:
    async with aionn.Runtime(start=()) as runtime:
        async with (await runtime.compile(MODEL, devices=(fake.name,), name="detector")).burst() as burst:
            gc.collect()
            assert [one.state for one in runtime.health().compilations] == ["serving"]
            os.kill(driver_pids()[0], signal.SIGKILL)
            await until(lambda: runtime.health().state == "degraded")
            await burst.compute(numbered(1))
            assert runtime.health().state == "serving"
        del burst
        gc.collect()
        await until(lambda: runtime.health().compilations == ())


async def test_a_driver_that_is_killed_degrades_until_the_next_call(fake: FakeDevice) -> None:
    async with aionn.Runtime(start=()) as runtime:
        compilation = await runtime.compile(MODEL, devices=(fake.name,), name="detector")
        os.kill(driver_pids()[0], signal.SIGKILL)
        await until(lambda: runtime.health().state == "degraded")
        health = runtime.health()
        assert health.ready
        assert (health.compilations[0].state, health.devices[0].state) == ("ended", "ended")
        assert "compilation 'detector' lost its driver, and the next call starts another one" in str(health)
        fake.hang("start")
        running = asyncio.ensure_future(compilation.compute(numbered(1)))
        await fake.heard("start")
        health = runtime.health()
        assert (health.state, health.ready, health.compilations[0].step) == ("degraded", True, "starting the driver")
        fake.tell(hang=("compile",))  # at once, or the driver may compile between two orders
        await fake.heard("compile")
        health = runtime.health()  # a compile may take long, and another replica can serve meanwhile
        assert (health.state, health.ready, health.compilations[0].step) == ("compiling", False, "compiling")
        fake.behave()
        await running
        assert str(runtime.health()) == "the runtime is serving"


async def test_a_compilation_that_was_given_back_is_served_on_demand(fake: FakeDevice, tmp_path: Path) -> None:
    async with aionn.Runtime(start=()) as runtime:
        compilation = await runtime.compile(MODEL, devices=(fake.name,), cache_dir=tmp_path, idle_s=0.05)
        await until(lambda: runtime.health().compilations[0].state == "on demand")
        assert runtime.health().state == "serving"
        fake.hang("load")
        running = asyncio.ensure_future(compilation.compute(numbered(1)))
        await fake.heard("load")
        health = runtime.health()
        assert (health.state, health.compilations[0].state, health.compilations[0].step) == (
            "serving",
            "preparing",
            "loading from the cache",
        )
        fake.behave()
        await running


async def test_a_cache_that_cannot_be_written_degrades(fake: FakeDevice, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file where a directory should be")
    async with aionn.Runtime(start=()) as runtime:
        compilation = await runtime.compile(MODEL, devices=(fake.name,), cache_dir=tmp_path / "cache", name="detector")
        assert compilation.outcomes[0].save_failure is not None
        health = runtime.health()
        assert (health.state, health.ready) == ("degraded", True)
        assert "the cache does not keep compilation 'detector' (" in str(health)


async def test_a_rejected_stage_degrades(quick: FakeDevice, best: FakeDevice) -> None:
    best.fail("no", "compile")
    async with aionn.Runtime(start=()) as runtime:
        compilation = await runtime.compile(MODEL, mode="staged", stages=(quick.name, best.name), name="detector")
        assert runtime.health().state == "serving"
        await compilation.compute(numbered(1))
        with pytest.raises(aionn.StageRejected):
            await compilation.wait_for_stage(best.name)
        health = runtime.health()
        assert (health.state, health.ready) == ("degraded", True)
        assert f"stage {best.name!r} of compilation 'detector' was rejected (" in str(health)


async def test_dropped_frames_degrade_above_the_share_that_the_policy_allows(fake: FakeDevice) -> None:
    policy = aionn.HealthPolicy(max_drop_rate=0.5)
    async with aionn.Runtime(start=(), health_policy=policy) as runtime, aionn.Runtime(start=()) as lenient:
        # Both drivers have started before the first drop, which counts for 10 s only.
        compilations = [await one.compile(MODEL, devices=(fake.name,)) for one in (lenient, runtime)]
        async with compilations[0].burst() as of_lenient, compilations[1].burst() as burst:
            for one in (of_lenient, burst):
                results = [result async for result in one.map([numbered(1)] * 200, policy="latest", deadline_s=1e-6)]
                assert one.statistics()["dropped"] >= 100
                assert len(results) <= 100
            seen: list[aionn.Health] = []

            def degraded() -> bool:
                seen.append(runtime.health())
                return seen[-1].state == "degraded"

            await until(degraded)
            assert "of their frames within 10 s, more than 50.0%" in str(seen[-1])
            assert lenient.health().state == "serving"


@pytest.mark.parametrize("rate", [-0.1, 1.1, "0.5", True])
def test_a_share_of_dropped_frames_lies_between_0_and_1(rate: Any) -> None:
    with pytest.raises(aionn.CallerError, match="max_drop_rate"):
        aionn.HealthPolicy(max_drop_rate=rate)
    with pytest.raises(aionn.CallerError, match=r"give an aionn\.HealthPolicy"):
        aionn.Runtime(health_policy=rate)


# --- hung drivers and loops that stand still ---------------------------------------------------------------------------------


async def test_a_driver_that_hangs_with_the_gil_is_stalled_then_killed_and_the_next_call_is_answered(
    fake: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Row O10 at a fifth of its time, without a deadline anywhere."""
    stacks_of = liveness.stacks_of

    async def stacks_once_seen(*arguments: Any) -> str:
        stacks = await stacks_of(*arguments)
        await until(watcher.stalled.is_set)  # the driver is killed after that, and no longer hangs
        return stacks

    monkeypatch.setattr(liveness, "stacks_of", stacks_once_seen)
    async with leak_check(), aionn.Runtime(start=(), hang_s=0.4) as runtime:
        compilation = await runtime.compile(MODEL, devices=(fake.name,), name="detector")
        await compilation.compute(numbered(0))
        fake.hang(with_gil=True)
        began = time.monotonic()
        with Watcher(runtime, 0.002) as watcher, anyio.fail_after(60):
            with pytest.raises(aionn.DriverHungError) as caught:
                await compilation.compute(numbered(1))
            hung = time.monotonic()
            assert "_stand_still" in caught.value.stack
            del caught  # its traceback holds the frame
            fake.behave()
            assert (await compilation.compute(numbered(2)))["input_out"][0, 0] == 2
        at, stalled = watcher.first("stalled")
        assert began + 0.4 <= at <= hung
        assert (stalled.live, stalled.ready, stalled.devices[0].state) == (False, False, "hung")
        assert re.search(r"is hung: it has finished nothing and used no CPU for \d+\.\d s", str(stalled)), str(stalled)
        assert watcher.states[:2] == ["serving", "stalled"]
        assert runtime.health().state == "serving"


async def test_without_hang_s_a_hang_is_told_until_the_driver_goes_on(fake: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aionn.runtime.processes.process.DEFAULT_HANG_S", 0.2)
    async with aionn.Runtime(start=(), hang_s=None) as runtime:
        compilation = await runtime.compile(MODEL, devices=(fake.name,))
        (pid,) = driver_pids()
        for _ in range(2):
            fake.hang()
            running = asyncio.ensure_future(compilation.compute(numbered(1)))
            await until(lambda: runtime.health().state == "stalled")
            assert runtime.health().devices[0].seconds >= 0.2
            fake.behave()
            await running
            await until(lambda: runtime.health().state == "serving")
        assert driver_pids() == [pid]


async def test_an_idle_driver_that_is_stopped_is_stalled_until_it_is_continued(fake: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aionn.runtime.processes.process.DEFAULT_HANG_S", 0.2)
    async with aionn.Runtime(start=(), hang_s=None) as runtime:
        compilation = await runtime.compile(MODEL, devices=(fake.name,))
        (pid,) = driver_pids()
        stop(pid)
        try:
            await until(lambda: runtime.health().state == "stalled")
            assert "was stopped by a signal, and has not gone on" in str(runtime.health())
        finally:
            os.kill(pid, signal.SIGCONT)
        await until(lambda: runtime.health().state == "serving")
        await compilation.compute(numbered(1))
        assert driver_pids() == [pid]


async def test_a_loop_that_stands_still_is_seen_from_other_threads_only(fake: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health_watch, "LOOP_STALL_S", 0.6)
    async with aionn.Runtime(start=()) as runtime:
        await runtime.compile(MODEL, devices=(fake.name,))
        with Watcher(runtime, 0.01) as watcher:
            assert watcher.stalled.wait(20)  # in the loop's thread, so the loop stands still
            assert runtime.health().state == "serving"
            _, health = watcher.first("stalled")
            assert (health.live, health.ready) == (False, False)
            assert re.search(r"the event loop has stood still for \d+\.\d s", str(health)), str(health)
            await until(lambda: watcher.states[-1] == "serving")


async def test_a_long_run_a_long_compile_and_an_uneven_run_are_told_and_never_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Row O11 at a sixtieth of its times."""
    monkeypatch.setattr(health_watch, "_LONG_S", 0.3)
    with FakeDevice(UnevenEngine) as fake:
        async with aionn.Runtime(start=(), hang_s=0.15) as runtime:
            with Watcher(runtime, 0.01) as watcher:
                fake.delay(1, "compile")
                times = [time.monotonic()]
                compilation = await runtime.compile(MODEL, devices=(fake.name,), name="detector")
                times.append(time.monotonic())
                pids = driver_pids()
                await compilation.compute(numbered(2000))  # the first one, at full CPU for 1 s
                times.append(time.monotonic())
                for _ in range(120):
                    await compilation.compute(numbered(1012))  # 12 ms
                await compilation.compute(numbered(1180))  # fifteen times as long
            assert driver_pids() == pids
    assert watcher.states == ["starting", "compiling", "serving"]
    told = {
        state: max((device.seconds for _, health in watcher.seen for device in health.devices if device.state == state), default=0.0)
        for state in ("compiling", "executing")
    }
    assert 0.5 < told["compiling"] < times[1] - times[0], told
    assert 0.5 < told["executing"] < times[2] - times[1], told
    assert any(re.search(r"is executing for \d+\.\d s", str(health)) and health.state == "serving" for _, health in watcher.seen)


def _same(evidence: Evidence) -> Evidence:
    return evidence


def test_a_compile_is_stalled_once_it_has_used_no_cpu_for_ten_minutes() -> None:
    judge, now_ns, cpu_ns = StallJudge(0), 0, 0

    def stalled_after(seconds: float, state: Any, runnable: bool = False, share: float = 0.0, since_ns: int = 0) -> float | None:
        nonlocal now_ns, cpu_ns
        began_ns = now_ns
        while now_ns - began_ns < seconds * S:
            now_ns, cpu_ns = now_ns + S, cpu_ns + int(share * S)
            activity, evidence = Activity(state, since_ns, (), 0, 0, 0), Evidence(runnable, cpu_ns)
            if judge.observe(now_ns, activity, partial(_same, evidence)) is not None:
                return (now_ns - began_ns) / S
        return None

    assert stalled_after(3600, "compiling", share=0.02) is None
    assert stalled_after(3600, "compiling", runnable=True) is None
    assert stalled_after(590, "compiling") is None
    assert stalled_after(590, "compiling", since_ns=1) is None  # the state word has moved
    assert stalled_after(3600, "idle") is None
    assert stalled_after(3600, "executing") is None
    after_s = stalled_after(3600, "loading")
    assert after_s is not None
    assert 600 <= after_s <= 602


async def test_a_compile_that_stands_still_is_told_and_not_killed(fake: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(liveness, "COMPILE_STALL_S", 0.4)
    async with aionn.Runtime(start=(), hang_s=0.2) as runtime:
        fake.hang("compile", with_gil=True)
        compiling = asyncio.ensure_future(runtime.compile(MODEL, devices=(fake.name,)))
        pid = await fake.heard("compile")
        assert runtime.health().state == "compiling"
        await until(lambda: runtime.health().state == "stalled")
        assert "has used no CPU for" in str(runtime.health())
        fake.behave()
        await compiling
        await until(lambda: runtime.health().state == "serving")
        assert driver_pids() == [pid]


# --- from anywhere, at once --------------------------------------------------------------------------------------------------


async def test_a_compile_is_told_with_its_step_and_seconds_to_a_thread_that_polls(fake: FakeDevice) -> None:
    """Row O9 at a fiftieth of its time."""
    async with aionn.Runtime(start=()) as runtime:
        fake.hang("compile")
        with Watcher(runtime, 0.01) as watcher:
            began = time.monotonic()
            compiling = asyncio.ensure_future(runtime.compile(MODEL, devices=(fake.name,), name="detector"))
            await until(lambda: len(watcher.compiling) > 10 and watcher.compiling[-1].step_s > 0.5)
            fake.behave()
            await compiling
            ended = time.monotonic()
            await until(lambda: watcher.seen[-1][0] > ended)
    assert watcher.states == ["starting", "compiling", "serving"]
    assert all(health.live for _, health in watcher.seen)
    assert all(health.state == "serving" for asked, health in watcher.seen if asked > ended)
    steps = watcher.compiling
    assert 0.5 < steps[-1].step_s < ended - began
    assert all(one.seconds >= one.step_s for one in steps)
    # All looks agree on when the step began. Each look was between its question and its answer.
    looks = [(asked, answered, health.compilations) for (asked, health), answered in zip(watcher.seen, watcher.answered, strict=True)]
    found = [(asked - one.step_s, answered - one.step_s) for asked, answered, shown in looks for one in shown if one.step == "compiling"]
    assert max(earliest for earliest, _ in found) < min(latest for _, latest in found) + 1e-6


async def test_a_health_costs_little(fake: FakeDevice) -> None:
    async with aionn.Runtime(start=()) as runtime:
        compilations = [await runtime.compile(MODEL, devices=(fake.name,)) for _ in range(4)]
        await compilations[0].compute(numbered(1))
        seconds = min(timeit.repeat(runtime.health, number=200, repeat=20)) / 200
    assert seconds < 5 * 50e-6, "five times what is promised"


async def test_threads_may_ask_while_everything_changes(fake: FakeDevice) -> None:
    errors: list[BaseException] = []
    over = threading.Event()
    asked = 0

    def ask(runtime: aionn.Runtime) -> None:
        nonlocal asked
        try:
            while not over.wait(0.0002):
                health = runtime.health()
                str(health)
                assert health.ready is (health.state in ("serving", "degraded"))
                asked += 1
        except BaseException as error:
            errors.append(error)

    async with leak_check(), aionn.Runtime(start=()) as runtime:
        threads = [threading.Thread(target=ask, args=(runtime,)) for _ in range(2)]
        for thread in threads:
            thread.start()
        try:
            for turn in range(3):
                one = await runtime.compile(MODEL, devices=(fake.name,))
                other = await runtime.compile(MODEL, devices=(fake.name,), mode="jit")
                await other.compute(numbered(turn))
                os.kill(driver_pids()[0], signal.SIGKILL)
                await until(lambda: runtime.health().state == "degraded")
                await one.compute(numbered(turn))
                await one.aclose()
                del other
        finally:
            over.set()
            for thread in threads:
                thread.join()
    assert errors == []
    assert asked > 100


async def test_the_state_stands_on_the_statistics_page(fake: FakeDevice) -> None:
    def shown() -> tuple[str, str]:
        with find_page(os.getpid()) as page:  # type: ignore[union-attr]
            view = page.read()
        assert view is not None
        (slot,) = (slot for slot in view.slots if slot.kind is Kind.RUNTIME)
        assert slot.name == "door"
        return slot.device, slot.stage

    async with aionn.Runtime(start=(), name="door") as runtime:
        await until(lambda: shown() == ("starting", "no compilation serves yet"))
        fake.hang("compile")
        compiling = asyncio.ensure_future(runtime.compile(MODEL, devices=(fake.name,), name="detector"))
        await until(lambda: shown()[0] == "compiling")
        assert shown()[1].startswith("compilation 'detector' is in preparation")
        fake.behave()
        await compiling
        await until(lambda: shown() == ("serving", ""))
        closing = asyncio.ensure_future(runtime.aclose())
        await asyncio.sleep(0)
        assert shown() == ("closing", "")
        await closing


def test_a_child_of_fork_and_a_runtime_that_an_internal_error_ended_are_closed() -> None:
    script = """
import asyncio, os, aionn
async def fail():
    raise KeyError("a defect")
async def main():
    runtime = aionn.Runtime(start=())
    await runtime.open()
    child = os.fork()
    if child == 0:
        health = runtime.health()
        os._exit(0 if (health.state, health.ready) == ("closed", False) and "child" in str(health) else 1)
    print(os.waitpid(child, 0)[1], flush=True)
    runtime._owned._tasks.start_soon(fail)
    while "internal" not in str(runtime.health()):
        await asyncio.sleep(0)
    print(runtime.health(), runtime.health().live)
asyncio.run(main())
"""
    ran = run_app([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    lines = ran.stdout.splitlines()
    assert lines[0] == "0"
    assert lines[1] == "the runtime is closed: an internal error has ended it (KeyError('a defect')) False", ran


# --- the rows at their full times --------------------------------------------------------------------------------------------


@pytest.mark.soak
async def test_row_o9(fake: FakeDevice) -> None:
    async with aionn.Runtime(start=()) as runtime:
        fake.delay(30, "compile")
        with Watcher(runtime, 0.1) as watcher:
            await runtime.compile(MODEL, devices=(fake.name,), name="detector")
            ended = time.monotonic()
            await until(lambda: watcher.states[-1] == "serving")
    compiling = [health.compilations[0] for _, health in watcher.seen if health.state == "compiling"]
    after_ms = (watcher.first("serving")[0] - ended) * 1000
    print(f"O9: {len(compiling)} looks, at last {compiling[-1].step} for {compiling[-1].step_s:.1f} s; serving after {after_ms:.0f} ms")
    assert all(health.live for _, health in watcher.seen)
    assert watcher.states[-2:] == ["compiling", "serving"]
    assert 29 < compiling[-1].step_s < 31
    assert after_ms < 500


@pytest.mark.soak
async def test_row_o10(fake: FakeDevice) -> None:
    async with aionn.Runtime(start=(), hang_s=2) as runtime:
        compilation = await runtime.compile(MODEL, devices=(fake.name,))
        await compilation.compute(numbered(0))
        fake.hang(with_gil=True)
        began = time.monotonic()
        with Watcher(runtime, 0.005) as watcher:
            with pytest.raises(aionn.DriverHungError) as caught:
                await compilation.compute(numbered(1))
            raised = time.monotonic()
            assert "_stand_still" in caught.value.stack
            fake.behave()
            await compilation.compute(numbered(2))
            answered = time.monotonic()
    stalled = watcher.first("stalled")[0]
    print(f"O10: stalled after {stalled - began:.3f} s, raised after {raised - began:.3f} s, next answer {answered - raised:.3f} s after")
    assert stalled - began < 10
    assert answered - raised < 10


@pytest.mark.soak
@pytest.mark.timeout(600)
async def test_row_o11() -> None:
    with FakeDevice(UnevenEngine) as fake:
        async with aionn.Runtime(start=()) as runtime:
            with Watcher(runtime, 0.1) as watcher:
                fake.delay(60, "compile")
                compilation = await runtime.compile(MODEL, devices=(fake.name,))
                pids = driver_pids()
                await compilation.compute(numbered(61_000))  # the first one, at full CPU for 60 s
                for _ in range(120):
                    await compilation.compute(numbered(1_800))
                await compilation.compute(numbered(13_000))  # fifteen times its usual 0.8 s
            assert driver_pids() == pids
    told = {
        state: max(device.seconds for _, health in watcher.seen for device in health.devices if device.state == state)
        for state in ("compiling", "executing")
    }
    print(f"O11: told {told}, states {watcher.states}")
    assert set(watcher.states) <= {"starting", "compiling", "serving"}
    assert all(58 < seconds < 62 for seconds in told.values())
