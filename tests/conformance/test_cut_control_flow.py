"""Control flow in a model that is cut over two devices: a `Scan` gets the shapes that it needs, or the compile fails by its name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnxruntime
import pytest
from onnx import FunctionProto, GraphProto, ModelProto, NodeProto, TensorProto, ValueInfoProto, helper, numpy_helper

import aionn
from aionn.errors import CompilationError
from tests.engines.split_engines import LEFT, RIGHT

pytestmark = [pytest.mark.anyio]
FLOAT = TensorProto.FLOAT
FEED = {"x": np.arange(6, dtype=np.float32).reshape(3, 2), "state": np.zeros(2, np.float32)}


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def bare(name: str, kind: int = FLOAT) -> ValueInfoProto:
    """Return a tensor of unknown rank."""
    return helper.make_tensor_value_info(name, kind, None)


def scan(name: str = "right scan", rows: str = "rows", outer: str = "outer") -> NodeProto:
    """last = state and all rows; scaled = each row times outer, which the body takes from the graph around it."""
    nodes = [helper.make_node("Add", ["s", "r"], ["next"]), helper.make_node("Mul", ["r", outer], ["out"])]
    body = helper.make_graph(nodes, "body", [bare("s"), bare("r")], [bare("next"), bare("out")])
    return helper.make_node("Scan", ["state", rows], ["last", "scaled"], name=name, body=body, num_scan_inputs=1)


def node(side: str, operator: str, reads: Sequence[str], made: str, **more: Any) -> NodeProto:
    return helper.make_node(operator, list(reads), [made], name=f"{side} {made}", **more)


def model_of(nodes: Sequence[NodeProto], outputs: Sequence[str], between: Sequence[ValueInfoProto] = (), **more: Any) -> ModelProto:
    inputs = [helper.make_tensor_value_info(name, FLOAT, list(array.shape)) for name, array in FEED.items()]
    constants = [numpy_helper.from_array(np.array(numbers, np.int64), name) for name, numbers in (("three", [3]), ("two", [2]))]
    made = [bare(name) for name in outputs]
    graph = helper.make_graph(list(nodes), "graph", inputs, made, constants, value_info=list(between))
    domains = [helper.make_opsetid(domain, version) for domain, version in (("", 21), ("com.microsoft", 1), ("local", 1))]
    return helper.make_model(graph, opset_imports=domains, ir_version=10, **more)


def outer_of_an_output() -> ModelProto:
    """The body reads an output of the model, which the file declares without a shape, and which the other device makes."""
    return model_of([node("left", "Neg", ["state"], "outer"), node("left", "Neg", ["x"], "rows"), scan()], ["outer", "last", "scaled"])


def rows_of_a_foreign_operator(side: str = "left", after: str = "right") -> ModelProto:
    """ONNX does not know the operator, so only ONNX Runtime knows the shape of what it makes. The file declares the type alone."""
    rows = node(side, "QuickGelu", ["x2"], "rows", domain="com.microsoft")
    nodes = [node("left", "Neg", ["x"], "x2"), node("left", "Abs", ["state"], "outer"), rows, scan(f"{after} scan")]
    return model_of(nodes, ["last", "scaled"], [bare("rows")])


def rows_by_a_computed_shape() -> ModelProto:
    """The rank of the rows follows from constants that ONNX Runtime folds."""
    nodes = [
        node("both", "Cast", ["three"], "floats", to=FLOAT),
        node("both", "Cast", ["floats"], "first", to=TensorProto.INT64),
        node("both", "Concat", ["first", "two"], "shape", axis=0),
        node("both", "QuickGelu", ["x"], "flat", domain="com.microsoft"),
        node("both", "Reshape", ["flat", "shape"], "rows"),
        node("left", "Abs", ["state"], "outer"),
        scan(),
    ]
    return model_of(nodes, ["outer", "last", "scaled"], [bare("flat")])


def inside(operator: str) -> ModelProto:
    """A `Scan` in the body of an If or a Loop reads what the other device makes."""
    taken = scan("scan in a body")
    if operator == "If":
        bodies = {
            "then_branch": helper.make_graph([taken], "then", [], [bare("last"), bare("scaled")]),
            "else_branch": helper.make_graph(
                [helper.make_node("Neg", ["state"], ["n"]), helper.make_node("Neg", ["rows"], ["m"])], "else", [], [bare("n"), bare("m")]
            ),
        }
        control = helper.make_node("If", ["go"], ["a", "b"], name="right if", **bodies)
    else:
        ends = [helper.make_node("Identity", ["c"], ["on"]), helper.make_node("Add", ["carried", "last"], ["more"])]
        inputs = [helper.make_tensor_value_info("i", TensorProto.INT64, []), helper.make_tensor_value_info("c", TensorProto.BOOL, [])]
        body: GraphProto = helper.make_graph(
            [taken, *ends],
            "loop",
            [*inputs, bare("carried")],
            [helper.make_tensor_value_info("on", TensorProto.BOOL, []), bare("more"), bare("scaled")],
        )
        control = helper.make_node("Loop", ["two", "go", "state"], ["a", "b"], name="right loop", body=body)
    nodes = [
        node("left", "Abs", ["state"], "outer"),
        node("left", "Neg", ["x"], "rows"),
        node("left", "ReduceSum", ["outer"], "sum", keepdims=0),
        node("left", "Cast", ["sum"], "zero", to=TensorProto.BOOL),
        node("left", "Not", ["zero"], "go"),
        control,
    ]
    return model_of(nodes, ["outer", "rows", "a", "b"])


def in_a_function() -> ModelProto:
    """A function has the `Scan`."""
    call = helper.make_node("Scanned", ["state", "rows", "outer"], ["last", "scaled"], name="right call", domain="local")
    function: FunctionProto = helper.make_function(
        "local", "Scanned", ["state", "rows", "outer"], ["last", "scaled"], [scan("inside")], [helper.make_opsetid("", 21)]
    )
    nodes = [node("left", "Abs", ["state"], "outer"), node("both", "QuickGelu", ["x"], "rows", domain="com.microsoft"), call]
    return model_of(nodes, ["outer", "last", "scaled"], [bare("rows")], functions=[function])


CASES = {
    "outer value is an output": outer_of_an_output(),
    "rows of a foreign operator": rows_of_a_foreign_operator("both"),
    "rows by a computed shape": rows_by_a_computed_shape(),
    "in an If": inside("If"),
    "in a Loop": inside("Loop"),
    "in a function": in_a_function(),
}


@pytest.mark.parametrize("what", CASES)
async def test_a_scan_that_is_cut_off_gets_the_shapes_that_it_needs(what: str) -> None:
    content = CASES[what].SerializeToString()
    session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
    wanted = dict(zip([output.name for output in session.get_outputs()], session.run(None, FEED), strict=True))
    async with aionn.Runtime() as runtime:
        compilation = await runtime.compile(aionn.Model.from_onnx(content), devices=(LEFT, RIGHT))
        assert {step.device for step in compilation.plan} == {LEFT, RIGHT}, "the model was cut"
        async with compilation.burst() as burst:
            for outputs in (await compilation.compute(FEED), await compilation.start(FEED), await burst.compute(FEED)):
                for name, value in wanted.items():
                    np.testing.assert_allclose(outputs[name], value, rtol=1e-5, err_msg=name)
            del outputs


def loop_without_iterations() -> ModelProto:
    """ONNX Runtime gives the rows of a Loop that never runs the shape (0,). The file declares rank 3 for them, as ONNX means it."""
    ends = [helper.make_node("Identity", ["c"], ["on"]), helper.make_node("Neg", ["carried"], ["row"])]
    inputs = [helper.make_tensor_value_info("i", TensorProto.INT64, []), helper.make_tensor_value_info("c", TensorProto.BOOL, [])]
    on = helper.make_tensor_value_info("on", TensorProto.BOOL, [])
    body = helper.make_graph(
        [*ends, helper.make_node("Identity", ["carried"], ["more"])], "b", [*inputs, bare("carried")], [on, bare("more"), bare("row")]
    )
    zero = node("left", "Sub", ["two", "two"], "zero")
    loop = helper.make_node("Loop", ["zero", "", "x"], ["last", "made"], name="left loop", body=body)
    through = node("right", "Abs", ["made"], "through")
    declared = [helper.make_tensor_value_info(name, FLOAT, ["N", 3, 2]) for name in ("made", "through")]
    return model_of([zero, loop, through, node("left", "Neg", ["through"], "y")], ["last", "y"], declared)


async def test_rows_of_a_loop_without_iterations_cross_between_devices() -> None:
    content = loop_without_iterations().SerializeToString()
    wanted = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"]).run(["y"], FEED)[0]
    assert wanted.shape == (0,), "what makes this case"
    async with aionn.Runtime() as runtime:
        compilation = await runtime.compile(aionn.Model.from_onnx(content), devices=(LEFT, RIGHT))
        assert [step.device for step in compilation.plan] == [LEFT, RIGHT, LEFT]
        outputs = await compilation.compute({"x": FEED["x"], "state": FEED["state"]})
        assert outputs["y"].shape == (0,)
        np.testing.assert_array_equal(outputs["last"], FEED["x"])


async def test_a_scan_whose_shapes_only_another_device_can_give_fails_the_compile_by_its_name() -> None:
    async with aionn.Runtime() as runtime:
        with pytest.raises(CompilationError, match=r"'left rows' to 'right scan'.*cannot run node '(left rows|right scan)'") as caught:
            await runtime.compile(aionn.Model.from_onnx(rows_of_a_foreign_operator().SerializeToString()), devices=(LEFT, RIGHT))
        assert caught.value.node in ("left rows", "right scan")
        assert "value_info" in str(caught.value)
