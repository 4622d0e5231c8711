"""F7: a store that is unreachable, hanging or full. Models are compiled locally, nothing hangs, and there is one warning."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import anyio
import pytest

import aionn
from aionn.caching import CacheOutcomeKind, MissReason
from aionn.fleet import BuilderKey, StoreBackend, StoreError, encode_public_key, use_backend
from aionn.fleet.artifact_store import ArtifactStore
from aionn.fleet.pulling import push_cache
from aionn.fleet.requests import open_address
from aionn.testing import identity_model
from tests.fleet.entries import artifact
from tests.fleet.fake_s3 import FakeS3

pytestmark = [pytest.mark.anyio, pytest.mark.parametrize("anyio_backend", ["asyncio"])]  # drivers start in each test
PATIENCE_S = 0.4
ANSWERED_WITHIN_S = 3.0  # the patience with a store that answers some requests, also if the machine is busy


@pytest.fixture
def builder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> BuilderKey:
    """A builder whom this user trusts."""
    key = BuilderKey.generate("ci")
    folder = tmp_path / "keys"
    folder.mkdir(mode=0o700)
    path = folder / "ci.pub"
    path.write_bytes(encode_public_key(key.public))
    path.chmod(0o600)
    monkeypatch.setenv("AIONN_TRUSTED_BUILDERS", os.fspath(folder))
    return key


async def outcome(tmp_path: Path, name: str, backend: StoreBackend, extent: int = 4) -> aionn.CacheOutcome:
    """The outcome of one start on the machine of that name."""
    path = tmp_path / f"{extent}.onnx"
    path.write_bytes(identity_model({"input": (1, extent)}))
    async with aionn.Runtime(state_dir=tmp_path / f"{name} state", start=()) as runtime:
        use_backend(runtime, backend)
        model = await runtime.load(path)
        compilation = await runtime.compile(model, devices=["onnxruntime"], cache_dir=tmp_path / f"{name} cache")
        return compilation.outcomes[0]


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [
        record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING and "artifact store" in record.getMessage()
    ]


@pytest.mark.parametrize("end", ["unreachable", "hangs", "answers nothing but errors"])
async def test_a_dead_store_is_a_miss_and_one_warning(
    end: str, s3: FakeS3, builder: BuilderKey, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if end == "unreachable":
        monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    elif end == "hangs":
        s3.hangs.set()
    else:
        s3.faults = {"error": 1.0}
    backend = StoreBackend("s3://artifacts", patience_s=PATIENCE_S)
    with anyio.fail_after(60.0):
        first = await outcome(tmp_path, "node", backend, 4)
        second = await outcome(tmp_path, "node", backend, 5)
    assert [one.kind for one in (first, second)] == [CacheOutcomeKind.MISS] * 2
    assert [one.save_failure for one in (first, second)] == [None, None]
    # Left alone after its failure: at most the first model was asked for, whose last request may come late.
    assert len({path.split("/")[2] for _, path in [*s3.requests]}) <= (end != "unreachable")
    assert len(warnings(caplog)) == 1
    assert "s3://artifacts" in warnings(caplog)[0]


async def test_a_store_that_hangs_while_a_file_is_read_is_a_miss(
    s3: FakeS3, builder: BuilderKey, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = ArtifactStore(open_address("s3://artifacts", patience_s=20.0))
    assert (await outcome(tmp_path, "builder", StoreBackend("s3://artifacts", patience_s=20.0))).reason is MissReason.ABSENT
    (pushed,) = await push_cache(tmp_path / "builder cache", store, builder, state_dir=tmp_path / "builder state")
    assert pushed.refusal is None
    s3.hangs_at = "blake3/"
    with anyio.fail_after(60.0):
        backend = StoreBackend("s3://artifacts", patience_s=ANSWERED_WITHIN_S)
        assert (await outcome(tmp_path, "node", backend)).kind is CacheOutcomeKind.MISS
    assert [path for _, path in s3.requests if path.startswith("artifacts/blake3/")]
    assert len(warnings(caplog)) == 1
    s3.hangs_at = None
    assert (await outcome(tmp_path, "other node", StoreBackend("s3://artifacts"))).kind is CacheOutcomeKind.HIT


async def test_a_store_without_the_artifact_or_with_a_part_of_it_is_a_miss_without_a_warning(
    builder: BuilderKey, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "store"
    store = ArtifactStore(open_address(folder, patience_s=20.0, make=True))
    backend = StoreBackend(folder)
    assert (await outcome(tmp_path, "builder", backend)).reason is MissReason.ABSENT
    await push_cache(tmp_path / "builder cache", store, builder, state_dir=tmp_path / "builder state")
    (file, *_) = (folder / "blake3").iterdir()
    contents = file.read_bytes()
    file.unlink()
    assert (await outcome(tmp_path, "node", backend)).kind is CacheOutcomeKind.MISS
    assert warnings(caplog) == []
    file.write_bytes(contents)
    found = await outcome(tmp_path, "other node", backend)
    assert (found.kind, found.detail) == (CacheOutcomeKind.HIT, "compiled by builder 'ci'")


async def test_a_full_store_takes_nothing_and_says_so(s3: FakeS3, builder: BuilderKey, tmp_path: Path) -> None:
    s3.full = True
    await outcome(tmp_path, "builder", StoreBackend("s3://artifacts", patience_s=PATIENCE_S))
    store = ArtifactStore(open_address("s3://artifacts", patience_s=ANSWERED_WITHIN_S))
    with anyio.fail_after(60.0), pytest.raises(StoreError, match="507"):
        await push_cache(tmp_path / "builder cache", store, builder, state_dir=tmp_path / "builder state")
    assert s3.objects == {}


async def test_a_backend_asks_for_trusted_builders_only(s3: FakeS3, builder: BuilderKey, tmp_path: Path) -> None:
    await artifact("one", b"").push(ArtifactStore(open_address("s3://artifacts", patience_s=20.0)))
    s3.requests.clear()
    await outcome(tmp_path, "node", StoreBackend("s3://artifacts"))
    assert [(method, path.split("/")[1], path.split("/")[-1]) for method, path in s3.requests] == [
        ("GET", "statement", builder.public.id.hex())
    ]
