"""Check an artifact store (`aionn fleet verify`): read every statement, file and model, and name those that no machine could use."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial

from aionn.caching.manifest import StoredFile
from aionn.caching.outcomes import MissReason, Refusal
from aionn.fleet.artifact_store import ArtifactStore, FilesOf, each
from aionn.fleet.folders import BadContentsError, Found
from aionn.fleet.models import check_model
from aionn.fleet.places import FILES, MODELS, StatementPlace, digest_in, file_path

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
