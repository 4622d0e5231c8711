"""aionn in a web app: health routes, a lifespan that compiles in the background, bursts for handlers, and the Open Inference Protocol.

It needs Starlette (`pip install 'aionn[web]'`), and works with FastAPI and every other framework over Starlette:

    from fastapi import Depends, FastAPI
    import aionn.asgi

    app = FastAPI(
        lifespan=aionn.asgi.lifespan(models={"detector": "detector.onnx"}),
        exception_handlers=aionn.asgi.exception_handlers,
    )
    app.routes.extend(aionn.asgi.routes())

    @app.post("/detect")
    async def detect(burst=Depends(aionn.asgi.burst("detector"))):
        ...

A server answers nothing until the lifespan's startup is complete, not even a probe. So a compile never runs inside the startup.

    requests  `burst`, `compilation`, `models`: what a request handler asks for; `routes`: /livez, /readyz and /startupz;
              `exception_handlers`: 503 where a driver died, hangs, or is not there for a moment
    open_inference  `oip`: the Open Inference Protocol (KServe v2), for clients that know nothing of aionn
    served    `Models`, the models of one app: attempts to compile them, and what serves; `lifespan`, which opens a runtime
"""

try:
    import starlette as _starlette  # noqa: F401
except ImportError as error:
    raise ImportError("aionn.asgi needs Starlette, which is not installed; run pip install 'aionn[web]'") from error

from aionn.asgi.open_inference import oip
from aionn.asgi.requests import burst, compilation, exception_handlers, models, routes
from aionn.asgi.served import Models, ModelSpec, lifespan

__all__ = ["ModelSpec", "Models", "burst", "compilation", "exception_handlers", "lifespan", "models", "oip", "routes"]
