from __future__ import annotations

import asyncio
import gc
import logging
import os
import shutil
import sqlite3
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest

from aionn import tasks, trace
from aionn.caching import CacheOutcomeKind, MissReason, Refusal
from aionn.caching.store import CacheStore, Declined, Hit, Miss
from aionn.caching.store import opening as store_opening
from aionn.caching.store.directory import CacheDirectory
from aionn.errors import CallerError
from aionn.hal.types import CacheFiles, ExecutionPreference, Priority
from tests.caching.entries import FILES, contents, expected, fill, generations, miss, open_descriptors, read, replacing, stored, wanted

pytestmark = pytest.mark.anyio


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "a-rather-long-name-of-a-cache-directory" / "cache"


@pytest.fixture(autouse=True)
def no_descriptor_is_left_open() -> Iterator[None]:
    def cache_files() -> set[str]:
        return {name for name in open_descriptors() if "/cache" in name}

    before = cache_files()
    yield
    assert cache_files() - before == set()


async def test_a_miss_is_published_and_then_hit(directory: Path) -> None:
    async with CacheStore(directory) as store:
        found = await store.open(wanted())
        assert isinstance(found, Miss)
        assert (found.outcome.kind, found.outcome.reason, found.outcome.device) == (CacheOutcomeKind.MISS, MissReason.ABSENT, "fake")
        async with found:
            assert found.publisher is not None
            handles = found.publisher.handles
            assert (len(handles.model), len(handles.data), handles.token) == (2, 1, wanted().key)
            assert contents(handles) == [b"", b"", b""]
            fill(handles, b"artifact")
            assert await found.publisher.publish(compile_ns=2_500_000_000) is None
        hit = await store.open(wanted())
        assert isinstance(hit, Hit)
        async with hit:
            assert (hit.outcome.kind, hit.outcome.reason) == (CacheOutcomeKind.HIT, None)
            assert hit.outcome.saved_s == 2.5
            assert hit.handles.token == wanted().key
            assert contents(hit.handles) == expected(b"artifact")
            assert [os.get_inheritable(fd) for fd in hit.handles.model] == [False, False]


async def test_a_hit_is_closed_and_its_use_noted_once(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with CacheStore(directory) as store:
        await stored(store, wanted())
        hit = await store.open(wanted())
        assert isinstance(hit, Hit)
        closed, close = 0, hit.close_here

        def counted(*, used: bool = True) -> None:
            nonlocal closed
            closed += 1
            close(used=used)

        monkeypatch.setattr(hit, "close_here", counted)
        hit.leave()
        await hit.aclose()
    assert closed == 1


async def test_an_entry_survives_its_store(directory: Path) -> None:
    async with CacheStore(directory) as store:
        await stored(store, wanted())
    async with CacheStore(directory) as store:
        assert await read(store, wanted()) == expected(b"artifact")


@pytest.mark.parametrize("data", [0, 1, 32])
@pytest.mark.parametrize("model", [0, 1, 32])
async def test_token_provided_and_cache_not_exist_then_exists(directory: Path, model: int, data: int) -> None:
    """Runtime TestCompilationCaching: exact numbers of files, one descriptor each, and the exact bytes come back."""
    files = CacheFiles(model, data)
    if not files.supported:
        return  # the runtime does not ask the store at all
    what = wanted(files=files)
    async with CacheStore(directory) as store:
        async with await miss(store, what) as publisher:
            assert (len(publisher.handles.model), len(publisher.handles.data)) == (model, data)
            fill(publisher.handles, bytes(range(256)))
            assert await publisher.publish() is None
        assert await read(store, what) == expected(bytes(range(256)), files)


async def test_an_abandoned_compilation_leaves_nothing(directory: Path) -> None:
    async with CacheStore(directory) as store:
        async with await miss(store, wanted()) as publisher:
            fill(publisher.handles, b"half")
        assert generations(directory, wanted()) == []
        async with await store.open(wanted()) as found:
            assert found.outcome.reason is MissReason.ABSENT


async def test_what_a_publisher_gave_out_ends_with_it(directory: Path) -> None:
    async with CacheStore(directory) as store:
        publisher = await miss(store, wanted())
        await publisher.aclose()
        with pytest.raises(CallerError, match="ended"):
            _ = publisher.handles
        with pytest.raises(CallerError, match="ended"):
            await publisher.publish()
        await stored(store, wanted())
        hit = await store.open_now(wanted())
        assert isinstance(hit, Hit)
        await hit.aclose()
        await hit.aclose()
        with pytest.raises(CallerError, match="closed"):
            _ = hit.handles


async def test_a_declined_model_is_remembered_until_the_driver_changes(directory: Path) -> None:
    async with CacheStore(directory) as store:
        async with await miss(store, wanted()) as publisher:
            assert await publisher.decline("has an If") is None
        found = await store.open(wanted())
        assert isinstance(found, Declined)
        assert (found.outcome.kind, found.outcome.reason, found.outcome.detail) == (CacheOutcomeKind.DECLINED, None, "has an If")
        async with await store.open(wanted(version="2.0")) as other:
            assert isinstance(other, Miss)


async def test_a_driver_that_wrote_nothing_has_declined(directory: Path) -> None:
    async with CacheStore(directory) as store:
        async with await miss(store, wanted()) as publisher:
            assert await publisher.publish() is None
        assert isinstance(await store.open(wanted()), Declined)


# --- every reason ----------------------------------------------------------------------------------------------------


def the_files(directory: Path) -> list[Path]:
    return sorted(path for path in (directory / "entries" / wanted().key.hex()).glob("*/*"))


async def reason_now(store: CacheStore, **changed: object) -> MissReason | None:
    async with await store.open(wanted(**changed)) as found:  # type: ignore[arg-type]
        return found.outcome.reason


@pytest.mark.parametrize("index", range(3))
async def test_a_missing_file_is_a_partial_entry(directory: Path, index: int) -> None:
    async with CacheStore(directory) as store:
        await stored(store, wanted())
        the_files(directory)[index].unlink()
        assert await reason_now(store) is MissReason.PARTIAL
        await stored(store, wanted(), b"again")
        assert await read(store, wanted()) == expected(b"again")


async def test_a_missing_generation_is_a_partial_entry(directory: Path) -> None:
    async with CacheStore(directory) as store:
        await stored(store, wanted())
        shutil.rmtree(the_files(directory)[0].parent)
        assert await reason_now(store) is MissReason.PARTIAL


@pytest.mark.parametrize("length", [0, 1, 300])
async def test_a_file_of_another_length_is_not_handed_out(directory: Path, length: int) -> None:
    async with CacheStore(directory) as store:
        await stored(store, wanted())
        os.truncate(the_files(directory)[0], length)
        assert await reason_now(store) is MissReason.WRONG_LENGTH


async def test_another_driver_version_is_told_from_a_cold_start_and_both_are_listed(directory: Path) -> None:
    async with CacheStore(directory) as store:
        await stored(store, wanted(version="A"))
        async with await store.open(wanted(version="B")) as found:
            assert found.outcome.reason is MissReason.OTHER_DRIVER_VERSION
            assert "'A'" in found.outcome.detail
            assert "'B'" in found.outcome.detail
        await stored(store, wanted(version="B"))
        entries = await store.entries()
        assert not isinstance(entries, Refusal)
        assert [(entry.device_version, entry.superseded) for entry in entries] == [("A", True), ("B", False)]
        report = await store.prune(1 << 30)
        assert not isinstance(report, Refusal)
        assert report.removed == 1
        assert await read(store, wanted(version="B")) == expected(b"artifact")
        # A downgrade of the driver is a miss of its own, not a hit on what the newer one left.
        assert await reason_now(store, version="A") is MissReason.OTHER_DRIVER_VERSION


SUSTAINED, LOW_POWER = ExecutionPreference.SUSTAINED_SPEED, ExecutionPreference.LOW_POWER


@pytest.mark.parametrize(
    ("change", "differs", "words"),
    [
        ({"preference": SUSTAINED}, ("preference",), "preference was LOW_POWER and is SUSTAINED_SPEED"),
        ({"token": 2}, ("app_token",), f"app_token was {'01' + 14 * '0'} and is {'02' + 14 * '0'}"),
        ({"priority": Priority.HIGH}, ("priority",), "priority was None and is HIGH"),
        ({"operations": ((0, 1),)}, ("operations",), "operations was None and is a list of 1"),
        ({"options": (("fast", b"1"),)}, ("options",), "options was a list of 0 and is a list of 1"),
        ({"token": 2, "preference": SUSTAINED}, ("app_token", "preference"), "preference was LOW_POWER and is SUSTAINED_SPEED"),
        ({"device": "other"}, ("device",), "device was 'fake' and is 'other'"),
        ({"version": "2.0"}, ("device_version",), "stored by driver '1.0', now '2.0'"),
        ({"model": 8, "preference": SUSTAINED}, (), ""),
    ],
)
async def test_a_miss_names_what_differs_from_the_nearest_entry_of_the_model(
    directory: Path, change: dict[str, Any], differs: tuple[str, ...], words: str
) -> None:
    async with CacheStore(directory) as store:
        await stored(store, wanted(9, preference=ExecutionPreference.FAST_SINGLE_ANSWER, priority=Priority.LOW, device="far"))
        await stored(store, wanted(1, preference=LOW_POWER))
        async with await store.open(wanted(**{"token": 1, "preference": LOW_POWER, **change})) as found:
            assert isinstance(found, Miss)
            assert found.outcome.differs == differs
            assert words in found.outcome.detail
            expected_reason = MissReason.OTHER_DRIVER_VERSION if "version" in change else MissReason.ABSENT
            assert found.outcome.reason is expected_reason


async def test_a_manifest_that_lies_about_its_key_explains_nothing_and_breaks_nothing(directory: Path) -> None:
    async with CacheStore(directory) as store:
        await stored(store, msgspec.structs.replace(wanted(1), parts=b"no parts at all"))
        await stored(store, msgspec.structs.replace(wanted(2), parts=bytes(100_000)))
        async with await store.open(wanted(3)) as found:
            assert (found.outcome.reason, found.outcome.differs) == (MissReason.ABSENT, ())


async def test_old_versions_go_by_themselves_when_unused_for_long(directory: Path) -> None:
    async with CacheStore(directory) as store:
        await stored(store, wanted(version="A"))
        await stored(store, wanted(version="B"))
    async with CacheStore(directory, old_versions_kept_s=0.0) as store:
        await read(store, wanted(version="B"))
        entries = await store.entries()
        assert not isinstance(entries, Refusal)
        assert [entry.device_version for entry in entries] == ["B"]


async def test_an_older_version_in_use_is_not_superseded(directory: Path) -> None:
    """Two environments with two versions of a driver share a cache without throwing each other out."""
    async with CacheStore(directory) as store:
        await stored(store, wanted(version="A"))
        await stored(store, wanted(version="B"))
        await read(store, wanted(version="A"))
        await store.prune()
        assert await read(store, wanted(version="A")) == await read(store, wanted(version="B"))


async def test_one_token_for_two_models_is_told_apart(directory: Path) -> None:
    async with CacheStore(directory) as store:
        await stored(store, wanted(model=1))
        assert await reason_now(store, model=2) is MissReason.OTHER_MODEL


async def test_an_entry_for_another_number_of_files_is_refused(directory: Path) -> None:
    async with CacheStore(directory) as store:
        await stored(store, wanted())
        assert await reason_now(store, files=CacheFiles(1, 1)) is MissReason.WRONG_FILES


async def test_an_entry_moved_to_another_key_is_refused(directory: Path) -> None:
    async with CacheStore(directory) as store:
        await stored(store, wanted(1))
        os.rename(directory / "entries" / wanted(1).key.hex(), directory / "entries" / wanted(2).key.hex())
        async with await store.open(wanted(2)) as found:
            assert found.outcome.reason is MissReason.WRONG_TOKEN


async def test_a_manifest_cut_at_any_length_is_a_miss(directory: Path) -> None:
    async with CacheStore(directory) as store:
        await stored(store, wanted())
        manifest = directory / "entries" / wanted().key.hex() / "manifest"
        whole = manifest.read_bytes()
        for length in range(0, len(whole), 37):
            manifest.parent.mkdir(mode=0o700, exist_ok=True)
            manifest.write_bytes(whole[:length])
            assert await reason_now(store) is MissReason.UNREADABLE
        await stored(store, wanted(), b"again")
        assert await read(store, wanted()) == expected(b"again")


async def test_what_the_device_refuses_is_a_miss_with_its_reason_and_is_replaced(directory: Path) -> None:
    async with CacheStore(directory) as store:
        await stored(store, wanted(), b"bad")
        hit = await store.open(wanted())
        assert isinstance(hit, Hit)
        again = await hit.reopen_as_miss(Refusal(MissReason.WRONG_BYTES, "file 0"))
        assert isinstance(again, Miss)
        async with again:
            assert (again.outcome.reason, again.outcome.detail) == (MissReason.WRONG_BYTES, "file 0")
            assert again.publisher is not None
            fill(again.publisher.handles, b"good")
            assert await again.publisher.publish() is None
        assert await read(store, wanted()) == expected(b"good")
        assert len(generations(directory, wanted())) == 1


async def test_a_refused_hit_is_a_hit_again_if_another_rebuilt_it(directory: Path) -> None:
    async with CacheStore(directory) as store, CacheStore(directory) as other:
        await stored(store, wanted(), b"bad")
        first, second = await store.open(wanted()), await other.open(wanted())
        assert isinstance(first, Hit)
        assert isinstance(second, Hit)
        rebuilt = await first.reopen_as_miss(Refusal(MissReason.WRONG_BYTES))
        assert isinstance(rebuilt, Miss)
        assert rebuilt.publisher is not None
        fill(rebuilt.publisher.handles, b"good")
        results: list[Hit | Miss | Declined] = []

        async def refuse_too() -> None:
            results.append(await second.reopen_as_miss(Refusal(MissReason.WRONG_BYTES)))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(refuse_too)
            # The second reader gives its hold back before it waits for its turn, or this would not get through.
            assert await rebuilt.publisher.publish() is None
        assert isinstance(results[0], Hit)
        async with results[0]:
            assert contents(results[0].handles) == expected(b"good")


# --- writing later ---------------------------------------------------------------------------------------------------


async def test_a_late_writer_publishes_a_new_generation(directory: Path) -> None:
    async with CacheStore(directory) as store:
        async with await miss(store, wanted()) as publisher:
            fill(publisher.handles, b"stage 1")
            assert await publisher.publish() is None
        async with await replacing(store, wanted()) as better:
            # Readers go on with the old generation meanwhile.
            assert await read(store, wanted()) == expected(b"stage 1")
            fill(better.handles, b"stage 2")
            assert await better.publish() is None
        assert await read(store, wanted()) == expected(b"stage 2")


async def test_a_second_publisher_is_told_that_the_entry_is_busy(directory: Path) -> None:
    async with CacheStore(directory) as store, CacheStore(directory) as other, await miss(store, wanted()):
        for asked in (store, other):
            async with await asked.open(wanted(), wait_s=0.0) as found:
                assert isinstance(found, Miss)
                assert (found.outcome.reason, found.publisher) == (MissReason.BUSY, None)


async def test_a_writer_waits_for_readers_and_a_reader_sees_one_generation(directory: Path) -> None:
    async with CacheStore(directory) as store, CacheStore(directory) as other:
        await stored(store, wanted(), b"old")
        hit = await other.open(wanted())
        assert isinstance(hit, Hit)
        better = await replacing(store, wanted())
        fill(better.handles, b"new")
        published = anyio.Event()

        async def publish() -> None:
            assert await better.publish() is None
            published.set()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(publish)
            for _ in range(3):
                await anyio.wait_all_tasks_blocked()
                assert contents(hit.handles) == expected(b"old")
                assert not published.is_set()
            await hit.aclose()
        assert published.is_set()
        assert await read(store, wanted()) == expected(b"new")


async def test_a_kept_descriptor_cannot_reach_a_later_generation(directory: Path) -> None:
    async with CacheStore(directory) as store:
        await stored(store, wanted(), b"old")
        async with await store.open(wanted()) as hit:
            assert isinstance(hit, Hit)
            kept = os.dup(hit.handles.model[0])
        better = await replacing(store, wanted())
        fill(better.handles, b"new")
        assert await better.publish() is None
        os.pwrite(kept, b"stale writer", 0)
        os.close(kept)
        assert await read(store, wanted()) == expected(b"new")


# --- a directory that cannot be used ---------------------------------------------------------------------------------


async def uncached(store: CacheStore, caplog: pytest.LogCaptureFixture) -> Refusal:
    """Three compilations that go on without a cache, and one warning."""
    caplog.clear()
    outcomes = []
    for token in range(3):
        async with await store.open(wanted(token)) as found:
            assert isinstance(found, Miss)
            assert found.publisher is None
            outcomes.append(found.outcome)
    assert len([record for record in caplog.records if record.name == "aionn.caching" and record.levelno >= logging.WARNING]) == 1
    failure = outcomes[0].save_failure
    assert failure is not None
    assert {outcome.reason for outcome in outcomes} == {failure.reason}
    return failure


async def test_a_directory_that_cannot_be_made_costs_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_bytes(b"")
    async with CacheStore(tmp_path / "file" / "cache") as store:
        await uncached(store, caplog)


async def test_a_symlinked_directory_is_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "cache").symlink_to(tmp_path / "real")
    async with CacheStore(tmp_path / "cache") as store:
        assert (await uncached(store, caplog)).reason is MissReason.UNSAFE
    assert list((tmp_path / "real").iterdir()) == []


async def test_a_directory_that_others_may_write_to_is_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache").chmod(0o777)
    async with CacheStore(tmp_path / "cache") as store:
        failure = await uncached(store, caplog)
    assert failure.reason is MissReason.UNSAFE
    assert "chmod" in failure.detail


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")
async def test_a_foreign_directory_is_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "cache").mkdir()
    os.chown(tmp_path / "cache", 12345, 12345)
    async with CacheStore(tmp_path / "cache") as store:
        assert (await uncached(store, caplog)).reason is MissReason.UNSAFE


async def test_an_empty_path_is_the_callers_mistake() -> None:
    with pytest.raises(CallerError, match="empty path"):
        CacheStore("")


@pytest.mark.parametrize("kind", ["symlink", "hard link", "directory", "fifo", "others may write"])
async def test_a_file_that_somebody_put_there_is_refused_and_replaced(directory: Path, kind: str) -> None:
    async with CacheStore(directory) as store:
        await stored(store, wanted())
        victim = directory.parent / "victim"
        victim.write_bytes(b"precious")
        planted = the_files(directory)[0]
        original = planted.read_bytes()
        planted.unlink()
        if kind == "symlink":
            planted.symlink_to(victim)
        elif kind == "hard link":
            os.link(victim, planted)
        elif kind == "directory":
            planted.mkdir()
        elif kind == "fifo":
            os.mkfifo(planted)
        else:
            planted.write_bytes(original)
            planted.chmod(0o666)
        reason = await reason_now(store)
        assert reason in (MissReason.UNSAFE, MissReason.IO_ERROR)
        await stored(store, wanted(), b"again")
        assert await read(store, wanted()) == expected(b"again")
        assert victim.read_bytes() == b"precious"


@pytest.mark.parametrize("what", ["mode 0777", "mode 0720", "symlink", "file"])
async def test_what_stands_in_an_entrys_place_is_refused_once_and_healed(directory: Path, tmp_path: Path, what: str) -> None:
    """`tests.caching.unprivileged` has the modes that do not bind root."""
    async with CacheStore(directory) as store:
        await stored(store, wanted())
        entry = directory / "entries" / wanted().key.hex()
        if what.startswith("mode"):
            entry.chmod(int(what.split()[1], 8))
        else:
            entry.rename(tmp_path / "elsewhere")
            entry.symlink_to(tmp_path / "elsewhere") if what == "symlink" else entry.write_bytes(b"")
        async with await miss(store, wanted()) as publisher:
            fill(publisher.handles, b"healed")
            assert await publisher.publish() is None
        assert await read(store, wanted()) == expected(b"healed")
        assert entry.lstat().st_mode & 0o7777 == 0o700
        assert list((directory / "trash").iterdir()) == []
    if what in ("symlink", "file"):
        assert (tmp_path / "elsewhere" / "manifest").exists()  # nothing outside was touched


async def test_no_descriptor_of_a_cache_directory_is_open_while_nothing_is_done_in_it(directory: Path) -> None:
    def held() -> set[str]:
        return {name for name in open_descriptors() if str(directory) in name}

    async with CacheStore(directory) as store:
        await stored(store, wanted())
        assert held() == set()
        hit = await store.open(wanted())
        assert isinstance(hit, Hit)
        assert len(held()) == len(contents(hit.handles)) + 1  # its files and its lock
        hit.leave()
        await store.wait_idle()
        assert held() == set()
        await stored(store, wanted(1))
        assert [bad async for bad in store.verify()] == []
        entries = await store.entries()
        assert not isinstance(entries, Refusal)
        assert len(entries) == 2
        assert not isinstance(await store.prune(0), Refusal)
        assert held() == set()


async def test_a_symlinked_manifest_or_lock_is_not_followed(directory: Path) -> None:
    async with CacheStore(directory) as store:
        await stored(store, wanted())
        victim = directory.parent / "victim"
        victim.write_bytes(b"precious")
        manifest = directory / "entries" / wanted().key.hex() / "manifest"
        manifest.unlink()
        manifest.symlink_to(victim)
        assert await reason_now(store) is MissReason.UNSAFE
        await stored(store, wanted(), b"again")
        for name in ("entry", "compile"):
            lock = directory / "locks" / f"{wanted().key.hex()}.{name}"
            lock.unlink(missing_ok=True)
            lock.symlink_to(victim)
        async with await store.open(wanted()) as found:
            assert isinstance(found, Miss)
        assert victim.read_bytes() == b"precious"


async def test_a_directory_deleted_under_us_is_made_again(directory: Path) -> None:
    async with CacheStore(directory) as store:
        await stored(store, wanted())
        shutil.rmtree(directory)
        await stored(store, wanted(), b"again")
        assert await read(store, wanted()) == expected(b"again")
        async with await miss(store, wanted(1)) as publisher:
            fill(publisher.handles, b"lost")
            shutil.rmtree(directory)
            assert isinstance(await publisher.publish(), Refusal)
        await stored(store, wanted(1))


async def test_a_lost_or_damaged_index_is_made_again(directory: Path) -> None:
    async with CacheStore(directory) as store:
        await stored(store, wanted(1))
        await stored(store, wanted(2))
    for damage in (b"", b"no database at all, by far " * 100):
        for path in sorted(directory.glob("index.sqlite*")):  # noqa: ASYNC240
            path.unlink()
        if damage:
            (directory / "index.sqlite").write_bytes(damage)
        async with CacheStore(directory) as store:
            assert await read(store, wanted(1)) == expected(b"artifact")
            report = await store.prune(0)
            assert not isinstance(report, Refusal)
            assert report.removed == 2
            await stored(store, wanted(1))
            await stored(store, wanted(2))


BAD_ROWS = (
    ("score = 'x'", 1),
    ("score = 9e999", 1),
    ("key = 'text'", 1),
    ("key = x'00'", 1),
    ("size = -5", 1),
    ("size = 'many', used_s = 'x'", 1),
)


@pytest.mark.parametrize(("change", "rows"), BAD_ROWS)
async def test_a_bad_row_of_the_index_is_dropped_and_eviction_goes_on(directory: Path, change: str, rows: int) -> None:
    async with CacheStore(directory) as store:
        for number in (1, 2, 3):
            await stored(store, wanted(number))
    connection = sqlite3.connect(directory / "index.sqlite")
    connection.execute(f"UPDATE entries SET {change} WHERE key = ?", (wanted(2).key,))
    connection.commit()
    connection.close()
    counted: list[trace.Counter] = []
    with trace.listen(lambda event: counted.append(event) if isinstance(event, trace.Counter) else None):
        async with CacheStore(directory) as store:
            assert await read(store, wanted(2)) == expected(b"artifact")  # puts its row right, unless its key is lost
            report = await store.prune(0)
            assert not isinstance(report, Refusal)
            assert report.left_bytes == 0
            assert await store.entries() == []
    if change.startswith("key"):
        assert [event.value for event in counted if event.name == "cache.index_rows_dropped"] == [rows]


async def test_an_index_that_is_damaged_under_a_running_store_is_made_again(directory: Path) -> None:
    async with CacheStore(directory, max_bytes=None) as store:
        for number in (1, 2):
            await stored(store, wanted(number))
        connection = sqlite3.connect(directory / "index.sqlite")
        connection.execute("DROP TABLE entries")
        connection.close()
        await stored(store, wanted(3))
        report = await store.prune(0)
        assert not isinstance(report, Refusal)
        assert (report.removed, report.left_bytes) == (3, 0)


async def test_a_cache_on_tmpfs_works() -> None:
    path = Path("/dev/shm") / f"cache-of-test-{os.getpid()}" / "cache"
    try:
        async with CacheStore(path) as store:
            await stored(store, wanted())
            assert await read(store, wanted()) == expected(b"artifact")
    finally:
        shutil.rmtree(path.parent, ignore_errors=True)


# --- cancelling ------------------------------------------------------------------------------------------------------


async def test_a_cancelled_waiter_leaves_nothing_and_the_next_goes_on(directory: Path) -> None:
    async with CacheStore(directory) as store, CacheStore(directory) as other:
        publisher = await miss(store, wanted())
        async with anyio.create_task_group() as tasks:
            waits = [anyio.Event() for _ in range(4)]
            for waiting, event in zip((store, other, store, other), waits, strict=True):
                tasks.start_soon(partial(waiting.open, wanted(), waits=event.set))
            for event in waits:
                await event.wait()
            tasks.cancel_scope.cancel()
        fill(publisher.handles, b"artifact")
        assert await publisher.publish() is None
        assert await read(other, wanted()) == expected(b"artifact")
        async with await miss(store, wanted(1)):
            pass


async def test_cancelling_at_any_moment_keeps_no_lock_and_no_staging(directory: Path) -> None:
    """The scope is cancelled after 0, 1, 2 ... turns of the event loop."""

    async def compile_once(store: CacheStore, content: bytes) -> None:
        async with await store.open(wanted()) as found:
            if isinstance(found, Miss) and found.publisher is not None:
                fill(found.publisher.handles, content)
                await found.publisher.publish()

    async with CacheStore(directory) as store:
        for turns in range(60):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(compile_once, store, b"x" * turns)
                for _ in range(turns):
                    await anyio.lowlevel.checkpoint()
                tasks.cancel_scope.cancel()
            if turns % 3 == 0:
                shutil.rmtree(directory / "entries" / wanted().key.hex(), ignore_errors=True)
        with anyio.fail_after(20):
            await compile_once(store, b"last")
            assert len(await read(store, wanted())) == len(expected(b""))
            async with await replacing(store, wanted()):
                assert len(generations(directory, wanted())) == 2


async def test_cancelling_the_task_itself_keeps_no_lock_and_no_descriptor(directory: Path) -> None:
    """`Task.cancel` pierces anyio's shields: what a thread is opening meanwhile must be closed all the same."""

    async def open_and_close(store: CacheStore) -> None:
        async with await store.open(wanted()) as found:
            if isinstance(found, Miss) and found.publisher is not None:
                fill(found.publisher.handles, b"artifact")
                await found.publisher.publish()

    def in_cache() -> set[str]:
        return {name for name in open_descriptors() if f"{directory}/entries/" in name}

    async with CacheStore(directory) as store:
        for turns in range(50):
            task = asyncio.create_task(open_and_close(store))
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            if turns % 3 == 0:
                shutil.rmtree(directory / "entries" / wanted().key.hex(), ignore_errors=True)
        gc.collect()
        assert in_cache() == set()
        with anyio.fail_after(20):
            await open_and_close(store)
            report = await store.prune(0)
        assert not isinstance(report, Refusal)
        assert (report.removed, report.in_use) == (1, 0)


async def test_no_file_is_touched_in_the_event_loops_thread(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Deterministic where a lag probe is not: a loop that never opens, reads, writes, syncs or renames cannot wait for a disk."""
    touched: list[str] = []
    gc.collect()  # what other tests left to finalizers is not ours
    loop_thread = threading.get_ident()

    def watched(name: str, original: Callable[..., object]) -> Callable[..., object]:
        def act(*arguments: object, **options: object) -> object:
            if threading.get_ident() == loop_thread:
                touched.append(f"{name} in {sys._getframe(1).f_code.co_qualname}")
            return original(*arguments, **options)

        return act

    acts = "open read write pread preadv pwrite fsync rename mkdir rmdir unlink listdir scandir stat fstat"
    for name in acts.split(" "):
        monkeypatch.setattr(os, name, watched(name, getattr(os, name)))
    monkeypatch.setattr(sqlite3, "connect", watched("connect", sqlite3.connect))
    async with CacheStore(directory, max_bytes=1500) as store:
        async with await miss(store, wanted()) as publisher:
            await anyio.to_thread.run_sync(fill, publisher.handles, b"artifact")
            assert await publisher.publish() is None
        async with await store.open(wanted()) as hit, await store.open(wanted(1)) as other:
            assert isinstance(hit, Hit)
            assert isinstance(other, Miss)
            assert other.publisher is not None
            await anyio.to_thread.run_sync(fill, other.publisher.handles, b"another")
            assert await other.publisher.publish() is None
        assert [bad async for bad in store.verify()] == []
        await store.entries()
        await store.prune(0)
    assert touched == []


async def test_each_outcome_is_a_counter_and_each_step_a_span(directory: Path) -> None:
    with trace.record() as recording:
        async with CacheStore(directory) as store:
            await stored(store, wanted())
            await read(store, wanted())
    assert [(event.name, event.attributes.get("reason")) for event in recording.counters if event.name in ("cache.hit", "cache.miss")] == [
        ("cache.miss", "absent"),
        ("cache.hit", ""),
    ]
    assert {"cache.lookup", "cache.publish"} <= {span.name for span in recording.spans}
    assert FILES.supported


def test_what_is_to_be_done_behind_a_caller_is_done_though_the_loop_takes_no_more_threads(tmp_path: Path) -> None:
    async def main() -> list[int]:
        store, done = CacheStore(tmp_path / "cache"), list[int]()
        await asyncio.get_running_loop().shutdown_default_executor()
        store.run_later(lambda: done.append(1))
        with anyio.fail_after(30):
            await store.wait_idle()
        return done

    assert asyncio.run(main()) == [1]


async def test_each_of_a_look_up_a_hits_end_and_a_publication_is_one_trip_to_a_thread(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trips: list[str] = []
    begin = tasks.in_thread

    def counted(act: Callable[..., Any], *arguments: object) -> Any:
        trips.append(getattr(act, "__name__", ""))
        return begin(act, *arguments)

    monkeypatch.setattr(tasks, "in_thread", counted)
    async with CacheStore(directory) as store:
        missed = await store.open_now(wanted())
        assert isinstance(missed, Miss)
        assert trips == ["open_now"]
        publisher = missed.publisher
        assert publisher is not None
        fill(publisher.handles, b"artifact")
        assert await publisher.publish() is None
        assert trips == ["open_now", "_publish_here"]
        hit = await store.open_now(wanted())
        assert isinstance(hit, Hit)
        await hit.aclose()
        assert len(trips) == 4


async def test_a_publication_that_readers_hold_up_waits_for_them_and_tidies_up(directory: Path) -> None:
    async with CacheStore(directory) as store:
        await stored(store, wanted())
        reader = await store.open(wanted())
        async with await replacing(store, wanted()) as publisher, anyio.create_task_group() as group:
            fill(publisher.handles, b"newer")
            refusals: list[Refusal | None] = []

            async def publish() -> None:
                refusals.append(await publisher.publish())

            group.start_soon(publish)
            turn = directory / "locks" / f"{wanted().key.hex()}.entry.turn"
            with anyio.fail_after(20):
                while not turn.exists():  # the writer waits for its turn, so the first attempt has failed
                    await anyio.lowlevel.checkpoint()
            assert refusals == []
            await reader.aclose()
        assert refusals == [None]
        assert await read(store, wanted()) == expected(b"newer")
        assert len(generations(directory, wanted())) == 1


async def test_a_caller_that_leaves_while_its_files_are_staged_leaves_nothing(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    staged, go_on = threading.Event(), threading.Event()
    stage_files: Callable[..., Any] = vars(store_opening)["stage_files"]

    def slow(*arguments: Any) -> Any:
        files = stage_files(*arguments)
        staged.set()
        assert go_on.wait(30)
        return files

    monkeypatch.setattr(store_opening, "stage_files", slow)
    async with CacheStore(directory) as store:
        opening = asyncio.ensure_future(store.open_now(wanted()))
        assert await anyio.to_thread.run_sync(staged.wait, 30)
        opening.cancel()
        with pytest.raises(asyncio.CancelledError):
            await opening
        assert generations(directory, wanted())
        go_on.set()
        await store.wait_idle()
        assert not (directory / "entries" / wanted().key.hex()).exists()
        assert not any(f"{directory}/" in name for name in open_descriptors())
        async with await miss(store, wanted()):
            pass


async def test_a_disk_that_hangs_under_many_callers_holds_up_no_other_cache(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hanging = (os.cpu_count() or 1) + 8  # more than the threads of the loop's default executor
    began, answers = threading.Semaphore(0), threading.Event()
    find = CacheDirectory.find

    def slow(here: CacheDirectory, key: bytes) -> Any:
        if here.path == str(directory):
            began.release()
            assert answers.wait(60)
        return find(here, key)

    monkeypatch.setattr(CacheDirectory, "find", slow)
    async with CacheStore(directory) as store, CacheStore(directory.parent / "other") as other, anyio.create_task_group() as group:
        for number in range(hanging):
            group.start_soon(store.open_now, wanted(number))
        try:
            with anyio.fail_after(30):
                await stored(other, wanted())
                assert await read(other, wanted()) == expected(b"artifact")
                for _ in range(hanging):
                    await anyio.to_thread.run_sync(began.acquire)
            group.cancel_scope.cancel()
        finally:
            answers.set()
