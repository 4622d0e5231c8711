"""`Step`: a part of a model that one device runs. A plan is a tuple of steps, in the order in which they run.

No `onnx` is needed here, so a plan that is read from a cache costs nothing of it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Step:
    """A part of a model that one device runs.

    Attributes:
        device: name of the device.
        operations: their indices in `Model.operations`, rising.
        nodes: the names of these operations.
        inputs: names of the tensors that it reads: inputs of the model, and outputs of earlier steps.
        outputs: names of the tensors that it makes for later steps, or as outputs of the model.
    """

    device: str
    operations: tuple[int, ...]
    nodes: tuple[str, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
