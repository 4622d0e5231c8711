"""A camera at 30 fps, a preprocessing model on one driver and a detector on another: as a fenced chain, and by hand through the app's loop.

Frames, latency and copied bytes are counted beside each other. What is asserted holds on any machine: every frame arrives, both ways
agree to the bit, and no byte of the chain is copied by the app.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import anyio
import numpy as np
import pytest

import aionn
from aionn.pages.app_layout import COPIED_BYTES
from aionn.runtime.compilation import parts_of
from tests.chains import PICTURE, TENSOR, TENSOR_BYTES, detector, pictures, preprocessing
from tests.leaks import leak_check

pytestmark = pytest.mark.anyio

FPS = 30
FRAMES = 24
IN_FLIGHT = 3
PICTURE_BYTES = int(np.prod(PICTURE))


def copied_bytes(*compilations: aionn.Compilation) -> int:
    """The bytes that the app has copied for these compilations."""
    found = 0
    for compilation in compilations:
        parts = parts_of(compilation)
        executors = [burst.executor for burst in parts.bursts] + [parts.starts.executor]
        found += sum(executor.counts.get(COPIED_BYTES) for executor in executors)
    return found


async def paced(frames: list[Any]) -> Any:
    """Yield each frame when it is due, with the moment at which it was due."""
    began = time.perf_counter()
    for number, frame in enumerate(frames):
        due = began + number / FPS
        await anyio.sleep(max(0.0, due - time.perf_counter()))
        yield number, frame, due


async def by_fences(first: aionn.Compilation, second: aionn.Compilation, frames: list[Any]) -> tuple[list[Any], list[float]]:
    found: dict[int, Any] = {}
    latencies: list[float] = []
    rooms = anyio.Semaphore(IN_FLIGHT)

    async def take(number: int, event: aionn.Event, due: float) -> None:
        (map_,) = (await event).values()
        latencies.append(time.perf_counter() - due)
        found[number] = map_.copy()
        rooms.release()

    cameras = [aionn.Memory.allocate(PICTURE_BYTES) for _ in range(IN_FLIGHT)]
    between = [aionn.Memory.allocate(TENSOR_BYTES).shaped(TENSOR) for _ in range(IN_FLIGHT)]
    async with anyio.create_task_group() as tasks:
        async for number, frame, due in paced(frames):
            await rooms.acquire()
            camera, tensor = cameras[number % IN_FLIGHT], between[number % IN_FLIGHT]
            camera.array(np.uint8, PICTURE)[:] = frame  # the camera writes into shared memory
            event = first.start({"picture": camera}, outputs={"tensor": tensor})
            tasks.start_soon(take, number, second.start({"x": tensor}, after=(event,)), due)
    for memory in (*cameras, *between):
        memory.close()
    return [found[number] for number in range(len(frames))], latencies


async def by_hand(first: aionn.Compilation, second: aionn.Compilation, frames: list[Any]) -> tuple[list[Any], list[float]]:
    found, latencies = [], []
    async for _, frame, due in paced(frames):
        tensor = (await first.compute({"picture": frame}))["tensor"]
        (map_,) = (await second.compute({"x": tensor})).values()
        latencies.append(time.perf_counter() - due)
        found.append(map_)
    return found, latencies


async def test_a_chain_at_30_fps_copies_nothing_and_gives_what_it_gives_by_hand(record_property: Any) -> None:
    async with leak_check():
        await the_journey(record_property)


async def the_journey(record_property: Any) -> None:
    frames = pictures(FRAMES)
    async with aionn.Runtime() as runtime:
        first = await runtime.compile(preprocessing(), devices=("reference",))
        second = await runtime.compile(detector(), devices=("onnxruntime",))
        await by_fences(first, second, frames[:2])  # the room for the detector's output is known now
        before = copied_bytes(first, second)
        chained, chained_s = await by_fences(first, second, frames)
        copied_by_chain = copied_bytes(first, second) - before
        before = copied_bytes(first, second)
        stepped, stepped_s = await by_hand(first, second, frames)
        copied_by_hand = copied_bytes(first, second) - before
        assert len(chained) == len(stepped) == FRAMES
        for ours, theirs in zip(chained, stepped, strict=True):
            np.testing.assert_array_equal(ours, theirs)
        assert copied_by_chain == 0
        assert copied_by_hand >= FRAMES * (PICTURE_BYTES + TENSOR_BYTES)
        record_property("chain_ms", statistics.median(chained_s) * 1e3)
        record_property("hand_ms", statistics.median(stepped_s) * 1e3)
        record_property("copied_per_frame", (copied_by_chain // FRAMES, copied_by_hand // FRAMES))
        print(
            f"\nchain: {FRAMES} frames, {statistics.median(chained_s) * 1e3:.1f} ms, {copied_by_chain // FRAMES} bytes copied per frame;"
            f" by hand: {statistics.median(stepped_s) * 1e3:.1f} ms, {copied_by_hand // FRAMES} bytes"
        )
