"""Cut the files of an index short while it is open. Run as `python -m tests.caching.cut_index FOLDER`.

A process of its own: who touches a mapping of a file that was cut short is ended by SIGBUS. Prints the names of the files that were cut.
"""

from __future__ import annotations

import os
import sqlite3
import sys
from pathlib import Path

from aionn.caching.store.index import IndexDatabase


def write(database: sqlite3.Connection) -> None:
    database.execute("INSERT OR REPLACE INTO staging VALUES (randomblob(32))")


def main() -> None:
    folder = Path(sys.argv[1])
    for share in (0.0, 0.3, 0.9):
        for has_written in (False, True):
            index = IndexDatabase(f"{folder}/index.sqlite")
            index.transact(write)

            def cut(database: sqlite3.Connection, share: float = share, has_written: bool = has_written) -> None:
                if has_written:
                    write(database)
                for path in sorted(folder.iterdir()):
                    os.truncate(path, int(path.stat().st_size * share))
                    print(path.name)

            index.transact(cut)
            index.transact(write)
            assert index.transact(lambda database: database.execute("SELECT COUNT(*) FROM staging").fetchone()) >= (1,)
            index.close()


if __name__ == "__main__":
    main()
