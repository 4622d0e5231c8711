"""A queue's file descriptors: what a peer's eventfd must be, and letting go of all of them, once."""

from __future__ import annotations

import fcntl
import os

from aionn.errors import CallerError
from aionn.memory.region import Region


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
        raise CallerError("queue descriptor: one of its last two descriptors is no eventfd; memory comes first, then both eventfds")
    os.set_inheritable(fd, False)
    fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_NONBLOCK)


def let_go(regions: list[Region], fds: list[int]) -> None:
    """Let go of everything, once; a number that is no open descriptor is the caller's mistake and already told."""
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
