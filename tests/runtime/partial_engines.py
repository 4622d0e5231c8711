"""Engines that run only the nodes whose names begin with a word of theirs, so that a model over several of them is cut.

Ask for one as "tests.runtime.partial_engines:OrtPart" (the tests' root must be on PYTHONPATH).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from numpy.typing import NDArray

from aionn.engines.onnxruntime import OnnxRuntimeEngine
from aionn.engines.reference import ReferenceEngine
from aionn.hal import CompileOptions, ExecutionReport, Model, OptionValue
from aionn.testing.fake_engine import VARIABLE, FakeEngine, FakeExecutable

HERE = "tests.runtime.partial_engines"


def _own(word: str, model: Model) -> list[bool]:
    return [operation.name.startswith(word) for operation in model.operations]


class LeftFake(FakeEngine):
    name = "left"
    variable = f"{VARIABLE}_LEFT"

    def supported_operations(self, model: Model) -> Sequence[bool]:
        self.act("supported")
        return _own("left", model)


class RightFake(FakeEngine):
    name = "right"
    variable = f"{VARIABLE}_RIGHT"

    def supported_operations(self, model: Model) -> Sequence[bool]:
        self.act("supported")
        return _own("right", model)


class UntimedFake(RightFake):
    """It cannot say how long a run took on its device."""

    name = "untimed"

    def compile(self, model: Model, options: CompileOptions) -> FakeExecutable:
        return _Untimed(self, super().compile(model, options).operands, b"")


class _Untimed(FakeExecutable):
    def run(self, inputs: Mapping[str, NDArray[Any]], outputs: Mapping[str, NDArray[Any]], timing: bool) -> ExecutionReport:
        return super().run(inputs, outputs, False)


class RefPart(ReferenceEngine):
    name = "ref"

    def supported_operations(self, model: Model) -> Sequence[bool]:
        return _own("ref", model)


class OrtPart(OnnxRuntimeEngine):
    name = "ort"

    def supported_operations(self, model: Model, options: Mapping[str, OptionValue] = MappingProxyType({})) -> Sequence[bool]:
        return _own("ort", model)
