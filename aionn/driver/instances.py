"""The executables of a prepared model: one per instance, over one copy of the weights."""

from __future__ import annotations

from collections.abc import Sequence

from aionn.errors import CompilationError
from aionn.hal.engine import Executable
from aionn.hal.types import NO_LANES


def instances_of(device: str, executable: Executable, count: int) -> Sequence[Executable]:
    """Return `count` executables that may run beside each other. Blocks, and passes on what the engine raises.

    Raises:
        CompilationError: the engine cannot run the model in so many instances. The reason is `NO_LANES` if it offers no lanes.
    """
    lanes = getattr(executable, "lanes", None)
    if lanes is None:
        why = f"cannot run {count} instances of a model, because {NO_LANES}; compile the model with instances=1"
        raise CompilationError(f"device {device!r} {why}", reason=NO_LANES)
    made = tuple(lanes(count))
    if len(made) != count:
        raise CompilationError(f"device {device!r} made {len(made)} lanes, but {count} were asked for; the fault lies in its engine")
    return made
