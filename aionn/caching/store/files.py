"""Files and descriptors of a cache directory: checks of their owner, digests, removal, and entries opened or staged. Blocking."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Sequence
from contextlib import suppress

import msgspec
import numpy as np
from blake3 import blake3

from aionn.caching.manifest import Manifest, StoredFile, file_names
from aionn.caching.outcomes import MissReason, Refusal, refusal_of_os_error
from aionn.hal.types import CacheFiles

__all__ = [
    "DIRECTORY_FLAGS",
    "FoundEntry",
    "Staged",
    "UnsafeFileError",
    "check_owner",
    "close_all",
    "copy_into",
    "is_hex",
    "is_shortage",
    "open_subdirectory",
    "refusal_of",
    "refusal_to_store",
    "remove_tree",
    "stored_file",
]

DIRECTORY_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_COPY_BYTES = 4 << 20  # on kernels that do not preempt, a longer system call would keep a CPU from others
_TRIAL_BYTES = 64 << 10
_CHUNK_BYTES = 1 << 20  # stays in a core's cache between being read and being digested


class UnsafeFileError(OSError):
    """A file or directory that another account made, or could change."""


def copy_into(targets: Sequence[int], sources: Sequence[int], lengths: Sequence[int]) -> None:
    """Copy files of known lengths into empty ones. The offsets of `sources` do not matter, and do not move.

    Args:
        lengths: in bytes. Another account may let a source grow meanwhile, and must not fill the disk.

    Raises:
        OSError: a file cannot be read or written, or is shorter.
    """
    for target, source, length in zip(targets, sources, lengths, strict=True):
        at = 0
        while at < length:
            count = os.sendfile(target, source, at, min(_COPY_BYTES, length - at))
            if not count:
                raise OSError(errno.EIO, f"the file ends after {at} of {length} bytes")
            at += count


def refusal_of(error: OSError, doing: str) -> Refusal:
    """Return the refusal that an error of the cache directory stands for. `doing` begins its sentence."""
    if isinstance(error, UnsafeFileError):
        return Refusal(MissReason.UNSAFE, f"{doing}: {error}")
    return refusal_of_os_error(error, doing)


def refusal_to_store(path: str) -> Refusal | None:
    """Bring a small file without a name to a directory's disk. Returns why that is not possible, or None."""
    import tempfile  # few apps and commands ask

    try:
        with tempfile.TemporaryFile(dir=path, buffering=0) as file:
            file.write(bytes(_TRIAL_BYTES))
            os.fsync(file.fileno())
    except OSError as error:
        return refusal_of(error, f"a new file in {path}")
    return None


def is_shortage(error: OSError) -> bool:
    """Return whether this process or the machine has too many open files. Such a failure to read an entry says nothing about the entry."""
    return error.errno in (errno.EMFILE, errno.ENFILE)


def check_owner(status: os.stat_result, what: str) -> None:
    """Check that a file belongs to this account, and that no other account may write to it.

    Raises:
        UnsafeFileError: `what` begins its sentence.
    """
    if status.st_uid != os.geteuid():
        raise UnsafeFileError(f"{what} belongs to user {status.st_uid}, not to this one")
    if stat.S_IMODE(status.st_mode) & 0o022:
        raise UnsafeFileError(f"{what} has mode {stat.S_IMODE(status.st_mode):04o}: others may write to it; chmod go-w")


def open_subdirectory(parent: int, name: str) -> int:
    """Open a directory, made if it is missing."""
    try:
        return os.open(name, DIRECTORY_FLAGS, dir_fd=parent)
    except FileNotFoundError:
        with suppress(FileExistsError):
            os.mkdir(name, 0o700, dir_fd=parent)
        return os.open(name, DIRECTORY_FLAGS, dir_fd=parent)


class FoundEntry(msgspec.Struct):
    """An entry's directory and manifest, opened together.

    The manifest stays open. As long as it is open, no other file gets its inode number (`identity`).
    """

    fd: int
    manifest: Manifest
    _manifest_fd: int
    identity: tuple[int, int]

    def close(self) -> None:
        fds, self.fd, self._manifest_fd = (self.fd, self._manifest_fd), -1, -1
        close_all(fds)

    def open_files(self, flags: int = os.O_RDWR) -> tuple[list[int], list[int | None]]:
        """Return descriptors of all files, and their lengths. A missing file has descriptor -1 and length None.

        Raises:
            OSError: a file cannot be opened or is unsafe. Then none is left open.
        """
        fds: list[int] = []
        lengths: list[int | None] = []
        names = file_names(CacheFiles(len(self.manifest.model), len(self.manifest.data)))
        try:
            generation = os.open(self.manifest.directory, DIRECTORY_FLAGS, dir_fd=self.fd)
            try:
                for name in names:
                    try:
                        fds.append(os.open(name, flags | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, dir_fd=generation))
                    except FileNotFoundError:
                        fds.append(-1)
                        lengths.append(None)
                        continue
                    status = os.fstat(fds[-1])
                    check_owner(status, f"file {name}")
                    if not stat.S_ISREG(status.st_mode) or status.st_nlink != 1:
                        raise UnsafeFileError(f"file {name} is not a regular file with one name")
                    lengths.append(status.st_size)
            finally:
                os.close(generation)
        except FileNotFoundError:
            return [-1] * len(names), [None] * len(names)
        except BaseException:
            close_all(fds)
            raise
        return fds, lengths


class Staged(msgspec.Struct, frozen=True):
    """Fresh files that no manifest names yet, open for reading and writing."""

    directory: str
    names: tuple[str, ...]
    fds: tuple[int, ...]


def stored_file(fd: int) -> StoredFile:
    """Return length and digest of a file as it is now, whatever the descriptor's offset."""
    hasher = blake3()
    # A bytearray would be zeroed while this thread keeps every other thread from running.
    buffer = np.empty(min(_CHUNK_BYTES, max(os.fstat(fd).st_size, 1)), np.uint8).data
    at = 0
    while count := os.preadv(fd, [buffer], at):
        hasher.update(buffer[:count])
        at += count
    return StoredFile(at, hasher.digest())


def close_all(fds: Sequence[int]) -> None:
    """Close descriptors, except those that are -1."""
    for fd in fds:
        if fd >= 0:
            os.close(fd)


def is_hex(name: str, length: int) -> bool:
    """Return whether a name has that many lower-case hex digits, and nothing else."""
    return len(name) == length and not set(name) - set("0123456789abcdef")


def remove_tree(name: str, parent: int) -> None:
    """Remove a file, a symlink (itself), or a directory with all in it."""
    try:
        os.unlink(name, dir_fd=parent)
    except FileNotFoundError:
        return
    except (IsADirectoryError, PermissionError):
        try:
            fd = os.open(name, DIRECTORY_FLAGS, dir_fd=parent)
        except FileNotFoundError:  # another process removes the same
            return
        try:
            for inner in os.listdir(fd):
                remove_tree(inner, fd)
        finally:
            os.close(fd)
        with suppress(FileNotFoundError):
            os.rmdir(name, dir_fd=parent)
