"""Copying large inputs: every byte arrives, and the driver is told once, when little is left to do."""

from __future__ import annotations

import math
from typing import Any

import anyio
import numpy as np
import pytest
from numpy.typing import NDArray

import aionn
from aionn.errors import CallerError
from aionn.runtime import frames
from aionn.runtime.arguments import Arguments
from aionn.runtime.frames import Frames, fill_large
from aionn.runtime.model import Model
from aionn.testing.models import identity_model


@pytest.mark.parametrize("layout", ["plain", "strided"])
@pytest.mark.parametrize(
    "shapes", [[(1, 700)], [(1, 3)], [(1, 100), (1, 100)], [(1, 500), (1, 2)], [(1, 2), (1, 500)], [(1, 1)] * 5, [(1, 256)], [(1, 257)]]
)
def test_large_inputs_arrive_whole(shapes: list[tuple[int, ...]], layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "LAST_BYTES", 1024)
    names = [f"input{index}" for index in range(len(shapes))]
    model = Model.from_onnx(identity_model(dict(zip(names, shapes, strict=True))))
    arguments = Arguments(model)
    chance = np.random.default_rng(5)
    inputs: dict[str, NDArray[Any]] = {}
    for name, shape in zip(names, shapes, strict=True):
        array = chance.random((2 * shape[0], *shape[1:]), np.float32)
        inputs[name] = array[::2] if layout == "strided" else array[: shape[0]].copy()
    way = arguments.way(arguments.shapes_of(inputs))
    pool = Frames(exact=True).pool(way)
    frame = pool.lease()
    missing: list[int] = []

    def soon() -> None:
        places = way.inputs_in(frame)
        missing.append(sum(int((places[name] != array).sum()) * 4 for name, array in inputs.items()))

    fill_large(frame, way, inputs, soon)
    assert all(np.array_equal(place, inputs[name]) for name, place in way.inputs_in(frame).items())
    total = sum(4 * math.prod(shape) for shape in shapes)
    assert len(missing) == 1
    if layout == "plain":
        assert missing == [min(1024, total)]
    assert not frame.held()
    pool.close()
    with pytest.raises(CallerError):
        pool.lease()


@pytest.mark.anyio
async def test_a_stream_of_large_inputs_lets_the_loop_run_before_each() -> None:
    turns = 0

    async def other_task() -> None:
        nonlocal turns
        while True:
            turns += 1
            await anyio.lowlevel.checkpoint()

    picture = np.zeros((1, frames.LARGE_BYTES), np.uint8)
    model = Model.from_onnx(identity_model({"input": picture.shape}, np.uint8))
    async with aionn.Runtime() as runtime, anyio.create_task_group() as app:
        compiled = await runtime.compile(model, devices=("reference",))
        async with compiled.burst() as burst:
            app.start_soon(other_task)
            for value in range(30):
                picture[...] = value
                before = turns
                outputs = await burst.compute({"input": picture})
                assert outputs["input_out"][0, -1] == outputs["input_out"][0, 0] == value
                assert turns > before
            app.cancel_scope.cancel()
