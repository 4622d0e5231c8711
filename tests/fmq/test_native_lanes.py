"""`Lanes` and `Lane` without their Python: misuse, and Python code that runs in the middle of a call."""

from __future__ import annotations

import select
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest

from aionn.fmq import Lane, Lanes, Listener, MessageQueue
from tests.fmq.queues import both_ends
from tests.fmq.test_native_objects import VALUES, in_child

BODY = bytes([0, 0, 0, 0, 2]) + bytes(19)
ANSWER = bytes(24)

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")


class Burst(NamedTuple):
    listener: Listener
    app_requests: MessageQueue
    app_results: MessageQueue
    requests: MessageQueue

    def send(self, identity: int) -> None:
        assert self.app_requests.write(BODY + bytes([7, 0, 0, 0]) + identity.to_bytes(8, "little") + bytes(12))

    def answers(self) -> list[int]:
        datums = self.app_results.read(self.app_results.available_to_read()) or b""
        return [int.from_bytes(datums[at + 32 : at + 40], "little") for at in range(0, len(datums), 48)]


@contextmanager
def bursts(count: int) -> Iterator[list[Burst]]:
    if not count:
        yield []
        return
    with both_ends(24, 64) as (app_requests, requests), both_ends(24, 64) as (app_results, results), bursts(count - 1) as others:
        listener = Listener(requests, results, 0)
        listener.remember(BODY, object())
        yield [*others, Burst(listener, app_requests, app_results, requests)]


def in_thread(call: Callable[[], Any], lanes: Lanes) -> Any:
    """The result of a call that could wait without end. `lanes` are stopped then, which ends it."""
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(call()))
    thread.start()
    thread.join(20)
    waited = thread.is_alive()
    lanes.stop()
    thread.join(20)
    assert not waited, "it slept through its wake"
    return found[0]


def test_a_job_that_comes_while_a_lane_drops_its_burst_is_not_slept_through() -> None:
    """The last reference to a burst goes when its run is over. That may run any Python code, and this code adds a job."""
    lanes = Lanes()
    dropped: list[int] = []

    class Value:
        def __del__(self) -> None:
            dropped.append(lanes.sleeping)
            lanes.announce()

    with bursts(1) as [burst], both_ends(24, 8) as (_, results):
        returned: list[int] = []
        listener = Listener(burst.requests, results, 0)
        listener.remember(BODY, Value())
        assert lanes.lend(listener, lambda: returned.append(1))
        burst.send(5)
        lane = Lane(lanes)
        assert type(lane.next(None)) is Value
        lanes.recall(listener)
        assert returned == [1]
        del listener
        assert in_thread(lambda: lane.next(ANSWER), lanes) is None
        assert (dropped, returned) == ([0], [1])


def test_two_bursts_that_come_at_once_wake_two_lanes_although_epoll_reports_one_signal() -> None:
    """Neither lane ends its run here, so nothing else would look at the second burst."""
    for _ in range(20):
        lanes = Lanes()
        with bursts(2) as lent:
            taken: list[object] = []
            threads = [threading.Thread(target=lambda: taken.append(Lane(lanes).next(None))) for _ in lent]  # noqa: B023 -- joined below
            for thread in threads:
                thread.start()
            while lanes.sleeping < len(lent):
                threading.Event().wait(0.0001)
            for burst in lent:
                burst.send(1)
            for burst in lent:
                assert lanes.lend(burst.listener, lambda: None)
            for thread in threads:
                thread.join(10)
            slept = [thread for thread in threads if thread.is_alive()]
            lanes.stop()
            for thread in threads:
                thread.join(10)
            assert not slept
            assert len(taken) == 2
            assert None not in taken


def is_signalled(burst: Burst) -> bool:
    return bool(select.select([burst.requests.reader_fd], [], [], 0)[0])


def test_a_request_wakes_another_lane_while_one_runs_and_none_when_that_one_is_about_to_look() -> None:
    """A caller that waits for each answer would else wake the lanes in turn. The job only makes `next` return after its answer."""
    lanes = Lanes()
    with bursts(1) as [burst]:
        assert lanes.lend(burst.listener, lambda: None)
        lane, _other = Lane(lanes), Lane(lanes)
        burst.send(1)
        lane.next(None)
        burst.send(2)
        assert is_signalled(burst)
        burst.requests.clear_reader_event()
        assert lane.next(ANSWER) is not None  # it takes the second request, and arms again
        lanes.announce()
        assert lane.next(ANSWER) is None
        burst.send(3)
        assert not is_signalled(burst)
        assert in_thread(lambda: lane.next(None), lanes) is not None


def test_a_lane_that_looks_for_one_of_two_bursts_needs_no_signal() -> None:
    """A signal would wake a lane that sleeps, beside the one that looks. A lane looks once it was alone for a millisecond."""
    lanes = Lanes()
    with bursts(1) as [other], both_ends(24, 64) as (app_requests, requests), both_ends(24, 64) as (app_results, results):
        burst = Burst(Listener(requests, results, 10**9), app_requests, app_results, requests)
        burst.listener.remember(BODY, object())
        lane = Lane(lanes)
        for one in (other, burst):
            assert lanes.lend(one.listener, lambda: None)
        burst.send(1)
        lane.next(None)
        burst.send(2)
        lane.next(ANSWER)
        assert burst.answers() == [1]
        threading.Event().wait(0.005)
        taken: list[object] = []
        thread = threading.Thread(target=lambda: taken.append(lane.next(ANSWER)))
        thread.start()
        threading.Event().wait(0.05)  # it looks for a second
        burst.send(3)
        signalled = is_signalled(burst)
        thread.join(20)
        lanes.stop()
        thread.join(20)
        assert not signalled
        assert taken != [None]
        assert burst.answers() == [2]


def test_a_burst_that_is_lent_to_other_lanes_while_its_run_is_in_flight_is_theirs() -> None:
    lanes, others = Lanes(), Lanes()
    with bursts(7) as [*before, burst]:
        assert lanes.lend(burst.listener, lambda: None)
        burst.send(1)
        lane = Lane(lanes)
        lane.next(None)
        lanes.recall(burst.listener)
        for one in before:
            assert others.lend(one.listener, lambda: None)
        assert others.lend(burst.listener, lambda: None)
        other = Lane(others)
        for _ in range(2):  # the second one comes after a look at all bursts
            others.announce()
            assert other.next(None) is None
        lanes.announce()
        assert lane.next(ANSWER) is None
        lanes.announce()
        assert in_thread(lambda: lane.next(None), lanes) is None
        burst.send(2)
        assert in_thread(lambda: other.next(None), others) is not None
        assert (burst.listener.taken, burst.answers()) == (2, [1])


def test_a_burst_whose_answer_had_no_room_is_given_back_at_once() -> None:
    lanes = Lanes()
    with bursts(1) as [burst]:
        told: list[str] = []
        assert lanes.lend(burst.listener, lambda: told.append("first"))
        lane = Lane(lanes)
        answer = None
        for identity in range(33):  # 32 answers fill the queue
            burst.send(identity)
            assert lane.next(answer) is not None
            answer = ANSWER
        lanes.recall(burst.listener)
        lanes.announce()
        assert lane.next(ANSWER) is None
        assert burst.listener.blocked
        assert lanes.lend(burst.listener, lambda: told.append("second"))
        assert (burst.listener.lent, lanes.lent, told) == (False, 0, ["first", "second"])
        assert [identity for _, identity, _ in burst.listener.held()] == [32]
        assert burst.answers() == list(range(32))
        lanes.stop()


def test_bursts_that_wait_for_a_lane_keep_their_turns_as_more_are_lent() -> None:
    lanes = Lanes()
    with bursts(12) as lent:
        lane = Lane(lanes)
        answer = None
        for number, burst in enumerate(lent):
            burst.send(number)
            assert lanes.lend(burst.listener, lambda: None)
            if number % 3 == 2:  # so the first in the queue is not in its first place when the queue grows
                assert lane.next(answer) is not None
                answer = ANSWER
        for _ in range(8):
            assert lane.next(answer) is not None
        lanes.announce()
        assert lane.next(answer) is None
        assert [burst.answers() for burst in lent] == [[number] for number in range(12)]
        lanes.stop()


def test_a_burst_is_lent_once_at_a_time_and_returns_while_its_run_is_in_flight() -> None:
    lanes, others = Lanes(), Lanes()
    with bursts(1) as [burst]:
        told: list[str] = []
        assert burst.listener.when_idle(print)  # no run is in flight
        assert lanes.lend(burst.listener, lambda: told.append("first"))
        assert not lanes.lend(burst.listener, lambda: told.append("second"))
        assert not others.lend(burst.listener, lambda: told.append("third"))
        burst.send(1)
        lane = Lane(lanes)
        lane.next(None)
        lanes.recall(burst.listener)
        lanes.recall(burst.listener)
        assert (burst.listener.running, burst.listener.lent, told) == (1, False, ["first"])
        assert not burst.listener.when_idle(lambda: told.append("replaced"))
        assert not burst.listener.when_idle(lambda: told.append("idle"))
        assert lanes.lend(burst.listener, lambda: told.append("fourth"))
        lanes.stop()
        assert told == ["first", "fourth"]
        assert lane.next(ANSWER) is None
        assert (burst.listener.running, told, burst.answers()) == (0, ["first", "fourth", "idle"], [1])
        assert not lanes.lend(burst.listener, print)  # they are stopped
        assert others.lend(burst.listener, lambda: told.append("fifth"))
        others.stop()
        assert told[3:] == ["fifth"]


@pytest.mark.parametrize("count", [1, 2, 5])
def test_a_burst_that_is_lent_again_by_its_own_return_is_served(count: int) -> None:
    lanes = Lanes()
    with bursts(count) as lent:
        again: list[int] = []

        def lend(burst: Burst) -> None:
            def back() -> None:
                again.append(1)
                if not lanes.stopped:
                    lend(burst)

            assert lanes.lend(burst.listener, back)

        for burst in lent:
            lend(burst)
        lane = Lane(lanes)
        answer = None
        for turn in range(20):
            for burst in lent:
                burst.send(turn)
            for _ in lent:
                assert lane.next(answer) is not None
                answer = ANSWER
                if turn % 2:
                    for burst in lent:
                        lanes.recall(burst.listener)
        lanes.stop()
        assert lane.next(ANSWER) is None
        for burst in lent:
            assert burst.answers() == list(range(20))
        assert len(again) >= 10 * count


def test_what_returned_raises_ends_nothing() -> None:
    lanes = Lanes()

    def fail() -> None:
        raise RuntimeError("the loop is closed")

    with bursts(2) as lent:
        for burst in lent:
            assert lanes.lend(burst.listener, fail)
            burst.send(3)
        lane = Lane(lanes)
        lane.next(None)
        for burst in lent:
            lanes.recall(burst.listener)
        lanes.announce()
        assert lane.next(ANSWER) is None
        assert [answer for burst in lent for answer in burst.answers()] == [3]


def test_a_queue_that_is_closed_while_it_is_lent_goes_back() -> None:
    lanes = Lanes()
    with bursts(2) as [first, second]:
        returned: list[int] = []
        assert lanes.lend(first.listener, lambda: returned.append(1))
        assert lanes.lend(second.listener, lambda: returned.append(2))
        first.requests.close()
        second.app_requests.close()
        lanes.announce()
        lane = Lane(lanes)
        assert lane.next(None) is None  # the job
        lanes.announce()
        assert lane.next(None) is None
        assert sorted(returned) == [1, 2]
        assert lanes.lent == 0


def test_an_answer_that_is_not_bytes_is_refused_and_may_come_again() -> None:
    lanes = Lanes()
    with bursts(1) as [burst]:
        assert lanes.lend(burst.listener, lambda: None)
        burst.send(8)
        lane = Lane(lanes)
        lane.next(None)
        for wrong in ("text", None, 3):
            with pytest.raises(TypeError):
                lane.next(wrong)  # type: ignore[arg-type]
        lanes.announce()
        assert lane.next(ANSWER) is None
        assert burst.answers() == [8]
        lanes.stop()


@pytest.mark.own_process
def test_lanes_refuse_what_is_not_theirs() -> None:
    def use() -> int:
        lanes, calls = Lanes(), 0
        make: Any = Lane
        with bursts(1) as [burst]:
            for value in (*VALUES, burst.requests, burst.listener, lanes):
                refusals: list[Callable[[Any], object]] = [lambda value: lanes.lend(value, print), lanes.recall, make]
                if value is burst.listener:
                    refusals = [make, lanes.lend]  # type: ignore[list-item]
                elif value is lanes:
                    refusals = refusals[:2]
                for call in refusals:
                    with pytest.raises(TypeError):
                        call(value)
                    calls += 1
            makers: list[Any] = [Lanes, Lane]
            for made in makers:
                with pytest.raises(TypeError):
                    made(1, 2, 3)
                with pytest.raises(TypeError):
                    made(more=1)
        return calls

    assert in_child(use) > 30
