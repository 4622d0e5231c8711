"""Web apps for the tests, each served by a real uvicorn: `tests.asgi.apps:fastapi_app` and `tests.asgi.apps:starlette_app`.

Their model runs on the fake device that the test steers. AIONN_TEST_CACHE names a cache directory.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from typing import Annotated, Any

import numpy as np
from fastapi import Body, Depends, FastAPI
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Route, WebSocketRoute
from starlette.websockets import WebSocket

import aionn
import aionn.asgi
from aionn.pages.app_layout import DIED
from aionn.testing import FakeDevice, identity_model

OPTIONS: dict[str, Any] = {"devices": (FakeDevice.name,)}
if "AIONN_TEST_CACHE" in os.environ:
    OPTIONS |= {"cache_dir": os.environ["AIONN_TEST_CACHE"]}
MODELS: dict[str, aionn.asgi.ModelSpec] = {"detector": (aionn.Model.from_onnx(identity_model()), OPTIONS)}


async def answer(burst: aionn.Burst, values: list[float]) -> dict[str, Any]:
    outputs = await burst.compute({"input": np.asarray([values], np.float32)})
    return {"answer": outputs["input_out"][0].tolist(), "pid": os.getpid()}


fastapi_app = FastAPI(lifespan=aionn.asgi.lifespan(models=MODELS, start=()))
fastapi_app.routes.extend(aionn.asgi.routes())


@fastapi_app.post("/detect")
async def detect(values: Annotated[list[float], Body()], burst: Annotated[aionn.Burst, Depends(aionn.asgi.burst("detector"))]) -> Any:
    return await answer(burst, values)


@fastapi_app.websocket("/stream")
async def stream(websocket: WebSocket, burst: Annotated[aionn.Burst, Depends(aionn.asgi.burst("detector"))]) -> None:
    await websocket.accept()
    await websocket.send_json(await answer(burst, await websocket.receive_json()))
    await websocket.close()


def documented_app(retry: int, handled: bool) -> FastAPI:
    """Return the app of docs/how-to/fastapi.md."""
    handlers = aionn.asgi.exception_handlers if handled else None
    app = FastAPI(lifespan=aionn.asgi.lifespan(models=MODELS, start=()), exception_handlers=handlers)
    app.routes.extend(aionn.asgi.routes())

    @app.post("/detect")
    async def detect(values: Annotated[list[float], Body()], burst: Annotated[aionn.Burst, Depends(aionn.asgi.burst("detector"))]) -> Any:
        outputs = await burst.compute({"input": np.asarray([values], np.float32)}, retry=retry)
        return outputs["input_out"][0].tolist()

    @app.websocket("/stream")
    async def stream(websocket: WebSocket, burst: Annotated[aionn.Burst, Depends(aionn.asgi.burst("detector"))]) -> None:
        await websocket.accept()
        while True:
            await websocket.send_json(await answer(burst, await websocket.receive_json()))

    @app.get("/numbers")
    async def numbers(burst: Annotated[aionn.Burst, Depends(aionn.asgi.burst("detector"))]) -> StreamingResponse:
        async def lines() -> AsyncIterator[str]:
            for number in range(100):
                outputs = await burst.compute({"input": np.full((1, 16), number, np.float32)}, retry=retry)
                yield f"{outputs['input_out'][0, 0]:.0f}\n"

        return StreamingResponse(lines())

    @app.get("/died")
    async def died(burst: Annotated[aionn.Burst, Depends(aionn.asgi.burst("detector"))]) -> int:
        return burst._executor.counts.get(DIED)

    return app


unhandled_app, handled_app, retrying_app = documented_app(0, False), documented_app(0, True), documented_app(1, True)


async def plain_detect(request: Request) -> JSONResponse:
    burst = await aionn.asgi.burst("detector")(request)
    return JSONResponse(await answer(burst, await request.json()))


async def plain_stream(websocket: WebSocket) -> None:
    await stream(websocket, await aionn.asgi.burst("detector")(websocket))


starlette_app = Starlette(
    routes=[*aionn.asgi.routes(), Route("/detect", plain_detect, methods=["POST"]), WebSocketRoute("/stream", plain_stream)],
    lifespan=aionn.asgi.lifespan(models=MODELS, start=()),
)
