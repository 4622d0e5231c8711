"""Executions over the control socket: as a channel, whose arrays go through shared memory, and of models with other values.

Strings, sequences, maps and optionals have no place in a frame; see `remote.values`. So bursts, frames, device memory and stages refuse
these models, and `Compilation.compute` runs every execution of them here, as one control call. Gate, swaps, deadlines and the driver's
death are as for other control calls.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from aionn import trace
from aionn.errors import CallerError, CompilationError
from aionn.hal.model import PooledModel
from aionn.hal.types import ErrorStatus
from aionn.hal.values import outside_frames
from aionn.pages.app_layout import COMPUTED, COPIED_BYTES
from aionn.remote.device import RemotePreparedModel
from aionn.runtime.executing.arguments import Outputs, as_array
from aionn.runtime.executing.execution import Call, Execution, Executor, Route
from aionn.runtime.executing.transitions import PLACE, SEND, SETTLE
from aionn.runtime.preparing.kept_model import KeptModel
from aionn.runtime.serving.serving import Serving


class ControlChannel:
    """Control calls to the driver of one serving. An `Execution` is sent over it (`Channel`).

    Attributes:
        serving: what computes.
    """

    __slots__ = ("_counted", "_estimated", "serving")

    def __init__(self, serving: Serving, *, counted: bool, estimated: bool = True) -> None:
        """`counted`: whether the executions are the app's, so that they count as use. `estimated`: whether their pauses count."""
        self.serving = serving
        self._counted = counted
        self._estimated = estimated

    async def send(self, execution: Execution) -> None:
        """Send one request over the control socket; see `Channel`."""
        options, serving, prepared = execution.call.options, self.serving, self.serving.prepared
        if self._counted:
            serving.use.count()
        settled = serving.entered(execution.answered, estimated=self._estimated)
        try:
            if isinstance(prepared, RemotePreparedModel):
                sending = prepared.execute(*execution.request(), options.measure_timing, options.deadline_ns, settled)
            else:
                planned = execution.planned(prepared)
                sending = planned.run(planned.execute, settled, check=execution.placement is not None)
        except BaseException:
            settled(None)
            raise
        with trace.span("compute", device=serving.device, stage=serving.stage):
            await sending


def control_route(kept_model: KeptModel, *, counted: bool = True) -> Callable[[int | None], Awaitable[ControlChannel]]:
    """Return the route of executions without a burst: to whatever serves when the gate is open.

    Args:
        counted: whether they are the app's. Others count as no use, and their pauses estimate no rhythm.
    """
    gate = kept_model.compiled.gate

    async def route(deadline_ns: int | None) -> ControlChannel:
        while True:
            if gate.shut:
                await gate.passed(deadline_ns)
            serving = await kept_model.live(deadline_ns)
            if not gate.closed:
                return ControlChannel(serving, counted=counted, estimated=counted)

    return route


def fixed_route(serving: Serving) -> Callable[[int | None], Awaitable[ControlChannel]]:
    """Return the route of a run on one prepared model, whatever serves. It passes no gate and does not count as use."""

    async def route(deadline_ns: int | None) -> ControlChannel:
        return ControlChannel(serving, counted=False)

    return route


def frames_refusal(model: PooledModel, what: str) -> CallerError:
    """Return why a model cannot do what needs frames."""
    return CallerError(f"{what} takes tensors of numbers only, but {outside_frames(model)}; use compilation.compute for this model")


def staged_refusal(model: PooledModel) -> CompilationError:
    """Return why a model cannot be staged."""
    strange = outside_frames(model)
    return CompilationError(f"mode 'staged' compares tensors of numbers only, but {strange}; use mode 'eager' or 'jit'", reason=strange)


def execution_of(executor: Executor, route: Route, call: Call) -> Execution:
    """Return an execution over the control socket, of whatever the model takes."""
    return (ValuesExecution if executor.arguments.values else Execution)(executor, route, call)


class ValuesExecution(Execution):
    """One execution. It holds nothing but its turn with the driver."""

    async def _run_once(self) -> Outputs:
        """Run once.

        Raises:
            CallerError: a name or a value does not fit, or the call names places for outputs; nothing was sent.
        """
        call, executor = self.call, self.executor
        if call.outputs:
            raise CallerError(f"outputs={list(call.outputs)}: this model's outputs are values that compute returns; leave outputs out")
        # Arrays in place of tensors of other libraries.
        inputs = {name: as_array(name, value) if hasattr(value, "__dlpack__") else value for name, value in call.inputs.items()}
        channel = self.channel = await self._route(call.options.deadline_ns)
        serving = channel.serving
        prepared = serving.prepared
        assert isinstance(prepared, RemotePreparedModel)  # such a model is never cut
        counted = executor.compiled is not None
        if counted:
            serving.use.count()
        self._act(PLACE)
        self._act(SEND)
        # From here on a swap waits for this execution.
        settled = serving.entered(self.answered, estimated=counted)
        with trace.span("compute.values", device=serving.device, stage=serving.stage):
            result, values, copied = await prepared.execute_values(inputs, call.options.measure_timing, call.options.deadline_ns, settled)
        executor.counts.add(COPIED_BYTES, copied)
        if result.status is not ErrorStatus.NONE:
            self.failed = result
            raise executor.failure(serving, result, None)
        executor.counts.add(COMPUTED, 1)
        self._act(SETTLE)
        return Outputs(values, serving.stage, result.timing if call.options.measure_timing else None)
