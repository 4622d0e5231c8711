"""A driver's cache files: checked descriptors, whole writes, and private copies with their digests.

Nothing here is kept, and nothing opens a file: all descriptors come from the app. `integrity` decides which bytes may be used.
Everything is blocking and runs in threads.
"""

from __future__ import annotations

import fcntl
import os
import stat
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

from aionn.caching.outcomes import MissReason, Refusal
from aionn.file_ranges import FileRange, ShortFileError, copy_ranges, digest_of, digest_ranges, private_memory

_SMALL_BYTES = 2 << 20  # files of fewer bytes in all are read at once, each in one call
_WRITABLE_BYTES = 64 << 10  # smaller copies are `bytes`
_WRITE_BYTES = 4 << 20  # on kernels that do not preempt, a longer system call would keep a CPU from others, such as an event loop
_RETRY_S = 0.01
_writers = threading.Lock()
_written: set[tuple[int, int]] = set()
"""Device and inode of the first file of each set that this process is writing."""
Purpose = Literal["read", "write"]


def check_descriptors(fds: Sequence[int], purpose: Purpose) -> Refusal | None:
    """Return why these descriptors cannot be used, or None.

    NNAPI's clients open all files for reading and writing. A cache on a read-only volume cannot do that, and a load only reads.
    """
    allowed = {os.O_RDWR} if purpose == "write" else {os.O_RDWR, os.O_RDONLY}
    seen = set()
    for index, fd in enumerate(fds):
        try:
            access = fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE
            status = os.fstat(fd)
        except (OSError, ValueError, OverflowError) as error:
            return Refusal(MissReason.BAD_HANDLE, f"handle {index}: {error}")
        if access not in allowed:
            needed = "reading and writing" if purpose == "write" else "reading"
            return Refusal(MissReason.BAD_HANDLE, f"handle {index} is not open for {needed}")
        if not stat.S_ISREG(status.st_mode):
            return Refusal(MissReason.BAD_HANDLE, f"handle {index} is not a regular file")
        if (status.st_dev, status.st_ino) in seen:
            return Refusal(MissReason.BAD_HANDLE, f"handle {index} is the same file as another")
        seen.add((status.st_dev, status.st_ino))
    return None


@contextmanager
def sole_writer(fd: int, patience_s: float) -> Iterator[bool]:
    """Hold the right to write a set of files, which its first file stands for. Yields False if another writer stays longer than that.

    flock keeps out writers with other open file descriptions, in any process. Duplicates of one description share its lock, so the
    writers of this process are kept apart by the file's identity as well.
    """
    from filelock import lock_descriptor, unlock_descriptor  # 6 ms of a driver's first hit that only a save needs

    status = os.fstat(fd)
    identity = (status.st_dev, status.st_ino)
    given_up_at = time.monotonic() + patience_s
    while not _begin_to_write(identity):
        if time.monotonic() > given_up_at:
            yield False
            return
        time.sleep(_RETRY_S)
    try:
        while not (locked := lock_descriptor(fd, blocking=False)) and time.monotonic() <= given_up_at:
            time.sleep(_RETRY_S)
        try:
            yield locked
        finally:
            if locked:
                unlock_descriptor(fd)  # the client may keep the description open
    finally:
        with _writers:
            _written.remove(identity)


def _begin_to_write(identity: tuple[int, int]) -> bool:
    with _writers:
        if identity in _written:
            return False
        _written.add(identity)
        return True


def write_whole(fd: int, *pieces: memoryview) -> None:
    """Replace the contents of a file by `pieces`, one after the other."""
    # "the driver must truncate a file to zero size before writing" (HAL 1.2, prepareModel)
    # An empty file needs no truncation. ext4 would take it for the replacement of a file, and write everything out when it is closed.
    if os.fstat(fd).st_size:
        os.ftruncate(fd, 0)
    at = 0
    for piece in pieces:
        done = 0
        while done < piece.nbytes:
            done += os.pwrite(fd, piece[done : done + _WRITE_BYTES], at + done)
        at += done


def read_private(fds: Sequence[int], lengths: Sequence[int]) -> tuple[list[bytes | memoryview], list[bytes]]:
    """Copy the first `lengths` bytes of the files, all in one pass. Return the copies and the digests of those copies.

    Only the caller has references to the copies. Copies of 64 KiB or more are writable and begin at a multiple of 64 bytes, so an
    engine uses them in place.

    Raises:
        ShortFileError: a file has been cut.
        MemoryError: there is not enough memory for the copies.
    """
    if sum(lengths) < _SMALL_BYTES:
        small = [_read_at_once(fd, length) for fd, length in zip(fds, lengths, strict=True)]
        return small, [digest_of(copy) for copy in small]
    copies: list[Any] = [private_memory(length) if length >= _WRITABLE_BYTES else bytearray(length) for length in lengths]
    digests = copy_ranges(_whole(fds, lengths), copies)
    return [copy if isinstance(copy, memoryview) else bytes(copy) for copy in copies], digests


def _read_at_once(fd: int, length: int) -> bytes | memoryview:
    """Copy a file in one system call. That costs half of what a pass over ranges costs, if the file has a few KB."""
    copy: bytes | memoryview
    if length < _WRITABLE_BYTES:
        copy = os.pread(fd, length, 0)
        count = len(copy)
    else:
        copy = private_memory(length)
        count = os.preadv(fd, [copy], 0)
    if count != length:
        raise ShortFileError(f"the file has only {count} of {length} bytes")
    return copy


_RECORD_BYTES = 8 + 32


def lengths_of(digests: bytes) -> list[int]:
    """Return the lengths in a record of `record_of`."""
    return [int.from_bytes(digests[at : at + 8], "little") for at in range(0, len(digests), _RECORD_BYTES)]


def record_of(lengths: Sequence[int], digests: Sequence[bytes]) -> bytes:
    """Return what is recorded of an artifact: for each file its length in 8 bytes, little-endian, and its digest of 32 bytes."""
    return b"".join(length.to_bytes(8, "little") + digest for length, digest in zip(lengths, digests, strict=True))


def digests_of_files(fds: Sequence[int], lengths: Sequence[int]) -> list[bytes]:
    """Return the digests of the first `lengths` bytes of the files, and keep no copy.

    Raises:
        ShortFileError: a file has been cut.
    """
    return digest_ranges(_whole(fds, lengths))


def _whole(fds: Sequence[int], lengths: Sequence[int]) -> list[FileRange]:
    return [FileRange(fd, 0, length) for fd, length in zip(fds, lengths, strict=True)]
