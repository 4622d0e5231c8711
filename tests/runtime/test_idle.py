"""`compile(idle_s=)`: an unused compilation gives its driver's memory back, its next use loads it again, and an idle driver ends."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import weakref
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import psutil
import pytest

import aionn
from aionn import trace
from aionn.hal.types import Priority
from aionn.runtime.preparing.kept_model import LOOKS, Idling
from aionn.testing import FakeDevice, identity_model
from tests.leaks import driver_pids, leak_check
from tests.runtime.idling_app import IDLE_S, SHAPE, asleep, device_of, idle, kinds, until, x
from tests.scaled_model import scaled_model
from tests.stopping import kill_under

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


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> Callable[[], Awaitable[None]]:
    """Returns what waits until an unused compilation would have been given back twice."""
    count, more = 0, anyio.Event()
    real = Idling._rested

    def counted(self: Idling) -> Any:
        nonlocal count, more
        count += 1
        more.set()
        more = anyio.Event()
        return real(self)

    async def wait() -> None:
        enough = count + 2 * (LOOKS + 1)
        while count < enough:
            await more.wait()

    monkeypatch.setattr(Idling, "_rested", counted)
    return wait


# --- what it does ------------------------------------------------------------------------------------------------------


async def test_an_unused_compilation_is_given_back_and_its_next_use_is_a_hit(
    fake: FakeDevice, model: aionn.Model, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aionn.runtime.processes.process.GRACE_S", 60.0)  # a driver on a busy machine is not killed while it ends
    caplog.set_level(logging.INFO, "aionn")
    with trace.record() as recording:
        async with leak_check(), aionn.Runtime() as runtime:
            device = device_of(runtime, fake.name)
            compilation = await idle(runtime, model, fake, tmp_path / "cache")
            assert kinds(compilation) == ["MISS"]
            for starts in (1, 2, 3):
                assert (await compilation.compute(x(starts)))["y"][0, 0] == starts
                assert kinds(compilation) == ["MISS" if starts == 1 else "HIT"]
                assert device.statistics()["starts"] == starts
                await until(lambda: device.pid is None and not driver_pids())
                assert asleep(compilation)
                assert compilation.device == fake.name
                await until(lambda: device.statistics()["last_exit_code"] == 0)
    assert recording.total("compilation.idle") == 3
    assert recording.total("burst.failed") == 0
    assert {record.levelno for record in caplog.records} == {logging.INFO}
    assert len([record for record in caplog.records if "no compilation needs it now" in record.message]) == 3


async def test_an_open_silent_burst_sleeps_too_and_goes_on(fake: FakeDevice, model: aionn.Model, tmp_path: Path) -> None:
    async with leak_check(), aionn.Runtime() as runtime:
        compilation = await idle(runtime, model, fake, tmp_path / "cache")
        async with compilation.burst() as burst:
            held = []
            for number in range(3):
                for _ in range(3):  # the last ones are usual frames
                    held.append((number, await burst.compute(x(number))))
                await until(lambda: asleep(compilation))
            assert burst.statistics()["connections"] == 3
            assert all((outputs["y"] == number).all() for number, outputs in held)
            del held
        assert kinds(compilation) == ["HIT"]


async def test_a_stream_waits_for_its_source_while_the_compilation_sleeps(fake: FakeDevice, model: aionn.Model, tmp_path: Path) -> None:
    async with leak_check(), aionn.Runtime() as runtime:
        compilation = await idle(runtime, model, fake, tmp_path / "cache")

        seen: list[float] = []

        async def source() -> Any:
            for number in range(4):
                yield x(number)
                await until(lambda: len(seen) > number and asleep(compilation))  # noqa: B023

        async with compilation.burst() as burst:
            async for result in burst.map(source()):
                seen.append(float(result.outputs["y"][0, 0]))
                del result
            assert seen == [0, 1, 2, 3]
            assert burst.statistics()["connections"] == 4


async def test_without_a_cache_the_next_use_compiles_again(fake: FakeDevice, model: aionn.Model) -> None:
    async with leak_check(), aionn.Runtime() as runtime:
        compilation = await idle(runtime, model, fake, None)
        fake.tell(outputs_offset=0.0)  # forgets what was heard
        await until(lambda: asleep(compilation))
        assert (await compilation.compute(x(1)))["y"][0, 0] == 1
        await fake.heard("compile")
        assert kinds(compilation) == ["NO_CACHE"]


async def test_concurrent_first_uses_load_once(fake: FakeDevice, model: aionn.Model, tmp_path: Path) -> None:
    async with leak_check(), aionn.Runtime() as runtime:
        compilation = await idle(runtime, model, fake, tmp_path / "cache", idle_s=0.1)
        await until(lambda: asleep(compilation))
        with trace.record() as recording:
            async with compilation.burst() as burst, anyio.create_task_group() as tasks:
                for number in range(20):
                    tasks.start_soon(compilation.compute, x(number))
                    tasks.start_soon(burst.compute, x(number))
        assert recording.total("compile.cache") == 1


async def test_a_jit_compilation_is_given_back_after_its_first_use(fake: FakeDevice, model: aionn.Model, tmp_path: Path) -> None:
    async with leak_check(), aionn.Runtime() as runtime:
        compilation = await idle(runtime, model, fake, tmp_path / "cache", mode="jit")
        for kind in ("MISS", "HIT"):
            await compilation.compute(x(1))
            assert kinds(compilation) == [kind]
            await until(lambda: asleep(compilation))


async def test_a_device_of_low_priority_sleeps_in_its_own_driver(fake: FakeDevice, model: aionn.Model, tmp_path: Path) -> None:
    async with leak_check(), aionn.Runtime() as runtime:
        low = device_of(runtime, fake.name).low_priority
        assert low is not None
        compilation = await idle(runtime, model, fake, tmp_path / "cache", priority="low")
        await compilation.compute(x(1))
        assert low.pid is not None
        await until(lambda: low.pid is None)
        assert (await compilation.compute(x(2)))["y"][0, 0] == 2


@pytest.mark.parametrize("seconds", [0, -1, float("nan"), "1", True, [1]])
async def test_wrong_seconds_are_refused(model: aionn.Model, fake: FakeDevice, seconds: Any) -> None:
    async with aionn.Runtime() as runtime:
        with pytest.raises(aionn.CallerError, match=r"idle_s is .*; give a number of seconds above 0, or None for no limit"):
            await idle(runtime, model, fake, None, idle_s=seconds)
        assert device_of(runtime, fake.name).statistics()["starts"] == 0


async def test_none_and_infinity_keep_it_for_good(model: aionn.Model, fake: FakeDevice) -> None:
    async with leak_check(), aionn.Runtime() as runtime:
        for seconds in (None, float("inf")):
            await runtime.compile(model, devices=(fake.name,), idle_s=seconds)
        assert not [task for task in asyncio.all_tasks() if task.get_name() == "idling"]


# --- what keeps it awake -----------------------------------------------------------------------------------------------


async def test_an_execution_in_flight_keeps_it(
    fake: FakeDevice, model: aionn.Model, tmp_path: Path, looks: Callable[[], Awaitable[None]]
) -> None:
    async with leak_check(), aionn.Runtime() as runtime:
        compilation = await idle(runtime, model, fake, tmp_path / "cache")
        await compilation.compute(x(0))
        fake.hang()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(compilation.compute, x(1))
            await fake.heard("run")
            await looks()
            assert not asleep(compilation)
            fake.behave()
        await until(lambda: asleep(compilation))


async def test_a_leased_frame_keeps_it(fake: FakeDevice, model: aionn.Model, tmp_path: Path, looks: Callable[[], Awaitable[None]]) -> None:
    async with leak_check(), aionn.Runtime() as runtime:
        compilation = await idle(runtime, model, fake, tmp_path / "cache", idle_s=0.2)
        async with compilation.burst() as burst:
            async with burst.frame() as frame:
                frame["x"][:] = 7
                await looks()
                assert not asleep(compilation)
                assert (await burst.compute(frame))["y"][0, 0] == 7
            await until(lambda: asleep(compilation))


async def test_a_device_memory_keeps_it_with_its_contents(
    fake: FakeDevice, model: aionn.Model, tmp_path: Path, looks: Callable[[], Awaitable[None]]
) -> None:
    async with leak_check(), aionn.Runtime() as runtime:
        device = device_of(runtime, fake.name)
        compilation = await idle(runtime, model, fake, tmp_path / "cache", idle_s=0.2)
        memory = await compilation.allocate(inputs=("x",))
        await memory.copy_from(x(5)["x"])
        await looks()
        assert not asleep(compilation)
        assert (await compilation.compute({"x": memory}))["y"][0, 0] == 5
        await memory.aclose()
        await until(lambda: device.pid is None)


async def test_a_device_memory_outlives_its_compilation_and_keeps_the_driver(
    fake: FakeDevice, model: aionn.Model, tmp_path: Path, looks: Callable[[], Awaitable[None]]
) -> None:
    async with leak_check(), aionn.Runtime() as runtime:
        device = device_of(runtime, fake.name)
        other = await runtime.compile(model, devices=(fake.name,))
        memory = await other.allocate(inputs=("x",))
        await memory.copy_from(x(5)["x"])
        await other.aclose()
        compilation = await idle(runtime, model, fake, tmp_path / "cache")
        await until(lambda: asleep(compilation))
        pid = device.pid
        for _ in range(3):
            runtime._opened.devices.end_unused(fake.name, Priority.MEDIUM)
        assert device.pid == pid is not None
        await memory.aclose()
        await until(lambda: device.pid is None)


async def test_a_swap_keeps_it_and_loads_it_if_it_sleeps(fake: FakeDevice, model: aionn.Model, tmp_path: Path) -> None:
    newer = aionn.Model.from_onnx(identity_model({"x": SHAPE}, outputs=["y"]).replace(b"identity_x", b"identity_z"))
    async with leak_check(), aionn.Runtime() as runtime:
        compilation = await idle(runtime, model, fake, tmp_path / "cache")
        async with compilation.burst() as burst:
            await burst.compute(x(1))
            await until(lambda: asleep(compilation))
            fake.delay(0.2, "compile")  # of the worker: ten times as long as the compilation may be unused
            with trace.record() as recording:
                await runtime.swap(compilation, newer)
            assert recording.total("compilation.idle") == 0
            await until(lambda: asleep(compilation))
            assert (await burst.compute(x(2)))["y"][0, 0] == 2
            assert (compilation.model, kinds(compilation)) == (newer, ["HIT"])


async def test_stages_keep_their_history_over_idle_times(quick: FakeDevice, best: FakeDevice, model: aionn.Model, tmp_path: Path) -> None:
    async with leak_check(), aionn.Runtime() as runtime:
        compilation = await idle(runtime, model, quick, tmp_path / "cache", mode="staged", stages=(quick.name, best.name))
        await compilation.compute(x(1))
        await until(lambda: asleep(compilation))
        with trace.record() as recording:
            await compilation.wait_for_stage(best.name, timeout_s=30)
        assert recording.total("compilation.idle") == 0  # the stage was not disturbed
        assert [stage.state for stage in compilation.stages] == ["replaced", "serving"]
        await until(lambda: asleep(compilation))
        await until(lambda: not driver_pids())  # the driver of the stage before has ended, too
        outputs = await compilation.compute(x(3))
        assert (outputs.stage, outputs["y"][0, 0]) == (best.name, 3)
        assert [stage.state for stage in compilation.stages] == ["replaced", "serving"]
        await compilation.wait_for_stage(best.name, timeout_s=1)
        await until(lambda: asleep(compilation))
        await compilation.wait_for_stage(best.name, timeout_s=1)
        assert asleep(compilation)  # what is decided already needs no model


# --- drivers -----------------------------------------------------------------------------------------------------------


async def test_two_compilations_of_one_model_of_which_one_is_used(
    fake: FakeDevice, model: aionn.Model, tmp_path: Path, looks: Callable[[], Awaitable[None]]
) -> None:
    async with leak_check(), aionn.Runtime() as runtime:
        device = device_of(runtime, fake.name)
        used = await runtime.compile(model, devices=(fake.name,), cache_dir=tmp_path / "cache", token=model.token)
        unused = await idle(runtime, model, fake, tmp_path / "cache")
        pid = device.pid
        for number in range(3):
            await until(lambda: asleep(unused))
            assert (await used.compute(x(number)))["y"][0, 0] == number
            assert (await unused.compute(x(number)))["y"][0, 0] == number
            assert device.pid == pid
        await until(lambda: asleep(unused))
        await used.aclose()
        await until(lambda: device.pid is None)


async def test_a_driver_without_such_a_compilation_never_ends(
    fake: FakeDevice, best: FakeDevice, model: aionn.Model, tmp_path: Path
) -> None:
    async with leak_check(), aionn.Runtime() as runtime:
        other = await runtime.compile(model, devices=(best.name,))
        pid = device_of(runtime, best.name).pid
        await other.aclose()
        compilation = await idle(runtime, model, fake, tmp_path / "cache")
        for _ in range(3):
            await compilation.compute(x(1))
            await until(lambda: device_of(runtime, fake.name).pid is None)
        assert device_of(runtime, best.name).pid == pid is not None


async def test_a_driver_in_which_a_model_is_being_prepared_does_not_end(fake: FakeDevice, model: aionn.Model, tmp_path: Path) -> None:
    async with leak_check(), aionn.Runtime() as runtime:
        device = device_of(runtime, fake.name)
        compilation = await idle(runtime, model, fake, tmp_path / "cache")
        pid = device.pid
        other = aionn.Model.from_onnx(identity_model({"x": (3,)}))
        fake.hang("compile")
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(lambda: runtime.compile(other, devices=(fake.name,)))
            await fake.heard("compile")
            await until(lambda: asleep(compilation))
            for _ in range(3):
                runtime._opened.devices.end_unused(fake.name, Priority.MEDIUM)
            assert device.pid == pid is not None
            fake.behave()
        assert device.pid == pid


async def test_an_idle_end_counts_as_no_death(
    fake: FakeDevice, model: aionn.Model, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with leak_check(), aionn.Runtime() as runtime:
        device = device_of(runtime, fake.name)
        compilation = await idle(runtime, model, fake, tmp_path / "cache", idle_s=0.2)
        assert device.pid is not None
        await kill_under(device.pid, lambda: compilation.compute(x(1)))
        caplog.clear()
        await compilation.compute(x(1))
        assert "deaths in a row: 1;" in caplog.text
        caplog.clear()
        await until(lambda: device.pid is None)
        await compilation.compute(x(2))
        assert [record for record in caplog.records if record.levelno > logging.INFO] == []


async def test_the_drivers_memory_falls(tmp_path: Path) -> None:
    large = aionn.Model.from_onnx(scaled_model(np.arange(30_000_000, dtype=np.float32)))
    small = aionn.Model.from_onnx(identity_model({"x": (4,)}))
    async with aionn.Runtime() as runtime:
        other = await runtime.compile(small, devices=("onnxruntime",))
        pid = device_of(runtime, "onnxruntime").pid
        driver = psutil.Process(pid)
        before = driver.memory_full_info().uss
        options: dict[str, Any] = {"cache_dir": tmp_path / "cache", "token": large.token}
        compilation = await runtime.compile(large, devices=("onnxruntime",), idle_s=0.2, **options)
        loaded = driver.memory_full_info().uss
        assert loaded - before > 100e6
        await until(lambda: driver.memory_full_info().uss - before < 30e6)
        assert (asleep(compilation), device_of(runtime, "onnxruntime").pid) == (True, pid)
        outputs = await compilation.compute({"x": np.ones(30_000_000, np.float32)})
        assert outputs["y"][7] == 7
        assert other.device == "onnxruntime"  # held until here, so its driver did not end
        assert kinds(compilation) == ["HIT"]


# --- what holds it ------------------------------------------------------------------------------------------------------


async def test_a_compilation_that_the_app_drops_is_collected_asleep_or_awake(fake: FakeDevice, model: aionn.Model, tmp_path: Path) -> None:
    async with leak_check(), aionn.Runtime() as runtime:
        for sleeps in (False, True):
            compilation = await idle(runtime, model, fake, tmp_path / "cache", idle_s=IDLE_S if sleeps else 1000.0)
            await compilation.compute(x(1))
            if sleeps:
                await until(partial(asleep, compilation))
            dropped = weakref.ref(compilation._parts.kept_model)
            del compilation
            gc.collect()
            assert dropped() is None
            await until(lambda: not [task for task in asyncio.all_tasks() if task.get_name() == "idling"])


@pytest.mark.own_process
async def test_a_forked_child_gives_nothing_back(fake: FakeDevice, model: aionn.Model, tmp_path: Path) -> None:
    async with leak_check(), aionn.Runtime() as runtime:
        compilation = await idle(runtime, model, fake, tmp_path / "cache", idle_s=1000.0)
        parts = compilation._parts
        child = os.fork()
        if not child:
            asyncio.events._set_running_loop(None)
            idling = Idling(parts.session, parts.compiled, (fake.name,), Priority.MEDIUM)
            try:
                asyncio.run(asyncio.wait_for(idling.watch(1e-9), 20))
            except BaseException:
                os._exit(1)
            os._exit(2 if asleep(compilation) else 0)
        _, status = await anyio.to_thread.run_sync(os.waitpid, child, 0)
        assert os.waitstatus_to_exitcode(status) == 0
        assert (await compilation.compute(x(1)))["y"][0, 0] == 1


@pytest.mark.parametrize("use", ["execution", "burst", "swap"])
async def test_a_use_between_any_two_looks_keeps_a_compilation_prepared(fake: FakeDevice, model: aionn.Model, use: str) -> None:
    async with leak_check(), aionn.Runtime() as runtime:
        compilation = await idle(runtime, model, fake, None, idle_s=1000.0)
        parts = compilation._parts
        async with compilation.burst() as burst:
            idling = Idling(parts.session, parts.compiled, (), Priority.MEDIUM)
            for turn in range(2 * (LOOKS + 1)):
                if use == "execution":
                    await compilation.compute(x(turn))
                elif use == "burst":
                    await burst.compute(x(turn))
                else:
                    await runtime.swap(compilation, model)
                await idling._look()
                assert not asleep(compilation)
            for _ in range(LOOKS):
                await idling._look()
            assert asleep(compilation)  # the looks do give back what is not used
            assert (await burst.compute(x(1)))["y"][0, 0] == 1
