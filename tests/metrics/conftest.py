"""What tests of metrics share: slots that a test writes itself, and a collector whose page is closed at the end."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
from prometheus_client import CollectorRegistry

import aionn.metrics
from aionn.pages.app_page import AppPage, close_page, open_page
from aionn.pages.finding import find_page


@pytest.fixture
def page() -> Iterator[AppPage]:
    written = open_page()
    yield written
    close_page(written)


@pytest.fixture
def registry() -> Iterator[CollectorRegistry]:
    """The metrics of this process. No page is left when the registry has gone."""
    registry = CollectorRegistry()
    collector = aionn.metrics.Collector()
    registry.register(collector)
    yield registry
    registry.unregister(collector)
    del collector
    gc.collect()


@pytest.fixture(autouse=True)
def no_page_is_left() -> Iterator[None]:
    import os

    yield
    gc.collect()
    assert find_page(os.getpid()) is None
