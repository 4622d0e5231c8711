"""Clients of the Open Inference Protocol that mean harm: what they send costs them their request, and nobody else anything."""

from __future__ import annotations

import asyncio
import json
import select
import struct
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import anyio
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import aionn
from aionn.asgi.open_inference.incoming import AwaitedBodies
from tests.asgi.oip_by_hand import INPUT0, INPUT1, LENGTH, OUTPUT0, answer, answer_in, body, connected, head, raw, until
from tests.asgi.oip_models import example_model, repeating
from tests.asgi.oip_served import OipServed, oip_served
from tests.runtime.values_models import model_of

LIMIT = 2**20
FLOATS = {"name": "FP32", "datatype": "FP32"}
TEXTS = {"name": "BYTES", "datatype": "BYTES"}


def model_of_any_rank() -> aionn.Model:
    return model_of([helper.make_node("Identity", ["x"], ["y"])], {"x": (TensorProto.FLOAT, None)}, {"y": (TensorProto.FLOAT, None)})


def model_that_finds() -> aionn.Model:
    """Return a model whose output has as many columns as its input has values that are not 0."""
    return model_of([helper.make_node("NonZero", ["x"], ["at"])], {"x": (TensorProto.FLOAT, [4])}, {"at": (TensorProto.INT64, [1, "M"])})


def model_that_parts_texts() -> aionn.Model:
    nodes: list[onnx.NodeProto] = [helper.make_node("Split", ["both"], ["left", "right"], axis=0, num_outputs=2)]
    string = TensorProto.STRING
    return model_of(nodes, {"both": (string, [2])}, {"left": (string, [1]), "right": (string, [1])})


@pytest.fixture(scope="module")
def served() -> Iterator[OipServed]:
    ort: dict[str, Any] = {"devices": ("onnxruntime",)}
    models: dict[str, aionn.asgi.ModelSpec] = {
        "mymodel": (example_model(), ort),
        "floats": (repeating({"FP32": 1}), ort),
        "texts": (repeating({"BYTES": 8}), ort),
        "any": (model_of_any_rank(), ort),
        "find": (model_that_finds(), ort),
        "part": (model_that_parts_texts(), ort),
    }
    with oip_served(models, max_body_bytes=LIMIT) as running:
        yield running


def still_serves(served: OipServed) -> None:
    content, headers = body(INPUT0, INPUT1)
    assert served.infer("mymodel", content, headers).json()["outputs"] == [OUTPUT0]
    for name in ("mymodel", "floats", "any"):
        served.no_frame_is_lost(name)


# ---- what a request says of itself ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [[0, 2**63], [0, 2**30, 2**30, 2**30], [0, 2**40], [2**63], [10**30, 0]])
@pytest.mark.parametrize("in_json", [True, False], ids=["json", "raw"])
def test_extents_that_no_array_has(served: OipServed, shape: list[int], in_json: bool) -> None:
    """A tensor with an extent of 0 has no elements, whatever its other extents are."""
    one: dict[str, Any] = {"name": "x", "shape": shape, "datatype": "FP32", "data": []}
    response = served.infer("any", *body(one if in_json else raw(one, 0)))
    assert response.status_code == 400, response.text
    assert "beyond what an array can have" in response.json()["error"] or "Integer value out of range" in response.json()["error"]
    still_serves(served)


@pytest.mark.parametrize("shape", [[0], [0, 2**31 - 1], [3, 0, 7], [1] * 32])
def test_tensors_without_elements_and_with_many_axes(served: OipServed, shape: list[int]) -> None:
    one = {"name": "x", "shape": shape, "datatype": "FP32", "data": [] if 0 in shape else [1.5]}
    response = served.infer("any", *body(one))
    assert response.status_code == 200, response.text
    assert response.json()["outputs"][0]["shape"] == shape
    still_serves(served)


@pytest.mark.parametrize(
    ("model", "one"),
    [
        ("floats", raw({**FLOATS, "shape": [10**12, 3]}, 12 * 10**12)),
        ("texts", raw({**TEXTS, "shape": [1, 3]}, 10**15)),
        ("texts", raw({**TEXTS, "shape": [1, 3]}, 10**30)),
        ("texts", raw({**TEXTS, "shape": [1, 3]}, LIMIT)),
    ],
)
def test_a_body_without_a_length_that_promises_too_much(served: OipServed, model: str, one: dict[str, Any]) -> None:
    """The answer comes before the body, so nothing was set aside for it."""
    text, _ = body(one)
    with connected(served) as stream:
        stream.sendall(head(model, "Transfer-Encoding: chunked", f"{LENGTH}: {len(text)}") + b"%x\r\n" % len(text) + text + b"\r\n")
        status, headers, answered = answer(stream)
    assert status in (400, 413), answered
    if status == 413:
        assert b"connection: close" in headers.lower()
    still_serves(served)


def test_raw_bytes_without_the_header_that_says_where_they_begin(served: OipServed) -> None:
    content, headers = body(raw({**FLOATS, "shape": [1, 3]}, 12), tail=b"\0" * 12)
    response = served.infer("floats", content[:-12])
    assert (response.status_code, LENGTH in response.json()["error"]) == (400, True)
    assert served.infer("floats", content, headers).status_code == 200


def test_a_name_as_long_as_the_body_does_not_come_back_whole(served: OipServed) -> None:
    response = served.infer("texts", *body({**TEXTS, "name": "x" * 500_000, "shape": [1, 3], "data": ["a"] * 3}))
    assert response.status_code == 400
    assert response.json()["error"].startswith("the model has no input 'xxx")
    assert response.json()["error"].endswith("xxx'; its inputs are ['BYTES']")
    assert len(response.content) < 3000
    still_serves(served)


def test_a_header_with_two_values(served: OipServed) -> None:
    """A proxy may have read the other one."""
    content, _ = body(INPUT0, INPUT1)
    for lengths, expected in (((len(content), 1), 400), ((len(content), len(content)), 200), ((f"{len(content)} ",), 200)):
        with connected(served) as stream:
            stream.sendall(head("mymodel", f"Content-Length: {len(content)}", *(f"{LENGTH}: {one}" for one in lengths)) + content)
            status, _, answered = answer(stream)
            assert status == expected, answered
            assert (b"inference-header-content-length has two values" in answered) == (expected == 400)


@pytest.mark.parametrize("lie", ["Content-Length: 5", "Transfer-Encoding: chunked"])
def test_two_lengths_end_the_connection(served: OipServed, lie: str) -> None:
    """They are what requests are smuggled with. uvicorn refuses them."""
    content, _ = body(INPUT0, INPUT1)
    with connected(served) as stream:
        stream.sendall(head("mymodel", f"Content-Length: {len(content)}", lie) + content)
        assert answer(stream)[0] == 400
        assert stream.recv(1) == b""
    still_serves(served)


def test_requests_that_come_at_once_are_answered_in_order(served: OipServed) -> None:
    with connected(served) as stream:
        for number in range(20):
            content, _ = body(INPUT0, INPUT1, id=str(number))
            stream.sendall(head("mymodel", f"Content-Length: {len(content)}") + content)
        with stream.makefile("rb") as lines:
            for number in range(20):
                status, _, answered = answer_in(lines)
                assert (status, json.loads(answered)["id"]) == (200, str(number))


@pytest.mark.parametrize("method", ["GET", "OPTIONS", "TRACE", "CONNECT", "DELETE"])
def test_other_methods_get_the_protocols_errors(served: OipServed, method: str) -> None:
    response = served.http.request(method, "/v2/models/mymodel/infer")
    assert (response.status_code, response.headers["Allow"]) == (405, "POST")
    assert response.json()["error"] == f"the path /v2/models/mymodel/infer takes POST, not {method}"


# ---- answers that are made from earlier ones ------------------------------------------------------------------------------


def test_the_same_json_with_outputs_of_other_shapes(served: OipServed) -> None:
    one = raw({"name": "x", "shape": [4], "datatype": "FP32"}, 16)
    for values in ([1, 0, 1, 0], [0, 1, 1, 1], [0, 0, 0, 0], [1, 0, 0, 0], [0, 0, 0, 5]):
        content, headers = body(one, tail=struct.pack("<4f", *values), parameters={"binary_data_output": True})
        response = served.infer("find", content, headers)
        at = int(response.headers[LENGTH])
        (described,) = json.loads(response.content[:at])["outputs"]
        found = np.flatnonzero(values)
        assert described["shape"] == [1, len(found)]
        assert described["parameters"] == {"binary_data_size": 8 * len(found)}
        assert np.array_equal(np.frombuffer(response.content[at:], np.int64), found)


def test_the_same_json_with_texts_of_other_lengths(served: OipServed) -> None:
    def packed(text: bytes) -> bytes:
        return struct.pack("<I", len(text)) + text

    for left, right in ((b"a", b"bcd"), (b"abc", b"d"), (b"", b"abcd")):
        content, headers = body(
            raw({"name": "both", "shape": [2], "datatype": "BYTES"}, 12),
            tail=packed(left) + packed(right),
            parameters={"binary_data_output": True},
        )
        response = served.infer("part", content, headers)
        at = int(response.headers[LENGTH])
        sizes = [one["parameters"]["binary_data_size"] for one in json.loads(response.content[:at])["outputs"]]
        assert sizes == [4 + len(left), 4 + len(right)]
        assert response.content[at:] == packed(left) + packed(right)


# ---- bodies that come slowly ----------------------------------------------------------------------------------------------


def test_a_body_that_trickles_is_refused_in_the_end(served: OipServed, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each byte comes in time, and so the server never waits for long."""
    with monkeypatch.context() as patch, connected(served) as stream:
        patch.setattr("aionn.asgi.open_inference.inference.BODY_S", 0.5)
        stream.sendall(head("mymodel", f"Content-Length: {LIMIT}"))
        while not select.select([stream], [], [], 0.01)[0]:
            stream.sendall(b" ")
        status, headers, answered = answer(stream)
    assert (status, b"did not arrive within 0.5 s" in answered) == (408, True)
    assert b"connection: close" in headers.lower()
    still_serves(served)


def test_bodies_of_many_clients_have_one_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four bodies of the largest size are kept here. A fifth is refused, until one of them has gone."""
    monkeypatch.setattr("aionn.asgi.open_inference.incoming.ROOM_BYTES", 0)
    size = LIMIT - 2**12
    text, _ = body(raw({**TEXTS, "shape": [1, 3]}, size))
    began = head("texts", f"{LENGTH}: {len(text)}", f"Content-Length: {len(text) + size}") + text + b"\0" * 70_000
    whole = struct.pack("<I", size - 12) + b"x" * (size - 12) + struct.pack("<II", 0, 0)
    models: dict[str, aionn.asgi.ModelSpec] = {"texts": (repeating({"BYTES": 8}), {"devices": ("onnxruntime",)})}
    with oip_served(models, max_body_bytes=LIMIT) as served, ExitStack() as stalled:

        def one_more_is_refused() -> bool:
            stream = stalled.enter_context(connected(served))
            stream.sendall(began)
            if not select.select([stream], [], [], 0.2)[0]:
                return False
            status, headers, answered = answer(stream)
            assert (status, b"try again later" in answered) == (503, True)
            assert b"retry-after: 1" in headers.lower()
            return True

        until(one_more_is_refused)
        small, _ = body({**TEXTS, "shape": [1, 3], "data": ["a", "b", "c"]})
        assert served.infer("texts", small).status_code == 200, "what comes in one piece is not counted"
        assert served.infer("texts", text + whole, {LENGTH: str(len(text))}).status_code == 503
        stalled.close()
        until(lambda: served.infer("texts", text + whole, {LENGTH: str(len(text))}).status_code == 200)
        for _ in range(8):
            assert served.infer("texts", text + whole, {LENGTH: str(len(text))}).status_code == 200, "each gives its room back"


UVLOOP, PLAIN = ("asyncio", {"use_uvloop": True}), ("asyncio", {"use_uvloop": False})


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", [UVLOOP, PLAIN], ids=["uvloop", "asyncio"])
class TestArrivals:
    async def test_each_wait_ends_in_time(self, anyio_backend: Any) -> None:
        arrivals = AwaitedBodies()
        loop = asyncio.get_running_loop()
        began_s = loop.time()

        async def wait(by_s: float) -> float:
            with pytest.raises(TimeoutError):
                await arrivals.message(anyio.Event().wait, by_s)  # type: ignore[arg-type]
            task = asyncio.current_task()
            assert task is not None
            assert task.cancelling() == 0, "the task may wait again"
            return loop.time() - by_s

        late = await asyncio.gather(*(wait(began_s + seconds) for seconds in (0.2, 0.1, 0.3, 0.1)))
        assert min(late) > -0.01
        assert await wait(loop.time() - 1) > 0, "a deadline that has passed"
        patient = asyncio.create_task(arrivals.message(anyio.Event().wait, loop.time() + 600))  # type: ignore[arg-type]
        await asyncio.sleep(0)
        with anyio.fail_after(60):
            await wait(loop.time() + 0.1)  # an earlier deadline than the timer's
        patient.cancel()
        with pytest.raises(asyncio.CancelledError):
            await patient

    async def test_what_is_there_is_handed_out_without_an_end(self, anyio_backend: Any) -> None:
        async def receive() -> Any:
            return {"type": "http.request"}

        arrivals = AwaitedBodies()
        assert await arrivals.message(receive, asyncio.get_running_loop().time() + 60) == {"type": "http.request"}

    async def test_a_cancellation_by_others_stays_one(self, anyio_backend: Any) -> None:
        arrivals = AwaitedBodies()
        with anyio.CancelScope() as scope:
            scope.cancel()
            await arrivals.message(anyio.Event().wait, asyncio.get_running_loop().time() + 60)  # type: ignore[arg-type]
        assert scope.cancelled_caught
        task = asyncio.create_task(arrivals.message(anyio.Event().wait, asyncio.get_running_loop().time()))  # type: ignore[arg-type]
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
