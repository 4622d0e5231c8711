"""A service and the device it offers, in one process, over a socket pair; and one end alone, for a hostile peer."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio

from aionn.driver import EngineDevice
from aionn.driver.service import DeviceService
from aionn.errors import DriverDiedError
from aionn.hal.engine import Engine
from aionn.loopless import Answer, running_loop
from aionn.remote.calls import HalCall
from aionn.remote.connection import Connection, Descriptors
from aionn.remote.control import Ready, Refused, ServiceReady
from aionn.remote.device import RemoteDevice


@asynccontextmanager
async def remote_device(engine: Engine) -> AsyncIterator[RemoteDevice]:
    """The engine as a client sees it through the control socket."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    greeted: Answer[RemoteDevice] = Answer(running_loop())

    def on_greeting(greeting: Ready | Refused | ServiceReady, _: Descriptors) -> None:
        assert isinstance(greeting, Ready)
        greeted.set(RemoteDevice(connection, greeting))

    async with anyio.create_task_group() as tasks:
        device = EngineDevice(engine, tasks)
        service = DeviceService(device, theirs, tasks)

        def on_call(call_id: int, body: HalCall[Any], descriptors: Descriptors) -> None:
            running_loop().create_task(remote.answer(call_id, body, descriptors))

        connection = Connection(ours, on_call, lambda error: connection.end(error or DriverDiedError("fake", None)), on_greeting)
        await service.start()
        remote = await greeted.wait()
        try:
            yield remote
        finally:
            connection.end(DriverDiedError("fake", None))
            with anyio.move_on_after(30, shield=True):
                await service.ended.wait()
                await service.aclose()
            device.close()
            tasks.cancel_scope.cancel()
