"""What a driver keeps for the app, by number: buffers and the listeners of bursts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from aionn.hal.types import IMemory
from aionn.memory.memory import Memory
from aionn.remote.connection import Connection
from aionn.remote.control import (
    CallBody,
    CloseBurst,
    CopyFrom,
    CopyTo,
    Done,
    FreeBuffer,
    FreeMemory,
    HasRequest,
    ReplyBody,
    RequestFound,
)

Settled = Callable[[object], None]


class Owner(Protocol):
    """The device that a handle belongs to."""

    @property
    def connection(self) -> Connection: ...

    @property
    def name(self) -> str: ...

    def post(self, body: CallBody) -> None: ...

    def forget_burst(self, number: int) -> None: ...

    def forget_buffer(self, token: int) -> None: ...


class RemoteBurstContext:
    """A burst's listener in the driver process. Satisfies `IBurstContext`."""

    def __init__(self, device: Owner, number: int) -> None:
        self._device = device
        self._number = number
        self._closed = False

    async def free_memory(self, slot: int) -> None:
        await self._device.connection.call(FreeMemory(self._number, slot), Done)

    def forget_memory(self, slot: int) -> None:
        """Forget the memory cached under `slot`, without waiting."""
        self._device.post(FreeMemory(self._number, slot))

    def ask(self, identity: int, answered: Callable[[bool], None]) -> None:
        """Ask whether the driver still has a request to answer, without waiting. Never calls `answered` if the connection ends first."""
        if self._device.connection.ended_by is None:

            def settled(reply: ReplyBody | None) -> None:
                if reply is not None:
                    answered(isinstance(reply, RequestFound) and reply.known)

            self._device.connection.begin(HasRequest(self._number, identity), RequestFound, (), settled)

    async def aclose(self) -> None:
        """End the burst. Returns when the driver has freed all it held for the burst, or has gone."""
        try:
            if not self._closed and self._device.connection.ended_by is None:
                self._closed = True
                await self._device.connection.call(CloseBurst(self._number), Done)
        finally:
            self._device.forget_burst(self._number)

    def release(self) -> None:
        """End the burst without waiting."""
        if not self._closed:
            self._closed = True
            self._device.post(CloseBurst(self._number))
        self._device.forget_burst(self._number)


class RemoteBuffer:
    """A buffer in the driver process. Satisfies `IBuffer`."""

    def __init__(self, device: Owner, token: int) -> None:
        self.device = device
        self.token = token
        self._closed = False

    async def copy_from(self, source: IMemory, dimensions: tuple[int, ...], settled: Settled | None = None) -> None:
        """Fill the whole buffer. `settled` is as for `Connection.call`."""
        pool, offset = _place_of(source)
        body = CopyFrom(self.token, pool.description, dimensions, offset, source.size_bytes)
        await self.device.connection.call(body, Done, [pool.fileno()], settled)

    async def copy_to(self, target: IMemory, settled: Settled | None = None) -> None:
        """Copy the whole buffer out. `settled` is as for `Connection.call`."""
        pool, offset = _place_of(target)
        body = CopyTo(self.token, pool.description, offset, target.size_bytes)
        await self.device.connection.call(body, Done, [pool.fileno()], settled)

    async def aclose(self) -> None:
        if not self._closed and self.device.connection.ended_by is None:
            self._closed = True
            self.device.forget_buffer(self.token)
            await self.device.connection.call(FreeBuffer(self.token), Done)

    def release(self) -> None:
        """Free the buffer without waiting."""
        if not self._closed:
            self._closed = True
            self.device.forget_buffer(self.token)
            self.device.post(FreeBuffer(self.token))


def _place_of(memory: IMemory) -> tuple[IMemory, int]:
    """Return the whole pool of a memory, which may be a slice of it, and where the memory begins in its pool."""
    return (memory.pool, memory.offset_bytes) if isinstance(memory, Memory) else (memory, 0)
