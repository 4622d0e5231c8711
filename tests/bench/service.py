"""Apps that share drivers through one service, beside apps with a driver each: `python -m tests.bench service [--row V1,V3] [--rounds 5]`.

Rows, one ratio or more each, with the bound that aionn means to reach. Ratios are computed within a round; their median is judged.
    V1    memory of four apps, their drivers and the service for a model of 134 MB, beside one app and four apps with a driver each
    V2    the first result of the second app, with a runtime and without an event loop, beside an app with its own driver and a hit
    V3    six processes with a camera of 720 lines at 10 frames a second: p99 and memory, beside the same with a driver each
    V4    p50 of a frame beside that with the app's own driver, and the service's system calls over 10,000 frames
    B3    one of five streaming apps is killed again and again: errors and late frames of the others, and what stays behind
    B9    one app keeps 32 bursts busy beside one at 30 frames a second, with the same and with another model
    B11   memory and wake-ups of a service whose apps have gone
Apps are fresh processes. "Own driver" is this version of aionn with `service="off"`. Memory is PSS, counted as in
`tests.bench.starts_processes`: of all apps, drivers and templates at one moment, and of the service if there is one. V3 streams the
model of examples/cameras.py, because six streams of the text detector are more work than two CPUs can do.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack, contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import uvloop

import aionn
from tests.bench.machine import memory_bytes, system_calls, wake_ups
from tests.bench.real_hot import timed
from tests.bench.real_report import Groups, Lanes, NotAvailableError, Options, Report, Taken, measure, print_measured, ratios, rows_among
from tests.bench.real_subjects import silero_subject
from tests.bench.starts import Bench, divided
from tests.bench.starts_models import subjects
from tests.bench.starts_processes import Worker, descendants, group_bytes
from tests.bench.starts_worker import arrays
from tests.service.served import Served, serving

STREAMS = Path(__file__).with_name("service_worker.py")
DEVICE = "onnxruntime"
OFF = "off"
APPS, CAMERAS, STREAMING, FLOODED = 4, 6, 5, 32
CAMERA_RATE, STREAM_RATE = 10.0, 30.0
MODEL_ROUNDS, PLACED_ROUNDS = 3, 10
SETTLE_S = 1.0
COUNTED_FRAMES, COUNTED_S = 10_000, 10.0
"""Frames whose system calls are counted, and the time for which they are. Each timer of the service goes off as often in such times."""

KILLS, FIRST_KILLS, BETWEEN_S = 50, 5, 0.2
"""Apps that are killed, those of them before the first look at the driver, and how long a new one streams before."""

WARM = 30
"""Frames that do not count, while a flood begins."""

ENDLESS = 10**9
SHARED, OWN = "one service", "own drivers"


@contextmanager
def served(bench: Bench | None = None) -> Iterator[Served]:
    """Run a service, whose cache goes with it. With `bench`, its drivers trust the bench's caches, and its own one is among them."""
    before = dict(os.environ)
    with serving() as folder:
        os.environ["XDG_CACHE_HOME"] = str(folder / "cache" if bench is None else bench.directory / "service")
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
        try:
            service = Served(folder, state_dir=None if bench is None else bench.given("hit")["state_dir"])
            try:
                yield service
            finally:
                service.end()
        finally:
            os.environ.clear()
            os.environ.update(before)


@contextmanager
def bench_of(name: str) -> Iterator[Bench]:
    """Make a model and a cache that holds it."""
    with TemporaryDirectory(prefix="aionn-service-") as directory:
        (subject,) = subjects((name,), Path(directory))
        bench = Bench(subject, Path(directory, "kept"), from_onnx=False)
        bench.prepare(("hit",))
        yield bench


def family(service: Served | None) -> list[int]:
    """Return the service's process and those that it has started."""
    return [] if service is None else [service.process.pid, *descendants(service.process.pid)]


def together_mb(workers: Sequence[Worker], service: Served | None) -> float:
    """Return the memory of apps, of their drivers and of the service."""
    pids = family(service)
    for worker in workers:
        pids += [worker.pid, *worker.drivers()]
    return group_bytes(pids) / 1e6


# ---- V1, V2: memory and first results ----------------------------------------------------------------------------------------


async def memory(report: Report, options: Options) -> None:
    """V1: apps that have computed once, and that keep what they have."""
    found: dict[str, list[float]] = {"one app": [], f"{APPS} apps, {OWN}": [], f"{APPS} apps, {SHARED}": []}
    one, own, shared = found.values()
    with bench_of("dense") as bench:
        for _ in range(min(options.rounds, MODEL_ROUNDS)):
            one.append(_held_mb(bench, 1, None))
            own.append(_held_mb(bench, APPS, None))
            with served(bench) as service:
                shared.append(_held_mb(bench, APPS, service))
        report.note(f"memory, {bench.subject.size_bytes / 1e6:.0f} MB of weights", found, "MB")
    report.check("V1", f"{APPS} apps: {SHARED} / one app with its own driver", divided(shared, one), 1.6)
    report.check("V1", f"{APPS} apps: {SHARED} / {OWN}", divided(shared, own), 0.4)


def _held_mb(bench: Bench, apps: int, service: Served | None) -> float:
    with ExitStack() as stack:
        workers = []
        for _ in range(apps):
            workers.append(stack.enter_context(Worker(bench.given("hit", service=service.path if service else OFF))))
            bench.checked("hit", workers[-1].answer())
        time.sleep(SETTLE_S)
        return together_mb(workers, service)


async def first_results(report: Report, options: Options) -> None:
    """V2: an app has the model already, and another one comes."""
    kinds: dict[str, tuple[str, dict[str, Any]]] = {OWN: ("hit", {"service": OFF})}
    with bench_of("dense") as bench, served(bench) as service:
        kinds |= {SHARED: ("hit", {"service": service.path}), "without a loop": ("attach", {"service": service.path})}
        whole: dict[str, list[float]] = {name: [] for name in kinds}
        entered: dict[str, list[float]] = {OWN: [], SHARED: []}
        opened: dict[str, list[float]] = {OWN: [], SHARED: []}
        with ExitStack() as stack:
            for name in (SHARED, "without a loop"):
                kind, more = kinds[name]
                bench.checked(kind, stack.enter_context(Worker(bench.given(kind, **more))).answer())
            for number in range(options.rounds):
                names = list(kinds)
                for name in (*names[number % len(names) :], *names[: number % len(names)]):
                    kind, more = kinds[name]
                    whole[name].append(bench.first(kind, **more)["ms"])
                    if name in entered:
                        answer = bench.first(kind, numpy_first=True, **more)
                        entered[name].append(answer["ms"] - answer["marks"]["imports"])
                        opened[name].append(answer["ms"] - answer["marks"]["open"])
    report.note("first result of the second app, from the start of its process", whole, "ms")
    report.note("the same, from entering the runtime, with NumPy imported before", entered, "ms")
    report.note("the same, from the moment at which the runtime is open", opened, "ms")
    report.check("V2", f"from entering the runtime: {SHARED} / own driver", divided(entered[SHARED], entered[OWN]), 0.06)
    report.check("V2", f"from the start of the process: {SHARED} / own driver", divided(whole[SHARED], whole[OWN]), 0.45)
    report.check("V2", "from the start of the process: without a loop / own driver", divided(whole["without a loop"], whole[OWN]), 0.3)


# ---- V3, V4: frames ----------------------------------------------------------------------------------------------------------


def streaming_given(bench: Bench, service: str, rate: float, **more: Any) -> dict[str, Any]:
    """Return what a process of `tests.bench.service_worker` needs to know."""
    shown = {"camera": False, "offset": 0.0, "count": ENDLESS, "device": DEVICE, **more}
    return {**bench.given("hit"), "kind": "stream", "service": service, "rate": rate, **shown}


async def cameras(report: Report, options: Options) -> None:
    """V3: each process cuts its picture down itself, and calls without an event loop."""
    late: Lanes = {OWN: [], SHARED: []}
    taken: Lanes = {OWN: [], SHARED: []}
    held: dict[str, list[float]] = {OWN: [], SHARED: []}
    with bench_of("orientation") as bench:
        with served(bench) as first, ExitStack() as stack:
            _six(bench, first, 1, stack)  # it fills the service's cache, as the bench has filled that of the apps
        for number in range(options.rounds):
            for name in (OWN, SHARED) if number % 2 else (SHARED, OWN):
                with ExitStack() as stack:
                    service = stack.enter_context(served(bench)) if name == SHARED else None
                    answers, memory_mb = _six(bench, service, options.frames, stack)
                    held[name].append(memory_mb)
                    for lanes, key in ((late, "late_us"), (taken, "taken_us")):
                        lanes[name].append(Taken.of([int(each * 1e3) for answer in answers for each in answer[key]]))
    report.show(f"{CAMERAS} cameras, from the moment at which a frame is due", late)
    report.show(f"{CAMERAS} cameras, the call alone", taken)
    report.note(f"{CAMERAS} cameras, memory", held, "MB")
    report.check("V3", f"p99: {SHARED} / {OWN}", ratios(late, SHARED, OWN, "p99"), 1.0)
    report.check("V3", f"memory: {SHARED} / {OWN}", divided(held[SHARED], held[OWN]), 0.4)


def _six(bench: Bench, service: Served | None, frames: int, stack: ExitStack) -> tuple[list[dict[str, Any]], float]:
    workers = []
    for camera in range(CAMERAS):
        more = {"camera": True, "offset": camera / CAMERAS, "count": frames}
        given = streaming_given(bench, service.path if service else OFF, CAMERA_RATE, **more)
        workers.append(stack.enter_context(Worker(given, STREAMS)))
    for worker in workers:
        worker.answer()
    time.sleep(SETTLE_S)
    for worker in workers:
        worker.go_on()
    answers = [worker.answer() for worker in workers]
    _raise_first(answers)
    return answers, together_mb(workers, service)


def _raise_first(answers: Sequence[dict[str, Any]]) -> None:
    for answer in answers:
        if answer["errors"]:
            raise NotAvailableError(f"{len(answer['errors'])} calls failed, the first with {answer['errors'][0]}")


async def frames(report: Report, options: Options) -> None:
    """V4: both drivers serve the same app in turns, and each round has fresh ones of the app's."""
    subject = silero_subject()
    lanes: Lanes = {OWN: [], SHARED: []}
    inputs = subject.inputs[0]
    count = options.frames * PLACED_ROUNDS
    with served() as service:
        for number in range(max(options.rounds, PLACED_ROUNDS)):
            async with AsyncExitStack() as stack:
                bursts = {}
                for name, where in ((OWN, OFF), (SHARED, service.path)):
                    runtime = await stack.enter_async_context(aionn.Runtime(service=where, start=()))
                    compilation = await runtime.compile(await runtime.load(subject.path), devices=(DEVICE,))
                    burst = await stack.enter_async_context(compilation.burst())
                    await burst.compute(inputs)
                    (pid,) = (device.pid for device in runtime.devices if device.name == DEVICE)
                    bursts[name] = burst, pid
                for name in (OWN, SHARED) if number % 2 else (SHARED, OWN):
                    burst, pid = bursts[name]
                    lanes[name].append(await timed(lambda burst=burst: burst.compute(inputs), count, pid))  # type: ignore[misc]
        counts = await _counted(service, subject.path, inputs)
    report.show(f"{subject.name} without a pause", lanes)
    report.check("V4", f"p50 of a frame: {SHARED} / {OWN}", ratios(lanes, SHARED, OWN), 1.05)
    if counts is None:
        report.lacks("V4", "the service's system calls are not counted, because strace is missing or may not attach")
        return
    busy, idle = counts
    report.note(f"system calls of the service in {COUNTED_S:.0f} s", {f"{COUNTED_FRAMES} frames": [busy], "no frames": [idle]}, "calls")
    report.check("V4", "system calls of the service per frame, to a hundredth", [round(max(0.0, busy - idle) / COUNTED_FRAMES, 2)], 0.0)


async def _counted(service: Served, path: Path, inputs: Any) -> tuple[float, float] | None:
    """Return the service's system calls with the frames and without them."""
    async with aionn.Runtime(service=service.path, start=()) as runtime:
        compilation = await runtime.compile(await runtime.load(path), devices=(DEVICE,))
        async with compilation.burst() as burst:

            async def act(count: int) -> None:
                ends_s = time.monotonic() + COUNTED_S
                for _ in range(count):
                    await burst.compute(inputs)
                await asyncio.sleep(ends_s - time.monotonic())

            await burst.compute(inputs)
            await act(0)  # what a new model and its template have the service do is over then
            busy = await system_calls(service.process.pid, partial(act, COUNTED_FRAMES))
            idle = await system_calls(service.process.pid, partial(act, 0))
    return None if busy is None or idle is None else (float(busy), float(idle))


# ---- B3, B9: neighbours ------------------------------------------------------------------------------------------------------


async def deaths(report: Report, options: Options) -> None:
    """B3: first apps end as they should, then they are killed. The others must not see the difference."""
    with bench_of("silero") as bench, served() as service:
        calm, _, _ = _changing(bench, service, killed=False)
        killed, before, after = _changing(bench, service, killed=True)
    lanes = {name: [Taken.of([int(each * 1e3) for answer in answers for each in answer["late_us"]])] for name, answers in
             (("apps end", calm), ("apps are killed", killed))}  # fmt: skip
    report.show(f"{STREAMING - 1} streams beside {KILLS} apps that come and go", lanes)
    p99_us = lanes["apps end"][0].p99
    worst_us = [max(each for answer in answers for each in answer["late_us"]) for answers in (calm, killed)]
    report.note("their latest frame", {"apps end": [worst_us[0] / 1e3], "apps are killed": [worst_us[1] / 1e3]}, "ms")
    report.note("held before", {name: [value] for name, value in before.items()}, "count, MB")
    report.note("held after", {name: [value] for name, value in after.items()}, "count, MB")
    errors = [error for answer in killed for error in answer["errors"]]
    report.say(f"errors of the others: {errors[:3]}")
    report.check("B3", "errors of the others", [float(len(errors))], 0.0)
    report.check("B3", "latest frame / twice the p99 while apps end", [worst_us[1] / 2 / p99_us], 1.0)
    for name, value in before.items():
        if name.endswith("MB"):
            report.check("B3", f"{name}: after {KILLS} / before", [after[name] / value], 1.05)
        else:
            report.check("B3", f"{name}: more than before", [after[name] - value], 0.0)


Held = dict[str, float]


def _changing(bench: Bench, service: Served, killed: bool) -> tuple[list[dict[str, Any]], Held, Held]:
    """Let one of the streams come and go. Returns what the others say, and what driver and service hold near the start and at the end."""
    given = streaming_given(bench, service.path, STREAM_RATE)
    with ExitStack() as stack:
        staying = [stack.enter_context(Worker(given, STREAMS)) for _ in range(STREAMING - 1)]
        for worker in staying:
            worker.answer()
            worker.go_on()
        before: Held = {}
        for number in range(KILLS):
            if number == FIRST_KILLS:
                before = _held(service)
            with Worker(given, STREAMS) as worker:
                worker.answer()
                worker.go_on()
                time.sleep(BETWEEN_S)
                if killed:
                    worker.kill()
                else:
                    worker.go_on()
                    worker.answer()
        after = _held(service)
        for worker in staying:
            worker.go_on()
        return [worker.answer() for worker in staying], before, after


def _held(service: Served) -> Held:
    """Return what the driver and the service hold once the driver knows that the app has gone."""
    deadline_s = time.monotonic() + 30
    while len(service.guests()) > STREAMING - 1 and time.monotonic() < deadline_s:
        time.sleep(0.05)
    time.sleep(SETTLE_S)
    (driver,) = service.facts()["drivers"]
    found: Held = {}
    for name, pid in (("driver", driver["pid"]), ("service", service.process.pid)):
        found[f"{name}: descriptors"] = float(len(os.listdir(f"/proc/{pid}/fd")))
        found[f"{name}: mappings"] = float(len(Path(f"/proc/{pid}/maps").read_text().splitlines()))
        found[f"{name}: memory, MB"] = memory_bytes(pid, "Pss") / 1e6
    return found


async def flooded(report: Report, options: Options) -> None:
    """B9: the bound is two runs of the model that floods, and 5 ms."""
    with ExitStack() as stack:
        heavy, light = stack.enter_context(bench_of("orientation")), stack.enter_context(bench_of("silero"))
        service = stack.enter_context(served())
        runs_us: list[float] = []
        late: dict[str, Lanes] = {"the same model": {}, "another model": {}}
        errors: list[str] = []
        for _ in range(options.rounds):
            for name, bench in (("the same model", heavy), ("another model", light)):
                alone = _paced(bench, service, options.frames)
                if bench is heavy:
                    runs_us.append(float(np.median(alone["taken_us"])))
                flood = {**streaming_given(heavy, service.path, 0.0), "kind": "flood", "bursts": FLOODED}
                with Worker(flood, STREAMS) as flooding:
                    flooding.answer()
                    flooding.go_on()
                    beside = _paced(bench, service, options.frames)
                    flooding.go_on()
                    answer = flooding.answer()
                    report.say(f"{name}: the flood had {answer['calls']} calls, and errors: {answer['errors'][:2]}")
                errors += beside["errors"]
                for lane, found in (("alone", alone), ("beside a flood", beside)):
                    late[name].setdefault(lane, []).append(Taken.of([int(each * 1e3) for each in found["late_us"]]))
    report.note("a run of the model that floods, alone", {"run": [run_us / 1e3 for run_us in runs_us]}, "ms")
    for name, lanes in late.items():
        report.show(f"a stream at {STREAM_RATE:.0f}/s with {name}", lanes)
        found_us = [taken.p99 for taken in lanes["beside a flood"]]
        bounds_us = [2 * run_us + 5e3 for run_us in runs_us]
        report.check("B9", f"{name}, p99 beside {FLOODED} busy bursts / (2 runs + 5 ms)", divided(found_us, bounds_us), 1.0)
    report.check("B9", "errors of the stream", [float(len(errors))], 0.0)


async def overtaken(report: Report, options: Options) -> None:
    """B9: how many runs of the flood end during a call of the stream. Other work on the machine changes that less than times.

    Both apps are runtimes of this process, so that one loop sees their answers in the order in which they come.
    """
    found: dict[str, list[float]] = {}
    with ExitStack() as held:
        heavy, light = held.enter_context(bench_of("orientation")), held.enter_context(bench_of("silero"))
        service = held.enter_context(served())
        for name, bench in (("the same model", heavy), ("another model", light)):
            for _ in range(options.rounds):
                async with AsyncExitStack() as stack:
                    flooding, streaming = [await _app(stack, service, each) for each in (heavy, bench)]
                    bursts = [await stack.enter_async_context(flooding.burst()) for _ in range(FLOODED)]
                    stream = await stack.enter_async_context(streaming.burst())
                    counts = await _counts(bursts, arrays(heavy.given("hit")), stream, arrays(bench.given("hit")), options.frames)
                for percentile in (50, 90, 99):
                    found.setdefault(f"{name}, p{percentile}", []).append(float(np.percentile(counts, percentile)))
    report.note("runs of the flood that end during a call of the stream", found, "runs")
    for name in ("the same model", "another model"):
        report.check("B9", f"{name}, runs of the flood during a call, p90", found[f"{name}, p90"], 2.0)


async def _app(stack: AsyncExitStack, service: Served, bench: Bench) -> aionn.Compilation:
    runtime = await stack.enter_async_context(aionn.Runtime(service=service.path, start=()))
    return await runtime.compile(await runtime.load(bench.subject.path), devices=(DEVICE,))


async def _counts(bursts: Sequence[aionn.Burst], flood: Any, stream: aionn.Burst, inputs: Any, frames: int) -> list[int]:
    """Return for each frame how many runs of the flood ended before its answer came."""
    ended, calls = False, 0

    async def flat_out(burst: aionn.Burst) -> None:
        nonlocal calls
        while not ended:
            await burst.compute(flood)
            calls += 1

    found = []
    async with asyncio.TaskGroup() as group:
        for burst in bursts:
            group.create_task(flat_out(burst))
        for number in range(WARM + frames):
            await asyncio.sleep(1 / STREAM_RATE)
            before = calls
            await stream.compute(inputs)
            if number >= WARM:
                found.append(calls - before)
        ended = True
    return found


def _paced(bench: Bench, service: Served, count: int) -> dict[str, Any]:
    with Worker(streaming_given(bench, service.path, STREAM_RATE, count=count), STREAMS) as worker:
        worker.answer()
        worker.go_on()
        return worker.answer()


async def idle(report: Report, options: Options) -> None:
    """B11: the driver still runs, and no app is there."""
    subject = silero_subject()
    with served() as service:
        async with aionn.Runtime(service=service.path, start=()) as runtime:
            compilation = await runtime.compile(await runtime.load(subject.path), devices=(DEVICE,))
            await compilation.compute(subject.inputs[0])
        pid = service.process.pid
        woken = []
        for _ in range(options.rounds):
            before = wake_ups(pid)
            await asyncio.sleep(COUNTED_S)
            woken.append((wake_ups(pid) - before) / COUNTED_S)
        rss = [memory_bytes(pid, "Rss") / 2**20]
        own = [memory_bytes(pid, "Private_Dirty", "Private_Clean") / 2**20]
    report.note("memory of the idle service", {"RSS": rss, "of that private": own}, "MiB")
    report.check("B11", "RSS of the idle service, MiB", rss, 30.0)
    report.check("B11", "wake-ups of it a second", woken, 1.0)


GROUPS: Groups = (
    (("V1",), memory),
    (("V2",), first_results),
    (("V3",), cameras),
    (("V4",), frames),
    (("B3",), deaths),
    (("B9",), flooded),
    (("B9",), overtaken),
    (("B11",), idle),
)
ROWS = tuple(dict.fromkeys(row for rows, _ in GROUPS for row in rows))


def main(argv: list[str]) -> None:
    """Measure and print. See the module's docstring."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench service", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--row", "--rows", type=rows_among(ROWS), default=frozenset(ROWS), help=f"some of {','.join(ROWS)}")
    parser.add_argument("--rounds", type=int, default=5, help="of each row; V4 has ten at least, V1 three at most, B3 one")
    parser.add_argument("--frames", type=int, default=150, help="frames per stream and round; ten times as many in V4")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    options = parser.parse_args(argv)
    report = Report(options.row, quiet=options.json)
    where = f"not pinned; {options.rounds} rounds of {options.frames} frames a stream; load {os.getloadavg()[0]:.1f}"
    how = Options(options.rounds, options.frames, None)
    print_measured(report, where, options.json, lambda: uvloop.run(measure(GROUPS, report, how)))
