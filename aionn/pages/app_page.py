"""`AppPage`: the statistics page of a process in which runtimes are open.

A process has one page, whatever number of runtimes it opens. The first opens it (`open_page`), and the last one closes it.

Nothing here raises. Without memory for the page, without a free slot, and in a child of `os.fork`, slots lie in memory of this process.
They count there all the same, because `Burst.statistics` reads them.

Slots that last (`lasting`, `past`) are named by their texts. There are at most 64 names of models and 256 names of bursts for one runtime;
others share the name "other" for models and the empty name for bursts. So a page stays small, whatever names an app makes up.

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
from collections.abc import Sequence

from aionn.loopless import leave_in_child
from aionn.pages import app_layout, layout
from aionn.pages._page import BurstSlot as BurstSlot
from aionn.pages._page import Trace, leave_page
from aionn.pages.app_layout import Kind
from aionn.pages.page import make_page, own_start_time, time_namespace_of
from aionn.pages.trace_records import NAMED, notes_of
from aionn.trace.events import Counter, Span

MOST_MODELS, MOST_BURSTS = 64, 256
"""So many names of models and bursts one runtime may have on the page."""


class AppPage:
    """The page of this process, an app.

    Attributes:
        fd: its descriptor, or -1 if the system gave no memory or no descriptor for it.
    """

    def __init__(self) -> None:
        """Make the page."""
        self.users = 0
        self._pid = os.getpid()
        self._numbers = itertools.count(1)
        self._changing = threading.Lock()
        self._unseen: list[BurstSlot] = []
        self._retired = BurstSlot()
        self._lasting: dict[tuple[object, ...], BurstSlot] = {}
        self._names: dict[tuple[str, str], set[str]] = {}
        self._trace: Trace | None = None
        self._other: BurstSlot | None = None
        try:
            started, time_namespace = own_start_time(), time_namespace_of("self")
            words = layout.header(layout.ROLE_APP, self._pid, started, app_layout.SLOTS, app_layout.SLOT_BYTES)
            self.fd, self._mapping = make_page(words)
        except OSError:
            self.fd = -1
            return
        self._words = memoryview(self._mapping).cast("Q")
        self._words[layout.TIME_NAMESPACE] = time_namespace
        self._trace = Trace(self._mapping)
        self._other = self.slot(Kind.OTHER, "other")

    def slot(self, kind: Kind, *texts: str, parent: BurstSlot | None = None) -> BurstSlot:
        """Give a runtime, a device, a compilation or a burst its slot, until the slot's `release`, or until the slot is dropped.

        Args:
            kind: what the slot is for.
            texts: name, device, stage, burst and runtime, as far as they are known.
            parent: the slot that gets the counts at the end, unless the slot follows another one later.
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
        self._tell_tracer(slot, texts)
        return slot

    def lasting(self, kind: Kind, *texts: str) -> BurstSlot:
        """Return the slot of that kind and with these texts. It stays until the page is closed.

        Without a free slot it is one that no other process sees.
        """
        if not self._writable():
            return BurstSlot()
        key = (kind, *texts)
        with self._changing:
            found = self._lasting.get(key)
            if found is None:
                found = self._free_slot(None)
                if found is None:
                    self._words[layout.SLOTS_LOST] += 1
                    found = BurstSlot()
                else:
                    words = app_layout.description(kind, next(self._numbers), 0, time.monotonic_ns(), texts)
                    found.describe(app_layout.KIND, words)
                self._lasting[key] = found
            return found

    def past(self, kind: Kind, model: str, device: str, stage: str, burst: str, runtime: str) -> BurstSlot:
        """Return the slot that keeps the counts of bursts with these texts when they end. `kind`: PAST_BURSTS or PAST_SINGLES."""
        if not self._writable():
            return BurstSlot()
        slot = self.lasting(kind, self.named("model", model, runtime), device, stage, self.named("burst", burst, runtime), runtime)
        return slot if slot.get(app_layout.KIND) else self._retired

    def named(self, what: str, name: str, runtime: str) -> str:
        """Return the name of a model or a burst, or the common one once a runtime has had too many names. `what`: "model" or "burst"."""
        names = self._names.setdefault((what, runtime), set())
        if name not in names:
            if len(names) >= (MOST_MODELS if what == "model" else MOST_BURSTS):
                return "other" if what == "model" else ""
            if name:
                names.add(name)
        return name

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

    def follow(self, slot: BurstSlot, parent: BurstSlot) -> None:
        """Leave a slot's counts with its parent before, and count anew from now on, for this parent."""
        slot.follow(parent)
        slot.describe(app_layout.SINCE, struct.pack("=Q", time.monotonic_ns()))

    def gauge(self, slot: BurstSlot, first: int, second: int = 0) -> None:
        """Set the two numbers of this moment of a slot."""
        slot.describe(app_layout.FIRST_GAUGE, struct.pack("=2Q", first, second))

    def rename(self, slot: BurstSlot, *texts: str) -> None:
        """Give a slot other texts, from its name on."""
        self._tell_tracer(slot, texts)
        slot.describe(app_layout.NAME, b"".join([app_layout.text(name) for name in texts]))

    def _tell_tracer(self, slot: BurstSlot, texts: Sequence[str]) -> None:
        """Give a tracer a slot's texts by a record, too, because the slot may leave the page soon."""
        if self.traced_until_ns > (now_ns := time.monotonic_ns()):
            number = slot.get(app_layout.NUMBER)
            self.write_event(Counter(NAMED, now_ns, 1, {"slot": number, **app_layout.named(texts)}))

    def beat(self, runtime: BurstSlot) -> None:
        """Write the heartbeat of a runtime's event loop, and what the slots without room count."""
        if not self._writable():
            return
        runtime.describe(app_layout.BEAT, struct.pack("=Q", time.monotonic_ns()))
        with self._changing:
            if self._words[layout.SLOTS_LOST] and self._other is not None:
                self._other.become_sum_of([self._retired, *self._unseen])

    def release(self, slot: BurstSlot) -> None:
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

    @property
    def traced_until_ns(self) -> int:
        """Until when trace records are wanted, or 0."""
        return self._words[layout.TRACE_UNTIL] if self._writable() else 0

    def write_event(self, event: Span | Counter) -> None:
        """Write a span or a counter as trace records, if the page is being traced."""
        for note in notes_of(event):
            self.trace_note(*note)

    def close(self) -> None:
        """Close the page's descriptor, after which no process finds it, and release all slots. So an error's traceback keeps no memory."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            leave_page()
            if self._trace is not None:
                self._trace.close()
            self._words.release()
            del self._mapping
            self._trace = self._other = None
            self._lasting.clear()
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


def traced_until_ns() -> int:
    """Return until when trace records of this process are wanted, or 0."""
    with _opening:
        return max((page.traced_until_ns for page in _shared), default=0)
