"""`Lane.join`: which requests a lane takes to the one that it has, in which order, and what happens to those that it leaves."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from aionn.fmq import Lane, Lanes, Listener
from tests.fmq.test_native_lanes import ANSWER, BODY, Burst, bursts

OTHER = BODY[:8] + bytes([1]) + BODY[9:]
MOST = 63


def lent(lanes: Lanes, each: Sequence[Burst], kind: int = 1, serial: bool = False) -> None:
    for number, burst in enumerate(each):
        burst.listener.remember(BODY, f"burst {number}", serial, kind)
        assert lanes.lend(burst.listener, lambda: None)


def send(burst: Burst, identity: int, body: bytes = BODY, deadline_ns: int = 0) -> None:
    stamp = bytes([7, 0, 0, 0]) + identity.to_bytes(8, "little") + deadline_ns.to_bytes(8, "little") + bytes(4)
    assert burst.app_requests.write(body + stamp)


def in_turn(*calls: Callable[[], None]) -> threading.Thread:
    """Return a thread that makes these calls, each a moment after the one before."""

    def work() -> None:
        for call in calls:
            time.sleep(0.02)
            call()

    return threading.Thread(target=work)


def finished(lane: Lane, lanes: Lanes, answers: Any) -> None:
    """Answer, and do not wait for another request."""
    lanes.announce()
    assert lane.next(answers) is None


def test_one_request_of_each_burst_is_taken_in_turn_and_all_are_answered_at_once() -> None:
    lanes, lane = Lanes(), None
    with bursts(3) as each:
        lent(lanes, each)
        for burst, count in zip(each, (1, 4, 2), strict=True):
            for identity in range(count):
                send(burst, 10 + identity)
        lane = Lane(lanes)
        first = lane.next(None)
        assert first == "burst 0"
        assert lane.join(5, 0, 0) == ["burst 1", "burst 2", "burst 1", "burst 2", "burst 1"]
        assert [burst.listener.running for burst in each] == [1, 3, 2]
        finished(lane, lanes, [ANSWER] * 6)
        assert [burst.answers() for burst in each] == [[10], [10, 11, 12], [10, 11]]
        assert lane.next(None) == "burst 1"  # the one that was left is not slept through
        assert lane.join(MOST, 0, 0) == []
        finished(lane, lanes, ANSWER)
        assert each[1].answers() == [13]
        lanes.stop()


def test_a_request_of_another_kind_stays_and_is_served_next() -> None:
    lanes = Lanes()
    with bursts(3) as each:
        lent(lanes, each)
        each[1].listener.remember(OTHER, "other", False, 2)
        send(each[0], 1)
        send(each[1], 2, OTHER)
        send(each[1], 3)
        send(each[2], 4)
        lane = Lane(lanes)
        assert lane.next(None) == "burst 0"
        assert lane.join(MOST, 0, 0) == ["burst 2"]
        assert lane.next([ANSWER, ANSWER]) == "other"
        assert lane.join(MOST, 0, 0) == []
        assert lane.next(ANSWER) == "burst 1"
        finished(lane, lanes, ANSWER)
        assert [burst.answers() for burst in each] == [[1], [2, 3], [4]]
        lanes.stop()


def test_a_kind_of_0_is_never_joined() -> None:
    lanes = Lanes()
    with bursts(2) as each:
        lent(lanes, each, kind=0)
        for burst in each:
            send(burst, 1)
        lane = Lane(lanes)
        assert lane.next(None) == "burst 0"
        assert lane.join(MOST, 0, 0) is None
        assert lane.next(ANSWER) == "burst 1"
        finished(lane, lanes, ANSWER)
        lanes.stop()


def test_a_burst_with_device_memory_has_one_request_in_a_run() -> None:
    lanes = Lanes()
    with bursts(2) as each:
        lent(lanes, each, serial=True)
        for burst in each:
            send(burst, 1)
            send(burst, 2)
        lane = Lane(lanes)
        assert lane.next(None) == "burst 0"
        assert lane.join(MOST, 0, 0) == ["burst 1"]
        assert lane.next([ANSWER, ANSWER]) in ("burst 0", "burst 1")
        assert len(lane.join(MOST, 0, 0) or []) == 1
        finished(lane, lanes, [ANSWER, ANSWER])
        assert [burst.answers() for burst in each] == [[1, 2], [1, 2]]
        lanes.stop()


def test_nothing_is_joined_while_another_lane_sleeps() -> None:
    lanes = Lanes()
    with bursts(2) as each:
        lent(lanes, each)
        send(each[0], 1)
        lane, other = Lane(lanes), Lane(lanes)
        assert lane.next(None) == "burst 0"
        assert lane.join(MOST, 0, 0) == []
        thread = threading.Thread(target=other.next, args=(None,))
        thread.start()
        while not lanes.sleeping:
            time.sleep(0.001)
        assert lane.join(MOST, 0, 0) is None
        lanes.stop()
        thread.join(20)
        assert not thread.is_alive()


def test_a_request_that_would_miss_its_deadline_in_a_joined_run_stays() -> None:
    lanes = Lanes()
    with bursts(3) as each:
        lent(lanes, each)
        send(each[0], 1)
        send(each[1], 2, deadline_ns=time.monotonic_ns() + 5_000_000_000)
        send(each[2], 3)
        lane = Lane(lanes)
        assert lane.next(None) == "burst 0"
        assert lane.join(MOST, 60_000_000_000, 0) == ["burst 2"]
        assert lane.next([ANSWER, ANSWER]) == "burst 1"
        finished(lane, lanes, ANSWER)
        lanes.stop()


def test_a_lane_waits_for_the_bursts_that_have_no_request_in_hand_and_for_no_others() -> None:
    lanes = Lanes()
    with bursts(3) as each:
        lent(lanes, each)
        send(each[0], 1)
        lane = Lane(lanes)
        assert lane.next(None) == "burst 0"
        later = in_turn(lambda: send(each[2], 2), lambda: send(each[1], 3))
        later.start()
        began_s = time.monotonic()
        assert lane.join(MOST, 0, time.monotonic_ns() + 60_000_000_000) == ["burst 2", "burst 1"]
        assert time.monotonic() - began_s < 30  # all bursts have a request in hand, so nothing can come
        later.join()
        finished(lane, lanes, [ANSWER] * 3)
        lanes.stop()


@pytest.mark.parametrize("ended_by", ["time", "deadline", "job", "stop"])
def test_a_wait_for_more_requests_ends(ended_by: str) -> None:
    lanes = Lanes()
    with bursts(2) as each:
        lent(lanes, each)
        now_ns = time.monotonic_ns()
        send(each[0], 1, deadline_ns=now_ns + 2_000_000_000 if ended_by == "deadline" else 0)
        lane = Lane(lanes)
        assert lane.next(None) == "burst 0"
        until_ns = now_ns + (20_000_000 if ended_by == "time" else 60_000_000_000)
        calls: dict[str, Callable[[], None]] = {"job": lanes.announce, "stop": lanes.stop}
        later = in_turn(calls.get(ended_by, lambda: None))
        later.start()
        assert lane.join(MOST, 1_900_000_000 if ended_by == "deadline" else 0, until_ns) == []
        assert time.monotonic_ns() - now_ns < 30_000_000_000
        later.join()
        lanes.stop()
        assert lane.next(ANSWER) is None
        assert each[0].answers() == [1]


def test_a_recalled_burst_gets_the_answers_of_its_joined_requests() -> None:
    lanes = Lanes()
    with bursts(2) as each:
        lent(lanes, each)
        for burst in each:
            send(burst, 1)
        lane = Lane(lanes)
        assert lane.next(None) == "burst 0"
        assert lane.join(MOST, 0, 0) == ["burst 1"]
        idle: list[int] = []
        for burst in each:
            lanes.recall(burst.listener)
            assert not burst.listener.when_idle(lambda: idle.append(1))
        finished(lane, lanes, [ANSWER, ANSWER])
        assert idle == [1, 1]
        assert [burst.answers() for burst in each] == [[1], [1]]
        lanes.stop()


@pytest.mark.parametrize("wrong", [ANSWER, [ANSWER], [ANSWER] * 3, [ANSWER, "text"], None])
def test_answers_of_another_number_are_refused_and_change_nothing(wrong: Any) -> None:
    lanes = Lanes()
    with bursts(2) as each:
        lent(lanes, each)
        for burst in each:
            send(burst, 1)
        lane = Lane(lanes)
        lane.next(None)
        assert lane.join(MOST, 0, 0) == ["burst 1"]
        with pytest.raises(TypeError):
            lane.next(wrong)
        finished(lane, lanes, [ANSWER, ANSWER])
        assert [burst.answers() for burst in each] == [[1], [1]]
        lanes.stop()


def test_a_lane_that_is_dropped_within_a_joined_run_lets_its_bursts_go() -> None:
    lanes = Lanes()
    with bursts(2) as each:
        lent(lanes, each)
        for burst in each:
            send(burst, 1)
        lane = Lane(lanes)
        lane.next(None)
        assert lane.join(MOST, 0, 0) == ["burst 1"]
        del lane
        lanes.stop()


def test_misuse_of_join_raises() -> None:
    lanes = Lanes()
    lane = Lane(lanes)
    assert lane.join(1, 0, 0) is None  # it runs nothing
    for wrong in ((), (1,), (1, 0), (1, 0, "x")):
        with pytest.raises(TypeError):
            lane.join(*wrong)
    lanes.stop()


def test_forgotten_requests_keep_their_values_in_a_joined_run() -> None:
    lanes = Lanes()
    with bursts(2) as each:
        lent(lanes, each)
        for burst in each:
            send(burst, 1)
        lane = Lane(lanes)
        first = lane.next(None)
        others = lane.join(MOST, 0, 0)
        for burst in each:
            burst.listener.forget()
        assert [first, *(others or [])] == ["burst 0", "burst 1"]
        finished(lane, lanes, [ANSWER, ANSWER])
        lanes.stop()


def test_listeners_are_the_only_thing_that_knows_kinds() -> None:
    with bursts(1) as [burst]:
        with pytest.raises(TypeError):
            burst.listener.remember(BODY, 1, False, 1, 1)  # type: ignore[call-arg]
        with pytest.raises((TypeError, OverflowError)):
            burst.listener.remember(BODY, 1, False, "kind")  # type: ignore[arg-type]
        assert isinstance(burst.listener, Listener)
