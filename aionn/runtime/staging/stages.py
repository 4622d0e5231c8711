"""Stages: serve from a quick one at once, make a better one behind the stream, compare it, and swap it in between two executions.

    waiting ──> compiling ──> loading ──> comparing ──> serving ──> replaced (by a better one)
       └────────────┴────────────┴────────────┴────────────┴──> rejected (`reason` says why; the stage before serves)
    skipped     a better one was stored already and served from the start

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

import anyio

from aionn import trace
from aionn.errors import AionnError, CallerError, DeadlineError, StageRejected
from aionn.runtime.preparing.partition import prepare_on
from aionn.runtime.preparing.renewal import stage_devices
from aionn.runtime.record import CompilationRecord, Progress, about
from aionn.runtime.serving.planned_model import Prepared
from aionn.runtime.serving.serving import Serving, Use
from aionn.runtime.staging.making import StageMaker
from aionn.runtime.staging.samples import samples_of
from aionn.runtime.staging.stage import Stage, StagePolicy, enter_state, reported_stage, settled
from aionn.runtime.staging.target import Target
from aionn.runtime.staging.verdicts import Verdicts
from aionn.runtime.staging.way_back import WayBack
from aionn.tasks import bounded_shield, checked_seconds

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
        self._over = anyio.Event()
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
            await settled(stage).wait()
        if not settled(stage).is_set():
            raise DeadlineError(f"stage {name!r} is still {stage.state} after {timeout_s} s")
        if stage.state == "rejected":
            raise StageRejected(name, stage.reason)

    @property
    def over(self) -> bool:
        """Whether its task has ended."""
        return self._over.is_set()

    async def stop(self, why: str = "") -> None:
        """End the worker and the task. The stage that was being made, and those that wait, are rejected."""
        self._ended_by = why or self._ended_by
        self._abandoned()
        with bounded_shield(_STOP_S):
            await self._over.wait()

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
                if not settled(stage).is_set():
                    self._reject(stage, self._ended_by)
            self._over.set()

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
