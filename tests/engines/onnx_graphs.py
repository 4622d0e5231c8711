"""Small ONNX models for tests, made with the onnx package."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper

FLOAT = TensorProto.FLOAT


def weights(rows: int, columns: int, seed: int = 0) -> NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal((rows, columns)).astype(np.float32)


def value(name: str, shape: Sequence[int | str | None] | None, kind: int = FLOAT) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, kind, shape)


def model_of(
    nodes: Sequence[NodeProto],
    inputs: Sequence[onnx.ValueInfoProto],
    outputs: Sequence[onnx.ValueInfoProto],
    constants: dict[str, NDArray[Any]] | None = None,
    **more: Any,
) -> ModelProto:
    initializers = [numpy_helper.from_array(array, name) for name, array in (constants or {}).items()]
    graph = helper.make_graph(list(nodes), "graph", list(inputs), list(outputs), initializers)
    imports = [helper.make_opsetid("", 17), *(helper.make_opsetid(domain, 1) for domain in more.pop("domains", ()))]
    return helper.make_model(graph, opset_imports=imports, ir_version=8, **more)


def matmul(rows: int = 8, columns: int = 8) -> ModelProto:
    """y[N, columns] = x[N, rows] @ w."""
    node = helper.make_node("MatMul", ["x", "w"], ["y"], name="multiply")
    return model_of([node], [value("x", ["N", rows])], [value("y", ["N", columns])], {"w": weights(rows, columns)})


def identity(kind: int, shape: Sequence[int | str | None] | None = (2, 3)) -> ModelProto:
    return model_of([helper.make_node("Identity", ["x"], ["y"], name="pass")], [value("x", shape, kind)], [value("y", shape, kind)])


def body(name: str, nodes: Sequence[NodeProto], output: str, constants: dict[str, NDArray[Any]] | None = None) -> GraphProto:
    initializers = [numpy_helper.from_array(array, name) for name, array in (constants or {}).items()]
    return helper.make_graph(list(nodes), name, [], [value(output, None)], initializers)


def branching(size: int = 8) -> ModelProto:
    """y = x @ w in both branches, with different weights that have the same name, as initializer and as Constant node."""
    first, second = weights(size, size, 1), weights(size, size, 2)
    then = body("then", [helper.make_node("MatMul", ["x", "w"], ["t"], name="then_multiply")], "t", {"w": first})
    constant = helper.make_node("Constant", [], ["w"], name="else_weights", value=numpy_helper.from_array(second))
    otherwise = body("else", [constant, helper.make_node("MatMul", ["x", "w"], ["e"], name="else_multiply")], "e")
    choose = helper.make_node("If", ["condition"], ["y"], name="choose", then_branch=then, else_branch=otherwise)
    inputs = [value("x", [2, size]), value("condition", [], TensorProto.BOOL)]
    return model_of([choose], inputs, [value("y", [2, size])])


def returning_constants(size: int = 40) -> ModelProto:
    """y is one of two constants, which are the very outputs of the branches; z is a constant of the main graph."""
    first, second, third = (np.full(size, number, np.float32) for number in (1, 2, 3))
    then = body("then", [helper.make_node("Constant", [], ["c"], value=numpy_helper.from_array(first))], "c")
    otherwise = body("else", [], "c", {"c": second})
    choose = helper.make_node("If", ["condition"], ["y"], name="choose", then_branch=then, else_branch=otherwise)
    constant = helper.make_node("Constant", [], ["z"], value=numpy_helper.from_array(third))
    return model_of([choose, constant], [value("condition", [], TensorProto.BOOL)], [value("y", [size]), value("z", [size])])


def attribute(node: NodeProto, name: str) -> AttributeProto:
    found: AttributeProto = next(a for a in node.attribute if a.name == name)
    return found
