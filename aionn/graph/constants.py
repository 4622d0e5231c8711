"""Take large constants out of a graph, and put them back.

Invariants
    After `take_out` each constant it returns is an initializer of the main graph, once, under a name no other value has.
    Every name that was read before is readable after, from the same nodes.
    After `bring_in` every other tensor of the model carries its own bytes, so an engine has no file to look for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from math import prod
from typing import Any

import msgspec
import numpy as np
import onnx
from google.protobuf.message import Message  # type: ignore[import-untyped]
from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper

from aionn.errors import CompilationError
from aionn.graph.arrays import constant_arrays
from aionn.graph.checking import CONSTANT_TYPES, nested_graphs
from aionn.graph.places import described_place, visit_tensors
from aionn.hal.model import Constant, Model
from aionn.hal.types import CONSTANT_COPY_BYTES, DataLocation, Operand

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


def embed_constants(model: Model) -> ModelProto:
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
