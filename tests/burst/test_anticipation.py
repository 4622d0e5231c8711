"""Anticipation in a driver: what a warm run reads, holds and shows. tests/fmq/test_anticipation.py has the rule and the lanes."""

from __future__ import annotations

import os
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import anyio
import numpy as np
import pytest
from numpy.typing import NDArray

import aionn
from aionn.driver.device import EngineDevice
from aionn.driver.prepared_model import EnginePreparedModel
from aionn.fmq import SOON, Caller, MessageQueue
from aionn.hal import PrepareOptions
from aionn.hal.types import ErrorStatus, ExecutionPreference
from aionn.pages.page import DriverPage, PageReader
from aionn.runtime.model import Model as OnnxModel
from aionn.testing import FakeDevice
from aionn.testing.models import identity_model
from tests.burst.ends import ELEMENTS, Gate, RawClient, ScriptedEngine, Slots, begin_to_free, packet
from tests.fmq.queues import duplicated

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.both_loops,
    pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="an app and a lane that share one CPU are not anticipated"),
]

DATUM_BYTES = 24
PERIOD_S = 0.02


@pytest.fixture(autouse=True)
def with_lanes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aionn.driver.prepared_model.LANES", True)
    monkeypatch.setattr("aionn.burst.spin_policy.cpus_for_both_ends", lambda: 2)


class Client(RawClient):
    """A raw client of a burst that anticipates."""

    prepared: EnginePreparedModel
    caller: Caller

    @property
    def warm_ups(self) -> int:
        return self.server._native.warm_ups

    async def frame(self, identity: int) -> None:
        assert (await self.answer_to(packet(identity=identity))).result.status is ErrorStatus.NONE

    async def warm_up(self, act: Callable[[], object] = int) -> None:
        """Send paced frames, and announce each, until a warm run begins, which calls `act`."""
        turn, begun = threading.Lock(), threading.Event()

        def run() -> None:
            if turn.acquire(blocking=False):  # no frame is in flight, and the next one is not sent before the release
                begun.set()
                act()

        turn.acquire()
        self.engine.act = run
        for identity in range(1, 1000):
            await self.frame(identity)
            turn.release()
            await anyio.sleep(PERIOD_S)
            self.caller.nudge(SOON)
            await anyio.sleep(PERIOD_S / 4)
            if not turn.acquire(blocking=False):
                assert begun.is_set()
                return
        raise AssertionError("no warm run")

    async def over(self) -> None:
        with anyio.fail_after(20):
            while self.server._native.running:  # noqa: ASYNC110 -- a lane's thread changes it
                await anyio.sleep(0.0005)
        self.engine.act = None


@asynccontextmanager
async def anticipating(preference: ExecutionPreference = ExecutionPreference.FAST_SINGLE_ANSWER) -> AsyncIterator[Client]:
    engine, slots = ScriptedEngine(), Slots()
    slots.add(0)
    requests, results = MessageQueue.create(DATUM_BYTES, 1024), MessageQueue.create(DATUM_BYTES, 1024)
    try:
        async with anyio.create_task_group() as tasks:
            device = EngineDevice(engine, tasks)
            prepared = await device.prepare_model(OnnxModel.from_onnx(identity_model()), PrepareOptions(preference))
            channels = duplicated(requests.descriptor()), duplicated(results.descriptor())
            server = await prepared.configure_execution_burst(slots, *channels, anticipate=True)
            client = Client(requests, results, slots, server, engine)
            client.prepared, client.caller = prepared, Caller(requests, results)
            yield client
            engine.act = None
            await prepared.aclose()
            tasks.cancel_scope.cancel()
    finally:
        requests.close()
        results.close()
        slots.close()


async def test_a_warm_run_touches_no_byte_of_the_frame() -> None:
    async with anticipating() as client:
        memory: NDArray[np.float32] = np.frombuffer(client.slots.regions[0].view(), np.float32)
        memory[:ELEMENTS] = 1
        kept: list[bytes] = []

        def mark() -> None:
            assert (memory[ELEMENTS : 2 * ELEMENTS] == 2).all()
            memory[ELEMENTS : 2 * ELEMENTS] = 100  # the app's own, from the answer on
            kept.append(bytes(memory))

        for _ in range(3):
            await client.warm_up(mark)
            await client.over()
            assert bytes(memory) == kept[-1]
        assert len(kept) == 3


async def test_a_warm_run_shows_while_it_goes_on_and_is_no_execution_of_the_statistics(monkeypatch: pytest.MonkeyPatch) -> None:
    written = DriverPage()
    page = PageReader(os.dup(written.fd))
    monkeypatch.setattr(EngineDevice, "slot", lambda device, model, *_: written.slot(model))
    async with anticipating() as client:
        gate = Gate()
        await client.warm_up(gate)
        await gate.entered()
        answered = client.server.answered
        seen = page.read()
        assert len(seen.executing) == 1  # a watch sees it hang
        assert seen.finished == answered
        gate.open()
        await client.over()
        seen = page.read()
        assert seen.executing == ()
        assert seen.finished == client.server.answered == answered
        assert client.engine.runs == answered + client.warm_ups
    page.close()
    os.close(written.fd)


async def test_a_free_waits_for_the_warm_run_and_nothing_old_is_warmed_afterwards() -> None:
    async with anticipating() as client, anyio.create_task_group() as app:
        gate = Gate()
        await client.warm_up(gate)
        await gate.entered()
        freed = await begin_to_free(client.server, app)
        gate.open()
        with anyio.fail_after(20):
            await freed.wait()
        client.engine.act = None
        runs = client.engine.runs
        client.caller.nudge(SOON)
        await anyio.sleep(2 * PERIOD_S)
        assert client.engine.runs == runs
        await client.frame(1)
        assert client.slots.asked == [[0], [0]]


async def test_the_end_of_the_burst_waits_for_the_warm_run() -> None:
    async with anticipating() as client, anyio.create_task_group() as app:
        gate, closed = Gate(), anyio.Event()
        await client.warm_up(gate)
        await gate.entered()

        async def close() -> None:
            await client.server.aclose()
            closed.set()

        app.start_soon(close)
        await anyio.wait_all_tasks_blocked()
        assert not closed.is_set()
        gate.open()
        with anyio.fail_after(20):
            await closed.wait()


async def test_a_warm_run_that_hangs_delays_the_end_of_the_burst_for_a_bounded_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aionn.burst.server.CLOSE_S", 0.05)
    async with anticipating() as client:
        gate = Gate()
        await client.warm_up(gate)
        await gate.entered()
        with anyio.fail_after(20):
            await client.server.aclose()
        gate.open(1000)


async def test_a_warm_run_that_fails_harms_no_frame() -> None:
    async with anticipating() as client:

        def fail() -> None:
            raise RuntimeError("failed on demand")

        await client.warm_up(fail)
        await client.over()
        await client.frame(1)


async def test_low_power_is_never_warmed_up() -> None:
    async with anticipating(ExecutionPreference.LOW_POWER) as client:
        for identity in range(1, 25):
            await client.frame(identity)
            await anyio.sleep(PERIOD_S)
            client.caller.nudge(SOON)
        assert client.warm_ups == 0
        assert client.engine.runs == client.server.answered


async def test_a_leased_frame_announces_its_request_to_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole way: `burst(anticipate=True)`, a lease, a warm run in the driver's process, which lanes make."""
    monkeypatch.setenv("AIONN_LANES", "1")
    x = {"input": np.ones((1, 16), np.float32)}
    with FakeDevice() as fake:
        async with aionn.Runtime() as runtime:
            compilation = await runtime.compile(aionn.Model.from_onnx(identity_model()), devices=(fake.name,))
            async with compilation.burst(anticipate=True) as burst:
                warmed, computed = False, 0
                for _ in range(500):
                    await burst.compute(x)
                    computed += 1
                    await fake.heard("run")
                    await anyio.sleep(2 * PERIOD_S)
                    async with burst.frame():
                        with anyio.move_on_after(0.01):
                            await fake.heard("run")
                            warmed = True
                    if warmed:
                        break
                assert warmed
                assert burst.statistics()["computed"] == computed
