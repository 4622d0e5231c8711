"""Many streams and batch jobs. Rows P7, P8, P16 and P17 of `tests.bench.real`: states, what a burst holds, lanes, a batch of pictures.

`threads` and `instances` are options of `Runtime.compile`. Where this release lacks them, the rows say so.
"""

from __future__ import annotations

import asyncio
import os
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import aionn
from tests.bench.machine import descriptors, memory_bytes
from tests.bench.real_hot import driver_pid
from tests.bench.real_report import NotAvailableError, Options, Report
from tests.bench.real_subjects import (
    Subject,
    classifier_subject,
    detector_subject,
    identity_subject,
    orientation_subject,
    silero_subject,
)
from tests.bench.real_worker import session_of

STREAMS = (1, 4, 16, 64)
OPENED = 10
DEPTHS = (1, 2, 8)
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
POOLS = ((1, 2), (2, 1), (2, 2))
"""Sessions and threads of each, of the pools that a batch job could use."""


async def compile_with(runtime: aionn.Runtime, path: Path, **options: Any) -> aionn.Compilation:
    """Compile for ONNX Runtime with options that this release may lack.

    Raises:
        NotAvailableError: `compile` does not know such an option.
    """
    try:
        return await runtime.compile(aionn.Model.from_onnx(path), devices=("onnxruntime",), **options)
    except TypeError as error:
        if "unexpected keyword" not in str(error):
            raise
        raise NotAvailableError(f"compile() has no such option ({', '.join(options)})") from error


# ---- P7: bursts that each have a state -----------------------------------------------------------------------------------


async def many_streams(report: Report, options: Options) -> None:
    """P7: Silero, its state in the driver, by so many bursts at once, each as fast as it can."""
    subject, seconds = silero_subject(), options.frames / 100
    rates: dict[str, list[float]] = {f"{count} bursts": [] for count in STREAMS}
    fairness: dict[str, list[float]] = {f"{count} bursts": [] for count in STREAMS[1:]}
    for _ in range(options.rounds):
        async with aionn.Runtime() as runtime:
            compilation = await compile_with(runtime, subject.path)
            for count in STREAMS:
                done = await _streams(compilation, subject, count, seconds)
                rates[f"{count} bursts"].append(sum(done) / seconds)
                if count > 1:
                    fairness[f"{count} bursts"].append(min(done) / max(1, max(done)))
    report.note("Silero with its state in the driver", rates, "rows/s")
    one = rates["1 bursts"]
    for count, bound in ((16, 1.3), (64, 1.2)):
        gains = [many / alone for many, alone in zip(rates[f"{count} bursts"], one, strict=True)]
        report.check("P7", f"rows/s: {count} bursts / one", gains, bound, at_least=True)
        report.check("P7", f"{count} bursts: slowest / fastest", fairness[f"{count} bursts"], 0.8, at_least=True)


async def _streams(compilation: aionn.Compilation, subject: Subject, count: int, seconds: float) -> list[int]:
    """Return the requests of each burst within the time."""
    done = [0] * count
    async with AsyncExitStack() as stack:
        bursts = [await stack.enter_async_context(compilation.burst()) for _ in range(count)]
        states = [await compilation.allocate(inputs=("state",), outputs=("stateN",)) for _ in range(count)]
        ends = 0.0

        async def caller(index: int) -> None:
            burst, state = bursts[index], states[index]
            inputs: dict[str, Any] = {"input": subject.inputs[index % 64]["input"], "state": state}
            while time.monotonic() < ends:
                await burst.compute(inputs, outputs={"stateN": state})
                done[index] += 1

        for state in states:
            await state.reset()
        for lasts in (seconds / 10, seconds):  # the first time is for warming up
            done[:] = [0] * count
            ends = time.monotonic() + lasts
            async with asyncio.TaskGroup() as group:
                for index in range(count):
                    group.create_task(caller(index))
        for state in states:
            await state.aclose()
    return done


# ---- P8: what a burst holds ------------------------------------------------------------------------------------------------


async def holdings(report: Report, options: Options) -> None:
    """P8: descriptors and time to open of a small burst, memory of a large one at several depths."""
    subject = detector_subject()
    frame = _frame_bytes(subject)
    found: dict[str, list[float]] = {"app": [], "driver": []}
    opening: list[float] = []
    memory: dict[int, list[float]] = {depth: [] for depth in DEPTHS}
    with TemporaryDirectory() as directory:
        small = identity_subject(directory)
        for _ in range(options.rounds):
            async with aionn.Runtime() as runtime:
                compilation = await compile_with(runtime, small.path)
                each_app, each_driver, each_ms = await _opened(compilation, driver_pid(runtime), small)
                found["app"].append(each_app)
                found["driver"].append(each_driver)
                opening.append(each_ms)
                for depth in DEPTHS:
                    large = await compile_with(runtime, subject.path)
                    memory[depth].append(await _held_bytes(large, driver_pid(runtime), subject, depth) / frame)
                    await large.aclose()
    report.note(
        "a burst of the identity model", {**{f"descriptors, {end}": each for end, each in found.items()}, "opening, ms": opening}, "each"
    )
    for end, each in found.items():
        report.check("P8", f"descriptors per burst, {end}", each, 5.0)
    report.check("P8", "opening a burst, ms", opening, 1.0)
    for depth, held in memory.items():
        report.check("P8", f"memory of a {subject.name} burst of depth {depth}, in true frames", held, depth + 1.0)


def _frame_bytes(subject: Subject) -> int:
    """Return the bytes of one request's arrays, each rounded up to pages."""
    session = session_of(str(subject.path), subject.threads)
    arrays = [*subject.inputs[0].values(), *session.run(None, subject.inputs[0])]
    return sum(-(-array.nbytes // PAGE_BYTES) * PAGE_BYTES for array in arrays)


async def _opened(compilation: aionn.Compilation, pid: int, subject: Subject) -> tuple[float, float, float]:
    """Return descriptors per burst of app and driver, and the median of milliseconds to open one."""
    async with AsyncExitStack() as stack:
        await (await stack.enter_async_context(compilation.burst())).compute(subject.inputs[0])
        before = descriptors(os.getpid()), descriptors(pid)
        taken = []
        for _ in range(OPENED):
            began = time.perf_counter()
            burst = await stack.enter_async_context(compilation.burst())
            taken.append((time.perf_counter() - began) * 1e3)
            await burst.compute(subject.inputs[0])
        after = descriptors(os.getpid()), descriptors(pid)
    return (after[0] - before[0]) / OPENED, (after[1] - before[1]) / OPENED, sorted(taken)[OPENED // 2]


async def _held_bytes(compilation: aionn.Compilation, pid: int, subject: Subject, depth: int) -> int:
    """Return the shared memory that a burst makes resident in both processes together, with `depth` requests in flight, twice."""

    def resident() -> int:
        return memory_bytes(os.getpid(), "Pss_Shmem") + memory_bytes(pid, "Pss_Shmem")

    before = resident()
    async with compilation.burst(depth=depth) as burst:
        for _ in range(2):
            await asyncio.gather(*(burst.compute(subject.inputs[0]) for _ in range(depth)))
        return resident() - before


# ---- P16: lanes over one copy of the weights -------------------------------------------------------------------------------------


async def instances(report: Report, options: Options) -> None:
    """P16: two streams, one execution with two threads at a time or two executions with one thread each."""
    for subject in (orientation_subject(), classifier_subject()):
        rates: dict[str, list[float]] = {"default": [], "threads=2, instances=1": [], "threads=1, instances=2": []}
        grown, second = [], []
        missing = None
        for _ in range(options.rounds):
            rates["default"].append((await _two_streams(subject, options))[0])
            try:
                one, one_bytes = await _two_streams(subject, options, threads=2, instances=1)
                two, two_bytes = await _two_streams(subject, options, threads=1, instances=2)
            except NotAvailableError as error:
                missing = str(error)
                continue
            rates["threads=2, instances=1"].append(one)
            rates["threads=1, instances=2"].append(two)
            grown.append((two_bytes - one_bytes) / 2**20)
            second.append(_second_session_bytes(subject) / 2**20)
        report.note(f"{subject.name}, two streams", {name: found for name, found in rates.items() if found}, "rows/s")
        if missing:
            report.lacks("P16", missing)
            continue
        gains = [two / one for one, two in zip(rates["threads=2, instances=1"], rates["threads=1, instances=2"], strict=True)]
        report.check("P16", f"{subject.name}, rows/s: threads=1, instances=2 / threads=2, instances=1", gains, 1.25, at_least=True)
        report.note(f"{subject.name}, private memory", {"of the second instance": grown, "of a second session": second}, "MiB")
        costs = [ours / theirs for ours, theirs in zip(grown, second, strict=True)]
        report.check("P16", f"{subject.name}, private memory: second instance / second session", costs, 1.0)


async def _two_streams(subject: Subject, options: Options, **lanes: int) -> tuple[float, int]:
    """Return rows per second, and the driver's private memory."""
    seconds, done = options.frames / 75, 0
    async with aionn.Runtime() as runtime:
        compilation = await compile_with(runtime, subject.path, **lanes)
        async with compilation.burst() as one, compilation.burst() as other:
            ends = 0.0

            async def caller(burst: aionn.Burst) -> None:
                nonlocal done
                while time.monotonic() < ends:
                    await burst.compute(subject.inputs[done % len(subject.inputs)])
                    done += 1

            for lasts in (seconds / 5, seconds):
                done, ends = 0, time.monotonic() + lasts
                async with asyncio.TaskGroup() as group:
                    group.create_task(caller(one))
                    group.create_task(caller(other))
            return done / seconds, memory_bytes(driver_pid(runtime), "Private_Clean", "Private_Dirty")


def _second_session_bytes(subject: Subject) -> int:
    """Return what a second session of the model costs this process. A first one is open already."""
    first = session_of(str(subject.path), 1)
    first.run(None, subject.inputs[0])
    before = memory_bytes(os.getpid(), "Private_Clean", "Private_Dirty")
    second = session_of(str(subject.path), 1)
    second.run(None, subject.inputs[0])
    return max(1, memory_bytes(os.getpid(), "Private_Clean", "Private_Dirty") - before)


# ---- P17: a batch of pictures ------------------------------------------------------------------------------------------------------


async def batch(report: Report, options: Options) -> None:
    """P17: pictures through `burst.map`, beside the best pool of ONNX Runtime sessions."""
    subject, count = orientation_subject(), options.frames * 2
    rates: dict[str, list[float]] = {}
    missing = None
    for _ in range(options.rounds):
        for sessions, threads in POOLS:
            rate = await asyncio.to_thread(_pool_rate, subject, count, sessions, threads)
            rates.setdefault(f"pool of {sessions} x {threads}", []).append(rate)
        rates.setdefault("aionn, default", []).append(await _map_rate(subject, count))
        try:
            rates.setdefault("aionn, threads=1, instances=2", []).append(await _map_rate(subject, count, threads=1, instances=2))
        except NotAvailableError as error:
            missing = str(error)
    best = [max(found) for found in zip(*(rates[f"pool of {sessions} x {threads}"] for sessions, threads in POOLS), strict=True)]
    report.note(f"{count} pictures through {subject.name}", {name: found for name, found in rates.items() if found}, "pictures/s")
    defaults = [ours / theirs for ours, theirs in zip(rates["aionn, default"], best, strict=True)]
    if missing:
        report.lacks("P17", missing)
        report.check("P17", "pictures/s: burst.map with defaults / best pool", defaults, 0.95, at_least=True)
        return
    lanes = [ours / theirs for ours, theirs in zip(rates["aionn, threads=1, instances=2"], best, strict=True)]
    report.check("P17", "pictures/s: burst.map with threads=1, instances=2 / best pool", lanes, 0.95, at_least=True)


def _pool_rate(subject: Subject, count: int, sessions: int, threads: int) -> float:
    made = [session_of(str(subject.path), threads) for _ in range(sessions)]
    names = [output.name for output in made[0].get_outputs()]
    with ThreadPoolExecutor(sessions) as pool:

        def run(number: int) -> Any:
            return made[number % sessions].run(names, subject.inputs[number % len(subject.inputs)])

        list(pool.map(run, range(sessions * 2)))
        began = time.perf_counter()
        list(pool.map(run, range(count)))
        return count / (time.perf_counter() - began)


async def _map_rate(subject: Subject, count: int, **lanes: int) -> float:
    pictures = [subject.inputs[index % len(subject.inputs)] for index in range(count)]
    async with aionn.Runtime() as runtime:
        compilation = await compile_with(runtime, subject.path, **lanes)
        async with compilation.burst() as burst:
            async for _ in burst.map(pictures[:8], depth=8):
                pass
            began = time.perf_counter()
            answered = 0
            async for _ in burst.map(pictures, depth=8):
                answered += 1
            if answered != count:
                raise AssertionError(f"{answered} of {count} pictures were answered")
            return count / (time.perf_counter() - began)
