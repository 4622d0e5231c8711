"""`aionn serve-http`: a web server whose models are asked by the Open Inference Protocol.

The server listens before a model is compiled, so probes are answered from the first second. A model that can never be compiled ends the
command, because its server would stay unready. An error that may pass is logged, and the compile is tried again.
"""

from __future__ import annotations

import signal
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio

from aionn.cli.printing import NotDoneError, UsageError, say, url_of
from aionn.cli.serving.listening import tcp_socket
from aionn.errors import AionnError
from aionn.memory.limits import raise_file_limit

try:
    import uvicorn
    from starlette.applications import Starlette

    import aionn.asgi
except ImportError as error:
    raise UsageError("aionn serve-http needs Starlette and uvicorn; install them with: pip install 'aionn[web]'") from error

KEEP_ALIVE_S = 75
"""A client may reuse a connection after so long a pause. uvicorn's own 5 s close connections on which clients just send a request."""

END_S = 10
"""What requests get for their end when the server ends."""


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """How `aionn serve-http` serves. The command line describes each option."""

    listen: str
    device: Sequence[str] | None
    threads: int | None
    cache_dir: str | None
    state_dir: str | None
    max_body_bytes: int


def serve(models: Sequence[str], options: ServeOptions) -> None:
    """Serve models until SIGINT or SIGTERM.

    Raises:
        UsageError: a model or an option is wrong.
        NotDoneError: the address cannot be listened on, or a model can never be compiled.
    """
    app = _App(_specs(models, options), options)
    raise_file_limit()  # each connection takes a descriptor, and the usual soft limit is 1024
    with tcp_socket(options.listen, "--listen HOST:PORT") as listening:
        host, port = listening.getsockname()[:2]
        app.where = url_of(host, port)
        app.server = uvicorn.Server(server_config(app.made()))
        # uvicorn closes everything at a signal, and raises the signal again at its end. This handler takes that second one.
        before = signal.signal(signal.SIGTERM, lambda *_: None)
        try:
            app.server.run(sockets=[listening])
        finally:
            signal.signal(signal.SIGTERM, before)
    if app.failure:
        raise NotDoneError(app.failure)


def server_config(app: Starlette) -> uvicorn.Config:
    """Return how uvicorn serves an app."""
    return uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        lifespan="on",
        proxy_headers=False,  # no answer depends on the client's address
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=END_S,
    )


def _specs(models: Sequence[str], options: ServeOptions) -> Mapping[str, aionn.asgi.ModelSpec]:
    if not models:
        raise UsageError("aionn serve-http needs a model; give the path of an ONNX file, or NAME=PATH")
    compile_options: dict[str, Any] = {"threads": options.threads}
    if options.device:
        compile_options["devices"] = tuple(options.device)
    if options.cache_dir is not None:
        compile_options["cache_dir"] = options.cache_dir
    specs: dict[str, aionn.asgi.ModelSpec] = {}
    for text in models:
        name, equals, path = text.partition("=")
        if not equals or Path(text).exists():  # a path may have "=" in it, too
            name, path = Path(text).stem, text
        if not name or "/" in name:
            raise UsageError(f"model {text!r}: the name {name!r} cannot stand in a path; give NAME=PATH with a name without '/'")
        if name in specs:
            raise UsageError(f"two models have the name {name!r}; give one of them another name, as in NAME=PATH")
        if not Path(path).is_file():
            raise UsageError(f"there is no file {path!r}; give the path of an ONNX file, or NAME=PATH")
        specs[name] = path, compile_options
    return specs


class _App:
    """The web app.

    Attributes:
        where: the address of the server. server: it runs the app.
        failure: why a model can never be compiled, which ends the server. Else empty.
    """

    def __init__(self, specs: Mapping[str, aionn.asgi.ModelSpec], options: ServeOptions) -> None:
        self._specs = specs
        self._options = options
        self.where = ""
        self.server: uvicorn.Server | None = None
        self.failure = ""

    def made(self) -> Starlette:
        routes = [*aionn.asgi.oip(max_body_bytes=self._options.max_body_bytes), *aionn.asgi.routes()]
        lifespan = aionn.asgi.lifespan(self._specs, state_dir=self._options.state_dir)

        @asynccontextmanager
        async def live(app: Starlette) -> AsyncIterator[Mapping[str, Any]]:
            async with lifespan(app) as state, anyio.create_task_group() as tasks:
                tasks.start_soon(self._report, state["aionn"])
                yield state
                tasks.cancel_scope.cancel()

        return Starlette(routes=routes, lifespan=live)

    async def _report(self, models: aionn.asgi.Models) -> None:
        """Print where the server is, and when its models serve. End it if they never will."""
        count = f"{len(self._specs)} {'model' if len(self._specs) == 1 else 'models'}"
        say(f"listening on {self.where}/v2, compiling {count}")
        try:
            await models.wait()
        except Exception as error:
            self.failure = str(error) if isinstance(error, AionnError) else f"{type(error).__name__}: {error}"
            assert self.server is not None
            self.server.should_exit = True
            return
        say(f"ready: {', '.join(f'{self.where}/v2/models/{name}' for name in models.names)}")
