"""The reference engine with a slow run for each input that has the number 7 in it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from numpy.typing import NDArray

from aionn.engines.reference import ReferenceEngine, ReferenceExecutable
from aionn.hal import CompileOptions, ExecutionReport
from aionn.hal.model import PooledModel

RUN_S = 5.0


class SlowEngine(ReferenceEngine):
    name = "slow"

    def compile(self, model: PooledModel, options: CompileOptions) -> ReferenceExecutable:
        made = super().compile(model, options)
        made.__class__ = _Slow
        return made


class _Slow(ReferenceExecutable):
    def run(self, inputs: Mapping[str, NDArray[Any]], outputs: Mapping[str, NDArray[Any]], timing: bool) -> ExecutionReport:
        if any((array == 7).any() for array in inputs.values()):
            time.sleep(RUN_S)
        return super().run(inputs, outputs, timing)
