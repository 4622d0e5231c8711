"""The description of a message queue, by which another process attaches to it (libfmq: MQDescriptor)."""

from __future__ import annotations

import enum

import msgspec


class MQFlavor(enum.IntEnum):
    """The flavours of a message queue (libfmq's, with the same numbers). UNSYNCHRONIZED is there for parity with libfmq."""

    SYNCHRONIZED = 1
    UNSYNCHRONIZED = 2


class GrantorDescriptor(msgspec.Struct, frozen=True):
    """One piece of a queue's shared region (libfmq: GrantorDescriptor, flags always 0)."""

    fd_index: int
    offset: int
    extent: int


class MQDescriptor(msgspec.Struct, frozen=True, eq=False):
    """Everything that another process needs to attach to a queue. The descriptors travel beside it.

    Grantors 0 to 3 are libfmq's: read counter, write counter, data, event flag word. The others are aionn's.

    Attributes:
        grantors: where each part lies.
        quantum: bytes of one element.
        flavor: synchronized or unsynchronized.
        fds: the descriptors of memory, which `fd_index` of a grantor counts, then those of aionn's eventfds.
    """

    grantors: tuple[GrantorDescriptor, ...]
    quantum: int
    flavor: MQFlavor
    fds: tuple[int, ...] = ()

    def __eq__(self, other: object) -> bool:  # whatever numbers the descriptors have
        return isinstance(other, MQDescriptor) and self._layout == other._layout

    def __hash__(self) -> int:
        return hash(self._layout)

    @property
    def _layout(self) -> tuple[object, ...]:
        return self.grantors, self.quantum, self.flavor
