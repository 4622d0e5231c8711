"""Files of a local store: look, read and remove without following symlinks and without waiting. All functions block.

Another account may be able to write to the folder. So a FIFO must hold no thread, and no symlink may lead a removal out of the store.
"""

from __future__ import annotations

import errno
import os
import stat
from dataclasses import dataclass
from pathlib import Path


class BadContentsError(Exception):
    """An object's contents are not those that its name stands for, or are too large, or the object is not a regular file."""


@dataclass(frozen=True, slots=True)
class Found:
    """One object, as the store describes it.

    Attributes:
        path: in the store.
        size_bytes: its length.
        written_s: the wall-clock time of its last writing, in seconds since the epoch.
        tag: differs if another object is put in its place, also within the same second. Only `Requests.find` knows it.
    """

    path: str
    size_bytes: int
    written_s: float
    tag: str = ""


def found_below(folder: Path, path: str) -> Found:
    """Look for a file of a local store. obstore would open it, and wait there if it is a FIFO.

    Raises:
        OSError: it is not there.
    """
    return _found_of(path, os.lstat(folder / path))


def _found_of(path: str, status: os.stat_result) -> Found:
    written_s = status.st_mtime_ns // 1000 / 1e6  # as precise as obstore's lists
    return Found(path, status.st_size, written_s, f"{status.st_ino}-{status.st_mtime_ns}-{status.st_ctime_ns}")


def open_below(folder: Path, path: str) -> int:
    """Open a file of a local store for reading, without following a symlink in its place or waiting for a FIFO. Return the descriptor.

    Raises:
        OSError: it is not there, or cannot be opened.
    """
    return os.open(folder / path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)


def read_small(folder: Path, path: str, max_bytes: int) -> bytes:
    """Read a file of a local store. A FIFO in its place would hold obstore's thread until a writer comes.

    Raises:
        OSError: it is not there, or cannot be read.
        BadContentsError: it is not a regular file, or has more than `max_bytes` bytes.
    """
    try:
        fd = open_below(folder, path)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise BadContentsError(f"{path} is a symlink") from error
        raise
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise BadContentsError(f"{path} is not a regular file")
        content = os.read(fd, max_bytes + 1)
    finally:
        os.close(fd)
    if len(content) > max_bytes:
        raise BadContentsError(f"{path} has more than {max_bytes} bytes")
    return content


def unlink_below(folder: Path, path: str, expected: Found | None) -> None:
    """Remove a file of a local store. No folder on the way may be a symlink, which a hostile writer could lead out of the store.

    Args:
        expected: the file that `found_below` has found. None: any file.

    Raises:
        FileNotFoundError: it is not there, or is not the expected one.
        OSError: a folder on the way is a symlink, or the file cannot be removed.
    """
    *parents, name = path.split("/")
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for parent in parents:
            below = os.open(parent, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=fd)
            os.close(fd)
            fd = below
        if expected is not None and _found_of(path, os.stat(name, dir_fd=fd, follow_symlinks=False)) != expected:
            raise FileNotFoundError(errno.ENOENT, "another file has taken its place", path)
        os.unlink(name, dir_fd=fd)
    finally:
        os.close(fd)
