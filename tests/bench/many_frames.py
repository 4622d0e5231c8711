"""What a burst costs beside others. Rows N11 and N12 of `tests.bench.many`: opening, memory, idle neighbours, held outputs."""

from __future__ import annotations

import os
import time
from collections import deque
from contextlib import AsyncExitStack

import aionn
from aionn.testing.models import identity_model
from tests.bench.machine import memory_bytes, shared_bytes
from tests.bench.real_hot import CALLS_PER_FRAME, SMALL, compiled, timed
from tests.bench.real_many import PAGE_BYTES
from tests.bench.real_paced import SEGMENTS
from tests.bench.real_report import Lanes, Options, Report, Taken, ratios

OPENED = 64
LATER = 16
"""Further bursts: what each of them takes and adds is the median, and the mean."""

HELD = (64, 200)
KIB = 1024


async def opening(report: Report, options: Options) -> None:
    """N11: time until the 64th burst and the next ones have answered, and what each adds to both processes."""
    taken_ms, added_kib, shared_kib = [], [], []
    for _ in range(options.rounds):
        async with compiled(options, identity_model()) as (compilation, pid), AsyncExitStack() as stack:
            pids = (os.getpid(), pid)
            for _ in range(OPENED - 1):
                await (await stack.enter_async_context(compilation.burst())).compute(SMALL)
            before = _private_bytes(*pids), shared_bytes(*pids)
            each_ms = []
            for _ in range(LATER):
                began = time.perf_counter()
                await (await stack.enter_async_context(compilation.burst())).compute(SMALL)
                each_ms.append((time.perf_counter() - began) * 1e3)
            taken_ms.append(sorted(each_ms)[LATER // 2])
            added_kib.append((_private_bytes(*pids) - before[0]) / LATER / KIB)
            shared_kib.append((shared_bytes(*pids) - before[1]) / LATER / KIB)
    values = {"open and first call, ms": taken_ms, "private memory, KiB": added_kib, "shared memory, KiB": shared_kib}
    report.note("the 64th burst of the identity model and the next ones", values, "each")
    report.check("N11", "open and first call of the 64th burst, ms", taken_ms, 1.0)
    both = [private + shared - PAGE_BYTES / KIB for private, shared in zip(added_kib, shared_kib, strict=True)]
    report.check("N11", "memory that a burst adds beside its one frame, KiB", both, 64.0)


def _private_bytes(*pids: int) -> int:
    return sum(memory_bytes(pid, "Private_Dirty", "Private_Clean") for pid in pids)


async def idle_and_held(report: Report, options: Options) -> None:
    """N12: calls without a pause by one burst alone and beside 64 idle ones; and with outputs held."""
    neighbours: Lanes = {"alone": [], "among 64 idle": []}
    outputs: Lanes = {f"{held} held": [] for held in (0, *HELD)}
    count = options.frames * CALLS_PER_FRAME // SEGMENTS
    for number in range(options.rounds):
        async with compiled(options, identity_model()) as (compilation, pid), compilation.burst() as burst:
            await timed(lambda burst=burst: burst.compute(SMALL), count, pid)  # type: ignore[misc]
            for where in neighbours if number % 2 else reversed(neighbours):
                async with AsyncExitStack() as stack:
                    for _ in range(OPENED if where != "alone" else 0):
                        await (await stack.enter_async_context(compilation.burst())).compute(SMALL)
                    neighbours[where].append(await timed(lambda burst=burst: burst.compute(SMALL), count, pid))  # type: ignore[misc]
        async with compiled(options, identity_model()) as (compilation, pid), AsyncExitStack() as stack:
            turns = {}
            for held in (0, *HELD):
                turns[held] = await stack.enter_async_context(compilation.burst())
            for held in turns if number % 2 else reversed(turns):
                outputs[f"{held} held"].append(await _holding(turns[held], held, count, pid))
    report.show("identity 64 B without a pause, by one burst", neighbours)
    report.check("N12", "hot, p50: one burst among 64 idle ones / alone", ratios(neighbours, "among 64 idle", "alone"), 1.15)
    report.show("identity 64 B without a pause; the app keeps its last outputs", outputs)
    for held in HELD:
        report.check("N12", f"hot, p50: {held} outputs held / none", ratios(outputs, f"{held} held", "0 held"), 1.25)


async def _holding(burst: aionn.Burst, held: int, count: int, pid: int) -> Taken:
    kept: deque[object] = deque(maxlen=held)

    async def call() -> None:
        kept.append(await burst.compute(SMALL))

    for _ in range(3 * held):  # each frame has come several times
        await call()
    taken = await timed(call, 2 * count, pid)
    kept.clear()
    return taken
