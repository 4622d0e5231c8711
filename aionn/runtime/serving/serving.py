"""`Serving`: a prepared model that serves, or has served. `Use`: how much the app uses a compilation.

Invariants
    `Serving.users` counts calls that have taken it, and requests that its driver has not answered. A burst's usual requests are left out
    while `CompiledModel.watched` is 0; the burst's controller counts those.
    A serving that no longer serves is released when both counts are 0.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

import anyio

from aionn.errors import again
from aionn.hal.model import Model
from aionn.hal.types import Result

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
        asleep: whether it was given back because the app did not use it (`preparing.idling`). The next use prepares it again.
    """

    __slots__ = ("_idle", "asleep", "lost", "model", "prepared", "stage", "use", "users")

    def __init__(self, prepared: Prepared, model: Model, use: Use, stage: str | None = None) -> None:
        self.prepared = prepared
        self.stage = prepared.device.name if stage is None else stage
        self.model = model
        self.use = use
        self.users = 0
        self.lost = False
        self.asleep = False
        self._idle: list[anyio.Event] = []

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
            if self._idle:
                waiting, self._idle = self._idle, []
                for event in waiting:
                    event.set()

    def entered(
        self, settled: Callable[[Result | None], None], deadline_ns: int | None = None, *, estimated: bool = True
    ) -> Callable[[Result | None], None]:
        """Count an execution until its request is settled, whatever its caller does.

        Args:
            deadline_ns: the app's, if it has set one.
            estimated: whether the pauses before and after it are the app's.
        """
        self.enter(estimated)
        return partial(self._settled, settled, deadline_ns, self.alive, estimated)

    def _settled(
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
        event = anyio.Event()
        self._idle.append(event)
        try:
            await event.wait()
        finally:
            if event in self._idle:
                self._idle.remove(event)


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
