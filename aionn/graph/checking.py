"""What is wrong with a graph, said before any engine sees it, and named node by node.

`value_type` reads the types of inputs and outputs that are not tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from onnx import AttributeProto, GraphProto, NodeProto, TensorProto, TypeProto, ValueInfoProto, helper

from aionn.errors import CallerError, CompilationError
from aionn.hal.types import Operand, OperandType
from aionn.hal.values import ValueKind, ValueType

TYPES: dict[int, OperandType] = {helper.np_dtype_to_tensor_dtype(member.dtype): member for member in OperandType}
"""ONNX's element types that can cross the wall between app and driver."""

CONSTANT_TYPES = {number: member for number, member in TYPES.items() if member.in_numpy}
"""The element types of constants that may lie in a pool. A constant of another type stays in the graph."""


def nested_graphs(node: NodeProto) -> Iterator[GraphProto]:
    """The bodies of a control flow node."""
    for attribute in node.attribute:
        if attribute.type == AttributeProto.GRAPH or attribute.HasField("g"):
            yield attribute.g
        yield from attribute.graphs


def label(node: NodeProto, index: int) -> str:
    """The node's name, or "OpType_<index>" where ONNX has none."""
    return node.name or f"{node.op_type}_{index}"


def check_text(graph: GraphProto) -> None:
    """Check that every name is text. Where the bytes are not UTF-8, protobuf returns `bytes` and raises nothing.

    Raises:
        CallerError: one of them is not.
    """
    for text in _texts(graph):
        if not isinstance(text, str):
            raise CallerError(f"this is not an ONNX model: it has a name that is not UTF-8 ({text!r:.80}); export it again")


def _texts(graph: GraphProto) -> Iterator[object]:
    for value in (*graph.input, *graph.output):
        yield value.name
        yield from (axis.dim_param for axis in value.type.tensor_type.shape.dim)
    for tensor in (*graph.initializer, *(sparse.values for sparse in graph.sparse_initializer)):
        yield tensor.name
    for node in graph.node:
        yield from (node.name, node.op_type, node.domain)
        yield from node.input
        yield from node.output
        yield from (attribute.name for attribute in node.attribute)
        for body in nested_graphs(node):
            yield from _texts(body)


def name_nodes(graph: GraphProto) -> None:
    """Give every nameless node its label, so that any engine's complaint names the node as `operations` does."""
    for index, node in enumerate(graph.node):
        node.name = label(node, index)
        for body in nested_graphs(node):
            name_nodes(body)


def check_names(graph: GraphProto, outer: frozenset[str] = frozenset(), prefix: str = "") -> None:
    """Every value is made once, and every value that is read is made.

    Raises:
        CompilationError: naming the node, and a nested node as "outer/inner".
    """
    made: set[str] = set()
    for kind, names in (("input", [value.name for value in graph.input]), ("initializer", [tensor.name for tensor in graph.initializer])):
        for name in sorted(names):
            if names.count(name) > 1:
                raise CompilationError(f"{kind} {name!r} is there twice; names of a graph are unique", reason=f"two of {kind} {name!r}")
        made.update(names)
    made.update(tensor.values.name for tensor in graph.sparse_initializer)
    for index, node in enumerate(graph.node):
        at = prefix + label(node, index)
        for name in filter(None, node.output):
            if name in made:
                raise CompilationError(
                    f"node {at!r} makes {name!r}, which is made elsewhere too; names of a graph are unique",
                    node=at,
                    reason=f"{name!r} is made twice",
                )
            made.add(name)
    seen = outer | made
    for index, node in enumerate(graph.node):
        at = prefix + label(node, index)
        for name in filter(None, node.input):
            if name not in seen:
                raise CompilationError(f"node {at!r} reads {name!r}, which nothing makes", node=at, reason=f"nothing makes {name!r}")
        for body in nested_graphs(node):
            check_names(body, seen, f"{at}/")
    for value in graph.output:
        if value.name not in seen:
            raise CompilationError(f"output {value.name!r} is made by no node of the graph", reason=f"nothing makes {value.name!r}")


def border(values: Sequence[ValueInfoProto], side: str) -> dict[str, Operand]:
    """Inputs or outputs as operands, in the graph's order.

    Raises:
        CompilationError: one of them has a type that cannot cross to a driver.
    """
    return {value.name: _operand(value, side) for value in values}


def _operand(value: ValueInfoProto, side: str) -> Operand:
    kind = value.type.WhichOneof("value")
    if kind in ("sequence_type", "map_type", "optional_type"):
        return value_type(value, lambda inner: _operand(inner, side))
    if kind != "tensor_type":
        found = "has no type" if kind is None else f"is a {kind.removesuffix('_type').replace('_', ' ')}"
        wrong = f"{side} {value.name!r} {found}"
        raise CompilationError(f"{wrong}; dense tensors, sequences, maps and optionals can cross to a driver", reason=wrong)
    tensor = value.type.tensor_type
    element = TYPES.get(tensor.elem_type)
    if element is None:
        known = tensor.elem_type in TensorProto.DataType.values()
        found = TensorProto.DataType.Name(tensor.elem_type) if known else f"number {tensor.elem_type}"
        can = ", ".join(member.value for member in OperandType)
        raise CompilationError(
            f"{side} {value.name!r} has element type {found}; those that can cross to a driver are {can}",
            reason=f"{side} {value.name!r} has element type {found}",
        )
    if not tensor.HasField("shape"):
        return Operand(element, None)
    # Some exporters write -1 for an open dimension; ONNX means it to be absent.
    dimensions = tuple(max(axis.dim_value, 0) if axis.HasField("dim_value") else 0 for axis in tensor.shape.dim)
    # Paddle's exporter writes "?" on every open axis; it names nothing.
    symbols = tuple(axis.dim_param if axis.dim_param not in ("", "?") else None for axis in tensor.shape.dim)
    return Operand(element, dimensions, symbols if any(symbols) else ())


def value_type(value: ValueInfoProto, inner: Callable[[ValueInfoProto], Operand]) -> ValueType:
    """Return the type of a sequence, a map or an optional.

    Args:
        inner: returns the type of what it holds, and of its keys.

    Raises:
        CompilationError: it cannot cross to a driver.
    """
    kind = ValueKind(value.type.WhichOneof("value").removesuffix("_type"))
    holder = getattr(value.type, f"{kind.value}_type")
    element: TypeProto = holder.value_type if kind is ValueKind.MAP else holder.elem_type
    try:
        held = inner(ValueInfoProto(name=value.name, type=element))
        key = None
        if kind is ValueKind.MAP:
            key = inner(ValueInfoProto(name=value.name, type=TypeProto(tensor_type=TypeProto.Tensor(elem_type=holder.key_type)))).type
        return ValueType(kind, _without_symbols(held), key)
    except (CallerError, RecursionError) as error:
        raise CompilationError(f"{value.name!r} cannot cross to a driver: {error}", reason=str(error)) from error


def _without_symbols(operand: Operand) -> Operand:
    """Names of open dimensions say nothing inside a value, because its tensors may differ in them."""
    return operand if isinstance(operand, ValueType) else Operand(operand.type, operand.dimensions)
