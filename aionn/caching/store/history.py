"""What a cache directory remembers beside its entries: measurements of stages, how often each model was executed, and plans.

No manifest has these facts, so they are lost with the index. Then a stage is measured again, use counts from zero, and a model is cut
again. Blocking.
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
