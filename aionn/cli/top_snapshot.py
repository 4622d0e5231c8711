"""One snapshot of what runs, for programs and for where there is no terminal. Imports neither rich nor what an app needs."""

from __future__ import annotations

import os
import time

from aionn.cli.top_figures import Figures, figures
from aionn.cli.top_reading import read


def is_snapshot(arguments: list[str]) -> bool:
    """Return whether a command line asks for one snapshot as JSON, without any other option.

    That is what a monitoring script starts again and again. It takes a third of the time without the imports of the other commands.
    """
    return arguments[:1] == ["top"] and "--json" in arguments and set(arguments[1:]) <= {"--once", "--json"}


def snapshot(pid: int | None, interval_s: float | None) -> Figures:
    """Read once, or twice with an interval between.

    Raises:
        NotReadableError: as `read`.
    """
    before = read(pid)
    if interval_s is None:
        return figures(before)
    time.sleep(interval_s)
    return figures(read(pid), before)


def none_open(shown: Figures) -> str:
    """Return the sentence for when no runtime was found."""
    return f"no aionn runtime is open here{'; ' + not_seen(shown) if not_seen(shown) else ''}"


def not_seen(shown: Figures) -> str:
    """Return what cannot be seen, or an empty text."""
    if shown.hidden:
        return f"/proc hides the processes of other users ({shown.hidden})"
    if not shown.unreadable:
        return ""
    processes = "1 process" if shown.unreadable == 1 else f"{shown.unreadable} processes"
    return f"{processes} of other users cannot be read{'' if os.geteuid() == 0 else '; run aionn top as root to see all'}"
