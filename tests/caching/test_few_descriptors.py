"""A process with too few file descriptors: the cache refuses in words, loses no entry, and works again afterwards."""

from __future__ import annotations

from pathlib import Path

import pytest

from aionn.caching.outcomes import MissReason, Refusal
from aionn.caching.store import CacheStore, Hit, Miss
from aionn.caching.store.index import MANIFEST_BYTES
from tests.caching.entries import expected, read, stored, wanted
from tests.descriptors import free_descriptors

pytestmark = pytest.mark.anyio

ENOUGH = 24
"""With so many free descriptors everything works; the tests see to it."""


def lose_the_index(directory: Path) -> None:
    for file in directory.glob("index.sqlite*"):
        file.unlink()


@pytest.mark.parametrize("index", ["kept", "lost"])
async def test_a_look_up_without_free_descriptors_is_a_miss_and_never_an_oserror(tmp_path: Path, index: str) -> None:
    async with CacheStore(tmp_path) as store:
        await stored(store, wanted(1))
    hits = misses = 0
    for count in range(ENOUGH + 1):
        if index == "lost":
            lose_the_index(tmp_path)
        async with CacheStore(tmp_path) as store:
            with free_descriptors(count):
                glanced = await store.glance(wanted(1))
                found = glanced or await store.open(wanted(1))
                assert isinstance(found, Hit | Miss)
                await found.aclose()
            hits += isinstance(found, Hit)
            if isinstance(found, Miss):
                assert found.outcome.reason in (MissReason.NO_SPACE, MissReason.IO_ERROR)
                misses += 1
            # A new look when there are descriptors again: by this store, which has seen the shortage.
            assert await read(store, wanted(1)) == expected(b"artifact")
            entries = await store.entries()
            assert not isinstance(entries, Refusal)
            assert [entry.key for entry in entries] == [wanted(1).key]
    assert hits
    assert misses


async def test_pruning_without_free_descriptors_removes_no_good_entry(tmp_path: Path) -> None:
    refused = 0
    silent = []
    async with CacheStore(tmp_path) as store:
        for token in range(3):
            await stored(store, wanted(token))
        for count in range(ENOUGH + 1):
            with free_descriptors(count):
                report = await store.prune()
                listed = await store.entries()
                bad = [entry async for entry in store.verify()]
            assert isinstance(listed, Refusal) or len(listed) == 3
            assert isinstance(report, Refusal) or report.removed == 0
            if isinstance(report, Refusal):
                assert report.reason is MissReason.NO_SPACE
                refused += 1
            assert {entry.reason for entry in bad} <= {MissReason.NO_SPACE, MissReason.IO_ERROR}
            if not bad:
                silent.append(count)
        # Too few descriptors are a finding, never silence: silence begins at one count and lasts from there on.
        assert silent
        assert silent == list(range(silent[0], ENOUGH + 1))
        assert silent[0] > 0
        assert refused
        assert not isinstance(report, Refusal)
        assert not isinstance(listed, Refusal)
        for token in range(3):
            assert await read(store, wanted(token)) == expected(b"artifact")


async def test_an_index_rebuilt_without_free_descriptors_counts_all_entries_later(tmp_path: Path) -> None:
    async with CacheStore(tmp_path) as store:
        for token in range(3):
            await stored(store, wanted(token))
    size = 3 * (3 * len(b"0artifact") + MANIFEST_BYTES)
    for count in range(ENOUGH + 1):
        lose_the_index(tmp_path)
        async with CacheStore(tmp_path, max_bytes=size) as store:
            with free_descriptors(count):
                glanced = await store.glance(wanted(0))
                if glanced is not None:
                    await glanced.aclose()
        async with CacheStore(tmp_path, max_bytes=size) as store:
            report = await store.prune()
        assert not isinstance(report, Refusal)
        assert (report.removed, report.left_bytes) == (0, size)
