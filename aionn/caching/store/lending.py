"""Cache files for a driver that is about to write: opened once more in the app, so that the driver opens nothing.

A driver locks the files that it writes. flock belongs to an open file description, and a descriptor that is sent over a socket, duplicated
or inherited still belongs to the same one. So a lock would not keep out another driver that got the same description.

Invariants
    Each preparation sends fresh descriptions, which no other user locks. Their offsets begin at 0.
    A load shares its descriptions with the app, because it uses neither an offset nor a lock.
"""

from __future__ import annotations

import fcntl
import os
import stat

from aionn.caching.outcomes import Refusal, refusal_of_os_error
from aionn.caching.store.directory import close_all
from aionn.hal.interfaces import CacheHandles

__all__ = ["close_handles", "open_again", "reopen"]


def open_again(handles: CacheHandles) -> CacheHandles | Refusal:
    """Return handles of the same files with fresh descriptions, or why a file cannot be opened again. Blocking.

    The caller closes them (`close_handles`).
    """
    fds: list[int] = []
    try:
        for fd in (*handles.model, *handles.data):
            fds.append(reopen(fd))
    except OSError as error:
        close_all(fds)
        return refusal_of_os_error(error, f"opening cache file {len(fds)} again for the driver")
    models = len(handles.model)
    return CacheHandles(tuple(fds[:models]), tuple(fds[models:]), handles.token)


def close_handles(handles: CacheHandles | Refusal) -> None:
    """Close what `open_again` has opened, if anything."""
    if isinstance(handles, CacheHandles):
        close_all((*handles.model, *handles.data))


def reopen(fd: int) -> int:
    """Return a new descriptor for the same file, with an offset and locks that it shares with no other. The caller closes it.

    What is not a regular file is duplicated, because opening it may wait or act. A driver refuses it.

    Raises:
        OSError: the descriptor is closed, or the file may not be opened again as it is open now.
    """
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        return os.dup(fd)
    access = fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE
    try:
        return os.open(f"/proc/self/fd/{fd}", access | os.O_CLOEXEC)
    except FileNotFoundError as error:
        raise OSError(error.errno, "it needs /proc; mount a proc file system there") from error
