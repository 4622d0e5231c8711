from __future__ import annotations

import hmac
import os
import random
import re
import shutil
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aionn import file_ranges
from aionn.caching import artifact_files, integrity
from aionn.caching.artifact_files import digests_of_files, read_private
from aionn.caching.integrity import IntegrityStore, Verified
from aionn.caching.outcomes import MissReason, Refusal
from aionn.caching.state import UNUSED_KEPT_S
from aionn.caching.store.directory import reopen
from aionn.file_ranges import digest_of
from aionn.hal.engine import Artifact
from aionn.hal.interfaces import CacheHandles
from aionn.hal.types import CacheFiles
from tests.caching.copier import Copier

FILES = CacheFiles(model=2, data=2)
TOKEN = bytes(32)
# The two kinds of model that the VTS fixtures use, as artifacts: float32 weights and quantised ones.
FLOAT32 = np.linspace(-1, 1, 20_000, dtype=np.float32).tobytes()
QUANT8 = np.arange(20_000, dtype=np.uint8).tobytes()


def artifact(weights: bytes = FLOAT32, name: bytes = b"mobilenet") -> Artifact:
    return Artifact((name + b"-graph", name + b"-code" * 50), (weights, weights[::-1]))


class Cache:
    """Cache files as the app's side makes them, and handles on them."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._fds: list[int] = []

    def path(self, kind: str, index: int) -> Path:
        return self.directory / f"{kind}{index}"

    def open(self, kind: str, index: int, flags: int = os.O_RDWR | os.O_CREAT) -> int:
        fd = os.open(self.path(kind, index), flags, 0o600)
        self._fds.append(fd)
        return fd

    def handles(self, token: bytes = TOKEN, model: int = 2, data: int = 2) -> CacheHandles:
        return CacheHandles(tuple(self.open("model", i) for i in range(model)), tuple(self.open("data", i) for i in range(data)), token)

    def close(self) -> None:
        while self._fds:
            os.close(self._fds.pop())


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[Cache]:
    (tmp_path / "cache").mkdir()
    cache = Cache(tmp_path / "cache")
    yield cache
    cache.close()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., IntegrityStore]]:
    """Start a driver's store; its state survives from one start to the next."""
    started: list[IntegrityStore] = []

    def make(version: str = "1.0", files: CacheFiles = FILES, **options: Any) -> IntegrityStore:
        started.append(IntegrityStore("fake", version, files, state_directory=tmp_path / "state", **options))
        return started[-1]

    yield make
    for store in started:
        store.close()


Start = Callable[..., IntegrityStore]


def refused(result: Artifact | Refusal | None, *reasons: MissReason) -> None:
    assert isinstance(result, Refusal), result
    assert not reasons or result.reason in reasons, result


def same(result: Artifact | Refusal, expected: Artifact) -> None:
    assert isinstance(result, Artifact), result
    assert [bytes(b) for b in (*result.model, *result.data)] == [bytes(b) for b in (*expected.model, *expected.data)]


# --- CompilationCachingTests, against the driver's store alone -------------------------------------------------------


@pytest.mark.parametrize("weights", [FLOAT32, QUANT8], ids=["float32", "quant8"])
def test_cache_saving_and_retrieval(start: Start, cache: Cache, weights: bytes) -> None:
    assert start().save(cache.handles(), artifact(weights)) is None
    same(start().load(cache.handles()), artifact(weights))


@pytest.mark.parametrize("weights", [FLOAT32, QUANT8], ids=["float32", "quant8"])
def test_cache_saving_and_retrieval_non_zero_offset(start: Start, cache: Cache, weights: bytes) -> None:
    saving = cache.handles()
    for fd in (*saving.model, *saving.data):
        os.write(fd, b"xx")
    assert start().save(saving, artifact(weights)) is None
    loading = cache.handles()
    for fd in (*loading.model, *loading.data):
        os.lseek(fd, 1, os.SEEK_SET)
    same(start().load(loading), artifact(weights))
    assert [os.lseek(fd, 0, os.SEEK_CUR) for fd in loading.model] == [1, 1]


@pytest.mark.parametrize(("model", "data"), [(3, 2), (1, 2), (2, 3), (2, 1)])
def test_save_to_cache_invalid_num_cache(start: Start, cache: Cache, model: int, data: int) -> None:
    refused(start().save(cache.handles(model=model, data=data), artifact()), MissReason.WRONG_FILES)
    refused(start().load(cache.handles(model=model, data=data)), MissReason.WRONG_FILES)


@pytest.mark.parametrize(("model", "data"), [(3, 2), (1, 2), (2, 3), (2, 1)])
def test_prepare_model_from_cache_invalid_num_cache(start: Start, cache: Cache, model: int, data: int) -> None:
    assert start().save(cache.handles(), artifact()) is None
    refused(start().load(cache.handles(model=model, data=data)), MissReason.WRONG_FILES)


EACH_HANDLE = [("model", 0), ("model", 1), ("data", 0), ("data", 1)]


def with_handle(cache: Cache, kind: str, index: int, flags: int) -> CacheHandles:
    fds = {("model", 0): 0, ("model", 1): 0, ("data", 0): 0, ("data", 1): 0}
    for one in fds:
        fds[one] = cache.open(*one)
    fds[kind, index] = cache.open(kind, index, flags)
    return CacheHandles((fds["model", 0], fds["model", 1]), (fds["data", 0], fds["data", 1]), TOKEN)


@pytest.mark.parametrize(("kind", "index"), EACH_HANDLE)
def test_save_to_cache_invalid_access_mode(start: Start, cache: Cache, kind: str, index: int) -> None:
    handles = with_handle(cache, kind, index, os.O_RDONLY)
    refused(start().save(handles, artifact()), MissReason.BAD_HANDLE)
    refused(start().load(handles), MissReason.NO_INTEGRITY_RECORD)


def test_files_that_are_open_for_reading_alone_are_loaded(start: Start, cache: Cache) -> None:
    """As on a read-only volume."""
    assert start().save(cache.handles(), artifact()) is None
    read_only = [cache.open(kind, index, os.O_RDONLY) for kind, index in EACH_HANDLE]
    same(start().load(CacheHandles(tuple(read_only[:2]), tuple(read_only[2:]), TOKEN)), artifact())


@pytest.mark.parametrize(("kind", "index"), EACH_HANDLE)
def test_prepare_model_from_cache_invalid_access_mode(start: Start, cache: Cache, kind: str, index: int) -> None:
    assert start().save(cache.handles(), artifact()) is None
    refused(start().load(with_handle(cache, kind, index, os.O_WRONLY)), MissReason.BAD_HANDLE)


@pytest.mark.parametrize("bad", ["closed", "negative", "pipe", "directory", "memfd twice"])
def test_a_handle_that_is_no_file_of_its_own_is_refused(start: Start, cache: Cache, tmp_path: Path, bad: str) -> None:
    good = cache.handles()
    ends: tuple[int, ...] = ()
    if bad == "pipe":
        ends = os.pipe()
        wrong = ends[0]
    elif bad == "directory":
        ends = (os.open(tmp_path, os.O_RDONLY),)
        wrong = ends[0]
    else:
        wrong = {"closed": 10**6, "negative": -1, "memfd twice": good.model[1]}[bad]
    handles = CacheHandles((wrong, good.model[1]), good.data, TOKEN)
    refused(start().save(handles, artifact()), MissReason.BAD_HANDLE)
    refused(start().load(handles), MissReason.BAD_HANDLE)
    for fd in ends:
        os.close(fd)


SEEDS = [(weights, seed) for weights in (FLOAT32, QUANT8) for seed in range(10)]
SECURITY = pytest.mark.parametrize(("weights", "seed"), SEEDS, ids=[f"{n}-{s}" for n in ("float32", "quant8") for s in range(10)])
MUL, ADD = artifact(name=b"MUL"), artifact(name=b"ADD")
OTHER_TOKEN = b"\x01" + bytes(31)


@pytest.fixture
def mul_files(start: Start, tmp_path: Path) -> Iterator[list[Path]]:
    """Model files of a MUL chain, saved under another token by the same driver."""
    (tmp_path / "mul").mkdir()
    mul = Cache(tmp_path / "mul")
    assert start().save(mul.handles(OTHER_TOKEN), MUL) is None
    yield [mul.path("model", 0), mul.path("model", 1)]
    mul.close()


def copier(cache: Cache, mul_files: list[Path], longest_s: float) -> Copier:
    """Puts the MUL chain's model files, and the ADD chain's own, into the cache in turn."""
    own = [cache.path("model", index) for index in range(2)]
    return Copier([(path, mul.read_bytes(), path.read_bytes()) for path, mul in zip(own, mul_files, strict=True)], longest_s, 64)


class Outcomes:
    """What loads under attack gave: the ADD chain, or a refusal."""

    def __init__(self) -> None:
        self.taken = self.refused = 0
        self._give_up_at = time.monotonic() + 60

    def note(self, result: Artifact | Refusal) -> None:
        if isinstance(result, Refusal):
            self.refused += 1
        else:
            same(result, ADD)
            self.taken += 1

    @property
    def over(self) -> bool:
        """Whether it has been tried often enough, and both outcomes have occurred."""
        assert time.monotonic() < self._give_up_at, (self.taken, self.refused)
        return self.taken + self.refused >= 100 and self.taken > 0 and self.refused > 0


def test_save_to_cache_toctou(start: Start, cache: Cache, mul_files: list[Path]) -> None:
    store, outcomes = start(), Outcomes()
    assert store.save(cache.handles(), ADD) is None
    with copier(cache, mul_files, 0.002):
        while not outcomes.over:
            store.save(cache.handles(), ADD)
            outcomes.note(store.load(cache.handles()))
            cache.close()


def test_prepare_from_cache_toctou(start: Start, cache: Cache, mul_files: list[Path]) -> None:
    store, outcomes = start(), Outcomes()
    assert store.save(cache.handles(), ADD) is None
    with copier(cache, mul_files, 0.002):
        while not outcomes.over:
            outcomes.note(store.load(cache.handles()))
            cache.close()


def test_no_file_is_read_after_it_was_verified(start: Start, cache: Cache, mul_files: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """The files change while their digests are compared: a second reading would see the MUL chain."""
    store, compare, swapped = start(), hmac.compare_digest, 0
    assert store.save(cache.handles(), ADD) is None

    def swapping(one: bytes, other: bytes) -> bool:
        nonlocal swapped
        for index, path in enumerate(mul_files):
            shutil.copyfile(path, cache.path("model", index))
        swapped += 1
        return compare(one, other)

    monkeypatch.setattr(hmac, "compare_digest", swapping)
    same(store.load(cache.handles()), ADD)
    assert swapped == 1
    refused(store.load(cache.handles()), MissReason.WRONG_BYTES)


@pytest.mark.parametrize("size", [80_000, 9 << 20], ids=["small", "large"])
def test_what_is_digested_is_the_only_reading_of_each_byte(start: Start, cache: Cache, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    """Every byte changes as soon as it has been read. So a digest of the file, before or after the copy, is not of what was copied."""
    store, made, read, read_into = start(), artifact(random.Random(size).randbytes(size)), os.pread, os.preadv
    assert store.save(cache.handles(), made) is None
    places: list[tuple[int, int, int]] = []

    def change(fd: int, count: int, offset: int) -> None:
        places.append((os.fstat(fd).st_ino, offset, offset + count))
        os.pwrite(fd, (~np.frombuffer(read(fd, count, offset), np.uint8)).tobytes(), offset)

    def changing_read(fd: int, length: int, offset: int) -> bytes:
        content = read(fd, length, offset)
        change(fd, len(content), offset)
        return content

    def changing_read_into(fd: int, buffers: list[memoryview], offset: int) -> int:
        count = read_into(fd, buffers, offset)
        change(fd, count, offset)
        return count

    monkeypatch.setattr(os, "pread", changing_read)
    monkeypatch.setattr(os, "preadv", changing_read_into)
    same(store.load(cache.handles()), made)
    places.sort()
    assert sum(end - begin for _, begin, end in places) == sum(len(content) for content in (*made.model, *made.data))
    assert all(one[0] != next_one[0] or one[2] <= next_one[1] for one, next_one in pairwise(places))  # none is read twice
    monkeypatch.undo()
    refused(store.load(cache.handles()), MissReason.WRONG_BYTES)


def test_a_file_that_is_cut_between_its_measuring_and_its_reading_is_refused(
    start: Start, cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, cuts = start(), 0

    def cutting(fds: Sequence[int], lengths: Sequence[int]) -> tuple[list[bytes | memoryview], list[bytes]]:
        nonlocal cuts
        cuts += 1
        os.ftruncate(fds[1], lengths[1] - 1)
        return read_private(fds, lengths)

    for size in (100, 100_000, 9 << 20):
        assert store.save(cache.handles(), Artifact((b"a", bytes(size)), (b"c", b"d"))) is None
        monkeypatch.setattr(integrity, "read_private", cutting)
        refused(store.load(cache.handles()), MissReason.WRONG_BYTES)
        monkeypatch.undo()
    assert cuts == 3


def test_files_of_a_known_artifact_are_verified_and_not_kept(start: Start, cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    store = start()
    assert store.save(cache.handles(), MUL) is None
    mul = store.verify(cache.handles())
    assert store.save(cache.handles(), ADD) is None
    add = store.verify(cache.handles())
    assert isinstance(mul, Verified)
    assert isinstance(add, Verified)
    assert add.artifact is not None
    same(add.artifact, ADD)
    contents = (*ADD.model, *ADD.data)
    assert add.digests == b"".join(len(content).to_bytes(8, "little") + digest_of(content) for content in contents)
    monkeypatch.setattr(artifact_files, "private_memory", None)  # no copy is made
    assert store.verify(cache.handles(), {mul.digests, add.digests}) == Verified(add.digests, None)
    monkeypatch.undo()
    again = store.verify(cache.handles(), {mul.digests})  # another artifact of the same token is known
    assert isinstance(again, Verified)
    assert again.artifact is not None
    same(again.artifact, ADD)


def test_files_that_were_digested_and_have_not_changed_are_not_read_again(
    start: Start, cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, reads = start(), 0

    def counted(fds: Sequence[int], lengths: Sequence[int]) -> list[bytes]:
        nonlocal reads
        reads += 1
        return digests_of_files(fds, lengths)

    monkeypatch.setattr(integrity, "digests_of_files", counted)
    assert store.save(cache.handles(), MUL) is None
    first = store.verify(cache.handles())
    assert isinstance(first, Verified)
    known = Verified(first.digests, None)
    for expected in (1, 2):  # files that were written a moment ago may change again and keep their times
        assert store.verify(cache.handles(), {first.digests}) == known
        assert reads == expected
    monkeypatch.setattr(file_ranges, "_RACY_NS", -(10**18))
    for _ in range(2):
        assert store.verify(cache.handles(), {first.digests}) == known
        assert reads == 3
    path, before = cache.path("data", 1), os.stat(cache.path("data", 1))
    content = path.read_bytes()
    with path.open("r+b") as file:
        file.write(bytes([content[0] ^ 1]))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))  # the time of the inode's last change stays new
    changed = store.verify(cache.handles(), {first.digests})
    assert isinstance(changed, Refusal)
    assert changed.reason is MissReason.WRONG_BYTES
    assert reads == 4


@SECURITY
def test_files_of_a_known_artifact_that_were_changed_are_refused(start: Start, cache: Cache, weights: bytes, seed: int) -> None:
    store, dice = start(), random.Random(seed)
    assert store.save(cache.handles(), artifact(weights)) is None
    known = store.verify(cache.handles())
    assert isinstance(known, Verified)
    for kind, index in EACH_HANDLE:
        path = cache.path(kind, index)
        whole = path.read_bytes()
        path.write_bytes(flip_one_bit(whole, dice))
        result = store.verify(cache.handles(), {known.digests})
        assert isinstance(result, Refusal)
        assert result.reason is MissReason.WRONG_BYTES
        path.write_bytes(whole)
    assert store.verify(cache.handles(), {known.digests}) == Verified(known.digests, None)


def test_large_copies_are_aligned_and_ask_for_huge_pages(start: Start, cache: Cache) -> None:
    store, size = start(), 24 << 20
    assert store.save(cache.handles(), Artifact((bytes(100_000), bytes(size)), (b"c", bytes(70_001)))) is None
    result = store.load(cache.handles())
    assert isinstance(result, Artifact)
    views = [np.frombuffer(content, np.uint8) for content in (*result.model, result.data[1])]
    assert [view.ctypes.data % 64 for view in views] == [0, 0, 0]
    assert all(view.flags.writeable for view in views)
    middle = views[1].ctypes.data + size // 2
    inside, flags = False, list[str]()
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if found := re.match("([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(found[1], 16) <= middle < int(found[2], 16)
        elif inside and line.startswith("VmFlags:"):
            flags = line.split()
    assert "hg" in flags


def test_the_digest_is_of_the_engines_buffer_and_not_of_the_file(
    start: Start, cache: Cache, mul_files: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each file changes as soon as it is written: a digest of what can be read there would vouch for the MUL chain."""
    store, write, swapped = start(), artifact_files.write_whole, 0

    def swapping(fd: int, buffer: memoryview) -> None:
        nonlocal swapped
        write(fd, buffer)
        if swapped < len(mul_files):
            write(fd, memoryview(mul_files[swapped].read_bytes()))
        swapped += 1

    monkeypatch.setattr(integrity, "write_whole", swapping)
    assert store.save(cache.handles(), ADD) is None
    assert swapped == 4
    refused(store.load(cache.handles()), MissReason.WRONG_BYTES)


def test_what_was_verified_does_not_change_with_the_file(start: Start, cache: Cache) -> None:
    store = start()
    assert store.save(cache.handles(), artifact()) is None
    result = store.load(cache.handles())
    for path in cache.directory.iterdir():
        path.write_bytes(b"")
    same(result, artifact())
    assert isinstance(result, Artifact)
    other = store.load(cache.handles())
    refused(other)
    assert not any(np.shares_memory(np.frombuffer(a, np.uint8), np.frombuffer(b, np.uint8)) for a, b in combinations(result.model, 2))


def test_replace_security_sensitive_cache(start: Start, cache: Cache, mul_files: list[Path]) -> None:
    store = start()
    assert store.save(cache.handles(), ADD) is None
    for index, path in enumerate(mul_files):
        shutil.copy(path, cache.path("model", index))
    refused(store.load(cache.handles()), MissReason.WRONG_BYTES, MissReason.WRONG_LENGTH)


def test_the_files_of_an_entry_cannot_change_places(start: Start, cache: Cache) -> None:
    store = start()
    swapped = artifact()
    assert store.save(cache.handles(), Artifact((b"a", b"b"), swapped.data)) is None
    good = cache.handles()
    refused(store.load(CacheHandles(good.model[::-1], good.data, TOKEN)), MissReason.WRONG_BYTES)


def test_files_of_two_generations_are_not_mixed(start: Start, cache: Cache) -> None:
    store = start()
    assert store.save(cache.handles(), Artifact((b"old", b"old"), (b"old", b"old"))) is None
    assert store.save(cache.handles(), Artifact((b"new", b"new"), (b"new", b"new"))) is None
    same(store.load(cache.handles()), Artifact((b"new", b"new"), (b"new", b"new")))
    cache.path("model", 0).write_bytes(b"old")
    refused(store.load(cache.handles()), MissReason.WRONG_BYTES)


def flip_one_bit(content: bytes, dice: random.Random) -> bytes:
    changed = bytearray(content)
    changed[dice.randrange(len(changed))] ^= 1 << dice.randrange(8)
    return bytes(changed)


def tampered(start: Start, cache: Cache, weights: bytes, kind: str, change: Callable[[bytes], bytes], reason: MissReason) -> None:
    store = start()
    for index in range(2):
        assert store.save(cache.handles(), artifact(weights)) is None
        path = cache.path(kind, index)
        path.write_bytes(change(path.read_bytes()))
        refused(store.load(cache.handles()), reason)
        cache.close()


@SECURITY
def test_corrupted_model_cache(start: Start, cache: Cache, weights: bytes, seed: int) -> None:
    dice = random.Random(seed)
    tampered(start, cache, weights, "model", lambda content: flip_one_bit(content, dice), MissReason.WRONG_BYTES)


@SECURITY
def test_wrong_length_model_cache(start: Start, cache: Cache, weights: bytes, seed: int) -> None:
    dice = random.Random(seed)
    tampered(start, cache, weights, "model", lambda content: content + dice.randbytes(dice.randint(1, 256)), MissReason.WRONG_LENGTH)


@SECURITY
def test_corrupted_data_cache(start: Start, cache: Cache, weights: bytes, seed: int) -> None:
    """NNAPI allows wrong outputs here; aionn refuses."""
    dice = random.Random(seed)
    tampered(start, cache, weights, "data", lambda content: flip_one_bit(content, dice), MissReason.WRONG_BYTES)


@SECURITY
def test_wrong_length_data_cache(start: Start, cache: Cache, weights: bytes, seed: int) -> None:
    dice = random.Random(seed)
    tampered(start, cache, weights, "data", lambda content: content + dice.randbytes(dice.randint(1, 256)), MissReason.WRONG_LENGTH)


@SECURITY
def test_wrong_token(start: Start, cache: Cache, weights: bytes, seed: int) -> None:
    store = start()
    assert store.save(cache.handles(), artifact(weights)) is None
    refused(store.load(cache.handles(flip_one_bit(TOKEN, random.Random(seed)))), MissReason.NO_INTEGRITY_RECORD)


def test_forty_flipped_bits_are_forty_refusals(start: Start, cache: Cache) -> None:
    store, dice = start(), random.Random(40)
    assert store.save(cache.handles(), artifact()) is None
    for _ in range(40):
        path = cache.path(*dice.choice(EACH_HANDLE))
        good = path.read_bytes()
        path.write_bytes(flip_one_bit(good, dice))
        refused(store.load(cache.handles()), MissReason.WRONG_BYTES)
        path.write_bytes(good)
        same(store.load(cache.handles()), artifact())
        cache.close()


def test_a_file_cut_at_any_length_is_refused(start: Start, cache: Cache) -> None:
    store = start()
    small = Artifact((b"graph", b"code"), (bytes(40), b"x"))
    assert store.save(cache.handles(), small) is None
    for length in range(40):
        os.truncate(cache.path("data", 0), length)
        refused(store.load(cache.handles()), MissReason.WRONG_LENGTH)
        cache.path("data", 0).write_bytes(bytes(40))
        cache.close()
    same(store.load(cache.handles()), small)


# --- the store itself ------------------------------------------------------------------------------------------------


def test_records_survive_a_restart(start: Start, cache: Cache) -> None:
    assert start().save(cache.handles(), artifact()) is None
    same(start().load(cache.handles()), artifact())


def test_two_versions_side_by_side_keep_their_records_and_believe_none_of_each_others(start: Start, cache: Cache) -> None:
    old = start("1.0")
    assert old.save(cache.handles(), artifact(name=b"old")) is None
    new = start("1.1")
    refused(new.load(cache.handles()), MissReason.NO_INTEGRITY_RECORD)
    same(old.load(cache.handles()), artifact(name=b"old"))  # a process of the version before goes on
    assert new.save(cache.handles(OTHER_TOKEN), artifact(name=b"new")) is None
    refused(old.load(cache.handles(OTHER_TOKEN)), MissReason.NO_INTEGRITY_RECORD)
    same(start("1.1").load(cache.handles(OTHER_TOKEN)), artifact(name=b"new"))


def test_stores_of_versions_long_unused_are_collected_and_no_others(start: Start, cache: Cache, tmp_path: Path) -> None:
    state = tmp_path / "state"

    def databases() -> set[Path]:
        return set(state.glob("integrity-*.sqlite"))

    def unused_for(path: Path, seconds: float) -> None:
        at = time.time() - seconds
        os.utime(path, (at, at))

    old = start("1.0")
    assert old.save(cache.handles(), artifact()) is None
    (of_old,) = databases()
    IntegrityStore("another device", "1.0", FILES, state_directory=state).close()
    (of_another,) = databases() - {of_old}
    for path in (of_old, of_another):
        unused_for(path, UNUSED_KEPT_S + 60)
    same(old.load(cache.handles()), artifact())
    old.note_uses()  # a use counts, however long ago the store was opened
    start("1.1").close()
    (of_new,) = databases() - {of_old, of_another}
    assert databases() == {of_old, of_another, of_new}

    old.close()
    for path in (of_old, of_new):
        unused_for(path, UNUSED_KEPT_S - 60)
    start("1.2").close()
    assert {of_old, of_another, of_new} < databases()
    for path in (of_old, of_new):
        unused_for(path, UNUSED_KEPT_S + 60)
    again = start("1.1")  # its own, however old, stays
    assert databases() & {of_old, of_another, of_new} == {of_another, of_new}
    assert [path for path in state.iterdir() if path.name.startswith(of_old.name)] == []
    again.close()
    refused(start("1.0").load(cache.handles()), MissReason.NO_INTEGRITY_RECORD)


@pytest.mark.parametrize("used", ["saved", "loaded", "opened twice"])
def test_what_is_recorded_after_another_process_has_used_the_records_is_not_lost(
    start: Start, cache: Cache, tmp_path: Path, used: str
) -> None:
    """SQLite removes the log of a database when its last user closes it. Each user is known by its lock."""
    first = start()
    assert first.save(cache.handles(), artifact()) is None
    if used == "loaded":
        same(first.load(cache.handles()), artifact())
        first.note_uses()
    second = start() if used == "opened twice" else None
    program = (
        "import sys; from aionn.caching.integrity import IntegrityStore; from aionn.hal.types import CacheFiles\n"
        "store = IntegrityStore('fake', '1.0', CacheFiles(2, 2), state_directory=sys.argv[1])\n"
        "assert store.unavailable is None\n"
        "store.close()\n"
    )
    subprocess.run([sys.executable, "-c", program, tmp_path / "state"], check=True)
    assert first.save(cache.handles(OTHER_TOKEN), artifact(name=b"later")) is None
    (database,) = (tmp_path / "state").glob("integrity-*.sqlite")
    count = f"import sqlite3; print(sqlite3.connect({str(database)!r}).execute('SELECT COUNT(*) FROM records').fetchone()[0])"
    counted = subprocess.run([sys.executable, "-c", count], check=True, capture_output=True, text=True)
    assert int(counted.stdout) == 2
    if second is not None:
        second.close()


def test_devices_do_not_share_records(tmp_path: Path, cache: Cache) -> None:
    for names in (("a/b", "a_b"), ("../x", "x" * 300)):
        one, other = (IntegrityStore(name, "1", FILES, state_directory=tmp_path / "state") for name in names)
        assert one.unavailable is None
        assert one.save(cache.handles(), artifact()) is None
        refused(other.load(cache.handles()), MissReason.NO_INTEGRITY_RECORD)
        same(one.load(cache.handles()), artifact())
        one.close()
        other.close()


def test_an_interrupted_update_leaves_the_old_entry_valid(start: Start, cache: Cache, tmp_path: Path) -> None:
    """The new artifact was recorded and written into fresh files, but the app died before it published them."""
    store = start()
    assert store.save(cache.handles(), artifact(name=b"old")) is None
    (tmp_path / "staging").mkdir()
    fresh = Cache(tmp_path / "staging")
    assert store.save(fresh.handles(), artifact(name=b"new")) is None
    same(store.load(cache.handles()), artifact(name=b"old"))
    same(store.load(fresh.handles()), artifact(name=b"new"))
    fresh.close()


def test_records_are_bounded_and_the_unused_go_first(start: Start, cache: Cache) -> None:
    store = start(max_tokens=3)
    tokens = [bytes([n]) * 32 for n in range(4)]
    for token in tokens[:3]:
        assert store.save(cache.handles(token), artifact()) is None
    same(store.load(cache.handles(tokens[0])), artifact())
    assert store.save(cache.handles(tokens[3]), artifact()) is None
    refused(store.load(cache.handles(tokens[1])), MissReason.NO_INTEGRITY_RECORD)
    for token in (tokens[0], tokens[2], tokens[3]):
        same(store.load(cache.handles(token)), artifact())


def test_a_use_is_noted_when_the_driver_has_a_moment_or_ends(start: Start, cache: Cache) -> None:
    tokens = [bytes([n]) * 32 for n in range(5)]
    store = start()
    for token in tokens[:3]:
        assert store.save(cache.handles(token), artifact()) is None
    same(store.load(cache.handles(tokens[0])), artifact())
    store.note_uses()
    other = start(max_tokens=3)  # another process of the same driver
    assert other.save(cache.handles(tokens[3]), artifact()) is None  # tokens[1] goes
    same(store.load(cache.handles(tokens[2])), artifact())
    store.close()
    assert other.save(cache.handles(tokens[4]), artifact()) is None  # tokens[0] goes, the use of tokens[2] was noted
    refused(other.load(cache.handles(tokens[0])), MissReason.NO_INTEGRITY_RECORD)
    refused(other.load(cache.handles(tokens[1])), MissReason.NO_INTEGRITY_RECORD)
    for token in tokens[2:]:
        same(other.load(cache.handles(token)), artifact())


def test_a_use_of_a_token_that_was_forgotten_brings_nothing_back(start: Start, cache: Cache, tmp_path: Path) -> None:
    store, other = start(), start(max_tokens=1)
    assert store.save(cache.handles(), artifact()) is None
    same(store.load(cache.handles()), artifact())
    assert other.save(cache.handles(b"2" * 32), artifact()) is None
    store.note_uses()
    (database,) = (tmp_path / "state").glob("integrity-*.sqlite")
    connection = sqlite3.connect(database)
    assert connection.execute("SELECT COUNT(*) FROM tokens").fetchone() == (1,)
    connection.close()


def test_one_token_keeps_a_bounded_number_of_records(start: Start, cache: Cache, tmp_path: Path) -> None:
    store = start()
    for number in range(30):
        assert store.save(cache.handles(), artifact(name=b"%d" % number)) is None
    (database,) = (tmp_path / "state").glob("integrity-*.sqlite")
    connection = sqlite3.connect(database)
    assert connection.execute("SELECT COUNT(*) FROM records").fetchone() == (16,)
    connection.close()
    same(store.load(cache.handles()), artifact(name=b"29"))


@pytest.mark.parametrize("wrong", [Artifact((b"a",), (b"c", b"d")), Artifact((b"a", b"b"), ()), Artifact(("text", b"b"), (b"c", b"d"))])
def test_an_artifact_the_engine_should_not_make_is_a_failed_save(start: Start, cache: Cache, wrong: Artifact) -> None:
    refused(start().save(cache.handles(), wrong))


def test_any_contiguous_buffer_is_an_artifact(start: Start, cache: Cache) -> None:
    made = Artifact((b"a", bytearray(b"b")), (memoryview(b"c"), np.arange(6, dtype=np.float32).reshape(2, 3)))
    assert start().save(cache.handles(), made) is None
    result = start().load(cache.handles())
    assert isinstance(result, Artifact)
    assert np.array_equal(np.frombuffer(result.data[1], np.float32), np.arange(6))


@pytest.mark.parametrize("size", [(64 << 10) - 1, 64 << 10, (4 << 20) - 1, 4 << 20, (6 << 20) + 1, (9 << 20) + 7])
def test_files_of_every_size_are_verified(start: Start, cache: Cache, size: int) -> None:
    content = random.Random(size).randbytes(size)
    assert start().save(cache.handles(), Artifact((content, b"b"), (b"c", b"d"))) is None
    result = start().load(cache.handles())
    same(result, Artifact((content, b"b"), (b"c", b"d")))
    assert isinstance(result, Artifact)
    # The engine's own: some use one in place, but only if it may be written to.
    assert memoryview(result.model[0]).readonly is (size < 64 << 10)
    for at in (0, size // 2, size - 1):
        os.pwrite(cache.open("model", 0), bytes([content[at] ^ 128]), at)
        refused(start().load(cache.handles()), MissReason.WRONG_BYTES)
        os.pwrite(cache.open("model", 0), content[at : at + 1], at)


def test_an_empty_file_is_a_file(start: Start, cache: Cache) -> None:
    assert start().save(cache.handles(), Artifact((b"a", b""), (b"", b"d"))) is None
    same(start().load(cache.handles()), Artifact((b"a", b""), (b"", b"d")))


def test_empty_files_that_nobody_saved_are_refused(start: Start, cache: Cache) -> None:
    refused(start().load(cache.handles()), MissReason.NO_INTEGRITY_RECORD)


def test_a_reopened_descriptor_has_its_own_offset_and_lock(cache: Cache) -> None:
    fd = cache.open("model", 0)
    os.write(fd, b"abc")
    own = reopen(fd)
    assert os.lseek(own, 0, os.SEEK_CUR) == 0
    assert not os.get_inheritable(own)
    import fcntl

    fcntl.flock(fd, fcntl.LOCK_EX)
    with pytest.raises(BlockingIOError):
        fcntl.flock(own, fcntl.LOCK_EX | fcntl.LOCK_NB)
    fcntl.flock(os.dup(fd), fcntl.LOCK_EX | fcntl.LOCK_NB)  # a duplicate is the sender's lock: that is the trap
    os.close(own)


def test_digests_do_not_depend_on_the_number_of_threads() -> None:
    from blake3 import blake3

    for size in (0, 1, (1 << 20) - 1, 1 << 20, 3_000_001):
        content = random.Random(size).randbytes(size)
        assert digest_of(content) == blake3(content, max_threads=1).digest()


# --- a state directory that cannot be used ---------------------------------------------------------------------------


def unusable(tmp_path: Path, cache: Cache, reason: MissReason | None = None) -> None:
    store = IntegrityStore("fake", "1.0", FILES, state_directory=tmp_path / "state")
    assert store.unavailable is not None
    assert reason is None or store.unavailable.reason is reason
    assert f"(in {tmp_path / 'state'};" in store.unavailable.detail  # the way out: where it would have to be
    refused(store.save(cache.handles(), artifact()), store.unavailable.reason)
    refused(store.load(cache.handles()), store.unavailable.reason)
    store.close()


def test_a_symlinked_state_directory_is_refused(tmp_path: Path, cache: Cache) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "state").symlink_to(tmp_path / "real")
    unusable(tmp_path, cache)
    assert list((tmp_path / "real").iterdir()) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")
def test_a_foreign_state_directory_is_refused(tmp_path: Path, cache: Cache) -> None:
    (tmp_path / "state").mkdir()
    os.chown(tmp_path / "state", 12345, 12345)
    unusable(tmp_path, cache, MissReason.UNSAFE)


def test_a_state_directory_open_to_others_is_closed_to_them(tmp_path: Path, start: Start) -> None:
    (tmp_path / "state").mkdir()
    (tmp_path / "state").chmod(0o777)
    assert start().unavailable is None
    assert (tmp_path / "state").stat().st_mode & 0o777 == 0o700
    assert all(path.stat().st_mode & 0o077 == 0 for path in (tmp_path / "state").iterdir())


def test_a_symlinked_database_is_refused(tmp_path: Path, cache: Cache, start: Start) -> None:
    start().close()
    (database,) = (tmp_path / "state").glob("integrity-*.sqlite")
    database.unlink()
    (tmp_path / "victim").write_bytes(b"precious")
    database.symlink_to(tmp_path / "victim")
    unusable(tmp_path, cache, MissReason.UNSAFE)
    assert (tmp_path / "victim").read_bytes() == b"precious"


def test_a_damaged_database_is_begun_anew(tmp_path: Path, cache: Cache, start: Start) -> None:
    store = start()
    assert store.save(cache.handles(), artifact()) is None
    store.close()
    (database,) = (tmp_path / "state").glob("integrity-*.sqlite")
    for damage in (b"", b"no database", database.read_bytes()[:1000], os.urandom(8192)):
        database.write_bytes(damage)
        again = start()
        refused(again.load(cache.handles()), MissReason.NO_INTEGRITY_RECORD)
        assert again.save(cache.handles(), artifact()) is None
        same(again.load(cache.handles()), artifact())
        again.close()


ENDLESS_VIEW = (
    "CREATE VIEW records AS WITH RECURSIVE c(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM c) "
    "SELECT i AS number, x'00' AS token, x'00' AS digests FROM c WHERE i < 0"
)
OTHER_SCHEMAS = (
    ENDLESS_VIEW,
    "CREATE TABLE tokens (token BLOB PRIMARY KEY)",
    "CREATE TABLE records (number INTEGER PRIMARY KEY, token BLOB, content BLOB)",
    "CREATE VIEW records AS SELECT 1 AS number",
)


@pytest.mark.parametrize("schema", OTHER_SCHEMAS)
def test_a_database_of_another_schema_is_begun_anew(tmp_path: Path, cache: Cache, start: Start, schema: str) -> None:
    start().close()
    (database,) = (tmp_path / "state").glob("integrity-*.sqlite")
    database.unlink()
    connection = sqlite3.connect(database)
    connection.execute(schema)
    connection.close()
    store = start()
    assert store.unavailable is None
    assert store.save(cache.handles(), artifact()) is None
    same(store.load(cache.handles()), artifact())


def test_a_view_that_a_hostile_driver_left_in_place_of_records_is_not_asked(tmp_path: Path, cache: Cache, start: Start) -> None:
    writer = start()
    assert writer.save(cache.handles(), artifact()) is None
    writer.close()
    (database,) = (tmp_path / "state").glob("integrity-*.sqlite")
    with closing(sqlite3.connect(database)) as connection:
        connection.execute("DROP TABLE records")
        connection.execute(ENDLESS_VIEW)
    refused(start(confined=False).load(cache.handles()), MissReason.IO_ERROR)
    refused(start().load(cache.handles()), MissReason.NO_INTEGRITY_RECORD)


def test_records_that_cannot_be_read_leave_no_database_open(start: Start, cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    """The look at the tables fails after the database was opened."""
    opened: list[sqlite3.Connection] = []

    def fail(database: sqlite3.Connection, statement: str) -> list[tuple[str]]:
        opened.append(database)
        raise sqlite3.OperationalError("disk I/O error")

    assert start().save(cache.handles(), artifact()) is None
    monkeypatch.setattr("aionn.caching.state.query", fail)
    refused(start(confined=False).load(cache.handles()), MissReason.IO_ERROR)
    (database,) = opened
    with pytest.raises(sqlite3.ProgrammingError, match="closed"):
        database.execute("SELECT 1")


@pytest.mark.parametrize("first", ["save", "load"])
def test_a_database_that_is_damaged_under_a_running_driver_is_begun_anew(tmp_path: Path, cache: Cache, start: Start, first: str) -> None:
    store = start()
    assert store.save(cache.handles(), artifact()) is None
    (database,) = (tmp_path / "state").glob("integrity-*.sqlite")
    connection = sqlite3.connect(database)
    connection.execute("DROP TABLE records")
    connection.close()
    refused(store.save(cache.handles(), artifact()) if first == "save" else store.load(cache.handles()), MissReason.IO_ERROR)
    refused(store.load(cache.handles()), MissReason.NO_INTEGRITY_RECORD)
    assert store.save(cache.handles(), artifact()) is None
    same(store.load(cache.handles()), artifact())


def test_a_closed_store_refuses(start: Start, cache: Cache) -> None:
    store = start()
    store.close()
    refused(store.save(cache.handles(), artifact()))
    refused(store.load(cache.handles()))


def test_many_threads_save_and_load_at_once(start: Start, cache: Cache, tmp_path: Path) -> None:
    store, failures = start(), []

    def work(number: int) -> None:
        (tmp_path / f"t{number}").mkdir()
        own = Cache(tmp_path / f"t{number}")
        for turn in range(10):
            mine = artifact(name=b"%d-%d" % (number, turn))
            if store.save(own.handles(bytes([number]) * 32), mine) is not None or store.load(own.handles(bytes([number]) * 32)) != mine:
                failures.append((number, turn))
        own.close()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
