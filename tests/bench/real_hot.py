"""Calls without a pause. Rows P3, P6, P9 and P10 of `tests.bench.real`: placement, held outputs, requests in flight, `compute()`."""

from __future__ import annotations

import asyncio
import ctypes
import multiprocessing
import os
import signal
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import asynccontextmanager
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

import aionn
from aionn.testing.models import identity_model
from tests.bench.burst import EMPTY
from tests.bench.machine import busiest_thread, last_cpu, process_cpu_ns, shared_bytes, system_calls, threads_ns
from tests.bench.real_report import Lanes, Options, Report, Taken, ratios
from tests.bench.real_rivals import placed
from tests.bench.real_subjects import PICTURE, Inputs, identity_subject, picture_model
from tests.bench.real_worker import session_of
from tests.bench.rivals import ROOT

SMALL = {"input": np.zeros((1, 16), np.float32)}
CALLS_PER_FRAME = 10
"""Calls without a pause for each frame of the option `--frames`."""

HELD = (0, 17, 64, 200)
FLIGHTS = (1, 8, 64)
AT_ONCE = 1000
STRACED = 200

Call = Callable[[], Awaitable[object]]


@asynccontextmanager
async def compiled(options: Options, content: bytes, device: str = "onnxruntime") -> AsyncIterator[tuple[aionn.Compilation, int]]:
    """Compile a model in a runtime of its own, placed as the options say. Yields the compilation and the driver's pid."""
    os.environ["PYTHONPATH"] = str(ROOT)  # where a driver finds the empty engine
    model = aionn.Model.from_onnx(content)
    async with aionn.Runtime() as runtime, await runtime.compile(model, devices=(device,)) as made:
        await made.compute({name: np.zeros(operand.dimensions or (), operand.type.dtype) for name, operand in model.inputs.items()})
        with placed(runtime, device, options.cpus):
            yield made, driver_pid(runtime, device)


def driver_pid(runtime: aionn.Runtime, device: str = "onnxruntime") -> int:
    (pid,) = [found.pid for found in runtime.devices if found.name == device]
    assert pid is not None
    return pid


async def timed(call: Call, count: int, pid: int | None = None) -> Taken:
    """Call so often, after a tenth as many that do not count."""
    for _ in range(max(2, count // 10)):
        await call()
    taken = []
    before = (time.process_time_ns(), process_cpu_ns(pid) if pid else 0)
    for _ in range(count):
        began_ns = time.perf_counter_ns()
        await call()
        taken.append(time.perf_counter_ns() - began_ns)
    return Taken.of(taken, time.process_time_ns() - before[0], (process_cpu_ns(pid) if pid else 0) - before[1])


# ---- P3: where the scheduler puts the two ends -------------------------------------------------------------------------------


async def placement(report: Report, options: Options) -> None:
    """P3: each run has a fresh driver, first left to the scheduler, then pinned."""
    found: Lanes = {"not pinned": [], "pinned": []}
    together = []
    count = options.frames * CALLS_PER_FRAME
    for _ in range(2 * options.rounds):
        async with aionn.Runtime() as runtime:
            compilation = await runtime.compile(aionn.Model.from_onnx(identity_model()), devices=("onnxruntime",))
            async with compilation.burst() as burst:
                pid = driver_pid(runtime)
                found["not pinned"].append(await timed(lambda burst=burst: burst.compute(SMALL), count, pid))  # type: ignore[misc]
                together.append(await _share_on_one_cpu(burst, pid, count))
                with placed(runtime, "onnxruntime", options.both_cpus):
                    found["pinned"].append(await timed(lambda burst=burst: burst.compute(SMALL), count, pid))  # type: ignore[misc]
    report.show("identity 64 B without a pause, by burst", found)
    report.note("both ends on one CPU, where not pinned", {"share of the calls": together}, "0 to 1")
    report.check("P3", "hot, p50: not pinned / pinned, in 9 of 10 runs", ratios(found, "not pinned", "pinned"), 1.5, runs=0.9)


async def _share_on_one_cpu(burst: aionn.Burst, pid: int, count: int) -> float:
    """Return the share of looks, at one call in twenty, that find both ends on one CPU."""
    libc = ctypes.CDLL(None)
    before_ns = threads_ns(pid)
    for _ in range(count // 2):
        await burst.compute(SMALL)
    thread = busiest_thread(pid, before_ns)
    looks = []
    for number in range(count):
        await burst.compute(SMALL)
        if number % 20 == 0:
            looks.append(libc.sched_getcpu() == last_cpu(pid, thread))
    return float(np.mean(looks))


# ---- P6: held outputs, requests in flight ------------------------------------------------------------------------------------


async def holding(report: Report, options: Options) -> None:
    """P6: outputs that the app keeps, then requests in flight. One burst at a time is open."""
    found: Lanes = {f"{count} held": [] for count in HELD}
    rates: dict[str, list[float]] = {f"{count} in flight": [] for count in FLIGHTS}
    count = options.frames * CALLS_PER_FRAME
    for _ in range(options.rounds):
        async with compiled(options, identity_model()) as (compilation, pid):
            for held in HELD:
                async with compilation.burst() as burst:
                    kept: deque[object] = deque(maxlen=held)

                    async def call(burst: aionn.Burst = burst, kept: deque[object] = kept) -> None:
                        kept.append(await burst.compute(SMALL))

                    for _ in range(held):
                        await call()
                    found[f"{held} held"].append(await timed(call, count, pid))
                    kept.clear()
        async with compiled(options, identity_model(), EMPTY) as (compilation, _):
            for flight in FLIGHTS:
                rates[f"{flight} in flight"].append(await _rate(compilation, flight, count * 4))
    report.show("identity 64 B without a pause, by burst; the app keeps its last outputs", found)
    for held in HELD[1:]:
        report.check("P6", f"hot, p50: {held} outputs held / none", ratios(found, f"{held} held", "0 held"), 1.25)
    report.note("empty engine, by one burst", rates, "requests/s")
    one, eight, many = rates.values()
    report.check("P6", "requests/s: 8 in flight / 1", [a / b for a, b in zip(eight, one, strict=True)], 2.0, at_least=True)
    report.check("P6", "requests/s: 64 in flight / 8", [a / b for a, b in zip(many, eight, strict=True)], 1.2, at_least=True)


async def _rate(compilation: aionn.Compilation, flight: int, count: int) -> float:
    async def caller(burst: aionn.Burst, calls: int) -> None:
        for _ in range(calls):
            await burst.compute(SMALL)

    async with compilation.burst(depth=max(flight, 8)) as burst:
        each = -(-count // flight)
        async with asyncio.TaskGroup() as group:
            for _ in range(flight):
                group.create_task(caller(burst, max(2, each // 10)))
        began = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for _ in range(flight):
                group.create_task(caller(burst, each))
        return each * flight / (time.perf_counter() - began)


# ---- P9, P10: compute() without a burst --------------------------------------------------------------------------------------

_pooled: dict[str, Any] = {}


def _start_pooled(path: str, cpus: set[int]) -> None:
    os.sched_setaffinity(0, cpus)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the pool ends it
    _pooled["session"] = session_of(path, 1)


def _run_pooled(inputs: Inputs) -> list[Any]:
    answers: list[Any] = _pooled["session"].run(None, inputs)
    return answers


async def one_call(report: Report, options: Options) -> None:
    """P9: `compute()` beside a burst and a process pool, small and large, and its system calls."""
    small: Lanes = {"compute()": [], "burst": [], "ProcessPoolExecutor": []}
    large: Lanes = {"compute()": [], "burst": []}
    calls: list[float] = []
    count, few = options.frames * CALLS_PER_FRAME, max(5, options.frames // 4)
    cpus = {options.cpus[1]} if options.cpus else os.sched_getaffinity(0)
    picture = {"input": np.ones(PICTURE, np.uint8)}
    loop = asyncio.get_running_loop()
    with TemporaryDirectory() as directory:
        subject = identity_subject(directory)
        for _ in range(options.rounds):
            context = multiprocessing.get_context("spawn")
            with ProcessPoolExecutor(1, context, initializer=_start_pooled, initargs=(str(subject.path), cpus)) as pool:
                async with compiled(options, subject.path.read_bytes()) as (compilation, pid):
                    small["compute()"].append(await timed(lambda made=compilation: made.compute(SMALL), count, pid))  # type: ignore[misc]
                    calls += await _system_calls(compilation, pid)
                    async with compilation.burst() as burst:
                        small["burst"].append(await timed(lambda burst=burst: burst.compute(SMALL), count, pid))  # type: ignore[misc]

                    async def pooled(pool: ProcessPoolExecutor = pool) -> object:
                        return await loop.run_in_executor(pool, _run_pooled, SMALL)

                    await pooled()
                    (worker,) = multiprocessing.active_children()
                    small["ProcessPoolExecutor"].append(await timed(pooled, count // 2, worker.pid))
            async with compiled(options, picture_model()) as (compilation, pid):
                large["compute()"].append(await timed(lambda made=compilation: made.compute(picture), few, pid))  # type: ignore[misc]
                async with compilation.burst() as burst:
                    large["burst"].append(await timed(lambda burst=burst: burst.compute(picture), few, pid))  # type: ignore[misc]
    report.show("identity 64 B without a pause", small)
    report.show("identity 6 MB without a pause", large)
    report.check("P9", "hot, p50: compute() / burst", ratios(small, "compute()", "burst"), 1.3)
    report.check("P9", "hot, p50: compute() / ProcessPoolExecutor", ratios(small, "compute()", "ProcessPoolExecutor"), 0.3)
    report.check("P9", "6 MB, p50: compute() / burst", ratios(large, "compute()", "burst"), 1.2)
    if calls:
        report.check("P9", "the driver's system calls per compute()", calls, 4.0)
    else:
        report.lacks("P9", "the driver's system calls are not measured, because strace is missing or may not attach")


async def _system_calls(compilation: aionn.Compilation, pid: int) -> list[float]:
    """Return the number of system calls of the driver per `compute()`, or nothing where they cannot be counted."""

    async def act() -> None:
        for _ in range(STRACED):
            await compilation.compute(SMALL)

    total = await system_calls(pid, act)
    return [] if total is None else [total / STRACED]


async def at_once(report: Report, options: Options) -> None:
    """P10: a thousand calls of `compute()` at once."""
    answered, burst_words, seconds, grown = [], [], [], []
    for _ in range(options.rounds):
        async with compiled(options, identity_model()) as (compilation, pid):
            before = shared_bytes(os.getpid(), pid)
            began = time.perf_counter()
            found = await asyncio.gather(*(compilation.compute(SMALL) for _ in range(AT_ONCE)), return_exceptions=True)
            seconds.append(time.perf_counter() - began)
            grown.append((shared_bytes(os.getpid(), pid) - before) / 2**20)
            errors = [str(each) for each in found if isinstance(each, BaseException)]
            answered.append((AT_ONCE - len(errors)) / AT_ONCE)
            burst_words.append(float(sum("burst" in error for error in errors)))
    report.note(f"{AT_ONCE} calls of compute() at once", {"seconds": seconds, "shared memory grew by MiB": grown}, "per round")
    report.check("P10", f"share of {AT_ONCE} calls at once that are answered", answered, 1.0, at_least=True)
    report.check("P10", "errors that talk of bursts", burst_words, 0.0)
