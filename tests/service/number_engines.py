"""The reference engine with a number that makes a run do something first: end its driver, or take long."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping
from typing import Any

from numpy.typing import NDArray

from aionn.engines.reference import ReferenceEngine, ReferenceExecutable
from aionn.hal import CompileOptions, ExecutionReport
from aionn.hal.model import PooledModel

RUN_S = 5.0


def _crash() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _take_long() -> None:
    time.sleep(RUN_S)


class _Acting(ReferenceExecutable):
    acts: Mapping[int, Callable[[], None]] = {666: _crash, 7: _take_long}

    def run(self, inputs: Mapping[str, NDArray[Any]], outputs: Mapping[str, NDArray[Any]], timing: bool) -> ExecutionReport:
        for number, act in self.acts.items():
            if any((array == number).any() for array in inputs.values()):
                act()
        return super().run(inputs, outputs, timing)


class NumberEngine(ReferenceEngine):
    name = "numbers"

    def compile(self, model: PooledModel, options: CompileOptions) -> ReferenceExecutable:
        made = super().compile(model, options)
        made.__class__ = _Acting
        return made
