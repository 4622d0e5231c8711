"""The machine that a benchmark runs on, and what its processes use of it."""

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


def busiest_thread(pid: int, before_ns: dict[int, int]) -> int:
    """Return the thread of a process that used the most CPU time since `before_ns` (of `threads_ns`)."""
    used = {thread: spent - before_ns.get(thread, 0) for thread, spent in threads_ns(pid).items()}
    return max(used, key=lambda thread: used[thread])


def threads_ns(pid: int) -> dict[int, int]:
    """Return the CPU time of each thread of a process."""
    return {int(path.parent.name): int(path.read_text().split()[0]) for path in Path(f"/proc/{pid}/task").glob("*/schedstat")}


def last_cpu(pid: int, thread: int) -> int:
    """Return the CPU on which a thread runs, or ran last."""
    return int(Path(f"/proc/{pid}/task/{thread}/stat").read_text().rpartition(")")[2].split()[36])


def descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def memory_bytes(pid: int, *kinds: str) -> int:
    """Return the sum of a process's figures in `smaps_rollup`, such as "Pss_Shmem" or "Private_Dirty"."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return 1024 * sum(int(line.split()[1]) for line in lines if line.partition(":")[0] in kinds)
