"""Hung or busy: the judge by itself, on made-up observations, then real drivers that hang, compute, wait and stand still."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import anyio.to_thread
import numpy as np
import pytest
from numpy.typing import NDArray

import aionn
from aionn.pages.layout import Activity, ShownExecution
from aionn.pages.page import BEAT_S
from aionn.runtime.processes.devices import Device
from aionn.runtime.processes.liveness import Evidence, Hang, Judge, Witness
from aionn.testing import FakeDevice, identity_model
from tests.leaks import driver_pids, leak_check
from tests.runtime.uneven_engine import Accelerator, UnevenEngine
from tests.stopping import stop

S = 10**9


class Case:
    """A driver as a judge is shown it: one tick of the watch after the other."""

    def __init__(self, *, hang_s: float = 10.0, cpu_decides: bool = True, when_idle: bool = False) -> None:
        self.now_ns = 1000 * S
        self.judge = Judge(hang_s, cpu_decides, self.now_ns, when_idle)
        self.executing: tuple[ShownExecution, ...] = ()
        self.finished = 0
        self.ended_ns = 0
        self.heartbeat_ns: int | None = None
        self.state = "idle"
        self.runnable = False
        self.cpu_share = 0.0
        self.cpu_ns = 0
        self.usual: float | None = None
        self.visible = True

    def begin(self, slot: int = 0, number: int = 1) -> None:
        self.executing = (*self.executing, ShownExecution(slot, number, self.now_ns))

    def end(self, slot: int = 0) -> None:
        self.executing = tuple(execution for execution in self.executing if execution.slot != slot)
        self.finished += 1
        self.ended_ns = self.now_ns

    def tick(self, seconds: float | None = None) -> Hang | None:
        if seconds is None:
            seconds = self.judge.next_look_s
        self.now_ns += int(seconds * S)
        self.cpu_ns += int(seconds * self.cpu_share * S)
        since_ns = min((execution.since_ns for execution in self.executing), default=self.ended_ns)
        beat_ns = self.now_ns if self.heartbeat_ns is None else self.heartbeat_ns
        state: Any = "executing" if self.executing else self.state
        activity = Activity(state, since_ns, self.executing, self.finished, self.ended_ns, beat_ns)
        evidence = Evidence(self.runnable, self.cpu_ns) if self.visible else None
        return self.judge.observe(self.now_ns, activity, lambda: evidence, lambda slot: self.usual)

    def hung_after(self, seconds: float) -> float | None:
        """Seconds until it counts as hung; None: it does not within that time."""
        began_ns = self.now_ns
        while self.now_ns - began_ns < seconds * S:
            if self.tick() is not None:
                return (self.now_ns - began_ns) / S
        return None


@pytest.mark.parametrize("hang_s", [0.1, 1.0, 10.0, 100.0])
def test_an_execution_without_cpu_time_or_end_is_hung_after_hang_s_and_not_much_later(hang_s: float) -> None:
    case = Case(hang_s=hang_s)
    assert case.hung_after(5 * hang_s) is None
    case.begin()
    after_s = case.hung_after(2 * hang_s)
    assert after_s is not None
    assert hang_s <= after_s <= 1.02 * hang_s


def test_an_execution_that_began_right_after_another_ended_is_counted_from_its_beginning() -> None:
    case = Case(hang_s=1.0)
    case.begin(number=1)
    case.tick()
    case.end()
    case.begin(number=2)
    after_s = case.hung_after(3)
    assert after_s is not None
    assert 1.0 <= after_s <= 1.02


def test_a_driver_that_computes_is_busy_however_long_it_takes() -> None:
    case = Case()
    case.begin()
    case.cpu_share = 0.02
    assert case.hung_after(3600) is None
    case.cpu_share = 0.0  # and hangs then
    assert case.hung_after(30) is not None


def test_a_driver_that_uses_less_than_a_hundredth_of_a_cpu_does_nothing() -> None:
    case = Case()
    case.begin()
    case.cpu_share = 0.005
    assert case.hung_after(30) is not None


def test_a_driver_that_waits_for_a_cpu_or_a_disk_is_not_hung() -> None:
    case = Case()
    case.usual = 0.001
    case.begin()
    case.runnable = True
    assert case.hung_after(3600) is None


def test_a_driver_that_finishes_something_else_meanwhile_is_not_hung() -> None:
    case = Case(hang_s=1.0)
    case.begin(slot=0)
    for _ in range(20):
        case.begin(slot=1)
        assert case.hung_after(0.5) is None
        case.end(slot=1)
    assert case.hung_after(2) is not None


def test_an_app_that_was_stopped_does_not_count_that_time() -> None:
    case = Case()
    case.usual = 0.001
    case.begin()
    for _ in range(4):
        assert case.tick(3600) is None  # Ctrl-Z, a suspended machine, a loop that was blocked
    assert case.hung_after(10) is not None


@pytest.mark.parametrize("since_s", [0, 1, 1800])
def test_a_verdict_tells_the_time_that_the_watch_has_counted_whatever_the_page_says(since_s: int) -> None:
    """The page may be damaged, so that a run seems to have begun with the machine, or in the future."""
    for usual, why in ((None, "has finished nothing and used no CPU for 10.0 s"), (0.001, "executes one request for 1")):
        case = Case(cpu_decides=usual is None)
        case.usual = usual
        case.executing = (ShownExecution(0, 1, since_s * S),)
        hang = None
        while hang is None:
            hang = case.tick()
        assert hang.why.startswith(why)
        assert 10 <= hang.waited_s < 12
        if since_s > 1000:
            break  # a run that has not begun yet is not slow


def test_a_driver_on_an_accelerator_is_judged_by_its_own_history_only() -> None:
    case = Case(cpu_decides=False)
    case.begin()
    assert case.hung_after(3600) is None  # a first run
    case.usual = 300.0
    assert case.hung_after(2000) is None
    assert case.hung_after(6000) is not None
    short = Case(cpu_decides=False)
    short.usual = 0.001
    short.begin()
    after_s = short.hung_after(60)
    assert after_s is not None
    assert 10.0 < after_s <= 11.1  # never before hang_s


@pytest.mark.parametrize("cpu_decides", [True, False])
def test_a_driver_that_has_made_no_progress_for_long_is_not_looked_at_more_often(cpu_decides: bool) -> None:
    """As with `hang_s=None`, or with an accelerator that computes for minutes."""
    case = Case(cpu_decides=cpu_decides)
    case.begin()
    case.hung_after(30)
    assert case.judge.next_look_s >= 0.5


def test_a_run_of_fifteen_times_its_usual_time_is_not_hung_and_one_of_more_than_twenty_is() -> None:
    for share in (0.0, 1.0):
        case = Case(cpu_decides=False)
        case.usual, case.cpu_share = 4.0, share
        case.begin()
        assert case.hung_after(60) is None
        after_s = case.hung_after(60)
        assert after_s is not None
        assert 20.0 <= after_s <= 22.0


def test_a_heartbeat_that_stands_still_means_a_hang_only_while_the_driver_is_idle() -> None:
    case = Case()
    case.tick()
    case.heartbeat_ns = case.now_ns
    for case.state in ("compiling", "loading"):
        assert case.hung_after(700) is None
    case.state = "idle"
    case.runnable = True  # it waits for a CPU
    assert case.hung_after(700) is None
    case.runnable = False
    after_s = case.hung_after(60)
    assert after_s is not None
    assert after_s > 10.0 + 2 * BEAT_S


def test_a_process_that_cannot_be_seen_is_not_judged_by_its_threads() -> None:
    case = Case()
    case.visible = False
    case.begin()
    assert case.hung_after(3600) is None


def test_a_witness_sees_the_cpu_time_and_the_threads_of_the_right_process_only() -> None:
    with open("/proc/self/stat", encoding="utf-8") as file:
        started = int(file.read().rpartition(")")[2].split()[19])
    witness = Witness(os.getpid(), started)
    before = witness.look()
    assert before is not None
    assert before.runnable  # it is looking
    until = time.process_time_ns() + 5_000_000
    while time.process_time_ns() < until:
        pass
    after = witness.look()
    assert after is not None
    assert abs(after.cpu_ns - time.process_time_ns()) < S
    assert after.cpu_ns - before.cpu_ns >= 4_000_000
    assert Witness(os.getpid(), started + 1).look() is None
    assert Witness(2**22 - 1, started).look() is None


# --- real drivers --------------------------------------------------------------------------------------------------------


def numbered(number: float) -> dict[str, NDArray[np.float32]]:
    return {"input": np.full((1, 16), number, np.float32)}


@asynccontextmanager
async def app(
    fake: FakeDevice | None = None, hang_s: float | None = 10.0
) -> AsyncIterator[tuple[FakeDevice, aionn.Compilation, Device, aionn.Runtime]]:
    async with leak_check():
        with fake or FakeDevice() as fake:
            async with aionn.Runtime(hang_s=hang_s) as runtime:
                compilation = await runtime.compile(aionn.Model.from_onnx(identity_model()), devices=(fake.name,))
                (device,) = (device for device in runtime.devices if device.pid)
                yield fake, compilation, device, runtime


@pytest.fixture(autouse=True)
def _engines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))


def hangs_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if record.levelno == logging.WARNING and " hangs: " in record.message]


@pytest.mark.anyio
@pytest.mark.parametrize("with_gil", [False, True], ids=["without the GIL", "with the GIL"])
async def test_a_deadlocked_driver_is_declared_hung_with_its_stacks_and_replaced(caplog: pytest.LogCaptureFixture, with_gil: bool) -> None:
    """Scenario S3: a deadline ends its own call; the driver is judged by what it gets done."""
    async with app(hang_s=1) as (fake, compilation, device, _), compilation.burst() as burst:
        await burst.compute(numbered(1))
        pid = device.pid
        fake.hang(with_gil=with_gil)
        with pytest.raises(aionn.DeadlineError):
            await burst.compute(numbered(2), timeout_s=0.2)
        assert device.pid == pid
        assert burst.statistics()["pinned_frames"] == 1  # the driver may still write into it
        errors: list[BaseException] = []

        async def call(number: int) -> None:
            try:
                await (burst.compute(numbered(number)) if number % 2 else compilation.compute(numbered(number)))
            except aionn.DriverHungError as error:
                errors.append(error)

        with anyio.fail_after(20):
            async with anyio.create_task_group() as tasks:
                for number in range(4):
                    tasks.start_soon(call, number)
        assert len(errors) == 4
        for error in errors:
            assert isinstance(error, aionn.DriverHungError)
            assert error.device == fake.name
            assert error.waited_s >= 1
            assert "_stand_still" in error.stack
            assert len(error.stack.encode()) <= 16 * 1024
        del error
        errors.clear()  # their tracebacks hold frames
        assert len(hangs_in(caplog)) == 1
        assert "_stand_still" in hangs_in(caplog)[0]
        fake.behave()
        assert (await burst.compute(numbered(3)))["input_out"][0, 0] == 3
        assert burst.statistics()["pinned_frames"] == 0
        assert device.pid != pid


@pytest.mark.anyio
async def test_a_slow_driver_is_not_killed_by_the_deadline_of_another_stream() -> None:
    async with app() as (fake, compilation, device, _), compilation.burst() as slow, compilation.burst() as hasty:
        await slow.compute(numbered(0))
        pid = device.pid
        fake.delay(0.7)
        late = 0

        async def give_up_often() -> None:
            nonlocal late
            for number in range(6):
                with pytest.raises(aionn.DeadlineError):
                    await (hasty if number % 2 else compilation).compute(numbered(9), timeout_s=0.05)
                late += 1

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(give_up_often)
            for number in range(3):
                assert (await slow.compute(numbered(number)))["input_out"][0, 0] == number
        assert late == 6
        fake.behave()
        assert (await hasty.compute(numbered(5)))["input_out"][0, 0] == 5
        assert (device.pid, device.statistics()["starts"]) == (pid, 1)
        with anyio.fail_after(20):
            while hasty.statistics()["pinned_frames"]:
                await anyio.lowlevel.checkpoint()


@pytest.mark.anyio
async def test_a_long_first_run_that_computes_and_a_long_compile_and_load_are_not_hung(tmp_path: Path) -> None:
    async with app(FakeDevice(UnevenEngine), hang_s=0.2) as (fake, compilation, device, runtime):
        pid = device.pid
        outputs = await compilation.compute(numbered(2200))  # computes for 1.2 s
        assert outputs["input_out"][0, 0] == 2200
        fake.delay(0.8, "compile")
        fake.delay(0.8, "load")
        model = aionn.Model.from_onnx(identity_model())
        for kind in ("miss", "hit"):
            again = await runtime.compile(model, devices=(fake.name,), cache_dir=tmp_path, token=model.token)
            assert again.outcomes[0].kind.value == kind
        assert device.pid == pid


@pytest.mark.anyio
async def test_a_run_that_waits_for_an_accelerator_is_hung_only_by_its_own_history() -> None:
    async with app(FakeDevice(Accelerator), hang_s=0.3) as (fake, compilation, device, _), compilation.burst() as burst:
        pid = device.pid
        fake.delay(1.2, "slow")
        assert (await burst.compute(numbered(-1)))["input_out"][0, 0] == -1  # uses no CPU for four times hang_s
        assert device.pid == pid
        for number in range(200):
            await burst.compute(numbered(number))
        fake.delay(20, "slow")
        with anyio.fail_after(20), pytest.raises(aionn.DriverHungError) as caught:
            await burst.compute(numbered(-1))
        assert "uneven_engine" in caught.value.stack
        del caught  # its traceback holds the frame


@pytest.mark.anyio
async def test_a_driver_that_is_stopped_while_idle_is_killed_and_leaves_no_stack(caplog: pytest.LogCaptureFixture) -> None:
    async with app(hang_s=0.3) as (_, compilation, device, _), compilation.burst() as burst:
        await burst.compute(numbered(1))
        assert device.pid is not None
        stop(device.pid)
        with anyio.fail_after(20), pytest.raises(aionn.DriverHungError) as caught:
            await burst.compute(numbered(2))
        assert caught.value.stack == ""
        del caught  # its traceback holds the frame
        assert len(hangs_in(caplog)) == 1
        assert (await burst.compute(numbered(3)))["input_out"][0, 0] == 3


@pytest.mark.anyio
async def test_without_hang_s_a_hang_is_logged_once_and_ended_by_the_app(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aionn.runtime.processes.process.DEFAULT_HANG_S", 0.2)
    async with app(hang_s=None) as (fake, compilation, device, _), compilation.burst() as burst:
        await burst.compute(numbered(1))
        pid = device.pid
        fake.hang()
        errors: list[aionn.DriverDiedError] = []

        async def call() -> None:
            try:
                await burst.compute(numbered(2))
            except aionn.DriverDiedError as error:
                errors.append(error)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(call)
            with anyio.fail_after(20):
                while not hangs_in(caplog):
                    await anyio.lowlevel.checkpoint()
            activity = device.activity
            assert activity is not None
            assert activity.state == "executing"
            with anyio.move_on_after(0.6):  # it is looked at a few more times
                await anyio.sleep_forever()
            assert device.pid == pid
            await device.restart()
        assert len(hangs_in(caplog)) == 1
        assert device.pid not in (None, pid)
        (error,) = errors
        assert "restarted" in str(error)
        assert error.exit_code == -signal.SIGKILL
        del error
        errors.clear()
        fake.behave()
        assert (await burst.compute(numbered(3)))["input_out"][0, 0] == 3


@pytest.mark.anyio
async def test_restart_ends_a_run_at_full_cpu_and_starts_a_driver_where_none_runs() -> None:
    async with app(FakeDevice(UnevenEngine), hang_s=0.3) as (_, compilation, device, _):
        pid = device.pid
        async with anyio.create_task_group() as tasks:

            async def call() -> None:
                with pytest.raises(aionn.DriverDiedError, match="restarted"):
                    await compilation.compute(numbered(1_000_000))

            tasks.start_soon(call)
            with anyio.fail_after(20):
                while (activity := device.activity) is None or activity.state != "executing":
                    await anyio.lowlevel.checkpoint()
            with anyio.move_on_after(1):  # more than three times hang_s
                await anyio.sleep_forever()
            assert device.pid == pid
            await device.restart()
        assert device.statistics()["last_exit_code"] == -signal.SIGKILL
        assert driver_pids() == [device.pid]
        os.kill(driver_pids()[0], signal.SIGKILL)
        with anyio.fail_after(20):
            while device.pid is not None:
                await anyio.lowlevel.checkpoint()
        await device.restart()
        assert (await compilation.compute(numbered(3)))["input_out"][0, 0] == 3
    with pytest.raises(aionn.CallerError, match="not open"):
        await device.restart()


@pytest.mark.anyio
async def test_restart_is_refused_in_another_loop_and_while_the_runtime_closes() -> None:
    with FakeDevice() as fake:
        runtime = aionn.Runtime()
        await runtime.open()
        await runtime.compile(aionn.Model.from_onnx(identity_model()), devices=(fake.name,))
        (device,) = (device for device in runtime.devices if device.name == fake.name)
        pid = device.pid

        def in_another_loop() -> None:
            with pytest.raises(aionn.CallerError, match="another event loop"):
                asyncio.run(device.restart())

        await anyio.to_thread.run_sync(in_another_loop)
        assert device.pid == pid
        closing = asyncio.ensure_future(runtime.aclose())
        await asyncio.sleep(0)
        with pytest.raises(aionn.CallerError, match="not open"):
            await device.restart()
        await closing
        assert device.statistics()["starts"] == 1


@pytest.mark.parametrize("hang_s", [0, -1, float("nan"), "10", True, 10**400])
def test_hang_s_is_a_positive_number_or_none(hang_s: Any) -> None:
    with pytest.raises(aionn.CallerError, match="hang_s"):
        aionn.Runtime(hang_s=hang_s)
    aionn.Runtime(hang_s=None)
    aionn.Runtime(hang_s=float("inf"))
