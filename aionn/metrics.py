"""Metrics of runtimes for Prometheus. They need the extra `aionn[metrics]`, which is prometheus_client.

    Collector   of the runtimes of this process: `prometheus_client.REGISTRY.register(aionn.metrics.Collector())`
    AllRuntimes of all runtimes of this user, whatever their processes: what `aionn metrics` serves

A scrape reads memory. It calls nothing in an event loop and sends nothing to a driver, so any thread may do it. `families` brings sums of
statistics pages into the form of prometheus_client. docs/reference/metrics.md lists the metrics.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING

try:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, InfoMetricFamily
    from prometheus_client.metrics_core import Metric
    from prometheus_client.registry import Collector as _Collector
    from prometheus_client.samples import Sample
    from prometheus_client.utils import floatToGoString
except ImportError as error:
    raise ImportError("aionn.metrics needs prometheus_client; install it with: pip install 'aionn[metrics]'") from error

from aionn.caching.outcomes import MissReason
from aionn.errors import CallerError
from aionn.loopless import leave_in_child
from aionn.pages.app_layout import shown_text
from aionn.pages.totals import MEASURES, OCTAVE_EDGES_S, Measure, OtherPages, OwnPage, Sums, Totals, octaves, seconds_in

if TYPE_CHECKING:
    from aionn.runtime.runtime import Runtime


__all__ = ["LOOK_S", "AllRuntimes", "Collector"]

LOOK_S = 1.0
"""How often to look for processes. One look takes about 25 us for each descriptor that processes of this user have."""

_REASONS = [reason.value for reason in MissReason]

_living: weakref.WeakSet[Collector] = weakref.WeakSet()
_making = threading.Lock()


class Collector(_Collector):
    """Metrics of a runtime of this process, or of all: `prometheus_client.REGISTRY.register(aionn.metrics.Collector())`.

    It holds no runtime. It keeps the statistics page of this process open, so the counts of runtimes that were closed stay. Runtimes of
    one process that have the same name are counted together. A registry takes only one collector, so two collectors need two registries.

    Args:
        runtime: an `aionn.Runtime`, open or not. None: all runtimes of this process, also those that are made later.

    Raises:
        CallerError: another collector has this runtime already. The old one must be unregistered and dropped first.
        MemoryAllocationError: this process has no statistics page.

    Examples:
        >>> prometheus_client.REGISTRY.register(aionn.metrics.Collector(runtime))
        >>> prometheus_client.start_http_server(8000)
    """

    def __init__(self, runtime: Runtime | None = None) -> None:
        self._runtime = None if runtime is None else shown_text(runtime.name)
        with _making:
            for other in _living:
                if None in (self._runtime, other._runtime) or other._runtime == self._runtime:
                    raise CallerError(_refusal(self._runtime, other._runtime))
            self._own = OwnPage()
            _living.add(self)
        self._totals = Totals(_REASONS, self._runtime)
        self._scraping = threading.Lock()
        leave_in_child(self)

    def describe(self) -> list[Metric]:
        """Return nothing, so that registering does not scrape."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics of this moment. Any thread may call it.

        Raises:
            MemoryAllocationError: this process has no statistics page.
        """
        with self._scraping:
            view = self._own.read()
            sums = self._totals.now([(view.pid, view)])
        yield from families(sums)

    def leave(self) -> None:
        """Begin anew in a child of `os.fork`, which may have been made while another thread was scraping."""
        self._scraping = threading.Lock()
        self._totals = Totals(_REASONS, self._runtime)


def _refusal(runtime: str | None, other: str | None) -> str:
    if other is None:
        return "a Collector for all runtimes of this process exists already; use that one"
    if runtime is None:
        return f"runtime {other!r} has a Collector already; make only Collector(), which has all runtimes of this process"
    return f"runtime {runtime!r} has a Collector already; use that one, or give another runtime another name with Runtime(name=)"


class AllRuntimes(_Collector):
    """Metrics of all runtimes that processes of this user have open, or had open while this collector looked.

    Runtimes with the same name are counted together, as those of a web server's workers. The counts of a process that ended stay, also
    if it was killed. A process is missed if it lives only between two looks. So call `look` about every `LOOK_S`.

    Examples:
        >>> everything = aionn.metrics.AllRuntimes()
        >>> registry = prometheus_client.CollectorRegistry()
        >>> registry.register(everything)
    """

    def __init__(self) -> None:
        self._totals = Totals(_REASONS)
        self._pages = OtherPages(self._totals)
        self._looking = threading.Lock()
        self._looked_at = float("-inf")

    def describe(self) -> list[Metric]:
        """Return nothing, so that registering does not scrape."""
        return []

    def look(self) -> None:
        """Find the processes that have come and those that have ended. Any thread may call it."""
        with self._looking:
            self._look()

    def _look(self) -> None:
        self._pages.look()
        self._looked_at = time.monotonic()

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics of this moment. Any thread may call it. Look for processes if the last look was a second ago."""
        with self._looking:
            if time.monotonic() - self._looked_at > LOOK_S:
                self._look()
            else:
                self._pages.retire_ended()
            sums = self._totals.now(self._pages.views())
        yield from families(sums)

    def close(self) -> None:
        """Unmap all pages. Idempotent."""
        with self._looking:
            self._pages.close()


PREFIX = "aionn_"

_TURN = 128
"""So many samples are formatted in about 2 ms."""

_EDGES = tuple(map(floatToGoString, (*OCTAVE_EDGES_S, float("inf"))))


def families(sums: Sums) -> Iterator[Metric]:
    """Yield one family for each measure, in the order of `MEASURES`. One without a sample is left out."""
    for name, measure in MEASURES.items():
        family = _times(name, measure, sums) if measure.kind == "histogram" else _values(name, measure, sums)
        if family.samples:
            family.samples = _Yielding(family.samples)
            yield family


class _Yielding(list[Sample]):
    """Samples that give way to other threads while they are read, one after the other, to be formatted.

    Formatting takes longer than the 5 ms after which Python lets another thread run. So an event loop would be late at each scrape.
    """

    def __iter__(self) -> Iterator[Sample]:
        for number, sample in enumerate(super().__iter__()):
            if number % _TURN == 0:
                time.sleep(0)
            yield sample


def _values(name: str, measure: Measure, sums: Sums) -> Metric:
    name, series = PREFIX + name, sums.values[name]
    if measure.kind == "info":
        info = InfoMetricFamily(name, measure.text, labels=())
        for labels in sorted(series):
            info.add_metric((), dict(zip(measure.labels, labels, strict=True)))
        return info
    family = (CounterMetricFamily if measure.kind == "counter" else GaugeMetricFamily)(name, measure.text, labels=measure.labels)
    for labels, value in sorted(series.items()):
        family.add_metric(labels, value)
    return family


def _times(name: str, measure: Measure, sums: Sums) -> Metric:
    family = HistogramMetricFamily(PREFIX + name, measure.text, labels=measure.labels)
    for labels, (*buckets, total_ns) in sorted(sums.times[name].items()):
        seconds = total_ns / 1e9 if total_ns else seconds_in(buckets)
        family.add_metric(labels, list(zip(_EDGES, octaves(buckets), strict=True)), seconds)
    return family
