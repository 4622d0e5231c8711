"""Where a driver runs a model: on its loop while that disturbs no other model, else in the model's own thread."""

from __future__ import annotations

from typing import cast

import pytest
from anyio.abc import TaskGroup

import aionn
from aionn.driver.device import EngineDevice
from aionn.hal.interfaces import PrepareOptions
from aionn.testing import identity_model
from aionn.testing.fake_engine import FakeEngine

pytestmark = pytest.mark.anyio


async def test_short_runs_are_on_the_loop_only_while_their_model_is_the_only_one() -> None:
    device = EngineDevice(FakeEngine(), cast("TaskGroup", None))  # no burst, so no task
    model, options = aionn.Model.from_onnx(identity_model()), PrepareOptions()
    one = await device.prepare_model(model, options)
    pace = one._bound.pace
    told = [pace.inline]
    for _ in range(20):
        pace.ran(1000)
    told.append(pace.inline)
    other = await device.prepare_model(model, options)
    told.append(pace.inline)
    await other.aclose()
    told.append(pace.inline)
    assert told == [False, True, False, True]
    await one.aclose()
    device.close()
