"""A stream through a staged compilation that leaves no gaps and checks every answer."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest

import aionn
from aionn.testing import FakeDevice

SHAPE = (1, 16)


def frame(number: int) -> dict[str, Any]:
    """Small values without end: what a comparison tolerates grows with them."""
    return {"x": np.full(SHAPE, number % 97, np.float32)}


class Stream:
    """Computes frame after frame in a burst until it is stopped. Every answer is right, or the test fails."""

    def __init__(self, compilation: aionn.Compilation) -> None:
        self._compilation = compilation
        self.stages: list[str] = []
        self.answered = 0
        self._more = anyio.Event()

    async def run(self) -> None:
        async with self._compilation.burst() as burst:

            async def frames() -> AsyncIterator[dict[str, Any]]:
                number = 0
                while True:
                    yield frame(number)
                    number += 1

            async for result in burst.map(frames(), depth=2):
                assert result.seq == self.answered
                np.testing.assert_array_equal(result.outputs["y"], frame(result.seq)["x"])
                self.answered += 1
                if not self.stages or self.stages[-1] != result.stage:
                    self.stages.append(result.stage)
                self._more.set()

    async def goes_on(self, frames: int = 5) -> None:
        """Until so many more frames have been answered."""
        for _ in range(frames):
            self._more = anyio.Event()
            await self._more.wait()


@asynccontextmanager
async def streaming(compilation: aionn.Compilation) -> AsyncIterator[Stream]:
    stream = Stream(compilation)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(stream.run)
        await stream.goes_on()
        yield stream
        await stream.goes_on()
        tasks.cancel_scope.cancel()


async def staged(
    runtime: aionn.Runtime,
    model: aionn.Model,
    quick: FakeDevice,
    best: FakeDevice,
    cache: Path | None = None,
    stage_policy: aionn.StagePolicy | None = None,
) -> aionn.Compilation:
    token, stages = None if cache is None else model.token, (quick.name, best.name)
    return await runtime.compile(model, mode="staged", stages=stages, stage_policy=stage_policy, cache_dir=cache, token=token)


async def rejected(compilation: aionn.Compilation, device: FakeDevice) -> str:
    with pytest.raises(aionn.StageRejected) as caught:
        await compilation.wait_for_stage(device.name, timeout_s=60)
    stage = compilation.stages[-1]
    assert (stage.state, stage.reason) == ("rejected", caught.value.reason)
    assert compilation.device == compilation.stages[0].name
    return caught.value.reason
