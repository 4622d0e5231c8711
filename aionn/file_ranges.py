"""Read ranges of files at the speed of memory: copied into private memory, digested from that copy, or both.

The order is always copy, digest, use the copy. So no other process can change bytes between their digest and their use.

One thread reads ahead while the calling thread digests what has been read; BLAKE3 takes the usable cores for large chunks. A digest
without a copy uses the same few buffers again, because fresh memory costs more than reading does. Every function blocks, releases the
GIL, and may be called in several threads at once. Only `private_memory` imports NumPy.

`Identity` shows without reading that a file has changed, so that a digest of the same file can be remembered.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import ContextVar
from typing import Any, NamedTuple, TypeVar

import blake3
import msgspec

T = TypeVar("T")

_CHUNK_BYTES = 4 << 20
_AHEAD = 4
"""So many chunks are read before they are digested."""
_SERIAL_BYTES = 8 << 20
"""Fewer bytes in all are read by the calling thread: starting another one costs more than it saves."""
_PARALLEL_BYTES = 2 << 20
"""Below this, starting BLAKE3's threads costs more than it gains."""
_ALIGNMENT_BYTES = 64
"""A cache line and AVX-512's width, so that engines can use a copy in place."""


_RACY_NS = 2_000_000_000
"""A file that was written to more recently than this may be written to again and keep its times.

The kernel takes them from a clock that moves every few milliseconds, some file systems round them to two seconds. Git calls
such entries of its index "racily clean", and reads the files again.
"""


class Identity(NamedTuple):
    """What shows that a file has changed, without reading it."""

    device: int
    inode: int
    size: int
    mtime_ns: int
    ctime_ns: int

    @classmethod
    def of(cls, status: os.stat_result) -> Identity:
        return cls(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


def shows_changes(identities: Iterable[Identity], began_ns: int) -> bool:
    """Return whether files with these identities will show every later change of theirs by another identity.

    A change through a mapping shows late: where a page was written to before and is not on the disk yet, the times stay.

    Args:
        began_ns: when reading them began, in `time.time_ns`.
    """
    return all(max(identity.mtime_ns, identity.ctime_ns) <= began_ns - _RACY_NS for identity in identities)


_stopped: ContextVar[Callable[[], bool]] = ContextVar("aionn_reading_stopped", default=lambda: False)


class StoppedError(Exception):
    """The caller of `until` has stopped waiting."""


def until(stopped: Callable[[], bool], work: Callable[[], T]) -> T:
    """Do `work` in this thread, and end its reading between two chunks once `stopped` says so.

    Raises:
        StoppedError: the reading was ended.
        Exception: what `work` raises.
    """
    token = _stopped.set(stopped)
    try:
        return work()
    finally:
        _stopped.reset(token)


class ShortFileError(OSError):
    """A file ended before the range did."""


class FileRange(msgspec.Struct, frozen=True):
    """`length` bytes of an open file, from `offset` on."""

    fd: int
    offset: int
    length: int


def digest_ranges(ranges: Sequence[FileRange]) -> list[bytes]:
    """Return BLAKE3 of each range, 32 bytes. No more than a few chunks are in memory at a time.

    Raises:
        ShortFileError: a file ends before its range.
        OSError: a file cannot be read.
    """
    return _digests(ranges, None)


def copy_ranges(ranges: Sequence[FileRange], targets: Sequence[Any]) -> list[bytes]:
    """Copy each range into its target, and return BLAKE3 of each copy, 32 bytes.

    Args:
        targets: writable bytes-like objects, each of its range's length. Only the caller may have references to them.

    Raises:
        ShortFileError: a file ends before its range.
        OSError: a file cannot be read.
    """
    views = [memoryview(target).cast("B") for target in targets]
    for place, view in zip(ranges, views, strict=True):
        if view.nbytes != place.length:
            raise ValueError(f"a target has {view.nbytes} bytes for a range of {place.length}")
    return _digests(ranges, views)


def digest_of(content: Any, *more: Any) -> bytes:
    """Return BLAKE3 of bytes-like objects, one after the other: 32 bytes. A large first one uses several threads. Releases the GIL."""
    hasher = _hasher(memoryview(content).nbytes)
    for piece in (content, *more):
        hasher.update(piece)
    return hasher.digest()


def private_memory(length: int) -> memoryview:
    """Return uninitialised memory that begins at a multiple of 64 bytes. It is freed with the last view of it.

    NumPy asks for huge pages from 4 MiB on. They make fresh memory four times quicker to fill.
    """
    import numpy as np

    memory = np.empty(length + _ALIGNMENT_BYTES, np.uint8)
    begin = -memory.__array_interface__["data"][0] % _ALIGNMENT_BYTES
    return memory.data[begin : begin + length]


def _hasher(length: int) -> blake3.blake3:
    return blake3.blake3(max_threads=blake3.blake3.AUTO if length >= _PARALLEL_BYTES else 1)


class _Chunk(msgspec.Struct, frozen=True):
    index: int
    offset: int
    view: memoryview


def _digests(ranges: Sequence[FileRange], targets: Sequence[memoryview] | None) -> list[bytes]:
    hashers = [_hasher(place.length) for place in ranges]
    chunks, stopped = _chunks(ranges, targets), _stopped.get()
    if sum(place.length for place in ranges) <= _SERIAL_BYTES:
        for chunk in chunks:
            _read(ranges[chunk.index].fd, chunk)
            hashers[chunk.index].update(chunk.view)
        return [hasher.digest() for hasher in hashers]
    reading: deque[tuple[_Chunk, Future[None]]] = deque()

    def digest_oldest() -> None:
        if stopped():
            raise StoppedError
        chunk, read = reading.popleft()
        read.result()
        hashers[chunk.index].update(chunk.view)

    with ThreadPoolExecutor(1, "aionn read") as reader:
        try:
            for chunk in chunks:
                reading.append((chunk, reader.submit(_read, ranges[chunk.index].fd, chunk)))
                if len(reading) == _AHEAD:  # the generator may use the oldest chunk's buffer again after this
                    digest_oldest()
            while reading:
                digest_oldest()
        finally:
            reader.shutdown(cancel_futures=True)
    return [hasher.digest() for hasher in hashers]


def _chunks(ranges: Sequence[FileRange], targets: Sequence[memoryview] | None) -> Iterator[_Chunk]:
    """Yield all ranges chunk by chunk. Without targets, every chunk uses the buffer of the chunk `_AHEAD` before it."""
    ring: list[memoryview] = []
    count = 0
    for index, place in enumerate(ranges):
        for at in range(0, place.length, _CHUNK_BYTES):
            length = min(_CHUNK_BYTES, place.length - at)
            if targets is not None:
                view = targets[index][at : at + length]
            else:
                if len(ring) < _AHEAD:
                    ring.append(memoryview(bytearray(min(_CHUNK_BYTES, max(place.length for place in ranges)))))
                view = ring[count % len(ring) if len(ring) == _AHEAD else -1][:length]
                count += 1
            yield _Chunk(index, place.offset + at, view)


def _read(fd: int, chunk: _Chunk) -> None:
    done = 0
    while done < chunk.view.nbytes:
        got = os.preadv(fd, [chunk.view[done:]], chunk.offset + done)
        if not got:
            raise ShortFileError(f"the file ends at byte {chunk.offset + done}, {chunk.view.nbytes - done} bytes before the range does")
        done += got
