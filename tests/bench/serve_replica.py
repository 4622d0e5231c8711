"""The deployment of `python -m tests.bench serve`. Replicas import this module, so it holds what runs in them."""

from __future__ import annotations

import os
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import anyio
import numpy as np
from numpy.typing import NDArray
from ray import serve

import aionn.ray
from aionn.runtime.processes import process

FPS = 30.0


class Measured(aionn.ray.Holder):
    """A holder that says which process has answered, how long its upgrades take, and that has a camera."""

    async def __init__(  # type: ignore[misc]  # Serve awaits a constructor
        self, models: Mapping[str, Any], hang_after_s: float | None = None, **arguments: Any
    ) -> None:
        if hang_after_s is not None:
            process.DEFAULT_HANG_S = hang_after_s  # type: ignore[attr-defined]  # with hang_s=None: when health sees a hang
        self._swaps_s: list[float] = []
        await super().__init__(models, **arguments)

    async def ask(self, inputs: Mapping[str, Any]) -> int:
        """Run the model once, and return this process's id."""
        await self.infer(inputs)
        return os.getpid()

    async def who(self) -> tuple[int, list[int], list[float]]:
        """Return this process's id, those of its drivers, and the seconds of each `reconfigure`."""
        drivers = [device.pid for device in self.runtime.health().devices if device.pid is not None]
        return os.getpid(), drivers, self._swaps_s

    async def reconfigure(self, user_config: Any) -> None:
        began = time.monotonic()
        await super().reconfigure(user_config)
        self._swaps_s.append(time.monotonic() - began)

    async def watch(self, until: str) -> AsyncGenerator[tuple[int, int, float, float, float], None]:
        """Yield for each frame of a camera until a file exists: pid, number, the model's factor, when it came (s), how long it took (s).

        Times are those of CLOCK_MONOTONIC, which all processes of a machine share.
        """
        began = [0.0]
        async for outputs in self.stream(_camera(Path(until), began)):
            number, one = outputs["y"][0, :2]
            yield os.getpid(), int(number / one), float(one), began[0], time.monotonic() - began[0]


async def _camera(until: Path, began: list[float]) -> AsyncIterator[dict[str, NDArray[np.float32]]]:
    """Frames of (number, 1, 1, ...), at 30 per second. `began` says when the last one came."""
    number, opened = 1, time.monotonic()
    while not until.exists():  # noqa: ASYNC240 - a camera of a benchmark
        frame = np.ones((1, 16), np.float32)
        frame[0, 0] = number
        began[0] = time.monotonic()
        yield {"x": frame}
        await anyio.sleep(max(0.0, opened + number / FPS - time.monotonic()))
        number += 1


def application(arguments: dict[str, Any]) -> Any:
    """Build the application of a config: `models` of `ModelSpec`'s arguments, `holder` and `options`."""
    models = {name: aionn.ray.ModelSpec(**spec) for name, spec in arguments["models"].items()}
    return made(models, arguments["holder"], arguments["options"])


def made(models: Mapping[str, Any], holder: Mapping[str, Any], options: Mapping[str, Any]) -> Any:
    options = aionn.ray.serve_options(ray_actor_options={"num_cpus": 1}, **options)
    return serve.deployment(name="Measured", **options)(Measured).bind(models, **holder)
