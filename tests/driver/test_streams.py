"""Executables hear when the first burst of their prepared model opens, and when the last one has ended."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest

import aionn
from aionn.driver.prepared_model import StreamHints
from aionn.hal import ExecutionReport, Needs
from aionn.testing.models import identity_model
from tests.runtime.hinted_engine import VARIABLE


class Hinted:
    def __init__(self) -> None:
        self.heard: list[str] = []

    def run(self, inputs: Any, outputs: Any, timing: bool) -> ExecutionReport:
        return ExecutionReport()

    def stream_began(self) -> None:
        self.heard.append("began")

    def stream_ended(self) -> None:
        self.heard.append("ended")
        raise ValueError("a fault of the engine")


class Plain:
    def run(self, inputs: Any, outputs: Any, timing: bool) -> ExecutionReport:
        return ExecutionReport()


def test_only_the_first_and_the_last_burst_are_told() -> None:
    executable = Hinted()
    hints = StreamHints([executable, Plain()], lambda job: job())
    hints.opened()
    hints.opened()
    hints.ended()
    assert executable.heard == ["began"]
    hints.ended()
    hints.opened()
    assert executable.heard == ["began", "ended", "began"]


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))), ids=str)
def test_jobs_in_any_order_leave_what_holds(order: tuple[int, ...]) -> None:
    """Threads may run the jobs in any order, so a short stream may never be heard of. What was heard takes turns and ends rightly."""
    jobs: list[Callable[[], None]] = []
    executable = Hinted()
    hints = StreamHints([executable], jobs.append)
    for _ in range(2):
        hints.opened()
        hints.ended()
    assert len(jobs) == 4
    for place in order:
        jobs[place]()
    assert executable.heard == []
    hints.opened()
    jobs[-1]()
    assert executable.heard == ["began"]


def test_an_executable_without_hints_costs_no_thread() -> None:
    jobs: list[Callable[[], None]] = []
    hints = StreamHints([Plain()], jobs.append)
    hints.opened()
    hints.ended()
    assert jobs == []


@pytest.mark.anyio
async def test_a_driver_tells_its_engine_of_an_apps_bursts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    notes = tmp_path / "notes"
    notes.touch()
    monkeypatch.setenv(VARIABLE, str(notes))
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))

    async def heard(lines: int) -> list[str]:
        with anyio.fail_after(30):
            while len(found := notes.read_text().split()) < lines:  # noqa: ASYNC110 -- another process writes them
                await anyio.sleep(0.005)
        return found

    device = "tests.runtime.hinted_engine:HintedEngine"
    async with aionn.Runtime(engine_needs={device: Needs(devices=(str(notes),))}) as runtime:  # where it may write
        compilation = await runtime.compile(aionn.Model.from_onnx(identity_model()), devices=(device,))
        x = np.ones((1, 16), np.float32)
        async with compilation.burst() as first, compilation.burst() as second:
            await first.compute({"input": x})
            await second.compute({"input": x})
            assert await heard(1) == ["began"]
        assert await heard(2) == ["began", "ended"]
        async with compilation.burst() as again:
            await again.compute({"input": x})
            assert await heard(3) == ["began", "ended", "began"]
        await compilation.aclose()
        assert await heard(4) == ["began", "ended"] * 2
