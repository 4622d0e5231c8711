"""`BufferPair`: the buffers of one device memory in its driver.

An execution may read and write the same device memory: a state and its successor. The device works with two buffers then, which change
places when the execution has succeeded. A failed one leaves the state as it was.

Invariant
    `front` holds the tensor. `back` is allocated before the first execution that reads and writes the memory, with the same roles.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import anyio

from aionn.errors import DeviceMemoryLostError, DriverDiedError, DriverHungError
from aionn.remote.device import RemoteBuffer
from aionn.runtime.executing.device_roles import DeviceRoles

if TYPE_CHECKING:
    from aionn.runtime.serving.planned_model import Prepared


class BufferPair:
    """The buffers of a device memory, all in one driver.

    Attributes:
        prepared: the model that they were allocated for.
        roles: what they may stand for.
        front: holds the tensor. back: the second one, or None.
        all: both. A collected memory frees what stands in this very list, so it is changed in place only.
    """

    __slots__ = ("_allocating", "all", "back", "front", "prepared", "roles")

    def __init__(self, prepared: Prepared, front: RemoteBuffer, roles: DeviceRoles) -> None:
        self.prepared = prepared
        self.roles = roles
        self.front = front
        self.back: RemoteBuffer | None = None
        self.all = [front]
        self._allocating = anyio.Lock()

    @property
    def device(self) -> str:
        return self.prepared.device.name

    @property
    def ended_by(self) -> BaseException | None:
        """Why their driver has ended; None while it lives."""
        return self.prepared.device.connection.ended_by

    async def complete(self, closed: Callable[[], bool]) -> None:
        """See that there is a second buffer, unless the memory is `closed`.

        Raises:
            MemoryAllocationError: the driver cannot have it now.
        """
        if self.back is not None:
            return  # without the lock: taking it costs a turn of the loop, which is more than a small model's whole run
        async with self._allocating:
            if self.back is None and not closed():
                with losing(self.device):
                    back = await self.roles.allocate(self.prepared)
                self.all.append(back)
                self.back = back
                if closed():
                    back.release()

    def turn(self) -> None:
        """Let the two buffers change places."""
        assert self.back is not None
        self.front, self.back = self.back, self.front

    def replace(self, prepared: Prepared, front: RemoteBuffer) -> list[RemoteBuffer]:
        """Use one buffer in another driver from now on. Returns the buffers before."""
        before = list(self.all)
        self.all[:] = [front]
        self.prepared, self.front, self.back = prepared, front, None
        return before

    def release(self) -> None:
        """Free them, without waiting."""
        for buffer in self.all:
            buffer.release()


@contextmanager
def losing(device: str) -> Iterator[None]:
    """Raise the end of the driver as the loss of the memory in it."""
    try:
        yield
    except (DriverDiedError, DriverHungError) as error:
        raise lost_with(device, error) from error


def lost_with(device: str, error: BaseException) -> DeviceMemoryLostError:
    """Return what the end of a driver means to the memory in it."""
    return DeviceMemoryLostError(device, error.exit_code if isinstance(error, DriverDiedError) else None)
