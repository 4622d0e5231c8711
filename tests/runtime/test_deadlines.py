"""One deadline goes through a whole call, whatever stands still: the driver, its socket, or the disk under a cache."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest
from numpy.typing import NDArray

import aionn
from aionn.caching.store.directory import CacheDirectory
from aionn.caching.store.housekeeping import Housekeeping
from aionn.runtime.processes.devices import Device
from aionn.testing import FakeDevice, identity_model
from aionn.testing.fake_engine import SecondFakeEngine
from tests.leaks import leak_check
from tests.stopping import holds_the_gil

pytestmark = [pytest.mark.anyio, pytest.mark.both_loops]

ROLES: dict[str, Any] = {"inputs": ("input",), "outputs": ("input_out",)}


def numbered(number: float) -> dict[str, NDArray[np.float32]]:
    return {"input": np.full((1, 16), number, np.float32)}


async def kill(device: Device) -> None:
    """Kill its driver, and return when the app has seen it."""
    pid = device.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    with anyio.fail_after(30):
        while device.pid == pid:
            await anyio.lowlevel.checkpoint()


class Standstill:
    """A driver that stands still with everything in it, after its first process has died. It never counts as hung here."""

    def __init__(self, fake: FakeDevice, compilation: aionn.Compilation, burst: aionn.Burst, state: aionn.DeviceMemory) -> None:
        self.fake = fake
        self.compilation = compilation
        self.burst = burst
        self.state = state
        self.over = False
        self.released = False  # the test has let it go on

    async def late(self, call: Any) -> None:
        """The call ends by its own deadline, while the driver stands still."""
        with anyio.fail_after(30), pytest.raises(aionn.DeadlineError):
            await call
        assert not self.over


@asynccontextmanager
async def standstill() -> AsyncIterator[Standstill]:
    async with leak_check():
        with FakeDevice() as fake:
            async with aionn.Runtime(hang_s=None) as runtime:
                compilation = await runtime.compile(aionn.Model.from_onnx(identity_model()), devices=(fake.name,))
                (device,) = (device for device in runtime.devices if device.pid)
                async with compilation.burst() as busy, compilation.burst() as burst:
                    await burst.compute(numbered(0))
                    await kill(device)
                    await busy.compute(numbered(0))  # has connected to the new driver; `burst` has not
                    state = await compilation.allocate(**ROLES)
                    await state.copy_from(numbered(7)["input"])
                    fake.hang(with_gil=True)
                    here = Standstill(fake, compilation, burst, state)

                    async def run() -> None:
                        await busy.compute(numbered(1))
                        here.over = True

                    async with anyio.create_task_group() as tasks:
                        tasks.start_soon(run)
                        await fake.heard("run")
                        pid = device.pid
                        assert pid is not None
                        await holds_the_gil(pid)
                        yield here
                        assert device.pid == pid
                        assert here.released or not here.over
                        fake.behave()
                    assert here.over
                    assert (await burst.compute(numbered(2)))["input_out"][0, 0] == 2
                    assert device.pid == pid
                    with anyio.fail_after(30):
                        while burst.statistics()["pinned_frames"]:
                            await anyio.lowlevel.checkpoint()


async def test_a_burst_that_reconnects_to_a_driver_that_stands_still_keeps_the_callers_deadline() -> None:
    async with standstill() as here, anyio.create_task_group() as tasks:
        for _ in range(3):  # one connects, the others wait for it
            tasks.start_soon(here.late, here.burst.compute(numbered(1), timeout_s=0.1))


async def test_a_frame_and_placed_arguments_keep_the_deadline_too() -> None:
    async with standstill() as here:
        async with here.burst.frame() as frame:
            frame["input"][:] = 1
            await here.late(here.burst.compute(frame, timeout_s=0.1))
        await here.late(here.burst.compute({"input": here.state}, timeout_s=0.1))
        await here.late(here.compilation.compute({"input": here.state}, timeout_s=0.1))
        await here.late(here.compilation.compute(numbered(1), timeout_s=0.1))
        # The second buffer of a state is allocated before its first step.
        await here.late(here.compilation.compute({"input": here.state}, outputs={"input_out": here.state}, timeout_s=0.1))


@pytest.mark.parametrize("policy", ["block", "latest"])
async def test_a_stream_whose_burst_reconnects_keeps_its_deadline(policy: Any) -> None:
    async with standstill() as here:
        dropped = here.burst.statistics()["dropped"]

        async def take() -> None:
            async for _ in here.burst.map([numbered(1)], policy=policy, deadline_s=0.1):
                raise AssertionError("an answer of a driver that stands still")

        with anyio.fail_after(30):
            if policy == "block":
                with pytest.raises(aionn.DeadlineError):
                    await take()
            else:
                await take()
                assert here.burst.statistics()["dropped"] == dropped + 1


async def test_device_memory_keeps_deadlines_and_is_closed_in_bounded_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aionn.runtime.executing.device_memory.CLOSE_S", 0.1)
    async with standstill() as here:
        state = here.state
        await here.late(here.compilation.allocate(**ROLES, timeout_s=0.1))
        await here.late(state.snapshot(timeout_s=0.1))
        await here.late(state.copy_to(timeout_s=0.1))
        await here.late(state.copy_from(numbered(8)["input"], timeout_s=0.1))  # waits for the copy that is under way
        await here.late(state.reset(3, timeout_s=0.1))
        with anyio.fail_after(30):
            await state.aclose()
        with pytest.raises(aionn.CallerError):
            await state.snapshot()


async def test_what_was_late_is_done_later_and_nothing_of_it_is_lost() -> None:
    async with standstill() as here:
        await here.late(here.state.copy_from(numbered(8)["input"], timeout_s=0.1))
        here.fake.behave()
        here.released = True
        with anyio.fail_after(30):
            assert (await here.state.snapshot())[0, 0] == 8


async def test_preparing_again_keeps_the_callers_deadline() -> None:
    async with leak_check():
        with FakeDevice() as fake:
            async with aionn.Runtime(hang_s=None) as runtime:
                compilation = await runtime.compile(aionn.Model.from_onnx(identity_model()), devices=(fake.name,))
                (device,) = (device for device in runtime.devices if device.pid)
                for act in ("start", "supported", "compile"):
                    async with compilation.burst() as burst:
                        await kill(device)
                        fake.hang(act)
                        for call in (
                            burst.compute(numbered(1), timeout_s=0.1),
                            compilation.compute(numbered(1), timeout_s=0.1),
                            compilation.allocate(**ROLES, timeout_s=0.1),
                        ):
                            with anyio.fail_after(30), pytest.raises(aionn.DeadlineError):
                                await call
                        await fake.heard(act)
                        fake.behave()
                        assert (await burst.compute(numbered(3)))["input_out"][0, 0] == 3


@pytest.mark.parametrize("what", ["the index", "the entries"])
async def test_a_staged_compile_on_a_disk_that_hangs_keeps_its_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    asked, go_on = threading.Event(), threading.Event()
    place: Any = Housekeeping if what == "the index" else CacheDirectory
    name = "with_index" if what == "the index" else "find"
    look = getattr(place, name)

    def slow(*arguments: Any, **options: Any) -> Any:
        asked.set()
        assert go_on.wait(60)
        return look(*arguments, **options)

    model = aionn.Model.from_onnx(identity_model())
    with FakeDevice() as quick, FakeDevice(SecondFakeEngine) as best:
        stages = (quick.name, best.name)
        async with aionn.Runtime() as runtime:
            running = [await runtime.compile(model, devices=(stage,)) for stage in stages]  # the deadline is not for starts of drivers
            monkeypatch.setattr(place, name, slow)
            try:
                with anyio.fail_after(30):  # the disk answers after that only
                    compilation = await runtime.compile(
                        model, mode="staged", stages=stages, cache_dir=tmp_path, token=model.token, timeout_s=2.0
                    )
                    assert set(await compilation.compute(numbered(1))) == {"input_out"}
            except aionn.DeadlineError:
                assert asked.is_set()
            finally:
                go_on.set()
            assert len(running) == 2
    assert asked.is_set()
