"""aionn beside what users have already, at real rates: the figures of `docs/explanation/benchmarks.md` and of the page beside it.

    pip install -e '.[bench]'             the rivals' packages
    python -m tests.bench versus          measure for eleven minutes, keep the figures as JSON, and write pages and pictures from them
    python -m tests.bench versus --write  only write pages and pictures, from the JSON that is there
    python -m tests.bench versus --json FILE  keep the figures there, and say which ratios lie outside of the page's intervals

A way to run a model is a section of `tests.bench.versus_contenders`. Each figure is of a fresh process, which is alone on the machine: ways
take turns within a round, and each round begins with another way. A ratio is that of two figures of one round. Its median over the
rounds is shown, with the interval in which that of another run is expected. The runs before are kept with the figures, and count for the
interval, because ratios differ between machines.

Ways that need ten seconds to start and to end take part in every other round. A way whose package is not installed is left out.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from aionn.cli.bench import Others, machine, machine_line
from tests.bench import service, versus_pages
from tests.bench.starts import Bench
from tests.bench.starts_models import CPUS
from tests.bench.starts_processes import Worker, WorkerError, descendants, group_bytes
from tests.bench.versus_contenders import OPEN, Job
from tests.real_models import carried

WORKER = Path(__file__).with_name("versus_worker.py")
PACKAGES = {"iceoryx2": ("iceoryx2",), "Ray Serve": ("ray",), "LitServe": ("litserve", "aiohttp")}
"""What a way needs beside aionn's own extras."""

SLOW = ("Ray Serve", "LitServe")
MORTAL = ("process pool", "Ray Serve", "LitServe", "aionn")
"""Ways that notice the death of their other process."""

CROWDED = ("direct", "to_thread", "process pool", "shared memory", "aionn")
SETTLE_S = 0.5
APPS = 4
MEMORY_ROUNDS = 3

SILERO_IN = {"input": ("float32", (1, 576)), "state": ("float32", (2, 1, 128))}
SILERO_OUT = {"output": ("float32", (1, 1)), "stateN": ("float32", (2, 1, 128))}
PICTURE_IN, PICTURE_OUT = {"x": ("float32", (1, 3, 384, 640))}, {"fetch_name_0": ("float32", (1, 1, 384, 640))}


@dataclass(frozen=True)
class Task:
    """One job for several ways: how many streams at which rate, and for how many frames each."""

    name: str
    ways: Sequence[str]
    streams: int
    rate: float
    frames: int

    def job(self, cache_dir: str) -> Job:
        if self.name == "detector":
            return Job(str(carried("detector")), CPUS, self.streams, PICTURE_IN, PICTURE_OUT, cache_dir)
        return Job(str(carried("silero")), 1, self.streams, SILERO_IN, SILERO_OUT, cache_dir)


TASKS = (
    Task("one", tuple(OPEN), 1, 31, 93),
    Task("sixteen", CROWDED, 16, 31, 62),
    Task("sixty-four", CROWDED, 64, 31, 62),
    Task("detector", tuple(OPEN), 1, 10, 25),
)

Lanes = dict[str, list[float | None]]
"""A figure of each way for each round, or None for a round in which it took no part."""


@dataclass
class Figures:
    """Rows by name, each with a figure of each way and round."""

    rounds: int
    rows: dict[str, Lanes] = field(default_factory=dict)
    checksums: dict[str, float] = field(default_factory=dict)
    lost: dict[str, int] = field(default_factory=dict)
    """Calls that a death cost, by way."""

    def add(self, row: str, way: str, number: int, figure: float | None) -> None:
        lanes = self.rows.setdefault(row, {}).setdefault(way, [None] * self.rounds)
        lanes[number] = None if figure is None else round(figure, 3)

    def check(self, task: str, way: str, checksum: float) -> None:
        """Compare an answer with that of the way before.

        Raises:
            WorkerError: the ways do not compute the same.
        """
        right = self.checksums.setdefault(task, checksum)
        if abs(right - checksum) > 0.01 * abs(right):
            raise WorkerError(f"{task}, {way}: the sum of the outputs is {checksum}, but that of the other ways is {right}")


@contextmanager
def ending_all(worker: Worker) -> Iterator[None]:
    """After an error, end what the worker has started. Not every way ends by itself with its app.

    Only the tracker of `multiprocessing` does: when all others have ended, it removes their semaphores, and ends.
    """
    try:
        yield
    except BaseException:
        for pid in descendants(worker.pid):
            with suppress(OSError):  # it has ended
                if b"resource_tracker" not in Path(f"/proc/{pid}/cmdline").read_bytes():
                    os.kill(pid, signal.SIGKILL)
        raise


def run(figures: Figures, task: Task, way: str, number: int | None, cache_dir: str) -> None:
    """Run a task in one way in a fresh process. Without a number only start it, so that files and caches are warm for all ways."""
    kill = task.name == "one" and way in MORTAL
    given = {"kind": way, "contender": way, "job": asdict(task.job(cache_dir)), "rate": task.rate, "frames": task.frames, "kill": kill}
    if number is None:
        given |= {"frames": 1, "kill": False}
    with Worker(given, WORKER) as worker, ending_all(worker):
        first = worker.answer()
        figures.check(task.name, way, first["checksum"])
        if number is not None:
            time.sleep(SETTLE_S)
            held_mb = group_bytes([worker.pid, *descendants(worker.pid)]) / 1e6
        worker.go_on()
        found = worker.answer()
        if number is None:
            return
        p50_us, p99_us = (float(value) / 1e3 for value in np.percentile(found["times_ns"], [50, 99]))
        figures.add(f"{task.name}, p50", way, number, p50_us)
        figures.add(f"{task.name}, p99", way, number, p99_us)
        figures.add(f"{task.name}, cpu", way, number, found["cpu_us"])
        if task.name == "one":
            figures.add("start", way, number, first["ms"])
            figures.add("memory", way, number, held_mb)
        if kill:
            after = worker.answer()
            figures.add("death", way, number, after["after_ms"] if after["right"] else None)
            figures.lost[way] = max(figures.lost.get(way, 0), after["errors"])


def large(figures: Figures, say: Callable[[str], None]) -> None:
    """Start with a model of 134 MB, and run four apps with it."""
    with service.bench_of("dense") as bench:
        kinds = {"ONNX Runtime in the app": "ort", "aionn, no cache": "no cache", "aionn, hit": "hit"}
        for kind in kinds.values():
            bench.first(kind)
        for number in range(figures.rounds):
            for name, kind in turned(list(kinds.items()), number):
                figures.add("large start", name, number, bench.first(kind)["ms"])
        say("134 MB: starts")
        for number in range(min(figures.rounds, MEMORY_ROUNDS)):
            figures.add("four apps", "ONNX Runtime in each app", number, four(bench, "ort", None))
            figures.add("four apps", "aionn, drivers of each app", number, four(bench, "hit", None))
            with service.served(bench) as served:
                figures.add("four apps", "aionn, one service", number, four(bench, "hit", served))
        say(f"134 MB: {APPS} apps")


def four(bench: Bench, kind: str, served: Any) -> float:
    """Return the megabytes of four apps that have computed once, of their drivers and of the service."""
    more = {} if kind == "ort" else {"service": served.path if served else service.OFF}
    with ExitStack() as stack:
        workers = []
        for _ in range(APPS):
            workers.append(stack.enter_context(Worker(bench.given(kind, **more))))
            bench.checked(kind, workers[-1].answer())
        time.sleep(service.SETTLE_S)
        return service.together_mb(workers, served)


def turned(values: Sequence[Any], number: int) -> list[Any]:
    """Return the values in an order that begins with another one in each round."""
    start = number % len(values)
    return [*values[start:], *values[:start]]


def installed(way: str) -> bool:
    return all(find_spec(package) for package in PACKAGES.get(way, ()))


@contextmanager
def homes(folder: Path) -> Iterator[None]:
    """Keep what aionn keeps for its user in a folder meanwhile."""
    before = os.environ.get("XDG_STATE_HOME")
    os.environ["XDG_STATE_HOME"] = str(folder / "state")
    try:
        yield
    finally:
        del os.environ["XDG_STATE_HOME"]
        if before is not None:
            os.environ["XDG_STATE_HOME"] = before


def measure(rounds: int, ways: Sequence[str], say: Callable[[str], None]) -> dict[str, Any]:
    """Measure everything. Returns what the JSON file holds."""
    began_s, others, where = time.monotonic(), Others(), machine()
    for way in [way for way in ways if not installed(way)]:
        say(f"{way} is left out, because {' or '.join(PACKAGES[way])} is not installed; `pip install -e '.[bench]'` brings it")
    ways = [way for way in ways if installed(way)]
    figures = Figures(rounds)
    with TemporaryDirectory(prefix="aionn-versus-") as directory, homes(Path(directory)):
        cache_dir = str(Path(directory, "cache"))
        for number in (None, *range(rounds)):
            for task in TASKS:
                taking_part = [way for way in task.ways if way in ways and not (way in SLOW and (number or 0) % 2)]
                if number is None and task.streams > 1:
                    continue
                for way in turned(taking_part, number or 0):
                    run(figures, task, way, number, cache_dir)
            done = "every way has started once" if number is None else f"round {number + 1} of {rounds}"
            say(f"{done}, after {time.monotonic() - began_s:.0f} s")
        large(figures, say)
    packages = {package: version(package) for way in ways for package in PACKAGES.get(way, ())}
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "machine": {**where, "versions": {**where["versions"], **packages}},
        "others": round(others.share(), 3),
        "rounds": rounds,
        "seconds": round(time.monotonic() - began_s),
        "lost": figures.lost,
        "rows": figures.rows,
    }


def main(argv: list[str]) -> None:
    """Measure and write. See the module's docstring."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench versus", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true", help="measure nothing, and write pages and pictures from the JSON that is there")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ways", default=",".join(OPEN), help=f"some of {','.join(OPEN)}; a page needs all of them")
    parser.add_argument("--json", type=Path, default=versus_pages.FIGURES, help="where the figures are kept")
    options = parser.parse_args(argv)
    ways = options.ways.split(",")
    if unknown := set(ways) - set(OPEN):
        parser.error(f"--ways {min(unknown)!r}: the ways are {', '.join(OPEN)}")
    if not options.write:
        print(machine_line(machine()), flush=True)
        found = measure(options.rounds, ways, lambda line: print(line, flush=True))
        print(f"{found['seconds']} s; other processes used {found['others']:.0%} of the CPUs meanwhile")
        if options.json == versus_pages.FIGURES:
            found = versus_pages.following(found, json.loads(versus_pages.FIGURES.read_text(encoding="utf-8")))
        options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    figures = json.loads(options.json.read_text(encoding="utf-8"))
    print(versus_pages.table(figures))
    if options.json == versus_pages.FIGURES:
        versus_pages.write()
    else:
        print("\n" + "\n".join(versus_pages.outside(json.loads(versus_pages.FIGURES.read_text(encoding="utf-8")), figures)))
