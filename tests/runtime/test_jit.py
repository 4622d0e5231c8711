"""JIT: nothing happens before the first execution, and then everything once, under the entry's locks, although callers wait or leave."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest

import aionn
from aionn import trace
from aionn.caching.store import CacheStore
from aionn.caching.store.locks import hold_now, sole_holder
from aionn.testing import FakeDevice, identity_model
from tests.apps import App
from tests.leaks import leak_check
from tests.runtime.staged_streams import SHAPE, frame

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> Any:
    return ("asyncio", {"use_uvloop": True})


@pytest.fixture
def device() -> Iterator[FakeDevice]:
    with FakeDevice() as device:
        yield device


@pytest.fixture(autouse=True)
def state_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


@pytest.fixture
def model() -> aionn.Model:
    return aionn.Model.from_onnx(identity_model({"x": SHAPE}, outputs=["y"]))


async def jit(runtime: aionn.Runtime, model: aionn.Model, device: FakeDevice, cache: Path | None) -> aionn.Compilation:
    token = None if cache is None else model.token
    return await runtime.compile(model, devices=(device.name,), mode="jit", cache_dir=cache, token=token)


async def test_jit_compiles_once_at_the_first_execution_and_outlives_its_first_caller(
    device: FakeDevice, model: aionn.Model, tmp_path: Path
) -> None:
    for kind, act in (("MISS", "compile"), ("HIT", "load")):
        with trace.record() as recording:
            async with leak_check(), aionn.Runtime() as runtime:
                compilation = await jit(runtime, model, device, tmp_path / "cache")
                assert (compilation.outcomes, runtime.devices[-1].pid) == ((), None)
                answers: list[float] = []

                async def call(number: int, compilation: aionn.Compilation = compilation, answers: list[float] = answers) -> None:
                    answers.append(float((await compilation.compute(frame(number)))["y"][0, 0]))

                device.hang(act)
                async with anyio.create_task_group() as tasks:
                    async with anyio.create_task_group() as first:
                        first.start_soon(call, -1)
                        await device.heard(act)
                        first.cancel_scope.cancel()
                    for number in range(3):
                        tasks.start_soon(call, number)
                    await anyio.wait_all_tasks_blocked()
                    device.behave()
                assert sorted(answers) == [0, 1, 2]
                assert [outcome.kind.name for outcome in compilation.outcomes] == [kind]
        assert recording.total("compile.cache") == 1


async def test_the_entry_is_locked_while_jit_writes_it_and_while_it_loads_it(
    device: FakeDevice, model: aionn.Model, tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    async with aionn.Runtime() as runtime:  # the key is the same in any directory
        eager = await runtime.compile(model, devices=(device.name,), cache_dir=tmp_path / "other", token=model.token)
        key = eager.outcomes[0].key
    async with CacheStore(cache) as store:
        assert await store.entries() == []
        directory = store._house.directory
    assert directory is not None
    entry_lock, compile_lock = directory.entry_lock(key), directory.compile_lock(key)

    def others_may(mode: str) -> bool:
        if mode == "compile":
            with sole_holder(entry_lock, compile_lock) as free:
                return free
        if (hold := hold_now(entry_lock, "write")) is not None:
            hold.release()
        return hold is not None

    for act, forbidden in (("compile", "compile"), ("load", "write")):
        async with leak_check(), aionn.Runtime() as runtime:
            compilation = await jit(runtime, model, device, cache)
            device.hang(act)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(compilation.compute, frame(1))
                await device.heard(act)
                assert not await anyio.to_thread.run_sync(others_may, forbidden)
                device.behave()
        # Not before: housekeeping behind the caller's back takes an entry's locks, too.
        for mode in ("compile", "write"):
            assert await anyio.to_thread.run_sync(others_may, mode)


@pytest.mark.parametrize("burst", [False, True])
async def test_a_failed_jit_compile_reaches_every_caller_and_the_next_call_tries_again(
    device: FakeDevice, model: aionn.Model, tmp_path: Path, burst: bool
) -> None:
    async with leak_check(), aionn.Runtime() as runtime:
        compilation = await jit(runtime, model, device, tmp_path / "cache")
        device.fail("not yet", "compile")
        errors: list[str] = []

        async def call() -> None:
            try:
                if burst:
                    async with compilation.burst() as opened:
                        await opened.compute(frame(0))
                else:
                    await compilation.compute(frame(0))
            except aionn.CompilationError as error:
                errors.append(str(error))

        async with anyio.create_task_group() as tasks:
            for _ in range(3):
                tasks.start_soon(call)
        assert len(errors) == 3
        assert all("not yet" in error for error in errors)
        device.behave()
        assert (await compilation.compute(frame(4)))["y"][0, 0] == 4
        assert [outcome.kind.name for outcome in compilation.outcomes] == ["MISS"]


async def test_closing_or_leaving_in_the_middle_of_a_jit_compile_leaves_nothing(
    device: FakeDevice, model: aionn.Model, tmp_path: Path
) -> None:
    for close in (True, False):
        async with leak_check(), anyio.create_task_group() as tasks:
            ended: list[str] = []

            async def call(compilation: aionn.Compilation, ended: list[str] = ended) -> None:
                try:
                    await compilation.compute(frame(0))
                except aionn.AionnError as error:
                    ended.append(type(error).__name__)

            async with aionn.Runtime() as runtime:
                compilation = await jit(runtime, model, device, tmp_path / "cache")
                device.hang("compile")
                tasks.start_soon(call, compilation)
                await device.heard("compile")
                if close:
                    await compilation.aclose()
                    device.behave()
        assert ended == ["CallerError"]
        device.behave()
    async with leak_check(), aionn.Runtime() as runtime:
        compilation = await jit(runtime, model, device, tmp_path / "cache")
        assert (await compilation.compute(frame(5), timeout_s=30))["y"][0, 0] == 5


async def test_two_processes_that_jit_one_entry_at_once_compile_it_once(device: FakeDevice, tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(identity_model({"x": SHAPE}, outputs=["y"]))
    device.hang("compile")
    command = [sys.executable, "-m", "tests.journeys.caching_app", str(path), str(tmp_path / "cache"), device.name, "jit"]
    apps = _start(command, 2)
    try:
        drivers = {await device.heard("start"), await device.heard("start")}
        assert len(drivers) == 2
        device.behave()
        told = [json.loads((await anyio.to_thread.run_sync(app.communicate))[0]) for app in apps]
    finally:
        for app in apps:
            app.kill()
            app.wait()
    assert sorted(one["kind"] for one in told) == ["hit", "miss"]
    assert len({one["outputs"] for one in told}) == 1
    assert np.isfinite([one["waited_s"] for one in told]).all()


def _start(command: list[str], times: int) -> list[subprocess.Popen[bytes]]:
    return [App(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE) for _ in range(times)]
