from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.service.served import Served, serving


@pytest.fixture
def folder() -> Iterator[Path]:
    with serving() as made:
        yield made


@pytest.fixture
def served(folder: Path) -> Iterator[Served]:
    service = Served(folder)
    try:
        yield service
        assert "Traceback" not in service.log, service.log
    finally:
        service.end()
