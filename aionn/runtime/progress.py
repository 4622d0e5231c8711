"""How a compilation and its preparations are shown: on the statistics page, as events, in `Health`, and to `compile(on_event=)`.

`CompilationReports` is one for each compilation. Each preparation of its model has a `Progress`. The code that prepares does not hold it.
It says `current.get().enter(device, COMPILING)`, and the `Progress` whose `with` block the code runs in shows that step. Tasks inherit the
context variable `current` from the task that starts them. A model that is cut over two devices is in two steps at the same time.

Invariants
    Every `Progress` that begins publishes `CompileStarted`, and then `CompileDone` once, also if it fails or is cancelled.
    Only the loop's thread changes a `Progress` or `under_way`. Any thread may read them: each number and each text is stored whole,
    and `list(under_way.values())` is one step.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar, Token
from types import TracebackType
from typing import Literal, Self

import msgspec

from aionn.caching.outcomes import CacheOutcome, CacheOutcomeKind, MissReason, Refusal
from aionn.errors import CallerError
from aionn.events import CompileDone, CompileStarted, CompileStep, CompileWaiting, Event
from aionn.hal.types import Priority
from aionn.runtime.reports import Listener, Reports

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

_NO_REFUSALS = {
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


class Named(msgspec.Struct, frozen=True):
    """How a compilation is shown.

    Attributes:
        name: in health, metrics, traces and logs.
        required: whether the runtime's health waits for it.
        on_event: the app's listener to the events of this compilation, or None.
    """

    name: str = ""
    required: bool = True
    on_event: Callable[[Event], object] | None = None


class CompilationReports:
    """What one compilation shows.

    Attributes:
        named: its name, and who listens to it.
        took_s: what each step of the last preparation took, by device and step.
    """

    def __init__(self, reports: Reports, named: Named, priority: Priority = Priority.MEDIUM) -> None:
        """`reports`: of the runtime."""
        self.named = named
        self.took_s: dict[tuple[str, str], float] = {}
        self.of_runtime = reports
        self.low_priority = priority is Priority.LOW
        self._listener = None if named.on_event is None else Listener(named.on_event, named.name)

    def publish(self, event: Event) -> None:
        """Give an event to the listeners of the runtime and of the compilation."""
        if self.of_runtime.events.streams:
            self.of_runtime.publish(event)
        if self._listener is not None:
            self._listener(event)

    def _hear(self, event: Event) -> None:
        if self._listener is not None:
            self._listener(event)

    def cache_refused(self, directory: str, device: str, refusal: Refusal | None) -> None:
        """Report that an entry of a cache, or a new artifact, was refused. Reasons that show no fault are left out."""
        if refusal is not None and refusal.reason not in _NO_REFUSALS:
            self._hear(self.of_runtime.cache_refused(directory, device, refusal))

    def stage_entered(self, stage: str, state: str, reason: str) -> None:
        """Report that a stage has entered a state."""
        self._hear(self.of_runtime.stage_entered(self.named.name, stage, state, reason))

    def stage_swapped(self, stage: str, held_ns: int) -> None:
        """Count a swap to a stage, for which executions were held back for so long."""
        self.of_runtime.stage_swapped(self.named.name, stage, held_ns)


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
        named: how the compilation is shown.
        outcomes: assign them when everything is prepared.
    """

    def __init__(self, named: Named) -> None:
        self.named = named
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
        """Report that an entry of a cache, or a new artifact, was refused."""

    def on(self, device: str) -> AbstractContextManager[OneDevice]:
        """Count the body as one preparation on a device. The body sets `outcome` of what this yields."""
        return nullcontext(OneDevice())


current: ContextVar[Unwatched] = ContextVar("aionn progress", default=Unwatched(Named()))  # noqa: B039 - nothing changes it
"""The preparation that the running code is a part of."""


class Progress(Unwatched):
    """One preparation of a compilation's model, which begins and ends with the `with` block.

    Attributes:
        cause: "first", or why it is prepared again: "death" of its driver, or "idle" time. None if the app does not wait for it.
        device: where it is prepared. At first that of the first candidate.
        step: what is done now. While a compile backend is asked, the words that it reports.
        step_ns: when the step began (CLOCK_MONOTONIC).
        failure: why the last attempt failed, in words, and whether there will be another one. Else empty.
        outcomes: without them the preparation counts as failed.
    """

    def __init__(
        self, reports: CompilationReports, device: str, on_step: Callable[[str], None] | None = None, cause: Cause | None = None
    ) -> None:
        """Begin nothing yet.

        Args:
            device: the first candidate.
            on_step: called with each step that begins.
            cause: why the app waits for this preparation. None if the app does not, so that `Health` does not show it.
        """
        super().__init__(reports.named)
        self.cause = cause
        self.device = device
        self.step = STARTING
        self._began_ns = self.step_ns = time.monotonic_ns()
        self.failure = ""
        self._reports = reports
        self._on_step = on_step
        self._number = -1
        self._expected: Progress | None = None
        self._steps: dict[str, tuple[str, int]] = {}
        self._failure_counted = False

    def __enter__(self) -> Self:
        self._before = current.set(self)
        if self.cause is not None:
            expected = _expected.get()
            if expected is not None and expected.named.name == self.named.name:
                self._number, self._expected = expected._number, expected  # one compilation over all its attempts
            else:
                self._number = next(_numbers)
            self._reports.of_runtime.under_way[self._number] = self
        self._reports.publish(CompileStarted(compilation=self.named.name, device=self.device))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        current.reset(self._before)
        now_ns = time.monotonic_ns()
        took_ns = now_ns - self._began_ns
        outcome, reason, device = "failed", "it was cancelled", self.device
        if error is None and self.outcomes:
            for name, (step, began_ns) in self._steps.items():
                self._reports.took_s[name, step] = (now_ns - began_ns) / 1e9
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
                runtime = self._reports.of_runtime
                runtime.compiled(runtime.device(device, self._reports.low_priority), None, took_ns)
        done = CompileDone(compilation=self.named.name, device=device, outcome=outcome, reason=reason, seconds=took_ns / 1e9)
        self._reports.publish(done)
        if self._expected is not None:
            self._expected.device = self.device
            self._reports.of_runtime.under_way[self._number] = self._expected
        elif self.cause is not None:
            del self._reports.of_runtime.under_way[self._number]

    @property
    def began_ns(self) -> int:
        """When the preparation began (CLOCK_MONOTONIC). With several attempts, when the first one began."""
        return self._began_ns if self._expected is None else self._expected.began_ns

    def enter(self, device: str, step: str, expected_s: float | None = None) -> None:
        now_ns = time.monotonic_ns()
        if device in self._steps:
            ended, began_ns = self._steps[device]
            self._reports.took_s[device, ended] = (now_ns - began_ns) / 1e9
        self._steps[device] = step, now_ns
        if self.step != step or self.device != device:
            self.step_ns = now_ns
        self.device, self.step = device, step
        if self._on_step is not None:
            self._on_step(step)
        expected_s = self._reports.took_s.get((device, step)) if expected_s is None else expected_s
        self._reports.publish(CompileStep(compilation=self.named.name, device=device, step=step, expected_s=expected_s))

    def says(self, device: str, words: str) -> None:
        self.device, self.step, self.step_ns = device, " ".join(words.split())[:_MOST_CHARACTERS], time.monotonic_ns()
        if self._on_step is not None:
            self._on_step(self.step)
        self._reports.publish(CompileStep(compilation=self.named.name, device=device, step=self.step))

    def waits(self, device: str) -> None:
        self.device, self.step, self.step_ns = device, WAITING, time.monotonic_ns()
        self._reports.publish(CompileWaiting(compilation=self.named.name, device=device))

    def failed(self, why: str) -> None:
        """Note that an attempt of an expected compilation has failed."""
        self.failure, self.step, self.step_ns = why, FAILED, time.monotonic_ns()

    @contextmanager
    def on(self, device: str) -> Iterator[OneDevice]:
        attempt, began_ns, runtime = OneDevice(), time.monotonic_ns(), self._reports.of_runtime
        low_priority = self._reports.low_priority
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
        self._reports.cache_refused(directory, device, refusal)


@contextmanager
def expecting(reports: Reports, name: str, required: bool) -> Iterator[Progress]:
    """Show during the body that the app will have this compilation, over all its attempts."""
    expected = Progress(CompilationReports(reports, Named(name, required)), "", cause="first")
    number = expected._number = next(_numbers)
    reports.under_way[number] = expected
    before = _expected.set(expected)
    try:
        yield expected
    finally:
        _expected.reset(before)
        del reports.under_way[number]
