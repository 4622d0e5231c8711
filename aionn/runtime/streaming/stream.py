"""`Burst.map`: a stream of frames in, a stream of results out, in order, with bounded age.

One task pulls frames from the source (`_pump`); each admitted frame is computed by another task. A frame holds one of
`depth` places from its admission until its result has been taken, so a slow consumer bounds the stream as a slow model does.
With "latest" one frame is with the driver at a time: a second one would only grow old in its queue, while a newer one comes.
What happens to a frame for which there is no place is the policy:
    "block"   the source waits; nothing is ever dropped.
    "latest"  the newest frame waits and replaces an older one that waits; the older one is dropped and counted.
    "reject"  the stream ends with ExecutionError, RESOURCE_EXHAUSTED_TRANSIENT.

A stream's failure is that stream's. Whatever its source raises, `CancelledError` and `SystemExit` included, is raised by `results`, after
the answers to the frames before it. Nothing of it reaches the runtime's other tasks.

Invariants
    `_entries` is in the order of `seq`; at most `depth` long. `_computing` of them have no answer yet.
    `_over` is None while the consumer may still take what comes.
    The pump and all computes end before `results` returns or is closed: they live in one task group, cancelled in its `finally`.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Awaitable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

import anyio
import anyio.lowlevel

from aionn import trace
from aionn.errors import CallerError, DeadlineError, ExecutionError
from aionn.hal.types import ErrorStatus
from aionn.pages.app_layout import DROPPED
from aionn.runtime.executing.arguments import Outputs
from aionn.runtime.streaming.connection import BurstConnection
from aionn.tasks import Answer, checked_seconds, running_loop

if TYPE_CHECKING:
    from anyio.abc import TaskGroup

Policy = Literal["latest", "block", "reject"]
Frames = AsyncIterable[Mapping[str, Any]] | Iterable[Mapping[str, Any]]


class Compute(Protocol):
    """`Burst.compute`, as far as a stream calls it."""

    def __call__(self, inputs: Mapping[str, Any], *, timeout_s: float | None = None) -> Awaitable[Outputs]: ...


@dataclass(frozen=True, slots=True)
class StreamOptions:
    """See `Burst.map`."""

    policy: Policy
    depth: int
    deadline_s: float | None


@dataclass(frozen=True, slots=True)
class StreamResult:
    """One frame's result.

    Attributes:
        seq: the frame's number in its source, from 0; rising, with gaps where frames were dropped.
        age_s: seconds from the frame's arrival from its source until this result was handed out.
        stage: the stage that computed it.
        outputs: views of the burst's memory; not overwritten while they are held.
        inputs: the frame as it came from its source.
    """

    seq: int
    age_s: float
    stage: str
    outputs: Outputs
    inputs: Mapping[str, Any]


class _Entry:
    __slots__ = ("answer", "arrived_ns", "inputs", "seq")

    def __init__(self, seq: int, inputs: Mapping[str, Any], arrived_ns: int) -> None:
        self.seq = seq
        self.inputs = inputs
        self.arrived_ns = arrived_ns
        self.answer: Answer[Outputs] = Answer(running_loop())


class Stream:
    """One run of `Burst.map`."""

    def __init__(self, compute: Compute, connection: BurstConnection, frames: Frames, options: StreamOptions) -> None:
        policy, depth, deadline_s = options.policy, options.depth, options.deadline_s
        if policy not in ("latest", "block", "reject"):
            raise CallerError(f"policy {policy!r}: it is one of 'latest', 'block', 'reject'")
        if isinstance(depth, bool) or not isinstance(depth, int) or depth < 1:
            raise CallerError(f"depth={depth!r}: give a whole number of frames, at least 1")
        deadline_s = checked_seconds("deadline_s", deadline_s)
        if not hasattr(frames, "__aiter__") and not hasattr(frames, "__iter__"):
            raise CallerError(f"frames: expected an iterable or async iterable of inputs by name, got {type(frames).__name__}")
        self._compute_frame = compute
        self._connection = connection
        self._frames = frames
        self._policy = policy
        self._depth = depth
        self._deadline_s = deadline_s
        self._entries: deque[_Entry] = deque()
        self._newest: _Entry | None = None
        self._computing = 0
        self._over: BaseException | None = None
        self._changed = anyio.Event()
        self._taken = anyio.Event()
        self._tasks: TaskGroup | None = None

    async def results(self) -> AsyncGenerator[StreamResult, None]:
        """Yield the results, in order."""
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
                except DeadlineError:
                    if self._policy != "latest":
                        raise
                    self._drop(entry, "late")
                    outputs = None
                self._entries.popleft()
                self._place_freed()
                if outputs is not None:
                    age_s = (time.monotonic_ns() - entry.arrived_ns) / 1e9
                    yield StreamResult(entry.seq, age_s, outputs.stage, outputs, entry.inputs)
                    del outputs  # or the frame would count as held while the next one is computed
        finally:
            self._connection.when_closed.discard(self.cancel)
            self.cancel()

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
            self._changed.set()

    async def _pump(self) -> None:
        try:
            seq = 0
            async for inputs in _each(self._frames):
                await self._offer(_Entry(seq, inputs, time.monotonic_ns()))
                seq += 1
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

    def _keep(self, error: BaseException) -> None:
        """Raise an error that ends the app where no consumer is left to raise it, and where this is a child by `os.fork`."""
        if not isinstance(error, Exception) and (self._over is not None or self._connection.session.inherited):
            raise error

    async def _offer(self, entry: _Entry) -> None:
        if self._has_place():
            self._admit(entry)
        elif self._policy == "latest":
            if self._newest is not None:
                self._drop(self._newest, "replaced")
            self._newest = entry
        elif self._policy == "reject":
            raise ExecutionError(
                f"frame {entry.seq}: all {self._depth} places of the stream are taken; the source is faster than the model",
                status=ErrorStatus.RESOURCE_EXHAUSTED_TRANSIENT,
            )
        else:
            while not self._has_place():
                await self._wait_for_place()
            self._admit(entry)

    def _has_place(self) -> bool:
        return len(self._entries) < self._depth and not (self._policy == "latest" and self._computing)

    async def _wait_for_place(self) -> None:
        self._taken = anyio.Event()
        await self._taken.wait()

    def _place_freed(self) -> None:
        """Give a place that may be free to the frame that waits."""
        if self._newest is not None and self._tasks is not None and self._over is None and self._has_place():
            newest, self._newest = self._newest, None
            self._admit(newest)
        self._taken.set()

    def _admit(self, entry: _Entry) -> None:
        assert self._tasks is not None
        self._entries.append(entry)
        self._computing += 1
        self._tasks.start_soon(self._compute, entry)
        self._changed.set()

    async def _compute(self, entry: _Entry) -> None:
        timeout_s = None
        if self._deadline_s is not None:
            timeout_s = self._deadline_s - (time.monotonic_ns() - entry.arrived_ns) / 1e9
        try:
            if timeout_s is not None and timeout_s <= 0:
                raise DeadlineError(f"frame {entry.seq} was older than the stream's deadline before it could be sent")
            entry.answer.set(await self._compute_frame(entry.inputs, timeout_s=timeout_s))
        except asyncio.CancelledError:
            entry.answer.fail(CallerError("the stream was closed"))
        except BaseException as error:
            self._keep(error)
            entry.answer.fail(error)
        finally:
            self._computing -= 1
            self._place_freed()

    def _drop(self, entry: _Entry, why: str) -> None:
        self._connection.executor.counts.add(DROPPED, 1)
        if trace.active:
            trace.count("stream.dropped", seq=entry.seq, why=why)


async def _each(frames: Frames) -> AsyncIterator[Mapping[str, Any]]:
    if isinstance(frames, AsyncIterable):
        async for inputs in frames:
            yield inputs
    else:
        for inputs in frames:
            yield inputs
            await anyio.lowlevel.checkpoint()  # a source that never waits must not keep the loop from the results
