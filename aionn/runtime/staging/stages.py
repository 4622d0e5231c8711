"""Stages: serve from a quick one at once, make a better one behind the stream, compare it, and swap it in between two executions.

    waiting ──> compiling ──> loading ──> comparing ──> serving ──> replaced (by a better one)
       └────────────┴────────────┴────────────┴────────────┴──> rejected (`reason` says why; the stage before serves)
    skipped     a better one was stored already and served from the start

The best stage that is stored and approved serves from the start (`prepare_first`), else the quickest one that can be prepared. A better
one is compiled in the background, loaded, compared with the stage that serves, and swapped in (`StageMaker`).

An error while a stage is made rejects this one stage. The rejection is a value on `compilation.stages`, an event "stage.rejected" in the
trace and a line in the log. A caller that waits for the stage gets `StageRejected`. The executions of the app do not see it. A stage
that fails after it was swapped in does fail the app's executions. Then the stage before takes its place again (`way_back`). What a
comparison measured is kept with the cache (`verdicts`). So the next start does not begin with a stage that was refused.

Invariants
    There is one `Staging` task per compilation. Only this task swaps stages.
    A `Staging` refers to a `Target` and never to the compilation. So a compilation that the app no longer holds is
    collected, and its staging ends.

"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import anyio

from aionn import trace
from aionn.caching import CacheOutcomeKind
from aionn.caching.store import Hit
from aionn.engines.processor import run_threads
from aionn.errors import AionnError, CallerError, CompilationError, DeadlineError, DriverDiedError, DriverHungError, StageRejected
from aionn.loopless import checked_seconds, deadline_of
from aionn.runtime.preparing import background
from aionn.runtime.preparing.background import version_of
from aionn.runtime.preparing.compile_acts import CompileRequest, load, wanted_of
from aionn.runtime.preparing.kept_model import stage_devices
from aionn.runtime.preparing.partition import prepare_on
from aionn.runtime.preparing.preparation import Found
from aionn.runtime.processes.devices import Devices
from aionn.runtime.record import LOOKING, CompilationRecord, Progress, about, current
from aionn.runtime.serving.planned_model import Prepared
from aionn.runtime.serving.serving import NotNowError, Serving, Use
from aionn.runtime.staging import verdicts
from aionn.runtime.staging.comparing import COMPARE_S, RUNS, TOLERANCES, Comparison, Rules, compare
from aionn.runtime.staging.measuring import RUN_TIMEOUT_S, Inputs, Samples, Target, guessed_inputs, samples_of
from aionn.runtime.staging.stage import Stage, StagePolicy, compiles_here, decided, enter_state, enter_step, reported_stage
from aionn.runtime.staging.verdicts import Verdicts
from aionn.runtime.staging.way_back import WayBack
from aionn.tasks import bounded_shield, in_time, ungrouped

PER_S = 7 * 86400.0
"""The period in which executions count."""

_STEPS = 16
"""The count is read so often in one period. Executions are forgotten up to one step too early, never too late."""

_STEP_S = 0.05
"""The least time between two readings of the count. A short period has fewer steps."""


async def until_frequent(
    use: Use, executions: int, *, since: int = 0, earlier: int = 0, per_s: float = PER_S, clock: Callable[[], float] = time.monotonic
) -> None:
    """Return when there have been so many executions within the last `per_s` seconds, at least one of them in this start.

    Args:
        since: the count when this start began.
        earlier: executions of the starts before this one. They count as if they had just ended.
    """
    if not executions:
        return
    marks = deque([(clock(), since - earlier)])
    await use.wait_for(since + 1)
    while True:
        now_s = clock()
        while marks and marks[0][0] < now_s - per_s:
            marks.popleft()
        if not marks:
            marks.append((now_s, use.executions))
        enough = marks[0][1] + executions
        if use.executions >= enough:
            return
        with anyio.move_on_after(max(per_s / _STEPS, _STEP_S)):
            await use.wait_for(enough)
        marks.append((clock(), use.executions))


logger = logging.getLogger("aionn.stages")

_IDLE_S = 0.005
"""A compile begins in a pause of this length between two executions, so that its start does not meet an execution."""

_WITHIN_S = 2.0
"""After so long, a better stage is made even if the stream leaves no pause."""

_STOP_S = 10.0
"""How long to wait for a staging that is stopped. Ending its worker and closing its cache entry take less."""


class Staging:
    """Makes the stages of one compilation, one after the other.

    Attributes:
        stages: from quick to best.
        policy: when stages are made, and what they must show.
    """

    def __init__(self, target: Target, stages: Sequence[Stage], policy: StagePolicy) -> None:
        """Prepare the task, which is `work`."""
        compiled = target.compiled
        self.stages = tuple(stages)
        self.policy = policy
        self._target = target
        self._samples = samples_of(target.request.model)
        self._verdicts = Verdicts(target)
        self._maker = StageMaker(target, policy, self._samples, self._verdicts, self._serves)
        self._wanted = anyio.Event()
        self._ended_by = "the compilation was closed"
        self._scope = anyio.CancelScope()
        self._ended = anyio.Event()
        self._began = self._counted = compiled.use.executions
        self._way_back = WayBack(compiled, self._before, self._prepare_again, target.run, self._gone_back, self._model)
        compiled.abandoned = self._abandoned
        if any(stage.state == "waiting" for stage in stages):
            compiled.sampling = self._samples  # from the very first execution, because a second one may not come for long

    def stage(self, name: str) -> Stage:
        """Return the stage of that name.

        Raises:
            CallerError: there is no such stage.
        """
        for stage in self.stages:
            if stage.name == name:
                return stage
        names = ", ".join(repr(stage.name) for stage in self.stages)
        raise CallerError(f"this compilation has no stage {name!r}; its stages are {names}")

    async def wait_for(self, name: str, timeout_s: float | None) -> None:
        """See `Compilation.wait_for_stage`."""
        stage = self.stage(name)
        seconds = checked_seconds("timeout_s", timeout_s)
        self._wanted.set()
        with anyio.move_on_after(seconds):
            await decided(stage).wait()
        if not decided(stage).is_set():
            raise DeadlineError(f"stage {name!r} is still {stage.state} after {timeout_s} s")
        if stage.state == "rejected":
            raise StageRejected(name, stage.reason)

    @property
    def ended(self) -> bool:
        """Whether its task has ended."""
        return self._ended.is_set()

    async def aclose(self, why: str = "") -> None:
        """End the worker and the task. The stage that was being made, and those that wait, are rejected."""
        self._ended_by = why or self._ended_by
        self._abandoned()
        with bounded_shield(_STOP_S):
            await self._ended.wait()

    # --- the task ----------------------------------------------------------------------------------------------------

    async def work(self) -> None:
        """Make the stages. Runs in the runtime's task group until the compilation is closed."""
        try:
            with self._scope:
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(self._make_all)
                    await self._way_back.watch()
        finally:
            for stage in self.stages:
                if not decided(stage).is_set():
                    self._reject(stage, self._ended_by)
            self._ended.set()

    async def _make_all(self) -> None:
        try:
            with self._target.compiled.watching():
                for stage in self.stages:
                    if stage.state == "waiting":
                        with self._judged(stage):
                            await self._use_warrants_it()
                            await self._maker.make(stage)
        finally:
            self._target.compiled.sampling = None

    def _abandoned(self) -> None:
        """Stop, and count how often the model was used, for the next start. Runs in `finally` blocks, so it must not await."""
        use, cache = self._target.compiled.use, self._target.request.cache
        executions = use.executions - self._counted
        self._counted += executions
        if cache is not None and executions:
            cache.store.remembered.count_use(self._target.request.model.token, executions)
        self._scope.cancel()

    @contextmanager
    def _judged(self, stage: Stage) -> Iterator[None]:
        """Reject the stage if the body fails."""
        try:
            yield
        except StageRejected as rejected:
            self._reject(stage, rejected.reason, logging.INFO)  # the finding of a comparison may come at every start
        except AionnError as error:
            self._reject(stage, f"while {stage.state}: {error}")
        except Exception as error:  # a defect here must not end the app's runtime, and with it the stream
            logger.exception("making stage %r of model %r failed", stage.name, self._model, extra=self._about(stage.name))
            self._reject(stage, f"while {stage.state}: {type(error).__name__}: {error}")

    def _reject(self, stage: Stage, reason: str, level: int = logging.WARNING) -> None:
        enter_state(stage, "rejected", reason)
        if not self._target.compiled.closed and not self._target.devices.closed:
            words = "stage %r of model %r was not swapped in: %s"
            logger.log(level, words, stage.name, self._model, reason, extra=self._about(stage.name))

    async def _use_warrants_it(self) -> None:
        """Wait until the model is used often enough, or until a caller waits for a stage."""
        policy, cache, use = self.policy, self._target.request.cache, self._target.compiled.use

        async def used() -> None:
            earlier = 0 if cache is None else await cache.store.remembered.use(self._target.request.model.token, PER_S)
            await until_frequent(use, policy.executions, since=self._began, earlier=earlier)
            with anyio.move_on_after(_WITHIN_S):
                await self._pause()

        await _first(used, self._wanted.wait)

    async def _pause(self) -> None:
        """Wait until nothing has been executed for `_IDLE_S`."""
        while (serving := self._target.compiled.serving) is not None:
            await serving.wait_idle()
            executions = serving.use.executions
            await anyio.sleep(_IDLE_S)
            if not serving.users and executions == serving.use.executions:
                return

    def _serves(self, stage: Stage, before: Serving | None) -> None:
        for other in self.stages:
            if before is not None and other.name == before.stage and other is not stage:
                enter_state(other, "replaced")
        enter_state(stage, "serving")
        trace.count("stage.swapped", stage=stage.name, made_by=stage.made_by)
        logger.info("stage %r of model %r serves now: %s", stage.name, self._model, stage.comparison, extra=self._about(stage.name))

    @property
    def _model(self) -> str:
        return self._target.request.record.name

    def _about(self, stage: str) -> dict[str, str]:
        return about(model=self._model, stage=stage)

    # --- the way back ------------------------------------------------------------------------------------------------

    def _before(self, name: str) -> list[str]:
        """Return the stages before that one which were not rejected, the best first."""
        names = [stage.name for stage in self.stages]
        return [stage.name for stage in reversed(self.stages[: names.index(name)]) if stage.state in ("replaced", "skipped")]

    async def _prepare_again(self, name: str) -> Prepared:
        target = self._target
        names = stage_devices(name, [stage.name for stage in self.stages])
        with Progress(target.request.record, name) as progress:
            prepared, progress.outcomes = await prepare_on(target.devices, names, target.request)
            return prepared

    def _gone_back(self, bad: Serving, base: Serving, reason: str, held_ns: int) -> None:
        enter_state(self.stage(bad.stage), "rejected", reason)
        enter_state(self.stage(base.stage), "serving")
        if held_ns:
            self._target.request.record.stage_swapped(base.stage, held_ns)
        words = "stage %r of model %r no longer serves, and stage %r serves again: %s"
        logger.warning(words, bad.stage, self._model, base.stage, reason, extra=self._about(bad.stage))
        self._verdicts.remember_failure(bad, base, reason)


def stages_after(staging: Staging, serving: Serving | None, record: CompilationRecord) -> list[Stage]:
    """Return new stages in place of those of a staging that is over. `serving` is what serves now."""
    names = [stage.name for stage in staging.stages]
    now = names[-1] if serving is None else serving.stage
    stages = [reported_stage(name, record.stage_entered) for name in names]
    for stage in stages:
        if stage.name == now:
            enter_state(stage, "serving")
        elif names.index(stage.name) < names.index(now):
            enter_state(stage, "skipped", f"stage {now!r} serves")
    return stages


async def _first(*acts: Callable[[], Awaitable[None]]) -> None:
    """Run until one of the functions returns. The others are cancelled."""
    async with anyio.create_task_group() as tasks:

        async def run(act: Callable[[], Awaitable[None]]) -> None:
            await act()
            tasks.cancel_scope.cancel()

        for act in acts:
            tasks.start_soon(run, act)


COMPARISONS = 5
"""A comparison under which the stage before ends is begun again, up to so many in all."""

SWAP_TRIES = 5
"""A swap that comes at a wrong moment is tried again in another gap, up to so many times."""


class StageMaker:
    """Makes stages of one compilation.

    Invariant
        Nothing that a stage needs before its swap (worker, model, connections) is left when the stage is rejected.
    """

    def __init__(
        self, target: Target, policy: StagePolicy, samples: Samples, known: Verdicts, serves: Callable[[Stage, Serving | None], None]
    ) -> None:
        """Make stages on `target`. `serves` is called with a stage that was swapped in, and with what served before."""
        self._target = target
        self._policy = policy
        self._samples = samples
        self._known = known
        self._serves = serves

    async def make(self, stage: Stage) -> None:
        """Make a stage and swap it in.

        Raises:
            StageRejected: the comparison refused the stage, now or earlier.
            AionnError: the stage cannot be made.
        """
        with self._target.compiled.use.hold():
            await self._make(stage)

    async def _make(self, stage: Stage) -> None:
        target, policy = self._target, self._policy
        if (reason := await self._known.known(stage.name, policy)) not in (None, verdicts.APPROVED):
            raise StageRejected(stage.name, f"as an earlier comparison found: {reason}")
        enter_state(stage, "compiling")
        effort = background.Effort(policy.threads, policy.timeout_s, policy.backend, partial(compiles_here, stage))
        with Progress(target.request.record, stage.name, partial(enter_step, stage)):
            made = await background.make(target.devices, stage_devices(stage.name, target.stages), target.request, effort)
        stage.made_by, stage.not_kept = made.by, made.not_kept
        made.prepared.remember(target.request.model)
        better = Serving(made.prepared, target.request.model, target.compiled.use, stage.name)
        swapped = False
        try:
            if made.not_kept is not None and (unkept := target.request.unkept(made.not_kept)):
                raise StageRejected(stage.name, unkept)
            enter_state(stage, "comparing")
            stage.comparison, base = await self._compare(better)
            if stage.comparison.refused:
                await self._known.remember(stage.comparison, better, base)
                raise StageRejected(stage.name, stage.comparison.refused)
            before = target.compiled.serving
            await self._swap(better)
            swapped = True
        finally:
            if not swapped:
                made.prepared.release()
        try:
            # First, so that an app which ends as soon as the stage serves finds it at its next start.
            await self._known.remember(stage.comparison, better, base)
        finally:
            self._serves(stage, before)

    async def _compare(self, better: Serving) -> tuple[Comparison, Serving]:
        """Compare a stage with the one that serves. Returns the comparison and the stage that served.

        Making a stage is a use of the model. So the stage that serves is prepared again if its driver has died, as before an execution.
        """
        policy, compiled = self._policy, self._target.compiled
        tolerances = {**TOLERANCES, **policy.tolerances}
        rules = Rules(policy.min_gain, tolerances, RUNS, COMPARE_S)
        for left in reversed(range(COMPARISONS)):
            before = await self._target.live()
            try:
                samples, made_up = await self._inputs(before)
                return await compare(self._target.run, compiled, before, better, samples, rules, made_up=made_up), before
            except AionnError:
                if not left or (before.alive and before is compiled.serving):
                    raise
        raise AssertionError("the last comparison returns or raises")

    async def _inputs(self, before: Serving) -> tuple[Sequence[Inputs], bool]:
        """Return recent inputs and False, or made-up inputs and True before the first recent ones are kept."""
        samples = self._samples
        if not samples.kept:
            for inputs in guessed_inputs(self._target.request.model):
                try:
                    await self._target.run(before, inputs, deadline_of(RUN_TIMEOUT_S))
                except AionnError:
                    before.check_alive()
                    continue
                return [inputs], True
            await samples.arrived.wait()
        return list(samples.kept), False

    async def _swap(self, better: Serving) -> None:
        for attempt in range(SWAP_TRIES):
            try:
                held_ns = await self._target.compiled.swap(better)
                return self._target.request.record.stage_swapped(better.stage, held_ns)
            except NotNowError as not_now:
                if attempt == SWAP_TRIES - 1:
                    raise StageRejected(better.stage, f"{not_now}, at each of {SWAP_TRIES} attempts") from not_now
        raise AssertionError("the last attempt returns or raises")


_STORED_SHARE = 0.5
"""The share of the time that is left which the search for stored stages may take, before the first stage is prepared."""


def stages_of(names: Sequence[str], record: CompilationRecord) -> list[Stage]:
    """Return the stages of those names, which wait."""
    return [reported_stage(name, record.stage_entered) for name in names]


async def prepare_first(devices: Devices, stages: Sequence[Stage], request: CompileRequest, policy: StagePolicy) -> Found:
    """Prepare the stage that serves from the start. A device that cannot run every node gets the other stages' devices for the rest.

    Raises:
        CompilationError, DriverDiedError, DriverHungError: no stage can be prepared.
    """
    names, options, cache = [stage.name for stage in stages], request.options, request.cache
    patience_s = request.left_s(_STORED_SHARE / max(1, len(names) - 1))
    for index in range(len(names) - 1, 0, -1):
        if cache is None:
            break
        # A disk may hang in any of this, and the app's deadline does not wait for it.
        work = partial(_stored, devices, names[index], names[:index], request, policy)
        with devices.kept(names[index], options.priority):
            found = await in_time(devices.tasks, work, patience_s, _release)
        if found is not None:
            for stage in stages[:index]:
                enter_state(stage, "skipped", f"stage {names[index]!r} was stored already")
            stages[index].made_by = "cache"
            enter_state(stages[index], "serving")
            return found
    for stage in stages:
        try:
            found = await prepare_on(devices, stage_devices(stage.name, names), request)
        except (CompilationError, DriverDiedError, DriverHungError) as error:
            enter_state(stage, "rejected", str(error))
            if stage is stages[-1]:
                raise
            extra = about(model=current.get().name, stage=stage.name)
            logger.warning("stage %r of model %r cannot serve first: %s", stage.name, current.get().name, error, extra=extra)
            continue
        stage.made_by = "cache" if all(outcome.kind is CacheOutcomeKind.HIT for outcome in found[1]) else "driver"
        enter_state(stage, "serving")
        return found
    raise AssertionError("the last stage returns or raises")


async def _release(found: Found | None) -> None:
    if found is not None:
        found[0].release()


async def _stored(devices: Devices, name: str, bases: Sequence[str], request: CompileRequest, policy: StagePolicy) -> Found | None:
    """Load a stage if it is stored and the policy approves of its measurements. Returns None otherwise.

    No driver is started for a stage that the policy does not approve of.
    """
    model, options, cache = request.model, request.options, request.cache
    assert cache is not None  # without one nothing is stored
    threads = run_threads(options)
    found = await cache.store.remembered.measurements(verdicts.scope(request, name))
    found = [one for one in found if one.base in bases and one.threads == threads]
    if verdicts.judged(found, model, policy) != verdicts.APPROVED:
        return None
    versions: dict[str, str | None] = {}

    async def ask(base: str) -> None:
        versions[base] = await version_of(devices, base)

    try:
        with ungrouped():
            async with anyio.create_task_group() as tasks:
                for base in {one.base for one in found}:
                    tasks.start_soon(ask, base)
                remote = await devices.get(name, options.priority)
        valid = [one for one in found if verdicts.holds(one, remote.version, versions[one.base], threads)]
        if not remote.cache_files.supported or verdicts.judged(valid, model, policy) != verdicts.APPROVED:
            return None
        current.get().enter(name, LOOKING)
        async with await cache.store.open(wanted_of(remote, request, cache.token, cache.operations), wait_s=0.0) as stored:
            if not isinstance(stored, Hit):
                return None
            with current.get().on(name) as attempt:
                loaded = await load(remote, request, stored)
                attempt.outcome = stored.outcome
            return loaded, (stored.outcome,)
    except AionnError as error:
        model_name = request.record.name
        words = "stage %r of model %r is stored and cannot serve from the start: %s"
        logger.info(words, name, model_name, error, extra=about(model=model_name, stage=name))
        return None
