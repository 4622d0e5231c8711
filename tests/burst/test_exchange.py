"""The native shortcut for packets that come again: it does what the general path in Python does, or nothing at all."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import sys
import time
import weakref
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import AsyncExitStack, ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

import anyio
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from aionn import trace
from aionn.burst.controller import ExecutionBurstController
from aionn.burst.packets import (
    DATUM_BYTES,
    PacketError,
    PoolReference,
    ResultPacket,
    encode_request_body,
    encode_result_body,
    is_framed_request,
    is_framed_result,
    read_identity,
    read_result_identity,
    result_identity_datum,
    split_requests,
    split_results,
)
from aionn.burst.spin_policy import APP_WINDOW_NS
from aionn.errors import CallerError, DeadlineError, ExecutionError
from aionn.fmq import LONGEST_KNOWN, SOON, Caller, Lane, Lanes, Listener, MessageQueue
from aionn.hal.types import ErrorStatus, OutputShape, Result
from tests.burst.ends import Gate, RawDriver, packet, raw_client, raw_driver, request
from tests.burst.whole_packets import encode_result, identity_datum
from tests.fmq.queues import duplicated

pytestmark = [pytest.mark.anyio, pytest.mark.both_loops]

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
        """The value of the next request, or None if it is not known or has not come."""
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
        caller = Caller(requests, results)
        stack.callback(caller.end)  # or it would go on to take turns with those of later tests
        yield Ends(requests, results, caller, requests_read, results_written, Taker(requests_read, results_written))


class Future:
    """A future without a loop."""

    def __init__(self) -> None:
        self.answer: list[Any] = []

    def set_result(self, answer: Any) -> None:
        assert not self.answer
        self.answer.append(answer)

    def done(self) -> bool:
        return bool(self.answer)


class Calls:
    """What a `Caller` has asked Python for."""

    def __init__(self, caller: Caller, depth: int = 1000, window_ns: int = 0) -> None:
        self.caller = caller
        self.looks: list[Any] = []
        self.general = self.unsendable = 0
        self.deadlines: list[int] = []
        self.captured_ns = 0
        caller.begin(depth, window_ns, self.calls())

    def calls(self) -> Any:
        return (Future, self.looks.append, self.take_unknown, self.cannot_send, self.deadlines.append, lambda: self.captured_ns)

    def take_unknown(self) -> None:
        """End the exchange, so that what the native part has left in the queue can be seen."""
        self.general += 1
        self.caller.end()

    def cannot_send(self) -> None:
        self.unsendable += 1


def pieces(bodies: list[bytes], stamp: Any, identities: Any = st.integers(0, U63)) -> st.SearchStrategy[bytes]:  # noqa: B008
    """Packets known and unknown, whole, mutated, cut and stuck together."""
    whole = st.builds(lambda body, first, second: body + stamp(first, second), st.sampled_from(bodies), identities, st.integers(0, U63))

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
@given(st.lists(pieces(RESULTS, result_identity_datum, st.integers(1, 8)), max_size=8), st.integers(0, 3))
def test_the_caller_takes_the_answers_that_python_would_take(written: list[bytes], known: int) -> None:
    """In order, up to the first one that is not known or whose request is not in flight. That one and the rest stay in the queue."""
    datums = b"".join(written)
    with exchange(capacity=1000) as ends:
        calls = Calls(ends.caller)
        for body in RESULTS[:known]:
            ends.caller.remember(body, body)
        sent: list[Any] = [ends.caller.send(BODY, None, 0) for _ in range(8)]
        in_flight = dict(enumerate(sent, 1))
        if datums:
            assert ends.results_written.write(datums)
        whole = split_results(datums)
        taken = 0
        for one in whole:
            if not is_framed_result(one) or one[:-DATUM_BYTES] not in RESULTS[:known]:
                break
            identity, service_ns = read_result_identity(one)
            if identity not in in_flight:
                break
            in_flight.pop(identity).expected = (one[:-DATUM_BYTES], service_ns)
            taken += 1
        ends.caller.event()
        rest = b"".join(whole[taken:])
        assert (ends.results.read(ends.results.available_to_read()) or b"") == rest
        assert (calls.general, ends.caller.answers) == (bool(rest), taken)
        unanswered = [None] if rest else []
        assert [future.answer for future in sent] == [[future.expected] if hasattr(future, "expected") else unanswered for future in sent]


@given(st.sampled_from(REQUESTS), st.integers(1, 20), st.integers(0, U63), st.integers(0, 10))
def test_what_is_written_is_what_python_writes(body: bytes, identity: int, deadline_ns: int, before: int) -> None:
    with exchange(capacity=16) as ends:  # `before`: the packet wraps around the ring's end
        assert ends.requests.write(bytes(DATUM_BYTES * before))
        assert ends.requests_read.read(before) is not None
        Calls(ends.caller)
        for number in range(1, identity + 1):
            assert ends.caller.send(body, None, deadline_ns) is not None
            written = ends.requests_read.peek(ends.requests_read.available_to_read())
            assert written == body + identity_datum(number, deadline_ns)
            if number < identity:
                assert ends.requests_read.read(ends.requests_read.available_to_read())
        ends.listener.remember(body, "known")
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
        ("the answer", RESULTS[0] + result_identity_datum(1, 5), True),
        ("another answer", RESULTS[2] + result_identity_datum(1, 5), False),
        ("an answer to another request", RESULTS[0] + result_identity_datum(8, 5), False),
        ("two answers", (RESULTS[0] + result_identity_datum(1, 5)) * 2, False),
        ("an answer without identity", encode_result(ResultPacket(Result(ErrorStatus.NONE))), False),
        ("half an answer", RESULTS[0], False),
        ("nothing", b"", False),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_call_takes_the_one_known_answer_to_its_request_and_nothing_else(what: str, answer: bytes, taken: bool) -> None:
    with exchange() as ends:
        calls = Calls(ends.caller, window_ns=APP_WINDOW_NS)
        ends.caller.yield_by_ns, ends.caller.inline_ns = U63, 1000
        ends.caller.remember(RESULTS[0], "known")
        if answer:
            assert ends.results_written.write(answer)
        found: Any = ends.caller.send(BODY, None, 9)
        assert (found == ("known", 5)) == taken, what
        assert ends.requests_read.read(ends.requests_read.available_to_read()) == BODY + identity_datum(1, 9)
        left = ends.results.available_to_read()
        # Of two answers any look takes the first one. The general path judges the second one.
        expected = b"" if taken else answer[len(answer) // 2 :] if what == "two answers" else answer
        assert (ends.results.read(left) if left else b"") == expected
        assert ends.caller.answers_at_once == int(taken)
        assert calls.general == (bool(answer) and not taken)


def test_what_cannot_be_written_is_not_sent() -> None:
    with exchange(capacity=12) as ends:
        assert ends.caller.send(BODY, None, 0) is None  # before `begin`
        calls = Calls(ends.caller)
        assert ends.caller.send(BODY + b"x", None, 0) is None
        assert ends.caller.send(bytes(DATUM_BYTES * 12), None, 0) is None
        assert (ends.requests_read.available_to_read(), ends.caller.in_flight) == (0, 0)
        first: Any = ends.caller.send(BODY, None, 0)
        second: Any = ends.caller.send(BODY, None, 0)  # no room: it waits
        assert (first.done(), second.done(), ends.caller.in_flight) == (False, False, 1)
        ends.listener.remember(BODY, "known")
        ends.caller.remember(RESULTS[0], "fine")
        for identity in (1, 2):
            assert ends.listener.next() == "known"
            assert ends.listener.lane.identity == identity
            assert ends.listener.answer(RESULTS[0])
            ends.caller.event()
            assert ends.caller.answers == identity
        assert [first.answer[0][0], second.answer[0][0], ends.caller.in_flight] == ["fine", "fine", 0]
        for identity in range(3, 8):  # the results queue has room for four
            assert ends.requests.write(BODY + identity_datum(identity, None))
            assert ends.listener.next() == "known"
            assert ends.listener.answer(RESULTS[0]) == (identity < 7)
        ((body, identity, service_ns),) = ends.listener.held()
        assert (body, identity) == (RESULTS[0], 7)
        assert service_ns > 0
        assert ends.listener.held() == []
        ends.caller.event()  # answers to nothing stay where they are
        assert (ends.caller.answers, calls.general) == (2, 1)
        ends.results.close()
        assert ends.caller.send(BODY, None, 0) is None
        ends.caller.event()
        ends.requests_read.close()
        assert ends.listener.next() is None
        assert ends.caller.end() == 0


def test_a_request_longer_than_any_that_is_recognised_is_written_whole() -> None:
    body = encode_request_body(request(inputs=200), (PoolReference(0),), False, framed=True)
    assert len(body) > LONGEST_KNOWN
    with exchange(capacity=len(body) // DATUM_BYTES + 5) as ends:
        Calls(ends.caller)
        for identity in (1, 2):  # the second one wraps
            assert ends.caller.send(body, None, 0) is not None
            assert ends.requests_read.read(len(body) // DATUM_BYTES + 1) == body + identity_datum(identity, None)


def test_requests_settle_once_in_any_order_and_leave_in_two_ways() -> None:
    with exchange(capacity=200) as ends:
        Calls(ends.caller, depth=3)
        ends.caller.remember(RESULTS[0], "fine")
        settled: list[Any] = []

        def note(number: int, value: object) -> None:
            settled.append((number, value))

        sent: list[Any] = [ends.caller.send(BODY, partial(note, number), 0) for number in range(6)]
        assert ends.caller.in_flight == 3
        assert ends.requests_read.read(2 * (len(BODY) // DATUM_BYTES + 1))  # the driver has two of them
        assert ends.caller.leave(sent[1], None)  # in flight: settled by the answer
        assert not ends.caller.leave(sent[1], None)  # once
        assert not ends.caller.leave(sent[4], None)  # not sent: settled now
        assert settled == [(4, None)]
        for identity in (2, 1, 3, 4, 6):  # the fifth one has left
            assert ends.results_written.write(RESULTS[0] + result_identity_datum(identity, identity))
            ends.caller.event()
        assert settled == [(4, None), (1, "fine"), (0, "fine"), (2, "fine"), (3, "fine"), (5, "fine")]
        assert [future.answer for future in sent] == [[("fine", 1)], [], [("fine", 3)], [("fine", 4)], [], [("fine", 6)]]
        unsent: list[Any] = [ends.caller.send(BODY, None, 0) for _ in range(5)]
        assert ends.caller.end() == 3
        assert [future.answer for future in unsent] == [[None]] * 5
        assert ends.caller.send(BODY, None, 0) is None
        assert ends.caller.end() == 0


def test_a_request_that_its_caller_leaves_is_run_or_gives_back_at_once_what_it_holds() -> None:
    with exchange() as ends:
        Calls(ends.caller)
        ends.caller.remember(RESULTS[0], "fine")
        ends.listener.remember(BODY, "known")
        settled: list[Any] = []
        sent: list[Any] = [ends.caller.send(BODY, settled.append, 0) for _ in range(2)]
        assert ends.listener.next() == "known"
        assert ends.caller.leave(sent[0], None)  # it is run
        assert settled == []
        assert not ends.caller.leave(sent[1], None)
        assert settled == [None]
        ends.listener.answer(RESULTS[0])
        ends.listener._lanes.announce()
        assert ends.listener.lane.next(None) is None
        assert not ends.listener.listener.lent  # the second one is given back to the task, which answers it
        assert ends.requests_read.available_to_read() == len(BODY) // DATUM_BYTES + 1
        ends.caller.event()
        assert settled == [None, "fine"]
        assert ends.results_written.write(RESULTS[0] + result_identity_datum(2, 7))
        ends.caller.event()
        assert (settled, ends.caller.in_flight) == ([None, "fine"], 0)


def test_up_to_depth_withdrawn_requests_leave_their_places_to_the_next_ones() -> None:
    with exchange() as ends:
        Calls(ends.caller, depth=2)
        ends.caller.remember(RESULTS[0], "fine")
        sent: list[Any] = [ends.caller.send(BODY, None, 0) for _ in range(3)]
        assert ends.caller.in_flight == 2
        assert not ends.caller.leave(sent[0], None)  # the third one, which waited, goes in
        assert ends.caller.in_flight == 3
        sent.append(ends.caller.send(BODY, None, 0))
        assert ends.caller.in_flight == 3  # the fourth one waits for the second and the third one
        ends.caller.make_late(3)
        assert ends.caller.in_flight == 4
        ends.caller.make_late(3)  # its place is given once
        sent += [ends.caller.send(BODY, None, 0) for _ in range(2)]
        assert ends.caller.in_flight == 4
        assert not ends.caller.leave(sent[1], None)  # the third one withdrawn keeps its place
        assert not ends.caller.leave(sent[3], None)
        assert ends.caller.in_flight == 4

        def answer(identity: int) -> None:
            assert ends.results_written.write(RESULTS[0] + result_identity_datum(identity, 7))
            ends.caller.event()

        for identity, in_flight in ((1, 4), (2, 4), (3, 3), (4, 2)):  # two of them let the others in
            answer(identity)
            assert ends.caller.in_flight == in_flight
        assert [future.answer for future in sent] == [[], [], [("fine", 7)], [], [], []]
        for identity in (5, 6):
            answer(identity)
        assert [future.answer for future in sent[4:]] == [[("fine", 7)]] * 2
        sent += [ends.caller.send(BODY, None, 0) for _ in range(3)]
        assert ends.caller.in_flight == 2  # again two places


class InterruptedCalls(Calls):
    """The handler of a signal raises while a loop takes a call."""

    def calls(self) -> Any:
        create_future, _, *others = super().calls()
        return (create_future, self.interrupt, *others)

    def interrupt(self, look_again: object) -> None:
        self.looks.append(look_again)
        raise KeyboardInterrupt


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="an end looks for its peer only if that was seen on another CPU")
def test_what_a_signals_handler_raises_while_a_look_is_scheduled_comes_with_the_answer() -> None:
    usable = os.sched_getaffinity(0)
    here, there, *_ = sorted(usable)
    settled: list[Any] = []
    try:
        with exchange() as ends:
            calls = InterruptedCalls(ends.caller, window_ns=1_000_000_000)
            ends.caller.remember(RESULTS[0], "fine")
            for identity in (1, 2):
                os.sched_setaffinity(0, {here})
                ends.caller.send(BODY, settled.append, 0)
                os.sched_setaffinity(0, {there})
                assert ends.results_written.write(RESULTS[0] + result_identity_datum(identity, 7))
                if identity == 1:
                    ends.caller.event()  # until then, this end did not know where its peer runs
            assert len(calls.looks) == 1
            with pytest.raises(KeyboardInterrupt):
                ends.caller.event()
            assert settled == ["fine", "fine"]
    finally:
        os.sched_setaffinity(0, usable)


def test_a_settled_callback_may_end_or_send_and_one_that_raises_harms_no_other(recwarn: pytest.WarningsRecorder) -> None:
    with exchange() as ends:
        Calls(ends.caller)
        ends.caller.remember(RESULTS[0], "fine")
        again: list[Any] = []

        def send(_: object) -> None:
            again.append(ends.caller.send(BODY, None, 0))

        def fail(_: object) -> None:
            raise LookupError("on purpose")

        def end(_: object) -> None:
            ends.caller.end()

        raised: list[Any] = []
        hook, sys.unraisablehook = sys.unraisablehook, raised.append
        try:
            futures: list[Any] = [ends.caller.send(BODY, act, 0) for act in (send, fail, end, None)]
            for identity in range(1, 5):
                assert ends.results_written.write(RESULTS[0] + result_identity_datum(identity, 0))
            ends.caller.event()
        finally:
            sys.unraisablehook = hook
        assert [future.answer for future in futures] == [[("fine", 0)]] * 3 + [[None]]
        assert again[0].answer == [None]
        assert [one.exc_type for one in raised] == [LookupError]


def test_a_caller_that_nobody_ends_is_collected_with_what_its_requests_hold() -> None:
    class Held:
        def __call__(self, _: object) -> None: ...

    with exchange() as ends:
        caller = Caller(ends.requests, ends.results)
        calls = Calls(caller)
        held = Held()
        held.caller = caller  # type: ignore[attr-defined]
        caller.send(BODY, held, 0)
        gone = weakref.ref(held), weakref.ref(calls)
        del caller, calls, held
        gc.collect()
        assert [reference() for reference in gone] == [None, None]


def test_one_timer_serves_the_earliest_deadline() -> None:
    with exchange() as ends:
        calls = Calls(ends.caller, depth=2)
        later = time.monotonic_ns() + 10**15
        futures = [ends.caller.send(BODY, None, deadline_ns) for deadline_ns in (later, later + 9, 1, later - 9, 0)]
        assert calls.deadlines == [later, 1]
        assert ends.caller.late() == (later - 9, [(futures[2], False)], (0, 0))
        assert ends.caller.late() == (later - 9, [], (0, 0))
        ends.caller.send(BODY, None, later)
        assert calls.deadlines == [later, 1]
        ends.caller.send(BODY, None, later - 10)
        assert calls.deadlines == [later, 1, later - 10]


def test_inputs_that_do_not_fit_are_not_sent() -> None:
    with exchange() as ends:
        Calls(ends.caller)
        places: dict[str, NDArray[Any]] = {"x": np.zeros((2, 3), np.float32), "y": np.zeros(4, np.int64)}
        x, y = np.arange(6, dtype=np.float32).reshape(2, 3), np.arange(4)

        class Sub(np.ndarray):
            pass

        unfit: list[Any] = [
            {},
            {"x": x},
            {"x": x, "z": y},
            {"x": x, "y": y, "z": y},
            {"x": x.astype(np.float64), "y": y},
            {"x": x.astype(">f4"), "y": y},
            {"x": x.T, "y": y},
            {"x": x.reshape(6), "y": y},
            {"x": x.tolist(), "y": y},
            {"x": x.view(Sub), "y": y},
            {"x": None, "y": y},
            OrderedDict(x=x, y=y),
            [x, y],
            None,
        ]
        for inputs in unfit:
            assert ends.caller.post(places, inputs, BODY, 0) is None
        assert ends.requests_read.available_to_read() == 0
        strided = np.zeros((2, 6), np.float32)[:, ::2]
        strided[...] = x
        native = x.astype(np.dtype("<f4"))  # equal, whether or not it is the same object
        for number, array in enumerate((x, strided, native), 1):
            places["x"][...] = -1
            assert ends.caller.post(places, {"y": y, "x": array}, BODY, 0) is not None
            np.testing.assert_array_equal(places["x"], x)
            np.testing.assert_array_equal(places["y"], y)
            assert ends.caller.in_flight == number
        wrong: list[Any] = [(), (places, {}, BODY), (None, {}, BODY, 0), (places, {"x": x, "y": y}, "text", 0)]
        for arguments in wrong:
            with pytest.raises(TypeError):
                ends.caller.post(*arguments)


@pytest.mark.own_process
def test_a_child_of_fork_writes_and_takes_nothing() -> None:
    with exchange() as ends:
        Calls(ends.caller)
        ends.caller.remember(RESULTS[0], "known")
        ends.listener.remember(BODY, "known")
        assert ends.caller.send(BODY, None, 0) is not None
        assert ends.results_written.write(RESULTS[0] + result_identity_datum(1, 0))
        child = os.fork()
        if child == 0:
            caller, listener = ends.caller, ends.listener
            caller.event()
            done = (caller.send(BODY, None, 0), caller.answers, listener.next())
            os._exit(0 if done == (None, 0, None) else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert ends.listener.next() == "known"
        ends.caller.event()
        assert ends.caller.answers == 1


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
        caller.send(BODY, None, 2**64)
    Calls(caller)
    with pytest.raises(ValueError, match="not begun"):
        Calls(caller)
    for queue in queues:
        queue.close()
    with pytest.raises(ValueError, match="open"):
        Caller(queues[0], queues[1])


@contextmanager
def two_cpus(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let both ends stay awake also where the tests have one CPU."""
    with monkeypatch.context() as patch:
        patch.setattr("aionn.burst.spin_policy.cpus_for_both_ends", lambda: 2)
        yield


# ---- the app's end ------------------------------------------------------------------------------------------------------


async def warm(burst: ExecutionBurstController, driver: RawDriver) -> None:
    """One answer the general way, so that its like is known; and no clock that could end a test's luck."""
    async with anyio.create_task_group() as app:
        app.start_soon(burst.execute, BODY)
        await driver.wait_for(1)
        driver.answer()
    burst.caller.yield_by_ns = U63


def in_advance(driver: RawDriver, identity: int, status: ErrorStatus = ErrorStatus.NONE) -> None:
    """The answer lies in the queue before the request does: as quick as a driver can be."""
    driver.say(encode_result(ResultPacket(Result(status), identity, 7)))


@pytest.fixture
def brisk(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with two_cpus(monkeypatch):
        yield


@pytest.mark.usefixtures("brisk")
async def test_a_known_answer_that_comes_at_once_is_had_without_an_await() -> None:
    async with raw_driver() as (burst, driver):
        await warm(burst, driver)
        for identity in (2, 3):
            in_advance(driver, identity)
            assert burst.caller.send(BODY, None, 0) == (Result(ErrorStatus.NONE), 7)
            assert (burst.in_flight, driver.take()) == (0, [identity])
            driver.read.clear()
        in_advance(driver, 4)
        settled: list[Result | None] = []
        assert await burst.execute(BODY, settled.append) == (Result(ErrorStatus.NONE), 7)
        assert settled == [Result(ErrorStatus.NONE)]
        assert (burst.caller.answers_at_once, burst.caller.answers) == (3, 1)


@pytest.mark.usefixtures("brisk")
async def test_an_unknown_answer_that_comes_at_once_is_taken_the_general_way() -> None:
    async with raw_driver() as (burst, driver):
        await warm(burst, driver)
        for at_once, identity in enumerate((2, 3)):  # the second time it is known
            in_advance(driver, identity, ErrorStatus.GENERAL_FAILURE)
            settled: list[Result | None] = []
            assert (await burst.execute(BODY, settled.append))[0] == Result(ErrorStatus.GENERAL_FAILURE)
            assert settled == [Result(ErrorStatus.GENERAL_FAILURE)]
            assert burst.caller.answers_at_once == at_once
        assert burst.in_flight == 0


@pytest.mark.usefixtures("brisk")
async def test_a_request_sent_at_once_and_not_answered_waits_as_any_other() -> None:
    async with raw_driver() as (burst, driver):
        await warm(burst, driver)
        settled: list[Result | None] = []
        for cancelled in (False, True):
            async with anyio.create_task_group() as app:
                app.start_soon(burst.execute, BODY, settled.append)
                await driver.wait_for(1)
                await anyio.lowlevel.checkpoint()
                assert burst.in_flight == 1
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


@pytest.mark.usefixtures("brisk")
async def test_a_false_answer_at_once_ends_the_burst_with_a_reason() -> None:
    async with raw_driver() as (burst, driver):
        await warm(burst, driver)
        in_advance(driver, 99)
        settled: list[Result | None] = []
        with pytest.raises(ExecutionError, match="99"):
            await burst.execute(BODY, settled.append)
        assert settled == [None]
        assert isinstance(burst.ended_by, PacketError)
        with pytest.raises(ExecutionError, match="99"):
            await burst.execute(BODY)


@pytest.mark.usefixtures("brisk")
async def test_no_answer_is_awaited_at_once_where_that_may_not_be() -> None:
    async with raw_driver(low_power=True) as (burst, driver):
        await warm(burst, driver)
        in_advance(driver, 2)
        await burst.execute(BODY)
    async with raw_driver() as (other, driver):
        await warm(other, driver)
        other.caller.yield_by_ns = 0  # the loop must run first
        in_advance(driver, 2)
        await other.execute(BODY)
    assert [(caller.answers_at_once, caller.answers) for caller in (burst.caller, other.caller)] == [(0, 2), (0, 2)]


@pytest.mark.usefixtures("brisk")
async def test_nobody_looks_for_answers_while_more_than_four_bursts_take_turns() -> None:
    async with AsyncExitStack() as stack:
        ends = [await stack.enter_async_context(raw_driver()) for _ in range(5)]

        async def turn(count: int) -> list[bool]:
            """Let so many bursts compute one after the other. Returns which of them has found its answer at once."""
            found = []
            for burst, driver in ends[:count]:
                before = burst.caller.answers_at_once
                in_advance(driver, burst.caller.answers + before + 1)
                await burst.execute(BODY)
                found.append(burst.caller.answers_at_once > before)
            return found

        for end in ends:
            await warm(*end)
        assert await turn(5) == [False] * 5
        assert await turn(5) == [False] * 5
        assert await turn(4) == [False] * 4, "the fifth has had its turn just before"
        assert await turn(4) == [True] * 4
        assert await turn(5) == [True] * 4 + [False]
        assert await turn(1) == [False]
        ends[0][0].end(CallerError("closed"))
        del ends[0]
        assert await turn(4) == [True] * 4, "a burst that was closed takes no turn"


@pytest.mark.usefixtures("brisk")
async def test_a_request_takes_the_same_way_while_somebody_listens() -> None:
    async with raw_driver() as (burst, driver):
        await warm(burst, driver)
        heard: list[object] = []
        with trace.listen(heard.append):
            in_advance(driver, 2)
            await burst.execute(BODY)
            assert burst.caller.answers_at_once == 1
        assert heard == []


@pytest.mark.parametrize("low_power", [False, True])
async def test_a_look_settles_every_answer_that_has_come(low_power: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    with two_cpus(monkeypatch):
        async with raw_driver(depth=64, low_power=low_power) as (burst, driver), anyio.create_task_group() as app:
            done: list[int] = []

            async def compute(number: int) -> None:
                await burst.execute(BODY)
                done.append(number)

            await warm(burst, driver)
            sleeps = burst.caller.sleeps
            for number in range(100):
                app.start_soon(compute, number)
            for round_ in range(2):  # 36 wait for their turn, and are sent by the look that settles the first 64
                expected = (64, 36)[round_]
                identities = await driver.wait_for(expected)
                assert (len(identities), burst.in_flight) == (expected, expected)
                driver.say(b"".join(encode_result(ResultPacket(Result(ErrorStatus.NONE), identity, 7)) for identity in identities))
                driver.read.clear()
                with anyio.fail_after(20):
                    while len(done) < (64, 100)[round_]:
                        await anyio.lowlevel.checkpoint()
            assert done == list(range(100))
            if low_power:
                assert burst.caller.sleeps - sleeps == 2


async def test_a_storm_of_cancelled_callers_and_deadlines_settles_each_request_once() -> None:
    for low_power in (False, True):
        async with raw_driver(depth=64, low_power=low_power) as (burst, driver):
            settled: list[list[Result | None]] = []

            async def call(number: int, burst: ExecutionBurstController = burst, settled: list[list[Result | None]] = settled) -> None:
                mine: list[Result | None] = []
                settled.append(mine)
                deadline_ns = time.monotonic_ns() + (number % 3) * 500_000 if number % 2 else None
                with contextlib.suppress(DeadlineError):
                    await burst.execute(BODY, mine.append, deadline_ns)

            for round_ in range(10):
                tasks = [asyncio.ensure_future(call(number)) for number in range(100)]
                for _ in range(round_ % 4):
                    await asyncio.sleep(0)
                for number, task in enumerate(tasks):
                    if number % 3 == round_ % 3:
                        task.cancel()
                with anyio.fail_after(20):
                    while burst.in_flight or not all(task.done() for task in tasks):
                        for identity in driver.take()[:: 1 - 2 * (round_ % 2)]:
                            driver.answer(identity)
                        await asyncio.sleep(0)
            assert len(settled) >= 600
            assert all(len(mine) == 1 for mine in settled)
            assert burst.ended_by is None


async def test_a_driver_that_answers_what_it_has_not_read_ends_the_burst() -> None:
    async with raw_driver(capacity=12) as (burst, driver), anyio.create_task_group() as app:
        errors: list[BaseException] = []

        async def call() -> None:
            try:
                await burst.execute(BODY)
            except ExecutionError as error:
                errors.append(error)

        for _ in range(2):  # one packet fits
            app.start_soon(call)
        await anyio.wait_all_tasks_blocked()
        in_advance(driver, 1)
        with anyio.fail_after(20):
            while burst.ended_by is None:
                await anyio.lowlevel.checkpoint()
        await anyio.wait_all_tasks_blocked()
        assert isinstance(burst.ended_by, PacketError)
        assert "has not read" in str(errors[0])


async def test_a_nudge_wakes_a_reader_that_sleeps_and_awaits_it_and_no_other() -> None:
    with exchange() as ends:
        queue = ends.requests_read
        ends.caller.nudge(SOON)  # no end sleeps: nothing is left behind that would make one look later
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
            assert (burst.caller.yield_by_ns == 0) == low_power  # the loop has just run


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
