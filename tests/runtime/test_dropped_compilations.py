"""What an app keeps of a compilation that it has dropped. Closing the runtime ends it, as if the compilation still lived.

Each test drops the compilation, and checks that it was collected. So nothing is closed through it.
"""

from __future__ import annotations

import asyncio
import gc
import os
import threading
import weakref
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest

import aionn
from aionn.caching.store import CacheStore
from aionn.testing import FakeDevice, identity_model
from tests.leaks import leak_check
from tests.runtime.staged_streams import SHAPE, frame, staged

pytestmark = pytest.mark.anyio

X = frame(1)
MODEL = aionn.Model.from_onnx(identity_model({"x": SHAPE}, outputs=["y"]))
RECURRENT = aionn.Model.from_onnx(identity_model({"x": (3,), "state": (4,)}, outputs=["y", "stateN"]))
CALLS = 200
"""More than a burst sends at once, and more than a page has frames for."""


@pytest.fixture
def anyio_backend() -> Any:
    return ("asyncio", {"use_uvloop": True})


class Dropped:
    """An open runtime, and a compilation of it that the app drops with `drop`."""

    def __init__(self, runtime: aionn.Runtime, compilation: aionn.Compilation) -> None:
        self.runtime = runtime
        self.compilation: aionn.Compilation | None = compilation
        self._lives = weakref.ref(compilation._parts)

    @property
    def made(self) -> aionn.Compilation:
        assert self.compilation is not None
        return self.compilation

    def drop(self) -> None:
        self.compilation = None
        gc.collect()
        assert self._lives() is None


async def made(fake: FakeDevice, model: aionn.Model = MODEL) -> Dropped:
    runtime = aionn.Runtime()
    await runtime.open()
    return Dropped(runtime, await runtime.compile(model, devices=(fake.name,)))


async def errors_of(tasks: list[asyncio.Task[Any]]) -> set[str]:
    """Wait for calls that closing has ended. Returns their errors."""
    with anyio.fail_after(20):
        return {str(found) for found in await asyncio.gather(*tasks, return_exceptions=True) if isinstance(found, aionn.AionnError)}


async def test_calls_and_leases_that_wait_in_a_kept_burst_end(fake: FakeDevice) -> None:
    async with leak_check():
        app = await made(fake)
        burst = await app.made.burst(depth=1).__aenter__()
        app.drop()
        fake.hang()
        leased: list[aionn.Frame] = []

        async def lease() -> None:
            leased.append(await burst.lease())

        loop = asyncio.get_running_loop()
        tasks: list[asyncio.Task[Any]] = [loop.create_task(burst.compute(X)) for _ in range(4)]
        tasks += [loop.create_task(lease()) for _ in range(CALLS)]
        await fake.heard("run")
        await anyio.wait_all_tasks_blocked()
        assert sum(not task.done() for task in tasks) > 4
        refused: list[BaseException] = []

        def lease_in_thread() -> None:
            try:
                burst.lease()
            except aionn.CallerError as error:
                refused.append(error)

        thread = threading.Thread(target=lease_in_thread)
        thread.start()
        with anyio.fail_after(20):
            while not burst._connection.when_closed:
                await anyio.lowlevel.checkpoint()
        await app.runtime.aclose()
        assert len(await errors_of(tasks)) >= 1
        assert all(task.done() for task in tasks)
        await anyio.to_thread.run_sync(thread.join, 20)
        assert not thread.is_alive()
        assert len(refused) == 1
        with pytest.raises(aionn.CallerError, match="the burst of this frame was closed"):
            leased[0]["x"]
        with pytest.raises(aionn.CallerError, match="is not open"):
            await burst.compute(X)
        leased.clear()
        tasks.clear()
    await burst.aclose()


async def test_a_stream_of_a_kept_burst_ends_with_the_reason(fake: FakeDevice) -> None:
    async with leak_check():
        app = await made(fake)
        burst = await app.made.burst().__aenter__()
        app.drop()

        async def silent() -> AsyncIterator[dict[str, Any]]:
            yield X
            await anyio.sleep_forever()

        results = burst.map(silent())
        assert (await anext(results)).seq == 0
        waiting = asyncio.get_running_loop().create_task(anext(results))
        await anyio.wait_all_tasks_blocked()
        await app.runtime.aclose()
        assert await errors_of([waiting]) == {"the burst was closed while its stream went on"}


async def test_frames_of_a_kept_recurrent_stream_end(fake: FakeDevice) -> None:
    async with leak_check():
        app = await made(fake, RECURRENT)
        voice = await app.made.recurrent({"state": "stateN"}).__aenter__()
        app.drop()
        await voice.compute({"x": np.zeros(3, np.float32)})
        fake.hang()
        tasks = [asyncio.get_running_loop().create_task(voice.compute({"x": np.zeros(3, np.float32)})) for _ in range(8)]
        await fake.heard("run")
        await app.runtime.aclose()
        assert len(await errors_of(tasks)) >= 1
        with pytest.raises(aionn.CallerError):
            await voice.reset()
    await voice.aclose()


async def test_kept_events_and_device_memory_end(fake: FakeDevice) -> None:
    gate = os.eventfd(0, os.EFD_CLOEXEC)
    try:
        async with leak_check():
            app = await made(fake)
            memory = await app.made.allocate(inputs=["x"])
            await memory.copy_from(X["x"])
            events = [app.made.start(X, after=(gate,)), app.made.start({"x": memory}, after=(gate,))]
            events.append(app.made.start(X, after=(events[0],)))
            app.compilation = None
            gc.collect()
            reading = asyncio.get_running_loop().create_task(memory.snapshot())
            await anyio.wait_all_tasks_blocked()
            await app.runtime.aclose()
            for event in events:
                with anyio.fail_after(20), pytest.raises(aionn.AionnError):
                    await event
            await errors_of([reading])
            with pytest.raises(aionn.CallerError):
                await memory.snapshot()
            await memory.aclose()
    finally:
        os.close(gate)


async def test_stages_behind_a_kept_burst_end_and_its_use_is_counted(quick: FakeDevice, best: FakeDevice, tmp_path: Path) -> None:
    best.hang("compile")
    async with leak_check(), aionn.Runtime(state_dir=tmp_path / "state") as runtime:
        app = Dropped(runtime, await staged(runtime, MODEL, quick, best, tmp_path / "cache"))
        stages = app.made.stages
        burst = await app.made.burst().__aenter__()
        app.drop()
        for number in range(10):
            await burst.compute(frame(number))
        with anyio.fail_after(20):
            await best.heard("compile")
        await runtime.aclose()
        assert [(stage.state, stage.reason) for stage in stages] == [("serving", ""), ("rejected", "the compilation was closed")]
    async with CacheStore(tmp_path / "cache") as store:
        assert await store.remembered.use(MODEL.token, 86400.0) == 10
    await burst.aclose()


async def test_frames_of_a_comparison_behind_a_kept_burst_end(quick: FakeDevice, best: FakeDevice) -> None:
    """The app keeps a burst, and its runtime is closed while two stages are compared. The frames of the comparison are freed with it."""
    best.hang()
    async with leak_check():
        app = Dropped(runtime := aionn.Runtime(), await staged(await runtime.__aenter__(), MODEL, quick, best))
        burst = await app.made.burst().__aenter__()
        trials = app.made._parts.trials.frames
        app.drop()
        for number in range(10):  # so many warrant the better stage
            await burst.compute(frame(number))
        with anyio.fail_after(20):
            await best.heard("run")
        assert trials.count()["frames"] > 0
        await runtime.aclose()
        assert trials.count() == {"frames": 0, "free_frames": 0, "pinned_frames": 0, "shared_bytes": 0}
    assert burst._connection.closed


async def test_a_burst_that_outlives_its_compilation_keeps_working_until_then(fake: FakeDevice) -> None:
    async with leak_check():
        app = await made(fake)
        burst = await app.made.burst().__aenter__()
        app.drop()
        for _ in range(3):
            await burst.compute(X)
        view = (await burst.compute(X))["y"]
        await app.runtime.aclose()
        np.testing.assert_array_equal(view, X["x"])
        del view
        assert burst._connection.executor.frames.count() == {"frames": 0, "free_frames": 0, "pinned_frames": 0, "shared_bytes": 0}


async def test_a_request_whose_caller_has_left_keeps_no_dropped_burst(fake: FakeDevice) -> None:
    """A driver that hangs may answer late. Until then its request holds the frame, and nothing of the app's."""
    async with leak_check():
        app = await made(fake)
        burst: aionn.Burst | None = await app.made.burst().__aenter__()
        assert burst is not None
        fake.hang()
        left: list[bool] = []

        async def call(burst: aionn.Burst) -> None:
            try:
                await burst.compute(X)
            except asyncio.CancelledError:
                left.append(True)

        task = asyncio.get_running_loop().create_task(call(burst))
        await fake.heard("run")
        connection = weakref.ref(burst._connection)
        task.cancel()
        await task
        assert left == [True]
        assert burst.statistics()["in_flight"] == 1
        burst = None
        del task
        app.drop()
        assert connection() is None
        fake.behave()
        await app.runtime.aclose()
