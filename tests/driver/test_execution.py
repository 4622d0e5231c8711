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
    for _ in range(20):
        pace.ran(1000)
    assert pace.inline
    other = await device.prepare_model(model, options)
    assert not pace.inline
    await other.aclose()
    assert pace.inline
    await one.aclose()
    device.close()
