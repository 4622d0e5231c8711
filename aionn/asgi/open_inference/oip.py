"""`oip`: the routes of the Open Inference Protocol."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from importlib.util import find_spec
from typing import Any

from starlette.requests import HTTPConnection, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route
from starlette.types import Receive, Scope, Send

import aionn
from aionn.asgi.open_inference.incoming import Incoming, Room
from aionn.asgi.open_inference.inference import infer
from aionn.asgi.open_inference.refusals import RequestRefusal, refusal_of
from aionn.asgi.open_inference.targets import VERSION, ServedModel, Targets, checked_targets
from aionn.asgi.open_inference.tensors import datatype, shape_of
from aionn.asgi.requests import RETRY_AFTER_S
from aionn.asgi.served import Models
from aionn.errors import AionnError
from aionn.hal.types import Operand
from aionn.tasks import checked_count

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
