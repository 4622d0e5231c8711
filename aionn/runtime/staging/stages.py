"""Stages: serve from a quick one at once, make a better one behind the stream, compare, swap it in between two executions.

    waiting ──> compiling ──> loading ──> comparing ──> serving ──> replaced (by a better one)
       └────────────┴────────────┴────────────┴────────────┴──> rejected (`reason` says why; the stage before serves)
    skipped     a better one was stored already and served from the start

Whatever goes wrong is one stage's rejection: a value on `compilation.stages`, an event "stage.rejected" in the trace, a log
line, and `StageRejected` for whoever waits for it. The executions of the app never see it. Only a stage that fails after it was swapped
in fails the app's executions, and then the stage before takes its place again (`way_back`). What a comparison measured is kept with
the cache (`verdicts`), so the next start does not begin with a stage that has been found wanting.

Invariants
    One `Staging` task per compilation; it is the only one that swaps stages, and it refers to the compilation's parts only,
    never to the compilation: one that nobody holds any more is collected, and ends its staging.
    Of all that a stage needs before its swap (worker, model, connections) nothing is left when it is rejected.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

import anyio

from aionn import trace
from aionn.caching import CacheOutcome, CacheOutcomeKind, StageMeasurement
from aionn.caching.store import Hit
from aionn.errors import AionnError, CallerError, CompilationError, DeadlineError, DriverDiedError, DriverHungError, StageRejected
from aionn.hal.interfaces import PrepareOptions
from aionn.hal.model import Model
from aionn.remote.device import RemotePreparedModel
from aionn.runtime.preparing import background, preparation
from aionn.runtime.preparing.cached import CacheChoice, load, wanted_of
from aionn.runtime.preparing.in_time import in_time
from aionn.runtime.serving.compiled_model import CompiledModel
from aionn.runtime.serving.members import NotNowError
from aionn.runtime.serving.serving import Serving
from aionn.runtime.staging import verdicts
from aionn.runtime.staging.comparing import TOLERANCES, Comparison, Samples, compare, made_up_inputs
from aionn.runtime.staging.frequency import until_frequent
from aionn.runtime.staging.measuring import Inputs, Run
from aionn.runtime.staging.stage import Stage, StagePolicy
from aionn.runtime.staging.way_back import WayBack
from aionn.tasks import bounded_shield, seconds_until, ungrouped

if TYPE_CHECKING:
    from aionn.runtime.processes.devices import Devices

logger = logging.getLogger("aionn.runtime")

_STORED_SHARE = 0.5
"""Of the time that is left, what looking for stored stages may take before the first one is prepared."""

SWAP_TRIES = 5
"""A swap that finds the moment wrong is tried again in another gap so often."""

_IDLE_S = 0.005
"""A compile begins in a pause of that length between two executions, so that its start does not meet one."""

_WITHIN_S = 2.0
"""A stream that leaves no pause for so long gets its better stage all the same."""

RUNS = 11
"""Pairs of runs that are timed at most. With eleven, a stage is decided on within seconds, and one disturbed run decides nothing."""

COMPARE_S = 300.0
"""Timing ends after so long. A stream that has left no room for it by then will hardly leave any later."""

SAMPLES = 3
"""Recent inputs that a stage is compared on: more of them show little more, and each costs a run that warms up."""

SAMPLES_BYTES = 64 << 20
"""What these inputs may take together. One is kept whatever its size."""

_STOP_S = 10.0
"""A staging that is stopped ends its worker and lets go of its cache entry; both are bounded by less."""


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
        self._samples = Samples(model, SAMPLES, SAMPLES_BYTES)
        self._wanted = anyio.Event()
        self._ended_by = "the compilation was closed"
        self._scope = anyio.CancelScope()
        self._over = anyio.Event()
        self._began = self._counted = compiled.use.executions
        self._way_back = WayBack(compiled, self._before, self._prepare_again, run, policy.run_timeout_s, self._gone_back)
        compiled.abandoned = self._abandoned
        if any(stage.state == "waiting" for stage in stages):
            compiled.sampling = self._samples  # from the very first execution: there may be no other for long

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
        self._abandoned()
        with bounded_shield(_STOP_S):
            await self._over.wait()

    # --- the task ----------------------------------------------------------------------------------------------------

    async def work(self) -> None:
        """Runs in the runtime's task group until the compilation is closed."""
        try:
            with self._scope:
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(self._make_all)
                    await self._way_back.watch()
        finally:
            for stage in self.stages:
                if not stage._settled.is_set():
                    self._reject(stage, self._ended_by)
            self._over.set()

    async def _make_all(self) -> None:
        try:
            with self._compiled.watching():
                for stage in self.stages:
                    if stage.state == "waiting":
                        with self._judged(stage):
                            await self._use_warrants_it()
                            await self._make(stage)
        finally:
            self._compiled.sampling = None

    def _abandoned(self) -> None:
        """Stop, and count how often the model was used, for the next start. In `finally` blocks: nothing is awaited."""
        executions = self._compiled.use.executions - self._counted
        self._counted += executions
        if self._cache is not None and executions:
            self._cache.store.count_use(self._model.token, executions)
        self._scope.cancel()

    @contextmanager
    def _judged(self, stage: Stage) -> Iterator[None]:
        try:
            yield
        except StageRejected as rejected:
            self._reject(stage, rejected.reason, logging.INFO)  # what a comparison found, at every start perhaps
        except AionnError as error:
            self._reject(stage, f"while {stage.state}: {error}")
        except Exception as error:  # a defect here must not end the app's runtime, and with it the stream
            logger.exception("making stage %r failed", stage.name)
            self._reject(stage, f"while {stage.state}: {type(error).__name__}: {error}")

    def _reject(self, stage: Stage, reason: str, level: int = logging.WARNING) -> None:
        stage._enter("rejected", reason)
        trace.count("stage.rejected", stage=stage.name, reason=reason)
        if not self._compiled.closed and not self._devices.closed:
            logger.log(level, "stage %r was not swapped in: %s", stage.name, reason)

    async def _use_warrants_it(self) -> None:
        policy, cache = self.policy, self._cache

        async def used() -> None:
            earlier = 0 if cache is None else await cache.store.use(self._model.token, policy.per_s)
            await until_frequent(self._compiled.use, policy.executions, policy.per_s, since=self._began, earlier=earlier)
            with anyio.move_on_after(_WITHIN_S):
                await self._pause()

        await _first(used, self._wanted.wait)

    async def _pause(self) -> None:
        """Until nothing has been executed for `_IDLE_S`."""
        while (serving := self._compiled.serving) is not None:
            await serving.wait_idle()
            executions = serving.use.executions
            await anyio.sleep(_IDLE_S)
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
            stage.comparison, base = await self._compare(better)
            if stage.comparison.refused:
                await self._remember(stage.comparison, better, base)
                raise StageRejected(stage.name, stage.comparison.refused)
            before = self._compiled.serving
            await self._swap(better)
            swapped = True
        finally:
            if not swapped:
                made.prepared.release()
        try:
            # First, so that an app which ends as soon as the stage serves finds it at its next start.
            await self._remember(stage.comparison, better, base)
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

    async def _compare(self, better: Serving) -> tuple[Comparison, Serving]:
        """What the comparison found, and the stage before that it was made with."""
        policy = self.policy
        while True:
            before = self._compiled.serving
            if before is None or not before.alive:
                # Nothing serves now: the next execution prepares it anew, or nobody uses it any more.
                await self._compiled.use.wait_for(self._compiled.use.executions + 1)
                continue
            samples, made_up = await self._inputs(before, better)
            try:
                found = await compare(
                    self._run,
                    self._compiled,
                    before,
                    better,
                    samples,
                    runs=RUNS,
                    min_gain=policy.min_gain,
                    tolerances={**TOLERANCES, **policy.tolerances},
                    run_timeout_s=policy.run_timeout_s,
                    compare_s=COMPARE_S,
                    hold=policy.hold,
                    made_up=made_up,
                )
            except AionnError:
                if before.alive and before is self._compiled.serving:
                    raise
                continue
            return found, before

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
        for attempt in range(SWAP_TRIES):
            if self.policy.state == "wait_for_reset":
                await self._compiled.wait_for_new_state()
            try:
                return await self._compiled.swap(better, may_swap=self._may_swap)
            except NotNowError as not_now:
                if attempt == SWAP_TRIES - 1:
                    raise StageRejected(better.stage, f"{not_now}, at each of {SWAP_TRIES} attempts") from not_now
        raise AssertionError("the last attempt returns or raises")

    def _may_swap(self) -> bool:
        return self.policy.state == "move" or self._compiled.state_is_new

    # --- the way back ------------------------------------------------------------------------------------------------------

    def _before(self, name: str) -> list[str]:
        """The stages before that one which were not rejected, the best first."""
        names = [stage.name for stage in self.stages]
        return [stage.name for stage in reversed(self.stages[: names.index(name)]) if stage.state in ("replaced", "skipped")]

    async def _prepare_again(self, name: str) -> RemotePreparedModel:
        return (await preparation.prepare(self._devices, name, self._model, self._options, self._cache))[0]

    def _gone_back(self, bad: Serving, base: Serving, reason: str) -> None:
        self.stage(bad.stage)._enter("rejected", reason)
        self.stage(base.stage)._enter("serving")
        trace.count("stage.rejected", stage=bad.stage, reason=reason)
        logger.warning("stage %r serves no longer: %s; stage %r serves again", bad.stage, reason, base.stage)
        if self._cache is not None:
            found = StageMeasurement(
                model_digest=self._model.token,
                stage=bad.stage,
                version=bad.prepared.device.version,
                base=base.stage,
                base_version=base.prepared.device.version,
                threads=verdicts.threads_of(self._options),
                detail=reason,
                failed=True,
                measured_s=time.time(),
            )
            self._cache.store.remember_later(verdicts.scope(self._cache, self._model, self._options, bad.stage), found)

    # --- measurements, kept with the cache ---------------------------------------------------------------------------------

    async def _known_verdict(self, stage: Stage) -> str | None:
        base = self._compiled.serving
        if self._cache is None or base is None:
            return None
        timeout_s = self.policy.timeout_s
        with anyio.move_on_after(timeout_s):
            found = await self._cache.store.measurements(verdicts.scope(self._cache, self._model, self._options, stage.name))
            if not found:
                return None
            version, threads = (await self._devices.get(stage.name)).version, verdicts.threads_of(self._options)
            valid = [one for one in found if one.base == base.stage and verdicts.holds(one, version, base.prepared.device.version, threads)]
            return verdicts.judged(valid, self._model, self.policy)
        raise DeadlineError(
            f"device {stage.name!r} did not make the stage within {timeout_s} s: its driver does not start, or its cache is slow"
        )

    async def _remember(self, comparison: Comparison, better: Serving, base: Serving) -> None:
        if self._cache is not None:
            versions = better.stage, better.prepared.device.version, base.stage, base.prepared.device.version
            found = verdicts.measurement(self._model, *versions, verdicts.threads_of(self._options), comparison)
            await self._cache.store.remember(verdicts.scope(self._cache, self._model, self._options, better.stage), found)


async def prepare_first(
    devices: Devices, model: Model, names: Sequence[str], options: PrepareOptions, cache: CacheChoice | None, policy: StagePolicy
) -> tuple[RemotePreparedModel, CacheOutcome, list[Stage]]:
    """Prepare the stage that serves from the start: the best one that is stored and approved, else the quickest that can be prepared.

    Raises:
        CallerError, DeviceUnavailableError: a name is wrong.
        CompilationError, DriverDiedError, DriverHungError: no stage can be prepared.
    """
    if isinstance(names, str) or len(set(names)) < len(names) or not names:
        raise CallerError(f"stages={names!r}: give the names of devices from quick to best, each once")
    for name in names:
        devices.find(name)
    stages = [Stage(name) for name in names]
    left_s = seconds_until(options.deadline_ns)
    patience_s = None if left_s is None else left_s * _STORED_SHARE / max(1, len(names) - 1)
    for index in range(len(names) - 1, 0, -1):
        if cache is None:
            break
        # A disk may hang in any of this, and the app's deadline does not wait for it.
        work = partial(_stored, devices, names[index], names[:index], model, options, cache, policy)
        found = await in_time(devices.tasks, work, patience_s, _release_stored)
        if found is not None:
            for stage in stages[:index]:
                stage._enter("skipped", f"stage {names[index]!r} was stored already")
            stages[index].made_by = "cache"
            stages[index]._enter("serving")
            return *found, stages
    for stage in stages:
        try:
            prepared, outcome = await preparation.prepare(devices, stage.name, model, options, cache)
        except (CompilationError, DriverDiedError, DriverHungError) as error:
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
    devices: Devices, name: str, bases: Sequence[str], model: Model, options: PrepareOptions, cache: CacheChoice, policy: StagePolicy
) -> tuple[RemotePreparedModel, CacheOutcome] | None:
    """The stage, if the present policy approves of what was measured and it can be loaded. Otherwise no driver is started."""
    threads = verdicts.threads_of(options)
    found = await cache.store.measurements(verdicts.scope(cache, model, options, name))
    found = [one for one in found if one.base in bases and one.threads == threads]
    if verdicts.judged(found, model, policy) != verdicts.APPROVED:
        return None
    versions: dict[str, str | None] = {}

    async def ask(base: str) -> None:
        versions[base] = await background.version_of(devices, base)

    try:
        with ungrouped():
            async with anyio.create_task_group() as tasks:
                for base in {one.base for one in found}:
                    tasks.start_soon(ask, base)
                remote = await devices.get(name)
        valid = [one for one in found if verdicts.holds(one, remote.version, versions[one.base], threads)]
        if not remote.cache_files.supported or verdicts.judged(valid, model, policy) != verdicts.APPROVED:
            return None
        async with await cache.store.open(wanted_of(remote, model, options, cache.token), wait_s=0.0) as stored:
            if not isinstance(stored, Hit):
                return None
            return await load(remote, model, options, stored), stored.outcome
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
