"""`aionn bench`: how fast aionn is on this machine, beside what does the same work without it.

bench_subjects   what is measured, and the rivals
bench_worker     the program of worker processes

A run may be compared with an older one. The medians of rounds are compared, not single calls: thousands of calls of one run resemble each
other more than two runs do, so they would make any small difference significant."""

from __future__ import annotations

import json
import math
import os
import platform
import resource
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from statistics import NormalDist
from typing import Any

import aionn
from aionn.cgroups import text_of
from aionn.cli import bench_subjects as subjects
from aionn.cli.bench_subjects import Measured
from aionn.cli.printing import NotDoneError, UsageError, duration, print_json, print_table, say
from aionn.cli.running import check_shapes, completed, parse_shapes

FORMAT = 1
_BUSY = 0.2
_MOST_S = 1e9
_BEST_FIRST = ("onnxruntime", "openvino", "reference")


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """What `aionn bench` measures. The command line describes each option.

    Attributes:
        subject: "burst", "cache", "stages", the path of a model, or an empty text for bursts, the cache and the start.
        compare: the report of an older run, or None.
    """

    subject: str
    device: str | None
    shapes: Sequence[str]
    seconds: float
    compare: str | None


def run_bench(options: BenchOptions, as_json: bool) -> None:
    """Measure, print, and compare.

    Raises:
        UsageError: a number, a file or the old report cannot be used.
        NotDoneError: something became slower than in the old report, or cannot be measured.
    """
    if not 0 < options.seconds < math.inf:
        raise UsageError(f"--seconds {options.seconds:g} is not a time; give a number above 0")
    if options.shapes and options.subject in _SUBJECTS:
        raise UsageError("--shape is for the inputs of a model; give the path of a model, too")
    if options.subject not in _SUBJECTS and not Path(options.subject).is_file():
        raise UsageError(f"{options.subject!r} is neither a subject nor a file; give burst, cache, stages or the path of a model")
    old = None if options.compare is None else _report_in(options.compare)
    found, others = machine(), Others()
    measured = aionn.run(_measure, options)
    report: dict[str, Any] = {
        "format": FORMAT,
        "subject": options.subject or "all",
        "machine": found,
        "others_share": others.share(),
        "measures": [_as_json(one) for one in measured],
    }
    compared = [] if old is None else changes(old["measures"], report["measures"])
    if options.compare is not None and not compared:
        raise UsageError(f"--compare {options.compare!r} has none of these measures; compare runs of the same subject")
    if as_json:
        print_json({**report, **({"compared": [{**asdict(one), "lost": one.lost} for one in compared]} if compared else {})})
    else:
        _print(report, compared)
    if old is not None and old["machine"]["cpu"] != found["cpu"]:
        say(f"the older run was on another CPU ({old['machine']['cpu']})")
    lost = [f"{one.name} takes {one.ratio:.2f} times as long (chance {one.chance:.1g})" for one in compared if one.lost and not one.rival]
    if lost:
        raise NotDoneError(f"slower than in {options.compare!r}: {', '.join(lost)}")


_SUBJECTS = ("", "burst", "cache", "stages")


async def _measure(options: BenchOptions) -> list[Measured]:
    subject, seconds = options.subject, options.seconds
    if subject == "burst":
        return await subjects.measure_burst(options.device, seconds)
    if subject not in _SUBJECTS:
        return await _measure_model(options)
    with tempfile.TemporaryDirectory(prefix="aionn-bench-") as name:
        directory = Path(name)
        path = directory / "dense.onnx"
        inputs = subjects.write_model(path)
        if subject == "stages":
            return await subjects.measure_stages(path, inputs, seconds)
        device = options.device or next(name for name in _BEST_FIRST if find_spec(name) or name == "reference")
        if subject == "cache":
            return await subjects.measure_cache(device, path, directory / "cache", seconds)
        found = await subjects.measure_burst(options.device, seconds * 0.4)
        hits = True
        try:
            found += await subjects.measure_cache(device, path, directory / "cache", seconds * 0.1)
        except subjects.NotCachedError as error:
            hits = False
            say(f"no hits are measured: {error}")
        return found + await subjects.measure_start(device, path, inputs, directory, seconds * 0.5, hits=hits)


async def _measure_model(options: BenchOptions) -> list[Measured]:
    path = Path(options.subject)
    model = await aionn.Model.load(path)
    shapes = parse_shapes(options.shapes)
    check_shapes(shapes, (), model)
    return await subjects.measure_model(options.device, path, completed({}, shapes, model), options.seconds)


def _as_json(one: Measured) -> dict[str, Any]:
    return {
        "name": one.name,
        "rival": one.rival,
        "p50_s": one.p50_s,
        "p99_s": one.p99_s,
        "repetitions": sum(map(len, one.rounds)),
        "rounds_p50_s": one.medians_s(),
    }


def _report_in(path: str) -> dict[str, Any]:
    """Return the report in a file.

    Raises:
        UsageError: it is not the report of a run.
    """
    try:
        report = json.loads(Path(path).read_text(encoding="utf-8"))
        sound = report["format"] == FORMAT and all(
            isinstance(one["name"], str) and _are_times(one["rounds_p50_s"]) for one in report["measures"]
        )
        sound = sound and isinstance(report["machine"]["cpu"], str)
    except OSError as error:
        raise UsageError(f"--compare {path!r} cannot be read ({error.strerror}); give a file that aionn bench --json wrote") from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise UsageError(f"--compare {path!r} is not a report of aionn bench; write one with aionn bench --json > {path}") from error
    if not sound:
        raise UsageError(f"--compare {path!r} is a report of another release; write one with aionn bench --json > {path}")
    return dict(report)


def _are_times(seconds: Any) -> bool:
    """Return whether a value of a report is a list of times that can be compared."""
    return isinstance(seconds, list) and bool(seconds) and all(type(one) in (int, float) and 0 < one < _MOST_S for one in seconds)


def _print(report: Mapping[str, Any], compared: Sequence[MeasureChange]) -> None:
    print(machine_line(report["machine"]))
    by_name = {one.name: one for one in compared}
    columns = ["measure", "p50>", "p99>", "times>", *(["before>", "change>", "chance>"] if compared else [])]
    rows = []
    for one in report["measures"]:
        cells = [f"{one['name']}{' *' if one['rival'] else ''}", duration(one["p50_s"]), duration(one["p99_s"]), f"{one['repetitions']}"]
        if compared:
            change = by_name.get(one["name"])
            cells += [duration(change.before_s), f"{change.ratio - 1:+.0%}", f"{change.chance:.2g}"] if change else ["", "", ""]
        rows.append(cells)
    print_table("", columns, rows)
    if any(one["rival"] for one in report["measures"]):
        print("* without aionn")
    if report["others_share"] > _BUSY:
        sys.stdout.flush()
        say(f"other processes used {report['others_share']:.0%} of the CPUs meanwhile, so the figures are larger than they need be")


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


_PACKAGES = ("aionn", "numpy", "uvloop", "onnxruntime", "openvino")


def machine() -> dict[str, Any]:
    """Return what the machine is, as JSON values."""
    return {
        "cpu": _cpu_name(),
        "architecture": platform.machine(),
        "usable_cpus": len(os.sched_getaffinity(0)),
        "governor": text_of("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor").strip(),  # many virtual machines have none
        "kernel": platform.release(),
        "load": os.getloadavg()[0],
        "versions": {"python": platform.python_version(), **_versions()},
    }


def machine_line(found: dict[str, Any]) -> str:
    """Return what `machine` found in two lines for people."""
    governor = found["governor"] or "not known"
    versions = ", ".join(f"{name} {number}" for name, number in found["versions"].items())
    return (
        f"{found['cpu']} ({found['architecture']}), {found['usable_cpus']} usable CPUs, governor {governor}, Linux {found['kernel']}, "
        f"load {found['load']:.1f}\n{versions}"
    )


def _versions() -> dict[str, str]:
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def _cpu_name() -> str:
    lines = text_of("/proc/cpuinfo").splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "CPU not named")


class Others:
    """What share of the CPUs other processes use meanwhile. Where it is large, no figure can be trusted."""

    def __init__(self) -> None:
        self._began_s, self._foreign_s = time.monotonic(), _foreign_s()

    def share(self) -> float:
        """Return the share since the start, 0 to 1. Children count as ours once they have ended."""
        passed_s = max(1e-9, time.monotonic() - self._began_s)
        return min(1.0, max(0.0, _foreign_s() - self._foreign_s) / passed_s / (os.cpu_count() or 1))


def _foreign_s() -> float:
    """Return the CPU seconds of the machine without those of this process and its ended children."""
    user, nice, system, _, _, *more = map(int, Path("/proc/stat").read_text(encoding="ascii").split("\n", 1)[0].split()[1:9])
    busy_s = (user + nice + system + sum(more)) / os.sysconf("SC_CLK_TCK")
    ours = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return busy_s - sum(used.ru_utime + used.ru_stime for used in ours)
