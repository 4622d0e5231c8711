"""The frames of one burst: a pool per frame size, and one slot number per region.

A frame has the size that its layout needs. A model with open dimensions may see ever new shapes, so two rules bound its pools:

    Two sizes of which the larger exceeds the smaller by an eighth at most share one pool, with frames of the larger size.
    Before a pool grows, others are released, the least recently used first, until all memory together is that of `in_flight` of its
    frames, or 1 MiB. A pool stays if one of its frames is pinned, or if it was used since the growth before.

A pool that has grown beyond `in_flight` frames, because the app holds outputs, is trimmed within `TRIM_S` seconds of their end. The
driver unmaps memory that is released (`on_gone`). Arrays that the app still holds keep their bytes.

When requests in flight hold all frames that can be had, `Frames.lease` waits for one. Each frame that comes back goes to the
caller who has waited longest.

Invariants
    A pool is a key of `waiting`  <=>  a caller waits for a frame of it  <=>  the pool is `crowded`.
    A pool that is released has no pinned frame, so no request in flight names its slots, and no caller waits for it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Container, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from aionn.errors import CallerError, DeadlineError, MemoryAllocationError, again
from aionn.fmq.thread_waits import Loop, ThreadWaits, Timer, Waited
from aionn.hal.types import IMemory
from aionn.loopless import running_loop, seconds_until
from aionn.memory.pool import FramePool, FramesInFlightError, MemoryFrame
from aionn.memory.region import Region
from aionn.runtime.executing.arguments import FrameLayout, as_array

if TYPE_CHECKING:
    import asyncio

TRIM_S = 2.0
"""A pool is trimmed so many seconds after it has grown, and again as long as the app holds its frames."""

_KEPT_BYTES = 2**20
"""Pools of small frames with less memory than this together are kept: a model of short texts sees hundreds of sizes."""


class Frames:
    """Frame pools and their regions by slot. Satisfies `IBurstCallback`.

    Attributes:
        waiting: the callers that wait for a frame, by pool, those who came first first.
        loop: what the callers wait by.
        regions: by slot.
        on_gone: called with the slot of memory that the driver need not keep mapped.
    """

    def __init__(self, in_flight: int, waits: ThreadWaits | None = None) -> None:
        """
        Args:
            in_flight: so many frames of each size may be pinned while requests are in flight. The app may hold more.
            waits: what its callers wait by, if that is not the running loop.
        """
        self.loop: Loop = waits or running_loop()
        self._in_flight = in_flight
        self.waiting: dict[FramePool, deque[asyncio.Future[MemoryFrame] | Waited[MemoryFrame]]] = {}
        self._pools: dict[int, FramePool] = {}  # by the size of their frames, the least recently used first
        self._used: set[FramePool] = set()  # since the last growth
        self.regions: dict[int, Region] = {}
        self._next_slot = 0
        self._foreign: dict[Region, int] = {}
        self._undo: dict[int, Callable[[], None]] = {}
        self._last: tuple[FrameLayout, FramePool] | None = None
        self.on_gone: Callable[[int], None] | None = None
        self._trimming: asyncio.TimerHandle | Timer | None = None
        self._closed = False

    def pool(self, layout: FrameLayout, between_bytes: int = 0) -> FramePool:
        """Return the pool whose frames fit `layout`, and what lies between the steps of a plan."""
        pools = self._pools
        size = _size_among(pools, layout.frame_bytes + between_bytes)
        pool = pools.pop(size, None)
        if pool is None:
            if self._closed:
                raise CallerError("the burst was closed; open another one")
            for smaller in [other for other in pools if other < size <= other + other // 8]:
                self._release(smaller)
            pool = FramePool(size, self._in_flight, self._allocate)
        pools[size] = pool
        self._last = layout, pool
        self._used.add(pool)
        return pool

    def _allocate(self, growing: FramePool, size_bytes: int) -> tuple[Region, int]:
        """Return new memory for a pool, and its slot. Other pools make room for it."""
        room = max(self._in_flight * growing.frame_bytes, _KEPT_BYTES) - growing.size_bytes - size_bytes
        others = [pool for pool in self._pools.values() if pool is not growing]
        for pool in others:
            if pool not in self._used and sum(other.size_bytes for other in others) > room:
                self._release(pool.frame_bytes)
        self._used = {growing}
        try:
            region = Region.allocate(size_bytes)
        except MemoryAllocationError:
            released = [pool for pool in others if pool.size_bytes and self._release(pool.frame_bytes)]
            if not released:
                raise
            region = Region.allocate(size_bytes)
        if growing.frames >= self._in_flight and self._trimming is None:
            self._trimming = self.loop.call_later(TRIM_S, self._trim)
        return region, self._add(region)

    def _trim(self) -> None:
        """Release memory that was needed for outputs which the app has dropped. Look again later if it holds some still."""
        self._trimming = None
        for pool in self._pools.values():
            for slot in pool.trim():
                self._remove(slot)
        if any(pool.frames > self._in_flight and len(pool.regions) > 1 for pool in self._pools.values()):
            self._trimming = self.loop.call_later(TRIM_S, self._trim)

    def _remove(self, slot: int) -> None:
        """Forget a region. The driver need not keep it mapped."""
        self.regions.pop(slot, None)
        if self.on_gone is not None:
            self.on_gone(slot)

    def _release(self, size: int) -> bool:
        """Release the pool of that size if no frame of it is in use. Returns whether it did so."""
        pool = self._pools[size]
        slots = list(pool.regions)
        if not pool.release():
            return False
        del self._pools[size]
        self._used.discard(pool)
        for slot in slots:
            self._remove(slot)
        return True

    def outgrown(self, pool: FramePool) -> None:
        """Note that the layout of a pool's frames is replaced by a smaller one. The pool may go at the next growth."""
        self._used.discard(pool)

    async def lease(self, layout: FrameLayout, between_bytes: int = 0, deadline_ns: int | None = None) -> MemoryFrame:
        """Return a frame as `pool` says, leased. While requests in flight hold all, wait for one: first come, first served.

        Raises:
            CallerError: the burst was closed.
            DeadlineError: none came back by then.
            MemoryAllocationError: more shared memory cannot be had.
        """
        pool = self.pool(layout, between_bytes)
        if not pool.crowded:
            try:
                return pool.lease()
            except FramesInFlightError:
                pass
        return await self.wait(pool, deadline_ns)

    async def wait(self, pool: FramePool, deadline_ns: int | None = None) -> MemoryFrame:
        """Wait for a frame that requests in flight will bring back; see `lease`."""
        loop = self.loop
        waiter: asyncio.Future[MemoryFrame] | Waited[MemoryFrame] = loop.create_future()
        timer = None
        if (left_s := seconds_until(deadline_ns)) is not None:
            timer = loop.call_later(left_s, _fail_late, waiter)
        self.waiting.setdefault(pool, deque()).append(waiter)
        pool.tell_returns(partial(self._serve, pool))
        try:
            return await waiter
        except BaseException:
            if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
                pool.unpin(waiter.result())  # it came in the same turn of the loop
            raise
        finally:
            if timer is not None:
                timer.cancel()
            self._leave(pool, waiter)

    def _serve(self, pool: FramePool) -> None:
        """Serve those who wait: a frame has come back, or the pool is closed."""
        for waiter in list(self.waiting.get(pool, ())):
            if waiter.done():
                continue
            try:
                waiter.set_result(pool.lease())
            except FramesInFlightError:
                return
            except (CallerError, MemoryAllocationError) as error:
                waiter.set_exception(again(error))
            self._leave(pool, waiter)

    def _leave(self, pool: FramePool, waiter: asyncio.Future[MemoryFrame] | Waited[MemoryFrame]) -> None:
        waiting = self.waiting.get(pool)
        if waiting is not None and waiter in waiting:
            waiting.remove(waiter)
            if not waiting:
                del self.waiting[pool]
                pool.tell_returns(None)

    def _add(self, region: Region) -> int:
        slot = self._next_slot
        self._next_slot += 1
        self.regions[slot] = region
        return slot

    def slot_of(self, region: Region) -> int:
        """Return the slot of an app's memory. A slot is never given to another memory, so a stale mapping cannot be reached."""
        slot = self._foreign.get(region)
        if slot is None:
            slot = self._foreign[region] = self._add(region)
            self._undo[slot] = region.when_closed(partial(self._gone, region, slot))
        return slot

    def _gone(self, region: Region, slot: int) -> None:
        """Forget an app's memory that has been closed, in whatever thread. The driver need not keep it mapped."""
        self._foreign.pop(region, None)
        self._undo.pop(slot, None)
        self._remove(slot)

    @property
    def brought(self) -> dict[int, Region]:
        """The memory by slot of the frame that the next request mostly takes, if one is free."""
        frame = None if self._last is None else self._last[1].used_last
        return {} if frame is None else {frame.slot: frame.region}

    async def get_memories(self, slots: Sequence[int]) -> Sequence[IMemory]:
        try:
            return [self.regions[slot] for slot in slots]
        except KeyError:
            raise CallerError(f"burst memories {list(slots)}: one of these slots is not in use") from None

    def last_inputs(self) -> dict[str, NDArray[Any]] | None:
        """Return copies of the inputs that the last execution has left in its frame, or None if its frame is used again."""
        if self._last is None:
            return None
        layout, pool = self._last
        frame = pool.used_last  # a pool that was released or closed has no frames
        places = None if frame is None else frame.arrays.get(layout)
        return None if places is None else {name: place.copy() for name, place in places.items()}

    def count(self) -> dict[str, int]:
        """Return frames, free, pinned and bytes over all pools."""
        pools = list(self._pools.values())  # at once, because the frames may be another thread's
        return {
            "frames": sum(pool.frames for pool in pools),
            "free_frames": sum(pool.free_frames for pool in pools),
            "pinned_frames": sum(pool.pinned_frames for pool in pools),
            "shared_bytes": sum(pool.size_bytes for pool in pools),
        }

    def renew(self) -> None:
        """Use new frames from now on. A driver may still write into the old ones, and its answers do not reach this process any more."""
        for pool in self._pools.values():
            for slot in pool.regions:
                self.regions.pop(slot, None)
            pool.close()
        self._pools.clear()
        self._used.clear()

    def close(self) -> None:
        self._closed = True
        if self._trimming is not None:
            self._trimming.cancel()
        for undo in list(self._undo.values()):
            undo()
        self._undo.clear()
        self._foreign.clear()
        for pool in self._pools.values():
            pool.close()
        self._pools.clear()
        self._used.clear()
        self.regions.clear()


def _size_among(sizes: Collection[int], own: int) -> int:
    """Return the size of the frames for what needs so many bytes: that size, or a slightly larger one that exists."""
    return own if own in sizes else min((size for size in sizes if own < size <= own + own // 8), default=own)


def expect(frames: Frames, layout: FrameLayout, between_bytes: int) -> None:
    """Have a frame of that layout ready, so that its memory goes to the driver together with the burst (`Frames.brought`).

    It is the first frame of most bursts. Another pool that grows may release it. Without memory the first lease says so.
    """
    if frames.count()["frames"] == 0:
        pool = frames.pool(layout, between_bytes)
        with suppress(MemoryAllocationError):
            pool.unpin(pool.lease())
        frames.outgrown(pool)


def _fail_late(waiter: asyncio.Future[MemoryFrame] | Waited[MemoryFrame]) -> None:
    if not waiter.done():
        waiter.set_exception(DeadlineError("no frame was free by the deadline; too many requests are in flight, try again later"))


LARGE_BYTES = 2**18
"""Inputs of fewer bytes are copied faster than a driver wakes up."""

LAST_BYTES = 2**21
"""So much is left to copy when the driver is woken: 35 to 150 us, in which it wakes up, and for which it may look out."""


def fill_large(frame: MemoryFrame, layout: FrameLayout, inputs: Mapping[str, NDArray[Any]], soon: Callable[[], None]) -> None:
    """Copy arrays that fit into a frame; `soon` is called once, when little of it is left to do."""
    left, woken = layout.input_bytes, False
    for name, place in layout.inputs_in(frame).items():
        array = inputs[name]
        if woken or left - place.nbytes >= LAST_BYTES:
            place[...] = array
        else:
            woken = True
            first = max(0, left - LAST_BYTES) // place.itemsize if array.flags.c_contiguous else 0
            if first:
                place.reshape(-1)[:first] = array.reshape(-1)[:first]
            soon()
            if first:
                place.reshape(-1)[first:] = array.reshape(-1)[first:]
            else:
                place[...] = array
        left -= place.nbytes


def fill(frame: MemoryFrame, layout: FrameLayout, inputs: Mapping[str, Any], placed: Container[int] = ()) -> int:
    """Copy an app's arrays into a frame, each once. Returns the bytes copied. `placed`: indices of inputs that lie elsewhere."""
    copied = 0
    for index, (name, place) in enumerate(layout.inputs_in(frame).items()):
        if placed and index in placed:
            continue
        array = inputs[name]
        np.copyto(place, array if type(array) is np.ndarray else as_array(name, array), casting="no")
        copied += place.nbytes
    return copied
