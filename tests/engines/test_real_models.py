"""Every engine on real models: the same numbers as ONNX Runtime called directly, again after export and load."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
from numpy.typing import NDArray

from aionn.engines.onnxruntime import TABLE_BYTES, OnnxRuntimeEngine
from aionn.engines.openvino import OpenVINOEngine
from aionn.engines.reference import ReferenceEngine
from aionn.graph.support import gather_tables
from aionn.hal import Artifact, CompileOptions, Engine, Executable
from aionn.memory.region import Region
from aionn.runtime.model import Model
from tests.real_models import carried, some_input

ENGINES: dict[str, Callable[[], Engine]] = {"onnxruntime": OnnxRuntimeEngine, "openvino": OpenVINOEngine, "reference": ReferenceEngine}
# Float32's own drift between kernels, with room: a wrong layout or precision is a hundred times off.
TOLERANCE = {"onnxruntime": 1e-6, "openvino": 2e-5, "reference": 1e-5}

# Not here: OpenVINO refuses silero_branching (rank unknown behind an If); onnx's reference fails on magika (AxisError)
# and needs minutes for the detector.
RUNS = [
    ("onnxruntime", "silero"),
    ("onnxruntime", "silero_branching"),
    ("onnxruntime", "orientation"),
    ("onnxruntime", "detector"),
    ("onnxruntime", "magika"),
    ("openvino", "silero"),
    ("openvino", "orientation"),
    ("openvino", "detector"),
    ("openvino", "magika"),
    ("reference", "silero"),
    ("reference", "silero_branching"),
]

Arrays = dict[str, NDArray[Any]]


def directly(name: str, inputs: Arrays) -> Arrays:
    """ONNX Runtime on the file itself, without anything of aionn."""
    session = ort.InferenceSession(carried(name), providers=["CPUExecutionProvider"])
    return dict(zip([output.name for output in session.get_outputs()], session.run(None, inputs), strict=True))


def inputs_for(name: str, model: Model, seed: int = 0) -> Arrays:
    extents: dict[str, Sequence[int]] = {
        "input": (1, 576),
        "state": (1,),
        "x": (1, 160, 224) if name == "detector" else (2,),
        "bytes": (2,),
    }
    arrays = {key: some_input(operand, *extents.get(key, ()), seed=seed) for key, operand in model.inputs.items()}
    if "sr" in arrays:
        arrays["sr"] = np.array(16000, np.int64)
    return arrays


def assert_close(found: Arrays, expected: Arrays, engine: str) -> None:
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        assert found[name].dtype == array.dtype
        np.testing.assert_allclose(found[name], array, rtol=0, atol=TOLERANCE[engine], err_msg=name)


@pytest.mark.parametrize(("engine_name", "model_name"), RUNS)
def test_an_engine_computes_what_onnx_runtime_does_and_its_artifact_computes_the_same(engine_name: str, model_name: str) -> None:
    model = Model.from_onnx(carried(model_name))
    engine = ENGINES[engine_name]()
    assert all(engine.supported_operations(model))
    compiled = engine.compile(model, CompileOptions())
    inputs = inputs_for(model_name, model)
    expected = directly(model_name, inputs)

    first = dict(compiled.run(inputs, {}, False).outputs)
    assert_close(first, expected, engine_name)

    into = {name: np.full_like(array, 7) for name, array in expected.items()}
    report = compiled.run(inputs, into, True)
    assert dict(report.outputs) == {}
    assert report.on_device_ns is not None
    assert report.on_device_ns > 0
    assert_close(into, expected, engine_name)

    artifact = engine.export(compiled)
    if engine.cache_files.supported:
        assert artifact is not None
        assert (len(artifact.model), len(artifact.data)) == (engine.cache_files.model, engine.cache_files.data)
        assert all(len(content) > 0 for content in (*artifact.model, *artifact.data))
        loaded = engine.load(artifact, CompileOptions())
        # Bit for bit: a load that computes anything else than what was compiled is a broken cache.
        for name, array in loaded.run(inputs, {}, False).outputs.items():
            np.testing.assert_array_equal(array, first[name])
    else:
        assert artifact is None


@pytest.mark.parametrize("engine_name", ENGINES)
def test_recurrent_state_fed_back_over_frames_gives_what_onnx_runtime_gives(engine_name: str) -> None:
    model = Model.from_onnx(carried("silero"))
    executable = ENGINES[engine_name]().compile(model, CompileOptions())
    session = ort.InferenceSession(carried("silero"), providers=["CPUExecutionProvider"])
    state: NDArray[Any] = np.zeros((2, 1, 128), np.float32)
    expected_state = state
    for seed in range(8):
        frame: Any = some_input(model.inputs["input"], seed=seed).astype(np.float32) - np.float32(0.5)
        expected, expected_state = session.run(None, {"input": frame, "state": expected_state})
        outputs = {"output": np.empty((1, 1), np.float32), "stateN": np.empty((2, 1, 128), np.float32)}
        executable.run({"input": frame, "state": state}, outputs, False)
        state = outputs["stateN"]
        np.testing.assert_allclose(outputs["output"], expected, rtol=0, atol=1e-4)
    np.testing.assert_allclose(state, expected_state, rtol=0, atol=1e-4)


@pytest.mark.parametrize("engine_name", ["onnxruntime", "openvino"])
def test_shapes_may_change_from_run_to_run_given_or_not(engine_name: str) -> None:
    model = Model.from_onnx(carried("detector"))
    executable = ENGINES[engine_name]().compile(model, CompileOptions())
    session = ort.InferenceSession(carried("detector"), providers=["CPUExecutionProvider"])
    for height, width, given in [(64, 96, False), (96, 64, True), (64, 96, True), (128, 64, False), (96, 96, True)]:
        x = some_input(model.inputs["x"], 1, height, width)
        (expected,) = session.run(None, {"x": x})
        assert_close(run(executable, {"x": x}, expected.shape if given else None), {"fetch_name_0": expected}, engine_name)


def run(executable: Executable, inputs: Arrays, shape: tuple[int, ...] | None) -> Arrays:
    outputs = {} if shape is None else {"fetch_name_0": np.empty(shape, np.float32)}
    return {**outputs, **executable.run(inputs, outputs, False).outputs}


@pytest.mark.parametrize("model_name", ["silero", "silero_branching", "detector", "orientation", "magika"])
def test_an_artifact_whose_memory_is_given_back_computes_the_same_bits(model_name: str) -> None:
    """ONNX Runtime lays some weights out anew, and their memory goes. All others must stay."""
    model = Model.from_onnx(carried(model_name))
    engine = ENGINES["onnxruntime"]()
    artifact = engine.export(engine.compile(model, CompileOptions()))
    assert artifact is not None
    inputs = inputs_for(model_name, model)
    kept = engine.load(artifact, CompileOptions())
    given: list[int] = []

    def scribble(part: memoryview) -> None:
        """Do worse than the system does, so that every later use shows."""
        given.append(part.nbytes)
        part[:] = b"\xff" * part.nbytes

    released = engine.load(Artifact(artifact.model, (bytearray(artifact.data[0]),)), CompileOptions(give_back=scribble))
    assert engine.export(released) is None
    for _ in range(2):
        expected = kept.run(inputs, {}, False).outputs
        for name, array in released.run(inputs, {}, False).outputs.items():
            np.testing.assert_array_equal(array, expected[name])
    assert sum(given) <= len(artifact.data[0])
    # Convolutions find their weights stored as their kernels want them. Weights of nested graphs are parts of the graph.
    assert bool(given) == (model_name in ("silero", "magika"))


@pytest.mark.parametrize("may_export", [False, True], ids=["no_cache", "miss"])
@pytest.mark.parametrize("model_name", ["silero", "silero_branching", "detector", "orientation", "magika"])
def test_a_compiled_model_needs_its_constants_no_more(model_name: str, may_export: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """ONNX Runtime documents that it copies constants, so a driver frees them. Only tables are used in place."""
    monkeypatch.setattr(Region, "freeze", lambda region: None)  # frozen, they could not be overwritten
    model = Model.from_onnx(carried(model_name))
    engine = ENGINES["onnxruntime"]()
    inputs = inputs_for(model_name, model)
    executable = engine.compile(model, CompileOptions(may_export=may_export))
    expected = dict(executable.run(inputs, {}, False).outputs)
    tables = gather_tables(model, TABLE_BYTES)
    overwritten = [constant.location for constant in model.constants if constant.name not in tables]
    for place in overwritten:
        model.pools[place.pool_index].view()[place.offset : place.offset + place.length] = b"\xff" * place.length
    assert overwritten
    for name, array in executable.run(inputs, {}, False).outputs.items():
        np.testing.assert_array_equal(array, expected[name])
