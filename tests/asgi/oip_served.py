"""A server of the Open Inference Protocol in a thread of the test's process: a real uvicorn, real drivers, reached over TCP."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import httpx
import uvicorn
from anyio.from_thread import BlockingPortal, start_blocking_portal
from starlette.applications import Starlette

import aionn
import aionn.asgi

__all__ = ["OipServed", "oip_served", "serving"]


class OipServed:
    """A running server.

    Attributes:
        address: HOST:PORT. http: a client of it. models: what it serves. portal: runs code in its event loop.
    """

    def __init__(self, portal: BlockingPortal, address: str, http: httpx.Client, models: aionn.asgi.Models) -> None:
        self.portal = portal
        self.address = address
        self.http = http
        self.models = models

    def compilation(self, name: str) -> aionn.Compilation:
        compilation = self.models.wanted(name).compilation
        assert compilation is not None
        return compilation

    def compute(self, name: str, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Run a model without HTTP."""

        async def run() -> dict[str, Any]:
            return dict(await self.compilation(name).compute(inputs))

        return self.portal.call(run)

    def infer(self, name: str, content: bytes, headers: Mapping[str, str] | None = None) -> httpx.Response:
        return self.http.post(f"/v2/models/{name}/infer", content=content, headers=headers)

    def counts(self, name: str) -> dict[str, int]:
        """Return the statistics of a model's burst."""
        burst = self.models.wanted(name).burst
        assert burst is not None
        return self.portal.call(burst.statistics)

    def no_frame_is_lost(self, name: str) -> None:
        """Check that every frame is free, once the server has nothing to do."""
        counts = self.counts(name)
        assert counts["pinned_frames"] == counts["in_flight"] == 0, counts
        assert counts["free_frames"] == counts["frames"], counts


@contextmanager
def oip_served(models: Mapping[str, aionn.asgi.ModelSpec], *, wait: bool = True, hang_s: float = 30, **options: Any) -> Iterator[OipServed]:
    """Serve models for the body.

    Args:
        wait: whether the body begins when all models are compiled.
        hang_s: of the runtime. options: of `oip`.
    """
    found: list[aionn.asgi.Models] = []
    lifespan = aionn.asgi.lifespan(models, start=(), hang_s=hang_s)

    @asynccontextmanager
    async def live(app: Any) -> AsyncIterator[Mapping[str, Any]]:
        async with lifespan(app) as state:
            found.append(state["aionn"])
            yield state

    app = Starlette(routes=aionn.asgi.oip(**options), lifespan=live)
    with (
        start_blocking_portal(backend="asyncio", backend_options={"use_uvloop": True}) as portal,
        serving(portal, app) as address,
        httpx.Client(base_url=f"http://{address}", timeout=60) as http,
    ):
        assert http.get("/v2/health/live").status_code == 200
        if wait:
            portal.call(found[0].wait)
        yield OipServed(portal, address, http, found[0])


@contextmanager
def serving(portal: BlockingPortal, app: Any) -> Iterator[str]:
    """Run a server for an app in the portal's loop. Returns HOST:PORT."""
    with socket.create_server(("127.0.0.1", 0), backlog=128) as listening:
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning", timeout_keep_alive=75, timeout_graceful_shutdown=2))
        running = portal.start_task_soon(server.serve, [listening])
        try:
            yield f"127.0.0.1:{listening.getsockname()[1]}"
        finally:
            server.should_exit = True
            running.result(30)
