"""A model with one constant, of any size, for tests."""

from __future__ import annotations

import numpy as np
from onnx import TensorProto, helper, numpy_helper

from aionn.testing.models import OPSET


def scaled_model(factor: np.ndarray[tuple[int, ...], np.dtype[np.float32]]) -> bytes:
    """Return a model that computes y = x * factor elementwise in float32. The factor is its only constant."""
    shape = list(factor.shape)
    graph = helper.make_graph(
        [helper.make_node("Mul", ["x", "factor"], ["y"], name="mul")],
        "scaled",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, shape)],
        [numpy_helper.from_array(factor, "factor")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=8)
    content: bytes = model.SerializeToString()
    return content
