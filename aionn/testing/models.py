"""Tiny ONNX models for tests, as bytes for `Model.from_onnx`.

`onnx` is imported only when a model is made, because the driver of the fake engine imports this package and makes none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import DTypeLike

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
