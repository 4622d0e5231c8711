"""What joining costs while nothing is to be joined: no wake-up. And what `Compilation.batching` says of a model that gains nothing."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest

import aionn
from aionn.pages.layout import JoinedRuns
from aionn.runtime.compilation import BatchingState
from aionn.testing.models import identity_model
from tests.bench.machine import wake_ups
from tests.joining.engine import NAME
from tests.joining.test_failures import doubling
from tests.leaks import driver_pids

pytestmark = pytest.mark.anyio

BURSTS, BEATS = 16, 3


async def later(beat_ns: Callable[[], int], beats: int) -> None:
    """Return when a driver has written its heartbeat so often."""
    with anyio.fail_after(60):
        for _ in range(beats):
            before = beat_ns()
            while beat_ns() == before:  # noqa: ASYNC110  (shared memory has no event)
                await anyio.sleep(0.02)


@pytest.mark.parametrize("depth", [1, 8])
async def test_a_driver_with_open_bursts_wakes_up_for_its_heartbeat_and_for_nothing_else(depth: int) -> None:
    x = np.zeros((1, 16), np.float32)
    async with aionn.Runtime(start=()) as runtime, AsyncExitStack() as stack:
        compilation = await runtime.compile(
            aionn.Model.from_onnx(identity_model({"input": ("batch", 16)})), devices=("onnxruntime",), batch=aionn.Batching(max_rows=8)
        )
        for _ in range(BURSTS):
            burst = await stack.enter_async_context(compilation.burst(depth=depth))
            await burst.compute({"input": x})
        serving: Any = compilation._parts.compiled.serving
        page = serving.prepared.device.page
        (pid,) = driver_pids()
        await later(lambda: page.read().heartbeat_ns, 2)
        before = wake_ups(pid)
        await later(lambda: page.read().heartbeat_ns, BEATS)
        assert wake_ups(pid) - before < BEATS + BURSTS // 2  # one a beat. With a timer for each burst there would be 16


async def test_a_model_that_gains_nothing_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIONN_LANES", "1")
    monkeypatch.setenv("AIONN_JOINED_RUNS", os.fspath(tmp_path / "runs"))
    async with aionn.Runtime(start=(), sandbox="off") as runtime:
        compilation = await runtime.compile(doubling(), devices=(NAME,), batch=aionn.Batching(max_rows=8))
        serving: Any = compilation._parts.compiled.serving
        found = JoinedRuns(22, 28, 1, False, (16, 6), (38_000_000, 50_500_000))
        monkeypatch.setattr(serving.prepared, "joined_runs", lambda: found)
        why = "a row took 38 ms in runs of 1; a row took 50.5 ms in runs of 2"
        assert compilation.batching == BatchingState(True, why, {"x": 0}, 1, {1: 38.0, 2: 50.5})
        assert compilation.statistics()["by_rows"] == {1: 16, 2: 6}
        found = found._replace(most=2)  # the driver still tries
        assert compilation.batching == BatchingState(True, "", {"x": 0}, 2, {1: 38.0, 2: 50.5})
        found = found._replace(most=1, size_row_ns=(38_000_000, 0))  # nothing was compared yet
        assert compilation.batching == BatchingState(True, "", {"x": 0}, 1, {1: 38.0})
