"""A queue's file descriptors: new eventfds, the check of a peer's eventfd, and the release of all of them."""

from __future__ import annotations

import errno
import fcntl
import os
import select

from aionn.errors import CallerError
from aionn.memory import limits
from aionn.memory.region import Region


def make_eventfds(count: int, queue_bytes: int) -> list[int]:
    """Make `count` eventfds for a queue of `queue_bytes`: all of them, or none.

    Raises:
        MemoryAllocationError: the process has no descriptor left.
    """
    made: list[int] = []
    try:
        while len(made) < count:
            made.append(os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC))
    except OSError as error:
        release([], made)
        raise limits.allocation_error(queue_bytes, error) from error
    return made


def check_eventfd(fd: int) -> None:
    """Take over a received eventfd: children do not inherit it, and it never blocks.

    A pipe or socket in its place could block this process at a write, or hand it bytes.

    Raises:
        CallerError: the descriptor is something else, or not open.
    """
    try:
        right = is_eventfd(fd)
    except OSError as error:
        raise CallerError(f"queue descriptor: eventfd {fd} is not open; send an open one") from error
    if not right:
        raise CallerError("queue descriptor: its last two descriptors must be eventfds, after the memory; one of them is something else")
    os.set_inheritable(fd, False)
    fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_NONBLOCK)


def is_eventfd(fd: int) -> bool:
    """Return whether a descriptor is an eventfd.

    Without /proc, an eventfd is known by what it does: it refuses a read of less than 8 bytes, and it can be written to. A pipe, a socket
    and a file return nothing for a read of nothing, and timers and signals cannot be written to.

    Raises:
        OSError: it is not open.
    """
    try:
        return os.readlink(f"/proc/self/fd/{fd}") == "anon_inode:[eventfd]"
    except OSError:
        os.fstat(fd)
    try:
        os.read(fd, 0)
    except OSError as error:
        (looking := select.poll()).register(fd, select.POLLOUT)
        return error.errno == errno.EINVAL and looking.poll(0) == [(fd, select.POLLOUT)]
    return False


def release(regions: list[Region], fds: list[int]) -> None:
    """Release everything, once. A closed descriptor number is skipped, because its error has been raised already."""
    for region in regions:
        region.close()
    regions.clear()
    for fd in fds:
        if fd >= 0:
            try:
                os.close(fd)
            except OSError:
                continue
    fds.clear()
