"""The prepared model of the hour, who uses it, and how another takes its place between two executions.

A swap has three parts. Everything that may fail or take time comes first and touches nothing that serves: the new model is
prepared, every open burst has a second connection (queues, listener) to its driver over the same frames. Then the gate is
closed: executions that come now wait, those in flight end; device memories are copied over. Then the swap itself, one
assignment per holder without an await in between, and the gate opens. So every execution sees the old model or the new one,
none is lost, and none overtakes another: what was sent before the swap has been answered before anything is sent after it.
The same gate holds a stream for a single run while stages are compared (`held`; see `measuring`).

Invariants
    `serving` is replaced by `swap` and by whoever prepares it anew after its driver has died, never set back to a dead one.
    `Serving.users` counts calls that have taken it, and requests that its driver has not answered, but for a burst's plain requests
    while nobody watches; those are counted by the burst's controller. One that no longer serves is released when both are 0.
    While the gate is closed nobody enters `serving`, and it is closed for a bounded time.
"""

from __future__ import annotations

import statistics
import time
import weakref
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import anyio
from anyio.lowlevel import checkpoint

from aionn import trace
from aionn.errors import AionnError, CallerError, DeadlineError, again
from aionn.hal.model import Model
from aionn.hal.types import Result
from aionn.remote.device import RemotePreparedModel
from aionn.runtime.executing.moving import MovedMemory, NotNowError, move

if TYPE_CHECKING:
    from aionn.runtime.executing.device_memory import DeviceMemory
    from aionn.runtime.executing.link import Link
    from aionn.runtime.staging.comparing import Samples
    from aionn.runtime.streaming.burst import Burst
    from aionn.tasks import Tasks

DRAIN_S = 2.0
"""How long a swap holds new executions back until those in flight have ended. A model slower than that is swapped without
holding back if it has no device memory, and not at all if it has."""


LINK_S = 5.0
"""How long the new model's driver may take to connect the open bursts. Nothing is held back meanwhile."""

MOVE_S = 1.0
"""How long executions are held back for what is left to do when none is in flight: copying device memory, mostly."""

_IDLES = 15
"""So many pauses between executions tell a stream's rhythm."""

_DEADLINES = 32
"""So many executions with a deadline tell whether a stream has time to spare."""


class Serving:
    """One prepared model that serves, or has served.

    Attributes:
        prepared: in its driver.
        stage: what results are marked with.
        model: what it computes.
        users: calls that have taken it, and requests not yet answered.
    """

    __slots__ = ("_idle", "model", "prepared", "stage", "use", "users")

    def __init__(self, prepared: RemotePreparedModel, model: Model, use: Use, stage: str | None = None) -> None:
        self.prepared = prepared
        self.stage = prepared.device.name if stage is None else stage
        self.model = model
        self.use = use
        self.users = 0
        self._idle: list[anyio.Event] = []

    @property
    def device(self) -> str:
        return self.prepared.device.name

    @property
    def alive(self) -> bool:
        return self.prepared.device.connection.ended_by is None

    def check_alive(self) -> None:
        """Raise why its driver has ended, if it has."""
        ended_by = self.prepared.device.connection.ended_by
        if ended_by is not None:
            raise again(ended_by)

    def enter(self) -> None:
        """An execution begins. `leave` must follow, once."""
        if not self.users:
            self.use.idle_ended()
        self.users += 1

    def leave(self) -> None:
        self.users -= 1
        if not self.users:
            self.use.idle_began()
            if self._idle:
                waiting, self._idle = self._idle, []
                for event in waiting:
                    event.set()

    @contextmanager
    def used(self) -> Iterator[None]:
        """An execution of the app's for the body."""
        self.use.count()
        self.enter()
        try:
            yield
        finally:
            self.leave()

    def entered(self, settled: Callable[[Result | None], None], deadline_ns: int | None = None) -> Callable[[Result | None], None]:
        """An execution until its request is settled, whatever its caller does. `deadline_ns`: the app's, if it has set one."""
        self.enter()
        return partial(self._settled, settled, deadline_ns)

    def _settled(self, settled: Callable[[Result | None], None], deadline_ns: int | None, result: Result | None) -> None:
        settled(result)
        if deadline_ns is not None:
            self.use.answered(deadline_ns)
        self.leave()

    async def wait_idle(self) -> None:
        """Until no execution uses it."""
        if self.users:
            await self.next_gap()

    async def next_gap(self) -> None:
        """Until the last of the executions in flight ends, now or after the next has begun."""
        event = anyio.Event()
        self._idle.append(event)
        try:
            await event.wait()
        finally:
            if event in self._idle:
                self._idle.remove(event)


class Use:
    """How much the app uses a compilation, over all its stages, while somebody watches.

    Attributes:
        executions: so many have begun. last_ns: CLOCK_MONOTONIC, when the last one did.
    """

    __slots__ = ("_awaited", "_idle_ns", "_idle_since_ns", "_left_ns", "_reached", "executions", "last_ns")

    def __init__(self) -> None:
        self.executions = 0
        self.last_ns = 0
        self._idle_since_ns = 0
        self._idle_ns: deque[int] = deque(maxlen=_IDLES)
        self._left_ns: deque[int] = deque(maxlen=_DEADLINES)
        self._awaited = -1
        self._reached = anyio.Event()

    def count(self) -> None:
        self.executions += 1
        self.last_ns = time.monotonic_ns()
        if self.executions == self._awaited:
            self._reached.set()

    def idle_began(self) -> None:
        self._idle_since_ns = time.monotonic_ns()

    def idle_ended(self) -> None:
        if self._idle_since_ns:
            self._idle_ns.append(time.monotonic_ns() - self._idle_since_ns)

    @property
    def idle_s(self) -> float:
        """The usual time between the end of an execution and the beginning of the next: the median of the last few; 0: unknown."""
        return statistics.median(self._idle_ns) / 1e9 if self._idle_ns else 0.0

    def answered(self, deadline_ns: int) -> None:
        """An execution with that deadline has been answered, or will never be."""
        self._left_ns.append(deadline_ns - time.monotonic_ns())

    @property
    def least_left_s(self) -> float | None:
        """The least time that was left of a deadline when its answer came, among the last few; None: there were no deadlines."""
        return min(self._left_ns) / 1e9 if self._left_ns else None

    async def wait_for(self, executions: int) -> None:
        """Until so many executions have begun. One task at a time may wait."""
        if self.executions < executions:
            self._reached = anyio.Event()
            self._awaited = executions
            await self._reached.wait()


class Gate:
    """Holds executions back while it is shut; lets them pass one after the other, in the order in which they came.

    Attributes:
        shut: whether there is anything to wait for: it is closed, or those who waited are still passing. Read it before `passed`:
            nearly always there is not.
        closed: whether it holds everybody back. Read it again after an await that followed `passed`.
    """

    __slots__ = ("_came", "_turns", "closed", "shut")

    def __init__(self) -> None:
        self.shut = False
        self.closed = False
        self._turns: deque[_Turn] = deque()
        self._came = anyio.Event()

    def close(self) -> None:
        self.shut = self.closed = True

    def open(self) -> None:
        self.closed = False
        self._next()

    def _next(self) -> None:
        # Whoever comes while others still pass queues behind them.
        if self._turns:
            self._turns[0].come.set()
        else:
            self.shut = False

    async def wait_for_arrival(self) -> None:
        """Until somebody waits. One task at a time may ask."""
        if not self._turns:
            self._came = anyio.Event()
            await self._came.wait()

    async def passed(self, deadline_ns: int | None) -> None:
        """Wait for it to open, and for those who came before. The next one passes after the caller's next await.

        Raises:
            DeadlineError: it did not by the deadline.
        """
        seconds = None if deadline_ns is None else max(0.0, (deadline_ns - time.monotonic_ns()) / 1e9)
        turn = _Turn()
        self._turns.append(turn)
        self._came.set()
        if not self.closed:
            self._next()
        try:
            with anyio.move_on_after(seconds):
                await turn.come.wait()
                while self.closed:  # again, before this turn was taken
                    turn.come = anyio.Event()
                    await turn.come.wait()
                return
        finally:
            self._turns.remove(turn)
            if not self.closed:
                self._next()
        raise DeadlineError("a new stage was being tried or swapped in until past the deadline")


class _Turn:
    __slots__ = ("come",)

    def __init__(self) -> None:
        self.come = anyio.Event()


class CompiledModel:
    """What a compilation serves from. Knows the bursts and device memories that a swap must take along, weakly.

    Attributes:
        serving: what executions enter now; None before the first preparation.
        watched: bursts count their executions (`Serving.enter`); they leave that out otherwise, for it costs.
        sampling: keeps inputs of executions, or None.
        swaps: how many there have been.
        on_failure: called when an execution of the app's was answered with an error, and when the driver has died; with the inputs if
            they are at hand.
        devices_for: the devices that may serve after a driver's death, the best first; None: the same device again.
        replaced: called when the model was prepared anew after a driver's death.
    """

    def __init__(self, tasks: Tasks) -> None:
        self._tasks = tasks
        self.serving: Serving | None = None
        self.use = Use()
        self.gate = Gate()
        self.swaps = 0
        self.watched = 0
        self.sampling: Samples | None = None
        self.bursts: weakref.WeakSet[Burst] = weakref.WeakSet()
        self.memories: weakref.WeakSet[DeviceMemory] = weakref.WeakSet()
        self.abandoned: Callable[[], None] | None = None
        self.on_failure: Callable[[Serving, AionnError, Mapping[str, Any] | None], None] | None = None
        self.devices_for: Callable[[Serving], Sequence[str]] | None = None
        self.replaced: Callable[[Serving, Serving], None] | None = None
        self.closed = False
        self._swapping = anyio.Lock()
        self._filled: anyio.Event | None = None

    def abandon(self) -> None:
        """The compilation is closed, or has been collected: whoever works for it stops. In the loop's thread."""
        self.closed = True
        if self.abandoned is not None:
            self.abandoned()

    def failed(self, serving: Serving, error: AionnError, inputs: Mapping[str, Any] | None = None) -> None:
        """An execution of the app's failed on `serving`, or its driver has died."""
        if self.on_failure is not None:
            self.on_failure(serving, error, inputs)

    def release(self) -> None:
        """As closing the compilation, without waiting."""
        self.abandon()
        if self.serving is not None:
            self.serving.prepared.release()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Every execution that begins in the body is counted."""
        self.watched += 1
        for burst in list(self.bursts):
            burst.count_from_now()
        try:
            yield
        finally:
            self.watched -= 1

    # --- device memory -------------------------------------------------------------------------------------------------

    def memory_filled(self) -> None:
        """The app has filled a device memory anew."""
        if self._filled is not None:
            self._filled.set()

    @property
    def state_is_new(self) -> bool:
        """Whether no execution has used any device memory since the app filled it."""
        return all(memory.fresh or memory.closed for memory in self.memories)

    async def wait_for_new_state(self) -> None:
        while not self.state_is_new:
            self._filled = anyio.Event()
            await self._filled.wait()

    # --- the swap --------------------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def held(self, serving: Serving, *, drain_s: float = DRAIN_S) -> AsyncIterator[bool]:
        """Executions that come now wait until the body ends, which is for the caller to bound.

        Yields whether those in flight on `serving` have ended; False: they did not within `drain_s`.
        """
        async with self._swapping:
            with self.watching():
                self.gate.close()
                try:
                    yield await _drained(serving, list(self.bursts), drain_s)
                finally:
                    self.gate.open()

    async def swap(self, better: Serving, *, drain_s: float = DRAIN_S, may_swap: Callable[[], bool] = lambda: True) -> None:
        """Let every execution from now on use `better`. The one before is released when its last execution has ended.

        Args:
            drain_s: how long new executions are held back for those in flight.
            may_swap: asked when nothing is in flight; False leaves everything as it is.

        Raises:
            NotNowError: it may work at another moment.
            DeadlineError: its driver has not done its part within LINK_S or MOVE_S. It is left alive: it may serve others.
            AionnError: `better` cannot take over.
            In all cases nothing has changed, and `better` stays the caller's.
        """
        async with self._swapping:
            links: dict[Burst, Link] = {}
            moved: list[MovedMemory] = []
            with self.watching():
                try:
                    with _within(LINK_S, f"device {better.device!r} did not connect the open bursts"):
                        await self._link(better, links)
                    self.gate.close()
                    try:
                        with trace.span("stage.swap", stage=better.stage):
                            old, retired = await self._exchange(better, links, moved, drain_s, may_swap)
                    finally:
                        self.gate.open()
                except BaseException:
                    for copy in moved:
                        copy.discard()
                    self._tasks.start_soon(_close, list(links.values()), None, name="links of no use")
                    raise
            for copy in moved:
                copy.free_old()
            if old is not None:
                self._tasks.start_soon(_close, retired, old, name="the stage before")

    async def _exchange(
        self,
        better: Serving,
        links: dict[Burst, Link],
        moved: list[MovedMemory],
        drain_s: float,
        may_swap: Callable[[], bool],
    ) -> tuple[Serving | None, list[Link]]:
        old = self.serving
        drained = old is None or await _drained(old, list(self.bursts), drain_s)
        if not may_swap():
            raise NotNowError("the state in a device memory is to be kept until its next reset")
        with _within(MOVE_S, f"device {better.device!r} did not take over bursts and device memory"):
            await self._link(better, links)  # bursts that were opened meanwhile
            for memory in list(self.memories):
                if not drained:
                    raise NotNowError(f"executions were in flight for more than {drain_s} s, and there is device memory to move")
                copy = await move(memory, better.prepared)
                if copy is not None:
                    moved.append(copy)
        for _ in range(2):
            await checkpoint()  # a driver that has ended by now is seen to: its pidfd is polled in between
        # From here to the end nothing is awaited: this is the swap.
        if self.closed:
            raise CallerError("the compilation was closed")
        better.check_alive()
        if any(copy.outdated for copy in moved) or self.serving is not old:
            raise NotNowError("device memory was filled, or the driver started anew, during the swap")
        if any(burst not in links for burst in self.bursts):
            raise NotNowError("a burst was opened during the swap")
        self.serving = better
        self.swaps += 1
        for copy in moved:
            copy.settle()
        return old, [before for burst, link in links.items() if (before := burst.install(link)) is not None]

    async def _link(self, better: Serving, links: dict[Burst, Link]) -> None:
        for burst in list(self.bursts):
            if burst not in links:
                links[burst] = await burst.link_to(better)


@contextmanager
def _within(seconds: float, what: str) -> Iterator[None]:
    with anyio.move_on_after(seconds) as scope:
        yield
    if scope.cancelled_caught:
        raise DeadlineError(f"{what} within {seconds:g} s")


async def _drained(old: Serving, bursts: Sequence[Burst], drain_s: float) -> bool:
    with anyio.move_on_after(drain_s):
        await old.wait_idle()
        for burst in bursts:
            await burst.wait_idle()
        await old.wait_idle()
        return True
    return False


async def _close(links: Sequence[Link], old: Serving | None) -> None:
    """Close what no longer serves, or never did, when its last execution has ended."""
    try:
        if old is not None:
            await old.wait_idle()
        for link in links:
            await link.controller.wait_idle()
            await link.aclose(CallerError("this stage has been replaced"))
        if old is not None:
            await old.prepared.aclose()
            trace.count("stage.released", stage=old.stage)
    except AionnError as error:
        trace.count("stage.release_failed", reason=str(error))  # its driver is gone, and it with it
