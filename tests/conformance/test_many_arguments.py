"""A model with 1,500 inputs and as many outputs: requests, packets, queues and frames have no bound of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import aionn
from aionn.errors import CallerError
from aionn.runtime.executing import link
from aionn.testing.models import identity_model

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("both_ways")]

COUNT = 1500
NAMES = [f"x{number}" for number in range(COUNT)]
INPUTS = {name: np.full((1, 3), number, np.float32) for number, name in enumerate(NAMES)}


def check(outputs: Any) -> None:
    assert list(outputs) == [f"{name}_out" for name in NAMES]
    for number, array in enumerate(outputs.values()):
        assert array.shape == (1, 3)
        assert (array == number).all()


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module", params=[(1, 3), ("N", 3)], ids=str)
def model(request: pytest.FixtureRequest) -> aionn.Model:
    return aionn.Model.from_onnx(identity_model(dict.fromkeys(NAMES, request.param)))


async def test_fifteen_hundred_inputs_and_outputs_work_on_every_path(model: aionn.Model, tmp_path: Path) -> None:
    kinds = []
    for _ in range(2):
        async with aionn.Runtime() as runtime:
            compilation = await runtime.compile(model, devices=("onnxruntime",), cache_dir=tmp_path)
            kinds.append(compilation.outcomes[0].kind.value)
            for _ in range(2):
                check(await compilation.compute(INPUTS))
            check(await compilation.compute(INPUTS, measure_timing=True))
            async with compilation.burst() as burst:
                for _ in range(2):
                    check(await burst.compute(INPUTS))
                async for result in burst.map([INPUTS] * 4):
                    check(result.outputs)
                async with burst.frame(shapes=dict.fromkeys(NAMES, (1, 3))) as frame:
                    for name, array in INPUTS.items():
                        frame[name] = array
                    check(await burst.compute(frame))
                async with await compilation.allocate(inputs=("x7",), outputs=("x9_out",), shape=(1, 3)) as memory:
                    await memory.copy_from(INPUTS["x7"])
                    outputs = await burst.compute({**INPUTS, "x7": memory}, outputs={"x9_out": memory})
                    assert (outputs["x7_out"] == 7).all()
                    assert (await memory.snapshot() == 9).all()
    assert kinds == ["miss", "hit"]


async def test_a_queue_that_is_too_small_for_one_request_is_named_in_one_sentence(
    model: aionn.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with aionn.Runtime() as runtime:
        compilation = await runtime.compile(model, devices=("onnxruntime",))
        with monkeypatch.context() as patch:
            patch.setattr(link, "enough_datums", lambda operands, depth: 1024)
            async with compilation.burst() as burst:
                with pytest.raises(CallerError, match=r"has 9004 datums, but the burst's queue holds 1024; .*make the queues larger"):
                    await burst.compute(INPUTS)
        check(await compilation.compute(INPUTS))
