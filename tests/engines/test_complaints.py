"""What an engine says of a run that failed: one sentence that names the node, without places of its source and names of its exceptions."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper

from aionn.engines.complaints import onnxruntime_failure, openvino_failure
from aionn.errors import ExecutionError
from aionn.hal import CompileOptions, Engine
from tests.engines.onnx_graphs import model_of, value
from tests.engines.test_engines import engine as engine  # a fixture
from tests.engines.test_engines import read

RUNS: dict[str, tuple[list[Any], dict[str, NDArray[Any]], str]] = {
    "reshape": (
        [helper.make_node("Reshape", ["x", "z"], ["y"], name="node")],
        {"x": np.zeros(6, np.float32), "z": np.array([4, 4])},
        "6",
    ),
    "product": (
        [helper.make_node("MatMul", ["x", "z"], ["y"], name="node")],
        {"x": np.zeros((2, 3), np.float32), "z": np.zeros((4, 5), np.float32)},
        "",
    ),
    "sum": ([helper.make_node("Add", ["x", "z"], ["y"], name="node")], {"x": np.zeros(3, np.float32), "z": np.zeros(2, np.float32)}, ""),
    "negative": (
        [helper.make_node("Pad", ["x", "z"], ["y"], name="node")],
        {"x": np.zeros(3, np.float32), "z": np.array([-9, -9])},
        "negative|must be >= 0|overflow|shape",
    ),
    "join": (
        [helper.make_node("Concat", ["x", "z"], ["y"], name="node", axis=0)],
        {"x": np.zeros((2, 3), np.float32), "z": np.zeros((4, 5), np.float32)},
        "axis",
    ),
}
NOISE = (
    "onnxruntime_src",
    "src/",
    ".cpp",
    ".h:",
    ".cc",
    "ONNXRuntimeError",
    "Exception",
    "INVALID_ARGUMENT",
    "FAIL",
    "Error:",
    "<class",
    "::",
    "\n",
)


@pytest.mark.parametrize("given", [False, True], ids=["engine's outputs", "outputs in place"])
@pytest.mark.parametrize("what", RUNS)
def test_a_failed_run_is_one_plain_sentence(engine: Engine, what: str, given: bool) -> None:
    nodes, inputs, words = RUNS[what]
    borders = [
        value(name, [2], TensorProto.INT64) if array.dtype == np.int64 else value(name, [f"{name}{axis}" for axis in range(array.ndim)])
        for name, array in inputs.items()
    ]
    rank = 1 if what in ("sum", "negative") else 2
    executable = engine.compile(read(model_of(nodes, borders, [value("y", [f"y{axis}" for axis in range(rank)])])), CompileOptions())
    outputs = {"y": np.zeros((4,) * rank, np.float32)} if given else {}
    for _ in range(2):
        with pytest.raises(ExecutionError) as caught:
            executable.run(inputs, outputs, False)
        said = str(caught.value)
        assert len(said) > 20
        assert re.search(words, said)
        assert not [noise for noise in NOISE if noise in said], said
        if engine.name != "reference":
            assert "node" in said


SAID = {
    "[ONNXRuntimeError] : 2 : INVALID_ARGUMENT : Got invalid dimensions for input: x for the following indices\n index: 0 Got: 3": (
        "Got invalid dimensions for input: x for the following indices index: 0 Got: 3"
    ),
    "[ONNXRuntimeError] : 1 : FAIL : Non-zero status code returned while running Foo node. Name:'a b' Status Message: /src/x/arena.cc:360 "
    "void* ort::Arena::Get(size_t, bool, ort::Stream*) Failed to get 5 bytes\n": "Foo node 'a b': Failed to get 5 bytes",
    "[ONNXRuntimeError] : 1 : FAIL : Non-zero status code returned while running Foo node. Name:'' Status Message: helper.h:59 Compute "
    "dimensions differ": "Foo node '': dimensions differ",
    "[ONNXRuntimeError] : 6 : RUNTIME_EXCEPTION : Non-zero status code returned while running Foo node. Name:'n' Status Message: "
    "/src/a.cc:1 void f(int) axis == 1 was false. ": "Foo node 'n': axis == 1 was false.",
    "Error in execution: Got invalid dimensions": "Got invalid dimensions",
    "": "the library gave no reason",
}


@pytest.mark.parametrize("said", SAID)
def test_onnx_runtime_is_quoted_without_its_source(said: str) -> None:
    assert str(onnxruntime_failure(RuntimeError(said))) == SAID[said]


def test_openvino_is_quoted_without_its_source() -> None:
    said = (
        "Exception from src/a.cpp:224:\nException from src/b.cpp:7:\n[CPU] Add node with name 'y' Check 'a == 1' failed at src/c.cpp:5:\n"
    )
    assert str(openvino_failure(RuntimeError(said + "[cpu]add: dims differ\n\n\n"))) == "Add node with name 'y': add: dims differ"
    assert str(openvino_failure(RuntimeError("Exception from src/a.cpp:224:\n"))) == "the library gave no reason"
