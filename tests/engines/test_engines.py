"""What every engine keeps to, on graphs small enough to see through."""

from __future__ import annotations

import gc
import mmap
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper

from aionn.engines.onnxruntime import OnnxRuntimeEngine
from aionn.engines.openvino import OpenVINOEngine
from aionn.engines.reference import ReferenceEngine
from aionn.errors import CallerError, CompilationError, DeviceUnavailableError
from aionn.hal import Artifact, CancelFlag, CompileOptions, Engine, ExecutionPreference, OperandType
from aionn.memory.region import Region
from aionn.runtime.model import Model
from tests.engines.onnx_graphs import branching, identity, matmul, model_of, returning_constants, value, weights

ENGINES: dict[str, Callable[[], Engine]] = {"onnxruntime": OnnxRuntimeEngine, "openvino": OpenVINOEngine, "reference": ReferenceEngine}


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest) -> Engine:
    make: Callable[[], Engine] = ENGINES[request.param]
    return make()


@pytest.fixture(params=[name for name in ENGINES if name != "reference"])
def storing_engine(request: pytest.FixtureRequest) -> Engine:
    make: Callable[[], Engine] = ENGINES[request.param]
    return make()


def read(model: onnx.ModelProto) -> Model:
    return Model.from_onnx(model.SerializeToString())


def test_an_engine_says_who_it_is(engine: Engine) -> None:
    assert engine.name in ENGINES
    assert engine.version
    assert engine.version == ENGINES[engine.name]().version


def test_the_modules_import_without_their_libraries_and_the_engine_says_what_is_missing() -> None:
    program = """if True:
        import sys
        sys.modules["openvino"] = sys.modules["onnxruntime"] = None
        from aionn.engines.openvino import OpenVINOEngine
        from aionn.engines.onnxruntime import OnnxRuntimeEngine
        from aionn.errors import DeviceUnavailableError
        for engine in (OpenVINOEngine, OnnxRuntimeEngine):
            try:
                engine()
            except DeviceUnavailableError as error:
                print(error.device, error)
    """
    lines = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.splitlines()
    assert lines[0].startswith("openvino device 'openvino' needs the package openvino")
    assert lines[0].endswith("pip install 'aionn[openvino]'")
    assert lines[1].startswith("onnxruntime device 'onnxruntime' needs the package onnxruntime")
    assert lines[1].endswith("pip install 'aionn[onnxruntime]'")
    assert issubclass(DeviceUnavailableError, Exception)


COMPLEX = (OperandType.COMPLEX64, OperandType.COMPLEX128)


@pytest.mark.parametrize("kind", [kind for kind in OperandType if kind.in_numpy and kind not in COMPLEX])
def test_every_element_type_passes_through(engine: Engine, kind: OperandType) -> None:
    executable = engine.compile(read(identity(helper.np_dtype_to_tensor_dtype(kind.dtype))), CompileOptions())
    x = (np.arange(6) % 2).astype(kind.dtype).reshape(2, 3)
    y = np.zeros_like(x)
    executable.run({"x": x}, {"y": y}, False)
    np.testing.assert_array_equal(y, x)
    returned = executable.run({"x": x}, {}, False).outputs["y"]
    assert returned.dtype == x.dtype
    np.testing.assert_array_equal(returned, x)
    assert not np.may_share_memory(returned, x)


def cast(source: int, target: int) -> onnx.ModelProto:
    """y = x in another element type, at an opset that has all of them."""
    node = helper.make_node("Cast", ["x"], ["y"], name="cast", to=target)
    graph = helper.make_graph([node], "cast", [value("x", ["N", 3], source)], [value("y", ["N", 3], target)])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 25)], ir_version=13)


TAKEN = {
    "onnxruntime": "bfloat16 float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu int4 uint4 int2 uint2",
    "openvino": "bfloat16 float8_e4m3fn float8_e5m2 float8_e8m0fnu float4_e2m1fn int4 uint4",
    "reference": " ".join(kind.value for kind in OperandType if not kind.in_numpy and kind is not OperandType.STRING),
}
"""The types without a NumPy dtype that an engine casts from and to float32."""


@pytest.mark.parametrize("rows", [0, 1, 3])
@pytest.mark.parametrize(
    "kind", [kind for kind in OperandType if not kind.in_numpy and kind is not OperandType.STRING], ids=lambda kind: kind.value
)
def test_a_type_that_numpy_lacks_is_taken_or_refused_in_a_sentence(engine: Engine, kind: OperandType, rows: int) -> None:
    number = helper.np_dtype_to_tensor_dtype(kind.dtype)
    numbers = np.array([1, 0, 1] * rows, np.float32).reshape(rows, 3)
    few = np.where(numbers, numbers, 1).astype(kind.dtype) if kind is OperandType.FLOAT8E8M0 else numbers.astype(kind.dtype)
    wide = few.astype(np.float32)
    for source, target, x, wanted in ((number, TensorProto.FLOAT, few, wide), (TensorProto.FLOAT, number, wide, few)):
        if kind.value not in TAKEN[engine.name].split():
            with pytest.raises(CompilationError):
                engine.compile(read(cast(source, target)), CompileOptions())
            continue
        executable = engine.compile(read(cast(source, target)), CompileOptions())
        artifact = engine.export(executable)
        for again in (executable, executable if artifact is None else engine.load(artifact, CompileOptions())):
            place = np.zeros_like(wanted)
            report = again.run({"x": x}, {"y": place}, False)
            got = report.outputs.get("y", place)  # an empty array may be replaced
            for returned in (got, again.run({"x": x}, {}, False).outputs["y"]):
                assert returned.dtype == wanted.dtype
                assert returned.shape == wanted.shape
                np.testing.assert_array_equal(returned.astype(np.float32), wanted.astype(np.float32))


PASSED_THROUGH = {
    "an input": ([], ["x"], ["x"]),
    "two inputs crossed": ([], ["x", "z"], ["z", "x"]),
    "an input that is used as well": ([helper.make_node("Neg", ["x"], ["y"])], ["x"], ["y", "x"]),
    "a sum of one": ([helper.make_node("Sum", ["x"], ["y"])], ["x"], ["y"]),
}


@pytest.mark.parametrize("stored", [False, True], ids=["compiled", "loaded"])
@pytest.mark.parametrize("what", PASSED_THROUGH)
def test_an_output_that_is_an_input_has_its_values(engine: Engine, what: str, stored: bool) -> None:
    nodes, inputs, outputs = PASSED_THROUGH[what]
    model = model_of(nodes, [value(name, (2, 3)) for name in inputs], [value(name, (2, 3)) for name in outputs])
    executable = engine.compile(read(model), CompileOptions())
    if stored and engine.name != "reference":
        artifact = engine.export(executable)
        assert artifact is not None
        executable = engine.load(artifact, CompileOptions())
    for number in range(1, 3):
        given = {name: np.full((2, 3), number * 10 + place, np.float32) for place, name in enumerate(inputs)}
        wanted = {"y": -given["x"] if nodes and nodes[0].op_type == "Neg" else given["x"], **given}
        places = {name: np.zeros((2, 3), np.float32) for name in outputs}
        executable.run(given, places, False)
        returned = executable.run(given, {}, False).outputs
        for name in outputs:
            np.testing.assert_array_equal(places[name], wanted[name])
            np.testing.assert_array_equal(returned[name], wanted[name])
            assert not any(np.may_share_memory(returned[name], array) for array in given.values())


@pytest.mark.parametrize("shape", [(), (0, 3), (1,)])
def test_scalars_and_empty_tensors_pass_through(engine: Engine, shape: tuple[int, ...]) -> None:
    declared: list[int | str | None] = ["N", 3] if shape == (0, 3) else list(shape)
    executable = engine.compile(read(identity(TensorProto.FLOAT, declared)), CompileOptions())
    x = np.full(shape, 5, np.float32)
    returned = executable.run({"x": x}, {}, False).outputs["y"]
    assert returned.shape == shape
    np.testing.assert_array_equal(returned, x)


def test_arrays_are_seen_anew_each_run_and_other_arrays_take_their_place(engine: Engine) -> None:
    executable = engine.compile(read(matmul()), CompileOptions())
    w = weights(8, 8)
    x, y = np.ones((2, 8), np.float32), np.empty((2, 8), np.float32)
    executable.run({"x": x}, {"y": y}, False)
    np.testing.assert_allclose(y, x @ w, rtol=1e-5, atol=1e-6)
    x *= 2
    executable.run({"x": x}, {"y": y}, False)
    np.testing.assert_allclose(y, x @ w, rtol=1e-5, atol=1e-6)
    for rows in (3, 1, 3):
        x, y = np.full((rows, 8), rows, np.float32), np.empty((rows, 8), np.float32)
        executable.run({"x": x}, {"y": y}, False)
        np.testing.assert_allclose(y, x @ w, rtol=1e-5, atol=1e-6)
        returned = executable.run({"x": x}, {}, False).outputs["y"]
        executable.run({"x": x * 5}, {}, False)
        np.testing.assert_allclose(returned, x @ w, rtol=1e-5, atol=1e-6)


def test_an_input_that_may_only_be_read_is_read(engine: Engine) -> None:
    executable = engine.compile(read(matmul()), CompileOptions())
    x = np.ones((2, 8), np.float32)
    x.flags.writeable = False
    for _ in range(2):
        np.testing.assert_allclose(executable.run({"x": x}, {}, False).outputs["y"], x @ weights(8, 8), rtol=1e-5, atol=1e-6)


def test_an_input_that_the_caller_changes_through_another_view_is_seen_anew(engine: Engine) -> None:
    """The driver's way: read-only views over memory that an app goes on writing to."""
    executable = engine.compile(read(matmul()), CompileOptions())
    for owner in (bytearray(64), np.zeros(16, np.float32)):
        written = np.frombuffer(owner, np.float32).reshape(2, 8)
        seen = np.frombuffer(owner, np.float32).reshape(2, 8)
        seen.flags.writeable = False
        for number in (1, 2):
            written[:] = number
            np.testing.assert_allclose(executable.run({"x": seen}, {}, False).outputs["y"], written @ weights(8, 8), rtol=1e-5, atol=1e-6)
        assert not seen.flags.writeable


def test_inputs_and_outputs_may_lie_in_shared_memory(engine: Engine) -> None:
    region = Region.allocate(4096)
    x = np.frombuffer(region.view(), np.float32, 16, 0).reshape(2, 8)
    y = np.frombuffer(region.view(), np.float32, 16, 1024).reshape(2, 8)
    x[:] = 3
    executable = engine.compile(read(matmul()), CompileOptions())
    assert dict(executable.run({"x": x}, {"y": y}, False).outputs) == {}
    with mmap.mmap(region.fileno(), 4096) as other_mapping:
        found = np.frombuffer(other_mapping[1024 : 1024 + 64], np.float32).reshape(2, 8)
    np.testing.assert_allclose(found, x @ weights(8, 8), rtol=1e-5, atol=1e-5)


def test_an_input_in_memory_mapped_read_only_is_seen_anew(engine: Engine, tmp_path: Path) -> None:
    path = tmp_path / "input"
    path.write_bytes(bytes(64))
    executable = engine.compile(read(matmul()), CompileOptions())
    seen = np.memmap(path, np.float32, "r", shape=(2, 8))
    written = np.memmap(path, np.float32, "r+", shape=(2, 8))
    for number in (1, 2):
        written[:] = number
        y = executable.run({"x": seen}, {}, False).outputs["y"]
        np.testing.assert_allclose(y, np.full((2, 8), number, np.float32) @ weights(8, 8), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("shape", [(1, 8), (5, 8), (16,), (1, 2, 8)])
def test_an_output_of_another_shape_than_its_array_comes_back_and_the_engine_stays_usable(engine: Engine, shape: tuple[int, ...]) -> None:
    executable = engine.compile(read(matmul()), CompileOptions())
    x = np.ones((2, 8), np.float32)
    for _ in range(2):
        report = executable.run({"x": x}, {"y": np.empty(shape, np.float32)}, False)
        np.testing.assert_allclose(report.outputs["y"], x @ weights(8, 8), rtol=1e-5, atol=1e-6)
        y = np.empty((2, 8), np.float32)
        assert executable.run({"x": x}, {"y": y}, False).outputs == {}
        np.testing.assert_allclose(y, x @ weights(8, 8), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("engine", ["onnxruntime", "reference"], indirect=True)  # OpenVINO answers such an index with zeros
def test_a_run_that_fails_with_arrays_of_the_right_shapes_fails_with_the_engines_own_words(engine: Engine) -> None:
    nodes = [helper.make_node("Gather", ["x", "i"], ["y"]), helper.make_node("Relu", ["x"], ["z"])]
    inputs = [value("x", ["N", 8]), value("i", [2], TensorProto.INT64)]
    executable = engine.compile(read(model_of(nodes, inputs, [value("y", [2, 8]), value("z", ["N", 8])])), CompileOptions())
    x = np.ones((3, 8), np.float32)
    with pytest.raises(Exception, match=r"(?i)index|bounds"):
        executable.run({"x": x, "i": np.array([0, 7])}, {"y": np.empty((2, 8), np.float32), "z": np.empty_like(x)}, False)


def test_nothing_but_the_next_run_holds_an_array_that_was_given(engine: Engine) -> None:
    executable = engine.compile(read(matmul()), CompileOptions())
    x, y = np.ones((2, 8), np.float32), np.empty((2, 8), np.float32)
    gone = [weakref.ref(x), weakref.ref(y)]
    executable.run({"x": x}, {"y": y}, False)
    del x, y
    executable.run({"x": np.ones((2, 8), np.float32)}, {"y": np.empty((2, 8), np.float32)}, False)
    gc.collect()
    assert [reference() for reference in gone] == [None, None]


@pytest.mark.parametrize("condition", [True, False])
def test_hoisted_constants_of_branches_are_used_also_after_export_and_load(engine: Engine, condition: bool) -> None:
    executable = engine.compile(read(branching()), CompileOptions())
    inputs = {"x": weights(2, 8, 5), "condition": np.array(condition)}
    expected = inputs["x"] @ weights(8, 8, 1 if condition else 2)
    np.testing.assert_allclose(executable.run(inputs, {}, False).outputs["y"], expected, rtol=1e-5, atol=1e-6)
    artifact = engine.export(executable)
    if artifact is not None:
        loaded = engine.load(artifact, CompileOptions())
        np.testing.assert_allclose(loaded.run(inputs, {}, False).outputs["y"], expected, rtol=1e-5, atol=1e-6)


def test_constants_may_be_outputs(engine: Engine) -> None:
    executable = engine.compile(read(returning_constants()), CompileOptions())
    for condition, expected in ((True, 1), (False, 2)):
        outputs = executable.run({"condition": np.array(condition)}, {}, False).outputs
        np.testing.assert_array_equal(outputs["y"], np.full(40, expected, np.float32))
        np.testing.assert_array_equal(outputs["z"], np.full(40, 3, np.float32))


def test_a_model_without_weights_survives_export_and_load(storing_engine: Engine) -> None:
    compiled = storing_engine.compile(read(identity(TensorProto.FLOAT)), CompileOptions())
    artifact = storing_engine.export(compiled)
    assert artifact is not None
    assert all(len(content) > 0 for content in (*artifact.model, *artifact.data))
    x = np.ones((2, 3), np.float32)
    np.testing.assert_array_equal(storing_engine.load(artifact, CompileOptions()).run({"x": x}, {}, False).outputs["y"], x)


@pytest.mark.parametrize("writable", [True, False])
def test_an_artifact_is_loaded_from_any_buffer_and_can_be_exported_again(storing_engine: Engine, writable: bool) -> None:
    artifact = storing_engine.export(storing_engine.compile(read(matmul(32, 32)), CompileOptions()))
    assert artifact is not None
    kind: Callable[[Any], Any] = (
        (lambda content: memoryview(bytearray(content))) if writable else (lambda content: memoryview(bytes(content)))
    )
    loaded = storing_engine.load(Artifact(tuple(map(kind, artifact.model)), tuple(map(kind, artifact.data))), CompileOptions())
    again = storing_engine.export(loaded)
    assert again is not None
    del loaded
    gc.collect()
    x = np.ones((2, 32), np.float32)
    result = storing_engine.load(again, CompileOptions()).run({"x": x}, {}, False).outputs["y"]
    np.testing.assert_allclose(result, x @ weights(32, 32), rtol=1e-5, atol=1e-5)


def test_only_its_own_executables_are_exported(storing_engine: Engine) -> None:
    foreign = ReferenceEngine().compile(read(matmul()), CompileOptions())
    with pytest.raises(CallerError, match="exports only what it has compiled itself"):
        storing_engine.export(foreign)


def test_an_artifact_of_another_make_is_refused(storing_engine: Engine) -> None:
    for artifact in (Artifact((), ()), Artifact((b"nonsense",), (b"nonsense",)), Artifact((b"a", b"b"), (b"c",))):
        with pytest.raises(CompilationError):
            storing_engine.load(artifact, CompileOptions())


def test_an_unknown_operation_is_told_by_name_before_and_while_compiling(engine: Engine) -> None:
    nodes = [helper.make_node("Relu", ["x"], ["a"]), helper.make_node("Frobnicate", ["a"], ["y"], domain="com.example")]
    model = read(model_of(nodes, [value("x", [2])], [value("y", [2])], domains=["com.example"]))
    assert list(engine.supported_operations(model)) == [True, False]
    with pytest.raises(CompilationError) as caught:
        engine.compile(model, CompileOptions())
    assert caught.value.node == "Frobnicate_1"
    assert caught.value.reason
    assert engine.name in str(caught.value) or engine.name == "reference"


def test_a_node_that_cannot_be_is_named(storing_engine: Engine) -> None:
    """Not the reference: it looks at shapes only when it runs."""
    nodes = [helper.make_node("Relu", ["x"], ["a"]), helper.make_node("Conv", ["a", "a"], ["y"], kernel_shape=[3])]
    with pytest.raises(CompilationError) as caught:
        storing_engine.compile(read(model_of(nodes, [value("x", [4])], [value("y", None)])), CompileOptions())
    assert caught.value.node == "Conv_1"


def test_what_nobody_waits_for_is_not_compiled(engine: Engine) -> None:
    cancelled = CancelFlag()
    cancelled.set()
    with pytest.raises(CompilationError) as caught:
        engine.compile(read(matmul()), CompileOptions(cancelled=cancelled))
    assert caught.value.reason == "cancelled"


@pytest.mark.parametrize("preference", list(ExecutionPreference))
@pytest.mark.parametrize("threads", [0, 1, 2])
def test_any_preference_and_number_of_threads_gives_the_same_answer(engine: Engine, preference: ExecutionPreference, threads: int) -> None:
    x: NDArray[np.float32] = np.ones((2, 8), np.float32)
    executable = engine.compile(read(matmul()), CompileOptions(preference=preference, threads=threads))
    np.testing.assert_allclose(executable.run({"x": x}, {}, False).outputs["y"], x @ weights(8, 8), rtol=1e-5, atol=1e-6)
