"""A killed process, a full disk, two drivers at once: at every act, in real processes where that matters."""

from __future__ import annotations

import ctypes
import errno
import os
import resource
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from aionn.caching import MissReason, Refusal, state
from aionn.caching.integrity import IntegrityStore
from aionn.caching.private_folder import UnsafeStateError
from aionn.caching.state import open_database, read_database
from aionn.caching.store import CacheStore, Hit, Miss, housekeeping
from aionn.caching.store.housekeeping import Housekeeping
from aionn.caching.store.index import Index, IndexDatabase
from aionn.hal.engine import Artifact
from aionn.hal.interfaces import CacheHandles
from aionn.hal.types import CacheFiles
from tests.apps import App, run_app
from tests.caching.entries import FILES, expected, fill, generations, read, stored, wanted


# A first save and an upgrade do nearly the same acts. So each kills at every other act: one at the odd ones, the other at the even ones.
@pytest.mark.parametrize(
    ("scenario", "start", "step"),
    [
        ("first", 1, 2),
        ("upgrade", 2, 2),
        *(pytest.param(scenario, 1, 1, marks=pytest.mark.soak) for scenario in ("first", "upgrade", "evict", "decline")),
    ],
)
def test_a_process_killed_before_any_act_leaves_the_old_entry_or_the_new(scenario: str, start: int, step: int, quick_disk: Path) -> None:
    command = [sys.executable, "-m", "tests.caching.crash", scenario, str(quick_disk), str(start), str(step)]
    done = run_app(command, capture_output=True, text=True, check=False, timeout=110)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) * step > 20


# --- an index that is damaged in use ----------------------------------------------------------------------------------


def test_an_index_whose_files_are_cut_short_in_use_does_not_end_the_app(tmp_path: Path) -> None:
    done = run_app([sys.executable, "-m", "tests.caching.cut_index", str(tmp_path)], capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    assert set(done.stdout.split()) == {"index.sqlite", "index.sqlite-journal"}, "no file was cut"


def test_an_index_that_another_process_has_begun_anew_is_opened_again(tmp_path: Path) -> None:
    path = tmp_path / "index.sqlite"
    before = IndexDatabase(str(path))
    path.unlink()
    after = IndexDatabase(str(path))
    try:
        for number, index in enumerate((before, after)):
            index.transact(lambda database, number=number: database.execute("INSERT INTO staging VALUES (?)", (bytes([number] * 32),)))  # type: ignore[misc]
        for index in (before, after):
            assert index.transact(lambda database: database.execute("SELECT COUNT(*) FROM staging").fetchone()) == (2,)
    finally:
        before.close()
        after.close()


@pytest.mark.parametrize("beside", ["", "-journal", "-wal", "-shm"])
def test_a_fifo_in_place_of_a_file_of_sqlite_is_refused_and_not_waited_for(tmp_path: Path, beside: str) -> None:
    path = tmp_path / "index.sqlite"
    if beside:
        IndexDatabase(str(path)).close()
    os.mkfifo(f"{path}{beside}")
    for synced in (True, False):
        with pytest.raises(UnsafeStateError, match="is not a regular file"):
            open_database(path, lambda database: None, synced=synced)
    with pytest.raises(UnsafeStateError, match="is not a regular file"):
        read_database(path)


def test_an_index_that_another_process_keeps_locked_is_waited_for_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    opened: list[str] = []

    def counted(path: str) -> Index:
        opened.append(path)
        return Index(path)

    monkeypatch.setattr(state, "BUSY_TIMEOUT_S", 0.1)
    monkeypatch.setattr(housekeeping, "Index", counted)
    house = Housekeeping(str(tmp_path), None, 0.0)
    house.current()
    index = str(tmp_path / "index.sqlite")
    with closing(sqlite3.connect(index, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        opened.clear()
        for _ in range(3):
            assert house.with_index(lambda index: index.total_bytes) is None
        assert opened == [index]
        assert "database is locked" in caplog.text
    house._index_locked_until_s -= housekeeping._LOCKED_S  # the time is over
    assert house.with_index(lambda index: index.total_bytes) == 0


def test_an_index_that_cannot_be_begun_anew_is_done_without(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    house = Housekeeping(str(tmp_path), None, 0.0)
    house.current()
    index = tmp_path / "index.sqlite"
    with house.indexed():
        os.truncate(index, 5000)
        index.rename(tmp_path / "before")
        index.mkdir()
        for _ in range(2):  # the first one finds the damage, the second one a connection that is closed
            assert house.with_index(lambda index: index.total_bytes) is None
    assert "nothing will be evicted" in caplog.text


# --- a full disk -----------------------------------------------------------------------------------------------------

GROWING = ["open", "write", "pwrite", "fsync", "mkdir"]


class FullDisk:
    """From the n-th act on that could need space, every one fails with ENOSPC."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, full_from: int) -> None:
        self.acts = 0
        opened = os.open

        def counting(original: Callable[..., Any]) -> Callable[..., Any]:
            def act(*arguments: Any, **options: Any) -> Any:
                if original is not opened or arguments[1] & os.O_CREAT:
                    self.acts += 1
                    if self.acts >= full_from:
                        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                return original(*arguments, **options)

            return act

        for name in GROWING:
            monkeypatch.setattr(os, name, counting(getattr(os, name)))
        disk = self

        class Full(sqlite3.Connection):
            def execute(self, *arguments: Any) -> sqlite3.Cursor:
                if arguments[0].startswith("COMMIT"):
                    disk.acts += 1
                    if disk.acts >= full_from:
                        super().execute("ROLLBACK")
                        error = sqlite3.OperationalError("database or disk is full")
                        error.sqlite_errorcode = sqlite3.SQLITE_FULL
                        raise error
                return super().execute(*arguments)

        connect = sqlite3.connect
        monkeypatch.setattr(sqlite3, "connect", lambda *arguments, **options: connect(*arguments, **{"factory": Full, **options}))


@pytest.mark.anyio
async def test_a_disk_that_is_full_from_any_act_on_costs_the_cache_and_nothing_else(quick_disk: Path) -> None:
    async def compile_once(place: Path) -> tuple[bool, bool]:
        """What an app and a driver do; whether the artifact was saved, and published."""
        driver = IntegrityStore("fake", "1.0", FILES, state_directory=place / "state")
        saved = published = False
        async with CacheStore(place / "cache") as store, await store.open(wanted()) as found:
            assert not isinstance(found, Hit) or found.outcome.reason is None
            if isinstance(found, Miss) and found.publisher is not None:
                saved = driver.save(found.publisher.handles, Artifact((b"a", b"b"), (b"c",))) is None
                if saved:
                    refusal = await found.publisher.publish()
                    published = refusal is None
                    assert refusal is None or refusal.reason in (MissReason.NO_SPACE, MissReason.IO_ERROR), refusal
            elif isinstance(found, Miss):
                assert found.outcome.save_failure is not None
        driver.close()
        return saved, published

    for full_from in range(1, 200):
        place = quick_disk / str(full_from)
        place.mkdir()
        with pytest.MonkeyPatch.context() as monkeypatch:
            disk = FullDisk(monkeypatch, full_from)
            saved, published = await compile_once(place)
        came_through = disk.acts < full_from
        # Space is there again: whatever was left is a whole entry or none, and the next compilation is stored.
        await compile_once(place)
        driver = IntegrityStore("fake", "1.0", FILES, state_directory=place / "state")
        async with CacheStore(place / "cache") as store:
            async with await store.open(wanted()) as found:
                assert isinstance(found, Hit), (full_from, found.outcome)
                assert driver.load(found.handles) == Artifact((b"a", b"b"), (b"c",))
            assert [bad async for bad in store.verify()] == []
        driver.close()
        assert len(generations(place / "cache", wanted())) == 1
        if came_through:
            assert (saved, published) == (True, True)
            assert full_from > 15
            return
    pytest.fail("the compilation never came through")


@pytest.fixture
def small_disk(tmp_path: Path) -> Path:
    """A tmpfs of 1 MB, where mounting is allowed."""
    where = tmp_path / "small"
    where.mkdir()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"tmpfs", bytes(where), b"tmpfs", 0, b"size=1m,mode=0700") != 0:
        pytest.skip(f"a tmpfs cannot be mounted here: {os.strerror(ctypes.get_errno())}")
    return where


@pytest.mark.anyio
async def test_a_small_tmpfs_fills_up_and_the_runs_go_on(small_disk: Path) -> None:
    try:
        async with CacheStore(small_disk / "cache") as store:
            await stored(store, wanted(0), bytes(100_000))
            async with await store.open(wanted(1)) as found:
                assert isinstance(found, Miss)
                assert found.publisher is not None
                driver = IntegrityStore("fake", "1.0", FILES, state_directory=small_disk.parent / "state")
                refusal = driver.save(found.publisher.handles, Artifact((bytes(500_000), b"b"), (bytes(500_000),)))
                driver.close()
                assert isinstance(refusal, Refusal)
                assert refusal.reason is MissReason.NO_SPACE
            assert await read(store, wanted(0)) == expected(bytes(100_000))
            await stored(store, wanted(2), bytes(100_000))
            assert [bad async for bad in store.verify()] == []
    finally:
        ctypes.CDLL(None).umount2(bytes(small_disk), 2)


LIMITED = """
import os, resource, signal, sys
from pathlib import Path
from aionn.caching.integrity import IntegrityStore
from aionn.hal.engine import Artifact
from aionn.hal.interfaces import CacheHandles
from aionn.hal.types import (CacheFiles)
store = IntegrityStore("fake", "1.0", CacheFiles(1, 1), state_directory=sys.argv[1])
fds = [os.open(Path(sys.argv[1]) / name, os.O_RDWR | os.O_CREAT) for name in ("m", "d")]
handles = CacheHandles((fds[0],), (fds[1],), bytes(32))
assert store.save(handles, Artifact((b"old",), (b"old",))) is None
resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))
refusal = store.save(handles, Artifact((bytes(100_000),), (bytes(300_000),)))
print(refusal.reason.value, type(store.load(handles)).__name__)
"""


def test_a_file_size_limit_fails_the_save_and_never_the_process(tmp_path: Path) -> None:
    assert resource.RLIMIT_FSIZE is not None
    done = subprocess.run([sys.executable, "-c", LIMITED, str(tmp_path / "state")], capture_output=True, text=True, check=False)
    # The old artifact was in these very files, so it is gone: refused, not half of both.
    assert (done.returncode, done.stdout) == (0, "no_space Refusal\n"), done.stderr


# --- several driver processes ----------------------------------------------------------------------------------------

SAVER = """
import os, sys
from aionn.caching.integrity import IntegrityStore
from aionn.hal.engine import Artifact
from aionn.hal.interfaces import CacheHandles
from aionn.hal.types import (CacheFiles)
store = IntegrityStore("fake", "1.0", CacheFiles(1, 1), state_directory=sys.argv[1])
fds = [os.open(path, os.O_RDWR | os.O_CREAT) for path in sys.argv[2:4]]
mine = sys.argv[4].encode() * 100_000
sys.stdin.readline()
for _ in range(20):
    refusal = store.save(CacheHandles((fds[0],), (fds[1],), bytes(32)), Artifact((mine,), (mine,)))
    assert refusal is None, refusal
"""


def test_two_processes_that_save_one_token_into_the_same_files_end_with_a_valid_entry(tmp_path: Path) -> None:
    """Two drivers, started together on a state directory that is not there yet, overwrite each other twenty times."""
    paths = [tmp_path / "m", tmp_path / "d"]
    savers = [App([sys.executable, "-c", SAVER, str(tmp_path / "state"), *map(str, paths), name], stdin=subprocess.PIPE) for name in "AB"]
    for saver in savers:
        assert saver.stdin is not None
        saver.stdin.write(b"\n")
        saver.stdin.close()
    assert [saver.wait() for saver in savers] == [0, 0]
    store = IntegrityStore("fake", "1.0", CacheFiles(1, 1), state_directory=tmp_path / "state")
    fds = [os.open(path, os.O_RDWR) for path in paths]
    loaded = store.load(CacheHandles((fds[0],), (fds[1],), bytes(32)))
    assert isinstance(loaded, Artifact), loaded
    assert (loaded.model[0], loaded.data[0]) in [(name * 100_000, name * 100_000) for name in (b"A", b"B")]
    for fd in fds:
        os.close(fd)
    store.close()


@pytest.mark.anyio
async def test_a_publisher_whose_files_were_swapped_by_name_is_refused(tmp_path: Path) -> None:
    async with CacheStore(tmp_path / "cache") as store, await store.open(wanted()) as found:
        assert isinstance(found, Miss)
        assert found.publisher is not None
        fill(found.publisher.handles, b"good")
        (staged,) = (tmp_path / "cache" / "entries" / wanted().key.hex()).glob("*/model0")
        staged.unlink()
        staged.write_bytes(b"evil")
        refusal = await found.publisher.publish()
        assert isinstance(refusal, Refusal)
        assert refusal.reason is MissReason.UNSAFE
