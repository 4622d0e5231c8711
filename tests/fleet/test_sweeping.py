"""A sweep drops what no node needs, and nothing that is young, named or wanted."""

from __future__ import annotations

import os
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import anyio
import pytest

from aionn.fleet.artifact_store import ArtifactStore, Pushed, claimed_files, trusted_files
from aionn.fleet.places import STATEMENTS, seen_path
from aionn.fleet.requests import StoreError
from aionn.fleet.sweeping import SweepReport, check_store, sweep
from tests.fleet.entries import KEYRING, OTHER_BUILDER, artifact, some_bytes, stored
from tests.fleet.fake_s3 import FakeS3

pytestmark = pytest.mark.anyio
DAY_S = 86400.0


async def age(store: ArtifactStore, days: float, prefix: str = "") -> None:
    """Make all objects below a prefix that much older."""
    folder = store.requests.opened.folder
    assert folder is not None
    for path in folder.rglob("*"):
        if path.is_file() and str(path.relative_to(folder)).startswith(prefix):
            os.utime(path, (time.time(), path.stat().st_mtime - days * DAY_S))


@pytest.fixture
def folder_store(tmp_path: Path) -> ArtifactStore:
    from aionn.fleet.requests import open_address

    return ArtifactStore(open_address(tmp_path / "store", patience_s=20.0, make=True))


async def paths(store: ArtifactStore) -> set[str]:
    return {found.path for part in (STATEMENTS, "blake3", "seen") for found in await store.requests.listing(part)}


async def test_an_old_statement_and_its_files_go_and_shared_files_stay(folder_store: ArtifactStore) -> None:
    old, young = artifact("old", b"old", b"shared"), artifact("young", b"young", b"shared")
    await old.push(folder_store)
    await age(folder_store, 31)
    await young.push(folder_store)
    would = await sweep(folder_store, claimed_files, dry_run=True)
    assert len(await paths(folder_store)) == 5
    did = await sweep(folder_store, claimed_files)
    assert did == would == SweepReport(statements=1, files=1, freed_bytes=did.freed_bytes, kept=1, kept_bytes=11)
    assert await paths(folder_store) == {young.place.path, *(f"blake3/{stored(text).digest.hex()}" for text in (b"young", b"shared"))}


async def test_what_is_younger_than_the_grace_stays(folder_store: ArtifactStore) -> None:
    await folder_store.requests.put_new(f"blake3/{stored(b'alone').digest.hex()}", b"alone")
    incomplete = artifact("incomplete", b"missing")
    await folder_store.requests.put_new(incomplete.place.path, incomplete.signed)
    assert await sweep(folder_store, claimed_files, keep_s=0.0, max_bytes=0) == SweepReport(kept=1)
    await age(folder_store, 2)
    report = await sweep(folder_store, claimed_files)
    assert (report.statements, report.files) == (1, 1)
    assert await paths(folder_store) == set()


async def test_a_statement_that_lost_a_file_goes_though_it_is_kept(folder_store: ArtifactStore) -> None:
    for number in range(3):
        await artifact(str(number), some_bytes(number, 10), b"shared").push(folder_store)
    await folder_store.requests.remove(f"blake3/{stored(some_bytes(1, 10)).digest.hex()}")
    await age(folder_store, 2)
    report = await sweep(folder_store, claimed_files)
    assert (report.statements, report.files, report.kept) == (1, 0, 2)
    assert not (await check_store(folder_store, trusted_files(KEYRING))).bad


async def test_a_fingerprint_that_a_node_reported_is_kept(folder_store: ArtifactStore) -> None:
    wanted, unwanted = artifact("one", b"1", version="1"), artifact("one", b"2", version="2")
    await wanted.push(folder_store)
    await unwanted.push(folder_store)
    await age(folder_store, 31)
    await folder_store.mark_seen([wanted.place.fingerprint])
    await sweep(folder_store, claimed_files)
    assert wanted.place.path in await paths(folder_store)
    assert unwanted.place.path not in await paths(folder_store)
    await age(folder_store, 31, "seen")
    assert (await sweep(folder_store, claimed_files)).statements == 1
    assert await paths(folder_store) == set()


async def test_a_statement_that_is_pushed_again_is_young_again(folder_store: ArtifactStore) -> None:
    one = artifact("one", b"1")
    await one.push(folder_store)
    await age(folder_store, 31)
    assert await one.push(folder_store) is Pushed.ADDED
    report = await sweep(folder_store, claimed_files)
    assert (report.statements, report.files, report.kept) == (0, 0, 1)


async def test_the_oldest_go_first_beyond_the_budget(folder_store: ArtifactStore) -> None:
    for number in range(4):
        await artifact(str(number), some_bytes(number, 1000), some_bytes(99, 500)).push(folder_store)
        await age(folder_store, 2)
    report = await sweep(folder_store, claimed_files, max_bytes=2500)
    assert (report.statements, report.kept, report.kept_bytes, report.over_bytes) == (2, 2, 2500, 0)
    left = {place.key for place, _ in await folder_store.statements()}
    assert left == {artifact(str(number), b"").place.key for number in (2, 3)}
    await artifact("young", b"1234567").push(folder_store)
    report = await sweep(folder_store, claimed_files, max_bytes=0)
    assert (report.statements, report.kept, report.kept_bytes, report.over_bytes) == (2, 1, 7, 7)


async def test_unfinished_files_and_empty_folders_of_killed_writers_go(folder_store: ArtifactStore) -> None:
    one = artifact("one", b"1")
    await one.push(folder_store)
    folder = folder_store.requests.opened.folder
    assert folder is not None
    unfinished = folder / "blake3" / f"{stored(b'2').digest.hex()}#1"
    unfinished.write_bytes(b"unfinished")
    assert (await sweep(folder_store, claimed_files)).staging == 0
    await age(folder_store, 2)
    assert (await sweep(folder_store, claimed_files, dry_run=True)).staging == 1
    assert unfinished.exists()
    report = await sweep(folder_store, claimed_files)
    assert (report.staging, report.freed_bytes, report.kept) == (1, 10, 1)
    await age(folder_store, 31)
    await sweep(folder_store, claimed_files)
    assert sorted(path.name for path in folder.rglob("*")) == ["blake3", "statement"]


async def test_a_writer_loses_nothing_to_a_sweep_that_removes_empty_folders(folder_store: ArtifactStore) -> None:
    folder = folder_store.requests.opened.folder
    assert folder is not None
    over = threading.Event()

    def keep_removing() -> None:
        while not over.is_set():
            for place in ("a/b/c/d/e", "a/b/c/d", "a/b/c", "a/b", "a"):
                with suppress(OSError):
                    os.rmdir(folder / place)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(anyio.to_thread.run_sync, keep_removing)
        try:
            for _ in range(100):
                assert await folder_store.requests.put_new("a/b/c/d/e/object", b"1")
                (folder / "a/b/c/d/e/object").unlink()
        finally:
            over.set()


# --- what a hostile writer has put there ------------------------------------------------------------------------------


def elsewhere(folder: Path) -> list[Path]:
    """Files of another program, with names and ages of files that a sweep removes."""
    folder.mkdir()
    found = [folder / ("0" * 64), folder / ("1" * 64), folder / "notes#1"]
    for path in found:
        path.write_text("mine")
        os.utime(path, (0, 0))
    (folder / "empty").mkdir()
    return [*found, folder / "empty"]


@pytest.mark.parametrize("part", ["blake3", f"statement/{'a' * 64}/{'b' * 32}", f"statement/{'a' * 64}", "statement", "seen"])
async def test_no_sweep_and_no_check_follows_a_symlink_out_of_the_store(tmp_path: Path, folder_store: ArtifactStore, part: str) -> None:
    mine = elsewhere(tmp_path / "mine")
    folder = folder_store.requests.opened.folder
    assert folder is not None
    (folder / part).parent.mkdir(parents=True, exist_ok=True)
    (folder / part).symlink_to(tmp_path / "mine")
    for attempt in (sweep(folder_store, claimed_files), check_store(folder_store, claimed_files, remove=True)):
        try:
            await attempt
        except StoreError as error:
            assert "Not a directory" in str(error)
    assert [path for path in mine if not path.exists()] == []


async def test_a_sweep_leaves_what_is_no_object_of_a_store(folder_store: ArtifactStore) -> None:
    for path in ("seen/holiday.jpg", "seen/2019/holiday.jpg", "blake3/holiday.jpg", "statement/holiday.jpg", "holiday.jpg"):
        await folder_store.requests.put_new(path, b"mine")
    await folder_store.requests.put_new(seen_path("0" * 32), b"")
    await age(folder_store, 100)
    before = await paths(folder_store)
    await sweep(folder_store, claimed_files)
    assert before - await paths(folder_store) == {seen_path("0" * 32)}


async def test_what_a_statement_claims_does_not_use_up_the_budget(folder_store: ArtifactStore) -> None:
    """Any writer can put a statement that names files of any length. Its signature does not matter to a sweep."""
    one = artifact("one", some_bytes(1, 1000))
    await one.push(folder_store)
    await age(folder_store, 2)
    claims = artifact("another", b"", length=2**62)
    await folder_store.requests.put_new(claims.place.path, claims.signed)
    report = await sweep(folder_store, claimed_files, max_bytes=2000)
    assert (report.statements, report.kept, report.kept_bytes, report.over_bytes) == (0, 2, 1000, 0)


async def test_a_statement_that_cannot_be_read_goes_after_the_grace(folder_store: ArtifactStore) -> None:
    one = artifact("one", b"1")
    await folder_store.requests.put_new(one.place.path, b"junk")
    assert (await sweep(folder_store, claimed_files)).statements == 0
    await age(folder_store, 2)
    assert (await sweep(folder_store, claimed_files)).statements == 1


@pytest.mark.parametrize("writer", ["pushes another artifact with that file", "writes a statement for that file", "pushes the same again"])
async def test_what_is_written_while_a_sweep_decides_stays(
    writer: str, folder_store: ArtifactStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A writer comes between the marking and the removal."""
    old, new = artifact("old", b"old"), artifact("new", b"old")
    await old.push(folder_store)
    await age(folder_store, 31)
    listing = folder_store.requests.listing

    async def then_write(prefix: str) -> object:
        found = await listing(prefix)
        if prefix == "seen":
            monkeypatch.setattr(folder_store.requests, "listing", listing)
            if writer == "writes a statement for that file":
                await folder_store.requests.put_new(new.place.path, new.signed)
            else:
                await (new if "another" in writer else old).push(folder_store)
        return found

    monkeypatch.setattr(folder_store.requests, "listing", then_write)
    report = await sweep(folder_store, claimed_files)
    assert (report.statements, report.files) == (0 if "same" in writer else 1, 0)
    left = await check_store(folder_store, trusted_files(KEYRING))
    assert (left.statements, left.bad) == (1, ())


async def test_a_statement_that_is_written_again_after_its_removal_keeps_its_files(
    folder_store: ArtifactStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A writer may write a statement for files that it has just seen, right after the sweep has removed that statement."""
    old = artifact("old", b"old")
    await old.push(folder_store)
    await age(folder_store, 31)
    remove = folder_store.requests.remove

    async def then_write(path: str, *arguments: Any) -> bool:
        removed = await remove(path, *arguments)
        if path == old.place.path:
            await folder_store.requests.replace(path, old.signed)
        return removed

    monkeypatch.setattr(folder_store.requests, "remove", then_write)
    report = await sweep(folder_store, claimed_files)
    assert (report.statements, report.files, report.kept) == (1, 0, 1)
    assert (await check_store(folder_store, trusted_files(KEYRING))).bad == ()


async def test_a_sweep_of_a_bucket_follows_the_dates_of_the_store(s3: FakeS3) -> None:
    from aionn.fleet.requests import open_address

    store = ArtifactStore(open_address("s3://artifacts/prefix", patience_s=20.0))
    one, two = artifact("one", b"1"), artifact("two", b"2")
    await one.push(store)
    for found in s3.objects.values():
        found.written_s -= 31 * DAY_S
    await two.push(store)
    report = await sweep(store, claimed_files)
    assert (report.statements, report.files, report.kept) == (1, 1, 1)
    assert len(s3.objects) == 2
    # A reader never finds a statement whose files have been taken on purpose.
    assert [path.split("/")[2] for method, path in s3.requests if method == "DELETE"] == ["statement", "blake3"]


async def test_a_sweep_of_a_list_that_breaks_off_removes_nothing(s3: FakeS3) -> None:
    from aionn.fleet.requests import StoreError, open_address

    await artifact("one", b"1").push(ArtifactStore(open_address("s3://artifacts/prefix", patience_s=20.0)))
    for found in s3.objects.values():
        found.written_s -= 2 * DAY_S
    s3.faults = {"torn": 1.0}
    with pytest.raises(StoreError):
        await sweep(ArtifactStore(open_address("s3://artifacts/prefix", patience_s=0.5)), claimed_files)
    assert len(s3.objects) == 2


async def test_a_check_names_each_kind_of_damage(store: ArtifactStore) -> None:
    whole, torn, partial = (artifact(name, name.encode(), b"shared") for name in ("whole", "torn", "partial"))
    alone = artifact("alone", b"alone")  # a statement with no whole file
    for one in (whole, torn, partial, alone):
        await one.push(store)
    foreign = artifact("foreign", b"shared", key=OTHER_BUILDER)
    await store.requests.put_new(foreign.place.path, foreign.signed)
    misplaced = artifact("misplaced", b"shared")
    await store.requests.put_new(misplaced.place._replace(fingerprint="0" * 32).path, misplaced.signed)
    await store.requests.replace(f"blake3/{stored(b'torn').digest.hex()}", b"tron")
    for gone in (b"partial", b"alone"):
        await store.requests.remove(f"blake3/{stored(gone).digest.hex()}")
    await store.requests.put_new(f"blake3/{stored(b'unnamed').digest.hex()}", b"unnamed")
    found = await check_store(store, trusted_files(KEYRING))
    reasons = {one.path: one.reason.value for one in found.bad}
    assert reasons == {
        f"blake3/{stored(b'torn').digest.hex()}": "wrong_bytes",
        torn.place.path: "wrong_bytes",
        partial.place.path: "partial",
        alone.place.path: "partial",
        foreign.place.path: "untrusted_builder",
        misplaced.place._replace(fingerprint="0" * 32).path: "wrong_token",
    }
    assert (found.statements, found.files, found.unnamed, found.removed) == (6, 4, 1, 0)
    assert (await check_store(store, trusted_files(KEYRING), remove=True)).removed == 6
    left = await check_store(store, trusted_files(KEYRING))
    assert (left.statements, left.bad) == (1, ())
    assert await torn.push(store) is Pushed.ADDED


async def test_a_note_of_a_node_is_written_once_a_day_and_never_needed(s3: FakeS3) -> None:
    from aionn.fleet.requests import open_address

    store = ArtifactStore(open_address("s3://artifacts", patience_s=20.0))
    fingerprint = artifact("one", b"").place.fingerprint
    await store.mark_seen([fingerprint])
    await store.mark_seen([fingerprint])
    assert [method for method, _ in s3.requests] == ["HEAD", "PUT", "HEAD"]
    assert f"artifacts/{seen_path(fingerprint)}" in s3.objects
    s3.objects.clear()
    s3.full = True
    await ArtifactStore(open_address("s3://artifacts", patience_s=0.3)).mark_seen([fingerprint])
    assert s3.objects == {}


async def test_an_old_file_that_a_writer_is_about_to_name_becomes_young(folder_store: ArtifactStore) -> None:
    """Or a sweep would take it before the statement is there."""
    one = artifact("one", b"1")
    await folder_store.requests.put_new(f"blake3/{stored(b'1').digest.hex()}", b"1")
    await age(folder_store, 2)
    await one.push(folder_store)
    await folder_store.requests.remove(one.place.path)
    assert (await sweep(folder_store, claimed_files)).files == 0
