"""A web server's worker that answers with a real model, for the soak of the exporter."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import numpy as np
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

import aionn
from aionn.testing import identity_model


@asynccontextmanager
async def lifespan(app: Starlette) -> AsyncIterator[None]:
    async with aionn.Runtime(start=(), name=os.environ["AIONN_TEST_NAME"]) as runtime:
        app.state.compilation = await runtime.compile(aionn.Model.from_onnx(identity_model()), devices=("reference",))
        yield


async def answer(request: Request) -> JSONResponse:
    await request.app.state.compilation.compute({"input": np.zeros((1, 16), np.float32)})
    return JSONResponse({"pid": os.getpid()})


app = Starlette(routes=[Route("/", answer)], lifespan=lifespan)
