"""`BufferPair`: the buffers of one device memory in its driver.

An execution may read and write the same device memory: a state and its successor. The device works with two buffers then, which change
places when the execution has succeeded. A failed one leaves the state as it was.

Invariant
    `front` holds the tensor. `back` is allocated before the first execution that reads and writes the memory, with the same roles.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
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
        prepared: the models that they were allocated for, one for each of `roles.parts`.
        roles: what they may stand for.
        front: holds the tensor. back: the second one, or None.
        all: both. A collected memory frees what stands in this very list, so it is changed in place only.
        turns: how often they have changed places.
    """

    __slots__ = ("_allocating", "_names", "all", "back", "front", "prepared", "roles", "turns")

    def __init__(self, prepared: Sequence[Prepared], front: RemoteBuffer, roles: DeviceRoles) -> None:
        self.roles = roles
        self._stand_for(prepared)
        self.front = front
        self.back: RemoteBuffer | None = None
        self.all = [front]
        self.turns = 0
        self._allocating = anyio.Lock()

    def _stand_for(self, prepared: Sequence[Prepared]) -> None:
        self.prepared = tuple(prepared)
        self._names = dict(zip(self.prepared, self.roles.parts, strict=True))

    def inputs_of(self, prepared: Prepared) -> tuple[str, ...] | None:
        """Return the inputs of a prepared model that they may stand for. None if they were not allocated for that model."""
        names = self._names.get(prepared)
        return None if names is None else names[0]

    def outputs_of(self, prepared: Prepared) -> tuple[str, ...] | None:
        """Return the same as `inputs_of`, for outputs."""
        names = self._names.get(prepared)
        return None if names is None else names[1]

    @property
    def device(self) -> str:
        return self.front.device.name

    @property
    def ended_by(self) -> BaseException | None:
        """Why their driver has ended; None while it lives."""
        return self.front.device.connection.ended_by

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
        self.turns += 1

    def replace(self, prepared: Sequence[Prepared], front: RemoteBuffer) -> list[RemoteBuffer]:
        """Use one buffer in another driver from now on. Returns the buffers before."""
        before = list(self.all)
        self.all[:] = [front]
        self.front, self.back = front, None
        self._stand_for(prepared)
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
    lost = DeviceMemoryLostError(device, error.exit_code if isinstance(error, DriverDiedError) else None)
    for note in getattr(error, "__notes__", ()):
        lost.add_note(note)
    return lost
