"""Files: manifests, key encodings, artifacts beside their digests, databases, ONNX."""

from __future__ import annotations

import atexit
import os
import shutil
import sqlite3
import tempfile
from collections.abc import Callable
from contextlib import closing, suppress
from functools import cache
from pathlib import Path

import numpy as np
import onnx
from blake3 import blake3

from aionn.caching.blob_cache import BlobCache
from aionn.caching.integrity import IntegrityStore
from aionn.caching.manifest import Manifest, StoredFile, Wanted, decode_manifest, encode_manifest, reason_to_miss
from aionn.caching.outcomes import Refusal
from aionn.caching.state import device_database
from aionn.caching.store.index import Index
from aionn.caching.token import KeyParts, decode_parts, encode_parts, encoded_keys
from aionn.errors import CallerError, CompilationError, MemoryAllocationError
from aionn.graph.reading import read_onnx
from aionn.hal.engine import Artifact
from aionn.hal.interfaces import CacheHandles
from aionn.hal.types import CacheFiles, ExecutionPreference, IMemory, Priority
from aionn.memory.region import Region
from aionn.testing.models import identity_model
from tests.fuzz.choices import Choices
from tests.real_models import carried
from tests.scaled_model import scaled_model

_TOKEN = bytes(range(32))

# ---- manifests and keys -----------------------------------------------------------------------------------------------


def _manifest(**changes: object) -> Manifest:
    file = StoredFile(100, bytes(32))
    fields: dict[str, object] = {
        "key": _TOKEN, "family": bytes(32), "device": "fake", "device_version": "1", "model_digest": bytes(32), "model": (file,),
        "data": (file, file), "directory": "0123456789abcdef", "generation": 3, "compile_ns": 10**9, "created_ns": 10**18, **changes,
    }  # fmt: skip
    return Manifest(**fields)  # type: ignore[arg-type]


def manifest_seeds() -> list[bytes]:
    """The text alone: a manifest with a wrong digest is refused before anything is read."""
    return [encode_manifest(manifest)[65:] for manifest in (_manifest(), _manifest(model=(), data=(), directory="", declined=True))]


def manifests(data: bytes) -> None:
    """A manifest as it lies there, and one whose digest fits whatever it says."""
    assert isinstance(decode_manifest(data), Refusal | Manifest)
    manifest = decode_manifest(blake3(data).hexdigest().encode() + b"\n" + data)
    if isinstance(manifest, Refusal):
        return
    assert decode_manifest(encode_manifest(manifest)) == manifest
    assert manifest.declined == (manifest.directory == "")
    wanted = Wanted(_TOKEN, bytes(32), "fake", "1", bytes(32), CacheFiles(1, 2))
    for lengths in (None, (100, 100, 100), (None, 100, 100), (manifest.generation,) * 3):
        said = reason_to_miss(manifest, wanted, lengths)
        if said is None and not manifest.declined and lengths is not None:
            assert tuple(file.length for file in manifest.files) == lengths


def key_seeds() -> list[bytes]:
    parts = KeyParts(_TOKEN, "npu", "1.0")
    more = KeyParts(
        _TOKEN, "npu\udc80", "", ExecutionPreference.LOW_POWER, Priority.HIGH, ((0, 1), (2, 2**32 - 1)), (("a", b"1"), ("b", b""))
    )
    return [encode_parts(parts), encode_parts(more)]


def keys(data: bytes) -> None:
    """These bytes are the one encoding of some parts, or refused."""
    try:
        parts = decode_parts(data)
    except CallerError:
        return
    assert encode_parts(parts) == data
    assert encoded_keys(parts).entry == blake3(data).digest()
    assert len(encoded_keys(parts).family) == 32


# ---- artifacts ----------------------------------------------------------------------------------------------------------

_STORED = (b"model" * 20, b"weights" * 30)


@cache
def _scratch() -> Path:
    """A directory of this process, gone with it."""
    path = Path(tempfile.mkdtemp(prefix="fuzz-"))
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    return path


def _files(*contents: bytes) -> tuple[int, ...]:
    fds = []
    for content in contents:
        fd = os.memfd_create("file", os.MFD_CLOEXEC)
        os.write(fd, content)
        fds.append(fd)
    return tuple(fds)


def _save(store: IntegrityStore) -> None:
    fds = _files(b"", b"")
    saved = store.save(CacheHandles(fds[:1], fds[1:], _TOKEN), Artifact(_STORED[:1], _STORED[1:]))
    assert saved is None, saved
    for fd in fds:
        os.close(fd)


@cache
def _store() -> IntegrityStore:
    store = IntegrityStore("fuzzed", "1", CacheFiles(1, 1), state_directory=_scratch() / "artifacts")
    _save(store)
    return store


def artifact_seeds() -> list[bytes]:
    return [b"\0\0", b"\1\0" + _STORED[0], b"\2\0" + _STORED[1], b"\3\0\0", b"\4" + b"".join(_STORED), bytes(range(64))]


def artifacts(data: bytes) -> None:
    """Exactly the stored bytes load; any others, under any token, are refused."""
    choices = Choices(data)
    contents, token = list(_STORED), _TOKEN
    act = choices.byte() % 8
    if act == 1:
        contents = [choices.rest(), _STORED[1]]
    elif act == 2:
        contents = [_STORED[0], choices.rest()]
    elif act == 3:
        contents.reverse()
    elif act == 4:
        rest = choices.rest()
        contents = [rest[: len(_STORED[0])], rest[len(_STORED[0]) :]]
    elif act == 5:
        token = choices.rest()
    elif act >= 6:
        changed = bytearray(choices.of(contents))
        for _ in range(1 + choices.below(3)):
            changed[choices.below(len(changed))] ^= choices.byte()
        contents[choices.below(2)] = bytes(changed)
    fds = _files(*contents)
    loaded = _store().load(CacheHandles(fds[:1], fds[1:], token))
    for fd in fds:
        os.close(fd)
    if tuple(contents) == _STORED and token == _TOKEN:
        assert isinstance(loaded, Artifact), loaded
        assert (bytes(loaded.model[0]), bytes(loaded.data[0])) == _STORED
    else:
        assert isinstance(loaded, Refusal), contents


# ---- databases ----------------------------------------------------------------------------------------------------------


def _database(make: str) -> bytes:
    """A small good database of that kind, as one file."""
    path = _scratch() / f"good-{make}"
    if make == "integrity":
        store = IntegrityStore("fuzzed", "1", CacheFiles(1, 1), state_directory=path)
        _save(store)
        store.close()
        file = next(path.glob("*.sqlite"))
    elif make == "blobs":
        with BlobCache(path / "blobs.sqlite", state_directory=path) as blobs:
            for number in range(3):
                assert blobs.set(b"key%d" % number, b"value" * number + b"!")
        file = path / "blobs.sqlite"
    else:
        path.mkdir()
        file = path / "index.sqlite"
        index = Index(str(file))
        index.put(_manifest(), published=True)
        index.note_staging(b"key")
        index.close()
    with closing(sqlite3.connect(file)) as database:
        database.execute("PRAGMA journal_mode=DELETE")
    content = file.read_bytes()
    file.unlink()
    return content


_cached_database = cache(_database)
_VALUES = (None, -1, 0, 1, 2**40, 2**63 - 1, -(2**63), 1.5, float("inf"), "", "x", "7", b"", b"\xff\xfe", b"x" * 32)


def database_seeds() -> list[bytes]:
    return [b"\0" + bytes(16), b"\1" + bytes(range(64)), b"\2" + bytes(range(100, 200)), b"\3\4\5\6\7" * 8]


def _twisted(kind: str, path: Path, choices: Choices) -> None:
    """The database of that kind at `path`, with bytes or values that another program wrote."""
    content = bytearray(_cached_database(kind))
    by_value = choices.byte() % 2 == 1
    if not by_value:
        act = choices.byte()
        if act > 240:
            content = bytearray(choices.piece(64))
        elif act > 224:
            del content[choices.below(len(content)) :]
        else:
            for _ in range(1 + choices.below(6)):
                at = choices.below(len(content))
                content[at : at + 1] = choices.piece(1 + choices.below(4)) or b"\xff"
    path.write_bytes(content)
    for suffix in ("-wal", "-shm"):
        Path(f"{path}{suffix}").unlink(missing_ok=True)
    if by_value:
        with closing(sqlite3.connect(path, isolation_level=None)) as database:
            listed = database.execute("SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite%' ORDER BY name")
            tables = [name for (name,) in listed]
            for _ in range(1 + choices.below(4)):
                table = choices.of(tables)
                columns = [row[1] for row in database.execute(f"PRAGMA table_info({table})")]
                value = choices.of(_VALUES)
                with suppress(sqlite3.Error):  # the schema refuses some of them
                    if choices.byte() < 16:
                        database.execute(f"DELETE FROM {table}")
                    elif choices.byte() < 8:
                        database.execute(f"DROP TABLE {table}")
                    else:
                        count = database.execute(f"SELECT COUNT(*) FROM {table}").fetchone()[0] or 1
                        first = columns[0]
                        row = database.execute(f"SELECT {first} FROM {table} LIMIT 1 OFFSET {choices.below(count)}").fetchone()
                        database.execute(f"UPDATE {table} SET {choices.of(columns)} = ? WHERE {first} IS ?", (value, row and row[0]))


def integrity_databases(data: bytes) -> None:
    """Whatever the driver's own database has become: the stored bytes or a refusal, and saving works or is refused."""
    choices = Choices(data)
    directory = _scratch() / "integrity"
    directory.mkdir(mode=0o700, exist_ok=True)
    path = device_database(directory, "integrity", "fuzzed", "1")
    _twisted("integrity", path, choices)
    store = IntegrityStore("fuzzed", "1", CacheFiles(1, 1), state_directory=directory)
    try:
        fds = _files(*_STORED)
        for act in (0, 1, 0):
            handles = CacheHandles(fds[:1], fds[1:], _TOKEN)
            if act:
                assert isinstance(store.save(handles, Artifact(_STORED[:1], _STORED[1:])), Refusal | None)
            else:
                loaded = store.load(handles)
                assert isinstance(loaded, Refusal) or (bytes(loaded.model[0]), bytes(loaded.data[0])) == _STORED
        for fd in fds:
            os.close(fd)
    finally:
        store.close()


def blob_databases(data: bytes) -> None:
    """Whatever the blob cache's file has become: the value that was set or none, and nothing raises."""
    choices = Choices(data)
    directory = _scratch() / "blobs"
    directory.mkdir(mode=0o700, exist_ok=True)
    _cached_database("blobs")
    shutil.copyfile(_scratch() / "good-blobs" / "blob-cache.key", directory / "blob-cache.key")
    _twisted("blobs", directory / "blobs.sqlite", choices)
    with BlobCache(directory / "blobs.sqlite", state_directory=directory) as blobs:
        for number in range(3):
            assert blobs.get(b"key%d" % number) in (None, b"value" * number + b"!")
        if blobs.set(b"new", b"value"):
            assert blobs.get(b"new") == b"value"
        assert isinstance(blobs.total_bytes, int)
        assert isinstance(len(blobs), int)
        blobs.delete(b"key1")
        blobs.clear()


def index_databases(data: bytes) -> None:
    """Whatever the index has become: answers of the declared types, or SQLite's or the file system's error."""
    choices = Choices(data)
    path = _scratch() / "index.sqlite"
    _twisted("index", path, choices)
    with suppress(sqlite3.Error, OSError):
        index = Index(str(path))
        try:
            acts: list[Callable[[], bool]] = [
                lambda: isinstance(index.complete, bool),
                lambda: isinstance(index.total_bytes, int),
                lambda: index.next_victim() is None or isinstance(index.next_victim(), tuple),
                lambda: all(isinstance(key, bytes) for key in index.superseded(0)),
                lambda: all(isinstance(key, bytes) for key in index.staging()),
                lambda: index.other_version(bytes(32), "2") is None or isinstance(index.other_version(bytes(32), "2"), str),
                lambda: all(isinstance(used, float) for used in index.used_s().values()),
            ]
            for act in acts:
                with suppress(sqlite3.Error):
                    assert act()
            with suppress(sqlite3.Error):
                index.remove(_TOKEN)
            with suppress(sqlite3.Error):
                index.put(_manifest(), published=True)
        finally:
            index.close()


# ---- ONNX -----------------------------------------------------------------------------------------------------------------


def _skeleton(name: str) -> bytes:
    """A real model whose weights are short: the graph is what is to be mutated, not 7 MB of floats."""
    model = onnx.load(carried(name))
    graphs = [model.graph]
    while graphs:
        graph = graphs.pop()
        tensors = list(graph.initializer)
        for node in graph.node:
            for attribute in node.attribute:
                tensors += [attribute.t] if attribute.HasField("t") else []
                graphs += ([attribute.g] if attribute.HasField("g") else []) + list(attribute.graphs)
        for tensor in tensors:
            if len(tensor.raw_data) > 160 and tensor.data_type == onnx.TensorProto.FLOAT:
                tensor.raw_data = tensor.raw_data[:160]
                del tensor.dims[:]
                tensor.dims.append(40)
    content: bytes = model.SerializeToString()
    return content


@cache
def onnx_seeds() -> list[bytes]:
    small = [identity_model(), identity_model({"a": (1, "n"), "b": ()}), scaled_model(np.ones((8, 8), np.float32))]
    return [*small, *(_skeleton(name) for name in ("silero", "silero_branching", "magika"))]


def onnx_files(data: bytes) -> None:
    """A model, or CallerError, CompilationError, MemoryAllocationError. Constants fill the pool that was asked for."""
    pools: list[Region] = []

    def allocate(size_bytes: int) -> IMemory:
        if size_bytes > 1 << 26:
            raise MemoryAllocationError("the fuzzer gives no more", needed_bytes=size_bytes, available_bytes=1 << 26)
        pools.append(Region.allocate(size_bytes))
        return pools[-1]

    try:
        read = read_onnx(data, allocate)
        for constant in read.constants:
            assert constant.location.offset + constant.location.length <= pools[0].size_bytes
        assert len(read.token) == 32
        assert read.outputs
    except (CallerError, CompilationError, MemoryAllocationError):
        pass
    finally:
        for pool in pools:
            pool.close()
