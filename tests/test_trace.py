"""Spans and counters: what exists, what a viewer gets, and that nothing is done without a listener."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import aionn
from aionn import trace
from aionn.pages.page import DriverPage, PageReader
from aionn.testing import identity_model
from tests import trace_format
from tests.apps import App

INPUTS = {"input": np.arange(16, dtype=np.float32).reshape(1, 16)}


@pytest.fixture
async def compilation() -> AsyncIterator[aionn.Compilation]:
    async with aionn.Runtime() as runtime:
        yield await runtime.compile(aionn.Model.from_onnx(identity_model()), devices=("reference",))


def test_a_span_tells_its_time_its_attributes_and_its_error() -> None:
    with trace.record() as recording:
        before_ns = time.monotonic_ns()
        with trace.span("outer", device="d"), pytest.raises(KeyError), trace.span("inner"):
            raise KeyError("gone")
        after_ns = time.monotonic_ns()
    inner, outer = recording.spans
    assert (inner.name, inner.attributes) == ("inner", {"error": "KeyError"})
    assert (outer.name, outer.attributes) == ("outer", {"device": "d"})
    assert before_ns <= outer.started_ns <= inner.started_ns <= inner.ended_ns <= outer.ended_ns <= after_ns


def test_counters_add_up() -> None:
    with trace.record() as recording:
        trace.count("dropped")
        trace.count("dropped", 4, seq=7)
        trace.count("other")
    assert recording.total("dropped") == 5
    assert recording.counters[1].attributes == {"seq": 7}


def test_what_no_longer_fits_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace, "MOST_EVENTS", 3)
    with trace.record() as recording:
        for number in range(5):
            trace.count("counted", number)
            with trace.span(f"span {number}"):
                pass
    assert [span.name for span in recording.spans] == ["span 2", "span 3", "span 4"]
    assert recording.total("counted") == 2 + 3 + 4
    assert recording.lost == 4


def test_nothing_is_made_while_nobody_listens() -> None:
    assert trace.span("one", device="x") is trace.span("two")
    with trace.record():
        assert trace.span("one") is not trace.span("two")
    assert trace.span("one") is trace.span("two")


def test_listeners_come_and_go_in_any_order() -> None:
    first: list[Any] = []
    second: list[Any] = []
    one, two = trace.listen(first.append), trace.listen(second.append)
    one.__enter__()
    two.__enter__()
    one.__exit__(None, None, None)
    trace.count("a")
    two.__exit__(None, None, None)
    trace.count("b")
    assert first == []
    assert [event.name for event in second] == ["a"]


def test_the_file_is_what_viewers_open(tmp_path: Path) -> None:
    with trace.record() as recording:
        with trace.span("work", ratio=math.nan, path=tmp_path):
            trace.count("done", 2)
        trace.count("done", 1)
    recording.write_chrome(tmp_path / "t.json")

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    written = json.loads((tmp_path / "t.json").read_text(), parse_constant=refuse)
    spans = [event for event in written["traceEvents"] if event["ph"] == "X"]
    counters = [event for event in written["traceEvents"] if event["ph"] == "C"]
    assert [(span["name"], span["dur"] >= 0) for span in spans] == [("work", True)]
    assert {"ts", "pid", "tid", "args"} <= spans[0].keys()
    assert [counter["args"]["value"] for counter in counters] == [2, 3]


WRITER = """
import sys
from aionn.trace.events import Recorded, Span
from aionn.trace.file import write
spans = [Span(f"span {sys.argv[2]}", number * 10, number * 10 + 5) for number in range(int(sys.argv[3]))]
print("ready", flush=True)
sys.stdin.readline()
write(sys.argv[1], Recorded(spans))
"""


@pytest.mark.parametrize("ending", [".json", ".json.gz"])
def test_of_processes_that_write_one_file_the_last_ones_stays_whole(tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"t{ending}"
    with ExitStack() as stack:
        writers = []
        for number in range(4):
            command = [sys.executable, "-c", WRITER, str(path), str(number), str(20_000 - 4000 * number)]
            writers.append(stack.enter_context(App(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)))
        for writer in writers:
            assert writer.stdout is not None
            assert writer.stdout.readline() == b"ready\n"
        for writer in writers:
            assert writer.stdin is not None
            writer.stdin.close()  # all write at once
        assert [writer.wait(60) for writer in writers] == [0] * 4
    names = [event["name"] for event in trace_format.check(path)["traceEvents"] if event["ph"] == "X"]
    assert len(set(names)) == 1
    assert len(names) == 20_000 - 4000 * int(names[0].removeprefix("span "))


@pytest.mark.anyio
async def test_compiling_preparing_executing_and_waiting_in_the_queue_are_seen() -> None:
    with trace.record() as recording:
        async with aionn.Runtime() as runtime:
            compilation = await runtime.compile(aionn.Model.from_onnx(identity_model()), devices=("reference",))
            await compilation.compute(INPUTS)
            async with compilation.burst() as burst:
                await burst.compute(INPUTS)
    spans = {span.name: span for span in recording.spans}
    assert {"compile", "driver.start", "prepare", "compute", "burst.connect", "burst.queue_wait", "burst.execute"} <= spans.keys()
    assert spans["compile"].started_ns <= spans["prepare"].started_ns <= spans["prepare"].ended_ns <= spans["compile"].ended_ns
    assert spans["burst.queue_wait"].ended_ns == spans["burst.execute"].started_ns
    assert spans["burst.queue_wait"].attributes["identity"] == spans["burst.execute"].attributes["identity"]


@pytest.mark.anyio
async def test_records_of_a_driver_in_the_apps_process_hide_none_of_the_apps() -> None:
    page = DriverPage()
    with closing(PageReader(page.fd, 0, page.asked_fd)) as reader:
        reader.trace_until(time.monotonic_ns() + 60 * 10**9)
        page.write_event(trace.Counter("earlier", time.monotonic_ns(), 1))  # makes a ring that is found before the app's own
        with trace.record() as recording:
            async with aionn.Runtime() as runtime:
                compilation = await runtime.compile(aionn.Model.from_onnx(identity_model()), devices=("reference",))
                async with compilation.burst() as burst:
                    await burst.compute(INPUTS)
    assert {"burst.queue_wait", "burst.execute", "burst.return"} <= {span.name for span in recording.spans}


@pytest.mark.anyio
async def test_a_frame_costs_no_trace_call_while_nobody_listens(compilation: aionn.Compilation, monkeypatch: pytest.MonkeyPatch) -> None:
    called = []
    async with compilation.burst() as burst:
        await burst.compute(INPUTS)
        for name in ("span", "span_at", "count", "_report"):
            monkeypatch.setattr(trace, name, lambda *_, name=name, **__: called.append(name))
        for _ in range(10):
            await burst.compute(INPUTS)
        monkeypatch.undo()
    assert called == []
