"""A fake engine whose runs depend on their data.

A negative number in the input makes it do the act "slow" first. A number over 1000 makes it compute for so many thousandths of a
second less 1000: it uses a whole CPU.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from numpy.typing import NDArray

from aionn.hal import Artifact, CompileOptions, DeviceType, ExecutionReport, Model
from aionn.testing.fake_engine import FakeEngine, FakeExecutable


class UnevenEngine(FakeEngine):
    """Steered like its parent: `fake.hang("slow")`, `fake.delay(5, "slow")`. Other runs are not slow."""

    name = "uneven"

    def compile(self, model: Model, options: CompileOptions) -> FakeExecutable:
        return _uneven(super().compile(model, options))

    def load(self, artifact: Artifact, options: CompileOptions) -> FakeExecutable:
        return _uneven(super().load(artifact, options))


class Accelerator(UnevenEngine):
    """An engine whose device is not a CPU: a run that waits for it uses none."""

    name = "accelerator"
    device_type = DeviceType.ACCELERATOR


class _UnevenExecutable(FakeExecutable):
    def run(self, inputs: Mapping[str, NDArray[Any]], outputs: Mapping[str, NDArray[Any]], timing: bool) -> ExecutionReport:
        if min(float(array.min()) for array in inputs.values()) < 0:
            self._engine.act("slow")
        until = time.monotonic() + max(float(array.max()) for array in inputs.values()) / 1000 - 1
        while time.monotonic() < until:
            pass
        return super().run(inputs, outputs, timing)


def _uneven(made: FakeExecutable) -> _UnevenExecutable:
    return _UnevenExecutable(made._engine, made.operands, made.weights)
