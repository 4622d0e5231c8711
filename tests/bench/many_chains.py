"""Chains of two models. Rows N8 and N9 of `tests.bench.many`: by `start(after=)`, and by one `compute` after the other.

Both ways take turns over the same compilations. What lies between the models is an `aionn.Memory` in both.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Any

import anyio
import numpy as np

import aionn
from aionn.testing.models import identity_model
from tests.bench.chain import hold_the_loop
from tests.bench.machine import process_cpu_ns
from tests.bench.real_paced import SEGMENTS
from tests.bench.real_report import Lanes, Options, Report, Taken, ratios
from tests.chains import PICTURE, TENSOR, detector, pictures, preprocessing

TINY = (1, 16)
TINY_FRAMES = 4
"""Chains of two tiny models for each frame of the option `--frames`."""

WARMING = 5


class Chain:
    """Two compilations in a row, and what each way took in all segments of a round."""

    def __init__(self, pair: Sequence[aionn.Compilation], inputs: dict[str, Any], between: tuple[str, str], shape: tuple[int, ...]) -> None:
        self.first, self.second = pair
        self.inputs = inputs
        self.made, self.taken_by = between
        self.memory = aionn.Memory.allocate(int(np.prod(shape)) * 4).shaped(shape)
        self.restart()

    def restart(self) -> None:
        """Forget what the ways took."""
        self.taken_ns: dict[str, list[int]] = {"start": [], "compute": []}
        self.cpu_ns = {"start": 0, "compute": 0}

    async def start(self) -> None:
        event = self.first.start(self.inputs, outputs={self.made: self.memory})
        await self.second.start({self.taken_by: self.memory}, after=(event,))

    async def compute(self) -> None:
        await self.first.compute(self.inputs, outputs={self.made: self.memory})
        await self.second.compute({self.taken_by: self.memory})

    async def segment(self, way: str, count: int, pids: Sequence[int], *, busy: bool = False) -> None:
        run = getattr(self, way)
        async with anyio.create_task_group() as tasks:
            if busy:
                tasks.start_soon(hold_the_loop)
            for number in range(-WARMING, count):
                if number == 0:
                    before = [process_cpu_ns(pid) for pid in pids]
                began_ns = time.monotonic_ns()
                await run()
                if number >= 0:
                    self.taken_ns[way].append(time.monotonic_ns() - began_ns)
            self.cpu_ns[way] += sum(process_cpu_ns(pid) - earlier for pid, earlier in zip(pids, before, strict=True))
            tasks.cancel_scope.cancel()


async def in_turn(chain: Chain, found: Lanes, runtime: aionn.Runtime, count: int, *, busy: bool = False) -> None:
    """Measure both ways in turn, and add one round of each."""
    pids = [os.getpid(), *(device.pid for device in runtime.devices if device.pid is not None)]
    chain.restart()
    for turn in range(SEGMENTS):
        for way in ("start", "compute") if turn % 2 else ("compute", "start"):
            await chain.segment(way, -(-count // SEGMENTS), pids, busy=busy)
    for way, taken_ns in chain.taken_ns.items():
        found.setdefault(way, []).append(Taken.of(taken_ns, chain.cpu_ns[way]))


async def tiny(report: Report, options: Options) -> None:
    """N8: two models that do nothing, both by one driver, or by two of them."""
    places = {"one driver": ("onnxruntime", "onnxruntime"), "two drivers": ("onnxruntime", "reference")}
    found: dict[str, Lanes] = {where: {} for where in places}
    for _ in range(options.rounds):
        for where, devices in places.items():
            async with aionn.Runtime() as runtime, AsyncExitStack() as stack:
                models = [aionn.Model.from_onnx(identity_model({name: TINY})) for name in ("x", "y")]
                pair = [
                    await stack.enter_async_context(await runtime.compile(model, devices=(device,)))
                    for model, device in zip(models, devices, strict=True)
                ]
                chain = Chain(pair, {"x": np.ones(TINY, np.float32)}, ("x_out", "y"), TINY)
                await in_turn(chain, found[where], runtime, options.frames * TINY_FRAMES)
    for (where, lanes), bound in zip(found.items(), (0.6, 1.0), strict=True):
        report.show(f"two tiny models, {where}; all CPU under app", lanes)
        report.check("N8", f"{where}, p50: start(after=) / two compute", ratios(lanes, "start", "compute"), bound)


async def detection(report: Report, options: Options) -> None:
    """N9: a picture is prepared and searched for text by one driver, while the app's loop is idle, then while it is busy."""
    found: dict[str, Lanes] = {"idle loop": {}, "busy loop": {}}
    for _ in range(options.rounds):
        async with aionn.Runtime() as runtime, AsyncExitStack() as stack:
            pair = [
                await stack.enter_async_context(await runtime.compile(model, devices=("onnxruntime",)))
                for model in (preprocessing(), detector())
            ]
            picture = aionn.Memory.allocate(int(np.prod(PICTURE)))
            picture.array(np.uint8, PICTURE)[:] = pictures(1)[0]
            chain = Chain(pair, {"picture": picture}, ("tensor", "x"), TENSOR)
            for where, lanes in found.items():
                await in_turn(chain, lanes, runtime, max(15, options.frames // 4), busy=where == "busy loop")
    for (where, lanes), bound in zip(found.items(), (1.0, 0.6), strict=True):
        report.show(f"preprocessing and detector, one driver, {where}; all CPU under app", lanes)
        report.check("N9", f"{where}, p50: start(after=) / two compute", ratios(lanes, "start", "compute"), bound)
