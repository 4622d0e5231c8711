"""The memories of a request as the device sees them: a client's bytes in place, or a buffer of the device itself.

`BurstMemories` keeps those of a burst mapped, by slot.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Protocol

import numpy as np

from aionn.burst.packets import PoolReference
from aionn.driver.execution import BoundExecution, BoundPool
from aionn.errors import AionnError, CallerError, again
from aionn.hal.interfaces import IBuffer
from aionn.hal.model import PooledModel, may_change
from aionn.hal.types import IMemory, MemoryKind, Request
from aionn.memory.device_buffer import DeviceBuffer
from aionn.memory.device_buffers import DeviceBuffers
from aionn.memory.memory import Memory
from aionn.memory.region import Region
from aionn.memory.requests import Extent
from aionn.tasks import run_in_thread


class EngineBuffer:
    """Memory that the device owns. Satisfies `IBuffer`."""

    def __init__(self, buffers: DeviceBuffers, buffer: DeviceBuffer) -> None:
        self._buffers = buffers
        self._buffer = buffer
        self.token = buffer.token

    @property
    def size_bytes(self) -> int:
        """How many bytes are reserved for it now."""
        memory = self._buffer.memory
        return 0 if memory is None else memory.size

    def bound(self, check: Callable[[int], None]) -> None:
        """Ask `check` before each reservation from now on; see `DeviceBuffer`."""
        self._buffer.check = check

    def of(self, buffers: DeviceBuffers) -> bool:
        """Return whether the buffer belongs to that device."""
        return self._buffers is buffers

    async def copy_from(self, source: IMemory, dimensions: tuple[int, ...]) -> None:
        """Fill the whole buffer; see `DeviceBuffer.copy_from`."""

        def copy() -> None:
            with ExitStack() as used:
                self._buffer.fill_from(lambda: _opened(source, used), dimensions)

        await _copied(copy)

    async def copy_to(self, target: IMemory) -> None:
        """Copy the whole buffer out, and flush the target if it is a file; see `DeviceBuffer.copy_to`."""
        file = _file_of(target)

        def copy() -> None:
            with ExitStack() as used:
                self._buffer.copy_to(_opened(target, used))
            if file is not None:
                file.flush()

        await _copied(copy)

    async def aclose(self) -> None:
        self._buffers.release(self.token)


def _opened(memory: IMemory, used: ExitStack) -> memoryview:
    """Return the bytes of a memory. Where it is a file, its use lasts as long as `used`."""
    file = _file_of(memory)
    if file is not None:
        file.begin_use()
        used.callback(file.end_use)
    return memory.view()


async def _copied(copy: Callable[[], None]) -> None:
    """Run a blocking copy in a thread.

    Raise its error without the frames of the thread. Those frames hold views of the client's memory, which would stay mapped.
    """

    def attempt() -> AionnError | None:
        try:
            copy()
        except AionnError as error:
            return again(error)
        return None

    failed = await run_in_thread(attempt)
    if failed is not None:
        try:
            raise failed
        finally:
            del failed


def bound_pool(pool: IMemory | IBuffer, buffers: DeviceBuffers) -> BoundPool:
    """Return a pool of a request: its bytes in place with shape (size_bytes,), or the token of one of `buffers`."""
    if isinstance(pool, EngineBuffer) and pool.of(buffers):
        return BoundPool(None, pool.token)
    if not isinstance(pool, Region | IMemory):  # a check against the protocol alone takes long
        raise CallerError("a device memory of another device was given; allocate one from a compilation on this device")
    return BoundPool(np.frombuffer(pool.view(), np.uint8), None, _file_of(pool), _home_of(pool))


def _file_of(memory: IMemory) -> Region | None:
    """Return the mapping of a file, which may be cut off and must be flushed, or None for other memory."""
    region = memory.pool if isinstance(memory, Memory) else memory
    return region if isinstance(region, Region) and region.description.kind is MemoryKind.MMAP_FD else None


def _home_of(memory: IMemory) -> Extent:
    begin = memory.description.offset_bytes
    if isinstance(memory, Region):
        inode = memory.inode()
    else:
        status = os.fstat(memory.fileno())
        inode = status.st_dev, status.st_ino
    return inode, begin, begin + memory.size_bytes


def constants_of(model: PooledModel) -> tuple[Extent, ...]:
    """Return where those constants lie that are an app's memory or a file. The others are sealed against writing."""
    homes = [_home_of(pool) if may_change(pool) else None for pool in model.pools]
    extents: list[Extent] = []
    for constant in model.constants:
        home, place = homes[constant.location.pool_index], constant.location
        if home is not None:
            extents.append((home[0], home[1] + place.offset, home[1] + place.offset + place.length))
    return tuple(extents)


_ANY_SIZE = 2**64


class Binding(Protocol):
    """What a burst needs of its prepared model."""

    def wrong_with(self, request: Request, pool_sizes: Sequence[int]) -> str | None: ...
    def bind(self, request: Request, pools: Sequence[BoundPool]) -> BoundExecution: ...


class BurstMemories:
    """Keeps the memories of a burst mapped, by slot. Satisfies `IBurstExecutorWithCache`.

    `may_use` says of a buffer's token whether it is one of the burst's client. None: there is one client only.
    """

    def __init__(self, prepared: Binding, buffers: DeviceBuffers, may_use: Callable[[int], bool] | None = None) -> None:
        self._may_use = may_use
        self._prepared = prepared
        self._buffers = buffers
        self._memories: dict[int, tuple[IMemory, BoundPool]] = {}

    def is_cache_entry_present(self, slot: int) -> bool:
        return slot in self._memories

    def add_cache_entry(self, memory: IMemory, slot: int) -> None:
        self._memories[slot] = (memory, bound_pool(memory, self._buffers))

    def remove_cache_entry(self, slot: int) -> None:
        memory, _ = self._memories.pop(slot, (None, None))
        close = getattr(memory, "close", None)
        if close is not None:
            close()

    def check(self, request: Request, pools: Sequence[PoolReference]) -> None:
        if self._may_use is not None:
            for pool in pools:
                if pool.token and not self._may_use(pool.token):
                    raise CallerError(
                        f"token {pool.token} names no device buffer of this client; it was never given out, or its buffer was freed"
                    )
        # `bind` sees the size of a memory that is not here yet.
        wrong = self._prepared.wrong_with(request, [0 if pool.token else _ANY_SIZE for pool in pools])
        if wrong is not None:
            raise CallerError(wrong)

    def bind(self, request: Request, pools: Sequence[PoolReference]) -> BoundExecution:
        bound = [BoundPool(None, pool.token) if pool.token else self._memories[pool.slot][1] for pool in pools]
        return self._prepared.bind(request, bound)

    def close(self) -> None:
        for slot in list(self._memories):
            self.remove_cache_entry(slot)
