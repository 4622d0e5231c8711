"""Stages: serve from a quick one at once, make a better one behind the stream, compare, swap it in between two executions.

    waiting ──> compiling ──> loading ──> comparing ──> serving ──> replaced (by a better one)
       └────────────┴────────────┴────────────┴──────> rejected (`reason` says why; the stage before goes on serving)
    skipped     a better one was stored already and served from the start

Whatever goes wrong is one stage's rejection: a value on `compilation.stages`, an event "stage.rejected" in the trace, a log
line, and `StageRejected` for whoever waits for it. The executions of the app never see it. A verdict on outputs or speed is kept
with the cache, so the next start does not begin with a stage that has been found wanting; it holds for one version of the
device, after one stage.

Invariants
    One `Staging` task per compilation; it is the only one that swaps stages, and it refers to the compilation's parts only,
    never to the compilation: one that nobody holds any more is collected, and ends its staging.
    Of all that a stage needs before its swap (worker, model, connections) nothing is left when it is rejected.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Literal

import anyio

from aionn import trace
from aionn.caching import CacheOutcome, CacheOutcomeKind, KeyParts, family_key
from aionn.caching.store import Hit
from aionn.errors import AionnError, CallerError, CompilationError, DeadlineError, StageRejected
from aionn.hal.interfaces import PrepareOptions
from aionn.hal.model import Model
from aionn.remote.device import RemotePreparedModel
from aionn.runtime import background, preparation, verdicts
from aionn.runtime.comparing import TOLERANCES, Comparison, Samples, Tolerance, compare, made_up_inputs
from aionn.runtime.compiled_model import CompiledModel, Serving
from aionn.runtime.measuring import Inputs, Run
from aionn.runtime.moving import NotNowError
from aionn.runtime.preparation import CacheChoice
from aionn.tasks import bounded_shield

if TYPE_CHECKING:
    from aionn.runtime.devices import Devices

logger = logging.getLogger("aionn.runtime")

State = Literal["waiting", "compiling", "loading", "comparing", "serving", "replaced", "rejected", "skipped"]
_STEPS: Mapping[str, float] = {"waiting": 0.0, "compiling": 0.1, "loading": 0.7, "comparing": 0.8}

_STORED_SHARE = 0.5
"""Of the time that is left, what looking for stored stages may take before the first one is prepared."""

_SWAP_TRIES = 5
"""A swap that finds the moment wrong is tried again in another gap so often."""

_STOP_S = 10.0
"""A staging that is stopped ends its worker and lets go of its cache entry; both are bounded by less."""


@dataclass(frozen=True)
class StagePolicy:
    """When a better stage is made, at what cost, and what it must show before it serves.

    Attributes:
        executions, seconds: use that warrants a compile: so many executions since the compilation was made, over at least so long.
            A compile costs seconds of CPU: a script that runs a model three times would pay and never gain.
        idle_s, within_s: the compile then begins in a pause of that length between two executions, or after `within_s` without one.
        threads: of the worker; it never runs on more CPUs at once. At the lowest priority, one takes least from the stream.
        timeout_s: for compile and load together; a worker that takes longer is killed.
        min_gain: the new stage must be faster by this share of the median run; None: outputs alone decide.
        runs: pairs of runs that are timed at most, one on each stage; more than half of them must show the gain.
        hold: the stream may be held back for single runs of the comparison where it leaves no gaps (`aionn.runtime.measuring` has the
            rule); False: such a stream keeps its stage unless the new one is faster even beside it.
        compare_s: timing ends after so many seconds; a stream that has left no room for it by then keeps its stage.
        samples, samples_bytes: recent inputs that are kept for it, and their bytes together.
        tolerances: by element type, on top of `TOLERANCES`.
        run_timeout_s: a run in the comparison may take so long; then the new stage hangs and is killed.
        state: device memories are copied to the new stage's driver at the swap ("move"), or the swap waits until the app has filled
            each of them anew, as at the beginning of a recording ("wait_for_reset").

    `Compilation.wait_for_stage` is use that warrants it, too.
    """

    executions: int = 10
    seconds: float = 1.0
    idle_s: float = 0.005
    within_s: float = 2.0
    threads: int = 1
    timeout_s: float = 600.0
    min_gain: float | None = 0.1
    runs: int = 11
    hold: bool = True
    compare_s: float = 300.0
    samples: int = 3
    samples_bytes: int = 64 << 20
    tolerances: Mapping[str, Tolerance] = field(default_factory=dict)
    run_timeout_s: float = 30.0
    state: Literal["move", "wait_for_reset"] = "move"

    def __post_init__(self) -> None:
        if self.executions < 0 or self.seconds < 0 or self.idle_s < 0 or self.within_s < 0:
            raise CallerError("StagePolicy: executions, seconds, idle_s and within_s are at least 0")
        if self.threads < 1 or self.runs < 1 or self.samples < 1:
            raise CallerError("StagePolicy: threads, runs and samples are at least 1")
        if self.timeout_s <= 0 or self.run_timeout_s <= 0 or self.compare_s <= 0:
            raise CallerError("StagePolicy: timeout_s, run_timeout_s and compare_s are more than 0 seconds")
        if self.state not in ("move", "wait_for_reset"):
            raise CallerError(f"StagePolicy: state {self.state!r} is one of 'move', 'wait_for_reset'")


@dataclass
class Stage:
    """One stage of a compilation, as it is now (public face: `compilation.stages`).

    Attributes:
        name: of its device.
        state: "waiting", "compiling", "loading", "comparing", then "serving", "replaced" (by a better one) or "rejected"; "skipped"
            where a better one was stored already and served from the start.
        reason: why it was rejected or skipped; empty otherwise.
        made_by: "cache", "worker" (compiled in the background) or "driver" (in its own driver, for its artifacts cannot be stored).
        times_s: seconds spent so far in each state that it has left.
        comparison: what the comparison with the stage before found.
    """

    name: str
    state: State = "waiting"
    reason: str = ""
    made_by: str = ""
    times_s: dict[str, float] = field(default_factory=dict)
    comparison: Comparison | None = None
    _since_ns: int = field(default_factory=time.monotonic_ns, repr=False)
    _settled: anyio.Event = field(default_factory=anyio.Event, repr=False)

    @property
    def in_state_s(self) -> float:
        """Seconds since it came into its present state."""
        return (time.monotonic_ns() - self._since_ns) / 1e9

    @property
    def progress(self) -> float:
        """0 to 1, by steps done: engines do not tell how far a compile is."""
        return _STEPS.get(self.state, 1.0)

    def _enter(self, state: State, reason: str = "") -> None:
        now_ns = time.monotonic_ns()
        if state != self.state:
            self.times_s[self.state] = self.times_s.get(self.state, 0.0) + (now_ns - self._since_ns) / 1e9
            trace.span_at(f"stage.{self.state}", self._since_ns, now_ns, stage=self.name)
            self._since_ns = now_ns
            trace.count("stage.entered", stage=self.name, state=state)
        self.state, self.reason = state, reason
        if state in ("serving", "replaced", "rejected", "skipped"):
            self._settled.set()


class Staging:
    """Makes one stage after the other, for as long as there are any."""

    def __init__(
        self,
        devices: Devices,
        compiled: CompiledModel,
        model: Model,
        options: PrepareOptions,
        cache: CacheChoice | None,
        stages: Sequence[Stage],
        policy: StagePolicy,
        run: Run,
    ) -> None:
        self.stages = tuple(stages)
        self.policy = policy
        self._devices = devices
        self._compiled = compiled
        self._model = model
        self._options = dataclasses.replace(options, deadline_ns=None)
        self._cache = cache
        self._run = run
        self._samples = Samples(model, policy.samples, policy.samples_bytes)
        self._wanted = anyio.Event()
        self._ended_by = "the compilation was closed"
        self._scope = anyio.CancelScope()
        self._over = anyio.Event()
        compiled.abandoned = self._scope.cancel

    def stage(self, name: str) -> Stage:
        for stage in self.stages:
            if stage.name == name:
                return stage
        raise CallerError(f"stage {name!r} is none of this compilation's; they are {[stage.name for stage in self.stages]}")

    async def wait_for(self, name: str, timeout_s: float | None) -> None:
        stage = self.stage(name)
        self._wanted.set()
        with anyio.move_on_after(timeout_s):
            await stage._settled.wait()
        if not stage._settled.is_set():
            raise DeadlineError(f"stage {name!r} is still {stage.state} after {timeout_s} s")
        if stage.state == "rejected":
            raise StageRejected(name, stage.reason)

    @property
    def over(self) -> bool:
        """Whether its task has ended."""
        return self._over.is_set()

    async def stop(self, why: str = "") -> None:
        """End the worker and the task. Stages that were under way are rejected."""
        self._ended_by = why or self._ended_by
        self._scope.cancel()
        with bounded_shield(_STOP_S):
            await self._over.wait()

    # --- the task ----------------------------------------------------------------------------------------------------

    async def work(self) -> None:
        """Runs in the runtime's task group until every stage has served or been rejected."""
        began_ns = time.monotonic_ns()
        compiled = self._compiled
        compiled.sampling = self._samples
        try:
            with self._scope, compiled.watching():
                for stage in self.stages:
                    if stage.state != "waiting":
                        continue
                    await self._use_warrants_it(began_ns)
                    with self._judged(stage):
                        await self._make(stage)
        finally:
            compiled.sampling = None
            for stage in self.stages:
                if not stage._settled.is_set():
                    self._reject(stage, self._ended_by)
            self._over.set()

    @contextmanager
    def _judged(self, stage: Stage) -> Iterator[None]:
        try:
            yield
        except StageRejected as rejected:
            self._reject(stage, rejected.reason)
        except AionnError as error:
            self._reject(stage, f"while {stage.state}: {error}")
        except Exception as error:  # a defect here must not end the app's runtime, and with it the stream
            logger.exception("making stage %r failed", stage.name)
            self._reject(stage, f"while {stage.state}: {type(error).__name__}: {error}")

    def _reject(self, stage: Stage, reason: str) -> None:
        stage._enter("rejected", reason)
        trace.count("stage.rejected", stage=stage.name, reason=reason)
        if not self._compiled.closed and not self._devices.closed:
            logger.warning("stage %r was not swapped in: %s", stage.name, reason)

    async def _use_warrants_it(self, began_ns: int) -> None:
        policy, compiled = self.policy, self._compiled

        async def used() -> None:
            await compiled.use.wait_for(policy.executions)
            await anyio.sleep(max(0.0, policy.seconds - (time.monotonic_ns() - began_ns) / 1e9))
            with anyio.move_on_after(policy.within_s):
                await self._pause()

        await _first(used, self._wanted.wait)

    async def _pause(self) -> None:
        """Until nothing has been executed for `idle_s`."""
        while (serving := self._compiled.serving) is not None:
            await serving.wait_idle()
            executions = serving.use.executions
            await anyio.sleep(self.policy.idle_s)
            if not serving.users and executions == serving.use.executions:
                return

    async def _make(self, stage: Stage) -> None:
        policy = self.policy
        if (reason := await self._known_verdict(stage)) not in (None, verdicts.APPROVED):
            raise StageRejected(stage.name, f"as an earlier comparison found: {reason}")
        stage._enter("compiling")
        made = await background.make(
            self._devices,
            stage.name,
            self._model,
            self._options,
            self._cache,
            threads=policy.threads,
            timeout_s=policy.timeout_s,
            phase=lambda state: stage._enter("loading" if state == "loading" else "compiling"),
        )
        stage.made_by = made.by
        made.prepared.remember(self._model)
        better = Serving(made.prepared, self._model, self._compiled.use, stage.name)
        swapped = False
        try:
            stage._enter("comparing")
            stage.comparison = await self._compare(better)
            if stage.comparison.refused:
                if stage.comparison.sure:
                    await self._remember(stage, better, stage.comparison.refused)
                raise StageRejected(stage.name, stage.comparison.refused)
            before = self._compiled.serving
            await self._swap(better)
            swapped = True
        finally:
            if not swapped:
                made.prepared.release()
        try:
            # First, so that an app which ends as soon as the stage serves finds it at its next start.
            await self._remember(stage, better, verdicts.APPROVED)
        except AionnError as error:
            logger.info("that stage %r serves well could not be remembered: %s", stage.name, error)
        finally:
            self._serves(stage, before)

    def _serves(self, stage: Stage, before: Serving | None) -> None:
        for other in self.stages:
            if before is not None and other.name == before.stage and other is not stage:
                other._enter("replaced")
        stage._enter("serving")
        trace.count("stage.swapped", stage=stage.name, made_by=stage.made_by)
        logger.info("stage %r serves now: %s", stage.name, stage.comparison)

    # --- comparing and swapping ----------------------------------------------------------------------------------------

    async def _compare(self, better: Serving) -> Comparison:
        policy = self.policy
        while True:
            before = self._compiled.serving
            if before is None or not before.alive:
                # Nothing serves now: the next execution prepares it anew, or nobody uses it any more.
                await self._compiled.use.wait_for(self._compiled.use.executions + 1)
                continue
            samples, made_up = await self._inputs(before, better)
            try:
                return await compare(
                    self._run,
                    self._compiled,
                    before,
                    better,
                    samples,
                    runs=policy.runs,
                    min_gain=policy.min_gain,
                    tolerances={**TOLERANCES, **policy.tolerances},
                    run_timeout_s=policy.run_timeout_s,
                    compare_s=policy.compare_s,
                    hold=policy.hold,
                    made_up=made_up,
                )
            except AionnError:
                if before.alive:
                    raise

    async def _inputs(self, before: Serving, better: Serving) -> tuple[Sequence[Inputs], bool]:
        """Recent ones; while nothing has been executed, made up ones that the stage before takes."""
        samples = self._samples
        if not samples.kept and not before.use.executions:
            for inputs in made_up_inputs(self._model):
                try:
                    await self._run(before, inputs, time.monotonic_ns() + int(self.policy.run_timeout_s * 1e9))
                except AionnError:
                    continue
                return [inputs], True
        if not samples.kept:
            await samples.arrived.wait()
        return list(samples.kept), False

    async def _swap(self, better: Serving) -> None:
        for attempt in range(_SWAP_TRIES):
            if self.policy.state == "wait_for_reset":
                await self._compiled.wait_for_new_state()
            try:
                return await self._compiled.swap(better, may_swap=self._may_swap)
            except NotNowError as not_now:
                if attempt == _SWAP_TRIES - 1:
                    raise StageRejected(better.stage, f"{not_now}, at each of {_SWAP_TRIES} attempts") from not_now
        raise AssertionError("the last attempt returns or raises")

    def _may_swap(self) -> bool:
        return self.policy.state == "move" or self._compiled.state_is_new

    # --- verdicts, kept with the cache -----------------------------------------------------------------------------------

    async def _known_verdict(self, stage: Stage) -> str | None:
        if self._cache is None or (base := self._base(stage)) is None:
            return None
        timeout_s = self.policy.timeout_s
        with anyio.move_on_after(timeout_s):
            remote = await self._devices.get(stage.name)
            return await verdicts.known(self._cache, remote, self._model, self._options, base)
        raise DeadlineError(
            f"device {stage.name!r} did not make the stage within {timeout_s} s: its driver does not start, or its cache is slow"
        )

    async def _remember(self, stage: Stage, better: Serving, verdict: str) -> None:
        if self._cache is not None and (base := self._base(stage)) is not None:
            await verdicts.remember(self._cache, better.prepared.device, self._model, self._options, base, verdict)

    def _base(self, stage: Stage) -> str | None:
        index = self.stages.index(stage)
        return self.stages[index - 1].name if index else None


async def prepare_first(
    devices: Devices, model: Model, names: Sequence[str], options: PrepareOptions, cache: CacheChoice | None
) -> tuple[RemotePreparedModel, CacheOutcome, list[Stage]]:
    """Prepare the stage that serves from the start: the best one that is stored, else the quickest that can be prepared.

    Raises:
        CallerError, DeviceUnavailableError: a name is wrong.
        CompilationError: no stage can be prepared.
    """
    if isinstance(names, str) or len(set(names)) < len(names) or not names:
        raise CallerError(f"stages={names!r}: give the names of devices from quick to best, each once")
    for name in names:
        devices.find(name)
    stages = [Stage(name) for name in names]
    left_s = preparation._left_s(options)
    patience_s = None if left_s is None else left_s * _STORED_SHARE / max(1, len(names) - 1)
    for index in range(len(names) - 1, 0, -1):
        if cache is None:
            break
        # A disk may hang in any of this, and the app's deadline does not wait for it.
        work = partial(_stored, devices, names[index], names[index - 1], model, options, cache)
        found = await preparation._in_time(devices._tasks, work, patience_s, _release_stored)
        if found is not None:
            for stage in stages[:index]:
                stage._enter("skipped", f"stage {names[index]!r} was stored already")
            stages[index].made_by = "cache"
            stages[index]._enter("serving")
            return *found, stages
    for stage in stages:
        try:
            prepared, outcome = await preparation.prepare(devices, stage.name, model, options, cache)
        except CompilationError as error:
            stage._enter("rejected", str(error))
            trace.count("stage.rejected", stage=stage.name, reason=str(error))
            if stage is stages[-1]:
                raise
            logger.warning("stage %r cannot serve first: %s", stage.name, error)
            continue
        stage.made_by = "cache" if outcome.kind is CacheOutcomeKind.HIT else "driver"
        stage._enter("serving")
        return prepared, outcome, stages
    raise AssertionError("the last stage returns or raises")


async def _release_stored(found: tuple[RemotePreparedModel, CacheOutcome] | None) -> None:
    if found is not None:
        found[0].release()


async def _stored(
    devices: Devices, name: str, base: str, model: Model, options: PrepareOptions, cache: CacheChoice
) -> tuple[RemotePreparedModel, CacheOutcome] | None:
    """The stage, if it is stored, was found good and can be loaded. Its device is started only if something is stored."""
    parts = (KeyParts(cache.token, name, "", options.preference, priority) for priority in (None, options.priority))
    if not any([await cache.store.knows(family_key(part)) for part in parts]):
        return None
    try:
        remote = await devices.get(name)
        if not remote.cache_files.supported or await verdicts.known(cache, remote, model, options, base) != verdicts.APPROVED:
            return None
        async with await cache.store.open(preparation._wanted(remote, model, options, cache.token), wait_s=0.0) as found:
            if not isinstance(found, Hit):
                return None
            return await preparation._load(remote, model, options, found), found.outcome
    except AionnError as error:
        logger.info("stage %r is stored and cannot serve from the start: %s", name, error)
        return None


async def _first(*acts: Callable[[], object]) -> None:
    """Until one of them returns; the others are cancelled."""
    async with anyio.create_task_group() as tasks:

        async def run(act: Callable[[], object]) -> None:
            await act()  # type: ignore[misc]
            tasks.cancel_scope.cancel()

        for act in acts:
            tasks.start_soon(run, act)
