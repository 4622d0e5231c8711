"""Tiny ONNX models for tests, as bytes for `Model.from_onnx`.

`onnx` is imported only when a model is made, because the driver of the fake engine imports this package and makes none.

`check_engine` checks an engine on small ONNX graphs, or on the author's own models, with inputs and right outputs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from aionn.errors import CallerError
from aionn.hal.model import PooledModel
from aionn.testing.fake_engine import FAKE_DOMAIN

if TYPE_CHECKING:
    from onnx import GraphProto


OPSET = 17


def identity_model(
    shapes: Mapping[str, Sequence[int | str]] | None = None, dtype: DTypeLike = np.float32, *, outputs: Sequence[str] | None = None
) -> bytes:
    """Return a model that returns each input unchanged, with one Identity node per input.

    Args:
        shapes: shape by input name, where a string is an open dimension. Default: one input "input" of shape (1, 16).
        dtype: element type of all tensors.
        outputs: the names of the outputs. By default they are those of the inputs, followed by "_out".
    """
    from onnx import helper

    shapes = {"input": (1, 16)} if shapes is None else shapes
    element = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    names = list(outputs) if outputs is not None else [f"{name}_out" for name in shapes]
    graph = helper.make_graph(
        [helper.make_node("Identity", [name], [out], name=f"identity_{name}") for name, out in zip(shapes, names, strict=True)],
        "identity",
        [helper.make_tensor_value_info(name, element, list(shape)) for name, shape in shapes.items()],
        [helper.make_tensor_value_info(out, element, list(shape)) for out, shape in zip(names, shapes.values(), strict=True)],
    )
    return _serialized(graph)


Shape = Sequence[int | str]


def fake_model(
    inputs: Mapping[str, tuple[Shape, DTypeLike]] | None = None, outputs: Mapping[str, tuple[Shape, DTypeLike]] | None = None
) -> bytes:
    """Return a model with these inputs and outputs, which only the fake device runs. It answers zeros, or what `FakeDevice.answer` says.

    Args:
        inputs: (shape, element type) by name. A dimension that is a text, or 0, is open. Default: "x", float32 of shape (1, 16).
        outputs: the same for the outputs. An open dimension takes its extent from an input's dimension of the same name, else it is 1.
            Default: "y", float32 of shape (1, 16).

    Raises:
        CallerError: there are no outputs, or a shape has a negative dimension.

    Examples:
        >>> content = fake_model({"image": ((1, 3, 224, 224), "float32")}, {"boxes": ((1, "N", 4), "float32")})
        >>> model = aionn.Model.from_onnx(content)
    """
    from onnx import helper

    inputs = {"x": ((1, 16), np.float32)} if inputs is None else inputs
    outputs = {"y": ((1, 16), np.float32)} if outputs is None else outputs
    if not outputs:
        raise CallerError("fake_model got no outputs; give at least one, as (shape, element type) by name")
    given, made = ([_declared(name, shape, dtype) for name, (shape, dtype) in values.items()] for values in (inputs, outputs))
    node = helper.make_node("Fake", list(inputs), list(outputs), name="fake", domain=FAKE_DOMAIN)
    graph = helper.make_graph([node], "fake", given, made)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET), helper.make_opsetid(FAKE_DOMAIN, 1)], ir_version=8)
    content: bytes = model.SerializeToString()
    return content


def _declared(name: str, shape: Shape, dtype: DTypeLike) -> Any:
    from onnx import helper

    if any(isinstance(extent, int) and extent < 0 for extent in shape):
        raise CallerError(f"fake_model: {name!r} has the shape {tuple(shape)}; write 0 or a name for an open dimension")
    # ONNX leaves a dimension open by a name, and takes the number 0 for an empty axis.
    extents = [extent if extent != 0 else f"{name}_{axis}" for axis, extent in enumerate(shape)]
    return helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(np.dtype(dtype)), extents)


def _serialized(graph: GraphProto) -> bytes:
    from onnx import helper

    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=8)
    content: bytes = model.SerializeToString()
    return content


Arrays = Mapping[str, NDArray[Any]]


@dataclass(frozen=True, slots=True)
class CheckedModel:
    """A model, and what an engine must make of it.

    Attributes:
        name: for the texts of failures.
        model: from `aionn.Model.from_onnx` or `aionn.Model.from_bytes`.
        runs: sets of inputs, two at least, so that runs differ. Sets may differ in shape where the model is open.
        expected: the right outputs of each set. None for an ONNX model: the reference device computes them.
        tolerance: how far values may lie from the right ones, as a share of the largest right value.
    """

    name: str
    model: PooledModel
    runs: Sequence[Arrays]
    expected: Sequence[Arrays] | None = None
    tolerance: float = 1e-4
    _made: list[Sequence[Arrays]] = field(default_factory=list, repr=False, compare=False)

    def right(self, run: int) -> Arrays:
        """Return the right outputs of that set of inputs."""
        if self.expected is not None:
            return self.expected[run]
        if not self._made:
            self._made.append(_by_the_reference(self.model, self.runs))
        return self._made[0][run]


def _by_the_reference(model: PooledModel, runs: Sequence[Arrays]) -> Sequence[Arrays]:
    from aionn.engines.reference import ReferenceEngine
    from aionn.hal.engine import CompileOptions

    executable = ReferenceEngine().compile(model, CompileOptions())
    return [dict(executable.run(inputs, {}, False).outputs) for inputs in runs]


def standard_models() -> list[CheckedModel]:
    """Return small ONNX graphs of usual operators: weights, two outputs, integers, an open axis, scalars and a wrong declaration."""
    from onnx import TensorProto, helper

    random = np.random.default_rng(5)
    weights, bias = random.normal(size=(6, 3)).astype(np.float32), random.normal(size=3).astype(np.float32)
    large = random.normal(size=(64, 64)).astype(np.float32)
    node = helper.make_node

    def floats(*shape: int) -> NDArray[np.float32]:
        return random.normal(size=shape).astype(np.float32)

    def two(name: str, *shapes: tuple[int, ...]) -> list[Arrays]:
        return [{name: floats(*shape)} for shape in shapes]

    return [
        CheckedModel(
            "a dense layer",
            _model(
                [node("MatMul", ["x", "w"], ["m"]), node("Add", ["m", "b"], ["a"]), node("Relu", ["a"], ["y"])],
                {"x": [2, 6]},
                {"y": [2, 3]},
                {"w": weights, "b": bias},
            ),
            two("x", (2, 6), (2, 6)),
        ),
        CheckedModel(
            "large weights",
            _model([node("MatMul", ["x", "w"], ["y"])], {"x": [64, 64]}, {"y": [64, 64]}, {"w": large}),
            two("x", (64, 64), (64, 64)),
        ),
        CheckedModel(
            "two inputs and two outputs",
            _model([node("Add", ["p", "q"], ["s"]), node("Mul", ["p", "q"], ["t"])], {"p": [3], "q": [3]}, {"s": [3], "t": [3]}),
            [{"p": floats(3), "q": floats(3)}, {"p": floats(3), "q": floats(3)}],
        ),
        CheckedModel(
            "an open axis",
            _model([node("MatMul", ["x", "w"], ["m"]), node("Tanh", ["m"], ["y"])], {"x": ["N", 6]}, {"y": ["N", 3]}, {"w": weights}),
            two("x", (4, 6), (1, 6)),
        ),
        CheckedModel(
            "a scalar",
            _model([node("ReduceMax", ["x"], ["y"], keepdims=0)], {"x": [2, 3]}, {"y": []}),
            two("x", (2, 3), (2, 3)),
        ),
        CheckedModel(
            "a declared shape that is wrong",
            _model([node("Transpose", ["x"], ["y"], perm=[1, 0])], {"x": ["N", "M"]}, {"y": ["N", "M"]}),
            two("x", (2, 3), (4, 2)),
        ),
        CheckedModel(
            "integers",
            _model([node("Add", ["x", "x"], ["y"])], {"x": [4]}, {"y": [4]}, kind=TensorProto.INT32),
            [{"x": np.arange(4, dtype=np.int32)}, {"x": np.arange(4, dtype=np.int32) - 9}],
        ),
    ]


def unknown_operator() -> PooledModel:
    """Return a model with an operator that no engine has."""
    from onnx import helper

    nodes = [helper.make_node("Relu", ["x"], ["m"]), helper.make_node("NoSuchOperator", ["m"], ["y"], domain="aionn.testing.nowhere")]
    return _model(nodes, {"x": [3]}, {"y": [3]})


def _model(
    nodes: list[Any],
    inputs: Mapping[str, Sequence[int | str]],
    outputs: Mapping[str, Sequence[int | str]],
    constants: Mapping[str, NDArray[Any]] | None = None,
    kind: int = 1,
) -> PooledModel:
    from onnx import helper, numpy_helper

    import aionn

    def values(of: Mapping[str, Sequence[int | str]]) -> list[Any]:
        return [helper.make_tensor_value_info(name, kind, list(shape)) for name, shape in of.items()]

    initializers = [numpy_helper.from_array(array, name) for name, array in (constants or {}).items()]
    graph = helper.make_graph(nodes, "checked", values(inputs), values(outputs), initializers)
    domains = {node.domain for node in nodes if node.domain}
    imports = [helper.make_opsetid("", OPSET), *(helper.make_opsetid(domain, 1) for domain in domains)]
    return aionn.Model.from_onnx(helper.make_model(graph, opset_imports=imports, ir_version=8).SerializeToString())
