"""What the processes of a benchmark use of the machine. `aionn.cli.bench` says which machine it is."""

from __future__ import annotations

import asyncio
import gc
import os
import re
import shutil
import signal
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from tempfile import TemporaryDirectory


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
    """Return the number of a process's descriptors. Collects garbage first, so that those of ended objects do not count."""
    gc.collect()
    return len(os.listdir(f"/proc/{pid}/fd"))


def shared_bytes(*pids: int) -> int:
    """Return the bytes of nameless shared memory that exist because processes hold or map them. Each file counts once.

    Collects garbage first, as `descriptors` does.
    """
    gc.collect()
    found = {}
    for pid in pids:
        for directory in (f"/proc/{pid}/fd", f"/proc/{pid}/map_files"):
            for entry in _entries(directory):
                try:
                    if os.readlink(entry).startswith("/memfd:"):
                        status = os.stat(entry)
                        found[status.st_dev, status.st_ino] = status.st_blocks * 512
                except OSError:  # closed meanwhile
                    continue
    return sum(found.values())


def _entries(directory: str) -> list[str]:
    """Return the paths in a directory, or nothing where the kernel does not show it to us (`map_files` is for root alone)."""
    try:
        return [f"{directory}/{name}" for name in os.listdir(directory)]
    except PermissionError:
        return []


def memory_bytes(pid: int, *kinds: str) -> int:
    """Return the sum of a process's figures in `smaps_rollup`, such as "Private_Dirty"."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return 1024 * sum(int(line.split()[1]) for line in lines if line.partition(":")[0] in kinds)


def wake_ups(pid: int) -> int:
    """How often the threads of a process have gone to sleep so far."""
    found = 0
    for status in Path(f"/proc/{pid}/task").glob("*/status"):
        found += next(int(line.split()[1]) for line in status.read_text().splitlines() if line.startswith("voluntary_ctxt_switches"))
    return found


async def system_calls(pid: int, act: Callable[[], Awaitable[object]]) -> int | None:
    """Return how many system calls a process makes while `act` runs, as strace counts them.

    Where strace is missing or may not attach, it calls nothing and returns None.
    """
    if shutil.which("strace") is None:
        return None
    with TemporaryDirectory() as directory:
        counted = Path(directory, "counted")
        command = ("strace", "-c", "-f", "-o", str(counted), "-p", str(pid))
        tracer = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE, stdin=asyncio.subprocess.DEVNULL)
        try:
            assert tracer.stderr is not None
            attached = b"attached" in await tracer.stderr.readline()  # else the line says why it is not
            if attached:
                await act()
        finally:
            if tracer.returncode is None:
                tracer.send_signal(signal.SIGINT)
            await tracer.communicate()
        return _total_calls(counted) if attached else None


def _total_calls(counted: Path) -> int:
    total = re.search(r"^\s*[\d.]+\s+[\d.]+\s+\d*\s+(\d+)\s.*total$", counted.read_text(), re.MULTILINE)
    return int(total[1]) if total else 0
