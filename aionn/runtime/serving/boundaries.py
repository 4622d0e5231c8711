"""The tensors between the steps of a plan. They lie behind the arguments, in the frame of the execution.

Wiring            which tensors come from the app, go to the app, or go from one step to another
BoundaryLayout    their places for one set of shapes; tensors that are never needed at the same time share bytes
BoundaryLayouts   the layouts of one plan, and what executions have shown about shapes
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from aionn.errors import CompilationError
from aionn.graph.shapes import resolve_shapes
from aionn.graph.steps import Step, check_steps, lay_out, lifetimes
from aionn.hal.types import Operand
from aionn.memo import Memo
from aionn.memory.region import PAGE_BYTES
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


_REMEMBERED = 64
_FIRST_GUESS_BYTES = 4096
"""Room for a tensor of unknown shape before the plan has run once with these input shapes, at least."""

KnownShapes = tuple[tuple[int, ...] | None, ...]
"""Of the whole model's inputs, and then of its outputs. None while a shape is open."""


@dataclass(frozen=True, slots=True, eq=False)
class BoundaryLayout:
    """Where boundary tensors lie for one set of input shapes.

    Attributes:
        places: (offset behind the arguments, room in bytes) by name.
        shapes: of each tensor, or None while it is open.
        answered: whether the room of open tensors comes from an execution, and not from a guess.
        size_bytes: of all together.
    """

    places: Mapping[str, tuple[int, int]]
    shapes: Mapping[str, tuple[int, ...] | None]
    answered: bool
    size_bytes: int

    @classmethod
    def of(
        cls,
        boundaries: Sequence[Boundary],
        shapes: Mapping[str, tuple[int, ...] | None],
        room: Mapping[str, int],
        *,
        answered: bool = False,
    ) -> BoundaryLayout:
        """Lay tensors out. `room`: bytes for each of those whose shape is open."""
        sizes = {}
        for boundary in boundaries:
            shape = shapes[boundary.name]
            sizes[boundary.name] = room[boundary.name] if shape is None else prod(shape) * boundary.element_bytes
        layout = lay_out(sizes, {boundary.name: (boundary.made, boundary.read) for boundary in boundaries})
        places = {name: (offset, sizes[name]) for name, offset in layout.offsets.items()}
        return cls(places, dict(shapes), answered, layout.size_bytes)


class BoundaryLayouts:
    """The layouts of one plan. Remembers the room for each set of shapes, as `Arguments` does for frames.

    Attributes:
        disproved: tensors that came out in another shape than their step declares. Names are only added.
    """

    def __init__(self, wiring: Wiring) -> None:
        self._wiring = wiring
        self._layouts: Memo[KnownShapes, BoundaryLayout] = Memo(_REMEMBERED)
        self.disproved: set[str] = set()

    def layout(self, known: KnownShapes) -> BoundaryLayout:
        """Return where boundary tensors lie in an execution with these shapes."""
        return self._layouts.get(known) or self._make(known, {}, answered=False)

    def learn(self, known: KnownShapes, seen: Mapping[str, tuple[int, ...]]) -> None:
        """Note the shapes that boundary tensors had in an execution. The next one with the same inputs has room for them.

        A tensor that outgrows the room of an execution before gets twice what it needs, because each retry costs a run.
        """
        before = self.layout(known)
        room = {}
        changed = False
        for boundary in self._wiring.boundaries:
            name = boundary.name
            _, length = before.places[name]
            if name not in seen:
                room[name] = length
                continue
            shape, needed = before.shapes[name], prod(seen[name]) * boundary.element_bytes
            if shape is not None and shape != seen[name]:
                self.disproved.add(name)
                changed = True
            if needed > length:
                room[name] = needed * 2 if before.answered else _whole_pages(needed)
                changed = True
            else:  # a guess may have given far too much
                room[name] = length if before.answered else _whole_pages(needed)
        if changed or (not before.answered and None in before.shapes.values()):
            self._make(known, room, answered=True)

    def _make(self, known: KnownShapes, room: Mapping[str, int], *, answered: bool) -> BoundaryLayout:
        wiring = self._wiring
        shapes: dict[str, tuple[int, ...] | None] = dict(zip((*wiring.inputs, *wiring.outputs), known, strict=True))
        guess = max(_FIRST_GUESS_BYTES, 8 * sum(prod(shape) for shape in known if shape is not None))
        for planned in wiring.steps:
            inputs, outputs = planned.prepared.inputs, planned.prepared.outputs
            given = {name: shape for name in inputs if (shape := shapes.get(name)) is not None}
            for name, shape in resolve_shapes(outputs, inputs, given).items():
                if shapes.get(name) is None:
                    shapes[name] = None if name in self.disproved else shape
        boundaries = wiring.boundaries
        rooms = {boundary.name: room.get(boundary.name, guess) for boundary in boundaries}
        full = {b.name: shape if (shape := shapes[b.name]) is not None and 0 not in shape else None for b in boundaries}
        layout = BoundaryLayout.of(boundaries, full, rooms, answered=answered)
        self._layouts[known] = layout
        return layout


def _whole_pages(size_bytes: int) -> int:
    return -(-max(size_bytes, 1) // PAGE_BYTES) * PAGE_BYTES
