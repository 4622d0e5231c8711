"""The models that the journeys use, read before anything is counted: their weights are the test's, not the runtime's."""

from __future__ import annotations

from pathlib import Path

import pytest

import aionn


@pytest.fixture
def silero(silero_path: Path) -> aionn.Model:
    return aionn.Model.from_onnx(silero_path)


@pytest.fixture
def orientation(orientation_path: Path) -> aionn.Model:
    return aionn.Model.from_onnx(orientation_path)
