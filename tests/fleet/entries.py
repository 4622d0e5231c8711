"""Artifacts for tests of the store: made-up files, and statements with a real signature."""

from __future__ import annotations

import random
from dataclasses import dataclass

from blake3 import blake3

from aionn.caching.manifest import Manifest, StoredFile
from aionn.caching.statement import Statement, claimed_statement
from aionn.caching.token import KeyParts, encoded_keys
from aionn.fleet import BuilderKey
from aionn.fleet.artifact_store import ArtifactStore, Pushed, place_of, trusted_files
from aionn.fleet.places import StatementPlace
from aionn.hal.trust import Keyring

DEVICE, VERSION = "reference", "1;x86_64"
BUILDER = BuilderKey("tests", bytes(range(32)))
KEYRING = Keyring((BUILDER.public,))
OTHER_BUILDER = BuilderKey("others", bytes(range(1, 33)))


def stored(content: bytes) -> StoredFile:
    return StoredFile(len(content), blake3(content).digest())


@dataclass(frozen=True)
class Artifact:
    """One artifact: the signed statement, its place, and its files."""

    signed: bytes
    place: StatementPlace
    contents: tuple[bytes, ...]

    @property
    def files(self) -> list[tuple[StoredFile, bytes]]:
        return [(stored(content), content) for content in self.contents]

    async def push(self, store: ArtifactStore) -> Pushed:
        return await store.push(self.place, self.signed, self.files, trusted_files(KEYRING))


def artifact(name: str, *contents: bytes, version: str = VERSION, key: BuilderKey = BUILDER, length: int | None = None) -> Artifact:
    """An artifact for the model of that name. Two with one name have one key, whatever their contents.

    `length`: what the statement says of each file, if it is not the truth.
    """
    model = blake3(name.encode()).digest()
    keys = encoded_keys(KeyParts(app_token=model, device=DEVICE, device_version=version))
    manifest = Manifest(
        key=keys.entry,
        family=keys.family,
        device=DEVICE,
        device_version=version,
        model_digest=model,
        model=tuple(stored(content) if length is None else StoredFile(length, stored(content).digest) for content in contents),
        data=(),
        directory="0" * 16,
        generation=1,
        compile_ns=1_000_000,
        created_ns=1,
        parts=keys.encoded,
    )
    signed = key.sign(manifest)
    statement = claimed_statement(signed)
    assert isinstance(statement, Statement), statement
    return Artifact(signed, place_of(statement), contents)


def some_bytes(seed: int, count: int) -> bytes:
    return random.Random(seed).randbytes(count)
