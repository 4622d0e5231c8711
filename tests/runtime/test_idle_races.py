"""A use or an end that comes at any step while an idle compilation is given back and its driver ends."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anyio
import psutil
import pytest

import aionn
from aionn.hal.types import Priority
from aionn.runtime.preparing.kept_model import LOOKS, Idling
from aionn.runtime.processes.devices import Device, Devices
from aionn.runtime.processes.process import DriverProcess
from aionn.runtime.serving.serving import Rest, Serving
from aionn.testing import FakeDevice, identity_model
from tests.leaks import leak_check
from tests.runtime.idling_app import SHAPE, asleep, device_of, idle, until, x

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> Any:
    return ("asyncio", {"use_uvloop": True})


@pytest.fixture
def fake() -> Iterator[FakeDevice]:
    with FakeDevice() as device:
        yield device


@pytest.fixture(autouse=True)
def state_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


@pytest.fixture
def model() -> aionn.Model:
    return aionn.Model.from_onnx(identity_model({"x": SHAPE}, outputs=["y"]))


STEPS = ("before the last look", "asleep", "before the release", "after the release", "before the end", "while it ends", "ended")


def at(step: str, monkeypatch: pytest.MonkeyPatch, act: Callable[[], object]) -> Callable[[], bool]:
    """Call `act` once at a step of giving back. Returns what says whether it was called."""
    done = False

    def once() -> None:
        nonlocal done
        if not done:
            done = True
            act()

    rested, release, end_unused, end = Idling._rested, Idling._release, Devices.end_unused, Devices._end

    def at_rested(self: Idling) -> list[Rest] | None:
        if step == "before the last look" and self._quiet >= LOOKS - 1:
            once()
        rests = rested(self)
        return rests if rests is None or step != "asleep" else [*rests, Rest(0, once)]

    async def at_release(self: Idling, serving: Serving) -> None:
        if step == "before the release":
            once()
            await asyncio.sleep(0)
        await release(self, serving)
        if step == "after the release":
            once()
            await asyncio.sleep(0)

    def at_end_unused(self: Devices, name: str, priority: Priority) -> None:
        if step == "before the end":
            once()
        end_unused(self, name, priority)

    async def at_end(self: Devices, device: Device, process: DriverProcess) -> None:
        if step == "while it ends":
            once()
        await end(self, device, process)
        if step == "ended":
            once()

    monkeypatch.setattr(Idling, "_rested", at_rested)
    monkeypatch.setattr(Idling, "_release", at_release)
    monkeypatch.setattr(Devices, "end_unused", at_end_unused)
    monkeypatch.setattr(Devices, "_end", at_end)
    return lambda: done


@pytest.mark.parametrize("use", ["compute", "burst", "memory", "swap"])
@pytest.mark.parametrize("step", STEPS)
async def test_a_use_at_any_step_sees_no_error(
    fake: FakeDevice, model: aionn.Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, use: str
) -> None:
    async with leak_check(), aionn.Runtime() as runtime:
        compilation = await idle(runtime, model, fake, tmp_path / "cache")
        async with compilation.burst() as burst:
            for _ in range(3):
                await burst.compute(x(1))

            async def uses() -> float:
                if use == "compute":
                    return float((await compilation.compute(x(7)))["y"][0, 0])
                if use == "burst":
                    return float((await burst.compute(x(7)))["y"][0, 0])
                if use == "swap":
                    await runtime.swap(compilation, model)
                    return float((await burst.compute(x(7)))["y"][0, 0])
                async with await compilation.allocate(inputs=("x",)) as memory:
                    await memory.copy_from(x(7)["x"])
                    return float((await burst.compute({"x": memory}))["y"][0, 0])

            task: list[asyncio.Task[float]] = []
            called = at(step, monkeypatch, lambda: task.append(asyncio.get_running_loop().create_task(uses())))
            await until(called)
            with anyio.fail_after(20):
                assert await task[0] == 7
            await until(lambda: asleep(compilation))
            assert (await burst.compute(x(8)))["y"][0, 0] == 8


@pytest.mark.parametrize("who", ["compilation", "runtime", "driver"])
@pytest.mark.parametrize("step", STEPS)
async def test_an_end_at_any_step_leaves_nothing(
    fake: FakeDevice, model: aionn.Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, who: str
) -> None:
    async with leak_check():
        async with aionn.Runtime() as runtime:
            compilation = await idle(runtime, model, fake, tmp_path / "cache")
            burst = compilation.burst()
            await burst.__aenter__()
            await burst.compute(x(1))
            pid = device_of(runtime, fake.name).pid
            assert pid is not None

            async def ends() -> None:
                if who == "driver":
                    if psutil.pid_exists(pid) and psutil.Process(pid).ppid() == os.getpid():
                        os.kill(pid, signal.SIGKILL)
                elif who == "compilation":
                    await compilation.aclose()
                else:
                    await runtime.aclose()

            task: list[asyncio.Task[None]] = []
            called = at(step, monkeypatch, lambda: task.append(asyncio.get_running_loop().create_task(ends())))
            await until(called)
            with anyio.fail_after(20):
                await task[0]
            if who == "driver":
                assert (await burst.compute(x(2)))["y"][0, 0] == 2
                assert (await compilation.compute(x(3)))["y"][0, 0] == 3
            if who != "runtime":
                await burst.aclose()
        if who == "runtime":
            with pytest.raises(aionn.CallerError):
                await compilation.compute(x(1))
