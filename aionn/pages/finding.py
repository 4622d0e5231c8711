"""Pages and trace rings of other processes, found by the links in /proc/PID/fd and read through them.

The kernel decides who may look: the same user, or root. Nothing of the other process runs, and nothing is sent to it.

A page is shown only where it was made. A descriptor of a page is also in the app of a driver, and in every child of fork, so the page's
pid and start time are compared with those of the process in which it was found.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from contextlib import suppress
from typing import NamedTuple

from aionn.pages import app_layout, layout
from aionn.pages._page import snapshot, take_records
from aionn.pages.app_layout import PageView, TraceRecord, names_in, records_in, view
from aionn.pages.layout import Activity, LayoutError
from aionn.pages.page import map_path, start_time_of, time_namespace_of
from aionn.pages.process_use import of_each_process, own_pid_of, status_of

_PAGE, _ASKED, _RING = "/memfd:aionn-stats", "/memfd:aionn-asked", "/memfd:aionn-trace"
_HEADER_BYTES = layout.RELEASE_WORD * 8 + layout.RELEASE_BYTES


class FoundPage:
    """A page of another process, or of this one. Use it in `with`, or `close` it.

    Attributes:
        role: "app" or "driver".
        pid, start_time: which process it is; see `start_time_of`. `pid` is the number by which this process knows it.
        path: of the descriptor in /proc.
    """

    def __init__(self, pid: int, path: str) -> None:
        """Map the page for reading.

        Raises:
            LayoutError: it is not a page of this layout, or not one that this process made.
            OSError: the process has ended, or belongs to another user.
        """
        self.pid, self.path = pid, path
        self._mapping = map_path(path, layout.PAGE_BYTES)
        words = memoryview(self._mapping).cast("Q")
        if words[layout.HEADER_MAGIC] != layout.MAGIC or words[layout.HEADER_ROLE] not in layout.ROLES:
            raise LayoutError(f"{path} is not a statistics page of aionn")
        self.role = layout.ROLES[words[layout.HEADER_ROLE]]
        slots = (app_layout.SLOTS, app_layout.SLOT_BYTES) if self.role == "app" else (layout.SLOTS, layout.SLOT_BYTES)
        layout.check_header(words, words[layout.HEADER_ROLE], *slots)
        self._slot_bytes = slots[1]
        self.start_time = words[layout.HEADER_START]
        if not _is_of(pid, words[layout.HEADER_PID], self.start_time, words[layout.TIME_NAMESPACE]):
            raise LayoutError(f"{path} is the statistics page of another process, which this process has inherited or received")
        self._words = words

    def __enter__(self) -> FoundPage:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def read(self) -> PageView | None:
        """Return an app's page, or None if its slots kept changing hands, as after the death of its writer within a change."""
        copy = snapshot(self._mapping, self._slot_bytes)
        return None if copy is None else view(copy)

    def names(self) -> dict[int, dict[str, str]]:
        """Return what each burst of an app belongs to, by the number of its slot; see `app_layout.names_in`."""
        copy = snapshot(self._mapping, self._slot_bytes)
        return {} if copy is None else names_in(copy)

    def activity(self) -> Activity:
        """Return what a driver does now."""
        return layout.activity(self._words)

    @property
    def time_namespace(self) -> int:
        """The inode number of the process's time namespace. Clocks can be compared where it is the same."""
        return self._words[layout.TIME_NAMESPACE]

    def close(self) -> None:
        """Unmap the page. Idempotent."""
        self._words.release()
        self._mapping.close()


class TraceReader:
    """The trace records of one process: of all rings that its threads have made so far. Use it in `with`, or `close` it.

    Attributes:
        lost: how many records were overwritten before they could be read.
    """

    def __init__(self, page: FoundPage) -> None:
        self._page = page
        self._rings: dict[tuple[int, int], _Ring] = {}
        self.lost = 0

    def __enter__(self) -> TraceReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def read(self) -> list[TraceRecord]:
        """Return the records since the last call, those of each ring in their order.

        Raises:
            OSError: the process has ended. The records that were read before are all there are, apart from those in `drain`.
        """
        self._look()
        return self.drain()

    @property
    def rings(self) -> int:
        """How many rings are known."""
        return len(self._rings)

    def take(self, look: bool) -> list[tuple[int, bytes]]:
        """Return the new records of each ring, not decoded, with the number of the ring. `look`: look for new rings, too.

        A process that has ended has no new rings.
        """
        if look:
            with suppress(OSError):
                self._look()
        taken = [(ring.number, content) for ring in self._rings.values() for content in ring.take()]
        self.lost = sum(ring.lost for ring in self._rings.values())
        return taken

    def _look(self) -> None:
        for path in _links(self._page.pid, _RING):
            with suppress(LayoutError, FileNotFoundError):  # closed meanwhile, inherited, or not quite made
                status = os.stat(path)
                if (status.st_dev, status.st_ino) not in self._rings:
                    self._rings[status.st_dev, status.st_ino] = _Ring(self._page, path, len(self._rings))

    def drain(self) -> list[TraceRecord]:
        """Return the new records of the rings that are known. It works after the process's end, too."""
        return [record for _, content in self.take(False) for record in records_in(content)]

    def close(self) -> None:
        """Unmap the rings. Idempotent."""
        for ring in self._rings.values():
            ring.close()
        self._rings.clear()


class _Ring:
    """One ring, mapped for reading.

    A reader that comes later than the ring reads what is still there and does not count what was overwritten before it came.
    """

    def __init__(self, page: FoundPage, path: str, number: int) -> None:
        self.number = number
        self.lost = 0
        self._cursor = 0
        self._mapping = map_path(path, app_layout.TRACE_BYTES)
        with memoryview(self._mapping).cast("Q") as words:
            pid, start, records = (
                words[at] for at in (app_layout.TRACE_WORD_PID, app_layout.TRACE_WORD_START, app_layout.TRACE_WORD_RECORDS)
            )
            magic = words[0]
        if magic != app_layout.TRACE_MAGIC or records != app_layout.TRACE_RECORDS:
            raise LayoutError(f"{path} is not a trace ring of this release of aionn")
        if start != page.start_time or not _is_of(page.pid, pid, start, page.time_namespace):
            raise LayoutError(f"{path} is the trace ring of another process")

    def take(self) -> Iterator[bytes]:
        while True:
            content, self._cursor, lost = take_records(self._mapping, self._cursor)
            self.lost += lost
            if not content:
                return
            yield content

    def close(self) -> None:
        self._mapping.close()


def find_drivers(app: FoundPage, known: set[tuple[int, int]]) -> list[FoundPage]:
    """Return the pages of an app's drivers, each to be closed. An app has a descriptor of each driver's page.

    `known` has the pages that are left out, by device and inode number. What is found is added.

    Raises:
        OSError: the app has ended, or belongs to another user.
    """
    found = []
    for path in _links(app.pid, _PAGE):
        with suppress(OSError, LayoutError):  # a driver that ends, or is another user's
            status = os.stat(path)
            if (status.st_dev, status.st_ino) in known:
                continue
            pid = _maker_of(path)
            page = None if pid is None else find_page(pid)
            if page is not None and page.role == "driver":
                found.append(page)
            if pid is None or page is not None:
                known.add((status.st_dev, status.st_ino))
    return found


def _maker_of(path: str) -> int | None:
    """Return the process that a driver's page names as its maker. None if it is another kind of page."""
    mapping = map_path(path, layout.PAGE_BYTES)
    try:
        with memoryview(mapping).cast("Q") as words:
            driver = words[layout.HEADER_MAGIC] == layout.MAGIC and words[layout.HEADER_ROLE] == layout.ROLE_DRIVER
            return words[layout.HEADER_PID] if driver else None
    finally:
        mapping.close()


def find_page(pid: int, role: str = "") -> FoundPage | None:
    """Return the page of a process, to be closed, or None if it has none. An app with a driver in its own process has one of each role.

    Raises:
        PermissionError: the process belongs to another user.
        FileNotFoundError: there is no such process.
    """
    for path in _links(pid, _PAGE):
        with suppress(LayoutError, FileNotFoundError):
            page = FoundPage(pid, path)
            if role in ("", page.role):
                return page
            page.close()
    return None


class PageHeader(NamedTuple):
    """What a page of any release says of its process.

    Attributes:
        pid: the number by which this process knows it. role: "app" or "driver".
        release: of aionn, or an empty text. layout: the version of the page's layout.
        time_namespace: the inode number of the process's time namespace.
    """

    pid: int
    role: str
    release: str
    layout: int
    time_namespace: int


def find_headers() -> list[PageHeader]:
    """Return the headers of all pages that this user may read, also of those that have another layout than this release's."""
    found, _ = of_each_process(lambda pid: [_header_of(pid, path) for path in _links(pid, _PAGE)])
    return [header for headers in found for header in headers if header is not None]


def _header_of(pid: int, path: str) -> PageHeader | None:
    """Return the header of a page, or None if the file is not a page, or not one that this process made."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        content = os.pread(fd, _HEADER_BYTES, 0)
    finally:
        os.close(fd)
    if len(content) < _HEADER_BYTES:
        return None
    words = struct.unpack(f"={len(content) // 8}Q", content)
    if words[layout.HEADER_MAGIC] != layout.MAGIC or words[layout.HEADER_ROLE] not in layout.ROLES:
        return None
    if not _is_of(pid, words[layout.HEADER_PID], words[layout.HEADER_START], words[layout.TIME_NAMESPACE]):
        return None
    release = content[layout.RELEASE_WORD * 8 :][: layout.RELEASE_BYTES].rstrip(b"\0").decode("utf-8", "replace")
    return PageHeader(pid, layout.ROLES[words[layout.HEADER_ROLE]], release, words[layout.HEADER_VERSION], words[layout.TIME_NAMESPACE])


class Asking:
    """Asks a process to write trace records, for a limited time. `close` must follow.

    Of two tracers the one that asks for longer counts, so one that ends does not end the other.
    """

    def __init__(self, page: FoundPage) -> None:
        """Ask for nothing yet.

        Raises:
            LayoutError, OSError: as `FoundPage`.
        """
        if page.role == "app":
            self._mapping = map_path(page.path, layout.PAGE_BYTES, write=True)
        else:
            asked = _links(page.pid, _ASKED) or [page.path]
            self._mapping = map_path(asked[0], layout.ASKED_BYTES, write=True)
        self._words = memoryview(self._mapping).cast("Q")
        self._asked_ns = self._before_ns = 0

    def until(self, until_ns: int) -> None:
        """Ask until that moment of CLOCK_MONOTONIC. A tracer that is killed asks no longer than that."""
        found_ns = self._words[layout.TRACE_UNTIL]
        if found_ns <= until_ns:
            if found_ns != self._asked_ns:
                self._before_ns = found_ns
            self._words[layout.TRACE_UNTIL] = self._asked_ns = until_ns

    def close(self) -> None:
        """Ask no longer. What another tracer has asked for stays, before and since. Idempotent."""
        if self._asked_ns and self._words[layout.TRACE_UNTIL] == self._asked_ns:
            self._words[layout.TRACE_UNTIL] = self._before_ns
        self._asked_ns = 0
        self._words.release()
        self._mapping.close()


def _links(pid: int, target: str) -> list[str]:
    """Return the descriptors of a process that are such memory."""
    found = []
    with os.scandir(f"/proc/{pid}/fd") as entries:
        for entry in entries:
            with suppress(FileNotFoundError):
                if os.readlink(entry.path).startswith(target):
                    found.append(entry.path)
    return found


def _is_of(pid: int, made_by: int, start_time: int, time_namespace: int) -> bool:
    """Return whether the process `pid` made what names `made_by` as its maker. In a container that is the container's number."""
    if made_by != own_pid_of(pid, status_of(pid)):
        return False
    # The kernel shifts start times by the reader's time namespace, so they can be compared in one namespace only.
    return start_time_of(pid) == start_time or time_namespace != time_namespace_of(os.getpid())
