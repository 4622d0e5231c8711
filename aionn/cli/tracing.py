"""`aionn trace`: trace a running app and its drivers from outside, and write what was recorded to a file."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from aionn.cli.printing import NotDoneError, UsageError, duration, print_json
from aionn.cli.top_reading import NotReadableError, app_page
from aionn.escapes import escaped
from aionn.pages.layout import LayoutError
from aionn.pages.record_reader import READ_S, RecordReader
from aionn.trace.events import Recorded
from aionn.trace.file import write

MOST_SECONDS = 3600


def trace_process(pid: int, seconds: float, path: str, as_json: bool) -> None:
    """Trace a process for some seconds, write the file, and print what it holds. Ctrl-C ends the trace early.

    Raises:
        UsageError: the process cannot be traced, or an argument is wrong.
        NotDoneError: the process has no drivers that could be traced, or it ended before anything was recorded.
    """
    if not 0 < seconds <= MOST_SECONDS:
        raise UsageError(f"--seconds {seconds} is not a number of seconds above 0; give one up to {MOST_SECONDS}")
    check_output("-o", path)
    try:
        page = app_page(pid, "trace")
    except NotReadableError as error:
        raise UsageError(str(error)) from error
    began_ns = time.monotonic_ns()
    try:
        collector = RecordReader(page)
    except (OSError, LayoutError) as error:
        raise NotDoneError(f"process {pid} ended before it could be traced: {error}") from error
    pause_s = READ_S
    try:
        while time.monotonic_ns() < began_ns + seconds * 1e9 and os.path.exists(f"/proc/{pid}"):
            time.sleep(pause_s)
            pause_s = collector.read()
    except KeyboardInterrupt:
        pass  # what was read is written
    finally:
        harvest = collector.close()
    traced_s = (time.monotonic_ns() - began_ns) / 1e9
    recorded = Recorded()
    harvest.add_to(recorded)
    write(path, recorded)
    _print(recorded, pid, path, traced_s, as_json)


def check_output(option: str, path: str) -> None:
    """Check that a trace can be written, before the work that is traced.

    Raises:
        UsageError: it cannot.
    """
    file = Path(path)
    if not file.parent.is_dir():
        raise UsageError(f"{option} {path!r} lies in a directory that does not exist; make the directory, or name another file")
    if file.is_dir() or not os.access(file if file.exists() else file.parent, os.W_OK, effective_ids=True):
        raise UsageError(f"{option} {path!r} is a directory, or cannot be written to; name another file")


def _print(recorded: Recorded, pid: int, path: str, traced_s: float, as_json: bool) -> None:
    found: dict[str, Any] = {
        "pid": pid,
        "file": path,
        "seconds": traced_s,
        "processes": {str(number): name for number, name in recorded.processes.items()},
        "frames": len(recorded.frames),
        "spans": len(recorded.spans),
        "lost_records": recorded.lost,
    }
    if as_json:
        print_json(found)
        return
    lost = f", {recorded.lost} records lost" if recorded.lost else ""
    what = f"{len(recorded.frames)} frames and {len(recorded.spans)} spans of {', '.join(recorded.processes.values())}"
    print(escaped(f"{path}: {what}, in {duration(traced_s)}{lost}", one_line=True))
    print("Open it at https://ui.perfetto.dev or in chrome://tracing.")
