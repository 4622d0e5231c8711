"""What several tests of this room share: a model on the fake device that returns its input, and where drivers find things."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

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


@pytest.fixture
def surroundings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drivers keep their records in the test's own directory, and can import engines that tests define."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
