"""Streams that must be answered soon. Rows P18, P19 and P20 of `tests.bench.real`: priorities, bounded threads, anticipation.

`Runtime(threads=)` and `burst(anticipate=)` are options that a release may lack. The rows then say so.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import aionn
from tests.bench.burst import pin_driver
from tests.bench.machine import threads_ns
from tests.bench.real_hot import driver_pid
from tests.bench.real_many import compile_with
from tests.bench.real_paced import SEGMENTS, SILERO_RATE, Rhythm, Stream, Ticks, steady, ticking
from tests.bench.real_report import Lanes, NotAvailableError, Options, Report, Taken, ratios
from tests.bench.real_rivals import lanes
from tests.bench.real_subjects import Subject, detector_subject, silero_subject

URGENT_RATE = 100
NOISE = 1.05
"""What "never worse" allows, because two equal streams differ by so much from one round to the next."""


# ---- P18: a stream beside a model that is flat out ------------------------------------------------------------------------------


async def priorities(report: Report, options: Options) -> None:
    """P18: Silero every 10 ms with priority "high", beside the detector without a pause with priority "low"."""
    stream, heavy = silero_subject(), detector_subject()
    found: Lanes = {"stream alone": [], "stream beside the detector": []}
    rates: dict[str, list[float]] = {"alone": [], "beside the stream": []}
    slowest_s = []
    count = -(-options.frames * 2 // SEGMENTS)
    async with ticking() as ticks:
        for _ in range(options.rounds):
            async with aionn.Runtime() as runtime:
                high = await compile_with(runtime, stream.path, priority="high")
                low = await compile_with(runtime, heavy.path, priority="low")
                async with high.burst() as urgent, low.burst() as patient:
                    alone, beside = Stream(ticks, urgent.compute), Stream(ticks, urgent.compute)
                    await _flat_out(patient, heavy, _for(0.5))
                    taken_s: dict[str, list[float]] = {name: [] for name in rates}
                    for _ in range(SEGMENTS):
                        taken_s["alone"] += await _flat_out(patient, heavy, _for(count / URGENT_RATE))
                        await alone.segment(stream.inputs, steady(URGENT_RATE), count)
                        async with asyncio.TaskGroup() as group:
                            streaming = group.create_task(beside.segment(stream.inputs, steady(URGENT_RATE), count))
                            flat_out = group.create_task(_flat_out(patient, heavy, lambda task=streaming: not task.done()))  # type: ignore[misc]
                        taken_s["beside the stream"] += flat_out.result()
            for name, each_s in taken_s.items():
                rates[name].append(len(each_s) / sum(each_s))
            slowest_s.append(max(taken_s["beside the stream"]))
            found["stream alone"].append(Taken.of(alone.late_ns))
            found["stream beside the detector"].append(Taken.of(beside.late_ns))
    report.show(f"Silero, {URGENT_RATE} frames/s, priority high, from the time when a frame is due", found)
    report.note(f"{heavy.name} without a pause, priority low", {**rates, "slowest beside the stream, s": slowest_s}, "requests/s")
    pairs = zip(found["stream beside the detector"], found["stream alone"], strict=True)
    report.check("P18", "the stream's p99 beside minus alone, ms", [(beside.p99 - alone.p99) / 1e3 for beside, alone in pairs], 2.0)
    kept = [beside / alone for beside, alone in zip(rates["beside the stream"], rates["alone"], strict=True)]
    report.check("P18", "the detector's rate: beside / alone", kept, 0.6, at_least=True)
    report.check("P18", "the detector's slowest answer beside the stream, s", slowest_s, 1.0)


def _for(seconds: float) -> Callable[[], bool]:
    ends = time.monotonic() + seconds
    return lambda: time.monotonic() < ends


async def _flat_out(burst: aionn.Burst, subject: Subject, while_true: Callable[[], bool]) -> list[float]:
    """Return the seconds of each request."""
    taken: list[float] = []
    while while_true() or not taken:
        sent = time.monotonic()
        await burst.compute(subject.inputs[0])
        taken.append(time.monotonic() - sent)
    return taken


# ---- P19: a bound for threads ----------------------------------------------------------------------------------------------------


async def bounded_threads(report: Report, options: Options) -> None:
    """P19: the threads that the detector adds to a driver of one thread, above those of a tiny model."""
    added = []
    for _ in range(options.rounds):
        tiny, large = [await _driver_threads(subject, threads=1) for subject in (silero_subject(), detector_subject())]
        added.append(float(large - tiny))
    report.check("P19", "Runtime(threads=1): threads that the detector adds to the driver", added, 0.0)


async def _driver_threads(subject: Subject, **bound: Any) -> int:
    try:
        runtime = aionn.Runtime(**bound)
    except TypeError as error:
        raise NotAvailableError("Runtime() has no option threads") from error
    async with runtime:
        compilation = await compile_with(runtime, subject.path)
        async with compilation.burst() as burst:
            await burst.compute(subject.inputs[0])
            return len(threads_ns(driver_pid(runtime)))


# ---- P20: anticipation ---------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def _bursts(subject: Subject, options: Options, count: int, **asked: Any) -> AsyncIterator[tuple[list[aionn.Burst], int]]:
    """Open bursts on a driver of their own."""
    async with aionn.Runtime() as runtime:
        compilation = await compile_with(runtime, subject.path)
        try:
            made = [compilation.burst(**asked) for _ in range(count)]
        except TypeError as error:
            raise NotAvailableError(f"burst() has no option {', '.join(asked)}") from error
        if options.cpus is not None:
            pin_driver(runtime, "onnxruntime", options.cpus[1])
        try:
            for burst in made:
                await burst.__aenter__()
                await burst.compute(subject.inputs[0])
            yield made, driver_pid(runtime)
        finally:
            for burst in made:
                await burst.aclose()


async def anticipation(report: Report, options: Options) -> None:
    """P20: Silero at 31 frames a second, beside the app's own call; then streams that no rhythm predicts."""
    subject, count = silero_subject(), -(-options.frames // 3)
    found: Lanes = {"direct": [], "aionn": [], "anticipating": []}
    extra = []
    rhythms: dict[str, Rhythm] = {"jitter of +-20 %": _jittered(SILERO_RATE), "pauses": _paused(SILERO_RATE)}
    harm: dict[str, list[float]] = {name: [] for name in (*rhythms, "two streams")}
    async with ticking() as ticks:
        for _ in range(options.rounds):
            async with (
                _bursts(subject, options, 1, anticipate=True) as (eager, eager_pid),
                _bursts(subject, options, 1) as (plain, plain_pid),
                lanes(subject, options.cpus) as contenders,
            ):
                (direct,) = [lane for lane in contenders if lane.name == "direct"]
                streams = {
                    "direct": Stream(ticks, direct.call),
                    "aionn": Stream(ticks, plain[0].compute, plain_pid),
                    "anticipating": Stream(ticks, eager[0].compute, eager_pid),
                }
                for _ in range(3):
                    for stream in streams.values():
                        await stream.segment(subject.inputs, steady(SILERO_RATE), count)
                for name, stream in streams.items():
                    found[name].append(stream.taken())
                for name, rhythm in rhythms.items():
                    harm[name].append(await _harm(ticks, subject, rhythm, count, eager, plain))
            async with _bursts(subject, options, 2, anticipate=True) as (eager, _), _bursts(subject, options, 2) as (plain, _):
                harm["two streams"].append(await _harm(ticks, subject, steady(SILERO_RATE), count, eager, plain))
            ours, others = found["anticipating"][-1], found["aionn"][-1]
            extra.append((ours.cpu_s - others.cpu_s) / 10_000 * SILERO_RATE * 100)
    report.show(f"Silero, {SILERO_RATE} frames/s", found)
    report.check("P20", "anticipating, p50: aionn / direct", ratios(found, "anticipating", "direct"), 0.85)
    report.check("P20", "anticipating, p99: aionn / direct", ratios(found, "anticipating", "direct", "p99"), 1.2)
    report.check("P20", "anticipating: more CPU, % of a core", extra, 8.0)
    for name, worse in harm.items():
        report.check("P20", f"anticipating / not, p50, {name}", worse, NOISE)


async def _harm(ticks: Ticks, subject: Subject, rhythm: Rhythm, count: int, eager: list[aionn.Burst], plain: list[aionn.Burst]) -> float:
    """Return the p50 with anticipation divided by that without. Bursts of one kind stream at the same time."""
    p50 = []
    for bursts in (eager, plain):
        async with ticking() as more_ticks, asyncio.TaskGroup() as group:
            streams = [Stream(one_ticks, burst.compute) for one_ticks, burst in zip((ticks, more_ticks), bursts, strict=False)]
            for stream in streams:
                group.create_task(stream.segment(subject.inputs, rhythm, count))
        p50.append(Taken.of([taken for stream in streams for taken in stream.taken_ns]).p50)
    return p50[0] / p50[1]


def _jittered(rate: float) -> Rhythm:
    dice = random.Random(0)
    return lambda number: int(1e9 / rate * dice.uniform(0.8, 1.2))


def _paused(rate: float) -> Rhythm:
    """Return a rhythm that rests for half a second after each sixteenth frame."""
    return lambda number: int(1e9 / rate) + (500_000_000 if number % 16 == 0 else 0)
