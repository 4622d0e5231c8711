"""The operators of quantised models on the reference: every operator set, per tensor and per axis, compared with ONNX Runtime."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
import onnxruntime
import pytest
from numpy.typing import DTypeLike, NDArray
from onnx import TensorProto, helper, numpy_helper

from aionn.engines.reference import ReferenceEngine
from aionn.errors import CompilationError
from aionn.hal import CompileOptions
from aionn.runtime.model import Model
from tests.engines.onnx_graphs import value
from tests.real_models import carried

Array = NDArray[Any]
OPSETS = range(10, 24)
RNG = np.random.default_rng(14)
F32, U8, I8 = np.dtype(np.float32), np.dtype(np.uint8), np.dtype(np.int8)


class Case(NamedTuple):
    name: str
    operator: str
    inputs: Mapping[str, Array]
    attributes: Mapping[str, Any] = {}
    outputs: int = 1
    since: int = 10

    def arrays(self) -> dict[str, Array]:
        return {name: np.asarray(array) for name, array in self.inputs.items()}


def integers(kind: DTypeLike, *shape: int, limit: int = 2**31) -> Array:
    limits = np.iinfo(kind)
    return np.asarray(RNG.integers(max(limits.min, -limit), min(limits.max, limit), shape), kind)


def scales(*shape: int) -> Array:
    return np.asarray(RNG.uniform(0.02, 1, shape), np.float32)


def quantising() -> Iterator[Case]:
    x = (RNG.normal(size=(2, 3, 4)) * 40).astype(np.float32)
    x.flat[:8] = [1e20, -1e20, 0.25, 0.75, 1.25, -0.25, np.inf, -np.inf]
    for kind in (U8, I8):
        yield Case(f"{kind}", "QuantizeLinear", {"x": x, "s": np.array(0.5, np.float32), "z": integers(kind, limit=100)})
        for axis, extent in ((0, 2), (1, 3), (2, 4), (-1, 4)):
            given = {"x": x, "s": scales(extent), "z": integers(kind, extent, limit=100)}
            yield Case(f"{kind} axis {axis}", "QuantizeLinear", given, {"axis": axis}, since=13)
        given = {"x": x, "s": scales(3), "z": integers(kind, 3, limit=100)}
        yield Case(f"{kind} axis by default", "QuantizeLinear", given, since=13)
    for name in ("uint16", "int16"):
        yield Case(name, "QuantizeLinear", {"x": x, "s": scales(), "z": integers(name, limit=100)}, since=21)
    yield Case("no zero point", "QuantizeLinear", {"x": x, "s": scales()})
    yield Case("no zero point, axis", "QuantizeLinear", {"x": x, "s": scales(2)}, {"axis": 0}, since=13)
    yield Case("a scale of one element", "QuantizeLinear", {"x": x, "s": scales(1), "z": integers(U8, 1)})
    yield Case("a vector", "QuantizeLinear", {"x": x.reshape(-1), "s": scales(), "z": integers(U8)})
    yield Case("a scalar", "QuantizeLinear", {"x": np.array(3, np.float32), "s": scales(), "z": integers(U8)})
    yield Case("nothing", "QuantizeLinear", {"x": x[:0], "s": scales(), "z": integers(U8)})


def dequantising() -> Iterator[Case]:
    for kind, since in ((U8, 10), (I8, 10), (np.dtype(np.int32), 10), (np.dtype(np.uint16), 21), (np.dtype(np.int16), 21)):
        x = integers(kind, 2, 3, 4)
        limit = 1 if kind.itemsize == 4 else 100  # a zero point of int32 must be 0
        yield Case(f"{kind}", "DequantizeLinear", {"x": x, "s": scales(), "z": integers(kind, limit=limit) * (limit > 1)}, since=since)
        yield Case(f"{kind}, no zero point", "DequantizeLinear", {"x": x, "s": scales()}, since=since)
        for axis, extent in ((0, 2), (1, 3), (-1, 4)):
            zero_points = np.asarray(integers(kind, extent, limit=limit) * (limit > 1), kind)
            given = {"x": x, "s": scales(extent), "z": zero_points}
            yield Case(f"{kind} axis {axis}", "DequantizeLinear", given, {"axis": axis}, since=max(13, since))
        yield Case(f"{kind} axis, no zero point", "DequantizeLinear", {"x": x, "s": scales(2)}, {"axis": 0}, since=max(13, since))
        half = {"x": x, "s": scales().astype(np.float16)}
        yield Case(f"{kind} to float16", "DequantizeLinear", half, since=max(19, since))
    yield Case("a scalar", "DequantizeLinear", {"x": integers(U8), "s": scales(), "z": integers(U8)})
    blocks = {"x": integers(I8, 4, 6), "s": scales(4, 3), "z": integers(I8, 4, 3, limit=100)}
    yield Case("blocks", "DequantizeLinear", blocks, {"axis": 1, "block_size": 2}, since=21)


def ranging() -> Iterator[Case]:
    x = (RNG.normal(size=(2, 5)) * 3).astype(np.float32)
    ranges = {"mixed": x, "positive": abs(x), "negative": -abs(x), "zeros": x * 0, "equal": x * 0 + 2, "a scalar": x[0, 0]}
    for name, given in ranges.items():
        yield Case(name, "DynamicQuantizeLinear", {"x": np.asarray(given, np.float32)}, outputs=3, since=11)


def multiplying() -> Iterator[Case]:
    for left, right in ((U8, U8), (U8, I8), (I8, I8)):
        a, b = integers(left, 3, 4), integers(right, 4, 5)
        of_a, of_b, of_columns = integers(left, limit=100), integers(right, limit=100), integers(right, 5, limit=100)
        kinds = f"{left} by {right}"
        yield Case(f"{kinds}, no zero point", "MatMulInteger", {"a": a, "b": b})
        yield Case(kinds, "MatMulInteger", {"a": a, "b": b, "az": of_a, "bz": of_b})
        yield Case(f"{kinds}, columns", "MatMulInteger", {"a": a, "b": b, "az": of_a, "bz": of_columns})
        yield Case(f"{kinds}, stacked", "MatMulInteger", {"a": np.stack([a, a + 1]), "b": b, "az": of_a, "bz": of_b})
        plain = {"a": a, "as": scales(), "az": of_a, "b": b, "bs": scales(), "bz": of_b, "ys": scales() * 99, "yz": of_a}
        yield Case(kinds, "QLinearMatMul", plain)
        yield Case(f"{kinds}, columns", "QLinearMatMul", plain | {"bs": scales(5), "bz": of_columns})
        yield Case(f"{kinds}, stacked", "QLinearMatMul", plain | {"a": np.stack([a, a + 1]), "b": np.stack([b, b])})


SHAPES: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "plain": ((7, 6), {}),
    "padded": ((7, 6), {"pads": [1, 0, 1, 2], "strides": [2, 1]}),
    "dilated in groups": ((7, 6), {"dilations": [2, 2], "group": 2}),
    "same": ((7, 6), {"auto_pad": "SAME_UPPER", "strides": [2, 2]}),
    "of a line": ((9,), {"pads": [1, 1]}),
    "of a volume": ((4, 5, 4), {}),
}


def convolving() -> Iterator[Case]:
    for left, right in ((U8, U8), (U8, I8), (I8, I8)):
        for name, (extents, attributes) in SHAPES.items():
            x, w = integers(left, 2, 4, *extents), integers(right, 6, 4 // attributes.get("group", 1), *[3] * len(extents))
            of_x, of_w = integers(left, limit=100), integers(right, limit=100)
            kinds = f"{left} by {right}, {name}"
            yield Case(f"{kinds}, no zero point", "ConvInteger", {"x": x, "w": w}, attributes)
            yield Case(kinds, "ConvInteger", {"x": x, "w": w, "xz": of_x, "wz": of_w}, attributes)
            of_w = of_w * (right == U8)  # ONNX Runtime takes no other zero point of int8 filters
            given = {"x": x, "xs": scales(), "xz": of_x, "w": w, "ws": scales(), "wz": of_w, "ys": scales() + 1, "yz": of_x}
            given = {key: np.asarray(array, w.dtype if key == "wz" else array.dtype) for key, array in given.items()}
            bias = RNG.integers(-9999, 9999, 6).astype(np.int32)
            yield Case(kinds, "QLinearConv", given, attributes)
            yield Case(f"{kinds}, bias", "QLinearConv", given | {"bias": bias}, attributes)
            channels = given | {"ws": scales(6), "wz": np.full(6, given["wz"]), "bias": bias}
            yield Case(f"{kinds}, channels", "QLinearConv", channels, attributes)


CASES = [*quantising(), *dequantising(), *ranging(), *multiplying(), *convolving()]
OPERATORS = sorted({case.operator for case in CASES})


def model_of(case: Case, opset: int) -> onnx.ModelProto:
    node = helper.make_node(
        case.operator, list(case.inputs), [f"y{index}" for index in range(case.outputs)], name="quantised", **case.attributes
    )
    inputs = [value(name, array.shape, helper.np_dtype_to_tensor_dtype(array.dtype)) for name, array in case.arrays().items()]
    graph = helper.make_graph([node], "graph", inputs, [onnx.ValueInfoProto(name=name) for name in node.output])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)
    return onnx.shape_inference.infer_shapes(model)


def by_onnxruntime(model: onnx.ModelProto, inputs: Mapping[str, Array]) -> dict[str, Array]:
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(names, dict(inputs)), strict=True))


def by_the_reference(model: onnx.ModelProto, inputs: Mapping[str, Array]) -> dict[str, Array]:
    read = Model.from_onnx(model.SerializeToString())
    engine = ReferenceEngine()
    assert all(engine.supported_operations(read))
    return dict(engine.compile(read, CompileOptions()).run(inputs, {}, False).outputs)


@pytest.mark.parametrize("opset", OPSETS)
@pytest.mark.parametrize("operator", OPERATORS)
def test_a_quantised_operator_of_every_operator_set_gives_what_onnx_runtime_gives(operator: str, opset: int) -> None:
    compared = 0
    for case in CASES:
        if case.operator == operator and case.since <= opset:
            model = model_of(case, opset)
            wanted, made = by_onnxruntime(model, case.arrays()), by_the_reference(model, case.arrays())
            for name, array in wanted.items():
                assert (made[name].dtype, made[name].shape) == (array.dtype, array.shape), case.name
                np.testing.assert_array_equal(made[name], array, err_msg=case.name)
            compared += 1
    assert compared >= 6 or (operator, opset) == ("DynamicQuantizeLinear", 10)


@pytest.mark.parametrize("of_rows", [np.array([1, 0, 3], np.uint8), np.array([[1], [0], [3]], np.uint8)])
def test_a_zero_point_of_rows_belongs_to_the_rows(of_rows: Array) -> None:
    """ONNX Runtime has no zero points of rows, so the definition is written out here."""
    a, b = integers(U8, 3, 3), integers(U8, 3, 3)
    wanted = (a.astype(np.int32) - of_rows.reshape(3, 1)) @ b.astype(np.int32)
    case = Case("rows", "MatMulInteger", {"a": a, "b": b, "az": of_rows})
    np.testing.assert_array_equal(by_the_reference(model_of(case, 13), case.arrays())["y0"], wanted)
    one, nothing = np.array(1, np.float32), np.array(0, np.uint8)
    factors = np.array([1, 2, 4], np.float32).reshape(of_rows.shape)
    given: dict[str, Array] = {"a": a, "as": factors, "az": of_rows, "b": b, "bs": one, "bz": nothing, "ys": one, "yz": nothing}
    made = by_the_reference(model_of(Case("rows", "QLinearMatMul", given), 13), given)["y0"]
    np.testing.assert_array_equal(made, np.clip(wanted * factors.reshape(3, 1), 0, 255))


def test_filters_have_zero_points_of_their_channels() -> None:
    x, w = integers(U8, 1, 2, 4, 4), integers(U8, 2, 2, 3, 3)
    of_channels = np.array([3, 250], np.uint8)
    case = Case("channels", "ConvInteger", {"x": x, "w": w, "xz": integers(U8), "wz": of_channels})
    made = by_the_reference(model_of(case, 10), case.arrays())["y0"]
    for channel in range(2):
        alone = Case("one", "ConvInteger", dict(case.inputs) | {"w": w[channel : channel + 1], "wz": of_channels[channel].reshape(())})
        np.testing.assert_array_equal(made[:, channel : channel + 1], by_onnxruntime(model_of(alone, 10), alone.arrays())["y0"])


def test_an_operator_is_not_supported_in_an_operator_set_from_before_its_time() -> None:
    case = next(case for case in CASES if case.operator == "DynamicQuantizeLinear")
    model = model_of(case, 11)
    model.opset_import[0].version = 10
    read = Model.from_onnx(model.SerializeToString())
    assert list(ReferenceEngine().supported_operations(read)) == [False]
    with pytest.raises(CompilationError, match="no reference implementation of 'DynamicQuantizeLinear'"):
        ReferenceEngine().compile(read, CompileOptions())


@pytest.mark.parametrize("opset", [9, 13, 14, 15, 18])
def test_a_normalization_uses_the_mean_and_the_variance_that_it_is_given(opset: int) -> None:
    """Quantised models of convolutions hold them; below operator set 14, onnx uses those of the input."""
    inputs: dict[str, Array] = {"x": (RNG.normal(size=(1, 3, 5)) * 4 + 9).astype(np.float32)}
    inputs |= {name: scales(3) for name in "sbmv"}
    case = Case("normalization", "BatchNormalization", inputs)
    made, wanted = by_the_reference(model_of(case, opset), inputs), by_onnxruntime(model_of(case, opset), inputs)
    np.testing.assert_allclose(made["y0"], wanted["y0"], rtol=1e-5)


def test_a_body_and_a_function_of_the_model_may_hold_quantised_operators() -> None:
    """onnx hands operators of its caller's to bodies, and none to functions."""
    dequantise = helper.make_node("DequantizeLinear", ["x", "s"], ["d"], name="dequantise")
    function = helper.make_function("local", "Widen", ["x", "s"], ["d"], [dequantise], [helper.make_opsetid("", 13)])
    then = helper.make_graph([helper.make_node("Widen", ["x", "s"], ["t"], domain="local")], "then", [], [value("t", None)])
    otherwise = helper.make_graph([helper.make_node("DequantizeLinear", ["x", "s"], ["e"])], "else", [], [value("e", None)])
    choose = helper.make_node("If", ["c"], ["y"], name="choose", then_branch=then, else_branch=otherwise)
    inputs = [value("x", [3], TensorProto.UINT8), value("c", [], TensorProto.BOOL)]
    scale = numpy_helper.from_array(np.array(0.5, np.float32), "s")
    graph = helper.make_graph([choose], "graph", inputs, [value("y", [3])], [scale])
    imports = [helper.make_opsetid("", 13), helper.make_opsetid("local", 1)]
    model = helper.make_model(graph, opset_imports=imports, ir_version=8, functions=[function])
    for chosen in (True, False):
        made = by_the_reference(model, {"x": np.array([0, 1, 200], np.uint8), "c": np.array(chosen)})
        np.testing.assert_array_equal(made["y"], [0, 0.5, 100])


class OnePicture:
    """Calibrates a quantisation with one picture."""

    def __init__(self, name: str, picture: Array) -> None:
        self._pictures: list[dict[str, Array]] = [{name: picture}]

    def get_next(self) -> dict[str, Array] | None:
        return self._pictures.pop() if self._pictures else None

    def set_range(self, start_index: int, end_index: int) -> None:
        raise NotImplementedError


@pytest.mark.parametrize("as_operators", [False, True])
@pytest.mark.parametrize("per_channel", [False, True])
def test_a_real_model_that_was_quantised_gives_what_onnx_runtime_gives(per_channel: bool, as_operators: bool, tmp_path: Path) -> None:
    quantization = pytest.importorskip("onnxruntime.quantization")
    source, quantised = carried("upside_down"), tmp_path / "quantised.onnx"
    model = onnx.load(source)
    (name,) = [entry.name for entry in model.graph.input]
    picture = np.random.default_rng(3).uniform(-1, 1, (1, 3, 48, 192)).astype(np.float32)
    quantization.quantize_static(
        source,
        quantised,
        OnePicture(name, picture),
        quant_format=quantization.QuantFormat.QOperator if as_operators else quantization.QuantFormat.QDQ,
        per_channel=per_channel,
        op_types_to_quantize=["Conv", "MatMul"],
    )
    model = onnx.load(quantised)
    found = {node.op_type for node in model.graph.node}
    assert {"QLinearConv", "QuantizeLinear"} <= found if as_operators else {"QuantizeLinear", "DequantizeLinear"} <= found
    assert {entry.version for entry in model.opset_import if not entry.domain} <= set(range(10, 19))
    wanted, made = by_onnxruntime(model, {name: picture}), by_the_reference(model, {name: picture})
    for output, array in wanted.items():
        np.testing.assert_allclose(made[output], array, atol=1e-3)


def test_a_real_model_that_is_quantised_as_it_runs_gives_what_onnx_runtime_gives(tmp_path: Path) -> None:
    quantization = pytest.importorskip("onnxruntime.quantization")
    quantised = tmp_path / "quantised.onnx"
    quantization.quantize_dynamic(carried("upside_down"), quantised)
    model = onnx.load(quantised)
    assert {"DynamicQuantizeLinear", "ConvInteger"} <= {node.op_type for node in model.graph.node}
    picture = np.random.default_rng(3).uniform(-1, 1, (1, 3, 48, 192)).astype(np.float32)
    inputs = {model.graph.input[0].name: picture}
    wanted, made = by_onnxruntime(model, inputs), by_the_reference(model, inputs)
    for output, array in wanted.items():
        np.testing.assert_allclose(made[output], array, atol=1e-2)
