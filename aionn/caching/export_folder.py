"""The private folder of a driver whose engine writes temporary files by path. It is the only place beside its records where it may write.

The app names the folder and removes it when the driver has ended. The driver makes the folder, because the driver knows what its engine
needs (`writes_by_path`), and does so before it gives its rights away. The driver holds the folder while it lives (`private_folder.hold`).
So what an app that was killed has left behind is found by its lock: the next driver of such an engine removes it, and so does
`aionn doctor --fix`.

The folder lies in memory if there is room, because artifacts in it are read back at once. It imports nothing heavy.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice

from aionn.caching.private_folder import free_folder, hold

_PREFIX = "aionn-exports-"
_IN_MEMORY = "/dev/shm"
_ENOUGH_BYTES = 1 << 30
"""Containers have 64 MB there by default, which a model may exceed."""

_MOST_ENTRIES = 10_000
"""A driver that a model file has taken over may leave any number of files. Removing these many takes 20 ms; `clean_up` goes on later."""


def _places() -> tuple[str, ...]:
    return (_IN_MEMORY, *(place for place in (os.environ.get("TMPDIR", ""),) if os.path.isabs(place)), "/tmp", "/var/tmp")


def name_folder() -> str:
    """Return the path of a folder that does not exist yet, or an empty text if no place can be written to. Makes nothing."""
    for place in _places():
        with suppress(OSError):
            free = os.statvfs(place)
            enough = place != _IN_MEMORY or free.f_bavail * free.f_frsize >= _ENOUGH_BYTES
            if enough and os.access(place, os.W_OK | os.X_OK, effective_ids=True):
                return f"{place.rstrip('/')}/{_PREFIX}{os.getpid()}-{os.urandom(8).hex()}"
    return ""


def make_folder(path: str) -> int:
    """Make the folder and hold it, and remove folders that no process holds. Returns the descriptor that holds it.

    Raises:
        OSError: it cannot be made.
    """
    clean_up()
    return hold(path)


def remove_folder(path: str) -> None:
    """Remove the folder of a driver that has ended, if it was ever made. A folder that resists is left to `clean_up`."""
    with suppress(OSError):
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            if os.fstat(fd).st_uid == os.geteuid():
                _empty(fd)
                os.rmdir(path)
        finally:
            os.close(fd)


def left_folders() -> list[str]:
    """Return the folders of this account that no process holds."""
    found = []
    for path in _listed():
        with free_folder(path) as fd:
            if fd >= 0:
                found.append(path)
    return found


def clean_up() -> list[str]:
    """Remove the folders that no process holds. Returns those that are gone."""
    gone = []
    for path in _listed():
        with free_folder(path) as fd, suppress(OSError):
            if fd >= 0:
                _empty(fd)
                os.rmdir(path)
                gone.append(path)
    return gone


def _listed() -> Iterator[str]:
    for place in dict.fromkeys(_places()):
        with suppress(OSError):
            yield from sorted(os.path.join(place, name) for name in os.listdir(place) if name.startswith(_PREFIX))


def _empty(fd: int) -> None:
    """Remove what a folder holds. Folders within are moved up one by one, so that no depth exhausts the stack or the descriptors.

    Raises:
        OSError: something resists, or there are too many entries.
    """
    left = _MOST_ENTRIES
    while names := _names(fd, left + 1):
        for name in names:
            left -= 1
            if left < 0:
                raise OSError("there are too many entries to remove at once")
            if _unlinked(name, fd):
                continue
            inner = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=fd)
            try:
                for child in _names(inner, left + 1):
                    left -= 1
                    if left < 0:
                        raise OSError("there are too many entries to remove at once")
                    if not _unlinked(child, inner):
                        os.rename(child, os.urandom(8).hex(), src_dir_fd=inner, dst_dir_fd=fd)
            finally:
                os.close(inner)
            os.rmdir(name, dir_fd=fd)


def _names(fd: int, most: int) -> list[str]:
    """Return at most so many names of a folder. To list a million takes a second."""
    with os.scandir(fd) as entries:
        return [entry.name for entry in islice(entries, most)]


def _unlinked(name: str, parent: int) -> bool:
    """Remove a file, or give a folder the mode that its removal needs. Returns whether it was a file, or is gone already."""
    with suppress(FileNotFoundError):
        if stat.S_ISDIR(os.lstat(name, dir_fd=parent).st_mode):
            os.chmod(name, 0o700, dir_fd=parent)
            return False
        os.unlink(name, dir_fd=parent)
    return True
