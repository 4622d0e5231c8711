"""The control call as a channel: the request goes over the control socket, the arrays through shared memory."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from aionn import trace
from aionn.remote.device import RemotePreparedModel
from aionn.runtime.executing.execution import Execution
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
