"""`aionn bench`: how fast aionn is on this machine, beside what does the same work without it.

bench_subjects   what is measured, and the rivals
bench_rounds     rounds in which all kinds take turns
bench_processes  worker processes; bench_worker is their program
bench_machine    what the machine is
bench_compare    whether a run is slower than an older one (no I/O)
"""

from __future__ import annotations

import json
import math
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import aionn
from aionn.cli import bench_subjects as subjects
from aionn.cli.bench_compare import MeasureChange, changes
from aionn.cli.bench_machine import Others, machine, machine_line
from aionn.cli.bench_rounds import Measured
from aionn.cli.printing import NotDoneError, UsageError, duration, error_console, print_json, print_table
from aionn.cli.running import completed
from aionn.cli.shapes import check_shapes, parse_shapes

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
        error_console().print(f"aionn: the older run was on another CPU ({old['machine']['cpu']})", markup=False, soft_wrap=True)
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
            error_console().print(f"aionn: no hits are measured: {error}", markup=False, soft_wrap=True)
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
        text = (
            f"aionn: other processes used {report['others_share']:.0%} of the CPUs meanwhile, so the figures are larger than they need be"
        )
        error_console().print(text, markup=False, soft_wrap=True)
