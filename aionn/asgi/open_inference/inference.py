"""One request for inference: its inputs are read, the model computes, and the answer is written.

A body that has arrived with the request's head is used where it lies, and copied once, into the burst's memory. A large body that arrives
in chunks is written chunk by chunk into a frame, which is one copy, too. Where too many bodies do that, or the model has texts, the body
is put together first.
"""

from __future__ import annotations

import time
from typing import Any

import anyio
import msgspec
import numpy as np
from numpy.typing import NDArray
from starlette.responses import Response

import aionn
from aionn.asgi.open_inference.incoming import Incoming
from aionn.asgi.open_inference.messages import ModelRequest, asked_of, decoded
from aionn.asgi.open_inference.targets import VERSION, ServedModel
from aionn.asgi.open_inference.tensors import array_of, as_bytes, as_json, check_bools, datatype, from_json
from aionn.hal.types import UNKNOWN_TIME_US, OperandType

BODY_S = 60.0
"""A body that has not arrived after so many seconds is refused, so a client that stalls holds nothing for longer."""

_SHORT_BYTES = 2048
"""A longer JSON has data in it, which no other request has."""

_LARGE_BYTES = 2**18
"""A smaller body is put together faster than a frame is leased for it."""


async def infer(incoming: Incoming, target: ServedModel) -> Response:
    """Answer a request for inference.

    Raises:
        Refusal: the request cannot be answered, in the protocol's or in the model's terms.
        AionnError: as `Burst.compute`.
    """
    began_ns = time.monotonic_ns()
    counts = target.counts
    counts.last_ms = time.time_ns() // 1_000_000
    try:
        response, read_ns, called_ns = await _answered(incoming, target, began_ns)
    except BaseException:
        counts.failed += 1
        counts.fail_ns += time.monotonic_ns() - began_ns
        raise
    finally:
        incoming.close()
    ended_ns = time.monotonic_ns()
    counts.succeeded += 1
    counts.success_ns += ended_ns - began_ns
    counts.read_ns += read_ns - began_ns
    counts.call_ns += called_ns - read_ns
    counts.write_ns += ended_ns - called_ns
    return response


async def _answered(incoming: Incoming, target: ServedModel, began_ns: int) -> tuple[Response, int, int]:
    """Return the answer, when all inputs were there, and when the model had answered."""
    incoming.expect(target.arrivals, BODY_S)
    asked = _asked(await incoming.json(), target)
    incoming.check_rest(asked.binary_bytes)
    deadline_ns = None if asked.timeout_s is None else began_ns + round(asked.timeout_s * 1e9)
    if target.burst is not None and _is_large(incoming, asked):
        try:
            target.streaming.acquire_on_behalf_of_nowait(incoming)
        except anyio.WouldBlock:
            pass  # too many bodies hold frames
        else:
            return await _streamed(incoming, target, target.burst, (asked, deadline_ns))
    data = await incoming.take(asked.binary_bytes)
    await incoming.end()
    arrays = _arrays(data, asked)
    read_ns = time.monotonic_ns()
    outputs = await target.compute(arrays, asked.timing, deadline_ns)
    called_ns = time.monotonic_ns()
    return _response(asked, target, outputs), read_ns, called_ns


def _asked(text: memoryview, target: ServedModel) -> ModelRequest:
    key = bytes(text) if len(text) <= _SHORT_BYTES else b""
    asked = target.asked.get(key)
    if asked is None:
        model = target.compilation.model
        asked = asked_of(decoded(key or text), model.inputs, model.outputs)  # of the copy, because JSON data refers to its text
        if key:
            target.asked[key] = asked
    return asked


def _is_large(incoming: Incoming, asked: ModelRequest) -> bool:
    """Return whether much of the body is still to come."""
    return asked.binary_bytes - incoming.at_hand >= _LARGE_BYTES and all(tensor.operand.in_frames for tensor in asked.inputs)


def _arrays(data: memoryview, asked: ModelRequest) -> dict[str, NDArray[Any]]:
    """Return the inputs by name. Raw bytes are used where they lie."""
    arrays: dict[str, NDArray[Any]] = {}
    at = 0
    for tensor in asked.inputs:
        size = tensor.binary_bytes
        if size is None:
            arrays[tensor.name] = from_json(tensor.name, tensor.operand, tensor.shape, tensor.data)
            continue
        if tensor.dtype is not None:
            arrays[tensor.name] = np.ndarray(tensor.shape, tensor.dtype, data, at)
        else:
            arrays[tensor.name] = array_of(tensor.name, tensor.operand, tensor.shape, data[at : at + size])
        at += size
    return arrays


async def _streamed(
    incoming: Incoming, target: ServedModel, burst: aionn.Burst, request: tuple[ModelRequest, int | None]
) -> tuple[Response, int, int]:
    """Answer a request whose body is written into a frame while it arrives."""
    asked, deadline_ns = request
    try:
        async with burst.frame({tensor.name: tensor.shape for tensor in asked.inputs}) as frame:
            await _fill(frame, incoming, asked)
            read_ns = time.monotonic_ns()
            outputs = await target.compute(frame, asked.timing, deadline_ns)
            called_ns = time.monotonic_ns()
            return _response(asked, target, outputs), read_ns, called_ns
    finally:
        target.streaming.release_on_behalf_of(incoming)


async def _fill(frame: aionn.Frame, incoming: Incoming, asked: ModelRequest) -> None:
    """Write every input into a frame, except for those that have a default and are left out."""
    for tensor in asked.inputs:
        if tensor.binary_bytes is None:
            frame[tensor.name] = from_json(tensor.name, tensor.operand, tensor.shape, tensor.data)
        else:
            place = frame[tensor.name].reshape(-1).view(np.uint8)
            await incoming.into([place.data])
            if tensor.operand.type is OperandType.BOOL:
                check_bools(tensor.name, place)
    await incoming.end()


def _response(asked: ModelRequest, target: ServedModel, outputs: aionn.Outputs) -> Response:
    """Return the answer. It has copies of the outputs, whose memory is free from then on."""
    arrays = [outputs[name] for name in asked.outputs]
    shapes = [array.shape for array in arrays]
    head, of = asked.answered
    if shapes != of:
        head = msgspec.json.encode(_described(asked, target, outputs))
        if not asked.timing and asked.raw == "all" and all(array.dtype != object for array in arrays):
            asked.answered = head, shapes  # no value is in it, and no size of a text
    if asked.raw == "none":
        return EncodedAnswer(head, b"application/json")
    if asked.raw == "some":
        arrays = [array for array, binary in zip(arrays, asked.outputs.values(), strict=True) if binary]
    body = b"".join([head, *map(as_bytes, arrays)])
    return EncodedAnswer(body, b"application/octet-stream", (b"inference-header-content-length", b"%d" % len(head)))


def _described(asked: ModelRequest, target: ServedModel, outputs: aionn.Outputs) -> dict[str, Any]:
    """Return the JSON of an answer."""
    described: list[dict[str, Any]] = []
    for name, binary in asked.outputs.items():
        array, operand = outputs[name], target.compilation.model.outputs[name]
        one: dict[str, Any] = {"name": name, "datatype": datatype(operand), "shape": list(array.shape)}
        if binary:
            one["parameters"] = {"binary_data_size": len(as_bytes(array))}
        else:
            one["data"] = as_json(name, operand, array)
        described.append(one)
    answer: dict[str, Any] = {"model_name": target.name, "model_version": VERSION, "outputs": described}
    if asked.id:
        answer["id"] = asked.id
    if asked.timing and outputs.timing is not None:
        timing = outputs.timing
        known = {"aionn_time_on_device_us": timing.on_device_us, "aionn_time_in_driver_us": timing.in_driver_us}
        answer["parameters"] = {name: us for name, us in known.items() if us != UNKNOWN_TIME_US}
    return answer


class EncodedAnswer(Response):
    """An answer with status 200. Its headers need no encoding, so it is made in a fifth of the time."""

    def __init__(self, body: bytes, media_type: bytes, *headers: tuple[bytes, bytes]) -> None:
        self.status_code = 200
        self.background = None
        self.body = body
        self.raw_headers = [(b"content-length", b"%d" % len(body)), (b"content-type", media_type), *headers]
