"""`CompilationParts`: what a compilation consists of, below its face. The runtime opens and closes it.

Bursts, recurrent streams and device memories hold the `Renewal`, never these parts. What runs in the runtime's tasks holds neither.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from aionn import trace
from aionn.errors import AionnError, CallerError
from aionn.hal.options import CallOptions
from aionn.runtime.executing.arguments import Arguments
from aionn.runtime.executing.control import fixed_route
from aionn.runtime.executing.device_roles import Part, part_of
from aionn.runtime.executing.execution import Call, Executor
from aionn.runtime.executing.frame_layout import Outputs
from aionn.runtime.executing.frames import Frames
from aionn.runtime.executing.link import CLOSE_S
from aionn.runtime.executing.values import execution_of, frames_refusal
from aionn.runtime.preparing.preparation import Found
from aionn.runtime.preparing.renewal import Renewal
from aionn.runtime.preparing.request import CompileRequest
from aionn.runtime.serving.serving import Serving
from aionn.runtime.session import Session
from aionn.runtime.streaming.connection import BurstConnection, Connections
from aionn.runtime.streaming.kept_burst import KeptBurst
from aionn.tasks import bounded_shield

if TYPE_CHECKING:  # most apps make no stages, and start no executions
    from aionn.runtime.executing.starting import Starts
    from aionn.runtime.staging.measuring import Inputs, Run
    from aionn.runtime.staging.stage import Stage, StagePolicy
    from aionn.runtime.staging.stages import Staging
    from aionn.runtime.staging.swapping import NewModel

_TRIALS = 16
"""So many trials of one compilation may run at once."""


class CompilationParts:
    """The parts of one compilation.

    Attributes:
        renewal: keeps the model prepared. Its `compiled` is what serves.
        arguments: how arguments are laid out.
        roles: returns the `Part` with the inputs and the outputs that an app names for device memory.
        bursts: connections of the bursts that the app has made, and of the kept one.
        kept: the burst behind `Compilation.compute`.
        staging: makes better stages, in mode "staged".
    """

    def __init__(self, session: Session, request: CompileRequest, first: Found | None = None) -> None:
        """`first`: what was prepared already, or None to prepare it at the first use."""
        model = request.model
        self.session = session
        self.renewal = Renewal(session, request, first)
        self.compiled = self.renewal.compiled
        self.staging: Staging | None = None
        self.arguments = arguments = Arguments(model)
        self.roles = partial(_roles, self.renewal, arguments)
        self.renewal.disproved = lambda: arguments.disproved
        self._trials = Executor(arguments, Frames(_TRIALS), None)
        fallback = None
        if request.candidates is None:  # devices that the app has named forbid any fallback
            from aionn.runtime.executing.fallback import Fallback

            fallback = Fallback(self.renewal, self._trials)
        self.bursts = Connections(self.renewal, arguments, fallback)
        self.kept = KeptBurst(self.bursts)
        self._starts: Starts | None = None
        self._closed = False

    @property
    def starts(self) -> Starts:
        """The executions behind `Compilation.start`."""
        if self._starts is None:
            from aionn.runtime.executing.starting import IN_FLIGHT, Starts

            self._starts = Starts(self.renewal, self.bursts.executor(IN_FLIGHT))
        return self._starts

    async def wait_for_stage(self, staging: Staging, name: str, timeout_s: float | None) -> None:
        """See `Compilation.wait_for_stage`."""
        with self.compiled.use.hold():
            await staging.wait_for(name, timeout_s)

    def check_frames(self, what: str) -> None:
        """Raise a `CallerError` if frames cannot hold the model's inputs and outputs. `what`: the call that needs frames."""
        if self.arguments.values:
            raise frames_refusal(self.renewal.model, what)

    # --- closing -------------------------------------------------------------------------------------------------------

    async def aclose(self) -> None:
        """See `Compilation.aclose`."""
        if self._closed or self.session.inherited:
            return
        self.session.check_loop()
        self._closed = True
        bursts = list(self.bursts)
        try:
            self.renewal.close()
            self.kept.refuse()
            if self._starts is not None:
                self._starts.close()
            if self.staging is not None:
                await self.staging.stop()
            await self.kept.aclose()
            for burst in bursts:
                await burst.aclose()
            with bounded_shield(CLOSE_S):
                await self.renewal.store_tuned()
                if self.compiled.serving is not None:
                    await self.compiled.serving.aclose()
        except AionnError as error:
            trace.count("compilation.release_failed", reason=str(error))  # the driver is gone, and the model with it
        finally:
            self._end(bursts)
            self.compiled.release()

    def end(self) -> None:
        """Give the memory back: the runtime has closed, and every driver has ended. `CompiledModel.end` follows."""
        self._end(self.bursts)

    def _end(self, bursts: Iterable[BurstConnection]) -> None:
        self.kept.end()
        if self._starts is not None:
            self._starts.end()
        for burst in bursts:
            burst.end()
        self._trials.frames.close()
        self.bursts.close()

    # --- stages and new models -----------------------------------------------------------------------------------------

    def begin_stages(self, stages: Sequence[Stage], policy: StagePolicy) -> None:
        """Make better stages from now on."""
        from aionn.runtime.staging.stages import Staging
        from aionn.runtime.staging.target import Target

        names = tuple(stage.name for stage in stages)
        request = self.renewal.request.without_deadline()
        live = partial(_live, weakref.ref(self.renewal))
        target = Target(self.session.devices, self.compiled, live, request, _trial_runs(self._trials), names)
        self.staging = Staging(target, stages, policy)
        self.session.tasks.start_soon(self.staging.work, name="stages")

    def new_model(self) -> NewModel:
        """Return what an app's new version of the model needs to take over."""
        from aionn.runtime.staging.swapping import NewModel

        return NewModel(self.renewal, self.staging, self.begin_stages, _trial_runs(self._trials), self._last_inputs, self.bursts.static)

    def _last_inputs(self) -> list[Inputs]:
        """Return the inputs of the last execution on each burst."""
        found = [self.kept.last_inputs, *(burst.executor.frames.last_inputs() for burst in self.bursts)]
        return [inputs for inputs in found if inputs is not None]


def _roles(renewal: Renewal, arguments: Arguments, inputs: Iterable[str], outputs: Iterable[str]) -> Part:
    return part_of(renewal.model, arguments.outputs, inputs, outputs)


async def _live(renewal: weakref.ref[Renewal]) -> Serving:
    found = renewal()
    if found is None:
        raise CallerError("the app has dropped this compilation")
    return await found.live()


def _trial_runs(executor: Executor) -> Run:
    """Return what runs inputs on one prepared model, beside what serves."""

    async def run(serving: Serving, inputs: Inputs, deadline_ns: int | None) -> Outputs:
        call = Call(inputs, {}, CallOptions(deadline_ns=deadline_ns), inputs)
        return await execution_of(executor, fixed_route(serving), call).run()

    return run
