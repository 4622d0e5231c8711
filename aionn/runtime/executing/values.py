"""Executions of models with strings, sequences, maps or optionals. Each is one control call with its values; see `remote.values`.

Such values have no place in a frame. So bursts, frames, device memory and stages refuse these models, and
`Compilation.compute` runs every execution here. Gate, swaps, deadlines and the driver's death are as for other control calls.
"""

from __future__ import annotations

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
