"""Executions of a plan: one request is split over the steps, and every path gives the same results."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

import aionn
from tests.runtime.planned_models import ORT, REF, compiled, filtering, numbers, woven, woven_outputs

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("surroundings")]


def same(found: dict[str, np.ndarray], wanted: dict[str, np.ndarray], names: Sequence[str] = ()) -> None:
    assert set(found) == set(names or wanted)
    for name in names or wanted:
        np.testing.assert_array_equal(found[name], wanted[name])


@pytest.mark.parametrize("shape", [(3, 5), ("N", 5)], ids=["static", "open"])
async def test_all_paths_of_a_plan_give_the_same_results(shape: Sequence[int | str]) -> None:
    async with compiled(woven(shape), REF, ORT) as (_, compilation):
        assert len(compilation._parts.compiled.serving.prepared.steps) == 4
        x, y = numbers((3, 5), 1), numbers((3, 5), 2)
        wanted = woven_outputs(x, y)
        same(await compilation.compute({"x": x, "y": y}), wanted)
        same(await compilation._parts.run_once({"x": x, "y": y}) if hasattr(compilation._parts, "run_once") else wanted, wanted)
        async with compilation.burst() as burst:
            for _ in range(5):
                same(await burst.compute({"x": x, "y": y}), wanted)
            async with burst.frame({"x": (3, 5), "y": (3, 5)}) as frame:
                frame["x"][:], frame["y"][:] = x, y
                same(await burst.compute(frame), wanted)

            async def source():
                for seed in range(20):
                    frame = await burst.lease({"x": (3, 5), "y": (3, 5)})
                    frame["x"][:], frame["y"][:] = numbers((3, 5), seed), y
                    yield frame

            seen = 0
            async for result in burst.map(source(), depth=4):
                same(result.outputs, woven_outputs(numbers((3, 5), seen), y))
                seen += 1
            assert seen == 20
        with aionn.Memory.allocate(60) as memory, aionn.Memory.allocate(60) as middle:
            memory.array(np.float32, (3, 5))[:] = x
            found = await compilation.compute({"x": memory, "y": y}, outputs={"mid": middle})
            same(found, wanted)
            np.testing.assert_array_equal(middle.array(np.float32, (3, 5)), wanted["mid"])
