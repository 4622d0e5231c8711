"""`aionn top`: what runs on this machine, from the statistics pages of all processes of this user.

Nothing is sent to the processes that are shown, and nothing of theirs runs for it.

`top_reading` reads pages and /proc at one moment, and computes what is shown. Here are the tables (`content`: a line per runtime with its
devices below, then one table of all bursts), and the screen of a terminal, which is renewed again and again, with the keys q, s and p.

Invariants
    The terminal has its settings, its cursor and its former content again whenever the process ends or is stopped, except by SIGKILL
    and SIGSTOP. Signals only wake the loop, which leaves the screen first and obeys the signal then.
"""

from __future__ import annotations

import math
import os
import select
import signal
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.live import Live
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from aionn.cli.printing import NotDoneError, UsageError, print_json, print_plainly, size
from aionn.cli.top_reading import (
    BurstFigures,
    DeviceFigures,
    Figures,
    NotReadableError,
    Reading,
    RuntimeFigures,
    figures,
    none_open,
    not_seen,
    read,
    snapshot,
)
from aionn.escapes import escaped

_LEAST_INTERVAL_S, _USUAL_INTERVAL_S = 0.1, 1.0


def show_top(pid: int | None, interval_s: float | None, *, once: bool, as_json: bool) -> None:
    """Show what runs: once, or again and again at a terminal.

    Raises:
        UsageError: the interval is not a time.
        NotDoneError: no page can be read, or not that of `pid`.
    """
    if interval_s is not None and not (math.isfinite(interval_s) and interval_s >= _LEAST_INTERVAL_S):
        raise UsageError(f"--interval {interval_s:g} is not a time that can be shown; give a number of seconds from {_LEAST_INTERVAL_S} on")
    console = Console(highlight=False)
    try:
        if as_json:
            print_json(asdict(snapshot(pid, interval_s)))
        elif once or not console.is_terminal or console.is_dumb_terminal:
            _print(snapshot(pid, interval_s), console)
        else:
            show_screen(pid, interval_s or _USUAL_INTERVAL_S)
    except NotReadableError as error:
        raise NotDoneError(str(error)) from error


def _print(shown: Figures, console: Console) -> None:
    if sys.stdout.isatty():
        console.print(content(shown))
    else:
        print_plainly(content(shown))
    if shown.runtimes and not_seen(shown):
        print(not_seen(shown))


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
        joined = "" if one.rows_per_run is None else f", {one.rows_per_run:.1f} rows/run"
        table.add_row(
            _cell(f"  {one.device}{' (low priority)' if one.priority == 'low' else ''}"),
            "-" if one.pid is None else str(one.pid),
            _percent(one.cpu_percent),
            size(one.rss_bytes) if one.pid is not None else "-",
            str(one.threads) if one.pid is not None else "-",
            str(one.restarts),
            _cell(one.state + since + joined, _STYLES.get(one.state, "")),
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


_WAKING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGTSTP, signal.SIGCONT, signal.SIGWINCH)


@dataclass
class _Shown:
    """What the screen shows, and how. Survives a stop of the process.

    Attributes:
        quit: whether the user wants to leave. ended: a sentence, once the process that is watched has ended.
        signal: the signal to obey behind the screen, or 0.
    """

    pid: int | None
    interval_s: float
    sort: str = "model"
    paused: bool = False
    figures: Figures | None = None
    before: Reading | None = None
    quit: bool = False
    ended: str = ""
    signal: int = 0

    @property
    def left(self) -> bool:
        """Whether the screen is to be left."""
        return self.quit or bool(self.ended) or self.signal != 0

    def renew(self) -> None:
        """Read anew. Sets `ended` if the one process that is watched has ended."""
        try:
            now = read(self.pid)
        except NotReadableError as error:
            if self.before is None:
                raise
            self.ended = f"the runtime was closed or its process ended: {error}"
            return
        self.figures, self.before = figures(now, self.before), now

    def press(self, key: str) -> None:
        """Do what a key means."""
        if key in ("q", "Q"):
            self.quit = True
        elif key in ("s", "S"):
            orders = list(SORTS)
            self.sort = orders[(orders.index(self.sort) + 1) % len(orders)]
        elif key in ("p", "P"):
            self.paused = not self.paused

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Render what fits on the screen, the title first and the keys last."""
        if self.figures is None:
            return
        shown, height, width = self.figures, console.size.height, console.size.width
        lines = console.render_lines(content(shown, self.sort), options.update(width=width, height=None), pad=False)
        room = max(1, height - 3)
        hidden = len(lines) - room if len(lines) > room else 0
        yield _line(self._title(shown), "reverse", width)
        for line in lines[: room - 1 if hidden else room]:
            yield from line
            yield Segment.line()
        for _ in range(room - len(lines)):
            yield Segment.line()
        if hidden:
            yield _line(f"{hidden + 1} more lines; make the terminal taller, or sort", "dim", width)
        yield Text(f"q quit   s sort: {self.sort}   p {'go on (paused)' if self.paused else 'pause'}"[:width], style="dim", end="")

    def _title(self, shown: Figures) -> str:
        over = "averages since opened" if shown.interval_s is None else f"over {shown.interval_s:.1f} s"
        parts = [time.strftime("%H:%M:%S"), over, not_seen(shown) if shown.runtimes else ""]
        return f"aionn top  {', '.join(filter(None, parts))}"


def _line(text: str, style: str, width: int) -> Text:
    return Text(text[:width].ljust(width), style=style)


def show_screen(pid: int | None, interval_s: float) -> None:
    """Show what runs until the user quits or the process `pid` ends.

    Raises:
        NotReadableError: as `read`, at the beginning.
    """
    shown = _Shown(pid, interval_s)
    shown.renew()
    while not shown.quit and not shown.ended:
        shown.signal = 0
        console = Console(highlight=False)
        with _woken_by_signals() as woken, _keys() as keyboard, Live(shown, console=console, screen=True, auto_refresh=False) as live:
            _follow(shown, live, keyboard, woken)
        if shown.signal:
            # The handlers are those from before, so the signal does what it always does. After SIGTSTP this goes on with SIGCONT.
            os.kill(os.getpid(), shown.signal)
    if shown.ended:
        print(shown.ended)


def _follow(shown: _Shown, live: Live, keyboard: int | None, woken: int) -> None:
    """Renew the screen until the screen is to be left."""
    due_s = time.monotonic() + shown.interval_s
    live.refresh()
    while not shown.left:
        watched = [woken] if keyboard is None else [woken, keyboard]
        ready, _, _ = select.select(watched, [], [], max(0.0, due_s - time.monotonic()))
        if woken in ready:
            _obey(shown, os.read(woken, 64))
        if keyboard in ready:
            keys = _read_keys(keyboard)
            for key in keys or "q":  # no keys: the terminal has gone
                shown.press(key)
        if not shown.left and not ready:
            due_s = max(due_s + shown.interval_s, time.monotonic())
            if not shown.paused:
                shown.renew()
        if not shown.left:
            live.refresh()


def _obey(shown: _Shown, numbers: bytes) -> None:
    """Leave the screen for a signal, and enter it anew after SIGCONT, because a shell may have changed the terminal's settings."""
    for number in numbers:
        if number != signal.SIGWINCH:
            shown.signal = number


def _read_keys(keyboard: int) -> str:
    try:
        return os.read(keyboard, 64).decode(errors="replace")
    except OSError:
        return ""


@contextmanager
def _keys() -> Iterator[int | None]:
    """Let keys be read one by one and unseen during the body. Returns the keyboard's descriptor, or None if stdin is not a terminal."""
    if sys.stdin is None or not sys.stdin.isatty():
        yield None
        return
    keyboard = sys.stdin.fileno()
    before = termios.tcgetattr(keyboard)
    try:
        tty.setcbreak(keyboard)
        yield keyboard
    finally:
        with suppress(termios.error):  # the terminal has gone
            termios.tcsetattr(keyboard, termios.TCSADRAIN, before)


@contextmanager
def _woken_by_signals() -> Iterator[int]:
    """Turn signals into bytes during the body: their numbers come out of the descriptor that is returned."""
    reading, writing = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    handlers = {}
    before = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    try:
        for number in _WAKING:
            handlers[number] = signal.signal(number, lambda *_: None)
        yield reading
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(before)
        os.close(reading)
        os.close(writing)
