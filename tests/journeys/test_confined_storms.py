"""Confined drivers and their apps are killed at random moments, in a compile, a burst or a change of stages: nothing is left behind."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import anyio
import psutil
import pytest

import aionn
from aionn.errors import AionnError
from tests.apps import App
from tests.journeys.silero import Arrays, Directly, assert_same, still, windows
from tests.leaks import driver_pids, ended, leak_check, processes_with, wait_for_end
from tests.sandbox.confinement import assert_confined, serving

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("surroundings")]

ROOT = Path(__file__).parents[2]
APPS, ROUNDS = 4, 5
MARK = "AIONN_TEST_STORM"
GONE_WITHIN_S = 20.0


@pytest.fixture
def anyio_backend() -> Any:
    return ("asyncio", {"use_uvloop": True})


def drivers_of(pid: int) -> list[int]:
    return [child.pid for child in psutil.Process(pid).children(recursive=True) if "aionn.driver" in child.cmdline()]


def test_killed_apps_leave_no_confined_driver(silero_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel ends a driver with its app. A driver cannot take that back, because its filter denies that prctl."""
    mark = f"storm-{os.getpid()}"
    monkeypatch.setenv(MARK, mark)
    moments = random.Random(16)
    with leak_check():
        for _ in range(APPS):
            app = App(
                [sys.executable, "-m", "tests.journeys.storming_app", str(silero_path), str(tmp_path / "cache")],
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
            try:
                assert app.stdout is not None
                assert app.stdout.readline() == b"at work\n"
                drivers = drivers_of(app.pid)
                assert drivers
                with pytest.raises(subprocess.TimeoutExpired):
                    app.wait(moments.uniform(0, 1.5))  # the random moment itself
            finally:
                app.kill()
                app.communicate()
            for pid in drivers:
                assert wait_for_end(pid, GONE_WITHIN_S), f"driver {pid} is still there"
    monkeypatch.delenv(MARK)
    for left in processes_with(MARK, mark):  # a driver that was started after the look for drivers, just before its app was killed
        wait_for_end(int(left.split()[1].rstrip(":")), GONE_WITHIN_S)
    assert processes_with(MARK, mark) == []


class Storm:
    """One round: three callers use a device whose driver is killed at a random moment."""

    def __init__(self, runtime: aionn.Runtime, model: aionn.Model, device: str, cache: Path) -> None:
        self.runtime, self.model, self.device, self.cache = runtime, model, device, cache
        self.inputs: Arrays = {"input": next(windows(1)), "state": still()}
        self.busy = anyio.Event()

    async def compiling(self) -> None:
        while True:
            compilation = await self.runtime.compile(self.model, devices=(self.device,), cache_dir=self.cache, token=self.model.token)
            self.busy.set()
            await compilation.compute(self.inputs)

    async def streaming(self) -> None:
        compilation = await self.runtime.compile(self.model, devices=(self.device,))
        async with compilation.burst() as burst:
            while True:
                await burst.compute(self.inputs)
                self.busy.set()

    async def staging(self) -> None:
        stages = ("reference", self.device)
        compilation = await self.runtime.compile(self.model, mode="staged", stages=stages)
        while True:
            await compilation.compute(self.inputs)
            self.busy.set()

    async def kill_all(self, after_s: float, scope: anyio.CancelScope) -> None:
        await self.busy.wait()
        await anyio.sleep(after_s)  # the random moment itself
        for pid in driver_pids():
            with suppress(ProcessLookupError):  # a driver may also end by itself, as that of a rejected stage does
                os.kill(pid, signal.SIGKILL)
            assert await ended(pid, GONE_WITHIN_S)
        scope.cancel()

    async def until_it_dies(self, use: Any) -> None:
        try:
            await use()
        except AionnError:
            return


@pytest.mark.parametrize("device", ["onnxruntime", "openvino"])
async def test_killed_confined_drivers_leave_nothing_and_the_next_start_works(device: str, silero_path: Path, tmp_path: Path) -> None:
    model = aionn.Model.from_onnx(silero_path)
    expected = Directly(silero_path).run({"input": next(windows(1)), "state": still()})
    moments = random.Random(17)
    async with leak_check(), aionn.Runtime(sandbox="require") as runtime:
        for _ in range(ROUNDS):
            storm = Storm(runtime, model, device, tmp_path / "cache")
            with anyio.fail_after(60):
                async with anyio.create_task_group() as callers:
                    for use in (storm.compiling, storm.streaming, storm.staging):
                        callers.start_soon(storm.until_it_dies, use)
                    callers.start_soon(storm.kill_all, moments.uniform(0, 0.4), callers.cancel_scope)
            compilation = await runtime.compile(model, devices=(device,))
            found = await compilation.compute(storm.inputs)
            if device == "onnxruntime":
                assert_same(found, expected)
            assert serving(runtime)
            for pid in serving(runtime):
                assert_confined(pid)
