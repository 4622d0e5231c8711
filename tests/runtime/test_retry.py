"""`compute(retry=)`: a stateless call is made again after its driver's death, of a compilation and of a burst."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import AsyncIterator
from types import MappingProxyType
from typing import Any

import anyio
import numpy as np
import pytest

import aionn
from aionn.runtime.executing.retrying import Retries
from aionn.testing import FakeDevice, identity_model

pytestmark = pytest.mark.anyio
X = {"input": np.ones((1, 16), np.float32)}


@pytest.fixture
async def compilation(fake: FakeDevice) -> AsyncIterator[aionn.Compilation]:
    async with aionn.Runtime(hang_s=2) as runtime:
        yield await runtime.compile(aionn.Model.from_onnx(identity_model()), devices=(fake.name,))


async def killed(fake: FakeDevice, deaths: int) -> None:
    """Kill as many drivers, each in the midst of a run. The run after them is quick."""
    for number in range(deaths):
        os.kill(await fake.heard("run"), signal.SIGKILL)
        if number == deaths - 1:
            fake.behave()


async def call_of(compilation: aionn.Compilation, way: str, burst: aionn.Burst) -> Any:
    return compilation.compute if way == "compute" else burst.compute


@pytest.mark.parametrize("way", ["compute", "burst"])
@pytest.mark.parametrize(("deaths", "retry"), [(1, 1), (2, 2), (1, 0), (2, 1)])
async def test_a_call_survives_as_many_deaths_as_it_may_retry(
    compilation: aionn.Compilation, fake: FakeDevice, way: str, deaths: int, retry: int
) -> None:
    counted: list[None] = []
    async with compilation.burst() as burst:
        call = await call_of(compilation, way, burst)
        fake.hang("run")
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(killed, fake, min(deaths, retry + 1))
            if retry >= deaths:
                outputs = await call(X, retry=Retries(retry, lambda: counted.append(None)))
                assert np.array_equal(outputs["input_out"], X["input"])
                assert len(counted) == deaths
            else:
                with pytest.raises(aionn.DriverDiedError):
                    await call(X, retry=retry)


@pytest.mark.parametrize("way", ["compute", "burst"])
async def test_a_hung_driver_is_no_reason_to_call_again(compilation: aionn.Compilation, fake: FakeDevice, way: str) -> None:
    counted: list[None] = []
    async with compilation.burst() as burst:
        call = await call_of(compilation, way, burst)
        fake.hang("run", with_gil=True)
        with pytest.raises(aionn.DriverHungError):
            await call(X, retry=Retries(1, lambda: counted.append(None)))
        assert counted == []
        fake.behave()
        await call(X)


async def test_one_deadline_is_over_all_calls(compilation: aionn.Compilation, fake: FakeDevice) -> None:
    async with compilation.burst() as burst:
        fake.hang("run")
        began = time.monotonic()
        async with anyio.create_task_group() as tasks:

            async def kill_once() -> None:
                os.kill(await fake.heard("run"), signal.SIGKILL)

            tasks.start_soon(kill_once)
            with pytest.raises(aionn.DeadlineError):
                await burst.compute(X, retry=5, timeout_s=1.5)
        assert time.monotonic() - began >= 1.4
        fake.behave()


async def test_a_call_with_device_memory_has_no_retry(compilation: aionn.Compilation) -> None:
    state = await compilation.allocate(inputs=("input",), outputs=("input_out",))
    async with compilation.burst() as burst:
        for call in (compilation.compute, burst.compute):
            with pytest.raises(aionn.CallerError, match="retry with device memory; its contents end with the driver"):
                await call({"input": state}, retry=1)
            with pytest.raises(aionn.CallerError, match="retry with device memory"):
                await call(MappingProxyType({"input": state}), retry=1)
            with pytest.raises(aionn.CallerError, match="retry with device memory"):
                await call(X, outputs={"input_out": state}, retry=1)
            wrong: Any
            for wrong in (-1, "once", 1.5):
                with pytest.raises(aionn.CallerError, match=f"compute: retry={wrong!r}; give a whole number, at least 0"):
                    await call(X, retry=wrong)


async def test_a_frame_with_a_memory_is_sent_again_and_one_with_device_memory_is_refused(
    compilation: aionn.Compilation, fake: FakeDevice
) -> None:
    async with compilation.burst() as burst, burst.frame() as frame:
        with aionn.Memory.allocate(64) as memory:
            memory.array(np.float32, (1, 16))[:] = 5
            frame["input"] = memory
            fake.hang("run")
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(killed, fake, 1)
                outputs = await burst.compute(frame, retry=1)
            assert np.array_equal(outputs["input_out"], np.full((1, 16), 5, np.float32))
        state = await compilation.allocate(inputs=("input",))
        await state.copy_from(X["input"])
        frame["input"] = state
        with pytest.raises(aionn.CallerError, match="retry with device memory"):
            await burst.compute(frame, retry=1)


async def test_a_frame_is_sent_again_as_it_is(compilation: aionn.Compilation, fake: FakeDevice) -> None:
    async with compilation.burst() as burst, burst.frame() as frame:
        frame["input"][:] = 7
        fake.hang("run")
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(killed, fake, 1)
            outputs = await burst.compute(frame, retry=1)
        assert float(outputs["input_out"][0, 0]) == 7
