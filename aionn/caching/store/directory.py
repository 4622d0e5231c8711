"""The cache directory's files: every open, write, rename and unlink of the store is here. Blocking; callers are in a thread.

    DIR/                            the app's; must be ours and writable by nobody else
        entries/<key, 64 hex>/
            manifest                what the entry is; replaced by rename, the one act that switches generations
            <16 hex>/model0 data0   one generation; immutable once a manifest names it, staging before
        locks/<key>.entry           readers shared, the publisher exclusive (`locks`)
        locks/<key>.entry.turn      held by a publisher who waits for readers
        locks/<key>.compile         held by the one who compiles
        trash/                      what is being deleted
        index.sqlite                derived: sizes and values for eviction; rebuilt from the manifests when lost

All below DIR is opened relative to its parent's descriptor, never through a symlink, close-on-exec. Descriptors are open while an act
is under way and no longer, so an app may use any number of directories.

A directory that cannot be written to (a read-only volume, a mode without `w`) is read without locks: files do not change once a manifest
names them, and whoever has them open keeps them.
"""

from __future__ import annotations

import errno
import functools
import os
import secrets
import stat
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Concatenate, ParamSpec, TypeVar

import numpy as np
from blake3 import blake3

from aionn.caching.manifest import MAX_MANIFEST_BYTES, Manifest, StoredFile, decode_manifest, encode_manifest, file_names
from aionn.caching.outcomes import MissReason, Refusal, refusal_of_os_error
from aionn.caching.store.locks import TURN
from aionn.hal.types import CacheFiles

__all__ = ["CacheDirectory", "FoundEntry", "Staged", "UnsafeFileError", "close_all", "refusal_of"]

P = ParamSpec("P")
T = TypeVar("T")
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_MANIFEST = "manifest"
_CHUNK_BYTES = 1 << 20  # stays in a core's cache between being read and being digested


class UnsafeFileError(OSError):
    """A file or directory that another account made, or could change."""


def refusal_of(error: OSError, doing: str) -> Refusal:
    if isinstance(error, UnsafeFileError):
        return Refusal(MissReason.UNSAFE, f"{doing}: {error}")
    return refusal_of_os_error(error, doing)


@dataclass(slots=True)
class FoundEntry:
    """An entry's directory and manifest, opened together.

    The manifest stays open: as long as it is, its inode number (`identity`) stands for no other file.
    """

    fd: int
    manifest: Manifest
    _manifest_fd: int
    identity: tuple[int, int]

    def close(self) -> None:
        fds, self.fd, self._manifest_fd = (self.fd, self._manifest_fd), -1, -1
        close_all(fds)


@dataclass(frozen=True, slots=True)
class Staged:
    """Fresh files that no manifest names yet, open for reading and writing."""

    directory: str
    names: tuple[str, ...]
    fds: tuple[int, ...]


def _check(status: os.stat_result, what: str) -> None:
    if status.st_uid != os.geteuid():
        raise UnsafeFileError(f"{what} belongs to user {status.st_uid}, not to this one")
    if stat.S_IMODE(status.st_mode) & 0o022:
        raise UnsafeFileError(f"{what} has mode {stat.S_IMODE(status.st_mode):04o}: others may write to it; chmod go-w")


def _subdirectory(parent: int, name: str) -> int:
    try:
        return os.open(name, _DIRECTORY, dir_fd=parent)
    except FileNotFoundError:
        with suppress(FileExistsError):
            os.mkdir(name, 0o700, dir_fd=parent)
        return os.open(name, _DIRECTORY, dir_fd=parent)


def _within(act: Callable[Concatenate[CacheDirectory, P], T]) -> Callable[Concatenate[CacheDirectory, P], T]:
    """Keep the directory open during an act."""

    @functools.wraps(act)
    def opened(self: CacheDirectory, /, *arguments: P.args, **options: P.kwargs) -> T:
        with self:
            return act(self, *arguments, **options)

    return opened


class CacheDirectory:
    """One cache directory, made if it is missing.

    `with directory:` keeps it open over several acts. Each act opens it by itself otherwise, and fails if the path leads to another
    directory by then.

    Attributes:
        path: absolute.
        identity: device and inode number.
        writable: whether entries can be stored, or could be when it was opened last.

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
            root = os.open(self.path, _DIRECTORY)
            self._fds.append(root)
            status = os.fstat(root)
            _check(status, f"cache directory {self.path}")
            if self.identity is None:
                self.identity = (status.st_dev, status.st_ino)
            elif self.identity != (status.st_dev, status.st_ino):
                raise FileNotFoundError(errno.ENOENT, "it has been replaced by another directory", self.path)
            # `access` knows read-only file systems and flags, which a mode does not tell.
            self.writable = os.access(".", os.W_OK, dir_fd=root, effective_ids=True)
            for name in ("entries", "trash", "locks"):
                if name != "entries" and not self.writable:
                    break
                fd = _subdirectory(root, name)
                self._fds.append(fd)
                _check(os.fstat(fd), f"{self.path}/{name}")
                self.writable = self.writable and os.access(".", os.W_OK, dir_fd=fd, effective_ids=True)
        except NotADirectoryError as error:
            raise UnsafeFileError(f"{self.path} or a part of it is a symlink or no directory") from error

    def _close(self) -> None:
        while self._fds:
            os.close(self._fds.pop())

    @property
    def _entries(self) -> int:
        return self._fds[1]

    @property
    def _trash(self) -> int:
        self._check_writable()
        return self._fds[2]

    @property
    def _locks(self) -> int:
        self._check_writable()
        return self._fds[3]

    def _check_writable(self) -> None:
        # A volume may become read-only while it is in use.
        if not self.writable:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), self.path)

    def is_current(self) -> bool:
        """Whether the path still leads here: the directory may have been deleted, or replaced."""
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
        """Keys of all entry directories, also of those without a manifest."""
        with os.scandir(self._entries) as found:
            return [bytes.fromhex(entry.name) for entry in found if _is_hex(entry.name, 64) and entry.is_dir(follow_symlinks=False)]

    @_within
    def orphaned_locks(self) -> list[bytes]:
        """Keys that have lock files and no entry: of compilations that were abandoned."""
        with os.scandir(self._locks) as found:
            keys = {bytes.fromhex(lock.name[:64]) for lock in found if _is_hex(lock.name[:64], 64)}
        return sorted(keys.difference(self.all_keys()))

    @contextmanager
    def _entry(self, key: bytes, *, make: bool = False) -> Iterator[int]:
        fd = _subdirectory(self._entries, key.hex()) if make else os.open(key.hex(), _DIRECTORY, dir_fd=self._entries)
        try:
            _check(os.fstat(fd), f"entry {key.hex()[:16]}")
            yield fd
        finally:
            os.close(fd)

    # --- reading -----------------------------------------------------------------------------------------------------

    @_within
    def find(self, key: bytes) -> FoundEntry | Refusal:
        """The entry with its manifest, to be closed; ABSENT, UNREADABLE or UNSAFE where the next who compiles may put another in its
        place.

        Raises:
            OSError: it may be there and whole, but cannot be read now.
        """
        with ExitStack() as stack:
            try:
                entry = os.open(key.hex(), _DIRECTORY, dir_fd=self._entries)
                stack.callback(os.close, entry)
                _check(os.fstat(entry), f"entry {key.hex()[:16]}")
                fd = os.open(_MANIFEST, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, dir_fd=entry)
                stack.callback(os.close, fd)
                status = os.fstat(fd)
                _check(status, "manifest")
                if not stat.S_ISREG(status.st_mode) or status.st_size > MAX_MANIFEST_BYTES:
                    return Refusal(MissReason.UNREADABLE, f"manifest is no regular file of at most {MAX_MANIFEST_BYTES} bytes")
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
        """The entry's manifest alone; as `find`."""
        found = self.find(key)
        if isinstance(found, Refusal):
            return found
        found.close()
        return found.manifest

    def is_still(self, key: bytes, found: FoundEntry) -> bool:
        """Whether the key still leads to what was found: it was neither replaced nor removed since."""
        try:
            with self:
                status = os.stat(f"{key.hex()}/{_MANIFEST}", dir_fd=self._entries, follow_symlinks=False)
        except OSError:
            return False
        return (status.st_dev, status.st_ino) == found.identity

    def open_files(self, found: FoundEntry, flags: int = os.O_RDWR) -> tuple[list[int], list[int | None]]:
        """Descriptors of all files, and their lengths; a file that is gone has descriptor -1 and length None.

        Raises:
            OSError: one cannot be opened or is unsafe; then none is left open.
        """
        fds: list[int] = []
        lengths: list[int | None] = []
        names = file_names(CacheFiles(len(found.manifest.model), len(found.manifest.data)))
        try:
            generation = os.open(found.manifest.directory, _DIRECTORY, dir_fd=found.fd)
            try:
                for name in names:
                    try:
                        fds.append(os.open(name, flags | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, dir_fd=generation))
                    except FileNotFoundError:
                        fds.append(-1)
                        lengths.append(None)
                        continue
                    status = os.fstat(fds[-1])
                    _check(status, f"file {name}")
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

    # --- writing: only by the holder of the compile lock -------------------------------------------------------------

    @_within
    def heal(self, key: bytes) -> None:
        """Delete what stands under the name of an entry if no entry can be kept in it: another kind of file, or a wrong mode."""
        try:
            status = os.stat(key.hex(), dir_fd=self._entries, follow_symlinks=False)
        except FileNotFoundError:
            return
        mode = stat.S_IMODE(status.st_mode)
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or mode & 0o022 or mode & 0o700 != 0o700:
            self._displace(key)

    @_within
    def stage(self, key: bytes, files: CacheFiles) -> Staged:
        """Fresh empty files in a directory of their own."""
        directory = secrets.token_hex(8)
        names = file_names(files)
        fds: list[int] = []
        with self._entry(key, make=True) as entry:
            os.mkdir(directory, 0o700, dir_fd=entry)
            try:
                generation = os.open(directory, _DIRECTORY, dir_fd=entry)
                try:
                    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
                    fds.extend(os.open(name, flags, 0o600, dir_fd=generation) for name in names)
                finally:
                    os.close(generation)
            except BaseException:
                close_all(fds)
                _remove_tree(directory, entry)
                raise
        return Staged(directory, names, tuple(fds))

    @_within
    def seal(self, key: bytes, staged: Staged) -> tuple[StoredFile, ...]:
        """Bring the staged files to disk; their lengths and digests.

        Raises:
            UnsafeFileError: a name no longer leads to the file that was staged.
        """
        with self._entry(key) as entry:
            generation = os.open(staged.directory, _DIRECTORY, dir_fd=entry)
            try:
                for name, fd in zip(staged.names, staged.fds, strict=True):
                    there, ours = os.stat(name, dir_fd=generation, follow_symlinks=False), os.fstat(fd)
                    if (there.st_dev, there.st_ino) != (ours.st_dev, ours.st_ino):
                        raise UnsafeFileError(f"file {name} was replaced while the driver wrote it")
                # Read and digested while the disk is at work, which takes several times as long.
                with ThreadPoolExecutor(1, "aionn sync") as syncing:
                    synced = [syncing.submit(os.fsync, fd) for fd in (*staged.fds, generation)]
                    files = tuple(map(stored_file, staged.fds))
                for done in synced:
                    done.result()
            finally:
                os.close(generation)
        return files

    @_within
    def switch(self, key: bytes, manifest: Manifest) -> None:
        """Make `manifest` the entry's. Before the rename the entry is the old one, after it the new one; on disk when this returns."""
        with self._entry(key, make=True) as entry:
            aside = f"{_MANIFEST}.{secrets.token_hex(4)}"
            fd = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=entry)
            try:
                try:
                    text = encode_manifest(manifest)
                    while text:
                        text = text[os.write(fd, text) :]
                    os.fsync(fd)
                finally:
                    os.close(fd)
                os.rename(aside, _MANIFEST, src_dir_fd=entry, dst_dir_fd=entry)
            except BaseException:
                with suppress(OSError):
                    os.unlink(aside, dir_fd=entry)
                raise
            os.fsync(entry)
        os.fsync(self._entries)

    def clean(self, key: bytes, keep: str = "") -> None:
        """Remove what no manifest names: other generations, staging of the dead; an entry without a manifest and without `keep` too."""
        try:
            with self:
                manifest = self.manifest(key)
                kept = {keep} | ({_MANIFEST, manifest.directory} if isinstance(manifest, Manifest) else set())
                with self._entry(key) as entry:
                    for name in os.listdir(entry):
                        if name not in kept:
                            _remove_tree(name, entry)
                if not keep:
                    os.rmdir(key.hex(), dir_fd=self._entries)  # fails unless it is empty
        except OSError:
            # Rubbish that stays costs space only; the next one who compiles this key tries again.
            return

    @_within
    def discard(self, key: bytes) -> None:
        """Remove a whole entry, whose locks are held, and the locks. Gone at once for readers, whatever happens while its files are
        deleted."""
        with suppress(FileNotFoundError):  # removed by another process, or by hand
            self._displace(key)
        entry_lock = self.entry_lock(key)
        for lock in (entry_lock, entry_lock + TURN, self.compile_lock(key)):
            with suppress(OSError):
                os.unlink(lock)

    def _displace(self, key: bytes) -> None:
        """Take what stands under the name of an entry out of the way, then delete it."""
        status = os.stat(key.hex(), dir_fd=self._entries, follow_symlinks=False)
        if stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid():
            os.chmod(key.hex(), 0o700, dir_fd=self._entries)  # a directory that its owner may not write to cannot be moved
        name = f"{key.hex()}.{secrets.token_hex(4)}"
        os.rename(key.hex(), name, src_dir_fd=self._entries, dst_dir_fd=self._trash)
        _remove_tree(name, self._trash)

    def empty_trash(self) -> None:
        """Delete what `discard` began to delete, and nothing else: the app's directory may have had a `trash` of its own."""
        with suppress(OSError), self:
            for name in os.listdir(self._trash):
                if _is_hex(name[:64], 64) and name[64:65] == "." and _is_hex(name[65:], 8):
                    _remove_tree(name, self._trash)


def stored_file(fd: int) -> StoredFile:
    """Length and digest of a file as it is now, whatever the descriptor's offset."""
    hasher = blake3()
    # Not a bytearray: it would be zeroed while this thread keeps every other from running.
    buffer = np.empty(min(_CHUNK_BYTES, max(os.fstat(fd).st_size, 1)), np.uint8).data
    at = 0
    while count := os.preadv(fd, [buffer], at):
        hasher.update(buffer[:count])
        at += count
    return StoredFile(at, hasher.digest())


def close_all(fds: Sequence[int]) -> None:
    for fd in fds:
        if fd >= 0:
            os.close(fd)


def _is_hex(name: str, length: int) -> bool:
    return len(name) == length and not set(name) - set("0123456789abcdef")


def _remove_tree(name: str, parent: int) -> None:
    """Remove a file, a symlink (itself), or a directory with all in it."""
    try:
        os.unlink(name, dir_fd=parent)
    except FileNotFoundError:
        return
    except (IsADirectoryError, PermissionError):
        try:
            fd = os.open(name, _DIRECTORY, dir_fd=parent)
        except FileNotFoundError:  # another process removes the same
            return
        try:
            for inner in os.listdir(fd):
                _remove_tree(inner, fd)
        finally:
            os.close(fd)
        with suppress(FileNotFoundError):
            os.rmdir(name, dir_fd=parent)
