"""`FileMemory`: a file that a process has open, as a pool to send. The pool is not mapped here until somebody looks at its bytes."""

from __future__ import annotations

import os
import threading
from typing import Protocol

from aionn.hal.types import MemoryDescription, MemoryKind
from aionn.memory.region import Access, Region


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
