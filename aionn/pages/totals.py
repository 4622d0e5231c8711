"""Sums over pages that come and go. What a process had counted when it ended stays in the sums, so no counter falls at a restart.

    Totals      adds up what pages show, and keeps what ended pages had shown
    OwnPage     the page of this process, open and mapped as long as its counts are wanted
    OtherPages  the pages of all processes of this user, each mapped until its process ends or closes it

Memory that is mapped stays readable after the death of its writer. So the last counts of a process that SIGKILL ended are not lost,
if the process was found before. A page that closes leaves all its last values in the memory.

Invariants
    A page counts once: while it is open among the views that `Totals.now` is given, and after its end among the retired sums.
    Each class has one caller at a time. Its owner holds a lock if it has several threads.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress

from aionn.errors import MemoryAllocationError
from aionn.pages import layout
from aionn.pages.app_layout import PageView
from aionn.pages.app_page import AppPage, close_page, open_page
from aionn.pages.finding import FoundPage, find_page
from aionn.pages.layout import LayoutError
from aionn.pages.measures import Names, Sums, add_page, drivers_on
from aionn.pages.page import start_time_of
from aionn.pages.process_use import ProcessUse, child_with_pid, use_of


class Totals:
    """What pages show together, and have shown."""

    def __init__(self, reasons: Sequence[str], runtime: str | None = None) -> None:
        """`reasons`: values of `MissReason` in their order. `runtime`: name of the one that counts, or None for all."""
        self._reasons, self._runtime = reasons, runtime
        self._names = Names()
        self._retired = Sums()
        self._cpu: dict[tuple[int, int], tuple[tuple[str, str], float]] = {}

    def retire(self, view: PageView) -> None:
        """Keep the counters and histograms of a page that has ended."""
        last = Sums()
        self._add(last, view)
        self._retired.add_all(last, lasting=True)

    def now(self, pages: Iterable[tuple[int, PageView]]) -> Sums:
        """Return the sums over open pages and retired ones. `pages`: with the number by which this process knows the page's process."""
        sums = Sums()
        sums.add_all(self._retired)
        for pid, view in pages:
            self._add(sums, view)
            for found, runtime, device in drivers_on(view, self._runtime):
                # The page of a process in a container has that container's numbers.
                driver = found if view.pid == pid else child_with_pid(pid, found)
                with suppress(OSError):  # it ended meanwhile
                    if driver is not None:
                        use, where = use_of(driver), (self._names.shown("runtime", runtime), device)
                        self._cpu[driver, use.start_time] = where, use.cpu_s
                        _add_use(sums, where, use)
        for process, (where, cpu_s) in list(self._cpu.items()):
            sums.add("driver_cpu_seconds", where, cpu_s)
            if not _lives(*process):
                del self._cpu[process]
                self._retired.add("driver_cpu_seconds", where, cpu_s)
        return sums

    def _add(self, sums: Sums, view: PageView) -> None:
        add_page(sums, view, self._names, self._reasons, self._runtime)


def _add_use(sums: Sums, where: tuple[str, str], use: ProcessUse) -> None:
    sums.add("driver_resident_memory_bytes", where, use.resident_bytes)
    sums.add("driver_threads", where, use.threads)
    sums.add("driver_open_fds", where, use.open_fds)


def _lives(pid: int, start_time: int) -> bool:
    try:
        return start_time_of(pid) == start_time
    except (FileNotFoundError, ProcessLookupError):
        return False
    except OSError:  # no free descriptor, for example
        return True


class OwnPage:
    """The page of this process, kept open as long as this object lives, so that closed runtimes stay counted. `close` may end it.

    In a child of `os.fork` it is the child's own page, on which nothing is counted yet.
    """

    def __init__(self) -> None:
        """Open the page.

        Raises:
            MemoryAllocationError: as `read`.
        """
        self._pid = 0
        self._page: AppPage | None = None
        self._found: FoundPage | None = None
        self._last: PageView | None = None
        self._open()

    def read(self) -> PageView:
        """Return what the page shows now.

        Raises:
            MemoryAllocationError: this process has no page, because the system gave no memory, no descriptor or no /proc for it.
        """
        if self._pid != os.getpid():
            self.close()
            self._open()
        view = None if self._found is None else self._found.read()
        if view is None and self._last is None:
            raise _no_page()
        self._last = view or self._last  # slots kept changing hands for half a second
        assert self._last is not None
        return self._last

    def close(self) -> None:
        """End the use of the page, which closes if no runtime is open. Idempotent."""
        if self._found is not None:
            self._found.close()
        if self._page is not None:
            self._ending()
        self._page = self._found = self._last = None

    def _open(self) -> None:
        self._pid = os.getpid()
        self._page = open_page()
        self._ending = weakref.finalize(self, close_page, self._page)
        if self._page.fd < 0:
            self.close()
            raise _no_page()
        self._found = FoundPage(self._pid, f"/proc/{self._pid}/fd/{self._page.fd}")


def _no_page() -> MemoryAllocationError:
    return MemoryAllocationError(
        "this process has no statistics page, because the system gave no memory, no descriptor or no /proc for it; "
        "raise the limit that is reached, or mount /proc",
        needed_bytes=layout.PAGE_BYTES,
        available_bytes=None,
    )


class OtherPages:
    """The pages of all apps that this user may read, their processes' ends included.

    A process that lives only between two calls of `look` is missed.
    """

    def __init__(self, totals: Totals) -> None:
        self._totals = totals
        self._mapped: dict[tuple[int, int], _Mapped] = {}

    def retire_ended(self) -> None:
        """Keep the last counts of the processes that have ended, or closed their page."""
        for key, mapped in list(self._mapped.items()):
            if not mapped.is_open():
                del self._mapped[key]
                view = mapped.read()
                mapped.page.close()
                if view is not None:
                    self._totals.retire(view)

    def look(self) -> None:
        """Retire the pages that have ended, and map those that are new. This reads the descriptors of all processes of this user."""
        self.retire_ended()
        known = {mapped.page.pid for mapped in self._mapped.values()}
        for name in os.listdir("/proc"):
            if name.isdigit() and int(name) not in known:
                with suppress(OSError, LayoutError):  # it ended meanwhile, or belongs to another user
                    found = _Mapped.of(int(name))
                    if found is not None:
                        self._mapped[found.page.pid, found.inode] = found

    def views(self) -> Iterator[tuple[int, PageView]]:
        """Yield the number of each app's process, and what its page shows now."""
        for mapped in self._mapped.values():
            view = mapped.read()
            if view is not None:
                yield mapped.page.pid, view

    def close(self) -> None:
        """Unmap all pages. Idempotent."""
        for mapped in self._mapped.values():
            mapped.page.close()
        self._mapped.clear()


class _Mapped:
    """The page of an app, and the last view of it."""

    def __init__(self, page: FoundPage, inode: int) -> None:
        self.page, self.inode = page, inode
        self._last: PageView | None = None

    @classmethod
    def of(cls, pid: int) -> _Mapped | None:
        """Map the page of a process. Returns None if it has none now, or is not an app.

        Raises:
            OSError, LayoutError: as `FoundPage`.
        """
        found = find_page(pid)
        if found is None:
            return None
        with found:
            if found.role != "app":
                return None
        # The descriptor's number may have another page by now, so the page between two looks at the number is taken.
        before = os.stat(found.path).st_ino
        page = FoundPage(pid, found.path)
        if os.stat(found.path).st_ino != before:
            page.close()
            return None
        return cls(page, before)

    def is_open(self) -> bool:
        """Return whether the process lives and still has this page."""
        try:
            return os.stat(self.page.path).st_ino == self.inode and start_time_of(self.page.pid) == self.page.start_time
        except OSError:
            return False

    def read(self) -> PageView | None:
        """Return what the page shows, or showed when it could be read last. SIGKILL in the middle of a change makes it unreadable."""
        self._last = self.page.read() or self._last
        return self._last
