"""`lifespan`: opens a runtime for a web app, and has its models compiled while the server serves."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import aionn
from aionn.asgi.served import Models, ModelSpec, checked_models

Lifespan = Callable[[Any], AbstractAsyncContextManager[Mapping[str, Any]]]


def lifespan(models: Mapping[str, ModelSpec], **options: Any) -> Lifespan:
    """Return a lifespan for `FastAPI(lifespan=)` or `Starlette(lifespan=)`.

    At the start it opens a runtime, and begins to compile the models in tasks, without waiting for them. So the server answers at once:
    /livez with 200, and requests for a model with 503 until the model serves. At the end it closes the runtime, also in the midst of a
    compile. Each worker process of the server has a runtime and drivers.

    Args:
        models: by name a path, an `aionn.Model`, or a pair of one of them and options of `Runtime.compile`:
            `{"detector": ("detector.onnx", {"cache_dir": "cache", "required": False})}`.
        options: of `aionn.Runtime`, such as `threads=2`.

    Raises:
        CallerError: an argument is wrong. Errors of a compile are not raised: they are logged, and `Runtime.health` has them.

    The lifespan yields a state with the key "aionn". A lifespan of the app's own may enter it and add to it:

        @asynccontextmanager
        async def own(app):
            async with aionn.asgi.lifespan(models={"detector": "detector.onnx"})(app) as state:
                yield {**state, "database": database}
    """
    checked_models(models)
    aionn.Runtime(**options)  # its errors come here, not when the server starts

    @asynccontextmanager
    async def live(_app: Any) -> AsyncIterator[Mapping[str, Any]]:
        async with aionn.Runtime(**options) as runtime:
            served = Models(runtime, checked_models(models))
            served.start()
            try:
                yield {"aionn": served}
            finally:
                served.stop()

    return live
