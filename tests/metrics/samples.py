"""What a scrape says, for tests: samples by name and labels, read by the parser of prometheus_client."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families


def families(text: str) -> dict[str, Metric]:
    """The families of an exposition, by name. No name comes twice."""
    found = list(text_string_to_metric_families(text))
    names = [family.name for family in found]
    assert len(names) == len(set(names))
    return dict(zip(names, found, strict=True))


def scrape(registry: CollectorRegistry) -> str:
    return generate_latest(registry).decode()


def values(metrics: Iterable[Metric], name: str, **labels: str) -> dict[tuple[tuple[str, str], ...], float]:
    """The samples of that name that have these labels, by their other labels."""
    found = {}
    for metric in metrics:
        for sample in metric.samples:
            if sample.name == name and labels.items() <= sample.labels.items():
                found[tuple(sorted(set(sample.labels.items()) - set(labels.items())))] = sample.value
    return found


def value(metrics: Iterable[Metric], name: str, **labels: str) -> float:
    """The sum of those samples. There is at least one."""
    found = values(metrics, name, **labels)
    assert found, (name, labels)
    return sum(found.values())
