"""Check an artifact store (`aionn fleet verify`): read every statement, file and model, and name those that no machine could use."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from aionn.caching.manifest import StoredFile
from aionn.caching.outcomes import MissReason, Refusal
from aionn.fleet.artifact_store import ArtifactStore, FilesOf, each
from aionn.fleet.models import check_model
from aionn.fleet.places import FILES, MODELS, StatementPlace, digest_in, file_path
from aionn.fleet.requests import BadContentsError, Found

__all__ = ["BadObject", "Checked", "check_store"]

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
        removed: how many bad objects were removed.
    """

    statements: int
    files: int
    models: int
    size_bytes: int
    unnamed: int
    bad: tuple[BadObject, ...]
    removed: int = 0


async def check_store(store: ArtifactStore, judge: FilesOf, *, remove: bool = False) -> Checked:
    """Read everything, and compare each file and each model with the digest in its name.

    Args:
        judge: decides which statements are acceptable. A statement that it refuses is bad.
        remove: remove all bad objects, so that the next push or compile writes them again.

    Raises:
        StoreError: the store cannot be used, or a model cannot be copied to a temporary folder.
    """
    bad: list[BadObject] = []
    named: dict[str, list[tuple[str, StoredFile]]] = {}

    async def read_statement(place: StatementPlace, found: Found) -> None:
        encoded = await store.read_statement(place, found)
        if encoded is None:
            return
        files = judge(place, encoded)
        if isinstance(files, Refusal):
            bad.append(BadObject(place.path, files.reason, files.detail))
            return
        for file in files:
            named.setdefault(file_path(file.digest), []).append((place.path, file))

    statements = await store.statements()
    await each(partial(read_statement, place, found) for place, found in statements)
    listed = {found.path: found for found in await store.requests.listing(FILES)}

    async def read_file(found: Found) -> None:
        digest = digest_in(found.path)
        if digest is None:
            return
        try:
            await store.requests.copy_file(found.path, StoredFile(found.size_bytes, digest), None)
        except BadContentsError as error:
            bad.append(BadObject(found.path, MissReason.WRONG_BYTES, str(error)))

    await each((partial(read_file, found) for found in listed.values()), _AT_ONCE)
    models = [(one, token) for one in await store.requests.listing(MODELS) if (token := digest_in(one.path)) is not None]
    for model, token in models:  # one after the other, because each takes room in a temporary folder
        refusal = await check_model(store, token)
        if refusal is not None:
            bad.append(BadObject(model.path, refusal.reason, refusal.detail))
    damaged = {one.path for one in bad}
    for path, users in named.items():
        for statement, file in users:
            found = listed.get(path) or await store.requests.find(path)
            if found is None:
                bad.append(BadObject(statement, MissReason.PARTIAL, f"its file {path} is missing"))
            elif found.size_bytes != file.length:
                bad.append(BadObject(statement, MissReason.WRONG_LENGTH, f"{path} has {found.size_bytes} bytes, expected {file.length}"))
            elif path in damaged:
                bad.append(BadObject(statement, MissReason.WRONG_BYTES, f"its file {path} is damaged"))
    if remove:
        # Statements first, so that no reader finds one whose file has just been removed.
        for path in sorted({one.path for one in bad}, key=lambda path: (path.startswith(f"{FILES}/"), path)):
            await store.requests.remove(path)
    return Checked(
        statements=len(statements),
        files=len(listed),
        models=len(models),
        size_bytes=sum(one.size_bytes for one in (*listed.values(), *(model for model, _ in models))),
        unnamed=len(listed.keys() - named.keys()),
        bad=tuple(sorted(bad, key=lambda one: one.path)),
        removed=len({one.path for one in bad}) if remove else 0,
    )
