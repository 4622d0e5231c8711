"""Device memory moves to another driver at a swap: a copy of its contents under the same roles, or nothing at all.

The copy is made while no execution is in flight; `settle` puts it in place, without an await, together with the swap. A
memory that is empty stays empty: its next use is refused there as it would have been here, and never sees zeros.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from aionn.errors import CallerError, ExecutionError
from aionn.memory.memory import Memory
from aionn.memory.region import Region
from aionn.remote.device import RemoteBuffer, RemotePreparedModel

if TYPE_CHECKING:
    from aionn.runtime.executing.device_memory import DeviceMemory


class NotNowError(CallerError):
    """The swap is possible, but not at this moment."""


class MovedMemory:
    """A copy of a device memory in another driver, not yet in use."""

    def __init__(self, memory: DeviceMemory, prepared: RemotePreparedModel, buffer: RemoteBuffer) -> None:
        self._memory = memory
        self._prepared = prepared
        self._buffer = buffer
        self._fills = memory.fills
        self._old: list[RemoteBuffer] = []

    @property
    def outdated(self) -> bool:
        """Whether the app has filled the memory, or is filling it, since the copy was made."""
        return self._memory.fills != self._fills or bool(self._memory._filling)

    def settle(self) -> None:
        """From now on the copy is the memory."""
        memory = self._memory
        self._old = list(memory._buffers)
        # In place: a collected memory gives back what stands in this very list.
        memory._buffers[:] = [self._buffer]
        memory._prepared, memory._front, memory._back = self._prepared, self._buffer, None
        if memory.closed:
            self._buffer.release()

    def free_old(self) -> None:
        for buffer in self._old:
            buffer.release()

    def discard(self) -> None:
        """The memory stays where it was."""
        self._buffer.release()


async def move(memory: DeviceMemory, prepared: RemotePreparedModel) -> MovedMemory | None:
    """Copy a memory into the driver of `prepared`. None: there is nothing to move, it is closed or lost already.

    Raises:
        NotNowError: it is in use.
        AionnError: the other driver cannot have it.
    """
    if memory.closed or memory._ended_by() is not None:
        return None
    if memory._uses or memory._filling:
        raise NotNowError("a device memory is in use")
    buffer = await memory._roles.allocate(prepared)
    moved = MovedMemory(memory, prepared, buffer)
    try:
        shape, size_bytes = memory.shape, memory.size_bytes
        if shape is not None and size_bytes:
            with Memory(Region.allocate(size_bytes)) as contents:
                try:
                    await memory._front.copy_to(contents)
                except ExecutionError:
                    return moved  # it has never been filled, or an execution failed to write it
                await buffer.copy_from(contents, shape)
    except BaseException:
        buffer.release()
        raise
    return moved
