"""Housekeeping of one cache directory: find or make it, tidy up after dead processes, keep it within its budget.

Entries that are held open (by readers or compilers) are pinned. Removal takes both locks of an entry. It passes the entry over if it
cannot have both at once. Everything here is blocking and runs in threads.
"""

from __future__ import annotations

import logging
import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TypeVar

import msgspec

from aionn import trace
from aionn.caching.manifest import Manifest
from aionn.caching.outcomes import MissReason, Refusal
from aionn.caching.store.directory import CacheDirectory, is_shortage, refusal_of, refusal_to_store
from aionn.caching.store.index import Index
from aionn.caching.store.locks import sole_holder
from aionn.caching.store.writing import clean, discard, empty_trash, switch

__all__ = ["CacheUsage", "Housekeeping"]

T = TypeVar("T")
_log = logging.getLogger("aionn.caching")
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
            _log.log(level, "compilation cache %s cannot be used as asked: %s", self.path, refusal)

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
            if self._index is None and directory is not None and directory.writable:
                try:
                    self._index = Index(directory.index)
                except (OSError, sqlite3.Error) as error:
                    self.warn(Refusal(MissReason.IO_ERROR, f"the index of sizes cannot be used, nothing will be evicted: {error}"))
            self._index_users += 1
            index = self._index
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
            except sqlite3.Error as error:
                self.warn(Refusal(MissReason.IO_ERROR, f"index of sizes: {error}"))
                return None

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
                discard(directory, key)
                self.with_index(lambda index: index.drop(key))
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
