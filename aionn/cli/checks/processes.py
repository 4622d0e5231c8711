"""Processes of aionn on this machine: drivers that have lost their app, other releases, other time namespaces."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from aionn.cli.checks import Row, fail, ok, warn
from aionn.loopless import is_readable
from aionn.pages.finding import find_headers
from aionn.pages.layout import RELEASE, VERSION
from aionn.pages.page import start_time_of
from aionn.pages.process_use import of_each_process, own_pid_of, status_of
from aionn.runtime.processes.environment import APP_PID

_ENDS_WITHIN_S = 2.0
"""How long a driver may take to end after its app, before it counts as left."""


@dataclass(frozen=True, slots=True)
class Orphan:
    """A driver whose app has ended. The start time distinguishes it from a later process of the same number."""

    pid: int
    start_time: int
    app: int


def orphans() -> list[Orphan]:
    """Return this user's drivers whose app has ended at least two seconds ago, as far as that can be seen."""
    found, _ = of_each_process(_orphan)
    deadline = time.monotonic() + _ENDS_WITHIN_S
    for orphan in found:
        with suppress(OSError):
            pidfd = os.pidfd_open(orphan.pid)
            try:
                is_readable(pidfd, max(0.0, deadline - time.monotonic()))
            finally:
                os.close(pidfd)
    return [orphan for orphan in found if is_orphan(orphan)]


def is_orphan(orphan: Orphan) -> bool:
    """Return whether the same process still is a driver without its app."""
    return _orphan(orphan.pid) == orphan


def _orphan(pid: int) -> Orphan | None:
    """Return a driver that has another parent than the process that started it, or None for any other process.

    A driver of another user, and one that was started by hand, is left alone.
    """
    try:
        start_time = start_time_of(pid)
        with open(f"/proc/{pid}/cmdline", "rb") as cmdline:
            arguments = cmdline.read().split(b"\0")
        if os.stat(f"/proc/{pid}").st_uid != os.geteuid() or b"aionn.driver" not in arguments[1:5]:
            return None
        with open(f"/proc/{pid}/environ", "rb") as environment:
            app = dict(entry.partition(b"=")[::2] for entry in environment.read().split(b"\0")).get(APP_PID.encode(), b"")
        if not app.isdigit() or _has_ancestor(pid, int(app), start_time):
            return None
    except (OSError, ValueError):
        return None  # it ended meanwhile
    return Orphan(pid, start_time, int(app))


def _has_ancestor(pid: int, app: int, start_time: int) -> bool:
    """Return whether the process that started a driver is above it, or may be above it where this process cannot see.

    Raises:
        OSError: the driver, or a process above it, has ended.
    """
    _, parent = _numbers(pid)
    while parent:
        number, above = _numbers(parent)
        if number == app and start_time_of(parent) <= start_time:
            return True
        if parent == 1:
            return False
        parent = above
    return True  # in another pid namespace


def _numbers(pid: int) -> tuple[int, int]:
    """Return the number by which a process knows itself, and its parent's number. A zombie has ended.

    Raises:
        OSError: it has ended.
    """
    status = status_of(pid)
    if status["State"][0] in "ZX":
        raise ProcessLookupError(pid)
    return own_pid_of(pid, status), int(status["PPid"])


def orphan_drivers(found: Sequence[Orphan]) -> Row:
    """Return the row about drivers whose app has ended."""
    if not found:
        return ok("orphan drivers", "none")
    listed = ", ".join(f"process {orphan.pid} of app {orphan.app}" for orphan in found)
    return fail("orphan drivers", listed, "drivers that end with their app", "aionn doctor --fix kills them")


def releases() -> Row:
    """Check that running apps and drivers of this user have this release of aionn."""
    headers = find_headers()
    others = [header for header in headers if (header.release, header.layout) != (RELEASE, VERSION)]
    if not others:
        count = len(headers)
        return ok("releases", f"{RELEASE} here, and in {count} running process{'es' * (count != 1)}")
    listed = ", ".join(f"{header.release or 'another one'} in {header.role} {header.pid}" for header in others)
    way_out = "restart these apps, so that they run the release that is installed now"
    return warn("releases", f"{RELEASE} here, {listed}", "one release, or top, metrics and traces do not see these apps", way_out)


def time_namespaces() -> Row:
    """Check that running apps and drivers read the same monotonic clock as this process."""
    own = os.stat("/proc/self/ns/time").st_ino if os.path.exists("/proc/self/ns/time") else 0
    others = [header for header in find_headers() if header.time_namespace != own]
    if not others:
        return ok("time namespaces", "one for all processes of aionn")
    listed = ", ".join(f"{header.role} {header.pid}" for header in others)
    way_out = "run aionn top and aionn trace inside the container of the app"
    return warn("time namespaces", f"another one in {listed}", "one time namespace, or ages and traces of these do not fit", way_out)
