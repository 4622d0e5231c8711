from __future__ import annotations

import random
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from aionn.caching.blob_cache import BlobCache, Capacity, Limits, Policy, Victim
from aionn.errors import CallerError
from tests.apps import App

SMALL = Limits(max_total_bytes=13, max_key_bytes=6, max_value_bytes=8)  # BlobCache_test.cpp
NN = Limits(max_total_bytes=2 << 20, max_key_bytes=12 << 10, max_value_bytes=64 << 10)  # nnCache_test.cpp
POLICIES = [Policy(victim, capacity) for victim in Victim for capacity in Capacity]
Open = Callable[..., BlobCache]

each_policy = pytest.mark.parametrize("policy", POLICIES, ids=[f"{p.victim.value}-{p.capacity.value}" for p in POLICIES])


@pytest.fixture
def open_cache(tmp_path: Path) -> Iterator[Open]:
    opened: list[BlobCache] = []

    def make(policy: Policy | None = None, limits: Limits = SMALL, version: str = "1") -> BlobCache:
        opened.append(
            BlobCache(tmp_path / "blobs.sqlite", limits=limits, policy=policy, version=version, state_directory=tmp_path / "state")
        )
        return opened[-1]

    yield make
    for cache in opened:
        cache.close()


# --- BlobCacheTest, each with six policies ---------------------------------------------------------------------------


@each_policy
def test_cache_single_value_succeeds(open_cache: Open, policy: Policy) -> None:
    cache = open_cache(policy)
    assert cache.set(b"abcd", b"efgh")
    buffer = bytearray(b"\xee" * 4)
    assert cache.get_into(b"abcd", buffer) == 4
    assert buffer == b"efgh"
    assert cache.get(b"abcd") == b"efgh"


@each_policy
def test_cache_two_values_succeeds(open_cache: Open, policy: Policy) -> None:
    cache = open_cache(policy)
    cache.set(b"ab", b"cd")
    cache.set(b"ef", b"gh")
    assert (cache.get(b"ab"), cache.get(b"ef")) == (b"cd", b"gh")


@each_policy
def test_cache_two_values_malloc_succeeds(open_cache: Open, policy: Policy) -> None:
    cache = open_cache(policy)
    cache.set(b"ab", b"cd")
    cache.set(b"ef", b"gh")
    assert cache.get_with(b"ab", bytearray) == (2, b"cd")
    assert cache.get_with(b"ef", bytearray) == (2, b"gh")


@each_policy
def test_get_only_writes_inside_bounds(open_cache: Open, policy: Policy) -> None:
    cache = open_cache(policy)
    cache.set(b"abcd", b"efgh")
    buffer = bytearray(b"\xee" * 6)
    assert cache.get_into(b"abcd", memoryview(buffer)[1:5]) == 4
    assert buffer == b"\xeeefgh\xee"


@each_policy
def test_get_only_writes_if_buffer_is_large_enough(open_cache: Open, policy: Policy) -> None:
    cache = open_cache(policy)
    cache.set(b"abcd", b"efgh")
    buffer = bytearray(b"\xee" * 3)
    assert cache.get_into(b"abcd", buffer) == 4
    assert buffer == b"\xee" * 3


@each_policy
def test_get_with_failed_allocator(open_cache: Open, policy: Policy) -> None:
    cache = open_cache(policy)
    cache.set(b"abcd", b"efgh")
    assert cache.get_with(b"abcd", lambda size: None) == (4, None)


@each_policy
def test_get_doesnt_access_null_buffer(open_cache: Open, policy: Policy) -> None:
    cache = open_cache(policy)
    cache.set(b"abcd", b"efgh")
    assert cache.get_into(b"abcd", None) == cache.size(b"abcd") == 4


@each_policy
def test_multiple_sets_cache_latest_value(open_cache: Open, policy: Policy) -> None:
    cache = open_cache(policy)
    cache.set(b"abcd", b"efgh")
    cache.set(b"abcd", b"ijkl")
    assert cache.get(b"abcd") == b"ijkl"
    assert (len(cache), cache.total_bytes) == (1, 8)


@each_policy
def test_second_set_keeps_first_value_if_too_large(open_cache: Open, policy: Policy) -> None:
    cache = open_cache(policy)
    cache.set(b"abcd", b"efgh")
    assert not cache.set(b"abcd", bytes(SMALL.max_value_bytes + 1))
    assert cache.get(b"abcd") == b"efgh"


@each_policy
@pytest.mark.parametrize(("key", "value"), [(7, 1), (1, 9), (6, 8), (0, 1), (1, 0)], ids=["key", "value", "pair", "no key", "no value"])
def test_doesnt_cache_if_too_big_or_empty(open_cache: Open, policy: Policy, key: int, value: int) -> None:
    cache = open_cache(policy)
    assert not cache.set(bytes(key), bytes(value))
    assert cache.get(bytes(key)) is None
    assert len(cache) == 0


@each_policy
@pytest.mark.parametrize(("key", "value"), [(6, 4), (4, 8), (6, 7), (1, 1)], ids=["key", "value", "pair", "least"])
def test_cache_max_and_min_sizes_succeed(open_cache: Open, policy: Policy, key: int, value: int) -> None:
    cache = open_cache(policy)
    assert cache.set(b"k" * key, b"v" * value)
    assert cache.get(b"k" * key) == b"v" * value


@each_policy
def test_cache_size_doesnt_exceed_total_limit(open_cache: Open, policy: Policy) -> None:
    cache = open_cache(policy)
    for number in range(256):
        cache.set(bytes([number]), b"x")
        assert cache.total_bytes <= 13
    assert sum(2 for number in range(256) if cache.get(bytes([number]))) == cache.total_bytes


@each_policy
def test_exceeding_total_limit_halves_cache_size_or_just_fits(open_cache: Open, policy: Policy) -> None:
    """ExceedingTotalLimitHalvesCacheSize and ExceedingTotalLimitJustFitsSmallEntry."""
    cache = open_cache(policy)
    for number in range(6):
        cache.set(bytes([number]), b"x")  # 12 of 13 bytes
    cache.set(b"f", b"x")
    counted = sum(cache.get(bytes([number])) is not None for number in (*range(6), ord("f")))
    assert counted == (6 if policy.capacity is Capacity.FIT else 13 // 2 // 2 + 1)


@each_policy
def test_exceeding_total_limit_fits_big_entry(open_cache: Open, policy: Policy) -> None:
    cache = open_cache(policy)
    for number in range(6):
        cache.set(bytes([number]), b"x")
    # Halved it is 6 bytes, and 10 more do not fit into 13: HALVE gives up, as BlobCache does.
    assert cache.set(b"big", b"7 bytes") is (policy.capacity is not Capacity.HALVE)
    assert (cache.get(b"big") is not None) is (policy.capacity is not Capacity.HALVE)
    assert cache.total_bytes <= 13


@each_policy
def test_failed_get_with_allocator(open_cache: Open, policy: Policy) -> None:
    cache = open_cache(policy)
    assert cache.get_with(b"abcd", lambda size: pytest.fail("the allocator must not be called")) == (0, None)
    assert cache.get_into(b"abcd", bytearray(4)) == 0


@pytest.mark.parametrize("capacity", Capacity)
def test_exceeding_total_limit_removes_lru_entries(open_cache: Open, capacity: Capacity) -> None:
    cache = open_cache(Policy(Victim.LRU, capacity))
    for number in range(6):
        cache.set(bytes([number]), b"x")
    cache.get(b"\0")  # a use
    cache.get_into(b"\1", bytearray(1))  # a use
    cache.get_into(b"\2", None)  # none: nothing was copied
    cache.get_into(b"\3", bytearray(0))  # none
    cache.get_with(b"\4", lambda size: None)  # none
    cache.size(b"\5")
    cache.set(b"f", b"x")
    left = [number for number in range(6) if cache.size(bytes([number]))]
    assert left == ([0, 1, 3, 4, 5] if capacity is Capacity.FIT else [0, 1, 5])


def test_an_update_does_not_evict_more_than_it_needs(open_cache: Open) -> None:
    cache = open_cache(Policy(Victim.LRU, Capacity.FIT))
    cache.set(b"a", b"1234")
    cache.set(b"b", b"1234")
    assert cache.set(b"a", b"12345678")  # 9 for a, 13 - 9 = 4 are left, b has 5
    assert (cache.get(b"a"), cache.get(b"b")) == (b"12345678", None)
    assert cache.set(b"a", b"123")
    assert cache.total_bytes == 4


# --- nnCache: the life of the file -----------------------------------------------------------------------------------


@each_policy
def test_uninitialized_cache_always_misses(tmp_path: Path, policy: Policy) -> None:
    (tmp_path / "file").write_bytes(b"")
    cache = BlobCache(tmp_path / "file" / "blobs", limits=NN, policy=policy, state_directory=tmp_path / "state")
    assert not cache.set(b"abcd", b"efgh")
    assert cache.get(b"abcd") is None
    assert (cache.size(b"abcd"), len(cache), cache.total_bytes) == (0, 0, 0)


@each_policy
def test_initialized_cache_always_hits(open_cache: Open, policy: Policy) -> None:
    cache = open_cache(policy, NN)
    cache.set(b"abcd", b"efgh")
    assert cache.get(b"abcd") == b"efgh"


@each_policy
def test_terminated_cache_always_misses(open_cache: Open, policy: Policy) -> None:
    cache = open_cache(policy, NN)
    cache.set(b"abcd", b"efgh")
    cache.close()
    assert cache.get(b"abcd") is None
    assert not cache.set(b"abcd", b"efgh")


@each_policy
def test_nn_exceeding_total_limit_fits_big_entry(open_cache: Open, policy: Policy) -> None:
    cache = open_cache(policy, NN)
    for number in range(40):
        cache.set(b"%d" % number, bytes(60 << 10))
    if policy.capacity is not Capacity.HALVE:
        assert cache.set(b"k" * (12 << 10), bytes(64 << 10))
        assert cache.size(b"k" * (12 << 10)) == 64 << 10
    assert cache.total_bytes <= NN.max_total_bytes


@each_policy
def test_reinitialized_cache_contains_values(open_cache: Open, policy: Policy) -> None:
    first = open_cache(policy, NN)
    first.set(b"abcd", b"efgh")
    first.close()
    assert open_cache(policy, NN).get(b"abcd") == b"efgh"


@each_policy
def test_reinitialized_cache_contains_values_size_constrained(open_cache: Open, policy: Policy) -> None:
    first = open_cache(policy, NN)
    for key, value in ((b"abcd", b"efgh"), (b"small", b"x"), (b"long key", b"x"), (b"b", b"long value")):
        first.set(key, value)
    first.close()
    again = open_cache(policy, Limits(12, 7, 8))
    assert again.get(b"long key") is None
    assert again.get(b"b") is None
    assert again.total_bytes <= 12


def test_the_order_of_use_survives_a_restart(open_cache: Open) -> None:
    first = open_cache(Policy(Victim.LRU, Capacity.FIT))
    for number in range(6):
        first.set(bytes([number]), b"x")
    first.get(b"\0")
    first.close()
    again = open_cache(Policy(Victim.LRU, Capacity.FIT))
    again.set(b"f", b"x")
    assert [number for number in range(6) if again.size(bytes([number]))] == [0, 2, 3, 4, 5]


def test_unflatten_catches_another_version(open_cache: Open) -> None:
    first = open_cache(version="1")
    first.set(b"abcd", b"efgh")
    first.close()
    assert open_cache(version="2").get(b"abcd") is None
    assert open_cache(version="1").get(b"abcd") is None


def test_unflatten_catches_bad_magic(open_cache: Open, tmp_path: Path) -> None:
    open_cache().close()
    for noise in (b"nn$$", b"nn$$xxx", b"_Bb$", random.Random(0).randbytes(5000)):
        (tmp_path / "blobs.sqlite").write_bytes(noise)
        cache = open_cache()
        assert cache.get(b"abcd") is None
        assert cache.set(b"abcd", b"efgh")
        assert cache.get(b"abcd") == b"efgh"
        cache.close()


@pytest.mark.parametrize("step", [97, pytest.param(1, marks=pytest.mark.soak)])
def test_a_file_cut_at_every_length_is_never_a_crash_nor_a_wrong_value(
    tmp_path: Path, quick_disk: Path, open_cache: Open, step: int
) -> None:
    """AOSP: files of 4 to 7 bytes kill the process. The header's lengths one by one always, all the others in the soak."""
    first = open_cache(limits=NN)
    entries = {b"key %d" % n: b"value %d" % n * 30 for n in range(50)}
    for key, value in entries.items():
        first.set(key, value)
    first.close()
    whole = (tmp_path / "blobs.sqlite").read_bytes()
    cut = quick_disk / "cut.sqlite"
    for length in [*range(101), *range(101, len(whole), step)]:
        cut.write_bytes(whole[:length])
        cache = BlobCache(cut, limits=NN, version="1", state_directory=tmp_path / "state")
        for key in (b"key 0", b"key 49"):
            assert cache.get(key) in (None, entries[key])
        cache.close()
        for suffix in ("-wal", "-shm"):
            Path(f"{cut}{suffix}").unlink(missing_ok=True)


def test_a_value_changed_by_somebody_else_is_absent(tmp_path: Path, open_cache: Open) -> None:
    cache = open_cache()
    cache.set(b"a", b"good")
    cache.set(b"b", b"fine")
    meddler = sqlite3.connect(tmp_path / "blobs.sqlite")
    meddler.execute("UPDATE blobs SET value = x'00000000' WHERE key = x'61'")
    meddler.execute("UPDATE blobs SET (value, digest) = (SELECT value, digest FROM blobs WHERE key = x'61') WHERE key = x'62'")
    meddler.commit()
    meddler.close()
    assert (cache.get(b"a"), cache.get(b"b")) == (None, None)
    assert len(cache) == 0


def test_another_installation_cannot_forge_a_value(tmp_path: Path, open_cache: Open) -> None:
    stranger = BlobCache(tmp_path / "blobs.sqlite", limits=SMALL, version="1", state_directory=tmp_path / "elsewhere")
    stranger.set(b"a", b"evil")
    stranger.close()
    assert open_cache().get(b"a") is None


CHILD = """
import sys, threading
from aionn.caching.blob_cache import BlobCache, Limits
cache = BlobCache(sys.argv[1], limits=Limits(1 << 20, 100, 100), version="1", state_directory=sys.argv[2])
enough, kept = threading.Event(), []
threading.Thread(target=lambda: (sys.stdin.read(), enough.set())).start()
while not enough.is_set():
    kept.extend([cache.set(f"{sys.argv[3]}{n}".encode(), b"value") for n in range(10)])
    if len(kept) == 10:
        print("saving", flush=True)
print(all(kept), flush=True)
"""


def test_two_processes_lose_none_of_twenty_keys_and_no_reader_misses_one_during_their_saves(tmp_path: Path, open_cache: Open) -> None:
    """AOSP: the last writer of the whole file wins, so 10 of 20 are gone. A reader finds the file absent or short in half of its looks."""
    command = [sys.executable, "-c", CHILD, str(tmp_path / "blobs.sqlite"), str(tmp_path / "state")]
    children = [App([*command, name], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for name in "AB"]
    for child in children:
        assert child.stdout is not None
        assert child.stdout.readline() == "saving\n"
    for _ in range(20):  # each opens the file anew
        cache = open_cache(limits=Limits(1 << 20, 100, 100))
        assert [cache.get(f"{name}{n}".encode()) for name in "AB" for n in range(10)] == [b"value"] * 20
        cache.close()
    assert [child.poll() for child in children] == [None, None], "both save all the while"
    assert [child.communicate()[0] for child in children] == ["True\n", "True\n"]


def test_many_threads_share_one_cache(open_cache: Open) -> None:
    cache, wrong = open_cache(limits=NN), []

    def work(name: int) -> None:
        for number in range(50):
            key = b"%d/%d" % (name, number)
            cache.set(key, key * 3)
            if cache.get(key) != key * 3:
                wrong.append(key)

    threads = [threading.Thread(target=work, args=(name,)) for name in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert len(cache) == 200


@pytest.mark.parametrize("policy", POLICIES, ids=str)
@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=st.lists(st.tuples(st.sampled_from("sgd"), st.binary(max_size=7), st.binary(max_size=9)), max_size=30))
def test_the_cache_is_a_map_that_may_forget(open_cache: Open, policy: Policy, steps: list[tuple[str, bytes, bytes]]) -> None:
    cache = open_cache(policy)
    cache.clear()
    model: dict[bytes, bytes] = {}
    for act, key, value in steps:
        if act == "s":
            if cache.set(key, value):
                model[key] = value
        elif act == "d":
            cache.delete(key)
            model.pop(key, None)
        else:
            assert cache.get(key) in (None, model.get(key))
        assert cache.total_bytes <= SMALL.max_total_bytes
        assert cache.total_bytes == sum(len(k) + cache.size(k) for k in model if cache.size(k))
    cache.close()


def test_limits_that_can_never_hold_anything_are_refused() -> None:
    with pytest.raises(CallerError):
        Limits(0, 1, 1)


# --- the default path ------------------------------------------------------------------------------------------------


def test_devices_and_versions_do_not_share_the_default_blob_cache(tmp_path: Path) -> None:
    def of(device: str, version: str) -> BlobCache:
        return BlobCache(device=device, version=version, state_directory=tmp_path / "state")

    names = [("one", "1"), ("two", "1"), ("one", "2"), ("o/e", "1"), ("o_e", "1")]
    for turn in range(2):  # in the second one each has been opened after all the others
        for name in names:
            with of(*name) as cache:
                assert cache.get(b"who") == (None if turn == 0 else repr(name).encode())
                assert cache.set(b"who", repr(name).encode())


def test_a_blob_cache_needs_a_path_or_a_device(tmp_path: Path) -> None:
    with pytest.raises(CallerError, match="give device="):
        BlobCache(state_directory=tmp_path / "state")
