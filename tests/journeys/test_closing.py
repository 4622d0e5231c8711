"""A runtime is opened, used and closed by different tasks, some of them cancelled: nothing is left behind, and no other task notices."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest

import aionn
from aionn.fmq import QueueClosedError
from aionn.hal import ErrorStatus
from aionn.runtime.executing.link import Link
from aionn.runtime.processes import process
from aionn.runtime.runtime import opened_of
from aionn.tasks import OwnedTasks
from aionn.testing import FakeDevice, identity_model
from tests.leaks import leak_check, wait_for_end

pytestmark = [pytest.mark.anyio, pytest.mark.both_loops]

ROOT = Path(__file__).parent.parent.parent
INPUTS = {"input": np.ones((1, 16), np.float32)}
MODEL = aionn.Model.from_onnx(identity_model())


async def in_a_task(work: Any) -> Any:
    """Await `work` in a task of asyncio's own, as a framework's hook would."""
    return await asyncio.ensure_future(work)


async def cancelled_when(task: asyncio.Task[Any]) -> None:
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()


def tasks_of(runtime: aionn.Runtime) -> OwnedTasks:
    """The runtime's own tasks, also when it is closed."""
    opened = opened_of(runtime)
    assert opened is not None
    return opened._tasks


def owner_of(runtime: aionn.Runtime) -> asyncio.Task[None]:
    """The task in which these tasks live."""
    owner = tasks_of(runtime)._owner
    assert owner is not None
    return owner


async def test_a_runtime_opened_in_one_task_is_used_and_closed_in_others(fake: FakeDevice) -> None:
    async with leak_check():
        runtime = aionn.Runtime()
        await in_a_task(runtime.open())
        compilation = await in_a_task(runtime.compile(MODEL, devices=(fake.name,)))
        burst = await in_a_task(compilation.burst().__aenter__())
        assert list(await in_a_task(burst.compute(INPUTS))) == ["input_out"]
        await in_a_task(burst.aclose())
        assert list(await compilation.compute(INPUTS)) == ["input_out"]
        await in_a_task(runtime.aclose())


async def test_async_with_may_be_entered_in_one_task_and_left_in_another(fake: FakeDevice) -> None:
    """As pytest-asyncio and others run the two halves of a fixture."""

    async def fixture() -> AsyncIterator[aionn.Compilation]:
        async with aionn.Runtime() as runtime:
            yield await runtime.compile(MODEL, devices=(fake.name,))

    async with leak_check():
        halves = fixture()
        compilation = await in_a_task(halves.__anext__())
        assert list(await in_a_task(compilation.compute(INPUTS))) == ["input_out"]
        with pytest.raises(StopAsyncIteration):
            await in_a_task(halves.__anext__())


async def test_closing_twice_and_from_several_tasks_at_once_ends_once(fake: FakeDevice) -> None:
    async with leak_check():
        runtime = aionn.Runtime()
        await runtime.aclose()  # nothing to close yet
        await runtime.open()
        compilation = await runtime.compile(MODEL, devices=(fake.name,))
        async with anyio.create_task_group() as tasks:
            for _ in range(3):
                tasks.start_soon(runtime.aclose)
        assert owner_of(runtime).done()
        await runtime.aclose()
        with pytest.raises(aionn.CallerError, match="not open"):
            await compilation.compute(INPUTS)
        with pytest.raises(aionn.CallerError, match="opened already"):
            await runtime.open()


async def test_the_opener_may_be_cancelled_and_the_runtime_serves_on(fake: FakeDevice) -> None:
    runtime = aionn.Runtime()
    opened = asyncio.Event()

    async def open_and_stay() -> None:
        with anyio.CancelScope():
            await runtime.open()
            opened.set()
            await asyncio.sleep(3600)

    async with leak_check():
        opener = asyncio.create_task(open_and_stay())
        await opened.wait()
        compilation = await runtime.compile(MODEL, devices=(fake.name,))
        opener.cancel()
        await asyncio.wait([opener])
        async with compilation.burst() as burst:
            assert [result.seq async for result in burst.map([INPUTS] * 3)] == [0, 1, 2]
        await runtime.aclose()


async def test_an_opener_that_is_cancelled_while_it_opens_leaves_a_closed_runtime() -> None:
    async with leak_check():
        runtime = aionn.Runtime()
        opener = asyncio.create_task(runtime.open())
        await asyncio.sleep(0)
        await cancelled_when(opener)
        await asyncio.wait([owner_of(runtime)])
        with pytest.raises(aionn.CallerError, match="not open"):
            await runtime.compile(MODEL)


@pytest.mark.parametrize("by", ["asyncio", "anyio"])
async def test_a_closer_that_is_cancelled_does_not_stop_the_closing(fake: FakeDevice, by: str) -> None:
    async with leak_check():
        runtime = aionn.Runtime()
        await runtime.open()
        await runtime.compile(MODEL, devices=(fake.name,))
        if by == "anyio":
            with anyio.CancelScope() as scope:
                scope.cancel()
                await runtime.aclose()
            assert scope.cancel_called
        else:
            closer = asyncio.create_task(runtime.aclose())
            await asyncio.sleep(0)
            await cancelled_when(closer)
            await runtime.aclose()


async def test_cancelling_the_runtimes_own_tasks_kills_its_drivers_and_ends_in_time(
    fake: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What `asyncio.run` does at its end, here with a driver that would not end by itself and while the closing goes on."""
    monkeypatch.setattr(process, "GRACE_S", 60.0)
    others = asyncio.all_tasks()
    async with leak_check():
        runtime = aionn.Runtime()
        await runtime.open()
        compilation = await runtime.compile(MODEL, devices=(fake.name,))
        fake.hang(with_gil=True)
        running = asyncio.create_task(compilation.compute(INPUTS))
        await fake.heard("run")
        closer = asyncio.create_task(runtime.aclose())
        with pytest.raises(aionn.CallerError):
            await running
        ours = asyncio.all_tasks() - others
        assert owner_of(runtime) in ours
        with anyio.fail_after(30):
            for _ in range(2):
                for task in ours:
                    task.cancel()
                await asyncio.wait(ours)
        assert closer.cancelled()
        await runtime.aclose()
        del running  # its traceback holds a frame


async def test_an_error_in_one_of_the_runtimes_tasks_is_one_clear_error(fake: FakeDevice, caplog: pytest.LogCaptureFixture) -> None:
    async def fail() -> None:
        raise KeyError("a defect")

    async with leak_check():
        runtime = aionn.Runtime()
        await runtime.open()
        compilation = await runtime.compile(MODEL, devices=(fake.name,))
        tasks_of(runtime).start_soon(fail)
        tasks_of(runtime).start_soon(fail)
        await asyncio.wait([owner_of(runtime)])
        with pytest.raises(aionn.CallerError, match=r"internal error \(KeyError\)") as refused:
            await compilation.compute(INPUTS)
        assert isinstance(refused.value.__cause__, KeyError)
        with pytest.raises(KeyError, match="a defect"):
            await runtime.aclose()
        await runtime.aclose()
        assert [record.levelno for record in caplog.records] == [logging.ERROR] * 2
        caplog.clear()


async def test_one_of_the_runtimes_tasks_that_is_cancelled_ends_alone(fake: FakeDevice) -> None:
    async with leak_check(), aionn.Runtime() as runtime:
        compilation = await runtime.compile(MODEL, devices=(fake.name,))
        started: list[asyncio.Task[None] | None] = []

        async def stay() -> None:
            started.append(asyncio.current_task())
            await asyncio.sleep(3600)

        tasks_of(runtime).start_soon(stay)
        await anyio.wait_all_tasks_blocked()
        assert started[0] is not None
        started[0].cancel()
        await asyncio.wait([started[0]])
        assert list(await compilation.compute(INPUTS)) == ["input_out"]


async def test_a_runtime_is_not_closed_in_another_loop(fake: FakeDevice) -> None:
    async with aionn.Runtime() as runtime:
        with pytest.raises(aionn.CallerError, match="another event loop"):
            await anyio.to_thread.run_sync(lambda: asyncio.run(runtime.aclose()))
        compilation = await runtime.compile(MODEL, devices=(fake.name,))
        assert list(await compilation.compute(INPUTS)) == ["input_out"]


@pytest.mark.parametrize("at", ["in flight", "before it is sent"])
async def test_no_error_of_a_queue_reaches_an_app_when_a_driver_ends_a_burst(fake: FakeDevice, at: str) -> None:
    async with aionn.Runtime() as runtime:
        compilation = await runtime.compile(MODEL, devices=(fake.name,))
        async with compilation.burst() as burst:
            await burst.compute(INPUTS)
            assert isinstance(burst._connection.link, Link)
            controller = burst._connection.link.controller
            if at == "in flight":
                fake.hang()
                running = asyncio.ensure_future(burst.compute(INPUTS))
                await fake.heard("run")
            for queue in (controller._requests, controller._results):
                queue._set_closed()  # the shared word and both eventfds, as the driver's end does it
            if at != "in flight":
                running = asyncio.ensure_future(burst.compute(INPUTS))
            with pytest.raises(aionn.ExecutionError, match="the request is lost") as lost:
                await running
            assert lost.value.status is ErrorStatus.DEVICE_UNAVAILABLE
            assert isinstance(lost.value.__cause__, QueueClosedError)
            fake.behave()
            assert list(await burst.compute(INPUTS)) == ["input_out"]
            assert burst.statistics()["connections"] == 2


FORGETFUL = """
import asyncio, atexit, sys
import anyio, numpy as np, uvloop
import aionn
from aionn.testing import FakeDevice, identity_model
from aionn.runtime.executing.link import Link

fake = FakeDevice().__enter__()
runtime = aionn.Runtime()
kept = []

async def main(end):
    await runtime.open()
    compilation = await runtime.compile(aionn.Model.from_onnx(identity_model()), devices=(fake.name,))
    burst = await compilation.burst().__aenter__()
    results = burst.map([{"input": np.ones((1, 16), np.float32)}] * 3)
    kept.append((burst, results))
    for _ in range(3):
        await results.__anext__()
    print(next(device.pid for device in runtime.devices if device.name == fake.name), flush=True)
    if end == "exit":
        sys.exit(3)

how, end = sys.argv[1:]
atexit.register(fake.__exit__, None, None, None)
if how == "asyncio.run":
    asyncio.run(main(end))
elif how == "uvloop.run":
    uvloop.run(main(end))
elif how == "aionn.run":
    aionn.run(main, end)
elif how == "anyio.run":
    anyio.run(main, end)
else:
    loop = asyncio.new_event_loop()
    try:
        loop.run_until_complete(main(end))
    finally:
        loop.close()
"""


@pytest.mark.parametrize("end", ["return", "exit"])
@pytest.mark.parametrize("how", ["asyncio.run", "uvloop.run", "aionn.run", "anyio.run", "loop.close"])
def test_an_app_that_forgets_to_close_its_runtime_leaves_no_driver_and_hears_nothing_of_asyncio(how: str, end: str) -> None:
    with leak_check():
        app = subprocess.run(
            [sys.executable, "-W", "error", "-c", FORGETFUL, how, end], cwd=ROOT, capture_output=True, text=True, timeout=60
        )
        assert app.returncode == (3 if end == "exit" else 0), app.stderr
        assert app.stdout.strip().isdigit()
        assert wait_for_end(int(app.stdout), 10.0)
        assert app.stderr == "" or how == "loop.close", app.stderr
        assert "was destroyed" not in app.stderr
        assert "never retrieved" not in app.stderr
