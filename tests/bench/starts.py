"""From nothing to the first result, beside what users have already: `python -m tests.bench starts [--row P11,P12] [--large]`.

Each figure is of a fresh process: from its start by the bench to the line that it prints after its first result. Kinds take turns in a
round, after one run of each that is not counted. Ratios are computed within a round; their median is judged.
    ort                  onnxruntime.InferenceSession from the file
    ort, saved graph     the same from ONNX Runtime's optimised graph, saved before
    openvino             openvino.Core().compile_model from the file
    openvino, cached     the same with CACHE_DIR, which holds the model
    no cache             aionn on onnxruntime
    miss                 the same into an empty cache
    hit                  the same from the cache
    hit, own token       the same with a token of the app
    hit, openvino        aionn on openvino, from the cache
    hit, from_onnx       a hit of a model that `Model.from_onnx` has read whole
Rows
    P11   a hit beside plain ORT
    P12   a hit beside no cache, in fresh processes and in a warm driver (from the file to the first result)
    P13   the worst lag of the app's loop in each phase; "control" is the worst gap of another process's loop meanwhile
    P14   memory of app and driver after the first result, its peak before, and what a second compilation adds
    P15   the same for a model of 2.4 GB with its data beside it, of which 2.2 GB are a table that only Gather reads (`--large`)
    S1    as P11, by the bounds for starts
    S2    a hit of `from_onnx` beside one of `load`
    S3    from `import aionn` to an open runtime without a driver, beside `import numpy, anyio, uvloop`
    S4    from the start of the first driver to its greeting, beside a Python that imports numpy, onnxruntime and uvloop
    S8    as P12, fresh processes alone
Memory is taken in runs apart, of which no time counts. `tests.bench.starts_processes` says what it counts.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aionn.cli.bench import Others, machine, machine_line
from tests.bench.real_report import Report
from tests.bench.starts_models import LARGE, MODELS, Subject, subjects
from tests.bench.starts_processes import Worker, WorkerError, peak_rss_bytes

ROWS = ("P11", "P12", "P13", "P14", "P15", "S1", "S2", "S3", "S4", "S8")
STORED = ("hit", "hit, own token", "hit, openvino", "hit, from_onnx")
KINDS = ("ort", "ort, saved graph", "openvino", "openvino, cached", "no cache", "miss", *STORED)
PARTS = ("open", "imports of an app", "driver", "imports of a driver")
HEAVY_KINDS = ("ort", "ort, saved graph", "no cache", "miss", "hit")
"""Whose memory is taken, and all kinds that the large model is started in."""

FIRST_BOUNDS = {"silero": (2.0, 2.5), "detector": (1.5,), "resnet50": (1.0,), "transformer": (0.9,)}
"""A hit's time beside plain ORT's, per model: what it must reach, and what it may take at most."""

START_BOUNDS = {"silero": 1.7, "detector": 1.35, "resnet50": 0.95, "transformer": 0.85}
"""The same for S1."""

BESIDE_BYTES = 500_000_000
"""From this size on, ONNX Runtime's saved graph keeps its weights in a file beside it."""

SAMPLE_S, CONTROL_S, SETTLE_S = 0.005, 0.001, 0.5
MEMORY_ROUNDS, WARM_TURNS = 3, 5
INTERRUPTED = 130


@dataclass(frozen=True)
class Options:
    """How often, which models and kinds, and where the models are kept (None: in a folder that ends with the bench)."""

    rounds: int = 5
    models: tuple[str, ...] = MODELS
    kinds: tuple[str, ...] = KINDS
    large: bool = False
    from_onnx: bool = False
    keep: Path | None = None


@dataclass
class Bench:
    """One model with what is kept for it: ONNX Runtime's saved graph, and caches that hold it."""

    subject: Subject
    directory: Path
    from_onnx: bool
    _turn: int = 0
    _checksums: dict[str, float] = field(default_factory=dict)

    def prepare(self, kinds: Sequence[str]) -> None:
        """Save the graph, fill the caches, and run each kind once."""
        self.directory.mkdir()
        if "ort, saved graph" in kinds:
            (self.directory / "saved").mkdir()
            with Worker(self.given("save")) as worker:
                worker.answer()
        for kind in kinds:
            if kind in (*STORED, "openvino, cached"):
                self.first(kind, filling=True)
            self.first(kind)

    def given(self, kind: str, **more: Any) -> dict[str, Any]:
        """Return what the process of a kind needs to know. A miss finds a cache and a state folder that are empty each time."""
        self._turn += kind == "miss"
        own = {"miss": f"miss{self._turn}", "lag": f"lag{self._turn}", "no cache": None, "again": None, "warm": "hit"}.get(kind, kind)
        saved = self.directory / "saved" / "model.onnx"
        return {
            "kind": kind,
            "model": str(saved if kind == "ort, saved graph" else self.subject.path),
            "inputs": self.subject.inputs,
            "threads": self.subject.threads,
            "saved": str(saved),
            "beside": "model.data" if self.subject.size_bytes >= BESIDE_BYTES else None,
            "device": "openvino" if kind == "hit, openvino" else "onnxruntime",
            "cache_dir": None if own is None or kind == "openvino" else str(self.directory / own),
            "state_dir": str(self.directory / f"state {own}"),
            "own_token": self.subject.name if kind == "hit, own token" else None,
            "from_onnx": self.from_onnx or kind == "hit, from_onnx",
            "again": kind == "again",
            **more,
        }

    def first(self, kind: str, filling: bool = False, **more: Any) -> dict[str, Any]:
        """Run a kind in a fresh process, to its first result."""
        with Worker(given := self.given(kind, **more)) as worker:
            answer = self.checked(kind, worker.answer(), filling)
        marks = {name: (at - worker.began_ns) / 1e6 for name, at in answer["marks"].items()}
        self.forget(given)
        return {**answer, "marks": marks}

    def forget(self, given: dict[str, Any]) -> None:
        """Delete the caches of a miss."""
        if given["kind"] in ("miss", "lag"):
            for folder in (given["cache_dir"], given["state_dir"]):
                shutil.rmtree(folder, ignore_errors=True)

    def checked(self, kind: str, answer: dict[str, Any], filling: bool = False) -> dict[str, Any]:
        """Return the answer if it is the one that the kind must give.

        Raises:
            WorkerError: the cache did something else, or the result is another one than that of the other kinds.
        """
        wanted = {"miss": "MISS", "no cache": "NO_CACHE"} | dict.fromkeys((*STORED, "warm", "lag"), "HIT")
        if not filling and kind in wanted and answer["outcome"] not in (wanted[kind], "DECLINED"):
            raise WorkerError(f"{self.subject.name}, {kind}: the cache's outcome was {answer['outcome']}")
        if "checksum" in answer:
            self._checksums[kind] = answer["checksum"]
            least, most = min(self._checksums.values()), max(self._checksums.values())
            if most - least > 0.01 * abs(most):
                raise WorkerError(f"{self.subject.name}: the results differ by kind, as sums {self._checksums}")
        return answer


# ---- times -----------------------------------------------------------------------------------------------------------------


def times(report: Report, bench: Bench, kinds: Sequence[str], rounds: int) -> dict[str, list[float]]:
    """P11, P12: milliseconds from nothing to the first result, for each kind and round."""
    name = bench.subject.name
    taken: dict[str, list[float]] = {kind: [] for kind in kinds}
    marks: dict[str, dict[str, list[float]]] = {kind: {} for kind in kinds}
    outcomes: dict[str, set[str]] = {kind: set() for kind in kinds}
    for turn in range(rounds):
        for kind in (*kinds[turn % len(kinds) :], *kinds[: turn % len(kinds)]):
            answer = bench.first(kind)
            taken[kind].append(answer["ms"])
            outcomes[kind].add(answer.get("outcome", ""))
            for mark, at_ms in answer["marks"].items():
                marks[kind].setdefault(mark, []).append(at_ms)
    for kind in kinds:
        if "DECLINED" in outcomes[kind]:
            report.say(f"{name}, {kind}: the cache declined to store the model")
    report.note(f"{name}: from nothing to the first result", taken, "ms")
    for kind in kinds:
        if "load" in marks[kind]:
            found = ", ".join(f"{mark} {statistics.median(at_ms):.0f}" for mark, at_ms in marks[kind].items())
            report.say(f"    {kind}: done with {found}")
    if {"hit", "ort"} <= set(kinds):
        for bound in FIRST_BOUNDS.get(name, ()):
            report.check("P11", f"{name}: hit / plain ort", divided(taken["hit"], taken["ort"]), bound)
        if name in START_BOUNDS:
            report.check("S1", f"{name}: hit / plain ort", divided(taken["hit"], taken["ort"]), START_BOUNDS[name])
    if {"hit", "hit, from_onnx"} <= set(kinds):
        report.check("S2", f"{name}: hit of from_onnx / hit", divided(taken["hit, from_onnx"], taken["hit"]), 1.1)
    if {"hit", "no cache"} <= set(kinds):
        for row in ("P12", "S8"):
            report.check(row, f"{name}: hit / no cache, fresh processes", divided(taken["hit"], taken["no cache"]), 1.0)
    return taken


def warm(report: Report, bench: Bench, rounds: int) -> None:
    """P12: turns of a hit and of no cache in one driver."""
    name = bench.subject.name
    with Worker(bench.given("warm", turns=max(rounds, WARM_TURNS))) as worker:
        turns = bench.checked("warm", worker.answer())["turns"]
    whole = {kind: [whole_ns / 1e6 for whole_ns, _ in each] for kind, each in turns.items()}
    alone = {f"{kind}, compile alone": [compile_ns / 1e6 for _, compile_ns in each] for kind, each in turns.items()}
    report.note(f"{name}: from the file to the first result in a warm driver", {**whole, **alone}, "ms")
    report.check("P12", f"{name}: hit / no cache, warm driver", divided(whole["hit"], whole["no cache"]), 1.0)


def parts(report: Report, directory: Path, rounds: int) -> None:
    """S3, S4: an open runtime, and the first driver, each beside a fresh process that only imports what it cannot do without."""
    taken: dict[str, list[float]] = {kind: [] for kind in PARTS}
    for turn in range(rounds + 1):
        for kind in PARTS:
            with Worker({"kind": kind, "device": "onnxruntime", "state_dir": str(directory / "state parts")}) as worker:
                took_ms = worker.answer()["took_ms"]
            if turn:  # the first turn of each is not counted
                taken[kind].append(took_ms)
    report.note("parts of a start", taken, "ms")
    report.check("S3", "import aionn, open / import numpy, anyio, uvloop", divided(taken["open"], taken["imports of an app"]), 1.3)
    report.check("S4", "first driver / numpy, onnxruntime, uvloop", divided(taken["driver"], taken["imports of a driver"]), 1.15)


def divided(of: Sequence[float], by: Sequence[float]) -> list[float]:
    return [ours / theirs for ours, theirs in zip(of, by, strict=True)]


# ---- memory ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Held:
    """Megabytes: app and driver after the first result, their peak before, and the peak RSS of the driver (or of the one process)."""

    steady: float
    peak: float
    driver: float


def held(bench: Bench, kind: str) -> Held:
    most = 0
    with Worker(given := bench.given(kind)) as worker:

        def sample() -> None:
            nonlocal most
            most = max(most, worker.memory_bytes())

        bench.checked(kind, worker.answer_watched(SAMPLE_S, sample))
        sample()
        time.sleep(SETTLE_S)  # what goes after the first result may go
        steady = worker.memory_bytes()
        driver = max(peak_rss_bytes(pid) for pid in worker.drivers() or [worker.pid])
    bench.forget(given)
    return Held(steady / 1e6, max(most, steady) / 1e6, driver / 1e6)


def memory(report: Report, bench: Bench, kinds: Sequence[str], rounds: int) -> None:
    """P14 or P15: memory of each kind, in turns."""
    name, size_mb = bench.subject.name, bench.subject.size_bytes / 1e6
    taken: dict[str, list[Held]] = {kind: [] for kind in kinds}
    for _ in range(min(rounds, MEMORY_ROUNDS)):
        for kind in kinds:
            taken[kind].append(held(bench, kind))
    steady, peak, driver = (
        {kind: [getattr(each, what) for each in found] for kind, found in taken.items()} for what in Held.__annotations__
    )
    report.note(f"{name}: memory of app and driver after the first result, {size_mb:.0f} MB of file", steady, "MB")
    report.note(f"{name}: the peak of it", peak, "MB")
    report.note(f"{name}: peak RSS of the driver, or of the rival's process", driver, "MB")
    for kind in [kind for kind in ("no cache", "hit") if kind in kinds]:
        if name == LARGE:
            report.check("P15", f"{name}, {kind}: peak / file", [value / size_mb for value in peak[kind]], 1.3)
            report.check("P15", f"{name}, {kind}: driver's peak RSS / file", [value / size_mb for value in driver[kind]], 1.2)
        elif name == "transformer":
            report.check("P14", f"{name}, {kind}: peak / steady", divided(peak[kind], steady[kind]), 1.3)
    for kind, rival, bound in (("no cache", "ort", 1.15), ("hit", "ort, saved graph", 1.1)):
        if name == "transformer" and {kind, rival} <= set(kinds):
            report.check("P14", f"{name}: {kind} / {rival}", divided(steady[kind], steady[rival]), bound)


def again(report: Report, bench: Bench, rounds: int) -> None:
    """P14: what the second compilation of a file adds to the memory of app and driver."""
    name = bench.subject.name
    sizes: dict[str, list[float]] = {"one compilation": [], "two": []}
    for _ in range(min(rounds, MEMORY_ROUNDS)):
        with Worker(bench.given("again")) as worker:
            for number in sizes:
                bench.checked("again", worker.answer())
                time.sleep(SETTLE_S)
                sizes[number].append(worker.memory_bytes() / 1e6)
                if number != "two":
                    worker.go_on()
    report.note(f"{name}: memory of app and driver", sizes, "MB")
    if name == "transformer":
        report.check("P14", f"{name}: two compilations / one", divided(sizes["two"], sizes["one compilation"]), 1.1)


# ---- lag -------------------------------------------------------------------------------------------------------------------


def lags(report: Report, bench: Bench, rounds: int) -> None:
    """P13: the worst gap of the app's loop in each phase, and of this process meanwhile."""
    name = bench.subject.name
    app: dict[str, list[float]] = {}
    control: dict[str, list[float]] = {}
    worst: list[float] = []
    beyond: list[float] = []
    for _ in range(min(rounds, MEMORY_ROUNDS)):
        gaps: list[tuple[int, int]] = []
        last = time.monotonic_ns()

        def tick() -> None:
            nonlocal last
            now = time.monotonic_ns()
            gaps.append((last, now))  # noqa: B023 -- used in this turn alone
            last = now

        with Worker(given := bench.given("lag")) as worker:
            phases = bench.checked("lag", worker.answer_watched(CONTROL_S, tick))["phases"]
        bench.forget(given)
        each: dict[str, tuple[float, float]] = {}
        for phase, began, ended, gap_ns in phases:
            beside = max((end - start for start, end in gaps if start < ended and end > began), default=0) / 1e6 - CONTROL_S * 1e3
            before = each.get(phase, (0.0, 0.0))
            each[phase] = max(before[0], gap_ns / 1e6), max(before[1], beside)
        for phase, (mine, beside) in each.items():
            app.setdefault(phase, []).append(mine)
            control.setdefault(f"control, {phase}", []).append(beside)
        # The first runtime imports NumPy and more while it opens. That is a fixed cost of the app's start, whatever the model.
        of_model = [gap for phase, gap in each.items() if phase != "open"]
        worst.append(max(mine for mine, _ in of_model))
        beyond.append(max(mine - beside for mine, beside in of_model))
    report.note(f"{name}: worst lag of the loop", {**app, **control, "worst beyond the control": beyond}, "ms")
    report.check("P13", f"{name}: worst lag in any phase but open, ms", worst, 10.0)


# ---- all of it -------------------------------------------------------------------------------------------------------------


def measure(report: Report, options: Options) -> None:
    """Measure the wanted rows, model by model."""
    wanted = report.wanted
    if not options.large:
        report.lacks("P15", "give --large: it makes a model of 2.4 GB, and needs 20 GB of disk")
    names = tuple(name for name in options.models if name != LARGE) if wanted - {"P15", "S3", "S4"} else ()
    names += (LARGE,) if options.large and wanted & {"P13", "P15"} else ()
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="aionn-starts-")))
        if options.keep is not None:
            options.keep.mkdir(parents=True, exist_ok=True)
        if wanted & {"S3", "S4"}:
            parts(report, directory, options.rounds)
        tables = {}
        for subject in subjects(names, options.keep or directory):
            bench = Bench(subject, directory / subject.name, options.from_onnx)
            kinds = [kind for kind in options.kinds if subject.name != LARGE or kind in HEAVY_KINDS]
            tables[subject.name] = measure_model(report, bench, kinds, options.rounds)
            shutil.rmtree(bench.directory)
        report.say(table({name: taken for name, taken in tables.items() if taken}))


def measure_model(report: Report, bench: Bench, kinds: Sequence[str], rounds: int) -> dict[str, list[float]]:
    wanted, name = report.wanted, bench.subject.name
    heaviest = name in ("transformer", LARGE)
    heavy = [kind for kind in HEAVY_KINDS if kind in kinds]
    times_wanted = wanted & {"P11", "P12", "S1", "S2", "S8"}
    memory_wanted = "P15" in wanted if name == LARGE else "P14" in wanted
    bench.prepare(kinds if times_wanted else heavy)
    taken = times(report, bench, kinds, rounds) if times_wanted else {}
    steps: list[tuple[bool, Callable[[], None]]] = [
        ("P12" in wanted and "hit" in kinds and name != LARGE, lambda: warm(report, bench, rounds)),
        (memory_wanted, lambda: memory(report, bench, heavy, rounds)),
        (memory_wanted and "no cache" in kinds, lambda: again(report, bench, rounds)),
        ("P13" in wanted and heaviest, lambda: lags(report, bench, rounds)),
    ]
    for needed, step in steps:
        if needed:
            step()
    return taken


def table(tables: dict[str, dict[str, list[float]]]) -> str:
    """Return medians, one row for each kind and one column for each model, each with its ratio to plain ORT."""
    kinds = [kind for kind in KINDS if any(kind in taken for taken in tables.values())]
    lines = [f"\n{'ms, and ratio to plain ort':22}" + "".join(f"{name:>18}" for name in tables)]
    for kind in kinds:
        cells = []
        for taken in tables.values():
            found = f"{statistics.median(taken[kind]):.0f}" if kind in taken else "-"
            ratio = f" {statistics.median(divided(taken[kind], taken['ort'])):5.2f}" if {kind, "ort"} <= taken.keys() else ""
            cells.append(f"{found + ratio:>18}")
        lines.append(f"{kind:22}" + "".join(cells))
    return "\n".join(lines) if tables else ""


def _some_of(known: Sequence[str]) -> Callable[[str], tuple[str, ...]]:
    def chosen(text: str) -> tuple[str, ...]:
        found = tuple(part.strip() for part in text.split("+" if "+" in text or text in known else ","))
        if not set(found) <= set(known):
            raise argparse.ArgumentTypeError(f"unknown {sorted(set(found) - set(known))}; give some of {'; '.join(known)}")
        return found

    return chosen


def main(argv: list[str]) -> None:
    """Measure and print. See the module's docstring."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench starts", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--row", "--rows", type=_some_of(ROWS), default=ROWS, help=f"some of {','.join(ROWS)}")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--models", type=_some_of(MODELS), default=MODELS, help=f"some of {','.join(MODELS)}")
    parser.add_argument("--kinds", type=_some_of(KINDS), default=KINDS, help="some of the kinds, with + between them")
    parser.add_argument("--large", action="store_true", help="the 2.4 GB model, too")
    parser.add_argument("--from-onnx", action="store_true", help="Model.from_onnx, also where the release has runtime.load")
    parser.add_argument("--keep", type=Path, help="a folder in which the models that are made stay for the next run")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    given = parser.parse_args(argv)
    head = f"{machine_line(machine())}\n{given.rounds} rounds"
    report = Report(frozenset(given.row), quiet=given.json)
    report.say(head)
    others = Others()
    interrupted = False
    try:
        measure(report, Options(given.rounds, given.models, given.kinds, given.large, given.from_onnx, given.keep))
    except KeyboardInterrupt:
        interrupted = True
        report.say("\ninterrupted; this is what was measured before")
    if given.json:
        print(json.dumps({"machine": head.splitlines(), "others": others.share(), **report.plain()}))
    else:
        print(f"\n{report.summary()}\nother processes used {others.share():.0%} of the CPUs meanwhile")
    if interrupted:
        sys.exit(INTERRUPTED)
