"""What a runtime counts of devices, stages and caches on its statistics page, as another process would read it."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest

import aionn
from aionn.caching.store import CacheStore
from aionn.events import CompileStep, DriverEnded
from aionn.pages.app_layout import Kind, SlotView
from aionn.pages.finding import FoundPage, find_page
from aionn.testing import FakeDevice, identity_model

pytestmark = pytest.mark.anyio
X = {"input": np.zeros((1, 16), np.float32)}
REASONS = list(aionn.MissReason)


@pytest.fixture
def anyio_backend() -> Any:
    return "asyncio", {"use_uvloop": True}


@pytest.fixture
def model() -> aionn.Model:
    return aionn.Model.from_onnx(identity_model())


@contextmanager
def page() -> Iterator[FoundPage]:
    found = find_page(os.getpid())
    assert found is not None
    with found:
        yield found


def slots(found: FoundPage, kind: Kind) -> list[SlotView]:
    view = found.read()
    assert view is not None
    return [slot for slot in view.slots if slot.kind is kind]


def counted(slot: SlotView) -> dict[str, int]:
    return {name: count for name, count in slot.counters.items() if count}


def reasons(slot: SlotView) -> dict[str, int]:
    return {REASONS[number].value: count for number, count in enumerate(slot.reasons) if count}


async def test_a_device_counts_its_drivers_and_compilations(fake: FakeDevice, model: aionn.Model, tmp_path: Path) -> None:
    async with aionn.Runtime(name="shop") as runtime:
        stream = runtime.events()
        with page() as found:
            compilation = await runtime.compile(model, devices=(fake.name,), cache_dir=tmp_path)
            await runtime.compile(model, devices=(fake.name,), cache_dir=tmp_path)
            (device,) = slots(found, Kind.DEVICE)
            (known,) = (known for known in runtime.devices if known.name == fake.name)
            assert (device.name, device.runtime, device.stage, device.pid) == (fake.name, "shop", "", known.pid)
            assert counted(device) == {"starts": 1, "hit": 1, "miss": 1}
            assert reasons(device) == {"absent": 1}
            assert (sum(device.call_times), device.gauges) == (2, (0, 0))
            os.kill(device.pid, signal.SIGKILL)
            with anyio.fail_after(30):
                async for event in stream:
                    if isinstance(event, DriverEnded):
                        break
            (device,) = slots(found, Kind.DEVICE)
            assert (device.pid, counted(device)["signal"]) == (0, 1)
            await compilation.compute(X)
            (device,) = slots(found, Kind.DEVICE)
            assert device.pid > 0
            assert counted(device) == {"starts": 2, "signal": 1, "hit": 2, "miss": 1}


async def test_a_page_that_is_closed_keeps_the_last_counts_for_its_readers(fake: FakeDevice, model: aionn.Model) -> None:
    fake.fail(act="compile")
    async with aionn.Runtime() as runtime:
        found = find_page(os.getpid())
        assert found is not None
        for priority in ("medium", "low"):
            with pytest.raises(aionn.CompilationError):
                await runtime.compile(model, devices=(fake.name,), priority=priority)
    with found:
        usual, low = sorted(slots(found, Kind.DEVICE), key=lambda slot: slot.stage)
    assert (usual.stage, low.stage) == ("", "low")
    assert counted(usual) == counted(low) == {"starts": 1, "failed": 1, "closed": 1}
    assert (usual.pid, low.pid) == (0, 0)


async def test_a_compilation_that_is_under_way_is_a_gauge(fake: FakeDevice, model: aionn.Model) -> None:
    fake.hang("compile")
    async with aionn.Runtime() as runtime, anyio.create_task_group() as tasks:
        stream = runtime.events()
        for _ in range(2):
            tasks.start_soon(lambda: runtime.compile(model, devices=(fake.name,)))
        compiling = 0
        with anyio.fail_after(30):
            async for event in stream:
                compiling += isinstance(event, CompileStep) and event.step == "compiling"
                if compiling == 2:
                    break
        with page() as found:
            (device,) = slots(found, Kind.DEVICE)
            assert device.gauges == (2, 0)
            tasks.cancel_scope.cancel()
            with anyio.CancelScope(shield=True):
                fake.behave()
                while slots(found, Kind.DEVICE)[0].gauges != (0, 0):
                    await anyio.lowlevel.checkpoint()
            (device,) = slots(found, Kind.DEVICE)
            assert counted(device) == {"starts": 1, "failed": 2}


async def test_a_driver_that_dies_at_its_start_is_a_failed_compilation(fake: FakeDevice, model: aionn.Model) -> None:
    fake.crash("start")
    async with aionn.Runtime() as runtime:
        with page() as found:
            with pytest.raises(aionn.DriverDiedError):
                await runtime.compile(model, devices=(fake.name,))
            (device,) = slots(found, Kind.DEVICE)
            assert counted(device) == {"starts": 1, "signal": 1, "failed": 1}


async def test_stages_have_their_states_and_swaps(quick: FakeDevice, best: FakeDevice, model: aionn.Model) -> None:
    async with aionn.Runtime(name="shop") as runtime:
        with page() as found:
            compilation = await runtime.compile(
                model, mode="staged", stages=(quick.name, best.name), name="door", stage_policy=aionn.StagePolicy(min_gain=None)
            )
            await compilation.wait_for_stage(best.name, timeout_s=60)
            stages = {slot.stage: slot for slot in slots(found, Kind.STAGE)}
            devices = {slot.name: slot for slot in slots(found, Kind.DEVICE)}
    first, better = stages[quick.name], stages[best.name]
    assert {(slot.name, slot.runtime, slot.burst) for slot in (first, better)} == {("door", "shop", "")}
    assert (first.device, better.device) == ("replaced", "serving")
    assert counted(first) == {"waiting": 1, "serving": 1, "replaced": 1}
    assert counted(better) == {"waiting": 1, "compiling": 1, "loading": 1, "comparing": 1, "serving": 1}
    assert (sum(first.call_times), sum(better.call_times)) == (0, 1)
    assert counted(devices[best.name]) == {"starts": 1, "no_cache": 1}  # its worker is not its driver


async def test_a_cache_shows_what_it_holds_refuses_and_evicts(fake: FakeDevice, model: aionn.Model, tmp_path: Path) -> None:
    async with aionn.Runtime() as runtime:
        found = find_page(os.getpid())
        assert found is not None
        # One entry fits: a token per compile makes one entry each.
        runtime._opened.stores[str(tmp_path)] = store = CacheStore(tmp_path, max_bytes=1300)
        for number in range(3):
            await runtime.compile(model, devices=(fake.name,), cache_dir=tmp_path, token=bytes([number]) * 32)
        assert store.usage.entries == 1
        (stored,) = (path for path in (tmp_path / "entries").rglob("model*") if path.is_file())
        stored.write_bytes(bytes(stored.stat().st_size))
        await runtime.compile(model, devices=(fake.name,), cache_dir=tmp_path, token=bytes([2]) * 32)
    with found:
        (cache,) = slots(found, Kind.CACHE)
    assert cache.name == tmp_path.name
    assert counted(cache) == {"evicted": 2}
    assert reasons(cache) == {"wrong_bytes": 1}
    assert cache.gauges == (store.usage.held_bytes, 1)
    assert 1024 < cache.gauges[0] <= 1300
