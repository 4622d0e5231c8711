"""How much shared memory is still available, and which limit says so. Asked before memory is reserved.

The kernel does not refuse memory that a cgroup does not have, but kills a process of that cgroup. So the answer must
be known beforehand. These are the limits, in the order of `limits`:

    RLIMIT_FSIZE, RLIMIT_AS     of this process (a memfd is a file, and mapping it takes address space)
    memory.max                  of this cgroup and of every one above it (cgroup v2), less what is in use
    memory.limit_in_bytes       the same for cgroup v1, also beside v2 (hybrid)
    MemAvailable                of the machine

Used memory that the kernel can take back counts as free, since a container whose limit is filled with page cache is not
full. As in the kernel's MemAvailable, half of the active file pages are taken to be needed (mm/page_alloc.c,
si_mem_available). Swap is not counted, because a frame that has to be paged in is late.

`limits` reads everything anew, because a process can be moved and limits change. `root` is the directory of /proc and the cgroup mounts, so
that tests can lay out another machine.

Reading costs more than a small reservation. So `require` may use what it read in the last `REMEMBERED_S` seconds, but only to allow, and
only for an eighth of what was left then, with all reservations since. It refuses only by values that it has just read. The
limits of the process itself are read at each call.
"""

from __future__ import annotations

import functools
import resource
import threading
from collections.abc import Iterator
from os import fspath
from os.path import join
from time import monotonic_ns

import msgspec

from aionn import cgroups
from aionn.errors import NO_DESCRIPTOR_LEFT, MemoryAllocationError

REMEMBERED_S = 0.1
"""How long a reading serves. Other processes of the container reserve memory, too."""

_REMEMBERED_PART = 8


class Limit(msgspec.Struct, frozen=True):
    """One limit on memory: its name as an administrator knows it, and the bytes that it leaves, never negative."""

    name: str
    available_bytes: int


def limits(root: cgroups.Place = cgroups.ROOT) -> Iterator[Limit]:
    """Yield every limit that is set for this process. A file that cannot be read is left out."""
    yield from _resource_limits(root)
    yield from _shared_limits(root)


def tightest(root: cgroups.Place = cgroups.ROOT) -> Limit | None:
    """Return the limit that leaves least, or None if no limit can be read."""
    return min(limits(root), key=_available, default=None)


def require(needed_bytes: int, root: cgroups.Place = cgroups.ROOT) -> None:
    """Check that every known limit leaves that much now.

    Raises:
        MemoryAllocationError: a limit leaves less. The error names both sizes and the limit.
    """
    found = list(_resource_limits(root))
    reading = _readings(fspath(root))
    if not reading.spend(needed_bytes):
        shared = list(_shared_limits(root))
        reading.renew(min(map(_available, shared), default=2**63) - needed_bytes)
        found += shared
    limit = min(found, key=_available, default=None)
    if limit is not None and limit.available_bytes < needed_bytes:
        raise MemoryAllocationError(
            f"{needed_bytes} bytes of shared memory are needed and {limit.name} leaves {limit.available_bytes}; "
            "ask for less or raise the limit",
            needed_bytes=needed_bytes,
            available_bytes=limit.available_bytes,
        )


class _Reading:
    """What may still be reserved without reading the limits again."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # the handler of a signal may allocate while its thread is in here
        self._left_bytes = 0
        self._until_ns = 0

    def spend(self, needed_bytes: int) -> bool:
        """Return whether the reading still serves for a reservation, and count it."""
        with self._lock:
            if needed_bytes > self._left_bytes or monotonic_ns() >= self._until_ns:
                return False
            self._left_bytes -= needed_bytes
            return True

    def renew(self, available_bytes: int) -> None:
        """Note what the limits leave now."""
        with self._lock:
            self._left_bytes = available_bytes // _REMEMBERED_PART
            self._until_ns = monotonic_ns() + round(REMEMBERED_S * 1e9)


@functools.lru_cache(maxsize=4)
def _readings(root: str) -> _Reading:
    return _Reading()


def _available(limit: Limit) -> int:
    return limit.available_bytes


def allocation_error(needed_bytes: int, error: OSError, what: str = "") -> MemoryAllocationError:
    """Return the error for a caller whose memory the kernel refused. `what` begins its sentence."""
    if error.errno in NO_DESCRIPTOR_LEFT:
        files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        return MemoryAllocationError(
            f"{what}{needed_bytes} bytes of shared memory need a descriptor, and none is left (RLIMIT_NOFILE is {files}); "
            "close files or raise the limit",
            needed_bytes=needed_bytes,
            available_bytes=None,
        )
    limit = tightest()
    have = "" if limit is None else f"; {limit.name} leaves {limit.available_bytes}"
    return MemoryAllocationError(
        f"{what}{needed_bytes} bytes of shared memory could not be reserved: {error.strerror}{have}; ask for less or raise the limit",
        needed_bytes=needed_bytes,
        available_bytes=None if limit is None else limit.available_bytes,
    )


def _resource_limits(root: cgroups.Place) -> Iterator[Limit]:
    file_bytes = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    if file_bytes != resource.RLIM_INFINITY:
        yield Limit("RLIMIT_FSIZE of the process", file_bytes)
    address_bytes = resource.getrlimit(resource.RLIMIT_AS)[0]
    if address_bytes != resource.RLIM_INFINITY:
        for line in _lines(join(root, "proc/self/statm")):
            used_bytes = int(line.split()[0]) * resource.getpagesize()
            yield Limit("RLIMIT_AS of the process", max(0, address_bytes - used_bytes))


def _shared_limits(root: cgroups.Place) -> Iterator[Limit]:
    """Yield the limits that this process shares with others: of its cgroup, of those above it that it can see, and of the machine."""
    for folder in cgroups.folders("memory", root):
        limit_file, usage_file, prefix = _FILES[folder.unified]
        limit_bytes = _number(join(folder.path, limit_file))
        # v1 writes "no limit" as the largest number of whole pages, and no machine has 2^60 bytes.
        if limit_bytes is None or limit_bytes >= 2**60 or (usage_bytes := _number(join(folder.path, usage_file))) is None:
            continue
        counts = {words[0]: int(words[1]) for line in _lines(join(folder.path, "memory.stat")) if len(words := line.split()) == 2}
        reclaimable = counts.get(f"{prefix}inactive_file", 0) + counts.get(f"{prefix}active_file", 0) // 2
        yield Limit(f"{limit_file} of cgroup {folder.name}", max(0, limit_bytes - usage_bytes + min(reclaimable, usage_bytes)))
    for line in _lines(join(root, "proc/meminfo")):
        if line.startswith("MemAvailable:"):
            yield Limit("MemAvailable of the machine", int(line.split()[1]) * 1024)
            return


_FILES = {True: ("memory.max", "memory.current", ""), False: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")}
"""By whether the cgroup is of version 2: the file of the limit, that of the use, and what stands before the names in memory.stat."""


def _number(path: cgroups.Place) -> int | None:
    """Return the number in a file, or None if the file is missing or says "max"."""
    text = cgroups.text_of(path).strip()
    return int(text) if text.isdecimal() else None


def _lines(path: cgroups.Place) -> list[str]:
    return cgroups.text_of(path).splitlines()


def raise_file_limit() -> None:
    """Allow as many open files as the hard limit does, because each request in flight may bring descriptors."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
