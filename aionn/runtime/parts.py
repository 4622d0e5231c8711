"""`CompilationParts`: what a compilation consists of, below its face. The runtime opens and closes it.

Bursts and device memories hold the `Renewal`, never these parts. What runs in the runtime's tasks holds neither.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Sequence

from aionn import trace
from aionn.caching.outcomes import CacheOutcome
from aionn.errors import AionnError
from aionn.hal.model import Model
from aionn.hal.types import ExecutionPreference
from aionn.remote.device import RemotePreparedModel
from aionn.runtime.executing.arguments import Arguments, Outputs
from aionn.runtime.executing.attempt import Attempt, Call, Executor
from aionn.runtime.executing.control import control_route, fixed_route
from aionn.runtime.executing.device_buffers import BufferPair
from aionn.runtime.executing.device_memory import DeviceMemory
from aionn.runtime.executing.device_roles import DeviceRoles
from aionn.runtime.executing.frames import Frames
from aionn.runtime.executing.link import CLOSE_S, LinkOptions
from aionn.runtime.preparing.renewal import Order, Renewal
from aionn.runtime.serving.serving import Serving
from aionn.runtime.session import Session
from aionn.runtime.staging.measuring import Inputs, Run
from aionn.runtime.staging.stage import Stage, StagePolicy
from aionn.runtime.staging.stages import Staging
from aionn.runtime.staging.swapping import NewModel
from aionn.runtime.staging.target import Target
from aionn.runtime.streaming.connection import BurstConnection
from aionn.tasks import bounded_shield

_IN_FLIGHT = 64
"""So many executions without a burst are in flight, each with descriptors in the driver. Further callers wait, in order."""


class CompilationParts:
    """The parts of one compilation.

    Attributes:
        renewal: keeps the model prepared. Its `compiled` is what serves.
        executor: for the app's executions without a burst.
        staging: makes better stages, in mode "staged".
    """

    def __init__(self, session: Session, model: Model, order: Order, first: tuple[RemotePreparedModel, CacheOutcome] | None = None) -> None:
        """`first`: what was prepared already, or None to prepare it at the first use."""
        self.session = session
        self.renewal = Renewal(session, model, order, first)
        self.compiled = self.renewal.compiled
        self.staging: Staging | None = None
        arguments = Arguments(model)
        self.renewal.disproved = lambda: arguments.disproved
        # A model whose shapes are all known: its frames have one size.
        self.static = all(operand.size_bytes is not None for operand in (*model.inputs.values(), *model.outputs.values()))
        frames = Frames(_IN_FLIGHT)
        self.executor = Executor(arguments, frames, self.compiled, copies=True)
        self._trials = Executor(arguments, frames, None, copies=True)
        self._route = control_route(self.renewal)
        self._bursts: weakref.WeakSet[BurstConnection] = weakref.WeakSet()
        self._closed = False

    async def compute(self, call: Call) -> Outputs:
        """Run the model once, without a burst."""
        self.renewal.check_usable()
        return await Attempt(self.executor, self._route, call).run()

    async def allocate(self, roles: DeviceRoles, deadline_ns: int | None) -> DeviceMemory:
        """Return device memory in the driver that serves."""
        while True:
            serving = await self.renewal.live(deadline_ns)
            with trace.span("allocate", device=serving.device):
                buffer = await roles.allocate(serving.prepared)
            if serving is self.compiled.serving:
                return DeviceMemory(self.renewal, BufferPair(serving.prepared, buffer, roles))
            buffer.release()  # another stage has been swapped in meanwhile

    def connection(self, depth: int, queue_capacity: int) -> BurstConnection:
        """Return the connection of a new burst, not yet open."""
        low_power = self.renewal.options.preference is ExecutionPreference.LOW_POWER
        executor = Executor(self.executor.arguments, Frames(depth + 1), self.compiled, copies=False)
        connection = BurstConnection(self.renewal, executor, LinkOptions(depth, queue_capacity, low_power))
        self._bursts.add(connection)
        return connection

    # --- closing -------------------------------------------------------------------------------------------------------

    async def aclose(self) -> None:
        """See `Compilation.aclose`."""
        if self._closed or self.session.inherited:
            return
        self.session.check_loop()
        self._closed = True
        bursts = list(self._bursts)
        try:
            self.renewal.close()
            if self.staging is not None:
                await self.staging.stop()
            for burst in bursts:
                await burst.aclose()
            with bounded_shield(CLOSE_S):
                if self.compiled.serving is not None:
                    await self.compiled.serving.aclose()
        except AionnError as error:
            trace.count("compilation.release_failed", reason=str(error))  # the driver is gone, and the model with it
        finally:
            for burst in bursts:
                burst.end()
            self.compiled.release()
            self.executor.frames.close()

    def end(self) -> None:
        """Give the memory back: the runtime has closed, and every driver has ended."""
        for burst in list(self._bursts):
            burst.end()
        self.executor.frames.close()

    # --- stages and new models -----------------------------------------------------------------------------------------

    def begin_stages(self, stages: Sequence[Stage], policy: StagePolicy) -> None:
        """Make better stages from now on."""
        renewal = self.renewal
        options = dataclasses.replace(renewal.options, deadline_ns=None)
        target = Target(self.session.devices, self.compiled, renewal.model, options, renewal.cache, _trial_runs(self._trials))
        self.staging = Staging(target, stages, policy)
        self.session.tasks.start_soon(self.staging.work, name="stages")

    def new_model(self) -> NewModel:
        """Return what an app's new version of the model needs to take over."""
        return NewModel(self.renewal, self.staging, self.begin_stages, _trial_runs(self._trials), self._last_inputs, self.static)

    def _last_inputs(self) -> list[Inputs]:
        """Return the inputs of the last execution on each burst, and of the last one without a burst."""
        frames = (self.executor.frames, *(burst.executor.frames for burst in self._bursts))
        return [inputs for inputs in (one.last_inputs() for one in frames) if inputs is not None]


def _trial_runs(executor: Executor) -> Run:
    """Return what runs inputs on one prepared model, beside what serves."""

    async def run(serving: Serving, inputs: Inputs, deadline_ns: int | None) -> Outputs:
        return await Attempt(executor, fixed_route(serving), Call(inputs, {}, False, deadline_ns, inputs)).run()

    return run
