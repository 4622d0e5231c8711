"""Small float32 and quantised models for the caching rows, and their inputs: as bytes for `Model.from_onnx`."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

Kind = Literal["float32", "quant8"]
KINDS: tuple[Kind, ...] = ("float32", "quant8")
CHAIN_OPERATIONS = 100
_WIDTH = 64


def network(kind: Kind) -> bytes:
    """A classifier: convolution, ReLU, pooling, dense layer. Quantised: uint8 in and out, int8 weights."""
    random = np.random.default_rng(7)
    weights = (random.standard_normal((8, 3, 3, 3)) * 0.3).astype(np.float32)
    dense = (random.standard_normal((8, 10)) * 0.5).astype(np.float32)
    x, y = ("x", "y") if kind == "float32" else ("x_float", "y_float")
    nodes = [
        helper.make_node("Conv", [x, "weights"], ["convolved"], name="conv", pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["convolved"], ["positive"], name="relu"),
        helper.make_node("GlobalAveragePool", ["positive"], ["pooled"], name="pool"),
        helper.make_node("Flatten", ["pooled"], ["flat"], name="flatten"),
        helper.make_node("MatMul", ["flat", "dense"], [y], name="dense_matmul"),
    ]
    initializers = [numpy_helper.from_array(dense, "dense")]
    if kind == "float32":
        initializers.append(numpy_helper.from_array(weights, "weights"))
    else:
        initializers.append(numpy_helper.from_array((weights / 0.01).round().clip(-127, 127).astype(np.int8), "weights_int8"))
        nodes.insert(0, helper.make_node("DequantizeLinear", ["weights_int8", "weights_scale"], ["weights"], name="dequantize_weights"))
        initializers.append(numpy_helper.from_array(np.array(0.01, np.float32), "weights_scale"))
    return _model(kind, nodes, initializers, (1, 3, 8, 8), (1, 10))


def chain(kind: Kind, operator: Literal["Mul", "Add"], width: int = _WIDTH) -> bytes:
    """y = x op c1 op c2 ... op c100: two chains that differ in nothing but their operator."""
    x, y = ("x", "y") if kind == "float32" else ("x_float", "y_float")
    random = np.random.default_rng(100)
    names = [x, *(f"t{index}" for index in range(1, CHAIN_OPERATIONS)), y]
    constants = [
        numpy_helper.from_array((1.02 + 0.001 * random.standard_normal((1, width))).astype(np.float32), f"c{index}")
        for index in range(CHAIN_OPERATIONS)
    ]
    nodes = [
        helper.make_node(operator, [names[index], f"c{index}"], [names[index + 1]], name=f"{operator.lower()}{index}")
        for index in range(CHAIN_OPERATIONS)
    ]
    return _model(kind, nodes, constants, (1, width), (1, width), scale=0.5)


def input_of(kind: Kind, shape: tuple[int, ...], seed: int = 0) -> NDArray[Any]:
    random = np.random.default_rng(seed)
    return random.random(shape).astype(np.float32) if kind == "float32" else random.integers(0, 256, shape).astype(np.uint8)


def _model(
    kind: Kind, nodes: list[Any], initializers: list[Any], shape: tuple[int, ...], out: tuple[int, ...], scale: float = 0.02
) -> bytes:
    element = TensorProto.FLOAT
    if kind == "quant8":
        element = TensorProto.UINT8
        initializers += [
            numpy_helper.from_array(np.array(0.01, np.float32), "x_scale"),
            numpy_helper.from_array(np.array(0, np.uint8), "x_zero"),
            numpy_helper.from_array(np.array(scale, np.float32), "y_scale"),
            numpy_helper.from_array(np.array(0, np.uint8), "y_zero"),
        ]
        nodes = [
            helper.make_node("DequantizeLinear", ["x", "x_scale", "x_zero"], ["x_float"], name="dequantize"),
            *nodes,
            helper.make_node("QuantizeLinear", ["y_float", "y_scale", "y_zero"], ["y"], name="quantize"),
        ]
    graph = helper.make_graph(
        nodes,
        "caching",
        [helper.make_tensor_value_info("x", element, shape)],
        [helper.make_tensor_value_info("y", element, out)],
        initializers,
    )
    content: bytes = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10).SerializeToString()
    assert len(onnx.ModelProto.FromString(content).graph.node) == len(nodes)
    return content
