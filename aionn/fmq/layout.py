"""A queue's shared region, byte by byte, laid out for parity with libfmq; and the checks of a peer's descriptor. No I/O.

    offset   size  grantor  content
         0      8     0     read counter, u64          bytes ever read;    stored by the reader alone
        64      8     1     write counter, u64         bytes ever written; stored by the writer alone
       128      4     3     event flag word, u32       libfmq's: NOT_FULL 0x1, NOT_EMPTY 0x2, 30 bits for others
       192    320     4     aionn's control words      see `ring_control` in ring.h; libfmq peers ignore this grantor
       512      D     2     the elements               D = capacity * quantum; all of it usable, no element straddles the end

Counters, data and event flag word are libfmq's, each on separate cache lines, so a libfmq peer can attach through the
descriptor. A libfmq descriptor can be attached too. It has grantors 0 to 2 or 3, any offsets that are multiples of 8, and
one or two memory descriptors. Only threads can wait for a queue without grantor 4.

`_Static_assert` in ring.h mirrors these numbers, and tests/fmq/test_layout.py compares the two.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from itertools import pairwise
from typing import TYPE_CHECKING, TypeAlias, Union

from aionn.errors import CallerError
from aionn.hal.queues import GrantorDescriptor, MQDescriptor, MQFlavor

if TYPE_CHECKING:  # most queues are of plain bytes
    from numpy.typing import DTypeLike

LINE_BYTES = 64
"""A cache line. Two cores that store to the same line wait for each other."""

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
CLAIMED_OFFSET = 264
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

Element: TypeAlias = Union["DTypeLike", type[ctypes.Structure], int]
"""One element: a NumPy dtype (structured ones too), a ctypes.Structure type, or a number of plain bytes."""


def quantum_of(element: Element) -> int:
    """Return the bytes of one element.

    Raises:
        CallerError: the element is not plain old data, or has no bytes.
    """
    if isinstance(element, int):
        if not 1 <= element <= MAX_REGION_BYTES:
            raise CallerError(f"a queue element of {element} bytes was asked for; give 1 to {MAX_REGION_BYTES}")
        return element
    import numpy as np

    try:
        dtype = np.dtype(element)
    except (TypeError, ValueError) as error:
        raise CallerError(f"{element!r} cannot be a queue element; give a NumPy dtype, a ctypes.Structure or a number of bytes") from error
    if dtype.hasobject or not 1 <= dtype.itemsize <= MAX_REGION_BYTES:
        raise CallerError(
            f"a queue element of dtype {dtype} ({dtype.itemsize} bytes) was asked for; another process can read plain, non-empty data only"
        )
    return dtype.itemsize


def grantors_for(quantum: int, capacity: int, *, buffer_apart: bool = False) -> tuple[tuple[GrantorDescriptor, ...], int]:
    """Lay out a new queue. Return where its parts lie, and the bytes of its first region.

    Args:
        quantum: bytes of one element.
        capacity: elements.
        buffer_apart: the data lies in a second memory descriptor, from its first byte on. It exists for parity with
            libfmq `main` (bufferFd).

    Raises:
        CallerError: the size is too small or too large for a queue.
    """
    if capacity < 1 or quantum < 1 or DATA_OFFSET + capacity * quantum > MAX_REGION_BYTES:
        raise CallerError(
            f"a queue of {capacity} elements of {quantum} bytes was asked for; give at least 1 element and at most {MAX_REGION_BYTES} bytes"
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
    """Return how many of the descriptor's last fds are eventfds."""
    return EVENT_FDS if descriptor.flavor is MQFlavor.SYNCHRONIZED and len(descriptor.grantors) > CONTROL else 0


def memory_bytes_of(descriptor: MQDescriptor) -> tuple[int, ...]:
    """Return the bytes that each memory descriptor must have, so that every part lies inside it.

    Check everything that can be known without touching the descriptors, before anything is mapped.

    Raises:
        CallerError: the descriptor cannot be a queue's. The message says why.
    """
    grantors, quantum = descriptor.grantors, descriptor.quantum
    if len(grantors) < 3:
        raise CallerError(f"queue descriptor: {len(grantors)} grantors; expected at least 3, for two counters and the data")
    if not 1 <= quantum <= MAX_REGION_BYTES:
        raise CallerError(f"queue descriptor: a quantum of {quantum} bytes; expected 1 to {MAX_REGION_BYTES}")
    if not isinstance(descriptor.flavor, MQFlavor):
        raise CallerError(f"queue descriptor: flavor {descriptor.flavor!r}; expected synchronized (1) or unsynchronized (2)")
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
        raise CallerError("queue descriptor: it has a memory descriptor that no grantor uses; send only what the queue needs")
    return tuple(needed)


def _check_grantor(index: int, part: GrantorDescriptor, memories: int) -> None:
    name = f"queue descriptor, grantor {index} ({_NAMES[index]})"
    if not 0 <= part.fd_index < memories:
        raise CallerError(f"{name}: fd index {part.fd_index}; expected less than {memories}, the number of memory descriptors")
    alignment = LINE_BYTES if index == CONTROL else 8
    if part.offset < 0 or part.offset % alignment:
        raise CallerError(f"{name}: offset {part.offset}; expected a multiple of {alignment}")
    if part.extent < _LEAST_BYTES[index]:
        raise CallerError(f"{name}: {part.extent} bytes; expected at least {_LEAST_BYTES[index]}")
    if part.offset + part.extent > MAX_REGION_BYTES:
        raise CallerError(f"{name}: bytes {part.offset} to {part.offset + part.extent}; a queue ends before {MAX_REGION_BYTES}")


def _check_apart(parts: Iterable[GrantorDescriptor]) -> None:
    """Refuse parts that overlap, since a written element must never change a counter."""
    ordered = sorted((part.fd_index, part.offset, part.offset + part.extent) for part in parts)
    for (fd_index, _, end), (next_index, offset, _) in pairwise(ordered):
        if fd_index == next_index and offset < end:
            raise CallerError(f"queue descriptor: two grantors overlap at byte {offset} of memory descriptor {fd_index}")
