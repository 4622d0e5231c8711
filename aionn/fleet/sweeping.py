"""Sweep an artifact store (`aionn fleet gc`): remove old statements, then files that no statement names.

An object that is younger than the grace (24 hours) stays, so a writer who is at work loses nothing. Each object's age is looked up once
more just before it is removed. No lock is needed, because a writer looks for its files after it has written its statement
(`artifact_store`).

A statement stays while one of these holds: it is younger than `keep_s`, or a machine with its fingerprint has pulled within `keep_s`. A
statement that has lost a file is of no use, so it is removed. Beyond the budget the oldest statements are removed first.
Models for farms (`models`) are removed when they are older than the grace, because no statement names them.
"""

from __future__ import annotations

import os
import re
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import anyio

from aionn.caching.manifest import StoredFile
from aionn.caching.outcomes import Refusal
from aionn.fleet.artifact_store import ArtifactStore, FilesOf, each
from aionn.fleet.folders import Found
from aionn.fleet.places import FILES, MODELS, SEEN, STATEMENTS, StatementPlace, digest_in, file_path, seen_path

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
