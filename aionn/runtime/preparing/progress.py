"""How a compilation and its preparations are shown: on the statistics page, as events, and to `compile(on_event=)`.

`CompilationReports` is one for each compilation. Each preparation of its model has a `Progress`, which the code that prepares gets as an
argument. A model that is cut over two devices is in two steps at the same time, one for each device.

Invariant
    Every `Progress` that begins publishes `CompileStarted`, and then `CompileDone` once, also if it fails or is cancelled.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import TracebackType

import msgspec

from aionn.caching.outcomes import CacheOutcome, CacheOutcomeKind, MissReason, Refusal
from aionn.errors import CallerError
from aionn.events import CompileDone, CompileStarted, CompileStep, CompileWaiting, Event
from aionn.hal.types import Priority
from aionn.remote.device import RemoteDevice
from aionn.runtime.events import Listener
from aionn.runtime.preparations import STARTING, WAITING, Preparation
from aionn.runtime.processes.devices import Devices
from aionn.runtime.reports import Reports

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
        took_s: what each step of the last preparation took, by device, step and how often the step came before.
    """

    def __init__(self, reports: Reports | None, named: Named, priority: Priority = Priority.MEDIUM) -> None:
        """`reports`: of the runtime. None shows nothing."""
        self.named = named
        self.took_s: dict[tuple[str, str, int], float] = {}
        self._reports = reports
        self._low_priority = priority is Priority.LOW
        self._listener = None if named.on_event is None else Listener(named.on_event, named.name)

    def publish(self, event: Event) -> None:
        """Give an event to the listeners of the runtime and of the compilation."""
        if self._reports is not None:
            self._reports.publish(event)
        self._hear(event)

    def _hear(self, event: Event) -> None:
        if self._listener is not None:
            self._listener(event)

    def compiling(self, device: str, more: int) -> None:
        """Show that so many more preparations are under way on a device."""
        if self._reports is not None:
            self._reports.compiling(device, self._low_priority, more)

    def compiled(self, device: str, outcome: CacheOutcome | None, took_ns: int) -> None:
        """Count a preparation on a device. `outcome`: None if it failed."""
        if self._reports is not None:
            self._reports.compiled(device, self._low_priority, outcome, took_ns)

    def cache_refused(self, directory: str, device: str, refusal: Refusal | None) -> None:
        """Report that an entry of a cache, or a new artifact, was refused. Reasons that show no fault are left out."""
        if self._reports is not None and refusal is not None and refusal.reason not in _NO_REFUSALS:
            self._hear(self._reports.cache_refused(directory, device, refusal))

    def stage_entered(self, stage: str, state: str, reason: str) -> None:
        """Report that a stage has entered a state."""
        if self._reports is not None:
            self._hear(self._reports.stage_entered(self.named.name, stage, state, reason))

    def stage_swapped(self, stage: str, held_ns: int) -> None:
        """Count a swap to a stage, for which executions were held back for so long."""
        if self._reports is not None:
            self._reports.stage_swapped(self.named.name, stage, held_ns)


class _Attempt(msgspec.Struct):
    """One preparation on one device.

    Attributes:
        outcome: how it came out, or None if it failed.
        unfit: whether the device cannot run the whole model. Another device is tried then, so this is not counted.
    """

    outcome: CacheOutcome | None = None
    unfit: bool = False


class Progress:
    """One preparation of a compilation's model, which begins and ends with the `with` block.

    Attributes:
        model: the compilation's name, for log lines.
    """

    def __init__(
        self,
        reports: CompilationReports,
        device: str,
        on_step: Callable[[str], None] | None = None,
        shown: Preparation | None = None,
    ) -> None:
        """Begin nothing yet.

        Args:
            device: the first candidate.
            on_step: called with each step that begins.
            shown: what the runtime's health shows, unless the app does not wait for this preparation.
        """
        self.model = reports.named.name
        self._reports = reports
        self._device = device
        self._on_step = on_step
        self._shown = shown
        self._began_ns = time.monotonic_ns()
        self._steps: dict[str, tuple[str, int, int]] = {}
        self._times: Counter[tuple[str, str]] = Counter()
        self._outcomes: Sequence[CacheOutcome] = ()
        self._failure_counted = False

    def __enter__(self) -> Progress:
        self._reports.publish(CompileStarted(compilation=self.model, device=self._device))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        took_ns = time.monotonic_ns() - self._began_ns
        outcome, reason, device = "failed", "it was cancelled", self._device
        if error is None and self._outcomes:
            for name in list(self._steps):
                self._end_step(name)
            worst = min(self._outcomes, key=lambda one: _WORST_FIRST.index(one.kind))
            outcome, device = worst.kind.value, "+".join(dict.fromkeys(one.device for one in self._outcomes))
            reason = ": ".join(filter(None, ("" if worst.reason is None else worst.reason.value, worst.detail)))
        else:
            if isinstance(error, Exception):
                reason = str(error)
            if not self._failure_counted and device and not isinstance(error, CallerError):
                self._reports.compiled(device, None, took_ns)
        done = CompileDone(compilation=self.model, device=device, outcome=outcome, reason=reason, seconds=took_ns / 1e9)
        self._reports.publish(done)

    # --- steps ---------------------------------------------------------------------------------------------------------

    def step(self, device: str, step: str, expected_s: float | None = None) -> None:
        """Begin a step on a device.

        Args:
            expected_s: what the cache knows about it. None: what the compilation's last preparation took.
        """
        self._end_step(device)
        self._device = device
        times = self._times[device, step]
        self._times[device, step] += 1
        self._steps[device] = step, times, time.monotonic_ns()
        if self._on_step is not None:
            self._on_step(step)
        if self._shown is not None:
            self._shown.enter(step, device)
        expected_s = self._reports.took_s.get((device, step, times)) if expected_s is None else expected_s
        self._reports.publish(CompileStep(compilation=self.model, device=device, step=step, expected_s=expected_s))

    def says(self, device: str, words: str) -> None:
        """Show the words of a compile backend as the step of a device. They belong to the step that has begun, which goes on."""
        words = " ".join(words.split())[:_MOST_CHARACTERS]
        if self._on_step is not None:
            self._on_step(words)
        if self._shown is not None:
            self._shown.enter(words, device)
        self._reports.publish(CompileStep(compilation=self.model, device=device, step=words))

    def _end_step(self, device: str) -> None:
        if device in self._steps:
            step, times, began_ns = self._steps.pop(device)
            self._reports.took_s[device, step, times] = (time.monotonic_ns() - began_ns) / 1e9

    def waits(self, device: str) -> None:
        """Report that another process or compilation compiles the same."""
        if self._shown is not None:
            self._shown.enter(WAITING, device)
        self._reports.publish(CompileWaiting(compilation=self.model, device=device))

    async def driver(self, devices: Devices, name: str, priority: Priority) -> RemoteDevice:
        """Return the live device of that name, as `Devices.get` does."""
        return await devices.get(name, priority, partial(self.step, name, STARTING))

    # --- outcomes --------------------------------------------------------------------------------------------------------

    @contextmanager
    def on(self, device: str) -> Iterator[_Attempt]:
        """Count the body as one preparation on a device. The body sets `outcome` of what this yields."""
        attempt, began_ns = _Attempt(), time.monotonic_ns()
        self._reports.compiling(device, 1)
        try:
            yield attempt
        finally:
            self._reports.compiling(device, -1)
            if not attempt.unfit:
                self._failure_counted = attempt.outcome is None
                self._reports.compiled(device, attempt.outcome, time.monotonic_ns() - began_ns)

    def refused(self, directory: str, device: str, refusal: Refusal | None) -> None:
        """Report that an entry of a cache, or a new artifact, was refused."""
        self._reports.cache_refused(directory, device, refusal)

    def prepared(self, outcomes: Sequence[CacheOutcome]) -> None:
        """Note that everything is prepared. Without this call the preparation counts as failed."""
        self._outcomes = outcomes
