"""The models on which `check_engine` checks an engine: small ONNX graphs, or the author's own models, with inputs and right outputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aionn.hal.model import Model
from aionn.testing.models import OPSET

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
    model: Model
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


def _by_the_reference(model: Model, runs: Sequence[Arrays]) -> Sequence[Arrays]:
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


def unknown_operator() -> Model:
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
) -> Model:
    from onnx import helper, numpy_helper

    import aionn

    def values(of: Mapping[str, Sequence[int | str]]) -> list[Any]:
        return [helper.make_tensor_value_info(name, kind, list(shape)) for name, shape in of.items()]

    initializers = [numpy_helper.from_array(array, name) for name, array in (constants or {}).items()]
    graph = helper.make_graph(nodes, "checked", values(inputs), values(outputs), initializers)
    domains = {node.domain for node in nodes if node.domain}
    imports = [helper.make_opsetid("", OPSET), *(helper.make_opsetid(domain, 1) for domain in domains)]
    return aionn.Model.from_onnx(helper.make_model(graph, opset_imports=imports, ir_version=8).SerializeToString())
