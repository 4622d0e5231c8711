"""Engines that run only some operators, for plans. They compute as the reference does, cache, and take orders as the fake device does.

Use them as drivers: `FakeDevice(AddEngine)`. A large constant stays in the stored graph.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import msgspec
import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from aionn.engines.reference import ReferenceExecutable
from aionn.graph.constants import embed_constants
from aionn.hal import Artifact, CompileOptions, DeviceType, Executable, ExecutionReport, Model
from aionn.testing import FakeDevice
from aionn.testing.fake_engine import VARIABLE, FakeEngine


class PartialEngine(FakeEngine):
    """Runs the operators that `operators` names, or all if it names none."""

    operators: frozenset[str] = frozenset()
    device_type = DeviceType.ACCELERATOR

    def supported_operations(self, model: Model) -> Sequence[bool]:
        self.act("supported")
        return [not self.operators or operation.op_type in self.operators for operation in model.operations]

    def compile(self, model: Model, options: CompileOptions) -> PartialExecutable:  # type: ignore[override]
        self.act("compile", options)
        missing = [operation.name for operation in model.operations if self.operators and operation.op_type not in self.operators]
        assert not missing, f"{self.name} was given {missing}"
        return PartialExecutable(self, embed_constants(model).SerializeToString(), {n: o.type.value for n, o in model.outputs.items()})

    def export(self, executable: Executable) -> Artifact | None:
        assert isinstance(executable, PartialExecutable)
        if self.act("export").decline:
            return None
        return Artifact((msgspec.msgpack.encode((executable.graph, executable.types)),), (b"data",))

    def load(self, artifact: Artifact, options: CompileOptions) -> PartialExecutable:  # type: ignore[override]
        self.act("load", options)
        return PartialExecutable(self, *msgspec.msgpack.decode(artifact.model[0], type=tuple[bytes, dict[str, str]]))


class PartialExecutable:
    def __init__(self, engine: PartialEngine, graph: bytes, types: Mapping[str, str]) -> None:
        self.graph, self.types = bytes(graph), dict(types)
        self._engine = engine
        dtypes = {name: np.dtype(kind) for name, kind in types.items()}
        self._inner = ReferenceExecutable(ReferenceEvaluator(onnx.ModelProto.FromString(self.graph)), dtypes)

    def lanes(self, count: int) -> list[PartialExecutable]:
        return [self] * count

    def run(self, inputs: Mapping[str, NDArray[Any]], outputs: Mapping[str, NDArray[Any]], timing: bool) -> ExecutionReport:
        self._engine.act("run")
        return self._inner.run(inputs, outputs, timing)


class AddEngine(PartialEngine):
    name = "adds"
    variable = f"{VARIABLE}_ADD"
    operators = frozenset({"Add", "Sub"})


class MulEngine(PartialEngine):
    name = "muls"
    variable = f"{VARIABLE}_MUL"
    operators = frozenset({"Mul", "Div"})


class WholeEngine(PartialEngine):
    name = "whole"
    variable = f"{VARIABLE}_WHOLE"


class CpuAddEngine(AddEngine):
    name = "cpu_adds"
    variable = f"{VARIABLE}_CPU_ADD"
    device_type = DeviceType.CPU


class CpuMulEngine(MulEngine):
    name = "cpu_muls"
    variable = f"{VARIABLE}_CPU_MUL"
    device_type = DeviceType.CPU


class CpuWholeEngine(WholeEngine):
    name = "cpu_whole"
    variable = f"{VARIABLE}_CPU_WHOLE"
    device_type = DeviceType.CPU


@contextmanager
def drivers(*engines: type[FakeEngine]) -> Iterator[list[FakeDevice]]:
    """Steer several engines."""
    with ExitStack() as stack:
        yield [stack.enter_context(FakeDevice(engine)) for engine in engines]


WEIGHTS = np.linspace(0.5, 1.5, 64, dtype=np.float32).reshape(1, 64)


def three_step_model(operators: Sequence[str] = ("Add", "Mul", "Sub")) -> bytes:
    """Return y = ((x + w) * w) - w over 64 numbers, with a large constant, and with other operators if they are given."""
    nodes = []
    read = "x"
    for index, operator in enumerate(operators):
        made = "y" if index == len(operators) - 1 else f"t{index}"
        nodes.append(helper.make_node(operator, [read, "w"], [made], name=f"{operator.lower()}_{index}"))
        read = made
    kind = onnx.TensorProto.FLOAT
    graph = helper.make_graph(
        nodes,
        "three",
        [helper.make_tensor_value_info("x", kind, [1, 64])],
        [helper.make_tensor_value_info("y", kind, [1, 64])],
        [numpy_helper.from_array(WEIGHTS, "w")],
    )
    content: bytes = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8).SerializeToString()
    return content


def expected(x: NDArray[Any]) -> NDArray[Any]:
    """Return what `three_step_model` computes."""
    return (x + WEIGHTS) * WEIGHTS - WEIGHTS
