"""Checks whether a descriptor from another process may be mapped: its kind, its access, its size, its seals, its holes.

Two checks run in this order, before anything is mapped. `check_description` refuses numbers that can never be right.
`check_descriptor` asks the kernel about the file. Each refusal is a `CallerError` (HAL: INVALID_ARGUMENT) of one sentence.
A failure of mmap after that is a `MappingError` (GENERAL_FAILURE); see `region`.

What is refused, and what it would have done:

    a pipe, socket or directory     no mapping, or one without a size
    O_PATH or write-only            no mapping
    a file shorter than claimed     SIGBUS at the first touch
    a memfd without F_SEAL_SHRINK   its sender may cut it off later, which means SIGBUS then
    aionn's memory in huge pages    its sender may free them later, and no huge page may be left, which means SIGBUS then
    holes that cannot be filled     SIGBUS, or the out-of-memory killer, at the first touch

The seals are read before the size. Else the sender could cut the memory off and seal it between the two.

An ordinary file has no seals. A process that truncates a mapped file can end the process that reads it. So
`Region.check_backing` asks for the file's size again before each use. A file that is cut off during an execution remains a risk.

A dma-buf is memory that a camera, a GPU or `udmabuf` has exported. A CPU's use of it stands between two calls of `sync_dma_buf`.

A dma-buf is mapped like a file (pool kind `mmap_fd`). Its size never changes, so it needs no seals and has no holes. It cannot have
seals, so only what has none is asked for its name, because that question is the slowest. The kernel keeps the caches of CPU and device in
step only for accesses between the two ends of a use (DMA_BUF_IOCTL_SYNC).
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import struct

from aionn.errors import CallerError
from aionn.hal.types import MemoryDescription, MemoryKind
from aionn.memory import limits

# The fcntl module of Python 3.11 may lack some of these, depending on the headers it was built with. The numbers are the kernel's.
F_ADD_SEALS = 1033
F_GET_SEALS = 1034
F_SEAL_SEAL = 0x1
F_SEAL_SHRINK = 0x2
SIZE_SEALS = 0x2 | 0x4
F_SEAL_WRITE = 0x8
F_SEAL_FUTURE_WRITE = 0x10  # Linux 5.1

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def check_description(description: MemoryDescription) -> None:
    """Refuse numbers that can never be right.

    Raises:
        CallerError: the size is below 1, the offset is not the start of a page, or the end is beyond what a file can have.
            Only memory of kind `mmap_fd` may have an offset.
    """
    kind, size_bytes, offset = description.kind, description.size_bytes, description.offset_bytes
    if size_bytes < 1 or offset < 0 or offset % PAGE_BYTES or offset + size_bytes >= 2**63:
        raise CallerError(
            f"memory of kind {kind.value}: {size_bytes} bytes at offset {offset}; the size must be at least 1, the offset a multiple "
            f"of {PAGE_BYTES} and the end below 2^63"
        )
    if offset and kind is not MemoryKind.MMAP_FD:
        raise CallerError(f"memory of kind {kind.value}: offset {offset}; only mmap_fd may have one")


def check_descriptor(fd: int, description: MemoryDescription, *, write_through: bool) -> None:
    """Refuse a descriptor that is not what its description says, or that could end this process once it is mapped.

    Args:
        write_through: whether it is to be mapped shared and writable.

    Raises:
        CallerError: the message says what is wrong.
    """
    kind = description.kind
    try:
        seals = _seals(fd)
        status, flags = os.fstat(fd), fcntl.fcntl(fd, fcntl.F_GETFL)
    except (OSError, OverflowError, ValueError) as error:
        raise CallerError(f"memory of kind {kind.value}: descriptor {fd} is not open; send an open one") from error
    exported = seals is None and is_dma_buf(fd)
    if not exported and not stat.S_ISREG(status.st_mode):
        raise CallerError(
            f"memory of kind {kind.value}: the descriptor is {_file_type(status.st_mode)}; expected a regular file, a memfd or a dma-buf"
        )
    access = flags & os.O_ACCMODE
    if flags & os.O_PATH or access == os.O_WRONLY:
        how = "with O_PATH" if flags & os.O_PATH else "for writing only"
        raise CallerError(f"memory of kind {kind.value}: the descriptor was opened {how}; open it for reading, or for reading and writing")
    if write_through and access != os.O_RDWR:
        raise CallerError(
            f"memory of kind {kind.value}: the descriptor was opened for reading only, but memory to write is wanted; open it O_RDWR"
        )
    begin, end = description.offset_bytes, description.offset_bytes + description.size_bytes
    have = dma_buf_size(fd) if exported else status.st_size
    if have < end:
        raise CallerError(
            f"memory of kind {kind.value}: bytes {begin} to {end} of a file of {have} bytes; the file is shorter than claimed"
        )
    if exported and kind is MemoryKind.MMAP_FD:
        return  # its size is fixed
    if kind is MemoryKind.MMAP_FD and not _is_memfd(fd):
        return
    if seals is None or not seals & F_SEAL_SHRINK:
        raise CallerError(
            f"memory of kind {kind.value}: its size is not sealed, so its sender could cut it off while it is in use; "
            "make the memfd with MFD_ALLOW_SEALING and add F_SEAL_SHRINK"
        )
    if kind is MemoryKind.ASHMEM:
        _check_memfd(fd)


def _check_memfd(fd: int) -> None:
    """Refuse what is not a memfd of usual pages. Only a memfd is asked for its pages, because a file of FUSE may never answer.

    The owner of a memfd of huge pages can free its pages again. Where none is left then, the next look at one is SIGBUS.
    """
    if _seals(fd) is None:
        raise CallerError(
            f"memory of kind {MemoryKind.ASHMEM.value}: the descriptor is not a memfd; send a memfd, or memory of kind "
            f"{MemoryKind.MMAP_FD.value}"
        )
    page_bytes = os.fstatvfs(fd).f_bsize
    if page_bytes != PAGE_BYTES:
        raise CallerError(
            f"memory of kind {MemoryKind.ASHMEM.value}: its pages have {page_bytes} bytes; make the memfd without MFD_HUGETLB, for "
            f"pages of {PAGE_BYTES} bytes"
        )


def check_sealed(fd: int, description: MemoryDescription) -> None:
    """Refuse memory that its sender could take away, for a process that serves several senders. A dma-buf cannot be taken away.

    Raises:
        CallerError: it is a file, or memory whose size is not sealed, or it lies in huge pages.
    """
    seals = _seals(fd)
    if seals is None and is_dma_buf(fd):
        return
    if not (seals or 0) & F_SEAL_SHRINK:
        raise CallerError(
            f"memory of kind {description.kind.value}: its size is not sealed, so its sender could end a driver that several apps share; "
            "copy the data into aionn.Memory.allocate(...)"
        )
    _check_memfd(fd)


def check_reserved(fd: int, description: MemoryDescription) -> None:
    """Refuse memory with holes, which its receiver would have to pay for. The sender of an answer has reserved what it has written.

    Raises:
        CallerError: pages of it were never reserved.
    """
    _check_memfd(fd)
    hole_bytes = min(_missing_bytes(fd), description.size_bytes)
    if hole_bytes:
        raise CallerError(f"memory of kind {description.kind.value}: {hole_bytes} bytes were never reserved; call posix_fallocate first")


def reserve_holes(fd: int, description: MemoryDescription, *, write_through: bool) -> None:
    """Reserve every page of the range, so that touching it later cannot fail.

    A hole of a file on a disk reads as zeros and costs nothing until it is written to. A hole in shared memory is
    filled even by a read, and the reader pays for the page.

    Raises:
        MemoryAllocationError: the memory, or the disk's space, cannot be had now.
        CallerError: shared memory has holes that a descriptor opened for reading cannot fill.
    """
    in_memory = _seals(fd) is not None
    if not in_memory and (not write_through or is_dma_buf(fd)):
        return  # a dma-buf has all its pages
    hole_bytes = min(_missing_bytes(fd), description.size_bytes)
    if hole_bytes == 0:
        return
    if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE != os.O_RDWR:
        raise CallerError(
            f"memory of kind {description.kind.value}: {hole_bytes} bytes of the file were never reserved, and a "
            "descriptor opened for reading cannot reserve them; call posix_fallocate first, or send it O_RDWR"
        )
    if in_memory:
        limits.require(hole_bytes)
    try:
        os.posix_fallocate(fd, description.offset_bytes, description.size_bytes)
    except OSError as error:
        raise limits.allocation_error(hole_bytes, error) from error


def _missing_bytes(fd: int) -> int:
    """Return how many bytes of the file have no page or block yet. The holes of the range cannot be more.

    SEEK_HOLE would find the holes, but it moves a position that the sender of the descriptor shares. It also takes
    reserved pages of shared memory for holes.
    """
    status = os.fstat(fd)
    return max(0, -(-status.st_size // PAGE_BYTES) * PAGE_BYTES - status.st_blocks * 512)


def _seals(fd: int) -> int | None:
    """Return the seals of a memfd or tmpfs file, or None for another kind of file, which cannot have any."""
    try:
        return fcntl.fcntl(fd, F_GET_SEALS)
    except OSError:
        return None


def _is_memfd(fd: int) -> bool:
    """Return whether the file never had a name. Its size can be sealed then, and must be."""
    try:
        return os.readlink(f"/proc/self/fd/{fd}").startswith("/memfd:")
    except OSError:
        return True


def _file_type(mode: int) -> str:
    kinds = {
        stat.S_IFIFO: "a pipe",
        stat.S_IFSOCK: "a socket",
        stat.S_IFDIR: "a directory",
        stat.S_IFCHR: "a character device",
        stat.S_IFBLK: "a block device",
        stat.S_IFLNK: "a symbolic link",
    }
    return kinds.get(stat.S_IFMT(mode), "neither a file nor a memfd")


_SYNC = 0x40086200  # _IOW('b', 0, struct dma_buf_sync), linux/dma-buf.h
_READ, _WRITE, _END = 1, 2, 4


def is_dma_buf(fd: int) -> bool:
    """Return whether a descriptor is a dma-buf's. The kernel names these files so in every process's list of descriptors."""
    try:
        return os.readlink(f"/proc/self/fd/{fd}").startswith("/dmabuf:")
    except OSError:
        return False


def dma_buf_size(fd: int) -> int:
    """Return the size of a dma-buf in bytes. Its file has no size that `fstat` could always tell."""
    return os.lseek(fd, 0, os.SEEK_END)


def sync_dma_buf(fd: int, *, writable: bool, end: bool) -> None:
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
