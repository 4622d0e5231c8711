"""What one open runtime shows of itself: on the statistics page of its process (`Reports`), and as events to those who listen.

Rare things are written here, from Python: starts and ends of drivers, outcomes of compilations, states of stages. What happens to frames
is counted by native code, in slots that bursts have. Each method counts on the page, and publishes the event where there is one.

Events (`aionn.events`) go to streams for `Runtime.events`, and to one function for `compile(on_event=)`.

Invariants
    All methods of `Reports` run in the loop's thread, do not wait, and do not raise.
    A listener that does not keep up loses its oldest events, and `EventStream.lost` counts them.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
import struct
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

import anyio

from aionn.caching.outcomes import CacheOutcome, MissReason, Refusal
from aionn.errors import CallerError
from aionn.events import CacheRefused, DriverEnded, DriverHung, DriverStarted, Event, StageChanged
from aionn.pages.app_layout import CALL_TIMES, DEVICE_COUNTERS, EVICTED, FAILED_COMPILES, PID, REASONS, STAGE_COUNTERS, STARTS, Kind
from aionn.pages.app_page import BurstSlot, close_page, open_page
from aionn.pages.page import BEAT_S
from aionn.runtime.logs import about
from aionn.runtime.tracing import OutsideTracer, leave_source, share_source

logger = logging.getLogger("aionn.runtime")

MOST_WAITING = 256
"""So many events wait for one listener. Then the oldest is dropped."""


class EventStream:
    """The events of one runtime from now on: `async for event in runtime.events()`. It ends when the runtime is closed.

    Attributes:
        lost: how many events were dropped because this stream was not read.
    """

    def __init__(self, events: Events) -> None:
        self._events = events
        self._waiting: deque[Event] = deque()
        self._news = anyio.Event()
        self.lost = 0
        events.streams.add(self)

    def __aiter__(self) -> EventStream:
        return self

    if not TYPE_CHECKING:  # a type checker reports a plain `for` by itself

        def __iter__(self) -> NoReturn:
            raise CallerError("events come one after the other; write `async for event in runtime.events()`, not a plain `for`")

    async def __anext__(self) -> Event:
        while not self._waiting:
            if self._events.ended:
                raise StopAsyncIteration
            if self._news.is_set():
                self._news = anyio.Event()
            await self._news.wait()
        return self._waiting.popleft()

    def put(self, event: Event) -> None:
        """Add an event, and drop the oldest one if too many wait."""
        if len(self._waiting) >= MOST_WAITING:
            self._waiting.popleft()
            self.lost += 1
        self._waiting.append(event)
        self._news.set()

    def wake(self) -> None:
        """Let the reader see that the runtime was closed."""
        self._news.set()


class Events:
    """Who listens to one runtime.

    Attributes:
        streams: get all events from now on, as long as they live.
        ended: whether the runtime was closed, so that no event follows.
    """

    def __init__(self) -> None:
        self.streams: weakref.WeakSet[EventStream] = weakref.WeakSet()
        self.ended = False

    def publish(self, event: Event) -> None:
        """Give an event to all streams."""
        for stream in list(self.streams):
            stream.put(event)

    def end(self) -> None:
        """End all streams."""
        self.ended = True
        for stream in list(self.streams):
            stream.wake()


class Listener:
    """The app's function that is called with each event of one compilation. An error of the function disturbs nothing."""

    def __init__(self, on_event: Callable[[Event], object], compilation: str) -> None:
        self._on_event = on_event
        self._compilation = compilation
        self._failed = False

    def __call__(self, event: Event) -> None:
        """Call the function. Log its first error. A CancelledError that the function raises counts as an error, and cancels nothing."""
        try:
            self._on_event(event)
        except (Exception, asyncio.CancelledError) as error:
            if not self._failed:
                self._failed = True
                logger.warning(
                    "on_event of compilation %r raised %s: %s; later errors of it are not logged, and the compilation goes on",
                    self._compilation,
                    type(error).__name__,
                    error,
                    exc_info=error,
                    extra=about(model=self._compilation),
                )


def checked_on_event(on_event: object) -> Callable[[Event], object] | None:
    """Return `compile(on_event=)`.

    Raises:
        CallerError: it is not a function, or it is an async function.
    """
    if on_event is not None and not callable(on_event):
        raise CallerError(f"on_event={on_event!r}: give a function that takes one event, or None")
    if inspect.iscoroutinefunction(on_event):
        raise CallerError(f"on_event={on_event!r} is an async function; give a plain one, or read runtime.events() in a task")
    return on_event


_NUMBER_OF = {reason: number for number, reason in enumerate(MissReason)}


class Reports:
    """What one opening of a runtime shows. `end` must follow.

    Attributes:
        name: of the runtime.
        page: the statistics page of this process.
        slot: of the runtime on that page.
        events: who listens to this runtime.
        under_way: the preparations (`Progress`) that the app waits for, by number, the oldest first.
        beat_ns: when the loop last ran its heartbeat (CLOCK_MONOTONIC).
        each_beat: bound methods that are called with each heartbeat, twice a second, as long as their objects live.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, name: str) -> None:
        self._loop = loop
        self.name = name
        self.page = open_page()
        self.slot = self.page.slot(Kind.RUNTIME, self.name, "starting")
        self.events = Events()
        self.under_way: dict[int, Any] = {}
        self.beat_ns = time.monotonic_ns()
        self.each_beat: list[weakref.WeakMethod[Callable[[], None]]] = []
        self._compiling: Counter[tuple[str, bool]] = Counter()
        self._evicted: Counter[str] = Counter()
        self._shown = True
        self._source = share_source()
        self._tracer = OutsideTracer(self.page)
        self._beat_on()

    def _beat_on(self) -> None:
        """Write the loop's heartbeat, now and from now on."""
        self._beat: asyncio.TimerHandle = self._loop.call_later(BEAT_S, self._beat_on)  # first: the heart outlives what it calls
        self.beat_ns = time.monotonic_ns()
        self.page.beat(self.slot)
        self._tracer.beat()
        for call in list(self.each_beat):
            found = call()
            if found is None:
                self.each_beat.remove(call)
            else:
                found()

    def publish(self, event: Event) -> None:
        """Give an event to all streams of `Runtime.events`."""
        self.events.publish(event)

    def drivers_end(self) -> None:
        """Read what drivers have recorded, before they end."""
        self._source.look()

    # --- devices ---------------------------------------------------------------------------------------------------------

    def device(self, name: str, low_priority: bool) -> BurstSlot:
        """Return the slot of a device, which counts as `DEVICE_COUNTERS` says."""
        return self.page.lasting(Kind.DEVICE, name, "", "low" if low_priority else "", "", self.name)

    def compiling(self, slot: BurstSlot, device: str, low_priority: bool, more: int) -> None:
        """Show that so many more compilations are under way on a device, whose slot it is. `more` may be negative."""
        self._compiling[device, low_priority] += more
        self.page.gauge(slot, self._compiling[device, low_priority])

    def compiled(self, slot: BurstSlot, outcome: CacheOutcome | None, took_ns: int) -> None:
        """Count a compilation on the device of that slot. `outcome`: None if it failed."""
        slot.add(FAILED_COMPILES if outcome is None else DEVICE_COUNTERS[outcome.kind.value], 1)
        if outcome is not None and outcome.reason is not None:
            slot.add(REASONS + _NUMBER_OF[outcome.reason], 1)
        slot.took(CALL_TIMES, took_ns)

    # --- stages ----------------------------------------------------------------------------------------------------------

    def stage(self, model: str, stage: str) -> BurstSlot:
        """Return the slot of a stage of the compilations with that name, which counts as `STAGE_COUNTERS` says."""
        return self.page.lasting(Kind.STAGE, self.page.named("model", model, self.name), "", stage, "", self.name)

    def stage_entered(self, model: str, stage: str, state: str, reason: str) -> StageChanged:
        """Count that a stage has entered a state. Returns the event, which is published."""
        slot = self.stage(model, stage)
        slot.add(STAGE_COUNTERS[state], 1)
        self.page.rename(slot, self.page.named("model", model, self.name), state)
        event = StageChanged(compilation=model, stage=stage, state=state, reason=reason)
        self.publish(event)
        return event

    def stage_swapped(self, model: str, stage: str, held_ns: int) -> None:
        """Count a swap to a stage. `held_ns`: how long executions were held back for it."""
        self.stage(model, stage).took(CALL_TIMES, held_ns)

    # --- caches ----------------------------------------------------------------------------------------------------------

    def cache(self, directory: str) -> BurstSlot:
        """Return the slot of a cache, which counts as `CACHE_COUNTERS` says."""
        return self.page.lasting(Kind.CACHE, os.path.basename(directory), "", "", "", self.name)

    def cache_refused(self, directory: str, device: str, refusal: Refusal) -> CacheRefused:
        """Count that an entry of a cache, or a new artifact, was refused. Returns the event, which is published."""
        self.cache(directory).add(REASONS + _NUMBER_OF[refusal.reason], 1)
        event = CacheRefused(cache=directory, device=device, reason=refusal.reason.value, detail=refusal.detail)
        self.publish(event)
        return event

    def cache_holds(self, directory: str, held_bytes: int, entries: int, evicted: int) -> None:
        """Show what a cache holds. `evicted`: entries that this runtime has removed so far."""
        slot = self.cache(directory)
        self.page.gauge(slot, held_bytes, entries)
        slot.add(EVICTED, evicted - self._evicted[directory])
        self._evicted[directory] = evicted

    def end(self) -> None:
        """Show nothing of this runtime any longer. Idempotent."""
        self._beat.cancel()
        if self._shown:
            self._shown = False
            self._tracer.end()
            leave_source(self._source)
            self.events.end()
            self.page.free(self.slot)
            close_page(self.page)


class DriverReports:
    """What a runtime shows of the driver processes of one device, one after the other. A driver process calls it."""

    def __init__(self, reports: Reports, device: str, low_priority: bool) -> None:
        self._reports = reports
        self._device = device
        self._low_priority = low_priority

    def _slot(self) -> BurstSlot:
        return self._reports.device(self._device, self._low_priority)

    def spawned(self, pid: int) -> None:
        """Count a driver process that was started."""
        slot = self._slot()
        slot.add(STARTS, 1)
        slot.describe(PID, struct.pack("=Q", pid))

    def greeted(self, pid: int, seconds: float, kind: str, version: str) -> None:
        """Publish that a driver process is ready, so long after its start. `kind`, `version`: type of the device, version of its engine."""
        low = "low" if self._low_priority else ""
        self._reports.page.rename(self._slot(), self._device, kind, low, version)
        self._reports.publish(DriverStarted(device=self._device, pid=pid, seconds=seconds))

    def hung(self, pid: int, seconds: float, stack: str, killed: bool) -> None:
        """Publish that a driver process hangs. See `aionn.events.DriverHung`."""
        self._reports.publish(DriverHung(device=self._device, pid=pid, seconds=seconds, stack=stack, killed=killed))

    def ended(self, pid: int, cause: str, exit_code: int | None) -> None:
        """Count the end of a driver process. `cause`: as of `aionn.events.DriverEnded`."""
        slot = self._slot()
        slot.add(DEVICE_COUNTERS[cause], 1)
        if slot.get(PID) == pid:  # the device may have the next driver already
            slot.describe(PID, struct.pack("=Q", 0))
        self._reports.publish(DriverEnded(device=self._device, pid=pid, cause=cause, exit_code=exit_code))
