"""The models that `tests.bench.starts` starts. Those that no package carries are made by `python -m tests.bench.starts_models DIR NAME...`.

A process apart makes them, so that the memory of the bench stays small.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
from onnx.external_data_helper import set_external_data

from tests.bench.resnet import resnet50
from tests.bench.rivals import ROOT
from tests.real_models import carried

CPUS = len(os.sched_getaffinity(0))
WIDTH, TOKENS = 1024, 64
LAYERS = 10
"""Of the transformer: 12 * WIDTH * WIDTH weights each, which is 503 MB in all."""

DENSE_WIDTH, DENSE_LAYERS = 2048, 8
"""Of the dense model: DENSE_WIDTH * DENSE_WIDTH weights each, which is 134 MB in all."""

LARGE_LAYERS = 4
TABLE_ROWS = 540_000
"""Of the large model's table, which is 2.2 GB and which only Gather reads."""

CHUNK_ROWS = 4096


@dataclass(frozen=True)
class Subject:
    """A model's file, the type and the shape of each input, and the number of threads that aionn's engine gives it."""

    name: str
    path: Path
    inputs: dict[str, tuple[str, tuple[int, ...]]]
    threads: int = CPUS

    @property
    def size_bytes(self) -> int:
        """Bytes of the file and of the data beside it."""
        return sum(file.stat().st_size for file in (self.path, self.path.with_suffix(".data")) if file.exists())


CARRIED: dict[str, tuple[dict[str, tuple[str, tuple[int, ...]]], int]] = {
    "silero": ({"input": ("float32", (1, 576)), "state": ("float32", (2, 1, 128))}, 1),
    "detector": ({"x": ("float32", (1, 3, 384, 640))}, CPUS),
    "orientation": ({"x": ("float32", (1, 3, 224, 224))}, CPUS),
    "magika": ({"bytes": ("int32", (1, 2048))}, CPUS),
}
MADE: dict[str, dict[str, tuple[str, tuple[int, ...]]]] = {
    "resnet50": {"input": ("float32", (1, 3, 224, 224))},
    "transformer": {"x": ("float32", (1, TOKENS, WIDTH))},
    "dense": {"x": ("float32", (1, DENSE_WIDTH))},
    "large": {"ids": ("int64", (1, TOKENS))},
}
MODELS = (*CARRIED, "resnet50", "transformer")
"""Those that `starts` starts unless others are named. `tests.bench.service` starts the dense one."""

LARGE = "large"


def subjects(names: tuple[str, ...], directory: Path) -> list[Subject]:
    """Return the models of those names, in that order. Those which nothing carries are made in the directory unless they are there."""
    absent = [name for name in names if name in MADE and not (directory / f"{name}.onnx").exists()]
    if absent:
        subprocess.run([sys.executable, "-m", "tests.bench.starts_models", str(directory), *absent], cwd=ROOT, check=True)
    found = []
    for name in names:
        if name in MADE:
            found.append(Subject(name, directory / f"{name}.onnx", MADE[name]))
        else:
            inputs, threads = CARRIED[name]
            found.append(Subject(name, carried(name), inputs, threads))
    return found


class _Blocks:
    """Blocks of a transformer, each with attention and two dense layers. A cheap generator makes the weights."""

    def __init__(self) -> None:
        self._random = np.random.default_rng(0)
        self.nodes: list[Any] = []
        self.weights: list[tuple[str, NDArray[Any]]] = []

    def node(self, operator: str, *inputs: str, **attributes: Any) -> str:
        output = f"{operator.lower()}{len(self.nodes)}"
        self.nodes.append(helper.make_node(operator, list(inputs), [output], name=output, **attributes))
        return output

    def weight(self, *shape: int, around: float = 0.0) -> str:
        name = f"w{len(self.weights)}"
        spread = np.float32(2 / shape[0] ** 0.5)
        self.weights.append((name, (self._random.random(shape, np.float32) - np.float32(0.5)) * spread + np.float32(around)))
        return name

    def normal(self, x: str) -> str:
        return self.node("LayerNormalization", x, self.weight(WIDTH, around=1.0), self.weight(WIDTH))

    def block(self, x: str) -> str:
        y = self.normal(x)
        query, key, value = (self.node("MatMul", y, self.weight(WIDTH, WIDTH)) for _ in range(3))
        scores = self.node("MatMul", query, self.node("Transpose", key, perm=[0, 2, 1]))
        seen = self.node("MatMul", self.node("Softmax", self.node("Div", scores, "width"), axis=-1), value)
        x = self.node("Add", x, self.node("MatMul", seen, self.weight(WIDTH, WIDTH)))
        y = self.node("Relu", self.node("MatMul", self.normal(x), self.weight(WIDTH, 4 * WIDTH)))
        return self.node("Add", x, self.node("MatMul", y, self.weight(4 * WIDTH, WIDTH)))

    def model(self, x: str, given: Any, constants: list[Any]) -> bytes:
        """Serialize all nodes, with the end of the last block `x` as the output."""
        self.nodes.append(helper.make_node("Identity", [x], ["y"]))
        made = helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, TOKENS, WIDTH])
        width = numpy_helper.from_array(np.array(WIDTH**0.5, np.float32), "width")
        graph = helper.make_graph(self.nodes, "transformer", [given], [made], [*constants, width])
        content: bytes = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8).SerializeToString()
        return content


def transformer() -> bytes:
    """x f32[1,64,1024] -> y f32[1,64,1024], with all weights inside the file."""
    build = _Blocks()
    x = "x"
    for _ in range(LAYERS):
        x = build.block(x)
    x = build.normal(x)
    given = helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, TOKENS, WIDTH])
    return build.model(x, given, [numpy_helper.from_array(array, name) for name, array in build.weights])


def dense() -> bytes:
    """x f32[1,2048] -> y f32[1,2048], by a matrix for each layer."""
    random = np.random.default_rng(0)
    spread = np.float32(2 / DENSE_WIDTH**0.5)
    nodes, weights = [], []
    for layer in range(DENSE_LAYERS):
        values = (random.random((DENSE_WIDTH, DENSE_WIDTH), np.float32) - np.float32(0.5)) * spread
        weights.append(numpy_helper.from_array(values, f"w{layer}"))
        made = "y" if layer == DENSE_LAYERS - 1 else f"x{layer + 1}"
        nodes.append(helper.make_node("MatMul", [f"x{layer}" if layer else "x", f"w{layer}"], [made]))
    given, output = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, DENSE_WIDTH]) for name in "xy")
    graph = helper.make_graph(nodes, "dense", [given], [output], weights)
    content: bytes = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8).SerializeToString()
    return content


def make_large(path: Path) -> None:
    """Write ids i64[1,64] -> y f32[1,64,1024], with its weights and its table in a file beside it."""
    build = _Blocks()
    x = build.node("Gather", "table", "ids")
    for _ in range(LARGE_LAYERS):
        x = build.block(x)
    x = build.normal(x)
    constants = []
    beside = path.with_suffix(".data")
    with open(beside, "wb") as file:

        def placed(name: str, shape: tuple[int, ...], start: int) -> Any:
            tensor = TensorProto(name=name, data_type=TensorProto.FLOAT, dims=shape)
            tensor.raw_data = b"-"  # `set_external_data` wants some
            set_external_data(tensor, beside.name, offset=start, length=file.tell() - start)
            tensor.ClearField("raw_data")
            return tensor

        rows = np.random.default_rng(1).random((CHUNK_ROWS, WIDTH), np.float32)
        for first in range(0, TABLE_ROWS, CHUNK_ROWS):
            rows[:, 0] = first  # no two pieces of the table are alike
            file.write(rows[: TABLE_ROWS - first].tobytes())
        constants.append(placed("table", (TABLE_ROWS, WIDTH), 0))
        for name, array in build.weights:
            file.write(bytes(-file.tell() % 4096))
            start = file.tell()
            file.write(array.tobytes())
            constants.append(placed(name, array.shape, start))
    path.write_bytes(build.model(x, helper.make_tensor_value_info("ids", TensorProto.INT64, [1, TOKENS]), constants))


def make(directory: Path, name: str) -> None:
    """Write the model of that name. Its last act is a rename, so an interrupted run leaves no half of a model."""
    path = directory / f"{name}.onnx"
    if name == LARGE:
        make_large(path)
        return
    part = path.with_suffix(".part")
    part.write_bytes({"resnet50": resnet50, "transformer": transformer, "dense": dense}[name]())
    part.rename(path)


if __name__ == "__main__":
    for _name in sys.argv[2:]:
        make(Path(sys.argv[1]), _name)
