"""`Serving`: a prepared model that serves, or has served. `Use`: how much the app uses a compilation.

Invariants
    `Serving.users` counts calls that have taken it, and requests that its driver has not answered. A burst's usual requests are left out
    while `CompiledModel.watched` is 0; the burst's controller counts those.
    A serving that no longer serves is released when both counts are 0.

`CompiledModel` is the prepared model that serves now, and how another one takes its place between two executions.

A swap has three parts. First comes everything that may fail or take time, and nothing that serves is touched. The new model is
prepared, and each open burst prepares a second connection to its driver. Then the gate is closed. Executions that come now wait, those
in flight end, and device memories are copied. Then all changes are committed, without an await in between, and the gate opens.
So every execution sees the old model or the new one. No execution is lost. No execution overtakes another one: all that were sent before
the swap are answered before the next one is sent. The same gate holds a stream for a single run while stages are compared (`held`).

What must follow a compilation to another prepared model are its members: open bursts and device memories. A swap is a two-phase commit over
them. First each member prepares a `Change`. If anything fails before the commit, what was prepared is released, and nothing has changed.

    prepare       make what the member needs on the new model    may await, may fail
    check         raise if the change is outdated                right before the commit
    commit        use the new model from now on                  no await, cannot fail
    release_old   free what the change replaced                  after the commit, when nothing is in flight there
    release_new   free what was prepared                         in place of the commit

Invariants
    `serving` is replaced by `swap`, and by `KeptModel` after a driver's death or idle time. It is never set back to a dead one.
    While the gate is closed no execution enters `serving`, and it is closed for a bounded time.
"""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import anyio
from anyio.lowlevel import checkpoint

from aionn import trace
from aionn.errors import AionnError, CallerError, DeadlineError, again
from aionn.hal.model import PooledModel
from aionn.hal.types import Result
from aionn.loopless import seconds_until
from aionn.tasks import Tasks, each

if TYPE_CHECKING:
    from aionn.runtime.serving.planned_model import Prepared


_IDLES = 15
"""A stream's rhythm is judged by so many pauses between executions."""

_DEADLINES = 32
"""Whether a stream has time to spare is judged by so many executions with a deadline."""


class Serving:
    """A prepared model that serves, or has served.

    Attributes:
        prepared: what executions run on. A plan is one prepared model, too (`PlannedModel`).
        stage: what results are marked with.
        model: what it computes.
        users: calls that have taken it, and requests not yet answered.
        lost: whether its driver ended while an execution was in flight.
        asleep: whether it was given back because the app did not use it (`preparing.kept_model`). The next use prepares it again.
    """

    __slots__ = ("_gap", "asleep", "lost", "model", "prepared", "stage", "use", "users")

    def __init__(self, prepared: Prepared, model: PooledModel, use: Use, stage: str | None = None) -> None:
        self.prepared = prepared
        self.stage = prepared.device.name if stage is None else stage
        self.model = model
        self.use = use
        self.users = 0
        self.lost = False
        self.asleep = False
        self._gap: anyio.Event | None = None

    @property
    def device(self) -> str:
        return self.prepared.device.name

    @property
    def ended_by(self) -> BaseException | None:
        """Why one of its drivers has ended, or None while all live."""
        return self.prepared.device.connection.ended_by

    @property
    def alive(self) -> bool:
        """Whether it can be used: its drivers live, and it was not given back."""
        return not self.asleep and self.ended_by is None

    def check_alive(self) -> None:
        """Raise why one of its drivers has ended, if one has."""
        ended_by = self.ended_by
        if ended_by is not None:
            raise again(ended_by)

    async def aclose(self) -> None:
        """Let every driver free its step."""
        await self.prepared.aclose()

    def release(self) -> None:
        """As `aclose`, without waiting."""
        self.prepared.release()

    def enter(self, estimated: bool = True) -> None:
        """Count an execution that begins. `leave` must follow, once. `estimated`: whether the pause before it is one of the app's."""
        if not self.users and estimated:
            self.use.idle_ended()
        self.users += 1

    def leave(self, estimated: bool = True) -> None:
        self.users -= 1
        if not self.users:
            self.use.idle_began(known=estimated)
            if self._gap is not None:
                self._gap.set()
                self._gap = None

    def entered(
        self, settled: Callable[[Result | None], None], deadline_ns: int | None = None, *, estimated: bool = True
    ) -> Callable[[Result | None], None]:
        """Count an execution until its request is settled, whatever its caller does.

        Args:
            deadline_ns: the app's, if it has set one.
            estimated: whether the pauses before and after it are the app's.
        """
        self.enter(estimated)
        return partial(self._settle, settled, deadline_ns, self.alive, estimated)

    def _settle(
        self, settled: Callable[[Result | None], None], deadline_ns: int | None, sent: bool, estimated: bool, result: Result | None
    ) -> None:
        settled(result)
        if sent and result is None and not self.alive:
            self.lost = True
        if deadline_ns is not None:
            self.use.answered(deadline_ns)
        self.leave(estimated)

    async def wait_idle(self) -> None:
        """Return when no execution uses it."""
        if self.users:
            await self.next_gap()

    async def next_gap(self) -> None:
        """Return when the last of the executions in flight ends, now or after the next has begun."""
        if self._gap is None:
            self._gap = anyio.Event()
        await self._gap.wait()


class Use:
    """How much the app uses a compilation, over all its stages, while its executions are watched.

    Attributes:
        executions: so many have begun. last_ns: CLOCK_MONOTONIC, when the last one did.
        touches: counts uses other than executions over an open burst.
        held: so many acts need the prepared model to stay, such as a swap.
        over: set when the compilation is closed or has been collected.
    """

    __slots__ = ("_awaited", "_idle_ns", "_idle_since_ns", "_left_ns", "_reached", "executions", "held", "last_ns", "over", "touches")

    def __init__(self) -> None:
        self.executions = 0
        self.last_ns = 0
        self._idle_since_ns = 0
        self._idle_ns: deque[int] = deque(maxlen=_IDLES)
        self._left_ns: deque[int] = deque(maxlen=_DEADLINES)
        self._awaited = -1
        self._reached = anyio.Event()
        self.touches = 0
        self.held = 0
        self.over = anyio.Event()

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Keep the prepared model in its driver for the body, which counts as use."""
        self.held += 1
        try:
            yield
        finally:
            self.held -= 1
            self.touches += 1

    def count(self) -> None:
        self.executions += 1
        self.last_ns = time.monotonic_ns()
        if self.executions == self._awaited:
            self._reached.set()

    def idle_began(self, known: bool = True) -> None:
        """Note that nothing is executed now. `known`: whether the app's execution ended just now, so that this pause is the app's."""
        self._idle_since_ns = time.monotonic_ns() if known else 0

    def idle_ended(self) -> None:
        if self._idle_since_ns:
            self._idle_ns.append(time.monotonic_ns() - self._idle_since_ns)

    @property
    def idle_s(self) -> float:
        """The usual time between the end of an execution and the beginning of the next, as the median of the last few; 0 while unknown."""
        import statistics  # 2 ms of an app's start, for mode "staged" alone

        return statistics.median(self._idle_ns) / 1e9 if self._idle_ns else 0.0

    def answered(self, deadline_ns: int) -> None:
        """Note that an execution with that deadline has been answered, or will never be."""
        self._left_ns.append(deadline_ns - time.monotonic_ns())

    @property
    def least_left_s(self) -> float | None:
        """The least time that was left of a deadline when its answer came, among the last few. None if there were no deadlines."""
        return min(self._left_ns) / 1e9 if self._left_ns else None

    async def wait_for(self, executions: int) -> None:
        """Return when so many executions have begun. One task at a time may wait."""
        if self.executions < executions:
            self._reached = anyio.Event()
            self._awaited = executions
            await self._reached.wait()


DRAIN_S = 2.0
"""How long a swap holds new executions back until those in flight have ended. A slower model is swapped without holding back if it has
no device memory. It is not swapped at all if it has."""

LINK_S = 5.0
"""How long the new model's driver may take to connect the open bursts. Nothing is held back meanwhile."""

MOVE_S = 1.0
"""How long executions are held back for what remains to be done when none is in flight: mostly copying device memory."""


class NotNowError(CallerError):
    """The swap is possible, but not at this moment."""


class Change(Protocol):
    """What a member has prepared for a swap. Either `commit` or `release_new` is called, once."""

    def check(self) -> None:
        """Return if the change may be committed now.

        Raises:
            NotNowError: the member has been used since the change was prepared.
        """
        ...

    def commit(self) -> None:
        """Use the new model from now on. Nothing may fail here."""
        ...

    async def release_old(self) -> None:
        """Free what the change has replaced.

        Raises:
            AionnError: the driver is gone, and all that it held with it.
        """
        ...

    def release_new(self) -> None:
        """Free what was prepared, without waiting."""
        ...


class Rest(NamedTuple):
    """What a member can give back while the app does not use it.

    Attributes:
        sent: so many requests have gone over it.
        give_back: free its part in the driver, without waiting. The next use makes it anew.
    """

    sent: int
    give_back: Callable[[], None]


class Member(Protocol):
    """An open burst, or a device memory, of a compilation."""

    @property
    def needs_gap(self) -> bool:
        """Whether it can prepare a change only while no execution is in flight."""
        ...

    async def prepare(self, better: Serving) -> Change | None:
        """Prepare a change to `better`. Returns None if there is nothing to change.

        Raises:
            NotNowError: the member is in use.
            AionnError: the other driver cannot serve it.
        """
        ...

    def rest(self) -> Rest | None:
        """Return what it can give back now. Returns None if the app uses it, or if it would lose what the app needs."""
        ...

    async def wait_idle(self) -> None:
        """Return when none of its requests is in flight, apart from those that `Serving.users` counts."""
        ...

    def count_from_now(self) -> None:
        """Count every execution that begins, until `CompiledModel.watched` is 0 again."""
        ...

    def end(self) -> None:
        """Close without waiting: the runtime has closed, and every driver has ended. Calls that wait here end with `CallerError`."""
        ...


class Gate:
    """Holds executions back while it is shut, and lets them pass one after the other, in the order in which they came.

    Attributes:
        shut: whether an execution must call `passed`. It must while the gate is closed, and while executions that waited are still
            passing. Read it first, because the answer is nearly always no.
        closed: whether it holds every execution back. Read it again after an await that followed `passed`.
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
        # A caller that comes while others still pass queues behind them.
        if self._turns:
            self._turns[0].come.set()
        else:
            self.shut = False

    async def wait_for_arrival(self) -> None:
        """Return when an execution waits. One task at a time may ask."""
        if not self._turns:
            self._came = anyio.Event()
            await self._came.wait()

    async def passed(self, deadline_ns: int | None) -> None:
        """Wait for it to open, and for those who came before. The next execution passes after the caller's next await.

        Raises:
            DeadlineError: it did not by the deadline.
        """
        turn = _Turn()
        self._turns.append(turn)
        self._came.set()
        if not self.closed:
            self._next()
        try:
            with anyio.move_on_after(seconds_until(deadline_ns)):
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


class Sampling(Protocol):
    """Keeps inputs of executions, as copies."""

    def take(self, inputs: Mapping[str, Any]) -> None: ...

    async def take_placed(self, inputs: Mapping[str, Any], placed: Mapping[str, Any]) -> None: ...


class CompiledModel:
    """What a compilation serves from. It knows weakly the members that a swap must take along.

    Attributes:
        serving: what executions enter now; None before the first preparation.
        watched: bursts count their executions (`Serving.enter`) while this is above 0. Otherwise they leave that out, since it costs.
        sampling: keeps inputs of executions, or None.
        swaps: how many there have been.
        members: open bursts and device memories.
        abandoned: called when the compilation is closed, or has been collected.
        at_release: called when the model is released, to free memory that no member owns. Each may be called again.
        on_failure: called when an execution of the app's was answered with an error, and when the driver has died under one; with the
            inputs if they are at hand.
        devices_for: gives the devices that may serve after a driver's death, the best first; or None for the same device.
        replaced: called when the model was prepared anew after a driver's death, or after idle time.
        closed: whether the compilation has been closed or collected, or its runtime closed.
        held_back: whether an execution in this thread may have passed the gate, and come to use device memory after the gate was closed.
    """

    held_back = False  # nothing is awaited between the two

    def __init__(self, tasks: Tasks) -> None:
        self._tasks = tasks
        self.serving: Serving | None = None
        self.use = Use()
        self.gate = Gate()
        self.swaps = 0
        self.watched = 0
        self.sampling: Sampling | None = None
        self.members: weakref.WeakSet[Member] = weakref.WeakSet()
        self.abandoned: Callable[[], None] | None = None
        self.at_release: list[Callable[[], None]] = []
        self.on_failure: Callable[[Serving, AionnError, Mapping[str, Any] | None], None] | None = None
        self.devices_for: Callable[[Serving], Sequence[str]] | None = None
        self.replaced: Callable[[Serving, Serving], None] | None = None
        self.closed = False
        self._swapping = anyio.Lock()

    def cancel(self) -> None:
        """Stop what works for the compilation, which is closed or has been collected. Call it in the loop's thread."""
        self.closed = True
        self.use.over.set()
        if self.abandoned is not None:
            self.abandoned()

    def failed(self, serving: Serving, error: AionnError, inputs: Mapping[str, Any] | None = None) -> None:
        """Report that an execution of the app's failed on `serving`, or that its driver has died."""
        if self.on_failure is not None:
            self.on_failure(serving, error, inputs)

    def release(self) -> None:
        """Free the model in the driver, without waiting."""
        self.cancel()
        for free in self.at_release:
            free()
        if self.serving is not None:
            self.serving.release()

    def end(self) -> None:
        """Close what is left without waiting: the runtime has closed, and every driver has ended.

        An app may keep bursts and device memories of a compilation that it has dropped.
        """
        for member in list(self.members):
            member.end()
        self.release()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Count every execution that begins in the body."""
        self.watched += 1
        for member in list(self.members):
            member.count_from_now()
        try:
            yield
        finally:
            self.watched -= 1

    # --- giving the driver's memory back -------------------------------------------------------------------------------

    def rests(self) -> list[Rest] | None:
        """Return what its members can give back while the app does not use it. Returns None if it is in use, or does not serve."""
        serving = self.serving
        if serving is None or not serving.alive or serving.users or self.use.held or self.gate.shut or self._swapping.locked():
            return None
        rests = [member.rest() for member in list(self.members)]
        found = [rest for rest in rests if rest is not None]
        return found if len(found) == len(rests) else None

    # --- the swap --------------------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def held(self, serving: Serving, *, drain_s: float = DRAIN_S) -> AsyncIterator[bool]:
        """Hold back the executions that come now until the body ends. The caller bounds the time that the body takes.

        Yields whether those in flight on `serving` have ended within `drain_s`.
        """
        async with self._swapping:
            with self.watching():
                self.gate.close()
                try:
                    yield await _drained(serving, list(self.members), drain_s)
                finally:
                    self.gate.open()

    async def swap(self, better: Serving, *, drain_s: float = DRAIN_S, may_swap: Callable[[], bool] = lambda: True) -> int:
        """Let every execution from now on use `better`. The one before is released when its last execution has ended.

        Returns for how many nanoseconds executions were held back.

        Args:
            drain_s: how long new executions are held back for those in flight.
            may_swap: asked when nothing is in flight; False leaves everything as it is.

        Raises:
            NotNowError: it may work at another moment.
            DeadlineError: its driver has not done its part within LINK_S or MOVE_S. It is left alive, since it may serve others.
            AionnError: `better` cannot take over.
            In all cases nothing has changed, and `better` stays the caller's.
        """
        async with self._swapping:
            changes: dict[Member, Change | None] = {}
            with self.watching():
                try:
                    with _within(LINK_S, f"device {better.device!r} did not connect the open bursts"):
                        await self._prepare(better, changes, in_gap=False)
                    self.gate.close()
                    began_ns = time.monotonic_ns()
                    try:
                        with trace.span("stage.swap", stage=better.stage):
                            old = await self._exchange(better, changes, drain_s, may_swap)
                    finally:
                        self.gate.open()
                    held_ns = time.monotonic_ns() - began_ns
                except BaseException:
                    for change in changes.values():
                        if change is not None:
                            change.release_new()
                    raise
            committed = [change for change in changes.values() if change is not None]
            self._tasks.start_soon(_release_replaced, committed, old, name="the stage before")
            return held_ns

    async def _exchange(
        self, better: Serving, changes: dict[Member, Change | None], drain_s: float, may_swap: Callable[[], bool]
    ) -> Serving | None:
        old = self.serving
        drained = old is None or await _drained(old, list(self.members), drain_s)
        if not may_swap():
            raise NotNowError("the app has swapped in another model meanwhile")
        with _within(MOVE_S, f"device {better.device!r} did not take over bursts and device memory"):
            await self._prepare(better, changes, in_gap=False)  # bursts that were opened meanwhile
            if not drained and any(member.needs_gap for member in self.members):
                raise NotNowError(f"executions were in flight for more than {drain_s} s, and there is device memory to move")
            await self._prepare(better, changes, in_gap=True)
        for _ in range(2):
            await checkpoint()  # the loop polls pidfds in between, so the end of a driver is noticed
        # From here to the end nothing is awaited: this is the swap.
        if self.closed:
            raise CallerError("the compilation was closed")
        better.check_alive()
        if self.serving is not old:
            raise NotNowError("the driver was started anew during the swap")
        for change in changes.values():
            if change is not None:
                change.check()
        if any(member not in changes for member in self.members):
            raise NotNowError("a burst was opened, or device memory allocated, during the swap")
        self.serving = better
        self.swaps += 1
        for change in changes.values():
            if change is not None:
                change.commit()
        return old

    async def _prepare(self, better: Serving, changes: dict[Member, Change | None], *, in_gap: bool) -> None:
        async def prepare(member: Member) -> None:
            changes[member] = await member.prepare(better)

        await each(partial(prepare, member) for member in list(self.members) if member not in changes and member.needs_gap is in_gap)


@contextmanager
def _within(seconds: float, what: str) -> Iterator[None]:
    with anyio.move_on_after(seconds) as scope:
        yield
    if scope.cancelled_caught:
        raise DeadlineError(f"{what} within {seconds:g} s")


async def _drained(old: Serving, members: Sequence[Member], drain_s: float) -> bool:
    with anyio.move_on_after(drain_s):
        await old.wait_idle()
        for member in members:
            await member.wait_idle()
        await old.wait_idle()
        return True
    return False


async def _release_replaced(changes: Sequence[Change], old: Serving | None) -> None:
    """Free what no longer serves when its last execution has ended."""
    try:
        if old is not None:
            await old.wait_idle()
        for change in changes:
            await change.release_old()
        if old is not None:
            await old.aclose()
            trace.count("stage.released", stage=old.stage)
    except AionnError as error:
        trace.count("stage.release_failed", reason=str(error))  # its driver is gone, and the model with it
