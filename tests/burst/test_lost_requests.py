"""Requests that shared memory has lost: what the app's end asks, what the driver's end knows, and what the caller gets.

tests/runtime/test_damaged_memory.py has the same with an engine that writes beside its outputs.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable
from typing import Any
from unittest.mock import ANY

import anyio
import anyio.lowlevel
import pytest

from aionn.burst.controller import ExecutionBurstController
from aionn.errors import ExecutionError
from aionn.fmq import MessageQueue, QueueCorruptedError, layout
from aionn.hal.types import ErrorStatus, Result
from tests.burst.ends import Gate, RawClient, packet, raw_client, raw_driver, raw_model
from tests.burst.test_controller import Call
from tests.burst.test_lanes import Gates, mark, numbered, until, warm

pytestmark = [pytest.mark.anyio, pytest.mark.both_loops]

PATIENCE_S = 0.05


class Questions:
    """What a controller asks. The test answers."""

    def __init__(self, controller: ExecutionBurstController) -> None:
        self._sender, self._asked = anyio.create_memory_object_stream[tuple[int, Callable[[bool], None]]](100)
        controller.ask = lambda identity, answered: self._sender.send_nowait((identity, answered))

    async def next(self) -> tuple[int, Callable[[bool], None]]:
        with anyio.fail_after(20):
            return await self._asked.receive()

    @property
    def waiting(self) -> int:
        return self._asked.statistics().current_buffer_used

    def close(self) -> None:
        self._sender.close()
        self._asked.close()


def poke(queue: MessageQueue, grantor: int, value: int, offset: int = 0, form: str = "=I") -> None:
    """Write into the shared words of a queue, as an engine does that writes beside its outputs."""
    descriptor = queue.descriptor()
    part = descriptor.grantors[grantor]
    struct.pack_into(form, queue._regions[part.fd_index].view(), part.offset + offset, value)


def sleep_unseen(queue: MessageQueue) -> None:
    """Make a writer believe that the reader is awake."""
    poke(queue, layout.CONTROL, 0, layout.READER_ARMED_OFFSET)


async def test_the_driver_is_asked_about_a_request_that_is_unanswered_for_long_and_again_later() -> None:
    async with raw_driver(patience_s=PATIENCE_S) as (controller, driver), anyio.create_task_group() as app:
        questions, call = Questions(controller), Call(controller)
        app.start_soon(call)
        (identity,) = await driver.wait_for(1)
        for _ in range(3):
            asked, answered = await questions.next()
            assert asked == identity
            answered(True)
            assert controller.ended_by is None
        driver.answer()
        await until(lambda: call.result is not None)
        assert call.result == Result(ErrorStatus.NONE)
        questions.close()


async def test_a_request_that_the_driver_does_not_know_ends_the_burst_and_says_so() -> None:
    async with raw_driver(patience_s=PATIENCE_S) as (controller, driver), anyio.create_task_group() as app:
        questions, calls = Questions(controller), [Call(controller) for _ in range(3)]
        for call in calls:
            app.start_soon(call)
        first, *_ = await driver.wait_for(3)
        asked, answered = await questions.next()
        assert asked == first  # the oldest
        answered(False)
        await until(lambda: all(call.error is not None for call in calls))
        for call in calls:
            assert isinstance(call.error, ExecutionError)
            assert "the driver knows nothing of a request that was sent 0." in str(call.error)
            assert call.settled == [None]
        assert controller.lost == 3
        questions.close()


async def test_an_answer_that_has_come_meanwhile_counts_more_than_what_the_driver_says() -> None:
    async with raw_driver(patience_s=PATIENCE_S) as (controller, driver), anyio.create_task_group() as app:
        questions, call = Questions(controller), Call(controller)
        app.start_soon(call)
        await driver.wait_for(1)
        _, answered = await questions.next()
        sleep_unseen(driver.results)
        driver.answer()
        answered(False)
        await until(lambda: bool(call.settled))
        assert (call.settled, controller.ended_by) == ([Result(ErrorStatus.NONE)], None)
        questions.close()


async def test_an_answer_whose_wake_is_lost_is_found_without_a_question() -> None:
    async with raw_driver(patience_s=PATIENCE_S, low_power=True) as (controller, driver), anyio.create_task_group() as app:
        questions = Questions(controller)
        for _ in range(3):  # the first lost wake does not cost the next one
            call = Call(controller)
            app.start_soon(call)
            await driver.wait_for(1)
            await anyio.wait_all_tasks_blocked()
            sleep_unseen(driver.results)
            driver.answer()
            assert controller.in_flight == 1
            await until(lambda call=call: call.result is not None)  # type: ignore[misc]
        assert (questions.waiting, controller.ended_by) == (0, None)
        questions.close()


async def test_the_next_request_is_asked_for_at_once_when_it_has_become_the_oldest() -> None:
    async with raw_driver(patience_s=1.0) as (controller, driver), anyio.create_task_group() as app:
        questions, calls = Questions(controller), [Call(controller) for _ in range(2)]
        for call in calls:
            app.start_soon(call)
        first, second = await driver.wait_for(2)
        asked, answered = await questions.next()
        answered(True)
        again_ns, _, _ = controller.caller.late()
        assert again_ns - time.monotonic_ns() <= 501_000_000  # less than another second
        driver.answer(first)
        controller._late()
        assert (asked, await questions.next()) == (first, (second, ANY))
        driver.answer(second)
        await until(lambda: controller.in_flight == 0)
        questions.close()


async def test_a_burst_whose_requests_are_answered_asks_nothing_and_sets_one_timer() -> None:
    async with raw_driver(patience_s=3600.0) as (controller, driver), anyio.create_task_group() as app:
        timers: list[Any] = []
        questions = Questions(controller)
        for _ in range(20):
            call = Call(controller)
            app.start_soon(call)
            await driver.wait_for(1)
            driver.answer()
            await until(lambda call=call: call.result is not None)  # type: ignore[misc]
            timers.append(controller._timer)
        assert timers[0] is not None
        assert set(timers) == {timers[0]}
        assert questions.waiting == 0
        questions.close()


# ---- what the driver's end knows ----------------------------------------------------------------------------------------------------


async def test_a_request_is_known_until_it_is_answered(both_ways: bool) -> None:
    async with raw_client() as client:
        gate = client.engine.act = Gate()
        server = client.server
        assert not server.has_request(1)
        for identity in (1, 2):
            await client.send(packet(identity=identity, measure_timing=False))
        await gate.entered()
        assert [server.has_request(identity) for identity in (1, 2, 3)] == [True, True, False]
        gate.open()
        await client.receive()
        await gate.entered()
        assert [server.has_request(identity) for identity in (1, 2, 3)] == [False, True, False]
        gate.open()
        await client.receive()
        assert [server.has_request(identity) for identity in (1, 2, 3)] == [False, False, False]


async def test_requests_of_lanes_are_known_also_those_that_are_answered_out_of_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aionn.driver.prepared_model.LANES", True)
    async with raw_model(lanes=2) as raw:
        client = await raw.burst()
        await warm(client, 2)
        gates = Gates(1)
        raw.engine.see = gates
        mark(client, 1, 1)
        server, native = client.server, client.server._native
        await client.send(numbered(1, 7))
        await gates[1].entered()
        await client.send(numbered(0, 8))
        await until(lambda: native.running == 1 and native.taken - native.answered == 2)  # the second one is done, and waits for its turn
        assert client.requests.available_to_write() == client.requests.capacity
        assert [server.has_request(identity) for identity in (6, 7, 8, 9)] == [False, True, True, False]
        gates[1].open()
        for identity in (7, 8):
            assert (await client.receive()).identity == identity
        assert not server.has_request(7)
        assert not server.has_request(8)


async def test_a_request_whose_wake_is_lost_is_found_by_the_question(both_ways: bool) -> None:
    async with raw_client() as client:
        for identity in (1, 2, 3):
            await client.answer_to(packet(identity=identity, measure_timing=False))
        await asleep(client)
        runs = client.engine.runs
        sleep_unseen(client.requests)
        await client.send(packet(identity=4, measure_timing=False))
        for _ in range(20):
            await anyio.lowlevel.checkpoint()
        assert client.engine.runs == runs  # nobody has woken
        assert client.server.has_request(4)
        assert (await client.receive()).identity == 4


async def asleep(client: RawClient) -> None:
    """Return when the driver's end is armed."""
    part = client.requests.descriptor().grantors[layout.CONTROL]
    words = client.requests._regions[part.fd_index].view()
    await until(lambda: struct.unpack_from("=I", words, part.offset + layout.READER_ARMED_OFFSET) != (0,))


async def test_a_request_that_left_the_queue_unseen_is_not_known(both_ways: bool) -> None:
    async with raw_client() as client:
        for identity in (1, 2, 3):
            await client.answer_to(packet(identity=identity, measure_timing=False))
        await asleep(client)
        sleep_unseen(client.requests)
        await client.send(packet(identity=4, measure_timing=False))
        assert client.requests.read(client.requests.available_to_read())  # somebody moves the counter
        assert not client.server.has_request(4)


async def test_an_answer_without_room_is_known_as_long_as_it_may_get_room(both_ways: bool) -> None:
    async with raw_client(result_capacity=6) as client:
        for identity in (1, 2, 3):
            await client.send(packet(identity=identity, measure_timing=False))
        await until(lambda: client.server._needed > 0)
        assert not client.server.has_request(3)  # the app says that it has taken all answers, so the queue lies
        for identity in (1, 2, 3):
            assert (await client.receive()).identity == identity
        await until(lambda: client.server._needed == 0)
        assert not client.server.has_request(3)


async def test_broken_and_closed_queues_know_nothing(both_ways: bool) -> None:
    async with raw_client() as client:
        await client.answer_to(packet(identity=1, measure_timing=False))
        poke(client.requests, layout.WRITE_COUNTER, 2**63 + 1, form="=Q")
        with pytest.raises(QueueCorruptedError):
            client.server.has_request(1)
        await client.server.aclose()
        assert not client.server.has_request(1)
