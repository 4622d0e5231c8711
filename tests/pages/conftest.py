"""The statistics page of this process: written, and read as another process reads it."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from aionn.pages.app_page import AppPage, close_page, open_page
from aionn.pages.finding import FoundPage, find_page


@pytest.fixture
def page() -> Iterator[AppPage]:
    written = open_page()
    yield written
    close_page(written)


@pytest.fixture
def found(page: AppPage) -> Iterator[FoundPage]:
    reader = find_page(os.getpid())
    assert reader is not None
    with reader:
        yield reader
