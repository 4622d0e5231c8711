"""`exception_handlers`: what a web app answers where a driver died, hangs, or is not there for a moment: 503 with Retry-After."""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine
from typing import Any

from starlette.requests import HTTPConnection
from starlette.responses import JSONResponse, Response
from starlette.websockets import WebSocket, WebSocketState

from aionn.errors import DeadlineError, DeviceUnavailableError, DriverDiedError, DriverHungError, MemoryAllocationError

logger = logging.getLogger("aionn.asgi")

RETRY_AFTER_S = 1
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
    return JSONResponse(body, 503, {"Retry-After": str(RETRY_AFTER_S), "Cache-Control": "no-store"})


_MAY_PASS = (DriverDiedError, DriverHungError, DeadlineError, DeviceUnavailableError, MemoryAllocationError)

exception_handlers: dict[int | type[Exception], Callable[[Any, Any], Coroutine[Any, Any, Any]]] = dict.fromkeys(_MAY_PASS, _unavailable)
"""Handlers for `FastAPI(exception_handlers=aionn.asgi.exception_handlers)` and `Starlette(exception_handlers=...)`.

Errors that pass by themselves become an answer 503 with `Retry-After`, or close a WebSocket with code 1013. The endpoint is not run again:
`compute(..., retry=1)` makes its call again after a driver's death. Other errors, such as `CallerError`, stay the app's.
"""
