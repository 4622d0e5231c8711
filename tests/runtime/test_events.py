"""`Runtime.events` and `compile(on_event=)`: what an app sees of compiles, drivers, stages, caches and drops, and in which order."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, TypeVar

import anyio
import numpy as np
import pytest

import aionn
from aionn.caching.store import CacheStore
from aionn.events import (
    CacheRefused,
    CompileDone,
    CompileStarted,
    CompileStep,
    CompileWaiting,
    DriverEnded,
    DriverHung,
    DriverStarted,
    DropsSummary,
    Event,
    StageChanged,
)
from aionn.runtime.record import MOST_WAITING, EventStream, Record
from aionn.testing import FakeDevice, identity_model

pytestmark = pytest.mark.anyio
X = {"input": np.zeros((1, 16), np.float32)}
E = TypeVar("E")


@pytest.fixture
def anyio_backend() -> Any:
    return "asyncio", {"use_uvloop": True}


@pytest.fixture
def model() -> aionn.Model:
    return aionn.Model.from_onnx(identity_model())


def steps(events: list[Event]) -> list[str]:
    """The events of compiles in short."""
    short = []
    for event in events:
        match event:
            case CompileStep(step=step):
                short.append(step)
            case CompileDone(outcome=outcome):
                short.append(f"done: {outcome}")
            case CompileStarted() | CompileWaiting():
                short.append(type(event).__name__)
    return short


async def first(stream: EventStream, kind: type[E]) -> E:
    """The next event of that kind. Others are dropped."""
    with anyio.fail_after(30):
        async for event in stream:
            if isinstance(event, kind):
                return event
    raise AssertionError("the stream has ended")


# --- the hub, without a runtime ------------------------------------------------------------------------------------------------


async def test_a_stream_that_is_not_read_drops_its_oldest_events_and_counts_them() -> None:
    hub = Record(asyncio.get_running_loop(), "hub")
    slow, quick = EventStream(hub), EventStream(hub)
    for number in range(MOST_WAITING + 3):
        hub.publish(DriverStarted(device="d", pid=number, seconds=0.0))
        if number == 5:
            assert (await anext(quick)).pid == 0  # type: ignore[union-attr]
    assert (slow.lost, quick.lost) == (3, 2)
    assert (await anext(slow)).pid == 3  # type: ignore[union-attr]
    hub.end()
    left = [event async for event in slow]
    assert [event.pid for event in left] == list(range(4, MOST_WAITING + 3))  # type: ignore[union-attr]


async def test_two_readers_of_one_stream_both_end_with_it() -> None:
    hub = Record(asyncio.get_running_loop(), "hub")
    stream = EventStream(hub)

    async def read() -> list[Event]:
        return [event async for event in stream]

    readers = [asyncio.create_task(read()) for _ in range(2)]
    await asyncio.sleep(0)
    hub.publish(DriverStarted(device="d", pid=1, seconds=0.0))
    await asyncio.sleep(0)
    hub.end()
    with anyio.fail_after(30):
        both = [await reader for reader in readers]
    assert sorted(map(len, both)) == [0, 1]


# --- compiles ------------------------------------------------------------------------------------------------------------------


async def test_a_compile_shows_its_steps_until_the_runtime_closes(
    fake: FakeDevice, model: aionn.Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aionn.runtime.processes.process.GRACE_S", 60.0)  # a driver on a busy machine is not killed while it ends
    own: list[Event] = []
    async with aionn.Runtime() as runtime:
        stream = runtime.events()
        began_s = time.monotonic()
        await runtime.compile(model, devices=(fake.name,), cache_dir=tmp_path, name="cold", on_event=own.append)
        took_s = time.monotonic() - began_s
        await runtime.compile(model, devices=(fake.name,), cache_dir=tmp_path, name="warm")
    events = [event async for event in stream]
    cold = [event for event in events if getattr(event, "compilation", "") == "cold"]
    assert cold == own
    asked = ["looking into the cache", "asking what the device can run", "compiling"]
    assert steps(cold) == ["CompileStarted", "starting the driver", *asked, "done: miss"]
    warm = [event for event in events if getattr(event, "compilation", "") == "warm"]
    assert steps(warm) == ["CompileStarted", "looking into the cache", "loading from the cache", "done: hit"]
    assert isinstance(cold[-1], CompileDone)
    assert cold[-1].reason.startswith("absent: nothing is stored")
    times = [event.at_ns for event in cold]
    assert times == sorted(times)
    assert (times[-2] - times[0]) / 1e9 < cold[-1].seconds < took_s  # between the last step and the end of the call
    started, ended = (event for event in events if isinstance(event, DriverStarted | DriverEnded))
    assert (started.device, started.pid) == (fake.name, ended.pid)
    assert (ended.cause, ended.exit_code) == ("closed", 0)  # type: ignore[union-attr]


async def test_a_compile_without_a_cache_that_fails_says_why(fake: FakeDevice, model: aionn.Model) -> None:
    fake.fail("out of luck", "compile")
    own: list[Event] = []
    async with aionn.Runtime() as runtime:
        with pytest.raises(aionn.CompilationError):
            await runtime.compile(model, devices=(fake.name,), on_event=own.append)
    done = own[-1]
    assert isinstance(done, CompileDone)
    assert (done.outcome, done.device) == ("failed", fake.name)
    assert "out of luck" in done.reason


@pytest.mark.parametrize("by", ["deadline", "cancel"])
async def test_a_compile_that_is_given_up_is_over_for_listeners(by: str, fake: FakeDevice, model: aionn.Model) -> None:
    fake.hang("compile")
    own: list[Event] = []
    async with aionn.Runtime() as runtime:
        stream = runtime.events()
        timeout_s = 1.5 if by == "deadline" else None
        compiling = asyncio.create_task(runtime.compile(model, devices=(fake.name,), timeout_s=timeout_s, on_event=own.append))
        if by == "cancel":
            while (await first(stream, CompileStep)).step != "compiling":
                pass
            compiling.cancel()
        done = await first(stream, CompileDone)
        with pytest.raises((aionn.DeadlineError, asyncio.CancelledError)):
            await compiling
        fake.behave()
    assert own[-1] == done
    assert done.outcome == "failed"
    assert ("cancelled" if by == "cancel" else "deadline") in done.reason or "within 1.5 s" in done.reason


async def test_the_first_use_with_mode_jit_and_the_one_after_a_death_are_compiles(fake: FakeDevice, model: aionn.Model) -> None:
    own: list[Event] = []
    async with aionn.Runtime() as runtime:
        stream = runtime.events()
        compilation = await runtime.compile(model, devices=(fake.name,), mode="jit", on_event=own.append)
        assert own == []
        began_ns = time.monotonic_ns()
        await compilation.compute(X)
        expected = ["CompileStarted", "starting the driver", "asking what the device can run", "compiling", "done: no_cache"]
        assert steps(own) == expected
        driver = await first(stream, DriverStarted)
        pid = driver.pid
        os.kill(pid, signal.SIGKILL)
        ended = await first(stream, DriverEnded)
        assert (ended.pid, ended.cause, ended.exit_code) == (pid, "signal", -9)
        taken = {event.step: event for event in own if isinstance(event, CompileStep)}
        own.clear()
        await compilation.compute(X)
    assert steps(own) == expected
    again = {event.step: event for event in own if isinstance(event, CompileStep)}
    assert taken["compiling"].expected_s is None
    # What the step took the last time is known now. It began before its event, and the start of the driver is a part of it.
    most_s = (taken["asking what the device can run"].at_ns - began_ns) / 1e9
    expected_s = again["starting the driver"].expected_s
    assert expected_s is not None
    assert driver.seconds <= expected_s <= most_s


async def test_a_step_that_comes_twice_in_the_first_preparation_has_no_last_time(
    fake: FakeDevice, model: aionn.Model, tmp_path: Path
) -> None:
    (tmp_path / "model.onnx").write_bytes(identity_model())
    own: list[Event] = []
    async with aionn.Runtime() as runtime:
        loaded = await runtime.load(tmp_path / "model.onnx")
        await runtime.compile(loaded, devices=(fake.name,), cache_dir=tmp_path / "cache", on_event=own.append)
    read = [event.expected_s for event in own if isinstance(event, CompileStep) and event.step == "reading the model"]
    assert read == [None, None]  # for its digest, and for its graph


async def test_the_cache_knows_what_a_compile_took_for_an_older_version(fake: FakeDevice, model: aionn.Model, tmp_path: Path) -> None:
    fake.delay(0.3, "compile")
    async with aionn.Runtime() as runtime:
        began_s = time.monotonic()
        await runtime.compile(model, devices=(fake.name,), cache_dir=tmp_path)
        took_s = time.monotonic() - began_s
    fake.tell(version="2", delay_s={})
    own: list[Event] = []
    async with aionn.Runtime() as runtime:
        await runtime.compile(model, devices=(fake.name,), cache_dir=tmp_path, on_event=own.append)
    (compiling,) = (event for event in own if isinstance(event, CompileStep) and event.step == "compiling")
    assert compiling.expected_s is not None
    assert 0.3 <= compiling.expected_s < took_s
    assert not [event for event in own if isinstance(event, CacheRefused)]  # another version refuses nothing


async def test_a_compile_that_waits_for_another_one_says_so(fake: FakeDevice, model: aionn.Model, tmp_path: Path) -> None:
    fake.hang("compile")
    async with aionn.Runtime() as one, aionn.Runtime() as other:
        stream, own = other.events(), list[Event]()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(one.compile(model, devices=(fake.name,), cache_dir=tmp_path))
            await fake.heard("compile")
            tasks.create_task(other.compile(model, devices=(fake.name,), cache_dir=tmp_path, on_event=own.append))
            await first(stream, CompileWaiting)
            fake.behave()
    assert steps(own)[-4:] == ["looking into the cache", "CompileWaiting", "loading from the cache", "done: hit"]


async def test_an_entry_that_is_damaged_is_refused_in_an_event(fake: FakeDevice, model: aionn.Model, tmp_path: Path) -> None:
    async with aionn.Runtime() as runtime:
        await runtime.compile(model, devices=(fake.name,), cache_dir=tmp_path)
    (stored,) = (path for path in (tmp_path / "entries").rglob("model*") if path.is_file())
    stored.write_bytes(bytes(stored.stat().st_size))
    own: list[Event] = []
    async with aionn.Runtime() as runtime:
        await runtime.compile(model, devices=(fake.name,), cache_dir=tmp_path, on_event=own.append)
    (refused,) = (event for event in own if isinstance(event, CacheRefused))
    assert (refused.reason, refused.cache, refused.device) == ("wrong_bytes", str(tmp_path), fake.name)
    asked = ["asking what the device can run", "compiling", "done: miss"]
    assert steps(own)[-6:] == ["looking into the cache", "loading from the cache", "looking into the cache", *asked]


# --- on_event ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [ZeroDivisionError, asyncio.CancelledError])
async def test_an_on_event_that_raises_is_logged_once_and_disturbs_nothing(
    kind: type[BaseException], fake: FakeDevice, model: aionn.Model, caplog: pytest.LogCaptureFixture
) -> None:
    calls = 0

    def careless(event: Event) -> None:
        nonlocal calls
        calls += 1
        raise kind("careless")

    async with aionn.Runtime() as runtime:
        compilation = await runtime.compile(model, devices=(fake.name,), name="door", on_event=careless)
        await compilation.compute(X)
    assert calls > 2
    (record,) = (record for record in caplog.records if "on_event" in record.getMessage())
    assert (record.name, record.levelno, record.aionn_model) == ("aionn.runtime", logging.WARNING, "door")  # type: ignore[attr-defined]
    assert f"'door' raised {kind.__name__}: careless" in record.getMessage()


async def test_an_async_on_event_is_refused(fake: FakeDevice, model: aionn.Model) -> None:
    async def later(event: Event) -> None: ...

    async with aionn.Runtime() as runtime:
        with pytest.raises(aionn.CallerError, match=r"async function; give a plain one"):
            await runtime.compile(model, devices=(fake.name,), on_event=later)


async def test_events_of_a_runtime_that_is_not_open_are_refused() -> None:
    runtime = aionn.Runtime(start=())
    with pytest.raises(aionn.CallerError, match="not open"):
        runtime.events()
    async with runtime:
        pass
    with pytest.raises(aionn.CallerError, match="not open"):
        runtime.events()


# --- drivers, stages, drops ------------------------------------------------------------------------------------------------------


async def test_a_hang_and_a_restart_each_have_their_cause(fake: FakeDevice, model: aionn.Model) -> None:
    async with aionn.Runtime(hang_s=0.5) as runtime:
        stream = runtime.events()
        compilation = await runtime.compile(model, devices=(fake.name,), name="door")
        fake.hang(with_gil=True)
        with pytest.raises(aionn.DriverHungError):
            await compilation.compute(X)
        fake.behave()
        hung = await first(stream, DriverHung)
        assert hung.killed
        assert hung.seconds >= 0.5
        assert "_stand_still" in hung.stack
        ended = await first(stream, DriverEnded)
        assert (ended.pid, ended.cause, ended.exit_code) == (hung.pid, "hung", -9)
        await compilation.compute(X)
        (device,) = (device for device in runtime.devices if device.name == fake.name)
        await device.restart()
        assert (await first(stream, DriverEnded)).cause == "closed"


async def test_stages_change_in_order(quick: FakeDevice, best: FakeDevice, model: aionn.Model) -> None:
    own: list[Event] = []
    async with aionn.Runtime() as runtime:
        compilation = await runtime.compile(
            model,
            mode="staged",
            stages=(quick.name, best.name),
            name="door",
            on_event=own.append,
            stage_policy=aionn.StagePolicy(min_gain=None),
        )
        await compilation.wait_for_stage(best.name, timeout_s=60)
    changes = [(event.stage, event.state) for event in own if isinstance(event, StageChanged)]
    assert [state for stage, state in changes if stage == quick.name] == ["waiting", "serving", "replaced"]
    assert [state for stage, state in changes if stage == best.name] == ["waiting", "compiling", "loading", "comparing", "serving"]
    assert steps(own).count("CompileStarted") == 2
    assert [step for step in steps(own) if step.startswith("done")] == ["done: no_cache"] * 2


async def test_drops_are_summed_up_by_burst(fake: FakeDevice, model: aionn.Model) -> None:
    own: list[Event] = []
    async with aionn.Runtime() as runtime:
        compilation = await runtime.compile(model, devices=(fake.name,), name="door", on_event=own.append)
        fake.delay(0.01)

        async def camera() -> AsyncIterator[dict[str, Any]]:
            for _ in range(300):
                yield X
                await asyncio.sleep(0)

        dropped = answered = 0
        async with compilation.burst(name="front") as burst, compilation.burst() as other:
            # Without a heartbeat: a second in which no frame was dropped has no event, so its answers are in none.
            runtime._opened.session.record.each_beat.clear()
            for one in (burst, other):
                async for _ in one.map(camera(), policy="latest"):
                    answered += one is burst
                assert one.statistics()["dropped"] > 0
            dropped = burst.statistics()["dropped"]
        await compilation.aclose()
    front = [event for event in own if isinstance(event, DropsSummary) and event.burst == "front"]
    assert sum(event.dropped for event in front) == dropped
    assert sum(event.frames for event in front) >= dropped + answered
    assert {event.burst for event in own if isinstance(event, DropsSummary)} == {"front", ""}
    assert all(event.compilation == "door" for event in front)


async def test_no_drops_make_no_events(fake: FakeDevice, model: aionn.Model) -> None:
    own: list[Event] = []
    async with aionn.Runtime() as runtime:
        compilation = await runtime.compile(model, devices=(fake.name,), on_event=own.append)
        async with compilation.burst(name="front") as burst:
            await burst.compute(X)
        await compilation.aclose()
    assert [event for event in own if isinstance(event, DropsSummary)] == []


async def test_a_cache_that_cannot_be_written_is_reported(fake: FakeDevice, model: aionn.Model, tmp_path: Path) -> None:
    own: list[Event] = []
    async with aionn.Runtime() as runtime:
        store = CacheStore(tmp_path, max_bytes=0)
        runtime._opened.stores[str(tmp_path)] = store
        await runtime.compile(model, devices=(fake.name,), cache_dir=tmp_path, on_event=own.append)
    (refused,) = (event for event in own if isinstance(event, CacheRefused))
    assert refused.reason == "too_large"


async def test_a_jit_compile_that_a_listener_starts_is_no_step_of_the_other(fake: FakeDevice, model: aionn.Model, tmp_path: Path) -> None:
    path = tmp_path / "other.onnx"
    path.write_bytes(identity_model({"z": (1, 3)}))
    own: list[Event] = []
    inner: list[asyncio.Task[aionn.Compilation]] = []
    fake.delay(0.3, "compile")
    async with aionn.Runtime() as runtime:
        other = await runtime.load(path)

        def heard(event: Event) -> None:
            own.append(event)
            if isinstance(event, CompileStep) and event.step == "compiling" and not inner:
                work = runtime.compile(other, devices=(fake.name,), mode="jit", cache_dir=tmp_path / "cache")
                inner.append(asyncio.ensure_future(work))

        await runtime.compile(model, devices=(fake.name,), on_event=heard)
        await inner[0]
        assert [event.step for event in own if isinstance(event, CompileStep)][-1] == "compiling"
        fake.behave()
