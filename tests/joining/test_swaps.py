"""A swap and a change of stages while eight bursts share runs: each frame gets its own answer, once and in order."""

from __future__ import annotations

from collections.abc import AsyncIterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest
from onnx import TensorProto, helper

import aionn
from aionn.runtime.compilation import BatchingState
from tests.joining.engine import BETTER, NAME

pytestmark = pytest.mark.anyio

BURSTS = 8
FRAMES = [pytest.param(2_000 // BURSTS, id="2000"), pytest.param(10_000 // BURSTS, id="10000", marks=pytest.mark.soak)]
"""Of each burst."""


@pytest.fixture(autouse=True)
def counted_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIONN_LANES", "1")
    monkeypatch.setenv("AIONN_JOINED_RUNS", str(tmp_path / "runs"))


def times(factor: int) -> aionn.Model:
    """A model that multiplies by additions, so that the factor shows which model has answered."""
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 4])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 4])
    names = ["x", *(f"sum {number}" for number in range(2, factor)), "y"]
    nodes = [helper.make_node("Add", [before, "x"], [after]) for before, after in pairwise(names)]
    graph = helper.make_graph(nodes, f"times {factor}", [x], [y])
    return aionn.Model.from_onnx(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]).SerializeToString())


class Streams:
    """Eight streams over bursts. A stream ends after so many frames, but not before `ends` is set.

    Attributes:
        factors: by burst, the factors of its answers in the order in which they came, each once for a row of equal ones.
        stages: the same for the stages that answered.
        answered: how many frames each burst has answered.
    """

    def __init__(self, compilation: aionn.Compilation, frames: int) -> None:
        self._compilation, self._frames = compilation, frames
        self.factors: list[list[int]] = [[] for _ in range(BURSTS)]
        self.stages: list[list[str]] = [[] for _ in range(BURSTS)]
        self.answered = [0] * BURSTS
        self.ends = anyio.Event()

    async def one(self, index: int) -> None:
        sent = 0

        async def frames() -> AsyncIterator[dict[str, Any]]:
            nonlocal sent
            while sent < self._frames or not self.ends.is_set():
                yield {"x": self._frame(index, sent)}
                sent += 1

        async with self._compilation.burst() as burst:
            async for result in burst.map(frames(), depth=2):
                assert result.seq == self.answered[index]
                x, y = self._frame(index, result.seq), result.outputs["y"]
                factor = round(float(y[0, 0] / x[0, 0]))
                np.testing.assert_array_equal(y, factor * x)
                self.answered[index] += 1
                if self.factors[index][-1:] != [factor]:
                    self.factors[index].append(factor)
                if self.stages[index][-1:] != [result.stage]:
                    self.stages[index].append(result.stage)
        assert self.answered[index] == sent

    def _frame(self, index: int, number: int) -> np.ndarray[Any, Any]:
        """A row that no other frame of this test has, and that orders nothing of the engine. Its triple is exact."""
        return np.full((1, 4), -1 - index - BURSTS * number, np.float32)

    async def until_answered(self, frames: int) -> None:
        """Wait until each burst has answered so many more frames."""
        wanted = [answered + frames for answered in self.answered]
        with anyio.fail_after(60):
            while any(answered < least for answered, least in zip(self.answered, wanted, strict=True)):  # noqa: ASYNC110
                await anyio.sleep(0.005)


@pytest.mark.parametrize("frames", FRAMES)
async def test_a_swap_under_joined_load_loses_doubles_and_reorders_no_answer(frames: int) -> None:
    async with aionn.Runtime(start=(), sandbox="off") as runtime:  # the engine writes a file of the test's
        compilation = await runtime.compile(times(2), devices=(NAME,), batch=aionn.Batching(max_rows=8))
        streams = Streams(compilation, frames)
        async with anyio.create_task_group() as tasks:
            for index in range(BURSTS):
                tasks.start_soon(streams.one, index)
            await streams.until_answered(100)
            assert max(compilation.statistics()["by_rows"]) > 1
            await runtime.swap(compilation, times(3))
            await streams.until_answered(100)
            assert max(compilation.statistics()["by_rows"]) > 1  # the sizes are learned anew
            streams.ends.set()
        assert streams.factors == [[2, 3]] * BURSTS
        assert sum(streams.answered) >= BURSTS * frames


@pytest.mark.parametrize("frames", FRAMES)
async def test_a_change_of_stages_under_joined_load_loses_doubles_and_reorders_no_answer(frames: int) -> None:
    async with aionn.Runtime(start=(), sandbox="off") as runtime:
        policy = aionn.StagePolicy(executions=BURSTS * frames // 2, min_gain=None)
        batch = aionn.Batching(max_rows=8)
        compilation = await runtime.compile(times(2), mode="staged", stages=(NAME, BETTER), stage_policy=policy, batch=batch)
        streams = Streams(compilation, frames)
        async with anyio.create_task_group() as tasks:
            for index in range(BURSTS):
                tasks.start_soon(streams.one, index)
            await streams.until_answered(100)
            assert max(compilation.statistics()["by_rows"]) > 1
            await compilation.wait_for_stage(BETTER, timeout_s=60)
            await streams.until_answered(100)
            assert max(compilation.statistics()["by_rows"]) > 1
            streams.ends.set()
        assert streams.factors == [[2]] * BURSTS
        assert streams.stages == [[NAME, BETTER]] * BURSTS
        assert sum(streams.answered) >= BURSTS * frames


def found_in(compilation: aionn.Compilation) -> BatchingState:
    found = compilation.batching
    assert found is not None
    return found


async def test_a_swap_keeps_what_the_device_has_found_about_rows_also_in_the_cache(tmp_path: Path) -> None:
    cached: dict[str, Any] = {"devices": ("onnxruntime",), "batch": aionn.Batching(max_rows=8), "cache_dir": tmp_path / "cache"}
    async with aionn.Runtime(start=(), state_dir=tmp_path / "state") as runtime:
        compilation = await runtime.compile(times(2), **cached)
        assert found_in(compilation).allowed, found_in(compilation).reason
        await runtime.swap(compilation, times(3))
        assert found_in(compilation).allowed, found_in(compilation).reason
        uncached = await runtime.compile(times(4), devices=("onnxruntime",), batch=aionn.Batching(max_rows=8))
        await runtime.swap(uncached, times(5))
        assert found_in(uncached).allowed, found_in(uncached).reason
    async with aionn.Runtime(start=(), state_dir=tmp_path / "state") as runtime:
        again = await runtime.compile(times(3), **cached)
        assert again.outcomes[0].kind is aionn.CacheOutcomeKind.HIT
        assert found_in(again).allowed, found_in(again).reason
