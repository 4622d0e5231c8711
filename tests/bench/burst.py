"""Bursts beside their rivals: `python -m tests.bench burst [--rounds N] [--trips N]`.

App and driver process are pinned to two CPUs; the engine is empty (`empty_engine`), so what is measured is the way there and
back. All lanes are run one after the other within each round, so that drift of the machine hits all alike. Unit: microseconds
per round trip; shown is the median over the rounds of each round's p50 and p99, and the best round's p50, which is what a
machine shared with others lets one compare. CPU: seconds of app and driver (or worker) together per 10,000 round trips, median of
the rounds; who looks without sleeping is seen there. Rivals echo the same bytes and are told as missing where not installed.

    hot            64 B by `burst.compute`, both ends awake when that pays
    asleep         the same with preference "low_power": both ends always sleep (compare with python: shm + eventfd + add_reader)
    frame 64 B     `burst.frame()`, filled in place
    frame 6 MB     the same with 1080p RGB; filled in place once, as a decoder does, so nothing is copied
    copied 6 MB    `burst.compute` of an array: one copy; beside it memcpy of as much
    rivals         to_thread, ProcessPoolExecutor, zmq.asyncio, grpc.aio, iceoryx2 (its listener has no descriptor: a thread waits
                   for it, see `rivals`), python (tests.bench.fmq's)
Then: requests per second with 8 in flight, the spread of 64 bursts on one driver, and Silero against its engine's own time.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import os
import statistics
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

import numpy as np
import uvloop

import aionn
from aionn.cli.bench import machine, machine_line
from aionn.testing.models import identity_model
from tests.bench.fmq import run_lane
from tests.bench.rivals import RIVALS, ROOT, cpu_seconds
from tests.real_models import carried

EMPTY = "tests.bench.empty_engine:EmptyEngine"
BIG = (1, 1080, 1920, 3)
SMALL = {"input": np.zeros((1, 16), np.float32)}
PAYLOAD = bytes(64)
Lane = dict[str, list[tuple[float, float, float]]]


async def trips(lane: Lane, name: str, trip: Callable[[], Awaitable[object]], count: int) -> None:
    """One round of one lane."""
    for _ in range(max(20, count // 10)):
        await trip()
    taken = []
    before_s = cpu_seconds()
    for _ in range(count):
        began = time.perf_counter_ns()
        await trip()
        taken.append(time.perf_counter_ns() - began)
    note(lane, name, taken, cpu_seconds() - before_s)


def note(lane: Lane, name: str, taken: list[int], cpu_s: float = math.nan) -> None:
    """`cpu_s`: of all processes, in all trips together."""
    cuts = statistics.quantiles(taken, n=100)
    lane.setdefault(name, []).append((cuts[49] / 1e3, cuts[98] / 1e3, cpu_s / len(taken) * 10_000))


def pin_driver(runtime: aionn.Runtime, name: str, cpu: int) -> None:
    pid = next(device.pid for device in runtime.devices if device.name == name)
    for task in os.listdir(f"/proc/{pid}/task"):
        os.sched_setaffinity(int(task), {cpu})


async def ours(stack: AsyncExitStack, runtime: aionn.Runtime, cpu: int) -> dict[str, tuple[Callable[[], Awaitable[object]], int]]:
    """Our lanes: what to await, and by how much fewer trips than the small ones."""
    small, big = aionn.Model.from_onnx(identity_model()), aionn.Model.from_onnx(identity_model({"input": BIG}, np.uint8))
    compiled = await runtime.compile(small, devices=(EMPTY,))
    pin_driver(runtime, EMPTY, cpu)
    hot = await stack.enter_async_context(compiled.burst())
    tired = await runtime.compile(small, devices=(EMPTY,), preference="low_power")
    asleep = await stack.enter_async_context(tired.burst())
    large = await stack.enter_async_context((await runtime.compile(big, devices=(EMPTY,))).burst())
    small_frame = await stack.enter_async_context(hot.frame())
    large_frame = await stack.enter_async_context(large.frame())
    large_frame["input"][:] = 1
    picture = {"input": np.ones(BIG, np.uint8)}
    into = np.zeros(BIG, np.uint8)

    async def memcpy() -> None:
        into[...] = picture["input"]

    return {
        "hot": (lambda: hot.compute(SMALL), 1),
        "asleep": (lambda: asleep.compute(SMALL), 2),
        "frame 64 B": (lambda: hot.compute(small_frame), 1),
        "frame 6 MB": (lambda: large.compute(large_frame), 1),
        "copied 6 MB": (lambda: large.compute(picture), 20),
        "memcpy 6 MB": (memcpy, 20),
    }


async def against_rivals(lane: Lane, count: int, cpu: int, missing: dict[str, str]) -> None:
    for name, rival in RIVALS.items():
        if name in missing:
            continue
        try:
            async with rival(cpu) as trip:
                await trips(lane, name, lambda trip=trip: trip(PAYLOAD), max(100, count // 5))  # type: ignore[misc]
        except ImportError as error:
            missing[name] = str(error)


async def throughput(runtime: aionn.Runtime, count: int) -> float:
    """Requests per second with 8 in flight."""
    compiled = await runtime.compile(aionn.Model.from_onnx(identity_model()), devices=(EMPTY,))

    async def caller(burst: aionn.Burst) -> None:
        for _ in range(count // 8):
            await burst.compute(SMALL)

    async with compiled.burst() as burst:
        await caller(burst)
        began = time.perf_counter()
        await asyncio.gather(*(caller(burst) for _ in range(8)))
        return count // 8 * 8 / (time.perf_counter() - began)


async def fairness(runtime: aionn.Runtime, bursts: int, seconds: float) -> tuple[int, int]:
    """Requests of the slowest and of the fastest of so many bursts on one driver, each with one in flight."""
    compiled = await runtime.compile(aionn.Model.from_onnx(identity_model()), devices=(EMPTY,))
    done = [0] * bursts
    async with AsyncExitStack() as stack:
        opened = [await stack.enter_async_context(compiled.burst()) for _ in range(bursts)]
        ends = time.monotonic() + seconds

        async def caller(index: int) -> None:
            while time.monotonic() < ends:
                await opened[index].compute(SMALL)
                done[index] += 1

        await asyncio.gather(*(caller(index) for index in range(bursts)))
    return min(done), max(done)


async def silero(lane: Lane, runtime: aionn.Runtime, count: int, cpu: int) -> None:
    """The real model: a burst's round trip beside the time the driver was busy with it."""
    inputs = {"input": np.zeros((1, 576), np.float32), "state": np.zeros((2, 1, 128), np.float32)}
    compiled = await runtime.compile(aionn.Model.from_onnx(carried("silero")), devices=("onnxruntime",))
    pin_driver(runtime, "onnxruntime", cpu)
    async with compiled.burst() as burst:
        for _ in range(50):
            await burst.compute(inputs)
        trip, busy, before_s = [], [], cpu_seconds()
        for _ in range(count):
            before, began = burst.statistics()["driver_busy_ns"], time.perf_counter_ns()
            await burst.compute(inputs)
            trip.append(time.perf_counter_ns() - began)
            busy.append(burst.statistics()["driver_busy_ns"] - before)
        note(lane, "silero", trip, cpu_seconds() - before_s)
        note(lane, "silero engine", busy)


async def measure(lane: Lane, options: argparse.Namespace, cpus: tuple[int, int]) -> None:
    missing: dict[str, str] = {}
    rates, spreads = [], []
    for _ in range(options.rounds):
        async with aionn.Runtime() as runtime, AsyncExitStack() as stack:
            for name, (trip, fewer) in (await ours(stack, runtime, cpus[1])).items():
                await trips(lane, name, trip, max(50, options.trips // fewer))
        async with aionn.Runtime() as runtime:
            compiled = await runtime.compile(aionn.Model.from_onnx(identity_model()), devices=(EMPTY,))
            pin_driver(runtime, EMPTY, cpus[1])
            rates.append(await throughput(runtime, options.trips * 4))
            spreads.append(await fairness(runtime, 64, 1.0))
            await compiled.aclose()
            await silero(lane, runtime, max(100, options.trips // 10), cpus[1])
        await against_rivals(lane, options.trips, cpus[1], missing)
    show(lane, missing)
    print(f"8 in flight: {statistics.median(rates):,.0f} requests/s, best round {max(rates):,.0f}")
    slow, fast = min(spreads, key=lambda spread: spread[1] / max(1, spread[0]))
    ratios = [fast / max(1, slow) for slow, fast in spreads]
    print(f"64 bursts on one driver: fastest/slowest {statistics.median(ratios):.2f} (median), best round {fast}/{slow} in 1 s")


def show(lane: Lane, missing: dict[str, str]) -> None:
    hot = statistics.median(p50 for p50, _, _ in lane["hot"])
    best_hot = min(p50 for p50, _, _ in lane["hot"])
    print(f"{'':22}{'p50 us':>10}{'p99 us':>10}{'best p50':>10}{'p50 / hot':>11}{'best / hot':>11}{'CPU s/10k':>11}")
    for name, rounds in lane.items():
        p50, p99, cpu_s = (statistics.median(column) for column in zip(*rounds, strict=True))
        best = min(p50 for p50, _, _ in rounds)
        cpu = "" if math.isnan(cpu_s) else f"{cpu_s:11.3f}"
        print(f"{name:22}{p50:10.1f}{p99:10.1f}{best:10.1f}{p50 / hot:11.2f}{best / best_hot:11.2f}{cpu}")
    for name, why in missing.items():
        print(f"{name:22} not measured: {why}")


def main(argv: list[str]) -> None:
    """Measure and print. See the module's docstring."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench burst")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--trips", type=int, default=5000, help="round trips per small lane and round")
    options = parser.parse_args(argv)
    usable = sorted(os.sched_getaffinity(0))
    cpus = (usable[0], usable[-1])
    print(machine_line(machine()))
    print(f"app on CPU {cpus[0]}, driver on CPU {cpus[1]}, empty engine; {options.rounds} rounds of {options.trips} trips")
    os.environ["PYTHONPATH"] = str(ROOT)  # where the driver finds the empty engine
    os.sched_setaffinity(0, {cpus[0]})
    python: list[Any] = [run_lane("python", "uvloop", list(cpus), max(500, options.trips // 5)) for _ in range(options.rounds)]
    lane: Lane = {}
    for taken, cpu_s in python:
        note(lane, "python shm+eventfd", taken, cpu_s)
    uvloop.run(measure(lane, options, cpus))
