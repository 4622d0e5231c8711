"""Many streams. Rows P7 and P8 of `tests.bench.real`: bursts that each have a state, and what a burst holds."""

from __future__ import annotations

import asyncio
import os
import time
from contextlib import AsyncExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import aionn
from tests.bench.machine import descriptors, shared_bytes
from tests.bench.real_hot import driver_pid
from tests.bench.real_report import NotAvailableError, Options, Report
from tests.bench.real_rivals import placed
from tests.bench.real_subjects import (
    Subject,
    detector_subject,
    identity_subject,
    silero_subject,
)
from tests.bench.real_worker import session_of

STREAMS = (1, 4, 16, 64)
OPENED = 10
DEPTHS = (1, 2, 8)
HELD = 4
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


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
            with placed(runtime, "onnxruntime", options.cpus):
                done = {count: [0] * count for count in STREAMS}
                for count in (*STREAMS, *reversed(STREAMS)):  # so that drift of the machine hits all alike
                    again = await _streams(compilation, subject, count, seconds)
                    done[count] = [before + now for before, now in zip(done[count], again, strict=True)]
            for count, each in done.items():
                rates[f"{count} bursts"].append(sum(each) / seconds / 2)
                if count > 1:
                    fairness[f"{count} bursts"].append(min(each) / max(1, max(each)))
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
    holding: list[float] = []
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
                    if depth == DEPTHS[-1]:
                        holding.append(await _held_bytes(large, driver_pid(runtime), subject, depth, HELD) / frame)
                    await large.aclose()
    report.note(
        "a burst of the identity model", {**{f"descriptors, {end}": each for end, each in found.items()}, "opening, ms": opening}, "each"
    )
    for end, each in found.items():
        report.check("P8", f"descriptors per burst, {end}", each, 5.0)
    report.check("P8", "opening a burst, ms", opening, 1.0)
    for depth, held in memory.items():
        report.check("P8", f"memory of a {subject.name} burst of depth {depth}, in true frames", held, depth + 1.0)
    report.check("P8", f"the same at depth {DEPTHS[-1]} with {HELD} outputs held", holding, DEPTHS[-1] + 1.0 + HELD)


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


async def _held_bytes(compilation: aionn.Compilation, pid: int, subject: Subject, depth: int, held: int = 0) -> int:
    """Return the shared memory of a burst after `depth` requests in flight, twice, while so many further answers are held."""
    before = shared_bytes(os.getpid(), pid)
    async with compilation.burst(depth=depth) as burst:
        for _ in range(2):
            await asyncio.gather(*(burst.compute(subject.inputs[0]) for _ in range(depth)))
        kept = [await burst.compute(subject.inputs[0]) for _ in range(held)]
        size = shared_bytes(os.getpid(), pid) - before
        kept.clear()
        return size
