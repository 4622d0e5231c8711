"""What `aionn top` prints: a line per runtime with its devices below, then one table of all bursts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from aionn.cli.printing import size
from aionn.cli.top_reading import BurstFigures, DeviceFigures, Figures, RuntimeFigures, none_open
from aionn.escapes import escaped

Row = tuple[RuntimeFigures, BurstFigures]

SORTS: dict[str, Callable[[Row], Any]] = {
    "model": lambda row: (row[1].model, row[1].burst, row[0].pid),
    "fps": lambda row: -(row[1].fps or 0.0),
    "p99": lambda row: -(row[1].p99_s or 0.0),
    "age": lambda row: -(row[1].age_p99_s or 0.0),
    "queue": lambda row: -row[1].in_flight,
    "drops": lambda row: -row[1].dropped,
}
"""By the name of an order, the key that sorts bursts."""

_STYLES = {"serving": "green", "degraded": "yellow", "stalled": "bold red", "closing": "dim", "executing": "green", "ended": "red"}


def content(shown: Figures, sort: str = "model") -> Group:
    """Return everything that is shown of the runtimes. Names that do not fit into the terminal are cut."""
    if not shown.runtimes:
        return Group(Text(none_open(shown)))
    parts: list[Any] = []
    for runtime in shown.runtimes:
        parts.append(_header(runtime))
        if runtime.devices:
            parts.append(_devices(runtime.devices))
    rows = sorted(((runtime, burst) for runtime in shown.runtimes for burst in runtime.bursts), key=SORTS[sort])
    if rows:
        parts += [Text(), _bursts(rows, len(shown.runtimes) > 1)]
    return Group(*parts)


def _header(runtime: RuntimeFigures) -> Text:
    text = Text(no_wrap=True, overflow="ellipsis")
    text.append(escaped(runtime.name, one_line=True) or "(no name)", style="bold")
    text.append(f" ×{runtime.count}" if runtime.count > 1 else "")
    text.append(f"  pid {runtime.pid}  ")
    text.append(escaped(runtime.state, one_line=True), style=_STYLES.get(runtime.state, ""))
    text.append(f" ({escaped(runtime.reason, one_line=True)})" if runtime.reason else "")
    text.append(
        f"  up {_long(runtime.uptime_s)}  CPU {_percent(runtime.cpu_percent)}  {size(runtime.rss_bytes)}  {runtime.threads} threads"
    )
    return text


def _table(columns: Sequence[str]) -> Table:
    """Return an empty table. A column whose name ends with ">" holds numbers, which are never cut."""
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    for column in columns:
        numbers = column.endswith(">")
        table.add_column(column.rstrip(">"), justify="right" if numbers else "left", no_wrap=numbers)
    return table


def _cell(text: str, style: str = "") -> Text:
    return Text(escaped(text, one_line=True), style=style, no_wrap=True, overflow="ellipsis")  # plain, because names may hold brackets


def _devices(devices: Sequence[DeviceFigures]) -> Table:
    table = _table(["  device", "pid>", "CPU>", "memory>", "threads>", "restarts>", "doing"])
    for one in devices:
        since = "" if one.state_s is None else f" {_short(one.state_s)}"
        table.add_row(
            _cell(f"  {one.device}{' (low priority)' if one.priority == 'low' else ''}"),
            "-" if one.pid is None else str(one.pid),
            _percent(one.cpu_percent),
            size(one.rss_bytes) if one.pid is not None else "-",
            str(one.threads) if one.pid is not None else "-",
            str(one.restarts),
            _cell(one.state + since, _STYLES.get(one.state, "")),
        )
    return table


def _bursts(rows: Sequence[Row], several: bool) -> Table:
    table = _table([*(["runtime"] if several else []), "model", "burst", "stage", "fps>", "p50>", "p99>", "age>", "queue>", "drops>"])
    for runtime, burst in rows:
        table.add_row(*_burst_cells(runtime, burst, several))
    return table


def _burst_cells(runtime: RuntimeFigures, burst: BurstFigures, several: bool) -> Iterator[Text | str]:
    if several:
        yield _cell(f"{runtime.name} {runtime.pid}" if runtime.name else str(runtime.pid))
    yield _cell(burst.model or "-")
    yield _cell("compute()" if burst.path == "single" else burst.burst or "-")
    yield _cell(burst.stage or burst.device or "-")
    yield "-" if burst.fps is None else f"{burst.fps:.1f}" if burst.fps < 1000 else f"{burst.fps:.0f}"
    for seconds in (burst.p50_s, burst.p99_s, burst.age_p99_s):
        yield "-" if seconds is None else _short(seconds)
    yield str(burst.in_flight)
    yield str(burst.dropped)


def _percent(percent: float | None) -> str:
    return "-" if percent is None else f"{percent:.0f} %"


def _short(seconds: float) -> str:
    """Return a duration in at most six characters, such as "812us", "3.2ms", "1.25s", "12min"."""
    if seconds < 0.9995e-3:
        return f"{seconds * 1e6:.0f}us"
    if seconds < 0.9995:
        return f"{seconds * 1e3:.{1 if seconds < 0.09995 else 0}f}ms"
    if seconds < 99.95:
        return f"{seconds:.{2 if seconds < 9.995 else 1}f}s"
    return _long(seconds)


def _long(seconds: float) -> str:
    """Return a time for which something has been there, such as "12s", "5min", "3h"."""
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f}{unit}"
    return f"{seconds:.0f}s"
