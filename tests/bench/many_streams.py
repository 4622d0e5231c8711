"""Paced streams, one and many. Rows N1, N4, N5, N6 and N7 of `tests.bench.many`.

A crowd is so many streams of one rate, each a task of its own as a connection of a server is. One timer of the kernel's releases their
frames, staggered over the period or all in step. A stream whose frame is still under way takes the next one when it is done, late.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from tempfile import TemporaryDirectory
from typing import Any

import aionn
from tests.bench.machine import process_cpu_ns
from tests.bench.real_hot import driver_pid
from tests.bench.real_many import compile_with
from tests.bench.real_paced import LEAD, SEGMENTS, SILERO_RATE, Stream, Ticks, paced, steady, ticking
from tests.bench.real_report import Lanes, Options, Report, Taken, ratios
from tests.bench.real_subjects import Inputs, Subject, detector_subject, identity_subject, silero_subject
from tests.bench.real_worker import session_of

Call = Callable[[Inputs], Awaitable[Any]]
"""Runs the model once and returns its outputs by name."""

DETECTOR_RATE = 10
IDENTITY_RATE = 1000


@dataclass
class Crowd:
    """Streams of one contender: for each a call. What it took, over all segments of a round."""

    name: str
    calls: Sequence[Call]
    pid: int | None = None
    late_ns: list[int] = field(default_factory=list)
    cpu_ns: list[int] = field(default_factory=lambda: [0, 0])

    def taken(self) -> Taken:
        return Taken.of(self.late_ns, *self.cpu_ns)

    async def segment(self, ticks: Ticks, subject: Subject, rate: float, count: int, *, in_step: bool = False) -> None:
        """Release `count` frames to each stream after the leading ones, and wait for all answers."""
        period_ns = int(1e9 / rate)
        stagger_ns = 0 if in_step else period_ns // len(self.calls)
        due: list[asyncio.Queue[tuple[int, bool] | None]] = [asyncio.Queue() for _ in self.calls]
        pids = (os.getpid(), *([self.pid] if self.pid else []))
        before: list[int] = []
        async with asyncio.TaskGroup() as streams:
            for call, queue in zip(self.calls, due, strict=True):
                streams.create_task(self._stream(call, subject, queue))
            start_ns = time.monotonic_ns() + period_ns
            for number in range(-LEAD, count):
                if number == 0:
                    before = [process_cpu_ns(pid) for pid in pids]
                for index, queue in enumerate(due):
                    due_ns = start_ns + (number + LEAD) * period_ns + index * stagger_ns
                    if time.monotonic_ns() < due_ns:
                        await ticks.until(due_ns)
                    queue.put_nowait((due_ns, number >= 0))
            for queue in due:
                queue.put_nowait(None)
        for place, pid in enumerate(pids):
            self.cpu_ns[place] += process_cpu_ns(pid) - before[place]

    async def _stream(self, call: Call, subject: Subject, queue: asyncio.Queue[tuple[int, bool] | None]) -> None:
        """Take frames as they are released. What the model makes of its state goes into the next one."""
        number, state = 0, subject.inputs[0].get("state")
        while (released := await queue.get()) is not None:
            due_ns, counts = released
            inputs = subject.inputs[number % len(subject.inputs)]
            if state is None:
                await call(inputs)
            else:
                state = (await call({**inputs, "state": state}))["stateN"]
            if counts:
                self.late_ns.append(time.monotonic_ns() - due_ns)
            number += 1


def threaded(subject: Subject) -> Call:
    """Return what most apps do: one session of one thread, entered by the loop's default pool of threads."""
    session = session_of(str(subject.path), subject.threads)
    names = [output.name for output in session.get_outputs()]

    async def call(inputs: Inputs) -> Inputs:
        return dict(zip(names, await asyncio.to_thread(session.run, names, inputs), strict=True))

    return call


@asynccontextmanager
async def bursts(subject: Subject, count: int, **asked: Any) -> AsyncIterator[tuple[list[aionn.Burst], int]]:
    """Open so many bursts over one compilation with a driver of its own, each with one answer behind it. Yields also the driver's pid.

    `asked` are options of `compile`.
    """
    async with aionn.Runtime() as runtime, AsyncExitStack() as stack:
        compilation = await compile_with(runtime, subject.path, **asked)
        opened = [await stack.enter_async_context(compilation.burst()) for _ in range(count)]
        for burst in opened:
            await burst.compute(subject.inputs[0])
        yield opened, driver_pid(runtime)


async def crowds(subject: Subject, count: int, options: Options) -> Lanes:
    """Measure so many streams of Silero over bursts and over threads, in turn."""
    found: Lanes = {"to_thread": [], "aionn": []}
    frames = -(-options.frames // SEGMENTS)
    async with ticking() as ticks:
        for _ in range(options.rounds):
            async with bursts(subject, count) as (opened, pid):
                contenders = [
                    Crowd("to_thread", [threaded(subject)] * count),
                    Crowd("aionn", [burst.compute for burst in opened], pid),
                ]
                for turn in range(SEGMENTS):
                    for crowd in contenders if turn % 2 else reversed(contenders):
                        await crowd.segment(ticks, subject, SILERO_RATE, frames)
                for crowd in contenders:
                    found[crowd.name].append(crowd.taken())
    return found


# ---- N1, N4: many streams ----------------------------------------------------------------------------------------------------


def show_crowds(report: Report, found: Lanes, count: int) -> None:
    report.show(f"Silero, {count} streams at {SILERO_RATE} frames/s, from the time when a frame is due", found)


async def sixty_four(report: Report, options: Options) -> None:
    """N1: 64 streams, by their tail."""
    found = await crowds(silero_subject(), 64, options)
    show_crowds(report, found, 64)
    report.check("N1", "64 streams, p99: aionn / to_thread", ratios(found, "aionn", "to_thread", "p99"), 1.2)
    report.check("N1", "64 streams, CPU: aionn / to_thread", ratios(found, "aionn", "to_thread", "cpu_s"), 1.0)


async def sixteen(report: Report, options: Options) -> None:
    """N4: 16 streams, by their median."""
    found = await crowds(silero_subject(), 16, options)
    show_crowds(report, found, 16)
    report.check("N4", "16 streams, p50: aionn / to_thread", ratios(found, "aionn", "to_thread"), 1.1)
    report.check("N4", "16 streams, CPU: aionn / to_thread", ratios(found, "aionn", "to_thread", "cpu_s"), 1.0)


# ---- N5, N6: one stream ------------------------------------------------------------------------------------------------------


async def one(report: Report, options: Options) -> None:
    """N5: one stream of Silero."""
    measured = (await paced(silero_subject(), (SILERO_RATE,), options))[SILERO_RATE]
    report.show(f"Silero, {SILERO_RATE} frames/s", measured.lanes)
    report.note("where an aionn call's time goes, p50", measured.parts, "us")
    report.check("N5", "one stream, p50: aionn / shm", ratios(measured.lanes, "aionn", "shm"), 1.0)
    report.check("N5", "one stream, p50: aionn / to_thread", ratios(measured.lanes, "aionn", "to_thread"), 0.85)


async def identity(report: Report, options: Options) -> None:
    """N6: a model that does nothing. Each round has fresh processes."""
    with TemporaryDirectory() as directory:
        found = (await paced(identity_subject(directory), (IDENTITY_RATE,), options))[IDENTITY_RATE].lanes
    report.show(f"identity 64 B, {IDENTITY_RATE} frames/s", found)
    report.check("N6", f"identity at {IDENTITY_RATE}/s, p50: aionn / shm", ratios(found, "aionn", "shm"), 1.05)


# ---- N7: three models at once --------------------------------------------------------------------------------------------------


async def mixed(report: Report, options: Options) -> None:
    """N7: the detector and Silero alone, and both at once beside Silero without a pause with priority "low"."""
    subjects = {"detector": (detector_subject(), DETECTOR_RATE), "Silero": (silero_subject(), SILERO_RATE)}
    found: Lanes = {f"{name}, {where}": [] for name in subjects for where in ("alone", "beside")}
    seconds = options.frames / SILERO_RATE / SEGMENTS
    async with AsyncExitStack() as timers:
        ticks = [await timers.enter_async_context(ticking()) for _ in subjects]
        for _ in range(options.rounds):
            async with aionn.Runtime() as runtime, AsyncExitStack() as stack:
                opened = {}
                for name, (subject, _) in subjects.items():
                    compilation = await compile_with(runtime, subject.path)
                    opened[name] = await stack.enter_async_context(compilation.burst())
                    await opened[name].compute(subject.inputs[0])
                low = await compile_with(runtime, silero_subject().path, priority="low")
                patient = await stack.enter_async_context(low.burst())
                streams = {
                    f"{name}, {where}": Stream(tick, opened[name].compute)
                    for name, tick in zip(subjects, ticks, strict=True)
                    for where in ("alone", "beside")
                }

                def segment(name: str, where: str, streams: dict[str, Stream] = streams) -> Awaitable[None]:
                    subject, rate = subjects[name]
                    return streams[f"{name}, {where}"].segment(subject.inputs, steady(rate), max(1, int(seconds * rate)))

                for _ in range(SEGMENTS):
                    for name in subjects:
                        await segment(name, "alone")
                    async with asyncio.TaskGroup() as group:
                        flat_out = group.create_task(_flat_out(patient, silero_subject()))
                        both = [asyncio.ensure_future(segment(name, "beside")) for name in subjects]
                        await asyncio.gather(*both)
                        flat_out.cancel()
                for name, stream in streams.items():
                    found[name].append(Taken.of(stream.late_ns))
    report.show("detector at 10/s, Silero at 31/s, from the time when a frame is due; beside: both, and low-priority work", found)
    for name in subjects:
        report.check("N7", f"{name}, p99: beside / alone", ratios(found, f"{name}, beside", f"{name}, alone", "p99"), 1.5)


async def _flat_out(burst: aionn.Burst, subject: Subject) -> None:
    while True:
        await burst.compute(subject.inputs[0])
