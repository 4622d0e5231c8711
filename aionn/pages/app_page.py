"""`AppPage`: the statistics page of a process in which runtimes are open.

A process has one page, whatever number of runtimes it opens. The first opens it (`open_page`), and the last one closes it.

Nothing here raises. Without memory for the page, without a free slot, and in a child of `os.fork`, slots lie in memory of this process.
They count there all the same, because `Burst.statistics` reads them.

Invariants
    The holder of the GIL is the page's one writer, and a slot changes hands in one native call.
    `_unseen` has the slots that found no room. The slot "other" has the sum of their counts, as of the last heartbeat.
    In a child of `os.fork`, native code turns every writer off, and the page is not kept open.
"""

from __future__ import annotations

import itertools
import os
import struct
import threading
import time

from aionn.pages import app_layout, layout
from aionn.pages._page import BurstSlot, Trace
from aionn.pages.app_layout import Kind
from aionn.pages.page import make_page, start_time_of, time_namespace_of
from aionn.tasks import leave_in_child

__all__ = ["AppPage", "BurstSlot", "close_page", "open_page", "private_counts"]


class AppPage:
    """The page of this process, an app.

    Attributes:
        fd: its descriptor, or -1 if the system gave no memory, no descriptor or no /proc for it.
    """

    def __init__(self) -> None:
        """Make the page."""
        self.users = 0
        self._pid = os.getpid()
        self._numbers = itertools.count(1)
        self._changing = threading.Lock()
        self._unseen: list[BurstSlot] = []
        self._retired = BurstSlot()
        self._trace: Trace | None = None
        self._other: BurstSlot | None = None
        try:
            started, time_namespace = start_time_of(self._pid), time_namespace_of(self._pid)
            words = layout.header(layout.ROLE_APP, self._pid, started, app_layout.SLOTS, app_layout.SLOT_BYTES)
            self.fd, self._mapping = make_page(words)
        except OSError:
            self.fd = -1
            return
        self._words = memoryview(self._mapping).cast("Q")
        self._words[layout.TIME_NAMESPACE] = time_namespace
        at = layout.RELEASE_WORD * 8
        with memoryview(self._mapping) as content:
            content[at : at + layout.RELEASE_BYTES] = layout.RELEASE.encode().ljust(layout.RELEASE_BYTES, b"\0")
        self._trace = Trace(self._mapping)
        self._other = self.slot(Kind.OTHER, "other")

    def slot(self, kind: Kind, *texts: str, parent: BurstSlot | None = None) -> BurstSlot:
        """Give a runtime, a device, a compilation or a burst its slot, until the slot's `release`, or until the slot is dropped.

        Args:
            kind: what the slot is for.
            texts: name, device and stage, as far as they are known.
            parent: the slot that gets the counts at the end.
        """
        if not self._writable():
            return BurstSlot()
        with self._changing:
            slot = self._free_slot(parent)
            if slot is None:
                slot = BurstSlot(self._trace)
                self._words[layout.SLOTS_LOST] += 1
                self._unseen.append(slot)
                return slot
            parents = 0 if parent is None else parent.get(app_layout.NUMBER)
            words = app_layout.description(kind, next(self._numbers), parents, time.monotonic_ns(), texts)
            slot.describe(app_layout.KIND, words)
            return slot

    def _writable(self) -> bool:
        return self.fd >= 0 and os.getpid() == self._pid

    def _free_slot(self, parent: BurstSlot | None) -> BurstSlot | None:
        """Return an empty slot of the page, or None if no slot is free or there is no memory for it."""
        words = self._words
        for number in range(app_layout.SLOTS):
            offset = layout.SLOT_OFFSET + number * app_layout.SLOT_BYTES
            if words[offset // 8 + app_layout.KIND] == 0:
                try:
                    os.posix_fallocate(self.fd, offset, app_layout.SLOT_BYTES)
                except OSError:
                    return None
                words[layout.SLOTS_USED] = max(words[layout.SLOTS_USED], number + 1)
                return BurstSlot(self._trace, self._mapping, offset, parent)
        return None

    def rename(self, slot: BurstSlot, *texts: str) -> None:
        """Give a slot another name, device and stage."""
        slot.describe(app_layout.NAME, b"".join(app_layout.text(name) for name in texts))

    def beat(self, runtime: BurstSlot) -> None:
        """Write the heartbeat of a runtime's event loop, and what the slots without room count."""
        if not self._writable():
            return
        runtime.describe(app_layout.BEAT, struct.pack("=Q", time.monotonic_ns()))
        with self._changing:
            if self._unseen and self._other is not None:
                self._other.become_sum_of([self._retired, *self._unseen])

    def free(self, slot: BurstSlot) -> None:
        """Take back a slot. It still has its counts, for its owner."""
        slot.release()
        if not self._writable():
            return
        with self._changing:
            if slot in self._unseen:
                self._unseen.remove(slot)
                self._retired.become_sum_of([self._retired, slot])

    def trace_note(self, kind: int, burst: int, identity: int, at_ns: int, first: int = 0, second: int = 0) -> None:
        """Write a trace record from Python, if the page is being traced. See `TraceRecord`."""
        if self._trace is not None:
            self._trace.note(kind, burst, identity, at_ns, first, second)

    def close(self) -> None:
        """Close the page's descriptor, after which no process finds it. Its memory goes when the last slot has been released."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            if self._trace is not None:
                self._trace.close()
            self._words.release()
            del self._mapping
            self._trace = self._other = None
            os.close(fd)

    def leave(self) -> None:
        """Close what a child of `os.fork` has of its parent's page."""
        global _opening
        # Another thread of the parent may hold the locks.
        self._changing, _opening = threading.Lock(), threading.Lock()
        self.close()
        _shared.discard(self)


_shared: set[AppPage] = set()
_opening = threading.Lock()


def open_page() -> AppPage:
    """Return the page of this process; `close_page` must follow."""
    with _opening:
        page = next(iter(_shared), None)
        if page is None:
            page = AppPage()
            _shared.add(page)
            leave_in_child(page)
        page.users += 1
        return page


def close_page(page: AppPage) -> None:
    """Close the page of this process if no other runtime uses it."""
    with _opening:
        page.users -= 1
        if page.users == 0:
            page.close()
            _shared.discard(page)


def private_counts() -> BurstSlot:
    """Return a slot that no other process sees."""
    return BurstSlot()
