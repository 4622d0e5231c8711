"""Whether one run of a benchmark is slower than an older one. No I/O.

The medians of rounds are compared, not single calls: thousands of calls of one run resemble each other more than two runs do, so they
would make any small difference significant.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

LOSS = 0.10
"""A loss up to this share is not reported as one."""

CHANCE = 0.01
"""A difference counts only if chance alone would make one so large less often than this."""


@dataclass(frozen=True, slots=True)
class MeasureChange:
    """What became of one measure.

    Attributes:
        before_s, now_s: medians of the medians of rounds.
        chance: how probable it is that chance alone makes the new run look so much slower.
    """

    name: str
    rival: bool
    before_s: float
    now_s: float
    chance: float

    @property
    def ratio(self) -> float:
        return self.now_s / self.before_s if self.before_s > 0 else math.inf

    @property
    def lost(self) -> bool:
        """Whether the new run is slower, by more than chance and more than `LOSS`."""
        return self.ratio > 1 + LOSS and self.chance < CHANCE


def changes(before: Sequence[Mapping[str, Any]], now: Sequence[Mapping[str, Any]]) -> list[MeasureChange]:
    """Compare the measures that two reports have in common, by their names and the medians of their rounds."""
    old = {one["name"]: one["rounds_p50_s"] for one in before}
    return [
        MeasureChange(
            one["name"],
            one["rival"],
            statistics.median(old[one["name"]]),
            statistics.median(one["rounds_p50_s"]),
            probability_of_chance(old[one["name"]], one["rounds_p50_s"]),
        )
        for one in now
        if one["name"] in old
    ]


def probability_of_chance(before: Sequence[float], now: Sequence[float]) -> float:
    """Return the one-sided p-value of Mann and Whitney's U for "now is larger than before", by the normal approximation.

    Equal numbers share their ranks, and the variance is corrected for them.
    """
    ranks = _ranks([*before, *now])
    count, more = len(now), len(before) + len(now)
    u = sum(ranks[len(before) :]) - count * (count + 1) / 2
    ties = sum(equal**3 - equal for equal in Counter([*before, *now]).values())
    variance = len(before) * count / 12 * (more + 1 - ties / (more * (more - 1)))
    if variance <= 0:
        return 1.0  # all numbers are equal
    return 1 - NormalDist().cdf((u - len(before) * count / 2 - 0.5) / math.sqrt(variance))


def _ranks(values: Sequence[float]) -> list[float]:
    order = sorted(range(len(values)), key=values.__getitem__)
    ranks = [0.0] * len(values)
    at = 0
    while at < len(order):
        end = at
        while end < len(order) and values[order[end]] == values[order[at]]:
            end += 1
        for place in order[at:end]:
            ranks[place] = (at + 1 + end) / 2
        at = end
    return ranks
