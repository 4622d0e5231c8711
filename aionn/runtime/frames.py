"""The frames of one burst or one compilation: a pool per frame size, every region under a number of its own.

Models with open dimensions get frames of the next power of two, so that a stream of ever new shapes needs few pools.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aionn.errors import CallerError
from aionn.hal.types import IMemory
from aionn.memory.pool import Frame, FramePool
from aionn.memory.region import Region
from aionn.runtime.arguments import Way


class Frames:
    """Frame pools and their regions by slot. Satisfies `IBurstCallback`."""

    def __init__(self, *, exact: bool) -> None:
        """`exact`: every frame has the same size, so none is rounded up."""
        self._exact = exact
        self._pools: dict[int, FramePool] = {}
        self._regions: list[Region | None] = []
        self._foreign: dict[Region, int] = {}
        self._undo: dict[int, Callable[[], None]] = {}
        self._last: Way | None = None
        self.on_gone: Callable[[int], None] | None = None
        self._closed = False

    def pool(self, way: Way) -> FramePool:
        """The pool whose frames fit `way`."""
        self._last = way
        needed = way.layout.frame_bytes
        size = needed if self._exact else 1 << (needed - 1).bit_length()
        pool = self._pools.get(size)
        if pool is None:
            if self._closed:
                raise CallerError("the burst was closed")
            pool = self._pools[size] = FramePool(size, self._add)
        return pool

    def _add(self, region: Region) -> int:
        self._regions.append(region)
        return len(self._regions) - 1

    def slot_of(self, region: Region) -> int:
        """The slot of an app's own memory. A slot is never given to another: a stale mapping cannot be reached."""
        slot = self._foreign.get(region)
        if slot is None:
            slot = self._foreign[region] = self._add(region)
            self._undo[slot] = region.when_closed(partial(self._gone, region, slot))
        return slot

    def _gone(self, region: Region, slot: int) -> None:
        """An app's memory has been closed, in whatever thread: the driver need not keep it mapped."""
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
        """Copies of inputs that the last execution has left in its frame; None if there are none."""
        if self._last is None or self._closed:
            return None
        frame = self.pool(self._last).used_last
        places = None if frame is None else frame.arrays.get(self._last)
        return None if places is None else {name: place.copy() for name, place in places.items()}

    def count(self) -> dict[str, int]:
        """frames, free, pinned and bytes over all pools."""
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


LARGE_BYTES = 2**18
"""Inputs of fewer bytes are copied faster than a driver wakes up."""

LAST_BYTES = 2**21
"""So much is left to copy when the driver is told: 35 to 150 us, in which it wakes up, and which it may look for."""


def fill_large(frame: Frame, way: Way, inputs: Mapping[str, NDArray[Any]], soon: Callable[[], None]) -> None:
    """Copy arrays that fit into a frame; `soon` is called once, when little of it is left to do."""
    left, told = way.input_bytes, False
    for name, place in way.inputs_in(frame).items():
        array = inputs[name]
        if told or left - place.nbytes >= LAST_BYTES:
            place[...] = array
        else:
            told = True
            first = max(0, left - LAST_BYTES) // place.itemsize if array.flags.c_contiguous else 0
            if first:
                place.reshape(-1)[:first] = array.reshape(-1)[:first]
            soon()
            if first:
                place.reshape(-1)[first:] = array.reshape(-1)[first:]
            else:
                place[...] = array
        left -= place.nbytes


def fill(frame: Frame, way: Way, inputs: Mapping[str, Any], placed: Container[int] = ()) -> int:
    """Copy an app's arrays into a frame, each once; the bytes copied. `placed`: indices of inputs that lie elsewhere."""
    copied = 0
    for index, (name, place) in enumerate(way.inputs_in(frame).items()):
        if placed and index in placed:
            continue
        np.copyto(place, inputs[name], casting="no")
        copied += place.nbytes
    return copied
