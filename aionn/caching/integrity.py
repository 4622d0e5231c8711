"""The driver's side of a cache: which bytes this driver stored under a token. Only this driver writes where that is kept.

The order of the steps makes it safe. Save: hash the engine's buffer, record the digests, and only then write the files. Load: copy a file
into a private buffer, hash *that buffer*, compare, and return *that buffer*. No other process can change anything between check and
use. So it does not matter when a file is replaced. Where the executable is there already, nothing is loaded. Only then the digests that
are remembered of a file's identity are enough.

A token has up to `_CANDIDATES` records, newest first, because the files switch later than the record: the app publishes them. The app may
die in between. Two processes may save at once. Two apps may keep the same model in two caches. This driver wrote each of those sets of
files, whole, and has its record. A mix of two sets has no record.

A separate table has the records of artifacts that another machine has compiled and signed. They are believed while the key is trusted.

Invariants
    Every digest in `records` was computed from an engine's buffer in this process family, never from a file.
    All records of a store were made by one version of the engine, because each version has a separate database (`state.device_database`).

Nothing here raises for the state of a cache: `save` and `load` return a `Refusal`. Both block; call them in a thread.

The record of an adopted artifact holds the id of the builder's key that signed. It is believed only while the caller's keyring has that key
and lets it sign for this device. A key that is gone is revoked: the records of the token that it signed are removed. A keyring that could
not be read, whose folder is missing, or that was not sent, believes nothing and removes nothing.
"""

from __future__ import annotations

import errno
import hmac
import logging
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING

import msgspec

from aionn import trace
from aionn.caching.artifact_files import (
    Purpose,
    check_descriptors,
    digests_of_files,
    lengths_of,
    read_private,
    record_of,
    sole_writer,
    write_whole,
)
from aionn.caching.outcomes import MissReason, Refusal, refusal_of_os_error
from aionn.caching.private_folder import UnsafeStateError
from aionn.caching.state import (
    StateFolder,
    device_database,
    is_damage,
    open_database,
    private_state,
    query,
    read_database,
    refusal_of_database_error,
    transaction,
)
from aionn.file_ranges import Identity, ShortFileError, digest_of, shows_changes
from aionn.hal.engine import Artifact
from aionn.hal.interfaces import CacheHandles
from aionn.hal.types import CACHE_TOKEN_BYTES, KEYRING_NEEDED, CacheFiles
from aionn.memo import Memo

if TYPE_CHECKING:
    from aionn.hal.trust import Keyring


_log = logging.getLogger("aionn.caching")
_CANDIDATES = 16  # the published set, one being published, two savers at once; and the same model in other cache directories
_SEEN = 64  # sets of files whose digests are remembered
_LOCK_WAIT_S = 5.0  # two drivers write the same files: the second waits for the first, which takes a fraction of a second


class Verified(msgspec.Struct, frozen=True):
    """Cache files whose digests match a record.

    Attributes:
        digests: the record: for each file, model files first, its length in 8 bytes, little-endian, and its BLAKE3 of 32 bytes.
        artifact: private copies of the files, or None if the caller needs none.
        key_id: of the builder's key that signed what was adopted, or empty for what this driver has stored.
    """

    digests: bytes
    artifact: Artifact | None
    key_id: bytes = b""


class IntegrityStore:
    """Digests of one engine's cache files, by token. Thread-safe; several processes may use one store at once."""

    def __init__(
        self,
        device: str,
        version: str,
        files: CacheFiles,
        *,
        state_directory: StateFolder = None,
        max_tokens: int = 4096,
        known_as: str = "",
        confined: bool = True,
    ) -> None:
        """Open the store of this version of `device`, and remove stores of its other versions that were not used for long.

        Args:
            device, version: the engine's name and version; the store's file is named after both.
            files: how many cache files the engine has.
            state_directory: None stands for the user's (`private_folder.user_state_directory`).
            max_tokens: beyond it the store forgets the token unused for longest.
            known_as: the name by which the app, and so a builder's key, knows the device. Empty stands for `device`.
            confined: False for a process with more rights than the device's driver. It only reads, because a journal that a hostile
                driver has left has an SQLite that may write remove any file of this account.

        A directory that cannot be used raises nothing. `unavailable` says why, and every save and load is refused with it.
        """
        self.device, self.version, self.files, self.max_tokens = device, version, files, max_tokens
        self.known_as = known_as or device
        self.unavailable: Refusal | None = None
        self._lock = threading.Lock()
        self._database: sqlite3.Connection | None = None
        self._read_only = False  # the records are believed, and no record can be added
        self._seen: Memo[tuple[Identity, ...], bytes] = Memo(_SEEN)  # what was digested here, as in `Verified.digests`
        self._used: dict[bytes, None] = {}  # tokens loaded since `note_uses`, the latest last
        try:
            self._path = device_database(private_state(state_directory), "integrity", device, version)
            self._database = self._open() if confined else self._opened_for_reading()
        except (OSError, sqlite3.Error) as error:
            where = "$XDG_STATE_HOME/aionn, else ~/.local/state/aionn" if state_directory is None else str(state_directory)
            doing = f"integrity store of {device!r} (in {where}; Runtime(state_dir=) and --state-dir choose another folder)"
            if isinstance(error, UnsafeStateError):
                self.unavailable = Refusal(MissReason.UNSAFE, f"{doing}: {error}")
            elif isinstance(error, OSError):
                self.unavailable = refusal_of_os_error(error, doing)
            else:
                self.unavailable = refusal_of_database_error(error, doing)
            _log.info("device %s runs without a compilation cache: %s", device, self.unavailable)

    def _open(self) -> sqlite3.Connection:
        try:
            return open_database(self._path, make_tables)
        except OSError as error:
            if error.errno not in (errno.EROFS, errno.EACCES, errno.EPERM) or not self._path.exists():
                raise
            return self._opened_for_reading()

    def _opened_for_reading(self) -> sqlite3.Connection:
        self._read_only = True
        return read_database(self._path, make_tables)

    def close(self) -> None:
        """Close the database. Later saves and loads are refused."""
        self.note_uses()
        with self._lock:
            if self._database is not None:
                self._database.close()
                self._database = None
                self.unavailable = Refusal(MissReason.IO_ERROR, "integrity store is closed")

    def _begin_anew_if_damaged(self, error: sqlite3.Error) -> None:
        """Replace a store that cannot be read. The new store is empty, and it works."""
        if not is_damage(error) or self._read_only:
            return
        with self._lock:
            if self._database is None:
                return
            _log.warning("the store of digests of device %s was damaged and is begun anew: %s", self.device, error)
            trace.count("cache.state_begun_anew", device=self.device)
            self._database.close()
            self._database = None
            self._used.clear()
            try:
                self._database = open_database(self._path, make_tables, anew=True)
            except (OSError, sqlite3.Error) as again:
                self.unavailable = Refusal(MissReason.IO_ERROR, f"integrity store of {self.device!r}: {again}")

    # --- save --------------------------------------------------------------------------------------------------------

    def save(
        self, handles: CacheHandles, artifact: Artifact, trailer: bytes = b"", stored: Callable[[bytes], object] | None = None
    ) -> Refusal | None:
        """Record and write an artifact. Returns None if it was stored. The files are whole and recorded, or a load refuses them.

        Args:
            trailer: bytes that follow the engine's in the first file.
            stored: called with the record of the files when they are whole; see `Verified.digests`.

        The files are truncated and written from their beginning, wherever the descriptors' offsets stand. The app's store syncs them
        to disk when it publishes them.
        """
        with trace.span("cache.save", device=self.device):
            refusal = self._save(handles, artifact, trailer, stored)
        if refusal is not None:
            _log.info("device %s did not store an artifact: %s", self.device, refusal)
        trace.count("cache.saved" if refusal is None else "cache.save_failed", device=self.device)
        return refusal

    def _save(self, handles: CacheHandles, artifact: Artifact, trailer: bytes, stored: Callable[[bytes], object] | None) -> Refusal | None:
        try:
            if CacheFiles(len(artifact.model), len(artifact.data)) != self.files:
                return Refusal(
                    MissReason.WRONG_FILES,
                    f"the engine exported {len(artifact.model)} + {len(artifact.data)} files, and it announced {self.files}",
                )
            refusal = self._check(handles, "write")
            if refusal is not None:
                return refusal
            files = [[memoryview(buffer).cast("B")] for buffer in (*artifact.model, *artifact.data)]
            if trailer:
                files[0].append(memoryview(trailer))
            lengths = [sum(piece.nbytes for piece in pieces) for pieces in files]
            digests = record_of(lengths, [digest_of(*pieces) for pieces in files])
            refusal = self._record(handles.token, digests)
            if refusal is not None:
                return refusal
            fds = (*handles.model, *handles.data)
            # One right for the set: if two drivers get the same files, the later set stays, unmixed.
            with sole_writer(fds[0], _LOCK_WAIT_S) as alone:
                if not alone:
                    return Refusal(MissReason.BUSY, f"another driver has been writing these files for {_LOCK_WAIT_S} s")
                for fd, pieces in zip(fds, files, strict=True):
                    write_whole(fd, *pieces)
            if stored is not None:
                stored(digests)
        except OSError as error:
            return refusal_of_os_error(error, "writing the cache files")
        except (TypeError, ValueError, BufferError) as error:
            return Refusal(MissReason.IO_ERROR, f"the engine's artifact is not made of contiguous bytes: {error}")
        except sqlite3.Error as error:
            self._begin_anew_if_damaged(error)
            return refusal_of_database_error(error, "recording the digests")
        return None

    def note_adopted(self, token: bytes, digests: bytes, key_id: bytes) -> Refusal | None:
        """Record an artifact that `adopting` has verified and the engine has loaded. Returns None if it is believed from now on."""
        try:
            return self._record(token, digests, key_id)
        except sqlite3.Error as error:
            self._begin_anew_if_damaged(error)
            return refusal_of_database_error(error, "recording the digests")

    def _record(self, token: bytes, digests: bytes, key_id: bytes = b"") -> Refusal | None:
        """Record digests of what this driver has stored, or with a `key_id` of what it has adopted."""
        with self._lock:
            if self._database is None:
                return self.unavailable
            if self._read_only:
                return Refusal(MissReason.NO_PERMISSION, f"the records in {self._path.parent} are read-only")
            with transaction(self._database) as database:
                self._write_uses(database)
                database.execute("INSERT OR IGNORE INTO tokens VALUES (?, 0)", (token,))
                self._touch(database, token)
                if key_id:
                    note_adopted(database, token, digests, key_id)
                else:
                    # OR REPLACE: the same bytes saved again become the newest record.
                    database.execute("INSERT OR REPLACE INTO records (token, digests) VALUES (?, ?)", (token, digests))
                    database.execute(
                        "DELETE FROM records WHERE token = ? AND number NOT IN "
                        "(SELECT number FROM records WHERE token = ? ORDER BY number DESC LIMIT ?)",
                        (token, token, _CANDIDATES),
                    )
                (tokens,) = database.execute("SELECT COUNT(*) FROM tokens").fetchone()
                if tokens > self.max_tokens:
                    oldest = database.execute("SELECT token FROM tokens ORDER BY used LIMIT ?", (tokens - self.max_tokens,)).fetchall()
                    database.executemany("DELETE FROM records WHERE token = ?", oldest)
                    database.executemany("DELETE FROM adopted WHERE token = ?", oldest)
                    database.executemany("DELETE FROM tokens WHERE token = ?", oldest)
        return None

    @staticmethod
    def _touch(database: sqlite3.Connection, token: bytes) -> None:
        database.execute("UPDATE tokens SET used = (SELECT MAX(used) + 1 FROM tokens) WHERE token = ?", (token,))

    def _write_uses(self, database: sqlite3.Connection) -> None:
        for token in self._used:
            self._touch(database, token)
        self._used.clear()

    def note_uses(self) -> None:
        """Write down which tokens were loaded since the last time. A driver calls this when it has answered its client.

        A load does not do it, because it costs as much as the rest of the load. A process that is killed in between loses only the
        order in which tokens are forgotten.
        """
        with self._lock:
            if self._database is None or self._read_only or not self._used:
                return
            try:
                with transaction(self._database) as database:
                    self._write_uses(database)
            except sqlite3.Error as error:
                self._used.clear()
                _log.info("the use of cached artifacts of device %s was not noted: %s", self.device, error)

    # --- load --------------------------------------------------------------------------------------------------------

    def load(self, handles: CacheHandles) -> Artifact | Refusal:
        """Return the artifact that this driver stored under `handles.token`, or why it cannot."""
        verified = self.verify(handles)
        if isinstance(verified, Refusal):
            return verified
        assert verified.artifact is not None  # nothing is known
        return verified.artifact

    def verify(self, handles: CacheHandles, known: Collection[bytes] = ()) -> Verified | Refusal:
        """Verify the files, and return their digests and private copies of them, or why this driver did not store them.

        Args:
            known: digests of artifacts that the caller needs no copy of, because it has their executables. If this driver recorded
                such an artifact under the token, the files are digested without being kept. They are read once more and copied if
                they turn out to be another artifact. Files that were digested here before, and have the same identity, are not read:
                the executable was made of verified bytes, whatever is in the files now.

        The copies are private: only the caller has references to them. Copies of 64 KiB or more are writable memoryviews that begin at a
        multiple of 64 bytes, smaller ones are `bytes`.
        """
        result: Verified | Refusal
        with trace.span("cache.verify", device=self.device):
            try:
                result = self._verify(handles, known)
            except ShortFileError as error:
                result = Refusal(MissReason.WRONG_BYTES, f"a file was cut while it was read ({error})")
            except OSError as error:
                result = refusal_of_os_error(error, "reading the cache files")
            except sqlite3.Error as error:
                self._begin_anew_if_damaged(error)
                result = refusal_of_database_error(error, "reading the digests")
            except MemoryError:
                result = Refusal(MissReason.IO_ERROR, "there is not enough memory for a private copy of the cache files")
        if isinstance(result, Refusal) and result.detail != KEYRING_NEEDED:  # the client has the answer, and asks again
            _log.info("device %s refused a cached artifact: %s", self.device, result)
            trace.count("cache.refused", device=self.device, reason=result.reason.value)
        return result

    def _verify(self, handles: CacheHandles, known: Collection[bytes]) -> Verified | Refusal:
        refusal = self._check(handles, "read")
        if refusal is not None:
            return refusal
        recorded = self._recorded(handles.token, handles.keyring)
        if isinstance(recorded, Refusal):
            return recorded
        fds = (*handles.model, *handles.data)
        began_ns, identities = time.time_ns(), tuple(Identity.of(os.fstat(fd)) for fd in fds)
        lengths = [identity.size for identity in identities]
        # Before reading anything: a file that was made huge must not cost its size in memory.
        candidates = [digests for digests in recorded if lengths_of(digests) == lengths]
        if not candidates:
            stored = " or ".join(str(lengths_of(digests)) for digests in recorded)
            return Refusal(MissReason.WRONG_LENGTH, f"the files have {lengths} bytes, stored were {stored}")
        if known and any(digests in known for digests in candidates):
            found = self._seen.get(identities) or self._saw(identities, began_ns, record_of(lengths, digests_of_files(fds, lengths)))
            if not _matches(found, candidates):
                return _wrong_bytes(fds)
            if found in known:
                return Verified(found, None, recorded[found])
        copies, digests = read_private(fds, lengths)
        found = self._saw(identities, began_ns, record_of(lengths, digests))
        if not _matches(found, candidates):
            return _wrong_bytes(fds)
        return Verified(found, Artifact(tuple(copies[: self.files.model]), tuple(copies[self.files.model :])), recorded[found])

    def _saw(self, identities: tuple[Identity, ...], began_ns: int, found: bytes) -> bytes:
        """Remember the digests of files that had these identities before they were read, and return the digests."""
        if shows_changes(identities, began_ns):
            with self._lock:
                self._seen[identities] = found
        return found

    def _recorded(self, token: bytes, keyring: bytes) -> dict[bytes, bytes] | Refusal:
        """Return the records of a token, each with the id of the builder's key if it was adopted, and note the token's use."""
        with self._lock:
            if self._database is None:
                return self.unavailable or Refusal(MissReason.IO_ERROR, "integrity store is closed")
            rows = query(self._database, "SELECT digests FROM records WHERE token = ? ORDER BY number DESC", (token,))
            recorded = {digests: b"" for (digests,) in rows if isinstance(digests, bytes)}  # SQLite keeps any type in any column
            adopted = believed(self._database, token, self.known_as, keyring)
            if isinstance(adopted, dict):
                recorded = adopted | recorded
            elif not recorded or adopted.detail == KEYRING_NEEDED:
                return adopted
            if recorded:
                self._used.pop(token, None)
                self._used[token] = None
                return recorded
        return Refusal(MissReason.NO_INTEGRITY_RECORD, f"this driver has no record of token {token.hex()[:16]} in {self._path.parent}")

    def _check(self, handles: CacheHandles, purpose: Purpose) -> Refusal | None:
        """Check what shows without reading: number of files, the token's length, access mode, kind of file."""
        if self.unavailable is not None:
            return self.unavailable
        if CacheFiles(len(handles.model), len(handles.data)) != self.files:
            return Refusal(
                MissReason.WRONG_FILES,
                f"got {len(handles.model)} model and {len(handles.data)} data handles, expected {self.files.model} and {self.files.data}",
            )
        if not self.files.supported:
            return Refusal(MissReason.WRONG_FILES, "this device does not cache")
        if len(handles.token) != CACHE_TOKEN_BYTES:
            return Refusal(MissReason.WRONG_TOKEN, f"the token has {len(handles.token)} bytes, expected {CACHE_TOKEN_BYTES}")
        return check_descriptors((*handles.model, *handles.data), purpose)


def _matches(found: bytes, candidates: Sequence[bytes]) -> bool:
    # All candidates are compared: the time must not show which candidate matched, or how much of one.
    return sum([hmac.compare_digest(found, digests) for digests in candidates]) > 0


def _wrong_bytes(fds: Sequence[int]) -> Refusal:
    return Refusal(MissReason.WRONG_BYTES, f"the contents of {len(fds)} files are not what this driver stored")


_KEPT = 4
"""So many adopted artifacts are remembered per token."""


def make_tables(database: sqlite3.Connection) -> None:
    """Make the tables that are not there."""
    for statement in (
        "CREATE TABLE IF NOT EXISTS tokens (token BLOB PRIMARY KEY, used INTEGER NOT NULL) WITHOUT ROWID",
        "CREATE INDEX IF NOT EXISTS by_use ON tokens (used)",
        "CREATE TABLE IF NOT EXISTS records (number INTEGER PRIMARY KEY AUTOINCREMENT, token BLOB NOT NULL, digests BLOB NOT NULL, "
        "UNIQUE (token, digests))",
        "CREATE TABLE IF NOT EXISTS adopted (number INTEGER PRIMARY KEY AUTOINCREMENT, token BLOB NOT NULL, digests BLOB NOT NULL, "
        "key_id BLOB NOT NULL, UNIQUE (token, digests, key_id))",
    ):
        database.execute(statement)


def note_adopted(database: sqlite3.Connection, token: bytes, digests: bytes, key_id: bytes) -> None:
    """Remember an adopted artifact, in the caller's transaction. A few newest of its token are kept."""
    database.execute("INSERT OR REPLACE INTO adopted (token, digests, key_id) VALUES (?, ?, ?)", (token, digests, key_id))
    database.execute(
        "DELETE FROM adopted WHERE token = ? AND number NOT IN (SELECT number FROM adopted WHERE token = ? ORDER BY number DESC LIMIT ?)",
        (token, token, _KEPT),
    )


def believed(database: sqlite3.Connection, token: bytes, device: str, encoded_keyring: bytes) -> dict[bytes, bytes] | Refusal:
    """Return what was adopted under a token and is believed now: digests, and the id of the key that signed them. Or why none is.

    Records of revoked keys are removed, if the database can be written to. The result is empty if nothing was adopted.
    """
    rows = query(database, "SELECT digests, key_id FROM adopted WHERE token = ? ORDER BY number DESC", (token,))
    records = [(digests, key_id) for digests, key_id in rows if isinstance(digests, bytes) and isinstance(key_id, bytes)]
    if not records:
        return {}
    if not encoded_keyring:
        return Refusal(MissReason.UNTRUSTED_BUILDER, KEYRING_NEEDED)
    from aionn.hal.trust import decode_keyring  # most drivers have adopted nothing

    keyring = decode_keyring(encoded_keyring)
    if keyring.fault:
        return Refusal(MissReason.UNSAFE, f"it was adopted, and no builder is trusted now: {keyring.fault}")
    if keyring.missing:
        return Refusal(MissReason.UNTRUSTED_BUILDER, f"it was adopted, and no builder is trusted now: there is no folder {keyring.missing}")
    trusted = {key_id for _, key_id in records if _may_sign(keyring, key_id, device)}
    revoked = {key_id for _, key_id in records} - trusted
    if revoked:
        try:
            with transaction(database):
                database.executemany("DELETE FROM adopted WHERE token = ? AND key_id = ?", [(token, key_id) for key_id in revoked])
        except sqlite3.OperationalError:
            pass  # the database cannot be written to now, and the records are not believed anyway
    if not trusted:
        keys = ", ".join(sorted(key_id.hex()[:16] for key_id in revoked))
        return Refusal(MissReason.REVOKED, f"it was adopted, and key {keys} is not trusted any more for device {device!r}")
    return {digests: key_id for digests, key_id in reversed(records) if key_id in trusted}


def _may_sign(keyring: Keyring, key_id: bytes, device: str) -> bool:
    key = keyring.find(key_id)
    return key is not None and key.allows(device)
