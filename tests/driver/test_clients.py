"""A driver serves several clients: each has its connection and its tables, and a model stays as long as one of them holds it."""

from __future__ import annotations

import os
import socket
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any

import anyio
import anyio.lowlevel
import pytest

import aionn
from aionn.errors import CallerError
from aionn.hal.interfaces import PrepareOptions
from aionn.hal.types import BufferDesc, BufferRole
from aionn.loopless import Answer, running_loop
from aionn.remote.calls import Fd, FreeBuffer, Prepared, ReleasePreparedModel
from aionn.remote.connection import Connection, Descriptors
from aionn.remote.control import ATTACHED, Attach, ControlError, Ready, Refused, ServiceReady
from aionn.remote.device import RemoteDevice, RemotePreparedModel
from aionn.testing import FakeDevice, identity_model
from aionn.testing.fake_engine import FakeEngine
from tests.remote.frames import HEADER, decode
from tests.remote.pair import remote_device

pytestmark = pytest.mark.anyio


@asynccontextmanager
async def client(main: RemoteDevice, number: int) -> AsyncIterator[RemoteDevice]:
    """One more client of the same driver, with the prepared model of that number."""
    greeted: Answer[Ready] = Answer(running_loop())

    def on_greeting(greeting: Ready | Refused | ServiceReady, _: Descriptors) -> None:
        assert isinstance(greeting, Ready)
        greeted.set(greeting)

    def on_end(_: Exception | None) -> None:
        greeted.fail(ConnectionError("the driver has closed the socket"))
        connection.end(ControlError("over"))

    connection = Connection(main.connection.attach(number), lambda *_: None, on_end, on_greeting)
    try:
        with anyio.fail_after(30):
            yield RemoteDevice(connection, await greeted.wait())
    finally:
        connection.end(ControlError("over"))


async def prepared_in(device: RemoteDevice) -> RemotePreparedModel:
    return await device.prepare_model(aionn.Model.from_onnx(identity_model()), PrepareOptions())


async def test_a_model_stays_as_long_as_a_client_holds_it(fake: FakeDevice) -> None:
    async with remote_device(FakeEngine()) as device:
        model = await prepared_in(device)
        async with client(device, model.number) as other, client(device, model.number):
            await model.aclose()
            with pytest.raises(ConnectionError):
                async with client(device, model.number):
                    pass
            operands = tuple(model.inputs.items()), tuple(model.outputs.items())
            held = RemotePreparedModel(other, Prepared(ATTACHED, *operands))
            buffer = await other.allocate(BufferDesc((1, 16)), [held], [BufferRole(0, 0, 1.0)], [])
            assert buffer.token > 0
            await other.connection.call(ReleasePreparedModel(ATTACHED))
            with pytest.raises(CallerError, match="prepared model 1 does not exist"):
                await other.allocate(BufferDesc((1, 16)), [held], [BufferRole(0, 0, 1.0)], [])


async def test_a_client_cannot_name_what_is_anothers(fake: FakeDevice) -> None:
    async with remote_device(FakeEngine()) as device:
        model = await prepared_in(device)
        second = await prepared_in(device)
        roles = [BufferRole(0, 0, 1.0)]
        buffer = await device.allocate(BufferDesc((1, 16)), [model], roles, [])
        async with client(device, model.number) as other, client(device, model.number) as third:
            operands = tuple(model.inputs.items()), tuple(model.outputs.items())
            own = RemotePreparedModel(other, Prepared(ATTACHED, *operands))
            theirs = RemotePreparedModel(other, Prepared(second.number, *operands))
            with pytest.raises(CallerError, match=f"prepared model {second.number} does not exist"):
                await other.allocate(BufferDesc((1, 16)), [theirs], roles, [])
            made = await other.allocate(BufferDesc((1, 16)), [own], roles, [])
            await third.connection.call(FreeBuffer(made.token))  # does nothing: this client has no such buffer
            await other.connection.call(FreeBuffer(buffer.token))
            for owner, token in ((device, buffer), (other, made)):
                source = aionn.Memory.allocate(64)
                await token.copy_from(source, (1, 16))
                assert owner.connection.ended_by is None
                source.close()


async def test_the_end_of_the_first_client_ends_those_that_it_has_brought(fake: FakeDevice) -> None:
    async with remote_device(FakeEngine()) as device:
        model = await prepared_in(device)
        ours = device.connection.attach(model.number)
    ours.settimeout(30)
    while ours.recv(65536):
        pass
    ours.close()


async def test_a_client_without_a_socket_breaks_the_protocol(fake: FakeDevice) -> None:
    async with remote_device(FakeEngine()) as device:
        model = await prepared_in(device)
        read, write = os.pipe()
        try:
            device.connection._channel.post(Attach(Fd(read), model.number))
            with anyio.fail_after(30):
                while device.connection.ended_by is None:
                    await anyio.lowlevel.checkpoint()
        finally:
            os.close(read)
            os.close(write)


def test_threads_may_attach_while_the_loop_sends() -> None:
    """Frames of several threads stay whole."""

    async def main() -> None:
        ours, theirs = socket.socketpair()
        connection = Connection(ours, lambda *_: None, lambda _: None)

        def attach() -> None:
            for _ in range(50):
                connection.attach(7).close()

        def read() -> int:
            seen, data = 0, b""
            while seen < 8 * 50:
                chunk, fds, _, _ = socket.recv_fds(theirs, 65536, 253)
                for fd in fds:
                    os.close(fd)
                data += chunk
                while len(data) >= HEADER.size and len(data) >= HEADER.size + HEADER.unpack(data[: HEADER.size])[0]:
                    length = HEADER.unpack(data[: HEADER.size])[0]
                    message: Any = decode(data[HEADER.size : HEADER.size + length], lambda: Fd(0))
                    assert message.prepared == 7
                    data = data[HEADER.size + length :]
                    seen += 1
            return seen

        with ThreadPoolExecutor(9) as pool:
            reading = pool.submit(read)
            for _ in range(8):
                pool.submit(attach)
            with anyio.fail_after(30):
                while not reading.done():
                    await anyio.lowlevel.checkpoint()  # what the socket did not take goes out by the loop
            assert reading.result() == 400
        connection.end(ControlError("over"))
        theirs.close()

    anyio.run(main)
