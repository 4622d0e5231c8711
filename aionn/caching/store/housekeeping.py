"""Housekeeping of one cache directory: find or make it, tidy up after dead processes, keep it within its budget.

Entries that are held open (by readers or compilers) are pinned. Removal takes both locks of an entry. It passes the entry over if it
cannot have both at once. Everything here is blocking and runs in threads.

`aionn cache` asks a directory to list its entries, to read every file and compare it with its manifest, and to prune. Pruning removes old
versions, damaged entries and rubbish, then the least valuable entries. All functions except `verify` block, so they run in threads.
"""

from __future__ import annotations

import logging
import os
import sqlite3
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TypeVar

import msgspec
from blake3 import blake3

from aionn import trace
from aionn.caching.manifest import Manifest, file_names
from aionn.caching.outcomes import MissReason, Refusal
from aionn.caching.store.directory import CacheDirectory, FoundEntry, close_all, is_shortage, refusal_of, refusal_to_store
from aionn.caching.store.index import Index
from aionn.caching.store.locks import sole_holder
from aionn.caching.store.writing import clean, empty_trash, remove_entry, switch
from aionn.hal.types import CacheFiles
from aionn.tasks import run_in_thread

__all__ = ["BadEntry", "CacheUsage", "EntryInfo", "Housekeeping", "PruneReport", "list_entries", "prune", "verify"]

T = TypeVar("T")
_log = logging.getLogger("aionn.caching")
_LOCKED_S = 60.0
"""For so long an index is left alone whose lock another process has kept while this one waited for it: that process may be stopped."""

_USUAL = {MissReason.BUSY, MissReason.SUPERSEDED}  # another process was quicker: both have what they need


class CacheUsage(msgspec.Struct, frozen=True):
    """What a cache holds, as of the last time that this process opened, published in or pruned the directory.

    Attributes:
        held_bytes: bytes that count against the budget. entries: how many there are.
        evicted: entries that this store has removed so far.
    """

    held_bytes: int = 0
    entries: int = 0
    evicted: int = 0


class Housekeeping:
    """One directory, its index, and the order in it.

    Attributes:
        usage: what the directory holds. Threads replace it, and any thread may read it.
    """

    def __init__(self, path: str, max_bytes: int | None, old_versions_kept_s: float) -> None:
        self.path, self.max_bytes = path, max_bytes
        self._old_versions_kept_s = old_versions_kept_s
        self._lock = threading.Lock()
        self.directory: CacheDirectory | None = None
        self._index_lock = threading.Lock()
        self._index: Index | None = None  # open while a thread uses it
        self._index_users = 0
        self._index_locked_until_s = 0.0
        self._warned: set[MissReason] = set()
        self.usage = CacheUsage()

    def close(self) -> None:
        """Forget the directory. A thread that still works in it closes what it opened."""
        self.directory = None

    def warn(self, refusal: Refusal) -> None:
        """Log one warning per reason and store: a full disk is reported once, not once per model."""
        if refusal.reason not in self._warned:
            self._warned.add(refusal.reason)
            level = logging.INFO if refusal.reason in _USUAL else logging.WARNING
            _log.log(level, "compilation cache %s cannot be used as asked: %s; `aionn doctor --cache-dir` looks at it", self.path, refusal)

    def current(self) -> CacheDirectory | Refusal:
        """Return the directory as it is now, made again if it was deleted. The first call also tidies up."""
        with self._lock:
            if self.directory is not None and self.directory.is_current():
                return self.directory
            try:
                directory = CacheDirectory(self.path)
            except OSError as error:
                self.directory = None
                return refusal_of(error, f"cache directory {self.path}")
            self.directory = directory  # in one step: other threads read it without the lock and must never find None
        if directory.writable:
            with suppress(OSError), directory, self.indexed():
                self._tidy(directory)
        return directory

    def fault(self) -> Refusal | None:
        """See `CacheStore.fault`. Blocking."""
        directory = self.current()
        if isinstance(directory, Refusal):
            return directory
        refusal = refusal_to_store(self.path) if directory.writable else directory.not_writable
        try:
            return None if refusal is None or directory.all_keys() else refusal
        except OSError as error:
            return refusal_of(error, f"cache directory {self.path}")

    def _tidy(self, directory: CacheDirectory) -> None:
        empty_trash(directory)
        if not self.with_index(lambda index: index.complete):
            self._rebuild_index(directory)
        for key in self.with_index(lambda index: index.staging()) or []:
            self.clean_if_free(directory, key)
        for key in self.with_index(lambda index: index.superseded(self._old_versions_kept_s)) or []:
            self.remove_if_free(directory, key)
        self.note_usage()

    # --- the index ---------------------------------------------------------------------------------------------------

    @contextmanager
    def indexed(self) -> Iterator[Index | None]:
        """Keep the index open for the block; it is None if it cannot be used. Threads that use it at the same time share it."""
        directory = self.directory
        with self._index_lock:
            locked = time.monotonic() < self._index_locked_until_s
            if self._index is None and directory is not None and directory.writable and not locked:
                try:
                    self._index = Index(directory.index)
                except (OSError, sqlite3.Error) as error:
                    self._cannot_use_index(error)
            self._index_users += 1
            index = None if locked else self._index
        try:
            yield index
        finally:
            with self._index_lock:
                self._index_users -= 1
                if not self._index_users and self._index is not None:
                    self._index.close()
                    self._index = None

    def with_index(self, act: Callable[[Index], T]) -> T | None:
        """Ask the index. Return None if it cannot be used. Only the budget depends on the index."""
        with self.indexed() as index:
            if index is None:
                return None
            try:
                return act(index)
            except (OSError, sqlite3.Error) as error:
                self._cannot_use_index(error)
                return None

    def _cannot_use_index(self, error: Exception) -> None:
        if getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_BUSY:
            self._index_locked_until_s = time.monotonic() + _LOCKED_S
        self.warn(Refusal(MissReason.IO_ERROR, f"the index of sizes cannot be used, nothing will be evicted: {error}"))

    def _rebuild_index(self, directory: CacheDirectory) -> None:
        try:
            keys = directory.all_keys()
        except OSError as error:
            self.warn(refusal_of(error, "its entries, for the index of sizes"))
            return
        for key in keys:
            try:
                manifest = directory.manifest(key)
            except OSError as error:
                if is_shortage(error):
                    self.warn(refusal_of(error, "its entries, for the index of sizes"))
                    return
                continue
            if isinstance(manifest, Manifest) and manifest.key == key:
                self.with_index(lambda index, manifest=manifest: index.put(manifest, published=False))  # type: ignore[misc]
            else:
                self.with_index(lambda index, key=key: index.note_staging(key))  # type: ignore[misc]
        self.with_index(lambda index: index.set_complete())

    def left_bytes(self) -> int:
        """Return how many bytes count against the budget."""
        return self.with_index(lambda index: index.total_bytes) or 0

    def note_usage(self) -> None:
        """Note in `usage` what the directory holds now."""
        count = self.with_index(lambda index: index.count)
        if count is not None:
            held_bytes = self.left_bytes()
            with self._lock:
                self.usage = msgspec.structs.replace(self.usage, held_bytes=held_bytes, entries=count)

    # --- publishing and removing -------------------------------------------------------------------------------------

    def replace(self, directory: CacheDirectory, manifest: Manifest, based_on: int) -> Refusal | None:
        """Switch an entry to a new generation, and evict what no longer fits. The caller holds its compile lock and its entry lock.

        Returns SUPERSEDED if another generation than `based_on` is stored.
        """
        with directory, self.indexed():
            now = directory.manifest(manifest.key)
            generation = now.generation if isinstance(now, Manifest) else 0
            # 0: the entry was evicted meanwhile, which supersedes nothing.
            if generation not in (0, based_on):
                return Refusal(MissReason.SUPERSEDED, f"generation {generation} is stored, this one was to replace {based_on}")
            switch(directory, manifest.key, manifest)
            self.with_index(lambda index: index.put(manifest, published=True))
            self.evict(directory, self.max_bytes, spared=manifest.key)
            self.note_usage()
            return None

    def finish_staging(self, directory: CacheDirectory, key: bytes) -> None:
        """Remove staging and superseded generations of an entry. The caller holds its compile lock."""
        clean(directory, key)
        self.with_index(lambda index: index.strike_staging(key))

    def evict(self, directory: CacheDirectory, max_bytes: int | None, spared: bytes = b"") -> tuple[int, int]:
        """Remove entries, least value first, until the rest is within `max_bytes`.

        Returns:
            (entries removed, entries passed over because a process reads or compiles them)
        """
        removed = pinned = 0
        after: tuple[float, bytes] | None = None
        with directory, self.indexed():
            if max_bytes is not None and self.with_index(lambda index: index.complete) is False:
                self._rebuild_index(directory)  # it was damaged since the directory was opened
            while max_bytes is not None and self.left_bytes() > max_bytes:
                victim = self.with_index(lambda index, after=after: index.next_victim(after))  # type: ignore[misc]
                if victim is None:
                    self.with_index(lambda index: index.recount())
                    break
                after = victim
                if victim[1] == spared:
                    continue
                if self.remove_if_free(directory, victim[1]):
                    removed += 1
                else:
                    pinned += 1
        return removed, pinned

    def remove_if_free(self, directory: CacheDirectory, key: bytes) -> bool:
        """Remove an entry unless a process reads or compiles it. Return whether it is gone."""
        try:
            with directory, sole_holder(directory.entry_lock(key), directory.compile_lock(key)) as free:
                if not free:
                    return False
                remove_entry(directory, key)
                self.with_index(lambda index: index.remove(key))
                self.with_index(lambda index: index.strike_staging(key))
        except OSError as error:
            self.warn(refusal_of(error, f"removing cache entry {key.hex()[:16]}"))
            return False
        trace.count("cache.evicted")
        with self._lock:
            self.usage = msgspec.structs.replace(self.usage, evicted=self.usage.evicted + 1)
        return True

    def clean_if_free(self, directory: CacheDirectory, key: bytes) -> None:
        """Tidy up after a process that died while it compiled this entry."""
        try:
            with sole_holder(directory.entry_lock(key), directory.compile_lock(key)) as free:
                if not free:
                    return
                self.finish_staging(directory, key)
                manifest = directory.manifest(key)
                if isinstance(manifest, Manifest):
                    self.with_index(lambda index: index.put(manifest, published=False))
        except OSError as error:
            self.warn(refusal_of(error, f"tidying up cache entry {key.hex()[:16]}"))


class EntryInfo(msgspec.Struct, frozen=True):
    """One entry, for people. `used_s` and `created_s` are wall-clock seconds since the epoch; `used_s` is None if not known."""

    key: bytes
    device: str
    device_version: str
    model_digest: bytes
    model_name: str
    generation: int
    size_bytes: int
    saves_s: float
    created_s: float
    used_s: float | None
    declined: bool
    superseded: bool


def list_entries(house: Housekeeping) -> list[EntryInfo] | Refusal:
    """Return all entries with a readable manifest, oldest first."""
    directory = house.current()
    if isinstance(directory, Refusal):
        return directory
    try:
        with directory, house.indexed():
            return _listed(house, directory)
    except OSError as error:
        return refusal_of(error, f"cache directory {house.path}")


def _listed(house: Housekeeping, directory: CacheDirectory) -> list[EntryInfo]:
    used_s = house.with_index(lambda index: index.used_s()) or {}
    superseded = set(house.with_index(lambda index: index.superseded(0.0)) or [])
    found = []
    for key in directory.all_keys():
        try:
            manifest = directory.manifest(key)
        except OSError as error:
            if is_shortage(error):
                raise
            continue
        if isinstance(manifest, Manifest):
            found.append(
                EntryInfo(
                    key=key,
                    device=manifest.device,
                    device_version=manifest.device_version,
                    model_digest=manifest.model_digest,
                    model_name=manifest.model_name,
                    generation=manifest.generation,
                    size_bytes=manifest.size_bytes,
                    saves_s=manifest.compile_ns / 1e9,
                    created_s=manifest.created_ns / 1e9,
                    used_s=used_s.get(key),
                    declined=manifest.declined,
                    superseded=key in superseded,
                )
            )
    return sorted(found, key=lambda entry: (entry.created_s, entry.key))


_CHUNK_BYTES = 4 << 20


class BadEntry(msgspec.Struct, frozen=True):
    """An entry, or a file of one, that could not serve."""

    key: bytes
    device: str
    reason: MissReason
    detail: str


async def verify(house: Housekeeping) -> AsyncIterator[BadEntry]:
    """Yield every entry that could not serve, with what is wrong with it. A cancelled caller leaves between two chunks of a file."""
    directory = await run_in_thread(house.current)
    if isinstance(directory, Refusal):
        yield BadEntry(b"", "", directory.reason, directory.detail)
        return
    try:
        keys = await run_in_thread(directory.all_keys)
    except OSError as error:
        refusal = refusal_of(error, f"cache directory {house.path}")
        yield BadEntry(b"", "", refusal.reason, refusal.detail)
        return
    for key in keys:
        bad = await _verify_entry(directory, key)
        if bad is not None and bad.reason is not MissReason.ABSENT and await _verify_entry(directory, key) is not None:
            # Twice: an entry that was replaced or removed while it was read is not bad.
            yield bad


async def _verify_entry(directory: CacheDirectory, key: bytes) -> BadEntry | None:
    device = ""
    try:
        found = await run_in_thread(directory.find, key, undo=_close_found)
        if isinstance(found, Refusal):
            return BadEntry(key, device, found.reason, found.detail)
        manifest = found.manifest
        device = manifest.device
        try:
            if manifest.key != key:
                return BadEntry(key, device, MissReason.WRONG_TOKEN, f"its manifest is of key {manifest.key.hex()[:16]}")
            if manifest.declined:
                return None
            fds, lengths = await run_in_thread(found.open_files, os.O_RDONLY, undo=lambda opened: close_all(opened[0]))
        finally:
            found.close()
    except OSError as error:
        refusal = refusal_of(error, "its files")
        return BadEntry(key, device, refusal.reason, refusal.detail)
    try:
        names = file_names(CacheFiles(len(manifest.model), len(manifest.data)))
        for name, fd, length, stored in zip(names, fds, lengths, manifest.files, strict=True):
            if length is None:
                return BadEntry(key, device, MissReason.PARTIAL, f"file {name} is gone")
            if length != stored.length:
                return BadEntry(key, device, MissReason.WRONG_LENGTH, f"file {name} has {length} bytes, {stored.length} were stored")
            import aiofiles

            hasher = blake3()
            async with aiofiles.open(fd, "rb", buffering=0, closefd=False) as file:
                while chunk := await file.read(_CHUNK_BYTES):
                    hasher.update(chunk)
            if hasher.digest() != stored.digest:
                return BadEntry(key, device, MissReason.WRONG_BYTES, f"file {name} does not have the contents that were stored")
    except OSError as error:
        return BadEntry(key, device, MissReason.IO_ERROR, str(error))
    finally:
        close_all(fds)
    return None


def _close_found(found: FoundEntry | Refusal) -> None:
    if isinstance(found, FoundEntry):
        found.close()


class PruneReport(msgspec.Struct, frozen=True):
    """What pruning did.

    Attributes:
        removed: entries removed.
        freed_bytes: bytes they had.
        in_use: entries that stayed because a process uses them.
        left_bytes: bytes of the entries that are left.
        measurements: stage measurements removed.
    """

    removed: int
    freed_bytes: int
    in_use: int
    left_bytes: int
    measurements: int = 0


def prune(house: Housekeeping, max_bytes: int | None, *, measurements: bool = False) -> PruneReport | Refusal:
    """Remove entries of older driver versions, unreadable ones and what dead processes left. Then evict down to `max_bytes`.

    Stage measurements that are too old are removed, too. With `measurements`, all of them are.
    """
    directory = house.current()
    if isinstance(directory, Refusal):
        return directory
    if not directory.writable:
        return directory.not_writable
    try:
        with directory, house.indexed():
            return _pruned(house, directory, max_bytes, measurements)
    except OSError as error:
        return refusal_of(error, f"cache directory {house.path}")


def _pruned(house: Housekeeping, directory: CacheDirectory, max_bytes: int | None, measurements: bool) -> PruneReport:
    empty_trash(directory)
    before = house.left_bytes()
    removed = in_use = 0
    doomed = set(house.with_index(lambda index: index.superseded(0.0)) or [])
    for key in directory.all_keys():
        try:
            manifest = directory.manifest(key)
            if isinstance(manifest, Manifest) or manifest.reason is MissReason.ABSENT:
                house.clean_if_free(directory, key)
            else:
                doomed.add(key)
        except OSError as error:
            if is_shortage(error):
                raise
            doomed.add(key)
    for key in doomed:
        if house.remove_if_free(directory, key):
            removed += 1
        else:
            in_use += 1
    more_removed, more_in_use = house.evict(directory, max_bytes)
    for key in directory.orphaned_locks():
        house.remove_if_free(directory, key)
    house.note_usage()
    left = house.left_bytes()
    forgotten = house.with_index(lambda index: index.history.forget_measurements(all_of_them=measurements)) or 0
    return PruneReport(removed + more_removed, max(before - left, 0), in_use + more_in_use, left, forgotten)
