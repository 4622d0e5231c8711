"""Sums of statistics pages in the form of prometheus_client."""

from __future__ import annotations

import time
from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, InfoMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.samples import Sample
from prometheus_client.utils import floatToGoString

from aionn.pages.measures import MEASURES, OCTAVE_EDGES_S, Measure, Sums, octaves, seconds_in

__all__ = ["PREFIX", "families"]

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
