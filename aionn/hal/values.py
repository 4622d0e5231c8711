"""Inputs and outputs that are not tensors of numbers: sequences, maps and optionals, and how their types travel.

A model with such an input or output, or with strings, runs every execution by a control call (`IPreparedModel.execute_values`).
Its values are Python's: a list for a sequence, a dict for a map, None for an absent optional, an array for a tensor. Arrays of strings
have the dtype object and hold `str`. A map's values are numbers or `str` where its tensors are scalars.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from struct import pack, unpack_from
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from aionn.errors import CallerError
from aionn.hal.model import PooledModel
from aionn.hal.types import Operand, OperandType, Result

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = [
    "Border",
    "TypeMessage",
    "ValueKind",
    "ValueType",
    "ValuesResult",
    "as_messages",
    "default_of",
    "from_messages",
    "joined_texts",
    "outside_frames",
    "split_texts",
]

MAX_DEPTH = 8
"""A type has at most so many sequences, maps and optionals inside each other."""

_KEYS = frozenset(
    {OperandType.STRING, *(member for member in OperandType if member.value.strip("u").startswith("int") and member.in_numpy)}
)


class ValueKind(enum.Enum):
    """What a value is that is not a tensor."""

    SEQUENCE = "sequence"
    MAP = "map"
    OPTIONAL = "optional"


@dataclass(frozen=True, slots=True, init=False, kw_only=True)
class ValueType(Operand):
    """The type of an input or output that is not a tensor.

    Attributes:
        kind: a sequence, a map or an optional.
        element: the type of each element of a sequence, of each value of a map, or of the value that an optional may have.
        key: element type of a map's keys, else None.
        type: element type of the tensors inside. `dimensions` is None.
    """

    kind: ValueKind
    element: Operand
    key: OperandType | None

    def __init__(self, kind: ValueKind, element: Operand, key: OperandType | None = None) -> None:
        """Make a type.

        Raises:
            CallerError: the key does not fit the kind, or types are nested too deeply.
        """
        if (kind is ValueKind.MAP) is (key is None) or (key is not None and key not in _KEYS):
            raise CallerError(
                f"a {kind.value} has keys of type {key and key.value}; a map's keys are integers or strings, others have none"
            )
        inner, depth = element, 1
        while isinstance(inner, ValueType):
            inner, depth = inner.element, depth + 1
        if depth > MAX_DEPTH:
            raise CallerError(f"a type has {depth} sequences, maps and optionals inside each other, but at most {MAX_DEPTH} are allowed")
        for name, value in (
            ("type", element.type),
            ("dimensions", None),
            ("symbols", ()),
            ("default", None),
            ("kind", kind),
            ("element", element),
            ("key", key),
        ):
            object.__setattr__(self, name, value)

    @property
    def in_frames(self) -> bool:
        return False

    @property
    def word(self) -> str:
        inner = self.element.word if self.key is None else f"{self.key.value}, {self.element.word}"
        return f"{self.kind.value}({inner})"

    def __str__(self) -> str:
        return self.word

    def accepts(self, shape: tuple[int, ...]) -> bool:
        """Return False, because no tensor fits."""
        return False


class ValuesResult(NamedTuple):
    """The answer to one execution with values.

    Attributes:
        outputs: by name; empty unless the result's status is NONE.
        copied_bytes: so many bytes of tensors were copied on their way to the device and back.
    """

    result: Result
    outputs: Mapping[str, Any]
    copied_bytes: int = 0


def outside_frames(model: PooledModel) -> str:
    """Return words for the first input or output that cannot lie in a frame, as in "input 'x' is of type string". Empty if all can."""
    sides = ("input", model.inputs), ("output", model.outputs)
    found = (
        f"{side} {name!r} is of type {operand.word}" for side, all_of in sides for name, operand in all_of.items() if not operand.in_frames
    )
    return next(found, "")


_LENGTH_BYTES = 4


def joined_texts(texts: Sequence[bytes]) -> bytes:
    """Return texts of UTF-8 as they travel and lie in defaults: u32 lengths of all of them, then their bytes."""
    return pack(f"<{len(texts)}I", *map(len, texts)) + b"".join(texts)


def split_texts(content: bytes | memoryview, shape: tuple[int, ...]) -> NDArray[np.object_]:
    """Return the texts that `joined_texts` has joined, as an array of that shape.

    Raises:
        ValueError: the content does not hold so many texts, or a text is not UTF-8.
    """
    import numpy as np

    count = prod(shape)
    begin = count * _LENGTH_BYTES
    if begin > len(content):
        raise ValueError(f"{count} texts cannot lie in {len(content)} bytes")
    lengths = unpack_from(f"<{count}I", content)  # a copy: the peer may still write to the memory
    if begin + sum(lengths) != len(content):
        raise ValueError(f"texts of {sum(lengths)} bytes do not fill {len(content) - begin} bytes")
    texts = np.empty(count, object)
    for index, length in enumerate(lengths):
        texts[index] = str(content[begin : begin + length], "utf-8")
        begin += length
    return texts.reshape(shape)


def default_of(operand: Operand) -> NDArray[Any] | None:
    """Return what an input holds where an app leaves it out, as an array that may be read only. None: it has no default."""
    default = operand.default
    if default is None:
        return None
    if operand.type is OperandType.STRING:
        return split_texts(default.content, default.shape)
    import numpy as np

    return np.ndarray(default.shape, operand.type.dtype, default.content)


class TypeMessage(msgspec.Struct, frozen=True, array_like=True):
    """A `ValueType` in a message, or in a stored description."""

    kind: ValueKind
    element: Border
    key: OperandType | None = None


Border = Operand | TypeMessage
"""The type of an input or output in a message."""


def as_messages(operands: Mapping[str, Operand]) -> tuple[tuple[str, Border], ...]:
    """Return inputs or outputs as they stand in a message."""
    return tuple((name, operand if type(operand) is Operand else _message(operand)) for name, operand in operands.items())


def _message(operand: Operand) -> Border:
    return TypeMessage(operand.kind, _message(operand.element), operand.key) if isinstance(operand, ValueType) else operand


def from_messages(borders: Iterable[tuple[str, Border]]) -> dict[str, Operand]:
    """Return inputs or outputs of a message.

    Raises:
        CallerError: one of them is not a type.
    """
    return {name: border if isinstance(border, Operand) else _type_of(border) for name, border in borders}


def _type_of(border: Border) -> Operand:
    if isinstance(border, Operand):
        return border
    return ValueType(border.kind, _type_of(border.element), border.key)
