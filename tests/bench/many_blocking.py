"""The blocking face beside the awaited call. Row N10 of `tests.bench.many`.

Both call the same driver. The blocking calls run in a thread, while the loop has nothing to do. At a rate, both wait for a timer of the
kernel's: the task in its loop, and the thread in a read that blocks, as a camera's thread waits for its picture. Times at a rate are from
the moment when a frame is due.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from functools import partial
from tempfile import TemporaryDirectory

import aionn
from tests.bench.machine import process_cpu_ns
from tests.bench.real_hot import CALLS_PER_FRAME, compiled, timed
from tests.bench.real_paced import LEAD, SEGMENTS, SILERO_RATE, BlockingTimer, Stream, steady, ticking
from tests.bench.real_report import Lanes, Options, Report, Taken, ratios
from tests.bench.real_subjects import Inputs, Subject, identity_subject, silero_subject

AWAITED, BLOCKING = "awaited", "blocking"


async def blocking(report: Report, options: Options) -> None:
    """N10: calls without a pause, and at a voice's rate."""
    with TemporaryDirectory() as directory:
        for subject in (identity_subject(directory), silero_subject()):
            await _measure(subject, report, options)


async def _measure(subject: Subject, report: Report, options: Options) -> None:
    hot: Lanes = {AWAITED: [], BLOCKING: []}
    paced: Lanes = {AWAITED: [], BLOCKING: []}
    for number in range(options.rounds):
        async with compiled(options, subject.path.read_bytes()) as (compilation, pid), AsyncExitStack() as stack:
            burst, ticks = await stack.enter_async_context(compilation.burst()), await stack.enter_async_context(ticking())
            with compilation.blocking() as calls:
                names = (AWAITED, BLOCKING) if number % 2 else (BLOCKING, AWAITED)
                count = options.frames * CALLS_PER_FRAME // SEGMENTS
                for name in names:
                    inputs = subject.inputs[0]
                    if name == AWAITED:
                        hot[name].append(await timed(lambda burst=burst, inputs=inputs: burst.compute(inputs), count, pid))  # type: ignore[misc]
                    else:
                        hot[name].append(await asyncio.to_thread(_timed, partial(calls.compute, inputs), count, pid))
                stream, thread = Stream(ticks, burst.compute, pid), ThreadStream(calls, pid)
                for _ in range(SEGMENTS):
                    for name in names:
                        if name == AWAITED:
                            await stream.segment(subject.inputs, steady(SILERO_RATE), options.frames // SEGMENTS)
                        else:
                            await asyncio.to_thread(thread.segment, subject.inputs, options.frames // SEGMENTS)
                paced[AWAITED].append(Taken.of(stream.late_ns, *stream.cpu_ns))
                paced[BLOCKING].append(thread.taken())
    for what, lanes, bound in (("without a pause", hot, 0.8), (f"at {SILERO_RATE}/s", paced, 1.0)):
        report.show(f"{subject.name} {what}", lanes)
        report.check("N10", f"{subject.name} {what}, p50: blocking / awaited", ratios(lanes, BLOCKING, AWAITED), bound)


def _timed(call: Callable[[], object], count: int, pid: int) -> Taken:
    """Do as `timed` does, in this thread."""
    for _ in range(max(2, count // 10)):
        call()
    taken = []
    before = (time.process_time_ns(), process_cpu_ns(pid))
    for _ in range(count):
        began_ns = time.perf_counter_ns()
        call()
        taken.append(time.perf_counter_ns() - began_ns)
    return Taken.of(taken, time.process_time_ns() - before[0], process_cpu_ns(pid) - before[1])


class ThreadStream:
    """Calls of a thread at a rate, over all its segments of a round."""

    def __init__(self, calls: aionn.BlockingBurst, pid: int) -> None:
        self._calls = calls
        self._pids = (os.getpid(), pid)
        self._cpu_ns = [0, 0]
        self._late_ns: list[int] = []

    def segment(self, inputs: Sequence[Inputs], count: int) -> None:
        """Call `count` times after the leading frames."""
        period_ns = int(1e9 / SILERO_RATE)
        due_ns, before = time.monotonic_ns() + period_ns, [0, 0]
        timer = BlockingTimer()
        for number in range(-LEAD, count):
            if number == 0:
                before = [process_cpu_ns(pid) for pid in self._pids]
            timer.sleep_until(due_ns)
            self._calls.compute(inputs[number % len(inputs)])
            if number >= 0:
                self._late_ns.append(time.monotonic_ns() - due_ns)
            due_ns += period_ns
        timer.close()
        for place, pid in enumerate(self._pids):
            self._cpu_ns[place] += process_cpu_ns(pid) - before[place]

    def taken(self) -> Taken:
        return Taken.of(self._late_ns, *self._cpu_ns)
