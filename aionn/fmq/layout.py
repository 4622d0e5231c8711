"""A queue's shared region, byte by byte, and what makes a peer's descriptor acceptable. No I/O.

    offset   size  grantor  content
         0      8     0     read counter, u64          bytes ever read;    stored by the reader alone
        64      8     1     write counter, u64         bytes ever written; stored by the writer alone
       128      4     3     event flag word, u32       libfmq's: NOT_FULL 0x1, NOT_EMPTY 0x2, 30 bits for others
       192    320     4     aionn's control words      see `ring_control` in ring.h; libfmq peers ignore this grantor
       512      D     2     the elements               D = capacity * quantum; all of it usable, no element straddles the end

Counters, data and event flag word are libfmq's, each on separate cache lines, so a libfmq peer can attach through the
descriptor. A libfmq descriptor can be attached too: grantors 0 to 2 or 3, any offsets that are multiples of 8, one or two
memory descriptors. Without grantor 4 only threads can wait for such a queue.

Mirrored by `_Static_assert` in ring.h; tests/fmq/test_layout.py compares the two.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import DTypeLike

from aionn.errors import CallerError
from aionn.hal.types import GrantorDescriptor, MQDescriptor, MQFlavor

LINE_BYTES = 64
"""A cache line: what two cores cannot both store to without waiting for each other."""

READ_COUNTER, WRITE_COUNTER, DATA, EVENT_FLAG, CONTROL = range(5)
"""Grantor indices; 0 to 3 are libfmq's."""

READ_OFFSET = 0
WRITE_OFFSET = 64
FLAG_OFFSET = 128
CONTROL_OFFSET = 192
DATA_OFFSET = 512

# Within the control grantor.
READER_ARMED_OFFSET = 0
WRITER_ARMED_OFFSET = 64
CLOSED_OFFSET = 128
FUTEX_BITS_OFFSET = 132
WRITE_INTENT_OFFSET = 192
WRITER_CPU_OFFSET = 200
READER_CPU_OFFSET = 256
CONTROL_BYTES = 320

COUNTER_BYTES = 8
FLAG_BYTES = 4

NOT_FULL = 0x1
NOT_EMPTY = 0x2

EVENT_FDS = 2
"""Descriptors after the memory of a synchronized queue with control words: the reader's eventfd, the writer's."""

MAX_REGION_BYTES = 2**31 - 1
"""libfmq's limit for one grantor and for a whole AIDL queue (INT32_MAX)."""

_LEAST_BYTES = {READ_COUNTER: COUNTER_BYTES, WRITE_COUNTER: COUNTER_BYTES, DATA: 1, EVENT_FLAG: FLAG_BYTES, CONTROL: CONTROL_BYTES}
_NAMES = {READ_COUNTER: "read counter", WRITE_COUNTER: "write counter", DATA: "data", EVENT_FLAG: "event flag", CONTROL: "control"}

Element: TypeAlias = DTypeLike | type[ctypes.Structure] | int
"""What a queue holds: a NumPy dtype (structured ones too), a ctypes.Structure type, or plain elements of so many bytes."""


def element_of(element: Element) -> tuple[int, np.dtype[Any] | None]:
    """Bytes of one element, and its dtype, or None for plain bytes.

    Raises:
        CallerError: the element is not plain old data, or has no bytes.
    """
    if isinstance(element, int):
        if not 1 <= element <= MAX_REGION_BYTES:
            raise CallerError(f"a queue element of {element} bytes: it has 1 to {MAX_REGION_BYTES}")
        return element, None
    try:
        dtype = np.dtype(element)
    except (TypeError, ValueError) as error:
        raise CallerError(f"a queue element of type {element!r}: give a NumPy dtype, a ctypes.Structure or a number of bytes") from error
    if dtype.hasobject or not 1 <= dtype.itemsize <= MAX_REGION_BYTES:
        raise CallerError(f"a queue element of dtype {dtype}, {dtype.itemsize} bytes: another process can read plain, non-empty data only")
    return dtype.itemsize, dtype


def grantors_for(quantum: int, capacity: int, *, buffer_apart: bool = False) -> tuple[tuple[GrantorDescriptor, ...], int]:
    """Where the parts of a new queue lie, and the bytes of its first region.

    Args:
        quantum: bytes of one element.
        capacity: elements.
        buffer_apart: the data lies in a second memory descriptor, from its first byte on (libfmq `main`: bufferFd).

    Raises:
        CallerError: no queue can have that size.
    """
    if capacity < 1 or quantum < 1 or DATA_OFFSET + capacity * quantum > MAX_REGION_BYTES:
        raise CallerError(
            f"a queue of {capacity} elements of {quantum} bytes: it has at least 1 element and at most {MAX_REGION_BYTES} bytes in all"
        )
    data_bytes = capacity * quantum
    grantors = (
        GrantorDescriptor(0, READ_OFFSET, COUNTER_BYTES),
        GrantorDescriptor(0, WRITE_OFFSET, COUNTER_BYTES),
        GrantorDescriptor(1, 0, data_bytes) if buffer_apart else GrantorDescriptor(0, DATA_OFFSET, data_bytes),
        GrantorDescriptor(0, FLAG_OFFSET, FLAG_BYTES),
        GrantorDescriptor(0, CONTROL_OFFSET, CONTROL_BYTES),
    )
    return grantors, DATA_OFFSET if buffer_apart else DATA_OFFSET + data_bytes


def event_fds_of(descriptor: MQDescriptor) -> int:
    """How many of the descriptor's last fds are eventfds."""
    return EVENT_FDS if descriptor.flavor is MQFlavor.SYNCHRONIZED and len(descriptor.grantors) > CONTROL else 0


def memory_bytes_of(descriptor: MQDescriptor) -> tuple[int, ...]:
    """Bytes that each memory descriptor must have for every part to lie inside it.

    Everything that can be known without touching the descriptors is checked here, before anything is mapped.

    Raises:
        CallerError: the descriptor cannot be a queue's; the message says why.
    """
    grantors, quantum = descriptor.grantors, descriptor.quantum
    if len(grantors) < 3:
        raise CallerError(f"queue descriptor: {len(grantors)} grantors; counters and data alone are 3")
    if not 1 <= quantum <= MAX_REGION_BYTES:
        raise CallerError(f"queue descriptor: a quantum of {quantum} bytes; an element has 1 to {MAX_REGION_BYTES}")
    if not isinstance(descriptor.flavor, MQFlavor):
        raise CallerError(f"queue descriptor: flavor {descriptor.flavor!r} is neither synchronized (1) nor unsynchronized (2)")
    memories = len(descriptor.fds) - event_fds_of(descriptor)
    if memories not in (1, 2):
        raise CallerError(
            f"queue descriptor: {len(descriptor.fds)} file descriptors, {event_fds_of(descriptor)} of them eventfds; 1 or 2 must be memory"
        )
    needed = [0] * memories
    for index, part in enumerate(grantors[: CONTROL + 1]):
        _check_grantor(index, part, memories)
        needed[part.fd_index] = max(needed[part.fd_index], part.offset + part.extent)
    if grantors[DATA].extent % quantum:
        raise CallerError(f"queue descriptor: {grantors[DATA].extent} bytes of data; expected a multiple of the quantum of {quantum} bytes")
    _check_apart(grantors[: CONTROL + 1])
    if 0 in needed:
        raise CallerError("queue descriptor: a memory descriptor that no grantor uses; send only what the queue needs")
    return tuple(needed)


def _check_grantor(index: int, part: GrantorDescriptor, memories: int) -> None:
    name = f"queue descriptor, grantor {index} ({_NAMES[index]})"
    if not 0 <= part.fd_index < memories:
        raise CallerError(f"{name}: fd index {part.fd_index} of {memories} memory descriptors")
    alignment = LINE_BYTES if index == CONTROL else 8
    if part.offset < 0 or part.offset % alignment:
        raise CallerError(f"{name}: offset {part.offset} is not a multiple of {alignment}")
    if part.extent < _LEAST_BYTES[index]:
        raise CallerError(f"{name}: {part.extent} bytes; it has at least {_LEAST_BYTES[index]}")
    if part.offset + part.extent > MAX_REGION_BYTES:
        raise CallerError(f"{name}: bytes {part.offset} to {part.offset + part.extent}; a queue ends before {MAX_REGION_BYTES}")


def _check_apart(parts: Iterable[GrantorDescriptor]) -> None:
    """An element written must not be a counter stored."""
    ordered = sorted((part.fd_index, part.offset, part.offset + part.extent) for part in parts)
    for (fd_index, _, end), (next_index, offset, _) in pairwise(ordered):
        if fd_index == next_index and offset < end:
            raise CallerError(f"queue descriptor: two grantors overlap at byte {offset} of memory descriptor {fd_index}")
