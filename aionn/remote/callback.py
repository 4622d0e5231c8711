"""A driver's questions about the memories of a burst."""

from __future__ import annotations

from collections.abc import Sequence

from aionn.hal.types import IMemory
from aionn.memory.region import Region
from aionn.remote.connection import Connection
from aionn.remote.control import GetMemories, Memories
from aionn.remote.received import attached


class RemoteBurstCallback:
    """Asks the app for the memories of slots. Satisfies `IBurstCallback`."""

    def __init__(self, connection: Connection, burst: int) -> None:
        self._connection = connection
        self._burst = burst

    async def get_memories(self, slots: Sequence[int]) -> Sequence[IMemory]:
        memories, descriptors = await self._connection.call(GetMemories(self._burst, tuple(slots)), Memories)
        regions: list[Region] = []
        try:
            for description in memories.memories:
                region = attached(descriptors.take(), description)
                regions.append(region)
                region.forget_descriptor()
        except BaseException:
            for region in regions:
                region.close()
            raise
        finally:
            descriptors.close()
        return regions
