"""`Burst.map`: a stream of frames in, a stream of results out, in order, with bounded age.

One task pulls frames from an async source or a collection (`_pump`). Any other source may block, and a thread pulls from it
(`source`). Each admitted frame is computed by another task. A frame holds one of `depth` places from its admission until its result
has been taken, so a slow consumer bounds the stream as a slow model does.
With "latest" one frame is with the driver at a time: a second one would only grow old in its queue, while a newer one comes.
What happens to a frame for which there is no place is the policy:
    "block"   the source waits; nothing is ever dropped. A thread pulls the next frame only when there is a place for it.
    "latest"  the newest frame waits and replaces an older one that waits; the older one is dropped and counted.
    "reject"  the stream ends with ExecutionError, RESOURCE_EXHAUSTED_TRANSIENT.

A stream's failure is that stream's. Whatever its source raises, `CancelledError` and `SystemExit` included, is raised by `results`, after
the answers to the frames before it. Nothing of it reaches the runtime's other tasks.

Invariants
    `_entries` is in the order of `seq`; at most `depth` long. `_computing` of them have no answer yet.
    `_over` is None while the consumer may still take what comes.
    The pump and all computes end before `results` returns or is closed: they live in one task group, cancelled in its `finally`.
    That `finally` waits for their end, but at most `CLOSE_S`.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Awaitable, Collection, Coroutine, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal, NoReturn, Protocol, TypeVar

import anyio
import anyio.lowlevel
import msgspec

from aionn import trace
from aionn.errors import CallerError, DeadlineError, DeviceBusyError, ExecutionError, refuse_coroutine
from aionn.hal.types import ErrorStatus
from aionn.loopless import checked_count, checked_seconds
from aionn.runtime.executing.arguments import Outputs
from aionn.runtime.streaming.any_connection import AnyConnection
from aionn.runtime.streaming.frame import leases_here
from aionn.runtime.streaming.item import Arrivals, Entry, Item, SourceThread
from aionn.tasks import bounded_shield, start_in

if TYPE_CHECKING:
    from anyio.abc import TaskGroup

T = TypeVar("T")

Policy = Literal["latest", "block", "reject"]
Frames = AsyncIterable[Mapping[str, Any] | Item] | Iterable[Mapping[str, Any] | Item]

CLOSE_S = 0.9
"""A stream that is closed ends within this time, whatever its source does."""


class Compute(Protocol):
    """`Burst.compute`, as far as a stream calls it."""

    def __call__(self, inputs: Mapping[str, Any], *, timeout_s: float | None = None) -> Awaitable[Outputs]: ...


class StreamOptions(msgspec.Struct, frozen=True):
    """See `Burst.map`."""

    policy: Policy
    depth: int
    deadline_s: float | None


class StreamResult(msgspec.Struct, frozen=True):
    """One frame's result.

    Attributes:
        seq: the frame's number in its source, from 0; rising, with gaps where frames were dropped.
        age_s: seconds from when the frame was captured (`aionn.Item`), else from its arrival from its source, until this result was handed
            out.
        stage: the stage that computed it.
        outputs: views of the burst's memory; not overwritten while they are held.
        inputs: the frame as it came from its source. For a frame from `Burst.lease()`: its arrays by name, as `outputs` are.
        tag: that of the frame's `aionn.Item`, or None.
    """

    seq: int
    age_s: float
    stage: str
    outputs: Outputs
    inputs: Mapping[str, Any]
    tag: Any = None


class _Results(AsyncGenerator[StreamResult, None]):
    """An async generator that refuses a plain `for` with a sentence. `async for` gets the generator itself, so a result costs nothing."""

    def __init__(self, generator: AsyncGenerator[StreamResult, None]) -> None:
        self._generator = generator

    def __aiter__(self) -> AsyncGenerator[StreamResult, None]:
        return self._generator

    def asend(self, value: None) -> Coroutine[Any, Any, StreamResult]:
        return self._generator.asend(value)

    def athrow(self, *error: Any) -> Coroutine[Any, Any, StreamResult]:
        return self._generator.athrow(*error)

    async def aclose(self) -> None:
        await self._generator.aclose()

    if not TYPE_CHECKING:  # a type checker reports a plain `for` by itself

        def __iter__(self) -> NoReturn:
            raise CallerError("the results of map come one after the other; write `async for result in burst.map(...)`, not a plain `for`")


class Stream:
    """One run of `Burst.map`."""

    def __init__(self, compute: Compute, connection: AnyConnection, frames: Frames, options: StreamOptions) -> None:
        policy, depth, deadline_s = options.policy, options.depth, options.deadline_s
        if policy not in ("latest", "block", "reject"):
            raise CallerError(f"policy {policy!r}: it is one of 'latest', 'block', 'reject'")
        depth = checked_count("depth", depth, 1)
        deadline_s = checked_seconds("deadline_s", deadline_s)
        if not hasattr(frames, "__aiter__") and not hasattr(frames, "__iter__"):
            refuse_coroutine(frames, "what was passed for the frames")
            raise CallerError(f"frames: expected an iterable or async iterable of inputs by name, got {type(frames).__name__}")
        if getattr(frames, "gi_frame", frames) is None or getattr(frames, "ag_frame", frames) is None:
            raise CallerError(
                "frames: this generator has ended, by itself or with the stream that it was given to; call its function for a new one"
            )
        self._compute_frame = compute
        self._connection = connection
        self._frames = frames
        self._options = StreamOptions(policy, depth, deadline_s)
        self._source: SourceThread | None = None
        if not isinstance(frames, AsyncIterable | Collection):
            self._source = SourceThread(frames, self, connection.session, policy == "latest")
        self.arrivals = Arrivals(connection)
        self._entries: deque[Entry] = deque()
        self._newest: Entry | None = None
        self._computing = 0
        self._over: BaseException | None = None
        self._changed = anyio.Event()
        self._taken = anyio.Event()
        self._ended = anyio.Event()
        self._tasks: TaskGroup | None = None

    def results(self) -> AsyncGenerator[StreamResult, None]:
        """Return what yields the results, in order."""
        return _Results(self._results())

    async def _results(self) -> AsyncGenerator[StreamResult, None]:
        self._connection.start(self._run)
        self._connection.when_closed.add(self.cancel)
        try:
            while True:
                while not self._entries:
                    if self._over is not None:
                        if isinstance(self._over, StopAsyncIteration):
                            return
                        raise self._over
                    await self._changed.wait()
                    self._changed = anyio.Event()
                entry = self._entries[0]
                try:
                    outputs = await entry.answer.wait()
                except (DeadlineError, DeviceBusyError):
                    if self._options.policy != "latest":
                        raise
                    outputs = None
                self._entries.popleft()
                self._place_freed()
                if outputs is not None:
                    yield StreamResult(entry.seq, self.arrivals.handed_out(entry), outputs.stage, outputs, entry.inputs, entry.tag)
                del outputs, entry  # or the frame would count as held while the next one is computed
        finally:
            self._connection.when_closed.discard(self.cancel)
            self.cancel()
            if not self._connection.session.inherited:
                with bounded_shield(CLOSE_S):
                    await self._ended.wait()

    def cancel(self) -> None:
        """Stop pulling and computing. Requests in flight are answered into nothing."""
        if self._connection.session.inherited:
            return
        if self._over is None:
            self._over = CallerError("the burst was closed while its stream went on")
        if self._tasks is not None:
            self._tasks.cancel_scope.cancel()
        self._changed.set()

    async def _run(self) -> None:
        try:
            async with anyio.create_task_group() as self._tasks:
                if self._over is None:
                    await self._pump()
        finally:
            self._over = self._over or CallerError("the stream was cancelled")
            self._newest = None
            self.arrivals.end()
            self._changed.set()
            self._ended.set()

    async def _pump(self) -> None:
        try:
            await (self._iterate() if self._source is None else self._follow(self._source))
            while self._newest is not None:
                await self._wait_for_place()  # the last frame is answered too
            self._over = self._over or StopAsyncIteration()
        except asyncio.CancelledError as error:
            # Where the stream itself was cancelled, `_over` has the reason.
            if self._over is None:
                self._over = CallerError("the source of this stream raised CancelledError; to end a stream, return from its source")
                self._over.__cause__ = error
        except BaseException as error:  # the source's own errors, and a rejected frame, reach the consumer of the results
            self._keep(error)
            self._over = self._over or error
        self._changed.set()

    async def _iterate(self) -> None:
        leases_here.set(self.arrivals.leases)
        async for given in each(self._frames):
            entry = self.arrivals.next(given)
            del given
            while not self._placed(entry):
                await self._wait_for_place()
            del entry

    async def _follow(self, source: SourceThread) -> None:
        source.start()
        try:
            source.pull()
            await source.exhausted()
        finally:
            await source.aclose()

    def _ask(self) -> None:
        """Let a source in a thread go on, if the policy permits it."""
        if self._source is not None and self._over is None and (self._options.policy != "block" or self._has_place()):
            self._source.pull()

    def _keep(self, error: BaseException) -> None:
        """Raise an error that ends the app where no consumer is left to raise it, and where this is a child by `os.fork`."""
        if not isinstance(error, Exception) and (self._over is not None or self._connection.session.inherited):
            raise error

    # --- what comes from the source -----------------------------------------------------------------------------------------

    def arrived(self, entry: Entry) -> None:
        """Take an entry from the source's thread.

        Raises:
            ExecutionError: see `_placed`.
        """
        self.arrivals.add(entry)
        if self._ended.is_set():
            self.arrivals.drop_frame(entry, "closed")
        elif self._over is None:
            self._placed(entry)
            self._ask()

    def _placed(self, entry: Entry) -> bool:
        """Admit an entry, or let it wait, or return False: the source must wait.

        Raises:
            ExecutionError: there is no place, and the policy is to reject.
        """
        if self._has_place():
            self._admit(entry)
        elif self._options.policy == "latest":
            if self._newest is not None:
                self.arrivals.drop_frame(self._newest, "replaced")
            self._newest = entry
        elif self._options.policy == "reject":
            self.arrivals.drop_frame(entry, "rejected")
            raise ExecutionError(
                f"frame {entry.seq}: all {self._options.depth} places of the stream are taken; the source is faster than the model",
                status=ErrorStatus.RESOURCE_EXHAUSTED_TRANSIENT,
            )
        else:
            return False
        return True

    # --- what goes to the driver ----------------------------------------------------------------------------------------------

    def _has_place(self) -> bool:
        return len(self._entries) < self._options.depth and not (self._options.policy == "latest" and self._computing)

    async def _wait_for_place(self) -> None:
        self._taken = anyio.Event()
        await self._taken.wait()

    def _place_freed(self) -> None:
        """Give a place that may be free to the frame that waits."""
        if self._newest is not None and self._tasks is not None and self._over is None and self._has_place():
            newest, self._newest = self._newest, None
            self._admit(newest)
        self._taken.set()
        self._ask()

    def _admit(self, entry: Entry) -> None:
        assert self._tasks is not None
        entry.admit()
        self._entries.append(entry)
        self._computing += 1
        start_in(self._tasks, self._compute, entry)  # perhaps in a callback
        self._changed.set()

    async def _compute(self, entry: Entry) -> None:
        timeout_s = self._options.deadline_s
        if timeout_s is not None:
            timeout_s -= (time.monotonic_ns() - entry.arrived_ns) / 1e9
        if trace.active:
            trace.captured_ns.set(entry.captured_ns)  # this task is the frame's
        try:
            if timeout_s is not None and timeout_s <= 0:
                raise DeadlineError(f"frame {entry.seq} was older than the stream's deadline before it could be sent")
            outputs = await self._compute_frame(entry.inputs, timeout_s=timeout_s)
            self.arrivals.computed(entry)
            entry.answer.set(outputs)
        except asyncio.CancelledError:
            entry.answer.fail(CallerError("the stream was closed"))
        except BaseException as error:
            self.arrivals.failed(entry, error)
            self._keep(error)
            entry.answer.fail(error)
        finally:
            entry.release()
            self._computing -= 1
            self._place_freed()


async def each(frames: AsyncIterable[T] | Iterable[T]) -> AsyncIterator[T]:
    """Yield the frames of an async source or a collection."""
    if isinstance(frames, AsyncIterable):
        async for inputs in frames:
            yield inputs
    else:
        for inputs in frames:
            yield inputs
            await anyio.lowlevel.checkpoint()  # a source that never waits must not keep the loop from the results
