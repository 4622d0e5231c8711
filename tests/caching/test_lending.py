"""Savers that share open file descriptions, and descriptions that are opened again for a driver."""

from __future__ import annotations

import fcntl
import os
import stat
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from aionn.caching import artifact_files, integrity
from aionn.caching.integrity import IntegrityStore
from aionn.caching.outcomes import MissReason, Refusal
from aionn.caching.store.directory import close_handles, open_again
from aionn.hal.engine import Artifact
from aionn.hal.interfaces import CacheHandles
from aionn.hal.types import CacheFiles
from tests.descriptors import free_descriptors

FILES = CacheFiles(1, 1)
FIRST, SECOND = Artifact((b"first" * 9,), (b"first",)), Artifact((b"second" * 9,), (b"second",))


@pytest.fixture
def handles(tmp_path: Path) -> Iterator[CacheHandles]:
    fds = [os.open(tmp_path / name, os.O_RDWR | os.O_CREAT, 0o600) for name in ("model0", "data0")]
    yield CacheHandles((fds[0],), (fds[1],), bytes(32))
    for fd in fds:
        os.close(fd)


@pytest.fixture
def stores(tmp_path: Path) -> Iterator[list[IntegrityStore]]:
    """Two stores of one driver's state, as two devices in a process have them."""
    made = [IntegrityStore("fake", "1.0", FILES, state_directory=tmp_path / "state") for _ in range(2)]
    yield made
    for store in made:
        store.close()


class FirstWriter:
    """Stops the first saver when it has written the first of its files. Notes who writes."""

    def __init__(self, write: Callable[..., None]) -> None:
        self.stopped, self.go_on = threading.Event(), threading.Event()
        self.order: list[bytes] = []
        self._write = write

    def __call__(self, fd: int, *pieces: memoryview) -> None:
        self._write(fd, *pieces)
        self.order.append(bytes(pieces[0])[:5])
        if len(self.order) == 1:
            self.stopped.set()
            assert self.go_on.wait(30)


@pytest.fixture
def writer(monkeypatch: pytest.MonkeyPatch) -> FirstWriter:
    writer = FirstWriter(artifact_files.write_whole)
    monkeypatch.setattr(integrity, "write_whole", writer)
    return writer


@pytest.mark.parametrize("shared", ["one description", "two descriptions"])
def test_two_savers_of_one_process_never_mix_their_files(
    stores: list[IntegrityStore], handles: CacheHandles, writer: FirstWriter, shared: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second one waits although flock does not keep duplicates of one description apart."""
    waits, sleep = threading.Event(), time.sleep

    def waiting(seconds: float) -> None:
        waits.set()
        sleep(seconds)

    monkeypatch.setattr(time, "sleep", waiting)
    other = (
        open_again(handles)
        if shared == "two descriptions"
        else CacheHandles((os.dup(handles.model[0]),), (os.dup(handles.data[0]),), bytes(32))
    )
    assert isinstance(other, CacheHandles)
    results: dict[str, Refusal | None] = {}
    savers = [
        threading.Thread(target=lambda: results.update(first=stores[0].save(handles, FIRST))),
        threading.Thread(target=lambda: results.update(second=stores[1].save(other, SECOND))),
    ]
    savers[0].start()
    assert writer.stopped.wait(30)
    savers[1].start()
    assert waits.wait(30)
    writer.go_on.set()
    for saver in savers:
        saver.join()
    assert results == {"first": None, "second": None}
    assert writer.order == [b"first", b"first", b"secon", b"secon"]
    assert stores[0].load(handles) == SECOND
    close_handles(other)


def test_a_saver_that_another_one_keeps_waiting_is_refused_and_writes_nothing(
    stores: list[IntegrityStore], handles: CacheHandles, writer: FirstWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(integrity, "_LOCK_WAIT_S", 0.05)
    saver = threading.Thread(target=stores[0].save, args=(handles, FIRST))
    saver.start()
    assert writer.stopped.wait(30)
    refusal = stores[1].save(handles, SECOND)
    assert isinstance(refusal, Refusal)
    assert refusal.reason is MissReason.BUSY
    writer.go_on.set()
    saver.join()
    assert writer.order == [b"first", b"first"]
    assert stores[0].load(handles) == FIRST
    assert stores[1].save(handles, SECOND) is None  # the right is free again


def test_a_saver_waits_for_a_lock_on_another_description_of_the_files(
    stores: list[IntegrityStore], handles: CacheHandles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As another process holds it that writes them."""
    monkeypatch.setattr(integrity, "_LOCK_WAIT_S", 0.05)
    other = open_again(handles)
    assert isinstance(other, CacheHandles)
    fcntl.flock(other.model[0], fcntl.LOCK_EX)
    refusal = stores[0].save(handles, FIRST)
    assert isinstance(refusal, Refusal)
    assert refusal.reason is MissReason.BUSY
    assert [os.fstat(fd).st_size for fd in (*handles.model, *handles.data)] == [0, 0]
    close_handles(other)
    assert stores[0].save(handles, FIRST) is None


def test_a_save_leaves_no_lock_on_the_clients_description(stores: list[IntegrityStore], handles: CacheHandles) -> None:
    assert stores[0].save(handles, FIRST) is None
    other = open_again(handles)
    assert isinstance(other, CacheHandles)
    fcntl.flock(other.model[0], fcntl.LOCK_EX | fcntl.LOCK_NB)
    close_handles(other)


def test_a_save_that_fails_gives_the_right_to_write_back(
    stores: list[IntegrityStore], handles: CacheHandles, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(fd: int, *pieces: memoryview) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(integrity, "write_whole", full)
        refusal = stores[0].save(handles, FIRST)
        assert isinstance(refusal, Refusal)
        assert refusal.reason is MissReason.NO_SPACE
    assert stores[1].save(handles, SECOND) is None


def test_files_that_are_opened_again_share_neither_offset_nor_flags(handles: CacheHandles) -> None:
    os.write(handles.model[0], b"abc")
    opened = open_again(handles)
    assert isinstance(opened, CacheHandles)
    assert opened.token == handles.token
    for mine, its in zip((*handles.model, *handles.data), (*opened.model, *opened.data), strict=True):
        assert os.path.sameopenfile(mine, its)
        assert os.lseek(its, 0, os.SEEK_CUR) == 0
        assert not os.get_inheritable(its)
        assert fcntl.fcntl(its, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDWR
    close_handles(opened)
    assert os.lseek(handles.model[0], 0, os.SEEK_CUR) == 3


@pytest.mark.parametrize("bad", ["closed", "negative", "few descriptors"])
def test_a_file_that_cannot_be_opened_again_leaves_nothing_open(handles: CacheHandles, bad: str) -> None:
    def open_now() -> set[str]:
        return set(os.listdir("/proc/self/fd"))

    before = open_now()
    wrong = {"closed": 10**6, "negative": -1, "few descriptors": handles.data[0]}[bad]
    with free_descriptors(1 if bad == "few descriptors" else 50):
        refusal = open_again(CacheHandles(handles.model, (wrong,), bytes(32)))
    assert isinstance(refusal, Refusal)
    assert "cache file 1" in refusal.detail
    close_handles(refusal)
    assert open_now() == before


def test_a_pipe_is_handed_on_without_being_opened(tmp_path: Path, handles: CacheHandles) -> None:
    """Opening a named pipe for reading would wait for a writer."""
    os.mkfifo(tmp_path / "pipe")
    fd = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    opened = open_again(CacheHandles((fd,), handles.data, bytes(32)))
    assert isinstance(opened, CacheHandles)
    assert stat.S_ISFIFO(os.fstat(opened.model[0]).st_mode)
    close_handles(opened)
    os.close(fd)
