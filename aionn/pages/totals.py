"""Sums over pages that come and go. What a process had counted when it ended stays in the sums, so no counter falls at a restart.

    Totals      adds up what pages show, and keeps what ended pages had shown
    OwnPage     the page of this process, open and mapped as long as its counts are wanted
    OtherPages  the pages of all processes of this user, each mapped until its process ends or closes it

Memory that is mapped stays readable after the death of its writer. So the last counts of a process that SIGKILL ended are not lost,
if the process was found before. A page that closes leaves all its last values in the memory.

Invariants
    A page counts once: while it is open among the views that `Totals.now` is given, and after its end among the retired sums.
    Each class has one caller at a time. Its owner holds a lock if it has several threads.

What pages show are numbers with names and labels, which exporters give to monitoring systems. `MEASURES` lists all there is. `add_page`
adds what one page shows to `Sums`, where the same labels add up.

Invariants
    A counter or a histogram of one page never falls for the same labels, because what a slot counts moves to a slot with the same texts.
    Each measure has at most `MOST_SERIES` sets of labels. Further ones are counted in a common set, in which every label is "other".
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

from aionn.errors import MemoryAllocationError
from aionn.pages import layout
from aionn.pages.app_layout import STAGE_STATES, Kind, PageView, SlotView
from aionn.pages.app_page import AppPage, close_page, open_page
from aionn.pages.finding import FoundPage, find_page
from aionn.pages.page import start_time_of
from aionn.pages.process_use import child_with_pid, of_each_process, stat_of


class Totals:
    """What pages show together, and have shown."""

    def __init__(self, reasons: Sequence[str], runtime: str | None = None) -> None:
        """`reasons`: values of `MissReason` in their order. `runtime`: name of the one that counts, or None for all."""
        self._reasons, self._runtime = reasons, runtime
        self._names = Names()
        self._retired = Sums()
        self._cpu: dict[tuple[int, int], tuple[tuple[str, str], float]] = {}

    def add_ended(self, view: PageView) -> None:
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
                        stat, where = stat_of(driver), (self._names.shown("runtime", runtime), device)
                        self._cpu[driver, stat.start_time] = where, stat.cpu_s
                        open_fds = len(os.listdir(f"/proc/{driver}/fd"))
                        sums.add("driver_resident_memory_bytes", where, stat.resident_bytes)
                        sums.add("driver_threads", where, stat.threads)
                        sums.add("driver_open_fds", where, open_fds)
        for process, (where, cpu_s) in list(self._cpu.items()):
            sums.add("driver_cpu_seconds", where, cpu_s)
            if not _lives(*process):
                del self._cpu[process]
                self._retired.add("driver_cpu_seconds", where, cpu_s)
        return sums

    def _add(self, sums: Sums, view: PageView) -> None:
        add_page(sums, view, self._names, self._reasons, self._runtime)


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
                    self._totals.add_ended(view)

    def look(self) -> None:
        """Retire the pages that have ended, and map those that are new. This reads the descriptors of all processes of this user."""
        self.retire_ended()
        known = {mapped.page.pid for mapped in self._mapped.values()}
        for found in of_each_process(lambda pid: None if pid in known else _Mapped.of(pid))[0]:
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


MOST_SERIES = 2000
MOST_NAMES: Mapping[str, int] = {"runtime": 64, "model": 64, "burst": 256}
"""So many names of each kind are shown: of models and bursts for one runtime."""

Labels = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Measure:
    """One kind of number.

    Attributes:
        kind: "counter", "gauge", "histogram" or "info". A gauge may rise and fall, and an info is always 1.
        labels: names of its labels, in their order.
        text: what it says, in one sentence.
        highest: of a gauge that several pages have with the same labels, the highest is shown. Else their sum.
    """

    kind: Literal["counter", "gauge", "histogram", "info"]
    labels: Labels
    text: str
    highest: bool = False


_EXECUTION = ("runtime", "model", "device", "stage")
_CONNECTION = ("runtime", "model", "device")
_STREAM = ("runtime", "model", "burst")
_DEVICE = ("runtime", "device")

MEASURES: Mapping[str, Measure] = {
    "build": Measure("info", ("version",), "Releases of aionn that run."),
    "driver": Measure("info", (*_DEVICE, "type", "version"), "Engines of the driver processes that run, with their versions."),
    "executions": Measure("counter", (*_EXECUTION, "path", "status"), "Calls that ended, by how they ended."),
    "execution_seconds": Measure("histogram", _EXECUTION, "Time from a call to its answer."),
    "device_seconds": Measure("histogram", _EXECUTION, "Time for which a driver was busy with one execution."),
    "frames_dropped": Measure("counter", (*_STREAM, "reason"), "Frames of streams that were never answered."),
    "frame_age_seconds": Measure("histogram", _STREAM, "Age of a stream's frames when their results were handed out."),
    "in_flight": Measure("gauge", _CONNECTION, "Requests that were sent and not answered yet."),
    "bursts": Measure("gauge", _CONNECTION, "Open bursts."),
    "frames_free": Measure("gauge", _CONNECTION, "Pieces of shared memory that are free for the next request."),
    "shared_memory_bytes": Measure("gauge", _CONNECTION, "Shared memory of bursts."),
    "copied_bytes": Measure("counter", _CONNECTION, "Bytes of inputs that were copied into shared memory."),
    "joined_runs": Measure("counter", _CONNECTION, "Engine runs for bursts of compilations with `batch=`."),
    "joined_rows": Measure("counter", _CONNECTION, "Rows in these runs. Divided by the runs: how many requests share one."),
    "compilations": Measure("counter", (*_DEVICE, "outcome", "reason"), "Compilations that ended, by what the cache had for them."),
    "compilation_seconds": Measure("histogram", _DEVICE, "Time that a compilation took, also from the cache."),
    "compiling": Measure("gauge", _DEVICE, "Compilations that are under way."),
    "driver_up": Measure("gauge", _DEVICE, "Driver processes that run."),
    "driver_starts": Measure("counter", _DEVICE, "Driver processes that were started."),
    "driver_ends": Measure("counter", (*_DEVICE, "cause"), "Driver processes that ended, by the cause."),
    "driver_resident_memory_bytes": Measure("gauge", _DEVICE, "Physical memory of driver processes."),
    "driver_cpu_seconds": Measure("counter", _DEVICE, "CPU time of driver processes. Of one that ended, as of the last look."),
    "driver_threads": Measure("gauge", _DEVICE, "Threads of driver processes."),
    "driver_open_fds": Measure("gauge", _DEVICE, "Open file descriptors of driver processes."),
    "stage_state": Measure("gauge", ("runtime", "model", "stage", "state"), "1 for the state in which a stage is, and 0 for others.", True),
    "stage_transitions": Measure("counter", ("runtime", "model", "stage", "state"), "How often a stage entered a state."),
    "stage_swap_seconds": Measure("histogram", ("runtime", "model", "stage"), "Time that a swap to a stage took."),
    "cache_bytes": Measure("gauge", ("runtime", "cache"), "Size of a cache directory's entries.", True),
    "cache_entries": Measure("gauge", ("runtime", "cache"), "Entries of a cache directory.", True),
    "cache_refused": Measure("counter", ("runtime", "cache", "reason"), "Cache entries that were refused."),
    "cache_evicted": Measure("counter", ("runtime", "cache"), "Cache entries that were removed for want of room."),
    "statistics_slots_lost": Measure("counter", (), "How often a statistics page had no room. Such counts have the model 'other'."),
}

STATUSES: Mapping[str, str] = {
    "ok": "computed",
    "execution": "failed",
    "deadline": "late",
    "caller": "refused",
    "driver_died": "died",
    "driver_hung": "hung",
}
"""The counter behind each value of the label `status`."""

ENDS = ("exit", "signal", "hung", "protocol", "closed")
OUTCOMES = ("hit", "miss", "declined", "no_cache", "failed")
DROPS: Mapping[str, str] = {"replaced": "dropped_replaced", "late": "dropped_late", "rejected": "dropped_rejected"}

_PATHS = {Kind.BURST: "burst", Kind.SINGLE: "single", Kind.PAST_BURSTS: "burst", Kind.PAST_SINGLES: "single"}

OCTAVE_EDGES_S = tuple(2.0**power for power in range(-18, 5))
"""Upper edges in seconds of the classic buckets, apart from infinity."""


def octaves(buckets: Sequence[int]) -> list[int]:
    """Return how many durations lie below each of `OCTAVE_EDGES_S`, and then all. `buckets`: those of a page."""
    counts, below = [], buckets[0]
    for first in range(1, layout.BUCKETS, 4):
        counts.append(below)
        below += sum(buckets[first : first + 4])
    return [*counts, below]


def _middle_ns(bucket: int) -> int:
    """Return the middle of a bucket in ns. The last bucket has no middle, so it is taken by its lower edge."""
    if bucket == layout.BUCKETS - 1:
        return round(layout.longest_in_bucket_s(bucket - 1) * 1e9)
    below = layout.longest_in_bucket_s(bucket - 1) if bucket else 0.0
    return round((below + layout.longest_in_bucket_s(bucket)) / 2 * 1e9)


_MIDDLES_NS = [_middle_ns(bucket) for bucket in range(layout.BUCKETS)]


def seconds_in(buckets: Sequence[int]) -> float:
    """Return about how long the durations of a histogram took together. The error is at most an eighth."""
    return sum(count * ns for count, ns in zip(buckets, _MIDDLES_NS, strict=True) if count) / 1e9


class Names:
    """Names that are shown. A name that comes when there are too many of its kind is shown as "other", and a burst's as ""."""

    def __init__(self) -> None:
        self._shown: dict[tuple[str, str], set[str]] = {}

    def shown(self, kind: str, name: str, runtime: str = "") -> str:
        """Return the name, or the common one. `kind`: a key of `MOST_NAMES`."""
        names = self._shown.setdefault((kind, runtime), set())
        if name and name not in names:
            if len(names) >= MOST_NAMES[kind]:
                return "" if kind == "burst" else "other"
            names.add(name)
        return name


class Sums:
    """Numbers by measure and labels.

    Attributes:
        values: counters, gauges and infos.
        times: histograms with the page's buckets, and behind them all seconds in ns where they are known, else 0.
    """

    def __init__(self) -> None:
        self.values: dict[str, dict[Labels, float]] = {name: {} for name, one in MEASURES.items() if one.kind != "histogram"}
        self.times: dict[str, dict[Labels, list[int]]] = {name: {} for name, one in MEASURES.items() if one.kind == "histogram"}

    def add(self, measure: str, labels: Labels, value: float) -> None:
        """Add to a counter or a gauge. An info becomes 1, and of some gauges the highest value stays."""
        of, what = self.values[measure], MEASURES[measure]
        if labels not in of and len(of) >= MOST_SERIES:
            labels = ("other",) * len(labels)
        before = of.get(labels, 0)
        of[labels] = 1 if what.kind == "info" else max(before, value) if what.highest else before + value

    def add_times(self, measure: str, labels: Labels, buckets: Sequence[int], total_ns: int = 0) -> None:
        """Add a histogram. `total_ns`: all its durations together, where that is known."""
        of = self.times[measure]
        if labels not in of and len(of) >= MOST_SERIES:
            labels = ("other",) * len(labels)
        before = of.get(labels)
        of[labels] = [*buckets, total_ns] if before is None else [a + b for a, b in zip(before, (*buckets, total_ns), strict=True)]

    def add_all(self, other: Sums, *, lasting: bool = False) -> None:
        """Add all of other sums. With `lasting` only what lasts when a process has ended: its counters and histograms."""
        for measure, series in other.values.items():
            if not lasting or MEASURES[measure].kind == "counter":
                for labels, value in series.items():
                    self.add(measure, labels, value)
        for measure, times in other.times.items():
            for labels, buckets in times.items():
                self.add_times(measure, labels, buckets[:-1], buckets[-1])


def add_page(sums: Sums, view: PageView, names: Names, reasons: Sequence[str], runtime: str | None = None) -> None:
    """Add what a page shows.

    Args:
        reasons: values of `MissReason` in their order.
        runtime: name of the one runtime to add, or None for all. What found no room on the page is added in any case.
    """
    sums.add("build", (view.release,), 1)
    sums.add("statistics_slots_lost", (), view.slots_lost)
    by_number = {slot.number: slot for slot in view.slots}
    for slot in view.slots:
        owner, model = _owner(slot, by_number)
        if runtime is not None and owner != runtime and slot.kind is not Kind.OTHER:
            continue
        shown = names.shown("runtime", owner)
        if slot.kind is Kind.DEVICE:
            _add_device(sums, slot, (shown, slot.name), reasons)
        elif slot.kind is Kind.STAGE:
            _add_stage(sums, slot, (shown, names.shown("model", slot.name, owner), slot.stage))
        elif slot.kind is Kind.CACHE:
            _add_cache(sums, slot, (shown, slot.name), reasons)
        elif slot.kind in _PATHS or slot.counters["sent"] or slot.counters["computed"]:
            # Runtimes and compilations count nothing themselves, and "other" only what found no room.
            _add_executions(sums, slot, shown, names.shown("model", model, owner), names.shown("burst", slot.burst, owner))


def drivers_on(view: PageView, runtime: str | None = None) -> Iterator[tuple[int, str, str]]:
    """Yield pid, runtime and device of each driver that runs: of one runtime by its name, or of all."""
    for slot in view.slots:
        if slot.kind is Kind.DEVICE and slot.pid and runtime in (None, slot.runtime):
            yield slot.pid, slot.runtime, slot.name


def _owner(slot: SlotView, by_number: Mapping[int, SlotView]) -> tuple[str, str]:
    """Return the names of the runtime and of the model to which a slot belongs."""
    if slot.kind is Kind.OTHER:
        return "", "other"
    if slot.kind is Kind.RUNTIME:
        return slot.name, ""
    parent = by_number.get(slot.parent)
    if slot.runtime or parent is None or parent.kind is Kind.OTHER:
        return slot.runtime, slot.name
    runtime, model = _owner(parent, by_number)
    return runtime, slot.name or model


def _add_executions(sums: Sums, slot: SlotView, runtime: str, model: str, burst: str) -> None:
    counters, path = slot.counters, _PATHS.get(slot.kind, "other")
    where = (runtime, model, "" if slot.kind is Kind.RUNTIME else slot.device, slot.stage)
    for status, counter in STATUSES.items():
        sums.add("executions", (*where, path, status), counters[counter])
    sums.add_times("execution_seconds", where, slot.call_times)
    sums.add_times("device_seconds", where, slot.service_times, counters["driver_busy_ns"])
    on = where[:3]
    sums.add("copied_bytes", on, counters["copied_bytes"])
    if counters["joined_runs"]:
        sums.add("joined_runs", on, counters["joined_runs"])
        sums.add("joined_rows", on, counters["joined_rows"])
    if slot.kind in (Kind.BURST, Kind.SINGLE):
        sums.add("in_flight", on, slot.in_flight)
        sums.add("bursts", on, slot.kind is Kind.BURST)
        sums.add("shared_memory_bytes", on, slot.gauges[0])
        sums.add("frames_free", on, slot.gauges[1])
    if counters["dropped"] or any(slot.ages):  # other bursts have had no stream, and each would have many lines
        stream = (runtime, model, burst)
        sums.add_times("frame_age_seconds", stream, slot.ages)
        for reason, counter in DROPS.items():
            sums.add("frames_dropped", (*stream, reason), counters[counter])
        if others := counters["dropped"] - sum(counters[counter] for counter in DROPS.values()):
            sums.add("frames_dropped", (*stream, "other"), max(0, others))


def _add_device(sums: Sums, slot: SlotView, where: Labels, reasons: Sequence[str]) -> None:
    counters = slot.counters
    sums.add("driver_up", where, slot.pid != 0)
    if slot.pid and slot.device:
        sums.add("driver", (*where, slot.device, slot.burst), 1)  # its type and version
    sums.add("driver_starts", where, counters["starts"])
    for cause in ENDS:
        sums.add("driver_ends", (*where, cause), counters[cause])
    sums.add("compiling", where, slot.gauges[0])
    sums.add_times("compilation_seconds", where, slot.call_times)
    for outcome in OUTCOMES:
        if outcome != "miss":
            sums.add("compilations", (*where, outcome, ""), counters[outcome])
    for reason, count in zip(reasons, slot.reasons, strict=False):
        if count:  # every miss has a reason
            sums.add("compilations", (*where, "miss", reason), count)


def _add_stage(sums: Sums, slot: SlotView, where: Labels) -> None:
    for state in STAGE_STATES:
        sums.add("stage_state", (*where, state), slot.device == state)
        sums.add("stage_transitions", (*where, state), slot.counters[state])
    sums.add_times("stage_swap_seconds", where, slot.call_times)


def _add_cache(sums: Sums, slot: SlotView, where: Labels, reasons: Sequence[str]) -> None:
    sums.add("cache_bytes", where, slot.gauges[0])
    sums.add("cache_entries", where, slot.gauges[1])
    sums.add("cache_evicted", where, slot.counters["evicted"])
    for reason, count in zip(reasons, slot.reasons, strict=False):
        if count:
            sums.add("cache_refused", (*where, reason), count)
