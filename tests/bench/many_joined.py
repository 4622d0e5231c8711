"""Streams whose requests share runs (`compile(batch=)`). Rows N2 and N3 of `tests.bench.many`.

The model is Silero with an open batch. Its state goes with each call, as for the other rows of many streams. N3 keeps states in the driver,
and compares with one lane without joining, which is what one compilation had before.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

import numpy as np

import aionn
from tests.bench.machine import process_cpu_ns
from tests.bench.many_streams import Crowd, bursts, threaded
from tests.bench.real_hot import driver_pid
from tests.bench.real_many import compile_with
from tests.bench.real_paced import SEGMENTS, SILERO_RATE, ticking
from tests.bench.real_report import Lanes, Options, Report, Taken, ratios
from tests.bench.real_subjects import Subject, silero_subject
from tests.real_models import carried

BATCH = aionn.Batching(max_rows=16)
SECONDS = 0.5
"""How long a contender of N3 runs in a segment."""
LEARN = 300
"""Rounds of calls until the driver knows which sizes pay."""


def open_silero() -> Subject:
    usual = silero_subject()
    return replace(usual, path=carried("silero_batch"), inputs=[{**inputs, "sr": np.array(16000)} for inputs in usual.inputs])


async def joined(report: Report, options: Options) -> None:
    """N2: 64 paced streams, staggered and in step."""
    subject = open_silero()
    frames = -(-options.frames // SEGMENTS)
    for how, in_step in (("staggered", False), ("in step", True)):
        found: Lanes = {"to_thread": [], "aionn": []}
        async with ticking() as ticks:
            for _ in range(options.rounds):
                async with bursts(subject, 64, batch=BATCH, threads=1) as (opened, pid):
                    for _ in range(LEARN):
                        await asyncio.gather(*(burst.compute(subject.inputs[0]) for burst in opened[:16]))
                    contenders = [Crowd("to_thread", [threaded(subject)] * 64), Crowd("aionn", [burst.compute for burst in opened], pid)]
                    for turn in range(SEGMENTS):
                        for crowd in contenders if turn % 2 else reversed(contenders):
                            await crowd.segment(ticks, subject, SILERO_RATE, frames, in_step=in_step)
                    for crowd in contenders:
                        found[crowd.name].append(crowd.taken())
        report.show(f"Silero, 64 streams at {SILERO_RATE} frames/s, {how}, with Batching(16), from the time when a frame is due", found)
        report.check("N2", f"64 streams {how}, p99: aionn / to_thread", ratios(found, "aionn", "to_thread", "p99"), 1.0)
        bound = 0.45 if in_step else 0.8
        report.check("N2", f"64 streams {how}, CPU: aionn / to_thread", ratios(found, "aionn", "to_thread", "cpu_s"), bound)


class _Closed:
    """16 streams in a closed loop over one compilation, each with its state in the driver."""

    def __init__(self, compilation: aionn.Compilation, pid: int, burst_and_state: Sequence[tuple[aionn.Burst, Any]]) -> None:
        self.compilation, self.pid, self._streams = compilation, pid, burst_and_state
        self.calls_ns: list[int] = []
        self.seconds = 0.0
        self.cpu_ns = 0

    async def segment(self, subject: Subject) -> None:
        began_ns, cpu_ns = time.monotonic_ns(), process_cpu_ns(self.pid)
        end_ns = began_ns + int(SECONDS * 1e9)

        async def stream(index: int) -> None:
            burst, state = self._streams[index]
            inputs = {"input": subject.inputs[index]["input"], "sr": subject.inputs[index]["sr"], "state": state}
            while (now_ns := time.monotonic_ns()) < end_ns:
                await burst.compute(inputs, outputs={"stateN": state})
                self.calls_ns.append(time.monotonic_ns() - now_ns)

        await asyncio.gather(*(stream(index) for index in range(len(self._streams))))
        self.seconds += (time.monotonic_ns() - began_ns) / 1e9
        self.cpu_ns += process_cpu_ns(self.pid) - cpu_ns


async def closed(report: Report, options: Options) -> None:
    """N3: 16 streams that send each frame when they have the answer to the one before."""
    subject = open_silero()
    found: Lanes = {"one lane": [], "joined": []}
    gains, tails, sizes = [], [], []
    for _ in range(options.rounds):
        async with AsyncExitStack() as stack:
            contenders = {}
            for name, asked in (("one lane", {"instances": 1}), ("joined", {"batch": BATCH})):
                runtime = await stack.enter_async_context(aionn.Runtime())
                compilation = await compile_with(runtime, subject.path, threads=1, **asked)
                streams = []
                for _ in range(16):
                    state = await compilation.allocate(inputs=("state",), outputs=("stateN",), shape=(2, 1, 128))
                    await state.copy_from(np.zeros((2, 1, 128), np.float32))
                    streams.append((await stack.enter_async_context(compilation.burst()), state))
                contenders[name] = _Closed(compilation, driver_pid(runtime), streams)
                await contenders[name].segment(subject)  # until sizes are known
                contenders[name].calls_ns.clear()
                contenders[name].seconds = contenders[name].cpu_ns = 0
            for turn in range(SEGMENTS):
                for one in list(contenders.values()) if turn % 2 else reversed(contenders.values()):
                    await one.segment(subject)
            for name, one in contenders.items():
                found[name].append(Taken.of(one.calls_ns, 0, one.cpu_ns))
            before, after = contenders["one lane"], contenders["joined"]
            gains.append((len(after.calls_ns) / after.seconds) / (len(before.calls_ns) / before.seconds))
            tails.append(found["joined"][-1].p99 / found["one lane"][-1].p99)
            sizes.append(after.compilation.statistics()["rows_per_run"])
    report.show("Silero, 16 streams in a closed loop, states in the driver; the driver's CPU", found)
    report.check("N3", "16 closed streams, rows/s: joined / one lane", gains, 2.5, at_least=True)
    report.check("N3", "16 closed streams, p99: joined / one lane", tails, 0.5)
    report.check("N3", "16 closed streams, rows in a run", sizes, 6, at_least=True)
