"""What a request handler asks for: a model's burst or compilation, or an answer 503 while the model does not serve yet."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from starlette.exceptions import HTTPException
from starlette.requests import HTTPConnection

import aionn
from aionn.asgi.served import Models, WantedModel
from aionn.errors import CallerError

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
