"""Frames: exact memory, found at a constant cost while the app holds others, and given back."""

from __future__ import annotations

import mmap
import random
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from aionn.errors import CallerError, MemoryAllocationError
from aionn.memory import pool as pool_module
from aionn.memory.pool import FramePool, FramesInFlightError, MemoryFrame
from aionn.memory.region import Region

PAGE = mmap.PAGESIZE
DEPTH = 8
IN_FLIGHT = DEPTH + 1


class Memory:
    """Allocates for pools, up to `room` bytes."""

    def __init__(self) -> None:
        self.room = 2**40
        self.pools: list[FramePool] = []
        self._slots = 0

    def pool(self, frame_bytes: int, in_flight: int = IN_FLIGHT) -> FramePool:
        self.pools.append(FramePool(frame_bytes, in_flight, self._allocate))
        return self.pools[-1]

    def _allocate(self, pool: FramePool, size_bytes: int) -> tuple[Region, int]:
        assert size_bytes % PAGE == 0
        if size_bytes > self.room:
            raise MemoryAllocationError("there is no memory", needed_bytes=size_bytes, available_bytes=self.room)
        self.room -= size_bytes
        self._slots += 1
        return Region.allocate(size_bytes), self._slots


@pytest.fixture
def memory() -> Iterator[Memory]:
    made = Memory()
    yield made
    for pool in made.pools:
        pool.close()


def output(frame: MemoryFrame) -> NDArray[Any]:
    return frame.cut("outputs", [("y", np.dtype(np.uint8), (8,), 0)])["y"]


def computed(pool: FramePool) -> NDArray[Any]:
    """What an app gets: the output in a frame that is not pinned any more."""
    frame = pool.lease()
    found = output(frame)
    frame.settled(None)
    return found


@pytest.mark.parametrize("frame_bytes", [64, 960, 3000, PAGE, PAGE + 64, 3 * PAGE, 100_032])
def test_the_memory_of_a_pool_is_that_of_the_frames_in_use_and_whole_pages(memory: Memory, frame_bytes: int) -> None:
    pool = memory.pool(frame_bytes)
    assert pool.size_bytes == 0
    leased = [pool.lease()]
    assert pool.size_bytes == -(-frame_bytes // PAGE) * PAGE
    leased += [pool.lease() for _ in range(DEPTH)]
    rounding = PAGE * len(pool.regions)
    assert IN_FLIGHT * frame_bytes <= pool.size_bytes < IN_FLIGHT * frame_bytes + rounding
    for frame in leased:
        frame.settled(None)
    held = []
    for count in range(1, 200):
        held.append(computed(pool))
        assert pool.size_bytes < (IN_FLIGHT + count) * frame_bytes + PAGE * len(pool.regions)
    assert len({array.ctypes.data for array in held}) == len(held)  # each is a frame of its own


def test_many_small_frames_share_one_region(memory: Memory) -> None:
    pool = memory.pool(64)
    held = [computed(pool) for _ in range(PAGE // 64)]
    assert (len(pool.regions), pool.size_bytes) == (1, PAGE)
    held += [computed(pool) for _ in range(936)]
    assert len(held) == 1000
    assert len(pool.regions) == 16


def test_large_frames_that_are_held_share_regions_once_there_are_many(memory: Memory) -> None:
    pool = memory.pool(PAGE)
    held = [computed(pool) for _ in range(4)]
    assert len(pool.regions) == 4  # one at a time first
    held += [computed(pool) for _ in range(200)]
    assert len(pool.regions) < 50


def test_requests_beyond_those_in_flight_wait_while_the_app_may_hold_more(memory: Memory) -> None:
    pool = memory.pool(PAGE)
    held = [computed(pool) for _ in range(30)]
    leased = [pool.lease() for _ in range(IN_FLIGHT)]
    with pytest.raises(FramesInFlightError):
        pool.lease()
    assert len(held) == 30
    del held[0]
    pool.lease()  # it is there, so it may be used
    leased[0].settled(None)
    assert pool.lease() is leased[0]


def test_frames_that_the_app_leases_are_limited_by_memory_alone(memory: Memory) -> None:
    pool = memory.pool(PAGE)
    leased = []
    for _ in range(100):
        leased.append(pool.lease())
        leased[-1].lent = True
    assert pool.pinned_frames == 100
    assert pool.size_bytes == 100 * PAGE
    leased[0].pins += 1  # its request is in flight: a caller waits rather than take more memory
    with pytest.raises(FramesInFlightError):
        pool.lease()


def test_an_app_that_holds_all_memory_gets_one_sentence_that_says_so(memory: Memory) -> None:
    pool = memory.pool(PAGE)
    memory.room = 20 * PAGE
    held = [computed(pool) for _ in range(20)]
    with pytest.raises(MemoryAllocationError, match=r"^all 20 frames of this burst .*\(there is no memory\)\. Drop outputs") as caught:
        pool.lease()
    assert (caught.value.needed_bytes, caught.value.available_bytes) == (PAGE, 0)
    memory.room = 0
    del held[7]
    frame = pool.lease()
    with pytest.raises(FramesInFlightError):  # this one will come back
        pool.lease()
    frame.settled(None)
    assert pool.lease() is frame


def test_a_first_frame_that_cannot_be_had_is_the_allocations_own_error(memory: Memory) -> None:
    memory.room = 0
    with pytest.raises(MemoryAllocationError, match=r"^there is no memory$"):
        memory.pool(PAGE).lease()


def last_until_the_next(pool: FramePool, held: deque[NDArray[Any]]) -> None:
    held.append(computed(pool))
    if len(held) > 1:
        held.popleft()


def ring(size: int) -> Callable[[FramePool, deque[NDArray[Any]]], None]:
    def step(pool: FramePool, held: deque[NDArray[Any]]) -> None:
        held.append(computed(pool))
        if len(held) > size:
            held.popleft()

    return step


def any_of(size: int) -> Callable[[FramePool, deque[NDArray[Any]]], None]:
    chance = random.Random(5)

    def step(pool: FramePool, held: deque[NDArray[Any]]) -> None:
        found = computed(pool)
        if len(held) < size:
            held.append(found)
        else:
            held[chance.randrange(size)] = found

    return step


@pytest.mark.parametrize(
    ("kept", "step", "most_looks"),
    [
        (0, last_until_the_next, 3),
        (300, last_until_the_next, 4),
        (0, ring(17), 4),
        (0, ring(200), 4),
        (300, ring(17), 50),
        (0, any_of(17), 20),
        (0, any_of(200), 60),
    ],
)
def test_a_lease_looks_at_few_frames_however_many_are_held(
    memory: Memory,
    monkeypatch: pytest.MonkeyPatch,
    kept: int,
    step: Callable[[FramePool, deque[NDArray[Any]]], None],
    most_looks: int,
) -> None:
    looks = 0
    held_by = MemoryFrame.held

    def counted(frame: MemoryFrame) -> bool:
        nonlocal looks
        looks += 1
        return held_by(frame)

    pool = memory.pool(64)
    forever = [computed(pool) for _ in range(kept)]
    held: deque[NDArray[Any]] = deque()
    for _ in range(1000):
        step(pool, held)
    monkeypatch.setattr(MemoryFrame, "held", counted)
    for _ in range(2000):
        step(pool, held)
    assert looks / 2000 <= most_looks
    assert pool.size_bytes <= -(-(IN_FLIGHT + kept + len(held)) * 64 // PAGE) * PAGE
    assert len(forever) == kept


def test_an_app_that_keeps_its_last_result_uses_two_frames(memory: Memory) -> None:
    pool = memory.pool(64)
    held: deque[NDArray[Any]] = deque()
    for _ in range(50):
        last_until_the_next(pool, held)
    assert pool.frames == 2  # a driver knows these two, and each other one is new to it


@pytest.mark.parametrize("seed", range(20))
def test_no_frame_is_handed_out_while_it_is_held_or_pinned(memory: Memory, seed: int) -> None:
    """Random uses, beside a model of what the app holds; views of arrays count as well."""
    chance = random.Random(seed)
    pool = memory.pool(chance.choice([64, 1000, PAGE]))
    held: list[NDArray[Any]] = []
    leased: list[MemoryFrame] = []
    most = 0
    array: Any = None
    frame: Any = None
    for number in range(600):
        match chance.randrange(5):
            case 0 | 1:
                try:
                    frame = pool.lease()
                except FramesInFlightError:
                    assert pool.pinned_frames >= IN_FLIGHT
                    continue
                assert frame not in leased
                place: Any = output(frame)
                assert all(not np.shares_memory(place, other) for other in held)
                place[:] = number % 256
                leased.append(frame)
            case 2 if leased:
                frame = leased.pop(chance.randrange(len(leased)))
                array = output(frame)
                held.append(array[2:5] if chance.random() < 0.5 else array)
                frame.settled(None)
            case 3 if held:
                del held[chance.randrange(len(held))]
            case 4 if chance.random() < 0.1:
                pool.trim()
            case _ if leased:
                leased.pop().settled(None)
        array = place = frame = None  # or they would hold frames as an app does
        most = max(most, len(held) + max(IN_FLIGHT, len(leased)))
        assert pool.frames < most + PAGE // pool.frame_bytes * max(1, len(pool.regions))
        assert pool.frame_bytes < PAGE or pool.size_bytes <= most * pool.frame_bytes
        assert pool.free_frames + pool.pinned_frames == pool.frames
        assert pool.pinned_frames == len(leased)


def test_memory_of_outputs_that_were_dropped_is_trimmed(memory: Memory) -> None:
    pool = memory.pool(PAGE)
    held = [computed(pool) for _ in range(100)]
    assert pool.trim() == []
    kept, before = held[50], held[50].copy()
    del held
    gone = pool.trim()
    assert len(gone) == len(set(gone)) > 10
    assert not set(gone) & set(pool.regions)
    assert pool.size_bytes <= (2 * IN_FLIGHT + 1) * PAGE
    assert pool.free_frames == pool.frames >= IN_FLIGHT
    np.testing.assert_array_equal(kept, before)
    assert all(not np.shares_memory(kept, computed(pool)) for _ in range(50))
    assert pool.trim() == []


def test_a_pool_that_was_released_lends_no_frame_and_what_is_held_keeps_its_bytes(memory: Memory) -> None:
    pool = memory.pool(PAGE)
    held = computed(pool)
    held[:] = 7
    frame = pool.lease()
    assert not pool.release()
    frame.settled(None)
    assert pool.release()
    assert (pool.size_bytes, pool.frames) == (0, 0)
    with pytest.raises(FramesInFlightError):
        pool.lease()
    pool.close()
    with pytest.raises(CallerError, match="closed"):
        pool.lease()
    assert (held == 7).all()


def mapped() -> int:
    with open("/proc/self/maps") as maps:
        return sum("/memfd:" in line for line in maps)


@pytest.mark.parametrize("pins", [0, 1, 2])
def test_a_frame_that_a_traceback_holds_gives_its_memory_back_with_its_last_pin(memory: Memory, pins: int) -> None:
    before = mapped()
    pool = memory.pool(PAGE)
    frame = pool.lease()
    settled = frame.settled
    if pins == 0:
        settled(None)
    elif pins == 2:
        frame.pins += 1
    assert mapped() == before + 1
    pool.close()
    for left in range(pins, 0, -1):
        assert (frame.pins, mapped()) == (left, before + 1)  # a driver may still write to it
        frame.settled(None)
    assert (frame.pins, mapped()) == (0, before)


def test_a_frame_of_ever_new_shapes_remembers_few_arrays(memory: Memory) -> None:
    pool = memory.pool(PAGE)
    for number in range(200):
        frame = pool.lease()
        frame.cut(number, [("x", np.dtype(np.uint8), (number + 1,), 0)])
        frame.settled(None)
        assert len(frame.arrays) <= pool_module._REMEMBERED_GROUPS
    held = frame.cut("held", [("x", np.dtype(np.uint8), (1,), 0)])["x"]
    for number in range(200):  # while the app holds one, none is forgotten
        frame.cut(("more", number), [("x", np.dtype(np.uint8), (1,), 0)])
    assert frame.held()
    del held
    assert not frame.held()
