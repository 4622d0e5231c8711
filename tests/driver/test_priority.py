"""Turns of one driver: executions of high priority first, the others after them or after a bounded wait."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from aionn.driver.lanes import MAX_WAIT_S, Turns
from aionn.hal.types import Priority

FOR_EVER_S = 3600.0
PATIENCE_S = 30.0


@contextmanager
def thread(work: Callable[[], None]) -> Iterator[threading.Thread]:
    running = threading.Thread(target=work, daemon=True)
    running.start()
    yield running
    running.join(PATIENCE_S)
    assert not running.is_alive()


class Lower:
    """A thread that asks for turns of a lower priority."""

    def __init__(self, turns: Turns, priority: Priority = Priority.MEDIUM) -> None:
        self._turns, self._priority = turns, priority
        self.asks, self.runs = threading.Event(), threading.Event()

    def once(self) -> None:
        self.asks.set()
        self._turns.begin(self._priority)
        self.runs.set()
        self._turns.end(self._priority)


def waiting(turns: Turns, count: int = 1) -> None:
    """Return when so many threads wait. `_waiters` is what a condition wakes; a thread is in it before it gives up the lock."""
    while True:
        with turns._changed:
            if len(turns._changed._waiters) >= count:  # type: ignore[attr-defined]
                return


@pytest.mark.parametrize("priority", list(Priority))
def test_a_turn_begins_at_once_while_no_execution_of_high_priority_runs(priority: Priority) -> None:
    turns = Turns(FOR_EVER_S)
    for _ in range(3):
        turns.begin(priority)
        turns.end(priority)
    turns.begin(Priority.HIGH)
    turns.end(Priority.HIGH)
    turns.begin(priority)


@pytest.mark.parametrize("priority", [Priority.LOW, Priority.MEDIUM])
def test_another_execution_begins_when_the_last_one_of_high_priority_is_over(priority: Priority) -> None:
    turns = Turns(FOR_EVER_S)
    lower = Lower(turns, priority)
    turns.begin(Priority.HIGH)
    turns.begin(Priority.HIGH)  # beside the first, at once
    with thread(lower.once):
        waiting(turns)
        turns.end(Priority.HIGH)
        waiting(turns)
        assert not lower.runs.is_set()
        turns.end(Priority.HIGH)
        assert lower.runs.wait(PATIENCE_S)


def test_all_that_wait_begin_when_nothing_urgent_runs() -> None:
    turns = Turns(FOR_EVER_S)
    lowers = [Lower(turns) for _ in range(4)]
    turns.begin(Priority.HIGH)
    threads = [threading.Thread(target=lower.once, daemon=True) for lower in lowers]
    for each in threads:
        each.start()
    waiting(turns, 4)
    turns.end(Priority.HIGH)
    for each in threads:
        each.join(PATIENCE_S)
    assert all(lower.runs.is_set() for lower in lowers)


def test_an_execution_that_has_waited_long_enough_begins_beside_one_of_high_priority() -> None:
    turns = Turns(0.01)
    turns.begin(Priority.HIGH)
    lower = Lower(turns)
    with thread(lower.once):
        assert lower.runs.wait(PATIENCE_S)
    turns.end(Priority.HIGH)


def test_the_wait_is_short_enough_for_ten_executions_a_second() -> None:
    assert MAX_WAIT_S == 0.1


def test_a_turn_over_several_requests_lets_no_other_execution_in_between_them() -> None:
    turns = Turns(FOR_EVER_S)
    order: list[str] = []
    asked, go_on = threading.Event(), threading.Event()

    def urgent() -> None:
        turns.begin(Priority.HIGH)
        try:
            for number in range(3):
                order.append(f"high {number}")
                asked.set()
                assert go_on.wait(PATIENCE_S)
        finally:
            turns.end(Priority.HIGH)

    def other() -> None:
        turns.begin(Priority.MEDIUM)
        order.append("medium")
        turns.end(Priority.MEDIUM)

    with thread(urgent):
        assert asked.wait(PATIENCE_S)
        with thread(other):
            waiting(turns)
            go_on.set()
    assert order == ["high 0", "high 1", "high 2", "medium"]


def test_many_threads_of_all_priorities_end_and_leave_nothing_behind() -> None:
    turns = Turns(FOR_EVER_S)
    rounds, lock = 300, threading.Lock()
    urgent, ran = 0, dict.fromkeys(Priority, 0)
    together = threading.Barrier(6)

    def work(priority: Priority) -> None:
        nonlocal urgent
        together.wait(PATIENCE_S)
        for _ in range(rounds):
            turns.begin(priority)
            try:
                with lock:
                    ran[priority] += 1
                    urgent += priority is Priority.HIGH
                with lock:
                    urgent -= priority is Priority.HIGH
            finally:
                turns.end(priority)

    threads = [threading.Thread(target=work, args=(priority,), daemon=True) for priority in Priority for _ in range(2)]
    for each in threads:
        each.start()
    for each in threads:
        each.join(PATIENCE_S)
        assert not each.is_alive()
    assert ran == dict.fromkeys(Priority, 2 * rounds)
    assert urgent == turns.urgent == 0
    assert not turns._changed._waiters  # type: ignore[attr-defined]
