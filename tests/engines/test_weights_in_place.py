"""Weights of an artifact, used where they were verified: every way in which a graph may use them, again and again, changes none of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from onnx import ModelProto, TensorProto, helper

from aionn.engines.onnxruntime import OnnxRuntimeEngine
from aionn.engines.onnxruntime_artifact import WEIGHTS_FILE, with_weights_outside, without_notes
from aionn.hal import Artifact, CompileOptions
from aionn.runtime.model import Model
from tests.engines.onnx_graphs import body, model_of, value

Arrays = dict[str, NDArray[Any]]
N = 50_000


def random(*shape: int) -> NDArray[np.float32]:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)


def an_output_itself() -> tuple[ModelProto, Arrays]:
    nodes = [helper.make_node("Add", ["x", "c"], ["y"]), helper.make_node("Identity", ["c"], ["z"])]
    outputs = [value("y", [N]), value("z", [N]), value("c", [N])]
    return model_of(nodes, [value("x", [1])], outputs, {"c": random(N)}), {"x": random(1)}


def reshaped() -> tuple[ModelProto, Arrays]:
    nodes = [helper.make_node("Reshape", ["c", "shape"], ["z"]), helper.make_node("Mul", ["x", "z"], ["y"])]
    return model_of(nodes, [value("x", [1])], [value("y", [2, N // 2])], {"c": random(N), "shape": np.array([2, -1])}), {"x": random(1)}


def lstm() -> tuple[ModelProto, Arrays]:
    node = helper.make_node("LSTM", ["x", "w", "r"], ["y"], hidden_size=64)
    weights = {"w": random(1, 256, 64), "r": random(1, 256, 64)}
    return model_of([node], [value("x", [5, 1, 64])], [value("y", [5, 1, 1, 64])], weights), {"x": random(5, 1, 64)}


def shared_by_two_convolutions() -> tuple[ModelProto, Arrays]:
    nodes = [helper.make_node("Conv", ["x", "k"], ["a"], pads=[1, 1, 1, 1]), helper.make_node("ConvTranspose", ["a", "k"], ["y"])]
    inputs, outputs = [value("x", [1, 64, 8, 8])], [value("y", [1, 64, 10, 10])]
    return model_of(nodes, inputs, outputs, {"k": random(64, 64, 3, 3)}), {"x": random(1, 64, 8, 8)}


def integers() -> tuple[ModelProto, Arrays]:
    weights = np.random.default_rng(0).integers(-128, 127, (512, 512)).astype(np.int8)
    inputs, outputs = [value("x", [1, 512], TensorProto.INT8)], [value("y", [1, 512], TensorProto.INT32)]
    return model_of([helper.make_node("MatMulInteger", ["x", "q"], ["y"])], inputs, outputs, {"q": weights}), {"x": weights[:1]}


def half_precision() -> tuple[ModelProto, Arrays]:
    nodes = [
        helper.make_node("Cast", ["x"], ["a"], to=TensorProto.FLOAT16),
        helper.make_node("MatMul", ["a", "h"], ["b"]),
        helper.make_node("Cast", ["b"], ["y"], to=TensorProto.FLOAT),
    ]
    weights = {"h": random(512, 512).astype(np.float16)}
    return model_of(nodes, [value("x", [1, 512])], [value("y", [1, 512])], weights), {"x": random(1, 512)}


def transposed_and_looked_up() -> tuple[ModelProto, Arrays]:
    nodes = [
        helper.make_node("Gather", ["t", "rows"], ["g"]),
        helper.make_node("Transpose", ["t"], ["u"], perm=[1, 0]),
        helper.make_node("MatMul", ["g", "u"], ["y"]),
    ]
    inputs = [value("rows", [2], TensorProto.INT64)]
    return model_of(nodes, inputs, [value("y", [2, 1000])], {"t": random(1000, 256)}), {"rows": np.array([3, 999])}


@pytest.mark.parametrize("elements", [20_000, 400_000], ids=["weight", "table"])
def test_a_branch_has_its_own_constant_of_a_weights_name(elements: int) -> None:
    """ONNX Runtime would take what is handed over for a name in nested graphs too, where it is another's: 0, 1, 2 and not 100s."""
    then = body("then", [helper.make_node("Gather", ["w", "i"], ["t"])], "t", {"w": np.full(20, 100, np.float32)})
    other = body("else", [helper.make_node("Gather", ["x", "i"], ["e"])], "e")
    nodes = [
        helper.make_node("If", ["c"], ["y"], then_branch=then, else_branch=other),
        helper.make_node("Gather", ["w", "i"], ["z"]),
    ]
    inputs = [value("x", ["N"]), value("c", [], TensorProto.BOOL), value("i", ["K"], TensorProto.INT64)]
    content = model_of(nodes, inputs, [value("y", ["K"]), value("z", ["K"])], {"w": np.arange(elements, dtype=np.float32)})
    engine = OnnxRuntimeEngine()
    compiled = engine.compile(Model.from_onnx(content.SerializeToString()), CompileOptions())
    artifact = engine.export(compiled)
    assert artifact is not None
    given = {"x": np.zeros(3, np.float32), "c": np.array(True), "i": np.arange(3)}
    for executable in (compiled, engine.load(artifact, CompileOptions())):
        found = executable.run(given, {}, False).outputs
        np.testing.assert_array_equal(found["y"], np.full(3, 100, np.float32))
        np.testing.assert_array_equal(found["z"], np.arange(3, dtype=np.float32))


USES: list[Callable[[], tuple[ModelProto, Arrays]]] = [
    an_output_itself,
    reshaped,
    lstm,
    shared_by_two_convolutions,
    integers,
    half_precision,
    transposed_and_looked_up,
]


@pytest.mark.parametrize("use", USES, ids=lambda use: use.__name__)
def test_weights_give_what_the_compiled_model_gives_and_stay_what_they_are(use: Callable[[], tuple[ModelProto, Arrays]]) -> None:
    content, inputs = use()
    engine = OnnxRuntimeEngine()
    compiled = engine.compile(Model.from_onnx(content.SerializeToString()), CompileOptions())
    expected = dict(compiled.run(inputs, {}, False).outputs)
    artifact = engine.export(compiled)
    assert artifact is not None
    _, notes = without_notes(memoryview(artifact.model[0]))
    assert notes.weights
    assert notes.by_name
    # Writable, as the driver's own copy is: whatever wrote into it would be seen.
    weights = bytearray(artifact.data[0])
    loaded = engine.load(Artifact(artifact.model, (weights,)), CompileOptions())
    for _ in range(3):
        made = dict(loaded.run(inputs, {}, False).outputs)
        into = {name: np.full_like(array, 7) for name, array in expected.items()}
        loaded.run(inputs, into, False)
        for name, array in expected.items():
            np.testing.assert_array_equal(made[name], array)
            np.testing.assert_array_equal(into[name], array)
            made[name][...] = 3  # the caller's own
    assert weights == artifact.data[0]


def test_only_the_weights_that_are_lent_are_looked_for_in_a_file() -> None:
    graph = helper.make_graph([], "g", [], [])
    for name in ("lent", "kept"):
        tensor = graph.initializer.add(name=name, data_type=TensorProto.FLOAT, data_location=TensorProto.EXTERNAL, dims=[2])
        for key, entry in (("location", "weights"), ("offset", "8"), ("length", "16")):
            tensor.external_data.add(key=key, value=entry)
    changed = ModelProto.FromString(with_weights_outside(helper.make_model(graph).SerializeToString(), {"lent"}))
    lent, kept = ({entry.key: entry.value for entry in tensor.external_data} for tensor in changed.graph.initializer)
    assert lent == {"location": WEIGHTS_FILE, "offset": "8", "length": "16"}
    assert kept == {"location": "weights", "offset": "8", "length": "16"}


@pytest.mark.parametrize("use", USES, ids=lambda use: use.__name__)
def test_weights_whose_memory_is_given_back_are_used_no_more(use: Callable[[], tuple[ModelProto, Arrays]]) -> None:
    content, inputs = use()
    engine = OnnxRuntimeEngine()
    compiled = engine.compile(Model.from_onnx(content.SerializeToString()), CompileOptions())
    expected = dict(compiled.run(inputs, {}, False).outputs)
    artifact = engine.export(compiled)
    assert artifact is not None

    def scribble(part: memoryview) -> None:
        part[:] = b"\xff" * part.nbytes

    loaded = engine.load(Artifact(artifact.model, (bytearray(artifact.data[0]),)), CompileOptions(give_back=scribble))
    for executable in (loaded, loaded.share(), *loaded.lanes(2)):
        for name, array in executable.run(inputs, {}, False).outputs.items():
            np.testing.assert_array_equal(array, expected[name])
