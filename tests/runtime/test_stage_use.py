"""Use that warrants a better stage: counted over all starts with one cache, as a frequency."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import anyio
import pytest

import aionn
from aionn.caching.store import CacheStore
from aionn.runtime.serving.serving import Use
from aionn.runtime.staging import stages
from aionn.runtime.staging.stages import until_frequent
from aionn.testing import FakeDevice, identity_model
from tests.apps import App
from tests.leaks import leak_check
from tests.runtime.staged_streams import SHAPE, frame, staged

pytestmark = pytest.mark.anyio

MODEL = aionn.Model.from_onnx(identity_model({"x": SHAPE}, outputs=["y"]))


@pytest.fixture
def anyio_backend() -> Any:
    return ("asyncio", {"use_uvloop": True})


@pytest.fixture(autouse=True)
def state_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


async def counted(cache: Path, within_s: float = 86400.0) -> int:
    async with CacheStore(cache) as store:
        return await store.remembered.use(MODEL.token, within_s)


async def start(quick: FakeDevice, best: FakeDevice, cache: Path, executions: int) -> str:
    """One start of an app: so many executions, in a burst and without one. The state of the better stage then."""
    async with leak_check(), aionn.Runtime() as runtime:
        compilation = await staged(runtime, MODEL, quick, best, cache)
        async with compilation.burst() as burst:
            for number in range(executions // 2):
                await burst.compute(frame(number))
        for number in range(executions - executions // 2):
            await compilation.compute(frame(number))
        return compilation.stages[1].state


async def test_executions_of_earlier_starts_warrant_a_stage(quick: FakeDevice, best: FakeDevice, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    assert await start(quick, best, cache, 9) == "waiting"
    assert await counted(cache) == 9
    async with leak_check(), aionn.Runtime() as runtime:
        best.tell()
        compilation = await staged(runtime, MODEL, quick, best, cache)
        assert compilation.stages[1].state == "waiting"  # nothing was executed at this start yet
        await compilation.compute(frame(1))
        with anyio.fail_after(20):
            await best.heard("compile")
    assert await counted(cache) == 10


async def test_a_policy_names_the_executions_and_older_ones_do_not_count(
    quick: FakeDevice, best: FakeDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache"
    await start(quick, best, cache, 9)
    asked = anyio.Event()

    async def frequent(use: Use, executions: int, *, since: int, earlier: int) -> None:
        assert (executions, since, earlier) == (3, 0, 0)  # what earlier starts have executed is older
        asked.set()

    monkeypatch.setattr(stages, "until_frequent", frequent)
    monkeypatch.setattr(stages, "PER_S", 1e-9)
    async with aionn.Runtime() as runtime:
        compilation = await staged(runtime, MODEL, quick, best, cache, stage_policy=aionn.StagePolicy(executions=3))
        with anyio.fail_after(20):
            await asked.wait()
        await compilation.aclose()


@pytest.mark.parametrize("end", ["Task.cancel", "error", "abandoned", "closed"])
async def test_use_is_kept_however_the_app_ends(quick: FakeDevice, best: FakeDevice, tmp_path: Path, end: str) -> None:
    computed = anyio.Event()

    async def app() -> None:
        async with aionn.Runtime() as runtime:
            compilation = await staged(runtime, MODEL, quick, best, tmp_path / "cache")
            for number in range(4):
                await compilation.compute(frame(number))
            computed.set()
            if end == "Task.cancel":
                await anyio.sleep_forever()
            if end == "error":
                raise ValueError("of the app's")
            if end == "closed":
                await compilation.aclose()
                await compilation.aclose()

    task = asyncio.create_task(app())
    await computed.wait()
    if end == "Task.cancel":
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    elif end == "error":
        with pytest.raises(ValueError, match="of the app's"):
            await task
    else:
        await task
    assert await counted(tmp_path / "cache") == 4


APP = """
import signal, sys
import numpy as np
import aionn
from aionn.testing import identity_model

async def main(cache):
    model = aionn.Model.from_onnx(identity_model({"x": (1, 16)}, outputs=["y"]))
    stages = ("aionn.testing.fake_engine:FakeEngine", "aionn.testing.fake_engine:SecondFakeEngine")
    async with aionn.Runtime() as runtime:
        compilation = await runtime.compile(model, mode="staged", stages=stages, cache_dir=cache, token=model.token)
        for _ in range(4):
            await compilation.compute({"x": np.zeros((1, 16), np.float32)})
        print("computed", flush=True)
        sys.stdin.readline()

try:
    aionn.run(main, sys.argv[1])
except KeyboardInterrupt:
    pass
"""


@pytest.mark.parametrize(("number", "kept"), [(signal.SIGKILL, 0), (None, 4)])
async def test_a_killed_app_spoils_nothing_that_is_counted(tmp_path: Path, number: signal.Signals | None, kept: int) -> None:
    for starts in (1, 2):
        app = App([sys.executable, "-c", APP, str(tmp_path / "cache")], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert app.stdin is not None
        assert app.stdout is not None
        with app:
            assert app.stdout.readline() == b"computed\n"
            if number is not None:
                app.send_signal(number)
            app.stdin.close()
            app.wait(30)
        assert await counted(tmp_path / "cache") == kept * starts


async def test_use_without_a_cache_counts_from_the_beginning(quick: FakeDevice, best: FakeDevice) -> None:
    async with leak_check(), aionn.Runtime() as runtime:
        compilation = await staged(runtime, MODEL, quick, best, stage_policy=aionn.StagePolicy(executions=4))
        for number in range(3):
            await compilation.compute(frame(number))
        assert compilation.stages[1].state == "waiting"
        best.tell()
        await compilation.compute(frame(3))
        with anyio.fail_after(20):
            await best.heard("compile")


# --- the frequency ---------------------------------------------------------------------------------------------------------------


class Clock:
    """Stands still until it is moved on."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


async def settled(waiting: asyncio.Task[None]) -> bool:
    """Whether it has returned, once it has done all that it can do now."""
    for _ in range(20):
        await asyncio.sleep(0)
    return waiting.done()


async def test_executions_within_the_period_count_and_older_ones_do_not() -> None:
    use, clock = Use(), Clock()
    waiting = asyncio.create_task(until_frequent(use, 5, per_s=1e-3, clock=clock))
    try:
        assert not await settled(waiting)
        for _ in range(4):
            use.count()
        assert not await settled(waiting)
        clock.now_s += 1
        for _ in range(4):
            use.count()  # eight in all, but these are of another period
        assert not await settled(waiting)
        use.count()
        assert not await settled(waiting)
        for _ in range(4):
            use.count()
        assert await settled(waiting)
    finally:
        waiting.cancel()


@pytest.mark.parametrize(("executions", "earlier", "now"), [(0, 0, 0), (5, 5, 1), (5, 500, 1), (5, 3, 2), (5, 0, 5)])
async def test_executions_of_earlier_starts_are_wanted_no_more(executions: int, earlier: int, now: int) -> None:
    use = Use()
    waiting = asyncio.create_task(until_frequent(use, executions, per_s=3600, earlier=earlier))
    for _ in range(now):
        assert not await settled(waiting)
        use.count()
    assert await settled(waiting)
