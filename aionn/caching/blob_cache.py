"""A small map from bytes to bytes for drivers, here for parity with NNAPI's nnCache and BlobCache.

It is bounded, persistent and shared by processes. A driver keeps single kernels, tunings or constants in it, under names that the driver
chooses. The runtime's caching of whole compilations does not use it. An engine finds the blob cache of its device as
`CompileOptions.blob_cache`.

Every call is one small transaction of an SQLite file in WAL mode. So the file is never absent or short, no writer loses another's keys, and
there is nothing to save at exit. The order of use is a column, hence persistent. Its index finds victims at a cost that does not
grow with the number of entries.

Each value carries a keyed BLAKE3 digest of (key, value, cache version). The digest's key lies in the driver's state directory. So a value
that another process changed, cut or moved to another key reads as absent and is dropped.

Invariants
    total = sum of key and value lengths of all entries <= max_total_bytes  (kept by triggers, in the same transaction).
    A refused `set` leaves the old value.

Blocking, thread-safe. If the file cannot be used, every call is a miss. Nothing raises for the state of the disk.
"""

from __future__ import annotations

import enum
import hmac
import logging
import os
import random
import sqlite3
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
from blake3 import blake3

from aionn.caching.state import StateFolder, device_database, open_database, private_key, private_state, transaction
from aionn.errors import CallerError
from aionn.loopless import ClosedByWith

_log = logging.getLogger("aionn.caching")
_FORMAT = 1


class Victim(enum.Enum):
    """Which entry is evicted first."""

    LRU = "lru"
    RANDOM = "random"


class Capacity(enum.Enum):
    """How much is evicted when a new entry does not fit.

    HALVE evicts down to half of the limit. It evicts nothing if that is the case already, so the new entry may still not fit.
    FIT evicts just enough. FIT_HALVE evicts enough, and at least down to half.
    """

    HALVE = "halve"
    FIT = "fit"
    FIT_HALVE = "fit_halve"


class Policy(msgspec.Struct, frozen=True):
    """How a full cache makes room."""

    victim: Victim = Victim.LRU
    capacity: Capacity = Capacity.FIT


class Limits(msgspec.Struct, frozen=True):
    """Limits in bytes. The total counts keys and values, without overhead. The defaults are the limits of nnCache."""

    max_total_bytes: int = 2 << 20
    max_key_bytes: int = 12 << 10
    max_value_bytes: int = 64 << 10

    def __post_init__(self) -> None:
        if min(self.max_total_bytes, self.max_key_bytes, self.max_value_bytes) < 1:
            raise CallerError(f"blob cache limits {self}: give at least 1 byte for each")


class BlobCache(ClosedByWith):
    """A persistent map from bytes to bytes that forgets. Several objects, in several processes, may share one file."""

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        limits: Limits | None = None,
        policy: Policy | None = None,
        device: str = "",
        version: str = "",
        state_directory: StateFolder = None,
    ) -> None:
        """Open or make the cache.

        Args:
            path: the SQLite file. None stands for a file in the state directory, for this device and version alone.
            limits: entries that do not fit into smaller limits than last time are dropped.
            device: name of the driver's device; needed if `path` is None.
            version: the driver's version. A file that another version wrote last is emptied.
            state_directory: where the authenticating key lies. None stands for the user's.

        Raises:
            CallerError: neither `path` nor `device` is given.
        """
        if path is None and not device:
            raise CallerError("a blob cache without a path is found by its device; give device=, the engine's name, or a path")
        self.limits = limits or Limits()
        self.policy = policy or Policy()
        self._lock = threading.Lock()
        self._database: sqlite3.Connection | None = None
        try:
            state = private_state(state_directory)
            self._table = _Table(self.limits, self.policy, version, private_key(state, "blob-cache.key"))
            self._database = open_database(
                Path(path) if path is not None else device_database(state, "blobs", device, version), self._table.prepare
            )
        except (OSError, sqlite3.Error) as error:
            _log.warning("blob cache %s cannot be used, every read is a miss: %s", path or "", error)

    def set(self, key: bytes, value: bytes) -> bool:
        """Keep `value` under `key`. Return whether it is kept.

        An empty key or value is not kept, nor one over its limit, nor a pair that does not fit even after the policy has evicted.
        A refused update keeps the old value.
        """
        size = len(key) + len(value)
        limits = self.limits
        if not key or not value or len(key) > limits.max_key_bytes or len(value) > limits.max_value_bytes or size > limits.max_total_bytes:
            return False
        return bool(self._transact(lambda database: self._table.set(database, bytes(key), bytes(value), size)))

    def get(self, key: bytes) -> bytes | None:
        """Return the value, or None. Counts as a use."""

        def read(database: sqlite3.Connection) -> bytes | None:
            value = self._table.verified(database, key)
            if value is not None:
                self._table.use(database, key)
            return value

        return self._transact(read) if key else None

    def size(self, key: bytes) -> int:
        """Return the bytes of the value, or 0 if the key is unknown. Does not count as a use."""
        return self.get_into(key, None)

    def get_into(self, key: bytes, buffer: Any) -> int:
        """Return the value's true size, or 0 if the key is unknown. Copy the value to the front of `buffer` if it fits.

        Only a copy counts as a use, and the rest of the buffer stays untouched. The buffer is a writable bytes-like object. With None, the
        call only returns the size.
        """
        size, _ = self.get_with(key, lambda size: buffer if buffer is not None and memoryview(buffer).nbytes >= size else None)
        return size

    def get_with(self, key: bytes, allocate: Callable[[int], Any]) -> tuple[int, Any]:
        """Return the true size, and the buffer that `allocate(size)` gave, with the value at its front.

        An unknown key gives (0, None) without a call of `allocate`. If `allocate` returns None, the result is (size, None), and that
        does not count as a use.
        """
        # Read first, allocate after: a caller's function must not run inside the lock and the transaction.
        value = self._transact(lambda database: self._table.verified(database, key)) if key else None
        if value is None:
            return 0, None
        buffer = allocate(len(value))
        if buffer is None:
            return len(value), None
        memoryview(buffer).cast("B")[: len(value)] = value
        self._transact(lambda database: self._table.use(database, key))
        return len(value), buffer

    def delete(self, key: bytes) -> None:
        """Forget one key, if it is known."""
        self._transact(lambda database: database.execute("DELETE FROM blobs WHERE key = ?", (key,)))

    def clear(self) -> None:
        """Forget all keys."""
        self._transact(lambda database: database.execute("DELETE FROM blobs"))

    @property
    def total_bytes(self) -> int:
        """Bytes of all keys and values."""
        return self._transact(_total) or 0

    def __len__(self) -> int:
        rows = self._transact(lambda database: database.execute("SELECT COUNT(*) FROM blobs").fetchone())
        return int(rows[0]) if rows else 0

    def close(self) -> None:
        """Close the file. Every later call is a miss."""
        with self._lock:
            if self._database is not None:
                self._database.close()
                self._database = None

    def _transact(self, act: Callable[[sqlite3.Connection], Any]) -> Any:
        with self._lock:
            if self._database is None:
                return None
            try:
                with transaction(self._database) as database:
                    return act(database)
            except sqlite3.Error as error:
                _log.warning("blob cache: %s; this access is a miss", error)
                return None


def make_tables(database: sqlite3.Connection) -> None:
    """Make the tables and triggers that are not there."""
    for statement in (
        "CREATE TABLE IF NOT EXISTS facts (name TEXT PRIMARY KEY, value) WITHOUT ROWID",
        # `used` is the rowid: the order of use, and the index over it, in one.
        "CREATE TABLE IF NOT EXISTS blobs (used INTEGER PRIMARY KEY AUTOINCREMENT, key BLOB NOT NULL UNIQUE, value BLOB NOT NULL, "
        "digest BLOB NOT NULL, size INTEGER NOT NULL)",
        "INSERT OR IGNORE INTO facts VALUES ('total', 0)",
        "CREATE TRIGGER IF NOT EXISTS more AFTER INSERT ON blobs BEGIN UPDATE facts SET value = value + new.size WHERE name = 'total'; END",
        "CREATE TRIGGER IF NOT EXISTS less AFTER DELETE ON blobs BEGIN UPDATE facts SET value = value - old.size WHERE name = 'total'; END",
    ):
        database.execute(statement)


class _Table:
    """The rows of a blob cache: what its calls do within a transaction."""

    def __init__(self, limits: Limits, policy: Policy, version: str, digest_key: bytes) -> None:
        self._limits, self._policy, self._version, self._digest_key = limits, policy, version, digest_key

    def prepare(self, database: sqlite3.Connection) -> None:
        """Make the tables that are not there. Drop what another version wrote, and what no longer fits."""
        make_tables(database)
        stamp = f"{_FORMAT}:{self._version}"
        row = database.execute("SELECT value FROM facts WHERE name = 'version'").fetchone()
        if row is None or row[0] != stamp:
            database.execute("DELETE FROM blobs")
            database.execute("INSERT OR REPLACE INTO facts VALUES ('version', ?)", (stamp,))
        database.execute(
            "DELETE FROM blobs WHERE LENGTH(key) > ? OR LENGTH(value) > ?", (self._limits.max_key_bytes, self._limits.max_value_bytes)
        )
        self._shrink(database, self._limits.max_total_bytes, b"")

    def set(self, database: sqlite3.Connection, key: bytes, value: bytes, size: int) -> bool:
        row = database.execute("SELECT size FROM blobs WHERE key = ?", (key,)).fetchone()
        old_size: int = row[0] if row else 0
        limit = self._limits.max_total_bytes
        if _total(database) - old_size + size > limit:
            target = limit - size  # for all other entries
            if self._policy.capacity is not Capacity.FIT:
                if self._policy.capacity is Capacity.HALVE and _total(database) <= limit // 2:
                    return False
                half = limit // 2 - old_size
                target = half if self._policy.capacity is Capacity.HALVE else min(target, half)
            self._shrink(database, max(target, 0) + old_size, key)
            if _total(database) - old_size + size > limit:
                return False
        self._replace(database, key, value, size)
        return True

    def _replace(self, database: sqlite3.Connection, key: bytes, value: bytes, size: int) -> None:
        # OR REPLACE would not fire the delete trigger, so DELETE and INSERT. AUTOINCREMENT makes the row the most recently used.
        database.execute("DELETE FROM blobs WHERE key = ?", (key,))
        database.execute("INSERT INTO blobs (key, value, digest, size) VALUES (?, ?, ?, ?)", (key, value, self._digest(key, value), size))

    def _digest(self, key: bytes, value: bytes) -> bytes:
        hasher = blake3(key=self._digest_key)
        for part in (self._version.encode(), key):
            hasher.update(len(part).to_bytes(8, "little") + part)
        return hasher.update(value).digest()

    def verified(self, database: sqlite3.Connection, key: bytes) -> bytes | None:
        row = database.execute("SELECT value, digest FROM blobs WHERE key = ?", (key,)).fetchone()
        if row is None:
            return None
        value, digest = row
        if isinstance(value, bytes) and isinstance(digest, bytes) and hmac.compare_digest(digest, self._digest(key, value)):
            return value
        _log.warning("blob cache: the value of a key of %d bytes is not what was stored; it is dropped", len(key))
        database.execute("DELETE FROM blobs WHERE key = ?", (key,))
        return None

    @staticmethod
    def use(database: sqlite3.Connection, key: bytes) -> None:
        # seq is the largest number ever given, so the entry becomes the youngest, and the next insert is younger still.
        database.execute("UPDATE sqlite_sequence SET seq = seq + 1 WHERE name = 'blobs'")
        database.execute("UPDATE blobs SET used = (SELECT seq FROM sqlite_sequence WHERE name = 'blobs') WHERE key = ?", (key,))

    def _shrink(self, database: sqlite3.Connection, target_bytes: int, spared: bytes) -> None:
        """Evict until `total <= target_bytes`, but never the entry `spared`."""
        while _total(database) > target_bytes:
            start = 0
            if self._policy.victim is Victim.RANDOM:
                low, high = database.execute("SELECT (SELECT MIN(used) FROM blobs), (SELECT MAX(used) FROM blobs)").fetchone()
                if low is None:
                    return
                start = random.randint(low, high)
            for at in (start, 0):
                row = database.execute("SELECT used FROM blobs WHERE used >= ? AND key != ? ORDER BY used LIMIT 1", (at, spared)).fetchone()
                if row is not None:
                    break
            if row is None:
                return
            database.execute("DELETE FROM blobs WHERE used = ?", row)


def _total(database: sqlite3.Connection) -> int:
    row = database.execute("SELECT value FROM facts WHERE name = 'total'").fetchone()
    if row is None or not isinstance(row[0], int):
        raise sqlite3.DatabaseError(f"its total is {row and row[0]!r}, expected a number of bytes")
    return row[0]
