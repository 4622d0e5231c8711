"""Types of inputs and outputs that are not tensors."""

from __future__ import annotations

from collections.abc import Callable

from onnx import TypeProto, ValueInfoProto

from aionn.errors import CallerError, CompilationError
from aionn.hal.types import Operand
from aionn.hal.values import ValueKind, ValueType


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
