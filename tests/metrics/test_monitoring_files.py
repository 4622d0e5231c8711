"""The pages, the dashboard and the alert rules name metrics that exist, with labels that they have."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from aionn.pages.totals import DROPS, ENDS, MEASURES, OUTCOMES, STATUSES

yaml = pytest.importorskip("yaml", reason="PyYAML comes with the extra `docs`")

DOCS = Path(__file__).parents[2] / "docs"
ENDINGS = {"counter": ("_total",), "info": ("_info",), "histogram": ("_bucket", "_count", "_sum"), "gauge": ("",)}
NAMES = {f"aionn_{name}{ending}": measure for name, measure in MEASURES.items() for ending in ENDINGS[measure.kind]}


def check(expression: str) -> set[str]:
    """The metrics that an expression names. Each exists and has the labels that are matched or grouped by."""
    found = set(re.findall(r"\baionn_\w+", expression))
    assert found
    assert found <= NAMES.keys(), found - NAMES.keys()
    labels = {label for name in found for label in NAMES[name].labels} | {"le"}
    used = set(re.findall(r"(\w+)\s*(?:=~|!=|!~|=)\s*\"", expression))
    for group in re.findall(r"\b(?:by|ignoring|on)\s*\(([^)]*)\)", expression):
        used |= set(re.findall(r"\w+", group))
    assert used <= labels, used - labels
    assert expression.count("(") == expression.count(")")
    return found


def rules() -> list[dict[str, Any]]:
    (group,) = yaml.safe_load((DOCS / "monitoring" / "aionn-alerts.yml").read_text(encoding="utf-8"))["groups"]
    return list(group["rules"])


def test_the_alert_rules_are_five_and_name_what_exists() -> None:
    assert len(rules()) == 5
    for rule in rules():
        assert check(rule["expr"])
        assert rule["labels"]["severity"] in ("warning", "critical")
        labels = set(re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"]))
        (grouped, *_) = re.findall(r"by \(([^)]*)\)", rule["expr"])
        assert labels <= set(grouped.split(", "))  # a label that was summed away would be empty


def test_the_values_that_rules_match_exist() -> None:
    values = {"cause": ENDS, "status": tuple(STATUSES), "reason": tuple(DROPS), "outcome": OUTCOMES}
    matched = [match for rule in rules() for match in re.findall(r"(\w+)!?=\"(\w+)\"", rule["expr"])]
    assert len(matched) >= 3
    for label, value in matched:
        assert value in values[label]


def expressions(part: Any) -> Iterator[str]:
    if isinstance(part, dict):
        yield from (part[key] for key in ("expr", "query") if isinstance(part.get(key), str) and "aionn_" in part[key])
        part = list(part.values())
    if isinstance(part, list):
        for inner in part:
            yield from expressions(inner)


def test_the_dashboard_names_what_exists() -> None:
    board = json.loads((DOCS / "monitoring" / "aionn-dashboard.json").read_text(encoding="utf-8"))
    found = set()
    for expression in expressions(board):
        found |= check(expression)
    assert len(found) >= 15
    assert all(panel["targets"] for panel in board["panels"])
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])


def test_the_reference_is_the_code() -> None:
    page = (DOCS / "reference" / "metrics.md").read_text(encoding="utf-8")
    table = page.split("| metric | type |")[1].split("\n\n")[0]
    shown = {
        name: (kind, tuple(re.findall(r"`(\w+)`", labels)), text)
        for name, kind, labels, text in re.findall(r"^\| `(\w+)` \| (\w+) \| ([^|]+) \| ([^|]+) \|$", table, re.MULTILINE)
    }
    endings = {"counter": "_total", "info": "_info"}
    assert shown == {name + endings.get(one.kind, ""): (one.kind, one.labels, one.text) for name, one in MEASURES.items()}


def test_the_reference_names_all_spans() -> None:
    from aionn.otel import SPANS

    page = (DOCS / "reference" / "metrics.md").read_text(encoding="utf-8")
    table = page.split("| span | when |")[1].split("\n\n")[0]
    shown = set()
    for row in re.findall(r"^\| (`aionn[^|]+) \|", table, re.MULTILINE):
        names = re.findall(r"`([\w.]+)`", row)
        shown |= {name if name.startswith("aionn") else names[0].rpartition(".")[0] + name for name in names}
    assert shown == SPANS


def test_the_pages_name_metrics_that_exist() -> None:
    for page in ("how-to/monitoring.md", "reference/metrics.md"):
        text = (DOCS / page).read_text(encoding="utf-8")
        assert set(re.findall(r"\baionn_\w*\w", text)) - {"aionn_"} <= NAMES.keys()
