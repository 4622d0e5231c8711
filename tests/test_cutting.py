"""Models cut into steps: which device gets what, what crosses, and that the steps compute what the whole computes."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import NodeProto, TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

import aionn
from aionn.errors import CompilationError
from aionn.graph.constants import embed_constants
from aionn.graph.cutting import cut, step_models
from aionn.graph.steps import TEMPORARY_ALIGNMENT_BYTES, Step, check_steps, lay_out, lifetimes, step_token
from aionn.graph.support import supported_operations
from aionn.graph.unchanged import changeable_contents, contents_of
from aionn.hal import (
    ExecutionPreference,
    Model,
    Operand,
    OperandType,
    Performance,
    PerformanceInfo,
)
from aionn.hal.model import known_contents
from aionn.runtime.model import digests_of
from tests.engines.onnx_graphs import branching, model_of, value, weights
from tests.real_models import carried, some_input
from tests.test_graph import as_model, read

node = helper.make_node
FREE: Any = {"hand_over_us": 0.0}
"""Steps cost nothing, so that none is joined with another."""


def model_from(*made: Any, **more: Any) -> Model:
    return as_model(read(model_of(*made, **more)))


def able(model: Model, *names: str) -> list[bool]:
    """A device that can run the nodes of these names."""
    return [operation.name in names for operation in model.operations]


def times(**times: float) -> dict[str, Performance]:
    return {name: Performance(PerformanceInfo(execution_time=time)) for name, time in times.items()}


def shown(steps: Sequence[Step]) -> list[tuple[str, str, str, str]]:
    """Steps as words: device, nodes, inputs, outputs."""
    return [(step.device, " ".join(step.nodes), " ".join(step.inputs), " ".join(step.outputs)) for step in steps]


def adds(*nodes: tuple[str, str, str], inputs: str, outputs: str, **more: Any) -> Model:
    """A model of Add nodes: (what it makes, what it reads twice). The node that makes "b" is called "to_b"."""
    made = [node("Add", [first, second], [made], name=f"to_{made}") for made, first, second in nodes]
    return model_from(made, [value(name, [2, 3]) for name in inputs.split()], [value(name, [2, 3]) for name in outputs.split()], **more)


def run(model: Model, inputs: Mapping[str, Any]) -> dict[str, Any]:
    evaluator: Any = ReferenceEvaluator(embed_constants(model))
    return dict(zip(model.outputs, evaluator.run(list(model.outputs), dict(inputs)), strict=True))


def check(part: Model, values: Mapping[str, Any]) -> None:
    """Let ONNX check the model of a step. It wants a rank at each border, so an unknown one is that of the present values."""
    whole = embed_constants(part)
    for border in (*whole.graph.input, *whole.graph.output):
        if not border.type.tensor_type.HasField("shape"):
            border.CopyFrom(value(border.name, [None] * values[border.name].ndim, border.type.tensor_type.elem_type))
    onnx.checker.check_model(whole, full_check=True)


def run_steps(model: Model, steps: Sequence[Step], inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Run the steps one after the other, each as the model that it is, and check what crosses."""
    assert check_steps(steps, model.inputs, model.outputs) is None
    values = dict(inputs)
    extents: dict[str, int] = {}
    for step, part in zip(steps, step_models(model, steps), strict=True):
        assert tuple(part.inputs) == step.inputs
        assert tuple(part.outputs) == step.outputs
        assert {id(pool) for pool in part.pools} <= {id(pool) for pool in model.pools}
        assert len(part.operations) == len(step.operations)
        made = run(part, {name: values[name] for name in part.inputs})
        values.update(made)
        check(part, values)
        for name, operand in (*part.inputs.items(), *part.outputs.items()):
            assert operand.type.dtype == values[name].dtype
            assert operand.accepts(values[name].shape)
            for symbol, extent in zip(operand.symbols, values[name].shape, strict=False):
                assert symbol is None or extents.setdefault(symbol, extent) == extent
    return {name: values[name] for name in model.outputs}


def assert_steps_are_the_whole(model: Model, steps: Sequence[Step], inputs: Mapping[str, Any]) -> None:
    whole, parts = run(model, inputs), run_steps(model, steps, inputs)
    for name, array in whole.items():
        assert array.dtype == parts[name].dtype
        assert array.shape == parts[name].shape
        assert array.tobytes() == parts[name].tobytes(), name


# What NNAPI's partitioning tests compare, by their names


def two_adds() -> Model:
    return adds(("c", "a", "b"), ("e", "c", "d"), inputs="a b d", outputs="e")


def test_simple_model_stays_whole_on_the_first_device_that_can_run_it() -> None:
    model = two_adds()
    everything = [True, True]
    steps = cut(model, {"part": able(model, "to_c"), "slow": everything, "quick": everything}, times(slow=9.0, quick=0.1))
    assert shown(steps) == [("slow", "to_c to_e", "a b d", "e")]


def test_simple_model_is_two_steps_where_no_device_can_run_both() -> None:
    model = two_adds()
    steps = cut(model, {"A": able(model, "to_c"), "B": able(model, "to_e")})
    assert shown(steps) == [("A", "to_c", "a b", "c"), ("B", "to_e", "c d", "e")]
    assert_steps_are_the_whole(model, steps, {name: np.ones((2, 3), np.float32) for name in "abd"})


def test_slice_model() -> None:
    """Operations of three versions, of which the first device knows one, the next two, the last all but one."""
    model = adds(("c", "a", "b"), ("d", "a", "b"), ("e", "a", "b"), ("f", "c", "d"), inputs="a b", outputs="c e f")
    capable = {"V1": able(model, "to_c", "to_d"), "V2": able(model, "to_c", "to_d", "to_e"), "V3": able(model, "to_f")}
    steps = cut(model, capable, times(V1=0.7, V2=0.8, V3=0.5), **FREE)
    assert shown(steps) == [("V2", "to_e", "a b", "e"), ("V1", "to_c to_d", "a b", "c d"), ("V3", "to_f", "c d", "f")]


def test_slice_model_to_empty() -> None:
    """A device that can run nothing has no step."""
    model = adds(("c", "a", "b"), inputs="a b", outputs="c")
    assert [step.device for step in cut(model, {"nothing": [False], "all": [True]}, times(nothing=0.1, all=9.0))] == ["all"]


def test_cpu_between_two_steps_of_one_device() -> None:
    model = adds(
        *[("c", "a", "b"), ("d", "a", "c"), ("e", "a", "d"), ("f", "c", "e"), ("h", "d", "f"), ("i", "g", "h")],
        inputs="a b g",
        outputs="e i",
    )
    capable = {"dev": able(model, "to_c", "to_d", "to_h", "to_i"), "cpu": able(model, "to_e", "to_f")}
    assert shown(cut(model, capable)) == [
        ("dev", "to_c to_d", "a b", "c d"),
        ("cpu", "to_e to_f", "a d c", "e f"),
        ("dev", "to_h to_i", "d f g", "i"),
    ]


def test_model_output_as_step_model_input() -> None:
    model = adds(("c", "a", "b"), ("d", "c", "b"), inputs="a b", outputs="c d")
    steps = cut(model, {"A": able(model, "to_c"), "B": able(model, "to_d")})
    assert shown(steps) == [("A", "to_c", "a b", "c"), ("B", "to_d", "c b", "d")]
    assert_steps_are_the_whole(model, steps, {name: np.ones((2, 3), np.float32) for name in "ab"})


def test_perf_the_best_device_gets_an_operation_and_the_first_of_equals() -> None:
    model = two_adds()
    capable = {"only_c": able(model, "to_c"), "X": able(model, "to_e"), "Y": able(model, "to_e")}

    def device(**performance: Performance) -> str:
        return cut(model, capable, performance)[-1].device

    quick, frugal = PerformanceInfo(0.5, 2.0), PerformanceInfo(2.0, 0.5)
    both = {"X": Performance(frugal), "Y": Performance(quick)}
    assert cut(model, capable, both, ExecutionPreference.LOW_POWER)[-1].device == "X"
    for preference in (ExecutionPreference.FAST_SINGLE_ANSWER, ExecutionPreference.SUSTAINED_SPEED):
        assert cut(model, capable, both, preference)[-1].device == "Y"
    assert device() == device(X=Performance(quick), Y=Performance(quick)) == "X"
    # By the type of the first input; that of another type says nothing, and a default counts.
    assert device(Y=Performance(by_type={OperandType.FLOAT32: quick})) == "Y"
    assert device(Y=Performance(by_type={OperandType.FLOAT16: quick})) == "X"
    assert device(Y=Performance(quick, {OperandType.FLOAT32: frugal})) == "X"


def test_relaxed_fp_a_device_that_is_quick_for_half_floats_gets_them_alone() -> None:
    halves = [node("Cast", ["x"], ["h"], name="to_half", to=TensorProto.FLOAT16), node("Exp", ["h"], ["e"], name="half")]
    rest = [node("Cast", ["e"], ["f"], name="to_float", to=TensorProto.FLOAT), node("Tan", ["f"], ["y"], name="float")]
    model = model_from([*halves, *rest], [value("x", [2])], [value("y", [2])])
    capable = {"cpu": able(model, "to_half", "half", "to_float"), "half": able(model, "half", "float")}
    fast = Performance(by_type={OperandType.FLOAT16: PerformanceInfo(0.1)})
    assert [(step.device, step.nodes) for step in cut(model, capable, {"half": fast}, **FREE)] == [
        ("cpu", ("to_half",)),
        ("half", ("half",)),
        ("cpu", ("to_float",)),
        ("half", ("float",)),
    ]


def test_control_flow_stays_whole_and_its_captures_are_its_inputs() -> None:
    graph = branching()
    graph.graph.node.insert(0, node("Neg", ["x0"], ["x"], name="before"))
    graph.graph.input[0].name = "x0"
    model = as_model(read(graph))
    steps = cut(model, {"A": able(model, "before"), "B": able(model, "choose")})
    assert shown(steps) == [("A", "before", "x0", "x"), ("B", "choose", "condition x", "y")]
    first, second = step_models(model, steps)
    assert (len(first.constants), len(second.constants)) == (0, 2)
    for condition in (True, False):
        assert_steps_are_the_whole(model, steps, {"x0": weights(2, 8), "condition": np.array(condition)})


def test_what_a_body_hands_through_and_what_it_calls_is_in_its_step() -> None:
    then = helper.make_graph([], "then", [], [value("a", None)])
    otherwise = helper.make_graph([node("Twice", ["b"], ["c"], domain="local")], "else", [], [value("c", None)])
    nodes = [
        node("Neg", ["x"], ["a"], name="first"),
        node("Exp", ["x"], ["b"], name="second"),
        node("If", ["condition"], ["y"], name="choose", then_branch=then, else_branch=otherwise),
    ]
    twice = helper.make_function("local", "Twice", ["p"], ["q"], [node("Add", ["p", "p"], ["q"])], [helper.make_opsetid("", 17)])
    inputs = [value("x", [4]), value("condition", [], TensorProto.BOOL)]
    model = model_from(nodes, inputs, [value("y", [4])], domains=("local",), functions=[twice])
    steps = cut(model, {"A": able(model, "first", "second"), "B": able(model, "choose")})
    assert shown(steps) == [("A", "first second", "x", "a b"), ("B", "choose", "condition b a", "y")]
    first, second = (onnx.load_from_string(part.graph) for part in step_models(model, steps))
    assert [len(first.functions), len(second.functions)] == [0, 1]
    assert [entry.domain for entry in second.opset_import] == ["", "local"]


def test_control_flow_that_no_device_can_run_is_named() -> None:
    model = as_model(read(branching()))
    with pytest.raises(CompilationError, match=r"none of the devices A, B can run operator ai.onnx.If \(node 'choose'\)") as caught:
        cut(model, {"A": [False], "B": [False]})
    assert caught.value.node == "choose"


def test_unknown_size_a_temporary_of_unknown_rank_or_extent_crosses_with_an_open_operand() -> None:
    nodes = [
        node("Relu", ["x"], ["a"], name="a"),
        node("NonZero", ["a"], ["b"], name="b"),
        node("Reshape", ["a", "s"], ["c"], name="c"),
        node("Cast", ["b"], ["y"], name="d", to=TensorProto.FLOAT),
        node("Neg", ["c"], ["z"], name="e"),
    ]
    inputs = [value("x", ["N", 4]), value("s", ["R"], TensorProto.INT64)]
    model = model_from(nodes, inputs, [value("y", None), value("z", None)])
    steps = cut(model, {"A": able(model, "a", "b", "c"), "B": able(model, "d", "e")})
    part = step_models(model, steps)[1]
    assert part.inputs["b"].dimensions == (2, 0)
    assert part.inputs["c"].dimensions is None
    inputs_given = {"x": np.array([[1, -1, 2, 0]] * 3, np.float32), "s": np.array([2, 3, 2], np.int64)}
    assert_steps_are_the_whole(model, steps, inputs_given)


def test_symbols_of_the_model_reach_the_temporaries() -> None:
    model = model_from(
        [node("Relu", ["x"], ["a"], name="a"), node("Transpose", ["a"], ["b"], name="b"), node("Exp", ["b"], ["y"], name="c")],
        [value("x", ["N", "M"])],
        [value("y", None)],
    )
    last = step_models(model, cut(model, {"A": able(model, "a", "b"), "B": able(model, "c")}))[1]
    assert last.inputs["b"] == Operand(OperandType.FLOAT32, (0, 0), ("M", "N"))


def test_a_shape_that_the_graph_computes_is_known_where_it_crosses() -> None:
    nodes = [
        node("Shape", ["x"], ["s"], name="a"),
        node("Mul", ["s", "two"], ["r"], name="b"),
        node("Expand", ["one", "r"], ["e"], name="c"),
        node("Neg", ["e"], ["y"], name="d"),
    ]
    constants = {"one": np.ones((1, 1), np.float32), "two": np.array([2, 3])}
    model = model_from(nodes, [value("x", [2, 3])], [value("y", None)], constants)
    steps = cut(model, {"A": able(model, "a", "b", "c"), "B": able(model, "d")})
    assert step_models(model, steps)[1].inputs["e"].dimensions == (4, 9)
    assert_steps_are_the_whole(model, steps, {"x": weights(2, 3)})


def test_an_initializer_that_is_also_an_input_is_an_input_of_its_step() -> None:
    model = model_from(
        [node("Neg", ["x"], ["a"], name="first"), node("Add", ["a", "k"], ["y"], name="second")],
        [value("x", [4])],
        [value("y", [4])],
        {"k": np.ones(4, np.float32)},
    )
    model = dataclasses.replace(model, inputs={**model.inputs, "k": Operand(OperandType.FLOAT32, (4,))})
    steps = cut(model, {"A": able(model, "first"), "B": able(model, "second")})
    assert [step.inputs for step in steps] == [("x",), ("a", "k")]


def test_partial_model_not_supported_names_the_first_node_in_the_order_of_the_model() -> None:
    model = adds(("c", "a", "b"), ("d", "a", "b"), ("e", "c", "d"), inputs="a b", outputs="e")
    with pytest.raises(CompilationError, match="to_d") as caught:
        cut(model, {"A": able(model, "to_c"), "B": able(model, "to_c")})
    assert caught.value.node == "to_d"
    assert caught.value.reason.startswith("none of the devices A, B can run")


# What a cut must not break


def test_an_operation_that_nothing_reads_is_in_no_step_and_needs_no_device() -> None:
    model = adds(("c", "a", "b"), ("unread", "c", "c"), ("e", "c", "b"), inputs="a b", outputs="e")
    steps = cut(model, {"A": able(model, "to_c"), "B": able(model, "to_e")})
    assert [step.nodes for step in steps] == [("to_c",), ("to_e",)]
    assert [name for step in steps for name in step.outputs] == ["c", "e"]


def test_outputs_that_are_inputs_or_constants_come_from_the_first_step() -> None:
    small, large = np.arange(6, dtype=np.float32).reshape(2, 3), weights(8, 8)
    nodes = [
        node("Constant", [], ["k"], value_ints=[4, 5]),
        node("Add", ["a", "small"], ["b"], name="first"),
        node("Neg", ["b"], ["y"], name="second"),
    ]
    outputs = [value("y", [2, 3]), value("a", [2, 3]), value("small", [2, 3]), value("large", [8, 8]), value("k", [2], TensorProto.INT64)]
    model = model_from(nodes, [value("a", [2, 3])], outputs, {"small": small, "large": large})
    steps = cut(model, {"A": able(model, "second"), "B": able(model, "first")})
    assert shown(steps) == [("B", "first", "a", "b a small large k"), ("A", "second", "b", "y")]
    assert_steps_are_the_whole(model, steps, {"a": np.ones((2, 3), np.float32)})


def test_an_output_that_only_the_first_step_hands_through_is_its_input() -> None:
    model = adds(("c", "b", "b"), ("d", "c", "c"), inputs="a b", outputs="d a")
    steps = cut(model, {"A": able(model, "to_c"), "B": able(model, "to_d")})
    assert shown(steps) == [("A", "to_c", "b a", "c a"), ("B", "to_d", "c", "d")]
    assert_steps_are_the_whole(model, steps, {name: np.ones((2, 3), np.float32) for name in "ab"})


@pytest.mark.parametrize(
    "given",
    [
        {"value": numpy_helper.from_array(np.array([1.0, 2.0], np.float32))},
        {"value": numpy_helper.from_array(weights(1, 2)[0].astype(np.float64))},
        {"value_float": 1.5},
        {"value_floats": [1.5, 2.5]},
        {"value_int": 3},
        {"value_ints": [3, 4]},
        {"sparse_value": helper.make_sparse_tensor(helper.make_tensor("v", 1, [1], [3.0]), helper.make_tensor("i", 7, [1], [1]), [2])},
    ],
    ids=lambda given: next(iter(given)),
)
def test_a_constant_node_is_in_every_step_that_reads_it(given: dict[str, Any]) -> None:
    nodes = [
        node("Constant", [], ["k"], name="constant", **given),
        node("Cast", ["k"], ["f"], name="first", to=TensorProto.DOUBLE),
        node("Add", ["x", "f"], ["b"], name="second"),
        node("Cast", ["k"], ["g"], name="third", to=TensorProto.DOUBLE),
        node("Add", ["b", "g"], ["y"], name="fourth"),
    ]
    model = model_from(nodes, [value("x", [2], TensorProto.DOUBLE)], [value("y", [2], TensorProto.DOUBLE)])
    steps = cut(model, {"A": able(model, "first", "second"), "B": able(model, "third", "fourth")}, **FREE)
    assert {step.device for step in steps} == {"A", "B"}
    assert all("constant" not in step.nodes for step in steps)
    if "sparse_value" in given:  # the reference takes no sparse initializers
        for part in step_models(model, steps):
            onnx.checker.check_model(embed_constants(part))
    else:
        assert_steps_are_the_whole(model, steps, {"x": np.array([1.0, 2.0])})


def test_a_constant_of_strings_is_an_initializer_of_the_step() -> None:
    for made in ({"value_string": "a"}, {"value_strings": ["a", "b"]}):
        nodes = [
            node("Constant", [], ["k"], **made),
            node("Shape", ["k"], ["s"], name="first"),
            node("Add", ["s", "x"], ["y"], name="second"),
        ]
        model = model_from(nodes, [value("x", [1], TensorProto.INT64)], [value("y", None, TensorProto.INT64)])
        steps = cut(model, {"A": able(model, "first"), "B": able(model, "second")})
        assert_steps_are_the_whole(model, steps, {"x": np.array([1], np.int64)})


def test_a_step_of_constants_alone_has_no_inputs() -> None:
    nodes = [node("Neg", ["w"], ["v"], name="first"), node("MatMul", ["x", "v"], ["y"], name="second")]
    model = model_from(nodes, [value("x", [1, 8])], [value("y", [1, 8])], {"w": weights(8, 8)})
    steps = cut(model, {"A": able(model, "first"), "B": able(model, "second")})
    assert shown(steps) == [("A", "first", "", "v"), ("B", "second", "x v", "y")]
    assert_steps_are_the_whole(model, steps, {"x": weights(1, 8)})


def test_omitted_inputs_and_equal_node_names_do_no_harm() -> None:
    nodes = [node("Clip", ["x", "", "high"], ["a"], name="same"), node("Clip", ["a", "low"], ["y"], name="same")]
    constants = {"low": np.array(-1, np.float32), "high": np.array(1, np.float32)}
    model = model_from(nodes, [value("x", [4])], [value("y", [4])], constants)
    steps = cut(model, {"A": [True, False], "B": [False, True]})
    assert [(step.operations, step.nodes) for step in steps] == [((0,), ("same",)), ((1,), ("same",))]
    assert [[tensor.name for tensor in onnx.load_from_string(part.graph).graph.initializer] for part in step_models(model, steps)] == [
        ["high"],
        ["low"],
    ]
    assert_steps_are_the_whole(model, steps, {"x": np.array([-3, -0.5, 0.5, 3], np.float32)})


def test_a_step_has_the_functions_and_operator_sets_that_it_needs_and_no_others() -> None:
    def function(name: str, inner: NodeProto, *domains: str) -> onnx.FunctionProto:
        sets = [helper.make_opsetid("", 17), *(helper.make_opsetid(domain, 1) for domain in domains)]
        return helper.make_function("local", name, ["p"], ["q"], [inner], sets)

    functions = [
        helper.make_function("other", "Inner", ["p"], ["q"], [node("Exp", ["p"], ["q"])], [helper.make_opsetid("", 17)]),
        function("Outer", node("Inner", ["p"], ["q"], domain="other"), "other", "imported"),
    ]
    nodes = [node("Outer", ["x"], ["a"], name="first", domain="local"), node("Neg", ["a"], ["y"], name="second")]
    model = model_from(nodes, [value("x", [4])], [value("y", [4])], domains=("local", "other", "imported", "unused"), functions=functions)
    steps = cut(model, {"A": able(model, "first"), "B": able(model, "second")})
    first, second = (onnx.load_from_string(part.graph) for part in step_models(model, steps))
    assert [function.name for function in first.functions] == ["Inner", "Outer"]
    assert {entry.domain for entry in first.opset_import} == {"", "local", "other", "imported"}
    assert list(second.functions) == []
    assert {entry.domain for entry in second.opset_import} == {""}
    assert_steps_are_the_whole(model, steps, {"x": np.ones(4, np.float32)})


def test_a_step_has_both_functions_of_one_name() -> None:
    """Functions of one name differ by their overload."""
    functions = [
        helper.make_function("own", "Twice", ["p"], ["q"], [helper.make_node(kind, inputs, ["q"])], [helper.make_opsetid("", 17)])
        for kind, inputs in (("Add", ["p", "p"]), ("Unknown", ["p"]))
    ]
    functions[1].overload = "other"
    nodes = [node("Twice", ["x"], ["a"], name="one", domain="own"), node("Twice", ["a"], ["y"], name="other", domain="own")]
    nodes[1].overload = "other"
    model = model_from(nodes, [value("x", [4])], [value("y", [4])], functions=functions, domains=("own",))
    assert supported_operations(model, lambda domain, kind, version: kind == "Add") == (True, False)
    assert not any(supported_operations(model, lambda *_: True, overloads=False)), "which of them is meant?"
    (step,) = cut(model, {"A": [True, True]})
    made = onnx.ModelProto.FromString(step_models(model, (step,))[0].graph)
    assert [function.overload for function in made.functions] == ["", "other"]


def sequences() -> Model:
    nodes = [
        node("Relu", ["x"], ["r"], name="before"),
        node("SequenceConstruct", ["r", "x"], ["s"], name="pack"),
        node("SequenceAt", ["s", "zero"], ["b"], name="unpack"),
        node("Add", ["b", "b"], ["y"], name="after"),
    ]
    return model_from(nodes, [value("x", [4])], [value("y", [4])], {"zero": np.array(0, np.int64)})


def test_operations_stay_together_where_a_sequence_lies_between_them() -> None:
    model = sequences()
    steps = cut(model, {"A": able(model, "before", "pack", "unpack"), "B": able(model, "pack", "unpack", "after")}, times(B=2.0), **FREE)
    assert [(step.device, step.nodes) for step in steps] == [("A", ("before", "pack", "unpack")), ("B", ("after",))]


def test_operations_that_exchange_a_sequence_and_have_no_common_device_are_refused() -> None:
    model = sequences()
    with pytest.raises(CompilationError, match=r"nodes 'pack' to 'unpack' exchange values that cannot cross") as caught:
        cut(model, {"A": able(model, "before", "pack", "after"), "B": able(model, "unpack")})
    assert caught.value.node == "unpack"


def test_texts_do_not_cross_although_they_may_be_inputs_of_a_model() -> None:
    nodes = [
        node("Cast", ["x"], ["text"], name="write", to=TensorProto.STRING),
        node("Cast", ["text"], ["a"], name="read", to=TensorProto.FLOAT),
        node("Neg", ["a"], ["y"], name="after"),
    ]
    model = model_from(nodes, [value("x", [4])], [value("y", [4])])
    steps = cut(model, {"A": able(model, "write", "read"), "B": able(model, "read", "after")}, times(B=2.0), **FREE)
    assert [(step.device, step.nodes) for step in steps] == [("A", ("write", "read")), ("B", ("after",))]
    with pytest.raises(CompilationError, match="exchange values that cannot cross"):
        cut(model, {"A": able(model, "write"), "B": able(model, "read", "after")})


def test_a_tensor_of_unknown_type_does_not_cross() -> None:
    nodes = [
        node("Neg", ["x"], ["a"], name="before"),
        node("Strange", ["a"], ["b"], name="strange", domain="custom"),
        node("Identity", ["b"], ["y"], name="after"),
    ]
    model = model_from(nodes, [value("x", [4])], [value("y", [4])], domains=("custom",))
    steps = cut(model, {"A": able(model, "before", "after"), "B": able(model, "strange", "after")})
    assert [(step.device, step.nodes) for step in steps] == [("A", ("before",)), ("B", ("strange", "after"))]


def test_what_lies_between_operations_that_stay_together_stays_with_them() -> None:
    """The sequence goes from "pack" to "unpack" around "between": apart, the steps would wait for each other."""
    nodes = [
        node("SequenceConstruct", ["x", "x"], ["s"], name="pack"),
        node("SequenceLength", ["s"], ["l"], name="length"),
        node("Neg", ["l"], ["m"], name="between"),
        node("SequenceAt", ["s", "m"], ["y"], name="unpack"),
    ]
    model = model_from(nodes, [value("x", [4])], [value("y", [4])])
    together = ("pack", "length", "unpack")
    with pytest.raises(CompilationError) as caught:
        cut(model, {"A": able(model, *together), "B": able(model, "between")})
    assert caught.value.node == "between"


def test_a_declared_shape_that_is_wrong_does_not_cross() -> None:
    model = model_of(
        [node("Relu", ["x"], ["a"], name="a"), node("Neg", ["a"], ["y"], name="b")], [value("x", ["N", 4])], [value("y", ["N", 4])]
    )
    model.graph.value_info.append(value("a", [1, 9]))
    whole = as_model(read(model))
    steps = cut(whole, {"A": able(whole, "a"), "B": able(whole, "b")})
    assert step_models(whole, steps)[0].outputs["a"].dimensions == (0, 4)
    assert_steps_are_the_whole(whole, steps, {"x": weights(3, 4)})


# Steps that cost more than they gain


def chain(length: int, size: int = 2) -> Model:
    names = [f"t{number}" for number in range(length)] + ["y"]
    nodes = [node("Neg", [a], [b], name=f"to_{b}") for a, b in zip(["x", *names], names, strict=False)]
    return model_from(nodes, [value("x", [size])], [value("y", [size])])


def test_a_short_step_moves_to_the_device_around_it() -> None:
    model = chain(4)
    everything_but_last = [True] * 4 + [False]
    capable = {"A": everything_but_last, "B": [False, False, True, False, False], "C": [False] * 4 + [True]}
    quick_b = times(A=10.0, B=0.5)
    assert [step.device for step in cut(model, capable, quick_b, hand_over_us=0.0)] == ["A", "B", "A", "C"]
    assert [step.device for step in cut(model, capable, quick_b)] == ["A", "C"]


def test_a_long_step_stays_where_it_is_quick() -> None:
    model = chain(4, size=10_000_000)
    capable = {"A": [True] * 4 + [False], "B": [False, False, True, False, False], "C": [False] * 4 + [True]}
    assert [step.device for step in cut(model, capable, times(A=10.0, B=0.5))] == ["A", "B", "A", "C"]


def test_a_plan_begins_with_the_device_that_makes_fewer_steps() -> None:
    model = adds(("c", "a", "a"), ("d", "c", "b"), ("e", "b", "b"), ("y", "d", "e"), inputs="a b", outputs="y")
    capable = {"A": able(model, "to_c"), "B": able(model, "to_d", "to_e", "to_y")}
    assert [step.nodes for step in cut(model, capable)] == [("to_c",), ("to_d", "to_e", "to_y")]
    capable = {"B": capable["B"], "A": capable["A"]}
    assert [step.nodes for step in cut(model, capable)] == [("to_c",), ("to_d", "to_e", "to_y")]


# Tokens, constants, files


def test_a_steps_token_depends_on_the_model_and_on_what_the_step_does_but_not_on_its_device() -> None:
    step = Step("A", (0, 1), ("n", "m"), ("a", "b"), ("c",))
    token = step_token(b"t" * 32, step)
    assert len(token) == 32
    assert step_token(b"t" * 32, msgspec.structs.replace(step, device="B", nodes=("o", "p"))) == token
    others = [
        step_token(b"u" * 32, step),
        step_token(b"t" * 32, msgspec.structs.replace(step, operations=(0, 2))),
        step_token(b"t" * 32, msgspec.structs.replace(step, operations=(0,))),
        step_token(b"t" * 32, msgspec.structs.replace(step, inputs=("ab",))),
        step_token(b"t" * 32, msgspec.structs.replace(step, inputs=("ab", ""))),
        step_token(b"t" * 32, msgspec.structs.replace(step, inputs=("a",), outputs=("b", "c"))),
        step_token(b"t" * 32, msgspec.structs.replace(step, outputs=("d",))),
    ]
    assert len({token, *others}) == 8
    assert step_token(b"", step) == b""
    model = two_adds()
    steps = cut(model, {"A": able(model, "to_c"), "B": able(model, "to_e")})
    assert [part.token for part in step_models(model, steps)] == [step_token(model.token, step) for step in steps]
    undigested = dataclasses.replace(model, token=b"")
    assert [part.token for part in step_models(undigested, steps)] == [b"", b""]


def three_products() -> onnx.ModelProto:
    nodes = [
        node("MatMul", ["x", "u"], ["a"], name="first"),
        node("MatMul", ["a", "v"], ["b"], name="second"),
        node("MatMul", ["b", "w"], ["y"], name="third"),
    ]
    constants = {name: weights(8, 8, seed) for seed, name in enumerate("uvw")}
    return model_of(nodes, [value("x", [1, 8])], [value("y", [1, 8])], constants)


def test_a_step_has_its_weights_by_reference() -> None:
    model = as_model(read(three_products()))
    steps = cut(model, {"A": able(model, "first"), "B": able(model, "second", "third")})
    one, two = step_models(model, steps)
    assert [constant.name for constant in one.constants] == ["u"]
    assert [constant.name for constant in two.constants] == ["v", "w"]
    assert [constant.location for constant in (*one.constants, *two.constants)] == [constant.location for constant in model.constants]
    assert one.pools == two.pools == model.pools
    assert [part.graph for part in step_models(model, steps[1:])] == [two.graph]
    assert weights(8, 8, 0).tobytes() not in one.graph


def test_a_step_has_the_pools_that_it_uses_and_the_contents_of_its_files(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    onnx.save_model(three_products(), path, save_as_external_data=True, all_tensors_to_one_file=False, size_threshold=0)
    model = aionn.Model.from_onnx(path)
    assert len(model.pools) == 3
    steps = cut(model, {"A": able(model, "second"), "B": able(model, "first", "third")})
    digests = digests_of(model)
    assert digests is not None
    assert list(digests) == ["u", "v", "w"]
    parts = step_models(model, steps, digests)
    assert [[constant.name for constant in part.constants] for part in parts] == [["u"], ["v"], ["w"]]
    assert [part.pools for part in parts] == [(pool,) for pool in model.pools]
    for part in parts:
        (tensor,) = onnx.load_from_string(part.graph).graph.initializer
        assert tensor.external_data[0].value == "pool:0"
    assert (
        [known_contents(part) for part in parts]
        == [changeable_contents(part) for part in parts]
        == [contents_of([it]) for it in digests.values()]
    )
    assert [known_contents(part) for part in step_models(model, steps)] == [b"", b"", b""]  # not known
    (whole,) = step_models(model, cut(model, {"A": [True] * 3}))
    assert known_contents(whole) == known_contents(model) == contents_of(digests.values())
    assert_steps_are_the_whole(model, steps, {"x": weights(1, 8)})


# What lies between steps


def step(inputs: str, outputs: str) -> Step:
    return Step("A", (), (), tuple(inputs.split()), tuple(outputs.split()))


@pytest.mark.parametrize(
    ("steps", "why"),
    [
        ([step("x", "a"), step("a", "y")], None),
        ([step("x", "x y")], None),
        ([step("a", "y"), step("x", "a")], "step 0 reads 'a', which no step before it makes"),
        ([step("x", "y"), step("x", "y")], "step 1 makes 'y', which a step before it makes too"),
        ([step("x", "a")], "no step makes the output 'y'"),
        ([], "no step makes the output 'y'"),
    ],
)
def test_steps_that_do_not_fit_together_are_found(steps: list[Step], why: str | None) -> None:
    assert check_steps(steps, ["x"], ["y"]) == why


def test_steps_that_run_an_operation_twice_are_found() -> None:
    twice = [Step("A", (0,), ("n",), ("x",), ("a",)), Step("B", (0,), ("n",), ("x",), ("y",))]
    assert check_steps(twice, ["x"], ["y"]) == "step 1 runs operation 0, which a step before it runs too"


def test_a_temporary_lives_from_the_step_that_makes_it_to_the_last_that_reads_it() -> None:
    steps = [step("x", "a b"), step("a x", "c y"), step("c", "d"), step("b y d", "z")]
    assert lifetimes(steps, ["y", "z"]) == {"a": (0, 1), "b": (0, 3), "c": (1, 2), "d": (2, 3)}


def test_temporaries_of_different_times_share_memory() -> None:
    steps = [step("x", "a"), step("a", "b"), step("b", "c"), step("c", "y")]
    layout = lay_out({"a": 1000, "b": 500, "c": 900}, lifetimes(steps, ["y"]))
    assert layout.offsets["a"] == layout.offsets["c"]
    assert layout.size_bytes == 1024 + 512


@given(st.dictionaries(st.text(max_size=3), st.tuples(st.integers(0, 5000), st.integers(0, 9), st.integers(0, 9)), max_size=30))
def test_temporaries_of_the_same_time_never_share_a_byte(drawn: dict[str, tuple[int, int, int]]) -> None:
    sizes = {name: size for name, (size, _, _) in drawn.items()}
    lives = {name: (min(steps), max(steps)) for name, (_, *steps) in drawn.items()}
    layout = lay_out(sizes, lives)
    assert layout.offsets.keys() == sizes.keys()
    for name, offset in layout.offsets.items():
        assert offset % TEMPORARY_ALIGNMENT_BYTES == 0
        assert offset + sizes[name] <= layout.size_bytes
        for other, at in layout.offsets.items():
            if other != name and lives[other][0] <= lives[name][1] and lives[name][0] <= lives[other][1]:
                assert offset + sizes[name] <= at or at + sizes[other] <= offset
    most = max((sum(-(-sizes[n] // 64) * 64 for n in sizes if lives[n][0] <= t <= lives[n][1]) for t in range(10)), default=0)
    assert most <= layout.size_bytes <= sum(-(-size // 64) * 64 for size in sizes.values())


# Random graphs over random devices

DEVICES = ("A", "B", "C")


class Drawn:
    """A random graph in the making: typed values that later nodes may read, and the nodes so far.

    A seed decides about it. Drawing each node by hypothesis takes a second for a large graph, and minutes to shrink.
    """

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.floats, self.integers, self.truths = ["x", "y0", "small", "large"], ["n"], ["t"]
        self.nodes: list[NodeProto] = []
        self.capable: list[str] = []
        self.count = 0

    def fresh(self) -> str:
        self.count += 1
        return f"v{self.count}"

    def one(self, names: Sequence[str]) -> str:
        # Mostly a recent one, so that graphs are deep.
        return self.random.choice(names[-6:] if self.random.random() < 0.5 else names)

    def add(self, operator: str, inputs: Sequence[str], *kinds: list[str], together: str = "", **attributes: Any) -> list[str]:
        made = [self.fresh() for _ in kinds]
        able = together or self.random.choice(["A", "B", "C", "AB", "BC", "ABC", "AC"])
        self.nodes.append(node(operator, list(inputs), made, name=f"{operator}_{len(self.nodes) % 7}", **attributes))
        self.capable.append(able)
        for name, kind in zip(made, kinds, strict=True):
            kind.append(name)
        return made

    def grow(self) -> None:
        floats, integers, truths = self.floats, self.integers, self.truths
        kind = self.random.randrange(16)
        if kind <= 4:
            self.add(self.random.choice(["Add", "Sub", "Mul", "Max"]), [self.one(floats), self.one(floats)], floats)
        elif kind <= 6:
            self.add(self.random.choice(["Relu", "Neg", "Tanh", "Identity"]), [self.one(floats)], floats)
        elif kind == 7:
            self.add("Less", [self.one(floats), self.one(floats)], truths)
        elif kind == 8:
            self.add("Where", [self.one(truths), self.one(floats), self.one(floats)], floats)
        elif kind == 9:
            self.add("Cast", [self.one(floats)], integers, to=TensorProto.INT64)
        elif kind == 10:
            self.add("Cast", [self.one(integers)], floats, to=TensorProto.FLOAT)
        elif kind == 11:
            self.add("Clip", [self.one(floats), "", "limit"], floats)
        elif kind == 12:
            made = self.fresh()
            given_value = numpy_helper.from_array(np.full((8, 8), self.random.randint(-3, 3), np.float32))
            self.nodes.append(node("Constant", [], [made], value=given_value))
            self.capable.append("ABC")
            floats.append(made)
        elif kind == 13:
            first, second = (node("Add", [self.one(floats), "large"], ["o"]) for _ in range(2))
            then, otherwise = (helper.make_graph([it], "body", [], [value("o", None)]) for it in (first, second))
            self.add("If", ["flag"], floats, then_branch=then, else_branch=otherwise)
        elif kind == 14:
            self.add("Twice", [self.one(floats)], floats, domain="local")
        else:
            able = self.random.choice(["A", "B", "ABC"])
            (packed,) = self.add("SequenceConstruct", [self.one(floats), self.one(floats)], [], together=able)
            self.add("SequenceAt", [packed, "zero"], floats, together=able)


def random_model(seed: int, size: int) -> tuple[Model, list[str]]:
    """A model, and per node the letters of the devices that can run it."""
    drawn = Drawn(seed)
    while len(drawn.nodes) < size:
        drawn.grow()
    twice = helper.make_function("local", "Twice", ["p"], ["q"], [node("Add", ["p", "p"], ["q"])], [helper.make_opsetid("", 17)])
    everything = [*drawn.floats, *drawn.integers, *drawn.truths]
    outputs = drawn.random.sample(everything, drawn.random.randint(1, 6))
    kinds = dict.fromkeys(drawn.integers, TensorProto.INT64) | dict.fromkeys(drawn.truths, TensorProto.BOOL)
    model = model_from(
        drawn.nodes,
        [
            value("x", ["N", 8]),
            value("y0", [8, 8]),
            value("n", [8, 8], TensorProto.INT64),
            value("t", [8, 8], TensorProto.BOOL),
            value("flag", [], TensorProto.BOOL),
        ],
        [value(name, None, kinds.get(name, TensorProto.FLOAT)) for name in outputs],
        {
            "small": np.linspace(-1, 1, 8, dtype=np.float32),
            "large": weights(8, 8),
            "limit": np.array(2, np.float32),
            "zero": np.array(0, np.int64),
        },
        domains=("local",),
        functions=[twice],
    )
    return model, drawn.capable


@settings(max_examples=150, deadline=None)
@given(
    st.integers(0, 2**32),
    st.integers(1, 100),
    st.booleans(),
    st.sampled_from([0.0, 2.0, 150.0]),
    st.tuples(*[st.sampled_from([0.5, 1.0, 30.0])] * 3),
)
def test_the_steps_of_a_random_graph_compute_what_the_whole_computes(
    seed: int, size: int, flag: bool, hand_over_us: float, speeds: tuple[float, ...]
) -> None:
    model, able = random_model(seed, size)
    capable = {device: [device in letters for letters in able] for device in DEVICES}
    performance = times(**dict(zip(DEVICES, speeds, strict=True)))
    inputs = {
        "x": weights(8, 8, 1),
        "y0": weights(8, 8, 2),
        "n": np.arange(64).reshape(8, 8),
        "t": weights(8, 8, 3) > 0,
        "flag": np.array(flag),
    }
    try:
        steps = cut(model, capable, performance, hand_over_us=hand_over_us)
    except CompilationError as error:  # what lies between two halves of a sequence
        assert "exchange values that cannot cross" in str(error)
        return
    done = [index for part in steps for index in part.operations]
    assert len(done) == len(set(done))
    assert all(able[index] and capable[part.device][index] for part in steps for index in part.operations)
    assert steps == cut(model, capable, performance, hand_over_us=hand_over_us)
    with np.errstate(all="ignore"):
        assert_steps_are_the_whole(model, steps, inputs)


@pytest.mark.parametrize(("name", "other"), [("silero", "Slice"), ("orientation", "HardSwish")])
def test_the_steps_of_a_real_model_compute_what_the_whole_computes(name: str, other: str) -> None:
    model = as_model(read(carried(name)))
    odd = [operation.op_type == other for operation in model.operations]
    steps = cut(model, {"A": [not it for it in odd], "B": odd})
    assert len(steps) > 3
    assert {step.device for step in steps} == {"A", "B"}
    inputs = {name: some_input(operand, *([1, 64, 64] if name == "x" else [])) for name, operand in model.inputs.items()}
    assert_steps_are_the_whole(model, steps, inputs)
