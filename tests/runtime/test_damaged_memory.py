"""An engine that writes beside its outputs damages queues and page: each call ends in time, with right outputs or a clear error."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import numpy as np
import pytest
from numpy.typing import NDArray

import aionn
from aionn.hal.types import ErrorStatus
from aionn.remote.device import RemoteBurstContext
from aionn.testing import identity_model
from tests.leaks import leak_check
from tests.runtime.damaging_engine import COMPUTE_LONG, FREEZE_PAGE, LOSE_NEXT, NAME

pytestmark = [pytest.mark.anyio, pytest.mark.no_cover]

HANG_S = 1.0
DEPTH = 128
"""With so many requests, queues have the size by which the engine finds them."""
SEEDS = 20
CALLS = 12
"""For each seed: so many calls, of which every second one damages the memory."""


@pytest.fixture(autouse=True)
def _engines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))


@asynccontextmanager
async def compiled() -> AsyncIterator[tuple[aionn.Runtime, aionn.Compilation]]:
    async with leak_check(), aionn.Runtime(hang_s=HANG_S) as runtime:
        yield runtime, await runtime.compile(aionn.Model.from_onnx(identity_model()), devices=(NAME,))


def ordering(order: float, number: float = 0.0) -> dict[str, NDArray[np.float32]]:
    given = np.full((1, 16), number, np.float32)
    given[0, 0] = order
    return {"input": given}


async def test_a_request_that_has_left_its_queue_unseen_ends_with_an_error_that_says_so() -> None:
    async with compiled() as (runtime, compilation), compilation.burst(depth=DEPTH) as burst:
        await burst.compute(ordering(0))
        outputs: list[float] = []
        errors: list[aionn.ExecutionError] = []

        async def call(order: float) -> None:
            try:
                outputs.append((await burst.compute(ordering(order, 3)))["input_out"][0, 1])
            except aionn.ExecutionError as error:
                errors.append(error)

        began_s = time.monotonic()
        with anyio.fail_after(20):
            async with anyio.create_task_group() as calls:
                calls.start_soon(call, LOSE_NEXT)
                calls.start_soon(call, 0.0)
        (lost,) = errors
        assert outputs == [3]  # the other one was answered
        assert "the driver knows nothing of a request that was sent 1." in str(lost)
        assert lost.status == ErrorStatus.DEVICE_UNAVAILABLE
        assert time.monotonic() - began_s >= HANG_S
        assert runtime.health().state == "serving"
        assert (await burst.compute(ordering(0, 4)))["input_out"][0, 1] == 4
        assert burst.statistics()["connections"] == 2
        del lost
        errors.clear()  # its traceback holds a frame
        assert burst.statistics()["pinned_frames"] == 0


async def test_a_long_run_and_the_requests_behind_it_are_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: set[int] = set()
    ask = RemoteBurstContext.ask

    def counted(self: RemoteBurstContext, identity: int, answered: Callable[[bool], None]) -> None:
        asked.add(id(self))
        ask(self, identity, answered)

    monkeypatch.setattr(RemoteBurstContext, "ask", counted)
    async with compiled() as (_, compilation), compilation.burst(depth=DEPTH) as burst, compilation.burst(depth=DEPTH) as other:
        for each in (burst, other):
            await each.compute(ordering(0))
        outputs: list[float] = []

        async def call(over: aionn.Burst, order: float, number: float) -> None:
            outputs.append((await over.compute(ordering(order, number)))["input_out"][0, 1])

        with anyio.fail_after(60):
            async with anyio.create_task_group() as calls:
                calls.start_soon(call, burst, COMPUTE_LONG, 1.0)
                calls.start_soon(call, burst, 0.0, 2.0)
                calls.start_soon(call, other, 0.0, 3.0)
        assert sorted(outputs) == [1, 2, 3]
        assert asked  # and the driver knew
        assert [each.statistics()["connections"] for each in (burst, other)] == [1, 1]


async def test_times_that_a_damaged_page_says_are_not_told() -> None:
    async with compiled() as (runtime, compilation), compilation.burst(depth=DEPTH) as burst:
        await burst.compute(ordering(FREEZE_PAGE))
        (device,) = (device for device in runtime.devices if device.pid)
        activity = device.activity
        assert activity is not None
        assert (activity.state, activity.since_ns) == ("executing", 0)  # it is not, but nothing else says so
        assert 0 <= runtime.health().devices[0].seconds < 60
        process = device._process
        assert process is not None
        with anyio.fail_after(20):
            await process.wait_ended()  # the page says that it hangs
        error = process.connection.ended_by
        assert isinstance(error, aionn.DriverHungError)
        assert HANG_S <= error.waited_s < 20
        assert (await burst.compute(ordering(0, 5)))["input_out"][0, 1] == 5


async def _damaged(compilation: aionn.Compilation, seed: int, found: dict[str, int]) -> None:
    """Make the calls of one seed, over a burst of its own."""
    async with compilation.burst(depth=DEPTH) as burst:
        for number in range(CALLS):
            order = float(100 * seed + number) if number % 2 else 0.0
            began_s = time.monotonic()
            try:
                with anyio.fail_after(HANG_S + 10):  # one second more is usual, on a machine that does nothing else
                    outputs = await burst.compute(ordering(order, number))
            except (aionn.ExecutionError, aionn.DriverDiedError, aionn.DriverHungError) as error:
                assert not isinstance(error, aionn.DriverHungError) or HANG_S <= error.waited_s < HANG_S + 10
                found[type(error).__name__] = found.get(type(error).__name__, 0) + 1
            else:
                assert (outputs["input_out"] == ordering(order, number)["input"]).all()
                found["right"] = found.get("right", 0) + 1
            found["longest_ms"] = max(found.get("longest_ms", 0), int(1000 * (time.monotonic() - began_s)))


async def test_each_call_of_an_engine_that_damages_queues_and_page_ends_in_time() -> None:
    found: dict[str, int] = {}
    async with compiled() as (runtime, compilation):
        sound = await runtime.compile(aionn.Model.from_onnx(identity_model()), devices=("reference",))
        async with sound.burst() as stream, anyio.create_task_group() as tasks:
            right = 0

            async def beside() -> None:
                nonlocal right
                while True:
                    outputs = await stream.compute(ordering(right % 1000, 7))
                    assert outputs["input_out"][0, 0] == right % 1000
                    right += 1
                    await anyio.sleep(0.002)  # some in each call that is damaged; more would show no more

            tasks.start_soon(beside)
            for seed in range(1, SEEDS + 1):
                await _damaged(compilation, seed, found)
            tasks.cancel_scope.cancel()
    assert right > 0
    assert found["right"] > 0
    assert found.keys() - {"right", "longest_ms"}  # memory was damaged indeed
