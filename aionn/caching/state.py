"""A directory that belongs to this account alone, and SQLite databases in it. The driver's side.

A driver trusts the digests and the blob cache's key in it. They are only as private as their directory, which has mode 0700, belongs to
this account and is not a symlink. Each device has one database per kind and per version of its engine. So versions run side by side, and
no version reads another's records. A database that SQLite cannot read is removed and begun anew, because losing everything kept here costs
only a compilation.
"""

from __future__ import annotations

import errno
import os
import sqlite3
import stat
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

from blake3 import blake3

from aionn.caching.outcomes import MissReason, Refusal
from aionn.caching.private_folder import RecordsFolder, UnsafeStateError, private_directory, user_state_directory

StateFolder = str | os.PathLike[str] | RecordsFolder | None
"""Where records are kept. None stands for the user's state directory."""

BUSY_TIMEOUT_S = 5.0  # another process holds the write lock for one small transaction; far more than it ever needs
UNUSED_KEPT_S = 30 * 86400.0  # longer than the caches keep the entries of a version that is not used
_KEY_BYTES = 32
_BESIDE = ("-journal", "-wal", "-shm")
_UNTRUSTED = "PRAGMA trusted_schema=OFF"
"""A model file that has taken a driver over may have written the database, which drivers and `aionn doctor` read."""

_SCHEMA = "SELECT type, name, tbl_name, sql FROM sqlite_master"

_DAMAGE = {
    sqlite3.SQLITE_ERROR,
    sqlite3.SQLITE_CORRUPT,
    sqlite3.SQLITE_NOTADB,
    sqlite3.SQLITE_FORMAT,
    sqlite3.SQLITE_MISMATCH,
    sqlite3.SQLITE_CONSTRAINT,
    sqlite3.SQLITE_TOOBIG,
    sqlite3.SQLITE_EMPTY,
}


def state_path(directory: str | os.PathLike[str] | None = None) -> Path:
    """Return the path of the state directory, which need not exist. None stands for the user's (`private_folder.user_state_directory`)."""
    return Path(user_state_directory() if directory is None else directory)


def private_state(directory: StateFolder) -> Path:
    """Return the folder for records, made if it is missing.

    Raises:
        OSError: as `private_directory`.
    """
    return Path(directory.made() if isinstance(directory, RecordsFolder) else private_directory(state_path(directory)))


def _refuse_unsafe(path: Path) -> None:
    """Check a file, and what SQLite would open beside it. Opening a FIFO would wait until another process opens its other end."""
    for suffix in ("", *_BESIDE):
        with suppress(FileNotFoundError):
            status = os.lstat(f"{path}{suffix}")
            if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
                raise UnsafeStateError(f"{path}{suffix} is not a regular file of this account")


def device_database(directory: Path, kind: str, device: str, version: str) -> Path:
    """Return the path of one version's database of that kind. Remove those that the device's other versions have not used for long.

    A process that still has a removed database open goes on with a file that no later process sees. What such a process records is lost,
    which costs a compilation.
    """
    letters = "".join(letter if letter.isalnum() else "_" for letter in device)[:40]
    of_device = f"{kind}-{letters}-{blake3(device.encode()).hexdigest()[:16]}"
    path = directory / f"{of_device}-{blake3(version.encode()).hexdigest()[:32]}.sqlite"
    for other in directory.glob(f"{of_device}-*.sqlite"):
        with suppress(OSError):  # gone already, or on a read-only volume
            if other != path and time.time() - _last_used(other) > UNUSED_KEPT_S:
                _remove_database(other)
    return path


def _last_used(path: Path) -> float:
    """Return when a database was last opened or written to, in seconds since the epoch. Writes go to its log first.

    Raises:
        OSError: it is not there.
    """
    used = path.lstat().st_mtime
    with suppress(FileNotFoundError):
        used = max(used, Path(f"{path}-wal").lstat().st_mtime)
    return used


_open: Counter[str] = Counter()
"""How many connections of `open_database` this process has to each file, by absolute path."""

_counting = threading.Lock()


class _Connection(sqlite3.Connection):
    """A connection that is counted in `_open` until it is closed."""

    counted_as = ""

    def close(self) -> None:
        super().close()
        counted_as, self.counted_as = self.counted_as, ""
        if counted_as:
            with _counting:
                _open[counted_as] -= 1


def _connected(path: Path) -> _Connection:
    """Make a database's file unless it is there, note its use, so that no other version removes it, and connect.

    To close any descriptor of a file frees all locks that the process has on the file. Another process would then remove the log of a
    database that is in use. So a file that this process has connected to stays as it is. It was marked by the first connection.

    Raises:
        OSError: it can be neither made nor written to.
        sqlite3.Error
    """
    counted_as = str(path.absolute())
    with _counting:
        if not _open[counted_as] or not path.exists():
            _make_and_mark(path)
        connection = sqlite3.connect(path, timeout=BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False, factory=_Connection)
        connection.counted_as = counted_as
        _open[counted_as] += 1
    return connection


def _make_and_mark(path: Path) -> None:
    # Made by us, so that no other account can read it even before SQLite first writes to it.
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        with suppress(OSError):
            os.utime(fd)
    finally:
        os.close(fd)


def open_database(
    path: Path, prepare: Callable[[sqlite3.Connection], None], *, anew: bool = False, synced: bool = True
) -> sqlite3.Connection:
    """Open or create a database and run `prepare` on it in one transaction. Begin anew if its file is damaged.

    Any thread may use the connection, one at a time. The transaction of a killed writer never happened.

    Args:
        prepare: makes the tables that are not there. A file with anything else (a view, a generated column) is damaged, and not asked:
            SQL that a hostile writer put there need never end.
        synced: whether the file outlives a power cut, and readers and a writer of several processes do not block each other (WAL mode,
            which maps a file: who cuts that one short ends this process). False for contents that can be made again, in an app's process.
        anew: the file is known to be damaged; remove it. A process that has it open goes on with a file that no other process sees (WAL
            mode), or is refused its next write (SQLITE_READONLY_DBMOVED).

    Raises:
        OSError, sqlite3.Error: it can be neither opened nor made.
    """
    if anew:
        _remove_database(path)
    mode = "wal" if synced else "delete"
    while True:
        _refuse_unsafe(path)
        connection: sqlite3.Connection | None = None
        try:
            connection = _connected(path)
            connection.execute(_UNTRUSTED)
            if query(connection, "PRAGMA journal_mode") != [(mode,)]:
                with suppress(sqlite3.OperationalError):  # another process switches it now, or has it open in an older aionn's mode
                    connection.execute(f"PRAGMA journal_mode={mode}")
            # A record that a power cut loses or damages is a miss. So no write here needs an fsync.
            connection.execute(f"PRAGMA synchronous={'NORMAL' if synced else 'OFF'}")
            connection.execute("BEGIN IMMEDIATE")
            _check_schema(connection, prepare)
            prepare(connection)
            connection.execute("COMMIT")
            return connection
        except BaseException as error:
            if connection is not None:
                connection.close()
            # UnicodeDecodeError: SQLite's message quotes a damaged schema.
            if anew or not isinstance(error, sqlite3.Error | UnicodeDecodeError) or not is_damage(error):
                raise
        anew = True
        _remove_database(path)


@lru_cache(8)
def _schema_of(prepare: Callable[[sqlite3.Connection], None]) -> frozenset[tuple[str, ...]]:
    with closing(sqlite3.connect(":memory:", isolation_level=None)) as database:
        prepare(database)
        return frozenset(query(database, _SCHEMA))


def _check_schema(database: sqlite3.Connection, prepare: Callable[[sqlite3.Connection], None] | None) -> None:
    found = query(database, _SCHEMA)
    if prepare is not None and not _schema_of(prepare).issuperset(found):
        raise sqlite3.DatabaseError("it has tables, views or triggers that are not aionn's")


def read_database(path: Path, prepare: Callable[[sqlite3.Connection], None] | None = None, *, synced: bool = True) -> sqlite3.Connection:
    """Open a database that cannot be written to, as its last user left it. The arguments are as for `open_database`.

    Raises:
        OSError, sqlite3.Error: it is not there, or cannot be read. The database is closed then.
    """
    _refuse_unsafe(path)
    path.stat()
    # In WAL mode, without a log SQLite would make one. `immutable` says that no process writes.
    immutable = "&immutable=1" if synced and not Path(f"{path}-wal").exists() else ""
    connection = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro{immutable}", uri=True, isolation_level=None, check_same_thread=False)
    try:
        connection.execute(_UNTRUSTED)
        _check_schema(connection, prepare)
    except BaseException:
        connection.close()
        raise
    return connection


def _remove_database(path: Path) -> None:
    for suffix in (*_BESIDE, ""):  # a journal that is left would be played into the next file
        Path(f"{path}{suffix}").unlink(missing_ok=True)


def is_damage(error: Exception) -> bool:
    """Return whether a database's contents are at fault, and not the disk, permissions or another process. Damage is begun anew.

    A table that is gone meanwhile gives SQLITE_ERROR.
    """
    if isinstance(error, sqlite3.ProgrammingError | sqlite3.InterfaceError):
        return False  # a fault of this code, not of the file
    return not isinstance(error, sqlite3.Error) or _primary_code(error) in _DAMAGE


def _primary_code(error: sqlite3.Error) -> int:
    return int(getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR)) & 0xFF


def refusal_of_database_error(error: sqlite3.Error, doing: str) -> Refusal:
    """Return the refusal that an SQLite error stands for. `doing` begins its detail."""
    reasons = {
        sqlite3.SQLITE_FULL: MissReason.NO_SPACE,
        sqlite3.SQLITE_READONLY: MissReason.NO_PERMISSION,
        sqlite3.SQLITE_BUSY: MissReason.BUSY,
    }
    return Refusal(reasons.get(_primary_code(error), MissReason.IO_ERROR), f"{doing}: {error}")


@contextmanager
def _decodable() -> Iterator[None]:
    """Raise `sqlite3.DatabaseError` if Python cannot decode SQLite's message, which may quote from a damaged schema."""
    try:
        yield
    except UnicodeDecodeError as error:
        raise sqlite3.DatabaseError(f"SQLite's message is not UTF-8: {error.object[:200]!r}") from error


def query(database: sqlite3.Connection, statement: str, arguments: tuple[object, ...] = ()) -> list[tuple[Any, ...]]:
    """Return all rows of one SELECT. They are a consistent state, and neither wait for a writer nor delay one.

    Raises:
        sqlite3.Error
    """
    with _decodable():
        return database.execute(statement, arguments).fetchall()


@contextmanager
def transaction(database: sqlite3.Connection) -> Iterator[sqlite3.Connection]:
    """Run the body between BEGIN IMMEDIATE and COMMIT. Roll back if the body raises.

    Raises:
        sqlite3.Error
    """
    with _decodable():
        database.execute("BEGIN IMMEDIATE")
        try:
            yield database
            database.execute("COMMIT")
        except BaseException:
            if database.in_transaction:  # SQLite itself rolls back on some errors, such as a full disk
                database.execute("ROLLBACK")
            raise


def private_key(directory: Path, name: str) -> bytes:
    """Return 32 random bytes kept in that directory, the same for every process of this installation.

    Raises:
        OSError: it can be neither read nor made.
    """
    path = directory / name
    for _ in range(3):
        _refuse_unsafe(path)
        try:
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            pass
        else:
            try:
                key = os.read(fd, _KEY_BYTES + 1)
            finally:
                os.close(fd)
            if len(key) == _KEY_BYTES:
                return key
            path.unlink(missing_ok=True)
        # Written aside and linked: of two processes that start together one wins, and no process reads half a key.
        aside = directory / f"{name}.{os.getpid()}.{os.urandom(4).hex()}"
        fd = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            os.write(fd, os.urandom(_KEY_BYTES))
            os.fsync(fd)
        finally:
            os.close(fd)
        try:
            os.link(aside, path, follow_symlinks=False)
        except FileExistsError:
            pass
        finally:
            aside.unlink(missing_ok=True)
    raise OSError(errno.EBUSY, "another process removes it again and again", os.fspath(path))
