"""`Runtime(start=)`: driver processes that start when the runtime opens, before a compile asks for them."""

from __future__ import annotations

import logging
import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from importlib.metadata import entry_points
from pathlib import Path

import anyio
import anyio.lowlevel
import pytest

import aionn
from aionn.engines.installed import BUILT_IN, GROUP
from aionn.runtime.processes import spawning
from aionn.runtime.processes.devices import Devices
from aionn.runtime.processes.spawning import Settings
from tests.leaks import driver_pids, ended, leak_check, processes_with
from tests.stopping import kill_under, stop

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("real_starts")]

REFERENCE = ("reference",)


@pytest.fixture
def by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spawning, "BY_DEFAULT", True)


@pytest.fixture
def model(silero_path: Path) -> aionn.Model:
    return aionn.Model.from_onnx(silero_path)


def device_of(runtime: aionn.Runtime, name: str) -> aionn.Device:
    return next(device for device in runtime.devices if device.name == name)


def all_pids() -> set[int]:
    """Return the numbers of all processes, zombies included."""
    return {int(entry) for entry in os.listdir("/proc") if entry.isdecimal()}


async def killed(device: aionn.Device) -> None:
    """Kill the device's driver, and return when the runtime has seen its end."""
    assert device.pid is not None
    os.kill(device.pid, signal.SIGKILL)
    with anyio.fail_after(30):
        while device.pid is not None:
            await anyio.lowlevel.checkpoint()


async def test_the_first_installed_device_starts_when_the_runtime_opens_and_serves_the_first_compile(
    by_default: None, model: aionn.Model
) -> None:
    async with leak_check(), aionn.Runtime() as runtime:
        (pid,) = driver_pids()
        device = runtime.devices[0]
        assert (device.name, device.pid, device.statistics()["starts"]) == ("onnxruntime", pid, 1)
        async with await runtime.compile(model) as compilation:
            assert compilation.device == "onnxruntime"
        assert (device.pid, device.statistics()["starts"]) == (pid, 1)


async def test_no_driver_starts_before_it_is_needed_where_the_app_wants_none(by_default: None) -> None:
    async with aionn.Runtime(start=()) as runtime:
        assert driver_pids() == []
        assert all(device.statistics()["starts"] == 0 for device in runtime.devices)


async def test_each_named_device_starts_once() -> None:
    async with leak_check(), aionn.Runtime(start=["reference", "openvino", "reference"]) as runtime:
        pids = {name: device_of(runtime, name).pid for name in ("reference", "openvino")}
        assert sorted(driver_pids()) == sorted(pid for pid in pids.values() if pid is not None)
        assert len(driver_pids()) == 2


@pytest.mark.parametrize("start", ["onnxruntime", b"onnxruntime", 3, ["onnxruntime", 3], [""], ["a\0b"], {"onnxruntime": 1}, ["nothing"]])
def test_a_start_that_names_no_installed_device_is_a_callers_error(start: object) -> None:
    with pytest.raises(aionn.CallerError, match="start="):
        aionn.Runtime(start=start)  # type: ignore[arg-type]


def test_the_built_in_engines_are_the_entry_points_of_this_package() -> None:
    assert {point.name: point.value for point in entry_points(group=GROUP) if point.name in BUILT_IN} == BUILT_IN


async def test_a_device_that_cannot_start_fails_the_first_compile_and_not_the_opening(
    model: aionn.Model, caplog: pytest.LogCaptureFixture
) -> None:
    name = "aionn.nowhere:Engine"
    async with leak_check():
        with caplog.at_level(logging.WARNING, "aionn"):
            async with aionn.Runtime(start=(name,)) as runtime:
                while not any("early start" in record.getMessage() for record in caplog.records):  # noqa: ASYNC110
                    await anyio.sleep(0.01)
                for pid in driver_pids():
                    assert await ended(pid, 30)
                with pytest.raises(aionn.DeviceUnavailableError, match="cannot be loaded"):
                    await runtime.compile(model, devices=(name,))
        assert not any("deaths in a row" in record.getMessage() for record in caplog.records)


async def test_a_driver_that_cannot_be_spawned_does_not_fail_the_opening(
    monkeypatch: pytest.MonkeyPatch, model: aionn.Model, caplog: pytest.LogCaptureFixture
) -> None:
    async with leak_check():
        monkeypatch.setattr(sys, "executable", "/nowhere/python")
        with caplog.at_level(logging.WARNING, "aionn"):
            async with aionn.Runtime(start=REFERENCE) as runtime:
                assert [record.getMessage() for record in caplog.records if "early start" in record.getMessage()]
                with pytest.raises(aionn.DeviceUnavailableError, match="was not made"):
                    await runtime.compile(model, devices=REFERENCE)


async def test_a_driver_that_no_compile_asks_for_ends_quietly_and_the_next_compile_starts_another(
    monkeypatch: pytest.MonkeyPatch, model: aionn.Model, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("aionn.runtime.processes.devices.EARLY_S", 0.05)
    async with leak_check(), aionn.Runtime(start=REFERENCE) as runtime:
        device = device_of(runtime, "reference")
        (pid,) = driver_pids()
        with caplog.at_level(logging.DEBUG, "aionn"):
            assert await ended(pid, 30)
            async with await runtime.compile(model, devices=REFERENCE):
                assert device.pid not in (None, pid)
        assert device.statistics()["starts"] == 2
        assert caplog.records == []


async def test_a_driver_that_a_compile_has_asked_for_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aionn.runtime.processes.devices.EARLY_S", 0.5)
    async with anyio.create_task_group() as tasks:
        devices = Devices(tasks)
        devices.start_early(REFERENCE, {})
        (pid,) = driver_pids()
        await devices.get("reference")
        await anyio.sleep(0.6)  # EARLY_S is over
        assert driver_pids() == [pid]
        await devices.aclose()


async def test_a_driver_that_dies_before_its_first_use_is_logged_and_started_again(
    model: aionn.Model, caplog: pytest.LogCaptureFixture
) -> None:
    async with leak_check(), aionn.Runtime(start=REFERENCE) as runtime:
        device = device_of(runtime, "reference")
        (pid,) = driver_pids()
        with caplog.at_level(logging.WARNING, "aionn.driver"):
            await killed(device)
            async with await runtime.compile(model, devices=REFERENCE):
                assert device.pid not in (None, pid)
        assert (device.statistics()["starts"], device.statistics()["last_exit_code"]) == (2, -signal.SIGKILL)
        texts = [record.getMessage() for record in caplog.records]
        assert [text for text in texts if "ended by signal 9" in text]
        assert [text for text in texts if "started again" in text]


async def test_a_driver_killed_at_any_moment_of_its_start_is_replaced(model: aionn.Model) -> None:
    for part in range(4):  # of a start, which takes up to 0.3 s
        async with leak_check(), aionn.Runtime(start=REFERENCE) as runtime:
            (pid,) = driver_pids()
            device = device_of(runtime, "reference")
            await anyio.sleep(random.uniform(part, part + 1) * 0.075)
            await killed(device)
            async with await runtime.compile(model, devices=REFERENCE):
                assert device.pid not in (None, pid)


async def test_a_driver_killed_while_the_first_compile_waits_for_it_ends_that_compile_alone(model: aionn.Model) -> None:
    async with leak_check(), aionn.Runtime(start=REFERENCE) as runtime:
        (pid,) = driver_pids()
        await kill_under(pid, lambda: runtime.compile(model, devices=REFERENCE))
        async with await runtime.compile(model, devices=REFERENCE):
            assert device_of(runtime, "reference").statistics()["starts"] == 2


async def test_a_runtime_closed_at_once_leaves_nothing() -> None:
    for moment in (0.0, 0.0, 0.01, 0.05, 0.1, 0.2, 0.4):
        async with leak_check():
            runtime = aionn.Runtime(start=REFERENCE)
            await runtime.open()
            (pid,) = driver_pids()
            await anyio.sleep(moment)
            await runtime.aclose()
            assert pid not in all_pids()


async def test_a_closed_runtime_does_not_wait_for_a_driver_that_no_caller_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    for waits in ("spawning.EARLY_S", "devices.EARLY_S", "process.GRACE_S"):
        monkeypatch.setattr(f"aionn.runtime.processes.{waits}", 3600.0)
    async with leak_check():
        runtime = aionn.Runtime(start=REFERENCE)
        await runtime.open()
        (pid,) = driver_pids()
        stop(pid)  # so that it cannot end by itself
        with anyio.fail_after(30):
            await runtime.aclose()
        assert driver_pids() == []


@pytest.mark.parametrize("turns", [0, 1, 2, 3])
async def test_an_opening_that_is_cancelled_leaves_nothing(turns: int) -> None:
    async with leak_check():
        runtime = aionn.Runtime(start=REFERENCE)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(runtime.open)
            for _ in range(turns):
                await anyio.lowlevel.checkpoint()
            tasks.cancel_scope.cancel()
        await runtime.aclose()


def test_processes_that_were_not_taken_over_end() -> None:
    with leak_check():
        spawned = spawning.spawn_early(REFERENCE, Settings())
        (pid,) = driver_pids()
        spawning.end_early(spawned)
        assert not spawned
        assert pid not in all_pids()


APP = """
    import os, sys
    import aionn
    from aionn.runtime.processes import spawning

    class Spawned(spawning.Spawned):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            print(len(sys.modules.keys() & {"numpy", "onnx", "sqlite3", "msgspec", "anyio"}), flush=True)
            if sys.argv[1] == "interrupt":
                os.kill(os.getpid(), 2)

    async def main() -> None:
        try:
            await aionn.Runtime(start=("reference",)).open()
            await __import__("asyncio").sleep(100)
        finally:
            try:
                os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                print("no child", flush=True)

    from aionn.runtime.processes import spawning
    spawning.Spawned = Spawned
    aionn.run(main)
"""


def test_an_app_interrupted_while_it_opens_leaves_no_child() -> None:
    with leak_check():
        done = subprocess.run([sys.executable, "-c", textwrap.dedent(APP), "interrupt"], capture_output=True, text=True, timeout=60)
    assert (done.stdout.splitlines(), done.returncode) == (["0", "no child"], -signal.SIGINT), done.stderr


def test_an_app_killed_at_any_moment_of_its_start_leaves_no_driver() -> None:
    for turn in range(4):
        mark = f"{os.getpid()}-{turn}"
        environment = dict(os.environ, AIONN_TEST_MARK=mark)
        with subprocess.Popen([sys.executable, "-c", textwrap.dedent(APP), "stay"], env=environment, stdout=subprocess.PIPE) as app:
            assert app.stdout is not None
            app.stdout.readline()
            time.sleep(random.uniform(turn, turn + 1) * 0.075)
            assert processes_with("AIONN_TEST_MARK", mark)
            app.kill()
        while processes_with("AIONN_TEST_MARK", mark):  # without an end, the test's own time limit ends it
            time.sleep(0.02)


async def test_the_loop_turns_between_the_starts_of_drivers_that_are_asked_for_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each start blocks the loop for as long as the template takes to copy itself. Together they would block it for seconds."""
    turns = 0
    started: list[int] = []

    class Refused(spawning.Spawned):
        def __init__(self, name: str, *_: object) -> None:
            started.append(turns)
            raise aionn.DeviceUnavailableError(name, "it is not started in this test")

    async def restart(device: aionn.Device) -> None:
        with pytest.raises(aionn.DeviceUnavailableError, match="not started in this test"):
            await device.restart()

    monkeypatch.setattr("aionn.runtime.processes.process.Spawned", Refused)
    async with aionn.Runtime(start=()) as runtime:
        devices = [device for usual in runtime.devices for device in (usual, usual.low_priority) if device is not None]
        async with anyio.create_task_group() as tasks:
            for device in devices:
                tasks.start_soon(restart, device)
            while len(started) < len(devices):
                turns += 1
                await anyio.lowlevel.checkpoint()
    assert len(devices) > 4
    assert len(set(started)) == len(devices)
