"""`asyncio.Task.cancel` goes through anyio's shields: a clean-up that it strikes has nevertheless given everything back."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import aionn
from aionn.caching.store.opening import Hit
from aionn.memory.memory import Memory
from aionn.memory.region import Region
from aionn.remote.device import RemoteBuffer, RemotePreparedModel
from aionn.runtime.executing.device_buffers import DeviceRoles, roles_of
from aionn.testing import FakeDevice, identity_model
from tests.leaks import ended, leak_check

pytestmark = [pytest.mark.anyio, pytest.mark.both_loops]

INPUTS = {"input": np.ones((1, 16), np.float32)}
MODEL = aionn.Model.from_onnx(identity_model())
TURNS = range(1, 9)


@pytest.fixture
async def runtime(fake: FakeDevice) -> AsyncIterator[aionn.Runtime]:
    async with aionn.Runtime() as runtime:
        yield runtime


async def cancelled_after(turns: int, work: Any) -> bool:
    """Cancel `work` after so many turns of the loop; whether that came before its end."""
    task: asyncio.Task[Any] = asyncio.ensure_future(work)
    for _ in range(turns):
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])
    return task.cancelled()


async def is_released(prepared: RemotePreparedModel, compilation: aionn.Compilation) -> bool:
    """Whether its driver does not know the model any more. Asked over the socket, behind what was asked before."""
    try:
        (await DeviceRoles([roles_of(compilation.model, {}, ("input",), ())], None).allocate([prepared])).release()
    except aionn.CallerError as error:
        assert "does not exist in this driver process" in str(error)
        return True
    return False


async def test_a_compilation_whose_closing_is_cancelled_anywhere_leaves_no_model_burst_or_memory(
    runtime: aionn.Runtime, fake: FakeDevice
) -> None:
    cancelled = []
    await runtime.compile(MODEL, devices=(fake.name,))  # its driver stays
    for turns in TURNS:
        async with leak_check():
            compilation = await runtime.compile(MODEL, devices=(fake.name,))
            bursts = [await compilation.burst().__aenter__() for _ in range(2)]
            for burst in bursts:
                await burst.compute(INPUTS)
            await compilation.compute(INPUTS)
            kept = compilation._parts.kept.connection
            assert kept is not None
            serving = compilation._parts.compiled.serving
            assert serving is not None
            assert isinstance(serving.prepared, RemotePreparedModel)
            cancelled.append(await cancelled_after(turns, compilation.aclose()))
            assert await is_released(serving.prepared, compilation)
            with pytest.raises(aionn.CallerError):
                await bursts[1].compute(INPUTS)
            assert kept.executor.frames.count()["frames"] == bursts[0]._executor.frames.count()["frames"] == 0
            assert serving.prepared.device._bursts == {}
    assert any(cancelled)


async def test_a_staged_compilation_whose_closing_is_cancelled_leaves_no_model_and_no_worker(
    runtime: aionn.Runtime, fake: FakeDevice, best: FakeDevice
) -> None:
    best.hang("compile")
    compilation = await runtime.compile(MODEL, mode="staged", stages=(fake.name, best.name))
    waiting = asyncio.create_task(compilation.wait_for_stage(best.name))
    worker = await best.heard("compile")
    serving = compilation._parts.compiled.serving
    assert serving is not None
    assert isinstance(serving.prepared, RemotePreparedModel)
    assert worker in runtime._opened.devices.worker_pids
    assert await cancelled_after(1, compilation.aclose())
    assert await is_released(serving.prepared, compilation)
    with pytest.raises(aionn.StageRejected):
        await waiting
    assert await ended(worker, 10.0)


async def test_a_burst_whose_closing_is_cancelled_leaves_nothing(runtime: aionn.Runtime, fake: FakeDevice) -> None:
    compilation = await runtime.compile(MODEL, devices=(fake.name,))
    await compilation.compute(INPUTS)
    for turns in TURNS[:2]:
        async with leak_check():
            burst = await compilation.burst().__aenter__()
            await burst.compute(INPUTS)
            assert await cancelled_after(turns, burst.aclose())
            assert burst._executor.frames.count()["frames"] == 0


async def test_a_device_memory_whose_closing_is_cancelled_is_freed(
    runtime: aionn.Runtime, fake: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    compilation = await runtime.compile(MODEL, devices=(fake.name,))
    made: list[RemoteBuffer] = []
    init = RemoteBuffer.__init__

    def note(self: RemoteBuffer, *arguments: Any) -> None:
        init(self, *arguments)
        made.append(self)

    monkeypatch.setattr(RemoteBuffer, "__init__", note)
    memory = await compilation.allocate(inputs=("input",))
    await memory.reset()
    fake.hang()
    running = asyncio.create_task(compilation.compute({"input": memory}))
    await fake.heard("run")
    assert await cancelled_after(2, memory.aclose())
    fake.behave()
    assert list(await running) == ["input_out"]
    assert len(made) == 1
    with Memory(Region.allocate(64)) as target, pytest.raises(aionn.CallerError, match="does not exist in this driver process"):
        await made[0].copy_to(target)


async def test_a_swap_that_is_cancelled_while_it_leaves_the_cache_releases_the_new_model(
    runtime: aionn.Runtime, fake: FakeDevice, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    made: list[RemotePreparedModel] = []
    init = RemotePreparedModel.__init__

    def note(self: RemotePreparedModel, *arguments: Any) -> None:
        init(self, *arguments)
        made.append(self)

    monkeypatch.setattr(RemotePreparedModel, "__init__", note)
    closing, go_on = threading.Event(), threading.Event()
    close_here = Hit.close_here

    def wait_and_close(self: Hit, **arguments: Any) -> None:
        closing.set()
        assert go_on.wait(30)
        close_here(self, **arguments)

    async with await runtime.compile(MODEL, devices=(fake.name,), cache_dir=tmp_path, token=MODEL.token) as compilation:
        monkeypatch.setattr(Hit, "close_here", wait_and_close)
        fake.hang("run")
        swapping = asyncio.create_task(runtime.swap(compilation, MODEL))
        await asyncio.to_thread(closing.wait, 30)
        assert len(made) == 2
        swapping.cancel()
        go_on.set()
        await asyncio.wait([swapping])
        assert swapping.cancelled()
        fake.behave()
        assert compilation._parts.compiled.serving is not None
        assert compilation._parts.compiled.serving.prepared is made[0]
        assert await is_released(made[1], compilation)
        assert not await is_released(made[0], compilation)
