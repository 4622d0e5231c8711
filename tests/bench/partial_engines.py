"""Engines that run only some nodes, so that a model over two of them is cut. Asked for as "tests.bench.partial_engines:Front".

Even, Odd      compute nothing; the nodes whose names begin with "even" or "odd"
Front, Back    ONNX Runtime; Back has the nodes that AIONN_TEST_BENCH_BACK lists, and Front has the others
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from aionn.engines.onnxruntime import OnnxRuntimeEngine
from aionn.hal import Model, OptionValue
from tests.bench.empty_engine import EmptyEngine

BACK = "AIONN_TEST_BENCH_BACK"


class Even(EmptyEngine):
    name = "even"

    def supported_operations(self, model: Model, options: Mapping[str, OptionValue] = MappingProxyType({})) -> Sequence[bool]:
        return [operation.name.startswith(self.name) for operation in model.operations]


class Odd(Even):
    name = "odd"


class Front(OnnxRuntimeEngine):
    name = "front"
    own = False

    def supported_operations(self, model: Model, options: Mapping[str, OptionValue] = MappingProxyType({})) -> Sequence[bool]:
        back = set(json.loads(os.environ[BACK]))
        return [(operation.name in back) is self.own for operation in model.operations]


class Back(Front):
    name = "back"
    own = True
