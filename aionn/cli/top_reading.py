"""What `aionn top` reads at one moment: statistics pages, and /proc for the processes that have one.

`read` looks everywhere anew each time, in about 10 ms for some thousand descriptors. So a process that ends or starts between two
readings needs no care. Nothing here imports what a terminal needs, because a monitoring script starts `aionn top --once --json` often.

Times of a page are CLOCK_MONOTONIC of the process that wrote it. A process in another time namespace has another clock, so `AppReading`
has the moment by the app's own clock.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass

from aionn.pages.app_layout import Kind, PageView
from aionn.pages.finding import FoundPage, find_page
from aionn.pages.layout import Activity
from aionn.pages.page import time_namespace_of
from aionn.pages.process_use import driver_device, own_pid_of, stat_of, status_of


class NotReadableError(Exception):
    """No page can be read, or not that of the process asked for. The text is the sentence for the user."""


@dataclass(frozen=True, slots=True)
class ProcessReading:
    """What /proc says of a process.

    Attributes:
        parent: the pid of its parent. own_pid: by which number the process knows itself, which differs in a container.
        threads, rss_bytes: of this moment. cpu_s: CPU time since its start. age_s: time since its start.
    """

    pid: int
    parent: int
    own_pid: int
    threads: int
    rss_bytes: int
    cpu_s: float
    age_s: float


@dataclass(frozen=True, slots=True)
class DriverReading:
    """A driver process.

    Attributes:
        device: the name of its device, by the command that started it.
        activity: what it does. now_ns: the moment. same_clock: whether the two are by the same clock.
    """

    process: ProcessReading
    device: str
    activity: Activity
    now_ns: int
    same_clock: bool


@dataclass(frozen=True, slots=True)
class AppReading:
    """A process in which runtimes are open.

    Attributes:
        start_time: of its page; with the pid it names the process for good.
        now_ns: the moment by the clock of the page's times.
        same_clock: whether this is this process's clock. If not, `now_ns` is the last heartbeat, up to half a second ago.
        drivers: its driver processes.
    """

    process: ProcessReading
    start_time: int
    view: PageView
    now_ns: int
    same_clock: bool
    drivers: tuple[DriverReading, ...]


@dataclass(frozen=True, slots=True)
class Reading:
    """All that is to be seen at one moment.

    Attributes:
        at_s: the moment, CLOCK_MONOTONIC.
        unreadable: how many processes this user may not look into. Some of them may have runtimes. 0 where one app was asked for.
        hidden: why /proc shows no processes of other users at all, as "hidepid=2", or an empty text.
    """

    at_s: float
    apps: tuple[AppReading, ...]
    unreadable: int
    hidden: str


def read(pid: int | None = None) -> Reading:
    """Read every page that this user may read, or that of one app and its drivers.

    Raises:
        NotReadableError: /proc shows no processes, or process `pid` has no page that can be read.
    """
    numbers = _processes()
    hidden = _hidden()
    wanted = _checked(pid, hidden) if pid is not None else None
    pages, unreadable = _pages(numbers)
    try:
        apps: list[tuple[FoundPage, ProcessReading, PageView]] = []
        drivers: dict[int, list[DriverReading]] = {}
        for page in pages:
            try:
                process = _process(page.pid)
            except (OSError, ValueError, IndexError):
                continue  # it ended meanwhile
            if page.role == "driver":
                drivers.setdefault(process.parent, []).append(_driver(page, process))
            elif wanted in (None, page.pid) and (view := page.read()) is not None:
                apps.append((page, process, view))
        readings = tuple(_app(page, process, view, drivers.get(page.pid, ())) for page, process, view in apps)
    finally:
        for page in pages:
            page.close()
    if wanted is not None and not readings:
        raise NotReadableError(f"process {wanted} ended while its page was read; run aionn top to see what is still open")
    if wanted is not None:  # what other users run does not matter
        unreadable, hidden = 0, ""
    return Reading(time.monotonic(), tuple(sorted(readings, key=lambda app: app.process.pid)), unreadable, hidden)


def _processes() -> list[int]:
    """Return the numbers of all processes that /proc shows.

    Raises:
        NotReadableError: it shows no process.
    """
    try:
        numbers = sorted(int(name) for name in os.listdir("/proc") if name.isdigit())
    except OSError as error:
        raise NotReadableError(f"/proc cannot be read ({error.strerror}), and pages are found there; mount it") from error
    if not numbers:
        raise NotReadableError("/proc shows no processes, and pages are found there; mount a proc file system at /proc")
    return numbers


def _hidden() -> str:
    """Return the option by which /proc hides processes of other users, if it does and this user is not root."""
    try:
        with open("/proc/self/mountinfo", encoding="utf-8", errors="replace") as file:
            mounts = [line.split() for line in file]
    except OSError:
        return ""
    found = ""
    for fields in mounts:
        if len(fields) > 5 and fields[4] == "/proc":  # a later mount covers an earlier one
            options = ",".join((fields[5], fields[-1])).split(",")
            found = next((option for option in options if option.startswith("hidepid=")), "")
    return "" if found in ("hidepid=0", "hidepid=off") or os.geteuid() == 0 else found


def _checked(pid: int, hidden: str) -> int:
    """Return the number of a process that has an app's page.

    Raises:
        NotReadableError: it has none that this user may read.
    """
    try:
        page = find_page(pid)
    except PermissionError as error:
        raise NotReadableError(f"process {pid} belongs to another user; run aionn top as that user or as root") from error
    except OSError as error:
        unseen = f", or /proc does not show it ({hidden})" if hidden else ""
        raise NotReadableError(f"there is no process {pid}{unseen}; run aionn top to see what is open") from error
    if page is None:
        raise NotReadableError(f"process {pid} has no open aionn runtime of this release; run aionn top to see what is open")
    with page:
        if page.role == "driver":
            try:
                app = str(_process(pid).parent)
            except (OSError, ValueError, IndexError):
                app = "the app's number"
            raise NotReadableError(f"process {pid} is a driver; give the number of its app, --pid {app}")
    return pid


def _pages(numbers: Sequence[int]) -> tuple[list[FoundPage], int]:
    """Return the pages of these processes, to be closed, and how many processes of users this user may not look into."""
    pages, unreadable = [], 0
    for number in numbers:
        try:
            page = find_page(number)
        except PermissionError:
            unreadable += not _is_of_kernel(number)
        except OSError:
            continue  # it ended meanwhile
        else:
            if page is not None:
                pages.append(page)
    return pages, unreadable


def _is_of_kernel(pid: int) -> bool:
    """Return whether a process has no program: a thread of the kernel, or a process that has ended and has not been waited for."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return not file.read(1)
    except OSError:
        return True


def _driver(page: FoundPage, process: ProcessReading) -> DriverReading:
    return DriverReading(process, driver_device(page.pid) or "?", page.activity(), time.monotonic_ns(), _same_clock(page))


def _app(page: FoundPage, process: ProcessReading, view: PageView, drivers: Sequence[DriverReading]) -> AppReading:
    same = _same_clock(page)
    beats = [slot.beat_ns for slot in view.slots if slot.kind is Kind.RUNTIME]
    now_ns = time.monotonic_ns() if same else max(beats, default=0)
    return AppReading(process, page.start_time, view, now_ns, same, tuple(drivers))


def _same_clock(page: FoundPage) -> bool:
    return page.time_namespace == time_namespace_of(os.getpid())


def _process(pid: int) -> ProcessReading:
    """Read a process's figures.

    Raises:
        OSError, ValueError, IndexError: it has ended.
    """
    stat, status = stat_of(pid), status_of(pid)
    return ProcessReading(
        pid=pid,
        parent=stat.parent,
        own_pid=own_pid_of(pid, status),
        threads=stat.threads,
        rss_bytes=int(status.get("VmRSS", "0 kB").split()[0]) * 1024,
        cpu_s=stat.cpu_s,
        age_s=max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - stat.started_s),
    )
