"""Lines of a driver's log in the app's: under the device's logger, with its name, bounded in number, a traceback whole and once."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest

import aionn
from aionn.testing import FakeDevice, identity_model
from tests.runtime.logging_engine import LINES

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("surroundings")]
NAME = "tests.runtime.logging_engine:LoggingEngine"
QUIET = {"input": np.zeros((1, 16), np.float32)}
LOUD = {"input": np.ones((1, 16), np.float32)}


@pytest.fixture
def anyio_backend() -> Any:
    return "asyncio", {"use_uvloop": True}


class Log(logging.Handler):
    """The app's handler for the logger of one device."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []
        self.more = anyio.Event()
        self.logger = logging.getLogger(name)
        self.logger.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)
        if "more lines" in record.getMessage():
            self.more.set()


@pytest.fixture
def log() -> Iterator[Log]:
    handler = Log(f"aionn.driver.{NAME}")
    yield handler
    handler.logger.removeHandler(handler)


@pytest.fixture
def model() -> aionn.Model:
    return aionn.Model.from_onnx(identity_model())


async def test_an_engine_that_logs_ten_thousand_lines_fills_no_log(model: aionn.Model, log: Log) -> None:
    async with aionn.Runtime() as runtime:
        compilation = await runtime.compile(model, devices=(NAME,))
        await compilation.compute(LOUD)
        with anyio.fail_after(20):
            await log.more.wait()  # no line follows the last one
    texts = [record.getMessage() for record in log.records]
    shown = [text for text in texts if re.search(r": line \d+$", text)]
    left_out = [int(match[1]) for text in texts if (match := re.search(r": (\d+) more lines in one second were left out$", text))]
    assert len(shown) + sum(left_out) == LINES
    assert len(shown) == 50 * len(left_out)  # each second has its own fifty, on a machine that needs more than one
    assert {record.name for record in log.records} == {f"aionn.driver.{NAME}"}
    assert {record.aionn_device for record in log.records} == {NAME}  # type: ignore[attr-defined]
    assert {record.aionn_logger for record in log.records} == {"aionn.driver"}  # type: ignore[attr-defined]


async def test_a_traceback_of_a_driver_comes_whole_and_once(model: aionn.Model, log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIONN_TEST_LOGS", "bug")
    async with aionn.Runtime() as runtime:
        compilation = await runtime.compile(model, devices=(NAME,))
        async with compilation.burst() as burst:
            await burst.compute(QUIET)
            for _ in range(3):
                with pytest.raises(aionn.ExecutionError):
                    await burst.compute(LOUD)
    (record,) = log.records
    text = record.getMessage()
    assert text.startswith(f"device {NAME!r}: ")
    assert "Traceback (most recent call last):" in text
    assert text.endswith("KeyError: 'a bug'")
    assert record.levelno == logging.ERROR


async def test_warnings_name_the_model_and_the_device(
    fake: FakeDevice, model: aionn.Model, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with aionn.Runtime() as runtime:
        await runtime.compile(model, devices=(fake.name,), cache_dir=tmp_path, name="door")
    (stored,) = (path for path in (tmp_path / "entries").rglob("model*") if path.is_file())
    stored.write_bytes(bytes(stored.stat().st_size))
    async with aionn.Runtime() as runtime:
        await runtime.compile(model, devices=(fake.name,), cache_dir=tmp_path, name="door")
    (record,) = (record for record in caplog.records if record.levelno == logging.WARNING)
    assert f"device {fake.name!r} did not take the cached compilation of model 'door'" in record.getMessage()
    assert (record.aionn_device, record.aionn_model) == (fake.name, "door")  # type: ignore[attr-defined]


@pytest.mark.parametrize("way", ["an entry is cut", "the folder is open to others"])
async def test_an_entry_that_is_not_used_has_one_warning_with_the_way_out(
    way: str, fake: FakeDevice, model: aionn.Model, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with aionn.Runtime() as runtime:
        await runtime.compile(model, devices=(fake.name,), cache_dir=tmp_path)
        assert not caplog.records  # an empty cache gives no warning
        (stored,) = (path for path in (tmp_path / "entries").rglob("model*") if path.is_file())
        if way == "an entry is cut":
            os.truncate(stored, 1)
            reason, way_out = "wrong_length", f"`aionn cache verify {tmp_path}`"
        else:
            os.chmod(tmp_path, 0o777)
            reason, way_out = "unsafe", "`aionn doctor --cache-dir`"
        again = await runtime.compile(model, devices=(fake.name,), cache_dir=tmp_path, name="door")
    assert [outcome.reason and outcome.reason.value for outcome in again.outcomes] == [reason]
    (record,) = (record for record in caplog.records if record.levelno == logging.WARNING)
    assert f": {reason}: " in record.getMessage()
    assert way_out in record.getMessage()


def test_aionn_sets_no_level_and_adds_no_handler_but_a_null_one() -> None:
    code = """
import logging, aionn
async def main():
    async with aionn.Runtime(start=()) as runtime:
        runtime.events()
aionn.run(main)
loggers = {name: found for name, found in logging.root.manager.loggerDict.items() if isinstance(found, logging.Logger)}
ours = [found for name, found in loggers.items() if name.partition(".")[0] == "aionn"]
print(len(ours) > 3, {found.level for found in ours}, [type(one).__name__ for found in ours for one in found.handlers])
print(all(found.propagate for found in ours), logging.root.handlers)
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert ran.stdout.splitlines() == ["True {0} ['NullHandler']", "True []"]


async def test_a_death_names_the_models_without_the_ending_of_their_files(
    fake: FakeDevice, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "silero_vad.onnx").write_bytes(identity_model())
    async with aionn.Runtime() as runtime:
        compilation = await runtime.compile(await runtime.load(tmp_path / "silero_vad.onnx"), devices=(fake.name,))
        fake.crash()
        with pytest.raises(aionn.DriverDiedError):
            await compilation.compute(QUIET)
    (message,) = (record.getMessage() for record in caplog.records if record.name == "aionn.driver")
    assert message.endswith("with the models silero_vad)")
