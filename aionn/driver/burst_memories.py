"""The memories of a burst, kept mapped by slot, and its requests over them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from aionn.burst.packets import PoolReference
from aionn.driver.execution import BoundExecution, BoundPool
from aionn.driver.memories import bound_pool
from aionn.errors import CallerError
from aionn.hal.types import IMemory, Request
from aionn.memory.device_buffers import DeviceBuffers

_ANY_SIZE = 2**64


class Binding(Protocol):
    """What a burst needs of its prepared model."""

    def wrong_with(self, request: Request, pool_sizes: Sequence[int]) -> str | None: ...
    def bind(self, request: Request, pools: Sequence[BoundPool]) -> BoundExecution: ...


class BurstMemories:
    """Keeps the memories of a burst mapped, by slot. Satisfies `IBurstExecutorWithCache`."""

    def __init__(self, prepared: Binding, buffers: DeviceBuffers) -> None:
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
