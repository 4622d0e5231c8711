"""A chain of two models on two drivers: by fences (`Compilation.start`) against through the app's loop (`compute` after `compute`).

    python -m tests.bench chain [--rounds 9] [--frames 30]

The first model prepares a picture (uint8 320x320 to float 160x160) on the reference device, the second finds text on it (PP-OCR det) on
ONNX Runtime. Both ways run in the same process, in turn, round by round. Times are milliseconds per frame, medians over the rounds.

    idle     the app does nothing else
    busy     another task of the app holds the loop for 10 ms, again and again, as a careless decoder does
    batch    idle, and 8 frames are started before the first is awaited
"""

from __future__ import annotations

import argparse
import asyncio
import platform
import statistics
import time
from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import numpy as np

import aionn
from tests.chains import PICTURE, TENSOR, TENSOR_BYTES, detector, pictures, preprocessing

BATCH = 8
HELD_S = 0.010


class Chain:
    """Both models, and both ways to run them."""

    def __init__(self, first: aionn.Compilation, second: aionn.Compilation) -> None:
        self.first, self.second = first, second
        self.pictures = [aionn.Memory.allocate(int(np.prod(PICTURE))) for _ in range(BATCH)]
        self.tensors = [aionn.Memory.allocate(TENSOR_BYTES).shaped(TENSOR) for _ in range(BATCH)]
        for memory, picture in zip(self.pictures, pictures(BATCH), strict=True):
            memory.array(np.uint8, PICTURE)[:] = picture

    def start(self, number: int) -> aionn.Event:
        picture, tensor = self.pictures[number % BATCH], self.tensors[number % BATCH]
        event = self.first.start({"picture": picture}, outputs={"tensor": tensor})
        return self.second.start({"x": tensor}, after=(event,))

    async def fences(self, number: int) -> None:
        await self.start(number)

    async def loop(self, number: int) -> None:
        picture, tensor = self.pictures[number % BATCH], self.tensors[number % BATCH]
        await self.first.compute({"picture": picture}, outputs={"tensor": tensor})
        await self.second.compute({"x": tensor})

    async def fences_batch(self, number: int) -> None:
        for event in [self.start(index) for index in range(BATCH)]:
            await event

    async def loop_batch(self, number: int) -> None:
        async with anyio.create_task_group() as tasks:
            for index in range(BATCH):
                tasks.start_soon(self.loop, index)


async def hold_the_loop() -> None:
    """Hold the loop for 10 ms, then let it turn once."""
    while True:
        until = time.perf_counter() + HELD_S
        while time.perf_counter() < until:
            pass
        await asyncio.sleep(0)


async def timed(way: Callable[[int], Awaitable[None]], frames: int, per_call: int, *, busy: bool) -> float:
    """Return the median of milliseconds per frame."""
    found = []
    async with anyio.create_task_group() as tasks:
        if busy:
            tasks.start_soon(hold_the_loop)
        for number in range(frames // per_call):
            began = time.perf_counter()
            await way(number)
            found.append((time.perf_counter() - began) * 1e3 / per_call)
        tasks.cancel_scope.cancel()
    return statistics.median(found)


async def measure(rounds: int, frames: int) -> dict[str, dict[str, float]]:
    async with aionn.Runtime() as runtime:
        first = await runtime.compile(preprocessing(), devices=("reference",))
        second = await runtime.compile(detector(), devices=("onnxruntime",))
        chain = Chain(first, second)
        cases: dict[str, tuple[Any, Any, int, bool]] = {
            "idle": (chain.fences, chain.loop, 1, False),
            "busy": (chain.fences, chain.loop, 1, True),
            "batch": (chain.fences_batch, chain.loop_batch, BATCH, False),
        }
        times: dict[str, dict[str, list[float]]] = {case: {"fences": [], "loop": []} for case in cases}
        for turn in range(rounds + 1):
            for case, (by_fences, by_loop, per_call, busy) in cases.items():
                ways = [("fences", by_fences), ("loop", by_loop)]
                for name, way in ways if turn % 2 else reversed(ways):
                    found = await timed(way, frames, per_call, busy=busy)
                    if turn:  # the first round warms up
                        times[case][name].append(found)
        return {case: {name: statistics.median(found) for name, found in ways.items()} for case, ways in times.items()}


def main(argv: list[str]) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench chain")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--frames", type=int, default=30)
    options = parser.parse_args(argv)
    print(f"{platform.processor() or platform.machine()}, Python {platform.python_version()}; ms per frame, medians of {options.rounds}")
    print(f"{'':8}{'fences':>10}{'loop':>10}{'ratio':>8}")
    for case, ways in aionn.run(measure, options.rounds, options.frames).items():
        print(f"{case:8}{ways['fences']:10.2f}{ways['loop']:10.2f}{ways['fences'] / ways['loop']:8.2f}")
