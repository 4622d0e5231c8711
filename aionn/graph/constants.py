"""Take large constants out of a graph, and put them back.

Invariants
    After `take_out` each constant it returns is an initializer of the main graph, once, under a name no other value has.
    Every name that was read before is readable after, from the same nodes.
    After `bring_in` every other tensor of the model carries its own bytes, so an engine has no file to look for.

Every tensor of a model is found through the schema's own descriptors. An attribute, a sparse initializer, a function's node, training
information: each can hold a `TensorProto`, and so can a field that a later release of ONNX adds. So this module keeps no list of places.

ONNX lets an app override an initializer that is an input, too. So it becomes an input with a default.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from math import prod
from typing import Any, NamedTuple

import msgspec
import numpy as np
import onnx
from google.protobuf.descriptor import Descriptor  # type: ignore[import-untyped]
from google.protobuf.message import Message  # type: ignore[import-untyped]
from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper

from aionn.errors import CompilationError
from aionn.graph.arrays import constant_arrays
from aionn.graph.checking import CONSTANT_TYPES, TYPES, border, nested_graphs
from aionn.hal.model import Constant, PooledModel
from aionn.hal.types import CONSTANT_COPY_BYTES, DataLocation, Default, Operand
from aionn.hal.values import joined_texts, split_texts

Fill = Callable[[memoryview], None]
Payload = tuple[int, Fill]
"""How many bytes a constant has, and what writes them, little-endian, into memory of that size."""
PayloadOf = Callable[[TensorProto, str], Payload | None]
"""The bytes of a tensor that does not carry them itself, else None. The text names the tensor in errors."""

_MOST_INLINE_BYTES = 2**31 - 2**20
"""Protobuf's limit for one message, and room for the graph itself."""

_DATA_FIELDS = ("raw_data", "float_data", "int32_data", "int64_data", "double_data", "uint64_data", "string_data", "external_data")


class Taken(msgspec.Struct, frozen=True):
    """A large constant on its way out: the main graph's initializer, and where its bytes come from."""

    tensor: TensorProto
    operand: Operand
    length: int
    fill: Fill

    def refer(self, pool_index: int, offset: int) -> None:
        """Make the initializer point into a pool."""
        for name in _DATA_FIELDS:
            self.tensor.ClearField(name)
        self.tensor.data_location = TensorProto.EXTERNAL
        for key, value in (("location", f"pool:{pool_index}"), ("offset", str(offset)), ("length", str(self.length))):
            self.tensor.external_data.add(key=key, value=value)


def take_out(main: GraphProto, payload_of: PayloadOf) -> list[Taken]:
    """Make every large constant that is read an initializer of the main graph; one that nothing reads is dropped.

    Args:
        main: changed in place.
        payload_of: where the bytes of a tensor are.

    Raises:
        CompilationError: a constant's bytes are not as many as its type and shape need.
    """
    scopes: Counter[str] = Counter()
    _count_names(main, scopes)
    read: set[str] = set()
    _collect_reads(main, read)
    taken: list[Taken] = []
    # ONNX Runtime fails over an external initializer that it has thrown away itself because nothing reads it.
    unread = [tensor for tensor in main.initializer if _is_large(tensor) and tensor.name not in read]
    for tensor in unread:
        main.initializer.remove(tensor)
    for tensor in main.initializer:
        constant = _large(tensor, payload_of)
        if constant is not None:
            taken.append(constant)
    _hoist(main, main, scopes, payload_of, taken)
    return taken


def _hoist(graph: GraphProto, main: GraphProto, scopes: Counter[str], payload_of: PayloadOf, taken: list[Taken]) -> None:
    found: list[TensorProto] = []
    staying: list[NodeProto] = []
    for node in graph.node:
        tensor = _constant_node(node)
        if tensor is not None and _is_large(tensor):
            found.append(tensor)
            continue
        staying.append(node)
        for body in nested_graphs(node):
            _hoist(body, main, scopes, payload_of, taken)
    kept: list[TensorProto] = []
    if graph is not main:
        parameters = {value.name for value in graph.input}
        for tensor in graph.initializer:
            large = tensor.name not in parameters and _is_large(tensor)
            (found if large else kept).append(tensor)
    if not found:
        return
    outputs = {value.name for value in graph.output}
    renames: dict[str, str] = {}
    identities: list[NodeProto] = []
    for tensor in found:
        hoisted = main.initializer.add()
        hoisted.CopyFrom(tensor)
        if tensor.name in outputs:
            hoisted.name = _fresh(tensor.name, scopes)
            identities.append(helper.make_node("Identity", [hoisted.name], [tensor.name], name=f"{hoisted.name}_out"))
        elif scopes[tensor.name] > 1:
            hoisted.name = renames[tensor.name] = _fresh(tensor.name, scopes)
        constant = _large(hoisted, payload_of)
        assert constant is not None  # what made it large has been copied with it
        taken.append(constant)
    _replace(graph.node, [*identities, *staying])
    if graph is not main:
        _replace(graph.initializer, kept)
    if renames:
        _rename(graph, renames)


def _replace(repeated: Any, messages: list[Any]) -> None:
    # Copies first: messages taken from a repeated field die with it.
    copies = [type(message).FromString(message.SerializeToString()) for message in messages]
    del repeated[:]
    repeated.extend(copies)


def _made(graph: GraphProto) -> set[str]:
    """The names that a graph itself makes: parameters, constants, outputs of its nodes."""
    names = {value.name for value in graph.input} | {tensor.name for tensor in graph.initializer}
    names.update(name for node in graph.node for name in node.output if name)
    return names


def _count_names(graph: GraphProto, scopes: Counter[str]) -> None:
    """In how many graphs each name is made."""
    scopes.update(_made(graph))
    for node in graph.node:
        for body in nested_graphs(node):
            _count_names(body, scopes)


def _collect_reads(graph: GraphProto, read: set[str]) -> None:
    read.update(value.name for value in graph.output)
    for node in graph.node:
        read.update(node.input)
        for body in nested_graphs(node):
            _collect_reads(body, read)


def _fresh(name: str, scopes: Counter[str]) -> str:
    number = 1
    while scopes[f"{name}_{number}"]:
        number += 1
    scopes[f"{name}_{number}"] += 1
    return f"{name}_{number}"


def _rename(graph: GraphProto, renames: dict[str, str]) -> None:
    for node in graph.node:
        for index, name in enumerate(node.input):
            if name in renames:
                node.input[index] = renames[name]
        for body in nested_graphs(node):
            own = _made(body)
            _rename(body, {old: new for old, new in renames.items() if old not in own})


def _constant_node(node: NodeProto) -> TensorProto | None:
    """The value of a Constant node as a tensor with the node's output for a name; None for every other node."""
    if node.op_type != "Constant" or node.domain not in ("", "ai.onnx") or len(node.output) != 1:
        return None
    for attribute in node.attribute:
        if attribute.name == "value" and attribute.type == AttributeProto.TENSOR:
            tensor: TensorProto = attribute.t
        elif attribute.name == "value_floats":
            tensor = numpy_helper.from_array(np.array(attribute.floats, np.float32))
        elif attribute.name == "value_ints":
            tensor = numpy_helper.from_array(np.array(attribute.ints, np.int64))
        else:
            continue
        tensor.name = node.output[0]
        return tensor
    return None


def _is_large(tensor: TensorProto) -> bool:
    return tensor.data_type in CONSTANT_TYPES and prod(tensor.dims) * CONSTANT_TYPES[tensor.data_type].element_bytes > CONSTANT_COPY_BYTES


def _large(tensor: TensorProto, payload_of: PayloadOf) -> Taken | None:
    """The constant as it is to be taken out, or None if it stays."""
    if not _is_large(tensor):
        return None
    operand = Operand(CONSTANT_TYPES[tensor.data_type], tuple(tensor.dims))
    name = f"constant {tensor.name!r}"
    length, fill = payload_of(tensor, name) or _own_payload(tensor)
    _check_length(tensor, name, length)
    return Taken(tensor, operand, length, fill)


def _check_length(tensor: TensorProto, name: str, length: int) -> None:
    kind = CONSTANT_TYPES[tensor.data_type]
    needed = prod(tensor.dims) * kind.element_bytes
    if length != needed:
        raise CompilationError(
            f"{name} has {length} bytes; its type {kind.value} and shape {tuple(tensor.dims)} need {needed}",
            reason=f"{name} has {length} bytes instead of {needed}",
        )


def _own_payload(tensor: TensorProto) -> Payload:
    """Bytes that the tensor carries, in a raw_data that is not a span or in one of its typed fields."""
    if tensor.HasField("raw_data"):
        content: Any = tensor.raw_data
    else:
        try:
            array = numpy_helper.to_array(tensor)
        except (ValueError, TypeError) as error:
            raise CompilationError(f"constant {tensor.name!r} cannot be read: {error}", reason=str(error)) from error
        content = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return len(content), lambda target: _copy(target, content)


def _copy(target: memoryview, content: Any) -> None:
    target[:] = memoryview(content).cast("B")


def bring_in(model: ModelProto, taken: list[Taken], payload_of: PayloadOf) -> None:
    """Give every tensor that was not taken out its own bytes, wherever in the model it stands.

    Engines look for a file by a path relative to the working directory, and `payload_of` does not.

    Raises:
        CompilationError: a tensor's bytes are not as many as its type and shape need, or too many to stand in a graph.
    """
    outside = {constant.tensor.name for constant in taken}
    room = _MOST_INLINE_BYTES

    def inline(tensor: TensorProto, trail: tuple[Message, ...]) -> None:
        nonlocal room
        if tensor.data_location != TensorProto.EXTERNAL and not tensor.external_data:
            return
        if tensor.name in outside and len(trail) == 1 and isinstance(trail[0], GraphProto):
            return
        place = described_place(tensor, trail)
        payload = payload_of(tensor, place)
        if payload is None:
            return
        length, fill = payload
        if tensor.data_type in CONSTANT_TYPES:
            _check_length(tensor, place, length)
        room -= length
        if room < 0:
            raise CompilationError(
                f"{place} has {length} bytes, which do not fit into the graph (2 GiB in all); make it an initializer of the main graph",
                reason="the tensors that stay in the graph are larger than 2 GiB",
            )
        content = bytearray(length)
        fill(memoryview(content))
        for name in _DATA_FIELDS:
            tensor.ClearField(name)
        tensor.ClearField("data_location")
        tensor.raw_data = bytes(content)

    visit_tensors(model, inline)


def embed_constants(model: PooledModel) -> ModelProto:
    """The whole ONNX model again, constants inside: for engines that cannot take them by reference. Costs a copy of each.

    Raises:
        CompilationError: the whole model is over protobuf's limit of 2 GiB, or its graph cannot be parsed.
    """
    try:
        whole: ModelProto = onnx.ModelProto.FromString(model.graph)
    except Exception as error:
        raise CompilationError(f"the model's graph cannot be parsed: {error}", reason=str(error)) from error
    if sum(constant.location.length for constant in model.constants) + len(model.graph) >= 2**31:
        raise CompilationError(
            "the model with its constants inside is larger than protobuf's limit of 2 GiB; use a device that takes constants by reference"
        )
    arrays = constant_arrays(model)
    for tensor in whole.graph.initializer:
        array = arrays.get(tensor.name)
        if array is not None:
            tensor.ClearField("external_data")
            tensor.ClearField("data_location")
            tensor.raw_data = array.tobytes()
    return whole


def settle_exported(
    graph: bytes, location: str, content: bytes | memoryview, *, renamed: str | None = None
) -> tuple[bytes, tuple[Constant, ...], bool]:
    """A graph that ONNX Runtime wrote, as it reads it: external constants of nested graphs inside, and no name made twice on one way in.

    ONNX Runtime numbers what it adds to each graph by itself ("reorder_token_0"). It then refuses a nested graph that makes a name
    which a graph around it has made. A constant that it gets by name also replaces nested constants of that name.

    Args:
        graph: a serialized ModelProto.
        location: the file name that its external constants give.
        content: that file.
        renamed: the name that the returned graph gives instead of `location`.

    Returns:
        The graph, the main graph's constants in that file (which is pool 0), and whether they can be handed over by name. They cannot
        if one has an element type that NumPy lacks.
    """
    whole: ModelProto = onnx.ModelProto.FromString(graph)
    bodies = [body for node in whole.graph.node for body in nested_graphs(node)]
    for body in bodies:
        bodies.extend(inner for node in body.node for inner in nested_graphs(node))  # the list grows under the loop: every depth
        # ONNX Runtime before 1.31 writes each of them twice, and then does not read that.
        named = {tensor.name: index for index, tensor in enumerate(body.initializer)}
        for index in reversed(range(len(body.initializer))):
            if named[body.initializer[index].name] != index:
                del body.initializer[index]
        for tensor in body.initializer:
            place = _place_in(tensor, location)
            if place is not None:
                tensor.ClearField("external_data")
                tensor.ClearField("data_location")
                tensor.raw_data = bytes(content[place.offset : place.offset + place.length])
    if bodies:
        scopes: Counter[str] = Counter()
        _count_names(whole.graph, scopes)
        _name_apart(whole.graph, set(), scopes)
    outside = [(tensor, place) for tensor in whole.graph.initializer if (place := _place_in(tensor, location)) is not None]
    constants = tuple(
        Constant(tensor.name, Operand(CONSTANT_TYPES[tensor.data_type], tuple(tensor.dims)), place)
        for tensor, place in outside
        if tensor.data_type in CONSTANT_TYPES
    )
    if renamed is not None:
        for tensor, _ in outside:
            for entry in tensor.external_data:
                if entry.key == "location":
                    entry.value = renamed
    return whole.SerializeToString() if bodies or renamed is not None else graph, constants, len(constants) == len(outside)


def _name_apart(graph: GraphProto, above: set[str], scopes: Counter[str]) -> None:
    """Rename what nested graphs make under a name that is taken above them. `above`: what is made around `graph`."""
    visible = above | _made(graph)
    for node in graph.node:
        for body in nested_graphs(node):
            renames = {name: _fresh(name, scopes) for name in sorted(_made(body) & visible)}
            if renames:
                for named in (*body.input, *body.initializer, *body.output, *body.value_info):
                    named.name = renames.get(named.name, named.name)
                for inner in body.node:
                    for index, name in enumerate(inner.output):
                        inner.output[index] = renames.get(name, name)
                _rename(body, renames)
            _name_apart(body, visible, scopes)


def _place_in(tensor: TensorProto, location: str) -> DataLocation | None:
    """Return where a tensor's bytes lie in the file of that name, or None if they lie elsewhere."""
    entries = {entry.key: entry.value for entry in tensor.external_data}
    if entries.get("location") != location:
        return None
    return DataLocation(0, int(entries.get("offset", "0")), int(entries["length"]))


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


MOST_DEFAULT_BYTES = 64 * 1024
"""The most bytes of all defaults together. Some exporters list every weight among the inputs. Such weights stay constants."""


def take_defaults(model: ModelProto, payload_of: PayloadOf) -> dict[str, Default]:
    """Make inputs of those initializers that an app may override, and return their values by name.

    Before version 4 of the IR every initializer had to be an input, which says nothing. It stays a constant, and so does one that does
    not fit its own input.

    Args:
        model: changed in place.
        payload_of: where the bytes of a tensor are.

    Raises:
        CompilationError: an initializer's bytes are not as many as its type and shape need.
    """
    if model.ir_version < 4:
        return {}
    listed = {value.name: value for value in model.graph.input}
    found = [
        tensor
        for tensor in model.graph.initializer
        if tensor.name in listed
        and tensor.data_type in TYPES
        and listed[tensor.name].type.tensor_type.elem_type == tensor.data_type
        and border([listed[tensor.name]], "input")[tensor.name].accepts(tuple(tensor.dims))
    ]
    if sum(_size(tensor) for tensor in found) > MOST_DEFAULT_BYTES:
        return {}
    defaults = {tensor.name: Default(tuple(tensor.dims), _content(tensor, payload_of)) for tensor in found}
    kept = [TensorProto.FromString(tensor.SerializeToString()) for tensor in model.graph.initializer if tensor.name not in defaults]
    del model.graph.initializer[:]
    model.graph.initializer.extend(kept)
    return defaults


def _size(tensor: TensorProto) -> int:
    size: int = prod(tensor.dims) * TYPES[tensor.data_type].element_bytes + sum(map(len, tensor.string_data))
    return size


def _content(tensor: TensorProto, payload_of: PayloadOf) -> bytes:
    """Return a tensor's elements as `Default.content` has them."""
    if tensor.data_type == TensorProto.STRING:
        content = joined_texts(tensor.string_data)
        try:
            split_texts(content, tuple(tensor.dims))
        except ValueError as error:
            raise CompilationError(
                f"initializer {tensor.name!r} cannot be read: {error}; export the model again", reason=str(error)
            ) from error
        return content
    payload = payload_of(tensor, f"initializer {tensor.name!r}")
    if payload is not None:
        length, fill = payload
        filled = bytearray(length)
        fill(memoryview(filled))
        tensor.ClearField("external_data")
        tensor.ClearField("data_location")
        tensor.raw_data = bytes(filled)
    try:
        return numpy_helper.to_array(tensor).tobytes()
    except (ValueError, TypeError) as error:
        raise CompilationError(f"initializer {tensor.name!r} cannot be read: {error}", reason=str(error)) from error
