"""`priority="low"`: another driver process of the same device, under SCHED_IDLE, with a life of its own."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest

import aionn
from aionn.hal.types import Priority
from aionn.runtime.processes import process as process_module
from aionn.runtime.processes.devices import Device
from aionn.runtime.processes.liveness import waiting_cpu_ns
from aionn.runtime.serving import serving
from aionn.runtime.staging import stages
from aionn.testing import FakeDevice, identity_model
from tests.leaks import driver_pids, leak_check
from tests.runtime.asked_engine import AskedEngine, SecondAskedEngine
from tests.runtime.test_liveness import Case
from tests.scaled_model import scaled_model
from tests.stopping import kill_under

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("surroundings")]

SHAPE = (1, 16)
MODEL = aionn.Model.from_onnx(identity_model({"x": SHAPE}, outputs=["y"]))
FRAME = {"x": np.ones(SHAPE, np.float32)}
PATIENCE_S = 120.0  # a driver under SCHED_IDLE gets what the rest of the machine leaves


@pytest.fixture
def anyio_backend() -> Any:
    return ("asyncio", {"use_uvloop": True})


@asynccontextmanager
async def app(hang_s: float = 10.0) -> AsyncIterator[tuple[FakeDevice, aionn.Runtime, aionn.Compilation, aionn.Compilation]]:
    """An app with the same model at medium and at low priority."""
    with FakeDevice(AskedEngine) as fake:
        async with leak_check(), aionn.Runtime(hang_s=hang_s) as runtime:
            usual = await runtime.compile(MODEL, devices=(fake.name,))
            low = await runtime.compile(MODEL, devices=(fake.name,), priority="low")
            yield fake, runtime, usual, low


def both(runtime: aionn.Runtime) -> tuple[Device, Device]:
    """The device that runs, and its twin for low priority."""
    (device,) = (device for device in runtime.devices if device.pid)
    assert device.low_priority is not None
    return device, device.low_priority


def runs(device: Device) -> bool:
    return device.pid is not None


def schedulers(pid: int | None) -> set[int]:
    found = set()
    for thread in os.listdir(f"/proc/{pid}/task"):
        with suppress(ProcessLookupError):  # it has ended meanwhile
            found.add(os.sched_getscheduler(int(thread)))
    return found


async def test_low_compilations_share_another_process_whose_threads_run_when_the_cpu_is_idle() -> None:
    async with app() as (fake, runtime, usual, low):
        for compilation, priority in ((usual, Priority.MEDIUM), (low, Priority.LOW)):
            async with compilation.burst() as burst:
                assert (await burst.compute(FRAME))["y"][0, 4] == priority
            assert (await compilation.compute(FRAME))["y"][0, 4] == priority
        another = await runtime.compile(MODEL, devices=(fake.name,), priority="low")
        high = await runtime.compile(MODEL, devices=(fake.name,), priority="high")
        assert ((await another.compute(FRAME))["y"][0, 4], (await high.compute(FRAME))["y"][0, 4]) == (Priority.LOW, Priority.HIGH)
        device, twin = both(runtime)
        assert twin.pid not in (None, device.pid)
        assert sorted(driver_pids()) == sorted((device.pid or 0, twin.pid or 0))
        assert (schedulers(device.pid), schedulers(twin.pid)) == ({os.SCHED_OTHER}, {os.SCHED_IDLE})
        # On all CPUs, and no nicer: the scheduling class alone decides.
        assert os.sched_getaffinity(twin.pid or 0) == os.sched_getaffinity(0)


async def test_a_device_that_only_low_compilations_use_has_no_other_process() -> None:
    with FakeDevice(AskedEngine) as fake:
        async with leak_check(), aionn.Runtime() as runtime:
            low = await runtime.compile(MODEL, devices=(fake.name,), priority="low", mode="jit")
            assert (await low.compute(FRAME))["y"][0, 4] == Priority.LOW
            (device,) = (device for device in runtime.devices if device.name == fake.name)
            twin = device.low_priority
            assert twin is not None
            assert (device.pid, device.version, device.statistics()["starts"]) == (None, "1", 0)
            assert (driver_pids(), twin.statistics()["starts"]) == ([twin.pid], 1)
            assert (twin.version, twin.cache_files, twin.type) == (device.version, device.cache_files, device.type)
            assert "priority='low'" in repr(twin)
            assert "priority" not in repr(device)


@pytest.mark.parametrize("victim", ["usual", "low"])
async def test_the_death_of_one_process_leaves_the_other_alone(victim: str) -> None:
    async with app() as (_, runtime, usual, low):
        device, twin = both(runtime)
        dies, lives = (device, twin) if victim == "usual" else (twin, device)
        hit, spared = (usual, low) if victim == "usual" else (low, usual)
        pids = dies.pid, lives.pid
        assert pids[0] is not None
        await kill_under(pids[0], lambda: hit.compute(FRAME))
        await spared.compute(FRAME)
        outputs = await hit.compute(FRAME)
        assert outputs["y"][0, 4] == hit.priority
        assert (dies.statistics()["starts"], dies.statistics()["last_exit_code"]) == (2, -signal.SIGKILL)
        assert (lives.statistics()["starts"], lives.statistics()["last_exit_code"], lives.pid) == (1, None, pids[1])
        assert schedulers(twin.pid) == {os.SCHED_IDLE}


async def test_a_restart_ends_both_processes_and_one_of_the_twin_ends_its_own() -> None:
    async with app() as (_, runtime, usual, low):
        device, twin = both(runtime)
        before = device.pid, twin.pid
        await twin.restart()
        assert device.pid == before[0]
        assert twin.pid not in (None, before[1])
        between = device.pid, twin.pid
        await device.restart()
        assert not {device.pid, twin.pid} & {*between, None}
        for compilation in (usual, low):
            await compilation.compute(FRAME)
        await low.aclose()
    async with app() as (_, runtime, _usual, low):
        device, twin = both(runtime)
        assert twin.pid is not None
        os.kill(twin.pid, signal.SIGKILL)
        with anyio.fail_after(PATIENCE_S):
            while runs(twin):
                await anyio.lowlevel.checkpoint()
        await device.restart()
        assert not runs(twin)  # there was nothing to restart


async def test_a_low_process_that_hangs_is_killed_and_the_usual_one_goes_on() -> None:
    async with app(hang_s=0.5) as (fake, runtime, usual, low):
        device, twin = both(runtime)
        pids = device.pid, twin.pid
        fake.hang()
        with anyio.fail_after(PATIENCE_S), pytest.raises(aionn.DriverHungError) as caught:
            await low.compute(FRAME)
        assert "_stand_still" in caught.value.stack
        del caught  # its traceback holds the frame
        fake.behave()
        assert device.pid == pids[0]
        await usual.compute(FRAME)
        await low.compute(FRAME)
        assert twin.pid not in (None, pids[1])


async def test_closing_ends_both_processes_also_while_they_start_and_compute() -> None:
    async with app() as (fake, runtime, usual, low):
        fake.hang()
        async with anyio.create_task_group() as tasks:

            async def call(compilation: aionn.Compilation) -> None:
                with pytest.raises((aionn.CallerError, aionn.DriverDiedError)):
                    await compilation.compute(FRAME)

            for compilation in (usual, low):
                tasks.start_soon(call, compilation)
                await fake.heard("run")
            await runtime.aclose()
    with FakeDevice(AskedEngine) as fake:
        fake.hang("start")
        async with leak_check(), aionn.Runtime() as runtime, anyio.create_task_group() as tasks:

            async def begin() -> None:
                with pytest.raises(aionn.CallerError, match="closed"):
                    await runtime.compile(MODEL, devices=(fake.name,), priority="low")

            tasks.start_soon(begin)
            await fake.heard("start")
            await runtime.aclose()


async def test_low_and_usual_share_one_cache_entry(tmp_path: Path) -> None:
    with FakeDevice(AskedEngine) as fake:
        async with leak_check(), aionn.Runtime() as runtime:
            cached: dict[str, Any] = {"devices": (fake.name,), "cache_dir": tmp_path / "cache", "token": MODEL.token}
            for priority, kind in (("low", "miss"), ("medium", "hit"), ("low", "hit"), ("high", "hit")):
                compilation = await runtime.compile(MODEL, priority=priority, **cached)  # type: ignore[arg-type]
                assert compilation.outcomes[0].kind.value == kind
                assert (await compilation.compute(FRAME))["y"][0, 4] == Priority[priority.upper()]


async def test_stages_and_swaps_of_a_low_compilation_stay_in_low_processes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(stages, "RUNS", 3)
    monkeypatch.setattr(serving, "MOVE_S", 30.0)  # a low process moves nothing while other tests want both CPUs
    with FakeDevice(AskedEngine) as quick, FakeDevice(SecondAskedEngine) as best:
        async with leak_check(), aionn.Runtime() as runtime:
            cached: dict[str, Any] = {"cache_dir": tmp_path / "cache", "token": MODEL.token}
            compilation = await runtime.compile(
                MODEL,
                mode="staged",
                stages=(quick.name, best.name),
                priority="low",
                **cached,
                stage_policy=aionn.StagePolicy(executions=1, min_gain=None),
            )
            state = await compilation.allocate(inputs=("x",))
            await state.copy_from(FRAME["x"])
            await compilation.compute({"x": state})
            await compilation.wait_for_stage(best.name, timeout_s=30)
            assert (await compilation.compute({"x": state})).stage == best.name
            await runtime.swap(compilation, aionn.Model.from_onnx(scaled_model(np.ones(SHAPE, np.float32))))
            assert (await compilation.compute({"x": state}))["y"][0, 4] == Priority.LOW
            twins = [device.low_priority for device in runtime.devices if device.name in (quick.name, best.name)]
            assert all(twin is not None and schedulers(twin.pid) == {os.SCHED_IDLE} for twin in twins)
            assert [device.pid for device in runtime.devices if device.pid] == []
            assert sorted(driver_pids()) == sorted(twin.pid or 0 for twin in twins if twin is not None)


def test_only_a_process_that_wants_a_cpu_waits_for_one() -> None:
    assert waiting_cpu_ns(os.getpid()) > 0  # it runs just now
    assert waiting_cpu_ns(2**22 - 1) == 0
    ours, theirs = os.pipe()
    with subprocess.Popen(["cat"], stdin=ours, stdout=subprocess.DEVNULL) as asleep:
        os.close(ours)
        try:
            while waiting_cpu_ns(asleep.pid):
                os.sched_yield()
        finally:
            os.close(theirs)


# --- no hang: a process that waits for a CPU ---------------------------------------------------------------------------


@pytest.mark.parametrize(("when_idle", "share", "hung"), [(True, 0.5, False), (True, 0.95, True), (False, 0.5, True), (False, 0.05, False)])
def test_a_run_that_gets_a_part_of_a_cpu_is_too_long_only_without_sched_idle(when_idle: bool, share: float, hung: bool) -> None:
    """On an idle machine a run of many threads takes 0.1 s. Beside busy cores it gets what others leave."""
    case = Case(when_idle=when_idle)
    case.usual = 0.1
    case.begin()
    case.runnable, case.cpu_share = True, share
    assert (case.hung_after(600) is not None) == hung


class Start:
    """What a driver that has not greeted looks like, look after look."""

    def __init__(self, *cpu_ms: int) -> None:
        self.cpu_ms = list(cpu_ms)
        self.looks = 0

    def look(self, _pid: int) -> int:
        self.looks += 1
        return self.cpu_ms.pop(0) * 10**6 if self.cpu_ms else 0


@pytest.mark.parametrize("priority", ["low", "medium"])
async def test_a_driver_that_starts_slowly_is_given_time_while_it_gets_some(monkeypatch: pytest.MonkeyPatch, priority: Any) -> None:
    monkeypatch.setattr(process_module, "START_S", 0.05)
    monkeypatch.setattr(process_module, "_CPU_LOOK_S", 0.01)
    start = Start(10, 20, 30)  # then no more
    with FakeDevice(AskedEngine) as fake:
        fake.hang("start")
        async with leak_check(), aionn.Runtime() as runtime:
            with monkeypatch.context() as patch:
                patch.setattr(process_module, "waiting_cpu_ns", start.look)
                with anyio.fail_after(PATIENCE_S), pytest.raises(aionn.DriverHungError):
                    await runtime.compile(MODEL, devices=(fake.name,), priority=priority)
            assert start.looks == 4
            start.cpu_ms = [10, 20, 30]

            def look(pid: int) -> int:
                fake.behave()  # it greets while it is waited for, and not before it is looked at
                return start.look(pid)

            with monkeypatch.context() as patch:
                patch.setattr(process_module, "_CPU_LOOK_S", 20.0)
                patch.setattr(process_module, "waiting_cpu_ns", look)
                compiled = await runtime.compile(MODEL, devices=(fake.name,), priority=priority)
                assert (await compiled.compute(FRAME))["y"][0, 4] == Priority[priority.upper()]
            assert start.looks == 5
