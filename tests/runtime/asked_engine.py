"""Fake engines whose outputs say what they were asked for, so that a test sees which options reached a driver process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from numpy.typing import NDArray

from aionn.hal import Artifact, CompileOptions, ExecutionReport, Model
from aionn.testing.fake_engine import FakeEngine, FakeExecutable, SecondFakeEngine


class AskedEngine(FakeEngine):
    """The first elements of an output are threads, at_most, instances, lanes, priority."""

    name = "asked"

    def compile(self, model: Model, options: CompileOptions) -> FakeExecutable:
        return self.made(super().compile(model, options), options)

    def load(self, artifact: Artifact, options: CompileOptions) -> FakeExecutable:
        return self.made(super().load(artifact, options), options)

    def made(self, made: FakeExecutable, options: CompileOptions) -> FakeExecutable:
        return AskedExecutable(self, made, options)


class SecondAskedEngine(AskedEngine):
    name = "asked2"
    variable = SecondFakeEngine.variable


class SingleEngine(AskedEngine):
    """An engine of old, whose executables have no `lanes`."""

    name = "single"

    def made(self, made: FakeExecutable, options: CompileOptions) -> FakeExecutable:
        return SingleExecutable(self, made, options)


class SecondSingleEngine(SingleEngine):
    name = "single2"
    variable = SecondFakeEngine.variable


class AskedExecutable(FakeExecutable):
    def __init__(self, engine: FakeEngine, made: FakeExecutable, options: CompileOptions) -> None:
        super().__init__(engine, made.operands, made.weights)
        self.asked = [options.threads, options.at_most, options.instances, 0, options.priority]

    def lanes(self, count: int) -> list[FakeExecutable]:
        self.asked[3] = count
        return super().lanes(count)

    def run(self, inputs: Mapping[str, NDArray[Any]], outputs: Mapping[str, NDArray[Any]], timing: bool) -> ExecutionReport:
        report = super().run(inputs, outputs, timing)
        for array in (*outputs.values(), *report.outputs.values()):
            array.reshape(-1)[: len(self.asked)] = self.asked
        return report


class SingleExecutable(AskedExecutable):
    lanes = None  # type: ignore[assignment]
