"""`oip`: the routes of the Open Inference Protocol.

A request for inference has its inputs read, the model computes, and the answer is written. A body that has arrived with the request's head
is used where it lies, and copied once, into the burst's memory. A large body that arrives in chunks is written chunk by chunk into a frame,
which is one copy, too. Where too many bodies do that, or the model has texts, the body is put together first.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from importlib.util import find_spec
from typing import Any

import anyio
import msgspec
import numpy as np
from numpy.typing import NDArray
from starlette.requests import HTTPConnection, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route
from starlette.types import Receive, Scope, Send

import aionn
from aionn.asgi.open_inference.incoming import Incoming, Room
from aionn.asgi.open_inference.refusals import RequestRefusal, refusal_of
from aionn.asgi.open_inference.targets import VERSION, ServedModel, Targets, checked_targets
from aionn.asgi.open_inference.tensors import (
    ModelRequest,
    array_of,
    as_bytes,
    as_json,
    asked_of,
    check_bools,
    datatype,
    decoded,
    from_json,
    shape_of,
)
from aionn.asgi.requests import RETRY_AFTER_S
from aionn.asgi.served import Models
from aionn.errors import AionnError
from aionn.hal.types import UNKNOWN_TIME_US, Operand, OperandType
from aionn.loopless import checked_count

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
        head = msgspec.json.encode(_answer_head(asked, target, outputs))
        if not asked.timing and asked.raw == "all" and all(array.dtype != object for array in arrays):
            asked.answered = head, shapes  # no value is in it, and no size of a text
    if asked.raw == "none":
        return EncodedAnswer(head, b"application/json")
    if asked.raw == "some":
        arrays = [array for array, binary in zip(arrays, asked.outputs.values(), strict=True) if binary]
    body = b"".join([head, *map(as_bytes, arrays)])
    return EncodedAnswer(body, b"application/octet-stream", (b"inference-header-content-length", b"%d" % len(head)))


def _answer_head(asked: ModelRequest, target: ServedModel, outputs: aionn.Outputs) -> dict[str, Any]:
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


Handler = Callable[[Request], Awaitable[Response]]

_METHODS = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "CONNECT"]

EXTENSIONS = ["binary_tensor_data", "statistics"]


def oip(
    runtime: aionn.Runtime | None = None,
    models: Models | Mapping[str, aionn.Compilation] | None = None,
    *,
    max_body_bytes: int = 64 * 2**20,
    retry_stateless: int = 1,
) -> list[BaseRoute]:
    """Return the routes of the Open Inference Protocol (KServe v2): `app.routes.extend(aionn.asgi.oip())`.

    They are /v2, /v2/health/live, /v2/health/ready, and for each model /v2/models/NAME with /ready, /infer and /stats, also behind
    /versions/1. Where prometheus_client is installed, /metrics has the metrics of this process. All requests of a model share one burst.

    Errors are answered as `{"error": ...}`: 400 for a request that does not fit the protocol or the model, 404 for an unknown model, 408
    for a body that stalls, 413 for one that is too large, 422 where the model does not compute the values, 503 with `Retry-After`
    while a model compiles or its driver starts again, and 504 if the request's parameter `timeout` (in microseconds) has passed. All
    bodies together may take 512 MiB, or four times `max_body_bytes` if that is more. Beyond that a request is answered with 503, too.

    Args:
        runtime: of the compilations. None for the one that `aionn.asgi.lifespan` opens.
        models: compilations by name, which the app may change while it serves. None for the models of `aionn.asgi.lifespan`.
        max_body_bytes: a request with a larger body is refused with 413, before the body is read if the request says its size.
        retry_stateless: how often a call is made again after its driver has died. The protocol's calls have no state, so that is safe.
            After any other error a call is not made again.

    Raises:
        CallerError: an argument is wrong.
    """
    targets = checked_targets(runtime, models, checked_count("oip: retry_stateless", retry_stateless, 0))
    routes = _Routes(targets, checked_count("oip: max_body_bytes", max_body_bytes, 1))
    one = "/v2/models/{model}"
    paths: list[tuple[str, Handler, str]] = [
        ("/v2", routes.server, "GET"),
        ("/v2/health/live", routes.live, "GET"),
        ("/v2/health/ready", routes.ready, "GET"),
        ("/v2/models/stats", routes.all_statistics, "GET"),
    ]
    for prefix in (one, one + "/versions/{version}"):
        paths += [
            (prefix, routes.model, "GET"),
            (prefix + "/ready", routes.model_ready, "GET"),
            (prefix + "/stats", routes.statistics, "GET"),
        ]
    inferences = [one + "/infer", one + "/versions/{version}/infer"]
    found: list[BaseRoute] = [Route(path, _Inference(routes), methods=_METHODS) for path in inferences]  # first: routes are tried in order
    found += [Route(path, routes.answered(handler, method), methods=_METHODS) for path, handler, method in paths]
    if find_spec("prometheus_client") is not None:
        found.append(Route("/metrics", _metrics()))
    return [*found, Route("/v2/{rest:path}", routes.answered(routes.unknown), methods=_METHODS)]


class _Routes:
    def __init__(self, targets: Targets, max_body_bytes: int) -> None:
        self._targets = targets
        self._max_body_bytes = max_body_bytes
        self._room = Room(max_body_bytes)

    def answered(self, handler: Handler, method: str = "") -> Handler:
        """Return a handler that answers errors of aionn as the protocol does. `method`: the only one that the path has, or empty."""

        @functools.wraps(handler)
        async def answer(request: Request) -> Response:
            if method and request.method not in (method, "HEAD" if method == "GET" else method):
                return _wrong_method(request, method)
            try:
                return await handler(request)
            except (AionnError, RequestRefusal) as error:
                return self.refused(error, request)

        return answer

    def refused(self, error: AionnError | RequestRefusal, connection: HTTPConnection) -> Response:
        """Return the answer for an error."""
        refusal = error if isinstance(error, RequestRefusal) else refusal_of(error, self._targets.runtime(connection))
        return refusal.response()

    async def server(self, request: Request) -> Response:
        from importlib.metadata import version  # most processes answer this once

        return JSONResponse({"name": "aionn", "version": version("aionn"), "extensions": EXTENSIONS})

    async def live(self, request: Request) -> Response:
        live = self._targets.runtime(request).health().live
        return _health({"live": live}, live)

    async def ready(self, request: Request) -> Response:
        ready = self._targets.runtime(request).health().ready
        return _health({"ready": ready}, ready)

    async def model(self, request: Request) -> Response:
        target = await self._target(request)
        model = target.compilation.model
        return JSONResponse(
            {
                "name": target.name,
                "versions": [VERSION],
                "platform": f"aionn_{model.format}",
                "inputs": _described(model.inputs),
                "outputs": _described(model.outputs),
            }
        )

    async def model_ready(self, request: Request) -> Response:
        try:
            target = await self._target(request)
        except RequestRefusal as refusal:
            if refusal.status != 503:
                raise
            return _health({"name": request.path_params["model"], "ready": False, "error": str(refusal)}, False)
        live = self._targets.runtime(request).health().live
        return _health({"name": target.name, "ready": live}, live)

    async def infer(self, connection: HTTPConnection, receive: Receive) -> Response:
        incoming = Incoming(connection.scope, receive, self._max_body_bytes, self._room)
        return await infer(incoming, await self._target(connection))

    async def statistics(self, request: Request) -> Response:
        return JSONResponse({"model_stats": [(await self._target(request)).statistics()]})

    async def all_statistics(self, request: Request) -> Response:
        return JSONResponse({"model_stats": [target.statistics() for target in await self._targets.serving(request)]})

    async def unknown(self, request: Request) -> Response:
        raise RequestRefusal(404, f"the path {request.url.path} is unknown to this server")

    def _target(self, connection: HTTPConnection) -> Coroutine[Any, Any, ServedModel]:
        parameters = connection.path_params
        return self._targets.find(connection, parameters["model"], parameters.get("version", VERSION))


class _Inference:
    """The ASGI app of a path for inference.

    It is not a function of a request, because what Starlette makes around such a function costs a tenth of the time for a small request.
    """

    def __init__(self, routes: _Routes) -> None:
        self._routes = routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        connection = HTTPConnection(scope)
        if scope["method"] != "POST":
            response = _wrong_method(connection, "POST")
        else:
            try:
                response = await self._routes.infer(connection, receive)
            except (AionnError, RequestRefusal) as error:
                response = self._routes.refused(error, connection)
        await response(scope, receive, send)


def _wrong_method(connection: HTTPConnection, method: str) -> Response:
    sentence = f"the path {connection.url.path} takes {method}, not {connection.scope['method']}"
    return RequestRefusal(405, sentence, {"Allow": method}).response()


def _described(operands: Mapping[str, Operand]) -> list[dict[str, Any]]:
    return [{"name": name, "datatype": datatype(operand), "shape": shape_of(operand)} for name, operand in operands.items()]


def _health(content: dict[str, Any], well: bool) -> JSONResponse:
    headers = {"Cache-Control": "no-store"} | ({} if well else {"Retry-After": str(RETRY_AFTER_S)})
    return JSONResponse(content, 200 if well else 503, headers)


def _metrics() -> Handler:
    """Return what answers with the metrics of the runtimes of this process."""
    registry: Any = None

    async def metrics(request: Request) -> Response:
        nonlocal registry
        from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

        from aionn.metrics import Collector

        if registry is None:
            registry = CollectorRegistry()
            registry.register(Collector())
        return Response(generate_latest(registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

    return metrics
