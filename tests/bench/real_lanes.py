"""Runs beside each other over one copy of the weights. Rows P16 and P17 of `tests.bench.real`: two streams, a batch of pictures.

`threads` and `instances` are options of `Runtime.compile`. Where this release lacks them, the rows say so. All contenders of a round
are open at once and take turns.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from typing import Any

import aionn
from tests.bench.machine import memory_bytes
from tests.bench.real_hot import driver_pid
from tests.bench.real_many import compile_with
from tests.bench.real_paced import SEGMENTS
from tests.bench.real_report import NotAvailableError, Options, Report
from tests.bench.real_subjects import CPUS, Subject, classifier_subject, orientation_subject
from tests.bench.real_worker import session_of

POOLS = ((1, CPUS), (CPUS, 1), (CPUS, CPUS))
"""Sessions and threads of each, of the pools that a batch job could use."""

ONE, TWO = {"threads": 2, "instances": 1}, {"threads": 1, "instances": 2}
PRIVATE = ("Private_Clean", "Private_Dirty")

Turn = Callable[[], Awaitable[tuple[int, float]]]
"""Returns rows and seconds."""


def named(lanes: Mapping[str, int]) -> str:
    return ", ".join(f"{name}={number}" for name, number in lanes.items()) or "default"


async def in_turns(turns: Mapping[str, Turn]) -> dict[str, float]:
    """Return the rows per second of each contender, over all its turns. The first turn of each does not count."""
    rows, seconds = dict.fromkeys(turns, 0), dict.fromkeys(turns, 0.0)
    names = list(turns)
    for turn in turns.values():
        await turn()
    for number in range(SEGMENTS):
        for name in names[number:] + names[:number]:
            done, took_s = await turns[name]()
            rows[name] += done
            seconds[name] += took_s
    return {name: rows[name] / seconds[name] for name in names}


# ---- P16: two streams ------------------------------------------------------------------------------------------------------------


async def instances(report: Report, options: Options) -> None:
    """P16: two streams, one execution with two threads at a time or two executions with one thread each."""
    for subject in (orientation_subject(), classifier_subject()):
        rates: dict[str, list[float]] = {}
        grown, second = [], []
        for _ in range(options.rounds):
            async with AsyncExitStack() as stack:
                turns, pids = {}, {}
                for lanes in ({}, ONE, TWO):
                    try:
                        runtime = await stack.enter_async_context(aionn.Runtime())
                        compilation = await compile_with(runtime, subject.path, **lanes)
                    except NotAvailableError as error:
                        report.lacks("P16", str(error))
                        continue
                    bursts = [await stack.enter_async_context(compilation.burst()) for _ in range(2)]
                    turns[named(lanes)] = _streams_turn(bursts, subject, options.frames / 75 / SEGMENTS)
                    pids[named(lanes)] = driver_pid(runtime)
                for name, rate in (await in_turns(turns)).items():
                    rates.setdefault(name, []).append(rate)
                if named(TWO) in pids:
                    grown.append((memory_bytes(pids[named(TWO)], *PRIVATE) - memory_bytes(pids[named(ONE)], *PRIVATE)) / 2**20)
                    second.append(_second_session_bytes(subject) / 2**20)
        report.note(f"{subject.name}, two streams", rates, "rows/s")
        if grown:
            gains = [two / one for one, two in zip(rates[named(ONE)], rates[named(TWO)], strict=True)]
            report.check("P16", f"{subject.name}, rows/s: {named(TWO)} / {named(ONE)}", gains, 1.25, at_least=True)
            report.note(f"{subject.name}, private memory", {"of the second instance": grown, "of a second session": second}, "MiB")
            costs = [ours / theirs for ours, theirs in zip(grown, second, strict=True)]
            report.check("P16", f"{subject.name}, private memory: second instance / second session", costs, 1.0)


def _streams_turn(bursts: list[aionn.Burst], subject: Subject, seconds: float) -> Turn:
    async def turn() -> tuple[int, float]:
        done = 0
        began = time.monotonic()

        async def caller(burst: aionn.Burst) -> None:
            nonlocal done
            while time.monotonic() < began + seconds:
                await burst.compute(subject.inputs[done % len(subject.inputs)])
                done += 1

        async with asyncio.TaskGroup() as group:
            for burst in bursts:
                group.create_task(caller(burst))
        return done, time.monotonic() - began

    return turn


def _second_session_bytes(subject: Subject) -> int:
    """Return what a second session of the model costs this process. A first one is open already."""
    first = session_of(str(subject.path), 1)
    first.run(None, subject.inputs[0])
    before = memory_bytes(os.getpid(), *PRIVATE)
    second = session_of(str(subject.path), 1)
    second.run(None, subject.inputs[0])
    return max(1, memory_bytes(os.getpid(), *PRIVATE) - before)


# ---- P17: a batch of pictures ----------------------------------------------------------------------------------------------------


async def batch(report: Report, options: Options) -> None:
    """P17: pictures through `burst.map`, beside the best pool of ONNX Runtime sessions."""
    subject, count = orientation_subject(), -(-options.frames * 2 // SEGMENTS)
    rates: dict[str, list[float]] = {}
    for _ in range(options.rounds):
        async with AsyncExitStack() as stack:
            turns = {}
            for sessions, threads in POOLS:
                pool = stack.enter_context(ThreadPoolExecutor(sessions))
                turns[f"pool of {sessions} x {threads}"] = _pool_turn(pool, subject, count, sessions, threads)
            for lanes in ({}, TWO):
                try:
                    runtime = await stack.enter_async_context(aionn.Runtime())
                    compilation = await compile_with(runtime, subject.path, **lanes)
                except NotAvailableError as error:
                    report.lacks("P17", str(error))
                    continue
                turns[f"aionn, {named(lanes)}"] = _map_turn(await stack.enter_async_context(compilation.burst()), subject, count)
            for name, rate in (await in_turns(turns)).items():
                rates.setdefault(name, []).append(rate)
    report.note(f"{count} pictures at a time through {subject.name}", rates, "pictures/s")
    best = {
        kind: [max(each) for each in zip(*(rates[name] for name in rates if name.startswith(kind)), strict=True)]
        for kind in ("aionn", "pool")
    }
    shares = [ours / theirs for ours, theirs in zip(best["aionn"], best["pool"], strict=True)]
    report.check("P17", "pictures/s: best burst.map / best pool", shares, 0.95, at_least=True)


def _pool_turn(pool: ThreadPoolExecutor, subject: Subject, count: int, sessions: int, threads: int) -> Turn:
    made = [session_of(str(subject.path), threads) for _ in range(sessions)]
    names = [output.name for output in made[0].get_outputs()]

    def run(number: int) -> Any:
        return made[number % sessions].run(names, subject.inputs[number % len(subject.inputs)])

    def run_all() -> tuple[int, float]:
        began = time.monotonic()
        list(pool.map(run, range(count)))
        return count, time.monotonic() - began

    async def turn() -> tuple[int, float]:
        return await asyncio.to_thread(run_all)

    return turn


def _map_turn(burst: aionn.Burst, subject: Subject, count: int) -> Turn:
    pictures = [subject.inputs[index % len(subject.inputs)] for index in range(count)]

    async def turn() -> tuple[int, float]:
        began, answered = time.monotonic(), 0
        async for _ in burst.map(pictures, depth=8):
            answered += 1
        if answered != count:
            raise AssertionError(f"{answered} of {count} pictures were answered")
        return count, time.monotonic() - began

    return turn
