"""What the tests of idle compilations share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import numpy as np
from numpy.typing import NDArray

import aionn
from aionn.runtime.processes.devices import Device
from aionn.testing import FakeDevice

SHAPE = (1, 16)
IDLE_S = 0.02


def x(number: float) -> dict[str, NDArray[np.float32]]:
    return {"x": np.full(SHAPE, number, np.float32)}


def device_of(runtime: aionn.Runtime, name: str) -> Device:
    return runtime._opened.devices.find(name)


def asleep(compilation: aionn.Compilation) -> bool:
    serving = compilation._parts.compiled.serving
    return serving is not None and serving.asleep


async def until(condition: Callable[[], bool]) -> None:
    """Return when a condition holds that a timer or another process brings about."""
    with anyio.fail_after(20):
        while not condition():  # noqa: ASYNC110  (time changes it)
            await anyio.sleep(0.001)


async def idle(
    runtime: aionn.Runtime, model: aionn.Model, fake: FakeDevice, cache: Path | None, idle_s: float = IDLE_S, **options: Any
) -> aionn.Compilation:
    if "stages" not in options:
        options["devices"] = (fake.name,)
    return await runtime.compile(model, cache_dir=cache, token=None if cache is None else model.token, idle_s=idle_s, **options)


def kinds(compilation: aionn.Compilation) -> list[str]:
    return [outcome.kind.name for outcome in compilation.outcomes]
