"""Driver processes: started, watched, ended. Each test ends with nothing left, whatever the driver or the app does."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
import sys
import textwrap
from contextlib import suppress
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest

import aionn
from aionn.errors import CallerError, CompilationError, DeadlineError, DeviceUnavailableError, DriverDiedError, DriverHungError
from aionn.hal import Needs
from aionn.runtime.processes import process as process_module
from aionn.runtime.processes.child import Child
from aionn.runtime.processes.devices import Devices
from aionn.testing import FakeDevice, identity_model
from tests.apps import App
from tests.leaks import driver_pids, ended, leak_check
from tests.real_models import carried

pytestmark = [pytest.mark.anyio, pytest.mark.both_loops]

X = {"input": np.arange(16, dtype=np.float32).reshape(1, 16)}


@pytest.fixture
def model() -> aionn.Model:
    return aionn.Model.from_onnx(identity_model())


async def until_a_driver_runs() -> int:
    with anyio.fail_after(30):
        while not driver_pids():
            await anyio.lowlevel.checkpoint()
    return driver_pids()[0]


async def test_a_driver_that_the_app_itself_reaps_is_still_seen_to_end(model: aionn.Model) -> None:
    async with leak_check():
        with FakeDevice() as fake:
            async with aionn.Runtime() as runtime:
                compilation = await runtime.compile(model, devices=(fake.name,))
                await compilation.compute(X)  # the next call is sent at once, before the loop can see the end
                (pid,) = driver_pids()
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)  # noqa: ASYNC222  (an app with a careless SIGCHLD handler does this)
                with anyio.fail_after(30), pytest.raises(DriverDiedError) as caught:
                    while True:
                        await compilation.compute(X)
                assert caught.value.exit_code is None
                assert "not known" in str(caught.value)
                del caught  # its traceback holds the frames of the call
                assert set(await compilation.compute(X)) == {"input_out"}


async def test_a_driver_that_ends_before_it_is_ready_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    async with leak_check(), anyio.create_task_group() as tasks:
        devices = Devices(tasks)
        outcome: list[Exception] = []

        async def start() -> None:
            with pytest.raises(DriverDiedError) as caught:
                await devices.get("aionn.testing.fake_engine:FakeEngine")
            outcome.append(caught.value)

        async with anyio.create_task_group() as starting:
            starting.start_soon(start)
            os.kill(await until_a_driver_runs(), signal.SIGKILL)
        assert "before it was ready" in str(outcome[0])
        assert (await devices.get("aionn.testing.fake_engine:FakeEngine")).name == "aionn.testing.fake_engine:FakeEngine"
        await devices.aclose()


async def test_a_cancelled_start_is_taken_up_by_the_next_caller_and_two_callers_start_one(model: aionn.Model) -> None:
    async with leak_check():
        with FakeDevice() as fake:
            async with aionn.Runtime() as runtime:
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(lambda: runtime.compile(model, devices=(fake.name,)))
                    pid = await until_a_driver_runs()
                    tasks.cancel_scope.cancel()
                async with anyio.create_task_group() as tasks:
                    for _ in range(2):
                        tasks.start_soon(lambda: runtime.compile(model, devices=(fake.name,)))
                assert driver_pids() == [pid]


async def test_a_runtime_that_closes_during_a_start_tells_so_and_ends_the_driver(model: aionn.Model) -> None:
    async with leak_check():
        told: list[str] = []
        with FakeDevice() as fake:
            async with anyio.create_task_group() as tasks, aionn.Runtime() as runtime:

                async def compile_it() -> None:
                    with pytest.raises(CallerError) as caught:
                        await runtime.compile(model, devices=(fake.name,))
                    told.append(str(caught.value))

                tasks.start_soon(compile_it)
                await until_a_driver_runs()
        assert told == ["the runtime was closed"]


async def test_whoever_asks_for_a_dead_driver_while_the_runtime_closes_starts_none(model: aionn.Model) -> None:
    async with leak_check():
        with FakeDevice() as fake:
            for steps in range(8):  # so many turns of the loop the asking is ahead of the closing
                async with aionn.Runtime() as runtime:
                    await runtime.compile(model, devices=(fake.name,))
                    (device,) = (device for device in runtime.devices if device.pid is not None)
                    (pid,) = driver_pids()
                    os.kill(pid, signal.SIGKILL)
                    with anyio.fail_after(30):
                        while device.pid is not None:
                            await anyio.lowlevel.checkpoint()
                    devices = runtime._opened.devices

                    async def ask(devices: Devices = devices) -> None:
                        with suppress(CallerError, DriverDiedError):
                            await devices.get(fake.name)

                    runtime._opened._tasks.start_soon(ask)
                    for _ in range(steps):
                        await anyio.lowlevel.checkpoint()


async def test_a_driver_that_does_not_greet_in_time_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_module, "START_S", 0.0)
    async with leak_check(), anyio.create_task_group() as tasks:
        devices = Devices(tasks)
        with anyio.fail_after(30), pytest.raises(DriverHungError):
            await devices.get("reference")
        await devices.aclose()


async def test_what_keeps_an_engine_from_starting_is_one_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "odd_engines.py").write_text(
        "class NoVersion:\n    name = 'odd'\n\n\nclass Raises:\n    def __init__(self):\n        raise RuntimeError('no such card')\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    async with leak_check(), anyio.create_task_group() as tasks:
        devices = Devices(tasks)
        for name, word in (
            ("odd_engines:NoVersion", "version"),
            ("odd_engines:Raises", "no such card"),
            ("odd_engines:Absent", "Absent"),
            ("no_such_module_at_all:X", "PYTHONPATH"),
        ):
            with pytest.raises(DeviceUnavailableError, match=word) as caught:
                await devices.get(name)
            assert "\n" not in str(caught.value)
        assert all(":" not in device.name for device in devices.known)
        monkeypatch.setattr(sys, "executable", "")
        with pytest.raises(DeviceUnavailableError, match=r"sys\.executable"):
            await devices.get("reference")
        monkeypatch.setattr(sys, "executable", str(tmp_path / "nothing"))
        with pytest.raises(DeviceUnavailableError, match="cannot start"):
            await devices.get("reference")
        await devices.aclose()


async def test_a_compile_that_times_out_is_cancelled_in_the_driver_and_a_later_one_works(model: aionn.Model) -> None:
    async with leak_check():
        with FakeDevice() as fake:
            async with aionn.Runtime() as runtime:
                await runtime.compile(model, devices=(fake.name,))
                (pid,) = driver_pids()
                fake.delay(3600, "compile")  # ends only by its cancel flag
                with anyio.fail_after(30), pytest.raises(DeadlineError):
                    await runtime.compile(model, devices=(fake.name,), timeout_s=0.1)
                fake.behave()
                compilation = await runtime.compile(model, devices=(fake.name,))
                assert driver_pids() == [pid]
                assert set(await compilation.compute(X)) == {"input_out"}


async def test_a_driver_that_stands_still_over_a_compile_is_killed_for_that_and_not_by_the_deadline(model: aionn.Model) -> None:
    async with leak_check():
        with FakeDevice() as fake:
            async with aionn.Runtime(hang_s=0.2) as runtime:
                await runtime.compile(model, devices=(fake.name,))
                (pid,) = driver_pids()
                os.kill(pid, signal.SIGSTOP)
                with pytest.raises(DeadlineError):
                    await runtime.compile(model, devices=(fake.name,), timeout_s=0.1)
                assert driver_pids() == [pid]
                assert await ended(pid, 30)
                with anyio.fail_after(30):
                    try:
                        await runtime.compile(model, devices=(fake.name,))
                    except (DriverHungError, DriverDiedError):
                        await runtime.compile(model, devices=(fake.name,))


async def test_a_driver_killed_while_onnx_runtime_writes_its_artifact_leaves_no_file(
    model: aionn.Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    temporary, report = tmp_path / "temporary", tmp_path / "report"
    temporary.mkdir()
    for name, value in (("TMPDIR", temporary), ("AIONN_TEST_KILLED_ENGINE", report), ("PYTHONPATH", Path(__file__).parents[2])):
        monkeypatch.setenv(name, str(value))
    report.touch()
    device = "tests.runtime.killed_engine:KilledWhileItCompiles"
    needs = {device: Needs(devices=(str(report),))}  # where it may write
    async with leak_check(), aionn.Runtime(engine_needs=needs) as runtime:
        with pytest.raises(DriverDiedError) as caught:
            await runtime.compile(model, devices=(device,), cache_dir=tmp_path / "cache", token=model.token)
        assert caught.value.exit_code == -signal.SIGKILL
        del caught
    written = [int(line) for line in report.read_text(encoding="ascii").split()]
    assert written
    assert min(written) > 0
    assert list(temporary.iterdir()) == []


async def test_models_compiled_at_once_on_a_fresh_driver_all_compile() -> None:
    """The operators that ONNX Runtime knows are collected when the first model asks."""
    models = [aionn.Model.from_onnx(carried("orientation")) for _ in range(8)]
    async with leak_check(), aionn.Runtime() as runtime:
        found: list[aionn.Compilation] = []

        async def compile_one(model: aionn.Model) -> None:
            found.append(await runtime.compile(model, devices=("onnxruntime",)))

        async with anyio.create_task_group() as tasks:
            for model in models:
                tasks.start_soon(compile_one, model)
        assert len(found) == 8


async def test_a_collected_compilation_is_released_in_the_driver(model: aionn.Model) -> None:
    async with leak_check():
        with FakeDevice() as fake:
            async with aionn.Runtime() as runtime:
                for _ in range(3):
                    compilation = await runtime.compile(model, devices=(fake.name,))
                    await compilation.compute(X)
                    del compilation
                    gc.collect()
                kept = await runtime.compile(model, devices=(fake.name,))
                with anyio.fail_after(30):
                    while next(d for d in runtime.devices if d.name == fake.name).statistics()["calls_in_flight"]:
                        await anyio.lowlevel.checkpoint()
                assert set(await kept.compute(X)) == {"input_out"}


async def test_errors_leave_the_runtime_as_themselves(model: aionn.Model) -> None:
    mine = KeyError("mine")
    group = ExceptionGroup("mine too", [ValueError("inner")])
    for error in (mine, group):
        with pytest.raises((KeyError, ExceptionGroup)) as caught:
            async with aionn.Runtime():
                raise error
        assert caught.value is error


async def test_bad_options_are_the_callers_error(model: aionn.Model) -> None:
    options: list[dict[str, Any]] = [
        {"devices": 5},
        {"devices": (3,)},
        {"devices": ("",)},
        {"devices": "onnxruntime"},
        {"timeout_s": float("nan")},
        {"timeout_s": "soon"},
        {"timeout_s": 0},
        {"priority": []},
        {"preference": None},
        {"cache_dir": "somewhere", "token": "x" * 32},
        {"cache_dir": 5, "token": bytes(32)},
    ]
    async with aionn.Runtime() as runtime:
        for option in options:
            with pytest.raises(CallerError) as caught:
                await runtime.compile(model, **option)
            assert "\n" not in str(caught.value)
        with FakeDevice() as fake:
            compilation = await runtime.compile(model, devices=(fake.name,), timeout_s=float("inf"))
            for timeout_s in (float("nan"), -1, "soon"):
                with pytest.raises(CallerError):
                    await compilation.compute(X, timeout_s=timeout_s)  # type: ignore[arg-type]
            assert set(await compilation.compute(X, timeout_s=1e30)) == {"input_out"}


async def test_a_failing_compile_is_one_sentence_and_the_driver_goes_on(model: aionn.Model) -> None:
    async with leak_check():
        with FakeDevice() as fake:
            async with aionn.Runtime() as runtime:
                fake.fail("no luck", "compile")
                with pytest.raises(CompilationError, match="luck"):
                    await runtime.compile(model, devices=(fake.name,))
                fake.behave()
                await runtime.compile(model, devices=(fake.name,))


APP = """
import asyncio, os, signal, sys
import numpy as np
{before}
import aionn
from aionn.testing import FakeDevice, identity_model

async def main():
    with FakeDevice() as fake:
        async with aionn.Runtime() as runtime:
            compilation = await runtime.compile(aionn.Model.from_onnx(identity_model()), devices=(fake.name,))
            await compilation.compute({{"input": np.zeros((1, 16), np.float32)}})
            async with compilation.burst() as burst:
                await burst.compute({{"input": np.zeros((1, 16), np.float32)}})

asyncio.run(main())
os._exit(42)
"""


@pytest.mark.parametrize(
    "before",
    [
        "os.close(0)",
        "os.close(0); os.close(1); os.close(2)",
        "[os.close(fd) for fd in range(3)]; os.open('/dev/null', os.O_RDWR)",
        "open('onnxruntime.py', 'w').write('raise SystemExit(3)'); open('msgspec.py', 'w').write('raise SystemExit(3)')",
    ],
    ids=[
        "no stdin",
        "no standard streams",
        "stdin is free, stderr is something else",
        "traps in cwd",
    ],
)
def test_an_odd_app_can_start_drivers(tmp_path: Path, before: str) -> None:
    script = tmp_path / "app" / "main.py"
    script.parent.mkdir()
    script.write_text(textwrap.dedent(APP.format(before=before)))
    cwd = tmp_path / "cwd"
    cwd.mkdir()
    done = subprocess.run([sys.executable, str(script)], cwd=cwd, capture_output=True, timeout=60)
    assert done.returncode == 42, done.stderr.decode()


def test_a_runtime_works_in_two_loops_at_once_and_dies_with_neither(model: aionn.Model) -> None:
    async def life(fake: FakeDevice) -> None:
        async with aionn.Runtime() as one, aionn.Runtime() as two:
            first = await one.compile(model, devices=(fake.name,))
            second = await two.compile(model, devices=(fake.name,))
            assert len(driver_pids()) == 2
            await one._opened.devices.aclose()
            with pytest.raises(CallerError):
                await first.compute(X)
            await second.compute(X)

    with leak_check(), FakeDevice() as fake:
        asyncio.run(life(fake))


ENDING_SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGINT)


async def test_signals_to_a_driver_from_its_first_instruction_on_do_not_end_it(model: aionn.Model) -> None:
    async with leak_check():
        with FakeDevice() as fake:
            async with aionn.Runtime() as runtime:
                sent = 0
                compiled = anyio.Event()

                async def compile_it() -> None:
                    await runtime.compile(model, devices=(fake.name,))
                    compiled.set()

                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(compile_it)
                    pid = await until_a_driver_runs()
                    while not compiled.is_set():
                        for number in ENDING_SIGNALS:
                            os.kill(pid, number)
                            sent += 1
                        await anyio.lowlevel.checkpoint()
                assert sent >= len(ENDING_SIGNALS)
                assert driver_pids() == [pid]


DRAINING_APP = """
import asyncio, os, signal
import numpy as np
import aionn
from aionn.testing import FakeDevice, identity_model

async def main():
    told = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        asyncio.get_running_loop().add_signal_handler(number, told.set)
    x = {"input": np.zeros((1, 16), np.float32)}
    with FakeDevice() as fake:
        async with aionn.Runtime(start=()) as runtime:
            compilation = await runtime.compile(aionn.Model.from_onnx(identity_model()), devices=(fake.name,))
            async with compilation.burst() as burst:
                await burst.compute(x)
                print("at work", flush=True)
                await told.wait()
                for _ in range(20):
                    await burst.compute(x)
                    await compilation.compute(x)
                assert [device.statistics()["starts"] for device in runtime.devices if device.pid] == [1]
    print("drained", flush=True)

asyncio.run(main())
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT], ids=lambda number: number.name)
def test_an_app_drains_on_its_drivers_when_its_process_group_is_signalled(number: signal.Signals) -> None:
    """systemd, `timeout` and `tini -g` signal the whole group; the app answers what it has begun, and its drivers end with it."""
    with leak_check():
        app = App([sys.executable, "-c", DRAINING_APP], stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True)
        try:
            assert app.stdout is not None
            assert app.stdout.readline() == b"at work\n"
            os.killpg(app.pid, number)
            out, complaints = app.communicate(timeout=60)
        finally:
            app.kill()
            app.wait()
        assert (app.returncode, out, complaints) == (0, b"drained\n", b"")


SNIFFIO = """
import asyncio, contextvars, threading

class AsyncLibraryNotFoundError(RuntimeError):
    pass

class _Local(threading.local):
    name = None

thread_local = _Local()
current_async_library_cvar = contextvars.ContextVar("current_async_library_cvar", default=None)

def current_async_library():
    found = thread_local.name or current_async_library_cvar.get()
    try:
        found = found or (asyncio.current_task() and "asyncio")
    except RuntimeError:  # no loop runs in this thread
        pass
    if not found:
        raise AsyncLibraryNotFoundError
    return found
"""
"""What anyio asks in a process where sniffio is installed: a callback of the loop has no current task."""


async def test_drivers_work_where_sniffio_is_installed(tmp_path: Path) -> None:
    (tmp_path / "sniffio.py").write_text(SNIFFIO)
    async with leak_check(), aionn.Runtime(start=(), driver_env={"PYTHONPATH": str(tmp_path)}) as runtime:
        compilation = await runtime.compile(aionn.Model.from_onnx(identity_model()), devices=("onnxruntime",))
        x = np.ones((1, 16), np.float32)
        assert np.array_equal((await compilation.compute({"input": x}))["input_out"], x)


async def test_a_driver_that_does_not_end_when_it_is_killed_is_left_to_the_system(
    model: aionn.Model, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As one that waits for a disk or a device. The signal is kept from it here."""
    monkeypatch.setattr(process_module, "KILL_S", 0.3)
    send = Child.signal
    monkeypatch.setattr(Child, "signal", lambda child, number: None if number == signal.SIGKILL else send(child, number))
    with FakeDevice() as fake:
        async with aionn.Runtime(hang_s=0.3) as runtime:
            compilation = await runtime.compile(model, devices=(fake.name,))
            (pid,) = driver_pids()
            fake.hang()
            with anyio.fail_after(60), pytest.raises(DriverHungError):
                await compilation.compute(X)
            assert "does not end, even killed" in caplog.text
            assert pid in driver_pids()
            fake.behave()
            assert set(await compilation.compute(X)) == {"input_out"}
            monkeypatch.undo()
            os.kill(pid, signal.SIGKILL)
            await anyio.to_thread.run_sync(os.waitpid, pid, 0)
