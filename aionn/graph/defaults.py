"""Initializers that are inputs, too: ONNX lets an app override them, so they become inputs with a default."""

from __future__ import annotations

from math import prod

from onnx import ModelProto, TensorProto, numpy_helper

from aionn.errors import CompilationError
from aionn.graph.checking import TYPES, border
from aionn.graph.constants import PayloadOf
from aionn.hal.types import Default
from aionn.hal.values import joined_texts, split_texts

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
