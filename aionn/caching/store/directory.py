"""The cache directory: where everything lies in it, and how entries are found, and how its files are opened and checked.

`writing` changes entries. Everything here blocks, for threads.

    DIR/                            the app's; it must be ours, and writable for no other account
        entries/<key, 64 hex>/
            manifest                what the entry is; the rename that replaces it is the one act that switches generations
            <16 hex>/model0 data0   one generation; staging first, immutable once a manifest names it
        locks/<key>.entry           readers shared, the publisher exclusive (`locks`)
        locks/<key>.entry.turn      held by a publisher who waits for readers
        locks/<key>.compile         held by the one who compiles
        trash/                      what is being deleted
        index.sqlite                derived: sizes and values for eviction; rebuilt from the manifests when lost

Everything below DIR is opened relative to its parent's descriptor, never through a symlink, close-on-exec. Descriptors are open only during
an act, so an app may use any number of directories.

A directory that cannot be written to (a read-only volume, a mode without `w`) is read without locks. That is safe because files do not
change once a manifest names them, and a process that has them open keeps them.

Cache files for a driver that is about to write are opened once more in the app, so that the driver opens nothing. A driver locks the files
that it writes. flock belongs to an open file description, and a descriptor that is sent over a socket, duplicated or inherited still
belongs to the same one. So a lock would not keep out another driver that got the same description.

Invariants
    Each preparation sends fresh descriptions, which no other user locks. Their offsets begin at 0.
    A load shares its descriptions with the app, because it uses neither an offset nor a lock.
"""

from __future__ import annotations

import errno
import fcntl
import functools
import os
import stat
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Concatenate, ParamSpec, TypeVar

import msgspec
from blake3 import blake3

from aionn.caching.manifest import MAX_MANIFEST_BYTES, Manifest, StoredFile, decode_manifest, file_names
from aionn.caching.outcomes import MissReason, Refusal, refusal_of_os_error
from aionn.caching.private_folder import empty_folder
from aionn.errors import NO_DESCRIPTOR_LEFT
from aionn.hal.interfaces import CacheHandles
from aionn.hal.types import CacheFiles

__all__ = [
    "DIRECTORY_FLAGS",
    "MANIFEST",
    "CacheDirectory",
    "FoundEntry",
    "Staged",
    "UnsafeFileError",
    "check_owner",
    "close_all",
    "close_handles",
    "copy_into",
    "is_hex",
    "is_shortage",
    "open_again",
    "open_subdirectory",
    "refusal_of",
    "refusal_to_store",
    "remove_tree",
    "reopen",
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
    return error.errno in NO_DESCRIPTOR_LEFT


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
    """Return length and digest of a file as it is now, whatever the descriptor's offset. What is added meanwhile does not count."""
    hasher = blake3()
    length, at = os.fstat(fd).st_size, 0
    buffer = memoryview(bytearray(min(_CHUNK_BYTES, length)))
    while count := os.preadv(fd, [buffer[: length - at]], at):
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
    with suppress(FileNotFoundError):  # another process removes the same
        try:
            os.unlink(name, dir_fd=parent)
        except (IsADirectoryError, PermissionError):
            fd = os.open(name, DIRECTORY_FLAGS, dir_fd=parent)
            try:
                empty_folder(fd)
            finally:
                os.close(fd)
            os.rmdir(name, dir_fd=parent)


P = ParamSpec("P")
T = TypeVar("T")
MANIFEST = "manifest"


def _within(act: Callable[Concatenate[CacheDirectory, P], T]) -> Callable[Concatenate[CacheDirectory, P], T]:
    """Keep the directory open during an act."""

    @functools.wraps(act)
    def opened(self: CacheDirectory, /, *arguments: P.args, **options: P.kwargs) -> T:
        with self:
            return act(self, *arguments, **options)

    return opened


class CacheDirectory:
    """One cache directory, made if it is missing.

    `with directory:` keeps it open over several acts. Without that, each act opens the directory, and fails if the path leads to another
    directory by then.

    Attributes:
        path: absolute.
        identity: device and inode number.
        writable: whether entries can be stored, or could be when the directory was opened last.

    Raises (construction): OSError, UnsafeFileError.
    """

    def __init__(self, path: str) -> None:
        self.path = os.path.abspath(path)
        self.identity: tuple[int, int] | None = None
        self.writable = True
        self._lock = threading.Lock()
        self._acts = 0
        self._fds: list[int] = []
        os.makedirs(os.path.dirname(self.path), exist_ok=True)
        with suppress(FileExistsError):
            os.mkdir(self.path, 0o700)
        with self:
            return

    def __enter__(self) -> CacheDirectory:
        with self._lock:
            if not self._acts:
                try:
                    self._open()
                except BaseException:
                    self._close()
                    raise
            self._acts += 1
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._acts -= 1
            if not self._acts:
                self._close()

    def _open(self) -> None:
        try:
            root = os.open(self.path, DIRECTORY_FLAGS)
            self._fds.append(root)
            status = os.fstat(root)
            check_owner(status, f"cache directory {self.path}")
            if self.identity is None:
                self.identity = (status.st_dev, status.st_ino)
            elif self.identity != (status.st_dev, status.st_ino):
                raise FileNotFoundError(errno.ENOENT, "it has been replaced by another directory", self.path)
            # `access` knows read-only file systems and flags, which a mode does not show.
            self.writable = os.access(".", os.W_OK, dir_fd=root, effective_ids=True)
            for name in ("entries", "trash", "locks"):
                if name != "entries" and not self.writable:
                    break
                fd = open_subdirectory(root, name)
                self._fds.append(fd)
                check_owner(os.fstat(fd), f"{self.path}/{name}")
                self.writable = self.writable and os.access(".", os.W_OK, dir_fd=fd, effective_ids=True)
        except NotADirectoryError as error:
            raise UnsafeFileError(f"{self.path} or a part of it is a symlink, or not a directory") from error

    def _close(self) -> None:
        while self._fds:
            os.close(self._fds.pop())

    @property
    def entries_fd(self) -> int:
        """The descriptor of `entries`, during an act."""
        return self._fds[1]

    @property
    def trash_fd(self) -> int:
        """The descriptor of `trash`, during an act. Raises OSError if the directory cannot be written to."""
        self._check_writable()
        return self._fds[2]

    def _check_writable(self) -> None:
        # A volume may become read-only while it is in use.
        if not self.writable:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), self.path)

    def is_current(self) -> bool:
        """Return whether the path still leads here: the directory may have been deleted, or replaced."""
        try:
            status = os.stat(self.path, follow_symlinks=False)
            os.stat(f"{self.path}/entries", follow_symlinks=False)
            if self.writable:
                os.stat(f"{self.path}/locks", follow_symlinks=False)
        except OSError:
            return False
        return (status.st_dev, status.st_ino) == self.identity

    @property
    def not_writable(self) -> Refusal:
        """Why nothing is stored in a directory that is not `writable`."""
        return Refusal(MissReason.NO_PERMISSION, f"{self.path} is read-only for this account: what it holds is used, nothing is stored")

    def entry_lock(self, key: bytes) -> str:
        return f"{self.path}/locks/{key.hex()}.entry"

    def compile_lock(self, key: bytes) -> str:
        return f"{self.path}/locks/{key.hex()}.compile"

    @property
    def index(self) -> str:
        return f"{self.path}/index.sqlite"

    @_within
    def all_keys(self) -> list[bytes]:
        """Return the keys of all entry directories, also of those without a manifest."""
        with os.scandir(self.entries_fd) as found:
            return [bytes.fromhex(entry.name) for entry in found if is_hex(entry.name, 64) and entry.is_dir(follow_symlinks=False)]

    @_within
    def orphaned_locks(self) -> list[bytes]:
        """Return the keys that have lock files and no entry. Abandoned compilations leave them."""
        self._check_writable()
        with os.scandir(self._fds[3]) as found:
            keys = {bytes.fromhex(lock.name[:64]) for lock in found if is_hex(lock.name[:64], 64)}
        return sorted(keys.difference(self.all_keys()))

    @contextmanager
    def entry(self, key: bytes, *, make: bool = False) -> Iterator[int]:
        """Open the directory of an entry for the body, during an act. `make` makes it if it is missing.

        Raises:
            OSError, UnsafeFileError: it cannot be used.
        """
        fd = open_subdirectory(self.entries_fd, key.hex()) if make else os.open(key.hex(), DIRECTORY_FLAGS, dir_fd=self.entries_fd)
        try:
            check_owner(os.fstat(fd), f"entry {key.hex()[:16]}")
            yield fd
        finally:
            os.close(fd)

    @_within
    def find(self, key: bytes) -> FoundEntry | Refusal:
        """Return the entry with its manifest, to be closed. Return ABSENT, UNREADABLE or UNSAFE if the next compiler may replace it.

        Raises:
            OSError: it may be there and whole, but cannot be read now.
        """
        with ExitStack() as stack:
            try:
                entry = os.open(key.hex(), DIRECTORY_FLAGS, dir_fd=self.entries_fd)
                stack.callback(os.close, entry)
                check_owner(os.fstat(entry), f"entry {key.hex()[:16]}")
                fd = os.open(MANIFEST, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, dir_fd=entry)
                stack.callback(os.close, fd)
                status = os.fstat(fd)
                check_owner(status, "manifest")
                if not stat.S_ISREG(status.st_mode) or status.st_size > MAX_MANIFEST_BYTES:
                    return Refusal(MissReason.UNREADABLE, f"the manifest is not a regular file of at most {MAX_MANIFEST_BYTES} bytes")
                manifest = decode_manifest(os.read(fd, MAX_MANIFEST_BYTES + 1))
            except FileNotFoundError:
                return Refusal(MissReason.ABSENT, f"nothing is stored under {key.hex()[:16]}")
            except UnsafeFileError as error:
                return Refusal(MissReason.UNSAFE, str(error))
            except OSError as error:
                if error.errno != errno.ELOOP:
                    raise
                return Refusal(MissReason.UNSAFE, "the manifest is a symlink")
            if isinstance(manifest, Refusal):
                return manifest
            stack.pop_all()
            return FoundEntry(entry, manifest, fd, (status.st_dev, status.st_ino))

    def manifest(self, key: bytes) -> Manifest | Refusal:
        """Return the entry's manifest alone, or why it cannot serve, as `find` does."""
        found = self.find(key)
        if isinstance(found, Refusal):
            return found
        found.close()
        return found.manifest

    def is_still(self, key: bytes, found: FoundEntry) -> bool:
        """Return whether the key still leads to the found entry, which may have been replaced or removed."""
        try:
            with self:
                status = os.stat(f"{key.hex()}/{MANIFEST}", dir_fd=self.entries_fd, follow_symlinks=False)
        except OSError:
            return False
        return (status.st_dev, status.st_ino) == found.identity


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
