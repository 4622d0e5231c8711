"""`PlannedModel`: the steps of a plan, each prepared on its device, as one prepared model.

It has the face of `RemotePreparedModel` as the runtime uses it. So what serves, swaps and bursts need not know how many devices run
a model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from aionn.hal.batching import RowAxes
from aionn.hal.model import PooledModel
from aionn.hal.options import CallOptions
from aionn.hal.types import Request
from aionn.remote.device import RemoteDevice, RemotePreparedModel, StepRole
from aionn.runtime.serving.boundaries import BoundaryLayouts, KnownShapes, PlannedStep, Wiring
from aionn.runtime.serving.planned_execution import PlannedExecution, Pool

__all__ = ["PlannedDevice", "PlannedModel", "PlannedStep", "Prepared"]


class PlannedDevice:
    """The devices of a plan, as one.

    Attributes:
        name: of all, each once, joined by "+". version: the same with their versions.
        connection: the devices' connections, as one.
    """

    def __init__(self, steps: Sequence[PlannedStep]) -> None:
        devices = {id(planned.prepared.device): planned.prepared.device for planned in steps}
        self._devices = tuple(devices.values())
        names = {device.name: device.version for device in self._devices}
        self.name = "+".join(names)
        self.version = "+".join(names.values())
        self.connection = PlannedConnection(self._devices)

    @property
    def restarted(self) -> bool:
        """Whether the app has ended one of the drivers by a restart."""
        return any(device.restarted for device in self._devices)


class PlannedConnection:
    """The connections to the drivers of a plan, as one. It ends with the first of them."""

    def __init__(self, devices: Sequence[RemoteDevice]) -> None:
        self._connections = [device.connection for device in devices]
        self._ended_by: BaseException | None = None

    @property
    def ended_by(self) -> BaseException | None:
        """Why the first of them has ended, or None while all go on."""
        if self._ended_by is None:
            self._ended_by = next((ended_by for one in self._connections if (ended_by := one.ended_by) is not None), None)
        return self._ended_by

    def when_ended(self, key: object, callback: Callable[[BaseException], None]) -> None:
        """As `Connection.when_ended`. The callback may come once for each connection."""
        for connection in self._connections:
            connection.when_ended(key, callback)

    def cancel_when_ended(self, key: object) -> None:
        for connection in self._connections:
            connection.cancel_when_ended(key)


class PlannedModel:
    """The steps of a plan, as one prepared model.

    Attributes:
        steps: in the order in which they run.
        inputs, outputs: the operands of the whole model.
        device: the devices of the steps, as one.
        instances: the most that a step has.
        tunes: as `RemotePreparedModel.tunes`. A plan's steps are not asked for better artifacts.
        rows, was_joining: as those of `RemotePreparedModel`. A plan joins no requests.
    """

    tunes = was_joining = False
    rows = RowAxes("a plan cuts the model over several devices; compile it for one device")

    def __init__(self, model: PooledModel, steps: Sequence[PlannedStep]) -> None:
        """Join prepared steps.

        Args:
            model: the whole model.

        Raises:
            CompilationError: the steps do not fit together, or do not make all outputs of the model.
        """
        self.steps = tuple(steps)
        self.inputs = model.inputs
        self.outputs = model.outputs
        self.device = PlannedDevice(self.steps)
        self.instances = max(step.prepared.instances for step in self.steps)
        self._wiring = Wiring(model.inputs, model.outputs, self.steps)
        self._layouts = BoundaryLayouts(self._wiring)

    @property
    def runs_on(self) -> str:
        """What computes the steps, each once."""
        return "; ".join(dict.fromkeys(step.prepared.runs_on for step in self.steps if step.prepared.runs_on))

    def remember(self, model: PooledModel) -> None:
        """Note which model this is, for log lines."""
        for planned in self.steps:
            planned.prepared.remember(model)

    def between_bytes(self, known: KnownShapes) -> int:
        """Return the room that an execution needs for the tensors between the steps. `known`: shapes of all inputs and outputs."""
        return self._layouts.layout(known).size_bytes

    def execution(
        self, known: KnownShapes, between: int, request: Request, pools: Sequence[Pool], options: CallOptions
    ) -> PlannedExecution:
        """Return an execution of all steps, for what sends them; see `PlannedExecution`."""
        return PlannedExecution(self._wiring, self._layouts, known, between, request, pools, options)

    def step_roles(self, is_input: bool, index: int) -> list[StepRole]:
        """Return what an input or output of the whole model is in the steps. An output may be an input of later steps, too."""
        name = list(self.inputs if is_input else self.outputs)[index]
        roles = []
        for planned in self.steps:
            prepared = planned.prepared
            if name in prepared.inputs:
                roles.append(StepRole(prepared, True, list(prepared.inputs).index(name)))
            if not is_input and name in prepared.outputs:
                roles.append(StepRole(prepared, False, list(prepared.outputs).index(name)))
        return roles

    def joined_runs(self) -> None:
        """Return None: a plan joins no requests."""

    async def aclose(self) -> None:
        """Let every driver free its step."""
        try:
            for planned in self.steps:
                await planned.prepared.aclose()
        finally:
            self.release()

    def release(self) -> None:
        """As `aclose`, without waiting."""
        for planned in self.steps:
            planned.prepared.release()


Prepared = RemotePreparedModel | PlannedModel
"""What a device has prepared, or several devices step by step."""
