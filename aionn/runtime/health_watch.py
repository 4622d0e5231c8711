"""`HealthWatch`: judges the health of an open runtime (`aionn.Health`) from what the app's process knows already.

`HealthWatch.read` waits for nothing, sends nothing and may be called in any thread. It reads attributes that the loop's thread changes,
each of which is stored whole. So it may see one of them before a change and another one after it, and the next reading is right again.
The state also stands on the statistics page, for `aionn top`.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from aionn.pages.app_layout import ANSWERED, DROPPED
from aionn.runtime.health import CompilationHealth, Health, HealthPolicy, State
from aionn.runtime.record import ASKING, FAILED, LOADING, LOOKING, READING, STARTING, Progress
from aionn.runtime.session import Session

if TYPE_CHECKING:  # nothing is compiled yet when a runtime opens
    from aionn.runtime.compilation import CompilationParts
    from aionn.runtime.preparing.kept_model import KeptModel

LOOP_STALL_S = 5.0
"""An event loop that has not run its heartbeat for so long stands still. It should run every second."""

_LONG_S = 5.0
"""What a driver does for longer than this is mentioned."""

_DROP_BEATS = 10
"""The share of dropped frames is that of so many heartbeats, 10 seconds."""

_LEAST_FRAMES = 10
"""So many frames say something about the share of those that were dropped."""

_QUICK = (STARTING, READING, LOOKING, ASKING, LOADING, FAILED)
"""Steps in which a preparation waits for no compile."""


class HealthWatch:
    """Judges the health of one opening of a runtime, and shows it on the statistics page at each heartbeat."""

    def __init__(self, session: Session, policy: HealthPolicy) -> None:
        self._session = session
        self._thread = threading.get_ident()
        self._kept_models: weakref.WeakValueDictionary[int, KeptModel] = weakref.WeakValueDictionary()
        self._stagings: weakref.WeakValueDictionary[int, CompilationParts] = weakref.WeakValueDictionary()
        self._has_served = False
        self._shown: tuple[str, str] = "starting", ""
        self._most_dropped = policy.max_drop_rate
        self._drops = _Drops()
        session.record.each_beat.append(weakref.WeakMethod(self.beat))

    def watch(self, kept_model: KeptModel, staged: CompilationParts | None = None) -> None:
        """Include a model that was prepared, until it is closed or collected. A burst keeps it, too. `staged`: what makes its stages."""
        self._kept_models[id(kept_model)] = kept_model
        if staged is not None:
            self._stagings[id(staged)] = staged
        self._has_served = True

    def beat(self) -> None:
        """Count dropped frames, and show the state on the statistics page. Call it in the loop's thread."""
        if self._most_dropped is not None:
            self._drops.count(self._alive())
        health = self.read()
        shown = health.state, next(iter(health.reasons), "")
        if shown != self._shown:
            self._shown = shown
            record = self._session.record
            record.page.rename(record.slot, record.name, *shown)

    def read(self) -> Health:
        """Return the health now. Any thread may call this."""
        session, record = self._session, self._session.record
        if session.inherited:
            return Health("closed", False, False, ("this process is a child of the one that opened it",))
        if record.ended:
            failure = session.tasks.failure
            return Health("closed", False, False, () if failure is None else (f"an internal error has ended it ({failure!r})",))
        now_ns, alive = time.monotonic_ns(), self._alive()
        drivers = [one.health for usual in list(session.devices.by_name.values()) for one in (usual, usual.low_priority) if one is not None]
        devices = tuple(driver for driver in drivers if driver is not None)
        under_way = list(record.under_way.values())
        compilations = [_prepared_now(preparation, now_ns) for preparation in under_way]
        compilations += [_at_rest(kept_model) for kept_model in alive if kept_model.preparation is None]
        if not session.is_open:
            return Health("closing", True, False, (), devices, tuple(compilations))
        stalled = [str(device) for device in devices if device.state == "hung"] + self._standstill(now_ns)
        if stalled:
            return Health("stalled", False, False, tuple(stalled), devices, tuple(compilations))
        state, reasons = self._judged(under_way, compilations, alive)
        busy = [str(device) for device in devices if device.state in ("loading", "compiling", "executing") and device.seconds > _LONG_S]
        ready = state in ("serving", "degraded")
        return Health(state, True, ready, (*reasons, *busy), devices, tuple(compilations))

    def _alive(self) -> list[KeptModel]:
        found = [kept_model() for kept_model in self._kept_models.valuerefs()]
        return [kept_model for kept_model in found if kept_model is not None and not kept_model.compiled.closed]

    def _standstill(self, now_ns: int) -> list[str]:
        """Say for how long the loop has stood still, unless this is its thread. A loop that calls this runs."""
        late_s = (now_ns - self._session.record.beat_ns) / 1e9
        if late_s <= LOOP_STALL_S or threading.get_ident() == self._thread:
            return []
        return [f"the event loop has stood still for {late_s:.1f} s"]

    def _judged(
        self, under_way: Sequence[Progress], compilations: Sequence[CompilationHealth], alive: Sequence[KeptModel]
    ) -> tuple[State, list[str]]:
        shown = list(zip(under_way, compilations, strict=False))  # the first compilations are those under way
        missing = [one for preparation, one in shown if preparation.required and _keeps_waiting(preparation)]
        if missing:
            return "compiling" if any(one.state == "preparing" for one in missing) else "starting", [str(one) for one in missing]
        if not self._has_served:
            return "starting", ["no compilation serves yet"]
        wrong = [str(one) for one in compilations if one.state in ("ended", "failed")]
        wrong += [str(one) for preparation, one in shown if preparation.cause == "death"]
        wrong += [reason for kept_model in alive for reason in _refusals(kept_model)]
        wrong += [reason for parts in self._stagings.valuerefs() for reason in _wrong_stages(parts())]
        rate = self._drops.rate
        if self._most_dropped is not None and rate > self._most_dropped:
            wrong.append(f"streams have dropped {rate:.1%} of their frames within 10 s, more than {self._most_dropped:.1%}")
        return "degraded" if wrong else "serving", wrong


class _Drops:
    """The share of dropped frames over the last beats."""

    def __init__(self) -> None:
        self._before: dict[int, tuple[int, int]] = {}
        self._beats: deque[tuple[int, int]] = deque(maxlen=_DROP_BEATS)
        self.rate = 0.0

    def count(self, alive: Sequence[KeptModel]) -> None:
        """Count what the open bursts have dropped and answered since the last call."""
        from aionn.runtime.streaming.any_connection import AnyConnection

        now: dict[int, tuple[int, int]] = {}
        dropped = frames = 0
        for kept_model in alive:
            for burst in list(kept_model.compiled.members):
                if not isinstance(burst, AnyConnection):
                    continue  # device memory
                counts = burst.executor.counts
                now[id(counts)] = found = counts.get(DROPPED), counts.get(DROPPED) + counts.get(ANSWERED)
                before = self._before.get(id(counts), (0, 0))
                dropped += max(0, found[0] - before[0])
                frames += max(0, found[1] - before[1])
        self._before = now
        self._beats.append((dropped, frames))
        dropped, frames = (sum(numbers) for numbers in zip(*self._beats, strict=True))
        self.rate = dropped / frames if frames >= _LEAST_FRAMES else 0.0


def _keeps_waiting(preparation: Progress) -> bool:
    """Return whether calls would wait for long. A model that is only loaded again keeps its callers for less than a restart of traffic."""
    return preparation.cause == "first" or preparation.step not in _QUICK  # the others wait for a compile, here or elsewhere


def _prepared_now(preparation: Progress, now_ns: int) -> CompilationHealth:
    failure = preparation.failure
    return CompilationHealth(
        preparation.name,
        preparation.required,
        "failed" if failure else "preparing",
        preparation.device,
        preparation.step,
        (now_ns - preparation.step_ns) / 1e9,
        (now_ns - preparation.began_ns) / 1e9,
        failure,
    )


def _at_rest(kept_model: KeptModel) -> CompilationHealth:
    named, serving = kept_model.record, kept_model.compiled.serving
    if serving is None or serving.asleep:
        return CompilationHealth(named.name, named.required, "on demand", kept_model.device)
    ended_by = serving.ended_by
    if ended_by is None:
        return CompilationHealth(named.name, named.required, "serving", serving.device)
    return CompilationHealth(named.name, named.required, "ended", serving.device, reason=str(ended_by))


def _refusals(kept_model: KeptModel) -> Iterator[str]:
    for failure in dict.fromkeys(outcome.not_kept for outcome in kept_model.outcomes):  # often one for all steps of a plan
        if failure is not None:
            yield f"the cache does not keep compilation {kept_model.record.name!r} ({failure})"


def _wrong_stages(parts: CompilationParts | None) -> Iterator[str]:
    if parts is None or parts.staging is None or parts.compiled.closed:
        return
    for stage in parts.staging.stages:
        named = f"stage {stage.name!r} of compilation {parts.kept_model.record.name!r}"
        if stage.state == "rejected":
            yield f"{named} was rejected ({stage.reason})"
        elif stage.not_kept is not None:
            yield f"the cache does not keep {named} ({stage.not_kept})"
