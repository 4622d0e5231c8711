"""The description of a message queue, by which another process attaches to it (libfmq: MQDescriptor)."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field


class MQFlavor(enum.IntEnum):
    """The flavours of a message queue (libfmq's, with the same numbers). UNSYNCHRONIZED is there for parity with libfmq."""

    SYNCHRONIZED = 1
    UNSYNCHRONIZED = 2


@dataclass(frozen=True, slots=True)
class GrantorDescriptor:
    """One piece of a queue's shared region (libfmq: GrantorDescriptor, flags always 0)."""

    fd_index: int
    offset: int
    extent: int


@dataclass(frozen=True, slots=True)
class MQDescriptor:
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
    fds: tuple[int, ...] = field(default=(), compare=False)
