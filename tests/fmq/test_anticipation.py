"""Anticipation: the rule of rhythm.h with invented streams, and lanes that make warm runs. tests/burst/test_anticipation.py has the
driver's end above them.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from aionn.burst.spin_policy import DRIVER_WINDOW_NS
from aionn.fmq import SOON, Caller, Lane, Lanes, Listener, MessageQueue
from tests.fmq.queues import both_ends
from tests.fmq.test_native import ADDRESS, compiled, run

BODY = bytes([0, 0, 0, 0, 2]) + bytes(19)
ANSWER = bytes(24)
PACE_S = 0.02  # a stream's period, because frames without a pause are not anticipated

two_cpus = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="an app and a lane that share one CPU are not anticipated")


# ---- the rule -------------------------------------------------------------------------------------------------------------------


class Came(NamedTuple):
    frames: int
    warm: int
    foreseen: int
    early: int
    late_half: int
    lead_us: int
    cost: int


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("rhythm")


@pytest.fixture
def stream(build: Path) -> Callable[[str], Came]:
    return lambda name: Came(*map(int, run(compiled("rhythm", ADDRESS, build), name, 2000).split()))


@pytest.mark.parametrize("name", ["steady", "late timers", "pauses", "drift", "another rate"])
def test_a_rhythm_is_foreseen_through_pauses_and_drift_and_late_timers(stream: Callable[[str], Came], name: str) -> None:
    came = stream(name)
    assert came.foreseen >= 0.9 * came.frames
    assert came.warm <= came.frames * 15 / 16  # the others are for comparison
    assert came.early <= 0.02 * came.frames
    assert came.cost <= 40


def test_the_lead_is_learned_from_late_timers(stream: Callable[[str], Came]) -> None:
    prompt, late = stream("steady"), stream("late timers")
    assert 600 < prompt.lead_us < 1200  # a run takes 600 us, a timer is 60 us late
    assert prompt.lead_us + 700 < late.lead_us < prompt.lead_us + 1000  # 840 us later


@pytest.mark.parametrize("name", ["not asked for", "jitter", "long runs", "too dear"])
def test_nothing_is_run_that_cannot_pay(stream: Callable[[str], Came], name: str) -> None:
    assert stream(name).warm == 0


def test_a_rhythm_that_is_lost_ends_warm_runs(stream: Callable[[str], Came]) -> None:
    came = stream("lost")
    assert came.foreseen > 400
    assert came.late_half == 0


def test_warm_runs_that_gain_nothing_rest_for_hundreds_of_frames(stream: Callable[[str], Came]) -> None:
    assert 0 < stream("no gain").warm <= 0.03 * 2000


def test_an_announced_frame_is_foreseen_without_a_rhythm(stream: Callable[[str], Came]) -> None:
    came = stream("announced")
    assert came.foreseen >= 0.9 * came.frames
    assert came.cost <= 40


def test_announcements_that_come_much_too_early_are_ignored(stream: Callable[[str], Came]) -> None:
    came = stream("announced too early")
    assert 0 < came.warm <= 0.1 * came.frames


# ---- lanes ----------------------------------------------------------------------------------------------------------------------


class Request:
    """A request that a lane runs or warms up. Counts both. A run that no warm run came before takes longer."""

    def __init__(self) -> None:
        self.runs = 0
        self.warm_ups = 0
        self.before_warm_up: Callable[[], object] = int
        self.warms = True
        self._warm = False

    def __call__(self) -> bytes:
        self.runs += 1
        if not self._warm:
            time.sleep(0.0003)
        self._warm = False
        return ANSWER

    def warm_up(self) -> bool:
        self.warm_ups += 1
        self.before_warm_up()
        self._warm = True
        return self.warms


class Burst:
    def __init__(self, requests: MessageQueue, results: MessageQueue, listener: Listener, caller: Caller) -> None:
        self.requests = requests
        self.results = results
        self.listener = listener
        self._caller = caller
        self.sent = 0

    def send(self) -> None:
        self.sent += 1
        assert self.requests.write(BODY + bytes([7, 0, 0, 0]) + self.sent.to_bytes(8, "little") + bytes(12))

    def frame(self) -> None:
        """Send a request, and wait for its answer."""
        self.send()
        assert until(lambda: self.listener.answered == self.sent)
        self.results.read(self.results.available_to_read())

    def announce(self) -> None:
        self._caller.nudge(SOON)

    def stream(self, over: Callable[[], bool], most: int = 500) -> bool:
        """Send paced frames and announce each until `over`. Returns whether that was so."""
        for _ in range(most):
            self.frame()
            time.sleep(PACE_S)
            self.announce()
            if until(over, 0.02):
                return True
        return False


def until(happened: Callable[[], bool], seconds: float = 20) -> bool:
    end = time.monotonic() + seconds
    while not happened():
        if time.monotonic() > end:
            return False
        time.sleep(0.0005)
    return True


@contextmanager
def burst(value: object, *, asked: bool = True, window_ns: int = DRIVER_WINDOW_NS, serial: bool = False) -> Iterator[Burst]:
    with both_ends(24, 64) as (app_requests, requests), both_ends(24, 64) as (app_results, results):
        listener = Listener(requests, results, window_ns, 0, asked)
        listener.remember(BODY, value, serial)
        yield Burst(app_requests, app_results, listener, Caller(app_requests, app_results))


@contextmanager
def lent(*bursts: Burst, lanes: int = 1) -> Iterator[Lanes]:
    native = Lanes()

    def serve() -> None:
        lane, answer = Lane(native), None
        while (work := lane.next(answer)) is not None:
            answer = work()

    threads = [threading.Thread(target=serve) for _ in range(lanes)]
    for thread in threads:
        thread.start()
    try:
        for one in bursts:
            assert native.lend(one.listener, int)
        yield native
    finally:
        native.stop()
        for thread in threads:
            thread.join(20)


@two_cpus
@pytest.mark.parametrize("lanes", [1, 2])
def test_an_announced_request_is_warmed_up_and_answered_as_always(lanes: int) -> None:
    value = Request()
    with burst(value) as one, lent(one, lanes=lanes):
        assert one.stream(lambda: value.warm_ups >= 3)
        one.frame()
        assert value.runs == one.listener.answered == one.sent  # a warm run does not count as an answer
        assert one.listener.warm_ups == value.warm_ups


@two_cpus
def test_a_steady_stream_is_warmed_up_by_the_clock_alone() -> None:
    value = Request()
    with burst(value) as one, lent(one):
        due = time.monotonic()
        for _ in range(1500):
            one.frame()
            due += PACE_S
            time.sleep(max(0.0, due - time.monotonic()))
            if value.warm_ups >= 3:
                break
        assert value.warm_ups >= 3
        assert until(lambda: not one.listener.running)
        assert value.runs == one.sent


@two_cpus
def test_a_request_that_comes_in_a_warm_run_is_taken_right_after_it() -> None:
    value = Request()
    with burst(value) as one, lent(one):
        value.before_warm_up = one.send
        assert one.stream(lambda: value.warm_ups > 0, most=60)
        assert until(lambda: one.listener.answered == one.sent)


@two_cpus
def test_another_lane_takes_a_request_that_comes_in_a_warm_run() -> None:
    value = Request()
    with burst(value) as one, lent(one, lanes=2):

        def answered_meanwhile() -> None:
            one.send()
            assert until(lambda: one.listener.answered == one.sent)

        value.before_warm_up = answered_meanwhile
        assert one.stream(lambda: value.warm_ups > 0 and not one.listener.running)
        assert one.listener.answered == one.sent


def never(one: Burst, others: tuple[Burst, ...] = ()) -> None:
    """Enough frames and announcements for a warm run, if one was allowed."""
    for number in range(30):
        for each in (one, *others):
            each.frame()
        time.sleep(PACE_S if number > 20 else PACE_S / 2)
        one.announce()
        time.sleep(0.002)


@pytest.mark.parametrize("how", [{"asked": False}, {"window_ns": 0}, {"serial": True}])
def test_no_warm_run_unless_asked_for_nor_with_low_power_nor_with_device_memory(how: dict[str, Any]) -> None:
    value = Request()
    with burst(value, **how) as one, lent(one):
        never(one)
        assert value.warm_ups == one.listener.warm_ups == 0


def test_no_warm_run_while_two_bursts_are_lent() -> None:
    values = Request(), Request()
    with burst(values[0]) as one, burst(values[1]) as two, lent(one, two):
        never(one, (two,))
        assert [value.warm_ups for value in values] == [0, 0]


def test_no_warm_run_while_another_model_is_served() -> None:
    values = Request(), Request()
    with burst(values[0]) as one, burst(values[1]) as two, lent(one), lent(two):
        never(one, (two,))
        assert [value.warm_ups for value in values] == [0, 0]


def test_a_value_that_cannot_warm_up_is_run_as_always() -> None:
    with burst(lambda: ANSWER) as one, lent(one):
        never(one)
        assert one.listener.warm_ups == 0
        assert one.listener.answered == one.sent


@two_cpus
def test_a_request_that_refuses_its_warm_run_is_not_asked_again_soon() -> None:
    value = Request()
    value.warms = False
    with burst(value) as one, lent(one):
        assert one.stream(lambda: value.warm_ups > 0)
        never(one)
        assert value.warm_ups == 1


@two_cpus
def test_what_was_forgotten_is_not_warmed_up() -> None:
    value, newer = Request(), Request()
    with burst(value) as one, lent(one):
        assert one.stream(lambda: value.warm_ups > 0)
        one.listener.forget()
        one.listener.remember(BODY, newer)
        count = value.warm_ups
        assert one.stream(lambda: newer.warm_ups > 0)
        assert value.warm_ups == count


@two_cpus
def test_a_recalled_burst_is_idle_when_its_warm_run_is_over() -> None:
    value = Request()
    entered, leave = threading.Event(), threading.Event()

    def hold() -> None:
        entered.set()
        assert leave.wait(20)

    value.before_warm_up = hold
    with burst(value) as one, lent(one) as lanes:
        try:
            assert one.stream(entered.is_set)
            idle = threading.Event()
            lanes.recall(one.listener)
            assert one.listener.running == 1
            assert not one.listener.when_idle(idle.set)
            assert not idle.is_set()
        finally:
            leave.set()
        assert idle.wait(20)
        value.before_warm_up = int
        assert lanes.lend(one.listener, int)
        one.frame()


@two_cpus
@pytest.mark.parametrize("end", ["forget", "recall", "stop"])
def test_a_burst_that_ends_inside_its_warm_run_is_left_in_peace(end: str) -> None:
    value = Request()
    with burst(value) as one, lent(one) as lanes:
        ends: dict[str, Callable[[], object]] = {
            "forget": one.listener.forget,
            "recall": partial(lanes.recall, one.listener),
            "stop": lanes.stop,
        }
        value.before_warm_up = ends[end]
        assert one.stream(lambda: value.warm_ups > 0)
        assert until(lambda: not one.listener.running)
        assert value.warm_ups == 1
