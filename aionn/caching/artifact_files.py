"""A driver's cache files: checked descriptors, whole writes, and private copies with their digests.

Nothing here is kept. `integrity` decides which bytes may be used. Everything is blocking and runs in threads.
"""

from __future__ import annotations

import fcntl
import io
import os
import stat
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from blake3 import blake3

from aionn.caching.outcomes import MissReason, Refusal

__all__ = ["Purpose", "check_descriptors", "digest_of", "read_private", "reopen", "write_whole"]

_PARALLEL_BYTES = 2 << 20  # below this, starting BLAKE3's threads costs more than it gains
_PIPELINED_BYTES = 16 << 20  # below this, BLAKE3's threads over the whole are quicker than hashing while the rest is read
_WRITABLE_BYTES = 64 << 10  # smaller ones are `bytes`: one system call and no array
_CHUNK_BYTES = 4 << 20
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


def read_private(fd: int, length: int) -> tuple[bytes | memoryview, bytes]:
    """Copy `length` bytes from the beginning of the file, or fewer if it has been cut. Return the copy and its digest.

    Only this process has the copy. All but small copies are writable, so an engine that needs writable memory uses them in place.
    """
    if length < _WRITABLE_BYTES:
        content = os.pread(fd, length, 0)
        return content, digest_of(content)
    if length < _PIPELINED_BYTES:
        # A bytearray would be zeroed first. NumPy asks for huge pages for an array: clearing one in the kernel takes longer than
        # reading and hashing so few bytes. `BytesIO` does not copy the bytes, because it has the only reference to them.
        view = io.BytesIO(os.pread(fd, length, 0)).getbuffer()
        return view, digest_of(view)
    buffer = np.empty(length, np.uint8).data
    at = 0
    from concurrent.futures import ThreadPoolExecutor

    # One thread copies while another hashes what was copied. The copy costs twice what the hash does, so the whole costs little more
    # than reading.
    hasher = blake3()
    with ThreadPoolExecutor(1, "aionn verify") as hashing:
        while at < length and (count := os.preadv(fd, [buffer[at : at + _CHUNK_BYTES]], at)):
            hashing.submit(hasher.update, buffer[at : at + count])
            at += count
    return buffer[:at], hasher.digest()
