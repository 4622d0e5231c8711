"""The SQLite file of a cache directory's index: its tables, its transactions, and what becomes of damage.

A row that this code cannot have written is dropped, because SQLite keeps any type in any column. Such rows are counted as
"cache.index_rows_dropped", and the next scan of the manifests finds their entries again. An index that SQLite cannot read is begun anew.

Blocking, thread-safe, shared by processes (SQLite, WAL).
"""

from __future__ import annotations

import math
import sqlite3
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from aionn import trace
from aionn.caching.state import is_damage, open_database, transaction
from aionn.hal.types import CACHE_TOKEN_BYTES

__all__ = ["BadRowError", "IndexDatabase", "key_in", "number_in"]

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
    "SELECT key, family, model, version, size, worth, score, used_s FROM entries LIMIT 1",
    "SELECT key FROM staging LIMIT 1",
    "SELECT scope, base, body, measured_s FROM measurements LIMIT 1",
    "SELECT model, from_s, executions FROM use LIMIT 1",
    "SELECT scope, body, kept_s FROM plans LIMIT 1",
    "SELECT name, value FROM facts LIMIT 1",
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
        self._database = open_database(self._path, _prepare, synced=False)

    def close(self) -> None:
        with self._lock:
            self._database.close()

    def transact(self, act: Callable[[sqlite3.Connection], T]) -> T:
        """Run `act` in one transaction and return its result. After damage, mend the file and run `act` once more.

        Raises:
            sqlite3.Error: the file cannot be used.
        """
        with self._lock:
            try:
                with transaction(self._database) as database:
                    return act(database)
            except BadRowError:
                with transaction(self._database) as database:
                    _drop_bad_rows(database)
            except sqlite3.Error as error:
                if not is_damage(error):
                    raise
                self._database.close()
                self._database = open_database(self._path, _prepare, anew=True, synced=False)
                trace.count("cache.index_begun_anew")
            with transaction(self._database) as database:
                return act(database)


def _prepare(database: sqlite3.Connection) -> None:
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
