"""Cut a model into steps, each of which one device runs. Pure: no device is asked, and nothing is read but the graph.

A model that one device can run whole is one step, on the first such device. Otherwise each operation goes to the device that declares the
best `Performance` for it, and the steps are found as in NNAPI. Operations whose inputs are there wait in the queue of their device. The
cut takes one queue, opens a step, and drains the queue with all that becomes ready in it. Then it takes the next.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from aionn.errors import CompilationError
from aionn.graph.flow import Flow
from aionn.graph.steps import Step
from aionn.hal.model import Model
from aionn.hal.types import ExecutionPreference, Performance

__all__ = ["HAND_OVER_US", "cut"]

HAND_OVER_US = 150.0
"""What it costs to hand over to the next step, in microseconds."""

_UNDECLARED: Mapping[str, Performance] = MappingProxyType({})
_AS_A_CPU = Performance()


def cut(
    model: Model,
    capable: Mapping[str, Sequence[bool]],
    performance: Mapping[str, Performance] = _UNDECLARED,
    preference: ExecutionPreference = ExecutionPreference.FAST_SINGLE_ANSWER,
    *,
    hand_over_us: float = HAND_OVER_US,
) -> tuple[Step, ...]:
    """Cut a model into steps, in the order in which they run. One step means that one device runs the whole model.

    Args:
        model: read, so that its graph is known.
        capable: by device in the app's order: for each of `model.operations` whether the device can run it.
        performance: what devices declare; one that is missing here counts as a CPU.
        preference: LOW_POWER compares power, the others compare time.
        hand_over_us: what one more step costs.

    Raises:
        CompilationError: no device can run an operation, which is `.node`; or operations that must stay together.
    """
    flow = Flow(model)
    names = list(capable)
    homes: dict[int, int] = {}
    for index, operation in enumerate(model.operations):
        if flow.is_constant_node(index):
            continue
        able = [number for number, name in enumerate(names) if capable[name][index]]
        if not able:
            what = f"operator {operation.domain or 'ai.onnx'}.{operation.op_type} (node {operation.name!r})"
            reason = f"none of the devices {', '.join(names)} can run {what}"
            raise CompilationError(f"{reason}; name a device that can", node=operation.name, reason=reason)
        kind = next((flow.element_type(name) for name in flow.reads[index]), None)
        homes[index] = min(able, key=lambda number: performance.get(names[number], _AS_A_CPU).cost(kind, preference))
    done = set(flow.inputs | flow.constants)
    steps: list[tuple[str, list[int]]] = []
    left = dict(homes)
    while left:
        device = max(home for index, home in left.items() if done.issuperset(flow.reads[index]))
        taken: list[int] = []
        while ready := [index for index, home in left.items() if home == device and done.issuperset(flow.reads[index])]:
            for index in ready:
                del left[index]
                done.update(flow.makes[index])
            taken += ready
        steps.append((names[device], sorted(taken)))
    return tuple(_step(model, flow, steps, number) for number in range(len(steps)))


def _step(model: Model, flow: Flow, steps: Sequence[tuple[str, Sequence[int]]], number: int) -> Step:
    device, operations = steps[number]
    made = [name for index in operations for name in flow.makes[index]]
    read = dict.fromkeys(name for index in operations for name in flow.reads[index])
    inputs = [name for name in read if name not in flow.constants and name not in made]
    later = {name for _, other in steps[number + 1 :] for index in other for name in flow.reads[index]}
    outputs = [name for name in made if name in later or name in model.outputs]
    if number == 0:
        through = [name for name in model.outputs if name not in flow.maker]
        outputs += through
        inputs += [name for name in through if name in flow.inputs and name not in inputs]
    return Step(device, tuple(operations), tuple(model.operations[index].name for index in operations), tuple(inputs), tuple(outputs))
