"""NVIDIA's client, which knows nothing of aionn, asks real models: the answers are those of `Compilation.compute`, bit for bit (F18).

The second command of CONTRIBUTING.md installs the client. Without it these tests fail, because a test that is skipped proves nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tritonclient.http as client
from numpy.typing import NDArray
from tritonclient import utils
from tritonclient.http import aio

from aionn.hal.model import PooledModel
from tests.asgi.oip_models import IN_JSON, NUMBERS, extremes, json_model, numbers_model, texts_model
from tests.asgi.oip_served import OipServed, oip_served
from tests.real_models import carried, some_input

OPEN = {"silero": (), "upside_down": (3, 48, 192), "orientation": (2, 224, 224), "magika": (2, 2048)}


@pytest.fixture(scope="module")
def served() -> Iterator[OipServed]:
    ort = {"devices": ("onnxruntime",)}
    models: dict[str, Any] = {name: (carried(name), ort) for name in OPEN}
    models |= {"numbers": (numbers_model(), ort), "texts": (texts_model(), ort), "json": (json_model(), ort)}
    with oip_served(models) as running:
        yield running


@pytest.fixture
def triton(served: OipServed) -> Iterator[Any]:
    with client.InferenceServerClient(served.address, concurrency=4) as opened:
        yield opened


def given(name: str, array: NDArray[Any], datatype: str, binary: bool) -> Any:
    made = client.InferInput(name, list(array.shape), datatype)
    made.set_data_from_numpy(array, binary_data=binary)
    return made


def inputs_of(model: PooledModel, *extents: int, seed: int = 0) -> dict[str, NDArray[Any]]:
    return {name: some_input(operand, *extents, seed=seed) for name, operand in model.inputs.items()}


def asked(inputs: dict[str, NDArray[Any]], binary: bool) -> list[Any]:
    return [given(name, array, utils.np_to_triton_dtype(array.dtype), binary) for name, array in inputs.items()]


def same(left: NDArray[Any], right: NDArray[Any]) -> None:
    assert (left.dtype, left.shape) == (right.dtype, right.shape)
    assert left.tobytes() == right.tobytes()


def test_metadata_and_health(triton: Any) -> None:
    assert triton.is_server_live()
    assert triton.is_server_ready()
    metadata = triton.get_server_metadata()
    assert metadata["name"] == "aionn"
    assert "binary_tensor_data" in metadata["extensions"]
    assert triton.is_model_ready("silero")
    assert triton.is_model_ready("silero", "1")
    assert not triton.is_model_ready("other")
    assert triton.get_model_metadata("silero", "1") == {
        "name": "silero",
        "versions": ["1"],
        "platform": "aionn_onnx",
        "inputs": [{"name": "input", "datatype": "FP32", "shape": [1, 576]}, {"name": "state", "datatype": "FP32", "shape": [2, 1, 128]}],
        "outputs": [{"name": "output", "datatype": "FP32", "shape": [1, 1]}, {"name": "stateN", "datatype": "FP32", "shape": [2, 1, 128]}],
    }
    numbers = triton.get_model_metadata("numbers")
    assert {one["name"]: (one["datatype"], one["shape"]) for one in numbers["inputs"]} == {name: (name, [-1, 3]) for name in NUMBERS}
    with pytest.raises(utils.InferenceServerException, match="no model 'other'") as error:
        triton.get_model_metadata("other")
    assert error.value.status() == "404"


@pytest.mark.parametrize("binary", [True, False], ids=["binary", "json"])
@pytest.mark.parametrize("name", OPEN)
def test_real_models_answer_as_compute_does(served: OipServed, triton: Any, name: str, binary: bool) -> None:
    inputs = inputs_of(served.compilation(name).model, *OPEN[name])
    expected = served.compute(name, inputs)
    wanted = [client.InferRequestedOutput(output, binary_data=binary) for output in expected]
    result = triton.infer(name, asked(inputs, binary), outputs=wanted, request_id="seven")
    assert result.get_response()["id"] == "seven"
    for output, array in expected.items():
        same(result.as_numpy(output), array)


def test_a_body_that_comes_in_chunks_goes_into_a_frame(served: OipServed, triton: Any) -> None:
    """1.8 MB do not come at once, so they take the other way in. What is written into a frame is not copied once more."""
    for seed in range(3):
        inputs = inputs_of(served.compilation("upside_down").model, 16, 48, 192, seed=seed)
        before = served.counts("upside_down")
        result = triton.infer("upside_down", asked(inputs, True))
        after = served.counts("upside_down")
        assert after["computed"] == before["computed"] + 1
        assert after["copied_bytes"] == before["copied_bytes"]
        for output, array in served.compute("upside_down", inputs).items():
            same(result.as_numpy(output), array)


def test_every_datatype_as_raw_bytes(triton: Any) -> None:
    arrays = {name: extremes(name) for name in NUMBERS}
    result = triton.infer("numbers", [given(name, array, name, True) for name, array in arrays.items()])
    for name, array in arrays.items():
        same(result.as_numpy(f"{name}_out"), array)


def test_every_datatype_of_json(triton: Any) -> None:
    arrays = {name: extremes(name) for name in IN_JSON}
    wanted = [client.InferRequestedOutput(f"{name}_out", binary_data=False) for name in arrays]
    result = triton.infer("json", [given(name, array, name, False) for name, array in arrays.items()], outputs=wanted)
    for name, array in arrays.items():
        same(result.as_numpy(f"{name}_out"), array)


@pytest.mark.parametrize("binary", [True, False], ids=["binary", "json"])
def test_texts(triton: Any, binary: bool) -> None:
    texts = np.array([["", "Grüße", "日本"], ["a\nb", "\x00", "x" * 500]], object)
    integers = np.arange(6, dtype=np.int32).reshape(2, 3)
    wanted = [client.InferRequestedOutput(name, binary_data=binary) for name in ("BYTES_out", "INT32_out")]
    result = triton.infer("texts", [given("BYTES", texts, "BYTES", binary), given("INT32", integers, "INT32", binary)], outputs=wanted)
    found = result.as_numpy("BYTES_out")
    assert [text.decode() if isinstance(text, bytes) else text for text in found.reshape(-1)] == texts.reshape(-1).tolist()
    same(result.as_numpy("INT32_out"), integers)


def test_some_outputs_in_the_order_asked_for_each_in_its_own_form(served: OipServed, triton: Any) -> None:
    inputs = inputs_of(served.compilation("silero").model)
    wanted = [client.InferRequestedOutput("stateN", binary_data=True), client.InferRequestedOutput("output", binary_data=False)]
    result = triton.infer("silero", asked(inputs, True), outputs=wanted)
    described = result.get_response()["outputs"]
    assert [one["name"] for one in described] == ["stateN", "output"]
    assert ["data" in one for one in described] == [False, True]
    for output, array in served.compute("silero", inputs).items():
        same(result.as_numpy(output), array)


def test_errors_reach_the_client_with_their_sentence(served: OipServed, triton: Any) -> None:
    inputs = inputs_of(served.compilation("silero").model)
    with pytest.raises(utils.InferenceServerException, match="no input 'input'; the model's inputs are") as error:
        triton.infer("silero", asked({"state": inputs["state"]}, True))
    assert error.value.status() == "400"
    with pytest.raises(utils.InferenceServerException, match=r"the shape \[1, 575\] does not fit the model's \[1, 576\]"):
        triton.infer("silero", asked({**inputs, "input": inputs["input"][:, 1:]}, True))
    with pytest.raises(utils.InferenceServerException, match="keeps no state for a sequence"):
        triton.infer("silero", asked(inputs, True), sequence_id=3, sequence_start=True)


def test_statistics(served: OipServed, triton: Any) -> None:
    inputs = inputs_of(served.compilation("magika").model, *OPEN["magika"])
    before = triton.get_inference_statistics("magika")["model_stats"][0]
    for _ in range(3):
        triton.infer("magika", asked(inputs, True))
    after = triton.get_inference_statistics("magika", "1")["model_stats"][0]
    assert after["inference_count"] - before["inference_count"] == 3
    stats, old = after["inference_stats"], before["inference_stats"]
    assert stats["success"]["count"] - old["success"]["count"] == 3
    assert stats["compute_infer"]["ns"] > old["compute_infer"]["ns"]
    assert stats["success"]["ns"] >= stats["compute_input"]["ns"] + stats["compute_output"]["ns"]
    assert {one["name"] for one in triton.get_inference_statistics()["model_stats"]} == set(served.models.names)


@pytest.mark.parametrize("anyio_backend", [("asyncio", {"use_uvloop": False})], ids=["asyncio"])
async def test_the_asyncio_client_with_many_at_once(served: OipServed, anyio_backend: Any) -> None:
    cases = [inputs_of(served.compilation("silero").model, seed=seed) for seed in range(24)]
    expected = [await asyncio.to_thread(served.compute, "silero", case) for case in cases]
    async with aio.InferenceServerClient(served.address) as opened:
        results = await asyncio.gather(*(opened.infer("silero", asked(case, number % 2 == 0)) for number, case in enumerate(cases)))
    for result, arrays in zip(results, expected, strict=True):
        for output, array in arrays.items():
            same(result.as_numpy(output), array)


def test_row_f18_bits(served: OipServed, triton: Any) -> None:
    """2,000 requests beside `compute`. The times of F18 are in tests/bench."""
    model = served.compilation("silero").model
    for seed in range(670):
        inputs = inputs_of(model, seed=seed)
        expected = served.compute("silero", inputs)
        for binary in (True, False):
            wanted = [client.InferRequestedOutput(output, binary_data=binary) for output in expected]
            result = triton.infer("silero", asked(inputs, True), outputs=wanted)
            json_result = triton.infer("silero", asked(inputs, False), outputs=wanted) if seed % 2 else result
            for output, array in expected.items():
                same(result.as_numpy(output), array)
                same(json_result.as_numpy(output), array)
