"""The artifact store on a folder, in memory and in a bucket: what is written once, what is read whole, and what a dead store costs."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from aionn.caching.manifest import StoredFile
from aionn.caching.outcomes import MissReason, Refusal
from aionn.errors import CallerError
from aionn.fleet.artifact_store import ArtifactStore, Pushed
from aionn.fleet.folders import BadContentsError
from aionn.fleet.places import StatementPlace, fingerprint, statement_place
from aionn.fleet.requests import StoreError, open_address
from tests.fleet.entries import OTHER_BUILDER, Artifact, artifact, some_bytes, stored
from tests.fleet.fake_s3 import FakeS3

pytestmark = pytest.mark.anyio


async def read(store: ArtifactStore, artifact: Artifact, folder: Path) -> list[bytes] | Refusal:
    """Read an artifact's files as a node does."""
    paths = [folder / f"read{index}" for index in range(len(artifact.contents))]
    fds = [os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC) for path in paths]
    try:
        refusal = await store.fetch([stored for stored, _ in artifact.files], fds)
    finally:
        for fd in fds:
            os.close(fd)
    return [path.read_bytes() for path in paths] if refusal is None else refusal


def test_a_statements_path_is_read_as_it_is_written() -> None:
    place = StatementPlace(bytes(range(32)), fingerprint("onnxruntime", "1;x"), bytes(32))
    assert statement_place(place.path) == place
    assert statement_place(place.path + "#1") is None
    assert fingerprint("a", "bc") != fingerprint("ab", "c")


async def test_what_was_pushed_is_read_whole(store: ArtifactStore, tmp_path: Path) -> None:
    one = artifact("one", some_bytes(1, 3_000_000), b"", b"small")
    assert await store.statement(one.place) is None
    assert await one.push(store) is Pushed.ADDED
    assert await store.statement(one.place) == one.signed
    assert await read(store, one, tmp_path) == [*one.contents]
    assert [place for place, _ in await store.statements()] == [one.place]


async def test_the_first_of_two_writers_wins(store: ArtifactStore) -> None:
    first, second = artifact("one", b"first"), artifact("one", b"second")
    assert await first.push(store) is Pushed.ADDED
    assert await first.push(store) is Pushed.PRESENT
    assert await second.push(store) is Pushed.PRESENT
    assert await store.statement(first.place) == first.signed


async def test_a_statement_that_lost_its_files_is_mended_or_replaced(store: ArtifactStore, tmp_path: Path) -> None:
    first, second = artifact("one", b"first", b"shared"), artifact("one", b"second", b"shared")
    await first.push(store)
    await store.requests.remove(f"blake3/{stored(b'first').digest.hex()}")
    refused = await read(store, first, tmp_path)
    assert isinstance(refused, Refusal)
    assert refused.reason is MissReason.PARTIAL
    assert await first.push(store) is Pushed.REPAIRED
    assert await read(store, first, tmp_path) == [*first.contents]
    await store.requests.remove(f"blake3/{stored(b'first').digest.hex()}")
    assert await second.push(store) is Pushed.ADDED
    assert await store.statement(first.place) == second.signed
    assert await read(store, second, tmp_path) == [*second.contents]


@pytest.mark.parametrize("junk", [b"", b"junk", some_bytes(2, 100_000), artifact("one", b"x", key=OTHER_BUILDER).signed])
async def test_a_statement_that_is_not_acceptable_is_replaced(store: ArtifactStore, junk: bytes) -> None:
    one = artifact("one", b"contents")
    await store.requests.replace(one.place.path, junk)
    assert await one.push(store) is Pushed.ADDED
    assert await store.statement(one.place) == one.signed


async def test_a_file_that_a_sweep_takes_before_the_statement_is_written_again(
    store: ArtifactStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = artifact("one", b"first", b"second")
    put_new = store.requests.put_new

    async def then_sweep(path: str, content: bytes | memoryview) -> bool:
        if path == one.place.path:
            await store.requests.remove(f"blake3/{stored(b'second').digest.hex()}")
        return await put_new(path, content)

    monkeypatch.setattr(store.requests, "put_new", then_sweep)
    assert await one.push(store) is Pushed.ADDED
    assert await read(store, one, tmp_path) == [*one.contents]


async def test_a_torn_file_is_written_again(store: ArtifactStore, tmp_path: Path) -> None:
    one = artifact("one", b"contents")
    await store.requests.replace(f"blake3/{stored(b'contents').digest.hex()}", b"cont")
    assert await one.push(store) is Pushed.ADDED
    assert await read(store, one, tmp_path) == [b"contents"]


@pytest.mark.parametrize("damaged", [b"contentz", b"content", b"contents and more", b""])
async def test_other_bytes_than_the_name_says_are_refused(store: ArtifactStore, tmp_path: Path, damaged: bytes) -> None:
    one = artifact("one", b"contents", b"second file")
    await one.push(store)
    await store.requests.replace(f"blake3/{stored(b'contents').digest.hex()}", damaged)
    refused = await read(store, one, tmp_path)
    assert isinstance(refused, Refusal)
    assert refused.reason is MissReason.WRONG_BYTES
    with pytest.raises(BadContentsError):
        await store.requests.copy_file(f"blake3/{stored(b'contents').digest.hex()}", stored(b"contents"), None)


async def test_a_full_disk_of_the_reader_is_a_refusal(store: ArtifactStore) -> None:
    one = artifact("one", b"contents")
    await one.push(store)
    fd = os.open("/dev/full", os.O_WRONLY)
    try:
        refused = await store.fetch([stored(b"contents")], [fd])
    finally:
        os.close(fd)
    # /dev/full takes no `pwrite` at an offset on every kernel; either way it is a refusal, and nothing is raised.
    assert refused is not None
    assert refused.reason in (MissReason.NO_SPACE, MissReason.IO_ERROR)


async def test_large_files_travel_in_parts(s3: FakeS3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aionn.fleet.requests.MULTIPART_BYTES", 1_000_000)
    monkeypatch.setattr("aionn.fleet.requests._PART_BYTES", 5 << 20)
    store = ArtifactStore(open_address("s3://artifacts", patience_s=20.0))
    one = artifact("one", some_bytes(3, 12_000_000))
    assert await one.push(store) is Pushed.ADDED
    assert [(method, key) for method, key in s3.requests if method == "POST"] == [
        ("POST", f"artifacts/blake3/{one.files[0][0].digest.hex()}")
    ] * 2
    assert await read(store, one, tmp_path) == [*one.contents]
    before = len(s3.requests)
    assert await one.push(store) is Pushed.PRESENT
    assert {method for method, _ in s3.requests[before:]} == {"GET", "HEAD"}


async def test_reading_neither_lists_nor_renames(s3: FakeS3, tmp_path: Path) -> None:
    store = ArtifactStore(open_address("s3://artifacts/prefix", patience_s=20.0))
    one = artifact("one", b"a", b"b", b"c")
    await one.push(store)
    s3.requests.clear()
    await store.statement(one.place)
    await read(store, one, tmp_path)
    names = [f"artifacts/prefix/{one.place.path}", *(f"artifacts/prefix/blake3/{stored.digest.hex()}" for stored, _ in one.files)]
    assert sorted(s3.requests) == sorted(("GET", name) for name in names)


async def test_faults_of_a_server_are_asked_again(s3: FakeS3, tmp_path: Path) -> None:
    """A third of the answers fail, come late or are torn."""
    store = ArtifactStore(open_address("s3://artifacts/prefix", patience_s=20.0))
    s3.faults = {"error": 0.2, "slow": 0.1, "torn": 0.1}
    for number in range(10):
        one = artifact(str(number), some_bytes(number, 20_000), b"b", b"c")
        assert await one.push(store) in (Pushed.ADDED, Pushed.PRESENT)
        assert await store.statement(one.place) == one.signed
        assert await read(store, one, tmp_path) == [*one.contents]


@pytest.mark.parametrize("end", ["hangs", "unreachable"])
async def test_a_dead_store_costs_its_patience_and_no_more(s3: FakeS3, tmp_path: Path, end: str) -> None:
    if end == "unreachable":
        s3_port = s3.environment()["AWS_ENDPOINT_URL"].rpartition(":")[2]
        assert int(s3_port) == s3.port
        os.environ["AWS_ENDPOINT_URL"] = "http://127.0.0.1:1"
    else:
        s3.hangs.set()
    store = ArtifactStore(open_address("s3://artifacts", patience_s=0.5))
    one = artifact("one", b"a", b"b")
    began = time.monotonic()
    with pytest.raises(StoreError) as raised:
        await store.statement(one.place)
    refused = await read(store, one, tmp_path)
    with pytest.raises(StoreError):
        await one.push(store)
    with pytest.raises(StoreError):
        await store.statements()
    took = time.monotonic() - began
    assert isinstance(refused, Refusal)
    assert refused.reason is MissReason.IO_ERROR
    assert raised.value.store == "s3://artifacts"
    assert "\n" not in str(raised.value)
    assert took < 30.0, took  # four times 0.5 s; obstore alone would wait for minutes


async def test_a_store_that_hangs_in_the_middle_of_a_file_is_left(s3: FakeS3, tmp_path: Path) -> None:
    one = artifact("one", b"a")
    await one.push(ArtifactStore(open_address("s3://artifacts", patience_s=20.0)))
    s3.hangs.set()
    refused = await read(ArtifactStore(open_address("s3://artifacts", patience_s=0.5)), one, tmp_path)
    assert isinstance(refused, Refusal)
    assert refused.reason is MissReason.IO_ERROR


async def test_a_full_bucket_is_one_error(s3: FakeS3) -> None:
    s3.full = True
    one = artifact("one", b"a", b"b", b"c")
    with pytest.raises(StoreError, match="507"):  # a busy machine needs a part of the patience for the first answer
        await one.push(ArtifactStore(open_address("s3://artifacts", patience_s=3.0)))
    assert s3.objects == {}
    s3.full = False
    assert await one.push(ArtifactStore(open_address("s3://artifacts", patience_s=20.0))) is Pushed.ADDED


async def test_a_folder_that_cannot_be_used_is_one_error(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="there is no directory"):
        open_address(tmp_path / "missing", patience_s=1.0)
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match=r"Not a directory|File exists"):
        open_address(tmp_path / "file" / "below", patience_s=1.0, make=True)
    for address in ("", "ftp://host/path", "gs://bucket", "file://host/path"):
        with pytest.raises(CallerError, match="give a directory"):
            open_address(address, patience_s=1.0)


async def test_an_empty_file_is_a_file(store: ArtifactStore) -> None:
    one = artifact("one", b"")
    await one.push(store)
    assert await store.requests.copy_file(f"blake3/{stored(b'').digest.hex()}", StoredFile(0, stored(b"").digest), None)
