"""Plans, as the index of a cache directory keeps them."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from aionn.caching.store import CacheStore
from aionn.caching.store import index as store_index
from aionn.caching.store.index import History, Index

pytestmark = pytest.mark.anyio
SCOPE, OTHER = bytes(32), b"1" * 32


async def test_a_plan_takes_the_place_of_the_one_before_and_outlives_the_store(tmp_path: Path) -> None:
    async with CacheStore(tmp_path / "cache") as store:
        assert await store.remembered.plan(SCOPE) is None
        await store.remembered.keep_plan(SCOPE, b"first")
        await store.remembered.keep_plan(OTHER, b"other")
        await store.remembered.keep_plan(SCOPE, b"second")
    async with CacheStore(tmp_path / "cache") as store:
        assert (await store.remembered.plan(SCOPE), await store.remembered.plan(OTHER)) == (b"second", b"other")
        assert await store.entries() == []  # a plan is not an entry


async def test_a_directory_that_cannot_be_used_has_no_plans(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    async with CacheStore(tmp_path / "cache") as store:
        await store.remembered.keep_plan(SCOPE, b"plan")
        assert await store.remembered.plan(SCOPE) is None


def test_the_plans_that_were_kept_first_go_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_index, "_PLANS", 3)
    clock = iter(range(100))
    monkeypatch.setattr("aionn.caching.store.index.time.time", lambda: float(next(clock)))
    index = Index(str(tmp_path / "index"))
    try:
        found: History = index.history
        for number in range(5):
            found.keep_plan(bytes((number,)) * 32, b"plan")
        assert [found.plan(bytes((number,)) * 32) for number in range(5)] == [None, None, b"plan", b"plan", b"plan"]
    finally:
        index.close()


def test_a_row_of_another_type_is_no_plan(tmp_path: Path) -> None:
    index = Index(str(tmp_path / "index"))
    try:
        index.history.keep_plan(SCOPE, b"plan")
        with sqlite3.connect(tmp_path / "index") as database:
            database.execute("UPDATE plans SET body = 'text'")
        database.close()
        assert index.history.plan(SCOPE) is None
        index.history.keep_plan(SCOPE, b"anew")
        assert index.history.plan(SCOPE) == b"anew"
    finally:
        index.close()
