"""What the tests of the sandbox share."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def as_an_app_starts_them(real_starts: None) -> None:
    """Each test has its own template, so that its first driver is started by exec and the others are copies."""
