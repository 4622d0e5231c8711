"""A statistics page, as its process writes it and as another process reads it.

Invariants
    A page has its full size, and seals against any other size, before its descriptor leaves its process. So SIGBUS can never end a
    reader. Memory is reserved before it is written to, so SIGBUS can never end a writer either.
    A driver alone writes to its page, through the mapping from before the page was sealed. So no app can put words into the page of a
    driver that apps share, by whichever way it opens the memory. What others write is in a second memory, which counts for less: until
    when the driver writes trace records, and stacks. Its descriptor's file offset is that of the next byte of stacks.
    The driver's event loop writes the heartbeat and hands out slots; `_busy` guards the counts of loads and compiles.
"""

from __future__ import annotations

import fcntl
import os
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal

from aionn._mapping import Mapping
from aionn.escapes import escaped
from aionn.pages import layout
from aionn.pages._page import Slot as Slot
from aionn.pages._page import Trace
from aionn.pages.layout import Activity, LayoutError

if TYPE_CHECKING:
    from aionn.trace.events import Counter, Span

BEAT_S = 1.0
"""How often a loop writes its heartbeat."""


def until_beat_s() -> float:
    """Return the seconds until the next heartbeat, at a whole second of CLOCK_MONOTONIC.

    All that a process does once a second is due then, so an idle process wakes once. A loop's timer may come a little early.
    """
    left_s = BEAT_S - time.monotonic() % BEAT_S
    return left_s if left_s > BEAT_S / 10 else left_s + BEAT_S


_SYSTEM_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")

_SIZE_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
_F_SEAL_FUTURE_WRITE = 0x10  # Linux 5.1; the fcntl module may lack it


def start_time_of(pid: int) -> int:
    """Return when a process started, in clock ticks since the machine's boot. Together with the pid this names one process for good.

    Raises:
        OSError: the process does not exist, or /proc does not show it.
    """
    return _started(str(pid))


def _started(process: str) -> int:
    with open(f"/proc/{process}/stat", "rb") as file:
        return int(file.read().rpartition(b")")[2].split()[19])


def own_start_time() -> int:
    """Return when this process started, as `start_time_of`, or 0 without /proc: then no other process finds this one either.

    The /proc of another pid namespace has another number for this process. So its link `self` is read.
    """
    try:
        return _started("self")
    except OSError:
        return 0


def time_namespace_of(pid: int | Literal["self"]) -> int:
    """Return the inode number of a process's time namespace, or 0 if the kernel or /proc has none."""
    try:
        return os.stat(f"/proc/{pid}/ns/time").st_ino
    except FileNotFoundError:
        return 0


def make_page(
    words: Sequence[int], name: str = "aionn-stats", size_bytes: int = layout.PAGE_BYTES, *, others_write: bool = True
) -> tuple[int, Mapping]:
    """Make this process's page with these words of a header. Returns its descriptor and its mapping.

    Args:
        words: from the first one on.
        name: what other processes find it by.
        size_bytes: of all of it.
        others_write: whether other processes may write to it.

    Raises:
        OSError: the system has no memory or no descriptor for the page.
    """
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, size_bytes)
        os.posix_fallocate(fd, 0, layout.SLOT_OFFSET)
        os.lseek(fd, layout.STACK_OFFSET, os.SEEK_SET)
        mapping = Mapping(fd, size_bytes, True)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SIZE_SEALS | fcntl.F_SEAL_SEAL | (0 if others_write else _F_SEAL_FUTURE_WRITE))
    except BaseException:
        os.close(fd)
        raise
    with memoryview(mapping) as content:
        content[: len(words) * 8] = struct.pack(f"={len(words)}Q", *words)
        at = layout.RELEASE_WORD * 8
        content[at : at + layout.RELEASE_BYTES] = layout.RELEASE.encode().ljust(layout.RELEASE_BYTES, b"\0")
    return fd, mapping


def map_sealed(fd: int, size_bytes: int, *, write: bool = False) -> Mapping:
    """Map a memfd of another process that has this size for good.

    Raises:
        LayoutError: the descriptor is not such a memfd.
        OSError: it cannot be mapped.
    """
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError as error:
        raise LayoutError("the descriptor of a statistics page is not a memfd; a process of aionn has a memfd") from error
    if seals & _SIZE_SEALS != _SIZE_SEALS or os.fstat(fd).st_size != size_bytes:
        raise LayoutError(
            f"a statistics page came with another size or without its seals; it has {size_bytes} bytes and seals against any other size"
        )
    if os.fstatvfs(fd).f_bsize != _SYSTEM_PAGE_BYTES:
        # Its owner can free huge pages again, and where none is left then, the next look at one is SIGBUS.
        raise LayoutError("a statistics page lies in huge pages; a process of aionn makes a memfd of usual pages")
    return Mapping(fd, size_bytes, write)


def map_path(path: str, size_bytes: int, *, write: bool = False) -> Mapping:
    """Map such a memfd by its link in /proc.

    Raises:
        LayoutError, OSError: as `map_sealed`. The process may have ended, or belong to another user.
    """
    fd = os.open(path, (os.O_RDWR if write else os.O_RDONLY) | os.O_CLOEXEC)
    try:
        return map_sealed(fd, size_bytes, write=write)
    finally:
        os.close(fd)


class DriverPage:
    """The page of this process, a driver.

    Attributes:
        fd: its descriptor, which the app gets.
        asked_fd: of the memory in which others ask for trace records, and in which `faulthandler` writes stacks. The owner gets it.
    """

    def __init__(self) -> None:
        """Make the page.

        Raises:
            OSError: the system has no memory or no descriptor for the page.
        """
        header = layout.header(layout.ROLE_DRIVER, os.getpid(), own_start_time())
        self.fd, self._mapping = make_page(header, others_write=False)
        try:
            self.asked_fd, self._asked = make_page(header, "aionn-asked", layout.ASKED_BYTES)
        except BaseException:
            os.close(self.fd)
            raise
        self._words = memoryview(self._mapping).cast("Q")
        self._asked_words = memoryview(self._asked).cast("Q")
        self._events = Trace(self._asked)
        self._busy = threading.Lock()
        self._free = list(range(layout.SLOTS - 1, -1, -1))
        self._taken: dict[Slot, tuple[int, Trace]] = {}
        self._traces: list[Trace] = []
        self._words[layout.TIME_NAMESPACE] = time_namespace_of("self")
        self.beat()

    def write_event(self, event: Span | Counter) -> None:
        """Write a span or a counter as trace records, if the page is being traced. Any thread may call this."""
        if time.monotonic_ns() < self._asked_words[layout.TRACE_UNTIL]:
            from aionn.pages.trace_records import notes_of  # a driver has imported it; who only reads a page needs no records

            for note in notes_of(event):
                self._events.note(*note)

    def beat(self) -> None:
        """Write the heartbeat."""
        self._words[layout.HEARTBEAT] = time.monotonic_ns()

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Show during the body that a model is being loaded from an artifact. Any thread may call this."""
        with self._counted(layout.LOADS_BEGUN, layout.LOADS_ENDED, layout.LOADING_SINCE):
            yield

    @contextmanager
    def compiling(self) -> Iterator[None]:
        """Show during the body that a model is being judged, compiled or exported. Any thread may call this."""
        with self._counted(layout.COMPILES_BEGUN, layout.COMPILES_ENDED, layout.COMPILING_SINCE):
            yield

    @contextmanager
    def _counted(self, begun: int, ended: int, since: int) -> Iterator[None]:
        words = self._words
        with self._busy:
            if words[begun] == words[ended]:
                words[since] = time.monotonic_ns()
            words[begun] += 1
        try:
            yield
        finally:
            with self._busy:
                words[ended] += 1

    def show_preparing(self, key: int) -> None:
        """Show the key of a model before an engine compiles or loads it. Any thread may call this."""
        self._words[layout.PREPARING_KEY] = key

    def slot(self, model: int, key: int = 0) -> Slot:
        """Give a prepared model its slot. Without a free slot, or memory for one, the page does not show the model's executions."""
        if not self._free:
            return private_slot()
        number = self._free[-1]
        offset = layout.SLOT_OFFSET + number * layout.SLOT_BYTES
        try:
            os.posix_fallocate(self.fd, offset, layout.SLOT_BYTES)
        except OSError:
            return private_slot()
        self._free.pop()
        first = layout.slot_word(number)
        for word in range(first, first + layout.SLOT_WORDS):
            self._words[word] = 0
        self._words[first + layout.MODEL], self._words[first + layout.KEY] = model, key
        self._words[layout.SLOTS_USED] = max(self._words[layout.SLOTS_USED], number + 1)
        # A ring outlives its model, or a reader might find it too late.
        trace = self._traces.pop() if self._traces else Trace(self._asked)
        slot = Slot(self._mapping, offset, trace)
        self._taken[slot] = number, trace
        return slot

    def words_of(self, slot: Slot) -> memoryview | None:
        """Return the words of a slot for what `layout` says about joined runs, or None if the page does not show that slot."""
        taken = self._taken.get(slot)
        if taken is None:
            return None
        first = layout.slot_word(taken[0])
        return self._words[first : first + layout.SLOT_WORDS]

    def release(self, slot: Slot) -> None:
        """Take back the slot of a model that has been released. The page no longer shows an execution that still runs."""
        slot.release()
        taken = self._taken.pop(slot, None)
        if taken is not None:
            number, trace = taken
            self._traces.append(trace)
            first = layout.slot_word(number)
            for word in range(first, first + layout.SLOT_WORDS):
                self._words[word] = 0
            self._free.append(number)


def private_slot() -> Slot:
    """Return a slot that no other process sees."""
    return Slot(bytearray(layout.SLOT_BYTES), 0)


class PageReader:
    """A driver's page, read by its app.

    Attributes:
        pid: of the process that made the page, as the page says.
        start_time: of the same process; see `start_time_of`.
        started_ns: when its app started the process, or 0 if that is not known.
    """

    def __init__(self, fd: int, started_ns: int = 0, asked_fd: int = -1) -> None:
        """Map the page. Takes over the descriptors, also when this fails.

        Args:
            fd: of the page.
            started_ns: when the app started the process. A time on the page that is earlier, or in the future, is wrong.
            asked_fd: of the driver's second memory, which only the owner of the driver has.

        Raises:
            LayoutError: the descriptor is not a statistics page.
            OSError: the page cannot be mapped.
        """
        self._fd, self._asked_fd = fd, asked_fd
        self.started_ns = started_ns
        self._joining: frozenset[int] = frozenset()
        self._running: frozenset[int] = frozenset()
        try:
            if asked_fd >= 0:
                map_sealed(asked_fd, layout.ASKED_BYTES).close()
            self._mapping = map_sealed(fd, layout.PAGE_BYTES)
        except BaseException:
            self._close_descriptors()
            raise
        self._words = memoryview(self._mapping).cast("Q")
        try:
            layout.check_header(self._words, layout.ROLE_DRIVER)
        except BaseException:
            self.close()
            raise
        self.pid, self.start_time = self._words[layout.HEADER_PID], self._words[layout.HEADER_START]

    def read(self) -> Activity:
        """Return what the driver does now. A time that cannot be right is 0."""
        return layout.activity(self._words, self.started_ns)

    def joined_runs(self, model: int) -> layout.JoinedRuns | None:
        """Return what a prepared model has joined, or None if the page does not show that model, or is closed."""
        return layout.joined_runs(self._words, model) if self._fd >= 0 else None

    def joining_models(self) -> frozenset[int]:
        """Return the numbers of the models of which a joined run is in progress, or was when the page was closed."""
        return layout.joining_models(self._words) if self._fd >= 0 else self._joining

    def suspect_keys(self) -> frozenset[int]:
        """Return `layout.suspect_keys`, of the moment when the page was closed if it is."""
        return layout.suspect_keys(self._words) if self._fd >= 0 else self._running

    def usual_s(self, slot: int, quantile: float, least: int) -> float | None:
        """Return an upper bound in seconds for a quantile of that model's execution times, or None if fewer than `least` ended."""
        first = layout.slot_word(slot) + layout.HISTOGRAM
        return layout.quantile_s(self._words[first : first + layout.BUCKETS].tolist(), quantile, least)

    def for_reading(self) -> int:
        """Return a new descriptor of the page. Its seals keep everyone but the driver from writing to it."""
        return os.open(f"/proc/self/fd/{self._fd}", os.O_RDONLY | os.O_CLOEXEC)

    def trace_until(self, until_ns: int) -> None:
        """Ask the driver for trace records until that moment of CLOCK_MONOTONIC."""
        os.pwrite(self._asked_fd, struct.pack("=Q", until_ns), layout.TRACE_UNTIL * 8)

    def clear_stacks(self) -> None:
        """Make room for new stacks."""
        os.lseek(self._asked_fd, layout.STACK_OFFSET, os.SEEK_SET)
        os.pwrite(self._asked_fd, bytes(layout.STACK_BYTES), layout.STACK_OFFSET)

    def stack_bytes(self) -> int:
        """Return how many bytes of stacks have been written so far."""
        return os.lseek(self._asked_fd, 0, os.SEEK_CUR) - layout.STACK_OFFSET

    def stacks(self) -> str:
        """Return the stacks written so far, as text."""
        written = max(0, min(self.stack_bytes(), layout.STACK_BYTES))
        return escaped(os.pread(self._asked_fd, written, layout.STACK_OFFSET).decode(errors="replace"))

    def close(self) -> None:
        """Unmap the page and close its descriptor. Idempotent."""
        if self._fd >= 0:
            self._joining, self._running = self.joining_models(), self.suspect_keys()
            self._words.release()
            self._mapping.close()
            self._close_descriptors()

    def _close_descriptors(self) -> None:
        for fd in (self._fd, self._asked_fd):
            if fd >= 0:
                os.close(fd)
        self._fd = self._asked_fd = -1
