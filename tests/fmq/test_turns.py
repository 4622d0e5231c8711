"""Requests that name one of another burst: a lane leaves them in their queue until that one is over, and serves others meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest

from aionn.burst.packets import after_request
from aionn.fmq import Lane, Lanes, Listener
from tests.burst.whole_packets import identity_datum
from tests.fmq.test_native_lanes import ANSWER, BODY, Burst, bursts, in_thread

FAILED = ANSWER[:12] + bytes([5]) + ANSWER[13:]  # a status that is not NONE


def send(burst: Burst, identity: int, after: int = 0, deadline_ns: int | None = None) -> None:
    assert burst.app_requests.write(BODY + identity_datum(identity, deadline_ns, after))


@contextmanager
def beside(count: int) -> Iterator[list[Burst]]:
    """Bursts of one client, with their places in the list as numbers. The value of a request names its burst."""
    with bursts(count) as each:
        siblings: dict[int, Listener] = {}
        for number, burst in enumerate(each):
            burst.listener.remember(BODY, f"burst {number}")
            burst.listener.beside(siblings, number)
        yield each
        for burst in each:
            burst.listener.beside(None, 0)
        assert not siblings


def lend(lanes: Lanes, *each: Burst) -> list[Burst]:
    """Lend bursts to lanes. Returns those that are given back, as that happens."""
    returned: list[Burst] = []
    for burst in each:
        assert lanes.lend(burst.listener, partial(returned.append, burst))
    return returned


def none_now(lane: Lane, lanes: Lanes, answer: Any) -> bool:
    """Answer, and return whether no request can be taken. Bursts and jobs come in turn."""
    lanes.announce()
    if lane.next(answer) is not None:
        return False
    lanes.announce()
    return lane.next(None) is None


def test_a_request_waits_in_its_queue_and_its_lane_serves_others() -> None:
    first, second = Lanes(), Lanes()
    with beside(3) as each:
        lend(first, each[0])
        returned = lend(second, each[1], each[2])
        send(each[0], 7)
        send(each[1], 1, after_request(0, 7))
        send(each[2], 1)
        before, lane = Lane(first), Lane(second)
        assert lane.next(None) == "burst 2"
        assert none_now(lane, second, ANSWER)
        assert before.next(None) == "burst 0"
        assert none_now(lane, second, None)
        first.announce()
        assert before.next(ANSWER) is None
        assert in_thread(lambda: lane.next(None), second) == "burst 1"
        second.announce()
        lane.next(ANSWER)
        assert [burst.answers() for burst in each] == [[7], [1], [1]]
        assert returned == [each[1], each[2]]  # by the stop
        first.stop()


def test_a_lane_that_sleeps_wakes_when_the_request_before_is_over() -> None:
    for way in ("a lane has run it", "its task has answered it", "its burst has ended"):
        first, second = Lanes(), Lanes()
        with beside(2) as each:
            lend(first, each[0])
            returned = lend(second, each[1])
            send(each[0], 3)
            send(each[1], 1, after_request(0, 3))
            before = Lane(first)
            assert before.next(None) == "burst 0"
            found: list[object] = []
            lane = threading.Thread(target=lambda: found.append(Lane(second).next(None)))  # noqa: B023 -- joined below
            lane.start()
            while not second.sleeping:
                threading.Event().wait(0.0001)
            assert not found
            if way == "its task has answered it":
                each[0].listener.note(3, True)
            elif way == "its burst has ended":
                each[0].listener.beside(None, 0)
            else:
                first.announce()
                assert before.next(ANSWER) is None
            if way == "its burst has ended":
                while not returned:  # the task answers the request that is forfeited
                    threading.Event().wait(0.0001)
                second.stop()
            lane.join(20)
            assert not lane.is_alive(), way
            assert found == [None if way == "its burst has ended" else "burst 1"], way
            second.stop()
            first.stop()


@pytest.mark.parametrize(
    ("name", "outcome"),
    [
        ("it has succeeded", True),
        ("it has failed", False),
        ("another burst has that number", False),
        ("so many have been over since", False),
    ],
)
def test_what_has_not_succeeded_as_far_as_is_known_is_given_back(name: str, outcome: bool) -> None:
    lanes = Lanes()
    with beside(2) as each:
        after = after_request(9 if name.startswith("another") else 0, 5)
        each[0].listener.note(5, name != "it has failed")
        if name.startswith("so many"):
            each[0].listener.note(5 + 64, True)
        assert each[1].listener.may_run(after) is outcome
        returned = lend(lanes, each[1])
        send(each[1], 1, after)
        lane = Lane(lanes)
        assert none_now(lane, lanes, None) is not outcome
        assert bool(returned) is not outcome
        lanes.stop()


def test_the_status_of_the_answer_is_the_outcome() -> None:
    for answer in (ANSWER, FAILED):
        lanes = Lanes()
        with beside(1) as [burst]:
            lend(lanes, burst)
            send(burst, 2)
            lane = Lane(lanes)
            assert lane.next(None) == "burst 0"
            assert not burst.listener.may_run(after_request(0, 2))
            lanes.announce()
            assert lane.next(answer) is None
            assert burst.listener.may_run(after_request(0, 2)) is (answer is ANSWER)
            lanes.stop()


def test_a_request_that_becomes_late_while_it_waits_is_given_back_when_its_turn_comes() -> None:
    lanes = Lanes()
    with beside(2) as each:
        returned = lend(lanes, each[1])
        send(each[1], 1, after_request(0, 3), deadline_ns=1)
        assert none_now(Lane(lanes), lanes, None)
        assert returned == [each[1]]
        lanes.stop()


def test_misuse_is_refused() -> None:
    with bursts(1) as [burst]:
        assert not burst.listener.may_run(after_request(0, 1))
        wrong: list[tuple[Any, ...]] = [([], 1), ({},), ({}, [])]
        for arguments in wrong:
            with pytest.raises(TypeError):
                burst.listener.beside(*arguments)
        with pytest.raises(TypeError):
            burst.listener.note(1)  # type: ignore[call-arg]
        with pytest.raises(OverflowError):
            burst.listener.may_run(-1)
        assert after_request(2**24 - 1, 2**40 + 5) == (2**24 - 1) << 32 | 5
        assert after_request(2**24, 1) == 0
