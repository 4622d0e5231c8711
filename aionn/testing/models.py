"""Tiny ONNX models for tests, as bytes for `Model.from_onnx`.

`onnx` is imported only when a model is made, because the driver of the fake engine imports this package and makes none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import DTypeLike

from aionn.errors import CallerError
from aionn.testing.fake_engine import FAKE_DOMAIN

if TYPE_CHECKING:
    from onnx import GraphProto

OPSET = 17


def identity_model(
    shapes: Mapping[str, Sequence[int | str]] | None = None, dtype: DTypeLike = np.float32, *, outputs: Sequence[str] | None = None
) -> bytes:
    """Return a model that returns each input unchanged, with one Identity node per input.

    Args:
        shapes: shape by input name, where a string is an open dimension. Default: one input "input" of shape (1, 16).
        dtype: element type of all tensors.
        outputs: the names of the outputs. By default they are those of the inputs, followed by "_out".
    """
    from onnx import helper

    shapes = {"input": (1, 16)} if shapes is None else shapes
    element = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    names = list(outputs) if outputs is not None else [f"{name}_out" for name in shapes]
    graph = helper.make_graph(
        [helper.make_node("Identity", [name], [out], name=f"identity_{name}") for name, out in zip(shapes, names, strict=True)],
        "identity",
        [helper.make_tensor_value_info(name, element, list(shape)) for name, shape in shapes.items()],
        [helper.make_tensor_value_info(out, element, list(shape)) for out, shape in zip(names, shapes.values(), strict=True)],
    )
    return _serialized(graph)


Shape = Sequence[int | str]


def fake_model(
    inputs: Mapping[str, tuple[Shape, DTypeLike]] | None = None, outputs: Mapping[str, tuple[Shape, DTypeLike]] | None = None
) -> bytes:
    """Return a model with these inputs and outputs, which only the fake device runs. It answers zeros, or what `FakeDevice.answer` says.

    Args:
        inputs: (shape, element type) by name. A dimension that is a text, or 0, is open. Default: "x", float32 of shape (1, 16).
        outputs: the same for the outputs. An open dimension takes its extent from an input's dimension of the same name, else it is 1.
            Default: "y", float32 of shape (1, 16).

    Raises:
        CallerError: there are no outputs, or a shape has a negative dimension.

    Examples:
        >>> content = fake_model({"image": ((1, 3, 224, 224), "float32")}, {"boxes": ((1, "N", 4), "float32")})
        >>> model = aionn.Model.from_onnx(content)
    """
    from onnx import helper

    inputs = {"x": ((1, 16), np.float32)} if inputs is None else inputs
    outputs = {"y": ((1, 16), np.float32)} if outputs is None else outputs
    if not outputs:
        raise CallerError("fake_model got no outputs; give at least one, as (shape, element type) by name")
    given, made = ([_declared(name, shape, dtype) for name, (shape, dtype) in values.items()] for values in (inputs, outputs))
    node = helper.make_node("Fake", list(inputs), list(outputs), name="fake", domain=FAKE_DOMAIN)
    graph = helper.make_graph([node], "fake", given, made)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET), helper.make_opsetid(FAKE_DOMAIN, 1)], ir_version=8)
    content: bytes = model.SerializeToString()
    return content


def _declared(name: str, shape: Shape, dtype: DTypeLike) -> Any:
    from onnx import helper

    if any(isinstance(extent, int) and extent < 0 for extent in shape):
        raise CallerError(f"fake_model: {name!r} has the shape {tuple(shape)}; write 0 or a name for an open dimension")
    # ONNX leaves a dimension open by a name, and takes the number 0 for an empty axis.
    extents = [extent if extent != 0 else f"{name}_{axis}" for axis, extent in enumerate(shape)]
    return helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(np.dtype(dtype)), extents)


def scaled_model(factor: np.ndarray[tuple[int, ...], np.dtype[np.float32]]) -> bytes:
    """Return a model that computes y = x * factor elementwise in float32. The factor is its only constant."""
    from onnx import TensorProto, helper, numpy_helper

    shape = list(factor.shape)
    graph = helper.make_graph(
        [helper.make_node("Mul", ["x", "factor"], ["y"], name="mul")],
        "scaled",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, shape)],
        [numpy_helper.from_array(factor, "factor")],
    )
    return _serialized(graph)


def _serialized(graph: GraphProto) -> bytes:
    from onnx import helper

    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=8)
    content: bytes = model.SerializeToString()
    return content
