"""A fake engine whose runs depend on their data: a negative number in the input makes it do the act "slow" first."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from numpy.typing import NDArray

from aionn.hal import Artifact, CompileOptions, ExecutionReport, Model
from aionn.testing.fake_engine import FakeEngine, FakeExecutable


class UnevenEngine(FakeEngine):
    """Steered like its parent: `fake.hang("slow")`, `fake.delay(5, "slow")`. Other runs are not slow."""

    name = "uneven"

    def compile(self, model: Model, options: CompileOptions) -> FakeExecutable:
        return _uneven(super().compile(model, options))

    def load(self, artifact: Artifact, options: CompileOptions) -> FakeExecutable:
        return _uneven(super().load(artifact, options))


class _UnevenExecutable(FakeExecutable):
    def run(self, inputs: Mapping[str, NDArray[Any]], outputs: Mapping[str, NDArray[Any]], timing: bool) -> ExecutionReport:
        if min(float(array.min()) for array in inputs.values()) < 0:
            self._engine.act("slow")
        return super().run(inputs, outputs, timing)


def _uneven(made: FakeExecutable) -> _UnevenExecutable:
    return _UnevenExecutable(made._engine, made.operands, made.weights)
