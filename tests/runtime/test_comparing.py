"""When a stream may be held, and when pairs of runs have decided."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from typing import Any, cast

import anyio
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import aionn
from aionn.remote.device import RemotePreparedModel
from aionn.runtime.serving.serving import CompiledModel, Serving
from aionn.runtime.staging.comparing import _Pairs
from aionn.runtime.staging.measuring import Inputs, Meter, Timed
from aionn.testing import identity_model

MODEL = aionn.Model.from_onnx(identity_model({"x": (1,)}, outputs=["y"]))
FRAME: Inputs = {"x": np.zeros(1, np.float32)}


def timed(seconds: float, *, alone: bool = True) -> Timed:
    return Timed({}, seconds, alone)


@given(st.lists(st.tuples(st.integers(1, 50), st.integers(1, 50)), min_size=1, max_size=15), st.sampled_from([0.0, 0.1, 0.5]))
def test_the_verdict_comes_as_soon_as_the_median_of_all_ratios_is_sure(runs: list[tuple[int, int]], gain: float) -> None:
    if len(runs) % 2 == 0:
        runs = runs[1:] or [*runs, runs[0]]
    pairs = _Pairs(len(runs), gain)
    for before, after in runs:
        if not pairs.won and not pairs.lost:
            pairs.add(timed(before), timed(after))
    median = statistics.median(after <= (1 - gain) * before for before, after in runs)
    assert pairs.won == bool(median)
    assert pairs.lost != pairs.won
    assert 2 * pairs.count > len(runs)


def test_a_disturbed_run_proves_that_the_new_stage_is_faster_and_never_that_it_is_not() -> None:
    won, lost = _Pairs(1, 0.1), _Pairs(1, 0.1)
    won.add(timed(1.0), timed(0.8, alone=False))
    lost.add(timed(1.0), timed(1.2, alone=False))
    assert (won.won, won.unsure) == (True, False)
    assert (lost.lost, lost.unsure) == (True, True)


class Held:
    """A meter whose runs take no time, beside a stream of which one execution never ends until it is told to."""

    def __init__(self, tasks: Any) -> None:
        self.compiled = CompiledModel(tasks)
        self.stream = Serving(cast(RemotePreparedModel, None), MODEL, self.compiled.use, "quick")
        self.better = Serving(cast(RemotePreparedModel, None), MODEL, self.compiled.use, "best")
        self.compiled.serving = self.stream
        self.closed: list[bool] = []
        self.meter = Meter(self._run, self.compiled, self.stream)

    async def _run(self, serving: Serving, inputs: Inputs, deadline_ns: int | None) -> Mapping[str, Any]:
        self.closed.append(self.compiled.gate.closed)
        return {}


@pytest.mark.anyio
async def test_a_stream_is_held_only_where_gaps_did_not_come_and_its_deadlines_leave_room() -> None:
    async with anyio.create_task_group() as tasks:
        held = Held(tasks)
        meter, use = held.meter, held.compiled.use
        assert (await meter.time(held.stream, FRAME, 0.1)) is not None  # nothing is executed: no need to hold anything
        held.stream.enter()
        use.count()
        for _ in range(2):
            assert await meter.time(held.stream, FRAME, 0.1) is None
        assert held.closed == [False, False]  # one to warm up, and the one that is timed
        held.stream.leave()
        assert await meter.time(held.stream, FRAME, 0.1) is not None
        assert (held.closed, meter.holds) == ([False, False, True], 1)
        assert not held.compiled.gate.shut

        for left_s in (10.0, 0.05, 10.0):
            use.answered(time.monotonic_ns() + int(left_s * 1e9))
        assert not meter.may_hold(0.1)
        assert meter.may_hold(0.01)
        for _ in range(32):  # the stream is quicker now
            use.answered(time.monotonic_ns() + 10**10)
        assert meter.may_hold(0.1)


@pytest.mark.anyio
async def test_a_hold_ends_in_time_though_the_run_does_not() -> None:
    async with anyio.create_task_group() as tasks:
        held = Held(tasks)
        go_on = anyio.Event()

        async def run(serving: Serving, inputs: Inputs, deadline_ns: int | None) -> Mapping[str, Any]:
            await go_on.wait()
            return {}

        held.meter._run = run
        held.meter._disturbed = 2

        async def frame() -> None:
            await held.compiled.gate.passed(None)
            go_on.set()

        async def when_closed() -> None:
            while not held.compiled.gate.closed:
                await anyio.lowlevel.checkpoint()
            tasks.start_soon(frame)

        tasks.start_soon(when_closed)
        with anyio.fail_after(20):
            found = await held.meter._held(held.better, FRAME, 0.05)
        assert found is not None
        assert (found.late, found.alone, found.seconds) == (True, False, 0.05)


@pytest.mark.anyio
async def test_a_hold_whose_run_fails_or_is_cancelled_opens_the_gate() -> None:
    async with anyio.create_task_group() as tasks:
        held = Held(tasks)

        async def fails(serving: Serving, inputs: Inputs, deadline_ns: int | None) -> Mapping[str, Any]:
            raise aionn.DriverHungError("best", 1.0)

        held.meter._run = fails
        with pytest.raises(aionn.DriverHungError):
            await held.meter._held(held.better, FRAME, 1.0)
        assert not held.compiled.gate.shut

        async def hangs(serving: Serving, inputs: Inputs, deadline_ns: int | None) -> Mapping[str, Any]:
            running.set()
            await anyio.sleep_forever()
            raise AssertionError

        running = anyio.Event()
        held.meter._run = hangs
        async with anyio.create_task_group() as leaving:
            leaving.start_soon(held.meter._held, held.better, FRAME, 60.0)
            await running.wait()
            assert held.compiled.gate.closed
            leaving.cancel_scope.cancel()
        assert not held.compiled.gate.shut
