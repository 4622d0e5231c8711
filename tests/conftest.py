"""What the tests of every room share: the two event loops, and the real files that the carriers bring.

A carrier that is not installed fails the test, with the command that installs it: a skipped test proves nothing.
`AIONN_REQUIRE_MODELS=` (empty) in the environment lets such tests be skipped on a machine that cannot have them.
"""

from __future__ import annotations

import gc
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

os.environ.setdefault("AIONN_REQUIRE_MODELS", "1")
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")  # the tests' own use of ONNX Runtime leaves no files either

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # As in a shell's background job: apps that the tests start and interrupt would inherit it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # as under nohup

from aionn.testing import FakeDevice
from aionn.testing.fake_engine import SecondFakeEngine
from tests.real_models import carried  # after that line: it may be asked for a file while modules are collected

# How fast examples are made and run is the machine's business, and no failure.
hypothesis.settings.register_profile("aionn", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("aionn")


def pytest_configure(config: pytest.Config) -> None:
    if os.environ.pop("PYTHONDONTWRITEBYTECODE", None):
        # Processes by the thousand start in these tests; without bytecode each would compile aionn anew, a third of its start.
        # Theirs is kept elsewhere, since the environment forbids it here.
        os.environ["PYTHONPYCACHEPREFIX"] = bytecode = tempfile.mkdtemp(prefix="aionn-tests-bytecode-")
        config.add_cleanup(lambda: shutil.rmtree(bytecode, ignore_errors=True))
        # Drivers are confined, so none of them could keep the bytecode of its engine.
        for engine in ("onnx", "onnxruntime", "openvino"):
            subprocess.run([sys.executable, "-c", f"import {engine}"], check=False, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


@pytest.fixture(scope="module", autouse=True)
def what_is_there_already_is_no_garbage() -> None:
    """The collections of thousands of leak checks need not look again at all that earlier modules have imported."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def warnings_go_where_pytest_looks() -> Iterator[None]:
    """The command `aionn`, called in this process, prints warnings on stderr from then on. Later modules compare stderr and logs."""
    logger = logging.getLogger("aionn")
    handlers, propagate = logger.handlers, logger.propagate
    yield
    logger.handlers, logger.propagate = handlers, propagate


@pytest.fixture(scope="session", autouse=True)
def no_driver_starts_early() -> Iterator[None]:
    """A driver starts when a test needs one. The tests of the early start turn the default on."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("aionn.runtime.processes.early.BY_DEFAULT", False)
        yield


@pytest.fixture(
    params=[
        pytest.param(("asyncio", {"use_uvloop": False}), id="asyncio"),
        pytest.param(("asyncio", {"use_uvloop": True}), id="uvloop"),
    ]
)
def anyio_backend(request: pytest.FixtureRequest) -> Any:
    """Every async test runs on asyncio's own loop and on uvloop."""
    return request.param


@pytest.fixture(params=["lanes", "listener"])
def both_ways(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether lanes serve the bursts of this process, and of drivers that the test starts. Else their listeners do it alone."""
    lanes: bool = request.param == "lanes"
    monkeypatch.setattr("aionn.driver.prepared_model.LANES", lanes)
    monkeypatch.setenv("AIONN_LANES", "1" if lanes else "0")
    return lanes


@pytest.fixture
def fake() -> Iterator[FakeDevice]:
    with FakeDevice() as device:
        yield device


@pytest.fixture
def quick() -> Iterator[FakeDevice]:
    """A stage that serves at once, 10 ms a run."""
    with FakeDevice() as device:
        device.delay(0.01)
        yield device


@pytest.fixture
def best() -> Iterator[FakeDevice]:
    """A better stage: another engine, with an answer at once."""
    with FakeDevice(SecondFakeEngine) as device:
        yield device


@pytest.fixture
def surroundings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drivers keep their records in the test's own directory, and can import engines that tests define."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))


@pytest.fixture
def silero_path() -> Path:
    """Static shapes, recurrent state: input f32[1,576], state f32[2,1,128] -> output f32[1,1], stateN f32[2,1,128]."""
    return carried("silero")


@pytest.fixture
def orientation_path() -> Path:
    """One open dimension, 6.8 MB of constants: x f32[N,3,224,224] -> f32[N,4]."""
    return carried("orientation")


@pytest.fixture
def recording_path() -> Path:
    """44 s of speech, mono, 48 kHz, 16 bits."""
    return carried("speech")
