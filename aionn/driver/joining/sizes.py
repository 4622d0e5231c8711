"""How many rows a joined run should have, from the times of the runs so far. It reads no clock.

A size is a power of two, and stands for all numbers of rows up to the next size. A larger size is tried when real requests wait for it, and
is used if its rows are cheaper. A model that gains nothing is back at single rows after a dozen runs.
"""

from __future__ import annotations

from math import inf

from aionn.hal.batching import Batching

GAIN = 1.05
"""A size is used if its rows are this much cheaper than those of half the size."""
TRIES = 8
"""Runs of a size before it is judged by the quickest of them. The first one is not measured, because an engine prepares itself for new
shapes."""
FIRST_RETRY_RUNS, RETRY_RUNS = 200, 10_000
"""After so many runs the next larger size is tried again: first soon, because other processes may have disturbed the runs. Each time after
four times as many."""
FAILED_RUNS = 1000
"""A size that has failed is not used for so many runs."""
_NEWEST = 0.1
"""The weight of the newest run in a mean."""


class Sizes:
    """How long runs take by their rows, and how many rows to join.

    Attributes:
        most: how many rows to join at most now.
        row_ns: by size, the mean time of one row. 0: not known.
    """

    def __init__(self, batching: Batching) -> None:
        self._max_rows = batching.max_rows
        self._max_ns = inf if batching.max_batch_ms is None else batching.max_batch_ms * 1e6
        count = batching.max_rows.bit_length()
        self.row_ns = [0.0] * count
        self._failed_until = [0] * count
        self._all_runs = 0
        self._size = 0  # the largest size that pays so far
        self._tries = 0  # of the size that is tried now
        self._best = self._known = inf  # the quickest row of these tries, and of those of `_size`
        self._retry_at = 0  # 0: a size is tried now
        self._retry_runs = FIRST_RETRY_RUNS
        self.most = 1
        self._try(0)

    @property
    def tries_single(self) -> bool:
        """Whether runs of one row are measured now."""
        return not self._trial and not self._retry_at

    def note(self, rows: int, took_ns: int, runs: int = 1) -> None:
        """Note how long a run took. `runs`: how many it stands for."""
        size = rows.bit_length() - 1
        each = took_ns / rows
        self._all_runs += runs
        known = self.row_ns[size]
        self.row_ns[size] = known + _NEWEST * (each - known) if known else each
        if rows > 1 and self.run_ns(rows) > self._max_ns:
            self.most = min(self.most, rows - 1)
        if 0 < self._retry_at <= self._all_runs:
            self._try(self._size)  # measured again, because the machine may be in another state than it was
        elif not self._retry_at and rows == 1 << self._trial:
            self._tries += 1
            if self._tries > 1:
                self._best = min(self._best, each)
            if self._tries == TRIES:
                self._judge()

    def failed(self, rows: int) -> None:
        """Note that a run of so many rows has failed, so that its size rests."""
        size = rows.bit_length() - 1
        self._failed_until[size] = self._all_runs + FAILED_RUNS
        self._size = min(self._size, max(size - 1, 0))
        self._settle(FAILED_RUNS)

    def run_ns(self, rows: int) -> int:
        """Return how long a run of so many rows is expected to take, or 0 if nothing is known."""
        for size in range(rows.bit_length() - 1, -1, -1):
            if self.row_ns[size]:
                return int(self.row_ns[size] * rows)
        return 0

    def _try(self, size: int) -> None:
        """Measure runs of exactly that size from now on. A smaller number of waiting requests does not count."""
        self._trial, self._tries, self._best, self._retry_at = size, 0, inf, 0
        self.most = 1 << size

    def _judge(self) -> None:
        size = self._trial
        if size > self._size:
            if self._best * GAIN > self._known or self._too_long(1 << size):
                self._settle(self._retry_runs)
                self._retry_runs = min(4 * self._retry_runs, RETRY_RUNS)
                return
            self._size, self._retry_runs = size, FIRST_RETRY_RUNS
        self._known = self._best
        larger = size + 1
        if larger < len(self.row_ns) and self._failed_until[larger] <= self._all_runs and not self._too_long(1 << larger):
            self._try(larger)
        else:
            self._settle(RETRY_RUNS)

    def _settle(self, runs: int) -> None:
        self._retry_at = self._all_runs + runs
        self.most = min((2 << self._size) - 1, self._max_rows) if self._size else 1
        while self.most > 1 and self._too_long(self.most):
            self.most -= 1

    def _too_long(self, rows: int) -> bool:
        return self.run_ns(rows) > self._max_ns
