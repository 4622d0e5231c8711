"""Frames: equal pieces of shared regions, where an app's inputs are written and a driver's outputs appear.

`lease` hands out a frame, and `pin` keeps it from being handed out again. An app's lease is one pin. A request in flight is
another, which ends with the driver's answer or its death. So a cancelled caller can leave at once while the driver may
still be writing. Nothing here waits for a driver. A frame whose arrays the app still holds is not handed out either, so
no later request overwrites results that the app still holds. The pool grows instead, up to `max_frames`. Then `lease` says whether
requests in flight will bring frames back (`FramesInFlightError`), and `tell_returns` reports each one that comes back.

Invariants
    A frame is in `_free`  <=>  its `pins` is 0 and its pool is open.
    `_plain`  <=>  the pool is open and not `crowded`.
    Regions only come. The driver caches each one under its slot, and all of them end with the pool.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from ctypes import c_ubyte
from dataclasses import dataclass
from functools import partial
from sys import getrefcount
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aionn.errors import CallerError, MemoryAllocationError
from aionn.memory.region import Region

ALIGNMENT_BYTES = 64
"""Each argument begins on another cache line (AIDL NNAPI: preferred alignment)."""

MAX_FRAMES = 256
FRAMES_PER_REGION = 4
_REGION_BYTES = 64 * 2**20
"""A region holds several frames only up to this size."""

_REMEMBERED_GROUPS = 256
"""A frame that is cut into arrays of ever new shapes forgets all of them at this number, unless the app holds one."""


class FramesInFlightError(Exception):
    """No frame is free now, and requests in flight will bring some back. This error never reaches an app.

    Attributes:
        pool: where to wait for one.
    """

    def __init__(self, pool: FramePool) -> None:
        super().__init__("all frames are in use; requests in flight will bring some back")
        self.pool = pool


@dataclass(frozen=True, slots=True)
class Layout:
    """Where each input and output lies in a frame, as (offset, length) by index, and the frame's size.

    An output of unknown shape has room for `length` bytes and no array.
    """

    inputs: tuple[tuple[int, int], ...]
    outputs: tuple[tuple[int, int], ...]
    frame_bytes: int

    @classmethod
    def of(cls, input_bytes: tuple[int, ...], output_bytes: tuple[int, ...]) -> Layout:
        at = 0
        places = []
        for length in (*input_bytes, *output_bytes):
            places.append((at, length))
            at += -(-max(length, 1) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        return cls(tuple(places[: len(input_bytes)]), tuple(places[len(input_bytes) :]), max(at, ALIGNMENT_BYTES))


class Frame:
    """One piece of a region.

    Attributes:
        region: where it lies; `slot` is the region's name in the burst.
        offset: first byte in the region.
        pins: how many hold it.
        lent: whether one of the pins is a lease of the app.
        arrays: arrays over the frame by name, in groups that were cut at once. Each array has exactly one reference here,
            so that `held` can see whether the app still has one.
        bindings: what the frame's owner remembers of it (encoded requests).
        settled: gives one pin back. A request over this frame calls it when the request is settled.
    """

    __slots__ = ("_data", "arrays", "bindings", "lent", "offset", "pins", "region", "settled", "slot")

    def __init__(self, region: Region, slot: int, offset: int, frame_bytes: int, unpin: Callable[[Frame, object], None]) -> None:
        self.region = region
        self.slot = slot
        self.offset = offset
        # Neither an array nor a memoryview: over those, a view of one of our arrays would hold their memory instead of our
        # array, and `held` would not see the view. A ctypes array keeps the mapping as a memoryview does.
        self._data: Any = (c_ubyte * frame_bytes).from_buffer(region.view(), offset)
        self.pins = 0
        self.lent = False
        self.arrays: dict[Any, dict[str, NDArray[Any]]] = {}
        # A plain dictionary: the interpreter calls `get` of a subclass by a slower way, 3 % of a short round trip.
        self.bindings: dict[Any, Any] = {}
        self.settled: Callable[[object], None] = partial(unpin, self)

    def cut(self, key: Any, places: Iterable[tuple[str, np.dtype[Any], tuple[int, ...], int]]) -> dict[str, NDArray[Any]]:
        """Return arrays over the frame at (name, dtype, shape, offset), which are the same objects each time for one `key`."""
        group = self.arrays.get(key)
        if group is None:
            if len(self.arrays) >= _REMEMBERED_GROUPS and not self.held():
                self.arrays.clear()
            data = self._data
            group = {name: np.ndarray(shape, dtype, buffer=data, offset=offset) for name, dtype, shape, offset in places}
            self.arrays[key] = group
        return group

    def drop(self) -> None:
        """Give the memory back now, when the pool is closed and nothing uses the frame. Arrays that the app holds keep it."""
        self._data = None  # the frame stands in a reference cycle, so the collector might come late

    def held(self) -> bool:
        """Return whether the app still holds one of the arrays, or a view of one."""
        for group in self.arrays.values():
            for array in group.values():
                if getrefcount(array) > _HELD_ABOVE:
                    return True
        return False


def _measure_held_above() -> int:
    """Count the references that `held` sees on an array without other holders, on this interpreter."""
    groups = {0: {0: np.zeros(1)}}
    for group in groups.values():
        for array in group.values():
            return getrefcount(array)
    raise AssertionError("unreachable")


_HELD_ABOVE = _measure_held_above()


class FramePool:
    """Frames of one size.

    Args:
        frame_bytes: size of each.
        on_region: called with each new region; returns the slot under which the burst knows it.

    Attributes:
        crowded: whether a task waits for a frame (`tell_returns`).
    """

    def __init__(self, frame_bytes: int, on_region: Callable[[Region], int], *, max_frames: int = MAX_FRAMES) -> None:
        self.frame_bytes = -(-frame_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        self._on_region = on_region
        self._max_frames = max_frames
        self._free: deque[Frame] = deque()
        self._frames: list[Frame] = []
        self._regions: list[Region] = []
        self._closed = False
        self._on_return: Callable[[], None] | None = None
        self._plain = True
        self.crowded = False

    def tell_returns(self, callback: Callable[[], None] | None) -> None:
        """Call back whenever a frame has lost a pin, and when the pool is closed. None ends the calls."""
        self._on_return = callback
        self.crowded = callback is not None
        self._plain = not self.crowded and not self._closed

    @property
    def frames(self) -> int:
        return len(self._frames)

    @property
    def free_frames(self) -> int:
        return len(self._free)

    @property
    def pinned_frames(self) -> int:
        return sum(frame.pins > 0 for frame in self._frames)

    @property
    def used_last(self) -> Frame | None:
        """Return the free frame that was given back last, with its bytes and `arrays`. None if no frame is free.

        A frame that has never been used has no `arrays`.
        """
        return self._free[-1] if self._free else None

    def lease(self) -> Frame:
        """Return a frame without users and without readers, pinned once.

        Raises:
            FramesInFlightError: all frames are in use, some by requests in flight.
            CallerError: the app keeps the arrays of too many results.
            MemoryAllocationError: more shared memory cannot be had.
        """
        # The frame used last first: its bytes are still in the CPU's cache. Held ones move to the far end.
        free = self._free
        for _ in range(len(free)):
            frame = free.pop()
            if not frame.held():
                frame.pins = 1
                return frame
            free.appendleft(frame)
        if self._closed:
            raise CallerError("this burst was closed; open another one")
        try:
            self._grow()
        except (CallerError, MemoryAllocationError) as error:
            if any(frame.pins > frame.lent for frame in self._frames):
                raise FramesInFlightError(self) from error
            raise
        frame = free.pop()
        frame.pins = 1
        return frame

    def pin(self, frame: Frame) -> None:
        frame.pins += 1

    def unpin(self, frame: Frame, _answer: object = None) -> None:
        """Give one pin back. A request that is settled passes its answer, which does not matter here."""
        frame.pins -= 1
        if self._plain:
            if frame.pins == 0:
                self._free.append(frame)
        elif not self._closed:
            if frame.pins == 0:
                self._free.append(frame)
            if self._on_return is not None:
                self._on_return()

    def _grow(self) -> None:
        room = self._max_frames - len(self._frames)
        if room <= 0:
            raise CallerError(
                f"all {len(self._frames)} frames of this burst are in use: {self.pinned_frames} are leased or in flight, and the app "
                "holds arrays of the others; copy arrays that must live longer than the next compute"
            )
        count = min(FRAMES_PER_REGION, room, max(1, _REGION_BYTES // self.frame_bytes))
        try:
            region = Region.allocate(count * self.frame_bytes)
        except MemoryAllocationError:
            if count == 1:
                raise
            count, region = 1, Region.allocate(self.frame_bytes)
        slot = self._on_region(region)
        self._regions.append(region)
        for index in range(count):
            frame = Frame(region, slot, index * self.frame_bytes, self.frame_bytes, self.unpin)
            self._frames.append(frame)
            self._free.append(frame)

    def close(self) -> None:
        """Release every region. Arrays that the app still holds keep their bytes."""
        self._closed = True
        self._plain = False
        self._free.clear()
        for frame in self._frames:
            frame.arrays.clear()
            frame.bindings.clear()
            if not frame.pins:
                frame.drop()
        self._frames.clear()
        for region in self._regions:
            region.close()
        self._regions.clear()
        if self._on_return is not None:
            self._on_return()


__all__ = ["ALIGNMENT_BYTES", "MAX_FRAMES", "Frame", "FramePool", "FramesInFlightError", "Layout"]
