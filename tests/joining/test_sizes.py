"""How many rows are joined, from times that the tests make up: what pays is found, what does not pay is left within a dozen runs."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from aionn.driver.joining.sizes import FAILED_RUNS, FIRST_RETRY_RUNS, RETRY_RUNS, TRIES, Sizes
from aionn.hal.batching import Batching


def silero(rows: int) -> float:
    return 110_000 + 45_000 * rows


def detector(rows: int) -> float:
    return 38e6 * rows / (1 if rows == 1 else 0.93)


def grown(sizes: Sizes, cost: Callable[[int], float], runs: int, waiting: int = 64, noise: float = 0.0) -> list[int]:
    """Run while so many requests always wait. Return the rows of each run."""
    randomness = random.Random(0)
    taken = []
    for _ in range(runs):
        rows = min(waiting, sizes.most)
        sizes.note(rows, int(cost(rows) * (1 + noise * randomness.random())))
        taken.append(rows)
    return taken


@pytest.mark.parametrize("most", [2, 3, 8, 16, 32])
def test_a_tiny_model_is_joined_up_to_the_most_rows(most: int) -> None:
    sizes = Sizes(Batching(max_rows=most))
    sizes.note(1, int(silero(1)))
    assert grown(sizes, silero, 8 * TRIES, noise=0.3)[-1] == most


def test_a_model_that_gains_nothing_is_back_at_single_rows_within_twenty_runs() -> None:
    sizes = Sizes(Batching(max_rows=8))
    sizes.note(1, int(detector(1)))
    taken = grown(sizes, detector, FIRST_RETRY_RUNS)
    assert max(taken) == 2
    assert set(taken[19:]) == {1}
    later = grown(sizes, detector, 3 * RETRY_RUNS)
    assert sum(rows > 1 for rows in later) < 0.02 * len(later)  # it is tried again, seldom


def test_a_size_is_judged_by_runs_of_that_size_alone() -> None:
    sizes = Sizes(Batching(max_rows=16))
    assert grown(sizes, detector, TRIES - 1) == [1] * (TRIES - 1)
    assert sizes.most == 1
    sizes.note(1, int(detector(1)))
    assert sizes.most == 2
    for _ in range(3 * TRIES):  # not so many requests wait
        sizes.note(1, 1)
    assert sizes.most == 2


def test_a_run_stays_below_the_most_milliseconds() -> None:
    sizes = Sizes(Batching(max_rows=64, max_batch_ms=0.5))
    sizes.note(1, int(silero(1)))
    taken = grown(sizes, silero, 400)
    assert max(map(silero, taken[100:])) <= 0.5e6
    assert taken[-1] > 1


def test_a_size_that_has_failed_rests() -> None:
    sizes = Sizes(Batching(max_rows=16))
    sizes.note(1, int(silero(1)))
    grown(sizes, silero, 100)
    sizes.failed(9)
    assert max(grown(sizes, silero, FAILED_RUNS - 10)) < 8
    assert max(grown(sizes, silero, 100)) == 16


def test_an_expected_time_is_known_for_each_number_of_rows() -> None:
    sizes = Sizes(Batching(max_rows=16))
    assert sizes.run_ns(16) == 0
    sizes.note(1, 100)
    assert [sizes.run_ns(rows) for rows in (1, 5)] == [100, 500]
    sizes.note(4, 200)
    assert [sizes.run_ns(rows) for rows in (1, 5)] == [100, 250]


def test_a_wrong_verdict_of_a_disturbed_moment_is_corrected_soon() -> None:
    sizes = Sizes(Batching(max_rows=16))
    grown(sizes, silero, TRIES)
    grown(sizes, lambda rows: 20 * silero(rows), TRIES)  # another process had the CPUs
    assert sizes.most == 1
    assert max(grown(sizes, silero, FIRST_RETRY_RUNS + 6 * TRIES)) == 16


def test_a_run_stands_for_those_that_are_not_timed() -> None:
    sizes = Sizes(Batching(max_rows=8))
    tries = [sizes.tries_single]
    grown(sizes, detector, 3 * TRIES)
    tries.append(sizes.tries_single)
    for _ in range(FIRST_RETRY_RUNS // 8):
        sizes.note(1, int(detector(1)), 8)
    assert [*tries, sizes.tries_single] == [True, False, True]  # then it is time to look again
