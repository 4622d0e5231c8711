"""What ONNX Runtime adds to a model's graphs while it optimises them: it must be able to read its own artifact, with the same answers."""

from __future__ import annotations

from itertools import product

import numpy as np
import onnxruntime
import pytest
from numpy.typing import NDArray
from onnx import GraphProto, NodeProto, TensorProto, helper, numpy_helper

from aionn.engines.onnxruntime import OnnxRuntimeEngine
from aionn.graph.constants import settle_exported
from aionn.hal import CompileOptions
from aionn.runtime.model import Model
from tests.engines.onnx_graphs import body, model_of, value

IMAGE = [1, 16, 8, 8]


def floats(*values: float) -> NDArray[np.float32]:
    return np.array(values, np.float32)


def kernel(*shape: int) -> NDArray[np.float32]:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)


def convolving(output: str, weights: int) -> GraphProto:
    """A branch with a convolution of its own, small enough to stay one that ONNX Runtime lays out anew."""
    return body(output, [helper.make_node("Conv", ["a", f"k_{output}"], [output])], output, {f"k_{output}": kernel(1, 16, 1, 1) * weights})


@pytest.mark.parametrize("condition", [True, False])
def test_convolutions_of_the_main_graph_and_of_branches_are_loaded_again(condition: bool) -> None:
    """Each graph gets a "reorder_token_0" of its own."""
    nodes = [
        helper.make_node("Conv", ["x", "k"], ["a"], pads=[1, 1, 1, 1]),
        helper.make_node("If", ["c"], ["y"], then_branch=convolving("then", 1), else_branch=convolving("other", 2)),
    ]
    inputs = [value("x", IMAGE), value("c", [], TensorProto.BOOL)]
    content = model_of(nodes, inputs, [value("y", [1, 1, 8, 8])], {"k": kernel(16, 16, 3, 3)})
    engine = OnnxRuntimeEngine()
    compiled = engine.compile(Model.from_onnx(content.SerializeToString()), CompileOptions())
    artifact = engine.export(compiled)
    assert artifact is not None
    given = {"x": kernel(*IMAGE), "c": np.array(condition)}
    expected = compiled.run(given, {}, False).outputs["y"]
    found = engine.load(artifact, CompileOptions()).run(given, {}, False).outputs["y"]
    np.testing.assert_array_equal(found, expected)


def add(name: str, amount: str, output: str) -> NodeProto:
    return helper.make_node("Add", [name, amount], [output])


def twice_nested() -> GraphProto:
    """t = (t of the main graph) + 10, then a branch in it that reads this t, and makes names of both graphs around it again."""
    inner = body("inner", [add("t", "w", "u"), add("u", "w", "v")], "v", {"w": floats(100)})
    outer = body("outer", [add("x", "w", "t"), add("t", "w", "u")], "u", {"w": floats(10)})
    outer.node.append(helper.make_node("If", ["c"], ["v"], then_branch=inner, else_branch=body("same", [add("u", "t", "v")], "v")))
    del outer.output[:]
    outer.output.append(helper.make_empty_tensor_value_info("v"))
    return outer


@pytest.mark.parametrize(("condition", "in_loop"), list(product([True, False], repeat=2)))
def test_a_name_made_again_in_a_nested_graph_is_that_graphs_own(condition: bool, in_loop: bool) -> None:
    """By the rule that a name is the nearest one around it; `x` is 1 everywhere, and the main graph's t is 2."""
    nested = twice_nested()
    if in_loop:  # its parameters have names of the main graph too
        nested.input.extend([value("n", [], TensorProto.INT64), value("going", [], TensorProto.BOOL), value("y", ["K"])])
        nested.output.insert(0, value("going", [], TensorProto.BOOL))
        nested.node.append(helper.make_node("Identity", ["going"], ["on"]))
        nested.output[0].name = "on"
        choose = helper.make_node("Loop", ["once", "", "t"], ["y"], body=nested)
    else:
        choose = helper.make_node("If", ["c"], ["y"], then_branch=nested, else_branch=nested)
    nodes = [add("x", "w", "t"), helper.make_node("Identity", ["t"], ["n"]), choose, add("y", "t", "v")]
    constants = {"w": floats(1), "once": np.array(1)}
    content = model_of(nodes, [value("x", ["K"]), value("c", [], TensorProto.BOOL)], [value("v", ["K"]), value("n", ["K"])], constants)
    settled, weights, by_name = settle_exported(content.SerializeToString(), "none", b"")
    assert (weights, by_name) == ((), True)
    session = onnxruntime.InferenceSession(settled, providers=["CPUExecutionProvider"])
    found, main = session.run(["v", "n"], {"x": floats(1), "c": np.array(condition)})
    # t = 11 and u = 21 in the nested graph; in its own branches (t + 100) + 100, or u + t. The main graph's t is 2 still.
    assert (found.tolist(), main.tolist()) == ([(211 if condition else 32) + 2], [2])


def test_a_constant_of_a_branch_under_a_weights_name_stays_the_branchs() -> None:
    then = body("then", [add("x", "w", "t")], "t", {"w": floats(100)})
    other = body("else", [add("x", "w", "e")], "e")
    nodes = [helper.make_node("If", ["c"], ["y"], then_branch=then, else_branch=other)]
    content = model_of(nodes, [value("x", [1]), value("c", [], TensorProto.BOOL)], [value("y", [1])], {})
    outside = content.graph.initializer.add()
    outside.CopyFrom(numpy_helper.from_array(floats(7), "w"))
    outside.ClearField("raw_data")
    outside.data_location = TensorProto.EXTERNAL
    for key, text in (("location", "null"), ("offset", "0"), ("length", "4")):
        outside.external_data.add(key=key, value=text)
    settled, (constant,), by_name = settle_exported(content.SerializeToString(), "null", floats(7).tobytes())
    assert (constant.name, by_name) == ("w", True)
    settings = onnxruntime.SessionOptions()
    settings.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    settings.add_session_config_entry("session.model_external_initializers_file_folder_path", "/dev")
    handed_over = onnxruntime.OrtValue.ortvalue_from_numpy(floats(7))
    settings.add_initializer("w", handed_over)  # as the engine does at a load
    session = onnxruntime.InferenceSession(settled, settings, providers=["CPUExecutionProvider"])
    for condition, expected in ((True, 101), (False, 8)):
        (found,) = session.run(["y"], {"x": floats(1), "c": np.array(condition)})
        assert found.tolist() == [expected]
