"""A service of one runtime, for tests of its clients: it listens on a socket, prepares models, and hands out its drivers."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from pathlib import Path
from typing import Any

import anyio

import aionn
from aionn.hal.values import as_messages
from aionn.loopless import running_loop
from aionn.remote.calls import Fd, HalCall, Opened, OpenModel, Prepared
from aionn.remote.connection import Connection, Descriptors
from aionn.remote.control import ATTACHED, PROTOCOL, ServiceReady
from aionn.remote.device import RemotePreparedModel


class Service:
    """Answers `OpenModel`. Use it in the runtime's loop.

    Attributes:
        asked: the calls that came. Their descriptors are closed.
        compilations: by the bytes of the model.
    """

    def __init__(self, path: Path, runtime: aionn.Runtime, device: str) -> None:
        self._runtime = runtime
        self._device = device
        self._path = path
        self._loop = running_loop()
        self._connections: list[Connection] = []
        self._tasks: set[Any] = set()
        self._changed = anyio.Event()
        self.asked: list[OpenModel] = []
        self.compilations: dict[bytes, aionn.Compilation] = {}
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(path))
        self._listener.listen()
        self._listener.setblocking(False)
        self._loop.add_reader(self._listener.fileno(), self._accept)

    def _accept(self) -> None:
        with suppress(BlockingIOError):
            sock, _ = self._listener.accept()
            connection: Connection
            connection = Connection(sock, lambda *call: self._call(connection, *call), lambda error: self._ended(connection, error))
            self._connections.append(connection)
            connection.greet(ServiceReady(PROTOCOL, "the test's"))

    def _ended(self, connection: Connection, error: Exception | None) -> None:
        connection.end(error or aionn.CallerError("the client has gone"))
        self._connections.remove(connection)
        self._changed.set()

    def _call(self, connection: Connection, call_id: int, body: HalCall[Any], descriptors: Descriptors) -> None:
        task = self._loop.create_task(self._answer(connection, call_id, body, descriptors))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, connection: Connection, call_id: int, body: HalCall[Any], descriptors: Descriptors) -> None:
        assert isinstance(body, OpenModel)
        self.asked.append(body)
        try:
            content = os.pread(descriptors.take(body.file), 2**24, 0)
            os.close(body.file)
            compilation = self.compilations.get(content)
            if compilation is None:
                model = aionn.Model.from_onnx(content)
                compilation = self.compilations[content] = await self._runtime.compile(model, devices=body.devices or (self._device,))
            serving = await compilation._parts.kept_model.live()
            prepared = serving.prepared
            assert isinstance(prepared, RemotePreparedModel)
            message = Prepared(ATTACHED, as_messages(prepared.inputs), as_messages(prepared.outputs))
            pidfd = prepared.device.pidfd()
            with prepared.device.connection.attach(prepared.number) as sock:
                connection.reply(call_id, Opened(Fd(sock.fileno()), Fd(pidfd), message, prepared.device.name))
            os.close(pidfd)
        except aionn.AionnError as error:
            connection.reply_failure(call_id, error)

    async def until_connected(self, clients: int) -> None:
        """Return when so many clients have a connection."""
        with anyio.fail_after(30):
            while len(self._connections) != clients:
                self._changed = anyio.Event()
                await self._changed.wait()

    async def aclose(self) -> None:
        """End as a process does: its socket file stays, and nobody listens."""
        if self._listener.fileno() < 0:
            return
        self._loop.remove_reader(self._listener.fileno())
        self._listener.close()
        for connection in list(self._connections):
            connection.end(aionn.CallerError("the service has ended"))
        self._connections.clear()
        self.compilations.clear()  # they keep the memory of their models
