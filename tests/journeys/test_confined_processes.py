"""Every driver process of an engine that declares its needs is confined: each kind of provider, schedule and use. /proc says so."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest

import aionn
from aionn.testing import identity_model
from tests.engines.test_custom_ops import X, named, split
from tests.leaks import driver_pids, leak_check
from tests.real_models import some_input
from tests.sandbox.confinement import SECRET, assert_confined, serving
from tests.sandbox.evil_engine import HALTING

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("surroundings")]

SHAPE = (1, 16)
FRAME = {"x": np.ones(SHAPE, np.float32)}


@pytest.fixture
def anyio_backend() -> Any:
    return ("asyncio", {"use_uvloop": True})


@pytest.fixture(autouse=True)
def secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_TOKEN", SECRET)


def assert_all_confined(runtime: aionn.Runtime, count: int) -> None:
    pids = serving(runtime)
    assert len(pids) == count
    for pid in pids:
        assert_confined(pid)
    for device in runtime.devices:
        if device.pid is not None:
            assert device.sandbox is not None
            assert device.sandbox.level == "require"
            assert {"files", "system calls", "network", "processes", "signals", "environment"} <= set(device.sandbox.holds)
            assert ("no made code" in device.sandbox.holds) is not device.name.startswith("openvino")


@asynccontextmanager
async def confined_runtime(**more: Any) -> AsyncIterator[aionn.Runtime]:
    """A runtime whose drivers must be confined. A kernel that cannot confine them fails the test with the runtime's sentence."""
    async with leak_check(), aionn.Runtime(sandbox="require", **more) as runtime:
        yield runtime


@pytest.mark.parametrize("device", ["onnxruntime", "onnxruntime:cpu", "openvino", "openvino:cpu", "reference"])
@pytest.mark.parametrize("priority", ["medium", "low"])
async def test_each_provider_is_confined_at_each_priority(device: str, priority: Any, silero_path: Path, tmp_path: Path) -> None:
    model = aionn.Model.from_onnx(silero_path)
    frame = {name: some_input(operand) for name, operand in model.inputs.items()}
    async with confined_runtime() as runtime:
        for kind in ("miss", "hit"):
            compilation = await runtime.compile(
                model, devices=(device,), priority=priority, cache_dir=tmp_path / "cache", token=model.token
            )
            found = compilation.outcomes[0].kind.value
            assert found in (kind, "unsupported") or device == "reference"
            async with compilation.burst() as burst:
                await burst.compute(frame)
            assert_all_confined(runtime, 1)
        (pid,) = serving(runtime)
        assert os.sched_getscheduler(pid) == (os.SCHED_IDLE if priority == "low" else os.SCHED_OTHER)


async def test_a_library_of_operators_runs_confined(tmp_path: Path) -> None:
    extensions = pytest.importorskip("onnxruntime_extensions", reason="the package carries a library of operators")
    options = named(Path(extensions.get_library_path()))
    async with confined_runtime() as runtime:
        compilation = await runtime.compile(split(), devices=("onnxruntime",), options=options)
        outputs = await compilation.compute({"x": X})
        np.testing.assert_array_equal(outputs["n"], np.minimum(X, 0))
        assert_all_confined(runtime, 1)


def stopped() -> int | None:
    """Return the driver that stands still, if there is one."""
    for pid in driver_pids():
        with suppress(OSError):
            if b") T" in Path(f"/proc/{pid}/stat").read_bytes():
                return pid
    return None


@pytest.mark.timeout(400)  # its worker starts with the highest niceness
@pytest.mark.usefixtures("workers_in_the_background")
async def test_a_worker_in_the_background_is_confined() -> None:
    """It has the highest niceness, one schedule for batches, and few CPUs: all of that is set before it is confined."""
    model = aionn.Model.from_onnx(identity_model({"x": SHAPE}, outputs=["y"]))
    async with confined_runtime(hang_s=None) as runtime:
        policy = aionn.StagePolicy(min_gain=None)  # which of the two is quicker does not matter here
        compilation = await runtime.compile(model, mode="staged", stages=("onnxruntime", HALTING), stage_policy=policy)
        with anyio.fail_after(300):
            while (pid := stopped()) is None:  # a better stage is made once the first one is used
                await compilation.compute(FRAME)
        assert_confined(pid)
        assert (os.getpriority(os.PRIO_PROCESS, pid), os.sched_getscheduler(pid)) == (19, os.SCHED_BATCH)
        assert len(os.sched_getaffinity(pid)) < len(os.sched_getaffinity(0)) or len(os.sched_getaffinity(0)) == 1
        os.kill(pid, signal.SIGCONT)
        await compilation.wait_for_stage(HALTING, timeout_s=300)
        assert compilation.stages[1].made_by == "worker"
        assert_all_confined(runtime, 2)
