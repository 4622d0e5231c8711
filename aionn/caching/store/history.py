"""What a cache directory remembers beside its entries: measurements of stages, and how often each model was executed.

No manifest has these facts, so they are lost with the index. Then a stage is measured again, and use counts from zero. Blocking.
"""

from __future__ import annotations

import sqlite3
import time

import msgspec

from aionn import trace
from aionn.caching.measurements import KEPT_S, StageMeasurement
from aionn.caching.store.index_database import IndexDatabase, number_in

__all__ = ["History"]

_USE_S = 600  # executions are counted together for so many seconds
_USE_KEPT_S = 30 * 86400.0


class History:
    """Stage measurements and use counts of one index.

    A scope names the model, the better stage and the options. It has one measurement per stage before the better stage.
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
