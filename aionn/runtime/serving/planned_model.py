"""`PlannedModel`: the steps of a plan, each prepared on its device, as one prepared model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from aionn.graph.steps import Step
from aionn.hal.model import Model
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


class PlannedModel:
    """The steps of a plan, as one prepared model.

    Attributes:
        steps: in the order in which they run.
        inputs, outputs: the operands of the whole model.
        runs_on: what computes the steps, in their order.
    """

    def __init__(self, model: Model, steps: Sequence[PlannedStep]) -> None:
        self.steps = tuple(steps)
        self.inputs = model.inputs
        self.outputs = model.outputs
        self.runs_on = "; ".join(step.prepared.runs_on for step in self.steps)


Prepared = RemotePreparedModel | PlannedModel
"""What a device has prepared, or several devices step by step."""
