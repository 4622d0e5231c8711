"""Where the tensors between the steps of a plan lie: one piece of shared memory per execution, which the drivers of all steps map.

    BoundaryLayout    their places for one set of input shapes; tensors that are never needed at the same time share bytes
    BoundaryLayouts   the layouts of one plan, and what executions have shown about shapes
    BoundaryMemory    the pieces of memory of one plan: leased by an execution, given back when no driver can touch them any more

Invariants
    A piece that is leased is not leased again before it has been given back.
    At most `_KEPT` pieces are free at once, and `_KEPT_LARGE` of large ones. So the memory follows the executions in flight, which their
    frames bound.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from aionn.graph.shapes import resolve_shapes
from aionn.graph.steps import lay_out
from aionn.memo import Memo
from aionn.memory.region import PAGE_BYTES, Region
from aionn.runtime.serving.wiring import Boundary, Wiring

_KEPT = 16
"""As many as a compilation's own burst has requests in flight. A stream mostly uses one again and again."""

_KEPT_LARGE = 4
_KEPT_BYTES = 2**26
"""More than `_KEPT_LARGE` free pieces have this together at most."""

_REMEMBERED = 64
_FIRST_GUESS_BYTES = 4096
"""Room for a tensor of unknown shape before the plan has run once with these input shapes, at least."""

KnownShapes = tuple[tuple[int, ...] | None, ...]
"""Of the whole model's inputs, and then of its outputs. None while a shape is open."""


@dataclass(frozen=True, slots=True, eq=False)
class BoundaryLayout:
    """Where boundary tensors lie for one set of input shapes.

    Attributes:
        places: (offset, room in bytes) by name.
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
    """The layouts of one plan. Remembers the room for each set of input shapes, as `Arguments` does for frames.

    Attributes:
        disproved: tensors that came out in another shape than their step declares. Names are only added.
    """

    def __init__(self, wiring: Wiring) -> None:
        self._wiring = wiring
        self._layouts: Memo[tuple[KnownShapes, frozenset[str]], BoundaryLayout] = Memo(_REMEMBERED)
        self.disproved: set[str] = set()

    def layout(self, known: KnownShapes, omitted: frozenset[str]) -> BoundaryLayout:
        """Return where boundary tensors lie in an execution with these shapes, and without these outputs."""
        return self._layouts.get((known, omitted)) or self._make(known, omitted, {}, answered=False)

    def learn(self, known: KnownShapes, omitted: frozenset[str], seen: Mapping[str, tuple[int, ...]]) -> None:
        """Note the shapes that boundary tensors had in an execution. The next one with the same inputs has room for them.

        A tensor that outgrows the room of an execution before gets twice what it needs, because each retry costs a run.
        """
        before = self.layout(known, omitted)
        room = {}
        changed = False
        for boundary in self._wiring.boundaries(omitted):
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
            self._make(known, omitted, room, answered=True)

    def _make(self, known: KnownShapes, omitted: frozenset[str], room: Mapping[str, int], *, answered: bool) -> BoundaryLayout:
        wiring = self._wiring
        shapes: dict[str, tuple[int, ...] | None] = dict(zip((*wiring.inputs, *wiring.outputs), known, strict=True))
        guess = max(_FIRST_GUESS_BYTES, 8 * sum(prod(shape) for shape in known if shape is not None))
        for planned in wiring.steps:
            inputs, outputs = planned.prepared.inputs, planned.prepared.outputs
            given = {name: shape for name in inputs if (shape := shapes.get(name)) is not None}
            for name, shape in resolve_shapes(outputs, inputs, given).items():
                if shapes.get(name) is None:
                    shapes[name] = None if name in self.disproved else shape
        boundaries = wiring.boundaries(omitted)
        rooms = {boundary.name: room.get(boundary.name, guess) for boundary in boundaries}
        full = {b.name: shape if (shape := shapes[b.name]) is not None and 0 not in shape else None for b in boundaries}
        layout = BoundaryLayout.of(boundaries, full, rooms, answered=answered)
        self._layouts[known, omitted] = layout
        return layout


class BoundaryMemory:
    """The pieces of memory of one plan."""

    def __init__(self) -> None:
        self._free: list[Region] = []
        self._closed = False

    def lease(self, size_bytes: int) -> Region:
        """Return a piece of at least that size.

        Raises:
            MemoryAllocationError: there is no memory for one more.
        """
        for number in range(len(self._free) - 1, -1, -1):  # the last one's bytes are still in the CPU's cache
            if self._free[number].size_bytes >= size_bytes:
                return self._free.pop(number)
        if len(self._free) >= _KEPT:
            self._free.pop(0).close()  # all are too small
        return Region.allocate(_whole_pages(size_bytes))

    def give_back(self, region: Region) -> None:
        free = self._free
        small = sum(other.size_bytes for other in free) + region.size_bytes <= _KEPT_BYTES
        if not self._closed and (len(free) < _KEPT_LARGE or (small and len(free) < _KEPT)):
            free.append(region)
        else:
            region.close()

    def close(self) -> None:
        """Free what is not leased now. The rest goes when it is given back."""
        self._closed = True
        for region in self._free:
            region.close()
        self._free.clear()


def _whole_pages(size_bytes: int) -> int:
    return -(-max(size_bytes, 1) // PAGE_BYTES) * PAGE_BYTES
