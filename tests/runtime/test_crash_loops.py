"""A driver that dies again and again is started ever more rarely, and the log says so once for each death and each start."""

from __future__ import annotations

import logging
import os
import signal
import time

import anyio
import numpy as np
import pytest

import aionn
from aionn.runtime.processes import process
from aionn.testing import FakeDevice, identity_model
from tests.leaks import leak_check

pytestmark = pytest.mark.anyio

X = {"input": np.zeros((1, 16), np.float32)}


def logged(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.fixture
def slow_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A start on a busy machine may take longer than `STEADY_S`. A driver that dies after it has not lived for long."""
    monkeypatch.setattr(process, "STEADY_S", float("inf"))


@pytest.mark.usefixtures("slow_starts")
async def test_a_model_that_kills_its_driver_at_every_run_gets_ever_rarer_starts(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "BACKOFF_S", (*process.BACKOFF_S[:3], 3600.0))
    async with leak_check():
        with FakeDevice() as fake:
            async with aionn.Runtime() as runtime:
                model = aionn.Model.from_onnx(identity_model())
                compilation = await runtime.compile(model, devices=(fake.name,))
                (device,) = (device for device in runtime.devices if device.pid)
                fake.crash()
                began, ends = time.monotonic(), []
                while device.statistics()["starts"] != 4:
                    with pytest.raises(aionn.DriverDiedError):
                        await compilation.compute(X)
                    ends.append(time.monotonic() - began)
                with anyio.fail_after(20), pytest.raises(aionn.DeadlineError):
                    await compilation.compute(X, timeout_s=0.5)  # the fourth death is followed by the longest pause
                assert device.statistics()["starts"] == 4
                assert ends[-1] >= sum(process.BACKOFF_S[:3])
                told = logged(caplog)
                deaths = [line for line in told if "ended by signal 9" in line]
                starts = [line for line in told if "is started again" in line]
                assert (len(deaths), len(starts), len(told)) == (4, 3, 7)
                name = getattr(model, "name", None) or model.token.hex()[:12]
                assert all(fake.name in line and name in line for line in deaths)
                assert all(fake.name in line and "exit code -9" in line for line in starts)
                fake.behave()
                with anyio.fail_after(60):
                    await device.restart()  # the app need not wait
                assert set(await compilation.compute(X)) == {"input_out"}


@pytest.mark.usefixtures("slow_starts")
async def test_a_driver_that_dies_while_it_starts_is_started_ever_more_rarely_too(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "BACKOFF_S", (0.0, 0.0, 3600.0))
    async with leak_check():
        told: list[str] = []
        with FakeDevice() as fake, anyio.fail_after(90):
            model = aionn.Model.from_onnx(identity_model())
            async with anyio.create_task_group() as tasks, aionn.Runtime() as runtime:
                fake.crash("start")
                for _ in range(3):
                    with pytest.raises(aionn.DriverDiedError, match="before it was ready"):
                        await runtime.compile(model, devices=(fake.name,))
                with pytest.raises(aionn.DeadlineError):
                    await runtime.compile(model, devices=(fake.name,), timeout_s=0.1)
                assert len([line for line in logged(caplog) if "ended by signal 9" in line]) == 3
                assert len([line for line in logged(caplog) if "is started again" in line]) == 2

                async def wait() -> None:
                    try:
                        await runtime.compile(model, devices=(fake.name,))
                    except aionn.CallerError as error:
                        told.append(str(error))

                tasks.start_soon(wait)
                await anyio.wait_all_tasks_blocked()
        assert told == ["the runtime was closed"]  # it did not wait for the pause


@pytest.mark.parametrize("why", ["it has lived long enough", "it has finished an execution"])
async def test_a_driver_that_was_of_use_is_replaced_at_once(monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    monkeypatch.setattr(process, "BACKOFF_S", (0.0, 3600.0))
    if why == "it has lived long enough":
        monkeypatch.setattr(process, "STEADY_S", 0.0)
    async with leak_check():
        with FakeDevice() as fake:
            async with aionn.Runtime() as runtime:
                compilation = await runtime.compile(aionn.Model.from_onnx(identity_model()), devices=(fake.name,))
                (device,) = (device for device in runtime.devices if device.pid)
                with anyio.fail_after(90):
                    for _ in range(3):
                        if why != "it has lived long enough":
                            await compilation.compute(X)
                        pid = device.pid
                        assert pid is not None
                        os.kill(pid, signal.SIGKILL)
                        while device.pid == pid:
                            await anyio.lowlevel.checkpoint()
                        await runtime.compile(aionn.Model.from_onnx(identity_model()), devices=(fake.name,))
                assert device.statistics()["starts"] == 4


async def test_a_runtime_that_closes_and_a_restart_by_the_app_log_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with FakeDevice() as fake:
        async with aionn.Runtime() as runtime:
            compilation = await runtime.compile(aionn.Model.from_onnx(identity_model()), devices=(fake.name,))
            (device,) = (device for device in runtime.devices if device.pid)
            for _ in range(3):
                await device.restart()
            await compilation.compute(X)
    assert logged(caplog) == []
