"""The reference engine, whose driver dies at a run with the number 666 in it: a crash of native code."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from typing import Any

from numpy.typing import NDArray

from aionn.engines.reference import ReferenceEngine, ReferenceExecutable
from aionn.hal import CompileOptions, ExecutionReport
from aionn.hal.model import PooledModel


class CrashingEngine(ReferenceEngine):
    name = "crashing"

    def compile(self, model: PooledModel, options: CompileOptions) -> ReferenceExecutable:
        made = super().compile(model, options)
        made.__class__ = _Crashing
        return made


class _Crashing(ReferenceExecutable):
    def run(self, inputs: Mapping[str, NDArray[Any]], outputs: Mapping[str, NDArray[Any]], timing: bool) -> ExecutionReport:
        if any((array == 666).any() for array in inputs.values()):
            os.kill(os.getpid(), signal.SIGKILL)
        return super().run(inputs, outputs, timing)
