"""`Wiring`: which tensors of a plan come from the app, go to the app, or go from one step to another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from aionn.errors import CompilationError
from aionn.graph.steps import Step, check_steps, lifetimes
from aionn.hal.types import Operand
from aionn.remote.device import RemotePreparedModel


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """One step of a plan, and what its device has prepared for it.

    Attributes:
        step: what it computes.
        prepared: the step, prepared like any other model. Its inputs and outputs are those of `step`, in the same order.
    """

    step: Step
    prepared: RemotePreparedModel


@dataclass(frozen=True, slots=True)
class Boundary:
    """A tensor that one step makes for later ones.

    Attributes:
        name: of the tensor.
        element_bytes: of its type.
        made, read: numbers of the step that makes it and of the last one that reads it.
    """

    name: str
    element_bytes: int
    made: int
    read: int


class Wiring:
    """How the tensors of a plan go from step to step.

    Attributes:
        steps: of the plan.
        input_operands, output_operands: of the whole model.
        inputs, outputs: their numbers, by name.
        made: each tensor that a later step reads. boundaries: those among them that the app does not get.
    """

    def __init__(self, inputs: Mapping[str, Operand], outputs: Mapping[str, Operand], steps: Sequence[PlannedStep]) -> None:
        """Find where each tensor is made and read.

        Args:
            inputs, outputs: operands of the whole model, in its order.

        Raises:
            CompilationError: the steps do not fit together, or do not make all outputs.
        """
        self.steps = tuple(steps)
        self.input_operands, self.output_operands = inputs, outputs
        self.inputs = {name: number for number, name in enumerate(inputs)}
        self.outputs = {name: number for number, name in enumerate(outputs)}
        parts = [planned.step for planned in self.steps]
        wrong = check_steps(parts, self.inputs, self.outputs)
        if wrong is not None:
            raise CompilationError(f"the steps of the plan do not fit together: {wrong}; compile the model again")
        self.made = {
            name: Boundary(name, self.steps[made].prepared.outputs[name].type.element_bytes, made, read)
            for name, (made, read) in lifetimes(parts, ()).items()
            if read > made
        }
        self.boundaries = [boundary for name, boundary in self.made.items() if name not in self.outputs]
