"""`BurstConnection`: what an open burst of a loop has in the driver that serves. `Connections`: those of all bursts of a compilation.

A burst outlives its driver. When that dies, awaiting calls end with `DriverDiedError`, and the next use connects to a new one. Frames
belong to the burst, not to the link; the new driver asks for their memories by the same slots.

Invariants
    `link` is alive or None. A dead one is replaced under `_connecting`, by one task. A living one is replaced by a swap (`install`).
    The loop and the driver's connection hold no reference to the burst. So a burst that the app drops is collected, and then closed.
"""

from __future__ import annotations

import weakref
from asyncio import _get_running_loop  # the public function raises where no loop runs, and each call would catch that
from collections import Counter
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import anyio
from msgspec.structs import replace

from aionn import trace
from aionn.errors import AionnError, CallerError, DeadlineError, again
from aionn.events import DropsSummary
from aionn.fmq.thread_waits import ThreadWaits
from aionn.hal.types import ExecutionPreference
from aionn.loopless import call_soon_from_anywhere
from aionn.pages.app_layout import ANSWERED, DROPPED, JOINED_ROWS, JOINED_RUNS, SENT, Kind
from aionn.pages.app_page import BurstSlot
from aionn.runtime.executing.admission import Admission
from aionn.runtime.executing.arguments import Arguments
from aionn.runtime.executing.execution import Executor, FallsBack, Shown
from aionn.runtime.executing.frames import Frames
from aionn.runtime.executing.link import Link, LinkOptions, release
from aionn.runtime.preparing.kept_model import KeptModel
from aionn.runtime.processes.spawning import DEFAULT_HANG_S
from aionn.runtime.serving.serving import Rest, Serving
from aionn.runtime.streaming.any_connection import AnyConnection, trace_of

if TYPE_CHECKING:
    from aionn.runtime.session import Session

_NOT_OPEN = "the burst is not open, or was closed; open one with `async with compilation.burst() as burst`"

_AFTER_A_VERDICT_S = 0.4
"""A request is asked for so much later than `hang_s`. The question makes a driver run, and one that hangs is judged by then."""


class BurstConnection(AnyConnection):
    """The connection of one burst of a loop to whichever driver serves. It follows a swap to another one (`Member`)."""

    needs_gap = False
    running_loop = staticmethod(_get_running_loop)

    def __init__(self, kept_model: KeptModel, executor: Executor, options: LinkOptions) -> None:
        super().__init__(kept_model.compiled, executor, options, kept_model.record.name)
        self._kept_model = kept_model
        self.session, self.loop = kept_model.session, kept_model.session.loop
        self._connecting = anyio.Lock()
        self._failures = 0
        self._failure: AionnError | None = None
        self._finalizer: weakref.finalize[Any, Any] = weakref.finalize(
            self, call_soon_from_anywhere, self.session.loop, release, executor.frames, self._held
        )
        self._finalizer.atexit = False

    # --- opening and closing -------------------------------------------------------------------------------------------

    async def open(self) -> None:
        if self._open:
            raise CallerError("this burst is open already; call compilation.burst() for another one")
        self._open = True
        try:
            await self._connect(None)
        except BaseException:
            self._open = False
            self.executor.frames.renew()  # nothing is left of an opening that failed
            raise
        self._compiled.members.add(self)

    def begin(self) -> None:
        """Open without waiting. The first request connects."""
        self._open = True
        self._compiled.members.add(self)

    def check_here(self) -> None:
        """Say what is wrong with a call that does not come in the runtime's loop, or return."""
        self.session.check_open()

    def check_open(self) -> None:
        """Return if the burst may be used.

        Raises:
            CallerError: it is not open, or this is another process or another event loop.
        """
        self.session.check_loop()
        if not self._open:
            raise CallerError(_NOT_OPEN)

    async def aclose(self) -> None:
        """End the burst: calls that still wait get `CallerError`; queues, frames and the driver's part are freed."""
        if not self._open or self.session.inherited:
            return
        self.session.check_loop()
        self._begin_close()
        try:
            if self.link is not None:
                await self.link.aclose(CallerError("the burst was closed while this call waited"))
        finally:
            self.end()
            if not self._compiled.closed:
                self.session.tasks.start_soon(self._kept_model.store_tuned, name="better artifact")

    def end(self) -> None:
        """Close without waiting. What `aclose` has begun is not done twice."""
        self._begin_close()
        self.link = None
        self._finalizer.detach()
        release(self.executor.frames, self._held)
        self.session.page.release(self.executor.counts)

    def _begin_close(self) -> None:
        self._open = False
        self.count_from_now()
        for close in list(self.when_closed):
            close()
        self._compiled.members.discard(self)
        self._compiled.use.touches += 1

    # --- sending -------------------------------------------------------------------------------------------------------

    async def route(self, deadline_ns: int | None) -> Link:
        """Return the link to send over. It is the right one until the next await."""
        gate = self._compiled.gate
        while True:
            if gate.shut:
                await gate.passed(deadline_ns)
            link = self.link
            if link is not None and link.alive:
                return link
            link = await self._connect(deadline_ns)
            if not gate.closed:
                return link

    async def _connect(self, deadline_ns: int | None) -> Link:
        """Return the live link. Make one first if the burst has no live link.

        One task connects at a time. The tasks that wait for it share its failure, so a driver that cannot connect is tried once.
        """
        failures = self._failures
        async with self._connecting:
            if self._failures > failures and self._failure is not None:
                raise again(self._failure)
            try:
                return await self._connect_alone(deadline_ns)
            except DeadlineError:
                raise  # this caller's own
            except AionnError as error:
                self._failures, self._failure = self._failures + 1, again(error)
                raise

    async def _connect_alone(self, deadline_ns: int | None) -> Link:
        while True:
            if not self._open:
                raise CallerError(_NOT_OPEN)
            link = self.link
            if link is not None and link.alive:
                return link
            if link is not None and link.serving.alive:
                await _ended_at_driver(link, self.session)
                self.link = None if self.link is link else self.link
                continue
            with self._compiled.use.hold():
                serving = await self._kept_model.live(deadline_ns)
                with trace.span("burst.connect", device=serving.device, stage=serving.stage, **trace_of(self)):
                    link = await self._link_to(serving)
                if serving is self._compiled.serving and self._open:
                    before = self.install(link)
                    if before is not None:  # a plan of which one driver is dead; the others free their parts
                        self.session.tasks.start_soon(_close, before, name="a dead link")
                    return link
            await link.aclose(CallerError("another stage has been swapped in"))

    # --- a swap ----------------------------------------------------------------------------------------------------------

    async def prepare(self, better: Serving) -> BurstChange:
        """Make a second link, while executions go on over the first."""
        return BurstChange(self, await self._link_to(better))

    def rest(self) -> Rest | None:
        """Return None while a frame is leased or a request is in flight. An open burst that is silent rests."""
        link = self.link
        if self.executor.frames.count()["pinned_frames"] or (link is not None and link.in_flight):
            return None
        return Rest(self.executor.counts.get(SENT), partial(_disconnect, self))

    async def wait_idle(self) -> None:
        if self.link is not None:
            await self.link.wait_idle()


class Connections:
    """The connections of all bursts of one compilation, and what they share. It knows them weakly.

    Once a second it publishes a summary of the frames that the streams have dropped, while there are any. A burst that ends is summed up
    once more, so the summaries together have every frame that was dropped.

    Attributes:
        kept_model: keeps the model prepared.
        arguments: how arguments are laid out.
        admission: refuses executions while too many wait, or None.
    """

    def __init__(self, kept_model: KeptModel, arguments: Arguments, fallback: FallsBack | None = None) -> None:
        """`fallback`: of the app's executions, or None."""
        self.kept_model = kept_model
        self._fallback = fallback
        self.arguments = arguments
        batching = kept_model.request.options.batching
        self.admission = None if batching is None else Admission(batching, kept_model.compiled)
        self._slot = kept_model.session.page.slot(Kind.COMPILATION, kept_model.record.name, parent=kept_model.session.record.slot)
        self._bursts: list[tuple[str, BurstSlot, weakref.ref[BurstConnection]]] = []
        self._seen: dict[int, tuple[int, int]] = {}
        self._joined: tuple[weakref.ref[Any] | None, int, int] = (
            None,
            0,
            0,
        )  # what a prepared model had run and its rows, when they were counted last
        kept_model.session.record.each_beat.append(weakref.WeakMethod(self._beat))

    def __iter__(self) -> Iterator[BurstConnection]:
        return iter([connection for _, _, found in self._bursts if (connection := found()) is not None])

    @property
    def static(self) -> bool:
        """Whether all shapes of the model are known, so that its frames have one size."""
        model = self.kept_model.model
        return all(operand.size_bytes is not None for operand in (*model.inputs.values(), *model.outputs.values()))

    def _beat(self) -> None:
        """Show how much memory the bursts have now."""
        for connection in self:
            if not connection.closed:
                frames = connection.executor.frames.count()
                self.kept_model.session.page.gauge(connection.executor.counts, frames["shared_bytes"], frames["free_frames"])
        self._publish_drops()
        self.count_joined()

    def count_joined(self) -> None:
        """Count what the driver has run with joined rows since the last call."""
        serving = None if self.admission is None else self.kept_model.compiled.serving
        joined = None if serving is None else serving.prepared.joined_runs()
        if serving is None or joined is None:
            return
        before, runs, rows = self._joined
        if before is None or before() is not serving.prepared:
            runs = rows = 0
        self._joined = weakref.ref(serving.prepared), joined.runs, joined.rows
        session, name = self.kept_model.session, self.kept_model.record.name
        past = session.page.past(Kind.PAST_BURSTS, name, serving.device, serving.stage, "", session.record.name)
        past.add(JOINED_RUNS, max(0, joined.runs - runs))
        past.add(JOINED_ROWS, max(0, joined.rows - rows))

    def _publish_drops(self) -> None:
        """Publish the drops since the last call, by the names of the bursts."""
        dropped: Counter[str] = Counter()
        frames: Counter[str] = Counter()
        for name, counts, _ in self._bursts:
            now = counts.get(DROPPED), counts.get(ANSWERED)
            before = self._seen.get(id(counts), (0, 0))
            self._seen[id(counts)] = now
            dropped[name] += max(0, now[0] - before[0])
            frames[name] += max(0, now[0] - before[0]) + max(0, now[1] - before[1])
        for name in dropped:
            if dropped[name]:
                event = DropsSummary(compilation=self.kept_model.record.name, burst=name, dropped=dropped[name], frames=frames[name])
                self.kept_model.record.publish(event)
        gone = [one for one in self._bursts if one[2]() is None]
        for one in gone:
            self._bursts.remove(one)
            del self._seen[id(one[1])]

    def executor(self, in_flight: int, kind: Kind = Kind.SINGLE, burst: str = "", waits: ThreadWaits | None = None) -> Executor:
        """Return what the app's executions over one burst have in common.

        Args:
            in_flight: so many frames of each size may be pinned.
            kind: what the page shows it as. burst: its name.
            waits: what its callers wait by, if that is not the runtime's loop.
        """
        kept_model = self.kept_model
        serving, device = kept_model.compiled.serving, kept_model.device
        now = device, device if serving is None else serving.stage
        shown = Shown(kept_model.session.record, kind, self._slot, kept_model.record.name, now, burst)
        own = Executor(self.arguments, Frames(in_flight, waits), kept_model.compiled, shown.counts)
        return replace(own, fallback=self._fallback, shown=shown, admission=self.admission)

    def new(self, depth: int, anticipate: bool = False, name: str | None = None) -> BurstConnection:
        """Return the connection of a new burst, not yet open. Its queues suit the model.

        `name`: of a burst of the app, perhaps empty. None for the burst behind `Compilation.compute`.
        """
        options = self.options(depth, anticipate, name or "")
        executor = self.executor(depth + 1, Kind.SINGLE if name is None else Kind.BURST, name or "")
        connection = BurstConnection(self.kept_model, executor, options)
        self.add(connection, options)
        return connection

    def options(self, depth: int, anticipate: bool, name: str) -> LinkOptions:
        """Return how a burst of this model is connected."""
        low_power = self.kept_model.request.options.preference is ExecutionPreference.LOW_POWER
        patience_s = (self.kept_model.session.devices.settings.hang_s or DEFAULT_HANG_S) + _AFTER_A_VERDICT_S
        return LinkOptions(depth, low_power, patience_s, anticipate, name)

    def add(self, connection: Any, options: LinkOptions) -> None:
        """Know a new connection, which any thread may have made: a `BurstConnection`, or a `RuntimeConnection` of a thread."""
        self._bursts.append((options.name, connection.executor.counts, weakref.ref(connection)))

    def close(self) -> None:
        """Take the compilation off the app's statistics page."""
        self._publish_drops()
        self.kept_model.session.page.release(self._slot)


class BurstChange:
    """A second link, not yet in use."""

    def __init__(self, connection: BurstConnection, link: Link) -> None:
        self._connection = connection
        self._link = link
        self._before: Link | None = None

    def check(self) -> None:
        """Return: a link cannot be outdated."""

    def commit(self) -> None:
        self._before = self._connection.install(self._link)

    async def release_old(self) -> None:
        if self._before is not None:
            await _close(self._before)

    def release_new(self) -> None:
        self._connection.session.tasks.start_soon(_close, self._link, name="a link of no use")


def _disconnect(connection: BurstConnection) -> None:
    """Give a resting burst's link back, without waiting. The next request connects anew, and asks for the same frames."""
    link, connection.link = connection.link, None
    connection.count_from_now()
    connection.executor.frames.on_gone = None
    connection._held.clear()
    if link is not None:
        link.release(CallerError("the burst was given back while it was not used"))


async def _close(link: Link) -> None:
    await link.wait_idle()
    await link.aclose(CallerError("this stage has been replaced"))


async def _ended_at_driver(link: Link, session: Session) -> None:
    """Return when the driver has closed its end of a link whose queues are broken. A caller that leaves does not stop that.

    The driver may still run a request that is lost, over a frame that the next request gets.
    """
    closed = anyio.Event()

    async def close() -> None:
        await _close(link)
        closed.set()

    session.tasks.start_soon(close, name="a broken link")
    await closed.wait()
