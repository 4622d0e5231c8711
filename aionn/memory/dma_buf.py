"""dma-bufs: memory that a camera, a GPU or `udmabuf` has exported. A CPU's use of it stands between two calls of `sync`.

A dma-buf is mapped like a file (pool kind `mmap_fd`). Its size never changes, so it needs no seals and has no holes. The kernel keeps
the caches of CPU and device in step only for accesses between the two ends of a use (DMA_BUF_IOCTL_SYNC).
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct

_SYNC = 0x40086200  # _IOW('b', 0, struct dma_buf_sync), linux/dma-buf.h
_READ, _WRITE, _END = 1, 2, 4


def is_dma_buf(fd: int) -> bool:
    """Return whether a descriptor is a dma-buf's. The kernel names these files so in every process's list of descriptors."""
    try:
        return os.readlink(f"/proc/self/fd/{fd}").startswith("/dmabuf:")
    except OSError:
        return False


def size_of(fd: int) -> int:
    """Return the size of a dma-buf in bytes. Its file has no size that `fstat` could always tell."""
    return os.lseek(fd, 0, os.SEEK_END)


def sync(fd: int, *, writable: bool, end: bool) -> None:
    """Begin or end a use of a dma-buf by the CPU. It waits for the device where that still works on the bytes.

    Raises:
        OSError: the exporter refuses.
    """
    flags = struct.pack("=Q", (_READ | _WRITE if writable else _READ) | (_END if end else 0))
    while True:
        try:
            fcntl.ioctl(fd, _SYNC, flags)
            return
        except OSError as error:
            if error.errno not in (errno.EINTR, errno.EAGAIN):
                raise
