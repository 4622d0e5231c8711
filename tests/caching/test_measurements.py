"""Stage measurements and use, as the index of a cache directory keeps them."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
import time
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import msgspec
import pytest

from aionn import trace
from aionn.caching import StageMeasurement
from aionn.caching.measurements import KEPT_S
from aionn.caching.store import CacheStore, PruneReport
from aionn.caching.store.index import History, Index
from tests.caching.entries import stored, wanted

pytestmark = pytest.mark.anyio

SCOPE, OTHER = bytes(32), bytes(31) + b"1"
MODEL, ANOTHER = b"m" * 32, b"n" * 32


def measurement(**changes: Any) -> StageMeasurement:
    found = StageMeasurement(
        model_digest=MODEL, stage="best", version="2", base="quick", base_version="1", threads=4, gain=0.5, measured_s=time.time()
    )
    return msgspec.structs.replace(found, **changes)


async def test_a_measurement_takes_the_place_of_the_one_before(tmp_path: Path) -> None:
    first, second = measurement(), measurement(gain=-0.1, detail="slower")
    async with CacheStore(tmp_path / "cache") as store:
        assert await store.remembered.measurements() == []
        await store.remembered.remember(SCOPE, first)
        await store.remembered.remember(OTHER, first)
        await store.remembered.remember(SCOPE, second)
        assert await store.remembered.measurements(SCOPE) == [second]
        assert await store.remembered.measurements(OTHER) == [first]
        another = measurement(base="other", measured_s=time.time() + 1)
        await store.remembered.remember(SCOPE, another)
        assert await store.remembered.measurements(SCOPE) == [another, second]  # the newest first
    async with CacheStore(tmp_path / "cache") as store:
        assert len(await store.remembered.measurements()) == 3
        assert await store.entries() == []  # a measurement is not an entry


async def test_made_up_inputs_take_no_real_ones_place(tmp_path: Path) -> None:
    made_up, real = measurement(made_up=True), measurement(gain=0.2)
    async with CacheStore(tmp_path / "cache") as store:
        for remembered, expected in ((made_up, made_up), (real, real), (made_up, real)):
            await store.remembered.remember(SCOPE, remembered)
            assert await store.remembered.measurements(SCOPE) == [expected]


@pytest.mark.parametrize("age_s", [KEPT_S + 1, -KEPT_S - 60])
async def test_old_measurements_are_neither_read_nor_kept(tmp_path: Path, age_s: float) -> None:
    old = measurement(measured_s=time.time() - age_s)
    async with CacheStore(tmp_path / "cache") as store:
        await store.remembered.remember(SCOPE, old)
        assert await store.remembered.measurements() == await store.remembered.measurements(SCOPE) == []
        report = await store.prune()
        assert isinstance(report, PruneReport)
        assert (report.removed, report.measurements) == (0, 1)
        await store.remembered.remember(SCOPE, old)
        await store.remembered.remember(OTHER, measurement(made_up=True))
        report = await store.prune()  # the second act has removed the first one's row
        assert isinstance(report, PruneReport)
        assert report.measurements == 0


async def test_pruning_removes_all_measurements_where_asked(tmp_path: Path) -> None:
    async with CacheStore(tmp_path / "cache") as store:
        await stored(store, wanted(0), b"content")
        await store.remembered.remember(SCOPE, measurement())
        for everything, removed, left in ((False, 0, 1), (True, 1, 0)):
            report = await store.prune(measurements=everything)
            assert isinstance(report, PruneReport)
            assert (report.measurements, report.removed, len(await store.remembered.measurements())) == (removed, 0, left)


async def test_damaged_measurements_are_dropped_and_counted(tmp_path: Path) -> None:
    async with CacheStore(tmp_path / "cache") as store:
        await store.remembered.remember(SCOPE, measurement())
        await store.remembered.remember(OTHER, measurement())
    with sqlite3.connect(tmp_path / "cache" / "index.sqlite") as database:
        database.execute("UPDATE measurements SET body = ? WHERE scope = ?", (b"rubbish", SCOPE))
        database.execute("INSERT INTO measurements VALUES (?, 'text', 'no bytes', ?)", (SCOPE, time.time()))
    database.close()
    with trace.record() as recording:
        async with CacheStore(tmp_path / "cache") as store:
            assert len(await store.remembered.measurements()) == 1
            assert len(await store.remembered.measurements()) == 1
    assert recording.total("cache.index_rows_dropped") == 2


async def test_use_is_added_up_and_looked_at_within_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 1_000_000_000.0
    monkeypatch.setattr("aionn.caching.store.index.time.time", lambda: now_s)
    index = Index(str(tmp_path / "index.sqlite"))
    index.history.count_use(MODEL, 3)
    now_s += 5
    index.history.count_use(MODEL, 4)
    index.history.count_use(ANOTHER, 100)
    now_s += 3600
    index.history.count_use(MODEL, 10)
    assert index.history.use(MODEL, 7200) == 17
    assert index.history.use(MODEL, 1800) == 10
    assert index.history.use(MODEL, 1e-9) == 0  # the piece has begun before
    assert index.history.use(ANOTHER, 7200) == 100
    now_s += 31 * 86400
    index.history.count_use(ANOTHER, 1)
    assert index.history.use(MODEL, 1e9) == 0
    now_s -= 40 * 86400  # the clock was set back: what lies in the future goes
    index.history.count_use(MODEL, 1)
    assert (index.history.use(MODEL, 86400), index.history.use(ANOTHER, 1e9)) == (1, 0)
    index.close()


async def test_use_that_is_still_being_written_is_waited_for_at_close(tmp_path: Path) -> None:
    async with CacheStore(tmp_path / "cache") as store:
        store.remembered.count_use(MODEL, 5)
        store.remembered.remember_later(SCOPE, measurement())
    async with CacheStore(tmp_path / "cache") as store:
        assert await store.remembered.use(MODEL, 86400) == 5
        assert len(await store.remembered.measurements(SCOPE)) == 1


async def test_a_cancelled_caller_does_not_wait_for_a_disk_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = threading.Event()
    original = History.use

    def use(self: History, digest: bytes, within_s: float) -> int:
        asked.set()
        answers.wait()
        return original(self, digest, within_s)

    monkeypatch.setattr(History, "use", use)
    asked = threading.Event()
    async with CacheStore(tmp_path / "cache") as store:
        store.remembered.count_use(MODEL, 5)
    async with CacheStore(tmp_path / "cache") as store:
        for cancel in ("scope", "Task.cancel"):
            asked.clear()
            asking = asyncio.create_task(_ask(store, cancel == "scope"))
            await anyio.to_thread.run_sync(asked.wait)
            if cancel == "Task.cancel":
                asking.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await asking
            else:
                await asking
        assert not answers.is_set()
        answers.set()
        assert await store.remembered.use(MODEL, 86400) == 5


async def _ask(store: CacheStore, leaving: bool) -> None:
    with anyio.move_on_after(0.01 if leaving else None):
        await store.remembered.use(MODEL, 86400)


async def test_many_stores_add_up(tmp_path: Path) -> None:
    async def add() -> None:
        async with CacheStore(tmp_path / "cache") as store:
            for _ in range(10):
                store.remembered.count_use(MODEL, 1)

    async with anyio.create_task_group() as tasks:
        for _ in range(4):
            tasks.start_soon(add)
    async with CacheStore(tmp_path / "cache") as store:
        assert await store.remembered.use(MODEL, 86400) == 40


async def test_an_unusable_directory_remembers_nothing_and_raises_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no directory")
    async with CacheStore(tmp_path / "file") as store:
        await store.remembered.remember(SCOPE, measurement())
        store.remembered.count_use(MODEL, 5)
        assert await store.remembered.measurements() == []
        assert await store.remembered.use(MODEL, 86400) == 0
