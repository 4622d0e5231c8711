"""What `aionn doctor --fix` removes: what aionn itself has left, and nothing else.

drivers whose app has ended           killed, after a second look at the same process
half a key in the state directory     removed when its process has ended and it is an hour old
records of devices that are gone      removed when no driver has used them for 30 days and no process holds their folder
folders for temporary files           removed when no process holds them
trash and staging in a cache          removed under the cache's own locks, as the next app would do
"""

from __future__ import annotations

import fcntl
import os
import re
import signal
import stat
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from aionn.caching.manifest import Manifest
from aionn.caching.private_folder import clean_up, free_folder
from aionn.caching.state import UNUSED_KEPT_S
from aionn.caching.store.directory import MANIFEST, CacheDirectory, is_hex
from aionn.caching.store.housekeeping import Housekeeping
from aionn.caching.store.writing import empty_trash
from aionn.cli.checks.processes import Orphan, is_orphan
from aionn.loopless import is_readable

_ASIDE = re.compile(r"blob-cache\.key\.(\d+)\.[0-9a-f]{8}")
"""A key that is being written (`private_key`), with the number of its process."""

_RECORD = re.compile(r"(integrity|blobs)-.*\.sqlite(-wal|-shm|-journal)?|blob-cache\.key(\.\d+\.[0-9a-f]{8})?")
"""The files of a device."""

_OLD_S = 3600.0
"""A process in another container may share the folder. It needs far less than this."""

_ENDS_WITHIN_S = 5.0


def end_orphans(found: Sequence[Orphan]) -> list[str]:
    """Kill drivers whose app has ended. Return what was done."""
    done = []
    for orphan in found:
        with suppress(ProcessLookupError):
            pidfd = os.pidfd_open(orphan.pid)
            try:
                # The descriptor names one process for good. So a number that was given again is noticed here.
                if is_orphan(orphan):
                    signal.pidfd_send_signal(pidfd, signal.SIGKILL)
                    ended = is_readable(pidfd, _ENDS_WITHIN_S)
                    done.append(f"driver {orphan.pid} of app {orphan.app}: {'killed' if ended else 'killed, and it has not ended yet'}")
            finally:
                os.close(pidfd)
    return done


@dataclass(frozen=True, slots=True)
class StateLeavings:
    """What no driver needs in a state directory.

    Attributes:
        unfinished: files that a process has begun and never finished.
        gone: folders of devices that no driver has used for long.
    """

    unfinished: tuple[Path, ...] = ()
    gone: tuple[Path, ...] = ()

    def __str__(self) -> str:
        parts = (
            (len(self.unfinished), "unfinished files of ended processes"),
            (len(self.gone), f"devices unused for {UNUSED_KEPT_S / 86400:.0f} days"),
        )
        return ", ".join(f"{count} {what}" for count, what in parts if count)


def state_leavings(directory: Path) -> StateLeavings:
    """Return what a state directory holds in vain. A symlink, and a folder or a file of another account, is left alone."""
    folders = records_folders(directory)
    files = [path for folder in (directory, *folders) for path in _own_entries(folder, stat.S_ISREG)]
    return StateLeavings(
        tuple(path for path in files if _is_unfinished(path)),
        tuple(folder for folder in folders if _is_unused(folder)),
    )


def records_folders(directory: Path) -> list[Path]:
    """Return the folders of devices in a state directory, sorted."""
    return _own_entries(directory, stat.S_ISDIR)


def _own_entries(folder: Path, of_kind: Callable[[int], bool]) -> list[Path]:
    with suppress(OSError):
        if _is_own(folder.lstat(), stat.S_ISDIR):
            return sorted(path for path in folder.iterdir() if _is_own(path.lstat(), of_kind))
    return []


def _is_unfinished(path: Path) -> bool:
    aside = _ASIDE.fullmatch(path.name)
    with suppress(OSError):
        return aside is not None and time.time() - path.lstat().st_mtime > _OLD_S and not os.path.exists(f"/proc/{aside[1]}")
    return False


def _is_unused(folder: Path) -> bool:
    """Return whether a folder has only records, all of which are old, and no process holds it."""
    with suppress(OSError):
        names = os.listdir(folder)
        if all(_RECORD.fullmatch(name) for name in names):
            used = max(os.lstat(path).st_mtime for path in (folder, *(folder / name for name in names)))
            with free_folder(folder) as fd:
                return fd >= 0 and time.time() - used > UNUSED_KEPT_S
    return False


def _is_own(status: os.stat_result, is_kind: Callable[[int], bool]) -> bool:
    return is_kind(status.st_mode) and status.st_uid == os.geteuid()


def clean_state(directory: Path) -> list[str]:
    """Remove what `state_leavings` finds. Return what was done."""
    done, left = [], state_leavings(directory)
    for path in left.unfinished:
        with suppress(OSError):
            path.unlink()
            done.append(f"{path}: removed")
    for folder in left.gone:
        with free_folder(folder) as fd, suppress(OSError):
            if fd >= 0:  # no driver can begin to use it now
                for name in os.listdir(fd):
                    os.unlink(name, dir_fd=fd)
                folder.rmdir()
                done.append(f"{folder}: removed")
    return done


def clean_exports() -> list[str]:
    """Remove the folders for temporary files that no driver holds. Return what was done."""
    return [f"{folder}: removed" for folder in clean_up()]


def cache_leavings(directory: Path) -> int:
    """Return how many generations and deleted entries dead processes have left in a cache."""
    if not _is_cache(directory):
        return 0
    cache = CacheDirectory(str(directory))
    return _trash(directory) + sum(_left_in(cache, key) for key in cache.all_keys())


def clean_cache(directory: Path) -> list[str]:
    """Remove them under the cache's own locks. Return what was done. A cache that is not safe to use is left alone."""
    if not _is_cache(directory) or not os.access(directory, os.W_OK, effective_ids=True):
        return []
    try:
        cache, before = CacheDirectory(str(directory)), cache_leavings(directory)
    except OSError:
        return []  # the row of the cache directory says why
    house = Housekeeping(str(directory), None, float("inf"))
    house.directory = cache
    try:
        empty_trash(cache)
        for key in cache.all_keys():
            if _left_in(cache, key):
                house.clean_if_free(cache, key)
    finally:
        house.close()
    removed = before - cache_leavings(directory)
    return [f"{directory}: {removed} leavings removed"] if removed else []


def _is_cache(directory: Path) -> bool:
    return all((directory / part).is_dir() for part in ("entries", "locks", "trash"))


def _trash(directory: Path) -> int:
    return sum(is_hex(name[:64], 64) and name[64:65] == "." and is_hex(name[65:], 8) for name in os.listdir(directory / "trash"))


def _left_in(cache: CacheDirectory, key: bytes) -> int:
    """Return how many files and folders of an entry belong to no manifest, unless a process compiles the entry now."""
    try:
        manifest = cache.manifest(key)
        kept = {MANIFEST, manifest.directory} if isinstance(manifest, Manifest) else set()
        left = sum(name not in kept for name in os.listdir(f"{cache.path}/entries/{key.hex()}"))
        return 0 if left and _is_held(cache.compile_lock(key)) else left
    except OSError:
        return 0  # replaced or removed meanwhile


def _is_held(lock: str) -> bool:
    """Return whether a process holds a lock. The look takes a shared lock for a moment, which excludes no reader."""
    try:
        fd = os.open(lock, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False
