"""A driver's cache files: checked descriptors, whole writes, and private copies with their digests.

Nothing here is kept. `integrity` decides which bytes may be used. Everything is blocking and runs in threads.
"""

from __future__ import annotations

import fcntl
import os
import stat
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from blake3 import blake3

from aionn.caching.outcomes import MissReason, Refusal
from aionn.file_ranges import FileRange, copy_ranges, digest_ranges

__all__ = ["Purpose", "check_descriptors", "digest_of", "digests_of_files", "private_memory", "read_private", "reopen", "write_whole"]

_PARALLEL_BYTES = 2 << 20  # below this, starting BLAKE3's threads costs more than it gains
_WRITABLE_BYTES = 64 << 10  # smaller copies are `bytes`
_ALIGNMENT_BYTES = 64
_WRITE_BYTES = 4 << 20  # on kernels that do not preempt, a longer system call would keep a CPU from others, such as an event loop
Purpose = Literal["read", "write"]


def reopen(fd: int) -> int:
    """Return a new descriptor for the same file, with an offset and locks that it shares with no other. The caller closes it.

    A lock on a descriptor that came over a socket belongs to the open file description, and so to its sender as well.
    `dup` would share the lock, too.

    Raises:
        OSError: the descriptor is closed, or the file may not be opened again as it is open now.
    """
    access = fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE
    return os.open(f"/proc/self/fd/{fd}", access | os.O_CLOEXEC)


def digest_of(buffer: Any) -> bytes:
    """Return BLAKE3 of a bytes-like object, 32 bytes. Large buffers use several threads. Releases the GIL."""
    threads = blake3.AUTO if memoryview(buffer).nbytes >= _PARALLEL_BYTES else 1
    return blake3(buffer, max_threads=threads).digest()


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


def write_whole(fd: int, buffer: memoryview) -> None:
    """Replace the contents of a file by `buffer`."""
    # "the driver must truncate a file to zero size before writing" (HAL 1.2, prepareModel)
    os.ftruncate(fd, 0)
    at = 0
    while at < buffer.nbytes:
        at += os.pwrite(fd, buffer[at : at + _WRITE_BYTES], at)


def read_private(fds: Sequence[int], lengths: Sequence[int]) -> tuple[list[bytes | memoryview], list[bytes]]:
    """Copy the first `lengths` bytes of the files, all in one pass. Return the copies and the digests of those copies.

    Only the caller has references to the copies. Copies of 64 KiB or more are writable and begin at a multiple of 64 bytes, so an
    engine uses them in place.

    Raises:
        ShortFileError: a file has been cut.
        MemoryError: there is not enough memory for the copies.
    """
    copies: list[Any] = [private_memory(length) if length >= _WRITABLE_BYTES else bytearray(length) for length in lengths]
    digests = copy_ranges(_whole(fds, lengths), copies)
    return [copy if isinstance(copy, memoryview) else bytes(copy) for copy in copies], digests


def digests_of_files(fds: Sequence[int], lengths: Sequence[int]) -> list[bytes]:
    """Return the digests of the first `lengths` bytes of the files, and keep no copy.

    Raises:
        ShortFileError: a file has been cut.
    """
    return digest_ranges(_whole(fds, lengths))


def private_memory(length: int) -> memoryview:
    """Return uninitialised memory that begins at a multiple of 64 bytes. Large memory has huge pages where the system gives them."""
    # NumPy asks for huge pages from 4 MiB on. They make fresh memory several times cheaper.
    memory = np.empty(length + _ALIGNMENT_BYTES, np.uint8)
    begin = -memory.ctypes.data % _ALIGNMENT_BYTES
    return memory.data[begin : begin + length]


def _whole(fds: Sequence[int], lengths: Sequence[int]) -> list[FileRange]:
    return [FileRange(fd, 0, length) for fd, length in zip(fds, lengths, strict=True)]
