"""The driver's side: which bytes this driver stored under a token, kept where only this driver writes.

Order is the whole of it. Save: hash the engine's own buffer, record the digests, and only then write the files. Load: copy a file into
a private buffer, hash *that buffer*, compare, and hand out *that buffer*. Between check and use lies nothing that anybody else
could change, so it does not matter when a file is replaced.

A token has up to `_CANDIDATES` records, newest first, not one. The files switch later than the record (the app publishes them), and
the app may die in between, two processes may save at once, or two apps keep the same model in caches of their own: whichever of the
sets of files is found at last, this driver wrote it, whole, and has its record. A mix of two sets has none.

Invariants
    Every digest in the store was computed from an engine's buffer in this process family, never from a file.
    All records of a store were made by one version of the engine: each version has a database of its own (`state.device_database`).

Nothing here raises for what a cache may look like: `save` and `load` return a `Refusal`. Both block; call them in a thread.
"""

from __future__ import annotations

import errno
import fcntl
import hmac
import io
import logging
import os
import sqlite3
import stat
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from blake3 import blake3

from aionn import trace
from aionn.caching.outcomes import MissReason, Refusal, refusal_of_os_error
from aionn.caching.state import (
    UnsafeStateError,
    device_database,
    is_damage,
    mark_used,
    open_database,
    private_directory,
    query,
    read_database,
    refusal_of_database_error,
    transaction,
)
from aionn.hal.interfaces import Artifact, CacheHandles
from aionn.hal.types import CACHE_TOKEN_BYTES, CacheFiles

__all__ = ["IntegrityStore", "digest_of", "reopen"]

_log = logging.getLogger("aionn.caching")
_CANDIDATES = 16  # the published set, one being published, two savers at once; and the same model in other cache directories
_LOCK_WAIT_S = 5.0  # two drivers write the same files: the second waits for the first's write, which takes a fraction of a second
_PARALLEL_BYTES = 2 << 20  # below this, starting BLAKE3's threads costs more than it gains
_PIPELINED_BYTES = 16 << 20  # below this, BLAKE3's own threads over the whole are quicker than hashing while the rest is read
_WRITABLE_BYTES = 64 << 10  # smaller ones are `bytes`: one system call and no array
_CHUNK_BYTES = 4 << 20
_WRITE_BYTES = 4 << 20  # a longer system call would keep a CPU from others on kernels that do not preempt, an event loop among them
_RECORD_BYTES = 8 + 32
_Purpose = Literal["read", "write"]


def reopen(fd: int) -> int:
    """A descriptor of its own for the same file: own offset, own locks. The caller closes it.

    A lock taken on a descriptor that came over a socket belongs to the open file description, and so to its sender as well;
    `dup` would share it too.

    Raises:
        OSError: the descriptor is closed, or the file may not be opened again as it is open now.
    """
    access = fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE
    return os.open(f"/proc/self/fd/{fd}", access | os.O_CLOEXEC)


def digest_of(buffer: Any) -> bytes:
    """BLAKE3 of a bytes-like object, 32 bytes; on several threads where that pays. Releases the GIL."""
    threads = blake3.AUTO if memoryview(buffer).nbytes >= _PARALLEL_BYTES else 1
    return blake3(buffer, max_threads=threads).digest()


class IntegrityStore:
    """Digests of one engine's cache files, by token. Thread-safe; several processes may use one store at once."""

    def __init__(
        self, device: str, version: str, files: CacheFiles, *, state_directory: str | os.PathLike[str] | None = None, max_tokens: int = 4096
    ) -> None:
        """Open the store of this version of `device`, and remove stores of its other versions that were not used for long.

        Args:
            device, version: the engine's; the store's file is named after both.
            files: how many cache files the engine has.
            state_directory: None: the user's (`platformdirs.user_state_path("aionn")`).
            max_tokens: beyond it the token unused for longest is forgotten.

        A directory that cannot be used is no error: `unavailable` says why, and every save and load is refused with it.
        """
        self.device, self.version, self.files, self.max_tokens = device, version, files, max_tokens
        self.unavailable: Refusal | None = None
        self._lock = threading.Lock()
        self._database: sqlite3.Connection | None = None
        self._read_only = False  # what was recorded is believed, and nothing more can be
        self._used: dict[bytes, None] = {}  # tokens loaded since `note_uses`, the latest last
        try:
            directory = private_directory(Path(state_directory) if state_directory is not None else None)
            self._path = device_database(directory, "integrity", device, version)
            self._database = self._open()
        except (OSError, sqlite3.Error) as error:
            where = "$XDG_STATE_HOME/aionn, else ~/.local/state/aionn" if state_directory is None else str(state_directory)
            doing = f"integrity store of {device!r} (in {where}; Runtime(state_dir=) and --state-dir choose another folder)"
            if isinstance(error, UnsafeStateError):
                self.unavailable = Refusal(MissReason.UNSAFE, f"{doing}: {error}")
            elif isinstance(error, OSError):
                self.unavailable = refusal_of_os_error(error, doing)
            else:
                self.unavailable = refusal_of_database_error(error, doing)
            _log.warning("device %s runs without a compilation cache: %s", device, self.unavailable)

    def _open(self) -> sqlite3.Connection:
        try:
            return open_database(self._path, self._prepare)
        except OSError as error:
            if error.errno not in (errno.EROFS, errno.EACCES, errno.EPERM) or not self._path.exists():
                raise
            self._read_only = True
            return read_database(self._path)

    def _prepare(self, database: sqlite3.Connection) -> None:
        database.execute("CREATE TABLE IF NOT EXISTS tokens (token BLOB PRIMARY KEY, used INTEGER NOT NULL) WITHOUT ROWID")
        database.execute("CREATE INDEX IF NOT EXISTS by_use ON tokens (used)")
        database.execute(
            "CREATE TABLE IF NOT EXISTS records (number INTEGER PRIMARY KEY AUTOINCREMENT, token BLOB NOT NULL, digests BLOB NOT NULL, "
            "UNIQUE (token, digests))"
        )
        database.execute("SELECT token, used FROM tokens LIMIT 1")
        database.execute("SELECT number, token, digests FROM records LIMIT 1")

    def close(self) -> None:
        """Close the database. Later saves and loads are refused."""
        self.note_uses()
        with self._lock:
            if self._database is not None:
                self._database.close()
                self._database = None
                self.unavailable = Refusal(MissReason.IO_ERROR, "integrity store is closed")

    def _begin_anew_if_damaged(self, error: sqlite3.Error) -> None:
        """A store that cannot be read has forgotten everything, but is not to fail for ever."""
        if not is_damage(error) or self._read_only:
            return
        with self._lock:
            if self._database is None:
                return
            _log.warning("device %s: its store of digests is damaged and begun anew: %s", self.device, error)
            trace.count("cache.state_begun_anew", device=self.device)
            self._database.close()
            self._database = None
            self._used.clear()
            try:
                self._database = open_database(self._path, self._prepare, anew=True)
            except (OSError, sqlite3.Error) as again:
                self.unavailable = Refusal(MissReason.IO_ERROR, f"integrity store of {self.device!r}: {again}")

    # --- save --------------------------------------------------------------------------------------------------------

    def save(self, handles: CacheHandles, artifact: Artifact) -> Refusal | None:
        """Record and write an artifact; None if it was stored. The files are whole and recorded, or refused when loaded.

        The files are truncated and written from their beginning, wherever the descriptors' offsets stand. They are not synced
        to disk: the app's store does that when it publishes them.
        """
        with trace.span("cache.save", device=self.device):
            refusal = self._save(handles, artifact)
        if refusal is not None:
            _log.info("device %s did not store an artifact: %s", self.device, refusal)
        trace.count("cache.saved" if refusal is None else "cache.save_failed", device=self.device)
        return refusal

    def _save(self, handles: CacheHandles, artifact: Artifact) -> Refusal | None:
        own: list[int] = []
        try:
            if CacheFiles(len(artifact.model), len(artifact.data)) != self.files:
                return Refusal(
                    MissReason.WRONG_FILES,
                    f"the engine exported {len(artifact.model)} + {len(artifact.data)} files, it announced {self.files}",
                )
            refusal = self._check(handles, "write")
            if refusal is not None:
                return refusal
            buffers = [memoryview(buffer).cast("B") for buffer in (*artifact.model, *artifact.data)]
            digests = b"".join(buffer.nbytes.to_bytes(8, "little") + digest_of(buffer) for buffer in buffers)
            refusal = self._record(handles.token, digests)
            if refusal is not None:
                return refusal
            own.extend(reopen(fd) for fd in (*handles.model, *handles.data))
            from filelock import lock_descriptor  # 6 ms of a driver's first hit that only a save needs

            # One lock for the set: of two drivers that were given the same files, the later one's set stays, unmixed.
            given_up_at = time.monotonic() + _LOCK_WAIT_S
            while not lock_descriptor(own[0], blocking=False):
                if time.monotonic() > given_up_at:
                    return Refusal(MissReason.BUSY, f"another driver has been writing these files for {_LOCK_WAIT_S} s")
                time.sleep(0.01)
            for fd, buffer in zip(own, buffers, strict=True):
                _write_whole(fd, buffer)
        except OSError as error:
            return refusal_of_os_error(error, "writing the cache files")
        except (TypeError, ValueError, BufferError) as error:
            return Refusal(MissReason.IO_ERROR, f"the engine's artifact is not made of contiguous bytes: {error}")
        except sqlite3.Error as error:
            self._begin_anew_if_damaged(error)
            return refusal_of_database_error(error, "recording the digests")
        finally:
            for fd in own:
                os.close(fd)
        return None

    def _record(self, token: bytes, digests: bytes) -> Refusal | None:
        with self._lock:
            if self._database is None:
                return self.unavailable
            if self._read_only:
                return Refusal(MissReason.NO_PERMISSION, f"the records in {self._path.parent} are read-only")
            with transaction(self._database) as database:
                self._write_uses(database)
                database.execute("INSERT OR IGNORE INTO tokens VALUES (?, 0)", (token,))
                self._touch(database, token)
                # OR REPLACE: the same bytes saved again become the newest record.
                database.execute("INSERT OR REPLACE INTO records (token, digests) VALUES (?, ?)", (token, digests))
                database.execute(
                    "DELETE FROM records WHERE token = ? AND number NOT IN "
                    "(SELECT number FROM records WHERE token = ? ORDER BY number DESC LIMIT ?)",
                    (token, token, _CANDIDATES),
                )
                (tokens,) = database.execute("SELECT COUNT(*) FROM tokens").fetchone()
                if tokens > self.max_tokens:
                    oldest = database.execute("SELECT token FROM tokens ORDER BY used LIMIT ?", (tokens - self.max_tokens,)).fetchall()
                    database.executemany("DELETE FROM records WHERE token = ?", oldest)
                    database.executemany("DELETE FROM tokens WHERE token = ?", oldest)
            mark_used(self._path)
        return None

    @staticmethod
    def _touch(database: sqlite3.Connection, token: bytes) -> None:
        database.execute("UPDATE tokens SET used = (SELECT MAX(used) + 1 FROM tokens) WHERE token = ?", (token,))

    def _write_uses(self, database: sqlite3.Connection) -> None:
        for token in self._used:
            self._touch(database, token)
        self._used.clear()

    def note_uses(self) -> None:
        """Write down which tokens were loaded since the last time: for whoever has answered its client and has a moment.

        A load leaves this to later because it costs as much as the rest of it; a process that is killed in between loses nothing
        but the order in which tokens are forgotten.
        """
        with self._lock:
            if self._database is None or self._read_only or not self._used:
                return
            try:
                with transaction(self._database) as database:
                    self._write_uses(database)
                mark_used(self._path)
            except sqlite3.Error as error:
                self._used.clear()
                _log.info("device %s: the use of cached artifacts was not noted: %s", self.device, error)

    # --- load --------------------------------------------------------------------------------------------------------

    def load(self, handles: CacheHandles) -> Artifact | Refusal:
        """The artifact that this driver stored under `handles.token`, or why not.

        Returns:
            `Artifact` of private buffers (bytes; from 64 KiB on writable memoryviews) whose digests match a record; nobody else
            has a reference to them.
        """
        with trace.span("cache.verify", device=self.device):
            try:
                result = self._load(handles)
            except OSError as error:
                result = refusal_of_os_error(error, "reading the cache files")
            except sqlite3.Error as error:
                self._begin_anew_if_damaged(error)
                result = refusal_of_database_error(error, "reading the digests")
            except MemoryError:
                result = Refusal(MissReason.IO_ERROR, "no memory for a private copy of the cache files")
        if isinstance(result, Refusal):
            _log.info("device %s refused a cached artifact: %s", self.device, result)
            trace.count("cache.refused", device=self.device, reason=result.reason.value)
        return result

    def _load(self, handles: CacheHandles) -> Artifact | Refusal:
        refusal = self._check(handles, "read")
        if refusal is not None:
            return refusal
        with self._lock:
            if self._database is None:
                return self.unavailable or Refusal(MissReason.IO_ERROR, "integrity store is closed")
            rows = query(self._database, "SELECT digests FROM records WHERE token = ? ORDER BY number DESC", (handles.token,))
            recorded = [digests for (digests,) in rows if isinstance(digests, bytes)]  # SQLite keeps any type in any column
            if recorded:
                self._used.pop(handles.token, None)
                self._used[handles.token] = None
        if not recorded:
            return Refusal(
                MissReason.NO_INTEGRITY_RECORD, f"this driver has no record of token {handles.token.hex()[:16]} in {self._path.parent}"
            )

        fds = (*handles.model, *handles.data)
        lengths = [os.fstat(fd).st_size for fd in fds]
        # Before reading anything: a file somebody made huge must not cost its size in memory.
        candidates = [digests for digests in recorded if _lengths(digests) == lengths]
        if not candidates:
            stored = " or ".join(str(_lengths(digests)) for digests in recorded)
            return Refusal(MissReason.WRONG_LENGTH, f"files of {lengths} bytes; stored were {stored}")
        copies = [_read_private(fd, length) for fd, length in zip(fds, lengths, strict=True)]
        found = b"".join(len(buffer).to_bytes(8, "little") + digest for buffer, digest in copies)
        # No short cut on the first match: time must not tell which candidate, or how much of one, was met.
        if not sum([hmac.compare_digest(found, digests) for digests in candidates]):
            return Refusal(MissReason.WRONG_BYTES, f"the contents of {len(fds)} files are not what this driver stored")
        buffers = tuple(buffer for buffer, _ in copies)
        return Artifact(buffers[: self.files.model], buffers[self.files.model :])

    def _check(self, handles: CacheHandles, purpose: _Purpose) -> Refusal | None:
        """What can be seen without reading: numbers, the token's length, access mode, kind of file."""
        if self.unavailable is not None:
            return self.unavailable
        if CacheFiles(len(handles.model), len(handles.data)) != self.files:
            return Refusal(
                MissReason.WRONG_FILES,
                f"{len(handles.model)} model and {len(handles.data)} data handles, needed: {self.files.model} and {self.files.data}",
            )
        if not self.files.supported:
            return Refusal(MissReason.WRONG_FILES, "this device does not cache")
        if len(handles.token) != CACHE_TOKEN_BYTES:
            return Refusal(MissReason.WRONG_TOKEN, f"token of {len(handles.token)} bytes, a token has {CACHE_TOKEN_BYTES}")
        return _check_descriptors((*handles.model, *handles.data), purpose)


def _check_descriptors(fds: Sequence[int], purpose: _Purpose) -> Refusal | None:
    """NNAPI's clients open all files for reading and writing. A cache on a read-only volume cannot, and a load only reads."""
    allowed = {os.O_RDWR} if purpose == "write" else {os.O_RDWR, os.O_RDONLY}
    seen = set()
    for index, fd in enumerate(fds):
        try:
            access = fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE
            status = os.fstat(fd)
        except (OSError, ValueError, OverflowError) as error:
            return Refusal(MissReason.BAD_HANDLE, f"handle {index}: {error}")
        if access not in allowed:
            needed = "reading and writing" if purpose == "write" else "reading"
            return Refusal(MissReason.BAD_HANDLE, f"handle {index} is not open for {needed}")
        if not stat.S_ISREG(status.st_mode):
            return Refusal(MissReason.BAD_HANDLE, f"handle {index} is not a regular file")
        if (status.st_dev, status.st_ino) in seen:
            return Refusal(MissReason.BAD_HANDLE, f"handle {index} is the same file as another")
        seen.add((status.st_dev, status.st_ino))
    return None


def _lengths(digests: bytes) -> list[int]:
    return [int.from_bytes(digests[at : at + 8], "little") for at in range(0, len(digests), _RECORD_BYTES)]


def _write_whole(fd: int, buffer: memoryview) -> None:
    # "the driver must truncate a file to zero size before writing" (HAL 1.2, prepareModel)
    os.ftruncate(fd, 0)
    at = 0
    while at < buffer.nbytes:
        at += os.pwrite(fd, buffer[at : at + _WRITE_BYTES], at)


def _read_private(fd: int, length: int) -> tuple[bytes | memoryview, bytes]:
    """`length` bytes from the beginning of the file, or fewer if it has been cut, and their digest; this process's own.

    All but small ones are writable: an engine that insists on that uses them in place, and nobody else has them.
    """
    if length < _WRITABLE_BYTES:
        content = os.pread(fd, length, 0)
        return content, digest_of(content)
    if length < _PIPELINED_BYTES:
        # Neither a bytearray, which would be zeroed first, nor an array: NumPy asks for huge pages, and having one cleared by the kernel
        # takes longer than reading and hashing so few bytes. Nobody else has the bytes, so `BytesIO` does not copy them.
        view = io.BytesIO(os.pread(fd, length, 0)).getbuffer()
        return view, digest_of(view)
    buffer = np.empty(length, np.uint8).data
    at = 0
    from concurrent.futures import ThreadPoolExecutor

    # One thread copies while another hashes what was copied: the copy costs twice what the hash does, so the whole costs little more
    # than reading.
    hasher = blake3()
    with ThreadPoolExecutor(1, "aionn verify") as hashing:
        while at < length and (count := os.preadv(fd, [buffer[at : at + _CHUNK_BYTES]], at)):
            hashing.submit(hasher.update, buffer[at : at + count])
            at += count
    return buffer[:at], hasher.digest()
