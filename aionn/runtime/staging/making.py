"""`StageMaker`: makes one stage. A stage is compiled in the background, loaded, compared with the stage that serves, and swapped in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from aionn.errors import AionnError, StageRejected
from aionn.runtime.preparing import background
from aionn.runtime.preparing.renewal import stage_devices
from aionn.runtime.record import Progress
from aionn.runtime.serving.compiled_model import NotNowError
from aionn.runtime.serving.serving import Serving
from aionn.runtime.staging import verdicts
from aionn.runtime.staging.comparing import COMPARE_S, RUNS, TOLERANCES, Comparison, Rules, compare
from aionn.runtime.staging.measuring import RUN_TIMEOUT_S, Inputs
from aionn.runtime.staging.samples import Samples, guessed_inputs
from aionn.runtime.staging.stage import Stage, StagePolicy, compiles_here, enter_state, enter_step
from aionn.runtime.staging.target import Target
from aionn.runtime.staging.verdicts import Verdicts
from aionn.tasks import deadline_of

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
