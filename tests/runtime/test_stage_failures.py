"""Every failure of a better stage at every point of its making, in one stream after the other: none of them notices.

    points      the driver's start, the question what it can run, compile, export, load, the first run beside the stream, a later
                one, a run for which the stream is held, and the swap: before its connections, and with the gate closed
    failures    an error, SIGKILL, SIGSEGV, a hang, other outputs, slowness

`pytest -m soak` repeats it all.
"""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import anyio
import pytest

import aionn
from aionn.errors import ExecutionError
from aionn.hal.types import ErrorStatus
from aionn.runtime.serving import serving
from aionn.runtime.serving.serving import CompiledModel, Serving
from aionn.runtime.staging import measuring, stages
from aionn.runtime.staging.measuring import Inputs, Meter
from aionn.testing import FakeDevice, identity_model
from tests.leaks import leak_check
from tests.runtime.staged_streams import SHAPE, rejected, staged, streaming

pytestmark = pytest.mark.anyio

REPEATED = pytest.mark.parametrize("times", [1, pytest.param(20, marks=[pytest.mark.soak, pytest.mark.timeout(1800)])])

# Of the new stage's runs the first one warms up, the second is beside the stream, the third is made while the stream is held: the
# comparisons here keep one sample.
RUNS = (("run", 0), ("run", 1), ("run", 2))
BEFORE_RUNS = (("start", 0), ("supported", 0), ("compile", 0), ("export", 0), ("load", 0))


@pytest.fixture
def anyio_backend() -> Any:
    return ("asyncio", {"use_uvloop": True})


@pytest.fixture(autouse=True)
def state_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


@pytest.fixture(autouse=True)
def short_comparisons(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "SAMPLES", 1)
    monkeypatch.setattr(stages, "RUNS", 1)


class App:
    """Streams through one staged compilation after the other, all in one runtime."""

    def __init__(self, runtime: aionn.Runtime, quick: FakeDevice, best: FakeDevice, cache: Path, policy: aionn.StagePolicy) -> None:
        self.runtime = runtime
        self.policy = policy
        self._quick = quick
        self._best = best
        self._cache = cache
        self._stored = 0
        self.ran: Counter[str] = Counter()
        self.last_cache = cache / "1"
        self.model = aionn.Model.from_onnx(identity_model({"x": SHAPE}, outputs=["y"]))

    async def rejection(self, failure: Callable[[], None], runs: int = 0) -> str:
        """Why the better stage was rejected, after so many runs, under a stream to which nothing happened."""
        for device in self.runtime.devices:
            if device.name == self._best.name and device.pid is not None:
                await device.restart()  # each failure counts the acts of a new driver
        self._stored += 1  # a cache of its own: what is stored already is not compiled again
        compilation = await staged(
            self.runtime, self.model, self._quick, self._best, self._cache / str(self._stored), stage_policy=self.policy
        )
        failure()
        async with compilation, streaming(compilation) as stream:
            reason = await rejected(compilation, self._best)
            await stream.goes_on()
            assert stream.stages == [self._quick.name]
            assert self.runtime._opened.devices.worker_pids == []
        self._best.behave()
        assert self.ran.pop(self._best.name, 0) >= runs, "it was rejected before the run that was to fail"
        return reason


@asynccontextmanager
async def app(quick: FakeDevice, best: FakeDevice, cache: Path, **fields: Any) -> AsyncIterator[App]:
    """At its end the better stage, well again, takes over, from a cache that one of its failures has left."""
    async with leak_check(), aionn.Runtime() as runtime:
        app = App(runtime, quick, best, cache, aionn.StagePolicy(**fields))
        original = Meter._once

        async def once(self: Meter, serving: Serving, inputs: Inputs) -> Any:
            app.ran[serving.stage] += 1
            return await original(self, serving, inputs)

        with patch.object(Meter, "_once", once):
            yield app
        # Whatever its speed: one run each tells little on a busy machine, and is not what this is about.
        policy = aionn.StagePolicy(timeout_s=60, min_gain=None)
        compilation = await staged(runtime, app.model, quick, best, app.last_cache, stage_policy=policy)
        async with compilation, streaming(compilation) as stream:
            await compilation.wait_for_stage(best.name, timeout_s=60)
            await stream.goes_on()
            assert stream.stages == [quick.name, best.name]


@REPEATED
async def test_killed_anywhere(quick: FakeDevice, best: FakeDevice, tmp_path: Path, times: int) -> None:
    points = [*BEFORE_RUNS, *RUNS]
    signals = (signal.SIGKILL, signal.SIGSEGV)
    if times == 1:  # each signal at every other point
        cases = [(*point, signals[number % 2]) for number, point in enumerate(points)]
    else:
        cases = [(*point, number) for point in points for number in signals] * times
    async with app(quick, best, tmp_path) as here:
        for act, after, number in cases:
            reason = await here.rejection(partial(best.crash, act, number, after=after))
            assert f"ended by signal {number.value}" in reason, (act, after)


@REPEATED
async def test_failing_anywhere(quick: FakeDevice, best: FakeDevice, tmp_path: Path, times: int) -> None:
    points = [*BEFORE_RUNS, *RUNS]
    async with app(quick, best, tmp_path) as here:
        for act, after in points[1::2] if times == 1 else points * times:  # in the quick run every other point: all are killed at above
            reason = await here.rejection(partial(best.fail, "no luck today", act, after=after), after + 1 if act == "run" else 0)
            assert "no luck today" in reason, (act, after)


SOAK = [pytest.mark.soak, pytest.mark.timeout(1800)]


@pytest.mark.parametrize(
    ("act", "times"),
    # One timeout ends them all; the quick run waits for it where the engine's own code may really never end.
    [("start", 1), ("compile", 1), *[pytest.param(act, 20, marks=SOAK) for act, _ in BEFORE_RUNS]],
)
async def test_hanging_before_it_runs(quick: FakeDevice, best: FakeDevice, tmp_path: Path, act: str, times: int) -> None:
    async with app(quick, best, tmp_path, timeout_s=2.0) as here:
        for _ in range(times):
            assert "did not make the stage within 2.0 s" in await here.rejection(partial(best.hang, act))


async def test_a_stage_that_its_own_driver_compiles_fails_as_harmlessly(quick: FakeDevice, best: FakeDevice, tmp_path: Path) -> None:
    async with app(quick, best, tmp_path, timeout_s=2.0) as here:
        best.tell(cache_files=(0, 0))  # nothing can be stored, so no worker can make it
        for failure, told in (
            (partial(best.crash, "compile"), "ended by signal 9"),
            (partial(best.fail, "no luck today", "compile"), "no luck today"),
            (partial(best.hang, "compile"), "did not make the stage within 2.0 s"),
        ):
            assert told in await here.rejection(failure)
            best.tell(cache_files=(0, 0))
        policy = aionn.StagePolicy(min_gain=None)  # its speed is not what this is about
        compilation = await staged(here.runtime, here.model, quick, best, stage_policy=policy)
        async with compilation, streaming(compilation) as stream:
            await compilation.wait_for_stage(best.name, timeout_s=60)
            assert compilation.stages[1].made_by == "driver"
            await stream.goes_on()
            assert stream.stages == [quick.name, best.name]
        best.behave()


@REPEATED
async def test_hanging_while_it_runs(quick: FakeDevice, best: FakeDevice, tmp_path: Path, times: int) -> None:
    async with app(quick, best, tmp_path) as here:
        for act, after in RUNS * times:
            with patch.object(measuring, "RUN_TIMEOUT_S", 0.3):
                reason = await here.rejection(partial(best.hang, act, after=after), after + 1)
            assert "while comparing: the driver's answer did not come by the deadline" in reason, after


async def test_a_held_stream_goes_on_although_the_new_stage_hangs(quick: FakeDevice, best: FakeDevice, tmp_path: Path) -> None:
    async with app(quick, best, tmp_path) as here:
        compilation = await staged(here.runtime, here.model, quick, best)
        best.hang(after=2)
        async with compilation, streaming(compilation) as stream:
            compilation._parts.staging._wanted.set()  # type: ignore[union-attr]
            for _ in range(3):
                await best.heard("run")
            with anyio.fail_after(20):
                await stream.goes_on(20)
            assert compilation.stages[1].state == "comparing"
        best.behave()


@REPEATED
async def test_other_outputs_or_slowness_sooner_or_later(quick: FakeDevice, best: FakeDevice, tmp_path: Path, times: int) -> None:
    async with app(quick, best, tmp_path) as here:
        for after in (0, 2) if times == 1 else (0, 1, 2) * times:
            reason = await here.rejection(partial(best.tell, outputs_offset=0.5, after={"run": after}), after + 1)
            assert reason.startswith("output 'y': 16 of 16 elements are off by up to 0.5"), after
            reason = await here.rejection(partial(best.delay, 0.3, after=after), after + 1)
            assert reason.startswith("it is not faster by 10%"), after
        here.last_cache = tmp_path / "fresh"  # the others remember what was found


SWAP_FAILURES = {
    "error": "while comparing: no room for another burst",
    "SIGKILL": "ended by signal 9",
    "SIGSEGV": "ended by signal 11",
    "SIGSTOP": "while comparing: device 'aionn.testing.fake_engine:SecondFakeEngine' did not",
}


class FaultyDriverError(ExecutionError):
    """What a driver may answer at a swap."""


@REPEATED
async def test_failing_at_the_swap(
    quick: FakeDevice, best: FakeDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    monkeypatch.setattr(serving, "LINK_S", 0.5)
    original = CompiledModel._prepare
    told: list[tuple[str, bool]] = [("", False)]

    async def prepare(self: CompiledModel, better: Serving, changes: dict[Any, Any], *, in_gap: bool) -> None:
        failure, closed = told[0]
        if failure and not in_gap and self.gate.closed == closed:
            if failure == "error":
                raise FaultyDriverError("no room for another burst", status=ErrorStatus.GENERAL_FAILURE)
            (pid,) = [device.pid for device in here.runtime.devices if device.name == best.name]
            assert pid is not None
            os.kill(pid, signal.Signals[failure])
            if failure != "SIGSTOP":
                await _gone(pid)
            elif closed:
                changes.clear()  # as if all bursts had been opened meanwhile: they are to be connected now
        await original(self, better, changes, in_gap=in_gap)

    monkeypatch.setattr(CompiledModel, "_prepare", prepare)
    async with app(quick, best, tmp_path, min_gain=None) as here:  # one timed run does not decide whether there is a swap
        cases = [(failure, closed) for failure in SWAP_FAILURES for closed in (False, True)]
        if times == 1:
            cases = [("error", True), ("SIGKILL", False), ("SIGSEGV", True), ("SIGSTOP", True)]
        for failure, closed in cases * times:
            told[0] = failure, closed
            reason = await here.rejection(lambda: None)
            assert SWAP_FAILURES[failure] in reason, (failure, closed)
            if failure == "SIGSTOP":
                _end_stopped(here.runtime, best)
        told[0] = "", False


async def _gone(pid: int) -> None:
    """Until a process has ended; it stays its parent's to be waited for."""
    fd = os.pidfd_open(pid)
    try:
        await anyio.wait_readable(fd)
    finally:
        os.close(fd)


def _end_stopped(runtime: aionn.Runtime, device: FakeDevice) -> None:
    for known in runtime.devices:
        if known.name == device.name and known.pid is not None:
            os.kill(known.pid, signal.SIGKILL)
