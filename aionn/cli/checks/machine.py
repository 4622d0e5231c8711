"""What makes answers late on this machine: its clocks, its frequency governor, its pages, other work.

This process, and so an app beside it, may use open files, address space, and a Python for its drivers. A container leaves it some CPU time
and memory.
"""

from __future__ import annotations

import os
import re
import resource
import sys
import time
from pathlib import Path

from aionn.cgroups import cpu_quota, text_of
from aionn.cli.checks import ROOT, Row, fail, ok, warn
from aionn.cli.printing import size
from aionn.engines.processor import usable_cpus
from aionn.memory.limits import tightest

_SLOW_CLOCKS = ("hpet", "acpi_pm", "jiffies", "pit")
_BUSY_PERCENT = 50.0
_STEP_S = 0.1
_FIRST_S = 1_767_225_600
"""2026-01-01. aionn did not exist before."""


def clock_source(root: Path = ROOT) -> Row:
    """Check that the kernel reads a fast clock. Each frame reads it several times."""
    folder = root / "sys/devices/system/clocksource/clocksource0"
    current = text_of(folder / "current_clocksource").strip()
    if not current:
        return ok("clock source", "not shown here")
    if current not in _SLOW_CLOCKS:
        return ok("clock source", current)
    known = text_of(folder / "available_clocksource").split()
    fast = [name for name in known if name not in _SLOW_CLOCKS]
    way_out = f"echo {fast[0]} > /{folder.relative_to(root)}/current_clocksource" if fast else "dmesg says why the tsc is not used"
    return warn("clock source", f"{current}, which takes about a microsecond to read", "tsc or another fast clock", way_out)


def governor(root: Path = ROOT) -> Row:
    """Check that CPUs speed up at once under load. Drivers that set their own pace (intel_pstate) do so under any governor."""
    found = set()
    for folder in sorted((root / "sys/devices/system/cpu").glob("cpu[0-9]*/cpufreq")):
        name = text_of(folder / "scaling_governor").strip()
        if name and not re.match(r"intel_pstate|amd[-_]pstate_epp|amd-pstate-epp", text_of(folder / "scaling_driver").strip()):
            found.add(name)
    if not found & {"powersave", "conservative"}:
        return ok("cpu governor", ", ".join(sorted(found)) or "none; the CPU or its host sets the pace")
    return warn(
        "cpu governor",
        f"{', '.join(sorted(found))}: CPUs stay slow in short runs",
        "schedutil, ondemand or performance",
        "cpupower frequency-set -g schedutil",
    )


def huge_pages(root: Path = ROOT) -> Row:
    """Check that a driver's copies of large weights may lie in huge pages, as NumPy asks."""
    modes = text_of(root / "sys/kernel/mm/transparent_hugepage/enabled")
    chosen = re.search(r"\[(\w+)\]", modes)
    if chosen is None:
        return ok("huge pages", "not shown here")
    if chosen[1] != "never":
        return ok("huge pages", chosen[1])
    return warn("huge pages", "never", "madvise or always", "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled")


def busy(root: Path = ROOT) -> Row:
    """Check how much of the last ten seconds some process waited for a CPU (pressure stall information)."""
    found = re.search(r"some avg10=([\d.]+)", text_of(root / "proc/pressure/cpu"))
    if found is None:
        return ok("cpu pressure", "not shown here")
    waited = f"processes waited for a CPU {float(found[1]):.0f} % of the last 10 s"
    if float(found[1]) <= _BUSY_PERCENT:
        return ok("cpu pressure", waited)
    return warn("cpu pressure", f"this machine is busy: {waited}", f"at most {_BUSY_PERCENT:.0f} %", "stop other work before you measure")


class ClockWatch:
    """Compares the wall clock with the monotonic one over the time of the other checks. Times within aionn are monotonic."""

    def __init__(self) -> None:
        self._began = self._ahead_s()

    @staticmethod
    def _ahead_s() -> float:
        return time.time() - time.monotonic()

    def row(self) -> Row:
        """Return whether the wall clock was set since this was made, or is plainly wrong."""
        if time.time() < _FIRST_S:
            now = time.strftime("%Y-%m-%d", time.gmtime(time.time()))
            return warn(
                "wall clock", f"it says {now}", "today", "set it, or start an NTP service; until then ages of cache entries are wrong"
            )
        step_s = self._ahead_s() - self._began
        if abs(step_s) <= _STEP_S:
            return ok("wall clock", "it did not jump while the doctor looked")
        return warn(
            "wall clock",
            f"it jumped by {step_s:+.1f} s while the doctor looked",
            "a clock that is slewed",
            "let one NTP service alone set it; frames that are dated by the wall clock have wrong ages",
        )


BASE_FILES, FILES_PER_BURST = 40, 6
"""Descriptors of an app with a few devices, and of each burst: five, and one for each further piece of memory that its frames take."""

_LEAST_BURSTS, _GOOD_BURSTS = 8, 64
_LEAST_ADDRESS_BYTES, _GOOD_ADDRESS_BYTES = 1 << 30, 4 << 30
"""A driver maps 0.4 to 0.7 GB before it has loaded a model."""


def open_files() -> Row:
    """Check the limit on open files against what bursts take."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return ok("open files", "no limit")
    bursts = max(0, soft - BASE_FILES) // FILES_PER_BURST
    found = f"RLIMIT_NOFILE is {soft}, enough for {bursts} bursts"
    if bursts >= _GOOD_BURSTS:
        return ok("open files", found)
    good = BASE_FILES + FILES_PER_BURST * _GOOD_BURSTS
    needed = f"{BASE_FILES} + {FILES_PER_BURST} for each burst; {good} for {_GOOD_BURSTS} bursts"
    if hard == resource.RLIM_INFINITY or hard >= good:
        way_out = f"raise it before the app starts: ulimit -n {max(1024, good)}"
    else:
        way_out = (
            f"the hard limit is {hard}; leave the shell that has lowered it, or raise it: docker run --ulimit nofile=1024, "
            "LimitNOFILE=1024 of systemd, or a line in /etc/security/limits.conf"
        )
    return (fail if bursts < _LEAST_BURSTS else warn)("open files", found, needed, way_out)


def address_space() -> Row:
    """Check the limit on the address space. Each process has it for itself."""
    soft = resource.getrlimit(resource.RLIMIT_AS)[0]
    if soft == resource.RLIM_INFINITY:
        return ok("address space", "no limit")
    found = f"RLIMIT_AS is {size(soft)}"
    if soft >= _GOOD_ADDRESS_BYTES:
        return ok("address space", found)
    judge = fail if soft < _LEAST_ADDRESS_BYTES else warn
    return judge("address space", found, "4 GB for each process, and more for large models", "remove the limit: ulimit -v unlimited")


def python() -> Row:
    """Check that there is a Python to start drivers with."""
    check, needed = "python", "a Python that has aionn installed, which starts the drivers"
    if getattr(sys, "frozen", False):
        return fail(
            check, "sys.executable is the app itself, because the app is frozen", needed, "set sys.executable before the Runtime opens"
        )
    if not sys.executable:
        return fail(check, "sys.executable is not set", needed, "set sys.executable to the path of a Python before the Runtime opens")
    if not os.access(sys.executable, os.X_OK):
        return fail(check, f"sys.executable is {sys.executable}, which cannot be run", needed, "install it again, or name another one")
    return ok(check, f"{sys.executable}, {'.'.join(map(str, sys.version_info[:3]))}")


LEAST_BYTES, GOOD_BYTES = 192 << 20, 512 << 20
"""Memory of a small app with one driver and a small model: 70 MB and 80 to 120 MB. Frames and weights come on top."""


def cpus(root: Path = ROOT) -> Row:
    """Check the CPU quota against the CPUs that the app and its driver can use at the same moment.

    An app and its driver together use up a quota below the affinity. Then the kernel stops them for the rest of the period.
    """
    affinity, quota = len(os.sched_getaffinity(0)), cpu_quota(root)
    threads = usable_cpus(root)
    planned = f"a driver plans {threads} thread{'s' * (threads != 1)}"
    if quota is None:
        return ok("cpus", f"{affinity} usable, no quota; {planned}")
    found = f"{quota.name} allows {quota.cpus:g} of {affinity} usable CPUs; {planned}"
    if quota.cpus >= min(affinity, threads + 1):
        return ok("cpus", found)
    needed = f"a quota of {min(affinity, threads + 1)} CPUs, for the app's loop beside the driver, or no more CPUs than the quota"
    if quota.cpus >= 2:
        return warn("cpus", found, needed, f"raise the quota, or give Runtime(threads={threads - 1})")
    return fail(
        "cpus",
        found,
        needed,
        "raise the quota to 2 or more (docker run --cpus=2), or confine the app to one CPU, which is never stopped "
        "(docker run --cpuset-cpus=0, taskset -c 0)",
    )


def memory(root: Path = ROOT) -> Row:
    """Check what the limits on memory leave. Shared memory for frames is charged to the cgroup, and not to /dev/shm."""
    limit = tightest(root)
    if limit is None:
        return warn("memory", "no limit on memory can be read", "/proc/meminfo", "mount /proc")
    found = f"{limit.name} leaves {size(limit.available_bytes)}"
    if limit.available_bytes >= GOOD_BYTES:
        return ok("memory", found)
    needed = f"{size(GOOD_BYTES)}: an app and a driver take {size(LEAST_BYTES)}, and weights and frames come on top"
    judge = fail if limit.available_bytes < LEAST_BYTES else warn
    return judge(
        "memory", found, needed, "raise that limit (docker run --memory=1g; MemoryMax=1G of systemd; ulimit -f unlimited), or free memory"
    )
