"""A queue's file descriptors: what a peer's eventfd must be, and letting go of all of them, once."""

from __future__ import annotations

import fcntl
import os

from aionn.errors import CallerError
from aionn.memory import limits
from aionn.memory.region import Region


def make_eventfds(count: int, queue_bytes: int) -> list[int]:
    """New eventfds for a queue of so many bytes: all of them, or none.

    Raises:
        MemoryAllocationError: no descriptor is left.
    """
    made: list[int] = []
    try:
        while len(made) < count:
            made.append(os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC))
    except OSError as error:
        let_go([], made)
        raise limits.allocation_error(queue_bytes, error) from error
    return made


def check_eventfd(fd: int) -> None:
    """Make a received eventfd ours: not inherited, never blocking.

    A pipe or socket in its place could block us at a write, or hand us bytes.

    Raises:
        CallerError: it is something else, or not open.
    """
    try:
        kind = os.readlink(f"/proc/self/fd/{fd}")
    except OSError as error:
        raise CallerError(f"queue descriptor: eventfd {fd} is not open") from error
    if kind != "anon_inode:[eventfd]":
        raise CallerError("queue descriptor: its last two descriptors must be eventfds, after the memory; one of them is something else")
    os.set_inheritable(fd, False)
    fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_NONBLOCK)


def let_go(regions: list[Region], fds: list[int]) -> None:
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
