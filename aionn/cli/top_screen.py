"""`aionn top` at a terminal: a screen of its size that is renewed again and again, and the keys q, s and p.

Invariants
    The terminal has its settings, its cursor and its former content again whenever the process ends or is stopped, except by SIGKILL
    and SIGSTOP. Signals only wake the loop, which leaves the screen first and obeys the signal then.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import termios
import time
import tty
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.segment import Segment
from rich.text import Text

from aionn.cli.top_reading import Figures, NotReadableError, Reading, figures, not_seen, read
from aionn.cli.top_tables import SORTS, content

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
