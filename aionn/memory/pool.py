"""Frames: equal pieces of shared regions, where an app's inputs are written and a driver's outputs appear.

`lease` hands out a frame, and a pin keeps it from being handed out again. An app's lease is one pin. A request in flight is
another, which ends with the driver's answer or its death. So a cancelled caller can leave at once while the driver may
still be writing. Nothing here waits for a driver. A frame whose arrays the app still holds is not handed out either, so
no later request overwrites results that the app still holds. The pool grows instead, as long as there is memory.

While a request is in flight, `in_flight` frames are pinned at most, or as many as fit into the pages that are there. Beyond that, `lease`
says that requests in flight will bring frames back (`FramesInFlightError`), and `tell_returns` reports each one that comes back.

No one reports that an array of the app is gone. `lease` finds out, at a cost that does not grow with the number of held frames. It looks
at the frame given back last, then at the one that was found held last, then at the one found held first. These suit an app that keeps its
last result, or its last few. Only when all three are held does it look at every held frame. The pool then has spare frames, so that
the next look at all of them is many leases away.

Invariants
    A frame is in `_free` or in `_held`  <=>  its `pins` is 0 and its pool is open.
    A frame in `_held` was held by the app when `lease` last looked at it. The one that was found held first stands first.
    `_plain`  <=>  the pool is open and not `crowded`.
    The memory is at most that of `in_flight` frames, or of those that the app leases, and of one for each frame that it holds. Each
    region is rounded up to pages.
"""

from __future__ import annotations

import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from ctypes import c_ubyte
from functools import partial
from sys import getrefcount
from typing import TYPE_CHECKING, Any

from aionn.errors import CallerError, MemoryAllocationError
from aionn.memory.region import PAGE_BYTES, Region

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

ALIGNMENT_BYTES = 64
"""Each argument of a frame begins on another cache line (AIDL NNAPI: preferred alignment)."""

_REMEMBERED_GROUPS = 16
"""A frame that is cut into arrays of ever new shapes forgets all of them at this number, unless the app holds one."""

_LOOKS_PER_FRAME = 32
"""A look at all held frames that finds fewer than one free frame in so many makes the pool grow. A look takes 0.1 us a frame."""


class FramesInFlightError(Exception):
    """The pool has no frame now: requests in flight will bring some back, or `Frames` has released the pool. Never reaches an app.

    Attributes:
        pool: where to wait for one.
    """

    def __init__(self, pool: FramePool) -> None:
        super().__init__("all frames are in use; requests in flight will bring some back")
        self.pool = pool


class MemoryFrame:
    """One piece of a region.

    Attributes:
        pool: whose frame it is. Every frame of a pool has the same size.
        region: where it lies; `slot` is the region's name in the burst.
        offset: first byte in the region.
        pins: how many hold it.
        lent: whether one of the pins is a lease of the app.
        arrays: arrays over the frame by name, in groups that were cut at once. Each array has exactly two references here,
            so that `held` can see whether the app still has one.
        bindings: what the frame's owner remembers of it (encoded requests).
        settled: gives one pin back. A request over this frame calls it when the request is settled.
    """

    __slots__ = ("__weakref__", "_cut", "_data", "arrays", "bindings", "lent", "offset", "pins", "pool", "region", "settled", "slot")

    def __init__(self, pool: FramePool, region: Region, slot: int, offset: int) -> None:
        self.pool = pool
        self.region = region
        self.slot = slot
        self.offset = offset
        # Neither an array nor a memoryview: over those, a view of one of our arrays would hold their memory instead of our
        # array, and `held` would not see the view. A ctypes array keeps the mapping as a memoryview does.
        self._data: Any = (c_ubyte * pool.frame_bytes).from_buffer(region.view(), offset)
        self.pins = 0
        self.lent = False
        self.arrays: dict[Any, dict[str, NDArray[Any]]] = {}
        self._cut: list[NDArray[Any]] = []  # all of `arrays`
        # A plain dictionary: the interpreter calls `get` of a subclass by a slower way, 3 % of a short round trip.
        self.bindings: dict[Any, Any] = {}
        self.settled: Callable[[object], None] = partial(pool.unpin, self)

    def cut(self, key: Any, places: Iterable[tuple[str, np.dtype[Any], tuple[int, ...], int]]) -> dict[str, NDArray[Any]]:
        """Return arrays over the frame at (name, dtype, shape, offset), which are the same objects each time for one `key`."""
        group = self.arrays.get(key)
        if group is None:
            import numpy as np

            if len(self.arrays) >= _REMEMBERED_GROUPS and not self.held():
                self.clear()
            data = self._data
            group = {name: np.ndarray(shape, dtype, buffer=data, offset=offset) for name, dtype, shape, offset in places}
            self._cut += group.values()
            self.arrays[key] = group
        return group

    def held(self) -> bool:
        """Return whether the app still holds one of the arrays, or a view of one."""
        for array in self._cut:  # noqa: SIM110 -- a generator costs more than the loop
            if getrefcount(array) > _HELD_ABOVE:
                return True
        return False

    def clear(self) -> None:
        """Forget all arrays. Those that the app holds keep their bytes."""
        self.arrays.clear()
        self._cut.clear()

    def end(self) -> None:
        """Leave the pool. The frame gives its memory back when its last pin goes. Arrays that the app holds keep it.

        An error's traceback may hold the frame for long, so its memory must not wait for its last holder.
        """
        self.clear()
        self.bindings.clear()
        self.settled = partial(_unpin_ended, weakref.ref(self))  # no reference to itself, or only the collector would free it
        if not self.pins:
            self._data = None


def _unpin_ended(ended: weakref.ref[MemoryFrame], _answer: object) -> None:
    """Stand for `settled` of a frame whose pool has ended."""
    frame = ended()
    if frame is not None:
        frame.pins -= 1
        if not frame.pins:
            frame.end()


def _measure_held_above() -> int:
    """Count the references that `held` sees on an array without other holders, on this interpreter. Any object has as many."""
    group = {0: object()}
    for array in [*group.values()]:
        return getrefcount(array)
    raise AssertionError("unreachable")


_HELD_ABOVE = _measure_held_above()


class FramePool:
    """Frames of one size.

    Args:
        frame_bytes: size of each.
        in_flight: so many frames may be pinned while requests are in flight, at least 1.
        allocate: called with the pool and a number of bytes, returns a new region and the slot under which the burst knows it.

    Attributes:
        crowded: whether a task waits for a frame (`tell_returns`).
        regions: the pool's memory by slot.
    """

    def __init__(self, frame_bytes: int, in_flight: int, allocate: Callable[[FramePool, int], tuple[Region, int]]) -> None:
        self.frame_bytes = aligned(frame_bytes)
        self._in_flight = in_flight
        self._allocate = allocate
        self._free: list[MemoryFrame] = []
        self._held: deque[MemoryFrame] = deque()
        self._frames: list[MemoryFrame] = []
        self._uncut: Iterator[MemoryFrame] = iter(())
        self._over: Callable[[], Exception] | None = None  # makes the error of later leases
        self._on_return: Callable[[], None] | None = None
        self._plain = True
        self.crowded = False
        self.regions: dict[int, Region] = {}

    def tell_returns(self, callback: Callable[[], None] | None) -> None:
        """Call back whenever a frame has lost a pin, and when the pool is closed. None ends the calls."""
        self._on_return = callback
        self.crowded = callback is not None
        self._plain = not self.crowded and self._over is None

    @property
    def frames(self) -> int:
        return len(self._frames)

    @property
    def free_frames(self) -> int:
        """How many frames are not pinned. The app may hold arrays of some."""
        return len(self._free) + len(self._held)

    @property
    def pinned_frames(self) -> int:
        return len(self._frames) - self.free_frames

    @property
    def size_bytes(self) -> int:
        """Bytes of all regions together."""
        return sum([region.size_bytes for region in list(self.regions.values())])

    @property
    def used_last(self) -> MemoryFrame | None:
        """Return the free frame that was given back last, with its bytes and `arrays`. None if no frame is free."""
        return self._free[-1] if self._free else None

    def lease(self) -> MemoryFrame:
        """Return a frame without users and without readers, pinned once.

        Raises:
            FramesInFlightError: all frames are in use, some by requests in flight. Or the pool was released (`release`).
            CallerError: the burst was closed.
            MemoryAllocationError: more shared memory cannot be had.
        """
        free, held = self._free, self._held
        while free:
            frame = free.pop()  # its bytes are still in the CPU's cache
            if frame.held():
                if not held or held[-1].held():
                    held.append(frame)
                    continue
                before = held.pop()  # the app keeps each result until it has the next one
                held.append(frame)
                frame = before
            frame.pins = 1
            return frame
        frame = self._find()
        frame.pins = 1
        return frame

    def unpin(self, frame: MemoryFrame, _answer: object = None) -> None:
        """Give one pin back. A request that is settled passes its answer, which does not matter here."""
        frame.pins -= 1
        if self._plain:
            if frame.pins == 0:
                self._free.append(frame)
        elif self._over is None:
            if frame.pins == 0:
                self._free.append(frame)
            if self._on_return is not None:
                self._on_return()

    def _find(self) -> MemoryFrame:
        """Return a frame for `lease` where the app holds all that were free."""
        if self._over is not None:
            raise self._over()
        held = self._held
        if held and not held[0].held():
            return held.popleft()  # the app keeps its last few results
        frame = next(self._uncut, None)
        if frame is None:
            self._refill()
            frame = self._free.pop() if self._free else next(self._uncut)
        return frame

    def _look(self) -> None:
        """Look at all held frames, and move those to the free ones that the app does not hold any more."""
        still = deque[MemoryFrame]()
        for frame in self._held:
            (still if frame.held() else self._free).append(frame)
        self._held = still

    def _refill(self) -> None:
        """Look at all held frames, and grow unless enough of them are free now. Then there is a free frame, or one to be cut."""
        self._look()
        free, still = self._free, self._held
        if free and len(free) * _LOOKS_PER_FRAME >= len(still):
            return
        spare = self._in_flight - self.pinned_frames - len(free)
        if spare <= 0:
            if free:
                return
            if self._some_in_flight():
                raise FramesInFlightError(self)
        try:
            self._grow(spare)
        except MemoryAllocationError as error:
            if free:
                return
            if self._some_in_flight():
                raise FramesInFlightError(self) from error
            raise self._exhausted(error) from error

    def _some_in_flight(self) -> bool:
        return any(frame.pins > frame.lent for frame in self._frames)

    def _grow(self, spare: int) -> None:
        """Allocate as many frames as the requests may soon need: one at first, then more at once, at most `spare`."""
        count = max(1, min(len(self._frames) // 4, spare))
        try:
            region, slot = self._allocate(self, _whole_pages(count * self.frame_bytes))
        except MemoryAllocationError:
            if count == 1:
                raise
            region, slot = self._allocate(self, _whole_pages(self.frame_bytes))
        self.regions[slot] = region
        self._uncut = self._cut(region, slot)

    def trim(self) -> list[int]:
        """Free regions that are superfluous because the app has dropped outputs since they were allocated. Returns their slots."""
        self._look()
        used = [frame for frame in self._frames if frame.pins or frame.held()]
        surplus = len(self._frames) - self._in_flight - sum(frame.pins == 0 for frame in used)
        frames = Counter(frame.slot for frame in self._frames)
        gone: list[int] = []
        for slot in sorted(self.regions.keys() - {frame.slot for frame in used})[:-1]:  # the newest one may have frames to be cut
            if frames[slot] <= surplus:
                surplus -= frames[slot]
                gone.append(slot)
        for slot in gone:
            self.regions.pop(slot).close()
        for frame in self._frames:
            if frame.slot not in self.regions:
                frame.end()
        self._frames = [frame for frame in self._frames if frame.slot in self.regions]
        self._free = [frame for frame in self._free if frame.slot in self.regions]
        self._held = deque(frame for frame in self._held if frame.slot in self.regions)
        return gone

    def _cut(self, region: Region, slot: int) -> Iterator[MemoryFrame]:
        """Make the frames of a region when they are needed. A frame that the driver does not know yet is slower, so few are in use."""
        for offset in range(0, region.size_bytes - self.frame_bytes + 1, self.frame_bytes):
            frame = MemoryFrame(self, region, slot, offset)
            self._frames.append(frame)
            yield frame

    def _exhausted(self, error: MemoryAllocationError) -> MemoryAllocationError:
        """Return the error for an app that holds all frames that can be had."""
        if not self._frames:
            return error
        return MemoryAllocationError(
            f"all {len(self._frames)} frames of this burst are leased, or the app holds their outputs, and no memory is left for "
            f"another one ({error}). Drop outputs that are not needed any more, or copy those that must live long",
            needed_bytes=error.needed_bytes,
            available_bytes=error.available_bytes,
        )

    def close(self) -> None:
        """Free every region, because the burst was closed. Arrays that the app still holds keep their bytes."""
        self._end(partial(CallerError, "this burst was closed; open another one"))
        if self._on_return is not None:
            self._on_return()

    def release(self) -> bool:
        """Free every region if no frame is pinned. Returns whether it did so. Arrays that the app still holds keep their bytes."""
        if self.pinned_frames:
            return False
        self._end(partial(FramesInFlightError, self))
        return True

    def _end(self, over: Callable[[], Exception]) -> None:
        self._over = over
        self._plain = False
        self._free.clear()
        self._held.clear()
        self._uncut = iter(())
        for frame in self._frames:
            frame.end()
        self._frames.clear()
        for region in self.regions.values():
            region.close()
        self.regions.clear()


def aligned(size_bytes: int) -> int:
    """Return a size rounded up to whole cache lines."""
    return -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def _whole_pages(size_bytes: int) -> int:
    return -(-size_bytes // PAGE_BYTES) * PAGE_BYTES
