"""The checks of `aionn doctor`: small functions that look at one thing each, and return rows (`Row`).

    kernel           the kernel's version, and its calls by trying them: pidfds, memfds, eventfds, futexes, parent death signals
    sandbox          what the kernel has to confine drivers with, and what confines each driver that was tried
    machine          clocks, frequency governor, huge pages, pressure; open files and address space; CPU quotas and memory of the cgroups
    engines          every installed engine, with a small model in a real driver process
    folders          the state directory and caches: owner, mode, space, file system, databases
    processes        drivers without an app, other releases of aionn, other time namespaces
    service          the service of all apps: its socket, its rights, its release
    frigate          the endpoint of Frigate's detectors
    leavings         what `--fix` removes: leavings of aionn, and nothing else

A check takes the directory of /proc, /sys and the cgroup mounts as `root` where it only reads files, so that tests can lay out another
machine. A check leaves nothing behind. Only `leavings` changes something.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Status = Literal["ok", "warn", "fail"]

ROOT = Path("/")


@dataclass(frozen=True, slots=True)
class Row:
    """What one check found.

    Attributes:
        check: its name, which stays the same between releases.
        status: "ok", "warn" (it works, but badly or not for long) or "fail" (something of aionn does not work).
        found: as it is now.
        needed: as it should be. An empty text where the row is ok.
        way_out: what to do. An empty text where the row is ok.
    """

    check: str
    status: Status
    found: str
    needed: str = ""
    way_out: str = ""


def ok(check: str, found: str) -> Row:
    """Return a row without a complaint."""
    return Row(check, "ok", found)


def warn(check: str, found: str, needed: str, way_out: str) -> Row:
    """Return a row for what works, but badly or not for long."""
    return Row(check, "warn", found, needed, way_out)


def fail(check: str, found: str, needed: str, way_out: str) -> Row:
    """Return a row for what does not work."""
    return Row(check, "fail", found, needed, way_out)
