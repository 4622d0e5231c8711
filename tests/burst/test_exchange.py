"""The native shortcut for packets that come again: it does what the general path in Python does, or nothing at all."""

from __future__ import annotations

import gc
import os
import time
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import anyio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aionn import trace
from aionn.burst import DATUM_BYTES, ExecutionBurstController, PacketError, PoolReference, ResultPacket, controller, encode_result
from aionn.burst.packets import (
    encode_request_body,
    encode_result_body,
    identity_datum,
    is_framed_request,
    is_framed_result,
    read_identity,
    read_result_identity,
    result_identity_datum,
    split_requests,
    split_results,
)
from aionn.burst.spin_policy import APP_WINDOW_NS, SOON, SpinPolicy
from aionn.errors import CallerError, ExecutionError
from aionn.fmq import Caller, Lane, Lanes, Listener, MessageQueue
from aionn.hal.types import ErrorStatus, OutputShape, Result
from tests.burst.ends import Gate, RawDriver, packet, raw_client, raw_driver, request
from tests.fmq.queues import duplicated

pytestmark = pytest.mark.anyio

REQUESTS = [encode_request_body(request(offset), (PoolReference(0),), False, framed=True) for offset in (0, 128, 256)]
RESULTS = [
    encode_result_body(result, framed=True)
    for result in (
        Result(ErrorStatus.NONE),
        Result(ErrorStatus.NONE, (OutputShape((3,)),)),
        Result(ErrorStatus.GENERAL_FAILURE, (), message="no"),
    )
]
BODY = REQUESTS[0]
U63 = 2**63 - 1


class Taker:
    """A listener and one lane, which takes and answers in this thread, and never waits."""

    def __init__(self, requests: MessageQueue, results: MessageQueue) -> None:
        self._requests = requests
        self._lanes = Lanes()
        self.lane = Lane(self._lanes)
        self.listener = Listener(requests, results, 0)
        self.remember, self.forget, self.held = self.listener.remember, self.listener.forget, self.listener.held

    def next(self) -> Any:
        """The value of the next request, or None if it is not known, or there is none."""
        if not self.listener.lent and not self._lanes.lend(self.listener, self._lanes.announce):
            return None
        if not self._requests.available_to_read():
            return None
        return self.lane.next(None)

    def answer(self, body: bytes) -> bool:
        """Answer the request taken last. Whether there was room."""
        self._lanes.announce()
        assert self.lane.next(body) is None
        return self.listener.lent


class Ends(NamedTuple):
    """Both ends of both queues of a burst, in this process."""

    requests: MessageQueue
    results: MessageQueue
    caller: Caller
    requests_read: MessageQueue
    results_written: MessageQueue
    listener: Taker


@contextmanager
def exchange(capacity: int = 128) -> Iterator[Ends]:
    with ExitStack() as stack:
        queues = [MessageQueue.create(DATUM_BYTES, capacity) for _ in range(2)]
        queues += [MessageQueue.attach(duplicated(queue.descriptor())) for queue in queues]
        for queue in queues:
            stack.callback(queue.close)
        requests, results, requests_read, results_written = queues
        yield Ends(requests, results, Caller(requests, results), requests_read, results_written, Taker(requests_read, results_written))


def pieces(bodies: list[bytes], stamp: Any) -> st.SearchStrategy[bytes]:
    """Packets known and unknown, whole, mutated, cut and stuck together."""
    whole = st.builds(
        lambda body, first, second: body + stamp(first, second), st.sampled_from(bodies), st.integers(0, U63), st.integers(0, U63)
    )

    def mutate(data: bytes, at: int, value: int) -> bytes:
        at %= len(data)
        return data[:at] + bytes([value]) + data[at + 1 :]

    mutated = st.builds(mutate, whole, st.integers(0, 10_000), st.sampled_from((0, 1, 4, 7, 9, 10, 11, 255)))
    cut = st.builds(lambda data, count: data[: count % (len(data) // DATUM_BYTES) * DATUM_BYTES], whole, st.integers(0, 100))
    junk = st.binary(min_size=DATUM_BYTES, max_size=DATUM_BYTES)
    return st.one_of(whole, whole, mutated, cut, junk)


@settings(max_examples=300)
@given(st.lists(pieces(REQUESTS, identity_datum), max_size=8), st.integers(0, 3), st.booleans())
def test_the_listener_takes_the_requests_that_python_would_take(written: list[bytes], known: int, one_by_one: bool) -> None:
    """In the same order, with the same identities and deadlines; what is left over is what Python then cuts into the same packets."""
    with exchange() as ends:
        for body in REQUESTS[:known]:
            ends.listener.remember(body, (body,))
        expected: list[tuple[bytes, object]] = []
        found: list[tuple[bytes, object]] = []
        for datums in [b"".join(written)] if not one_by_one else written:
            if not datums:
                continue
            assert ends.requests.write(datums)
            for one in split_requests(datums):
                framed = is_framed_request(one) and one[:-DATUM_BYTES] in REQUESTS[:known]
                passed = framed and 0 < (read_identity(one)[1] or 0) <= time.monotonic_ns()
                expected.append((one[:-DATUM_BYTES], read_identity(one)) if framed and not passed else (one, None))
            while (value := ends.listener.next()) is not None:
                found.append((value[0], (ends.listener.lane.identity, ends.listener.lane.deadline_ns or None)))
                ends.listener.answer(RESULTS[0])
            rest = ends.requests_read.read(ends.requests_read.available_to_read())
            for one in split_requests(rest or b""):  # as the server does: once it goes the general way, all that lies there does
                framed = is_framed_request(one) and one[:-DATUM_BYTES] in REQUESTS[:known]
                passed = framed and 0 < (read_identity(one)[1] or 0) <= time.monotonic_ns()
                found.append((one[:-DATUM_BYTES], read_identity(one)) if framed and not passed else (one, None))
        assert found == expected


@settings(max_examples=300)
@given(st.lists(pieces(RESULTS, result_identity_datum), max_size=8), st.integers(0, 3))
def test_the_caller_takes_the_answers_that_python_would_take(written: list[bytes], known: int) -> None:
    datums = b"".join(written)
    with exchange() as ends:
        for body in RESULTS[:known]:
            ends.caller.remember(body, body)
        if datums:
            assert ends.results_written.write(datums)
        taken = [(body, identity, service_ns) for body, service_ns, identity in ends.caller.take()]
        rest = ends.results.read(ends.results.available_to_read()) or b""
        whole = split_results(datums)
        for index, (body, identity, service_ns) in enumerate(taken):
            assert is_framed_result(whole[index])
            assert (body, (identity, service_ns)) == (whole[index][:-DATUM_BYTES], read_result_identity(whole[index]))
        assert b"".join(whole[len(taken) :]) == rest
        following = split_results(rest)
        assert following == whole[len(taken) :]
        assert not following or following[0][:-DATUM_BYTES] not in RESULTS[:known] or not is_framed_result(following[0])


@given(st.sampled_from(REQUESTS), st.integers(0, U63), st.integers(0, U63), st.integers(0, 10))
def test_what_is_written_is_what_python_writes(body: bytes, identity: int, deadline_ns: int, before: int) -> None:
    with exchange(capacity=16) as ends:  # `before`: the packet wraps around the ring's end
        assert ends.requests.write(bytes(DATUM_BYTES * before))
        assert ends.requests_read.read(before) is not None
        assert ends.caller.send(body, identity, deadline_ns)
        ends.listener.remember(body, "known")
        assert ends.requests_read.peek(ends.requests_read.available_to_read()) == body + identity_datum(identity, deadline_ns)
        began_ns = time.monotonic_ns()
        assert ends.listener.next() == ("known" if not deadline_ns or deadline_ns > time.monotonic_ns() else None)
        if deadline_ns == 0:
            assert ends.listener.answer(RESULTS[0])
            answer = ends.results.read(ends.results.available_to_read())
            assert answer is not None
            found, service_ns = read_result_identity(answer)
            assert (found, answer) == (identity, RESULTS[0] + result_identity_datum(identity, service_ns))
            assert 0 < service_ns <= time.monotonic_ns() - began_ns


@pytest.mark.parametrize(
    ("what", "answer", "taken"),
    [
        ("the answer", RESULTS[0] + result_identity_datum(7, 5), True),
        ("another answer", RESULTS[2] + result_identity_datum(7, 5), False),
        ("an answer to another request", RESULTS[0] + result_identity_datum(8, 5), False),
        ("two answers", (RESULTS[0] + result_identity_datum(7, 5)) * 2, False),
        ("an answer without identity", encode_result(ResultPacket(Result(ErrorStatus.NONE))), False),
        ("half an answer", RESULTS[0], False),
        ("nothing", b"", False),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_call_takes_the_one_known_answer_to_its_request_and_nothing_else(what: str, answer: bytes, taken: bool) -> None:
    with exchange() as ends:
        ends.caller.remember(RESULTS[0], "known")
        if answer:
            assert ends.results_written.write(answer)
        found = ends.caller.call(BODY, 7, 9, U63, 1000)
        assert found == (("known", 5) if taken else None), what
        assert ends.requests_read.read(ends.requests_read.available_to_read()) == BODY + identity_datum(7, 9)
        left = ends.results.available_to_read()
        assert (ends.results.read(left) if left else b"") == (b"" if taken else answer)
        assert ends.caller.waits == int(taken)


def test_what_cannot_be_written_is_left_to_the_general_path() -> None:
    with exchange(capacity=12) as ends:
        assert ends.caller.call(BODY, 1, 0, time.monotonic_ns(), 0) is False  # too late
        assert ends.caller.call(BODY + b"x", 1, 0, U63, 0) is False
        assert ends.caller.call(bytes(DATUM_BYTES * 1000), 1, 0, U63, 0) is False
        assert ends.requests_read.available_to_read() == 0
        assert ends.caller.call(BODY, 1, 0, U63, 0) is None
        assert ends.caller.call(BODY, 2, 0, U63, 0) is False  # no room
        assert ends.caller.send(BODY, 2, 0) is False
        ends.listener.remember(BODY, "known")
        for identity in range(1, 6):
            assert identity == 1 or ends.caller.send(BODY, identity, 0)
            assert ends.listener.next() == "known"
            assert ends.listener.answer(RESULTS[0]) == (identity < 5)
        ((body, identity, service_ns),) = ends.listener.held()
        assert (body, identity) == (RESULTS[0], 5)
        assert service_ns > 0
        assert ends.listener.held() == []
        ends.results.close()
        assert ends.caller.call(BODY, 3, 0, U63, 0) is False
        assert ends.caller.take() == []
        ends.requests_read.close()
        assert ends.listener.next() is None
        assert ends.caller.send(BODY, 3, 0) is False


def test_a_child_of_fork_writes_and_takes_nothing() -> None:
    with exchange() as ends:
        ends.caller.remember(RESULTS[0], "known")
        ends.listener.remember(BODY, "known")
        assert ends.results_written.write(RESULTS[0] + result_identity_datum(1, 0))
        assert ends.requests.write(BODY + identity_datum(1, None))
        child = os.fork()
        if child == 0:
            caller, listener = ends.caller, ends.listener
            done = (caller.call(BODY, 2, 0, U63, 0), caller.send(BODY, 2, 0), caller.take(), listener.next())
            os._exit(0 if done == (False, False, [], None) else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert ends.listener.next() == "known"
        assert ends.caller.take() == [("known", 0, 1)]


def test_a_cycle_of_many_bodies_is_known_as_a_whole_and_released_at_the_bound() -> None:
    class Value:
        pass

    most = 4096  # EXCHANGE_KNOWN in exchange.h
    bodies = [encode_request_body(request(), (PoolReference(slot),), False, framed=True) for slot in range(most + 1)]
    with exchange(capacity=1024) as ends:
        gone = []
        for body in bodies[:most]:
            value = Value()
            gone.append(weakref.ref(value))
            ends.listener.remember(body, value)
            ends.listener.remember(body, value)  # again: no second place
        del value
        for turn in range(2):
            for body, reference in zip(bodies[:300], gone, strict=False):
                assert ends.requests.write(body + identity_datum(turn + 1, None))
                assert ends.listener.next() is reference()
                assert ends.listener.answer(RESULTS[0])
                assert ends.results.read(ends.results.available_to_read())
        assert None not in [reference() for reference in gone]
        ends.listener.remember(bodies[most], most)
        gc.collect()
        assert [reference() for reference in gone] == [None] * most
        assert ends.requests.write(bodies[most] + identity_datum(1, None))
        assert ends.listener.next() == most
        assert ends.listener.answer(RESULTS[0])
        assert ends.requests.write(bodies[0] + identity_datum(1, None))
        assert ends.listener.next() is None


def test_a_value_that_lets_go_of_the_exchange_is_no_danger() -> None:
    class Closes:
        def __init__(self, ends: Ends) -> None:
            self.ends = ends

        def __del__(self) -> None:
            self.ends.listener.forget()
            self.ends.requests_read.close()

    with exchange() as ends:
        ends.listener.remember(BODY, Closes(ends))
        ends.listener.remember(BODY, None)
        assert ends.listener.next() is None
        assert ends.requests_read.closed


def test_an_exchange_takes_two_open_queues_of_datums_and_nothing_else() -> None:
    queues = [MessageQueue.create(DATUM_BYTES, 8), MessageQueue.create(DATUM_BYTES, 8), MessageQueue.create(8, 8)]
    kinds: list[Any] = [Caller, lambda *queues: Listener(*queues, 0)]  # type: ignore[call-arg]
    for kind in kinds:
        for pair in ((queues[0], queues[2]), (queues[2], queues[0]), (queues[0], 5), (None, queues[0])):
            with pytest.raises(ValueError, match="24-byte elements"):
                kind(*pair)
        with pytest.raises(TypeError):
            kind(queues[0])
        made = kind(queues[0], queues[1])
        with pytest.raises(TypeError):
            made.remember("text", 1)
    caller = Caller(queues[0], queues[1])
    with pytest.raises(OverflowError):
        caller.send(BODY, 2**64, 0)
    for queue in queues:
        queue.close()
    with pytest.raises(ValueError, match="open"):
        Caller(queues[0], queues[1])


@contextmanager
def two_cpus(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """SpinPolicy also where the tests have one CPU."""
    with monkeypatch.context() as patch:
        patch.setattr("aionn.burst.spin_policy.usable_cpus", lambda: 2)
        yield


# ---- the app's end ------------------------------------------------------------------------------------------------------


async def warm(burst: ExecutionBurstController, driver: RawDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """One answer the general way, so that its like is known; and no clock that could end a test's luck."""
    monkeypatch.setattr(controller, "YIELD_NS", 10**15)
    async with anyio.create_task_group() as app:
        app.start_soon(burst.execute, BODY)
        await driver.wait_for(1)
        driver.answer()
    burst._spin = SpinPolicy(APP_WINDOW_NS, low_power=False, cpus=2)


def in_advance(driver: RawDriver, identity: int, status: ErrorStatus = ErrorStatus.NONE) -> None:
    """The answer lies in the queue before the request does: as quick as a driver can be."""
    driver.say(encode_result(ResultPacket(Result(status), identity, 7)))


async def test_a_known_answer_that_comes_at_once_is_had_without_an_await(monkeypatch: pytest.MonkeyPatch) -> None:
    async with raw_driver() as (burst, driver):
        await warm(burst, driver, monkeypatch)
        for identity in (2, 3):
            in_advance(driver, identity)
            assert burst.at_once(BODY) == (Result(ErrorStatus.NONE), 7)
            assert (burst.in_flight, driver.take()) == (0, [identity])
            driver.read.clear()
        in_advance(driver, 4)
        settled: list[Result | None] = []
        assert await burst.execute(BODY, settled.append) == (Result(ErrorStatus.NONE), 7)
        assert settled == [Result(ErrorStatus.NONE)]


async def test_an_unknown_answer_that_comes_at_once_is_taken_the_general_way(monkeypatch: pytest.MonkeyPatch) -> None:
    async with raw_driver() as (burst, driver):
        await warm(burst, driver, monkeypatch)
        for identity in (2, 3):  # the second time it is known
            in_advance(driver, identity, ErrorStatus.GENERAL_FAILURE)
            settled: list[Result | None] = []
            sent = burst.at_once(BODY)
            assert isinstance(sent, int) == (identity == 2)
            if isinstance(sent, int):
                assert (sent, burst.in_flight) == (2, 1)
                assert (await burst.execute(BODY, settled.append, None, sent))[0] == Result(ErrorStatus.GENERAL_FAILURE)
                assert settled == [Result(ErrorStatus.GENERAL_FAILURE)]
        assert burst.in_flight == 0


async def test_a_request_sent_at_once_and_not_answered_waits_as_any_other(monkeypatch: pytest.MonkeyPatch) -> None:
    async with raw_driver() as (burst, driver):
        await warm(burst, driver, monkeypatch)
        settled: list[Result | None] = []
        for cancelled in (False, True):
            sent = burst.at_once(BODY)
            assert isinstance(sent, int)
            assert sent == burst._last_id
            assert burst.at_once(BODY) == 0  # another one is in flight
            async with anyio.create_task_group() as app:
                app.start_soon(burst.execute, BODY, settled.append, None, sent)
                await driver.wait_for(1)
                await anyio.lowlevel.checkpoint()
                if cancelled:
                    app.cancel_scope.cancel()
                else:
                    driver.answer()
            if cancelled:
                assert (len(settled), burst.in_flight) == (1, 1)
                driver.answer()
                with anyio.fail_after(20):
                    while burst.in_flight:
                        await anyio.lowlevel.checkpoint()
        assert settled == [Result(ErrorStatus.NONE)] * 2


async def test_a_false_answer_at_once_ends_the_burst_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    async with raw_driver() as (burst, driver):
        await warm(burst, driver, monkeypatch)
        in_advance(driver, 99)
        settled: list[Result | None] = []
        sent = burst.at_once(BODY)
        assert isinstance(sent, int)
        with pytest.raises(ExecutionError, match="99"):
            await burst.execute(BODY, settled.append, None, sent)
        assert settled == [None]
        assert burst.at_once(BODY) == 0
        assert isinstance(burst.ended_by, PacketError)
        with pytest.raises(ExecutionError, match="99"):
            await burst.execute(BODY)


async def test_nothing_is_sent_at_once_where_that_may_not_be(monkeypatch: pytest.MonkeyPatch) -> None:
    async with raw_driver(low_power=True) as (burst, driver):
        assert burst.at_once(BODY) == 0
        await warm(burst, driver, monkeypatch)
        with trace.record() as recording:
            assert burst.at_once(BODY) == 0
            in_advance(driver, 2)
            await burst.execute(BODY)
        assert [span.name for span in recording.spans] == ["burst.queue_wait", "burst.execute"]
        driver.take()
        driver.read.clear()
        monkeypatch.setattr(burst, "_yield_by_ns", 0)  # the loop must run first
        assert burst.at_once(BODY) == 0
        assert driver.take() == []
        burst.end(CallerError("over"))
        assert burst.at_once(BODY) == 0


async def test_a_nudge_wakes_a_reader_that_sleeps_and_awaits_it_and_no_other() -> None:
    with exchange() as ends:
        queue = ends.requests_read
        ends.caller.nudge(SOON)  # nobody sleeps: nothing is left behind that would make anybody look later
        assert queue.peek_flag() == 0
        async with anyio.create_task_group() as app:
            for flag in (0, SOON):
                done = anyio.Event()

                async def wait(flag: int = flag, done: anyio.Event = done) -> None:
                    await queue.wait_readable(or_flag=flag)
                    done.set()

                app.start_soon(wait)
                await anyio.wait_all_tasks_blocked()
                ends.caller.nudge(SOON)
                if flag:
                    with anyio.fail_after(20):
                        await done.wait()
                    assert queue.take_flag(SOON) == SOON
                else:
                    assert queue.peek_flag() == 0
                    await anyio.wait_all_tasks_blocked()
                    assert not done.is_set()
                    assert ends.requests.write(BODY)
                    with anyio.fail_after(20):
                        await done.wait()
                    assert queue.read(len(BODY) // DATUM_BYTES) == BODY
        ends.requests.close()
        ends.caller.nudge(SOON)


@pytest.mark.parametrize("low_power", [False, True])
async def test_only_a_burst_that_may_stay_awake_nudges(low_power: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    with two_cpus(monkeypatch):
        async with raw_driver(low_power=low_power) as (burst, driver):
            queue = driver.requests
            assert queue.arm_reader(1, SOON)
            burst.soon()
            assert queue.take_flag(SOON) == (0 if low_power else SOON)
            queue.disarm_reader()
            assert (burst.at_once(BODY) == 0) == low_power  # the loop has just run


@pytest.mark.parametrize("low_power", [False, True])
async def test_a_nudged_server_answers_what_comes_and_sleeps_when_nothing_does(low_power: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    with two_cpus(monkeypatch):
        async with raw_client(low_power=low_power) as client:
            caller = Caller(client.requests, client.results)
            for identity in range(1, 30):
                for _ in range(identity % 5):  # asleep, or on its way there
                    await anyio.lowlevel.checkpoint()
                caller.nudge(SOON)
                if identity % 2:
                    assert (await client.answer_to(packet(identity=identity))).identity == identity
            await anyio.wait_all_tasks_blocked()


# ---- the driver's end -----------------------------------------------------------------------------------------------------


async def test_an_awake_server_never_reaches_the_memory_of_a_freed_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    with two_cpus(monkeypatch):
        async with raw_client(low_power=False) as client:
            for round_ in range(3):
                memory = client.slots.add(0)
                for turn in range(20):  # from the ninth on they run in the native loop
                    memory[0] = turn
                    identity = 100 * round_ + turn
                    assert (await client.answer_to(packet(identity=identity, measure_timing=False))).identity == identity
                    assert memory[16] == turn + 1
                await client.server.free_memory(0)
                memory[16] = -1
            assert memory[16] == -1
            assert client.slots.asked == [[0]] * 3


async def test_an_awake_server_answers_failures_late_requests_and_slow_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    with two_cpus(monkeypatch):
        async with raw_client(low_power=False) as client:

            def fail() -> None:
                raise ValueError("bad")

            for identity in range(1, 40):
                client.engine.act = fail if identity % 5 == 0 else None
                late = identity % 7 == 0
                deadline_ns = 1 if late else time.monotonic_ns() + 10**11
                answer = await client.answer_to(packet(identity=identity, measure_timing=False, deadline_ns=deadline_ns))
                wanted = (
                    ErrorStatus.MISSED_DEADLINE_TRANSIENT
                    if late
                    else ErrorStatus.GENERAL_FAILURE
                    if client.engine.act
                    else ErrorStatus.NONE
                )
                assert (answer.identity, answer.result.status) == (identity, wanted)
            assert client.engine.runs == 39 - 39 // 7


async def test_a_slow_model_on_an_awake_server_runs_in_its_thread_and_answers_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate()
    with two_cpus(monkeypatch):
        async with raw_client(low_power=False) as client:
            await client.answer_to(packet(identity=1, measure_timing=False))
            client.engine.act = gate
            for identity in range(2, 6):
                await client.send(packet(identity=identity, measure_timing=False))
            await gate.entered()
            gate.open(4)
            assert [(await client.receive()).identity for _ in range(4)] == [2, 3, 4, 5]
            assert client.engine.runs == 5


async def test_answers_of_an_awake_server_wait_for_room(monkeypatch: pytest.MonkeyPatch) -> None:
    with two_cpus(monkeypatch):
        async with raw_client(low_power=False, result_capacity=6) as client:  # two answers
            for identity in range(1, 12):
                await client.answer_to(packet(identity=identity, measure_timing=False))
            for identity in range(20, 30):
                await client.send(packet(identity=identity, measure_timing=False))
            with anyio.fail_after(20):
                while client.results.available_to_read() < 6:
                    await anyio.lowlevel.checkpoint()
            assert [(await client.receive()).identity for _ in range(10)] == list(range(20, 30))
