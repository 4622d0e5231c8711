"""The index of a cache directory, one SQLite file: which entry is evicted first, and what no manifest has.

`Index` has sizes and values of all entries, in the order of eviction. It is derived from the manifests: losing it costs a scan.

The order is GreedyDual-Size. An entry's score is clock + (compile time saved per byte), given anew at each use. The entry with the lowest
score is evicted first, and the clock moves up to its score. So a cheap large entry is evicted before an expensive small one. An expensive
entry is evicted, too, if it stays unused while many others come and go. Entries of a device's older version have score -1.
Each act costs O(log n). With 10,000 entries a publication with an eviction takes 1 ms here. Without an index, the times of all manifests
would take 80 ms, their files' sizes as well 490 ms, and the manifests themselves 820 ms.

`History` has measurements of stages, how often each model was executed, and plans. No manifest has these facts, so they are lost with the
index. Then a stage is measured again, use counts from zero, and a model is cut again.

`IndexDatabase` keeps the file. A row that this code cannot have written is dropped, because SQLite keeps any type in any column. Such rows
are counted as "cache.index_rows_dropped", and the next scan of the manifests finds their entries again. An index that SQLite cannot read is
begun anew.

Blocking, thread-safe, shared by processes. SQLite maps none of its files, so that one which is cut short cannot end the app.
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

__all__ = ["MANIFEST_BYTES", "BadRowError", "History", "Index", "IndexDatabase", "key_in", "number_in"]

T = TypeVar("T")
_TABLES = (
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
    "CREATE TABLE IF NOT EXISTS plans (scope BLOB PRIMARY KEY, body BLOB NOT NULL, kept_s REAL NOT NULL) WITHOUT ROWID",
    "INSERT OR IGNORE INTO facts VALUES ('total', 0), ('clock', 0.0), ('complete', 0)",
    "CREATE TRIGGER IF NOT EXISTS more AFTER INSERT ON entries BEGIN UPDATE facts SET value = value + new.size WHERE name = 'total'; END",
    "CREATE TRIGGER IF NOT EXISTS less AFTER DELETE ON entries BEGIN UPDATE facts SET value = value - old.size WHERE name = 'total'; END",
)


class BadRowError(sqlite3.DatabaseError):
    """A row that this code cannot have written."""


class IndexDatabase:
    """One index file.

    Raises (construction): OSError, sqlite3.Error.
    """

    def __init__(self, path: str) -> None:
        self._lock = threading.Lock()
        self._path = Path(path)
        self._database = open_database(self._path, make_tables, synced=False)

    def close(self) -> None:
        with self._lock:
            self._database.close()

    def transact(self, act: Callable[[sqlite3.Connection], T]) -> T:
        """Run `act` in one transaction and return its result. After damage, mend the file and run `act` once more.

        Raises:
            OSError, sqlite3.Error: the file cannot be used.
        """
        with self._lock:
            try:
                with transaction(self._database) as database:
                    return act(database)
            except BadRowError:
                with transaction(self._database) as database:
                    _drop_bad_rows(database)
            except sqlite3.Error as error:
                # DBMOVED: another process has removed the file. It has begun a new one, which is opened here.
                if not is_damage(error) and getattr(error, "sqlite_errorcode", None) != sqlite3.SQLITE_READONLY_DBMOVED:
                    raise
                self._database.close()
                self._database = open_database(self._path, make_tables, anew=is_damage(error), synced=False)
                trace.count("cache.index_begun_anew")
            with transaction(self._database) as database:
                return act(database)


def make_tables(database: sqlite3.Connection) -> None:
    """Make the tables that are not there."""
    for statement in _TABLES:
        database.execute(statement)


def _drop_bad_rows(database: sqlite3.Connection) -> None:
    rows = 0
    for statement in (
        "DELETE FROM entries WHERE typeof(key) != 'blob' OR length(key) != 32 OR typeof(size) != 'integer' OR size < 0"
        " OR typeof(worth) NOT IN ('real', 'integer') OR abs(worth) > 1e300 OR typeof(score) NOT IN ('real', 'integer')"
        " OR abs(score) > 1e300 OR typeof(used_s) NOT IN ('real', 'integer') OR abs(used_s) > 1e300",
        "DELETE FROM staging WHERE typeof(key) != 'blob' OR length(key) != 32",
        "DELETE FROM measurements WHERE typeof(body) != 'blob' OR typeof(measured_s) NOT IN ('real', 'integer')",
        "DELETE FROM plans WHERE typeof(body) != 'blob' OR typeof(kept_s) NOT IN ('real', 'integer')",
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


def number_in(value: object) -> float:
    """Return a column's number.

    Raises:
        BadRowError: it is not a finite number.
    """
    if not isinstance(value, int | float) or not math.isfinite(value):
        raise BadRowError(f"the index has {value!r:.80} where a number belongs")
    return float(value)


def key_in(value: object) -> bytes:
    """Return a column's entry key.

    Raises:
        BadRowError: it is not 32 bytes.
    """
    if not isinstance(value, bytes) or len(value) != CACHE_TOKEN_BYTES:
        raise BadRowError(f"the index has {value!r:.80} where a key belongs")
    return value


_USE_S = 600  # executions are counted together for so many seconds
_USE_KEPT_S = 30 * 86400.0
_PLANS = 1024
"""The most plans that are kept. The one that was kept first goes first."""


class History:
    """Stage measurements, use counts and plans of one index.

    The scope of a measurement names the model, the better stage and the options. It has one measurement per stage before the better stage.
    The scope of a plan names the model, its devices and the options.
    """

    def __init__(self, database: IndexDatabase) -> None:
        self._database = database

    def remember(self, scope: bytes, measurement: StageMeasurement) -> None:
        """Keep a measurement in place of the one before. A measurement on made-up inputs replaces no other."""
        verb = "IGNORE" if measurement.made_up else "REPLACE"
        body = msgspec.msgpack.encode(measurement)

        def act(database: sqlite3.Connection) -> None:
            _forget_old_measurements(database)
            database.execute(
                f"INSERT OR {verb} INTO measurements VALUES (?, ?, ?, ?)", (scope, measurement.base, body, measurement.measured_s)
            )

        self._database.transact(act)

    def measurements(self, scope: bytes | None = None) -> list[StageMeasurement]:
        """Return what is remembered of a scope, the newest first. None stands for every scope."""

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

        return self._database.transact(act)

    def forget_measurements(self, *, all_of_them: bool) -> int:
        """Remove all measurements, or those that are too old. Return how many were removed."""

        def act(database: sqlite3.Connection) -> int:
            return database.execute("DELETE FROM measurements").rowcount if all_of_them else _forget_old_measurements(database)

        return self._database.transact(act)

    def keep_plan(self, scope: bytes, body: bytes) -> None:
        """Keep a plan in place of the one before. Its maker checks the body when it reads it."""

        def act(database: sqlite3.Connection) -> None:
            database.execute("INSERT OR REPLACE INTO plans VALUES (?, ?, ?)", (scope, body, time.time()))
            database.execute(
                "DELETE FROM plans WHERE scope IN (SELECT scope FROM plans ORDER BY kept_s DESC LIMIT -1 OFFSET ?)",
                (_PLANS,),
            )

        self._database.transact(act)

    def plan(self, scope: bytes) -> bytes | None:
        """Return the plan that is kept under that scope, or None."""
        row = self._database.transact(
            lambda database: database.execute("SELECT body FROM plans WHERE scope = ? AND typeof(body) = 'blob'", (scope,)).fetchone()
        )
        return None if row is None else bytes(row[0])

    def count_use(self, model_digest: bytes, executions: int) -> None:
        """Add executions that have just ended."""
        now_s = time.time()

        def act(database: sqlite3.Connection) -> None:
            database.execute("DELETE FROM use WHERE from_s < ? OR from_s > ?", (now_s - _USE_KEPT_S, now_s + _USE_S))
            database.execute(
                "INSERT INTO use VALUES (?, ?, ?) ON CONFLICT DO UPDATE SET executions = executions + excluded.executions",
                (model_digest, int(now_s) // _USE_S * _USE_S, executions),
            )

        self._database.transact(act)

    def use(self, model_digest: bytes, within_s: float) -> int:
        """Return the executions of the last `within_s` seconds. Executions are counted in pieces of `_USE_S`.

        A piece that began before that time does not count.
        """
        row = self._database.transact(
            lambda database: database.execute(
                "SELECT COALESCE(SUM(executions), 0) FROM use WHERE model = ? AND from_s >= ?", (model_digest, time.time() - within_s)
            ).fetchone()
        )
        return int(number_in(row[0]))


def _forget_old_measurements(database: sqlite3.Connection) -> int:
    # A measurement from the future was made before the clock was set back, so its age is unknown.
    return database.execute("DELETE FROM measurements WHERE abs(measured_s - ?) >= ?", (time.time(), KEPT_S)).rowcount


MANIFEST_BYTES = 1024  # roughly what an entry costs beside its files; so that declined entries count too
_SUPERSEDED = -1.0


class Index:
    """One cache directory's index. Blocking, thread-safe, shared by processes.

    Attributes:
        history: stage measurements, use counts and plans, in the same file.

    Raises (construction): OSError, sqlite3.Error.
    """

    def __init__(self, path: str) -> None:
        self._database = IndexDatabase(path)
        self.history = History(self._database)

    def close(self) -> None:
        self._database.close()

    @property
    def complete(self) -> bool:
        """Whether the index has seen every manifest of the directory since it was made."""
        return bool(self._database.transact(lambda database: _fact(database, "complete")))

    def set_complete(self) -> None:
        self._database.transact(lambda database: database.execute("UPDATE facts SET value = 1 WHERE name = 'complete'"))

    @property
    def total_bytes(self) -> int:
        return int(self._database.transact(lambda database: _fact(database, "total")))

    def put(self, manifest: Manifest, *, published: bool) -> None:
        """Enter an entry or note its use. A publication makes entries of the family's other versions superseded."""

        def act(database: sqlite3.Connection) -> None:
            size = manifest.size_bytes + MANIFEST_BYTES
            worth = manifest.compile_ns / size
            score = _fact(database, "clock") + worth
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

        self._database.transact(act)

    def remove(self, key: bytes) -> None:
        """Forget an entry that is gone. The clock moves up to its score."""

        def act(database: sqlite3.Connection) -> None:
            database.execute(
                "UPDATE facts SET value = MAX(value, (SELECT score FROM entries WHERE key = ?)) WHERE name = 'clock'"
                " AND EXISTS (SELECT 1 FROM entries WHERE key = ?)",
                (key, key),
            )
            database.execute("DELETE FROM entries WHERE key = ?", (key,))

        self._database.transact(act)

    def recount(self) -> None:
        """Add up the total again. O(n), for a total that is too large although no entry is left to evict."""
        self._database.transact(
            lambda database: (
                database.execute("UPDATE facts SET value = COALESCE((SELECT SUM(size) FROM entries), 0) WHERE name = 'total'").rowcount
            )
        )

    def next_victim(self, after: tuple[float, bytes] | None = None) -> tuple[float, bytes] | None:
        """Return (score, key) of the entry to evict first, or of the next one after an entry that cannot be evicted now."""

        def act(database: sqlite3.Connection) -> tuple[float, bytes] | None:
            row = database.execute(
                "SELECT score, key FROM entries WHERE (score, key) > (?, ?) ORDER BY score, key LIMIT 1", after or (_SUPERSEDED - 1, b"")
            ).fetchone()
            return None if row is None else (number_in(row[0]), key_in(row[1]))

        return self._database.transact(act)

    def superseded(self, unused_for_s: float) -> list[bytes]:
        """Return the keys of older versions' entries that were not used for that long."""
        return self._database.transact(
            lambda database: [
                key_in(key)
                for (key,) in database.execute(
                    "SELECT key FROM entries WHERE score = ? AND used_s <= ?", (_SUPERSEDED, time.time() - unused_for_s)
                )
            ]
        )

    def other_version(self, family: bytes, version: str) -> str | None:
        """Return another version of the same device that stored this compilation, or None."""
        row = self._database.transact(
            lambda database: database.execute(
                "SELECT version FROM entries WHERE family = ? AND version != ? ORDER BY used_s DESC LIMIT 1", (family, version)
            ).fetchone()
        )
        return None if row is None else str(row[0])

    def compile_s(self, family: bytes) -> float | None:
        """Return what the last compile of this family took, for whichever version of the device. None if no entry shows it."""
        row = self._database.transact(
            lambda database: database.execute(
                "SELECT worth * size FROM entries WHERE family = ? AND worth > 0 ORDER BY used_s DESC LIMIT 1", (family,)
            ).fetchone()
        )
        return None if row is None else number_in(row[0]) / 1e9

    @property
    def count(self) -> int:
        """How many entries there are. O(n)."""
        return self._database.transact(lambda database: int(number_in(database.execute("SELECT COUNT(*) FROM entries").fetchone()[0])))

    def of_model(self, model_digest: bytes, at_most: int) -> list[bytes]:
        """Return the keys under which that model is stored, the last used first."""
        return self._database.transact(
            lambda database: [
                key_in(key)
                for (key,) in database.execute(
                    "SELECT key FROM entries WHERE model = ? ORDER BY used_s DESC LIMIT ?", (model_digest, at_most)
                )
            ]
        )

    def used_s(self) -> dict[bytes, float]:
        """Return the wall-clock second of each entry's last use."""
        return self._database.transact(
            lambda database: {key_in(key): number_in(used) for key, used in database.execute("SELECT key, used_s FROM entries")}
        )

    # Keys whose holders may have left staging behind. They are noted before staging and struck out after it.

    def note_staging(self, key: bytes) -> None:
        self._database.transact(lambda database: database.execute("INSERT OR IGNORE INTO staging VALUES (?)", (key,)))

    def strike_staging(self, key: bytes) -> None:
        self._database.transact(lambda database: database.execute("DELETE FROM staging WHERE key = ?", (key,)))

    def staging(self) -> list[bytes]:
        return self._database.transact(lambda database: [key_in(key) for (key,) in database.execute("SELECT key FROM staging")])


def _fact(database: sqlite3.Connection, name: str) -> float:
    row = database.execute("SELECT value FROM facts WHERE name = ?", (name,)).fetchone()
    return number_in(row and row[0])
