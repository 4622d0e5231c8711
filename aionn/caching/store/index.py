"""Sizes and values of all entries, ordered by what goes first. Derived from the manifests: losing it costs a scan.

The order is GreedyDual-Size: an entry's score is clock + (compile time saved per byte), given anew at each use; the entry of the lowest
score goes first, and the clock moves up to its score. So a cheap large entry goes before a dear small one, and what was dear
but has not been used while much came and went, goes too. Entries of a device's older version have score -1. Each act costs O(log n).

Blocking, thread-safe, shared by processes (SQLite, WAL).
"""

from __future__ import annotations

import math
import sqlite3
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from aionn.caching.manifest import Manifest
from aionn.caching.state import open_database, transaction

__all__ = ["MANIFEST_BYTES", "Index"]

T = TypeVar("T")
MANIFEST_BYTES = 1024  # what an entry costs beside its files, roughly; so that declined ones count too
_SUPERSEDED = -1.0


class Index:
    """One cache directory's index.

    Raises (construction): OSError, sqlite3.Error.
    """

    def __init__(self, path: str) -> None:
        self._lock = threading.Lock()
        self._database = open_database(Path(path), self._prepare)

    @staticmethod
    def _prepare(database: sqlite3.Connection) -> None:
        for statement in (
            "CREATE TABLE IF NOT EXISTS facts (name TEXT PRIMARY KEY, value) WITHOUT ROWID",
            "CREATE TABLE IF NOT EXISTS entries (key BLOB PRIMARY KEY, family BLOB NOT NULL, version TEXT NOT NULL, size INTEGER NOT NULL, "
            "worth REAL NOT NULL, score REAL NOT NULL, used_s REAL NOT NULL) WITHOUT ROWID",
            "CREATE INDEX IF NOT EXISTS by_score ON entries (score, key)",
            "CREATE INDEX IF NOT EXISTS by_family ON entries (family)",
            "CREATE TABLE IF NOT EXISTS staging (key BLOB PRIMARY KEY) WITHOUT ROWID",
            "INSERT OR IGNORE INTO facts VALUES ('total', 0), ('clock', 0.0), ('complete', 0)",
            "CREATE TRIGGER IF NOT EXISTS more AFTER INSERT ON entries "
            "BEGIN UPDATE facts SET value = value + new.size WHERE name = 'total'; END",
            "CREATE TRIGGER IF NOT EXISTS less AFTER DELETE ON entries "
            "BEGIN UPDATE facts SET value = value - old.size WHERE name = 'total'; END",
        ):
            database.execute(statement)

    def close(self) -> None:
        with self._lock:
            self._database.close()

    def _transact(self, act: Callable[[sqlite3.Connection], T]) -> T:
        with self._lock, transaction(self._database) as database:
            return act(database)

    @staticmethod
    def _fact(database: sqlite3.Connection, name: str) -> float:
        row = database.execute("SELECT value FROM facts WHERE name = ?", (name,)).fetchone()
        return _number(row and row[0])

    @property
    def complete(self) -> bool:
        """Whether every manifest of the directory has been seen since this index was made."""
        return bool(self._transact(lambda database: self._fact(database, "complete")))

    def set_complete(self) -> None:
        self._transact(lambda database: database.execute("UPDATE facts SET value = 1 WHERE name = 'complete'"))

    @property
    def total_bytes(self) -> int:
        return int(self._transact(lambda database: self._fact(database, "total")))

    def put(self, manifest: Manifest, *, published: bool) -> None:
        """Enter an entry or note its use; a publication makes entries of the family's other versions superseded."""

        def act(database: sqlite3.Connection) -> None:
            size = manifest.size_bytes + MANIFEST_BYTES
            worth = manifest.compile_ns / size
            score = self._fact(database, "clock") + worth
            database.execute("DELETE FROM entries WHERE key = ?", (manifest.key,))
            database.execute(
                "INSERT INTO entries VALUES (?, ?, ?, ?, ?, ?, ?)",
                (manifest.key, manifest.family, manifest.device_version, size, worth, score, time.time()),
            )
            if published:
                database.execute(
                    "UPDATE entries SET score = ? WHERE family = ? AND version != ?",
                    (_SUPERSEDED, manifest.family, manifest.device_version),
                )

        self._transact(act)

    def drop(self, key: bytes) -> None:
        """Forget an entry that is gone; the clock moves up to its score."""

        def act(database: sqlite3.Connection) -> None:
            database.execute(
                "UPDATE facts SET value = MAX(value, (SELECT score FROM entries WHERE key = ?)) WHERE name = 'clock'"
                " AND EXISTS (SELECT 1 FROM entries WHERE key = ?)",
                (key, key),
            )
            database.execute("DELETE FROM entries WHERE key = ?", (key,))

        self._transact(act)

    def next_victim(self, after: tuple[float, bytes] | None = None) -> tuple[float, bytes] | None:
        """(score, key) of the entry to go first, or of the next after one that cannot go now."""
        score, key = after or (_SUPERSEDED - 1, b"")
        row = self._transact(
            lambda database: database.execute(
                "SELECT score, key FROM entries WHERE (score, key) > (?, ?) ORDER BY score, key LIMIT 1", (score, key)
            ).fetchone()
        )
        return None if row is None else (_number(row[0]), _key(row[1]))

    def superseded(self, unused_for_s: float) -> list[bytes]:
        """Keys of older versions' entries that nobody has used for that long."""
        return self._transact(
            lambda database: [
                _key(key)
                for (key,) in database.execute(
                    "SELECT key FROM entries WHERE score = ? AND used_s <= ?", (_SUPERSEDED, time.time() - unused_for_s)
                )
            ]
        )

    def other_version(self, family: bytes, version: str) -> str | None:
        """Another version of the same device that stored this compilation, if any did."""
        row = self._transact(
            lambda database: database.execute(
                "SELECT version FROM entries WHERE family = ? AND version != ? ORDER BY used_s DESC LIMIT 1", (family, version)
            ).fetchone()
        )
        return None if row is None else str(row[0])

    def used_s(self) -> dict[bytes, float]:
        """Wall-clock second of each entry's last use."""
        return self._transact(
            lambda database: {_key(key): _number(used) for key, used in database.execute("SELECT key, used_s FROM entries")}
        )

    # Keys whose holders may have left staging behind: noted before, struck out after.

    def note_staging(self, key: bytes) -> None:
        self._transact(lambda database: database.execute("INSERT OR IGNORE INTO staging VALUES (?)", (key,)))

    def strike_staging(self, key: bytes) -> None:
        self._transact(lambda database: database.execute("DELETE FROM staging WHERE key = ?", (key,)))

    def staging(self) -> list[bytes]:
        return self._transact(lambda database: [_key(key) for (key,) in database.execute("SELECT key FROM staging")])


# SQLite keeps any type in any column: what a damaged or edited index holds is SQLite's error like any other damage.


def _number(value: object) -> float:
    if not isinstance(value, int | float) or not math.isfinite(value):
        raise sqlite3.DatabaseError(f"the index has {value!r:.80} where a number belongs")
    return float(value)


def _key(value: object) -> bytes:
    if not isinstance(value, bytes):
        raise sqlite3.DatabaseError(f"the index has {value!r:.80} where a key belongs")
    return value
