"""What /proc says of a process: its parent, memory, CPU time, threads and descriptors. Any process of the same user may ask."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

from aionn.cgroups import text_of
from aionn.pages.layout import LayoutError

T = TypeVar("T")

_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_DRIVER = "aionn.driver"


@dataclass(frozen=True, slots=True)
class ProcessStat:
    """What one line of /proc says of a process.

    Attributes:
        pid: by which this process knows it. parent: the pid of its parent.
        start_time: when it started, in clock ticks since boot. Together with the pid this names one process for good.
        started_s: the same in seconds (CLOCK_BOOTTIME).
        cpu_s: user and system time so far.
        resident_bytes: physical memory.
    """

    pid: int
    parent: int
    start_time: int
    started_s: float
    cpu_s: float
    threads: int
    resident_bytes: int

    @property
    def age_s(self) -> float:
        """Seconds since its start."""
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - self.started_s)


def of_each_process(look: Callable[[int], T | None]) -> tuple[list[T], int]:
    """Look at every process that /proc shows. A process that ends meanwhile is left out, and one whose page has another layout.

    Returns:
        What `look` returns for a pid, without None, and how many processes belong to users whom this one may not look at.

    Raises:
        OSError: /proc cannot be read, or shows no process (ProcessLookupError).
    """
    found, unreadable = [], 0
    numbers = sorted(int(name) for name in os.listdir("/proc") if name.isdigit())
    if not numbers:
        raise ProcessLookupError("/proc shows no processes")
    for pid in numbers:
        try:
            seen = look(pid)
        except PermissionError:
            unreadable += bool(
                text_of(f"/proc/{pid}/cmdline")
            )  # a thread of the kernel has no program, and a process that has ended has none
        except (OSError, LayoutError):
            continue
        else:
            if seen is not None:
                found.append(seen)
    return found, unreadable


def stat_of(pid: int) -> ProcessStat:
    """Return what /proc/PID/stat says.

    Raises:
        OSError: the process has ended.
    """
    with open(f"/proc/{pid}/stat", "rb") as file:
        fields = file.read().rpartition(b")")[2].split()  # the program's name before it may hold blanks and brackets
    start_time = int(fields[19])
    return ProcessStat(
        pid=pid,
        parent=int(fields[1]),
        start_time=start_time,
        started_s=start_time / _TICKS,
        cpu_s=(int(fields[11]) + int(fields[12])) / _TICKS,
        threads=int(fields[17]),
        resident_bytes=int(fields[21]) * _PAGE_BYTES,
    )


def status_of(pid: int) -> dict[str, str]:
    """Return the lines of /proc/PID/status by their names, as "VmRSS" or "State".

    Raises:
        OSError: the process has ended.
    """
    with open(f"/proc/{pid}/status", encoding="utf-8", errors="replace") as status:
        return {name: value.strip() for name, _, value in (line.partition(":") for line in status)}


def own_pid_of(pid: int, status: Mapping[str, str]) -> int:
    """Return by which number a process knows itself, which differs in a container. `status`: of `status_of`."""
    return int(status.get("NSpid", str(pid)).split()[-1])


def driver_device(pid: int) -> str | None:
    """Return the name of a driver's device, as its app has started it. None: the process has ended, or is another one."""
    words = text_of(f"/proc/{pid}/cmdline").split("\0")
    try:
        name, equals, home = words[words.index(_DRIVER) + 1].rpartition("=")  # a provider's name may have one, too
    except (ValueError, IndexError):
        return None
    return (name if equals else home) or None


def child_with_pid(parent: int, pid: int) -> int | None:
    """Return by which number this process knows a child of `parent` that has the number `pid` in its container, or None."""
    with suppress(OSError):
        for thread in os.listdir(f"/proc/{parent}/task"):
            with suppress(OSError), open(f"/proc/{parent}/task/{thread}/children", encoding="ascii") as file:
                for child in map(int, file.read().split()):
                    with suppress(OSError):
                        if own_pid_of(child, status_of(child)) == pid:
                            return child
    return None
