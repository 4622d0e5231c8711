"""A burst that is never closed: collected and freed when the app drops it, and freed with the runtime when the app keeps it."""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import AsyncIterator

import anyio
import numpy as np
import pytest

import aionn
from aionn.remote.device import RemotePreparedModel
from aionn.testing import FakeDevice, identity_model
from tests.leaks import Inventory, leak_check

pytestmark = [pytest.mark.anyio, pytest.mark.both_loops]

INPUTS = {"input": np.ones((1, 16), np.float32)}
MODEL = aionn.Model.from_onnx(identity_model())


@pytest.fixture
async def compilation(fake: FakeDevice) -> AsyncIterator[aionn.Compilation]:
    async with aionn.Runtime() as runtime:
        yield await runtime.compile(MODEL, devices=(fake.name,))


def held_by_the_driver(compilation: aionn.Compilation) -> tuple[int, int]:
    """Descriptors and shared mappings of the driver process."""
    serving = compilation._parts.compiled.serving
    assert serving is not None
    pid = next(device.pid for device in compilation._parts.session.devices.known if device.name == serving.device)
    with open(f"/proc/{pid}/maps", encoding="utf-8") as maps:
        return len(os.listdir(f"/proc/{pid}/fd")), sum("memfd:aionn" in line for line in maps)


@pytest.mark.parametrize("used", ["opened", "computed", "streamed"])
async def test_a_burst_that_is_dropped_is_collected_and_leaves_nothing_here_or_in_the_driver(
    compilation: aionn.Compilation, used: str
) -> None:
    async with compilation.burst() as burst:  # what the first burst makes once
        await burst.compute(INPUTS)
    await compilation.compute(INPUTS)  # over a burst that stays open
    assert compilation._parts.compiled.serving is not None
    prepared = compilation._parts.compiled.serving.prepared
    assert isinstance(prepared, RemotePreparedModel)
    kept = {*prepared.device._bursts}
    here, there = Inventory.take(), held_by_the_driver(compilation)

    burst = await compilation.burst().__aenter__()
    assert len(Inventory.take().since(here)) >= 3  # its eventfds, and two mappings
    if used == "computed":
        await burst.compute(INPUTS)
        await burst.compute({**INPUTS}, measure_timing=True)
    elif used == "streamed":
        assert [result.seq async for result in burst.map([INPUTS] * 3)] == [0, 1, 2]
    dropped = weakref.ref(burst)
    del burst
    await anyio.wait_all_tasks_blocked()  # the stream's own task ends a turn of the loop after its last result
    gc.collect()
    assert dropped() is None
    await anyio.wait_all_tasks_blocked()
    gc.collect()  # views in reference cycles are garbage, not leaks
    assert Inventory.take().since(here) == []
    with anyio.fail_after(30):
        # The driver may have still held something of the first burst when `there` was counted.
        while any(now > before for now, before in zip(held_by_the_driver(compilation), there, strict=True)):
            await compilation.compute(INPUTS)
    assert {*prepared.device._bursts} == kept


async def test_a_burst_that_is_kept_is_freed_with_its_runtime(fake: FakeDevice) -> None:
    async with leak_check():
        async with aionn.Runtime() as runtime:
            compilation = await runtime.compile(MODEL, devices=(fake.name,))
            burst = await compilation.burst().__aenter__()
            await burst.compute(INPUTS)
        with pytest.raises(aionn.CallerError):
            await burst.compute(INPUTS)
    await burst.aclose()
