from __future__ import annotations

import os
import shutil
from pathlib import Path

import anyio
import pytest

from aionn.caching import MissReason, Refusal
from aionn.caching.store import CacheStore, Hit, Miss, PruneReport, housekeeping
from aionn.caching.store.directory import CacheDirectory
from aionn.caching.store.index import MANIFEST_BYTES
from tests.caching.entries import expected, fill, miss, read, replacing, stored, wanted

pytestmark = pytest.mark.anyio
CONTENT = bytes(9_999)  # 10,000 bytes per file, three files
ENTRY_BYTES = 30_000 + MANIFEST_BYTES


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "cache"


async def there(store: CacheStore) -> list[int]:
    entries = await store.entries()
    assert not isinstance(entries, Refusal)
    by_key = {wanted(token).key: token for token in range(50)}
    return sorted(by_key[entry.key] for entry in entries)


async def test_a_directory_that_is_made_again_is_never_missing_for_other_threads(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lookups read it without a lock. One that finds none would report an unusable cache."""
    async with CacheStore(directory) as store:
        await stored(store, wanted(0))
        seen = []

        class Seen(CacheDirectory):
            def __init__(self, path: str) -> None:
                seen.append(store._house.directory)
                super().__init__(path)

        monkeypatch.setattr(housekeeping, "CacheDirectory", Seen)
        shutil.rmtree(directory)
        async with await store.open(wanted(0)) as found:
            assert isinstance(found, Miss)
        assert len(seen) == 1
        assert seen[0] is not None
        assert store._house.directory is not seen[0]


async def test_the_budget_is_kept_and_the_least_value_goes_first(directory: Path) -> None:
    async with CacheStore(directory, max_bytes=3 * ENTRY_BYTES) as store:
        for token, seconds in enumerate((9, 1, 5)):
            await stored(store, wanted(token), CONTENT, compile_ns=seconds * 10**9)
        await stored(store, wanted(3), CONTENT, compile_ns=2 * 10**9)
        assert await there(store) == [0, 2, 3]
        await stored(store, wanted(4), CONTENT, compile_ns=9 * 10**9)
        assert await there(store) == [0, 2, 4]


async def test_what_took_as_long_but_is_larger_goes_first(directory: Path) -> None:
    async with CacheStore(directory, max_bytes=3 * ENTRY_BYTES) as store:
        await stored(store, wanted(0), bytes(100))
        await stored(store, wanted(1), CONTENT)
        await stored(store, wanted(2), CONTENT * 2)
        assert await there(store) == [0, 2]  # the entry just published is never the victim
        await stored(store, wanted(3), CONTENT)
        assert await there(store) == [0, 3]


async def test_of_equal_value_the_one_unused_for_longest_goes(directory: Path) -> None:
    async with CacheStore(directory, max_bytes=3 * ENTRY_BYTES) as store:
        for token in range(3):
            await stored(store, wanted(token), CONTENT)
        await stored(store, wanted(3), CONTENT)  # one goes, and the clock moves up
        first = [token for token in range(4) if token in await there(store)]
        await read(store, wanted(first[0]))
        for token in (4, 5):
            await stored(store, wanted(token), CONTENT)
        assert first[0] in await there(store)


async def test_what_is_dear_but_never_used_goes_at_last(directory: Path) -> None:
    async with CacheStore(directory, max_bytes=2 * ENTRY_BYTES) as store:
        await stored(store, wanted(0), CONTENT, compile_ns=8 * 10**9)
        for token in range(1, 30):
            await stored(store, wanted(token), CONTENT, compile_ns=10**9)
        assert 0 not in await there(store)


async def test_nothing_pinned_is_evicted(directory: Path) -> None:
    async with CacheStore(directory, max_bytes=2 * ENTRY_BYTES) as store, CacheStore(directory) as other:
        await stored(store, wanted(0), CONTENT, compile_ns=1)
        await stored(store, wanted(1), CONTENT, compile_ns=2)
        publisher = await replacing(other, wanted(1))
        async with await store.open(wanted(0)) as hit:
            assert isinstance(hit, Hit)
            await stored(store, wanted(2), CONTENT, compile_ns=3)
            report = await other.prune(0)
            assert isinstance(report, PruneReport)
            assert (report.removed, report.in_use) == (1, 2)
            assert await there(store) == [0, 1]
            fill(publisher.handles, b"better")
            assert await publisher.publish() is None
        assert await read(store, wanted(1)) == expected(b"better")
        report = await other.prune(0)
        assert report == PruneReport(removed=2, freed_bytes=report.freed_bytes, in_use=0, left_bytes=0)  # type: ignore[union-attr]
        assert await there(store) == []
        assert list((directory / "trash").iterdir()) == []
        assert list((directory / "locks").iterdir()) == []


async def test_what_is_larger_than_the_whole_budget_is_not_stored(directory: Path) -> None:
    async with CacheStore(directory, max_bytes=20_000) as store:
        await stored(store, wanted(1))
        async with await miss(store, wanted()) as publisher:
            fill(publisher.handles, CONTENT)
            refusal = await publisher.publish()
        assert refusal == Refusal(MissReason.TOO_LARGE, f"{ENTRY_BYTES} bytes, the whole cache may have 20000")
        assert await there(store) == [1]
        async with await store.open(wanted()) as found:
            assert isinstance(found, Miss)
    assert os.listdir(directory / "entries") == [wanted(1).key.hex()]


async def test_a_huge_file_with_a_hole_is_refused_and_not_read(directory: Path) -> None:
    async with CacheStore(directory, max_bytes=20_000) as store, await miss(store, wanted()) as publisher:
        os.ftruncate(publisher.handles.model[0], 8 << 40)  # to read it would take an hour
        refusal = await publisher.publish()
        assert refusal is not None
        assert refusal.reason is MissReason.TOO_LARGE


async def test_a_tree_of_any_depth_in_the_trash_is_removed(directory: Path) -> None:
    async with CacheStore(directory) as store:
        await stored(store, wanted(1))
    (directory / "trash" / f"{wanted(2).key.hex()}.01234567").mkdir()
    folder = os.open(directory / "trash" / f"{wanted(2).key.hex()}.01234567", os.O_RDONLY)
    for _ in range(2_000):  # deeper than the stack of Python, and than a process may have descriptors
        os.mkdir("deep", dir_fd=folder)
        inner = os.open("deep", os.O_RDONLY, dir_fd=folder)
        os.close(folder)
        folder = inner
    os.close(folder)
    try:
        async with CacheStore(directory) as store:
            assert await there(store) == [1]
        assert os.listdir(directory / "trash") == []
    finally:
        await anyio.run_process(["rm", "-rf", str(directory)])  # pytest could not remove it either


@pytest.mark.parametrize("too_many", [0, 1])
async def test_an_entry_may_fill_the_whole_budget_and_not_a_byte_more(too_many: int, directory: Path) -> None:
    """Its manifest counts, too. An entry beyond the budget would evict all others, and the cache would still be too large."""
    async with CacheStore(directory, max_bytes=ENTRY_BYTES - too_many) as store:
        await stored(store, wanted(1))
        async with await miss(store, wanted()) as publisher:
            fill(publisher.handles, CONTENT)
            refusal = await publisher.publish()
        assert await there(store) == [too_many]
        assert store.usage.held_bytes <= ENTRY_BYTES - too_many
    assert (refusal and refusal.reason) is (MissReason.TOO_LARGE if too_many else None)


async def test_an_evicted_entry_is_a_miss_and_comes_back(directory: Path) -> None:
    async with CacheStore(directory) as store:
        await stored(store, wanted())
        await store.prune(0)
        async with await store.open(wanted()) as found:
            assert isinstance(found, Miss)
        await stored(store, wanted(), b"again")
        assert await read(store, wanted()) == expected(b"again")


async def test_two_stores_evict_the_same_directory(directory: Path) -> None:
    async with CacheStore(directory, max_bytes=5 * ENTRY_BYTES) as store, CacheStore(directory, max_bytes=5 * ENTRY_BYTES) as other:
        for token in range(20):
            await stored((store, other)[token % 2], wanted(token), CONTENT)
        assert len(await there(store)) == 5
        assert await there(store) == await there(other)


async def test_a_listing_tells_provenance(directory: Path) -> None:
    async with CacheStore(directory) as store:
        await stored(store, wanted(1), compile_ns=1_500_000_000)
        async with await miss(store, wanted(2, device="other")) as publisher:
            await publisher.decline("why not")
        entries = await store.entries()
        assert not isinstance(entries, Refusal)
        first, second = entries
        assert (first.device, first.device_version, first.generation, first.size_bytes, first.saves_s) == ("fake", "1.0", 1, 27, 1.5)
        assert (first.key, first.model_digest, first.declined, first.superseded) == (wanted(1).key, b"\x07" * 32, False, False)
        assert first.used_s is not None
        assert first.created_s <= first.used_s
        assert (second.device, second.declined, second.size_bytes) == ("other", True, 0)


async def test_verify_names_each_bad_entry_and_what_is_wrong_with_it(directory: Path) -> None:
    async with CacheStore(directory) as store:
        for token in range(8):
            await stored(store, wanted(token))
        assert [bad async for bad in store.verify()] == []

        def files(token: int) -> list[Path]:
            return sorted((directory / "entries" / wanted(token).key.hex()).glob("*/*"))

        def manifest(token: int) -> Path:
            return directory / "entries" / wanted(token).key.hex() / "manifest"

        content = bytearray(files(1)[2].read_bytes())
        content[3] ^= 4
        files(1)[2].write_bytes(content)
        files(2)[0].unlink()
        os.truncate(files(3)[1], 1)
        manifest(4).write_bytes(manifest(4).read_bytes()[:-1])
        link = files(5)[0]
        link.unlink()
        link.symlink_to(files(0)[0])
        manifest(6).write_bytes(manifest(7).read_bytes())
        # Not bad: what an abandoned compiler left beside a whole entry, or alone.
        (directory / "entries" / wanted(0).key.hex() / "0123456789abcdef").mkdir()
        (directory / "entries" / wanted(40).key.hex()).mkdir()
        found = {bad.key: (bad.reason, bad.detail) async for bad in store.verify()}
        reasons = {token: found[wanted(token).key][0] for token in range(8) if wanted(token).key in found}
        assert reasons == {
            1: MissReason.WRONG_BYTES,
            2: MissReason.PARTIAL,
            3: MissReason.WRONG_LENGTH,
            4: MissReason.UNREADABLE,
            5: MissReason.UNSAFE,
            6: MissReason.WRONG_TOKEN,
        }
        assert len(found) == 6
        assert "model1" in found[wanted(1).key][1]
        report = await store.prune()
        assert isinstance(report, PruneReport)
        assert report.removed == 1  # the unreadable one; the others are for the next compilation to replace
        assert wanted(40).key.hex() not in os.listdir(directory / "entries")


async def test_what_lies_in_the_directory_and_is_not_the_caches_stays(directory: Path) -> None:
    """An app may name a directory that it uses for more, and that may have a `trash` of its own."""
    dead = directory / "trash" / f"{wanted().key.hex()}.0123abcd" / "generation"
    kept = [
        directory / name
        for name in ("notes.txt", "trash/letter.txt", f"trash/{'0' * 64}", f"trash/{'0' * 64}.old/a", "entries/mine/b", "locks/c")
    ]
    for path in (dead, *kept):
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        path.write_text("precious", encoding="utf-8")
    async with CacheStore(directory) as store:
        assert await store.entries() == []
        await stored(store, wanted())
        assert isinstance(await store.prune(0), PruneReport)
        assert await there(store) == []
    assert not dead.parent.exists()
    assert [path.read_text(encoding="utf-8") for path in kept] == ["precious"] * len(kept)
