"""Sizes and values of all entries, ordered by what goes first. Derived from the manifests: losing it costs a scan.

The order is GreedyDual-Size: an entry's score is clock + (compile time saved per byte), given anew at each use; the entry of the lowest
score goes first, and the clock moves up to its score. So a cheap large entry goes before a dear small one, and what was dear
but has not been used while much came and went, goes too. Entries of a device's older version have score -1. Each act costs O(log n).

Beside them stand two things that no manifest has: measurements of stages, and how often each model was executed. They are lost with the
index; a stage is then measured again, and use counts from zero.

A row that cannot be (SQLite keeps any type in any column) is dropped, counted as "cache.index_rows_dropped", and found again by the next
scan of the manifests; an index that SQLite cannot read is begun anew.

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

import msgspec

from aionn import trace
from aionn.caching.manifest import Manifest
from aionn.caching.measurements import KEPT_S, StageMeasurement
from aionn.caching.state import is_damage, open_database, transaction
from aionn.hal.types import CACHE_TOKEN_BYTES

__all__ = ["MANIFEST_BYTES", "Index"]

T = TypeVar("T")
MANIFEST_BYTES = 1024  # what an entry costs beside its files, roughly; so that declined ones count too
_SUPERSEDED = -1.0
_USE_S = 600  # executions are counted together for so many seconds
_USE_KEPT_S = 30 * 86400.0


class Index:
    """One cache directory's index.

    Raises (construction): OSError, sqlite3.Error.
    """

    def __init__(self, path: str) -> None:
        self._lock = threading.Lock()
        self._path = Path(path)
        self._database = open_database(self._path, self._prepare, synced=False)

    @staticmethod
    def _prepare(database: sqlite3.Connection) -> None:
        for statement in (
            "CREATE TABLE IF NOT EXISTS facts (name TEXT PRIMARY KEY, value) WITHOUT ROWID",
            "CREATE TABLE IF NOT EXISTS entries (key BLOB PRIMARY KEY, family BLOB NOT NULL, model BLOB NOT NULL, version TEXT NOT NULL, "
            "size INTEGER NOT NULL, worth REAL NOT NULL, score REAL NOT NULL, used_s REAL NOT NULL) WITHOUT ROWID",
            "CREATE INDEX IF NOT EXISTS by_score ON entries (score, key)",
            "CREATE INDEX IF NOT EXISTS by_family ON entries (family)",
            "CREATE INDEX IF NOT EXISTS by_model ON entries (model, used_s)",
            "CREATE TABLE IF NOT EXISTS staging (key BLOB PRIMARY KEY) WITHOUT ROWID",
            "CREATE TABLE IF NOT EXISTS measurements (scope BLOB NOT NULL, base TEXT NOT NULL, body BLOB NOT NULL, "
            "measured_s REAL NOT NULL, PRIMARY KEY (scope, base)) WITHOUT ROWID",
            "CREATE TABLE IF NOT EXISTS use (model BLOB NOT NULL, from_s INTEGER NOT NULL, executions INTEGER NOT NULL, "
            "PRIMARY KEY (model, from_s)) WITHOUT ROWID",
            "INSERT OR IGNORE INTO facts VALUES ('total', 0), ('clock', 0.0), ('complete', 0)",
            "CREATE TRIGGER IF NOT EXISTS more AFTER INSERT ON entries "
            "BEGIN UPDATE facts SET value = value + new.size WHERE name = 'total'; END",
            "CREATE TRIGGER IF NOT EXISTS less AFTER DELETE ON entries "
            "BEGIN UPDATE facts SET value = value - old.size WHERE name = 'total'; END",
            "SELECT key, family, model, version, size, worth, score, used_s FROM entries LIMIT 1",
            "SELECT key FROM staging LIMIT 1",
            "SELECT scope, base, body, measured_s FROM measurements LIMIT 1",
            "SELECT model, from_s, executions FROM use LIMIT 1",
            "SELECT name, value FROM facts LIMIT 1",
        ):
            database.execute(statement)

    def close(self) -> None:
        with self._lock:
            self._database.close()

    def _transact(self, act: Callable[[sqlite3.Connection], T]) -> T:
        with self._lock:
            try:
                with transaction(self._database) as database:
                    return act(database)
            except _BadRowError:
                with transaction(self._database) as database:
                    self._drop_bad_rows(database)
            except sqlite3.Error as error:
                if not is_damage(error):
                    raise
                self._database.close()
                self._database = open_database(self._path, self._prepare, anew=True, synced=False)
                trace.count("cache.index_begun_anew")
            with transaction(self._database) as database:
                return act(database)

    @staticmethod
    def _drop_bad_rows(database: sqlite3.Connection) -> None:
        rows = 0
        for statement in (
            "DELETE FROM entries WHERE typeof(key) != 'blob' OR length(key) != 32 OR typeof(size) != 'integer' OR size < 0"
            " OR typeof(worth) NOT IN ('real', 'integer') OR abs(worth) > 1e300 OR typeof(score) NOT IN ('real', 'integer')"
            " OR abs(score) > 1e300 OR typeof(used_s) NOT IN ('real', 'integer') OR abs(used_s) > 1e300",
            "DELETE FROM staging WHERE typeof(key) != 'blob' OR length(key) != 32",
            "DELETE FROM measurements WHERE typeof(body) != 'blob' OR typeof(measured_s) NOT IN ('real', 'integer')",
            "DELETE FROM use WHERE typeof(from_s) != 'integer' OR typeof(executions) != 'integer'",
        ):
            rows += database.execute(statement).rowcount
        for name, value in (
            ("total", "COALESCE((SELECT SUM(size) FROM entries), 0)"),
            ("clock", "COALESCE((SELECT MAX(score) FROM entries), 0.0)"),
            ("complete", "0"),  # the next who opens the directory looks for what was dropped
        ):
            database.execute(f"INSERT OR REPLACE INTO facts VALUES (?, {value})", (name,))
        trace.count("cache.index_rows_dropped", max(rows, 1))

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
                "INSERT INTO entries VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                (manifest.key, manifest.family, manifest.model_digest, manifest.device_version, size, worth, score, time.time()),
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

    def recount(self) -> None:
        """Add up the total again. O(n): for when nothing is left to evict and the total does not know it."""
        self._transact(
            lambda database: (
                database.execute("UPDATE facts SET value = COALESCE((SELECT SUM(size) FROM entries), 0) WHERE name = 'total'").rowcount
            )
        )

    def next_victim(self, after: tuple[float, bytes] | None = None) -> tuple[float, bytes] | None:
        """(score, key) of the entry to go first, or of the next after one that cannot go now."""

        def act(database: sqlite3.Connection) -> tuple[float, bytes] | None:
            row = database.execute(
                "SELECT score, key FROM entries WHERE (score, key) > (?, ?) ORDER BY score, key LIMIT 1", after or (_SUPERSEDED - 1, b"")
            ).fetchone()
            return None if row is None else (_number(row[0]), _key(row[1]))

        return self._transact(act)

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

    def of_model(self, model_digest: bytes, at_most: int) -> list[bytes]:
        """Keys under which that model is stored, the last used first."""
        return self._transact(
            lambda database: [
                _key(key)
                for (key,) in database.execute(
                    "SELECT key FROM entries WHERE model = ? ORDER BY used_s DESC LIMIT ?", (model_digest, at_most)
                )
            ]
        )

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

    # Measurements of stages. `scope` names the model, the better stage and the options; there is one row per stage before it.

    def remember(self, scope: bytes, measurement: StageMeasurement) -> None:
        """Keep a measurement in place of the one before; one on made-up inputs takes no other's place."""
        verb = "IGNORE" if measurement.made_up else "REPLACE"
        body = msgspec.msgpack.encode(measurement)

        def act(database: sqlite3.Connection) -> None:
            self._forget_old_measurements(database)
            database.execute(
                f"INSERT OR {verb} INTO measurements VALUES (?, ?, ?, ?)", (scope, measurement.base, body, measurement.measured_s)
            )

        self._transact(act)

    @staticmethod
    def _forget_old_measurements(database: sqlite3.Connection) -> int:
        # One from the future was made before the clock was set back, so its age is unknown.
        return database.execute("DELETE FROM measurements WHERE abs(measured_s - ?) >= ?", (time.time(), KEPT_S)).rowcount

    def measurements(self, scope: bytes | None = None) -> list[StageMeasurement]:
        """What is remembered, the newest first; None: of every scope."""

        def act(database: sqlite3.Connection) -> list[StageMeasurement]:
            rows = database.execute(
                "SELECT scope, base, body FROM measurements WHERE (scope = ? OR ?) AND abs(measured_s - ?) < ? ORDER BY measured_s DESC",
                (scope, scope is None, time.time(), KEPT_S),
            ).fetchall()
            found = []
            for of, base, body in rows:
                try:
                    found.append(msgspec.msgpack.decode(body, type=StageMeasurement))
                except (msgspec.DecodeError, TypeError):  # damaged, or of another state of this code
                    database.execute("DELETE FROM measurements WHERE scope IS ? AND base IS ?", (of, base))
                    trace.count("cache.index_rows_dropped", 1)
            return found

        return self._transact(act)

    def forget_measurements(self, *, all_of_them: bool) -> int:
        """Remove measurements; those that are too old, or all. Returns how many went."""

        def act(database: sqlite3.Connection) -> int:
            return database.execute("DELETE FROM measurements").rowcount if all_of_them else self._forget_old_measurements(database)

        return self._transact(act)

    # How often a model was executed, in pieces of `_USE_S`.

    def count_use(self, model_digest: bytes, executions: int) -> None:
        """Add executions that have just ended."""
        now_s = time.time()

        def act(database: sqlite3.Connection) -> None:
            database.execute("DELETE FROM use WHERE from_s < ? OR from_s > ?", (now_s - _USE_KEPT_S, now_s + _USE_S))
            database.execute(
                "INSERT INTO use VALUES (?, ?, ?) ON CONFLICT DO UPDATE SET executions = executions + excluded.executions",
                (model_digest, int(now_s) // _USE_S * _USE_S, executions),
            )

        self._transact(act)

    def use(self, model_digest: bytes, within_s: float) -> int:
        """Executions of the last `within_s` seconds; a piece that began before them does not count."""
        row = self._transact(
            lambda database: database.execute(
                "SELECT COALESCE(SUM(executions), 0) FROM use WHERE model = ? AND from_s >= ?", (model_digest, time.time() - within_s)
            ).fetchone()
        )
        return int(_number(row[0]))


class _BadRowError(sqlite3.DatabaseError):
    """A row that this module cannot have written."""


def _number(value: object) -> float:
    if not isinstance(value, int | float) or not math.isfinite(value):
        raise _BadRowError(f"the index has {value!r:.80} where a number belongs")
    return float(value)


def _key(value: object) -> bytes:
    if not isinstance(value, bytes) or len(value) != CACHE_TOKEN_BYTES:
        raise _BadRowError(f"the index has {value!r:.80} where a key belongs")
    return value
