"""What `tests.bench.real` found: figures of each lane, and ratios beside the bounds that they must reach.

A figure is the median over the rounds. A ratio is computed within each round, and the median of the rounds' ratios is judged. On a
machine that others use as well, the best round's p50 shows best what a lane itself costs.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from aionn.cli.bench import Others, machine, machine_line

INTERRUPTED = 130


@dataclass(frozen=True)
class Taken:
    """One lane in one round: percentiles of its calls in microseconds, and CPU seconds per 10,000 calls."""

    p50: float
    p90: float
    p99: float
    app_s: float
    driver_s: float

    @classmethod
    def of(cls, calls_ns: Sequence[int], app_ns: int = 0, driver_ns: int = 0) -> Taken:
        p50, p90, p99 = (float(value) / 1e3 for value in np.percentile(calls_ns, [50, 90, 99]))
        return cls(p50, p90, p99, app_ns / len(calls_ns) / 1e5, driver_ns / len(calls_ns) / 1e5)

    @property
    def cpu_s(self) -> float:
        return self.app_s + self.driver_s


Lanes = dict[str, list[Taken]]


def ratios(lanes: Lanes, of: str, by: str, key: str = "p50") -> list[float]:
    """Return one lane's figure divided by the other's, for each round."""
    return [getattr(ours, key) / getattr(theirs, key) for ours, theirs in zip(lanes[of], lanes[by], strict=True)]


@dataclass(frozen=True)
class Options:
    """How long to measure, and where. `cpus`: of the app and of all others, or None for where the scheduler puts them."""

    rounds: int
    frames: int
    cpus: tuple[int, int] | None

    @property
    def both_cpus(self) -> tuple[int, int]:
        """Return the first and the last usable CPU."""
        usable = sorted(os.sched_getaffinity(0))
        return usable[0], usable[-1]


class NotAvailableError(Exception):
    """This release, or this machine, cannot do what a row measures."""


@dataclass(frozen=True)
class Check:
    """A ratio of each round, and the bound for their median. With `runs`, so large a share of the rounds must reach it."""

    row: str
    what: str
    rounds: tuple[float, ...]
    bound: float
    at_least: bool = False
    runs: float | None = None

    @property
    def judged(self) -> float:
        if self.runs is None:
            return statistics.median(self.rounds)
        return sorted(self.rounds, reverse=self.at_least)[math.ceil(self.runs * len(self.rounds)) - 1]

    @property
    def reached(self) -> bool:
        return self.judged >= self.bound if self.at_least else self.judged <= self.bound

    def line(self) -> str:
        wanted = f"{'>=' if self.at_least else '<='} {self.bound:g}"
        spread = f"({min(self.rounds):.2f} to {max(self.rounds):.2f})"
        return f"{self.row:4} {self.what:66} {self.judged:9.2f} {spread:20} {wanted:10} {'reached' if self.reached else 'MISSED'}"


@dataclass
class Report:
    """What the rows add while they measure. Each addition is printed at once unless `quiet`."""

    wanted: frozenset[str]
    quiet: bool = False
    figures: list[dict[str, Any]] = field(default_factory=list)
    checks: list[Check] = field(default_factory=list)
    absent: list[tuple[str, str]] = field(default_factory=list)

    def say(self, text: str) -> None:
        if not self.quiet:
            print(text, flush=True)

    def show(self, title: str, lanes: Lanes) -> None:
        """Add the figures of lanes that were measured in turns."""
        self.say(f"\n{title}\n{'':22}{'p50 us':>10}{'p90 us':>10}{'p99 us':>10}{'best p50':>10}{'CPU s/10k: app':>16}{'driver':>9}")
        medians = {}
        for name, rounds in lanes.items():
            values = {key: statistics.median(getattr(taken, key) for taken in rounds) for key in Taken.__dataclass_fields__}
            values["best_p50"] = min(taken.p50 for taken in rounds)
            medians[name] = values
            times = "".join(f"{values[key]:10.0f}" for key in ("p50", "p90", "p99", "best_p50"))
            self.say(f"{name:22}{times}{values['app_s']:16.2f}{values['driver_s']:9.2f}")
        self.figures.append({"title": title, "lanes": medians})

    def note(self, title: str, values: Mapping[str, Sequence[float]], unit: str) -> None:
        """Add figures of one number each, one per round."""
        self.say(f"\n{title} [{unit}]")
        for name, rounds in values.items():
            self.say(f"  {name:42}{statistics.median(rounds):12.2f}   ({min(rounds):.2f} to {max(rounds):.2f})")
        self.figures.append({"title": title, "unit": unit, "values": {name: list(rounds) for name, rounds in values.items()}})

    def check(
        self, row: str, what: str, rounds: Sequence[float], bound: float, *, at_least: bool = False, runs: float | None = None
    ) -> None:
        """Add a judged ratio, if its row was asked for."""
        if row in self.wanted:
            self.checks.append(Check(row, what, tuple(rounds), bound, at_least, runs))
            self.say(self.checks[-1].line())

    def lacks(self, row: str, why: str) -> None:
        """Add a row, or a part of one, that cannot be measured here."""
        if row in self.wanted and (row, why) not in self.absent:
            self.absent.append((row, why))
            self.say(f"{row:4} not available: {why}")

    def summary(self) -> str:
        lines = [f"{'row':4} {'what (ratios within one round)':66} {'median':>9} {'of the rounds':20} {'wanted':10}"]
        lines += [check.line() for check in self.checks]
        return "\n".join(lines + [f"{row:4} not available: {why}" for row, why in self.absent])

    def plain(self) -> dict[str, Any]:
        """Return everything as values that JSON knows."""
        checks = [asdict(check) | {"judged": check.judged, "reached": check.reached} for check in self.checks]
        return {"figures": self.figures, "checks": checks, "absent": self.absent}


Groups = Sequence[tuple[tuple[str, ...], Callable[[Report, Options], Awaitable[None]]]]
"""Rows, and what measures them."""


def rows_among(known: Sequence[str]) -> Callable[[str], frozenset[str]]:
    """Return what reads an argument that names some of these rows, with commas."""

    def rows_of(text: str) -> frozenset[str]:
        found = frozenset(text.replace(" ", "").upper().split(","))
        if not found <= set(known):
            raise argparse.ArgumentTypeError(f"unknown rows {sorted(found - set(known))}; give some of {','.join(known)}")
        return found

    return rows_of


async def measure(groups: Groups, report: Report, options: Options) -> None:
    """Measure the groups of which a row is wanted."""
    for rows, group in groups:
        if report.wanted & set(rows):
            try:
                await group(report, options)
            except NotAvailableError as error:
                for row in rows:
                    report.lacks(row, str(error))


def print_measured(report: Report, where: str, as_json: bool, act: Callable[[], None]) -> None:
    """Run `act`, which measures, and print what it found. After Ctrl-C, print what was measured before, and exit with 130."""
    head = f"{machine_line(machine())}\n{where}"
    report.say(head)
    others = Others()
    interrupted = False
    try:
        act()
    except KeyboardInterrupt:
        interrupted = True
        report.say("\ninterrupted; this is what was measured before")
    if as_json:
        print(json.dumps({"machine": head.splitlines(), "others": others.share(), **report.plain()}))
    else:
        print(f"\n{report.summary()}\nother processes used {others.share():.0%} of the CPUs meanwhile")
    if interrupted:
        sys.exit(INTERRUPTED)
