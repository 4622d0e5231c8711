"""What the tests of the queues share: two ends of one queue, and the shared words from a peer's point of view."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from aionn.fmq import MessageQueue, MQDescriptor, layout
from aionn.hal.types import MemoryDescription, MemoryKind
from aionn.memory.region import Region


def duplicated(descriptor: MQDescriptor) -> MQDescriptor:
    """As a peer receives it: descriptors of its own."""
    return replace(descriptor, fds=tuple(os.dup(fd) for fd in descriptor.fds))


@contextmanager
def both_ends(element: layout.Element, capacity: int, **options: Any) -> Iterator[tuple[MessageQueue, MessageQueue]]:
    """The two ends of one new queue, in this process."""
    queue = MessageQueue.create(element, capacity, **options)
    peer = MessageQueue.attach(duplicated(queue.descriptor()), element)
    try:
        yield queue, peer
    finally:
        peer.close()
        queue.close()


class Words:
    """The shared words of a queue, to be read and poked as a broken or hostile peer could."""

    def __init__(self, queue: MessageQueue) -> None:
        descriptor = queue.descriptor()
        fds = [os.dup(fd) for fd in descriptor.fds]
        sizes = layout.memory_bytes_of(descriptor)
        self._regions = [Region.attach(fd, MemoryDescription(MemoryKind.ASHMEM, size)) for fd, size in zip(fds, sizes, strict=False)]
        for fd in fds[len(sizes) :]:
            os.close(fd)
        self._parts = [
            np.frombuffer(self._regions[part.fd_index].view(), np.uint8)[part.offset : part.offset + part.extent]
            for part in descriptor.grantors
        ]
        self.read: NDArray[np.uint64] = self._parts[layout.READ_COUNTER].view(np.uint64)
        self.written: NDArray[np.uint64] = self._parts[layout.WRITE_COUNTER].view(np.uint64)
        self.data: NDArray[np.uint8] = self._parts[layout.DATA]
        self.flag: NDArray[np.uint32] = self._parts[layout.EVENT_FLAG].view(np.uint32)
        self.control: NDArray[np.uint32] = self._parts[layout.CONTROL].view(np.uint32)

    @property
    def reader_armed(self) -> int:
        return int(self.control[layout.READER_ARMED_OFFSET // 4])

    @property
    def writer_armed(self) -> int:
        return int(self.control[layout.WRITER_ARMED_OFFSET // 4])

    def close(self) -> None:
        for region in self._regions:
            region.close()


@contextmanager
def words_of(queue: MessageQueue) -> Iterator[Words]:
    words = Words(queue)
    try:
        yield words
    finally:
        words.close()


def open_fds(*, collect: bool = True) -> set[str]:
    """Open descriptors of this process and what they are, once nothing that could be collected holds one any more."""
    if collect:
        gc.collect()
    found = set()
    for fd in os.listdir("/proc/self/fd"):
        try:
            found.add(f"{fd} {os.readlink(f'/proc/self/fd/{fd}')}")
        except FileNotFoundError:
            continue
    return found


def counting(count: int, dtype: Any = np.uint8) -> NDArray[Any]:
    """0, 1, 2, ... wrapping round at the dtype's end."""
    return np.arange(count).astype(dtype)
