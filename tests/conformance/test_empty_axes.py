"""Inputs with an empty axis: the first step of a decoder has a past of 0 tokens. All paths give what ONNX Runtime itself gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper

import aionn
from aionn.errors import CallerError, ExecutionError
from tests.conformance.decoders import HEAD, HEADS, PAST, PRESENT, VOCABULARY, as_past, decoder, no_past
from tests.leaks import leak_check

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("both_ways")]


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, bool]]:
    """One loop: what a shape means does not depend on it."""
    return "asyncio", {"use_uvloop": True}


STEPS = [np.array([[3, 1, 4]]), np.array([[1]]), np.array([[5]])]
"""The prompt, and two tokens one by one."""


def by_the_engine() -> list[dict[str, NDArray[Any]]]:
    """The outputs of every step, from ONNX Runtime without aionn."""
    session = onnxruntime.InferenceSession(decoder(), providers=["CPUExecutionProvider"])
    past, found = no_past(), []
    for tokens in STEPS:
        names = ["logits", *PRESENT]
        found.append(dict(zip(names, session.run(names, {"input_ids": tokens, **past}), strict=True)))
        past = as_past(found[-1])
    return found


async def generate(compute: Any) -> list[dict[str, NDArray[Any]]]:
    past, found = no_past(), []
    for tokens in STEPS:
        outputs = await compute({"input_ids": tokens, **past})
        found.append({name: array.copy() for name, array in outputs.items()})
        past = as_past(outputs)
    return found


def check(found: list[dict[str, NDArray[Any]]], tolerance: float = 1e-4) -> None:
    for number, (step, wanted) in enumerate(zip(found, by_the_engine(), strict=True)):
        assert step.keys() == wanted.keys()
        for name, array in wanted.items():
            assert step[name].shape == array.shape, (number, name)
            np.testing.assert_allclose(step[name], array, rtol=tolerance, atol=tolerance)


@pytest.fixture(params=["onnxruntime", "openvino", "reference"])
def device(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


async def grow(model: aionn.Model, device: str, cache_dir: Path) -> str:
    """Generate on every path. Return how the compilation was prepared."""
    async with aionn.Runtime() as runtime:
        compilation = await runtime.compile(model, devices=(device,), cache_dir=cache_dir)
        check(await generate(compilation.compute))
        async with compilation.burst() as burst:
            check(await generate(burst.compute))
            check(await generate(burst.compute))  # the same shapes again
        return compilation.outcomes[0].kind.value


async def test_a_decoder_grows_from_a_past_of_no_tokens_on_every_path(device: str, tmp_path: Path) -> None:
    model = aionn.Model.from_onnx(decoder())
    with leak_check():
        kinds = [await grow(model, device, tmp_path), await grow(model, device, tmp_path)]
    assert kinds == (["no_cache", "no_cache"] if device == "reference" else ["miss", "hit"])


async def test_a_frame_and_a_stream_carry_an_empty_past() -> None:
    wanted = by_the_engine()[0]
    async with aionn.Runtime() as runtime:
        compilation = await runtime.compile(aionn.Model.from_onnx(decoder()), devices=("onnxruntime",))
        async with compilation.burst() as burst:
            shapes = {"input_ids": STEPS[0].shape, **{name: array.shape for name, array in no_past().items()}}
            async with burst.frame(shapes=shapes) as frame:
                assert frame[PAST[0]].shape == (1, HEADS, 0, HEAD)
                frame["input_ids"] = STEPS[0]
                outputs = await burst.compute(frame)
                np.testing.assert_array_equal(outputs["logits"], wanted["logits"])
            items = [{"input_ids": STEPS[0], **no_past()}] * 40
            seen = 0
            async for result in burst.map(items):
                np.testing.assert_array_equal(result.outputs["logits"], wanted["logits"])
                seen += 1
            assert seen == 40


async def test_an_output_memory_takes_the_output_of_an_empty_past() -> None:
    wanted = by_the_engine()[0]
    async with aionn.Runtime() as runtime:
        compilation = await runtime.compile(aionn.Model.from_onnx(decoder()), devices=("onnxruntime",))
        with aionn.Memory.allocate(3 * VOCABULARY * 4) as memory:
            outputs = await compilation.compute({"input_ids": STEPS[0], **no_past()}, outputs={"logits": memory})
            np.testing.assert_array_equal(outputs["logits"], wanted["logits"])


async def test_the_past_stays_in_the_driver_after_a_first_step_without_any() -> None:
    """An empty tensor is passed as an array. Device memory takes what the first step makes of it, and stands for the past from then on."""
    wanted = by_the_engine()
    async with aionn.Runtime() as runtime:
        compilation = await runtime.compile(aionn.Model.from_onnx(decoder()), devices=("onnxruntime",))
        states = {}
        for past, present in zip(PAST, PRESENT, strict=True):
            states[past, present] = await compilation.allocate(inputs=(past,), outputs=(present,))
        kept = {present: state for (_, present), state in states.items()}
        async with compilation.burst() as burst:
            for compute in (compilation.compute, burst.compute):
                given: dict[str, Any] = dict(no_past())
                for number, tokens in enumerate(STEPS):
                    outputs = await compute({"input_ids": tokens, **given}, outputs=kept)
                    np.testing.assert_allclose(outputs["logits"], wanted[number]["logits"], rtol=1e-4, atol=1e-4)
                    given = {name: state for (name, _), state in states.items()}
        state = next(iter(states.values()))
        with pytest.raises(CallerError, match=r"of shape \(1, 2, 0, 8\).*at least one element.*pass the empty array itself"):
            await state.copy_from(no_past()[PAST[0]])


def passing(shape: list[Any]) -> bytes:
    """A model that returns its input, and how many elements it has."""
    graph = helper.make_graph(
        [helper.make_node("Identity", ["x"], ["y"]), helper.make_node("Size", ["x"], ["size"])],
        "passing",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, shape), helper.make_tensor_value_info("size", TensorProto.INT64, [])],
    )
    content: bytes = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8).SerializeToString()
    return content


@pytest.mark.parametrize("given", [(0, 3), (2, 0), (0, 0), (2, 3)], ids=str)
async def test_an_empty_tensor_comes_back_with_its_shape(device: str, given: tuple[int, int]) -> None:
    """The output has the input's symbols, so its shape is known to be empty before the execution."""
    x = np.ones(given, np.float32)
    async with aionn.Runtime() as runtime:
        compilation = await runtime.compile(aionn.Model.from_onnx(passing(["N", "M"])), devices=(device,))
        async with compilation.burst() as burst:
            for compute in (compilation.compute, burst.compute, burst.compute):
                outputs = await compute({"x": x})
                assert outputs["y"].shape == given
                assert outputs["y"].dtype == np.float32
                assert outputs["size"] == x.size


async def test_an_axis_that_the_model_knows_cannot_be_empty() -> None:
    async with aionn.Runtime() as runtime:
        compilation = await runtime.compile(aionn.Model.from_onnx(passing(["N", 3])), devices=("onnxruntime",))
        with pytest.raises(CallerError, match=r"shape \(2, 0\) does not fit the model's \(0, 3\)"):
            await compilation.compute({"x": np.ones((2, 0), np.float32)})


async def test_device_memory_holds_no_empty_output() -> None:
    async with aionn.Runtime() as runtime:
        compilation = await runtime.compile(aionn.Model.from_onnx(passing(["N", 3])), devices=("onnxruntime",))
        async with await compilation.allocate(outputs=("y",)) as memory:
            with pytest.raises(ExecutionError, match="is empty, and a buffer holds at least one element"):
                await compilation.compute({"x": np.ones((0, 3), np.float32)}, outputs={"y": memory})
