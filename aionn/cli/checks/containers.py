"""What a container leaves to an app: CPU time and memory."""

from __future__ import annotations

import os
from pathlib import Path

from aionn.cgroups import cpu_quota
from aionn.cli.checks.row import ROOT, Row, fail, ok, warn
from aionn.cli.printing import size
from aionn.engines.processor import usable_cpus
from aionn.memory.limits import tightest

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
