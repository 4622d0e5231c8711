"""What several tests of this room share: a model on the fake device that returns its input."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

import aionn
from aionn.testing import FakeDevice, identity_model


@pytest.fixture
async def compilation(fake: FakeDevice) -> AsyncIterator[aionn.Compilation]:
    async with aionn.Runtime() as runtime:
        yield await runtime.compile(aionn.Model.from_onnx(identity_model()), devices=(fake.name,))


@pytest.fixture
async def burst(compilation: aionn.Compilation) -> AsyncIterator[aionn.Burst]:
    async with compilation.burst() as burst:
        yield burst
