"""One sealed memfd, or a checked foreign descriptor, mapped. Beside `aionn.pages`, only this file maps memory.

A region is reserved when it is made. First `limits` asks what cgroups and resource limits leave, then `posix_fallocate`
takes the pages. So too little memory is an error at allocation and never a SIGBUS or a killed process later. Its size is
sealed before another process sees it. A descriptor from a peer is checked before it is mapped (`descriptors`), because a
peer that can shrink a mapped file could kill this process with SIGBUS.

Errors come in two phases. A fault of a description or a descriptor is found before anything is mapped and is a
`CallerError` (HAL: INVALID_ARGUMENT). A refusal by mmap is a `MappingError` (GENERAL_FAILURE).

Invariants
    The mapping lives as long as any view of it. `close` drops this object's reference and descriptor. The kernel
    unmaps when the last `memoryview` or array over it is gone, so nothing is ever unmapped under a reader.
    A region owns its descriptor from construction on, also when construction fails. The mapping has no descriptor, so a
    region that is never sent again needs none (`forget_descriptor`).

Used by memory (for apps), fmq (for queues), runtime (for frames and constants) and driver (for what the app sent).

A `FileMemory` is a file that a process has open, as a pool to send. The pool is mapped here when its bytes are first looked at.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import threading
from collections.abc import Callable
from enum import Enum
from typing import Protocol

from aionn._mapping import Mapping
from aionn._mapping import give_back as give_back
from aionn.errors import CallerError, ExecutionError
from aionn.hal.types import ErrorStatus, MemoryDescription, MemoryKind
from aionn.memory import limits
from aionn.memory.descriptors import (
    F_ADD_SEALS,
    F_SEAL_FUTURE_WRITE,
    F_SEAL_SEAL,
    F_SEAL_WRITE,
    SIZE_SEALS,
    check_description,
    check_descriptor,
    is_dma_buf,
    reserve_holes,
    sync_dma_buf,
)

PAGE_BYTES = mmap.PAGESIZE
PROT_READ = mmap.PROT_READ
PROT_WRITE = mmap.PROT_WRITE

# Between two steps of a large reservation the limits are asked again, because another process may be taking memory too.
# If a cgroup runs full within posix_fallocate, the kernel raises no error but kills a process.
_STEP_BYTES = 64 * 2**20


class Access(Enum):
    """How an attached region is mapped."""

    READ = "read"
    WRITE = "write"
    PRIVATE = "private"  # copy on write: for engines that refuse read-only buffers, without letting them write through


class MappingError(ExecutionError):
    """Memory with a right description could not be mapped here. `.status` is GENERAL_FAILURE."""

    def __init__(self, message: str) -> None:
        super().__init__(message, status=ErrorStatus.GENERAL_FAILURE)


class Region:
    """Shared memory, mapped into this process. Satisfies `hal.IMemory`."""

    def __init__(self, fd: int, mapping: Mapping, description: MemoryDescription, access: Access = Access.WRITE) -> None:
        self._lock = threading.RLock()  # a region may be closed by the garbage collector, in any thread and at any moment
        self._when_closed: list[Callable[[], None]] = []
        self._fd = fd
        self._mapping: Mapping | None = mapping
        self._inode: tuple[int, int] | None = None
        self._exported = description.kind is MemoryKind.MMAP_FD and is_dma_buf(fd)
        self.access = access
        self.description = description
        self.size_bytes = description.size_bytes

    @classmethod
    def allocate(cls, size_bytes: int, *, freezable: bool = False, kind: MemoryKind = MemoryKind.ASHMEM) -> Region:
        """Reserve zeroed shared memory of a fixed size.

        Args:
            size_bytes: at least 1.
            freezable: leave room for `freeze`; otherwise all seals are final.
            kind: what it is called when it is sent. `mmap_fd` is refused, because it always means an existing file.

        Raises:
            CallerError: size or kind is wrong.
            MemoryAllocationError: the memory cannot be had now.
        """
        if size_bytes < 1:
            raise CallerError(f"a shared memory region of {size_bytes} bytes was asked for; ask for at least 1")
        if kind is MemoryKind.MMAP_FD:
            raise CallerError("memory of kind mmap_fd is a file that exists; attach it, or allocate another kind")
        limits.require(size_bytes)
        try:
            fd = os.memfd_create("aionn", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        except OSError as error:
            raise limits.allocation_error(size_bytes, error) from error
        try:
            # Without the reservation, a lack of memory would raise SIGBUS at the first touch.
            for offset in range(0, size_bytes, _STEP_BYTES):
                if offset:
                    limits.require(size_bytes - offset)
                os.posix_fallocate(fd, offset, min(_STEP_BYTES, size_bytes - offset))
            fcntl.fcntl(fd, F_ADD_SEALS, SIZE_SEALS | (0 if freezable else F_SEAL_SEAL))
            mapping = Mapping(fd, size_bytes, True)
        except (OSError, OverflowError) as error:
            os.close(fd)
            raise limits.allocation_error(size_bytes, error if isinstance(error, OSError) else OSError(errno.EFBIG, str(error))) from error
        except BaseException:
            os.close(fd)
            raise
        return cls(fd, mapping, MemoryDescription(kind, size_bytes))

    @classmethod
    def attach(cls, fd: int, description: MemoryDescription, access: Access = Access.WRITE) -> Region:
        """Map memory that a peer sent. Take over `fd`, also on failure.

        Raises:
            CallerError: the descriptor does not match its description. The message says how. Nothing was mapped.
            MappingError: the descriptor matches, but cannot be mapped into this process.
            MemoryAllocationError: the file has holes, and the memory to fill them cannot be had now.
        """
        try:
            check_description(description)
            if access is Access.WRITE and not description.writable:
                raise CallerError(
                    f"memory of kind {description.kind.value} was sent read-only, but memory to write is wanted; send it writable"
                )
            check_descriptor(fd, description, write_through=access is Access.WRITE)
            os.set_inheritable(fd, False)
            reserve_holes(fd, description, write_through=access is Access.WRITE)
            private = access is not Access.WRITE  # Linux before 6.7 maps what is sealed against writing in no other way
            try:
                mapping = Mapping(fd, description.size_bytes, access is not Access.READ, private, description.offset_bytes)
            except (OSError, OverflowError) as error:
                raise MappingError(
                    f"memory of kind {description.kind.value}, {description.size_bytes} bytes at offset {description.offset_bytes}: "
                    f"it cannot be mapped into this process: {getattr(error, 'strerror', None) or error}"
                ) from error
        except BaseException:
            _close_quietly(fd)
            raise
        return cls(fd, mapping, description, access)

    def freeze(self) -> None:
        """Forbid every process to write, for constants that have been filled. A view that is held goes on writing to the memory."""
        fd = self.fileno()
        mapping, readable = self._mapping, Mapping(fd, self.size_bytes, False, True)  # older kernels map it shared for no reader
        seal = F_SEAL_WRITE
        try:
            assert mapping is not None
            mapping.close()
            self._mapping = readable
        except BufferError:
            seal = F_SEAL_FUTURE_WRITE
        fcntl.fcntl(fd, F_ADD_SEALS, seal | F_SEAL_SEAL)
        self.description = MemoryDescription(self.description.kind, self.size_bytes, writable=False)

    def fileno(self) -> int:
        if self._fd < 0:
            raise CallerError(
                "this memory has been closed" if self.closed else "this memory has no descriptor any more, so it cannot be sent"
            )
        return self._fd

    def inode(self) -> tuple[int, int]:
        """Return device and inode number, which name the memory in every process."""
        if self._inode is None:
            status = os.fstat(self.fileno())
            self._inode = status.st_dev, status.st_ino
        return self._inode

    def forget_descriptor(self) -> None:
        """Close the descriptor of sealed memory that this process never sends again. The bytes stay mapped. Idempotent.

        A file keeps its descriptor, because `check_backing` and `flush` need it.
        """
        if self._fd < 0 or self.description.kind is MemoryKind.MMAP_FD:
            return
        self.inode()
        with self._lock:
            fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def view(self) -> memoryview:
        mapping = self._mapping
        if mapping is None:
            raise CallerError("this memory has been closed")
        return memoryview(mapping)[: self.size_bytes]

    def check_backing(self) -> None:
        """Check that an ordinary file is still as long as it was. Call it before each use.

        It costs one fstat for a file, and nothing for sealed memory.

        Raises:
            MappingError: the file has been cut off. Touching it would end this process.
        """
        if self.description.kind is not MemoryKind.MMAP_FD or self._exported:
            return
        begin, end = self.description.offset_bytes, self.description.offset_bytes + self.size_bytes
        have = os.fstat(self.fileno()).st_size
        if have < end:
            raise MappingError(
                f"memory of kind mmap_fd: bytes {begin} to {end} of a file that was cut off to {have} bytes; keep its size while in use"
            )

    def begin_use(self) -> None:
        """Begin a use of the bytes, after `check_backing`. `end_use` must follow. For a dma-buf this waits until its device is done.

        Raises:
            MappingError: as `check_backing`; or the dma-buf's exporter refuses the use.
        """
        self.check_backing()
        self._sync(end=False)

    def end_use(self) -> None:
        """End a use of the bytes, so that a dma-buf's device sees what was written.

        Raises:
            MappingError: the dma-buf's exporter refuses.
        """
        self._sync(end=True)

    def _sync(self, *, end: bool) -> None:
        if not self._exported:
            return
        try:
            sync_dma_buf(self.fileno(), writable=self.access is Access.WRITE, end=end)
        except OSError as error:
            raise MappingError(f"memory of kind mmap_fd: the exporter of the dma-buf refused its use: {error.strerror}") from error

    def flush(self) -> bool:
        """Write a mapped file's bytes back to it. Call it after a success, for memory that was written to.

        Only memory of kind `mmap_fd` has anything to flush. The call blocks while the disk works, without the GIL, so it
        belongs in a thread.

        Returns:
            Whether there was a file to write to.

        Raises:
            MappingError: the file could not be written.
        """
        if self.description.kind is not MemoryKind.MMAP_FD or self.access is not Access.WRITE or self._exported:
            return False
        try:
            # Linux's msync(MS_SYNC) is fdatasync over a range, and Python's mmap.flush would keep the GIL while the disk works.
            os.fdatasync(self.fileno())
        except OSError as error:
            raise MappingError(f"memory of kind mmap_fd: its file could not be written: {error.strerror}") from error
        return True

    def when_closed(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Call `callback` once when this region is closed, in the closing thread, or now if it is closed already.

        So a burst learns that a memory in its cache has ended. The callback must not raise.

        Returns:
            A function that cancels the callback.
        """
        with self._lock:
            if self._mapping is not None:
                self._when_closed.append(callback)
                return lambda: self._remove_callback(callback)
        callback()
        return lambda: None

    def _remove_callback(self, callback: Callable[[], None]) -> None:
        with self._lock:
            if callback in self._when_closed:
                self._when_closed.remove(callback)

    @property
    def closed(self) -> bool:
        return self._mapping is None

    def close(self) -> None:
        """Release descriptor and mapping. The bytes stay mapped until the last view of them is gone."""
        with self._lock:
            self._mapping = None
            fd, self._fd = self._fd, -1
            callbacks, self._when_closed = self._when_closed, []
        if fd >= 0:
            os.close(fd)
        for callback in callbacks:
            callback()

    def __del__(self) -> None:
        # Only the model owns its constants, so their descriptor ends with the last reference.
        if getattr(self, "_mapping", None) is not None:
            self.close()


def reserve(size_bytes: int) -> memoryview:
    """Reserve zeroed memory for buffers that stay in this process. It is freed with the last view of it.

    Raises:
        MemoryAllocationError: the memory cannot be had now.
    """
    return Region.allocate(size_bytes).view()


def _close_quietly(fd: int) -> None:
    try:
        os.close(fd)
    except (OSError, OverflowError) as error:
        if getattr(error, "errno", errno.EBADF) != errno.EBADF:
            raise


class _Open(Protocol):
    @property
    def size(self) -> int: ...

    def fileno(self) -> int: ...


class FileMemory:
    """A whole file, for reading (pool kind `mmap_fd`). Satisfies `hal.IMemory`. It keeps `file` open."""

    def __init__(self, file: _Open) -> None:
        self._file = file
        self._region: Region | None = None
        self._lock = threading.Lock()
        self.size_bytes = file.size
        self.description = MemoryDescription(MemoryKind.MMAP_FD, file.size, writable=False)

    def fileno(self) -> int:
        return self._file.fileno()

    def view(self) -> memoryview:
        """Return all bytes in place, read-only. The first call maps the file.

        Raises:
            CallerError, MappingError: the file cannot be mapped.
        """
        with self._lock:
            if self._region is None:
                self._region = Region.attach(os.dup(self.fileno()), self.description, Access.READ)
        self._region.check_backing()
        return self._region.view()
