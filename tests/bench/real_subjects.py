"""The models that `tests.bench.real` runs, with arrays for them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from aionn.testing.models import identity_model
from tests.real_models import carried

Inputs = dict[str, NDArray[Any]]
HEAVY_SIDE = 512
CPUS = len(os.sched_getaffinity(0))
"""What aionn's engine uses for models that are not tiny."""

PICTURE = (1, 1080, 1920, 3)
DETECTED = (1, 3, 384, 640)


@dataclass(frozen=True)
class Subject:
    """A model, arrays for it that take turns, and the number of threads that aionn's engine gives it."""

    name: str
    path: Path
    inputs: Sequence[Inputs]
    threads: int = 1


def silero_subject() -> Subject:
    random = np.random.default_rng(0)
    state = np.zeros((2, 1, 128), np.float32)
    sound = [(random.standard_normal((1, 576)) * 0.1).astype(np.float32) for _ in range(64)]
    return Subject("Silero", carried("silero"), [{"input": piece, "state": state} for piece in sound])


def identity_subject(directory: str) -> Subject:
    path = Path(directory, "identity.onnx")
    path.write_bytes(identity_model())
    random = np.random.default_rng(0)
    return Subject("identity 64 B", path, [{"input": random.random((1, 16), np.float32)} for _ in range(64)])


def heavy_model() -> bytes:
    """y = the sum of a matrix multiplied `count` times by another. Small enough for aionn's engine to give it one thread."""
    random = np.random.default_rng(0)
    weights = (random.standard_normal((HEAVY_SIDE, HEAVY_SIDE)) / HEAVY_SIDE**0.5).astype(np.float32)
    matrix = [HEAVY_SIDE, HEAVY_SIDE]
    body = helper.make_graph(
        [helper.make_node("MatMul", ["before", "weights"], ["after"]), helper.make_node("Identity", ["go"], ["goes"])],
        "body",
        [
            helper.make_tensor_value_info("number", TensorProto.INT64, []),
            helper.make_tensor_value_info("go", TensorProto.BOOL, []),
            helper.make_tensor_value_info("before", TensorProto.FLOAT, matrix),
        ],
        [helper.make_tensor_value_info("goes", TensorProto.BOOL, []), helper.make_tensor_value_info("after", TensorProto.FLOAT, matrix)],
    )
    nodes = [
        helper.make_node("Loop", ["count", "go on", "weights"], ["last"], body=body),
        helper.make_node("ReduceMean", ["last"], ["y"], keepdims=0),
    ]
    constants = [numpy_helper.from_array(weights, "weights"), numpy_helper.from_array(np.array(True), "go on")]
    given = [helper.make_tensor_value_info("count", TensorProto.INT64, [1])]
    made = [helper.make_tensor_value_info("y", TensorProto.FLOAT, [])]
    graph = helper.make_graph(nodes, "heavy", given, made, constants)
    content: bytes = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8).SerializeToString()
    return content


def picture_model() -> bytes:
    """Return a model that returns 6 MB of bytes unchanged."""
    return identity_model({"input": PICTURE}, np.uint8)


def _vision(name: str, path: Path, shape: tuple[int, ...], count: int, threads: int) -> Subject:
    random = np.random.default_rng(0)
    return Subject(name, path, [{"x": random.random(shape, np.float32)} for _ in range(count)], threads)


def orientation_subject() -> Subject:
    return _vision("orientation", carried("orientation"), (1, 3, 224, 224), 8, CPUS)


def classifier_subject() -> Subject:
    return _vision("cls", next(carried("detector").parent.glob("*_cls_*.onnx")), (1, 3, 48, 192), 8, CPUS)


def detector_subject() -> Subject:
    return _vision("det 384x640", carried("detector"), DETECTED, 2, CPUS)
