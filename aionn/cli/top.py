"""`aionn top`: what runs on this machine, from the statistics pages of all processes of this user.

Nothing is sent to the processes that are shown, and nothing of theirs runs for it.

    top_reading   reads pages and /proc at one moment
    top_figures   computes rates and percentiles from one reading or two (no I/O)
    top_snapshot  one snapshot, as JSON values
    top_tables    the tables
    top_screen    the screen of a terminal, and its keys
"""

from __future__ import annotations

import math
import sys
from dataclasses import asdict

from rich.console import Console

from aionn.cli.printing import NotDoneError, UsageError, print_json, print_plainly
from aionn.cli.top_reading import Figures, NotReadableError, not_seen, snapshot
from aionn.cli.top_screen import show_screen
from aionn.cli.top_tables import content

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
