"""The Open Inference Protocol by hand (F19): the examples of its pages, every refusal, lies about lengths, and bodies of hypothesis."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import aionn
from aionn.asgi.open_inference.refusals import RequestRefusal
from aionn.asgi.open_inference.tensors import asked_of, decoded
from aionn.hal.types import Operand, OperandType
from tests.asgi.oip_by_hand import INPUT0, INPUT1, LENGTH, OUTPUT0, answer, body, connected, head, raw, tensor, until
from tests.asgi.oip_models import example_model, picking_model, repeating
from tests.asgi.oip_served import OipServed, oip_served
from tests.runtime.values_models import linear_classifier

LIMIT = 2**20


@pytest.fixture(scope="module")
def served() -> Iterator[OipServed]:
    ort: dict[str, Any] = {"devices": ("onnxruntime",)}
    models: dict[str, aionn.asgi.ModelSpec] = {
        "mymodel": (example_model(), ort),
        "pick": (picking_model(), ort),
        "half": (repeating({"FP16": 10}), ort),
        "floats": (repeating({"FP32": 1, "FP64": 11}), ort),
        "texts": (repeating({"BYTES": 8}), ort),
        "classifier": (linear_classifier([0, 1]), ort),
    }
    with oip_served(models, max_body_bytes=LIMIT) as running:
        yield running


@pytest.mark.parametrize(
    ("dimensions", "shape", "sentence"),
    [
        ((), [2], r"the shape \[2\] does not fit the model's \[\]$"),
        ((0, 3), [2], r"the shape \[2\] does not fit the model's \[-1, 3\]$"),
        (None, [1] * 33, r"has 33 axes; give at most 32$"),
    ],
)
def test_a_shape_that_does_not_fit_is_named_beside_the_models(dimensions: tuple[int, ...] | None, shape: list[int], sentence: str) -> None:
    message = decoded(json.dumps({"inputs": [{"name": "x", "shape": shape, "datatype": "FP32", "data": [1]}]}).encode())
    with pytest.raises(RequestRefusal, match=sentence):
        asked_of(message, {"x": Operand(OperandType.FLOAT32, dimensions)}, {})


def infer(served: OipServed, asked: tuple[bytes, dict[str, str]], model: str = "mymodel") -> Any:
    return served.infer(model, *asked)


# ---- the examples of the protocol's pages ---------------------------------------------------------------------------------


def test_the_example_of_an_inference(served: OipServed) -> None:
    response = infer(served, body(INPUT0, INPUT1, id="42", outputs=[{"name": "output0"}]))
    assert (response.status_code, response.headers["Content-Type"]) == (200, "application/json")
    assert response.json() == {"model_name": "mymodel", "model_version": "1", "outputs": [OUTPUT0], "id": "42"}
    assert LENGTH not in response.headers


def test_data_may_be_nested(served: OipServed) -> None:
    assert infer(served, body(tensor(INPUT0, data=[[1, 2], [3, 4]]), INPUT1)).json()["outputs"] == [OUTPUT0]


def test_the_example_of_binary_tensors(served: OipServed) -> None:
    tail = struct.pack("<4I3B", 1, 2, 3, 4, 1, 1, 0)
    asked = body(raw(INPUT0, 16), raw(INPUT1, 3), tail=tail, outputs=[{"name": "output0", "parameters": {"binary_data": True}}])
    response = infer(served, asked)
    assert (response.status_code, response.headers["Content-Type"]) == (200, "application/octet-stream")
    at = int(response.headers[LENGTH])
    described = {"name": "output0", "datatype": "FP32", "shape": [3, 2], "parameters": {"binary_data_size": 24}}
    assert json.loads(response.content[:at]) == {"model_name": "mymodel", "model_version": "1", "outputs": [described]}
    assert struct.unpack("<6f", response.content[at:]) == (4, 6, 4, 6, 0, 0)


def test_raw_bytes_beside_json_and_the_default_for_all_outputs(served: OipServed) -> None:
    asked = body(INPUT0, raw(INPUT1, 3), tail=b"\1\1\0", parameters={"binary_data_output": True})
    response = infer(served, asked)
    assert response.content[int(response.headers[LENGTH]) :] == struct.pack("<6f", 4, 6, 4, 6, 0, 0)
    one = {"name": "output0", "parameters": {"binary_data": False}}
    one_in_json = body(INPUT0, INPUT1, parameters={"binary_data_output": True}, outputs=[one])
    assert infer(served, one_in_json).json()["outputs"] == [OUTPUT0]


def test_health_metadata_and_unknown_paths(served: OipServed) -> None:
    http = served.http
    assert (http.get("/v2/health/live").json(), http.get("/v2/health/ready").json()) == ({"live": True}, {"ready": True})
    assert http.get("/v2/models/mymodel/ready").json() == {"name": "mymodel", "ready": True}
    assert http.get("/v2").json()["extensions"] == ["binary_tensor_data", "statistics"]
    for path in ("/v2/models/other", "/v2/models/mymodel/versions/2", "/v2/models/mymodel/other", "/v2/other", "/v2/models/a%2Fb/ready"):
        response = http.get(path)
        assert response.status_code == 404
        assert response.json()["error"]
    assert served.infer("other", b"{}").status_code == 404
    refused = http.get("/v2/models/mymodel/infer")
    assert (refused.status_code, refused.headers["Allow"]) == (405, "POST")
    assert refused.json()["error"] == "the path /v2/models/mymodel/infer takes POST, not GET"
    assert http.head("/v2/health/live").status_code == 200
    assert "aionn_build_info" in http.get("/metrics").text


def test_the_outputs_that_the_protocol_can_carry_of_a_classifier(served: OipServed) -> None:
    model = served.compilation("classifier").model
    (name, operand), label = next(iter(model.inputs.items())), next(iter(model.outputs))
    shape = [extent or 1 for extent in operand.dimensions or ()]
    asked = {"name": name, "shape": shape, "datatype": "FP32", "data": [0.5] * int(np.prod(shape))}
    response = infer(served, body(asked, outputs=[{"name": label}]), "classifier")
    assert response.status_code == 200, response.text
    assert [one["name"] for one in response.json()["outputs"]] == [label]
    refused = infer(served, body(asked), "classifier")
    assert refused.status_code == 400
    assert "which the Open Inference Protocol lacks" in refused.json()["error"]


def test_how_long_the_model_took(served: OipServed) -> None:
    response = infer(served, body(INPUT0, INPUT1, parameters={"aionn_timing": True}))
    assert set(response.json()["parameters"]) <= {"aionn_time_on_device_us", "aionn_time_in_driver_us"}
    assert response.json()["parameters"]["aionn_time_in_driver_us"] >= 0


# ---- refusals -------------------------------------------------------------------------------------------------------------


FLAT = [1, 2, 3, 4]
REFUSED: list[tuple[tuple[bytes, dict[str, str]], str]] = [
    ((b"", {}), "form that the Open Inference Protocol prescribes"),
    ((b"{", {}), "form that the Open Inference Protocol prescribes"),
    ((b"[]", {}), "Expected `object`"),
    ((b"\xff\xfe", {}), "form that the Open Inference Protocol prescribes"),
    ((b'{"inputs":' + b"[" * 100_000, {}), "form that the Open Inference Protocol prescribes"),
    ((b'{"inputs": {}}', {}), "Expected `array`"),
    ((b"{}", {}), "missing required field `inputs`"),
    (body(INPUT0, INPUT1, id=7), r"Expected `str`, got `int` - at `\$\.id`"),
    (body(INPUT0), "the request has no input 'input1'"),
    (body(INPUT0, INPUT1, INPUT1), "has an input twice"),
    (body(INPUT0, INPUT1, tensor(INPUT1, name="input2")), "the model has no input 'input2'; its inputs are"),
    (body(tensor(INPUT0, name=None), INPUT1), "missing required field `name`"),
    (body(tensor(INPUT0, shape=[4]), INPUT1), r"shape \[4\] does not fit the model's \[2, 2\]"),
    (body(tensor(INPUT0, shape=[-2, -2]), INPUT1), "Expected `int` >= 0"),
    (body(tensor(INPUT0, shape=[2, 10**30]), INPUT1), "does not fit the model's"),
    (body(tensor(INPUT0, shape=[1] * 1000), INPUT1), "does not fit the model's"),
    (body(tensor(INPUT0, datatype="FP8"), INPUT1), "'FP8' is not a datatype; the datatypes are BOOL"),
    (body(tensor(INPUT0, datatype="INT32"), INPUT1), "INT32 does not fit the model's UINT32; values are not cast"),
    (body(tensor(INPUT0, data=None), INPUT1), "give either its data or the parameter binary_data_size"),
    (body(tensor(INPUT0, parameters={"binary_data_size": 16}), INPUT1), "give either its data or"),
    (body(tensor(INPUT0, data=[1, 2, 3]), INPUT1), r"has the shape \[3\], which does not fit \[2, 2\]"),
    (body(tensor(INPUT0, data=[[1, 2, 3, 4]]), INPUT1), r"has the shape \[1, 4\], which does not fit"),
    (body(tensor(INPUT0, data=[[1, 2], [3]]), INPUT1), "does not fit UINT32 of shape"),
    (body(tensor(INPUT0, data=[[[1, 2, 3, 4]]]), INPUT1), "give its data as a flat list, or nested"),
    (body(tensor(INPUT0, data="1234"), INPUT1), "give its data as a flat list"),
    (body(tensor(INPUT0, data=[1, 2, 3, -4]), INPUT1), "Expected `int` >= 0"),
    (body(tensor(INPUT0, data=[1, 2, 3, 2**32]), INPUT1), "Expected `int` <= 4294967295"),
    (body(tensor(INPUT0, data=[1, 2, 3, 4.5]), INPUT1), "Expected `int`, got `float`"),
    (body(tensor(INPUT0, data=[1, 2, 3, True]), INPUT1), "Expected `int`, got `bool`"),
    (body(tensor(INPUT0, data=[1, 2, 3, None]), INPUT1), "Expected `int`, got `null`"),
    (body(INPUT0, tensor(INPUT1, data=[1, 1, 0])), "Expected `bool`, got `int`"),
    (body(tensor(INPUT0, parameters={"shared_memory_region": "a"}), INPUT1), "takes no shared memory"),
    (body(INPUT0, INPUT1, outputs=[{"name": "output1"}]), "the model has no output 'output1'; its outputs are"),
    (body(INPUT0, INPUT1, outputs=[{"name": "output0"}] * 2), "asks for output 'output0' twice"),
    (body(INPUT0, INPUT1, outputs=[{"name": "output0", "parameters": {"classification": 3}}]), "does not classify"),
    (body(INPUT0, INPUT1, outputs=[{"name": "output0", "parameters": {"binary_data": "yes"}}]), "give true or false"),
    (body(INPUT0, INPUT1, outputs=[{"name": "output0", "parameters": {"shared_memory_region": "a"}}]), "takes no shared memory"),
    (body(INPUT0, INPUT1, parameters={"binary_data_output": 1}), "give true or false"),
    (body(INPUT0, INPUT1, parameters={"timeout": -1}), "positive number of microseconds"),
    (body(INPUT0, INPUT1, parameters={"timeout": "1"}), "positive number of microseconds"),
    (body(INPUT0, INPUT1, parameters={"sequence_id": 4}), "keeps no state for a sequence"),
    (body(raw(INPUT0, 15), INPUT1, tail=b"x" * 15), r"binary_data_size is 15, but UINT32 of shape \[2, 2\] has 16 bytes"),
    (body(raw(INPUT0, -16), INPUT1, tail=b"x" * 16), "give a number of bytes"),
    (body(raw(INPUT0, True), INPUT1, tail=b"x"), "give a number of bytes"),
    (body(raw(INPUT0, 16), INPUT1, tail=b"x" * 15), "15 bytes follow the JSON, but its tensors have 16"),
    (body(raw(INPUT0, 16), INPUT1, tail=b"x" * 17), "17 bytes follow the JSON, but its tensors have 16"),
    (body(INPUT0, raw(INPUT1, 3), tail=b"\1\2\0"), "a BOOL is the byte 0 or 1"),
    ((body(INPUT0, INPUT1)[0], {LENGTH: "many"}), "give a number of bytes"),
    ((body(INPUT0, INPUT1)[0], {LENGTH: "-1"}), "give a number of bytes"),
    ((body(INPUT0, INPUT1)[0], {LENGTH: "100000"}), "more than the body has"),
    ((body(INPUT0, INPUT1)[0], {LENGTH: "10"}), "form that the Open Inference Protocol prescribes"),
]


@pytest.mark.parametrize(("asked", "sentence"), REFUSED, ids=[sentence for _, sentence in REFUSED])
def test_a_wrong_request_is_refused_with_a_sentence(served: OipServed, asked: tuple[bytes, dict[str, str]], sentence: str) -> None:
    response = infer(served, asked)
    assert response.status_code == 400
    assert list(response.json()) == ["error"]
    assert re.search(sentence, response.json()["error"]), response.json()
    served.no_frame_is_lost("mymodel")
    assert infer(served, body(INPUT0, INPUT1)).json()["outputs"] == [OUTPUT0], "the next request is not affected"


def test_what_json_cannot_carry(served: OipServed) -> None:
    half = {"name": "FP16", "shape": [1, 3], "datatype": "FP16", "data": [1, 2, 3]}
    assert "does not travel as JSON; send it as binary data" in infer(served, body(half), "half").json()["error"]
    as_raw = body(raw(half, 6), tail=np.arange(3, dtype=np.float16).tobytes())
    assert "does not travel as JSON; ask for it as binary data" in infer(served, as_raw, "half").json()["error"]
    fp32 = {"name": "FP32", "shape": [1, 3], "datatype": "FP32", "data": [1, 2, 3]}
    fp64 = {"name": "FP64", "shape": [1, 3], "datatype": "FP64", "data": [1, 2, 3]}
    nan = body(raw(fp32, 12), fp64, tail=np.array([1, np.nan, 2], np.float32).tobytes())
    refused = infer(served, nan, "floats")
    assert (refused.status_code, "NaN or infinity, which JSON cannot carry" in refused.text) == (400, True)
    too_large = infer(served, body(tensor(fp32, data=[1e39, 0, 0]), fp64), "floats")
    assert (too_large.status_code, "does not fit FP32" in too_large.text) == (400, True)
    beyond = infer(served, (json.dumps({"inputs": [fp32, fp64]}).replace("[1, 2, 3]", "[1, 2, 1e999]").encode(), {}), "floats")
    assert beyond.status_code == 400


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (b"\x01\0\0\0a" * 2, "has 2 elements, but its shape [1, 3] has 3"),
        (b"\x01\0\0\0a" * 4, "has 4 elements"),
        (b"\x01\0\0\0a" * 2 + b"\xff\xff\xff\xffa", "element 2 of the BYTES tensor goes beyond the end"),
        (b"\x01\0\0", "element 0 of the BYTES tensor goes beyond the end"),
        (b"\x01\0\0\0\xff" * 3, "element 0 is not a text in UTF-8"),
    ],
)
def test_texts_of_another_form(served: OipServed, data: bytes, sentence: str) -> None:
    asked = {"name": "BYTES", "shape": [1, 3], "datatype": "BYTES", "parameters": {"binary_data_size": len(data)}}
    response = infer(served, body(asked, tail=data), "texts")
    assert response.status_code == 400
    assert sentence in response.json()["error"]


def test_what_the_model_does_not_compute_is_the_requests_fault(served: OipServed) -> None:
    index = {"name": "index", "shape": [2], "datatype": "INT64", "data": [0, 99]}
    response = infer(served, body(index), "pick")
    assert response.status_code in (400, 422)
    assert "99" in response.json()["error"]
    served.no_frame_is_lost("pick")
    assert infer(served, body(tensor(index, data=[3, 1])), "pick").json()["outputs"][0]["data"] == [3.0, 1.0]


def test_a_large_body_is_refused_before_it_is_read(served: OipServed) -> None:
    """The client sends only the head, so the answer cannot depend on the body."""
    with connected(served) as stream:
        stream.sendall(head("mymodel", f"Content-Length: {LIMIT + 1}"))
        status, headers, text = answer(stream)
        assert (status, b"connection: close" in headers.lower()) == (413, True)
        assert b"more than 1048576 bytes" in text
        assert stream.recv(1) == b""


def test_a_large_body_without_a_length_is_refused_when_it_is_too_large(served: OipServed) -> None:
    def endless() -> Iterator[bytes]:
        for _ in range(LIMIT // 2**16 + 8):
            yield b" " * 2**16

    response = served.http.post("/v2/models/mymodel/infer", content=endless())
    assert response.status_code == 413
    assert infer(served, body(INPUT0, INPUT1)).status_code == 200


def test_a_body_in_chunks_without_a_length(served: OipServed) -> None:
    content, headers = body(raw(INPUT0, 16), raw(INPUT1, 3), tail=struct.pack("<4I3B", 1, 2, 3, 4, 1, 1, 0))
    pieces = [content[at : at + 7] for at in range(0, len(content), 7)]
    response = served.http.post("/v2/models/mymodel/infer", content=iter(pieces), headers=headers)
    assert response.json()["outputs"] == [OUTPUT0]
    longer = served.http.post("/v2/models/mymodel/infer", content=iter([*pieces, b"x"]), headers=headers)
    assert (longer.status_code, "goes on behind its last tensor" in longer.text) == (400, True)
    shorter = served.http.post("/v2/models/mymodel/infer", content=iter(pieces[:-1]), headers=headers)
    assert (shorter.status_code, "before the end of a tensor" in shorter.text) == (400, True)


def test_a_compressed_body_is_refused(served: OipServed) -> None:
    response = served.infer("mymodel", body(INPUT0, INPUT1)[0], {"Content-Encoding": "gzip"})
    assert (response.status_code, "leave out Content-Encoding" in response.text) == (415, True)


def test_a_client_that_leaves_in_the_midst_of_a_body_leaves_no_frame(served: OipServed) -> None:
    """Its tensors come in chunks, so a frame is leased for them."""
    rows = 2**17 // 12
    fp32 = {"name": "FP32", "shape": [rows, 3], "datatype": "FP32", "parameters": {"binary_data_size": rows * 12}}
    fp64 = {"name": "FP64", "shape": [rows, 3], "datatype": "FP64", "parameters": {"binary_data_size": rows * 24}}
    text = json.dumps({"inputs": [fp32, fp64]}).encode()
    for _ in range(12):  # more than may stream at once
        with connected(served) as stream:
            stream.sendall(head("floats", f"{LENGTH}: {len(text)}", f"Content-Length: {len(text) + rows * 36}") + text + b"\0" * 70_000)
            until(lambda: served.counts("floats")["pinned_frames"] == 1)
        until(lambda: served.counts("floats")["pinned_frames"] == 0)
    whole = infer(served, (text + b"\0" * (rows * 36), {LENGTH: str(len(text))}), "floats")
    assert whole.status_code == 200


def test_clients_that_stall_do_not_hold_up_others(served: OipServed) -> None:
    rows = 2**17 // 12
    fp32 = {"name": "FP32", "shape": [rows, 3], "datatype": "FP32", "parameters": {"binary_data_size": rows * 12}}
    fp64 = {"name": "FP64", "shape": [rows, 3], "datatype": "FP64", "parameters": {"binary_data_size": rows * 24}}
    text = json.dumps({"inputs": [fp32, fp64]}).encode()
    stalled = [connected(served) for _ in range(24)]
    try:
        for stream in stalled:
            stream.sendall(head("floats", f"{LENGTH}: {len(text)}", f"Content-Length: {len(text) + rows * 36}") + text + b"\0" * 70_000)
        until(lambda: served.counts("floats")["pinned_frames"] == 4)
        for _ in range(20):
            assert infer(served, (text + b"\0" * (rows * 36), {LENGTH: str(len(text))}), "floats").status_code == 200
            assert served.counts("floats")["pinned_frames"] == 4
    finally:
        for stream in stalled:
            stream.close()
    until(lambda: served.counts("floats")["pinned_frames"] == 0)


def test_a_body_that_stalls_is_refused_in_the_end(served: OipServed, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first has no JSON yet, the second a frame, and the third waits for small tensors."""
    monkeypatch.setattr("aionn.asgi.open_inference.inference.BODY_S", 0.3)
    large, _ = body(raw({"name": "index", "shape": [2**16], "datatype": "INT64"}, 2**19))
    small, _ = body(raw({"name": "index", "shape": [2], "datatype": "INT64"}, 16))
    for text, more in ((b"{", 0), (large, 2**19), (small, 16)):
        with connected(served) as stream:
            said = len(text) + max(more, 1)
            stream.sendall(head("pick", f"{LENGTH}: {len(text) + (not more)}", f"Content-Length: {said}") + text)
            status, headers, answered = answer(stream)
            assert (status, b"did not arrive within 0.3 s" in answered) == (408, True)
            assert b"connection: close" in headers.lower()
    served.no_frame_is_lost("pick")


# ---- bodies that hypothesis makes -----------------------------------------------------------------------------------------

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(width=32) | st.text(max_size=5),
    lambda one: st.lists(one, max_size=4),
    max_leaves=8,
)
NAMES = st.sampled_from(["input0", "input1", "index", "FP32", "FP64", "BYTES", "FP16", "output0", ""]) | st.text(max_size=3)
DATATYPES = st.sampled_from(["UINT32", "BOOL", "INT64", "FP32", "FP64", "BYTES", "FP16", "BF16", "X"])
SIZES = st.integers(-2, 40) | JSON
PARAMETERS = st.dictionaries(st.sampled_from(["binary_data_size", "binary_data", "timeout", "aionn_timing", "priority"]), SIZES, max_size=2)
TENSORS = st.fixed_dictionaries(
    {"name": NAMES, "shape": st.lists(st.integers(-1, 4), max_size=3) | JSON, "datatype": DATATYPES},
    optional={"data": JSON | st.lists(st.integers(-3, 300), max_size=6), "parameters": PARAMETERS},
)
VALID = [
    ("mymodel", {"inputs": [INPUT0, INPUT1]}, b""),
    ("mymodel", {"inputs": [raw(INPUT0, 16), raw(INPUT1, 3)]}, b"\1" * 19),
    ("pick", {"inputs": [{"name": "index", "shape": [2], "datatype": "INT64", "data": [1, 2]}]}, b""),
    ("pick", {"inputs": [{"name": "index", "shape": [2], "datatype": "INT64", "parameters": {"binary_data_size": 16}}]}, b"\0" * 16),
    ("texts", {"inputs": [{"name": "BYTES", "shape": [1, 3], "datatype": "BYTES", "data": ["a", "", "b"]}]}, b""),
    (
        "texts",
        {"inputs": [{"name": "BYTES", "shape": [1, 3], "datatype": "BYTES", "parameters": {"binary_data_size": 14}}]},
        b"\1\0\0\0a" * 2 + b"\0\0\0\0",
    ),
]
"""Model, JSON and raw bytes of requests that are answered with 200."""


@st.composite
def requests(draw: st.DrawFn) -> tuple[str, bytes, dict[str, str]]:
    """A body that is nearly right, or not at all: other values in it, other bytes behind it, another length said."""
    model, message, right = draw(st.sampled_from(VALID))
    message = json.loads(json.dumps(message))
    for _ in range(draw(st.integers(0, 3))):
        change = draw(st.integers(0, 4))
        if change == 0:
            message["inputs"] = draw(st.lists(TENSORS, max_size=3))
        elif change == 1:
            message["parameters"] = draw(PARAMETERS | JSON)
        elif change == 2:
            message["outputs"] = draw(st.lists(st.fixed_dictionaries({"name": NAMES, "parameters": PARAMETERS}), max_size=2) | JSON)
        elif isinstance(message["inputs"], list) and message["inputs"]:
            one = draw(st.sampled_from(message["inputs"]))
            one[draw(st.sampled_from(["name", "shape", "datatype", "data", "parameters"]))] = draw(JSON | PARAMETERS)
    text = json.dumps(message).encode()
    tail = draw(st.just(right) | st.sampled_from([tail for _, _, tail in VALID]) | st.binary(max_size=24))
    if draw(st.booleans()):
        text = text[: draw(st.integers(0, len(text)))] + draw(st.binary(max_size=3))
    said = draw(st.just(len(text)) | st.integers(-1, len(text) + 40) | st.none())
    return model, text + tail, {} if said is None else {LENGTH: str(said)}


ALLOWED = {200, 400, 415, 422, 504}


def ask(served: OipServed, request: tuple[str, bytes, dict[str, str]]) -> int:
    model, content, headers = request
    response = served.infer(model, content, headers)
    assert response.status_code in ALLOWED, (request, response.text)
    if response.status_code != 200:
        assert list(response.json()) == ["error"]
    return int(response.status_code)


def check_made_bodies(served: OipServed, examples: int) -> None:
    seen: dict[int, int] = {}

    @settings(max_examples=examples, derandomize=examples < 1000)
    @given(requests())
    def check(request: tuple[str, bytes, dict[str, str]]) -> None:
        status = ask(served, request)
        seen[status] = seen.get(status, 0) + 1

    check()
    assert seen[200] > 5, f"some bodies must be right: {seen}"
    assert seen[400] > 50, seen
    for name in ("mymodel", "pick"):
        served.no_frame_is_lost(name)
    assert infer(served, body(INPUT0, INPUT1)).json()["outputs"] == [OUTPUT0]
    print(f"F19: {sum(seen.values())} bodies, answered {seen}")


def test_made_bodies_cost_no_frame_and_no_500(served: OipServed) -> None:
    check_made_bodies(served, 400)


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_row_f19(served: OipServed) -> None:
    check_made_bodies(served, 10_000)
