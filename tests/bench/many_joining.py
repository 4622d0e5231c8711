"""What joining costs where nothing is joined, and instances beside threads. Row N13 of `tests.bench.many`.

The numbers in the titles are those of the rows in the table of joining: a lone caller (2), a driver that only waits (3), a model that
gains nothing (4), instances (5), threads (17).
"""

from __future__ import annotations

import asyncio
import os
import statistics
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

import aionn
from aionn.testing.models import identity_model
from tests.bench.machine import memory_bytes, wake_ups
from tests.bench.many_joined import BATCH, open_silero
from tests.bench.real_hot import driver_pid
from tests.bench.real_many import compile_with
from tests.bench.real_paced import SEGMENTS
from tests.bench.real_report import Options, Report
from tests.real_models import carried

SECONDS = 1.0
"""How long a contender runs in a segment."""
WATCHED_S = 10.0
"""How long a driver is watched in a round."""
WARM = 300
SEEN_CPUS = 16


async def little(report: Report, options: Options) -> None:
    """N13."""
    await lone(report, options)
    await waiting(report, options)
    await no_gain(report, options)
    await instances(report, options)
    await ten_models(report)


async def lone(report: Report, options: Options) -> None:
    """One burst of Silero without a pause, with and without joining."""
    subject, found = open_silero(), []
    async with aionn.Runtime() as runtime, AsyncExitStack() as stack:
        bursts = {}
        for name, asked in (("without", {}), ("with", {"batch": BATCH})):
            compilation = await compile_with(runtime, subject.path, threads=1, **asked)
            bursts[name] = await stack.enter_async_context(compilation.burst())
            for _ in range(WARM):
                await bursts[name].compute(subject.inputs[0])
        for _ in range(options.rounds):
            taken: dict[str, list[int]] = {name: [] for name in bursts}
            for turn in range(2 * SEGMENTS):
                for name in bursts if turn % 2 else reversed(bursts):
                    for _ in range(options.frames):
                        began_ns = time.perf_counter_ns()
                        await bursts[name].compute(subject.inputs[0])
                        taken[name].append(time.perf_counter_ns() - began_ns)
            found.append(statistics.median(taken["with"]) / statistics.median(taken["without"]))
    report.check("N13", "(2) one burst of Silero, p50: with batch= / without", found, 1.03)


async def waiting(report: Report, options: Options) -> None:
    """A driver with 16 open bursts that nobody uses."""
    subject, found = open_silero(), []
    async with aionn.Runtime() as runtime, AsyncExitStack() as stack:
        compilation = await compile_with(runtime, subject.path, threads=1, batch=BATCH)
        for _ in range(16):
            await (await stack.enter_async_context(compilation.burst())).compute(subject.inputs[0])
        pid = driver_pid(runtime)
        await asyncio.sleep(2 * SECONDS)
        for _ in range(options.rounds):
            before = wake_ups(pid)
            await asyncio.sleep(WATCHED_S)
            found.append((wake_ups(pid) - before) / WATCHED_S)
    report.check("N13", "(3) wake-ups a second of a driver with 16 open bursts", found, 1.0)


async def _rate(bursts: Sequence[aionn.Burst], inputs: Mapping[str, Any]) -> float:
    """Return the answers a second of bursts that send each frame when they have the answer to the one before."""
    began, answers = time.perf_counter(), 0

    async def stream(burst: aionn.Burst) -> None:
        nonlocal answers
        while time.perf_counter() - began < SECONDS:
            await burst.compute(inputs)
            answers += 1

    await asyncio.gather(*map(stream, bursts))
    return answers / (time.perf_counter() - began)


async def _ratios(options: Options, first: Sequence[aionn.Burst], second: Sequence[aionn.Burst], inputs: Mapping[str, Any]) -> list[float]:
    found = []
    for _ in range(options.rounds):
        rates: dict[int, list[float]] = {0: [], 1: []}
        for turn in range(SEGMENTS):
            for number in (0, 1) if turn % 2 else (1, 0):
                rates[number].append(await _rate((first, second)[number], inputs))
        found.append(statistics.median(rates[0]) / statistics.median(rates[1]))
    return found


async def no_gain(report: Report, options: Options) -> None:
    """Four bursts of the detector at 320 x 320, with and without joining."""
    path = carried("detector")
    inputs = {"x": np.random.default_rng(0).random((1, 3, 320, 320), np.float32)}
    async with aionn.Runtime() as runtime, AsyncExitStack() as stack:
        plain = await compile_with(runtime, path)
        joining = await compile_with(runtime, path, batch=aionn.Batching(max_rows=8))
        first, second = [[await stack.enter_async_context(one.burst()) for _ in range(4)] for one in (joining, plain)]
        while sum(joining.statistics()["by_rows"].values()) < 20:
            await asyncio.gather(*(burst.compute(inputs) for burst in first))
        state = joining.batching
        assert state is not None
        report.note("the detector after 20 runs", {"rows a run": [joining.statistics()["rows_per_run"]]}, state.reason)
        found = await _ratios(options, first, second, inputs)
    report.check("N13", "(4) four bursts of the detector, rows/s: with batch= / without", found, 0.97, at_least=True)


async def instances(report: Report, options: Options) -> None:
    """Two bursts of a small net: two instances of one thread beside one of two threads, and what the second instance takes."""
    path = carried("upside_down")
    inputs = {"x": np.random.default_rng(0).random((1, 3, 48, 192), np.float32)}
    sizes: dict[int, list[float]] = {1: [], 2: []}
    for count in sizes:
        for _ in range(3):
            async with aionn.Runtime() as runtime, AsyncExitStack() as stack:
                compilation = await compile_with(runtime, path, instances=count, threads=1)
                await _rate([await stack.enter_async_context(compilation.burst()) for _ in range(2)], inputs)
                sizes[count].append(memory_bytes(driver_pid(runtime), "Anonymous") / 1024)
    added = statistics.median(sizes[2]) - statistics.median(sizes[1])
    async with aionn.Runtime() as one, aionn.Runtime() as other, AsyncExitStack() as stack:
        lanes = await compile_with(one, path, instances=2, threads=1)
        threads = await compile_with(other, path, instances=1, threads=2)
        first, second = [[await stack.enter_async_context(made.burst()) for _ in range(2)] for made in (lanes, threads)]
        found = await _ratios(options, first, second, inputs)
    report.check("N13", "(5) rows/s: instances=2, threads=1 / instances=1, threads=2", found, 1.25, at_least=True)
    report.check("N13", "(5) anonymous memory of the second instance, KiB; a second session takes 3,100", [added], 3100.0)


def _let_python_see_cpus(folder: str) -> None:
    Path(folder, "sitecustomize.py").write_text(f"import os\nos.sched_getaffinity = lambda pid: set(range({SEEN_CPUS}))\n")


async def ten_models(report: Report) -> None:
    """Ten models, each with one busy burst, in one driver that sees 16 CPUs."""
    with TemporaryDirectory(prefix="aionn-bench-") as folder:
        _let_python_see_cpus(folder)
        async with aionn.Runtime(driver_env={"PYTHONPATH": folder}, template=False, start=()) as runtime, AsyncExitStack() as stack:
            models = [identity_model({"x": (1, width)}) for width in range(1, 11)]
            compiled = [await runtime.compile(aionn.Model.from_onnx(model), devices=("onnxruntime",)) for model in models]
            bursts = [await stack.enter_async_context(each.burst()) for each in compiled]
            for _ in range(WARM):
                await asyncio.gather(*(burst.compute({"x": np.zeros((1, width), np.float32)}) for width, burst in enumerate(bursts, 1)))
            threads = len(os.listdir(f"/proc/{driver_pid(runtime)}/task"))
    report.check("N13", f"(17) threads of a driver with ten models and {SEEN_CPUS} CPUs", [threads], SEEN_CPUS + 12)
