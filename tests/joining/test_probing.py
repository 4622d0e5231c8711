"""Which models have rows that stay apart: real ones do, and models that mix rows in every way that is known are found out."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import aionn
from aionn.driver.joining.probing import probe
from aionn.engines.onnxruntime import OnnxRuntimeEngine
from aionn.errors import CallerError
from aionn.hal import CompileOptions
from aionn.hal.batching import RowAxes
from tests.real_models import carried

WIDTH = 6


def found_in(model: aionn.Model, batching: aionn.Batching | None = None) -> RowAxes:
    executable = OnnxRuntimeEngine().compile(model, CompileOptions(threads=1))
    return probe(executable, model, batching or aionn.Batching())


def model_of(nodes: Sequence[Any], constants: Sequence[Any] = (), *, rank: int = 2, kind: int = TensorProto.FLOAT) -> aionn.Model:
    """x[batch, 6] -> y, by these nodes."""
    shape: list[str | int | None] = ["batch", *([WIDTH] * (rank - 1))]
    x = helper.make_tensor_value_info("x", kind, shape)
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    graph = helper.make_graph(list(nodes), "rows", [x], [y], list(constants))
    return aionn.Model.from_onnx(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]).SerializeToString())


def numbers(name: str, value: Any, dtype: str = "int64") -> TensorProto:
    return numpy_helper.from_array(np.asarray(value, dtype), name)


node = helper.make_node


def test_silero_has_its_rows_in_other_axes_of_input_and_state() -> None:
    found = found_in(aionn.Model.from_onnx(carried("silero_batch")), aionn.Batching(tolerance="exact"))
    assert found == RowAxes("", (("input", 0), ("state", 1), ("sr", None)), (("output", 0), ("stateN", 1)))


@pytest.mark.parametrize("name", ["orientation", "upside_down", "magika"])
def test_the_rows_of_other_real_models_stay_apart(name: str) -> None:
    assert found_in(aionn.Model.from_onnx(carried(name))).reason == ""


MIXERS: dict[str, tuple[list[Any], list[Any], str]] = {
    "softmax over the batch": ([node("Softmax", ["x"], ["y"], axis=0)], [], "rows together differ"),
    "softmax over all": (
        [node("Reshape", ["x", "flat"], ["f"]), node("Softmax", ["f"], ["s"], axis=1), node("Reshape", ["s", "back"], ["y"])],
        [numbers("flat", [1, -1]), numbers("back", [-1, WIDTH])],
        "rows together differ",
    ),
    "minus the mean of the rows": ([node("ReduceMean", ["x"], ["m"], axes=[0]), node("Sub", ["x", "m"], ["y"])], [], "rows together"),
    "sum of all rows before": ([node("CumSum", ["x", "axis"], ["y"])], [numbers("axis", 0)], "rows together differ"),
    "quantised by the batch": (
        [
            node("DynamicQuantizeLinear", ["x"], ["q", "scale", "zero"]),
            node("DequantizeLinear", ["q", "scale", "zero"], ["y"]),
        ],
        [],
        "operator DynamicQuantizeLinear",
    ),
    "random numbers": ([node("RandomNormalLike", ["x"], ["n"]), node("Add", ["x", "n"], ["y"])], [], "operator RandomNormalLike"),
    "a number of outputs": (
        [node("NonZero", ["x"], ["z"]), node("Cast", ["z"], ["y"], to=TensorProto.FLOAT)],
        [],
        "operator NonZero",
    ),
    "one output for all": ([node("ReduceSum", ["x"], ["y"], keepdims=0)], [], "has no axis of rows"),
    "all rows in one": ([node("Reshape", ["x", "flat"], ["y"])], [numbers("flat", [-1])], "has no axis of rows"),
}


@pytest.mark.parametrize("mixer", MIXERS)
def test_a_model_that_mixes_rows_is_declined_with_the_operator_or_the_probe(mixer: str) -> None:
    nodes, constants, reason = MIXERS[mixer]
    assert reason in found_in(model_of(nodes, constants)).reason


def test_a_mixer_that_only_large_values_show_is_found() -> None:
    """Each row is scaled by a limit of the largest value among all rows. Usual values never reach it."""
    nodes = [
        node("Abs", ["x"], ["a"]),
        node("ReduceMax", ["a"], ["m"], keepdims=0),
        node("Max", ["m", "limit"], ["l"]),
        node("Div", ["x", "l"], ["y"]),
    ]
    reason = found_in(model_of(nodes, [numbers("limit", 1000.0, "float32")])).reason
    assert "changes when the other rows are made 1e+30" in reason


def test_a_mixer_that_only_nan_shows_is_found() -> None:
    """Rows are added to the sum of all rows times zero, which is NaN only if one of them is."""
    nodes = [
        node("ReduceSum", ["x"], ["s"], keepdims=0),
        node("Mul", ["s", "zero"], ["z"]),
        node("Add", ["x", "z"], ["y"]),
    ]
    reason = found_in(model_of(nodes, [numbers("zero", 0.0, "float32")])).reason
    assert "changes when the other rows are made NaN" in reason


def test_a_mixer_of_the_rows_before_is_found_by_a_later_row() -> None:
    """The sum of earlier rows times a tiny number is lost in usual values."""
    nodes = [node("CumSum", ["x", "axis"], ["c"]), node("Mul", ["c", "tiny"], ["t"]), node("Add", ["x", "t"], ["y"])]
    reason = found_in(model_of(nodes, [numbers("axis", 0), numbers("tiny", 1e-20, "float32")])).reason
    assert reason.startswith("row 1 of output 'y' changes")


def test_a_condition_on_a_value_of_a_row_is_declined_by_name() -> None:
    empty = helper.make_graph([node("Identity", ["x"], ["t"])], "then", [], [helper.make_tensor_value_info("t", 1, None)])
    other = helper.make_graph([node("Neg", ["x"], ["e"])], "else", [], [helper.make_tensor_value_info("e", 1, None)])
    nodes = [
        node("ReduceMax", ["x"], ["m"], keepdims=0),
        node("Greater", ["m", "limit"], ["large"]),
        node("If", ["large"], ["y"], then_branch=empty, else_branch=other, name="way"),
    ]
    reason = found_in(model_of(nodes, [numbers("limit", 1e6, "float32")])).reason
    assert reason == "operator If ('way') takes another way for other values of a row"


def test_weights_quantised_dynamically_are_declined(tmp_path: Path) -> None:
    quantization = pytest.importorskip("onnxruntime.quantization")
    weights = np.random.default_rng(0).standard_normal((WIDTH, WIDTH)).astype(np.float32)
    graph = helper.make_graph(
        [node("MatMul", ["x", "w"], ["y"])],
        "product",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", WIDTH])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", WIDTH])],
        [numpy_helper.from_array(weights, "w")],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]), tmp_path / "a.onnx")
    quantization.quantize_dynamic(tmp_path / "a.onnx", tmp_path / "b.onnx")
    assert "DynamicQuantizeLinear" in found_in(aionn.Model.from_onnx(tmp_path / "b.onnx")).reason


def test_indices_stay_within_their_table() -> None:
    table = np.random.default_rng(0).standard_normal((3, 4)).astype(np.float32)
    nodes = [node("Cast", ["x"], ["i"], to=TensorProto.INT64), node("Gather", ["table", "i"], ["g"]), node("ReduceSum", ["g", "a"], ["y"])]
    model = model_of(nodes, [numpy_helper.from_array(table, "table"), numbers("a", [1])], kind=TensorProto.INT32)
    assert found_in(model).reason == ""


def test_axes_are_named_or_found_and_mistakes_have_a_sentence() -> None:
    model = model_of([node("Relu", ["x"], ["y"])])
    assert found_in(model, aionn.Batching(axes={"x": 0})).inputs == (("x", 0),)
    assert "has 2 axes" in found_in(model, aionn.Batching(axes={"x": 2})).reason
    assert "fixed extent 6" in found_in(model, aionn.Batching(axes={"x": 1})).reason
    assert "names 'z', which the model has not" in found_in(model, aionn.Batching(axes={"x": 0, "z": 0})).reason
    fixed = aionn.Model.from_onnx(carried("silero"))
    assert found_in(fixed).reason == "no input has an open axis; export the model with an open batch axis"


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"max_rows": 1}, "max_rows=1; give a whole number from 2 to 64"),
        ({"max_rows": True}, "max_rows=True"),
        ({"max_wait_us": -1}, "max_wait_us=-1"),
        ({"max_batch_ms": 0}, "max_batch_ms=0; give milliseconds above 0"),
        ({"tolerance": "loose"}, "tolerance='loose'; it is 'close' or 'exact'"),
        ({"axes": {}}, "axes={}; give the axis of at least one input"),
        ({"axes": {"x": -1}}, "give the axis of at least one input"),
        ({"axes": (("x", 0), ("x", 1))}, "names an input twice; give one axis for each input"),
        ({"max_waiting": 0}, "max_waiting=0; give a whole number from 1 to 1000000"),
        ({"max_rows": np.float64(4)}, "give a whole number from 2 to 64"),
        ({"verify_every": 0}, "verify_every=0"),
    ],
)
def test_a_wrong_batching_says_what_is_right(wrong: dict[str, Any], text: str) -> None:
    with pytest.raises(CallerError, match="Batching: ") as refused:
        aionn.Batching(**wrong)
    assert text in str(refused.value)


def test_whole_numbers_of_numpy_are_numbers() -> None:
    batch = aionn.Batching(max_rows=np.int64(4), max_waiting=np.uint8(9))  # type: ignore[arg-type]
    assert (type(batch.max_rows), batch.max_rows, batch.max_waiting) == (int, 4, 9)
    assert batch == aionn.Batching(max_rows=4, max_waiting=9)
