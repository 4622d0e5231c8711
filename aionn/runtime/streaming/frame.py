"""`Frame`: shared memory for one request's inputs, lent to the app to be written in place.

Invariants
    It holds one pin of its slot from `__aenter__` to `__aexit__`; what an execution in flight needs beyond that is pinned by it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aionn.errors import CallerError
from aionn.memory import pool as memory_pool
from aionn.runtime.executing.arguments import FrameLayout, Shapes
from aionn.runtime.executing.placement import is_placed
from aionn.runtime.streaming.connection import BurstConnection


class Frame(Mapping[str, NDArray[Any]]):
    """Shared memory for one request's inputs, to be written in place. Got from `Burst.frame()`, used in `async with`.

    `frame["input"]` is a writable view with the input's dtype and shape; `burst.compute(frame)` sends it as it is. After
    the `async with` block it is another request's: using it then is a `CallerError`. It holds zeros, or what a request before has
    left there: write all of each input.
    """

    def __init__(self, connection: BurstConnection, shapes: Shapes) -> None:
        self._connection = connection
        self._shapes = shapes
        self._layout: FrameLayout | None = None
        self._frame: memory_pool.Frame | None = None
        self._placed: dict[str, Any] = {}

    async def __aenter__(self) -> Frame:
        if self._frame is not None:
            raise CallerError("this frame is entered already; get another one with burst.frame()")
        self._layout, self._frame = await self._connection.lease(self._shapes)
        self._frame.lent = True
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        layout, frame = self._layout, self._frame
        self._layout = self._frame = None
        self._placed.clear()
        if layout is not None and frame is not None:
            frame.lent = False
            frame.settled(None)

    def _leased(self) -> tuple[FrameLayout, memory_pool.Frame]:
        if self._layout is None or self._frame is None:
            raise CallerError("this frame's lease has ended, or has not begun; use it inside `async with burst.frame() as frame`")
        return self._layout, self._frame

    def __getitem__(self, name: str) -> NDArray[Any]:
        array = self._array(name)
        if name in self._placed:
            kind = type(self._placed[name]).__name__
            raise CallerError(f"input {name!r}: a {kind} stands for it in this frame; assign an array to end that")
        return array

    def _array(self, name: str) -> NDArray[Any]:
        layout, frame = self._leased()
        array = layout.inputs_in(frame).get(name)
        if array is None:
            raise CallerError(f"the model has no input {name!r}; its inputs are {list(self)}")
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
        return iter(self._connection.executor.arguments.names)

    def __len__(self) -> int:
        return len(self._connection.executor.arguments.names)


def lease_of(frame: Frame, connection: BurstConnection) -> tuple[tuple[FrameLayout, memory_pool.Frame], Mapping[str, Any]]:
    """Return the layout and the memory that a frame holds, and what stands for its inputs instead, by name.

    Raises:
        CallerError: it belongs to another burst, or its lease has ended.
    """
    if frame._connection is not connection:
        raise CallerError("this frame belongs to another burst")
    return frame._leased(), frame._placed
