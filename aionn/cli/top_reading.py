"""What `aionn top` reads at one moment: statistics pages, and /proc for the processes that have one.

`read` looks everywhere anew each time, in about 10 ms for some thousand descriptors. So a process that ends or starts between two
readings needs no care. Nothing here imports what a terminal needs, because a monitoring script starts `aionn top --once --json` often.

Times of a page are CLOCK_MONOTONIC of the process that wrote it. A process in another time namespace has another clock, so `AppReading`
has the moment by the app's own clock.

Figures are computed from one reading or from two, without I/O. From two readings, rates and percentiles are those of the time between them.
From one reading, they are averages since each burst was opened, and CPU is the average since the process started.

`snapshot` gives what runs at one moment, for programs and for where there is no terminal.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from aionn.cgroups import text_of
from aionn.pages.app_layout import Kind, PageView, SlotView
from aionn.pages.finding import FoundPage, find_page
from aionn.pages.layout import Activity, percentile_s
from aionn.pages.page import time_namespace_of
from aionn.pages.process_use import ProcessStat, driver_device, of_each_process, own_pid_of, stat_of, status_of


class NotReadableError(Exception):
    """No page can be read, or not that of the process asked for. The text is the sentence for the user."""


@dataclass(frozen=True, slots=True)
class DriverReading:
    """A driver process.

    Attributes:
        own_pid: by which number the process knows itself, which differs in a container.
        device: the name of its device, by the command that started it.
        activity: what it does. now_ns: the moment. same_clock: whether the two are by the same clock.
    """

    process: ProcessStat
    own_pid: int
    device: str
    activity: Activity
    now_ns: int
    same_clock: bool


@dataclass(frozen=True, slots=True)
class AppReading:
    """A process in which runtimes are open.

    Attributes:
        now_ns: the moment by the clock of the page's times.
        same_clock: whether this is this process's clock. If not, `now_ns` is the last heartbeat, up to a second ago.
        drivers: its driver processes.
    """

    process: ProcessStat
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
    hidden = _hidden()
    if pid is not None:
        app_page(pid).close()
    try:
        pages, unreadable = of_each_process(find_page)
    except OSError as error:
        problem = f"cannot be read ({error.strerror})" if error.strerror else "shows no processes"
        raise NotReadableError(f"/proc {problem}, and pages are found there; mount a proc file system at /proc") from error
    try:
        apps: list[tuple[FoundPage, ProcessStat, PageView]] = []
        drivers: dict[int, list[DriverReading]] = {}
        for page in pages:
            with suppress(OSError):  # it ended meanwhile
                process = stat_of(page.pid)
                if page.role == "driver":
                    drivers.setdefault(process.parent, []).append(_driver(page, process))
                elif pid in (None, page.pid) and (view := page.read()) is not None:
                    apps.append((page, process, view))
        readings = tuple(_app(page, process, view, drivers.get(page.pid, ())) for page, process, view in apps)
    finally:
        for page in pages:
            page.close()
    if pid is not None and not readings:
        raise NotReadableError(f"process {pid} ended while its page was read; run aionn top to see what is still open")
    if pid is not None:  # what other users run does not matter
        unreadable, hidden = 0, ""
    return Reading(time.monotonic(), tuple(sorted(readings, key=lambda app: app.process.pid)), unreadable, hidden)


def _hidden() -> str:
    """Return the option by which /proc hides processes of other users, if it does and this user is not root."""
    found = ""
    for fields in map(str.split, text_of("/proc/self/mountinfo").splitlines()):
        if len(fields) > 5 and fields[4] == "/proc":  # a later mount covers an earlier one
            options = ",".join((fields[5], fields[-1])).split(",")
            found = next((option for option in options if option.startswith("hidepid=")), "")
    return "" if found in ("hidepid=0", "hidepid=off") or os.geteuid() == 0 else found


def app_page(pid: int, command: str = "top") -> FoundPage:
    """Return the page of an app, to be closed. `command` of aionn asks for it.

    Raises:
        NotReadableError: the process has no page of an app that this user may read.
    """
    try:
        page = find_page(pid)
    except PermissionError as error:
        raise NotReadableError(f"process {pid} belongs to another user; run aionn {command} as that user or as root") from error
    except OSError as error:
        hidden = _hidden()
        unseen = f", or /proc does not show it ({hidden})" if hidden else ""
        raise NotReadableError(f"there is no process {pid}{unseen}; run aionn top to see what is open") from error
    if page is None:
        raise NotReadableError(f"process {pid} has no open aionn runtime of this release; run aionn top to see what is open")
    if page.role == "driver":
        page.close()
        try:
            app = str(stat_of(pid).parent)
        except (OSError, ValueError, IndexError):
            app = "the app's number"
        raise NotReadableError(f"process {pid} is a driver; give the number of its app, --pid {app}")
    return page


def _driver(page: FoundPage, process: ProcessStat) -> DriverReading:
    own_pid = own_pid_of(page.pid, status_of(page.pid))
    return DriverReading(process, own_pid, driver_device(page.pid) or "?", page.activity(), time.monotonic_ns(), _same_clock(page))


def _app(page: FoundPage, process: ProcessStat, view: PageView, drivers: Sequence[DriverReading]) -> AppReading:
    same = _same_clock(page)
    beats = [slot.beat_ns for slot in view.slots if slot.kind is Kind.RUNTIME]
    now_ns = time.monotonic_ns() if same else max(beats, default=0)
    return AppReading(process, view, now_ns, same, tuple(drivers))


def _same_clock(page: FoundPage) -> bool:
    return page.time_namespace == time_namespace_of(os.getpid())


STALLED_S = 5.0
"""A runtime whose event loop has not run for so long is shown as stalled."""

_NS = 1e9


@dataclass(frozen=True, slots=True)
class DeviceFigures:
    """One driver process, or a device whose driver does not run.

    Attributes:
        priority: "low" if the driver only gets CPU time that others leave.
        pid: of the driver, or None if none runs.
        state: "idle", "loading", "compiling", "executing"; or "starting" or "ended" without a driver.
        state_s: for how long, or None if that is not known.
        cpu_percent: 100 is one CPU in full.
        starts: how often a driver of this device was started. restarts: starts after the first.
        rows_per_run: how many requests' rows share a run (`compile(batch=)`), or None if no requests may be joined.
    """

    device: str
    priority: str
    pid: int | None
    state: str
    state_s: float | None
    cpu_percent: float | None
    rss_bytes: int
    threads: int
    starts: int
    restarts: int
    rows_per_run: float | None


@dataclass(frozen=True, slots=True)
class BurstFigures:
    """One burst, or with `path` "single" one connection behind `Compilation.compute` and `Compilation.start`.

    Attributes:
        fps: executions answered per second, or None if no time has passed.
        p50_s, p99_s: of the time from the call to its answer. None without an answer.
        age_p99_s: of the age of a stream's frames when their results were handed out. None without a stream.
        in_flight: requests that have not been answered.
        dropped: frames dropped since the burst was opened, or since its last swap.
        over_s: the time of which `fps` and the percentiles are.
        counters: all counts of the page's slot.
    """

    model: str
    burst: str
    path: str
    device: str
    stage: str
    fps: float | None
    p50_s: float | None
    p99_s: float | None
    age_p99_s: float | None
    in_flight: int
    dropped: int
    over_s: float
    counters: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class RuntimeFigures:
    """One open runtime. Several of one process with the same name are shown as one.

    Attributes:
        count: how many runtimes these are.
        state: as the runtime says, or "stalled" if its event loop has not run for 5 s.
        reason: why it is in that state, or an empty text.
        uptime_s: since it was opened.
        release: of aionn.
        cpu_percent, rss_bytes, threads: of the app's process, which other runtimes may share.
    """

    name: str
    pid: int
    count: int
    state: str
    reason: str
    uptime_s: float
    release: str
    cpu_percent: float | None
    rss_bytes: int
    threads: int
    devices: tuple[DeviceFigures, ...]
    bursts: tuple[BurstFigures, ...]


@dataclass(frozen=True, slots=True)
class Figures:
    """All that is shown.

    Attributes:
        interval_s: the time between the two readings, or None if there is one reading.
        unreadable, hidden: see `Reading`.
    """

    interval_s: float | None
    runtimes: tuple[RuntimeFigures, ...]
    unreadable: int
    hidden: str


def figures(now: Reading, before: Reading | None = None) -> Figures:
    """Compute what is shown from a reading, and from one before it if there is one."""
    earlier = {} if before is None else {(app.process.pid, app.process.start_time): app for app in before.apps}
    interval_s = None if before is None else now.at_s - before.at_s
    runtimes = [one for app in now.apps for one in _runtimes(app, earlier.get((app.process.pid, app.process.start_time)), interval_s)]
    return Figures(interval_s, tuple(runtimes), now.unreadable, now.hidden)


def _runtimes(app: AppReading, before: AppReading | None, interval_s: float | None) -> list[RuntimeFigures]:
    """Return the runtimes of one process, by name."""
    slots = app.view.slots
    named: dict[str, list[SlotView]] = {}
    for slot in slots:
        if slot.kind is Kind.RUNTIME:
            named.setdefault(slot.name, []).append(slot)
    if not named:
        return []
    first = next(iter(named))
    models = {slot.number: slot.name for slot in slots if slot.kind is Kind.COMPILATION}
    earlier = {} if before is None else {slot.number: slot for slot in before.view.slots}
    bursts: dict[str, list[BurstFigures]] = {name: [] for name in named}
    for slot in slots:
        if slot.kind in (Kind.BURST, Kind.SINGLE):
            counted = _burst(slot, earlier.get(slot.number), models.get(slot.parent, ""), app, before)
            if slot.kind is Kind.BURST or counted.in_flight or any(slot.counters.values()):
                bursts[slot.runtime if slot.runtime in named else first].append(counted)
    devices = _devices(app, before, interval_s, list(named))
    return [
        RuntimeFigures(
            name=name,
            pid=app.process.pid,
            count=len(opened),
            state=_state(app, opened)[0],
            reason=_state(app, opened)[1],
            uptime_s=max(0.0, (app.now_ns - min(slot.since_ns for slot in opened)) / _NS),
            release=app.view.release,
            cpu_percent=_cpu_percent(app.process, None if before is None else before.process, interval_s),
            rss_bytes=app.process.resident_bytes,
            threads=app.process.threads,
            devices=tuple(devices[name]),
            bursts=tuple(bursts[name]),
        )
        for name, opened in named.items()
    ]


def _state(app: AppReading, opened: Sequence[SlotView]) -> tuple[str, str]:
    """Return the state of runtimes with one name, and its reason."""
    if app.same_clock:
        silent_s = (app.now_ns - max(slot.beat_ns for slot in opened)) / _NS
        if silent_s > STALLED_S:
            return "stalled", f"its event loop has not run for {silent_s:.0f} s"
    states = list(dict.fromkeys(slot.device for slot in opened if slot.device))
    return ", ".join(states), "; ".join(dict.fromkeys(slot.stage for slot in opened if slot.stage))


def _burst(slot: SlotView, earlier: SlotView | None, model: str, app: AppReading, before: AppReading | None) -> BurstFigures:
    since_ns, base = slot.since_ns, None
    if before is not None:
        since_ns = max(since_ns, before.now_ns)
        # A swap moves the counts elsewhere, so that they begin again from 0.
        base = earlier if earlier is not None and earlier.counters["answered"] <= slot.counters["answered"] else None
    over_s = max(0.0, (app.now_ns - since_ns) / _NS)
    answered = slot.counters["answered"] - (base.counters["answered"] if base else 0)
    calls, ages = _more(slot.call_times, base.call_times if base else ()), _more(slot.ages, base.ages if base else ())
    return BurstFigures(
        model=slot.name or model,
        burst=slot.burst,
        path="burst" if slot.kind is Kind.BURST else "single",
        device=slot.device,
        stage=slot.stage,
        fps=answered / over_s if over_s > 0 else None,
        p50_s=percentile_s(calls, 0.50),
        p99_s=percentile_s(calls, 0.99),
        age_p99_s=percentile_s(ages, 0.99),
        in_flight=slot.in_flight,
        dropped=slot.counters["dropped"],
        over_s=over_s,
        counters=slot.counters,
    )


def _more(now: Sequence[int], before: Sequence[int]) -> Sequence[int]:
    return [more - less for more, less in zip(now, before, strict=True)] if before else now


def _devices(app: AppReading, before: AppReading | None, interval_s: float | None, names: Sequence[str]) -> dict[str, list[DeviceFigures]]:
    """Return the devices of each runtime of a process."""
    found: dict[str, list[DeviceFigures]] = {name: [] for name in names}
    running = {driver.own_pid: driver for driver in app.drivers}
    earlier = {} if before is None else {driver.process.pid: driver.process for driver in before.drivers}

    def shown(slot: SlotView | None, driver: DriverReading | None) -> DeviceFigures:
        starts = max(slot.counters["starts"] if slot else 0, 1 if driver else 0)
        state, state_s = _activity(driver) if driver else ("starting" if slot and slot.pid else "ended", None)
        process = driver.process if driver else None
        return DeviceFigures(
            device=slot.name if slot else driver.device if driver else "?",
            priority=slot.stage if slot else "",
            pid=process.pid if process else None,
            state=state,
            state_s=state_s,
            cpu_percent=_cpu_percent(process, earlier.get(process.pid), interval_s) if process else None,
            rss_bytes=process.resident_bytes if process else 0,
            threads=process.threads if process else 0,
            starts=starts,
            restarts=max(0, starts - 1),
            rows_per_run=driver.activity.joined_rows / driver.activity.joined_runs if driver and driver.activity.joined_runs else None,
        )

    for slot in app.view.slots:
        if slot.kind is Kind.DEVICE and slot.runtime in found:
            driver = running.pop(slot.pid, None)
            if driver is not None or slot.pid or slot.counters["starts"]:
                found[slot.runtime].append(shown(slot, driver))
    for driver in running.values():  # not on the app's page yet
        found[names[0]].append(shown(None, driver))
    return found


def _activity(driver: DriverReading) -> tuple[str, float | None]:
    """Return what a driver does, and for how long."""
    activity: Activity = driver.activity
    if not driver.same_clock or not activity.since_ns:
        return activity.state, None
    return activity.state, max(0.0, (driver.now_ns - activity.since_ns) / _NS)


def _cpu_percent(now: ProcessStat, before: ProcessStat | None, interval_s: float | None) -> float | None:
    if before is not None and interval_s:
        return max(0.0, (now.cpu_s - before.cpu_s) / interval_s * 100)
    return now.cpu_s / now.age_s * 100 if now.age_s > 0 else None


def is_snapshot(arguments: list[str]) -> bool:
    """Return whether a command line asks for one snapshot as JSON, without any other option.

    That is what a monitoring script starts again and again. It takes a third of the time without the imports of the other commands.
    """
    return arguments[:1] == ["top"] and "--json" in arguments and set(arguments[1:]) <= {"--once", "--json"}


def snapshot(pid: int | None, interval_s: float | None) -> Figures:
    """Read once, or twice with an interval between.

    Raises:
        NotReadableError: as `read`.
    """
    before = read(pid)
    if interval_s is None:
        return figures(before)
    time.sleep(interval_s)
    return figures(read(pid), before)


def none_open(shown: Figures) -> str:
    """Return the sentence for when no runtime was found."""
    return f"no aionn runtime is open here{'; ' + not_seen(shown) if not_seen(shown) else ''}"


def not_seen(shown: Figures) -> str:
    """Return what cannot be seen, or an empty text."""
    if shown.hidden:
        return f"/proc hides the processes of other users ({shown.hidden})"
    if not shown.unreadable:
        return ""
    processes = "1 process" if shown.unreadable == 1 else f"{shown.unreadable} processes"
    return f"{processes} of other users cannot be read{'' if os.geteuid() == 0 else '; run aionn top as root to see all'}"
