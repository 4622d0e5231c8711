"""The machine that a benchmark runs on, and the CPU time of its processes."""

from __future__ import annotations

import os
import platform
import time
from importlib import metadata
from pathlib import Path


def cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return "CPU not named"


def machine_lines(*packages: str) -> str:
    """Return two lines: the machine, then the versions of Python and of the packages, and the load."""
    versions = "".join(f", {name} {metadata.version(name)}" for name in packages)
    return (
        f"{platform.machine()}, {cpu_name()}, {len(os.sched_getaffinity(0))} usable CPUs, Linux {platform.release()}\n"
        f"Python {platform.python_version()}{versions}; load average {Path('/proc/loadavg').read_text().split()[0]}"
    )


def process_cpu_ns(pid: int) -> int:
    """Return the CPU time of a process, with that of its ended threads, in nanoseconds.

    The clock's number is what `clock_getcpuclockid` computes: the inverted pid, and 2 for the scheduler's exact count.
    """
    return time.clock_gettime_ns((~pid << 3) | 2)
