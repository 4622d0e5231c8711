"""Row N14 of `tests.bench.many`: 64 paced streams through deaths of their driver, swaps of their model, and a scrape each second.

A quarter of the streams share runs (`Batching`), and a thread without a loop calls beside them at the same rate. Each answer is compared
with that of a session in this process. A round takes two minutes, and all rounds use one runtime.
"""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from functools import partial
from typing import Any

import numpy as np
from prometheus_client import CollectorRegistry, generate_latest

import aionn
from aionn.metrics import Collector
from tests.bench.machine import descriptors, memory_bytes
from tests.bench.many_joined import BATCH, open_silero
from tests.bench.real_hot import driver_pid
from tests.bench.real_many import compile_with
from tests.bench.real_paced import SILERO_RATE
from tests.bench.real_report import Options, Report
from tests.bench.real_subjects import silero_subject
from tests.bench.real_worker import session_of

STREAMS, JOINED = 64, 16
ROUND_S = 120.0
KILL_S, SWAP_S, SCRAPE_S = 20.0, 15.0, 1.0
SETTLED_S = 10.0
"""A driver has all its memory so long after its start."""


class Rows:
    """What became of the rows, and the app's and the driver's private memory, in MiB."""

    def __init__(self) -> None:
        self.ends: Counter[str] = Counter()
        self.app_mib: list[float] = []
        self.driver_mib: list[float] = []


async def soak(report: Report, options: Options) -> None:
    """N14: no row is wrong, none is lost but by a death, and memory stays."""
    subject = silero_subject()
    session = session_of(str(subject.path), subject.threads)
    right = [session.run(["output"], inputs)[0] for inputs in subject.inputs]
    shared = open_silero()
    session = session_of(str(shared.path), shared.threads)
    right_shared = [session.run(["output"], inputs)[0] for inputs in shared.inputs]
    rows = Rows()
    async with aionn.Runtime() as runtime, AsyncExitStack() as stack:
        compilation = await compile_with(runtime, subject.path)
        joined = await compile_with(runtime, shared.path, batch=BATCH)
        bursts = [await stack.enter_async_context((joined if each < JOINED else compilation).burst()) for each in range(STREAMS)]
        calls = await asyncio.to_thread(stack.enter_context, compilation.blocking())
        registry = CollectorRegistry()
        registry.register(Collector(runtime))
        deaths = swaps = 0

        async def stream(number: int, burst: aionn.Burst, ends_s: float) -> None:
            due_s = time.monotonic() + number / STREAMS / SILERO_RATE
            while due_s < ends_s:
                await asyncio.sleep(max(0.0, due_s - time.monotonic()))
                of, expected = (shared, right_shared) if number < JOINED else (subject, right)
                rows.ends[await _row(partial(burst.compute, of.inputs[number]), expected[number])] += 1
                due_s = max(due_s + 1 / SILERO_RATE, time.monotonic())

        async def thread(ends_s: float) -> None:
            while time.monotonic() < ends_s:
                call = partial(asyncio.to_thread, calls.compute, subject.inputs[0])
                rows.ends[await _row(call, right[0])] += 1
                rows.ends["of them by a thread"] += 1
                await asyncio.sleep(1 / SILERO_RATE)

        async def kill() -> None:
            nonlocal deaths
            os.kill(driver_pid(runtime), signal.SIGKILL)
            deaths += 1
            await asyncio.sleep(SETTLED_S)
            gc.collect()
            rows.app_mib.append(_mib(os.getpid()))
            rows.driver_mib.append(_mib(driver_pid(runtime)))

        async def swap() -> None:
            nonlocal swaps
            try:
                await runtime.swap(compilation, aionn.Model.from_onnx(subject.path))
                swaps += 1
            except (aionn.DriverDiedError, aionn.DeadlineError) as error:  # the model before goes on serving
                rows.ends[f"swaps that ended with {type(error).__name__}"] += 1

        async def scrape() -> None:
            rows.ends["scrapes"] += bool(await asyncio.to_thread(generate_latest, registry))

        before = 0
        for _ in range(options.rounds):
            ends_s = time.monotonic() + ROUND_S
            async with asyncio.TaskGroup() as group:
                for number, burst in enumerate(bursts):
                    group.create_task(stream(number, burst, ends_s))
                group.create_task(thread(ends_s))
                for act, every_s in ((kill, KILL_S), (swap, SWAP_S), (scrape, SCRAPE_S)):
                    group.create_task(_again(act, every_s, ends_s))
            before = before or descriptors(os.getpid())
        grown = descriptors(os.getpid()) - before
    report.note(
        "rows, deaths and swaps", {name: [float(count)] for name, count in rows.ends.items()} | {"deaths": [float(deaths)]}, "count"
    )
    report.note("private memory", {"app": rows.app_mib, "driver": rows.driver_mib}, "MiB")
    report.check("N14", "wrong rows", [float(rows.ends["wrong"])], 0.0)
    report.check("N14", "rows that ended with another error than a death", [float(rows.ends["lost"])], 0.0)
    report.check("N14", "rows that a death ended, per death and caller", [rows.ends["died"] / deaths / (STREAMS + 1)], 1.0)
    report.check("N14", "swaps", [float(swaps)], 1.0, at_least=True)
    report.check("N14", "descriptors that the app has gained since the first round", [float(grown)], 8.0)
    for name, values in (("app", rows.app_mib), ("driver", rows.driver_mib)):
        report.check("N14", f"{name}'s memory: last / first", [values[-1] / values[0]], 1.1)


async def _row(call: Callable[[], Awaitable[Mapping[str, Any]]], right: np.ndarray[tuple[int, ...], np.dtype[np.float32]]) -> str:
    """Return what became of a row."""
    try:
        found = (await call())["output"]
    except aionn.DriverDiedError:
        return "died"
    except aionn.AionnError:
        return "lost"
    return "right" if np.allclose(found, right, rtol=1e-3, atol=1e-4) else "wrong"


async def _again(act: Callable[[], Awaitable[None]], every_s: float, ends_s: float) -> None:
    while time.monotonic() + every_s < ends_s:
        await asyncio.sleep(every_s)
        await act()


def _mib(pid: int) -> float:
    return memory_bytes(pid, "Private_Dirty", "Private_Clean") / 2**20
