"""Engines that write temporary files by path: the private folder of their drivers, and its end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest

import aionn
from aionn.caching.private_folder import left_folders
from aionn.testing import identity_model
from tests.apps import App
from tests.leaks import leak_check
from tests.runtime.exporting_engine import ExportingEngine, LitteringEngine, ReachingEngine
from tests.runtime.printing_engine import SilentEngine

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("surroundings")]

MODEL = aionn.Model.from_onnx(identity_model({"x": (1, 16)}, outputs=["y"]))
X = {"x": np.arange(16, dtype=np.float32).reshape(1, 16)}

APP = """
import os, sys
import aionn
async def main():
    async with aionn.Runtime(start=()) as runtime:
        await runtime.compile(aionn.Model.from_onnx(open(sys.argv[1], "rb").read()), devices=(sys.argv[2],))
        print(next(device.runs_on for device in runtime.devices if device.pid), flush=True)
        sys.stdin.read()
aionn.run(main)
"""


@pytest.fixture
def anyio_backend() -> Any:
    return ("asyncio", {"use_uvloop": True})


@pytest.fixture(params=["/dev/shm", "TMPDIR"])
def place(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the folders lie: in memory, or in the temporary directory where there is no room in memory."""
    if request.param == "/dev/shm":
        return Path("/dev/shm")
    monkeypatch.setattr("aionn.caching.private_folder._IN_MEMORY", "/no such place")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return tmp_path


def named(engine: type) -> str:
    return f"{engine.__module__}:{engine.__name__}"


def folder_of(runtime: aionn.Runtime) -> Path:
    (device,) = [device for device in runtime.devices if device.pid]
    return Path(device.runs_on or "")


@pytest.mark.parametrize("end", ["close", "kill"])
async def test_an_engine_that_writes_by_path_has_a_folder_that_ends_with_its_driver(place: Path, end: str, tmp_path: Path) -> None:
    async with leak_check():
        async with aionn.Runtime(start=()) as runtime:
            for kind in ("MISS", "HIT"):
                compilation = await runtime.compile(MODEL, devices=(named(ExportingEngine),), cache_dir=tmp_path / "cache")
                (outcome,) = compilation.outcomes
                assert (outcome.kind.name, outcome.save_failure) == (kind, None)
                np.testing.assert_array_equal((await compilation.compute(X))["y"], X["x"])
            folder = folder_of(runtime)
            assert folder.parent == place
            assert folder.stat().st_mode & 0o777 == 0o700
            assert list(folder.iterdir()) == []
            (pid,) = [device.pid for device in runtime.devices if device.pid]
            if end == "kill":
                os.kill(pid, signal.SIGKILL)
                with pytest.raises(aionn.DriverDiedError):
                    while True:
                        await compilation.compute(X)
                assert not folder.exists()
        assert not folder.exists()


async def test_what_an_engine_leaves_is_removed_with_its_driver(place: Path) -> None:
    async with aionn.Runtime(start=()) as runtime:
        await runtime.compile(MODEL, devices=(named(LitteringEngine),))
        folder = folder_of(runtime)
        assert len(list(folder.iterdir())) == 1
        device = next(device for device in runtime.devices if device.pid)
        await device.restart()
        assert not folder.exists()
        assert (again := folder_of(runtime)) != folder
    assert not again.exists()


async def test_an_engine_writes_nowhere_else(place: Path) -> None:
    async with aionn.Runtime(start=()) as runtime:
        with pytest.raises(aionn.CompilationError, match="beside: Permission denied"):
            await runtime.compile(MODEL, devices=(named(ReachingEngine),))


async def test_an_engine_that_does_not_state_it_has_no_temporary_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    async with aionn.Runtime(start=()) as runtime:
        await runtime.compile(MODEL, devices=(named(SilentEngine),))
        assert [device.runs_on for device in runtime.devices if device.pid] == ["none"]


async def test_without_a_sandbox_the_engine_has_the_temporary_directory_of_the_app(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    async with aionn.Runtime(start=(), sandbox="off") as runtime:
        await runtime.compile(MODEL, devices=(named(ExportingEngine),))
        assert folder_of(runtime) == tmp_path


async def test_without_a_place_for_the_folder_the_model_runs_and_is_not_stored(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("aionn.runtime.processes.spawning.name_folder", lambda: str(tmp_path / "absent" / "folder"))
    (tmp_path / "absent").write_text("a file, so that no folder can be made below it")
    async with aionn.Runtime(start=()) as runtime:
        compilation = await runtime.compile(MODEL, devices=(named(ExportingEngine),), cache_dir=tmp_path / "cache")
        (outcome,) = compilation.outcomes
        assert outcome.save_failure is not None
        assert "No usable temporary directory" in str(outcome.save_failure)
        np.testing.assert_array_equal((await compilation.compute(X))["y"], X["x"])


def killed_app(tmp_path: Path) -> Path:
    """Run an app with such an engine and kill it. Returns the folder of its driver."""
    (model := tmp_path / "model.onnx").write_bytes(identity_model())
    command = [sys.executable, "-c", APP, str(model), named(LitteringEngine)]
    app = App(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert app.stdout is not None
    folder = Path(app.stdout.readline().strip())
    assert len(list(folder.iterdir())) == 1
    assert str(folder) not in left_folders()
    app.kill()
    app.communicate()
    return folder


async def test_what_a_killed_app_leaves_is_removed_by_the_next_driver_of_such_an_engine(tmp_path: Path) -> None:
    folder = await anyio.to_thread.run_sync(killed_app, tmp_path)
    with anyio.fail_after(30):
        while str(folder) not in left_folders():  # the kernel kills the driver with its app
            await anyio.lowlevel.checkpoint()
    async with aionn.Runtime(start=()) as runtime:
        await runtime.compile(MODEL, devices=(named(ExportingEngine),))
        assert not os.path.exists(folder)  # noqa: ASYNC240
