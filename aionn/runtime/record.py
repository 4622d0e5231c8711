"""The record of one open runtime: what happens is a typed event that is published once, and each reader takes from it what it shows.

    the statistics page   `_ON_PAGE`: starts and ends of drivers, outcomes of compilations, states of stages, refusals of caches
    traces                `_trace`: counters, and the span of a driver's start
    events                streams for `Runtime.events`, and the function of `compile(on_event=)`
    health                `Record.under_way`: the preparations that the app waits for

Metrics, OpenTelemetry and `aionn top` read the page. What happens to frames is counted by native code, in slots that bursts have. A log
line is written where the event is published, because it says more than the event has.

`CompilationRecord` is one for each compilation, and `DriverRecord` one for the drivers of a device. Each preparation of a model has a
`Progress`. The code that prepares does not hold it. It says `current.get().enter(device, COMPILING)`, and the `Progress` whose `with`
block the code runs in shows that step. Tasks inherit the context variable `current` from the task that starts them. A model that is
cut over two devices is in two steps at the same time.

Invariants
    All methods of `Record` run in the loop's thread, do not wait, and do not raise.
    A listener that does not keep up loses its oldest events, and `EventStream.lost` counts them.
    Every `Progress` that begins publishes `CompileStarted`, and then `CompileDone` once, also if it fails or is cancelled.
    Only the loop's thread changes a `Progress` or `under_way`. Any thread may read them: each number and each text is stored whole,
    and `list(under_way.values())` is one step.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import logging
import os
import struct
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar, Token
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, NoReturn, Self

import anyio
import msgspec

from aionn import trace
from aionn.caching.outcomes import CacheOutcome, CacheOutcomeKind, MissReason, Refusal
from aionn.errors import CallerError
from aionn.events import (
    CacheRefused,
    CompileDone,
    CompileStarted,
    CompileStep,
    CompileWaiting,
    DriverEnded,
    DriverHung,
    DriverStarted,
    Event,
    StageChanged,
)
from aionn.hal.types import Priority
from aionn.pages.app_layout import CALL_TIMES, DEVICE_COUNTERS, EVICTED, FAILED_COMPILES, PID, REASONS, STAGE_COUNTERS, STARTS, Kind
from aionn.pages.app_page import BurstSlot, close_page, open_page
from aionn.pages.page import until_beat_s
from aionn.runtime.tracing import OutsideTracer, leave_source, share_source

STARTING = "starting the driver"
READING = "reading the model"
LOOKING = "looking into the cache"
LOADING = "loading from the cache"
ASKING = "asking what the device can run"
ASKING_BACKEND = "asking the compile backend"
COMPILING = "compiling"
WAITING = "waiting for another process that compiles it"
FAILED = "waiting after a failure"

Cause = Literal["first", "death", "idle"]

NO_FAULT = {
    MissReason.ABSENT,
    MissReason.OTHER_DRIVER_VERSION,
    MissReason.BUSY,
    MissReason.SUPERSEDED,
}
"""Reasons of a miss, or of a failed save, that show no fault of an entry or of the cache."""

_MOST_CHARACTERS = 200
"""So many characters of a backend's words are shown."""

_WORST_FIRST = (CacheOutcomeKind.MISS, CacheOutcomeKind.DECLINED, CacheOutcomeKind.NO_CACHE, CacheOutcomeKind.HIT)

_numbers = itertools.count()
_expected: ContextVar[Progress | None] = ContextVar("aionn expected compilation", default=None)

logger = logging.getLogger("aionn.runtime")

MOST_WAITING = 256
"""So many events wait for one listener. Then the oldest is dropped."""


def about(*, device: str = "", model: str = "", burst: str = "", stage: str = "") -> dict[str, str]:
    """Return `extra=` for a log record: `aionn_device` and so on, beside its text. Names that are empty are left out."""
    names = {"aionn_device": device, "aionn_model": model, "aionn_burst": burst, "aionn_stage": stage}
    return {key: name for key, name in names.items() if name}


class EventStream:
    """The events of one runtime from now on: `async for event in runtime.events()`. It ends when the runtime is closed.

    Attributes:
        lost: how many events were dropped because this stream was not read.
    """

    def __init__(self, record: Record) -> None:
        self._record = record
        self._waiting: deque[Event] = deque()
        self._news = anyio.Event()
        self.lost = 0
        record.streams.append(weakref.ref(self))

    def __aiter__(self) -> EventStream:
        return self

    if not TYPE_CHECKING:  # a type checker reports a plain `for` by itself

        def __iter__(self) -> NoReturn:
            raise CallerError("events come one after the other; write `async for event in runtime.events()`, not a plain `for`")

    async def __anext__(self) -> Event:
        while not self._waiting:
            if self._record.ended:
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


class Listener:
    """Publishes the events of one compilation, and calls the app's function with each. An error of the function disturbs nothing."""

    def __init__(self, record: Record, on_event: Callable[[Event], object], compilation: str) -> None:
        self._record = record
        self._on_event = on_event
        self._compilation = compilation
        self._failed = False

    def __call__(self, event: Event) -> None:
        """Publish an event, and call the function. Log its first error.

        A CancelledError that the function raises counts as an error, and cancels nothing.
        """
        self._record.publish(event)
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


_NUMBER_OF = {reason.value: number for number, reason in enumerate(MissReason)}


class Record:
    """What one opening of a runtime shows. `end` must follow.

    Attributes:
        name: of the runtime.
        page: the statistics page of this process.
        slot: of the runtime on that page.
        streams: get all events from now on, as long as they live.
        ended: whether the runtime was closed, so that no event follows.
        under_way: the preparations that the app waits for, by number, the oldest first.
        beat_ns: when the loop last ran its heartbeat (CLOCK_MONOTONIC).
        each_beat: bound methods that are called with each heartbeat, once a second, as long as their objects live.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, name: str) -> None:
        self._loop = loop
        self.name = name
        self.page = open_page()
        self.slot = self.page.slot(Kind.RUNTIME, self.name, "starting")
        self.streams: list[weakref.ref[EventStream]] = []
        self.ended = False
        self.under_way: dict[int, Progress] = {}
        self.beat_ns = time.monotonic_ns()
        self.each_beat: list[weakref.WeakMethod[Callable[[], None]]] = []
        self._compiling: Counter[tuple[str, bool]] = Counter()
        self._evicted: Counter[str] = Counter()
        self._source = share_source()
        self._tracer = OutsideTracer(self.page)
        self._beat_on()

    def _beat_on(self) -> None:
        """Write the loop's heartbeat, now and from now on."""
        self._beat: asyncio.TimerHandle = self._loop.call_later(until_beat_s(), self._beat_on)  # first: the heart outlives what it calls
        self.beat_ns = time.monotonic_ns()
        self.page.beat(self.slot)
        self._tracer.beat()
        for call in list(self.each_beat):
            found = call()
            if found is None:
                self.each_beat.remove(call)
            else:
                found()

    def publish(self, event: Event, low_priority: bool = False) -> None:
        """Give an event to its readers. `low_priority`: whether it is about the device's driver for compilations of low priority."""
        count = _ON_PAGE.get(type(event))
        if count is not None:
            count(self, event, low_priority)
        if trace.active:
            _trace(event)
        for found in list(self.streams):
            stream = found()
            if stream is None:
                self.streams.remove(found)
            else:
                stream.put(event)

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
            slot.add(REASONS + _NUMBER_OF[outcome.reason.value], 1)
        slot.took(CALL_TIMES, took_ns)

    # --- stages ----------------------------------------------------------------------------------------------------------

    def stage(self, model: str, stage: str) -> BurstSlot:
        """Return the slot of a stage of the compilations with that name, which counts as `STAGE_COUNTERS` says."""
        return self.page.lasting(Kind.STAGE, self.page.named("model", model, self.name), "", stage, "", self.name)

    # --- caches ----------------------------------------------------------------------------------------------------------

    def cache(self, directory: str) -> BurstSlot:
        """Return the slot of a cache, which counts as `CACHE_COUNTERS` says."""
        return self.page.lasting(Kind.CACHE, os.path.basename(directory), "", "", "", self.name)

    def cache_holds(self, directory: str, held_bytes: int, entries: int, evicted: int) -> None:
        """Show what a cache holds. `evicted`: entries that this runtime has removed so far."""
        slot = self.cache(directory)
        self.page.gauge(slot, held_bytes, entries)
        slot.add(EVICTED, evicted - self._evicted[directory])
        self._evicted[directory] = evicted

    def end(self) -> None:
        """Show nothing of this runtime any longer. Idempotent."""
        self._beat.cancel()
        if not self.ended:
            self.ended = True
            self._tracer.end()
            leave_source(self._source)
            for found in self.streams:
                if (stream := found()) is not None:
                    stream.wake()
            self.page.release(self.slot)
            close_page(self.page)


def _count_end(record: Record, event: DriverEnded, low_priority: bool) -> None:
    slot = record.device(event.device, low_priority)
    slot.add(DEVICE_COUNTERS[event.cause], 1)
    if slot.get(PID) == event.pid:  # the device may have the next driver already
        slot.describe(PID, struct.pack("=Q", 0))


def _count_state(record: Record, event: StageChanged, _low_priority: bool) -> None:
    slot = record.stage(event.compilation, event.stage)
    slot.add(STAGE_COUNTERS[event.state], 1)
    record.page.rename(slot, record.page.named("model", event.compilation, record.name), event.state)


def _count_refusal(record: Record, event: CacheRefused, _low_priority: bool) -> None:
    record.cache(event.cache).add(REASONS + _NUMBER_OF[event.reason], 1)


_ON_PAGE: dict[type[Event], Callable[[Record, Any, bool], None]] = {
    DriverEnded: _count_end,
    StageChanged: _count_state,
    CacheRefused: _count_refusal,
}
"""How the page counts an event. What it counts of a compile is counted for each device, in `Progress.on`."""


def _trace(event: Event) -> None:
    """Report an event to who listens to `aionn.trace`. What takes a compile long are spans, where it is done."""
    match event:
        case DriverStarted():
            trace.span_at("driver.start", event.at_ns - int(event.seconds * 1e9), event.at_ns, device=event.device, pid=event.pid)
        case DriverHung():
            trace.count("driver.hung", device=event.device)
        case DriverEnded():
            trace.count("driver.ended", device=event.device, exit_code=event.exit_code)
        case StageChanged():
            trace.count("stage.entered", stage=event.stage, state=event.state)
            if event.state == "rejected":
                trace.count("stage.rejected", stage=event.stage, reason=event.reason)


class DriverRecord:
    """What a runtime shows of the driver processes of one device, one after the other. A driver process calls it.

    Of a worker in the background, only traces are shown.
    """

    def __init__(self, record: Record | None, device: str, low_priority: bool = False) -> None:
        """`record`: of the runtime, or None for a worker in the background."""
        self._record = record
        self._device = device
        self._low_priority = low_priority

    def publish(self, event: Event) -> None:
        """Give an event to its readers."""
        if self._record is not None:
            self._record.publish(event, self._low_priority)
        elif trace.active:
            _trace(event)

    def spawned(self, pid: int) -> None:
        """Count a driver process that was started."""
        if self._record is not None:
            slot = self._record.device(self._device, self._low_priority)
            slot.add(STARTS, 1)
            slot.describe(PID, struct.pack("=Q", pid))

    def greeted(self, kind: str, version: str) -> None:
        """Show the type of the device, and the version of its engine."""
        if self._record is not None:
            slot = self._record.device(self._device, self._low_priority)
            self._record.page.rename(slot, self._device, kind, "low" if self._low_priority else "", version)


class CompilationRecord:
    """What one compilation shows.

    Attributes:
        name: in health, metrics, traces and logs.
        required: whether the runtime's health waits for it.
        took_s: what each step of the last preparation took, by device and step.
        of_runtime: the record of the runtime.
        publish: gives an event to the readers of that record, and to the compilation's listener.
        low_priority: whether drivers for compilations of low priority prepare it.
    """

    def __init__(
        self,
        record: Record,
        name: str,
        required: bool = True,
        on_event: Callable[[Event], object] | None = None,
        priority: Priority = Priority.MEDIUM,
    ) -> None:
        """`record`: of the runtime. `on_event`: the app's listener to the events of this compilation, or None."""
        self.name = name
        self.required = required
        self.took_s: dict[tuple[str, str], float] = {}
        self.of_runtime = record
        self.low_priority = priority is Priority.LOW
        self.publish: Callable[[Event], None] = record.publish if on_event is None else Listener(record, on_event, name)

    def stage_entered(self, stage: str, state: str, reason: str) -> None:
        """Publish that a stage has entered a state."""
        self.publish(StageChanged(compilation=self.name, stage=stage, state=state, reason=reason))

    def stage_swapped(self, stage: str, held_ns: int) -> None:
        """Count a swap to a stage, for which executions were held back for so long."""
        self.of_runtime.stage(self.name, stage).took(CALL_TIMES, held_ns)


class OneDevice(msgspec.Struct):
    """One preparation on one device.

    Attributes:
        outcome: how it came out, or None if it failed.
        unfit: whether the device cannot run the whole model. Another device is tried then, so this is not counted.
    """

    outcome: CacheOutcome | None = None
    unfit: bool = False


class Unwatched:
    """A preparation of which nothing is shown, also in the `with` block of a `Progress`.

    Attributes:
        name: of the compilation.
        outcomes: assign them when everything is prepared.
    """

    def __init__(self, name: str = "") -> None:
        self.name = name
        self.outcomes: Sequence[CacheOutcome] = ()
        self._before: Token[Unwatched]

    def __enter__(self) -> Self:
        self._before = current.set(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        current.reset(self._before)

    def enter(self, device: str, step: str, expected_s: float | None = None) -> None:
        """Begin a step on a device. `expected_s`: what the cache knows about it. None: what the compilation's last preparation took."""

    def says(self, device: str, words: str) -> None:
        """Show the words of a compile backend as the step of a device. They belong to the step that has begun, which goes on."""

    def waits(self, device: str) -> None:
        """Report that another process or compilation compiles the same."""

    def refused(self, directory: str, device: str, refusal: Refusal | None) -> None:
        """Publish that an entry of a cache, or a new artifact, was refused. Reasons that show no fault are left out."""

    def on(self, device: str) -> AbstractContextManager[OneDevice]:
        """Count the body as one preparation on a device. The body sets `outcome` of what this yields."""
        return nullcontext(OneDevice())


current: ContextVar[Unwatched] = ContextVar("aionn progress", default=Unwatched())  # noqa: B039 - nothing changes it
"""The preparation that the running code is a part of."""


class Progress(Unwatched):
    """One preparation of a compilation's model, which begins and ends with the `with` block.

    Attributes:
        required: whether the runtime's health waits for the compilation.
        cause: "first", or why it is prepared again: "death" of its driver, or "idle" time. None if the app does not wait for it.
        device: where it is prepared. At first that of the first candidate.
        step: what is done now. While a compile backend is asked, the words that it reports.
        step_ns: when the step began (CLOCK_MONOTONIC).
        failure: why the last attempt failed, in words, and whether there will be another one. Else empty.
        outcomes: without them the preparation counts as failed.
    """

    def __init__(
        self, record: CompilationRecord, device: str, on_step: Callable[[str], None] | None = None, cause: Cause | None = None
    ) -> None:
        """Begin nothing yet.

        Args:
            device: the first candidate.
            on_step: called with each step that begins.
            cause: why the app waits for this preparation. None if the app does not, so that `Health` does not show it.
        """
        super().__init__(record.name)
        self.required = record.required
        self.cause = cause
        self.device = device
        self.step = STARTING
        self._began_ns = self.step_ns = time.monotonic_ns()
        self.failure = ""
        self._record = record
        self._took_before_s = dict(record.took_s)  # a step that comes twice in this preparation has no last time yet
        self._on_step = on_step
        self._number = -1
        self._expected: Progress | None = None
        self._steps: dict[str, tuple[str, int]] = {}
        self._failure_counted = False

    def __enter__(self) -> Self:
        self._before = current.set(self)
        if self.cause is not None:
            expected = _expected.get()
            if expected is not None and expected.name == self.name:
                self._number, self._expected = expected._number, expected  # one compilation over all its attempts
            else:
                self._number = next(_numbers)
            self._record.of_runtime.under_way[self._number] = self
        self._record.publish(CompileStarted(compilation=self.name, device=self.device))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        current.reset(self._before)
        now_ns = time.monotonic_ns()
        took_ns = now_ns - self._began_ns
        outcome, reason, device = "failed", "it was cancelled", self.device
        if error is None and self.outcomes:
            for name, (step, began_ns) in self._steps.items():
                self._record.took_s[name, step] = (now_ns - began_ns) / 1e9
            worst = self.outcomes[0]
            device = worst.device
            if len(self.outcomes) > 1:
                worst = min(self.outcomes, key=lambda one: _WORST_FIRST.index(one.kind))
                device = "+".join(dict.fromkeys([one.device for one in self.outcomes]))
            outcome = worst.kind.value
            reason = ": ".join(filter(None, ("" if worst.reason is None else worst.reason.value, worst.detail)))
        else:
            if isinstance(error, Exception):
                reason = str(error)
            if not self._failure_counted and device and not isinstance(error, CallerError):
                runtime = self._record.of_runtime
                runtime.compiled(runtime.device(device, self._record.low_priority), None, took_ns)
        done = CompileDone(compilation=self.name, device=device, outcome=outcome, reason=reason, seconds=took_ns / 1e9)
        self._record.publish(done)
        if self._expected is not None:
            self._expected.device = self.device
            self._record.of_runtime.under_way[self._number] = self._expected
        elif self.cause is not None:
            del self._record.of_runtime.under_way[self._number]

    @property
    def began_ns(self) -> int:
        """When the preparation began (CLOCK_MONOTONIC). With several attempts, when the first one began."""
        return self._began_ns if self._expected is None else self._expected.began_ns

    def enter(self, device: str, step: str, expected_s: float | None = None) -> None:
        now_ns = time.monotonic_ns()
        if device in self._steps:
            ended, began_ns = self._steps[device]
            self._record.took_s[device, ended] = (now_ns - began_ns) / 1e9
        self._steps[device] = step, now_ns
        if self.step != step or self.device != device:
            self.step_ns = now_ns
        self.device, self.step = device, step
        if self._on_step is not None:
            self._on_step(step)
        expected_s = self._took_before_s.get((device, step)) if expected_s is None else expected_s
        self._record.publish(CompileStep(compilation=self.name, device=device, step=step, expected_s=expected_s))

    def says(self, device: str, words: str) -> None:
        self.device, self.step, self.step_ns = device, " ".join(words.split())[:_MOST_CHARACTERS], time.monotonic_ns()
        if self._on_step is not None:
            self._on_step(self.step)
        self._record.publish(CompileStep(compilation=self.name, device=device, step=self.step))

    def waits(self, device: str) -> None:
        self.device, self.step, self.step_ns = device, WAITING, time.monotonic_ns()
        self._record.publish(CompileWaiting(compilation=self.name, device=device))

    def failed(self, why: str) -> None:
        """Note that an attempt of an expected compilation has failed."""
        self.failure, self.step, self.step_ns = why, FAILED, time.monotonic_ns()

    @contextmanager
    def on(self, device: str) -> Iterator[OneDevice]:
        attempt, began_ns, runtime = OneDevice(), time.monotonic_ns(), self._record.of_runtime
        low_priority = self._record.low_priority
        slot = runtime.device(device, low_priority)
        runtime.compiling(slot, device, low_priority, 1)
        try:
            yield attempt
        finally:
            runtime.compiling(slot, device, low_priority, -1)
            if not attempt.unfit:
                self._failure_counted = attempt.outcome is None
                runtime.compiled(slot, attempt.outcome, time.monotonic_ns() - began_ns)

    def refused(self, directory: str, device: str, refusal: Refusal | None) -> None:
        if refusal is not None and refusal.reason not in NO_FAULT:
            self._record.publish(CacheRefused(cache=directory, device=device, reason=refusal.reason.value, detail=refusal.detail))


@contextmanager
def expecting(record: Record, name: str, required: bool) -> Iterator[Progress]:
    """Show during the body that the app will have this compilation, over all its attempts."""
    expected = Progress(CompilationRecord(record, name, required), "", cause="first")
    number = expected._number = next(_numbers)
    record.under_way[number] = expected
    before = _expected.set(expected)
    try:
        yield expected
    finally:
        _expected.reset(before)
        del record.under_way[number]
