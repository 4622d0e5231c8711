"""What /proc says of a process: its parent, memory, CPU time, threads and descriptors. Any process of the same user may ask."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_DRIVER = b"aionn.driver"


@dataclass(frozen=True, slots=True)
class ProcessStat:
    """What one line of /proc says of a process.

    Attributes:
        parent: the pid of its parent.
        start_time: when it started, in clock ticks since boot. Together with the pid this names one process for good.
        started_s: the same in seconds (CLOCK_BOOTTIME).
        cpu_s: user and system time so far.
        resident_bytes: physical memory.
    """

    parent: int
    start_time: int
    started_s: float
    cpu_s: float
    threads: int
    resident_bytes: int


@dataclass(frozen=True, slots=True)
class ProcessUse:
    """What a process uses now. `start_time`, `cpu_s` and `resident_bytes`: as of `ProcessStat`."""

    start_time: int
    cpu_s: float
    threads: int
    resident_bytes: int
    open_fds: int


def stat_of(pid: int) -> ProcessStat:
    """Return what /proc/PID/stat says.

    Raises:
        OSError: the process has ended.
    """
    with open(f"/proc/{pid}/stat", "rb") as file:
        fields = file.read().rpartition(b")")[2].split()  # the program's name before it may hold blanks and brackets
    start_time = int(fields[19])
    return ProcessStat(
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
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            words = file.read().split(b"\0")
        name, equals, home = os.fsdecode(words[words.index(_DRIVER) + 1]).rpartition("=")  # a provider's name may have one, too
    except (OSError, ValueError, IndexError):
        return None
    return (name if equals else home) or None


def use_of(pid: int) -> ProcessUse:
    """Return what a process uses.

    Raises:
        OSError: it has ended, or belongs to another user.
    """
    stat = stat_of(pid)
    return ProcessUse(stat.start_time, stat.cpu_s, stat.threads, stat.resident_bytes, len(os.listdir(f"/proc/{pid}/fd")))


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
