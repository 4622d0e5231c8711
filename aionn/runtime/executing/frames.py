"""The frames of one burst or one compilation: a pool per frame size, and one slot number per region.

Models with open dimensions get frames of the next power of two, so that a stream of ever new shapes needs few pools.

When requests in flight hold all frames that can be had, `Frames.lease` waits for one. Each frame that comes back goes to the
caller who has waited longest.

Invariant
    A pool is a key of `_waiting`  <=>  a caller waits for a frame of it  <=>  the pool is `crowded`.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Container, Mapping, Sequence
from functools import partial
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from aionn.errors import CallerError, DeadlineError, MemoryAllocationError, again
from aionn.hal.types import IMemory
from aionn.memory.pool import MAX_FRAMES, Frame, FramePool, FramesInFlightError
from aionn.memory.region import Region
from aionn.runtime.executing.arguments import FrameLayout
from aionn.tasks import seconds_until


class Frames:
    """Frame pools and their regions by slot. Satisfies `IBurstCallback`."""

    def __init__(self, *, exact: bool, max_frames: int = MAX_FRAMES) -> None:
        """`exact`: every frame has the same size, so none is rounded up, except where an output is larger than declared. `max_frames`: of
        each size."""
        self._exact = exact
        self._max_frames = max_frames
        self._waiting: dict[FramePool, deque[asyncio.Future[Frame]]] = {}
        self._pools: dict[int, FramePool] = {}
        self._regions: list[Region | None] = []
        self._foreign: dict[Region, int] = {}
        self._undo: dict[int, Callable[[], None]] = {}
        self._last: FrameLayout | None = None
        self.on_gone: Callable[[int], None] | None = None
        self._closed = False

    def pool(self, layout: FrameLayout) -> FramePool:
        """Return the pool whose frames fit `layout`."""
        self._last = layout
        needed = layout.frame_bytes
        size = needed if self._exact and layout.known else 1 << (needed - 1).bit_length()
        pool = self._pools.get(size)
        if pool is None:
            if self._closed:
                raise CallerError("the burst was closed")
            pool = self._pools[size] = FramePool(size, self._add, max_frames=self._max_frames)
        return pool

    async def lease(self, layout: FrameLayout, deadline_ns: int | None = None) -> Frame:
        """Return a frame that fits `layout`, leased. While requests in flight hold all, wait for one: first come, first served.

        Raises:
            CallerError: the app holds on to the arrays of too many results, or to too many frames.
            DeadlineError: none came back by then.
            MemoryAllocationError: more shared memory cannot be had.
        """
        pool = self.pool(layout)
        if not pool.crowded:
            try:
                return pool.lease()
            except FramesInFlightError:
                pass
        return await self.wait(pool, deadline_ns)

    async def wait(self, pool: FramePool, deadline_ns: int | None = None) -> Frame:
        """Wait for a frame that requests in flight will bring back; see `lease`."""
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[Frame] = loop.create_future()
        timer = None
        if (left_s := seconds_until(deadline_ns)) is not None:
            timer = loop.call_later(left_s, _fail_late, waiter)
        self._waiting.setdefault(pool, deque()).append(waiter)
        pool.tell_returns(partial(self._serve, pool))
        try:
            return await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
                pool.unpin(waiter.result())  # it came in the same turn of the loop
            raise
        finally:
            if timer is not None:
                timer.cancel()
            self._leave(pool, waiter)

    def _serve(self, pool: FramePool) -> None:
        """Serve those who wait: a frame has come back, or the pool is closed."""
        for waiter in list(self._waiting.get(pool, ())):
            if waiter.done():
                continue
            try:
                waiter.set_result(pool.lease())
            except FramesInFlightError:
                return
            except (CallerError, MemoryAllocationError) as error:
                waiter.set_exception(again(error))
            self._leave(pool, waiter)

    def _leave(self, pool: FramePool, waiter: asyncio.Future[Frame]) -> None:
        waiting = self._waiting.get(pool)
        if waiting is not None and waiter in waiting:
            waiting.remove(waiter)
            if not waiting:
                del self._waiting[pool]
                pool.tell_returns(None)

    def _add(self, region: Region) -> int:
        self._regions.append(region)
        return len(self._regions) - 1

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
        self._regions[slot] = None
        if self.on_gone is not None:
            self.on_gone(slot)

    async def get_memories(self, slots: Sequence[int]) -> Sequence[IMemory]:
        memories = [self._regions[slot] if 0 <= slot < len(self._regions) else None for slot in slots]
        found = [memory for memory in memories if memory is not None]
        if len(found) != len(slots):
            raise CallerError(f"burst memories {list(slots)}: one of these slots is not in use")
        return found

    def last_inputs(self) -> dict[str, NDArray[Any]] | None:
        """Return copies of the inputs that the last execution has left in its frame, or None if its frame is used again."""
        if self._last is None or self._closed:
            return None
        frame = self.pool(self._last).used_last
        places = None if frame is None else frame.arrays.get(self._last)
        return None if places is None else {name: place.copy() for name, place in places.items()}

    def count(self) -> dict[str, int]:
        """Return frames, free, pinned and bytes over all pools."""
        pools = self._pools.values()
        return {
            "frames": sum(pool.frames for pool in pools),
            "free_frames": sum(pool.free_frames for pool in pools),
            "pinned_frames": sum(pool.pinned_frames for pool in pools),
            "shared_bytes": sum(region.size_bytes for region in self._regions if region is not None and region not in self._foreign),
        }

    def close(self) -> None:
        self._closed = True
        for undo in list(self._undo.values()):
            undo()
        self._undo.clear()
        self._foreign.clear()
        for pool in self._pools.values():
            pool.close()
        self._pools.clear()


class Spare:
    """A frame that was waited for, kept while its owner works out anew where the other arguments lie.

    Those are held from their check until the request is sent, and nothing is awaited in between.
    """

    def __init__(self, frames: Frames, deadline_ns: int | None) -> None:
        self._frames = frames
        self._deadline_ns = deadline_ns
        self._kept: tuple[FramePool, Frame] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._give_back()

    async def wait(self, pool: FramePool) -> None:
        """Wait for a frame of that pool and keep it; see `Frames.lease`."""
        self._give_back()
        self._kept = (pool, await self._frames.wait(pool, self._deadline_ns))

    def lease(self, pool: FramePool) -> Frame:
        """Return the frame that is kept, if it is that pool's; else as `FramePool.lease`."""
        if self._kept is not None and self._kept[0] is pool:
            frame, self._kept = self._kept[1], None
            return frame
        return pool.lease()

    def _give_back(self) -> None:
        if self._kept is not None:
            (_, frame), self._kept = self._kept, None
            frame.settled(None)


def _fail_late(waiter: asyncio.Future[Frame]) -> None:
    if not waiter.done():
        waiter.set_exception(DeadlineError("no frame was free by the deadline; too many requests are in flight, try again later"))


LARGE_BYTES = 2**18
"""Inputs of fewer bytes are copied faster than a driver wakes up."""

LAST_BYTES = 2**21
"""So much is left to copy when the driver is woken: 35 to 150 us, in which it wakes up, and for which it may look out."""


def fill_large(frame: Frame, layout: FrameLayout, inputs: Mapping[str, NDArray[Any]], soon: Callable[[], None]) -> None:
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


def fill(frame: Frame, layout: FrameLayout, inputs: Mapping[str, Any], placed: Container[int] = ()) -> int:
    """Copy an app's arrays into a frame, each once; the bytes copied. `placed`: indices of inputs that lie elsewhere."""
    copied = 0
    for index, (name, place) in enumerate(layout.inputs_in(frame).items()):
        if placed and index in placed:
            continue
        np.copyto(place, inputs[name], casting="no")
        copied += place.nbytes
    return copied
