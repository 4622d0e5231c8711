"""Signed artifacts for tests: made by a real driver's store, loaded by an engine that records its loads."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from aionn.caching.manifest import StoredFile
from aionn.caching.statement import Statement, sign_statement
from aionn.caching.token import KeyParts, device_token, encoded_keys
from aionn.driver.artifacts import Artifacts, Loaded
from aionn.file_ranges import digest_of
from aionn.fleet import BuilderKey, Keyring, TrustedKey
from aionn.hal import Artifact, CacheHandles, CompileOptions, Model
from aionn.hal.trust import encode_keyring
from aionn.runtime.model import Model as AppModel
from aionn.testing.fake_engine import FakeEngine, FakeExecutable
from tests.scaled_model import scaled_model

DEVICE = "tests.fleet:Engine"


class RecordingEngine(FakeEngine):
    """The fake engine, which records what it is given to load."""

    def __init__(self) -> None:
        super().__init__()
        self.loads: list[Artifact] = []

    def load(self, artifact: Artifact, options: CompileOptions) -> FakeExecutable:
        self.loads.append(artifact)
        return super().load(artifact, options)


def small_model(factor: float = 2.0) -> Model:
    return AppModel.from_onnx(scaled_model(np.full(100, factor, dtype=np.float32)))


@contextmanager
def opened(paths: tuple[Path, ...], token: bytes, keyring: bytes = b"", flags: int = os.O_RDONLY) -> Iterator[CacheHandles]:
    fds = [os.open(path, flags, 0o600) for path in paths]
    try:
        yield CacheHandles((fds[0],), (fds[1],), token, keyring)
    finally:
        for fd in fds:
            os.close(fd)


@dataclass(frozen=True)
class Made:
    """An artifact that a builder has compiled, in two files, with its statement before it is signed."""

    statement: Statement
    paths: tuple[Path, ...]

    def signed(self, builder: BuilderKey, **changes: object) -> bytes:
        """Return the statement with some fields changed, signed as if it were true."""
        fields = {field: getattr(self.statement, field) for field in Statement.__struct_fields__}
        fields |= {"key_id": builder.public.id, "builder": builder.name} | changes
        return sign_statement(Statement(**fields), builder.private_key)


def make(folder: Path, model: Model, key: BuilderKey, version: str = "1", device: str = DEVICE) -> Made:
    """Compile a model with a driver's own means, and describe what it has stored."""
    folder.mkdir()
    parts, entry, family = encoded_keys(KeyParts(model.token, device, version))
    engine = RecordingEngine()
    artifacts = Artifacts(engine, folder / "state")
    paths = (folder / "model0", folder / "data0")
    with opened(paths, device_token(entry, model.token), flags=os.O_RDWR | os.O_CREAT) as handles:
        assert artifacts.save(engine.compile(model, CompileOptions(may_export=True)), model, handles) == "saved"
    artifacts.close()
    files = tuple(StoredFile(path.stat().st_size, digest_of(path.read_bytes())) for path in paths)
    statement = Statement(
        key=entry,
        family=family,
        device=device,
        device_version=version,
        model_digest=model.token,
        model=files[:1],
        data=files[1:],
        compile_ns=5_000_000,
        created_ns=1,
        parts=parts,
        builder=key.name,
        key_id=key.public.id,
    )
    return Made(statement, paths)


def keyring(*keys: TrustedKey) -> bytes:
    return encode_keyring(Keyring(keys))


def limited(key: BuilderKey, **limits: object) -> bytes:
    """A keyring with one key that may not do everything."""
    return keyring(msgspec.structs.replace(key.public, **limits))


@dataclass
class Driver:
    """What a driver does with an offer and with an entry, in this process, with a separate state directory.

    The end of a `with` block closes its store of digests.
    """

    state: Path

    def __post_init__(self) -> None:
        self.engine = RecordingEngine()
        self.artifacts = Artifacts(self.engine, self.state, DEVICE)

    def __enter__(self) -> Driver:
        return self

    def __exit__(self, *_: object) -> None:
        self.artifacts.close()

    def adopt(self, wanted: Statement, signed: bytes, paths: tuple[Path, ...], keys: bytes) -> Loaded:
        with opened(paths, wanted.key, keys) as handles:
            return self.artifacts.adopt(handles, CompileOptions(), wanted.model_digest, signed)

    def load(self, wanted: Statement, paths: tuple[Path, ...], keys: bytes) -> Loaded:
        with opened(paths, device_token(wanted.key, wanted.model_digest), keys) as handles:
            return self.artifacts.load(handles, CompileOptions())
