"""Deployments for tests of `aionn.ray.Holder` and `MultiplexedHolder`: replicas import this module, so it holds what runs in them."""

from __future__ import annotations

import os
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import psutil
from numpy.typing import NDArray
from ray import serve

import aionn.ray
from aionn.runtime.processes import process
from tests.ray.multiplexing import CompilationWatch

FPS = 30.0


class Watched(aionn.ray.Holder):
    """A holder that says who it is, and that has a camera."""

    async def __init__(  # type: ignore[misc]  # Serve awaits a constructor
        self, models: Mapping[str, Any], hang_after_s: float | None = None, **arguments: Any
    ) -> None:
        if hang_after_s is not None:
            process.DEFAULT_HANG_S = hang_after_s  # type: ignore[attr-defined]  # with hang_s=None: when a hang is logged, and health sees it
        await super().__init__(models, **arguments)
        self._built_in = threading.get_native_id()
        self._first_drivers = await self._drivers()
        self._configs: list[object] = []

    async def reconfigure(self, user_config: Any) -> None:
        await super().reconfigure(user_config)
        self._configs.append(user_config)

    async def _drivers(self) -> list[int]:
        return [device.pid for device in self.runtime.health().devices if device.pid is not None]

    async def who(self) -> dict[str, Any]:
        """Return the process, its drivers, the configs that it has taken or outlived, and whether the constructor's thread still lives."""
        return {
            "pid": os.getpid(),
            "drivers": await self._drivers(),
            "first_drivers": self._first_drivers,
            "configs": self._configs,
            "same_thread": self._built_in == threading.get_native_id(),
        }

    async def watch(self, until: str) -> AsyncGenerator[tuple[int, int, float], None]:
        """Yield the replica's pid, the number of a frame and what the model made of 1, for each frame of a camera until a file exists."""
        async for outputs in self.stream(_camera(Path(until))):
            number, one = outputs["y"][0, :2]
            yield os.getpid(), int(number / one), float(one)


async def _camera(until: Path) -> AsyncIterator[dict[str, NDArray[np.float32]]]:
    """Frames of (number, 1, 1, ...), at 30 per second."""
    number = 1
    while not until.exists():  # noqa: ASYNC240 - a test's camera
        frame = np.ones((1, 16), np.float32)
        frame[0, 0] = number
        yield {"x": frame}
        number += 1
        await anyio.sleep(1 / FPS)


def application(arguments: dict[str, Any]) -> Any:
    """Build the application of a config file. `arguments`: `models` of `ModelSpec`'s arguments, `holder` and `options`."""
    models = {name: aionn.ray.ModelSpec(**spec) for name, spec in arguments["models"].items()}
    options = aionn.ray.serve_options(**arguments.get("options", {}))
    return serve.deployment(name="Watched", **options)(Watched).bind(models, **arguments.get("holder", {}))


class Multiplexed(aionn.ray.MultiplexedHolder):
    """A holder of many models that counts its compilations from outside, and says what it takes."""

    async def __init__(self, *given: Any, **arguments: Any) -> None:  # type: ignore[misc]  # Serve awaits a constructor
        self._watch = CompilationWatch().install()
        await super().__init__(*given, **arguments)

    async def counts(self) -> dict[str, Any]:
        """Return what the watch has counted, and the resident bytes of this process and of its drivers."""
        drivers = [device.pid for device in self.runtime.health().devices if device.pid is not None]
        watch = self._watch
        return {
            "live": watch.live,
            "most": watch.most,
            "compiles": watch.compiles,
            "wrong": watch.wrong,
            "pid": os.getpid(),
            "drivers": drivers,
            "rss": psutil.Process().memory_info().rss,
            "driver_rss": sum(psutil.Process(pid).memory_info().rss for pid in drivers),
        }
