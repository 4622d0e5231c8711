"""Memory domains: for which uses memory in a driver is allocated, and which dimensions it may have. Pure rules, no I/O.

A use is a `Role`: (prepared model, input or output, index). A buffer may be used only in the roles it was allocated for.
`device_buffer` has one such buffer, `device_buffers` has the registry of them. HAL 1.3: IDevice::allocate.

A broken rule is a `CallerError` (INVALID_ARGUMENT).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

import msgspec

from aionn.errors import CallerError
from aionn.hal.types import BufferDesc, BufferRole, Operand, OperandType

Dimensions = tuple[int, ...] | None
"""Extents, with 0 for an open one. None while even the rank is open. () is a scalar."""

Direction = Literal["input", "output"]


class ModelInfo(msgspec.Struct, frozen=True):
    """What buffers need to know of a prepared model.

    Attributes:
        id: names the prepared model in this process. No other model ever gets it.
        inputs, outputs: its operands, in order.
    """

    id: int
    inputs: tuple[Operand, ...]
    outputs: tuple[Operand, ...]


class Role(msgspec.Struct, frozen=True):
    """A permitted use of a buffer: input or output `index` of the prepared model with that id."""

    model_id: int
    direction: Direction
    index: int


def combine_dimensions(first: Dimensions, second: Dimensions) -> Dimensions:
    """Combine two descriptions of one shape. A known extent fills an open one.

    Raises:
        CallerError: the two contradict each other, in rank or in an extent that both know.
    """
    if first is None or second is None:
        return second if first is None else first
    if len(first) != len(second):
        raise CallerError(f"dimensions {first} and {second} have different ranks")
    if any(a and b and a != b for a, b in zip(first, second, strict=True)):
        raise CallerError(f"dimensions {first} and {second} contradict each other; an extent of 0 is open")
    return tuple(a or b for a, b in zip(first, second, strict=True))


def combine_for_buffer(token: int, asked: Dimensions, own: Dimensions) -> Dimensions:
    """Combine what a request or a copy asks of a buffer with what the buffer has. Name the buffer in the error.

    Raises:
        CallerError: as `combine_dimensions`.
    """
    try:
        return combine_dimensions(asked, own)
    except CallerError as error:
        raise CallerError(f"device buffer {token}: {error}") from None


def given(dimensions: tuple[int, ...]) -> Dimensions:
    """Return the dimensions that a request, a copy or a desc gives, or None for (), which says nothing."""
    if any(extent < 0 for extent in dimensions):
        raise CallerError(f"dimensions {dimensions}: an extent is negative; give at least 1, or 0 for an open extent")
    return dimensions or None


def full_shape(dimensions: Dimensions) -> tuple[int, ...] | None:
    """Return the shape, or None while an extent is open."""
    return None if dimensions is None or 0 in dimensions else dimensions


def combine_roles(
    desc: BufferDesc, models: Sequence[ModelInfo | None], input_roles: Sequence[BufferRole], output_roles: Sequence[BufferRole]
) -> tuple[frozenset[Role], OperandType, Dimensions, Dimensions]:
    """Find out what a buffer for those uses must be, by the rules of IDevice::allocate.

    Returns its roles, its element type, its initial dimensions, and what desc and input roles alone say of the dimensions.

    Args:
        desc: extents to combine with those of the roles; () says nothing.
        models: the prepared models the roles point into. None for a model that this driver does not have.
        input_roles, output_roles: at least one together.

    Raises:
        CallerError: a rule is broken. The message says which.
    """
    if not models:
        raise CallerError("a device buffer was asked for without prepared models; name at least one, in which it has roles")
    known = [model for model in models if model is not None]
    if len(known) != len(models):
        raise CallerError(
            "a device buffer was asked for a prepared model that is closed or belongs to another driver; prepare the model here first"
        )
    roles: set[Role] = set()
    first: OperandType | None = None
    dimensions = bound = given(desc.dimensions)
    uses: Iterable[tuple[Direction, BufferRole]] = [*(("input", r) for r in input_roles), *(("output", r) for r in output_roles)]
    for direction, asked in uses:
        role, operand = _checked_role(direction, asked, known)
        if role in roles:
            raise CallerError(f"{direction} {asked.io_index} of one prepared model was given as a role twice; give each role once")
        roles.add(role)
        first = first or operand.type
        if operand.type is not first:
            raise CallerError(
                f"{direction} {asked.io_index} holds {operand.type.value}, another role {first.value}; give roles of one type"
            )
        try:
            dimensions = combine_dimensions(dimensions, operand.dimensions)
        except CallerError as error:
            raise CallerError(f"{direction} {asked.io_index} of model {asked.model_index}: {error}") from None
        if direction == "input":
            bound = dimensions
    if first is None:
        raise CallerError("a device buffer was asked for without roles; say which inputs and outputs it is for")
    return frozenset(roles), first, dimensions, bound


def _checked_role(direction: Direction, asked: BufferRole, models: Sequence[ModelInfo]) -> tuple[Role, Operand]:
    if not 0 <= asked.model_index < len(models):
        raise CallerError(f"a {direction} role names model {asked.model_index} of {len(models)}; models are numbered from 0")
    model = models[asked.model_index]
    operands = model.inputs if direction == "input" else model.outputs
    if not 0 <= asked.io_index < len(operands):
        raise CallerError(
            f"a role names {direction} {asked.io_index} of model {asked.model_index}, which has {len(operands)}; they are numbered from 0"
        )
    if not 0.0 < asked.frequency <= 1.0:  # not a NaN either
        raise CallerError(f"{direction} {asked.io_index}: frequency {asked.frequency}; give more than 0 and at most 1")
    return Role(model.id, direction, asked.io_index), operands[asked.io_index]
