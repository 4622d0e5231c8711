"""The artifact store: files named by the digest of their contents, and statements that name files.

Writing one artifact:  files, each only if it is new  ->  statement, only if it is new  ->  look for all files, write what is missing.
Reading one artifact:  one statement  ->  all its files at once. Each byte is compared with the digest in the file's name.

Invariants
    A statement is written after its files, so a reader who finds the statement finds the files. Between the two, a sweep may remove an
    old file that no statement named. So the writer looks for the files once more. A reader who still misses a file gets PARTIAL.
    A compile never lists the store, and nothing is ever renamed.

The store is not trusted. The keys of this machine decide about a statement (`trusted_files`), never the store. A
statement is accepted if it lies at its own path and, where it matters, a trusted key has signed it.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import NamedTuple

import anyio

from aionn.caching.manifest import StoredFile
from aionn.caching.outcomes import MissReason, Refusal, refusal_of_os_error
from aionn.caching.statement import Statement, claimed_statement, verified_statement
from aionn.fleet.folders import BadContentsError, Found
from aionn.fleet.places import STATEMENTS, StatementPlace, file_path, fingerprint, seen_path, statement_place
from aionn.fleet.requests import OpenedStore, Requests, StoreError
from aionn.hal.trust import Keyring
from aionn.tasks import each


def place_of(statement: Statement) -> StatementPlace:
    """Return where a statement lies in a store."""
    return StatementPlace(statement.key, fingerprint(statement.device, statement.device_version), statement.key_id)


def statement_at(place: StatementPlace, signed: bytes, keyring: Keyring | None = None) -> Statement | Refusal:
    """Return the statement that lies at a place, or why it does not belong there.

    Args:
        keyring: whose keys may have signed it. None: the signature is not checked, so nothing may be
            adopted because of this statement.
    """
    found = claimed_statement(signed) if keyring is None else verified_statement(signed, keyring, time.time())
    if isinstance(found, Statement) and place_of(found) != place:
        return Refusal(MissReason.WRONG_TOKEN, f"the statement belongs at {place_of(found).path}")
    return found


def claimed_files(place: StatementPlace, signed: bytes) -> Sequence[StoredFile] | Refusal:
    """Return the files that a statement names, and do not check the signature. For sweeping."""
    found = statement_at(place, signed)
    return found if isinstance(found, Refusal) else found.files


def trusted_files(keyring: Keyring) -> FilesOf:
    """Return a judge that accepts only what a key of the keyring has signed."""

    def judge(place: StatementPlace, signed: bytes) -> Sequence[StoredFile] | Refusal:
        found = statement_at(place, signed, keyring)
        return found if isinstance(found, Refusal) else found.files

    return judge


MAX_STATEMENT_BYTES = 64 * 1024
_FRESH_S = 3600.0  # far below the grace of a sweep: a file this young stays until the statement is written
_REFRESHED_S = 7 * 86400.0  # an older statement is written anew with its files, so that a sweep counts them as young
_NOTED_S = 86400.0  # a note below `seen/` is written anew after a day
_LOOKS = 3  # how often a push begins anew because other writers or a sweep were faster

FilesOf = Callable[[StatementPlace, bytes], Sequence[StoredFile] | Refusal]
"""Returns the files that an encoded statement names, or why it is not acceptable at that place."""


class Pushed(enum.Enum):
    """What a push found.

    ADDED: the artifact is new.
    PRESENT: it was there already, or another writer was first.
    REPAIRED: it was there, and some of its files were missing.
    """

    ADDED = "added"
    PRESENT = "present"
    REPAIRED = "repaired"


class _Statement(NamedTuple):
    """A statement in the store. `files` is a refusal if the statement is not acceptable."""

    encoded: bytes
    files: Sequence[StoredFile] | Refusal
    written_s: float


class ArtifactStore:
    """One artifact store. Several processes on several machines may read, write and sweep it at once."""

    def __init__(self, opened: OpenedStore) -> None:
        self.requests = Requests(opened)

    @property
    def address(self) -> str:
        """The address, as it was given."""
        return self.requests.opened.address

    # --- writing -----------------------------------------------------------------------------------------------------

    async def push(
        self, place: StatementPlace, encoded: bytes, files: Sequence[tuple[StoredFile, bytes | memoryview]], files_of: FilesOf
    ) -> Pushed:
        """Store one artifact: its files, then its statement.

        The first writer wins. If an acceptable statement is there already, it stays, and only its missing files are written, as far as
        they are among `files`. A statement is replaced if its files are lost, if it is older than a week, or if it is not acceptable.

        Args:
            encoded: the signed statement. It names exactly `files`.
            files: length, digest and contents of each file. The contents have that digest; the caller has computed it.
            files_of: judges a statement that is there already.

        Raises:
            StoreError: the store cannot be used. The artifact may be there in part. Then readers do not find it or get PARTIAL, until the
                next push.
        """
        contents = {stored.digest: content for stored, content in files}
        for _ in range(_LOOKS):
            before = await self._statement_at(place, files_of)
            if before is not None and not isinstance(before.files, Refusal):
                young = time.time() - before.written_s <= _REFRESHED_S
                written = await self._complete(before.files, contents) if young else None
                if written is not None:
                    return Pushed.REPAIRED if written else Pushed.PRESENT
            await each(partial(self._put_file, stored, content) for stored, content in files)
            if before is not None:
                await self.requests.replace(place.path, encoded)
            elif not await self.requests.put_new(place.path, encoded):
                continue  # another writer was first: look at what it wrote
            if await self._complete([stored for stored, _ in files], contents) is not None:
                return Pushed.ADDED
        raise StoreError(self.address, f"pushing {place.path}", f"its objects disappeared {_LOOKS} times while it was written")

    async def _statement_at(self, place: StatementPlace, files_of: FilesOf) -> _Statement | None:
        found = await self.requests.find(place.path)
        encoded = None if found is None else await self.read_statement(place, found)
        if found is None or encoded is None:
            return None
        return _Statement(encoded, files_of(place, encoded), found.written_s)

    async def read_statement(self, place: StatementPlace, found: Found) -> bytes | None:
        """Return a statement that was found, None if it is gone by now, or b"" if it is too large for one, or not a regular file.

        Raises:
            StoreError: the store cannot be used.
        """
        try:
            return b"" if found.size_bytes > MAX_STATEMENT_BYTES else await self.requests.get(place.path, MAX_STATEMENT_BYTES)
        except BadContentsError:
            return b""

    async def _put_file(self, stored: StoredFile, content: bytes | memoryview) -> None:
        path = file_path(stored.digest)
        if await self.requests.put_new(path, content):
            return
        found = await self.requests.find(path)
        # Writing an old file again keeps it from a sweep until the statement names it. A torn file has another length.
        if found is None or found.size_bytes != stored.length or time.time() - found.written_s > _FRESH_S:
            await self.requests.replace(path, content)

    async def _complete(self, files: Sequence[StoredFile], contents: Mapping[bytes, bytes | memoryview]) -> int | None:
        """Look for all files, and write those that are missing. Return how many were, or None if one is missing and cannot be written."""
        missing: list[StoredFile] = []

        async def look(stored: StoredFile) -> None:
            found = await self.requests.find(file_path(stored.digest))
            if found is None or found.size_bytes != stored.length:
                missing.append(stored)

        await each(partial(look, stored) for stored in files)
        if any(stored.digest not in contents for stored in missing):
            return None
        await each(partial(self.requests.replace, file_path(stored.digest), contents[stored.digest]) for stored in missing)
        return len(missing)

    # --- reading -----------------------------------------------------------------------------------------------------

    async def statement(self, place: StatementPlace) -> bytes | None:
        """Return an encoded statement, or None if that place has no statement, or one that is too large.

        Raises:
            StoreError: the store cannot be used.
        """
        try:
            return await self.requests.get(place.path, MAX_STATEMENT_BYTES)
        except BadContentsError:
            return None

    async def fetch(self, files: Sequence[StoredFile], fds: Sequence[int]) -> Refusal | None:
        """Read all files of an artifact at once, and write them to `fds`. Return None if each has the digest that was asked for.

        The refusal is PARTIAL if a file is missing, WRONG_BYTES if a file has other contents, and IO_ERROR if the store does not answer. If
        a file cannot be written, the refusal has the reason of the file system. No `StoreError` is raised.
        """
        refusals: list[Refusal] = []

        async def copy(stored: StoredFile, fd: int) -> None:
            path = file_path(stored.digest)
            try:
                if await self.requests.copy_file(path, stored, fd):
                    return
                refusals.append(Refusal(MissReason.PARTIAL, f"artifact store {self.address} has no {path}"))
            except StoreError as error:
                refusals.append(Refusal(MissReason.IO_ERROR, str(error)))
            except BadContentsError as error:
                refusals.append(Refusal(MissReason.WRONG_BYTES, f"artifact store {self.address}: {error}"))
            except OSError as error:
                refusals.append(refusal_of_os_error(error, "writing the cache files"))
            tasks.cancel_scope.cancel()

        async with anyio.create_task_group() as tasks:
            for stored, fd in zip(files, fds, strict=True):
                tasks.start_soon(copy, stored, fd)
        return refusals[0] if refusals else None

    async def statements(self) -> list[tuple[StatementPlace, Found]]:
        """List all statements, for commands.

        Raises:
            StoreError: the store cannot be used.
        """
        found = await self.requests.listing(STATEMENTS)
        return [(place, one) for one in found if (place := statement_place(one.path)) is not None]

    async def mark_seen(self, fingerprints: Iterable[str]) -> None:
        """Note that a machine with these fingerprints pulls, so that a sweep keeps their artifacts. At most one write a day for each.

        If the store refuses the note or does not answer, nothing is raised, because a pull does not need the note.
        """

        async def mark(fingerprint: str) -> None:
            with suppress(StoreError):
                found = await self.requests.find(seen_path(fingerprint))
                if found is None or time.time() - found.written_s > _NOTED_S:
                    await self.requests.replace(seen_path(fingerprint), b"")

        await each(partial(mark, fingerprint) for fingerprint in fingerprints)
