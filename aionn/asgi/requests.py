"""What a request handler asks for: a model's burst or compilation, or an answer 503 while the model does not serve yet.

`routes` answers what Kubernetes, a load balancer or a person asks about an app's health over HTTP.

`exception_handlers` answer 503 with Retry-After where a driver died, hangs, or is not there for a moment.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import HTTPConnection, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route
from starlette.websockets import WebSocket, WebSocketState

import aionn
from aionn.asgi.served import Models, WantedModel
from aionn.errors import (
    CallerError,
    DeadlineError,
    DeviceBusyError,
    DeviceUnavailableError,
    DriverDiedError,
    DriverHungError,
    MemoryAllocationError,
)

logger = logging.getLogger("aionn.asgi")

DRIVER_RETRY_AFTER_S = 1
"""Seconds that a client is asked to wait before it tries again. A new driver starts within that time."""

TRY_AGAIN_LATER = 1013
"""The code with which a WebSocket is closed."""


async def _unavailable(connection: HTTPConnection, error: Exception) -> Response | None:
    """Answer 503, or close a WebSocket. The sentence of the error goes to the log, and its class to the client."""
    logger.warning("%s %s was answered with 503: %s", connection.scope["type"], connection.url.path, error)
    if isinstance(connection, WebSocket):
        if connection.application_state is not WebSocketState.DISCONNECTED:
            await connection.close(TRY_AGAIN_LATER, "the model does not serve now; try again later")
        return None
    body = {"detail": f"the model does not serve now ({type(error).__name__}); try again later"}
    return JSONResponse(body, 503, {"Retry-After": str(DRIVER_RETRY_AFTER_S), "Cache-Control": "no-store"})


_MAY_PASS = (DriverDiedError, DriverHungError, DeadlineError, DeviceBusyError, DeviceUnavailableError, MemoryAllocationError)

exception_handlers: dict[int | type[Exception], Callable[[Any, Any], Coroutine[Any, Any, Any]]] = dict.fromkeys(_MAY_PASS, _unavailable)
"""Handlers for `FastAPI(exception_handlers=aionn.asgi.exception_handlers)` and `Starlette(exception_handlers=...)`.

Errors that pass by themselves become an answer 503 with `Retry-After`, or close a WebSocket with code 1013. The endpoint is not run again:
`compute(..., retry=1)` makes its call again after a driver's death. Other errors, such as `CallerError`, stay the app's.
"""

RETRY_AFTER_S = 5
"""Seconds that a client is asked to wait before it tries again. How long a compile takes is not known."""


def models(connection: HTTPConnection) -> Models:
    """Return the models of the app that got this request or WebSocket. In FastAPI: `Depends(aionn.asgi.models)`.

    Raises:
        CallerError: the app's lifespan is not `aionn.asgi.lifespan`, and does not pass its state on.
    """
    found = connection.scope.get("state", {}).get("aionn")
    if not isinstance(found, Models):
        raise CallerError("this app has no runtime of aionn; give it lifespan=aionn.asgi.lifespan(models=...), or pass on what that yields")
    return found


def burst(name: str) -> Callable[[HTTPConnection], Awaitable[aionn.Burst]]:
    """Return what gives a request handler the burst of a model. All handlers share one burst, and may compute at once.

    With FastAPI it is a dependency, `Depends(aionn.asgi.burst("detector"))`. In a plain Starlette handler, await it:
    `burst = await aionn.asgi.burst("detector")(request)`. It works for WebSockets, too.

    The request is answered with 503 and `Retry-After` until the model serves.

    Raises:
        CallerError: at a request, if the app has no such model, or no burst takes its values.
    """

    async def burst_of(connection: HTTPConnection) -> aionn.Burst:
        wanted = _serving(connection, name)
        if wanted.burst is None:
            raise CallerError(f"no burst takes the values of model {name!r}; use aionn.asgi.compilation({name!r}) and its compute")
        return wanted.burst

    return burst_of


def compilation(name: str) -> Callable[[HTTPConnection], Awaitable[aionn.Compilation]]:
    """Return what gives a request handler the compilation of a model, as `burst` does its burst.

    Raises:
        CallerError: at a request, if the app has no such model.
    """

    async def compilation_of(connection: HTTPConnection) -> aionn.Compilation:
        found = _serving(connection, name).compilation
        assert found is not None
        return found

    return compilation_of


def _serving(connection: HTTPConnection, name: str) -> WantedModel:
    wanted = models(connection).wanted(name)
    if wanted.compilation is None:
        why = f" ({wanted.failure})" if wanted.failure else ""
        raise HTTPException(503, f"model {name!r} does not serve yet{why}; try again later", {"Retry-After": str(RETRY_AFTER_S)})
    return wanted


def routes(runtime: aionn.Runtime | None = None) -> list[BaseRoute]:
    """Return the routes /livez, /readyz and /startupz: `app.routes.extend(aionn.asgi.routes())`, or `Starlette(routes=[...])`.

    Each answers 200 or 503, with `Runtime.health` as JSON. /livez is 503 if only a restart of the process helps. /readyz is 503 while
    requests would wait or fail. /startupz is 503 until the runtime was ready for the first time.

    Args:
        runtime: None for the one that `aionn.asgi.lifespan` opens.
    """
    started: weakref.WeakSet[aionn.Runtime] = weakref.WeakSet()

    def health(request: Request) -> tuple[aionn.Health, bool]:
        asked = runtime or models(request).runtime
        found = asked.health()
        if found.ready:
            started.add(asked)
        return found, asked in started

    async def livez(request: Request) -> JSONResponse:
        found, _ = health(request)
        return _answer(found, found.live)

    async def readyz(request: Request) -> JSONResponse:
        found, _ = health(request)
        return _answer(found, found.ready)

    async def startupz(request: Request) -> JSONResponse:
        return _answer(*health(request))

    return [Route("/livez", livez), Route("/readyz", readyz), Route("/startupz", startupz)]


def _answer(health: aionn.Health, well: bool) -> JSONResponse:
    headers = {"Cache-Control": "no-store"} | ({} if well else {"Retry-After": str(RETRY_AFTER_S)})
    return JSONResponse(msgspec.to_builtins(health) | {"text": str(health)}, 200 if well else 503, headers)
