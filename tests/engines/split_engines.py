"""Engines that run a part of a model each, so that a model over both is cut: "tests.engines.split_engines:Left", and "Right".

The first word of a node's name says which of them runs it: "left", "right", or "both".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from aionn.engines.onnxruntime import OnnxRuntimeEngine
from aionn.hal import Model, OptionValue
from aionn.hal.options import NO_OPTIONS

LEFT, RIGHT = "tests.engines.split_engines:Left", "tests.engines.split_engines:Right"


class Left(OnnxRuntimeEngine):
    name = "left"

    def supported_operations(self, model: Model, options: Mapping[str, OptionValue] = NO_OPTIONS) -> Sequence[bool]:
        return [operation.name.partition(" ")[0] in (self.name, "both") for operation in model.operations]


class Right(Left):
    name = "right"
