"""What the sandbox costs: `python -m tests.bench sandbox [--rounds 20] [--frames 300] [--engines NAME...]`.

Confined drivers (sandbox="auto") and free ones (sandbox="off") take turns, and the first of a round is the second of the next one. A ratio
or a difference is taken within a round. Shown are medians over the rounds, with the range of the differences. Row A4: at most 5 ms per
start, and a p50 per frame within 2 %.

    confining  ms that a fresh process takes to import `aionn.sandbox` and to confine itself: wall clock and CPU time, and the least of
               each. What a driver without a sandbox imports as well (ctypes, dataclasses, glob) is imported before
    greeted    ms from the start of the driver process until it said that it may be called
    CPU        ms of CPU time of such a process, all its threads, from its start to its end; it compiles one node
    frame      us per frame of silero in a burst, the p50 of a round's frames; both drivers live through all rounds
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack

import aionn
from aionn import trace
from aionn.cli.bench import machine, machine_line
from aionn.testing import identity_model
from tests.bench.driver import children_s
from tests.real_models import carried, some_input

LEVELS = ("auto", "off")
ENGINES = ("onnxruntime", "openvino", "reference")
FRAME_ENGINES = ("onnxruntime", "openvino")

CONFINING = """
import ctypes, dataclasses, glob, resource, socket, time
import aionn, aionn.errors
wall, cpu = time.perf_counter(), time.process_time()
from aionn.sandbox.confining import confine
from aionn.needs import Needs
found = confine("auto", Needs())
print((time.perf_counter() - wall) * 1e3, (time.process_time() - cpu) * 1e3, len(found.holds))
"""

Pairs = dict[str, list[float]]
"""By level: one figure per round."""


def turns(number: int) -> Sequence[str]:
    return LEVELS if number % 2 else LEVELS[::-1]


async def started(engine: str, level: str) -> tuple[float, float]:
    """Return the milliseconds until the driver greeted, and those of its CPU time."""
    before_s = children_s()
    async with aionn.Runtime(sandbox=level, start=()) as runtime:
        with trace.record() as recorded:
            await runtime.compile(aionn.Model.from_onnx(identity_model()), devices=(engine,))
        (span,) = [span for span in recorded.spans if span.name == "driver.start"]
    return span.duration_ns / 1e6, (children_s() - before_s) * 1e3


async def starts(engine: str, rounds: int) -> dict[str, Pairs]:
    found: dict[str, Pairs] = {what: {level: [] for level in LEVELS} for what in ("greeted", "CPU")}
    for level in LEVELS:
        await started(engine, level)
    for number in range(rounds):
        for level in turns(number):
            greeted, cpu = await started(engine, level)
            found["greeted"][level].append(greeted)
            found["CPU"][level].append(cpu)
    return found


async def frames(engine: str, rounds: int, count: int) -> Pairs:
    found: Pairs = {level: [] for level in LEVELS}
    model = aionn.Model.from_onnx(carried("silero"))
    inputs = {name: some_input(operand) for name, operand in model.inputs.items()}
    async with AsyncExitStack() as stack:
        bursts = {}
        for level in LEVELS:
            runtime = await stack.enter_async_context(aionn.Runtime(sandbox=level))
            compilation = await runtime.compile(model, devices=(engine,), threads=1)
            bursts[level] = await stack.enter_async_context(compilation.burst())
        for number in range(rounds + 1):
            for level in turns(number):
                taken = []
                for _ in range(count):
                    began = time.perf_counter_ns()
                    await bursts[level].compute(inputs)
                    taken.append(time.perf_counter_ns() - began)
                if number:  # the first round warms up
                    found[level].append(statistics.median(taken) / 1e3)
    return found


def confining(rounds: int) -> str:
    taken = []
    for _ in range(rounds + 1):
        printed = subprocess.run([sys.executable, "-P", "-c", CONFINING], capture_output=True, text=True, check=True).stdout
        taken.append([float(word) for word in printed.split()])
    walls, cpus, _ = zip(*taken[1:], strict=True)
    medians = f"{statistics.median(walls):.1f} ms, CPU {statistics.median(cpus):.1f} ms"
    return f"  confining {medians}   the least: {min(walls):.1f} ms, CPU {min(cpus):.1f} ms"


def line(what: str, pairs: Pairs, unit: str) -> str:
    differences = [confined - free for confined, free in zip(pairs["auto"], pairs["off"], strict=True)]
    ratios = [confined / free for confined, free in zip(pairs["auto"], pairs["off"], strict=True)]
    auto, off = (statistics.median(pairs[level]) for level in LEVELS)
    low, _, high = statistics.quantiles(differences, n=4) if len(differences) > 1 else differences * 3
    return (
        f"  {what:<9}{auto:9.1f}{off:9.1f} {unit}   difference {statistics.median(differences):7.2f}"
        f" (half of them {low:.2f} to {high:.2f})   ratio {statistics.median(ratios):.3f}"
    )


async def run(engines: Sequence[str], rounds: int, count: int) -> None:
    print(machine_line(machine()))
    print(f"a process, {rounds} rounds\n{confining(rounds)}", flush=True)
    for engine in engines:
        print(f"{engine}, {rounds} rounds: confined, free")
        for what, pairs in (await starts(engine, rounds)).items():
            print(line(what, pairs, "ms"), flush=True)
        if engine in FRAME_ENGINES:
            print(line("frame", await frames(engine, rounds, count), "us"), flush=True)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench sandbox", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--frames", type=int, default=300)
    parser.add_argument("--engines", nargs="+", default=list(ENGINES))
    options = parser.parse_args(arguments)
    if sys.dont_write_bytecode:
        print("Python keeps no bytecode here (PYTHONDONTWRITEBYTECODE): each driver compiles its sources anew")
    aionn.run(run, options.engines, options.rounds, options.frames)
    return 0
