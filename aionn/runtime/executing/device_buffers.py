"""`DeviceRoles`: which inputs and outputs of compilations a device memory may stand for. `BufferPair`: its buffers in its driver.

An execution may read and write the same device memory: a state and its successor. The device works with two buffers then, which change
places when the execution has succeeded. A failed one leaves the state as it was.

Invariant
    `front` holds the tensor. `back` is allocated before the first execution that reads and writes the memory, with the same roles.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

import anyio

from aionn.errors import CallerError, DriverDiedError, DriverHungError, lost_with
from aionn.hal.model import PooledModel
from aionn.hal.types import BufferDesc, BufferRole, Operand
from aionn.memory.domain import Dimensions, combine_dimensions, full_shape, given
from aionn.memory.memory import extents_of
from aionn.remote.device import RemoteBuffer, RemotePreparedModel

if TYPE_CHECKING:
    from aionn.runtime.serving.planned_model import Prepared


class ModelRoles(NamedTuple):
    """The roles in one compilation.

    Attributes:
        model: of the compilation. believed: its outputs, as `Arguments.outputs` has them.
        inputs, outputs: names.
    """

    model: PooledModel
    believed: Mapping[str, Operand]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


def roles_of(model: PooledModel, believed: Mapping[str, Operand], inputs: Iterable[str], outputs: Iterable[str]) -> ModelRoles:
    """Return the roles that an app names in one compilation.

    Raises:
        CallerError: a name is not the model's, or is given twice.
    """
    part = ModelRoles(model, believed, _names("inputs", inputs), _names("outputs", outputs))
    for names, known, what in ((part.inputs, model.inputs, "inputs"), (part.outputs, believed, "outputs")):
        unknown = [name for name in names if not isinstance(name, str) or name not in known]
        if unknown:
            raise CallerError(f"{what}={unknown!r}: give names of the model's {what} in a tuple, out of {list(known)}")
        if len(set(names)) < len(names):
            raise CallerError(f"{what}={names!r}: a name is given twice")
    return part


class DeviceRoles:
    """What a device memory may stand for: names and indices of operands, checked against the models.

    Attributes:
        parts: the names of inputs and of outputs, per compilation.
        inputs, outputs: the names of all compilations together.
        operand: what all roles and the asked shape say together.
        bound: what the inputs and the asked shape say; an output may come out in another shape than the model declares.
        shape: its extents where all are known.
    """

    def __init__(self, parts: Sequence[ModelRoles], shape: Iterable[int] | None) -> None:
        """`shape`: fills in what the operands leave open.

        Raises:
            CallerError: there is no role, or types or shapes do not go together.
        """
        extents = () if shape is None else extents_of(shape)
        dimensions: Dimensions = given(extents)
        bound = dimensions
        operands: list[Operand] = []
        self._roles: list[tuple[int, str, bool, int]] = []
        for is_input in (True, False):  # every input first, for `bound`
            for number, part in enumerate(parts):
                known = part.model.inputs if is_input else part.believed
                for name in part.inputs if is_input else part.outputs:
                    word = f"{'input' if is_input else 'output'} {name!r}"
                    operands.append(known[name])
                    if known[name].type is not operands[0].type:
                        raise CallerError(f"{word} holds {known[name].type.value}, another role {operands[0].type.value}")
                    try:
                        dimensions = combine_dimensions(dimensions, known[name].dimensions)
                    except CallerError as error:
                        raise CallerError(f"{word}: {error}") from None
                    place = list(part.model.inputs if is_input else part.model.outputs).index(name)
                    self._roles.append((number, name, is_input, place))
            bound = dimensions if is_input else bound
        if not operands:
            raise CallerError("device memory without a role: name the inputs or outputs it will stand for")
        self.parts = tuple((part.inputs, part.outputs) for part in parts)
        self.inputs = tuple(dict.fromkeys(name for part in parts for name in part.inputs))
        self.outputs = tuple(dict.fromkeys(name for part in parts for name in part.outputs))
        self._desc = BufferDesc(extents)
        self.operand = Operand(operands[0].type, dimensions)
        self.bound = Operand(operands[0].type, bound)
        self.shape = full_shape(dimensions)

    async def allocate(self, prepared: Sequence[Prepared]) -> RemoteBuffer:
        """Return a buffer in the driver that runs these inputs and outputs. `prepared`: one for each of `parts`.

        Raises:
            CallerError: several drivers run them.
            AionnError: the driver cannot have it.
        """
        models: list[RemotePreparedModel] = []
        inputs: list[BufferRole] = []
        outputs: list[BufferRole] = []
        for number, _, is_input, index in self._roles:
            for role in prepared[number].step_roles(is_input, index):
                if role.prepared not in models:
                    models.append(role.prepared)
                (inputs if role.is_input else outputs).append(BufferRole(models.index(role.prepared), role.index))
        device = models[0].device
        if any(model.device is not device for model in models):
            raise CallerError(self._why_scattered(prepared))
        return await device.allocate(self._desc, models, inputs, outputs)

    def _why_scattered(self, prepared: Sequence[Prepared]) -> str:
        used = {
            f"{'input' if is_input else 'output'} {name!r}": dict.fromkeys(
                repr(role.prepared.device.name) for role in prepared[number].step_roles(is_input, index)
            )
            for number, name, is_input, index in self._roles
        }
        found = "; ".join(f"{role} is used on {' and '.join(devices)}" for role, devices in used.items())
        return f"device memory lies in one driver, but these roles lie in several ({found}); give an aionn.Memory, which all of them map"


def _names(what: str, names: Iterable[str]) -> tuple[str, ...]:
    if isinstance(names, str):
        raise CallerError(f"{what}={names!r}: give names in a tuple, as in {what}=({names!r},)")
    try:
        return tuple(names)
    except TypeError:
        raise CallerError(f"{what}={names!r}: expected names in a tuple, got {type(names).__name__}") from None


class BufferPair:
    """The buffers of a device memory, all in one driver.

    Attributes:
        prepared: the models that they were allocated for, one for each of `roles.parts`.
        roles: what they may stand for.
        front: holds the tensor. back: the second one, or None.
        all: both. A collected memory frees what stands in this very list, so it is changed in place only.
        turns: how often they have changed places.
    """

    __slots__ = ("_allocating", "_names", "all", "back", "front", "prepared", "roles", "turns")

    def __init__(self, prepared: Sequence[Prepared], front: RemoteBuffer, roles: DeviceRoles) -> None:
        self.roles = roles
        self._stand_for(prepared)
        self.front = front
        self.back: RemoteBuffer | None = None
        self.all = [front]
        self.turns = 0
        self._allocating = anyio.Lock()

    def _stand_for(self, prepared: Sequence[Prepared]) -> None:
        self.prepared = tuple(prepared)
        self._names = dict(zip(self.prepared, self.roles.parts, strict=True))

    def inputs_of(self, prepared: Prepared) -> tuple[str, ...] | None:
        """Return the inputs of a prepared model that they may stand for. None if they were not allocated for that model."""
        names = self._names.get(prepared)
        return None if names is None else names[0]

    def outputs_of(self, prepared: Prepared) -> tuple[str, ...] | None:
        """Return the same as `inputs_of`, for outputs."""
        names = self._names.get(prepared)
        return None if names is None else names[1]

    @property
    def device(self) -> str:
        return self.front.device.name

    @property
    def ended_by(self) -> BaseException | None:
        """Why their driver has ended; None while it lives."""
        return self.front.device.connection.ended_by

    async def complete(self, closed: Callable[[], bool]) -> None:
        """See that there is a second buffer, unless the memory is `closed`.

        Raises:
            MemoryAllocationError: the driver cannot have it now.
        """
        if self.back is not None:
            return  # without the lock: taking it costs a turn of the loop, which is more than a small model's whole run
        async with self._allocating:
            if self.back is None and not closed():
                with losing(self.device):
                    back = await self.roles.allocate(self.prepared)
                self.all.append(back)
                self.back = back
                if closed():
                    back.release()

    def turn(self) -> None:
        """Let the two buffers change places."""
        assert self.back is not None
        self.front, self.back = self.back, self.front
        self.turns += 1

    def replace(self, prepared: Sequence[Prepared], front: RemoteBuffer) -> list[RemoteBuffer]:
        """Use one buffer in another driver from now on. Returns the buffers before."""
        before = list(self.all)
        self.all[:] = [front]
        self.front, self.back = front, None
        self._stand_for(prepared)
        return before

    def release(self) -> None:
        """Free them, without waiting."""
        for buffer in self.all:
            buffer.release()


@contextmanager
def losing(device: str) -> Iterator[None]:
    """Raise the end of the driver as the loss of the memory in it."""
    try:
        yield
    except (DriverDiedError, DriverHungError) as error:
        raise lost_with(device, error) from error
