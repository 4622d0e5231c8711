"""Engines that run only the nodes whose names begin with a word of theirs, so that a model over several of them is cut.

Ask for one as "tests.runtime.partial_engines:OrtPart" (the tests' root must be on PYTHONPATH).
"""

from __future__ import annotations

from collections.abc import Sequence

from aionn.engines.onnxruntime import OnnxRuntimeEngine
from aionn.engines.reference import ReferenceEngine
from aionn.hal import Model
from aionn.testing.fake_engine import VARIABLE, FakeEngine

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


class RefPart(ReferenceEngine):
    name = "ref"

    def supported_operations(self, model: Model) -> Sequence[bool]:
        return _own("ref", model)


class OrtPart(OnnxRuntimeEngine):
    name = "ort"

    def supported_operations(self, model: Model) -> Sequence[bool]:
        return _own("ort", model)
