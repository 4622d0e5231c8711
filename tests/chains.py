"""A chain of two real models for tests and benchmarks: a preprocessing model, and text detection on what it makes."""

from __future__ import annotations

from typing import Any

import numpy as np

import aionn
from tests.real_models import carried

SIDE = 160
"""The detector's pictures are so wide and high, the camera's twice that."""

PICTURE = (1, 2 * SIDE, 2 * SIDE, 3)
TENSOR = (1, 3, SIDE, SIDE)
TENSOR_BYTES = int(np.prod(TENSOR)) * 4


def preprocessing() -> aionn.Model:
    """A picture (uint8, NHWC) to what the detector takes (float32, NCHW, normalised): each pixel is the mean of four."""
    from onnx import TensorProto, helper, numpy_helper

    mean, deviation = np.array([0.485, 0.456, 0.406], np.float32), np.array([0.229, 0.224, 0.225], np.float32)
    constants: dict[str, np.ndarray[Any, Any]] = {
        "quarters": np.array([1, SIDE, 2, SIDE, 2, 3], np.int64),
        "scale": (1 / (255 * deviation)).reshape(1, 3, 1, 1).astype(np.float32),
        "offset": (mean / deviation).reshape(1, 3, 1, 1).astype(np.float32),
    }
    nodes = [
        helper.make_node("Cast", ["picture"], ["numbers"], to=TensorProto.FLOAT),
        helper.make_node("Reshape", ["numbers", "quarters"], ["blocks"]),
        helper.make_node("ReduceMean", ["blocks"], ["small"], axes=[2, 4], keepdims=0),
        helper.make_node("Transpose", ["small"], ["planes"], perm=[0, 3, 1, 2]),
        helper.make_node("Mul", ["planes", "scale"], ["scaled"]),
        helper.make_node("Sub", ["scaled", "offset"], ["tensor"]),
    ]
    graph = helper.make_graph(
        nodes,
        "preprocessing",
        [helper.make_tensor_value_info("picture", TensorProto.UINT8, PICTURE)],
        [helper.make_tensor_value_info("tensor", TensorProto.FLOAT, TENSOR)],
        [numpy_helper.from_array(array, name) for name, array in constants.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    return aionn.Model.from_onnx(model.SerializeToString())


def detector() -> aionn.Model:
    return aionn.Model.from_onnx(carried("detector"))


def pictures(count: int) -> list[np.ndarray[tuple[int, ...], np.dtype[np.uint8]]]:
    random = np.random.default_rng(7)
    return [random.integers(0, 256, PICTURE, np.uint8) for _ in range(count)]
