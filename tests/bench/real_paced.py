"""Frames at real rates: a camera's, a voice's. Rows P1, P2, P4 and P5 of `tests.bench.real`.

Frames are due at absolute times, which a timer of the kernel's keeps (a `timerfd`, because a loop's own timers have a millisecond's
grain). Each lane measures a short segment in turn, three times per round, in rotating order. So drift of the machine hits all alike.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from tempfile import TemporaryDirectory

import numpy as np

import aionn
from tests.bench.machine import process_cpu_ns
from tests.bench.real_report import Lanes, Options, Report, Taken, ratios
from tests.bench.real_rivals import lanes
from tests.bench.real_subjects import Inputs, Subject, heavy_model, identity_subject, silero_subject

LEAD = 3
"""Frames at the start of a segment that do not count: the lane has rested while others were measured."""

SEGMENTS = 3
SILERO_RATE = 31
IDENTITY_RATES = (30, 100, 1000)


Rhythm = Callable[[int], int]
"""Nanoseconds between a frame, by its number, and the one before it."""


def steady(rate: float) -> Rhythm:
    return lambda number: int(1e9 / rate)


class _Time(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class _Setting(ctypes.Structure):
    _fields_ = (("interval", _Time), ("first", _Time))


class BlockingTimer:
    """Sleep until points in time of the monotonic clock, to some microseconds, in this thread."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._fd = self._libc.timerfd_create(time.CLOCK_MONOTONIC, os.O_CLOEXEC)
        if self._fd < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create")

    def sleep_until(self, due_ns: int) -> None:
        setting = _Setting(_Time(0, 0), _Time(*divmod(due_ns, 10**9)))
        if self._libc.timerfd_settime(self._fd, 1, ctypes.byref(setting), None) < 0:
            raise OSError(ctypes.get_errno(), "timerfd_settime")
        os.read(self._fd, 8)

    def close(self) -> None:
        os.close(self._fd)


class Ticks:
    """Wait for points in time of the monotonic clock, to some microseconds, without holding the loop."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._fd = self._libc.timerfd_create(time.CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC)
        if self._fd < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create")
        self._loop = asyncio.get_running_loop()
        self._waiting: asyncio.Future[None] = self._loop.create_future()
        self._loop.add_reader(self._fd, self._tick)

    def _tick(self) -> None:
        os.read(self._fd, 8)
        if not self._waiting.done():
            self._waiting.set_result(None)

    async def until(self, due_ns: int) -> None:
        """Return at the time, or after one turn of the loop if it has passed."""
        if time.monotonic_ns() >= due_ns:
            await asyncio.sleep(0)
            return
        self._waiting = self._loop.create_future()
        setting = _Setting(_Time(0, 0), _Time(*divmod(due_ns, 10**9)))
        if self._libc.timerfd_settime(self._fd, 1, ctypes.byref(setting), None) < 0:
            raise OSError(ctypes.get_errno(), "timerfd_settime")
        await self._waiting

    def close(self) -> None:
        self._loop.remove_reader(self._fd)
        os.close(self._fd)


class Stream:
    """Calls of one lane at a rate, over all its segments of a round."""

    def __init__(
        self,
        ticks: Ticks,
        call: Callable[[Inputs], Awaitable[object]],
        pid: int | None = None,
        busy_ns: Callable[[], int] | None = None,
    ) -> None:
        self._ticks = ticks
        self._call = call
        self._pids = (os.getpid(), *([pid] if pid else []))
        self._busy_ns = busy_ns
        self.cpu_ns = [0, 0]
        self.taken_ns: list[int] = []
        """From the call to its answer."""
        self.late_ns: list[int] = []
        """From the time at which the frame was due to its answer, so that a stream that is held up counts each frame."""
        self.executed_ns: list[int] = []
        """What the other process was busy with each call, with `busy_ns`. To ask costs CPU time, so ratios come from other streams."""

    async def segment(self, inputs: Sequence[Inputs], rhythm: Rhythm, count: int, while_true: Callable[[], bool] = lambda: True) -> None:
        """Call `count` times after the leading frames, or until `while_true` returns False."""
        due_ns = time.monotonic_ns() + rhythm(-LEAD)
        before: list[int] = []
        for number in range(-LEAD, count):
            if number == 0:
                before = [process_cpu_ns(pid) for pid in self._pids]
            await self._ticks.until(due_ns)
            if not while_true():
                break
            busy_ns = self._busy_ns() if self._busy_ns else 0
            began_ns = time.monotonic_ns()
            await self._call(inputs[number % len(inputs)])
            ended_ns = time.monotonic_ns()
            if number >= 0:
                self.taken_ns.append(ended_ns - began_ns)
                self.late_ns.append(ended_ns - due_ns)
                if self._busy_ns:
                    self.executed_ns.append(self._busy_ns() - busy_ns)
            due_ns += rhythm(number + 1)
        for place, pid in enumerate(self._pids if before else ()):
            self.cpu_ns[place] += process_cpu_ns(pid) - before[place]

    def taken(self) -> Taken:
        return Taken.of(self.taken_ns, *self.cpu_ns)


@asynccontextmanager
async def ticking() -> AsyncIterator[Ticks]:
    ticks = Ticks()
    try:
        yield ticks
    finally:
        ticks.close()


@dataclass
class Paced:
    """All lanes at one rate, and for each round the medians of microseconds that an aionn call spent inside and outside the engine."""

    lanes: Lanes = field(default_factory=dict)
    parts: dict[str, list[float]] = field(default_factory=lambda: {"the driver executes": [], "everything else": []})

    def note_parts(self, profiled: Stream) -> None:
        executes, everything_else = self.parts.values()
        executes.append(statistics.median(profiled.executed_ns) / 1e3)
        pairs = zip(profiled.taken_ns, profiled.executed_ns, strict=True)
        everything_else.append(statistics.median(taken - executed for taken, executed in pairs) / 1e3)


async def paced(subject: Subject, rates: Sequence[float], options: Options) -> dict[float, Paced]:
    """Measure all lanes at each rate. Each round has fresh processes."""
    found = {rate: Paced() for rate in rates}
    async with ticking() as ticks:
        for _ in range(options.rounds):
            async with lanes(subject, options.cpus) as contenders:
                for rate in rates:
                    streams = {lane.name: Stream(ticks, lane.call, lane.pid) for lane in contenders}
                    count = -(-int(options.frames * max(1.0, rate / 100)) // SEGMENTS)
                    for turn in range(SEGMENTS):
                        names = list(streams)
                        for name in names[turn:] + names[:turn]:
                            await streams[name].segment(subject.inputs, steady(rate), count)
                    for name, stream in streams.items():
                        found[rate].lanes.setdefault(name, []).append(stream.taken())
                    (ours,) = [lane for lane in contenders if lane.busy_ns]
                    profiled = Stream(ticks, ours.call, ours.pid, ours.busy_ns)
                    await profiled.segment(subject.inputs, steady(rate), count)
                    found[rate].note_parts(profiled)
    return found


async def silero(report: Report, options: Options) -> None:
    """P1 and P5: Silero at 31 frames a second."""
    measured = (await paced(silero_subject(), (SILERO_RATE,), options))[SILERO_RATE]
    found = measured.lanes
    report.show(f"Silero, {SILERO_RATE} frames/s", found)
    report.note("where an aionn call's time goes, p50", measured.parts, "us")
    report.check("P1", "Silero at 31/s, p50: aionn / shm", ratios(found, "aionn", "shm"), 1.0)
    report.check("P1", "Silero at 31/s, p50: aionn / to_thread", ratios(found, "aionn", "to_thread"), 0.85)
    tails = {name: ratios(found, "aionn", name, "p99") for name in ("shm", "to_thread")}
    worse = [max(pair) for pair in zip(*tails.values(), strict=True)]
    report.check("P1", "Silero at 31/s, p99: aionn / better of shm and to_thread", worse, 1.0)
    own = [1 - 1 / ratio for ratio in ratios(found, "aionn", "direct")]
    report.check("P5", "Silero at 31/s, p50: (aionn - direct) / aionn", own, 0.25)


async def identity(report: Report, options: Options) -> None:
    """P2: a model that does nothing, at three rates."""
    with TemporaryDirectory() as directory:
        everything = await paced(identity_subject(directory), IDENTITY_RATES, options)
    for rate, measured in everything.items():
        found = measured.lanes
        report.show(f"identity 64 B, {rate} frames/s", found)
        report.note("where an aionn call's time goes, p50", measured.parts, "us")
        report.check("P2", f"identity at {rate}/s, p50: aionn / shm", ratios(found, "aionn", "shm"), 1.05)
        report.check("P2", f"identity at {rate}/s, CPU of both processes: aionn / shm", ratios(found, "aionn", "shm", "cpu_s"), 1.1)


async def beside_a_long_run(report: Report, options: Options) -> None:
    """P4: a stream alone, and beside one long run of another model in the same driver."""
    subject, found = silero_subject(), Lanes()
    seconds = max(1.0, options.frames / SILERO_RATE)
    async with ticking() as ticks:
        for _ in range(options.rounds):
            async with aionn.Runtime() as runtime:
                heavy = await runtime.compile(aionn.Model.from_onnx(heavy_model()), devices=("onnxruntime",))
                light = await runtime.compile(aionn.Model.from_onnx(subject.path), devices=("onnxruntime",))
                async with heavy.burst() as slow, light.burst() as quick:
                    await quick.compute(subject.inputs[0])
                    loops = await _loops_for(slow, seconds)
                    alone, beside = Stream(ticks, quick.compute), Stream(ticks, quick.compute)
                    half = -(-options.frames // 2)
                    await alone.segment(subject.inputs, steady(SILERO_RATE), half)
                    for _ in range(12):  # a driver may believe from short runs that the next one is short
                        await slow.compute({"count": np.array([0])})
                    async with asyncio.TaskGroup() as group:
                        long = group.create_task(slow.compute({"count": np.array([loops])}))
                        await beside.segment(subject.inputs, steady(SILERO_RATE), options.frames, lambda long=long: not long.done())  # type: ignore[misc]
                    await alone.segment(subject.inputs, steady(SILERO_RATE), half)
            found.setdefault("alone", []).append(Taken.of(alone.late_ns))
            found.setdefault("beside a long run", []).append(Taken.of(beside.late_ns))
    report.show(f"Silero, {SILERO_RATE} frames/s, from the time when a frame is due; the other model runs for {seconds:.1f} s", found)
    report.check(
        "P4", f"stream beside a run of {seconds:.1f} s, p99: beside / alone", ratios(found, "beside a long run", "alone", "p99"), 2.0
    )


async def _loops_for(burst: aionn.Burst, seconds: float) -> int:
    """Return how often the heavy model must loop to take so long."""
    await burst.compute({"count": np.array([20])})
    began = time.perf_counter()
    await burst.compute({"count": np.array([100])})
    return int(100 * seconds / (time.perf_counter() - began))
