"""The collector of this process: registering, threads, forks, and a real app's figures. Row O5 of the acceptance."""

from __future__ import annotations

import gc
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import Any

import numpy as np
import pytest
from prometheus_client import CollectorRegistry, generate_latest

import aionn
import aionn.metrics
from aionn.errors import CallerError
from aionn.pages import app_layout
from aionn.pages.app_layout import Kind
from aionn.pages.app_page import AppPage, close_page, open_page
from aionn.pages.finding import find_page
from aionn.pages.totals import MEASURES
from aionn.testing import identity_model
from tests.metrics.samples import families, scrape, value, values

INPUTS = {"input": np.zeros((1, 16), np.float32)}
MOST_LINES, MOST_SCRAPE_S = 1500, 0.04
PATIENCE = 10
"""This machine may be busy, so the gate is that many times the row's. `python -m tests.bench` is the place for figures."""

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> Any:
    return "asyncio", {"use_uvloop": True}


def test_a_second_collector_of_the_same_runtime_is_refused_in_a_sentence() -> None:
    one, other = aionn.Runtime(name="one"), aionn.Runtime(name="other")
    kept = [aionn.metrics.Collector(one), aionn.metrics.Collector(other)]
    with pytest.raises(CallerError, match=r"^runtime 'one' has a Collector already; use that one, or "):
        aionn.metrics.Collector(one)
    with pytest.raises(CallerError, match=r"^runtime '(one|other)' has a Collector already; make only Collector\(\)"):
        aionn.metrics.Collector()
    kept.clear()
    gc.collect()
    everything = aionn.metrics.Collector()
    with pytest.raises(CallerError, match="a Collector for all runtimes of this process exists already"):
        aionn.metrics.Collector(one)
    with pytest.raises(CallerError, match="a Collector for all runtimes of this process exists already"):
        aionn.metrics.Collector()
    del everything
    gc.collect()


def test_registering_scrapes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    collector = aionn.metrics.Collector()
    monkeypatch.setattr(collector, "collect", lambda: pytest.fail("registering scraped"))
    registry = CollectorRegistry(auto_describe=True)
    registry.register(collector)
    assert collector.describe() == []
    registry.unregister(collector)


def test_a_collector_holds_no_runtime() -> None:
    runtime = aionn.Runtime(name="short-lived")
    collector = aionn.metrics.Collector(runtime)
    seen = weakref.ref(runtime)
    del runtime
    gc.collect()
    assert seen() is None
    list(collector.collect())


def test_a_collector_of_one_runtime_shows_no_other(page: AppPage) -> None:
    collector = aionn.metrics.Collector(aionn.Runtime(name="one"))
    slots = [page.slot(Kind.BURST, "detector", "reference", "first", "", name) for name in ("one", "other")]
    for slot in slots:
        slot.add(app_layout.COMPUTED, 3)
    assert value(collector.collect(), "aionn_executions_total", status="ok") == 3
    assert values(collector.collect(), "aionn_executions_total", runtime="other") == {}


def test_the_counts_of_closed_runtimes_stay_while_there_is_a_collector(registry: CollectorRegistry) -> None:
    texts = "detector", "reference", "first", "", "shop"
    for turn in range(1, 4):
        page = open_page()
        burst = page.slot(Kind.BURST, *texts, parent=page.past(Kind.PAST_BURSTS, *texts))
        burst.add(app_layout.COMPUTED, 5)
        page.release(burst)
        close_page(page)
        assert value(registry.collect(), "aionn_executions_total", runtime="shop", status="ok") == 5 * turn


def test_without_memory_for_a_page_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(os, "memfd_create", full)
    with pytest.raises(aionn.MemoryAllocationError, match="has no statistics page"):
        aionn.metrics.Collector()


def test_without_the_extra_the_import_names_it() -> None:
    code = "import sys; sys.modules['prometheus_client'] = None; import aionn.metrics"
    refused = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert "install it with: pip install 'aionn[metrics]'" in refused.stderr.splitlines()[-1]


def in_child(body: Callable[[], None]) -> None:
    child = os.fork()
    if child == 0:
        signal.alarm(20)  # a child that waits for its parent's lock never gets it
        try:
            body()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0


@pytest.mark.own_process
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_a_child_of_fork_counts_anew_also_if_a_scrape_was_going_on(page: AppPage) -> None:
    collector = aionn.metrics.Collector()
    burst = page.slot(Kind.BURST, "detector", "reference", "first", "", "shop")
    burst.add(app_layout.COMPUTED, 3)

    def child() -> None:
        assert values(collector.collect(), "aionn_executions_total", runtime="shop") == {}
        own = open_page()
        slot = own.slot(Kind.BURST, "detector", "reference", "first", "", "shop")
        slot.add(app_layout.COMPUTED, 2)
        assert value(collector.collect(), "aionn_executions_total", runtime="shop", status="ok") == 2

    with collector._scraping:
        in_child(child)
    assert value(collector.collect(), "aionn_executions_total", runtime="shop", status="ok") == 3


async def test_an_app_with_two_runtimes_and_64_bursts(registry: CollectorRegistry) -> None:
    """Row O5: 4 models on a device in each runtime, 8 named bursts each, scraped by a thread while all of them run."""
    async with AsyncExitStack() as stack:
        bursts: list[aionn.Burst] = []
        for name in ("left", "right"):
            runtime = await stack.enter_async_context(aionn.Runtime(start=(), name=name))
            for number in range(4):
                compilation = await runtime.compile(aionn.Model.from_onnx(identity_model()), devices=("reference",), name=f"model{number}")
                await compilation.compute(INPUTS)
                for _ in range(8):
                    bursts.append(await stack.enter_async_context(compilation.burst(name=f"burst{len(bursts)}")))
        scrapes: list[tuple[str, float]] = []

        def scraping() -> None:
            for _ in range(3):
                began = time.thread_time()
                text = generate_latest(registry).decode()
                scrapes.append((text, time.thread_time() - began))

        thread = threading.Thread(target=scraping)
        thread.start()
        while thread.is_alive():
            for burst in bursts:
                await burst.compute(INPUTS)
        thread.join()
        text = scrape(registry)
        counted = sum(burst.statistics()["computed"] for burst in bursts)
    found = families(text)
    assert {name.removeprefix("aionn_").removesuffix("_info") for name in found} <= MEASURES.keys()
    assert {"aionn_executions", "aionn_execution_seconds", "aionn_device_seconds", "aionn_bursts"} <= found.keys()
    assert value(found.values(), "aionn_executions_total", status="ok") >= counted >= 64
    assert len(text.splitlines()) <= MOST_LINES
    assert statistics.median(seconds for _, seconds in scrapes) <= PATIENCE * MOST_SCRAPE_S
    totals = [value(families(text).values(), "aionn_executions_total", status="ok") for text, _ in scrapes]
    assert totals == sorted(totals)
    assert find_page(os.getpid()) is not None  # it closes with the collector


async def test_a_scrape_needs_nothing_of_the_loop(registry: CollectorRegistry) -> None:
    """So scrapes cannot hold up the loop, and a loop that stands still is scraped all the same."""
    async with aionn.Runtime(start=(), name="still") as runtime:
        compilation = await runtime.compile(aionn.Model.from_onnx(identity_model()), devices=("reference",))
        await compilation.compute(INPUTS)
        texts: list[str] = []
        thread = threading.Thread(target=lambda: texts.extend(scrape(registry) for _ in range(10)))
        thread.start()
        thread.join(60)  # the loop stands still meanwhile
        assert not thread.is_alive()
        assert len(texts) == 10
        assert value(families(texts[-1]).values(), "aionn_executions_total", runtime="still", status="ok") == 1
