"""What `aionn top` shows, computed from one reading or from two. No I/O.

From two readings, rates and percentiles are those of the time between them. From one reading, they are averages since each burst was
opened, and CPU is the average since the process started.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from aionn.cli.top_reading import AppReading, DriverReading, ProcessReading, Reading
from aionn.pages.app_layout import Kind, SlotView
from aionn.pages.layout import Activity, percentile_s

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
    earlier = {} if before is None else {(app.process.pid, app.start_time): app for app in before.apps}
    interval_s = None if before is None else now.at_s - before.at_s
    runtimes = [one for app in now.apps for one in _runtimes(app, earlier.get((app.process.pid, app.start_time)), interval_s)]
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
            rss_bytes=app.process.rss_bytes,
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
    running = {driver.process.own_pid: driver for driver in app.drivers}
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
            rss_bytes=process.rss_bytes if process else 0,
            threads=process.threads if process else 0,
            starts=starts,
            restarts=max(0, starts - 1),
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


def _cpu_percent(now: ProcessReading, before: ProcessReading | None, interval_s: float | None) -> float | None:
    if before is not None and interval_s:
        return max(0.0, (now.cpu_s - before.cpu_s) / interval_s * 100)
    return now.cpu_s / now.age_s * 100 if now.age_s > 0 else None
