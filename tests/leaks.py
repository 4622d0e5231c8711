"""What this process holds before a block and still holds after it: the instrument behind "nothing is left behind".

`with leak_check():` or `async with leak_check():` takes an inventory, runs the body and takes it again. What is new
is named thing by thing in one `LeakError`. It looks at

    processes     children and their children, zombies too: an ended driver that was not reaped is a leak
    descriptors   /proc/self/fd by what they point at; a memfd, socket or pipe by its inode, so a lost one is not
                  hidden by another of the same kind that was closed
    mappings      shared mappings of aionn's memfds; a NumPy view that a test kept is found here
    threads       by name; pools that belong to the event loop, not to aionn, are left out
    /dev/shm      names with "aionn" in them

Invariants
    A body that raises keeps its own error: nothing is checked then.
    Nothing sleeps. A new process is waited for through its pidfd, and a new thread by joining it, together no longer than
    `grace_s`; everything else must be gone when the body ends.
"""

from __future__ import annotations

import functools
import gc
import os
import select
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any, TypeVar

import anyio
import psutil
import uvloop

from aionn.pages.process_use import stat_of

__all__ = [
    "Inventory",
    "LeakError",
    "driver_pids",
    "ended",
    "leak_check",
    "leaves_nothing",
    "left_running",
    "processes_below",
    "processes_with",
    "wait_for_end",
]

Key = TypeVar("Key")

# The pools of worker threads of anyio, asyncio and uvloop live as long as the event loop and are reused by everybody on it.
LOOP_THREADS = ("AnyIO worker thread", "asyncio_", "uvloop_", "ThreadPoolExecutor-")  # the last: uvloop before 0.22
# libuv makes one pipe for signals with the first loop of a process and keeps it: it is there before we count.
uvloop.new_event_loop().close()

# pytest-timeout's watchdog thread of the running test.
TEST_THREADS = ("pytest_timeout",)


class LeakError(AssertionError):
    """Something is left. The message names each thing.

    Attributes:
        left: one line for each thing that is new.
    """

    def __init__(self, left: list[str]) -> None:
        super().__init__("left behind:\n  " + "\n  ".join(left))
        self.left = left


@dataclass(frozen=True)
class Inventory:
    """What a process holds at one moment."""

    processes: Counter[tuple[int, int]]
    descriptors: Counter[tuple[str, int, int]]
    mappings: Counter[tuple[str, str]]
    threads: Counter[tuple[int, str]]
    shm: Counter[str]

    @classmethod
    def take(cls) -> Inventory:
        return cls(_processes(), _descriptors(), _mappings(), _threads(), _shm())

    def sizes(self) -> tuple[int, int]:
        """How many descriptors and shared mappings."""
        return self.descriptors.total(), self.mappings.total()

    def since(self, before: Inventory) -> list[str]:
        """One line for each thing in here that was not there before."""
        processes = [_describe_process(pid) for pid, _ in (self.processes - before.processes)]
        descriptors = [f"{count} descriptor(s) of {target}" for (target, _, _), count in (self.descriptors - before.descriptors).items()]
        mappings = [f"shared mapping {perms} of {path}" for (path, perms) in (self.mappings - before.mappings).elements()]
        threads = [f"thread {name!r}" for (_, name) in (self.threads - before.threads)]
        shm = [f"/dev/shm/{name}" for name in (self.shm - before.shm)]
        return [*processes, *descriptors, *mappings, *threads, *shm]


class leak_check:  # noqa: N801  (reads as a statement: `with leak_check():`)
    """Fail if the body leaves something behind.

    Args:
        grace_s: how long processes and threads that are new may take to end after the body.

    Raises:
        LeakError: on leaving the block.
    """

    def __init__(self, grace_s: float = 2.0) -> None:
        self._grace_s = grace_s

    def __enter__(self) -> leak_check:
        gc.collect()
        self._before = Inventory.take()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        if error is not None:
            return
        deadline = time.monotonic() + self._grace_s
        for pid in self._new_processes():
            wait_for_end(pid, deadline - time.monotonic())
        self._join_threads(deadline)
        self._compare()

    async def __aenter__(self) -> leak_check:
        return self.__enter__()

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        if error is not None:
            return
        deadline = time.monotonic() + self._grace_s
        for pid in self._new_processes():
            await ended(pid, deadline - time.monotonic())
        # Callbacks that close descriptors one turn of the loop later (transports do) have run after this.
        await anyio.wait_all_tasks_blocked()
        self._join_threads(deadline)
        self._compare()

    def _new_processes(self) -> list[int]:
        return [pid for pid, _ in (_processes() - self._before.processes)]

    def _join_threads(self, deadline: float) -> None:
        known = {ident for ident, _ in self._before.threads}
        for thread in threading.enumerate():
            if thread.ident not in known and not thread.name.startswith((*LOOP_THREADS, *TEST_THREADS)):
                thread.join(max(0.0, deadline - time.monotonic()))

    def _compare(self) -> None:
        # Views in reference cycles (tracebacks, closed tasks) are garbage, not leaks.
        gc.collect()
        left = Inventory.take().since(self._before)
        if left:
            raise LeakError(left)


def processes_below(pid: int) -> Iterator[int]:
    """Yield each process below that one, zombies too. The kernel lists the children of each thread, so no other process is looked at."""
    with suppress(OSError):  # it has ended
        for thread in os.listdir(f"/proc/{pid}/task"):
            with suppress(OSError), open(f"/proc/{pid}/task/{thread}/children", encoding="ascii") as file:
                for child in map(int, file.read().split()):
                    yield child
                    yield from processes_below(child)


def driver_pids() -> list[int]:
    """Children of this process that are running aionn drivers, zombies left out."""
    found = []
    for child in processes_below(os.getpid()):
        with suppress(psutil.Error):
            if "aionn.driver" in psutil.Process(child).cmdline():
                found.append(child)
    return found


def processes_with(variable: str, value: str) -> list[str]:
    """Every process of this user that was started with that environment variable, however far down: orphans too."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(variable) == value:
                found.append(_describe_process(process.pid))
        except psutil.Error:
            continue
    return found


def left_running(variable: str, value: str, timeout_s: float = 30.0) -> list[str]:
    """Like `processes_with`, after such processes have had that time to end by themselves, as the workers of a Ray node do after it."""
    deadline = time.monotonic() + timeout_s
    while (left := processes_with(variable, value)) and time.monotonic() < deadline:
        wait_for_end(int(left[0].split()[1].rstrip(":")), deadline - time.monotonic())
    return left


def wait_for_end(pid: int, timeout_s: float) -> bool:
    """Wait, blocking, until the process has ended. A zombie has ended. False if it has not in that time."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        return bool(poll.poll(max(0.0, timeout_s) * 1000))
    finally:
        os.close(pidfd)


async def ended(pid: int, timeout_s: float) -> bool:
    """Wait until the process has ended. A zombie has ended. False if it has not in that time."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        with anyio.move_on_after(max(0.0, timeout_s)):
            await anyio.wait_readable(pidfd)
            return True
        return False
    finally:
        os.close(pidfd)


def _processes() -> Counter[tuple[int, int]]:
    found: Counter[tuple[int, int]] = Counter()
    for child in processes_below(os.getpid()):
        with suppress(OSError):
            found[child, stat_of(child).start_time] += 1
    return found


def _describe_process(pid: int) -> str:
    try:
        process = psutil.Process(pid)
        if process.status() == psutil.STATUS_ZOMBIE:
            return f"process {pid}: a zombie, ended and not reaped"
        return f"process {pid}: {' '.join(process.cmdline())}"
    except psutil.Error:
        return f"process {pid}: it ended while it was being described"


def _descriptors() -> Counter[tuple[str, int, int]]:
    held: Counter[tuple[str, int, int]] = Counter()
    for entry in os.listdir("/proc/self/fd"):
        try:
            # The listing's own descriptor is in the list and closed by now.
            target, status = os.readlink(f"/proc/self/fd/{entry}"), os.fstat(int(entry))
        except OSError:
            continue
        held[target, status.st_dev, status.st_ino] += 1
    return held


def _mappings() -> Counter[tuple[str, str]]:
    held: Counter[tuple[str, str]] = Counter()
    with open("/proc/self/maps", encoding="utf-8") as maps:
        for line in maps:
            if "memfd:aionn" in line:
                _, perms, _, _, inode, path = line.rstrip().split(maxsplit=5)
                held[f"{path} (inode {inode})", perms] += 1
    return held


def _threads() -> Counter[tuple[int, str]]:
    return Counter(
        (thread.ident or 0, thread.name) for thread in threading.enumerate() if not thread.name.startswith((*LOOP_THREADS, *TEST_THREADS))
    )


def _shm() -> Counter[str]:
    try:
        names = [name for name in os.listdir("/dev/shm") if "aionn" in name]
    except FileNotFoundError:
        return Counter()
    # Other processes that test at the same time have folders there, too. Their names carry the number of their app.
    return Counter(name for name in names if not name.startswith("aionn-exports-") or name.startswith(f"aionn-exports-{os.getpid()}-"))


def leaves_nothing(test: Any) -> Any:
    """Look for leaks when the test's own events, arrays and errors are gone, and the finalizers of what stood in circles have run."""

    @functools.wraps(test)
    async def checked(*args: Any, **named: Any) -> None:
        async with leak_check():
            await test(*args, **named)
            gc.collect()
            await anyio.wait_all_tasks_blocked()

    return checked
