"""Find every tensor of a model, through the schema's own descriptors.

An attribute, a sparse initializer, a function's node, training information: each can hold a `TensorProto`, and so can a field that a
later release of ONNX adds. So this module keeps no list of places.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

from google.protobuf.descriptor import Descriptor  # type: ignore[import-untyped]
from google.protobuf.message import Message  # type: ignore[import-untyped]
from onnx import ModelProto, TensorProto

Visit = Callable[[TensorProto, tuple[Message, ...]], None]
"""Receives a tensor and the messages around it, the outermost first, without the model itself."""


class _Door(NamedTuple):
    """A field that leads to tensors. `inner` are the fields of its messages that lead to more."""

    name: str
    repeated: bool
    is_tensor: bool
    inner: list[_Door]


def _doors_of(kind: Descriptor, known: dict[str, list[_Door]]) -> list[_Door]:
    """The fields of a kind of message that hold messages. A kind within itself gets the same list."""
    doors = known.get(kind.full_name)
    if doors is None:
        doors = known[kind.full_name] = []
        for entry in kind.fields:
            inner = entry.message_type
            if inner is not None:
                is_tensor = inner.full_name == TensorProto.DESCRIPTOR.full_name
                doors.append(_Door(entry.name, entry.is_repeated, is_tensor, _doors_of(inner, known)))
    return doors


def _reach(kinds: dict[str, list[_Door]]) -> None:
    """Strike off the fields that lead to no tensor."""
    reaching: set[int] = set()
    while True:
        more = {id(doors) for doors in kinds.values() if any(door.is_tensor or id(door.inner) in reaching for door in doors)}
        if more == reaching:
            break
        reaching = more
    for doors in kinds.values():
        doors[:] = [door for door in doors if door.is_tensor or id(door.inner) in reaching]


def _doors() -> list[_Door]:
    known: dict[str, list[_Door]] = {}
    doors = _doors_of(ModelProto.DESCRIPTOR, known)
    _reach(known)
    return doors


_DOORS = _doors()


def visit_tensors(model: ModelProto, visit: Visit) -> None:
    """Call `visit` for every tensor of the model, wherever the schema lets one stand."""
    _visit(model, _DOORS, (), visit)


def _visit(message: Message, doors: list[_Door], trail: tuple[Message, ...], visit: Visit) -> None:
    for name, repeated, is_tensor, inner in doors:
        if repeated:
            found = getattr(message, name)
            if not found:
                continue
        elif message.HasField(name):
            found = (getattr(message, name),)
        else:
            continue
        if is_tensor:
            for tensor in found:
                visit(tensor, trail)
        if inner:
            for within in found:
                _visit(within, inner, (*trail, within), visit)


def described_place(tensor: TensorProto, trail: tuple[Message, ...]) -> str:
    """Where a tensor stands, for an error: "tensor of attribute 'value' of node 'fill' of function 'local'"."""
    return " of ".join(_described(message) for message in (tensor, *reversed(trail)))


def _described(message: Message) -> str:
    kind = re.sub("(?<=[a-z])(?=[A-Z])", " ", message.DESCRIPTOR.name.removesuffix("Proto")).lower()
    name = getattr(message, "name", "") or getattr(message, "op_type", "")
    return f"{kind} {name!r}" if name else kind
