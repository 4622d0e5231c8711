"""Models whose outputs repeat their inputs, one for each datatype of the protocol."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper

import aionn
from tests.runtime.values_models import model_of

NUMBERS: dict[str, tuple[int, Any]] = {
    "BOOL": (TensorProto.BOOL, np.bool_),
    "UINT8": (TensorProto.UINT8, np.uint8),
    "UINT16": (TensorProto.UINT16, np.uint16),
    "UINT32": (TensorProto.UINT32, np.uint32),
    "UINT64": (TensorProto.UINT64, np.uint64),
    "INT8": (TensorProto.INT8, np.int8),
    "INT16": (TensorProto.INT16, np.int16),
    "INT32": (TensorProto.INT32, np.int32),
    "INT64": (TensorProto.INT64, np.int64),
    "FP16": (TensorProto.FLOAT16, np.float16),
    "FP32": (TensorProto.FLOAT, np.float32),
    "FP64": (TensorProto.DOUBLE, np.float64),
    "BF16": (TensorProto.BFLOAT16, ml_dtypes.bfloat16),
}
IN_JSON = [name for name in NUMBERS if name not in ("FP16", "BF16")]


def repeating(datatypes: dict[str, int]) -> aionn.Model:
    """Return a model with an input for each datatype, of shape [N, 3], and an output with the same values."""
    nodes: list[onnx.NodeProto] = [helper.make_node("Identity", [name], [f"{name}_out"]) for name in datatypes]
    return model_of(
        nodes,
        {name: (kind, ["N", 3]) for name, kind in datatypes.items()},
        {f"{name}_out": (kind, ["N", 3]) for name, kind in datatypes.items()},
    )


def numbers_model() -> aionn.Model:
    return repeating({name: kind for name, (kind, _) in NUMBERS.items()})


def json_model() -> aionn.Model:
    return repeating({name: NUMBERS[name][0] for name in IN_JSON})


def texts_model() -> aionn.Model:
    return repeating({"BYTES": TensorProto.STRING, "INT32": TensorProto.INT32})


def extremes(datatype: str, rows: int = 2) -> NDArray[Any]:
    """Return an array of shape [rows, 3] that begins with the least and the greatest value of the datatype."""
    dtype = np.dtype(NUMBERS[datatype][1])
    if datatype == "BOOL":
        return np.resize(np.array([True, False, False]), (rows, 3))
    if dtype.kind in "iu":
        info = np.iinfo(dtype)
        return np.resize(np.array([info.min, info.max, 1], dtype), (rows, 3))
    finfo: Any = ml_dtypes.finfo
    limits = finfo(dtype)
    return np.resize(np.array([float(limits.min), float(limits.max), 0.1]).astype(dtype), (rows, 3))


def example_model() -> aionn.Model:
    """Return a model for the protocol's examples: output0[row, column] = input1[row] * sum of input0's column."""
    nodes = [
        helper.make_node("Cast", ["input0"], ["numbers"], to=TensorProto.FLOAT),
        helper.make_node("ReduceSum", ["numbers", "first"], ["sums"], keepdims=1),
        helper.make_node("Cast", ["input1"], ["switches"], to=TensorProto.FLOAT),
        helper.make_node("Unsqueeze", ["switches", "second"], ["column"]),
        helper.make_node("MatMul", ["column", "sums"], ["output0"]),
        helper.make_node("Constant", [], ["first"], value_ints=[0]),
        helper.make_node("Constant", [], ["second"], value_ints=[1]),
    ]
    nodes = [*nodes[5:], *nodes[:5]]
    return model_of(
        nodes, {"input0": (TensorProto.UINT32, [2, 2]), "input1": (TensorProto.BOOL, [3])}, {"output0": (TensorProto.FLOAT, [3, 2])}
    )


def picking_model() -> aionn.Model:
    """Return a model that fails for an index beyond its 4 rows: picked = rows[index]."""
    rows = helper.make_tensor("rows", TensorProto.FLOAT, [4], [0, 1, 2, 3])
    nodes = [helper.make_node("Constant", [], ["rows"], value=rows), helper.make_node("Gather", ["rows", "index"], ["picked"])]
    return model_of(nodes, {"index": (TensorProto.INT64, ["N"])}, {"picked": (TensorProto.FLOAT, ["N"])})
