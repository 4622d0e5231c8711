"""The cache directory: where everything lies in it, and how entries are found. `writing` changes entries. Blocking, for threads.

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
"""

from __future__ import annotations

import errno
import functools
import os
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Concatenate, ParamSpec, TypeVar

from aionn.caching.manifest import MAX_MANIFEST_BYTES, Manifest, decode_manifest
from aionn.caching.outcomes import MissReason, Refusal
from aionn.caching.store.files import DIRECTORY_FLAGS, FoundEntry, UnsafeFileError, check_owner, is_hex, open_subdirectory

__all__ = ["MANIFEST", "CacheDirectory"]

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
