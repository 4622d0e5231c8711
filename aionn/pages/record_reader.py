"""`RecordReader`: trace records of an app and its drivers, read from their pages and rings while they run.

It asks the pages of an app and its drivers for trace records, again and again for a few seconds each. So a reader that is
killed costs them nothing later. It keeps what it reads undecoded, because decoding takes longer than what it looks at. A driver that starts
meanwhile takes over what its app is asked for (`PageReader.trace_until`). Rings have no descriptor to wait for, since their writers make no
system call. So they are read every `READ_S`.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field

from aionn.pages.app_layout import Kind
from aionn.pages.finding import Asking, FoundPage, TraceReader, find_drivers
from aionn.pages.layout import LayoutError
from aionn.pages.process_use import driver_device
from aionn.pages.trace_records import BurstNames, RingRecords, add_records
from aionn.trace.events import Recorded

READ_S, QUIET_S = 0.01, 0.03
"""How often to read while many records come, and while few do. A ring has room for 4,000 frames in the app. So the first is enough for
400,000 frames a second, and the second for a burst of 130,000 a second that begins."""

_MANY_BYTES = 64 * 1024
"""An eighth of a ring."""

LOOK_S = 0.25
"""How often to look for new drivers and bursts."""

RINGS_S = 0.05
"""How often to look for new rings. What a driver records and is killed within this time is lost."""

ASK_NS = 2_000_000_000
"""How long records are written after their reader was killed."""

MOST_BYTES = 64 * 1024 * 1024
"""The most that is kept: 250,000 frames, the newest ones. Older records count as lost."""


class _Process:
    """The app or one of its drivers. Owns the page."""

    def __init__(self, page: FoundPage) -> None:
        self.page = page
        self.pid = page.pid
        with ExitStack() as undo:
            undo.callback(page.close)
            self.asking = Asking(page)
            self.reader = TraceReader(page)
            undo.pop_all()
        self.lost_before = 0
        self.is_app = page.role == "app"
        self.time_namespace = page.time_namespace
        self.name = f"app {_runtimes(page)}" if self.is_app else f"driver {driver_device(page.pid) or page.pid}"

    def skip(self) -> None:
        """Leave out what was recorded for earlier tracers."""
        self.reader.take(True)
        self.lost_before = self.reader.lost

    def close(self) -> None:
        self.asking.close()
        self.reader.close()
        self.page.close()


@dataclass(slots=True)
class Harvested:
    """Records that were read, to be decoded. Satisfies `trace.Harvest`.

    Attributes:
        python_of: the process whose spans are known already, or 0.
    """

    contents: list[RingRecords] = field(default_factory=list)
    names: BurstNames = field(default_factory=BurstNames)
    processes: dict[int, str] = field(default_factory=dict)
    time_namespaces: dict[int, int] = field(default_factory=dict)
    lost: int = 0
    python_of: int = 0

    def add_to(self, recorded: Recorded) -> None:
        """Decode them."""
        recorded.processes |= self.processes
        recorded.time_namespaces |= self.time_namespaces
        recorded.lost += self.lost
        add_records(recorded, self.contents, self.names, self.python_of)


class RecordReader:
    """Reads records of an app and its drivers. `close` must follow.

    Args:
        app: the app's page, which the collector takes over.
    """

    def __init__(self, app: FoundPage) -> None:
        """Ask for records from now on.

        Raises:
            OSError, LayoutError: the app has ended, or belongs to another user.
        """
        self._app = _Process(app)
        self._processes = [self._app]
        self._known: set[tuple[int, int]] = set()
        self._names = BurstNames()
        self._contents: deque[RingRecords] = deque()
        self._bytes = 0  # read so far
        self._pushed_out = 0
        self._looked_ns = self._rings_ns = 0
        self._find()
        for process in self._processes:
            process.skip()
        self.look()

    def look(self) -> None:
        """Look for new drivers, rings and bursts, ask for more records, and read those that there are."""
        now_ns = self._looked_ns = self._rings_ns = time.monotonic_ns()
        self._find()
        for process in self._processes:
            process.asking.until(now_ns + ASK_NS)
        self._names.note(self._app.page.names(), now_ns)
        self._take(True, all_rings=True)

    def _find(self) -> None:
        """Find new drivers."""
        with suppress(OSError):  # the app has ended
            for page in find_drivers(self._app.page, self._known):
                with suppress(OSError, LayoutError):  # it ends
                    self._processes.append(_Process(page))

    def read(self) -> float:
        """Read new records. Look for new writers if it is time for that. Returns after how many seconds to read again."""
        before = self._bytes
        self._read()
        return READ_S if self._bytes - before > _MANY_BYTES else QUIET_S

    def _read(self) -> None:
        now_ns = time.monotonic_ns()
        if now_ns >= self._looked_ns + LOOK_S * 1e9:
            self.look()
            return
        look = now_ns >= self._rings_ns + RINGS_S * 1e9
        if look:
            self._rings_ns = now_ns
        self._take(look)

    def _take(self, look: bool, all_rings: bool = False) -> None:
        """Read new records. `look`: look for new rings, too. An app seldom has another one, so only `all_rings` looks for that."""
        for process in self._processes:
            for ring, records in process.reader.take(look and (all_rings or not (process.is_app and process.reader.rings))):
                self._contents.append(RingRecords(process.pid, f"lane {ring}", records))
                self._bytes += len(records)
        while self._bytes - 64 * self._pushed_out > MOST_BYTES:
            self._pushed_out += len(self._contents.popleft().records) // 64

    def close(self) -> Harvested:
        """Ask for no more, and return everything that was read."""
        self.look()
        for process in self._processes:
            process.asking.close()
        self._take(False)
        lost = self._pushed_out + sum(process.reader.lost - process.lost_before for process in self._processes)
        harvest = Harvested(
            list(self._contents),
            self._names,
            {process.pid: process.name for process in self._processes},
            {process.pid: process.time_namespace for process in self._processes},
            lost,
        )
        for process in self._processes:
            process.close()
        return harvest


class CollectingThread:
    """A thread that reads the records of this process and its drivers. `end` must follow."""

    def __init__(self, app: FoundPage) -> None:
        """Begin to read. Takes over the page.

        Raises:
            OSError, LayoutError: as `RecordReader`.
        """
        self._pid = os.getpid()
        self._collector = RecordReader(app)
        self._reading = threading.Lock()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="aionn trace", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        pause_s = READ_S
        while not self._over.wait(pause_s):
            with self._reading:
                pause_s = self._collector.read()

    def look(self) -> None:
        """Read what there is, as before a driver ends."""
        if os.getpid() == self._pid:
            with self._reading:
                self._collector.look()

    def end(self) -> Harvested:
        """Stop reading, and return what was read. In a child of fork nothing was read."""
        if os.getpid() != self._pid:
            return Harvested()
        self._over.set()
        self._thread.join()
        harvest = self._collector.close()
        harvest.python_of = self._pid
        return harvest


def _runtimes(page: FoundPage) -> str:
    """Return the names of an app's runtimes."""
    view = page.read()
    names = [] if view is None else [slot.name for slot in view.slots if slot.kind is Kind.RUNTIME and slot.name]
    return ", ".join(sorted(set(names))) or str(page.pid)
