"""Rounds of a benchmark: all kinds of one group take turns within each round, so that a change of the machine's pace meets all alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field

LEAST_ROUNDS = 5
"""Fewer rounds can show no significant difference between two runs."""

MOST_ROUNDS = 20
_LEAST_TRIPS = 20

Take = Callable[[float], Awaitable[Sequence[int]]]
"""Measures one round of one kind for about so many seconds. Returns nanoseconds, one number for each repetition."""


@dataclass
class Measured:
    """What was measured of one kind.

    Attributes:
        name: what was done. rival: whether aionn had no part in it.
        rounds: nanoseconds of all repetitions, by round.
    """

    name: str
    rival: bool = False
    rounds: list[Sequence[int]] = field(default_factory=list)

    @property
    def p50_s(self) -> float:
        return self._percentile_s(0.50)

    @property
    def p99_s(self) -> float:
        return self._percentile_s(0.99)

    def _percentile_s(self, share: float) -> float:
        taken = sorted(ns for one in self.rounds for ns in one)
        return taken[min(len(taken) - 1, int(len(taken) * share))] / 1e9

    def medians_s(self) -> list[float]:
        """Return the median of each round, in seconds."""
        return [statistics.median(one) / 1e9 for one in self.rounds]


def trips(trip: Callable[[], Awaitable[object]]) -> Take:
    """Return a `Take` that repeats one call until the time is over."""

    async def take(seconds: float) -> Sequence[int]:
        taken: list[int] = []
        ends_ns = time.perf_counter_ns() + int(seconds * 1e9)
        now_ns = 0
        while len(taken) < _LEAST_TRIPS or now_ns < ends_ns:
            began_ns = time.perf_counter_ns()
            await trip()
            now_ns = time.perf_counter_ns()
            taken.append(now_ns - began_ns)
        return taken

    return take


async def rounds(kinds: Mapping[str, Take], rivals: Mapping[str, Take], seconds: float, rest_s: float) -> list[Measured]:
    """Measure in rounds, after one short round that does not count.

    Args:
        kinds: what aionn does, by name. rivals: what does without aionn.
        seconds: how long all rounds together are to take. `LEAST_ROUNDS` are run in any case.
        rest_s: how long a kind with a fixed amount of work takes about; 0 for kinds that fill the time they get.
    """
    takes = {**kinds, **rivals}
    found = {name: Measured(name, name in rivals) for name in takes}
    planned = MOST_ROUNDS if not rest_s else max(LEAST_ROUNDS, int(seconds / (rest_s * len(takes))))
    share_s = seconds / (min(planned, MOST_ROUNDS) * len(takes))
    ends_s = time.monotonic() + seconds
    for take in takes.values():
        await take(0.0)
    done = 0
    while done < LEAST_ROUNDS or (done < planned and time.monotonic() < ends_s):
        for name, take in takes.items():
            found[name].rounds.append(await take(share_s))
        done += 1
    return list(found.values())
