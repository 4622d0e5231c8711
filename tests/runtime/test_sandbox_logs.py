"""What a runtime logs of a device that is less confined than it could be: one line at INFO, however often its driver starts."""

from __future__ import annotations

import logging

import pytest

import aionn.hal
from aionn.testing import identity_model

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("surroundings")]

NAME = "reference"
NEEDS = {NAME: aionn.hal.Needs(makes_code=True)}
"""Take one of the mechanisms away."""
MODEL = aionn.Model.from_onnx(identity_model())


def named(runtime: aionn.Runtime, name: str) -> aionn.Device:
    (device,) = [device for device in runtime.devices if device.name == name]
    return device


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if "the sandbox of device" in record.message]


async def test_what_the_sandbox_lacks_is_logged_once_for_each_device(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AIONN_SANDBOX", raising=False)
    caplog.set_level(logging.INFO, "aionn.driver")
    async with aionn.Runtime(start=(), engine_needs=NEEDS) as runtime:
        await runtime.compile(MODEL, devices=(NAME,))
        device = named(runtime, NAME)
        await device.restart()
        await runtime.compile(MODEL, devices=(NAME,), priority="low")
        assert device.low_priority is not None
        assert device.low_priority.pid is not None
        assert device.sandbox is not None
        (line,) = lines(caplog)
        assert NAME in line
        assert device.sandbox.lacks
        assert all(lack in line for lack in device.sandbox.lacks)
        (record,) = [record for record in caplog.records if record.message == line]
        assert (record.levelno, record.aionn_device) == (logging.INFO, NAME)  # type: ignore[attr-defined]


async def test_nothing_is_logged_where_all_holds_or_the_app_wants_no_sandbox(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "aionn.driver")
    async with aionn.Runtime(start=(), sandbox="off", engine_needs=NEEDS) as runtime:
        await runtime.compile(MODEL, devices=(NAME,))
        device = named(runtime, NAME)
        assert device.sandbox == aionn.Confinement("off")
    async with aionn.Runtime(start=(), sandbox="auto") as runtime:
        assert named(runtime, "reference").sandbox is None
        await named(runtime, "reference").restart()
        device = named(runtime, "reference")
        assert device.sandbox is not None
        assert len(lines(caplog)) == bool(device.sandbox.lacks)
