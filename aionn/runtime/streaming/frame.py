"""`Frame`: shared memory for one request's inputs, lent to the app to be written in place.

Invariants
    It holds one pin of its slot from `__aenter__` to `__aexit__`; what an execution in flight needs beyond that is pinned by it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from aionn.errors import CallerError
from aionn.memory import pool as memory_pool
from aionn.runtime.executing.arguments import Shapes, Way
from aionn.runtime.executing.placement import is_placed

if TYPE_CHECKING:
    from aionn.runtime.streaming.burst import Burst


def check_frame(way: Way, placed_shapes: Mapping[str, tuple[int, ...]]) -> None:
    """An app's frame has been laid out for the shapes it was asked for, also those of what stands elsewhere."""
    for name, _, shape, _ in way.inputs:
        if placed_shapes.get(name, shape) != shape:
            raise CallerError(f"input {name!r}: memory of shape {placed_shapes[name]} in a frame for {shape}; say frame(shapes=...)")


class Frame(Mapping[str, NDArray[Any]]):
    """Shared memory for one request's inputs, to be written in place. Got from `Burst.frame()`, used in `async with`.

    `frame["input"]` is a writable view with the input's dtype and shape; `burst.compute(frame)` sends it as it is. After
    the `async with` block it is another request's: using it then is a `CallerError`. It holds zeros, or what a request before has
    left there: write all of each input.
    """

    def __init__(self, burst: Burst, shapes: Shapes) -> None:
        self._burst = burst
        self._shapes = shapes
        self._way: Way | None = None
        self._frame: memory_pool.Frame | None = None
        self._placed: dict[str, Any] = {}

    async def __aenter__(self) -> Frame:
        if self._frame is not None:
            raise CallerError("this frame is entered already; get another one with burst.frame()")
        self._way, self._frame = await self._burst._lease(self._shapes)
        self._frame.lent = True
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        way, frame = self._way, self._frame
        self._way = self._frame = None
        self._placed.clear()
        if way is not None and frame is not None:
            frame.lent = False
            frame.settled(None)

    def _leased(self) -> tuple[Way, memory_pool.Frame]:
        if self._way is None or self._frame is None:
            raise CallerError("this frame's lease has ended, or has not begun; use it inside `async with burst.frame() as frame`")
        return self._way, self._frame

    def __getitem__(self, name: str) -> NDArray[Any]:
        array = self._array(name)
        if name in self._placed:
            kind = type(self._placed[name]).__name__
            raise CallerError(f"input {name!r}: a {kind} stands for it in this frame; assign an array to end that")
        return array

    def _array(self, name: str) -> NDArray[Any]:
        way, frame = self._leased()
        array = way.inputs_in(frame).get(name)
        if array is None:
            raise CallerError(f"input {name!r} is none of the model's; its inputs are {list(self)}")
        return array

    def __setitem__(self, name: str, value: Any) -> None:
        """Fill an input from an array, or let a `Memory`, `HardwareBuffer` or `DeviceMemory` stand for it."""
        place = self._array(name)
        if is_placed(value):
            self._placed[name] = value
            return
        array = np.asarray(value)
        if array.dtype != place.dtype or array.shape != place.shape:
            raise CallerError(f"input {name!r}: {array.dtype} {array.shape} does not fit the frame's {place.dtype} {place.shape}")
        self._placed.pop(name, None)
        np.copyto(place, array)

    def __iter__(self) -> Iterator[str]:
        return iter(self._burst._names)

    def __len__(self) -> int:
        return len(self._burst._names)
