"""Look after an artifact store: sweep it (`aionn fleet gc`), or check it (`aionn fleet verify`).

A sweep removes old statements, then files that no statement names. An object that is younger than the grace (24 hours) stays, so a writer
who is at work loses nothing. Each object's age is looked up once more just before it is removed. No lock is needed, because a writer looks
for its files after it has written its statement (`artifact_store`).

A statement stays while one of these holds: it is younger than `keep_s`, or a machine with its fingerprint has pulled within `keep_s`. A
statement that has lost a file is of no use, so it is removed. Beyond the budget the oldest statements are removed first.
Models for farms (`models`) are removed when they are older than the grace, because no statement names them.

A check reads every statement, file and model, and names those that no machine could use.
"""

from __future__ import annotations

import os
import re
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import anyio

from aionn.caching.manifest import StoredFile
from aionn.caching.outcomes import MissReason, Refusal
from aionn.fleet.artifact_store import ArtifactStore, FilesOf
from aionn.fleet.folders import BadContentsError, Found
from aionn.fleet.models import check_model
from aionn.fleet.places import FILES, MODELS, SEEN, STATEMENTS, StatementPlace, digest_in, file_path, seen_path
from aionn.tasks import each

KEEP_S = 30 * 86400.0
GRACE_S = 86400.0  # longer than any push takes, and than clocks of builders and store differ
_STAGING = re.compile(r".+#\d+")  # how obstore names a file that it has not finished


@dataclass(frozen=True, slots=True)
class SweepReport:
    """What a sweep did, or would do.

    Attributes:
        statements: statements removed.
        files: files removed that no statement names any more.
        models: models for farms removed.
        staging: unfinished files of writers that were killed, removed from a local store.
        freed_bytes: bytes of all of them.
        kept: statements that stay.
        kept_bytes: bytes of the files that these name and that are there, each file once.
        over_bytes: bytes beyond the budget that stay, because their statements are younger than the grace.
    """

    statements: int = 0
    files: int = 0
    models: int = 0
    staging: int = 0
    freed_bytes: int = 0
    kept: int = 0
    kept_bytes: int = 0
    over_bytes: int = 0


@dataclass(slots=True)
class _Marked:
    """One statement during a sweep. `files` is None if it cannot be read."""

    place: StatementPlace
    found: Found
    files: Sequence[StoredFile] | None
    kept: bool = False


@dataclass(slots=True)
class _Sweep:
    store: ArtifactStore
    files_of: FilesOf
    keep_s: float
    max_bytes: int | None
    grace_s: float
    now_s: float = field(default_factory=time.time)
    sizes: dict[str, int] = field(default_factory=dict)  # of the files that are there. What a statement says is not believed

    def old(self, found: Found) -> bool:
        return self.now_s - found.written_s >= self.grace_s

    async def marked(self, known: Sequence[_Marked] = ()) -> list[_Marked]:
        """Read all statements that are not known yet."""
        paths = {one.place.path for one in known}
        fresh: list[_Marked] = []

        async def read(place: StatementPlace, found: Found) -> None:
            encoded = await self.store.read_statement(place, found)
            if encoded is not None:
                files = self.files_of(place, encoded)
                fresh.append(_Marked(place, found, None if isinstance(files, Refusal) else files))

        await each(partial(read, place, found) for place, found in await self.store.statements() if place.path not in paths)
        return fresh

    async def mark(self, statements: Sequence[_Marked]) -> None:
        """Decide which statements are kept."""
        # Listed after the statements, so a statement that was found had its files before.
        self.sizes = {found.path: found.size_bytes for found in await self.store.requests.listing(FILES)}
        seen = {found.path for found in await self.store.requests.listing(SEEN) if self.now_s - found.written_s < self.keep_s}
        for one in statements:
            young = self.now_s - one.found.written_s < self.keep_s
            whole = one.files is not None and all(self.sizes.get(file_path(file.digest)) == file.length for file in one.files)
            wanted = young or seen_path(one.place.fingerprint) in seen
            one.kept = not self.old(one.found) or (wanted and whole)
        if self.max_bytes is not None:
            self._keep_within(self.max_bytes, [one for one in statements if one.kept])

    def _keep_within(self, max_bytes: int, kept: Sequence[_Marked]) -> None:
        """Drop the oldest statements until the files of the others fit."""
        users = Counter(file.digest for one in kept for file in set(one.files or ()))
        total = self.named_bytes(kept)
        for one in sorted(kept, key=lambda one: one.found.written_s):
            if total <= max_bytes or not self.old(one.found):
                break
            one.kept = False
            for file in set(one.files or ()):
                users[file.digest] -= 1
                total -= 0 if users[file.digest] else self.sizes.get(file_path(file.digest), 0)

    def named_bytes(self, statements: Sequence[_Marked]) -> int:
        """Return the bytes of all files that statements name and that are there."""
        digests = {file.digest for one in statements for file in one.files or ()}
        return sum(self.sizes.get(file_path(digest), 0) for digest in digests)

    async def unnamed(self, statements: Sequence[_Marked]) -> list[Found]:
        """Return the files that no kept statement names, among those older than the grace."""
        named = {file.digest for one in statements if one.kept for file in one.files or ()}
        found = await self.store.requests.listing(FILES)
        self.sizes = {one.path: one.size_bytes for one in found}
        return [one for one in found if self.old(one) and (digest := digest_in(one.path)) is not None and digest not in named]

    async def remove(self, found: Found) -> bool:
        """Remove an object, if it is still as old as it was when it was marked."""
        again = await self.store.requests.find(found.path)
        return again is not None and again.written_s <= found.written_s and await self.store.requests.remove(found.path, again)


async def sweep(
    store: ArtifactStore,
    files_of: FilesOf,
    *,
    keep_s: float = KEEP_S,
    max_bytes: int | None = None,
    grace_s: float = GRACE_S,
    dry_run: bool = False,
) -> SweepReport:
    """Remove what no machine needs any more.

    Args:
        files_of: returns the files that a statement names. The signature need not be checked.
        keep_s: seconds for which a statement is kept after it was written, and after a machine with its fingerprint has pulled.
        max_bytes: budget of all files. None: no budget.
        grace_s: seconds. Objects that are younger are never removed.
        dry_run: remove nothing, and report what would be removed.

    Raises:
        StoreError: the store cannot be used. Some objects may have been removed, which no machine needed.
    """
    plan = _Sweep(store, files_of, keep_s, max_bytes, grace_s)
    statements = await plan.marked()
    await plan.mark(statements)
    dropped = [one for one in statements if not one.kept]
    kept = [one for one in statements if one.kept]
    removed: list[Found] = []

    async def remove(found: Found) -> None:
        if dry_run or await plan.remove(found):
            removed.append(found)

    # Statements first: a reader never finds a statement whose files have been taken on purpose.
    await each(partial(remove, one.found) for one in dropped)
    gone = {found.path for found in removed}
    kept += [one for one in dropped if one.found.path not in gone]
    if not dry_run:
        kept += await plan.marked(kept)  # written since, or written anew after they were removed
    for one in kept:
        one.kept = True
    await each(partial(remove, found) for found in await plan.unnamed(kept))
    await each(
        partial(remove, found) for found in await store.requests.listing(MODELS) if plan.old(found) and digest_in(found.path) is not None
    )
    await each(
        partial(remove, found)
        for found in await store.requests.listing(SEEN)
        if plan.now_s - found.written_s > max(keep_s, grace_s) and digest_in(found.path) is not None
    )
    staging = await anyio.to_thread.run_sync(_remove_staging, store.requests.opened.folder, plan.now_s - grace_s, dry_run)
    left = plan.named_bytes(kept)
    return SweepReport(
        statements=sum(found.path.startswith(f"{STATEMENTS}/") for found in removed),
        files=sum(found.path.startswith(f"{FILES}/") for found in removed),
        models=sum(found.path.startswith(f"{MODELS}/") for found in removed),
        staging=len(staging),
        freed_bytes=sum(found.size_bytes for found in removed) + sum(staging),
        kept=len(kept),
        kept_bytes=left,
        over_bytes=max(0, left - max_bytes) if max_bytes is not None else 0,
    )


def _remove_staging(folder: Path | None, before_s: float, dry_run: bool) -> list[int]:
    """Remove what killed writers have left in a local store, and return the sizes. A bucket shows no unfinished objects."""
    sizes: list[int] = []
    if folder is None:
        return sizes
    for part in (FILES, STATEMENTS, MODELS, SEEN):
        with suppress(FileNotFoundError):
            # By descriptors, and without following symlinks, which a hostile writer could lead out of the store.
            for _, below, names, fd in os.fwalk(os.path.join(folder, part), topdown=False):
                for name in filter(_STAGING.fullmatch, names):
                    with suppress(FileNotFoundError):
                        status = os.lstat(name, dir_fd=fd)
                        if status.st_mtime <= before_s:
                            if not dry_run:
                                os.unlink(name, dir_fd=fd)
                            sizes.append(status.st_size)
                for empty in () if dry_run else below:
                    with suppress(OSError):  # it holds something
                        os.rmdir(empty, dir_fd=fd)
    return sizes


_AT_ONCE = 4


@dataclass(frozen=True, slots=True)
class BadObject:
    """A statement, a file or a model that no machine could use. `path` is its path in the store."""

    path: str
    reason: MissReason
    detail: str


@dataclass(frozen=True, slots=True)
class Checked:
    """What a check has read.

    Attributes:
        statements: how many statements there are.
        files: how many files there are, whether or not a statement names them.
        models: how many models for farms there are.
        size_bytes: bytes of the files and the models.
        unnamed: how many files no statement names. A sweep removes them.
        bad: the objects that no machine could use, in the order of the paths.
        removed: how many bad objects were removed. Those that were replaced or repaired meanwhile were not.
    """

    statements: int
    files: int
    models: int
    size_bytes: int
    unnamed: int
    bad: tuple[BadObject, ...]
    removed: int = 0


@dataclass(frozen=True, slots=True)
class _Damage:
    """A bad object that was found and read twice.

    Attributes:
        found: as `Requests.find` has returned it before the second reading.
        cause: for a statement, its file of which a reader could make no use: the path, and what was found there.
    """

    found: Found
    reason: MissReason
    detail: str
    cause: tuple[str, Found | None] | None = None


class _Check:
    """One check of a store.

    Others push, repair and sweep meanwhile. So an object that looks bad is looked at and read once more. It is bad if it is so again,
    and it is removed if `Requests.find` still returns what it returned before that second reading.
    """

    def __init__(self, store: ArtifactStore, judge: FilesOf) -> None:
        self._store, self._judge = store, judge
        self.damaged: dict[str, _Damage] = {}
        """Files and models, by path."""
        self.statements: list[_Damage] = []
        """Statements. One that names several bad files is there several times."""

    async def files_of(self, place: StatementPlace, found: Found) -> Sequence[StoredFile] | Refusal | None:
        """Read a statement. Return the files that it names, or why it is bad, or None if it is gone."""
        encoded = await self._store.read_statement(place, found)
        return None if encoded is None else self._judge(place, encoded)

    async def read_statement_again(self, place: StatementPlace) -> None:
        """Judge a statement that looked bad, by itself and by the files that it names."""
        found = await self._store.requests.find(place.path)
        files = None if found is None else await self.files_of(place, found)
        if found is None or files is None:
            return
        if isinstance(files, Refusal):
            self.statements.append(_Damage(found, files.reason, files.detail))
            return
        for file in files:
            path = file_path(file.digest)
            there = await self._store.requests.find(path)
            damage = self.damaged.get(path)
            if there is None:
                self.statements.append(_Damage(found, MissReason.PARTIAL, f"its file {path} is missing", (path, None)))
            elif there.size_bytes != file.length:
                detail = f"{path} has {there.size_bytes} bytes, expected {file.length}"
                self.statements.append(_Damage(found, MissReason.WRONG_LENGTH, detail, (path, there)))
            elif damage is not None and damage.found == there:
                self.statements.append(_Damage(found, MissReason.WRONG_BYTES, f"its file {path} is damaged", (path, there)))

    async def read_object(self, listed: Found, digest: bytes, read: Callable[[Found, bytes], Awaitable[Refusal | None]]) -> None:
        """Read a file or a model, and once more if it is bad."""
        if await read(listed, digest) is None:
            return
        found = await self._store.requests.find(listed.path)
        refusal = None if found is None else await read(found, digest)
        if found is not None and refusal is not None:
            self.damaged[found.path] = _Damage(found, refusal.reason, refusal.detail)

    async def read_file(self, found: Found, digest: bytes) -> Refusal | None:
        """Return why no machine could use a file, or None if it is whole, or gone."""
        try:
            await self._store.requests.copy_file(found.path, StoredFile(found.size_bytes, digest), None)
        except BadContentsError as error:
            return Refusal(MissReason.WRONG_BYTES, str(error))
        return None

    async def read_model(self, found: Found, token: bytes) -> Refusal | None:
        """Return why no machine could use a model, or None if it is whole, or gone."""
        return await check_model(self._store, token, found.size_bytes)

    async def remove(self) -> int:
        """Remove what is still bad. Return how many objects that were."""
        requests, removed = self._store.requests, 0
        # Files first. A writer who then finds a file missing writes it again, and its statement stays.
        for damage in self.damaged.values():
            removed += await requests.remove_found(damage.found)
        gone: set[str] = set()
        for damage in self.statements:
            path = damage.found.path
            if path not in gone and await self._is_still_caused(damage) and await requests.remove_found(damage.found):
                gone.add(path)
        return removed + len(gone)

    async def _is_still_caused(self, damage: _Damage) -> bool:
        """Return whether a statement's file is still missing or as bad as it was."""
        if damage.cause is None:
            return True
        path, before = damage.cause
        now = await self._store.requests.find(path)
        return now is None or now == before

    def bad(self) -> tuple[BadObject, ...]:
        found = [BadObject(one.found.path, one.reason, one.detail) for one in (*self.damaged.values(), *self.statements)]
        return tuple(sorted(found, key=lambda one: one.path))


async def check_store(store: ArtifactStore, judge: FilesOf, *, remove: bool = False) -> Checked:
    """Read everything, and compare each file and each model with the digest in its name. Others may push and sweep meanwhile.

    Args:
        judge: decides which statements are acceptable. A statement that it refuses is bad.
        remove: remove all bad objects, so that the next push or compile writes them again. An object that a writer has replaced or
            repaired meanwhile stays. What a writer does between the last look at an object and its removal is lost.

    Raises:
        StoreError: the store cannot be used, or a model cannot be copied to a temporary folder.
    """
    check = _Check(store, judge)
    suspects: set[StatementPlace] = set()
    named: dict[str, list[tuple[StatementPlace, StoredFile]]] = {}

    async def read_statement(place: StatementPlace, found: Found) -> None:
        files = await check.files_of(place, found)
        if isinstance(files, Refusal):
            suspects.add(place)
            return
        for file in files or ():
            named.setdefault(file_path(file.digest), []).append((place, file))

    statements = await store.statements()
    await each(partial(read_statement, place, found) for place, found in statements)
    listed = {found.path: found for found in await store.requests.listing(FILES)}
    files = [(one, digest) for one in listed.values() if (digest := digest_in(one.path)) is not None]
    await each((partial(check.read_object, one, digest, check.read_file) for one, digest in files), _AT_ONCE)
    models = [(one, token) for one in await store.requests.listing(MODELS) if (token := digest_in(one.path)) is not None]
    for model, token in models:  # one after the other, because each takes room in a temporary folder
        await check.read_object(model, token, check.read_model)
    for path, users in named.items():
        found = listed.get(path)
        for place, file in users:
            if found is None or found.size_bytes != file.length or path in check.damaged:
                suspects.add(place)
    await each(partial(check.read_statement_again, place) for place in suspects)
    return Checked(
        statements=len(statements),
        files=len(listed),
        models=len(models),
        size_bytes=sum(one.size_bytes for one in (*listed.values(), *(model for model, _ in models))),
        unnamed=len(listed.keys() - named.keys()),
        bad=check.bad(),
        removed=await check.remove() if remove else 0,
    )
