"""The app's end of a burst against a raw driver: every await point cancelled, deadlines, depth, order, ends, hostile answers."""

from __future__ import annotations

import asyncio
import os
import time
from typing import Any

import anyio
import pytest

from aionn.burst.controller import ExecutionBurstController
from aionn.burst.packets import (
    DATUM_BYTES,
    PacketError,
    PoolReference,
    ResultPacket,
    encode_request_body,
    read_identity,
    split_requests,
)
from aionn.errors import AionnError, CallerError, DeadlineError, DriverDiedError, ExecutionError
from aionn.fmq import QueueClosedError
from aionn.hal.types import ErrorStatus, Request, Result
from tests.burst.ends import RawDriver, raw_driver, request
from tests.burst.whole_packets import encode_result

pytestmark = [pytest.mark.anyio, pytest.mark.both_loops]

BODY = encode_request_body(request(), (PoolReference(0),), False, framed=True)


class Call:
    """One caller: what became of it, and how often its memory was given back."""

    def __init__(self, controller: ExecutionBurstController, deadline_ns: int | None = None, body: bytes = BODY) -> None:
        self.controller = controller
        self.deadline_ns = deadline_ns
        self.body = body
        self.settled: list[Result | None] = []
        self.result: Result | None = None
        self.error: BaseException | None = None
        self.scope = anyio.CancelScope()

    async def __call__(self) -> None:
        with self.scope:
            try:
                self.result, _ = await self.controller.execute(self.body, self.settled.append, self.deadline_ns)
            except AionnError as error:
                self.error = error


def soon(seconds: float) -> int:
    return time.monotonic_ns() + int(seconds * 1e9)


@pytest.mark.parametrize("low_power", [False, True])
async def test_answers_reach_their_callers_whatever_their_order(low_power: bool) -> None:
    async with raw_driver(low_power=low_power) as (controller, driver), anyio.create_task_group() as app:
        calls = [Call(controller) for _ in range(5)]
        for call in calls:
            app.start_soon(call)
        identities = await driver.wait_for(5)
        statuses = [ErrorStatus.NONE, *[ErrorStatus(status) for status in (1, 2, 4, 5)]]
        for identity, status in reversed(list(zip(identities, statuses, strict=True))):
            driver.answer(identity, Result(status))
        while not all(call.settled for call in calls):
            await anyio.lowlevel.checkpoint()
        await anyio.wait_all_tasks_blocked()
        assert [call.result.status for call in calls if call.result] == statuses
        assert all(call.settled == [call.result] for call in calls)


async def test_a_cancelled_request_keeps_what_it_holds_until_the_driver_answers() -> None:
    async with raw_driver() as (controller, driver), anyio.create_task_group() as app:
        call = Call(controller)
        app.start_soon(call)
        await driver.wait_for(1)
        call.scope.cancel()
        await anyio.wait_all_tasks_blocked()
        assert (call.settled, controller.in_flight) == ([], 1)
        driver.answer()
        while not call.settled:
            await anyio.lowlevel.checkpoint()
        assert (call.result, len(call.settled), controller.in_flight) == (None, 1, 0)


@pytest.mark.parametrize("deadline_s", [None, 60.0])
async def test_a_request_that_is_cancelled_in_the_queue_is_late_there_and_no_other_is(deadline_s: float | None) -> None:
    """It gives back at once what it holds. The queue has room for two requests, so the third one lies where the first one lay."""
    length = (len(BODY) + DATUM_BYTES) // DATUM_BYTES
    async with raw_driver(capacity=2 * length) as (controller, driver), anyio.create_task_group() as app:
        deadline_ns = None if deadline_s is None else soon(deadline_s)
        calls = [Call(controller, deadline_ns) for _ in range(4)]
        for call in calls[:2]:
            app.start_soon(call)
        await anyio.wait_all_tasks_blocked()
        taken = driver.requests.read(length)
        app.start_soon(calls[2])
        await anyio.wait_all_tasks_blocked()
        calls[0].scope.cancel()  # the driver has it
        calls[1].scope.cancel()
        await anyio.wait_all_tasks_blocked()
        assert [call.settled for call in calls[:3]] == [[], [None], []]
        assert controller.in_flight == 3
        packets = [taken or b"", *split_requests(driver.requests.read(2 * length) or b"")]
        assert [packet[:-DATUM_BYTES] for packet in packets] == [BODY] * 3
        identities, deadlines = zip(*map(read_identity, packets), strict=True)
        assert deadlines == (deadline_ns, 1, deadline_ns)
        for identity in identities:
            driver.answer(identity)
        app.start_soon(calls[3])
        await driver.wait_for(1)
        driver.answer()
    assert [len(call.settled) for call in calls] == [1] * 4
    assert [call.result is None for call in calls] == [True, True, False, False]


async def test_a_caller_cancelled_at_any_iteration_of_the_loop_loses_nothing() -> None:
    """Whatever await point the cancellation meets: awake, asleep, answered but not resumed."""
    async with raw_driver(depth=2) as (controller, driver):
        for iterations in range(12):
            for answer_first in (False, True):
                async with anyio.create_task_group() as app:
                    call, other = Call(controller), Call(controller)
                    app.start_soon(call)
                    app.start_soon(other)
                    identities = await driver.wait_for(2)
                    for _ in range(iterations):
                        await anyio.lowlevel.checkpoint()
                    if answer_first:
                        driver.answer(identities[0])
                    call.scope.cancel()
                    if not answer_first:
                        driver.answer(identities[0])
                    driver.answer(identities[1])
                assert len(call.settled) == len(other.settled) == 1
                assert other.result == Result(ErrorStatus.NONE)
                assert controller.in_flight == 0


async def test_callers_past_the_depth_wait_in_order_and_leave_without_blocking_those_behind() -> None:
    async with raw_driver(depth=1) as (controller, driver), anyio.create_task_group() as app:
        calls = [Call(controller) for _ in range(5)]
        for call in calls:
            app.start_soon(call)
            await anyio.lowlevel.checkpoint()
        assert len(await driver.wait_for(1)) == 1
        calls[1].scope.cancel()
        driver.answer()  # in the same iteration: the turn may have come to the one that leaves
        for served in (2, 3, 4):
            await driver.wait_for(1)
            await anyio.lowlevel.checkpoint()
            assert controller.in_flight == 1
            driver.answer()
            while calls[served].result is None:
                await anyio.lowlevel.checkpoint()
        assert calls[0].result is not None
        assert calls[1].settled == [None]


async def test_a_turn_that_is_past_its_deadline_leaves_and_the_next_one_is_served() -> None:
    async with raw_driver(depth=1) as (controller, driver), anyio.create_task_group() as app:
        first, late, last = Call(controller), Call(controller, soon(0.01)), Call(controller)
        for call in (first, late, last):
            app.start_soon(call)
            await anyio.lowlevel.checkpoint()
        await driver.wait_for(1)
        while late.error is None:
            await anyio.lowlevel.checkpoint()
        assert isinstance(late.error, DeadlineError)
        assert late.settled == [None]
        driver.answer()
        await driver.wait_for(1)
        driver.answer()
        while last.result is None:
            await anyio.lowlevel.checkpoint()


async def test_past_the_deadline_the_caller_leaves_and_the_memory_stays_until_the_answer() -> None:
    async with raw_driver() as (controller, driver):
        taken = False
        while not taken:  # before the deadline, or the memory does not stay
            async with anyio.create_task_group() as app:
                call = Call(controller, soon(0.01))
                app.start_soon(call)
                await driver.wait_for(1)
                taken = not call.settled
            assert isinstance(call.error, DeadlineError)
            assert call.settled == ([] if taken else [None])
            driver.answer()
        while not call.settled:
            await anyio.lowlevel.checkpoint()
        assert len(call.settled) == 1


async def test_past_its_deadline_a_request_that_lies_in_the_queue_gives_the_memory_back() -> None:
    async with raw_driver() as (controller, driver):
        call = Call(controller, soon(0.01))
        await call()
        assert isinstance(call.error, DeadlineError)
        assert call.settled == [None]
        await driver.wait_for(1)
        driver.answer()
        while controller.in_flight:
            await anyio.lowlevel.checkpoint()
        assert call.settled == [None]


async def test_deadlines_that_pass_end_their_own_requests_only() -> None:
    async with raw_driver() as (controller, driver), anyio.create_task_group() as app:
        patient = Call(controller)
        app.start_soon(patient)
        hasty = [Call(controller, soon(0.01)) for _ in range(3)]
        cancelled = Call(controller, soon(0.01))
        async with anyio.create_task_group() as leaving:
            for call in (*hasty, cancelled):
                leaving.start_soon(call)
            await driver.wait_for(5)
            cancelled.scope.cancel()  # before or after its deadline
        assert [type(call.error) for call in hasty] == [DeadlineError] * 3
        assert patient.settled == []
        assert all(call.settled in ([], [None]) for call in (*hasty, cancelled))  # [None]: the driver had not read it by then
        assert controller.ended_by is None
        for _ in range(5):
            driver.answer()
        while patient.result is None:
            await anyio.lowlevel.checkpoint()
        assert [len(call.settled) for call in (patient, *hasty, cancelled)] == [1] * 5


async def test_an_end_delivers_published_answers_first_and_gives_the_rest_the_reason() -> None:
    async with raw_driver() as (controller, driver), anyio.create_task_group() as app:
        calls = [Call(controller) for _ in range(3)]
        for call in calls:
            app.start_soon(call)
        identities = await driver.wait_for(3)
        await anyio.wait_all_tasks_blocked()
        driver.answer(identities[1])
        controller.end(DriverDiedError("raw", -9))
        assert all(len(call.settled) == 1 for call in calls)
    assert calls[1].result == Result(ErrorStatus.NONE)
    assert [type(call.error) for call in calls] == [DriverDiedError, type(None), DriverDiedError]


async def test_an_end_reaches_callers_that_wait_for_a_turn_or_for_room() -> None:
    async with raw_driver(depth=3, capacity=20) as (controller, _driver), anyio.create_task_group() as app:
        calls = [Call(controller) for _ in range(5)]  # 10 datums each: two fit, the third waits for room, two for a turn
        for call in calls:
            app.start_soon(call)
        await anyio.wait_all_tasks_blocked()
        controller.end(DriverDiedError("raw", 1))
    assert all(isinstance(call.error, DriverDiedError) and call.settled == [None] for call in calls)
    with pytest.raises(DriverDiedError):
        await controller.execute(BODY)


async def test_writers_that_wait_for_room_keep_their_order_and_may_leave() -> None:
    async with raw_driver(depth=8, capacity=20) as (controller, driver), anyio.create_task_group() as app:
        calls = [Call(controller) for _ in range(6)]
        for call in calls:
            app.start_soon(call)
        await anyio.wait_all_tasks_blocked()
        calls[3].scope.cancel()
        await anyio.wait_all_tasks_blocked()
        assert calls[3].settled == [None]
        for _ in range(5):
            await driver.wait_for(1)
            driver.answer()
    assert [call.result is not None for call in calls] == [True, True, True, False, True, True]


async def test_a_small_request_does_not_overtake_a_larger_one_that_waits_for_room() -> None:
    small = encode_request_body(Request((), ()), (), False, framed=True)
    room = 2 * (len(BODY) + DATUM_BYTES) // DATUM_BYTES - 1  # for one, and for a small one beside it
    assert len(BODY) + len(small) + 2 * DATUM_BYTES <= room * DATUM_BYTES
    async with raw_driver(depth=8, capacity=room) as (controller, driver), anyio.create_task_group() as app:
        calls = [Call(controller, body=body) for body in (BODY, BODY, small)]
        for call in calls:
            app.start_soon(call)
            await anyio.lowlevel.checkpoint()
        await anyio.wait_all_tasks_blocked()
        assert controller.in_flight == 1
        order = []
        for _ in calls:
            order.append((await driver.wait_for(1))[0])
            driver.answer()
    assert order == [1, 2, 3]
    assert all(call.result is not None for call in calls)


async def test_a_request_larger_than_the_queue_is_refused_before_anything_is_written() -> None:
    async with raw_driver(capacity=8) as (controller, driver):
        call = Call(controller)
        await call()
        assert isinstance(call.error, CallerError)
        assert "make the queues larger" in str(call.error)
        assert call.settled == [None]
        assert driver.take() == []
        assert controller.ended_by is None


def hostile_answers() -> list[tuple[str, bytes]]:
    good = encode_result(ResultPacket(Result(ErrorStatus.NONE), 1))
    return [
        ("another identity", encode_result(ResultPacket(Result(ErrorStatus.NONE), 12345))),
        ("no identity", encode_result(ResultPacket(Result(ErrorStatus.NONE)))),
        ("zeros", bytes(DATUM_BYTES)),
        ("ones", b"\xff" * DATUM_BYTES * 3),
        ("a wrong size", good[:8] + b"\x09" + good[9:]),
        ("an unknown status", good[:12] + b"\x63" + good[13:]),
        ("twice the same", good * 2),
        ("a request", BODY),
    ]


@pytest.mark.parametrize(("what", "datums"), hostile_answers(), ids=[what for what, _ in hostile_answers()])
async def test_a_hostile_answer_ends_the_burst_with_a_reason_and_hangs_nobody(what: str, datums: bytes) -> None:
    async with raw_driver() as (controller, driver), anyio.create_task_group() as app:
        calls = [Call(controller) for _ in range(3)]
        for call in calls:
            app.start_soon(call)
        await driver.wait_for(3)
        driver.say(datums)
        with anyio.fail_after(20):
            while controller.ended_by is None:
                await anyio.lowlevel.checkpoint()
    assert isinstance(controller.ended_by, PacketError)
    assert all(len(call.settled) == 1 for call in calls)
    assert sum(isinstance(call.error, ExecutionError) and isinstance(call.error.__cause__, PacketError) for call in calls) >= 2


async def test_an_answer_to_a_request_that_was_not_sent_yet_ends_the_burst() -> None:
    async with raw_driver(depth=1) as (controller, driver), anyio.create_task_group() as app:
        calls = [Call(controller) for _ in range(3)]
        app.start_soon(calls[0])
        assert await driver.wait_for(1) == [1]
        driver.answer()  # so that the answer's body is known
        while not calls[0].settled:
            await anyio.lowlevel.checkpoint()
        for call in calls[1:]:
            app.start_soon(call)
        assert await driver.wait_for(1) == [2]
        driver.answer(3)
        with anyio.fail_after(20):
            while controller.ended_by is None:
                await anyio.lowlevel.checkpoint()
    assert isinstance(controller.ended_by, PacketError)
    assert controller.lost == 1
    assert [call.settled for call in calls[1:]] == [[None], [None]]


async def test_a_driver_that_closes_its_queues_ends_the_burst() -> None:
    async with raw_driver() as (controller, driver), anyio.create_task_group() as app:
        call = Call(controller)
        app.start_soon(call)
        await driver.wait_for(1)
        await anyio.wait_all_tasks_blocked()
        driver.close()
    assert isinstance(call.error, ExecutionError)
    assert isinstance(controller.ended_by, QueueClosedError)
    assert len(call.settled) == 1
    assert controller.in_flight == 0


async def test_a_request_that_finds_the_queue_closed_ends_the_burst_too() -> None:
    async with raw_driver() as (controller, driver):
        driver.close()
        call = Call(controller)
        await call()
        assert isinstance(call.error, ExecutionError)
        assert call.error.status is ErrorStatus.DEVICE_UNAVAILABLE
        assert isinstance(controller.ended_by, QueueClosedError)
        assert call.settled == [None]


async def test_an_event_without_an_answer_costs_a_look_and_nothing_else() -> None:
    """A stale token, or a driver that writes the eventfd as it likes."""
    async with raw_driver(low_power=True) as (controller, driver), anyio.create_task_group() as app:
        call = Call(controller)
        app.start_soon(call)
        await driver.wait_for(1)
        for _ in range(20):
            os.eventfd_write(driver.results.reader_fd, 1)
            await anyio.wait_all_tasks_blocked()
        driver.answer()
    assert call.result == Result(ErrorStatus.NONE)


async def test_settled_may_start_and_end_things() -> None:
    """Called from the middle of a look: what it does to the burst must not disturb the settling of others."""
    async with raw_driver(depth=2) as (controller, driver), anyio.create_task_group() as app:
        other = Call(controller)
        given: list[Any] = []

        def end_it_all(result: Result | None) -> None:
            given.append(result)
            controller.end(CallerError("ended from within"))

        async def first() -> None:
            await controller.execute(BODY, end_it_all)

        app.start_soon(first)
        app.start_soon(other)
        identities = await driver.wait_for(2)
        await anyio.wait_all_tasks_blocked()
        driver.answer(identities[0])
    assert given == [Result(ErrorStatus.NONE)]
    assert isinstance(other.error, CallerError)
    assert len(other.settled) == 1


async def test_remembered_answers_do_not_grow_without_end() -> None:
    async with raw_driver() as (controller, driver), anyio.create_task_group() as app:
        for number in range(600):
            call = Call(controller)
            app.start_soon(call)
            await driver.wait_for(1)
            driver.answer(result=Result(ErrorStatus.GENERAL_FAILURE, message=str(number)))
            while call.result is None:
                await anyio.lowlevel.checkpoint()
            assert call.result.message == str(number)
        assert len(controller._decoded) <= 256


async def test_callers_that_find_their_answers_at_once_let_the_loop_run() -> None:
    """A brisk driver in a thread: the app's other tasks go on while one computes without a pause."""
    async with raw_driver() as (controller, driver):
        stop = False

        def serve() -> None:
            while not stop:
                if driver.requests.spin_until_readable(1_000_000):
                    while driver.take():
                        driver.answer()

        turns = 0

        async def other_task() -> None:
            nonlocal turns
            while True:
                turns += 1
                await anyio.lowlevel.checkpoint()

        async with anyio.create_task_group() as app:
            app.start_soon(other_task)
            thread = asyncio.get_running_loop().run_in_executor(None, serve)
            for _ in range(500):
                await controller.execute(BODY)
            stop = True
            await thread
            app.cancel_scope.cancel()
        assert turns > 2


async def test_a_thousand_requests_of_eight_callers_with_random_cancellation_settle_each_once() -> None:
    for low_power in (False, True):
        async with raw_driver(depth=4, capacity=64, low_power=low_power) as (controller, driver):
            calls: list[Call] = []

            async def caller(seed: int, controller: ExecutionBurstController = controller, calls: list[Call] = calls) -> None:
                for turn in range(60):
                    call = Call(controller)
                    calls.append(call)
                    async with anyio.create_task_group() as one:
                        one.start_soon(call)
                        if (seed * 7 + turn) % 5 == 0:
                            for _ in range((seed + turn) % 4):
                                await anyio.lowlevel.checkpoint()
                            call.scope.cancel()

            async def answer_all(driver: RawDriver = driver) -> None:
                while True:
                    await driver.requests.wait_readable()
                    for identity in driver.take():
                        driver.answer(identity)

            async with anyio.create_task_group() as app:
                app.start_soon(answer_all)
                async with anyio.create_task_group() as callers:
                    for seed in range(8):
                        callers.start_soon(caller, seed)
                with anyio.fail_after(20):
                    while controller.in_flight:
                        await anyio.lowlevel.checkpoint()
                app.cancel_scope.cancel()
            assert len(calls) == 480
            assert all(len(call.settled) == 1 for call in calls)


@pytest.mark.own_process("forks of test_controller.py")
async def test_a_child_of_fork_can_neither_write_to_nor_end_its_parents_burst() -> None:
    async with raw_driver() as (controller, driver):
        child = os.fork()
        if child == 0:
            try:
                controller.end(CallerError("in the child"))
                os._exit(0 if driver.requests.capacity else 1)
            finally:
                os._exit(2)
        _, status = os.waitpid(child, 0)  # noqa: ASYNC222 - it ends at once
        assert os.waitstatus_to_exitcode(status) == 0
        async with anyio.create_task_group() as app:
            call = Call(controller)
            app.start_soon(call)
            await driver.wait_for(1)
            driver.answer()
        assert call.result == Result(ErrorStatus.NONE)
