"""The socket of `aionn serve-frigate` in this process: how many requests it takes at once, and that it takes none at its end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import anyio
import anyio.lowlevel
import numpy as np
import pytest
import zmq
from numpy.typing import NDArray

from aionn.adapters.frigate.endpoint import MOST_REQUESTS, Endpoint
from aionn.service.listening import listen
from tests.adapters.frigate.test_serve_frigate import SSD, folder  # noqa: F401 -- a fixture

pytestmark = pytest.mark.anyio

HEADER = b'{"shape": [1, 8, 8, 3], "dtype": "uint8", "model_type": "ssd"}'
PICTURE = bytes(8 * 8 * 3)


class Held:
    """The detectors of a server: one model, whose runs wait until they may end. `ended`: the runtime is closed."""

    def __init__(self) -> None:
        self.fixed, self.entered = self, 0
        self.may_end, self.ended = asyncio.Event(), asyncio.Event()

    async def compute(self, tensor: NDArray[Any], width: int, height: int, timeout_s: float) -> Mapping[str, NDArray[Any]]:
        self.entered += 1
        await self.may_end.wait()
        return {"detections": SSD}

    async def watch(self) -> None:
        await self.ended.wait()


class Server:
    """An endpoint over `detectors`, and clients that have sent a picture each."""

    def __init__(self, path: str) -> None:
        self.detectors = Held()
        self._listening = listen(path)
        self.endpoint = Endpoint(self._listening, self.detectors, 300.0, 1 << 20)  # type: ignore[arg-type]
        self._path, self._context = path, zmq.Context()
        self.clients: list[zmq.Socket[bytes]] = []

    def send(self, count: int) -> None:
        for _ in range(count):
            client = self._context.socket(zmq.REQ)
            client.connect(f"ipc://{self._path}")
            client.send_multipart([HEADER, PICTURE])
            self.clients.append(client)

    def waits(self) -> bool:
        """Whether a request lies in the socket."""
        return bool(self.endpoint._socket.poll(0))

    def close(self) -> None:
        self._context.destroy(linger=0)
        self.endpoint.end()
        self._listening.end()


@pytest.fixture
async def server(folder: Any) -> AsyncIterator[Server]:  # noqa: F811
    found = Server(f"{folder}/detector")
    yield found
    found.close()


async def until(holds: Callable[[], bool]) -> None:
    with anyio.fail_after(30):
        while not holds():
            await anyio.lowlevel.checkpoint()


async def turns() -> None:
    for _ in range(10):
        await anyio.lowlevel.checkpoint()


async def test_at_most_64_requests_are_in_work_and_more_wait_in_the_socket(server: Server) -> None:
    serving = asyncio.ensure_future(server.endpoint.serve())
    more = 6
    server.send(MOST_REQUESTS + more)
    await until(lambda: server.detectors.entered >= MOST_REQUESTS)
    await until(lambda: server.waits() or server.detectors.entered > MOST_REQUESTS)
    server.endpoint._receive()
    await turns()
    assert server.detectors.entered == MOST_REQUESTS
    server.detectors.may_end.set()
    await until(lambda: all(client.poll(0) for client in server.clients))
    assert server.detectors.entered == MOST_REQUESTS + more
    assert {bool(np.frombuffer(client.recv(), np.float32).any()) for client in server.clients} == {True}
    server.detectors.ended.set()
    await serving


async def test_a_server_that_ends_answers_what_is_in_work_and_takes_nothing_more(server: Server) -> None:
    """Else it would never end while clients ask."""
    serving = asyncio.ensure_future(server.endpoint.serve())
    server.send(1)
    await until(lambda: server.detectors.entered == 1)
    server.detectors.ended.set()
    await turns()
    assert not serving.done()  # a request is in work
    server.send(1)
    await until(server.waits)
    server.detectors.may_end.set()
    with anyio.fail_after(30):
        await serving
    assert (server.detectors.entered, server.waits()) == (1, True)
    await until(lambda: bool(server.clients[0].poll(0)))
    assert not server.clients[1].poll(0)
