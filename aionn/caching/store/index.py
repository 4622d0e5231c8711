"""Sizes and values of all entries, in the order of eviction. The index is derived from the manifests: losing it costs a scan.

The order is GreedyDual-Size. An entry's score is clock + (compile time saved per byte), given anew at each use. The entry with the lowest
score is evicted first, and the clock moves up to its score. So a cheap large entry is evicted before an expensive small one. An expensive
entry is evicted, too, if it stays unused while many others come and go. Entries of a device's older version have score -1.
Each act costs O(log n).

`index_database` keeps the file. `history` keeps what no manifest has.
"""

from __future__ import annotations

import sqlite3
import time

from aionn.caching.manifest import Manifest
from aionn.caching.store.history import History
from aionn.caching.store.index_database import IndexDatabase, key_in, number_in

__all__ = ["MANIFEST_BYTES", "Index"]

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

    def drop(self, key: bytes) -> None:
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
