"""`routes`: what Kubernetes, a load balancer or a person asks about an app's health over HTTP."""

from __future__ import annotations

import weakref

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import BaseRoute, Route

import aionn
from aionn.asgi.requests import RETRY_AFTER_S, models


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
