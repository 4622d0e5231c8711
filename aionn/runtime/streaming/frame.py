"""`Frame`: shared memory for one request's inputs, lent to the app to be written in place.

A frame is used in `async with burst.frame()`, or leased by `burst.lease()` and yielded by the source of a stream. The stream then takes
the lease over, and the app's `Frame` is of no use any more.

Invariants
    A lease is one pin of its slot, and exactly one `Frame` holds it. What an execution in flight needs beyond that is pinned by it.
    A lease ends in the loop of its burst. A `Frame` that is collected, in whatever thread, ends its lease there too.
    The app has views of the slot's arrays. While it holds one, the slot is not given to another request.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Generator, Iterator, Mapping
from concurrent.futures import Future
from contextvars import ContextVar
from functools import partial
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aionn.errors import CallerError, UnknownNameError, refuse_coroutine
from aionn.loopless import AsyncOnly
from aionn.memory import pool as memory_pool
from aionn.runtime.executing.arguments import FrameLayout, Shapes, as_array
from aionn.runtime.executing.placement import is_placed
from aionn.runtime.streaming.any_connection import AnyConnection

_NOT_BEGUN = "this frame's lease has not begun; write `async with burst.frame() as frame`, or `frame = await burst.lease()`"
_ENDED = "this frame's lease has ended; use it inside `async with burst.frame() as frame`"
_YIELDED = "this frame was yielded to a stream, which owns it since then; get another one with burst.lease()"
_STREAM_ENDED = "the stream whose source leased this frame has ended and taken it back; lease each frame in the source of its stream"
_GIVEN_UP = "this frame was given up with a driver that had not answered every request; get another one with burst.frame()"
_BURST_CLOSED = "the burst of this frame was closed; open another burst, and get a frame of that one"


class Leases:
    """The frames that the source of one stream has leased. They come back when the stream ends, at the latest."""

    def __init__(self) -> None:
        self._frames: weakref.WeakValueDictionary[int, Frame] = weakref.WeakValueDictionary()
        self._ended = False

    def add(self, frame: Frame) -> None:
        self._frames[id(frame)] = frame
        if self._ended:
            self.end()

    def end(self) -> None:
        """End those that were not yielded. Their source may still run in its thread, or be kept by a traceback."""
        self._ended = True
        for reference in self._frames.valuerefs():
            frame = reference()
            if frame is not None:
                frame._end(_STREAM_ENDED)


leases_here: ContextVar[Leases | None] = ContextVar("leases_here", default=None)
"""The leases of the stream whose source runs in this context."""


class Frame(AsyncOnly, Mapping[str, NDArray[Any]]):
    """Shared memory for one request's inputs, to be written in place. Got from `Burst.frame()` or `Burst.lease()`.

    `frame["input"]` is a writable view with the input's dtype and shape; `burst.compute(frame)` sends it as it is. After
    the `async with` block, and after a stream's source has yielded it, it is another request's: using it then is a `CallerError`.
    Views of it that the app has kept are read-only then.
    It holds zeros, or what a request before has left there: write all of each input. An input with a default holds that.

    Attributes:
        captured_ns: set it to when the frame was captured, in ns of `time.monotonic_ns`. Traces show that, and `StreamResult.age_s` counts
            from then. 0: it is not known.
    """

    captured_ns = 0
    _lease: tuple[FrameLayout, memory_pool.MemoryFrame] | None = None

    def __init__(self, connection: AnyConnection, shapes: Shapes, leases: Leases | None = None) -> None:
        self._connection = connection
        self._shapes = shapes
        self._leases = leases
        self._views: dict[str, NDArray[Any]] = {}
        self._placed: dict[str, Any] = {}
        self._unusable = _NOT_BEGUN
        self._beginning = False

    def __await__(self) -> Generator[Any, None, Frame]:
        return self._begin().__await__()

    async def __aenter__(self) -> Frame:
        return await self._begin()

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._end(_ENDED)

    def __del__(self) -> None:
        if self._lease is not None:
            self._connection.run_later(partial(_release, self._lease[1]))

    async def _begin(self) -> Frame:
        if self._beginning or self._lease is not None:
            raise CallerError("this frame is leased already; get another one with burst.frame() or burst.lease()")
        self._beginning = True
        try:
            layout, frame = await self._connection.lease(self._shapes)
        finally:
            self._beginning = False
        frame.lent = True
        self._hold(layout, frame)
        for name, default in self._connection.executor.arguments.defaults.items():
            if self._views[name].shape == default.shape:
                np.copyto(self._views[name], default)
        if self._leases is not None:
            self._leases.add(self)
        return self

    def _hold(self, layout: FrameLayout, frame: memory_pool.MemoryFrame) -> None:
        # Before the lease, since they are what keeps the slot from being used again under the eyes of another thread.
        self._views = {name: array.view() for name, array in layout.inputs_in(frame).items()}
        self._lease = layout, frame

    def _yield_lease(self, why: str) -> tuple[FrameLayout, memory_pool.MemoryFrame] | None:
        """Return the lease, which this frame no longer has. `why` is said to an app that uses the frame from now on."""
        # At once, since two threads may ask for it.
        lease: tuple[FrameLayout, memory_pool.MemoryFrame] | None = vars(self).pop("_lease", None)
        if lease is not None:
            self._unusable = why
            for view in self._views.values():
                view.flags.writeable = False  # what the app writes from now on would be lost
            self._views, self._placed = {}, {}
        return lease

    def _end(self, why: str) -> None:
        lease = self._yield_lease(why)
        if lease is not None:
            _release(lease[1])

    def _leased(self) -> tuple[FrameLayout, memory_pool.MemoryFrame]:
        lease = self._lease
        if lease is None:
            raise CallerError(self._unusable)
        if self._connection.closed:
            raise CallerError(_BURST_CLOSED)
        if lease[1].slot not in lease[1].pool.regions:
            raise CallerError(_GIVEN_UP)
        return lease

    def __getitem__(self, name: str) -> NDArray[Any]:
        array = self._array(name)
        if name in self._placed:
            kind = type(self._placed[name]).__name__
            raise CallerError(f"input {name!r}: a {kind} stands for it in this frame; assign an array to end that")
        return array

    def _array(self, name: str) -> NDArray[Any]:
        views = self._views
        self._leased()
        array = views.get(name)
        if array is None:
            raise UnknownNameError(f"the model has no input {name!r}; its inputs are {list(self)}")
        return array

    def __setitem__(self, name: str, value: Any) -> None:
        """Fill an input from an array, or let a `Memory`, `HardwareBuffer` or `DeviceMemory` stand for it."""
        place = self._array(name)
        if is_placed(value):
            self._placed[name] = value
            return
        array = as_array(name, value) if hasattr(value, "__dlpack_device__") else np.asarray(value)
        if array.dtype != place.dtype or array.shape != place.shape:
            refuse_coroutine(value, f"input {name!r}")
            raise CallerError(f"input {name!r}: {array.dtype} {array.shape} does not fit the frame's {place.dtype} {place.shape}")
        self._placed.pop(name, None)
        np.copyto(place, array)

    def __iter__(self) -> Iterator[str]:
        return iter(self._connection.executor.arguments.names)

    def __len__(self) -> int:
        return len(self._connection.executor.arguments.names)


def lease_of(frame: Frame, connection: AnyConnection) -> tuple[tuple[FrameLayout, memory_pool.MemoryFrame], Mapping[str, Any]]:
    """Return the layout and the memory that a frame holds, and what stands for its inputs instead, by name.

    Raises:
        CallerError: it belongs to another burst, or its lease has ended.
    """
    if frame._connection is not connection:
        raise CallerError("this frame belongs to another burst; compute it with that one, or get a frame of this one")
    return frame._leased(), frame._placed


def placed_in(inputs: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return what stands for inputs of a frame instead, by name. Returns None for plain arguments."""
    return inputs._placed if isinstance(inputs, Frame) else None


def _release(frame: memory_pool.MemoryFrame) -> None:
    frame.lent = False
    frame.settled(None)


def begin_from_thread(frame: Frame) -> None:
    """Begin a frame's lease from a thread that is not the loop's, and wait until it has begun.

    Raises:
        CallerError: the burst is closed, its loop does not run, or this is a child by `os.fork`. Else as `Burst.lease`.
    """
    session = frame._connection.session
    if session.inherited or not session.loop.is_running():
        session.check_open()
    begun: Future[None] = Future()
    try:
        session.loop.call_soon_threadsafe(_start_to_begin, frame, begun)
    except RuntimeError as error:
        raise CallerError("the event loop of this burst was closed") from error
    begun.result()


def _start_to_begin(frame: Frame, begun: Future[None]) -> None:
    connection = frame._connection
    close = partial(_fail, begun, CallerError(_BURST_CLOSED))
    connection.when_closed.add(close)
    try:
        connection.start(partial(_begin_and_answer, frame, begun, close))
    except BaseException as error:
        connection.when_closed.discard(close)
        _fail(begun, error)


async def _begin_and_answer(frame: Frame, begun: Future[None], close: Callable[[], None]) -> None:
    try:
        await frame._begin()
        if not begun.done():
            begun.set_result(None)
    except Exception as error:
        _fail(begun, error)
    finally:
        frame._connection.when_closed.discard(close)
        close()  # does nothing, unless this task was cancelled


def _fail(begun: Future[None], error: BaseException) -> None:
    if not begun.done():
        begun.set_exception(error)


def end_lease(frame: Frame) -> None:
    """End a frame's lease, in the loop. Does nothing to a frame without one."""
    frame._end(_ENDED)


def take(frame: Frame, connection: AnyConnection) -> Frame:
    """Return a frame with the lease and the contents of one that a stream's source has yielded. The app's views become read-only.

    Raises:
        CallerError: it belongs to another burst, it was yielded before, or it has no lease.
    """
    lease_of(frame, connection)
    placed = frame._placed
    lease = frame._yield_lease(_YIELDED)
    if lease is None:
        raise CallerError(frame._unusable)
    taken = Frame(connection, frame._shapes)
    taken._placed, taken.captured_ns = placed, frame.captured_ns
    taken._hold(*lease)
    return taken


def contents_of(frame: Frame) -> dict[str, Any]:
    """Return a frame's inputs by name: arrays over the frame, and what stands for an input instead.

    While other calls wait for a free frame, the arrays are copies, as outputs are.
    """
    connection, views = frame._connection, frame._views
    if frame._lease is not None and not connection.closed and frame._lease[1].pool.crowded:
        views = {name: view.copy() for name, view in views.items()}
    return {**views, **frame._placed}
